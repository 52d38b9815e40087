//! The plan as a document: JSON, text, labels and affinity for Kubernetes, tags for Proxmox VE.

use crate::fleet::{Planned, Workload, Workloads};
use crate::inventory::{Inventory, LeftOut};
use crate::report::write_left_out;
use pagefold_engine::units::index;
use pagefold_planner::{HostId, Move, Plan, Saving};
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
        let mut steps = Vec::new();
        let mut touched = BTreeSet::new();
        for step in &plan.steps {
            let mut moves = Vec::new();
            for &Move { unit, from, to } in &step.moves {
                touched.extend([from, to]);
                for &member in &planned.members[index(unit.0)] {
                    let Workload { kind, name, .. } = &known.workloads[member];
                    moves.push(MoveRow { kind: kind.clone(), workload: name.clone(), from: host(from), to: host(to) });
                }
            }
            steps.push(StepRow { moves, saves_bytes: step.saves.saturating_mul(4096) });
        }
        let mut saved = vec![0_u64; known.hosts.len()];
        for workload in &known.workloads {
            saved[index(workload.host)] += workload.saved;
        }
        let mut hosts = Vec::new();
        for id in touched {
            hosts.push(HostPlan {
                host: host(id),
                saved_bytes: saved[index(id.0)],
                before: before[index(id.0)].into(),
                after: plan.hosts[index(id.0)].into(),
            });
        }
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
            hosts,
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
                let mut tagged = Vec::new();
                for member in members {
                    if ["vm", "container"].contains(&member.kind.as_str()) {
                        tagged.push(json!({
                            "guest": member.workload,
                            "kind": member.kind,
                            "from": member.from,
                            "node": node,
                            "migrate": member.from != *node,
                            "tags": [format!("plb_affinity_pagefold_{}_{}", group.name, number + 1)],
                        }));
                    }
                }
                if tagged.len() > 1 {
                    guests.append(&mut tagged);
                }
            }
        }
        json!({ "schema": "pagefold.fleet.proxmox/1", "guests": guests })
    }
}

/// The groups of like workloads, if the plan moves some of them.
fn groups(known: &Workloads, planned: &Planned, plan: &Plan) -> Vec<Buddies> {
    // The hosts of each group, with its members there.
    let mut hosts: BTreeMap<u32, BTreeMap<String, Vec<Member>>> = BTreeMap::new();
    for step in &plan.steps {
        for change in &step.moves {
            hosts.entry(plan.groups[index(change.unit.0)]).or_default();
        }
    }
    for (unit, group) in plan.groups.iter().enumerate() {
        let Some(hosts) = hosts.get_mut(group) else { continue };
        let host = known.hosts[index(plan.places[unit].0)].name.clone();
        let members = hosts.entry(host).or_default();
        for &number in &planned.members[unit] {
            let Workload { kind, name, host, .. } = &known.workloads[number];
            let from = known.hosts[index(*host)].name.clone();
            members.push(Member { kind: kind.clone(), workload: name.clone(), from });
        }
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
