//! Simulated fleets: workloads of a few kinds, placed at random, by plan and at best, and how much each way saves.
//!
//! | module | holds |
//! | --- | --- |
//! | [`mix`] | kinds of workloads: generated, or from a record of real programs |
//! | [`world`] | the workloads of a fleet, their contents, and the exact savings of its hosts |
//! | [`best`] | a bound that no placement exceeds |
//! | [`fill`] | how many workloads fit into the same memory |
//! | [`day`] | a day of churn, with a plan every hour |
//! | [`files`] | the fleet's sketches as files, for `pagefold-fleet` |
//!
//! pagefold's own code makes the sketches. We count a host's savings on all its contents.

pub mod best;
pub mod day;
pub mod files;
pub mod fill;
pub mod mix;
pub mod world;

use crate::bench::measures::median;
use crate::columns;
use mix::Mix;
use pagefold_engine::units::index;
use pagefold_planner::contents::Contents;
use pagefold_planner::{Placement, plan};
use serde::Serialize;
use std::fmt;
use std::time::Instant;
use world::{World, exact_saving};

/// Bars: a plan saves at least this share of the bound, and fits at least this share more workloads than random
/// placement.
pub const BAR_OF_BEST: f64 = 0.9;
pub const BAR_MORE: f64 = 0.15;

/// The fleets to simulate, and how.
#[derive(Clone, Copy, Debug)]
pub struct FleetOptions {
    pub hosts: u32,
    pub per_host: u32,
    pub seed: u64,
    /// Contents that the planner sees of each workload, at most.
    pub sampled: usize,
    /// Hours of churn.
    pub hours: u32,
    /// Whether to count how many workloads fit.
    pub fill: bool,
}

/// One fleet, as JSON. Sizes are in pages.
#[derive(Clone, Debug, Serialize)]
pub struct FleetOutcome {
    pub hosts: u32,
    pub workloads: usize,
    pub held: u64,
    /// Pages saved at random, by plan, and by the bound that no placement exceeds.
    pub random: u64,
    pub planned: u64,
    pub bound: f64,
    pub moves: u64,
    /// The share of hosts whose estimate was within its error, and the median error as a share of the savings.
    pub within_error: f64,
    pub median_error: f64,
    pub plan_seconds: f64,
    pub filled: Option<fill::Filled>,
    pub day: Option<day::Day>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Fleets {
    /// `pagefold.lab.fleet/1`.
    pub schema: &'static str,
    pub mix: String,
    pub outcomes: Vec<FleetOutcome>,
}

impl FleetOutcome {
    pub fn of_best(&self) -> f64 {
        self.planned as f64 / self.bound
    }

    pub fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        if self.of_best() < BAR_OF_BEST {
            missed.push(format!("{} hosts: {:.1} % of the bound", self.hosts, 100.0 * self.of_best()));
        }
        if let Some(filled) = self.filled.filter(|filled| filled.more() < BAR_MORE) {
            missed.push(format!("{} hosts: {:.1} % more workloads", self.hosts, 100.0 * filled.more()));
        }
        if self.within_error < 0.95 {
            missed.push(format!(
                "{} hosts: {:.0} % of estimates within their errors",
                self.hosts,
                100.0 * self.within_error
            ));
        }
        missed
    }
}

pub fn simulate(mix: &Mix, options: &FleetOptions, show: &dyn Fn(&str)) -> FleetOutcome {
    show("making workloads");
    let world = World::new(mix, options);
    let fleet = world.fleet();
    let contents = Contents::of(&fleet);
    show("planning");
    let began = Instant::now();
    let made = plan(&fleet, &contents, u64::MAX);
    let plan_seconds = began.elapsed().as_secs_f64();
    show("counting");
    let current = Placement::current(&fleet, &contents);
    let mut random = 0;
    let mut planned = 0;
    let mut within = 0;
    let mut errors = Vec::new();
    let mut now = vec![Vec::new(); fleet.hosts.len()];
    for (workload, host) in made.places.iter().enumerate() {
        now[index(host.0)].push(workload);
    }
    for host in fleet.host_ids() {
        let before: Vec<usize> = current.units_on(host).iter().map(|unit| index(unit.0)).collect();
        random += exact_saving(&world, &before);
        let exact = exact_saving(&world, &now[index(host.0)]);
        planned += exact;
        let estimate = made.hosts[index(host.0)];
        let off = estimate.pages.0.abs_diff(exact);
        within += u32::from(off <= estimate.error.0);
        errors.push(off as f64 / exact.max(1) as f64);
    }
    let workloads = fleet.units.len();
    FleetOutcome {
        hosts: options.hosts,
        workloads,
        held: world.held(),
        random,
        planned,
        bound: best::bound(&world, options),
        moves: made.moves,
        within_error: f64::from(within) / f64::from(options.hosts),
        median_error: median(errors),
        plan_seconds,
        filled: if options.fill { Some(fill::fill(mix, options, show)) } else { None },
        day: if options.hours > 0 { Some(day::day(mix, options, show)) } else { None },
    }
}

fn mib(pages: f64) -> String {
    format!("{:.0}", pages / 256.0)
}

impl fmt::Display for Fleets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: MiB saved by placement\n", self.mix)?;
        let table = columns::table(
            0,
            &self.outcomes,
            &[
                ("hosts", &|of| of.hosts.to_string()),
                ("workloads", &|of| of.workloads.to_string()),
                ("held", &|of| mib(of.held as f64)),
                ("at random", &|of| mib(of.random as f64)),
                ("by plan", &|of| mib(of.planned as f64)),
                ("bound", &|of| mib(of.bound)),
                ("of it", &|of| format!("{:.1} %", 100.0 * of.of_best())),
                ("moves", &|of| of.moves.to_string()),
                ("error", &|of| format!("{:.1} %", 100.0 * of.median_error)),
                ("within", &|of| format!("{:.0} %", 100.0 * of.within_error)),
                ("plan s", &|of| format!("{:.1}", of.plan_seconds)),
            ],
        );
        writeln!(f, "{table}")?;
        for outcome in &self.outcomes {
            if let Some(filled) = outcome.filled {
                writeln!(
                    f,
                    "{} hosts: {} workloads fit at random, {} by plan: {:.1} % more (at most {:.1} % are possible)",
                    outcome.hosts,
                    filled.random,
                    filled.planned,
                    100.0 * filled.more(),
                    100.0 * filled.more_at_most(),
                )?;
            }
            if let Some(day) = &outcome.day {
                writeln!(
                    f,
                    "{} hosts, {} hours, {} of {} workloads replaced, {} moves: on average {} MiB saved at random, {} by plan",
                    outcome.hosts,
                    day.hours,
                    day.replaced,
                    outcome.workloads,
                    day.moves,
                    mib(day.random),
                    mib(day.planned),
                )?;
            }
        }
        Ok(())
    }
}
