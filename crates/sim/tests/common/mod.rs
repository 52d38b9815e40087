//! A simulated machine, and the live engine on it.
#![allow(dead_code, reason = "each test uses a part of it")]

use pagefold_engine::config::Config;
use pagefold_engine::engine::{Cycle, Engine, cycle};
use pagefold_engine::host::{Actions, Host, MergeResult, Outcome, SamplePlan, Samples, ScanOrder, Snapshot};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost, scenario};
use proptest::prelude::Strategy;
use std::collections::BTreeMap;
use std::convert::Infallible;

pub const SECOND: u64 = 1_000_000_000;
/// Pages in a MiB.
pub const MIB: u64 = 256;

/// A machine with the settings that pagefold makes.
pub fn host() -> SimHost {
    SimHost::new(7, Costs::default(), Knobs::driven())
}

/// A machine that merges on request.
pub fn requested() -> SimHost {
    SimHost::new(7, Costs::default(), Knobs::requested())
}

pub fn config() -> Config {
    Config { seed: 11, ..Config::default() }
}

pub fn engine() -> Engine {
    Engine::new(config())
}

/// Runs the engine for some virtual seconds.
pub fn run(host: &mut SimHost, engine: &mut Engine, seconds: u64) {
    run_on(host, engine, seconds, SimHost::now_ns, |_| {});
}

/// Runs the engine on any host with this clock, and calls `after` each cycle.
pub fn run_on<H: Host<Error = Infallible>>(
    host: &mut H,
    engine: &mut Engine,
    seconds: u64,
    now_ns: impl Fn(&H) -> u64,
    mut after: impl FnMut(&H),
) {
    let end_ns = now_ns(host) + seconds * SECOND;
    while now_ns(host) < end_ns {
        let Ok(Cycle { wait_ns, .. }) = cycle(engine, host);
        let Ok(()) = host.wait(wait_ns.max(1_000_000).min(end_ns.saturating_sub(now_ns(host))));
        after(host);
    }
}

/// Each of three processes in turn exits and is replaced after a gap, in seconds: at once or after its contents may have been
/// forgotten. It is merged again.
pub fn assert_restarted_are_merged(mut host: SimHost, gaps: &[u64]) {
    let mut owners = scenario::redis(&mut host, 3, Pages(16 * MIB));
    let mut engine = engine();
    run(&mut host, &mut engine, 20);
    let before = host.saved().0;
    for &gap in gaps {
        host.exit(owners.remove(0));
        run(&mut host, &mut engine, gap);
        owners.extend(scenario::redis(&mut host, 1, Pages(16 * MIB)));
        run(&mut host, &mut engine, 120);
        assert!(host.saved().0 * 100 >= before * 95, "{before} before and {} after", host.saved().0);
    }
}

/// The trust domain of a process, the kind of its contents, its size in MiB and the second of its start.
pub type Tenant = (u16, u64, u64, u64);

/// Processes of several trust domains.
pub fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    proptest::collection::vec((1_u16..4, 0_u64..4, 1_u64..12, 0_u64..20), 2..9)
}

pub fn process_of((domain, fill, mib, start): Tenant) -> Process {
    let fill = match fill {
        0 => Fill::Same(1),
        1 => Fill::Series(1),
        2 => Fill::Series(2),
        _ => Fill::Zeros,
    };
    Process::starting_at(start * SECOND).in_domain(domain).mapping(Mapping::new(Pages(mib * MIB), fill))
}

/// A host that records what is asked of it, and when.
pub struct Watched {
    pub host: SimHost,
    seen_ns: u64,
    owners: BTreeMap<RegionKey, OwnerKey>,
    /// Pages read: time, process and number.
    pub pages: Vec<(u64, OwnerKey, u64)>,
    /// Stops of processes, likewise.
    pub stops: Vec<(u64, OwnerKey, u64)>,
    /// Frames to be moved, by the time of the request.
    pub moves: Vec<(u64, u64)>,
    /// What came of the merges asked for, by the time of the request.
    pub merges: Vec<(u64, MergeResult)>,
    /// Spans marked or unmarked, and orders to ksmd.
    pub marks: u64,
    pub orders: u64,
    /// The numbers of cache lines that pages were hashed by, one after the other.
    pub lines: Vec<Option<u32>>,
    pub looks: u64,
    pub activity: u64,
    /// Snapshots that contained nodes or processes.
    pub placed: u64,
}

impl Watched {
    pub fn new(host: SimHost) -> Self {
        let (owners, pages, stops, moves, merges, lines) = Default::default();
        let (seen_ns, marks, orders, looks, activity, placed) = Default::default();
        Self { host, seen_ns, owners, pages, stops, moves, merges, marks, orders, lines, looks, activity, placed }
    }

    /// Pages asked to be merged since a time, with their owners and those of the pages to keep.
    pub fn asked_since(&self, from_ns: u64) -> impl Iterator<Item = (OwnerKey, Option<OwnerKey>, &MergeResult)> {
        let recent = self.merges.iter().filter(move |(at_ns, _)| *at_ns >= from_ns);
        recent.map(|(_, result)| {
            let keep = result.range.keep.first().map(|(region, _)| self.owners[&region]);
            (self.owners[&result.range.take.region], keep, result)
        })
    }

    pub fn run(&mut self, engine: &mut Engine, seconds: u64) {
        run_on(self, engine, seconds, |watched| watched.host.now_ns(), |_| {});
    }
}

impl Host for Watched {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let snapshot = self.host.observe()?;
        self.seen_ns = snapshot.now_ns;
        self.owners.extend(snapshot.regions.iter().map(|view| (view.key, view.owner)));
        self.placed += u64::from(!snapshot.nodes.is_empty() || !snapshot.owners.is_empty());
        Ok(snapshot)
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        let (now_ns, owners) = (self.seen_ns, &self.owners);
        self.pages.extend(plan.runs.iter().map(|run| (now_ns, owners[&run.region], run.pages.into())));
        self.looks += plan.inspect.len() as u64;
        self.activity += plan.activity.len() as u64;
        if self.lines.last() != Some(&plan.lines) {
            self.lines.push(plan.lines);
        }
        self.host.read(plan)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        if !actions.moves.is_empty() {
            self.moves.push((self.seen_ns, actions.moves.len() as u64));
        }
        self.marks += (actions.mark.len() + actions.unmark.len()) as u64;
        self.orders += u64::from(actions.scan != ScanOrder::Keep);
        let outcome = self.host.apply(actions)?;
        self.merges.extend(outcome.merges.iter().map(|&result| (self.seen_ns, result)));
        self.stops.extend(outcome.stops.iter().map(|stops| (self.seen_ns, stops.owner, stops.number.into())));
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.host.wait(ns)
    }
}
