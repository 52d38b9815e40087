//! UKSM's short-lived memory (section 8.1.3): a program maps 500 MB, fills all pages alike, sleeps T, unmaps it, sleeps
//! T, and again. The daemon is there first. What was merged is what the program sees of its own pages just before it
//! unmaps them.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::daemon;
use crate::bench::policy::SUBJECT;
use crate::bench::report::{Answers, ExperimentReport, Limit, Picture, PolicyRun};
use crate::bench::sampler::Sampler;
use anyhow::{Context, ensure};
use pagefold_core::units::Pages;
use pagefold_linux::ksm::Knob;
use pagefold_workload::Activity;
use pagefold_workload::{Tenant, TenantSpec, Verdict};
use std::time::{Duration, Instant};

/// See the module's opening.
pub const EXPERIMENT: Experiment = Experiment {
    name: "short-lived",
    claim: "UKSM: 500 MB that live and rest for T: ignored by default; set to be sensitive, almost all is merged at T = 0.2 s, \
            where KSM at 2000 pages per 20 ms merges none below 2 s (asked: nothing marked; 90 % at T = 2 s)",
    run,
};

/// The daemon runs for so long before the memory appears.
const HEAD_START: Duration = Duration::from_secs(2);

/// A life takes this much longer than T, on a busy machine: mapping, filling, looking, unmapping.
const WORK: Duration = Duration::from_secs(4);

/// Who folds.
#[derive(Clone, Copy, Debug)]
enum Who {
    /// pagefold, with these options.
    Daemon(&'static [&'static str]),
    /// KSM, so many pages per 20 ms, on memory that marks itself.
    Ksm(u64),
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, cycles) = if setting.quick { (64, 2) } else { (500, 6) };
    report.parameters.extend([("same_mib", size_mib), ("cycles", cycles)]);
    let pages = mib(size_mib);
    let (by_default, sensitive) = (Who::Daemon(&[]), Who::Daemon(&["--preset", "sensitive"]));
    let plan: &[(Who, &[u64])] = if setting.quick {
        &[(by_default, &[500]), (sensitive, &[500]), (Who::Ksm(2000), &[500])]
    } else {
        &[(by_default, &[500, 1000, 2000]), (sensitive, &[4000, 2000, 1000, 500, 250]), (Who::Ksm(2000), &[2000, 1000])]
    };
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let (mut marked, mut merged, mut at_two, mut smallest): (Option<f64>, Option<f64>, _, Option<u64>) =
        (None, None, None, None);
    for &(who, lives) in plan {
        for &life_ms in lives {
            let name = format!("{}, T = {} s", name(who), life_ms as f64 / 1000.0);
            if !setting.wants(&name) {
                continue;
            }
            eprintln!("{}: {name}", report.experiment);
            let run = match live_through(&mut sequence, &name, who, pages, life_ms, cycles) {
                Ok(done) => done,
                Err(error) => {
                    // It may have ended anywhere.
                    sequence.control.unmerge()?;
                    sequence.failed(report, name, &error)?;
                    continue;
                }
            };
            let shares: Vec<f64> = run.lives.iter().map(|life| life.merged_pages as f64 / pages.0 as f64).collect();
            let share = median(shares.clone());
            let best = shares.into_iter().fold(0.0, f64::max);
            report.figure(format!("share merged, {name}"), share);
            report.figure(format!("share merged at best, {name}"), best);
            rows.push((name, share));
            match who {
                Who::Daemon([]) => {
                    let spans = run.summary.as_ref().and_then(|summary| summary["marked_spans"].as_f64());
                    marked = Some(marked.unwrap_or(0.0).max(spans.context("a summary without marked_spans")?));
                    merged = Some(merged.unwrap_or(0.0).max(best));
                }
                Who::Daemon(_) => {
                    at_two = if life_ms == 2000 { Some(share) } else { at_two };
                    if share >= 0.5 {
                        smallest = Some(smallest.map_or(life_ms, |smallest: u64| smallest.min(life_ms)));
                    }
                }
                Who::Ksm(_) => {}
            }
            report.runs.push(run);
        }
    }
    drop(sequence);
    report.bar_on_answers();
    report.pictures.push(Picture {
        name: "merged",
        title: "merged of memory that lives for T".to_owned(),
        subtitle: format!("share of {size_mib} MiB just before it is unmapped, median of {cycles} lives"),
        rows,
    });
    if let Some(smallest) = smallest {
        report.figure("smallest T at which half is merged, sensitive, s", smallest as f64 / 1000.0);
    }
    report.bar("default: spans marked", Limit::AtMost(0.0), marked);
    report.bar("default: share merged at best", Limit::AtMost(0.0), merged);
    if !setting.quick {
        report.bar("sensitive: share merged at T = 2 s", Limit::AtLeast(0.9), at_two);
    }
    Ok(())
}

fn name(who: Who) -> String {
    match who {
        Who::Daemon(options) => [&[SUBJECT], options].concat().join(" "),
        Who::Ksm(pages) => format!("ksm-{pages}/20ms"),
    }
}

/// So many lives with somebody folding from before the first one on.
fn live_through(
    sequence: &mut PolicySequence<'_>,
    name: &str,
    who: Who,
    pages: Pages,
    life_ms: u64,
    cycles: u64,
) -> anyhow::Result<PolicyRun> {
    let (program, interrupt) = (sequence.setting.program, sequence.setting.interrupt);
    let mergeable = matches!(who, Who::Ksm(_));
    let activity = Activity::ShortLived { pages: pages.0, seed: 10, life_us: life_ms * 1000, mergeable };
    let mut tenant = Tenant::start(sequence.setting.player, &TenantSpec::new([]).with_activity(activity))?;
    let mut run = PolicyRun { policy: name.to_owned(), ..PolicyRun::default() };
    run.answers_correct.before = tenant.verify()? == Verdict::Intact;
    sequence.control.kernel_defaults()?;
    let sampler = Sampler::start()?;
    let daemon = match who {
        Who::Daemon(options) => {
            let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
            let daemon = daemon::run(program, &[tenant.pid()], &options)?;
            sampler.watch(daemon.meter()?);
            interrupt.sleep(HEAD_START)?;
            Some(daemon)
        }
        Who::Ksm(pages) => {
            sequence.control.set(Knob::PagesToScan, pages)?;
            sequence.control.set(Knob::Run, 1)?;
            None
        }
    };
    tenant.begin()?;
    let cycle = Duration::from_millis(2 * life_ms);
    interrupt.sleep(cycle * u32::try_from(cycles)?)?;
    // Asked rarely: an answer makes a life longer.
    let mut counters = tenant.counters()?;
    let end = Instant::now() + WORK * u32::try_from(cycles)?;
    while (counters.lives.len() as u64) < cycles && Instant::now() < end {
        interrupt.sleep(cycle.min(Duration::from_millis(500)))?;
        counters = tenant.counters()?;
    }
    let ended = daemon.map(|daemon| daemon.end(interrupt)).transpose();
    let points = sampler.finish();
    run.answers_correct = Answers { during: tenant.verify()? == Verdict::Intact, ..run.answers_correct };
    sequence.control.unmerge()?;
    run.answers_correct.after = tenant.verify()? == Verdict::Intact;
    if let Some(ran) = ended? {
        run.cpu_pagefold_seconds = ran.cpu_seconds;
        run.summary = Some(ran.summary);
    }
    run.set_samples(&points?);
    // KSM's counters go on counting what was unmapped until ksmd passes again: they say nothing here.
    (run.curve, run.seconds_to_90_percent, run.cpu_ksmd_seconds_to_90_percent) = (Vec::new(), None, None);
    let bytes = |pages: f64| Pages(whole(pages)).bytes().0;
    let merged: Vec<f64> = counters.lives.iter().map(|life| life.merged_pages as f64).collect();
    run.saved_bytes_max = bytes(merged.iter().copied().fold(0.0, f64::max));
    run.saved_bytes = bytes(median(merged));
    ensure!(!counters.lives.is_empty(), "no life has ended");
    run.lives = counters.lives;
    Ok(run)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of pages")]
fn whole(pages: f64) -> u64 {
    pages as u64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[odd / 2],
        even => f64::midpoint(values[even / 2 - 1], values[even / 2]),
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    #[test]
    fn medians_lie_in_the_middle() {
        assert_eq!((median(vec![]), median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (0.0, 2.0, 2.5));
    }

    #[test]
    fn names_tell_who_folds() {
        assert_eq!(
            [Who::Daemon(&[]), Who::Daemon(&["--preset", "sensitive"]), Who::Ksm(2000)].map(name),
            ["pagefold", "pagefold --preset sensitive", "ksm-2000/20ms"]
        );
    }
}
