//! CMD's classes and nuKSM's forests in virtual time: we run the algorithms on generated memory, and leave this
//! machine's KSM alone.

use super::{Experiment, ExperimentSetting};
use crate::bench::metric;
use crate::bench::report::{ExperimentReport, Limit};
use crate::generate::{Generator, Options};
use crate::record::{Record, write};
use crate::replay::{Algorithm, Outcome, Settings, replay};
use crate::scale::{ForestPoint, Race, forest};
use crate::script::{Scripted, script};
use anyhow::{Context, anyhow};
use pagefold_engine::units::Pages;

pub const CLASSES: Experiment = Experiment {
    name: "classes",
    claim: "CMD, sections 3.3 and 4: trees for each class of pages need fewer comparisons than two global ones, fewer of them are futile, \
            and nearly as much is shared. On generated memory, in virtual time",
    run: run_classes,
};

pub const FORESTS: Experiment = Experiment {
    name: "forests",
    claim: "nuKSM, sections 4.3 and 5.4: comparisons fall with the number of trees, no sharing is lost, and memory that is taken step by \
            step does not run out. In virtual time",
    run: run_forests,
};

/// CMD gives figures for these workloads.
const WORKLOADS: [&str; 3] = ["kernel-build", "web-server", "database"];

/// An algorithm of CMD over the three workloads, relative to KSM.
#[derive(Clone, Copy)]
struct Classes {
    algorithm: Algorithm,
    /// The most comparisons and the least sharing, as shares of KSM's.
    comparisons: f64,
    sharing: f64,
    /// By how many percentage points fewer comparisons are futile on average.
    fewer_futile: f64,
}

/// The paper's figures.
const CMD: [Classes; 3] = [
    Classes { algorithm: Algorithm::CmdAddress, comparisons: 0.71, sharing: 0.39, fewer_futile: 4.8 },
    Classes { algorithm: Algorithm::CmdPageCount, comparisons: 0.86, sharing: 0.87, fewer_futile: 6.4 },
    Classes { algorithm: Algorithm::CmdSubPage, comparisons: 0.77, sharing: 0.98, fewer_futile: 12.2 },
];

fn run_classes(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let mib = if setting.quick { 8 } else { 128 };
    report.parameters([("guests", 4), ("mib_each", mib)]);
    let mut found = CMD.map(|paper| Classes { comparisons: 0.0, sharing: f64::INFINITY, fewer_futile: 0.0, ..paper });
    for workload in WORKLOADS {
        eprintln!("{}: {workload}", report.experiment);
        let scripted = generated(workload, Pages(mib << 8))?;
        let ksm = replayed(setting, Algorithm::Ksm, &scripted)?;
        report.figure(format!("{workload}: per cent of ksm's comparisons that are futile"), 100.0 * ksm.futile_rate);
        for Classes { algorithm, comparisons, sharing, fewer_futile } in &mut found {
            let outcome = replayed(setting, *algorithm, &scripted)?;
            let compared = outcome.comparisons() as f64 / ksm.comparisons() as f64;
            let shared = outcome.saved_mean / ksm.saved_mean;
            let fewer = 100.0 * (ksm.futile_rate - outcome.futile_rate);
            report.figure(format!("{workload}: {algorithm}, comparisons, of ksm's"), compared);
            report.figure(format!("{workload}: {algorithm}, sharing on average, of ksm's"), shared);
            report.figure(format!("{workload}: {algorithm}, points fewer futile comparisons"), fewer);
            *comparisons = comparisons.max(compared);
            *sharing = sharing.min(shared);
            *fewer_futile += fewer / WORKLOADS.len() as f64;
        }
    }
    if setting.quick {
        return Ok(());
    }
    for (paper, found) in CMD.iter().zip(found) {
        let of = paper.algorithm.to_string();
        report.bar(metric::CLASS_COMPARISONS.of([&of]), Limit::AtMost(paper.comparisons), Some(found.comparisons));
        report.bar(metric::CLASS_SHARING.of([&of]), Limit::AtLeast(paper.sharing), Some(found.sharing));
        report.bar(metric::CLASS_FUTILE.of([&of]), Limit::AtLeast(paper.fewer_futile), Some(found.fewer_futile));
    }
    Ok(())
}

fn replayed(setting: &ExperimentSetting<'_>, algorithm: Algorithm, scripted: &Scripted) -> anyhow::Result<Outcome> {
    setting.interrupt.check()?;
    Ok(replay(algorithm, scripted, &Settings::for_record(scripted)))
}

/// Generated memory, as steps of the simulator.
fn generated(workload: &str, size: Pages) -> anyhow::Result<Scripted> {
    let generator = Generator::named(workload).with_context(|| format!("no generator {workload}"))?;
    let options = Options { size, ..generator.defaults };
    let file = tempfile::NamedTempFile::new()?;
    let mut memory = generator.start(&options)?;
    write(file.path(), &generator.origin(&options), &mut memory).map_err(|error| anyhow!("{workload}: {error:?}"))?;
    Ok(script(&Record::read(file.path())?))
}

fn run_forests(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (nodes, grain) = if setting.quick { (10_240, 1_024) } else { (1_024_000, 64) };
    let race = Race { granularity: grain, cost_percent: 250, ..Race::default() };
    report.parameters([("stable_nodes", nodes), ("race_gib", race.node_gib), ("race_cost_percent", race.cost_percent)]);
    let mut points: Vec<ForestPoint> = Vec::new();
    for trees in [1, 16, 256, 1_800] {
        setting.interrupt.check()?;
        eprintln!("{}: {trees} trees", report.experiment);
        let point = forest(nodes, trees);
        report.figure(format!("comparisons of a page with stable nodes, trees: {trees:4}"), point.stable);
        report.figure(format!("scan, CPU s (modelled), trees: {trees:4}"), point.round_seconds);
        points.push(point);
    }
    // Memory runs out at a different time for each algorithm. A time after the end stands for never.
    let never = race.for_seconds as f64;
    let mut ours = never;
    for (name, algorithm) in [
        ("no merging", None),
        ("ksm", Some(Algorithm::Ksm)),
        ("nuksm", Some(Algorithm::NuKsm)),
        ("pagefold", Some(Algorithm::Pagefold)),
    ] {
        setting.interrupt.check()?;
        ours = race.run(algorithm).exhausted_seconds.unwrap_or(never);
        report.figure(metric::RACE.of([name, &never.to_string()]), ours);
    }
    if setting.quick {
        return Ok(());
    }
    let [first, .., last] = &points[..] else { return Ok(()) };
    let unmerged = points.iter().map(|point| point.lost).sum::<u64>() as f64;
    let deviation = ForestPoint::largest_deviation(&points);
    report.bar(metric::TREES_UNMERGED, Limit::AtMost(0.0), Some(unmerged));
    report.bar(metric::TREES_OFF_LAW, Limit::AtMost(0.6), Some(deviation));
    report.bar(metric::TREES_COMPARISONS, Limit::AtMost(0.5), Some(last.stable / first.stable));
    report.bar(metric::TREES_SCAN, Limit::AtMost(1.0), Some(last.round_seconds / first.round_seconds));
    report.bar(metric::RACE_LIMIT, Limit::AtLeast(never), Some(ours));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_name_these_algorithms_and_times() {
        let names = [metric::CMD_ADDRESS, metric::CMD_PAGECOUNT, metric::CMD_SUBPAGE];
        assert_eq!(CMD.map(|paper| paper.algorithm.to_string()), names);
        assert_eq!(Race::default().for_seconds.to_string(), metric::RACE_NEVER);
    }
}
