//! The placement of merged pages on a machine with several memory nodes, and its cost to the programs (nuKSM thesis,
//! sections 5.2 and 5.3).
//!
//! Plain KSM, and pagefold with each placement policy, merge the pages of programs bound to nodes. If this machine has
//! only one node, an emulated machine with four does that. We read the placement from page tables, and model the effect
//! on run times ([`model`]): we draw accesses over the real placement and weight them with latencies, measured ones on
//! real nodes, the thesis's on emulated ones.

mod guest;
mod latency;
mod model;
mod place;

use super::{Experiment, ExperimentSetting};
use crate::bench::metric;
use crate::bench::report::{ExperimentReport, Limit, PolicyRun};
use model::{PROGRAMS, Program, fairness};
use pagefold_engine::placement::policy::Latencies;
use place::{FAIR, FOUR, FOUR_NODES, KERNEL, KSM, LOCAL_ONLY, Nodes, PRIORITIES, PRIORITY, THREE};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

pub const EXPERIMENT: Experiment = Experiment {
    name: "numa",
    claim: "nuKSM: merging slows two programs on two nodes equally (fairness 0.94 to 0.99, KSM: 0.70 to 0.85), with the same \
            total time and memory saved; nice values decide each program's share of local merged pages",
    run,
};

sizes! {
    /// Pages per program.
    pages: u64 = 16_384, quick 8_192, as "pages";
    /// Time for pagefold to merge and place them.
    seconds: u64 = 20, quick 8, as "seconds";
    /// Number of runs of each of `kernel` and `fair`.
    turns: usize = 4, quick 1;
    /// How many of the thesis's priority configurations to run.
    priorities: usize = 5, quick 1;
    /// Also run three and four programs, and one on each of four nodes.
    larger_groups: bool = true, quick false;
    /// Accesses drawn per program.
    accesses: u64 = 1_000_000, quick 100_000, as "accesses";
    /// Time limit of the emulated machine.
    limit: Duration = Duration::from_secs(1800), quick Duration::from_secs(240);
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    // The thesis's latencies, unless we measure: the emulator has no realistic ones.
    let mut latencies = Latencies::default();
    let nodes = if setting.guest.is_none() { Nodes::of_machine()? } else { None };
    match nodes.map(Rc::new) {
        Some(nodes) => {
            place::run(setting, &nodes, sizes, report)?;
            let (mib, steps) = match (setting.emulated, setting.quick) {
                // These sizes only check that the measurement works.
                (true, _) => (4, 1 << 16),
                (_, true) => (64, 1 << 20),
                _ => (512, 1 << 23),
            };
            latencies = latency::measure(&nodes, mib, steps)?;
            if setting.emulated {
                return Ok(());
            }
        }
        None if setting.emulated => anyhow::bail!("the emulated machine has only one memory node"),
        None => {
            guest::run(setting, sizes, report)?;
            report.parameters([("emulated", 1)]);
        }
    }
    report.parameters([("local_ns", u64::from(latencies.local_ns)), ("remote_ns", u64::from(latencies.remote_ns))]);
    judge(report, latencies, sizes.accesses);
    if !setting.quick {
        judge_cpu(report);
    }
    Ok(())
}

/// Tolerated deviation of a share, percentage points.
const POINTS: f64 = 2.0;

/// Adds the modelled effect of the placements, and the bars. Draws `accesses` per program.
fn judge(report: &mut ExperimentReport, latencies: Latencies, accesses: u64) {
    for name in ["", THREE, FOUR, FOUR_NODES] {
        let ksm = last(report, &format!("{KSM}{name}"));
        let fair = last(report, &format!("{FAIR}{name}"));
        let (Some(ksm), Some(fair)) = (ksm, fair) else { continue };
        let mut rows = Vec::new();
        let mut least: Option<f64> = None;
        for program in &PROGRAMS {
            let under_ksm = slowdowns(&ksm, program, latencies, accesses);
            let under_fair = slowdowns(&fair, program, latencies, accesses);
            let (Some(unfair), Some(even)) = (fairness(&under_ksm), fairness(&under_fair)) else { continue };
            let together = under_fair.iter().sum::<f64>() / under_ksm.iter().sum::<f64>();
            let title = format!("{}{name}", program.name);
            report.figure(format!("{title}: fairness, KSM (modelled)"), unfair);
            report.figure(format!("{title}: fairness, pagefold (modelled)"), even);
            report.put_ratio(format!("{title}: run times together, pagefold of KSM (modelled)"), together);
            rows.push((format!("KSM, {}", program.name), unfair));
            rows.push((format!("pagefold, {}", program.name), even));
            least = Some(even.min(least.unwrap_or(even)));
            // These programs wait for memory most of the time.
            if name.is_empty() && program.wait_share() > 0.7 {
                report.bar(format!("{title}: fairness, KSM (modelled)"), Limit::AtMost(0.85), Some(unfair));
            }
        }
        report.bar(metric::FAIRNESS_SMALLEST.of([name]), Limit::AtLeast(0.98), least);
        let saved = fair.saved_bytes as f64 / ksm.saved_bytes.max(1) as f64;
        report.bar(format!("memory saved{name} relative to KSM"), Limit::AtLeast(0.99), Some(saved));
        for (policy, run) in [("KSM", &ksm), ("pagefold", &fair)] {
            let off = points_off(run).unwrap_or(0.0);
            report.figure(format!("{policy}{name}: points that local pages are off an even share"), off);
        }
        report.bar(metric::OFF_EVEN_SHARE.of([name]), Limit::AtMost(POINTS), points_off(&fair));
        if name.is_empty() {
            let subtitle = "fairness: smaller slowdown / larger slowdown; modelled on real placements";
            report.picture("two programs on two nodes", subtitle, rows);
        }
    }
    judge_priorities(report);
    if let Some(apart) = last(report, LOCAL_ONLY) {
        report.figure("local-only: MiB saved of two programs on two nodes", apart.saved_bytes as f64 / 1_048_576.0);
    }
}

fn judge_priorities(report: &mut ExperimentReport) {
    let mut rows = Vec::new();
    let mut worst: Option<f64> = None;
    for (name, _, wanted) in PRIORITIES {
        let Some(run) = last(report, &format!("{PRIORITY} {name}")) else { continue };
        let [first, second] = &run.programs[..] else { continue };
        let (Some(first), Some(second)) = (first.local_share(), second.local_share()) else { continue };
        report.figure(format!("priority {name}: local pages of the first, per cent"), 100.0 * first);
        report.figure(format!("priority {name}: local pages of the second, per cent"), 100.0 * second);
        rows.push((format!("pagefold, {name}, required {:.0}", 100.0 * wanted), 100.0 * first));
        let off = 100.0 * (first - wanted).abs().max((second - (1.0 - wanted)).abs());
        worst = Some(off.max(worst.unwrap_or(off)));
    }
    report.bar(metric::OFF_PRIORITY, Limit::AtMost(POINTS), worst);
    let subtitle = "per cent of the merged pages on the first program's node, by the ratio of priorities";
    report.picture("local merged pages by priority", subtitle, rows);
}

/// Compares the CPU time of pagefold and ksmd with placement and without. Takes the fastest run of each, since the
/// first run on an emulator, and any run on a busy machine, may take longer.
fn judge_cpu(report: &mut ExperimentReport) {
    let (Some(kernel), Some(fair)) = (least_cpu_seconds(report, KERNEL), least_cpu_seconds(report, FAIR)) else {
        return;
    };
    report.figure("CPU seconds, left where it falls", kernel);
    report.figure("CPU seconds, fair", fair);
    report.bar("CPU of pagefold and ksmd with fair relative to kernel", Limit::AtMost(1.25), Some(fair / kernel));
}

fn least_cpu_seconds(report: &ExperimentReport, policy: &str) -> Option<f64> {
    let runs = report.runs.iter().filter(|run| run.policy == policy);
    runs.map(|run| run.cpu_seconds).min_by(f64::total_cmp)
}

/// The last run of a policy, without start-up effects.
fn last(report: &ExperimentReport, policy: &str) -> Option<PolicyRun> {
    report.runs.iter().rfind(|run| run.policy == policy).cloned()
}

/// The most that a program's share of local merged pages is off an even share of all home nodes, percentage points.
fn points_off(run: &PolicyRun) -> Option<f64> {
    let homes: BTreeSet<usize> = run.programs.iter().map(|program| program.home).collect();
    let mut most: Option<f64> = None;
    for program in &run.programs {
        if let Some(share) = program.local_share() {
            let off = 100.0 * (share - 1.0 / homes.len() as f64).abs();
            most = Some(off.max(most.unwrap_or(off)));
        }
    }
    most
}

/// The slowdown of each instance if every program of the run were an instance of `program`.
fn slowdowns(run: &PolicyRun, program: &Program, latencies: Latencies, accesses: u64) -> Vec<f64> {
    (0..).zip(&run.programs).map(|(seed, placed)| program.slowdown(placed, latencies, accesses, seed)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Placed;

    /// A run of two programs that share all pages, `on_second` per cent of them on node 1.
    fn run(policy: &str, on_second: usize, cpu_seconds: f64) -> PolicyRun {
        let second = |page: usize| (page + 1) * on_second / 100 > page * on_second / 100;
        let pages: String = (0..12_000).map(|page| if second(page) { '1' } else { '0' }).collect();
        let merged = vec![(12_000 - 120 * on_second) as u64, (120 * on_second) as u64];
        let program = |home: usize, distances| Placed { home, distances, merged: merged.clone(), pages: pages.clone() };
        let programs = vec![program(0, vec![10, 20]), program(1, vec![20, 10])];
        PolicyRun {
            policy: policy.to_owned(),
            saved_bytes: 12_000 << 12,
            programs,
            cpu_seconds,
            ..PolicyRun::default()
        }
    }

    fn judged(runs: Vec<PolicyRun>) -> ExperimentReport {
        let mut report = ExperimentReport::new("numa", "");
        report.runs = runs;
        judge(&mut report, Latencies::default(), 100_000);
        judge_cpu(&mut report);
        report
    }

    fn missed(report: &ExperimentReport) -> Vec<&str> {
        report.bars.iter().filter(|bar| !bar.met).map(|bar| bar.name.as_str()).collect()
    }

    #[test]
    fn bars_can_be_met_and_missed() {
        let priorities = || {
            let of = |(name, _, share): (&str, [i32; 2], f64)| {
                let on_second = 100
                    - [91, 83, 50, 17, 9].into_iter().find(|at| (f64::from(*at) - 100.0 * share).abs() < 1.0).unwrap();
                run(&format!("{PRIORITY} {name}"), usize::try_from(on_second).unwrap(), 1.0)
            };
            PRIORITIES.map(of)
        };
        let mut runs = vec![run(KSM, 100, 9.0), run(KERNEL, 100, 1.0), run(FAIR, 50, 1.2), run(FAIR, 50, 1.6)];
        runs.extend(priorities());
        let report = judged(runs.clone());
        assert_eq!(missed(&report), [""; 0]);
        assert_eq!(report.bars.len(), 2 + 3 + 1 + 1, "{:?}", report.bars);
        assert!(report.ratios.values().all(|together| (together - 1.0).abs() < 0.01), "{:?}", report.ratios);

        (runs[1], runs[2], runs[3]) = (run(KERNEL, 100, 1.0), run(FAIR, 60, 1.3), run(FAIR, 60, 1.3));
        runs[3].saved_bytes /= 2;
        runs[5] = run(&format!("{PRIORITY} 5:1"), 20, 1.0);
        let report = judged(runs);
        assert_eq!(missed(&report).len(), 5, "{:?}", report.bars);
        // No runs, no bars.
        assert!(judged(Vec::new()).bars.is_empty());
    }
}
