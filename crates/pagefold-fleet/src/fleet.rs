//! The planner's fleet, made of samples of workloads, and of what the operator rules.

use crate::engine::{Columns, Engine, positive};
use crate::queries;
use crate::rules::{Group, Rules};
use datafusion::arrow::array::RecordBatch;
use datafusion::common::cast::as_binary_array;
use datafusion::error::{DataFusionError, Result};
use datasketches::theta::CompactThetaSketch;
use futures::TryStreamExt;
use pagefold_core::units::{Bytes, count, whole};
use pagefold_planner::contents::lg_sampled;
use pagefold_planner::{Fleet, Host, HostId, Sample, Unit};
use std::collections::{BTreeMap, BTreeSet};

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostInfo {
    pub name: String,
    pub memory: u64,
    pub cpu_millicores: u64,
}

/// A workload, with all its trust domains.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    pub host: u32,
    pub kind: String,
    pub name: String,
    pub anonymous: u64,
    pub read: u64,
    /// What could be saved within it.
    pub within: u64,
    pub saved: u64,
    pub take_back: u64,
    pub cpu_millicores: u64,
    pub samples: Vec<Sample>,
}

/// What the files say, by host and name.
#[derive(Clone, Debug, Default)]
pub struct Workloads {
    pub hosts: Vec<HostInfo>,
    pub workloads: Vec<Workload>,
}

/// Shares of a host's memory and processors that its workloads may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub memory: f64,
    pub cpu: f64,
}

/// The planner's fleet, and the workloads of each unit.
#[derive(Debug)]
pub struct Planned {
    pub fleet: Fleet,
    pub members: Vec<Vec<usize>>,
    /// Rules that are broken already.
    pub broken: Vec<String>,
}

impl Workloads {
    /// Asks the engine for all workloads.
    pub async fn of(engine: &Engine, show: &(dyn Fn(usize) + Sync)) -> Result<Self> {
        let mut rows = engine.stream(&queries::samples(lg_sampled(engine.workloads()))).await?;
        let mut builder = Builder::default();
        while let Some(batch) = rows.try_next().await? {
            builder.add(&batch)?;
            show(builder.rows);
        }
        Ok(builder.finish())
    }

    /// Makes the planner's fleet. Samples are moved into it.
    pub fn plan_with(&mut self, rules: &Rules, limits: Limits) -> Planned {
        let hosts = self.hosts.iter().map(|host| Host {
            memory: Bytes(whole(host.memory as f64 * limits.memory)),
            cpu_millicores: whole(host.cpu_millicores as f64 * limits.cpu),
        });
        let mut fleet = Fleet { hosts: hosts.collect(), units: Vec::new() };
        let (together, mut broken) = self.together(rules);
        let mut unit_of: BTreeMap<(usize, u32), usize> = BTreeMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        for (number, workload) in self.workloads.iter_mut().enumerate() {
            let group = rules.together.iter().position(|group| group.contains(&workload.name));
            let bundle = group.filter(|&group| together.contains(&(group, workload.host)));
            let unit = if let Some(&unit) = bundle.and_then(|group| unit_of.get(&(group, workload.host))) {
                unit
            } else {
                fleet.units.push(Unit { host: HostId(workload.host), ..Unit::default() });
                members.push(Vec::new());
                let unit = fleet.units.len() - 1;
                if let Some(group) = bundle {
                    unit_of.insert((group, workload.host), unit);
                }
                unit
            };
            let alone = workload.anonymous.saturating_sub(workload.within);
            let place = &mut fleet.units[unit];
            place.memory.0 += alone + workload.take_back;
            place.cpu_millicores += workload.cpu_millicores;
            place.workloads += 1;
            // Members of a group that is on several hosts are not moved: nothing is known of where they should be.
            place.pinned |= !rules.is_movable(&workload.kind, &workload.name) || group.is_some() && bundle.is_none();
            place.apart.extend(
                (0..).zip(&rules.apart).filter(|(_, group)| group.contains(&workload.name)).map(|(number, _)| number),
            );
            place.samples.append(&mut workload.samples);
            members[unit].push(number);
        }
        broken.extend(self.crowded(rules));
        Planned { fleet, members, broken }
    }

    /// Groups that are to be together and are, by host; and what is said of the others.
    fn together(&self, rules: &Rules) -> (BTreeSet<(usize, u32)>, Vec<String>) {
        let (mut together, mut broken) = (BTreeSet::new(), Vec::new());
        let mut hosts = vec![BTreeSet::new(); rules.together.len()];
        let mut overlap = vec![false; rules.together.len()];
        for workload in &self.workloads {
            let has_it = |number: &usize| rules.together[*number].contains(&workload.name);
            let groups: Vec<usize> = (0..rules.together.len()).filter(has_it).collect();
            for &group in &groups {
                hosts[group].insert(workload.host);
                overlap[group] |= groups.len() > 1;
            }
        }
        for (number, (Group { name, .. }, (hosts, overlap))) in
            rules.together.iter().zip(hosts.iter().zip(overlap)).enumerate()
        {
            match hosts.len() {
                0 => broken.push(format!("together '{name}': no workload has such a name")),
                1 if overlap => {
                    broken.push(format!("together '{name}': another such group has one of it, and neither is moved"));
                }
                1 => together.extend(hosts.iter().map(|&host| (number, host))),
                hosts => broken.push(format!("together '{name}': it is on {hosts} hosts, and is not moved")),
            }
        }
        (together, broken)
    }

    /// Groups that are to be apart and are not.
    fn crowded(&self, rules: &Rules) -> Vec<String> {
        let mut crowded = Vec::new();
        for group in &rules.apart {
            let mut on: BTreeMap<u32, usize> = BTreeMap::new();
            for workload in self.workloads.iter().filter(|workload| group.contains(&workload.name)) {
                *on.entry(workload.host).or_default() += 1;
            }
            for (host, members) in on.into_iter().filter(|(_, members)| *members > 1) {
                let host = usize::try_from(host).ok().and_then(|host| self.hosts.get(host));
                let host = host.map_or("", |host| &host.name);
                crowded.push(format!("apart '{}': {members} of its workloads are on {host}", group.name));
            }
        }
        crowded
    }
}

/// Collects rows in any order.
#[derive(Default)]
struct Builder {
    hosts: BTreeMap<String, HostInfo>,
    domains: BTreeMap<String, u32>,
    rows: usize,
    workloads: Vec<(String, Workload)>,
}

impl Builder {
    fn add(&mut self, batch: &RecordBatch) -> Result<()> {
        let columns = Columns(batch);
        let (host, kind) = (columns.texts("host")?, columns.texts("kind")?);
        let (name, domain) = (columns.texts("workload")?, columns.texts("domain")?);
        let (anonymous, read) = (columns.integers("anonymous_bytes")?, columns.integers("read_bytes")?);
        let (within, saved) = (columns.integers("savable_bytes")?, columns.integers("saved_bytes")?);
        let (take_back, cpu) = (columns.integers("take_back_bytes")?, columns.integers("cpu_millicores")?);
        let (memory, host_cpu) = (columns.integers("host_memory_bytes")?, columns.integers("host_cpu_millicores")?);
        let sample = as_binary_array(columns.named("sample")?)?;
        for row in 0..batch.num_rows() {
            self.rows += 1;
            let info = self.hosts.entry(host.value(row).to_owned()).or_default();
            info.memory = info.memory.max(positive(memory.value(row)));
            info.cpu_millicores = info.cpu_millicores.max(positive(host_cpu.value(row)));
            let domains = count(self.domains.len());
            let domain = if let Some(&domain) = self.domains.get(domain.value(row)) {
                domain
            } else {
                let number = u32::try_from(domains).unwrap_or(u32::MAX);
                self.domains.insert(domain.value(row).to_owned(), number);
                number
            };
            let workload = Workload {
                kind: kind.value(row).to_owned(),
                name: name.value(row).to_owned(),
                anonymous: positive(anonymous.value(row)),
                read: positive(read.value(row)),
                within: positive(within.value(row)),
                saved: positive(saved.value(row)),
                take_back: positive(take_back.value(row)),
                cpu_millicores: positive(cpu.value(row)),
                samples: vec![sampled(sample.value(row), domain)?],
                ..Workload::default()
            };
            self.workloads.push((host.value(row).to_owned(), workload));
        }
        Ok(())
    }

    fn finish(self) -> Workloads {
        let mut hosts = Vec::with_capacity(self.hosts.len());
        let mut numbers = BTreeMap::new();
        for ((name, info), number) in self.hosts.into_iter().zip(0_u32..) {
            numbers.insert(name.clone(), number);
            hosts.push(HostInfo { name, ..info });
        }
        let mut workloads: Vec<Workload> = self
            .workloads
            .into_iter()
            .filter_map(|(host, workload)| Some(Workload { host: *numbers.get(&host)?, ..workload }))
            .collect();
        workloads.sort_by(|a, b| (a.host, &a.kind, &a.name).cmp(&(b.host, &b.kind, &b.name)));
        // A workload in two trust domains has two rows. What it takes is the sum.
        workloads.dedup_by(|next, first| {
            let same = (next.host, &next.kind, &next.name) == (first.host, &first.kind, &first.name);
            if same {
                first.anonymous += next.anonymous;
                first.read += next.read;
                first.within += next.within;
                first.saved += next.saved;
                first.take_back += next.take_back;
                first.cpu_millicores = first.cpu_millicores.max(next.cpu_millicores);
                first.samples.append(&mut next.samples);
            }
            same
        });
        Workloads { hosts, workloads }
    }
}

fn sampled(bytes: &[u8], domain: u32) -> Result<Sample> {
    let sketch =
        CompactThetaSketch::deserialize(bytes).map_err(|error| DataFusionError::Execution(error.to_string()))?;
    Ok(Sample { domain, threshold: sketch.theta64() + 1, digests: sketch.iter().map(|entry| entry.hash()).collect() })
}
