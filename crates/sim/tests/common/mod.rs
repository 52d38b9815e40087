//! A simulated machine, and the real engine on it.
#![allow(dead_code, reason = "each test uses a part of it")]

pub mod oracle;

use pagefold_engine::config::Config;
use pagefold_engine::engine::{Cycle, Engine, cycle};
use pagefold_engine::governor::{Governor, WINDOW_NS};
use pagefold_engine::host::{
    Actions, Host, MergeResult, Merging, Outcome, PageRun, SamplePlan, Samples, ScanOrder, Snapshot,
};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost, scenario};
use proptest::prelude::Strategy;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ops::{Deref, DerefMut, Range};

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

/// The engine's settings: full speed, so that tests are short.
pub fn config() -> Config {
    Config { seed: 11, governor: Governor::Full, ..Config::default() }
}

pub fn both() -> [Machine; 2] {
    [Machine::new(host()), Machine::new(requested())]
}

/// A machine with the real engine on it, and a log of the engine's requests.
pub struct Machine {
    pub host: SimHost,
    pub engine: Engine,
    pub log: Log,
}

impl Machine {
    pub fn new(host: SimHost) -> Self {
        Self::with(host, config())
    }

    pub fn with(host: SimHost, config: Config) -> Self {
        Self { host, engine: Engine::new(config), log: Log::default() }
    }

    pub fn run(&mut self, seconds: u64) {
        self.run_and(seconds, |_| {});
    }

    /// Like [`Self::run`], but shows the host to `look` after each cycle.
    pub fn run_and(&mut self, seconds: u64, look: impl FnMut(&SimHost)) {
        self.run_until(self.host.now_ns() + seconds * SECOND, look);
    }

    /// Runs until a time, and shows the host to `look` after each cycle.
    pub fn run_until(&mut self, end_ns: u64, mut look: impl FnMut(&SimHost)) {
        while self.host.now_ns() < end_ns {
            let wait_ns = self.cycle();
            let left_ns = end_ns.saturating_sub(self.host.now_ns());
            let Ok(()) = self.host.wait(wait_ns.max(1_000_000).min(left_ns));
            look(&self.host);
        }
    }

    /// Like [`Self::run`], but returns the state after each cycle.
    pub fn course(&mut self, seconds: u64) -> Vec<Moment> {
        let mut course = Vec::new();
        self.run_and(seconds, |host| {
            let cost = host.cost();
            course.push(Moment {
                now_ns: host.now_ns(),
                saved: host.saved().0,
                spent_ns: cost.pagefold_ns + cost.ksmd_ns,
            });
        });
        course
    }

    /// In each region of a process, calls `change` for these pages, counted from the region's first page.
    pub fn change_pages(
        &mut self,
        owner: OwnerKey,
        pages: Range<u64>,
        mut change: impl FnMut(&mut SimHost, RegionKey, Vpn),
    ) {
        for region in self.host.regions_of(owner) {
            let first = self.host.span_of(region).unwrap().first;
            for page in pages.clone() {
                change(&mut self.host, region, first + page);
            }
        }
    }

    /// Makes one cycle, and returns the time until the next, nanoseconds.
    pub fn cycle(&mut self) -> u64 {
        let mut recorder = Recorder { host: &mut self.host, log: &mut self.log };
        let Ok(Cycle { wait_ns, .. }) = cycle(&mut self.engine, &mut recorder);
        wait_ns
    }
}

impl Deref for Machine {
    type Target = SimHost;

    fn deref(&self) -> &SimHost {
        &self.host
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut SimHost {
        &mut self.host
    }
}

/// The state after a cycle: the time, the pages saved, and the CPU time spent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    pub now_ns: u64,
    pub saved: u64,
    pub spent_ns: u64,
}

/// Asserts that the engine and ksmd spend at most `allowed_ns` of CPU time within any window of the governors.
#[track_caller]
pub fn assert_spent_at_most(allowed_ns: u64, course: &[Moment]) {
    for (at, from) in course.iter().enumerate() {
        let end_ns = from.now_ns + WINDOW_NS;
        let inside = course[at..].iter().take_while(|moment| moment.now_ns <= end_ns);
        let most_ns = inside.map(|moment| moment.spent_ns - from.spent_ns).max().unwrap();
        assert!(most_ns <= allowed_ns, "{most_ns} of {allowed_ns} ns from {}", from.now_ns);
    }
}

/// Three processes exit in turn, and after each gap of so many seconds another one takes its place. In a long gap its
/// contents may be forgotten. Asserts that the new process is merged again.
pub fn assert_restarted_are_merged(host: SimHost, gaps: &[u64]) {
    let mut sim = Machine::new(host);
    let mut owners = scenario::redis(&mut sim, 3, Pages(16 * MIB));
    sim.run(20);
    let before = sim.saved().0;
    for &gap in gaps {
        sim.exit(owners.remove(0));
        sim.run(gap);
        owners.extend(scenario::redis(&mut sim, 1, Pages(16 * MIB)));
        sim.run(120);
        assert!(sim.saved().0 * 100 >= before * 95, "{before} before and {} after", sim.saved().0);
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

/// The engine's requests to the host, with their times.
#[derive(Default)]
pub struct Log {
    /// When the engine last observed the host.
    pub seen_ns: u64,
    /// The last cycle's plan and actions.
    pub runs: Vec<PageRun>,
    pub actions: Actions,
    owners: BTreeMap<RegionKey, OwnerKey>,
    /// Pages that the engine read: time, process and number.
    pub pages: Vec<(u64, OwnerKey, u64)>,
    /// Stops of processes: time, process and number.
    pub stops: Vec<(u64, OwnerKey, u64)>,
    /// How many frames the engine asked to move, with the time.
    pub moves: Vec<(u64, u64)>,
    /// The results of the merges that the engine asked for, with the time.
    pub merges: Vec<(u64, MergeResult)>,
    /// How many spans were marked or unmarked, and how many orders ksmd got.
    pub marks: u64,
    pub orders: u64,
    /// How often the engine marked something in each mapping.
    pub marked: BTreeMap<RegionKey, u64>,
    /// How many cache lines of a page the engine had hashed. A new entry whenever the number changed.
    pub lines: Vec<Option<u32>>,
    pub looks: u64,
    pub activity: u64,
    /// How many snapshots contained nodes or processes.
    pub placed: u64,
}

impl Log {
    /// Merges that the engine has asked for since a time: the owner of the pages, the owner of the pages to keep, and
    /// the result.
    pub fn asked_since(&self, from_ns: u64) -> impl Iterator<Item = (OwnerKey, Option<OwnerKey>, &MergeResult)> {
        let recent = self.merges.iter().filter(move |(at_ns, _)| *at_ns >= from_ns);
        recent.map(|(_, result)| {
            let keep = result.range.keep.first().map(|(region, _)| self.owners[&region]);
            (self.owners[&result.range.take.region], keep, result)
        })
    }

    /// How many pages had this outcome when the engine asked to merge them.
    pub fn pages_that(&self, merging: Merging) -> u64 {
        pages_that(self.merges.iter().map(|(_, result)| result), merging)
    }
}

pub fn pages_that<'a>(merges: impl Iterator<Item = &'a MergeResult>, merging: Merging) -> u64 {
    merges.filter(|result| result.merging == merging).map(|result| u64::from(result.range.take.pages)).sum()
}

/// A host that logs every request.
struct Recorder<'a> {
    host: &'a mut SimHost,
    log: &'a mut Log,
}

impl Host for Recorder<'_> {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let snapshot = self.host.observe()?;
        self.log.seen_ns = snapshot.now_ns;
        self.log.owners.extend(snapshot.regions.iter().map(|view| (view.key, view.owner)));
        self.log.placed += u64::from(!snapshot.nodes.is_empty() || !snapshot.owners.is_empty());
        Ok(snapshot)
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        let log = &mut *self.log;
        log.runs.clone_from(&plan.runs);
        for run in &plan.runs {
            log.pages.push((log.seen_ns, log.owners[&run.region], run.pages.into()));
        }
        // We leave out frames that the engine looks up only to count the saving.
        log.looks += if plan.count { 0 } else { plan.inspect.len() as u64 };
        log.activity += plan.activity.len() as u64;
        if log.lines.last() != Some(&plan.lines) {
            log.lines.push(plan.lines);
        }
        self.host.read(plan)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        let log = &mut *self.log;
        log.actions.clone_from(actions);
        if !actions.moves.is_empty() {
            log.moves.push((log.seen_ns, actions.moves.len() as u64));
        }
        log.marks += (actions.mark.len() + actions.unmark.len()) as u64;
        let marked: BTreeSet<RegionKey> = actions.mark.iter().map(|change| change.span.region).collect();
        for region in marked {
            *log.marked.entry(region).or_default() += 1;
        }
        log.orders += u64::from(actions.scan != ScanOrder::Keep);
        let outcome = self.host.apply(actions)?;
        log.merges.extend(outcome.merges.iter().map(|&result| (log.seen_ns, result)));
        log.stops.extend(outcome.stops.iter().map(|stops| (log.seen_ns, stops.owner, stops.number.into())));
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.host.wait(ns)
    }
}
