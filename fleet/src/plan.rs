//! The plan as a document: JSON, text, labels and affinity for Kubernetes, tags for Proxmox VE.

use crate::fleet::{Planned, Workload, Workloads};
use crate::inventory::{Inventory, LeftOut};
use crate::report::write_left_out;
use pagefold_engine::units::index;
use pagefold_planner::{HostId, Plan, Saving};
use pagefold_text::style::{human, percent};
use pagefold_text::table::Table;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

pub const SCHEMA: &str = "pagefold.fleet.plan/1";

/// The plan as JSON. Sizes are in bytes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Document {
    pub schema: String,
    /// When the plan was made, microseconds since 1970.
    pub time_us: u64,
    pub key: Option<String>,
    pub workloads: u64,
    pub most_moves: u64,
    pub moves: u64,
    /// How much memory workloads of one host have in common, now and after the plan.
    pub before: Estimated,
    pub after: Estimated,
    pub steps: Vec<StepRow>,
    /// Hosts that the plan changes.
    pub hosts: Vec<HostPlan>,
    /// Groups of workloads that should be on one host, if the plan moves some of them.
    pub groups: Vec<Buddies>,
    /// Messages about rules that were broken before.
    pub broken_rules: Vec<String>,
    #[serde(skip_deserializing)]
    pub left_out: Vec<LeftOut>,
}

/// An estimate, which is off by at most the error in 19 of 20 cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Estimated {
    pub bytes: u64,
    pub error_bytes: u64,
}

/// One move, or two by which workloads change places.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct StepRow {
    pub moves: Vec<MoveRow>,
    /// Negative where a step only makes room for a later one.
    pub saves_bytes: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct MoveRow {
    pub kind: String,
    pub workload: String,
    pub from: String,
    pub to: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct HostPlan {
    pub host: String,
    /// How much the host said that it saved when the plan was made.
    pub saved_bytes: u64,
    pub before: Estimated,
    pub after: Estimated,
}

/// Workloads that hold nearly the same, by the host where each should be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Buddies {
    pub name: String,
    pub hosts: BTreeMap<String, Vec<Member>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Member {
    pub kind: String,
    pub workload: String,
    /// Its host now.
    pub from: String,
}

impl From<Saving> for Estimated {
    fn from(saving: Saving) -> Self {
        Self { bytes: saving.pages.bytes().0, error_bytes: saving.error.bytes().0 }
    }
}

impl Document {
    /// Makes a plan's document, with names. `before` is what each host saves now.
    pub fn of(
        known: &Workloads,
        planned: &Planned,
        plan: &Plan,
        before: &[Saving],
        inventory: &Inventory,
        time_us: u64,
        most_moves: u64,
    ) -> Self {
        let host = |host: HostId| known.hosts[index(host.0)].name.clone();
        let members = |unit: usize| planned.members[unit].iter().map(|&member| &known.workloads[member]);
        let step = |step: &pagefold_planner::Step| {
            let moves = step.moves.iter().flat_map(|step| {
                members(index(step.unit.0)).map(|workload| MoveRow {
                    kind: workload.kind.clone(),
                    workload: workload.name.clone(),
                    from: host(step.from),
                    to: host(step.to),
                })
            });
            StepRow { moves: moves.collect(), saves_bytes: step.saves.saturating_mul(4096) }
        };
        let steps: Vec<StepRow> = plan.steps.iter().map(step).collect();
        let touched: BTreeSet<HostId> =
            plan.steps.iter().flat_map(|step| &step.moves).flat_map(|step| [step.from, step.to]).collect();
        let mut saved = vec![0_u64; known.hosts.len()];
        for workload in &known.workloads {
            saved[index(workload.host)] += workload.saved;
        }
        let hosts = touched.into_iter().map(|id| HostPlan {
            host: host(id),
            saved_bytes: saved[index(id.0)],
            before: before[index(id.0)].into(),
            after: plan.hosts[index(id.0)].into(),
        });
        Self {
            schema: SCHEMA.to_owned(),
            time_us,
            key: inventory.key().map(|key| key.to_string()),
            workloads: pagefold_engine::units::count(known.workloads.len()),
            most_moves,
            moves: plan.moves,
            before: plan.before.into(),
            after: plan.after.into(),
            steps,
            hosts: hosts.collect(),
            groups: groups(known, planned, plan),
            broken_rules: planned.broken.clone(),
            left_out: inventory.left_out.clone(),
        }
    }

    /// Node labels, pod labels and affinity terms. Each host of a group has a label. Pods of the group prefer nodes
    /// with that label, and nodes with other pods of the group.
    pub fn kubernetes(&self) -> Value {
        let mut nodes: BTreeMap<&str, BTreeMap<String, &str>> = BTreeMap::new();
        let mut pods = Vec::new();
        for group in &self.groups {
            let home = format!("pagefold-{}", group.name);
            let of_group = json!({ "pagefold-group": group.name });
            let mut with_pods = false;
            for (host, members) in &group.hosts {
                let mut named = Vec::new();
                for member in members {
                    if member.kind == "pod" {
                        named.push(pod(member, &home, &of_group));
                    }
                }
                if named.len() > 1 {
                    nodes.entry(host).or_default().insert(home.clone(), "home");
                    with_pods = true;
                }
                pods.extend(named);
            }
            if !with_pods {
                pods.retain(|pod| pod["labels"]["pagefold-group"] != group.name.as_str());
            }
        }
        let nodes: Vec<Value> = nodes.iter().map(|(name, labels)| json!({ "name": name, "labels": labels })).collect();
        json!({ "schema": "pagefold.fleet.kubernetes/1", "nodes": nodes, "pods": pods })
    }

    /// Affinity tags. Proxmox VE keeps guests with the same tag on one node.
    pub fn proxmox(&self) -> Value {
        let mut guests = Vec::new();
        for group in &self.groups {
            for (number, (node, members)) in group.hosts.iter().enumerate() {
                let members: Vec<&Member> =
                    members.iter().filter(|member| ["vm", "container"].contains(&member.kind.as_str())).collect();
                if members.len() < 2 {
                    continue;
                }
                guests.extend(members.iter().map(|member| {
                    json!({
                        "guest": member.workload,
                        "kind": member.kind,
                        "from": member.from,
                        "node": node,
                        "migrate": member.from != *node,
                        "tags": [format!("plb_affinity_pagefold_{}_{}", group.name, number + 1)],
                    })
                }));
            }
        }
        json!({ "schema": "pagefold.fleet.proxmox/1", "guests": guests })
    }
}

/// The groups of like workloads, if the plan moves some of them.
fn groups(known: &Workloads, planned: &Planned, plan: &Plan) -> Vec<Buddies> {
    let moved: BTreeSet<u32> =
        plan.steps.iter().flat_map(|step| &step.moves).map(|step| plan.groups[index(step.unit.0)]).collect();
    let mut hosts: BTreeMap<u32, BTreeMap<String, Vec<Member>>> = BTreeMap::new();
    for (unit, group) in plan.groups.iter().enumerate().filter(|(_, group)| moved.contains(group)) {
        let host = known.hosts[index(plan.places[unit].0)].name.clone();
        let member = |workload: &Workload| Member {
            kind: workload.kind.clone(),
            workload: workload.name.clone(),
            from: known.hosts[index(workload.host)].name.clone(),
        };
        let members = planned.members[unit].iter().map(|&number| member(&known.workloads[number]));
        hosts.entry(*group).or_default().entry(host).or_default().extend(members);
    }
    (1..).zip(hosts.into_values()).map(|(number, hosts)| Buddies { name: format!("g{number}"), hosts }).collect()
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.steps.is_empty() {
            let mut table =
                Table::new(["STEP", "WORKLOAD", "FROM", "TO", "SAVES"], |column| column == 0 || column == 4);
            for (number, step) in (1..).zip(&self.steps) {
                for (part, of) in step.moves.iter().enumerate() {
                    let first = part == 0;
                    table.add_row([
                        if first { number.to_string() } else { String::new() },
                        format!("{} {}", of.kind, of.workload),
                        of.from.clone(),
                        of.to.clone(),
                        if first { signed(step.saves_bytes) } else { String::new() },
                    ]);
                }
            }
            writeln!(f, "{table}\n")?;
        }
        let more = self.after.bytes.saturating_sub(self.before.bytes);
        writeln!(
            f,
            "{} of {} workloads are moved. Workloads of one host then share {} (±{}) instead of {} (±{}): {} more ({})",
            self.moves,
            self.workloads,
            human(self.after.bytes),
            human(self.after.error_bytes),
            human(self.before.bytes),
            human(self.before.error_bytes),
            human(more),
            percent(more as f64, self.before.bytes as f64),
        )?;
        for broken in &self.broken_rules {
            writeln!(f, "rule {broken}")?;
        }
        write_left_out(f, &self.left_out, 0)
    }
}

fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, human(bytes.unsigned_abs()))
}

/// A pod of a group, which prefers nodes with the group's label and nodes with other pods of the group.
fn pod(member: &Member, home: &str, of_group: &Value) -> Value {
    let node = json!({
        "weight": 100,
        "preference": { "matchExpressions": [{ "key": home, "operator": "In", "values": ["home"] }] },
    });
    let others = json!({
        "weight": 50,
        "podAffinityTerm": {
            "labelSelector": { "matchLabels": of_group },
            "topologyKey": "kubernetes.io/hostname",
        },
    });
    json!({
        "name": member.workload,
        "from": member.from,
        "labels": of_group,
        "affinity": {
            "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [node] },
            "podAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [others] },
        },
    })
}
