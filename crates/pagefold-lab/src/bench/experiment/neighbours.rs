//! What the programs beside a policy feel: the latencies of a redis server under a fixed open load, and the speed of a compression, on
//! the cores that ksmd and pagefold use too, while memory is merged and when that is done. The server is one of the programs
//! whose memory is merged, so its own writes to merged pages count.

use super::{Experiment, ExperimentSetting, PolicySequence, median, mib, shuffled, sort_runs};
use crate::bench::load::{Compressed, Compression, Latencies, percentile};
use crate::bench::policy::{Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun, in_round};
use crate::programs::{RedisData, Target, need, scratch};
use anyhow::Context;
use pagefold_workload::Segment;
use pagefold_workload::contents::printable;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "neighbours",
    claim: "ours: the 99th percentile of a server's latencies is at most 1.10 of undisturbed while memory is merged beside it, and at \
            most 1.01 at rest (KSM: 1.6 to 5.8 times, Para-ksm, ATC 2025)",
    run,
};

const INSTANCES: usize = 3;
/// The order of the policies in each round follows from it, unless another one is asked for.
const SEED: u64 = 15;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    rounds: u64,
    keys: u64,
    mebibytes: u64,
    /// Requests a second.
    rate: u64,
    /// Time while memory is merged, time until nothing is left to merge, and time at rest, seconds.
    merging: u64,
    settling: u64,
    resting: u64,
}

/// One of the two windows in which the programs are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Window {
    Merging,
    Rest,
}

impl Window {
    const ALL: [(Self, &'static str); 2] = [(Self::Merging, "while merging"), (Self::Rest, "at rest")];
}

/// What the programs felt in one window.
#[derive(Clone, Copy, Debug)]
struct Felt {
    /// Microseconds.
    p50: f64,
    p99: f64,
    p999: f64,
    compression: f64,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = if setting.quick {
        Sizes { rounds: 1, keys: 5_000, mebibytes: 16, rate: 1_000, merging: 3, settling: 1, resting: 2 }
    } else {
        Sizes { rounds: 3, keys: 50_000, mebibytes: 256, rate: 3_000, merging: 10, settling: 10, resting: 15 }
    };
    report.parameters([
        ("rounds", sizes.rounds),
        ("redis_keys", sizes.keys),
        ("same_mib", sizes.mebibytes),
        ("random_mib", sizes.mebibytes),
        ("requests_per_second", sizes.rate),
        ("seconds_while_merging", sizes.merging),
        ("seconds_at_rest", sizes.resting),
        ("seed", SEED),
    ]);
    need("gzip", "gzip")?;
    let scratch = scratch()?;
    let redis = RedisData::make(scratch.path(), sizes.keys)?;
    let text = scratch.path().join("text");
    fs::write(&text, printable(SEED, 0, 2 << 20))?;

    let seconds = sizes.merging + sizes.settling + sizes.resting;
    let undisturbed = Policy::NoMerging { seconds };
    let mut policies = vec![
        Policy::pagefold(seconds),
        undisturbed.clone(),
        Policy::KsmPaced { pages: 1000, seconds },
        Policy::pagefold_with(seconds, &["--governor", "quiet"]),
    ];
    if !setting.quick {
        policies.push(Policy::pagefold_with(seconds, &["--governor", "auto"]));
        policies.push(Policy::KsmAdvisor { seconds });
    }
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut felt: BTreeMap<(String, Window), Vec<Felt>> = BTreeMap::new();
    let mut ratios: BTreeMap<(String, Window), Vec<f64>> = BTreeMap::new();
    for round in 0..sizes.rounds {
        let order = setting.order.unwrap_or(SEED).wrapping_add(round);
        let mut measured: BTreeMap<(String, Window), Felt> = BTreeMap::new();
        for policy in shuffled(&policies, Some(order)) {
            let load = RefCell::new(None);
            let before = report.runs.len();
            sequence.run(report, policy, || {
                let mut targets: Vec<Box<dyn Target>> = Vec::new();
                for instance in 0..INSTANCES {
                    let server = redis.start(scratch.path(), instance)?;
                    if instance == 0 {
                        let every = Duration::from_nanos(1_000_000_000 / sizes.rate);
                        load.replace(Some((server.load(every, sizes.keys)?, Compression::start(text.clone())?)));
                    }
                    targets.push(Box::new(server));
                }
                let pages = mib(sizes.mebibytes).0;
                targets.push(setting.tenant(Segment::Same { pages, seed: 1 })?);
                targets.push(setting.tenant(Segment::Random { pages, seed: 2 })?);
                Ok(targets)
            })?;
            // The servers have ended, and the requests with them.
            let Some((requests, compression)) = load.into_inner() else { continue };
            let (latencies, compressed) = (requests.finish()?, compression.finish()?);
            let Some(run) = report.runs.get_mut(before) else { continue };
            correct_cpu(run);
            let name = run.policy.clone();
            for (window, _) in Window::ALL {
                let felt = felt_in(window, run, &sizes, &latencies, &compressed)
                    .with_context(|| format!("{name}: nothing was measured"))?;
                measured.insert((name.clone(), window), felt);
            }
            run.policy = in_round(&name, round + 1);
        }
        for ((name, window), one) in measured.clone() {
            if let Some(base) =
                measured.get(&(undisturbed.to_string(), window)).filter(|_| name != undisturbed.to_string())
            {
                ratios.entry((name.clone(), window)).or_default().push(one.p99 / base.p99);
            }
            felt.entry((name, window)).or_default().push(one);
        }
    }
    drop(sequence);
    // By round, and in it in the order above.
    let names: Vec<String> = (1..=sizes.rounds)
        .flat_map(|round| policies.iter().map(move |policy| in_round(&policy.to_string(), round)))
        .collect();
    sort_runs(report, &names);
    put_figures(report, &felt, &ratios);
    report.bar_on_answers();
    if !setting.quick {
        for (window, limit) in [(Window::Merging, 1.10), (Window::Rest, 1.01)] {
            let ratio = ratios.get(&(SUBJECT.to_owned(), window)).map(|ratios| median(ratios.clone()));
            let words = Window::ALL.iter().find(|(which, _)| *which == window).map_or("", |(_, words)| words);
            report.bar(format!("99th percentile {words} relative to undisturbed"), Limit::AtMost(limit), ratio);
        }
    }
    Ok(())
}

/// pagefold's CPU time by its own clock: that of children that have ended includes the compression's.
fn correct_cpu(run: &mut PolicyRun) {
    run.cpu_pagefold_seconds = run.points.last().map_or(0.0, |last| last.daemon_seconds);
    let points = std::mem::take(&mut run.points);
    run.set_samples(&points);
}

fn felt_in(
    window: Window,
    run: &PolicyRun,
    sizes: &Sizes,
    latencies: &Latencies,
    compressed: &Compressed,
) -> Option<Felt> {
    let began: Instant = run.began?;
    let (from, seconds) = match window {
        Window::Merging => (began, sizes.merging),
        Window::Rest => (began + Duration::from_secs(sizes.merging + sizes.settling), sizes.resting),
    };
    let to = from + Duration::from_secs(seconds);
    let ascending = latencies.between(from, to);
    let micros = |share| percentile(&ascending, share).map(|latency| latency.as_secs_f64() * 1e6);
    Some(Felt {
        p50: micros(0.5)?,
        p99: micros(0.99)?,
        p999: micros(0.999)?,
        compression: compressed.mib_per_second(from, to)?,
    })
}

fn put_figures(
    report: &mut ExperimentReport,
    felt: &BTreeMap<(String, Window), Vec<Felt>>,
    ratios: &BTreeMap<(String, Window), Vec<f64>>,
) {
    for (window, words) in Window::ALL {
        let mut rows = Vec::new();
        for ((name, _), all) in felt.iter().filter(|((_, which), _)| *which == window) {
            let middle = |value: fn(&Felt) -> f64| median(all.iter().map(value).collect());
            report.figure(format!("{name} p50 us {words}"), middle(|felt| felt.p50));
            report.figure(format!("{name} p99 us {words}"), middle(|felt| felt.p99));
            report.figure(format!("{name} p99.9 us {words}"), middle(|felt| felt.p999));
            report.figure(format!("{name} compression MiB/s {words}"), middle(|felt| felt.compression));
            rows.push((name.clone(), middle(|felt| felt.p99)));
        }
        for ((name, _), all) in ratios.iter().filter(|((_, which), _)| *which == window) {
            report.figure(format!("{name} p99 of undisturbed {words}, median"), median(all.clone()));
            report.figure(
                format!("{name} p99 of undisturbed {words}, lowest"),
                all.iter().copied().fold(f64::MAX, f64::min),
            );
            report
                .figure(format!("{name} p99 of undisturbed {words}, highest"), all.iter().copied().fold(0.0, f64::max));
        }
        let (file, title) = match window {
            Window::Merging => ("p99-merging", "99th percentile of redis' latency while memory is merged"),
            Window::Rest => ("p99-rest", "99th percentile of redis' latency when that is done"),
        };
        report.picture(file, title, "microseconds; median of the rounds".to_owned(), rows);
    }
}
