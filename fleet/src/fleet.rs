//! Makes the planner's fleet from samples of workloads and the operator's rules.

use crate::engine::{Columns, Engine, positive};
use crate::queries;
use crate::rules::{Group, Rules};
use datafusion::arrow::array::RecordBatch;
use datafusion::common::cast::as_binary_array;
use datafusion::error::{DataFusionError, Result};
use datasketches::theta::CompactThetaSketch;
use futures::TryStreamExt;
use pagefold_engine::units::{Bytes, PAGE_BYTES, index, whole};
use pagefold_planner::contents::lg_sampled;
use pagefold_planner::fleet::DOMAINS;
use pagefold_planner::{Fleet, Host, HostId, Sample, Unit};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostInfo {
    pub name: String,
    pub memory: u64,
    pub cpu_millicores: u64,
}

/// A workload, with its contents in all trust domains.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    pub host: u32,
    pub kind: String,
    pub name: String,
    pub anonymous: u64,
    pub read: u64,
    /// How much memory could be saved within the workload.
    pub within: u64,
    pub saved: u64,
    pub take_back: u64,
    pub cpu_millicores: u64,
    pub samples: Vec<Sample>,
}

/// The workloads in the files, by host and name.
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
    /// Messages about rules that are already broken.
    pub broken: Vec<String>,
}

impl Workloads {
    /// Asks the engine for all workloads.
    pub async fn of(engine: &Engine, show: impl Fn(usize) + Sync) -> Result<Self> {
        let mut rows = engine.stream(&queries::samples(lg_sampled(engine.workloads()))).await?;
        let mut builder = Builder::default();
        while let Some(batch) = rows.try_next().await? {
            builder.add(&batch)?;
            show(builder.rows);
        }
        Ok(builder.finish())
    }

    /// Makes the planner's fleet, and moves the samples into it.
    pub fn plan_with(&mut self, rules: &Rules, limits: Limits) -> Planned {
        let mut fleet = Fleet::default();
        for host in &self.hosts {
            let memory = Bytes(whole(host.memory as f64 * limits.memory));
            let cpu_millicores = whole(host.cpu_millicores as f64 * limits.cpu);
            fleet.hosts.push(Host { memory, cpu_millicores });
        }
        let (together, mut broken) = self.together(rules);
        let mut unit_of: BTreeMap<(usize, u32), usize> = BTreeMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        for (number, workload) in self.workloads.iter_mut().enumerate() {
            let is_in = |group: &Group| group.contains(host_name(&self.hosts, workload.host), &workload.name);
            let group = rules.together.iter().position(is_in);
            let bundle = match group {
                Some(group) if together.contains(&(group, workload.host)) => Some((group, workload.host)),
                _ => None,
            };
            let next = fleet.units.len();
            let unit = match bundle {
                Some(bundle) => *unit_of.entry(bundle).or_insert(next),
                None => next,
            };
            if unit == next {
                fleet.units.push(Unit { host: HostId(workload.host), ..Unit::default() });
                members.push(Vec::new());
            }
            let alone = workload.anonymous.saturating_sub(workload.within);
            let place = &mut fleet.units[unit];
            place.memory.0 = place.memory.0.saturating_add(alone).saturating_add(workload.take_back);
            place.held.0 += workload.read.saturating_sub(workload.within) / PAGE_BYTES;
            place.cpu_millicores = place.cpu_millicores.saturating_add(workload.cpu_millicores);
            place.workloads += 1;
            // We don't move members of a group that is on several hosts, because we don't know where they should be.
            place.pinned |= !rules.is_movable(&workload.kind, &workload.name) || group.is_some() && bundle.is_none();
            for (number, group) in (0..).zip(&rules.apart) {
                if is_in(group) {
                    place.apart.push(number);
                }
            }
            place.samples.append(&mut workload.samples);
            members[unit].push(number);
        }
        broken.extend(self.crowded(rules));
        Planned { fleet, members, broken }
    }

    /// The groups that should be together and are, by host, and messages about the other groups.
    fn together(&self, rules: &Rules) -> (BTreeSet<(usize, u32)>, Vec<String>) {
        let (mut together, mut broken) = (BTreeSet::new(), Vec::new());
        let mut hosts = vec![BTreeSet::new(); rules.together.len()];
        let mut overlap = vec![false; rules.together.len()];
        for workload in &self.workloads {
            let host = host_name(&self.hosts, workload.host);
            let has_it = |number: &usize| rules.together[*number].contains(host, &workload.name);
            let groups: Vec<usize> = (0..rules.together.len()).filter(has_it).collect();
            for &group in &groups {
                hosts[group].insert(workload.host);
                overlap[group] |= groups.len() > 1;
            }
        }
        for (number, Group { name, .. }) in rules.together.iter().enumerate() {
            let hosts = &hosts[number];
            match hosts.len() {
                0 => broken.push(format!("together '{name}': no workload has such a name")),
                1 if overlap[number] => {
                    broken.push(format!(
                        "together '{name}': another such group has one of its workloads, so neither group is moved"
                    ));
                }
                1 => together.extend(hosts.iter().map(|&host| (number, host))),
                more => {
                    let first: Vec<&str> = hosts.iter().take(3).map(|&host| host_name(&self.hosts, host)).collect();
                    let (first, others) = (first.join(", "), if more > 3 { ", …" } else { "" });
                    broken.push(format!(
                        "together '{name}': it is on {more} hosts ({first}{others}), so it is not moved"
                    ));
                }
            }
        }
        (together, broken)
    }

    /// Messages about groups that should be apart and aren't.
    fn crowded(&self, rules: &Rules) -> Vec<String> {
        let mut crowded = Vec::new();
        for group in &rules.apart {
            let mut on: BTreeMap<&str, usize> = BTreeMap::new();
            for workload in &self.workloads {
                let host = host_name(&self.hosts, workload.host);
                if group.contains(host, &workload.name) {
                    *on.entry(host).or_default() += 1;
                }
            }
            for (host, members) in on {
                if members > 1 {
                    crowded.push(format!("apart '{}': {members} of its workloads are on {host}", group.name));
                }
            }
        }
        crowded
    }
}

fn host_name(hosts: &[HostInfo], number: u32) -> &str {
    &hosts[index(number)].name
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
            let domains = u32::try_from(self.domains.len()).unwrap_or(u32::MAX);
            let domain = *self.domains.entry(domain.value(row).to_owned()).or_insert(domains);
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
        let mut workloads = Vec::new();
        for (host, workload) in self.workloads {
            if let Some(&host) = numbers.get(&host) {
                workloads.push(Workload { host, ..workload });
            }
        }
        if self.domains.len() > index(DOMAINS) {
            keep_domains(&mut workloads, DOMAINS);
        }
        workloads.sort_by(|a, b| (a.host, &a.kind, &a.name).cmp(&(b.host, &b.kind, &b.name)));
        // A workload in two trust domains has two rows, which we add up.
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

/// Renumbers the trust domains, beginning with those of most hosts. Drops the samples of all but the first `most`,
/// since a host may report any number of domains of its own.
fn keep_domains(workloads: &mut [Workload], most: u32) {
    let mut hosts: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for workload in &*workloads {
        for sample in &workload.samples {
            hosts.entry(sample.domain).or_default().insert(workload.host);
        }
    }
    let mut order: Vec<(u32, BTreeSet<u32>)> = hosts.into_iter().collect();
    order.sort_by_key(|(domain, hosts)| (std::cmp::Reverse(hosts.len()), *domain));
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    for ((domain, _), number) in order.into_iter().zip(0..most) {
        numbers.insert(domain, number);
    }
    for workload in workloads {
        workload.samples.retain_mut(|sample| {
            let Some(&number) = numbers.get(&sample.domain) else { return false };
            sample.domain = number;
            true
        });
    }
}

fn sampled(bytes: &[u8], domain: u32) -> Result<Sample> {
    let sketch =
        CompactThetaSketch::deserialize(bytes).map_err(|error| DataFusionError::Execution(error.to_string()))?;
    Ok(Sample { domain, threshold: sketch.theta64() + 1, digests: sketch.iter().map(|entry| entry.hash()).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trust_domains_of_most_hosts_are_kept() {
        let workload = |host: u32, domains: &[u32]| Workload {
            host,
            samples: domains.iter().map(|&domain| Sample { domain, ..Sample::default() }).collect(),
            ..Workload::default()
        };
        let mut workloads = [workload(0, &[0, 1, 2]), workload(0, &[0, 3]), workload(1, &[5, 4]), workload(2, &[4])];
        keep_domains(&mut workloads, 2);
        let domains = workloads.map(|workload| workload.samples.iter().map(|sample| sample.domain).collect::<Vec<_>>());
        assert_eq!(domains, [vec![1], vec![1], vec![0], vec![0]]);
    }
}
