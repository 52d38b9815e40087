//! Algorithms on growing memory (a day of each size), and the error from simulating several pages as one.

use super::server_memory::ServerMemory;
use super::{NS_PER_HOUR, NS_PER_S};
use crate::replay::{Algorithm, ReplayRun, Settings, knobs};
use pagefold_engine::host::Host;
use pagefold_engine::units::whole;
use pagefold_sim::{Costs, Knobs, SimHost};
use serde::Serialize;

/// The share of the savable memory to reach.
const WANTED: f64 = 0.9;
/// Time between checks before that share is reached, and afterwards.
const CHECK_NS: u64 = NS_PER_S;
const LATER_NS: u64 = 60 * NS_PER_S;
/// Approximate number of simulated pages, as a power of two: ksmd scans billions of pages a day, so simulated pages
/// determine the running time. pagefold scans fewer, but its thresholds in pages (samples, extents, kicks) need a finer
/// granularity.
const SIMULATED_LOG2: u32 = 18;
const SIMULATED_LOG2_PAGEFOLD: u32 = 20;
/// The finest and the coarsest granularity.
const GRANULARITY: (u32, u32) = (64, 256);
const GRANULARITY_PAGEFOLD: (u32, u32) = (1, 64);

/// An algorithm and ksmd's scan rate (not under pagefold).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthRun {
    pub algorithm: Algorithm,
    /// Pages in a batch of ksmd, one each 20 ms.
    pub pages_to_scan: u32,
}

/// Results of an algorithm on one memory size.
#[derive(Clone, Debug, Serialize)]
pub struct Growth {
    pub gib: u64,
    /// Processes at any time.
    pub processes: u64,
    pub algorithm: Algorithm,
    /// Pages in a batch of ksmd, one each 20 ms; `None` if not fixed.
    pub pages_to_scan: Option<u32>,
    /// Pages per simulated page.
    #[serde(rename = "grain")]
    pub granularity: u32,
    pub hours: f64,
    /// Savable memory on average, bytes.
    pub savable_bytes: u64,
    /// Time until 90 % of it had first been saved, seconds; `None` if never.
    pub reached_seconds: Option<f64>,
    /// CPU time until then, seconds; of the whole run if never.
    pub cpu_until_seconds: f64,
    /// CPU time per day after that, seconds; `None` if there was no time left.
    pub cpu_day_seconds: Option<f64>,
    pub cpu_seconds: f64,
    /// CPU time of the kernel's thread, seconds.
    pub kernel_cpu_seconds: f64,
    /// Comparisons of pages until 90 % were reached.
    pub comparisons_until: u64,
    pub comparisons: u64,
    /// Comparisons of hashes, if trees are ordered by them.
    pub hash_comparisons: u64,
    /// Pages scanned by the kernel's thread.
    pub scanned: u64,
    pub cow_breaks: u64,
    /// The share of the savable memory that was saved, on average.
    pub saved_mean: f64,
    /// The same share at the end.
    pub saved_end: f64,
    /// Maximum memory of pagefold's index, bytes.
    pub index_bytes: u64,
    /// Maximum memory of ksmd's metadata, bytes.
    pub metadata_bytes: u64,
    /// Hours and the share of the savable memory that was saved.
    pub curve: Vec<(f64, f64)>,
}

/// Savable memory over time: nanoseconds and pages.
#[derive(Clone, Debug)]
pub struct Savable(Vec<(u64, u64)>);

impl Savable {
    /// Counts the savable pages of a machine without merging at some times.
    pub fn of(machine: ServerMemory, granularity: u32) -> Self {
        let knobs = Knobs { granularity, ..Knobs::default() };
        let mut sim = machine.populate(SimHost::new(1, Costs::default(), knobs), &knobs);
        let mut points = Vec::new();
        for share in [0, 1, 3, 6, 12, 18, 24] {
            let at_ns = machine.for_ns / 24 * share;
            let Ok(()) = sim.wait(at_ns - sim.now_ns());
            points.push((at_ns, sim.truth().savable));
        }
        Self(points)
    }

    /// Pages at a time, by linear interpolation.
    fn at(&self, at_ns: u64) -> f64 {
        let next = self.0.partition_point(|&(then_ns, _)| then_ns <= at_ns).clamp(1, self.0.len() - 1);
        let (from_ns, from) = self.0[next - 1];
        let (to_ns, to) = self.0[next];
        let passed = at_ns.clamp(from_ns, to_ns) - from_ns;
        from as f64 + (to as f64 - from as f64) * passed as f64 / (to_ns - from_ns).max(1) as f64
    }

    fn mean(&self, until_ns: u64) -> f64 {
        (0..100).map(|part| self.at(until_ns / 100 * part)).sum::<f64>() / 100.0
    }
}

pub fn granularity_for(machine: ServerMemory, algorithm: Algorithm) -> u32 {
    let pagefold = algorithm.is_pagefold();
    let wanted = machine.pages() >> if pagefold { SIMULATED_LOG2_PAGEFOLD } else { SIMULATED_LOG2 };
    let (finest, coarsest) = if pagefold { GRANULARITY_PAGEFOLD } else { GRANULARITY };
    u32::try_from(wanted.next_power_of_two()).unwrap_or(u32::MAX).clamp(finest, coarsest)
}

pub fn grow(machine: ServerMemory, runner: GrowthRun, granularity: u32, savable: &Savable) -> Growth {
    let GrowthRun { algorithm, pages_to_scan } = runner;
    // Never recount resident pages: no process grows or shrinks here.
    let knobs = Knobs { granularity, resident_age_ns: u64::MAX / 2, ..knobs(algorithm, machine.pages(), None) };
    let settings = Settings { pages_to_scan, ..Settings::for_time(machine.for_ns) };
    let mut run = ReplayRun::begin(algorithm, knobs, &settings, |sim| machine.populate(sim, &knobs));
    let mut reached = None;
    let mut index_bytes = 0;
    let mut metadata_bytes = 0;
    let mut shares = 0.0;
    let mut curve = Vec::new();
    while run.sim.now_ns() < machine.for_ns {
        let before_ns = run.sim.now_ns();
        let next_ns = before_ns + if reached.is_none() { CHECK_NS } else { LATER_NS };
        run.run_until(next_ns.min(machine.for_ns));
        let now_ns = run.sim.now_ns();
        let share = run.sim.saved().0 as f64 / savable.at(now_ns).max(1.0);
        shares += share * (now_ns - before_ns) as f64;
        if reached.is_none() && share >= WANTED {
            reached = Some((now_ns, run.cpu_seconds(), run.sim.counts().comparisons()));
        }
        metadata_bytes = metadata_bytes.max(run.sim.metadata().0);
        if now_ns / LATER_NS > before_ns / LATER_NS {
            index_bytes = index_bytes.max(run.index_bytes() * u64::from(granularity));
        }
        let hours = now_ns as f64 / NS_PER_HOUR as f64;
        if worth_a_point(&curve, hours, share, reached.is_some_and(|(at_ns, ..)| at_ns == now_ns)) {
            curve.push((hours, share));
        }
    }
    let now_ns = run.sim.now_ns();
    let spent = run.cpu_seconds();
    let counts = run.sim.counts();
    let saved_end = run.sim.saved().0 as f64 / savable.at(now_ns).max(1.0);
    let (until_ns, cpu_until, comparisons_until) = reached.unwrap_or((now_ns, spent, counts.comparisons()));
    let rest_days = (now_ns - until_ns) as f64 / (24 * NS_PER_HOUR) as f64;
    let fixed = algorithm != Algorithm::Uksm && !algorithm.is_pagefold();
    let savable_bytes = whole(savable.mean(machine.for_ns)) << 12;
    Growth {
        gib: machine.gib,
        processes: machine.processes(),
        algorithm,
        pages_to_scan: if fixed { Some(pages_to_scan) } else { None },
        granularity,
        hours: machine.for_ns as f64 / NS_PER_HOUR as f64,
        savable_bytes,
        reached_seconds: reached.map(|(at_ns, ..)| at_ns as f64 / NS_PER_S as f64),
        cpu_until_seconds: cpu_until,
        cpu_day_seconds: if rest_days > 0.0 { Some((spent - cpu_until) / rest_days) } else { None },
        cpu_seconds: spent,
        kernel_cpu_seconds: run.sim.cost().ksmd_ns as f64 / NS_PER_S as f64,
        comparisons_until,
        comparisons: counts.comparisons(),
        hash_comparisons: counts.hashes,
        scanned: run.sim.ksm().scanned,
        cow_breaks: run.sim.cow_breaks(),
        saved_mean: shares / now_ns.max(1) as f64,
        saved_end,
        index_bytes,
        metadata_bytes,
        curve,
    }
}

/// Whether a point adds a change to the curve, or enough time has passed since the last.
fn worth_a_point(curve: &[(f64, f64)], hours: f64, share: f64, reached: bool) -> bool {
    curve.last().is_none_or(|&(last, before)| reached || hours >= last + 0.25 || (share - before).abs() >= 0.01)
}

/// A result simulated page by page and several pages at a time.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub name: &'static str,
    /// Simulated page by page.
    pub fine: f64,
    /// Simulated several pages at a time.
    pub coarse: f64,
}

impl Figure {
    pub fn error(&self) -> f64 {
        self.coarse / self.fine - 1.0
    }
}

/// The error of an algorithm's results from simulating several pages as one.
#[derive(Clone, Debug, Serialize)]
pub struct GranularityCheck {
    pub gib: u64,
    pub hours: f64,
    pub algorithm: Algorithm,
    /// Pages per simulated page.
    #[serde(rename = "grain")]
    pub granularity: u32,
    pub figures: Vec<Figure>,
}

impl GranularityCheck {
    pub fn new(fine: &Growth, coarse: &Growth) -> Self {
        let Growth { gib, hours, algorithm, .. } = *fine;
        let mut figures = Vec::new();
        for (name, of) in FIGURES {
            match (of(fine), of(coarse)) {
                (Some(fine), Some(coarse)) if fine > 0.0 => figures.push(Figure { name, fine, coarse }),
                _ => {}
            }
        }
        Self { gib, hours, algorithm, granularity: coarse.granularity, figures }
    }
}

/// A figure's name, and its source.
type Source = (&'static str, fn(&Growth) -> Option<f64>);

const FIGURES: [Source; 7] = [
    ("time to 90 %", |growth| growth.reached_seconds),
    ("CPU until then", |growth| growth.reached_seconds.map(|_| growth.cpu_until_seconds)),
    ("CPU in all", |growth| Some(growth.cpu_seconds)),
    ("comparisons", |growth| Some(growth.comparisons as f64)),
    ("saved on average", |growth| Some(growth.saved_mean)),
    ("index", |growth| Some(growth.index_bytes as f64)),
    ("ksmd's records", |growth| Some(growth.metadata_bytes as f64)),
];

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: ServerMemory = ServerMemory { gib: 1, for_ns: 60 * NS_PER_S };

    #[test]
    fn savable_memory_does_not_depend_on_the_granularity() {
        let savable = |granularity| {
            let knobs = Knobs { granularity, ..Knobs::default() };
            MACHINE.populate(SimHost::new(1, Costs::default(), knobs), &knobs).truth().savable as f64
        };
        let (fine, coarse) = (savable(1), savable(16));
        assert!((0.30..0.40).contains(&(fine / MACHINE.pages() as f64)), "{fine}");
        // Measured: 1.3 %.
        assert!((coarse / fine - 1.0).abs() < 0.03, "{fine} and {coarse}");
    }

    #[test]
    fn results_hardly_depend_on_the_granularity() {
        let algorithms =
            [Algorithm::Ksm, Algorithm::NuKsm, Algorithm::Uksm, Algorithm::Pagefold, Algorithm::PagefoldRequest];
        for algorithm in algorithms {
            let runner = GrowthRun { algorithm, pages_to_scan: 1_000 };
            let [fine, coarse] =
                [1, 8].map(|granularity| grow(MACHINE, runner, granularity, &Savable::of(MACHINE, granularity)));
            // A check every second is too coarse for the time to 90 % of so small a memory.
            let figures = GranularityCheck::new(&fine, &coarse)
                .figures
                .into_iter()
                .filter(|figure| !figure.name.contains("then"));
            for figure in figures.filter(|figure| figure.name != "time to 90 %") {
                println!("{algorithm}: {figure:?} {:.4}", figure.error());
                // Whether pagefold marks sparse regions within the minute depends on ksmd's idle times, and one walk is
                // a large part of its cost. Measured: -16 % CPU time here, -40 % comparisons in half an hour with
                // granularity 16.
                let varies = algorithm.is_pagefold() && figure.name != "saved on average";
                let limit = if varies { 0.45 } else { 0.08 };
                assert!(figure.error().abs() < limit, "{algorithm}: {figure:?}");
            }
        }
    }

    #[test]
    fn a_curve_keeps_what_changes() {
        assert!(worth_a_point(&[], 0.0, 0.0, false));
        assert!(!worth_a_point(&[(1.0, 0.5)], 1.1, 0.5, false));
        assert!(worth_a_point(&[(1.0, 0.5)], 1.1, 0.52, false));
        assert!(worth_a_point(&[(1.0, 0.5)], 1.1, 0.5, true) && worth_a_point(&[(1.0, 0.5)], 1.3, 0.5, false));
    }
}
