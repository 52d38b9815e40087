//! UKSM's short-lived memory (section 8.1.3): a program repeatedly maps 500 MB, fills all pages alike, sleeps for T,
//! unmaps the memory and sleeps for T. The daemon starts first. The program counts its own merged pages just before it
//! unmaps them.

use super::{Experiment, ExperimentSetting, PolicySequence, are_intact, mib};
use crate::activity::{self, Activity};
use crate::bench::measures::Spread;
use crate::bench::metric;
use crate::bench::policy::{KsmPaced, Marks, Pagefold, Policy, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit};
use crate::tenant::Tenant;
use anyhow::Context;
use pagefold_engine::units::{Pages, whole};
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "short-lived",
    claim: "UKSM: 500 MB mapped for T, then unmapped for T: ignored by default; with sensitive settings almost all is merged at \
            T = 0.2 s, where KSM at 2000 pages per 20 ms merges none below 2 s (required: nothing marked; 90 % at T = 2 s)",
    run,
};

/// The daemon runs for this long before the memory appears.
const HEAD_START: Duration = Duration::from_secs(2);

/// Extra time for a lifetime on a busy machine: mapping, filling, counting, unmapping.
const WORK: Duration = Duration::from_secs(4);

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, cycles) = if setting.quick { (64, 2) } else { (500, 6) };
    report.parameters([("same_mib", size_mib), ("cycles", cycles)]);
    let pages = mib(size_mib);
    let by_default = Pagefold::new(0);
    let sensitive = Pagefold::new(0).with(&["--preset", "sensitive"]);
    let ksm = KsmPaced { pages: 2000, seconds: 0 };
    let plan: [(&dyn Policy, &[u64]); 3] = if setting.quick {
        [(&by_default, &[500]), (&sensitive, &[500]), (&ksm, &[500])]
    } else {
        [(&by_default, &[500, 1000, 2000]), (&sensitive, &[4000, 2000, 1000, 500, 250]), (&ksm, &[2000, 1000])]
    };
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let mut marked: Option<f64> = None;
    let mut merged: Option<f64> = None;
    let mut smallest: Option<u64> = None;
    for (by, lives) in plan {
        for &life_ms in lives {
            let name = name_of_lives(by, life_ms);
            let lived =
                sequence.conduct(report, &name, &name, |stage| live_through(stage, by, pages, life_ms, cycles))?;
            let Some(Lived { merged_pages, spans }) = lived else { continue };
            let share = merged_pages.median / pages.0 as f64;
            let best = merged_pages.max / pages.0 as f64;
            report.figure(metric::SHARE_MERGED.of([&name]), share);
            report.figure(format!("share merged at best, {name}"), best);
            rows.push((name, share));
            if by.name() == by_default.name() {
                marked = Some(marked.unwrap_or(0.0).max(spans.context("the summary has no marked_spans")?));
                merged = Some(merged.unwrap_or(0.0).max(best));
            } else if by.name() == sensitive.name() && share >= 0.5 {
                smallest = Some(smallest.unwrap_or(life_ms).min(life_ms));
            }
        }
    }
    let subtitle = format!("of {size_mib} MiB, just before it is unmapped; median of {cycles} lifetimes");
    report.picture("share merged of memory mapped for T", subtitle, rows);
    if let Some(smallest) = smallest {
        report.figure(metric::SMALLEST_LIFETIME, smallest as f64 / 1000.0);
    }
    report.bar("default: spans marked", Limit::AtMost(0.0), marked);
    report.bar(metric::MERGED_AT_BEST, Limit::AtMost(0.0), merged);
    if !setting.quick {
        let at_two = report.figure_of(metric::SHARE_MERGED, [&name_of_lives(&sensitive, 2000)]);
        report.bar("sensitive: share merged at T = 2 s", Limit::AtLeast(0.9), at_two);
    }
    Ok(())
}

fn name_of_lives(by: &dyn Policy, life_ms: u64) -> String {
    format!("{by}, T = {} s", life_ms as f64 / 1000.0)
}

/// The results of some lifetimes.
struct Lived {
    /// At the end of each lifetime.
    merged_pages: Spread,
    /// Spans that pagefold marked.
    spans: Option<f64>,
}

/// Runs `cycles` lifetimes, with merging on from the start.
fn live_through(
    stage: &mut Stage<'_>,
    by: &dyn Policy,
    pages: Pages,
    life_ms: u64,
    cycles: u64,
) -> anyhow::Result<Lived> {
    let setting = stage.setting;
    let interrupt = setting.interrupt;
    let mergeable = by.marks() == Marks::Everything;
    let activity = Activity::ShortLived { pages: pages.0, seed: 10, life_us: life_ms * 1000, mergeable };
    let mut tenant = Tenant::start(setting.player, &activity.of_tenant([]))?;
    let before = are_intact([&mut tenant])?;
    stage.merge(by, &["--pid", &tenant.pid().to_string()])?;
    if !mergeable {
        interrupt.sleep(HEAD_START)?;
    }
    tenant.begin()?;
    let cycle = Duration::from_millis(2 * life_ms);
    interrupt.sleep(cycle * u32::try_from(cycles)?)?;
    // Poll rarely: answering delays the program.
    let mut counters = activity::counters(&mut tenant)?;
    let end = Instant::now() + WORK * u32::try_from(cycles)?;
    while (counters.lives.len() as u64) < cycles && Instant::now() < end {
        interrupt.sleep(cycle.min(Duration::from_millis(500)))?;
        counters = activity::counters(&mut tenant)?;
    }
    stage.end_alone()?;
    let during = are_intact([&mut tenant])?;
    stage.unmerge()?;
    let run = &mut stage.run;
    run.answers_correct = Answers { before, during, after: are_intact([&mut tenant])? };
    run.forget_curve();
    let merged_pages = Spread::of(counters.lives.iter().map(|life| life.merged_pages as f64));
    let merged_pages = merged_pages.context("no lifetime was completed")?;
    run.saved_bytes_max = Pages(whole(merged_pages.max)).bytes().0;
    run.saved_bytes = Pages(whole(merged_pages.median)).bytes().0;
    run.lives = counters.lives;
    let spans = run.summary.as_ref().and_then(|summary| summary["marked_spans"].as_f64());
    Ok(Lived { merged_pages, spans })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_name_these_lives() {
        assert_eq!(name_of_lives(&KsmPaced { pages: 2000, seconds: 0 }, 2000), metric::KSM_FOR_2_S);
    }
}
