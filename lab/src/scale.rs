//! How the algorithms scale: with memory, up to a tebibyte; with the number of trees (nuKSM's claim on forests); and in
//! a race against memory running out. Everything runs in virtual time, where a simulated page stands for several
//! neighbours ([`pagefold_sim::Knobs::granularity`]); we measure the error from that as well.

mod forests;
mod growth;
mod race;
mod server_memory;
mod table;

pub use forests::{ForestPoint, forest};
pub use growth::{Figure, GranularityCheck, Growth, GrowthRun, Savable, granularity_for, grow};
pub use race::{Race, RaceResult, Racer};
pub use server_memory::ServerMemory;

use crate::replay::Algorithm;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum number of threads, to limit memory use.
const THREADS_MAX: usize = 4;
const NS_PER_S: u64 = 1_000_000_000;
const NS_PER_HOUR: u64 = 3_600 * NS_PER_S;
const PAGES_PER_GIB: u64 = 1 << 18;
/// ksmd's batches: the lab's default, and the kernel's.
const PAGES_TO_SCAN: u32 = 1_000;
const PAGES_TO_SCAN_DEFAULT: u32 = 100;
/// Costs in the races, in per cent of our measurements with little memory: as measured, and as high as the thesis's
/// outcome requires.
const RACE_COSTS: [u64; 2] = [100, 250];

#[derive(Clone, Debug, PartialEq)]
pub struct ScaleOptions {
    pub memory: Vec<u64>,
    pub algorithms: Vec<Algorithm>,
    /// Simulated time of each run, hours.
    pub hours: f64,
    /// The check of the granularity: memory in GiB, granularity, hours; `None` for no check.
    pub check: Option<(u64, u32, f64)>,
    /// Stable nodes of the forests.
    pub nodes: Vec<u64>,
    pub trees: Vec<u16>,
    pub races: Vec<Race>,
}

/// The default algorithms. CMD's need page-level write information, which is unrelated to size.
pub const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::Ksm,
    Algorithm::KsmSmart,
    Algorithm::NuKsm,
    Algorithm::Uksm,
    Algorithm::Pagefold,
    Algorithm::PagefoldRequest,
];

impl Default for ScaleOptions {
    fn default() -> Self {
        Self {
            memory: vec![4, 16, 64, 256, 1_024],
            algorithms: ALGORITHMS.to_vec(),
            hours: 24.0,
            check: Some((4, 16, 0.5)),
            nodes: vec![1_024, 10_240, 102_400, 1_024_000],
            trees: vec![1, 4, 16, 64, 256, 1_024, 1_800],
            races: RACE_COSTS.map(|cost_percent| Race { cost_percent, ..Race::default() }).to_vec(),
        }
    }
}

impl ScaleOptions {
    /// Small measurements that take seconds.
    pub fn quick() -> Self {
        Self {
            memory: vec![4, 16],
            hours: 0.05,
            check: Some((1, 8, 0.01)),
            nodes: vec![1_024, 10_240],
            trees: vec![1, 16, 256],
            races: RACE_COSTS.map(|cost_percent| Race { cost_percent, granularity: 1_024, ..Race::default() }).to_vec(),
            ..Self::default()
        }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Scaling {
    /// `pagefold.lab.scale/1`.
    pub schema: &'static str,
    pub growth: Vec<Growth>,
    /// Error from simulating several pages as one.
    #[serde(rename = "grain")]
    pub granularity: Vec<GranularityCheck>,
    /// One entry for each number of stable nodes and each number of trees.
    pub forests: Vec<ForestPoint>,
    pub races: Vec<RaceResult>,
}

#[derive(Clone, Copy, Debug)]
enum Task {
    /// A machine, an algorithm, and the granularity.
    Grow(ServerMemory, GrowthRun, u32),
    Forest(u64, u16),
    Race(Race, Option<Algorithm>),
}

#[derive(Debug)]
enum Done {
    Grown(Growth),
    Forest(ForestPoint),
    Raced(Racer),
}

/// Runs all measurements, several at a time. Calls `progress` with the numbers of finished and of all measurements.
pub fn scale(scale: &ScaleOptions, progress: impl Fn(usize, usize) + Sync) -> Scaling {
    let mut tasks: Vec<Task> = Vec::new();
    for &gib in &scale.memory {
        let memory = ServerMemory::new(gib, scale.hours);
        for &algorithm in &scale.algorithms {
            let granularity = granularity_for(memory, algorithm);
            tasks.push(Task::Grow(memory, GrowthRun { algorithm, pages_to_scan: PAGES_TO_SCAN }, granularity));
            if algorithm == Algorithm::KsmSmart {
                let slow = GrowthRun { algorithm, pages_to_scan: PAGES_TO_SCAN_DEFAULT };
                tasks.push(Task::Grow(memory, slow, granularity));
            }
        }
    }
    if let Some((gib, granularity, hours)) = scale.check {
        let memory = ServerMemory::new(gib, hours);
        for granularity in [1, granularity] {
            for &algorithm in &scale.algorithms {
                tasks.push(Task::Grow(memory, GrowthRun { algorithm, pages_to_scan: PAGES_TO_SCAN }, granularity));
            }
        }
    }
    for &nodes in &scale.nodes {
        for &trees in &scale.trees {
            tasks.push(Task::Forest(nodes, trees));
        }
    }
    for &race in &scale.races {
        tasks.push(Task::Race(race, None));
        for &algorithm in &scale.algorithms {
            tasks.push(Task::Race(race, Some(algorithm)));
        }
    }
    collect(scale, run(&tasks, progress))
}

/// Savable memory of each machine, computed once for each size and granularity.
type Savables = Mutex<HashMap<(ServerMemory, u32), Arc<OnceLock<Savable>>>>;

/// Runs the largest tasks first, so that no long one begins last.
fn run(tasks: &[Task], progress: impl Fn(usize, usize) + Sync) -> Vec<Done> {
    let known = Savables::default();
    let next = AtomicUsize::new(0);
    let results = Mutex::new(BTreeMap::new());
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(size(&tasks[at])));
    let work = || {
        while let Some(&at) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done = perform(tasks[at], &known);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.insert(at, done);
            progress(results.len(), tasks.len());
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS_MAX);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// The number of pages that a task simulates.
fn size(task: &Task) -> u64 {
    match *task {
        Task::Grow(machine, _, granularity) => machine.pages() / u64::from(granularity),
        Task::Forest(nodes, _) => 2 * nodes,
        Task::Race(race, _) => race.node_gib * PAGES_PER_GIB / u64::from(race.granularity),
    }
}

fn perform(task: Task, known: &Savables) -> Done {
    match task {
        Task::Grow(machine, runner, granularity) => {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            let cell = Arc::clone(known.entry((machine, granularity)).or_default());
            drop(known);
            Done::Grown(grow(machine, runner, granularity, cell.get_or_init(|| Savable::of(machine, granularity))))
        }
        Task::Forest(nodes, trees) => Done::Forest(forest(nodes, trees)),
        Task::Race(race, algorithm) => Done::Raced(race.run(algorithm)),
    }
}

fn collect(scale: &ScaleOptions, done: Vec<Done>) -> Scaling {
    let mut scaling = Scaling { schema: "pagefold.lab.scale/1", ..Scaling::default() };
    let mut racers = Vec::new();
    for done in done {
        match done {
            Done::Grown(growth) => scaling.growth.push(growth),
            Done::Forest(point) => scaling.forests.push(point),
            Done::Raced(racer) => racers.push(racer),
        }
    }
    let checks = scale.check.map_or(0, |_| scale.algorithms.len());
    let coarse = scaling.growth.split_off(scaling.growth.len() - checks);
    let fine = scaling.growth.split_off(scaling.growth.len() - checks);
    for (fine, coarse) in fine.iter().zip(&coarse) {
        scaling.granularity.push(GranularityCheck::new(fine, coarse));
    }
    for (&race, racers) in scale.races.iter().zip(racers.chunks(scale.algorithms.len() + 1)) {
        scaling.races.push(RaceResult { race, racers: racers.to_vec() });
    }
    scaling
}

fn name(growth: &Growth) -> String {
    match growth.pages_to_scan {
        Some(pages) if pages != PAGES_TO_SCAN => format!("{} at {pages}", growth.algorithm),
        _ => growth.algorithm.to_string(),
    }
}
