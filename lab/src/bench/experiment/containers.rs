//! WordPress sites in containers of their own, under constant page loads (UKSM, section 8.2.2): how much memory they
//! take when merged, and the cost of merging.

use super::{Experiment, ExperimentSetting, PolicySequence};
use crate::bench::clients::Clients;
use crate::bench::frames::Held;
use crate::bench::latencies::{Histogram, Latencies};
use crate::bench::load::percentile;
use crate::bench::measures::median;
use crate::bench::metric::{CPU_BUSIEST_SECOND, CPU_MEDIAN_SECOND, MEMORY_OF_UNMERGED};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmPaced, NO_MERGING, NoMerging, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::bench::sampler::{SamplerPoint, largest_share, spent_between};
use crate::bench::sampling::SamplingThread;
use crate::programs::{Site, Visitor, WordPress, scratch};
use anyhow::Context;
use pagefold_engine::units::whole;
use pagefold_procmem::process::Process;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "containers",
    claim: "UKSM: of three containers with WordPress under page loads, the anonymous memory is 61 % of that without merging, for mostly \
            less than 1 % of a core, at most 3 %",
    run,
};

const CONTAINERS: usize = 3;
/// Clients of each container.
const CLIENTS: usize = 4;
/// Time between two looks at the memory: a look reads the page tables of some twenty processes.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug)]
struct Sizes {
    workers: usize,
    posts: u64,
    /// Time between two page loads of a container.
    every: Duration,
    seconds: u64,
}

/// Page loads and memory samples beside a policy.
struct Beside {
    clients: Vec<Clients>,
    memory: SamplingThread<Option<(Instant, Held)>>,
}

/// The results for one policy.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Anonymous memory, MiB, on average over time and at the end.
    mean: Held,
    end: Held,
    /// Milliseconds.
    p50: f64,
    p99: f64,
    page_loads: usize,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (workers, posts, rate, seconds) = if setting.quick { (2, 2, 3, 6) } else { (4, 20, 2, 60) };
    report.parameters([
        ("containers", CONTAINERS as u64),
        ("apache_workers", workers),
        ("posts", posts),
        ("page_loads_per_second_each", rate),
        ("seconds", seconds),
    ]);
    let every = Duration::from_nanos(1_000_000_000 / rate);
    let sizes = Sizes { workers: usize::try_from(workers)?, posts, every, seconds };
    let scratch = scratch()?;
    let image = WordPress::make(scratch.path(), sizes.posts)?;

    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(NoMerging { seconds }), Box::new(Pagefold::new(seconds))];
    if !setting.quick {
        policies.push(Box::new(KsmPaced { pages: KSM_PAGES, seconds }));
        policies.push(Box::new(Pagefold::new(seconds).with(&["--governor", "quiet"])));
    }
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut all: Vec<(String, Measured)> = Vec::new();
    for policy in &policies {
        let mut beside = None;
        let run = sequence.run(report, &**policy, || {
            let mut started = Vec::new();
            for number in 0..CONTAINERS {
                setting.interrupt.check()?;
                started.push(image.start(scratch.path(), number, sizes.workers)?);
            }
            beside = Some(Beside::start(&started, sizes.every)?);
            Ok(started.into_iter().flat_map(Site::targets).collect())
        })?;
        let (Some(beside), Some(run)) = (beside, run) else { continue };
        let name = run.policy.clone();
        let began = run.began.context("the run has not begun")?;
        let span = (began, began + Duration::from_secs(sizes.seconds));
        let (measured, latencies, failure) = beside.finish(span).with_context(|| name.clone())?;
        if let Some(failure) = failure {
            eprintln!("{}: {name}: a page load failed: {failure}", EXPERIMENT.name);
            run.answers_correct.during = false;
        }
        report.latencies.push(Latencies {
            policy: name.clone(),
            server: "wordpress".to_owned(),
            when: "under load".to_owned(),
            histogram: latencies,
        });
        all.push((name, measured));
    }
    report.compare(SUBJECT);
    put_figures(report, &all, NO_MERGING);
    if !setting.quick {
        put_bars(report);
    }
    Ok(())
}

impl Beside {
    /// Starts page loads of all containers, and samples their memory.
    fn start(sites: &[Site], every: Duration) -> anyhow::Result<Self> {
        let client = |visitor: Visitor| move |number| visitor.visit(usize::try_from(number)?);
        let clients =
            |site: &Site| Clients::start(every, (0..CLIENTS).map(|_| client(site.visitor())).collect::<Vec<_>>());
        let clients = sites.iter().map(clients).collect();
        let pids = sites.iter().flat_map(Site::pids);
        let processes = pids.map(Process::open).collect::<Result<Vec<_>, _>>()?;
        // The processes end before the sampling does.
        let look = move |_| Ok(Held::by(&processes).ok().map(|held| (Instant::now(), held)));
        Ok(Self { clients, memory: SamplingThread::start(LOOK, look) })
    }

    /// Ends both. Returns the results between two instants, the latencies, and why the first page load failed until
    /// then, if any did.
    fn finish(self, (from, to): (Instant, Instant)) -> anyhow::Result<(Measured, Histogram, Option<String>)> {
        let samples = self.memory.finish()?;
        let within: Vec<Held> =
            samples.into_iter().flatten().filter(|(at, _)| (from..to).contains(at)).map(|(_, held)| held).collect();
        let end = *within.last().context("the memory was not looked at")?;
        let mean = |of: fn(&Held) -> f64| within.iter().map(of).sum::<f64>() / within.len() as f64;
        let mean = Held { by_processes: mean(|held| held.by_processes), in_frames: mean(|held| held.in_frames) };
        let (mut latencies, mut failure) = (Vec::new(), None);
        for clients in self.clients {
            let requests = clients.finish()?;
            latencies.extend(requests.latencies().between(from, to));
            failure = failure.or(requests.failure_before(to).map(str::to_owned));
        }
        latencies.sort_unstable();
        let millis = |share| percentile(&latencies, share).map(|latency| latency.as_secs_f64() * 1e3);
        let (p50, p99) = (millis(0.5).context("no page was loaded")?, millis(0.99).context("no page was loaded")?);
        let measured = Measured { mean, end, p50, p99, page_loads: latencies.len() };
        Ok((measured, Histogram::of(latencies), failure))
    }
}

fn put_figures(report: &mut ExperimentReport, all: &[(String, Measured)], undisturbed: &str) {
    let base = all.iter().find(|(name, _)| name == undisturbed).map(|(_, measured)| *measured);
    for (name, measured) in all {
        report.figure(format!("{name}: MiB of anonymous memory on average"), measured.mean.in_frames);
        report.figure(format!("{name}: MiB of anonymous memory at the end"), measured.end.in_frames);
        report.figure(
            format!("{name}: MiB by process on average, shared pages counted in each"),
            measured.mean.by_processes,
        );
        report.figure(format!("{name}: page loads"), measured.page_loads as f64);
        report.figure(format!("{name}: p50 of a page load, ms"), measured.p50);
        report.figure(format!("{name}: p99 of a page load, ms"), measured.p99);
        if let Some(base) = base.filter(|_| name != undisturbed) {
            report.figure(MEMORY_OF_UNMERGED.of([name]), measured.mean.in_frames / base.mean.in_frames);
            let at_the_end = measured.end.in_frames / base.end.in_frames;
            report.figure(format!("{name}: anonymous memory at the end relative to no merging"), at_the_end);
            report.figure(format!("{name}: p50 relative to no merging"), measured.p50 / base.p50);
            report.figure(format!("{name}: p99 relative to no merging"), measured.p99 / base.p99);
        }
    }
    let merging = report.runs.iter().filter(|run| run.policy != undisturbed);
    let spent: Vec<(String, [f64; 2])> = merging.map(|run| (run.policy.clone(), shares(&run.points))).collect();
    for (name, [usual, most]) in spent {
        report.figure(CPU_MEDIAN_SECOND.of([&name]), usual);
        report.figure(CPU_BUSIEST_SECOND.of([&name]), most);
    }
    let rows = all.iter().map(|(name, measured)| (name.clone(), measured.mean.in_frames)).collect();
    report.picture("anonymous memory of three containers", "MiB; on average over time", rows);
}

/// pagefold's and ksmd's share of a core in the median and in the busiest second, per cent.
fn shares(points: &[SamplerPoint]) -> [f64; 2] {
    let last = points.last().map_or(0.0, |last| last.seconds);
    let second = |second| {
        let from = second as f64;
        let (ksmd, daemon, seconds) = spent_between(points, from, from + 1.0)?;
        Some(100.0 * (ksmd + daemon) / seconds)
    };
    let seconds = (0..whole(last.floor())).filter_map(second);
    [median(seconds), 100.0 * largest_share(points, 1.0)]
}

fn put_bars(report: &mut ExperimentReport) {
    for (metric, limit) in [(MEMORY_OF_UNMERGED, 0.61), (CPU_MEDIAN_SECOND, 1.0), (CPU_BUSIEST_SECOND, 3.0)] {
        report.bar(metric, Limit::AtMost(limit), report.figure_of(metric, [SUBJECT]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_whole_seconds() {
        // Idle, but for half a core in the third of five seconds.
        let points: Vec<SamplerPoint> = (0..=20_u32)
            .map(|at| {
                let seconds = f64::from(at) / 4.0;
                let ksmd_seconds = 0.5 * (seconds - 2.0).clamp(0.0, 1.0);
                SamplerPoint { seconds, ksmd_seconds, ..SamplerPoint::default() }
            })
            .collect();
        let [usual, most] = shares(&points);
        assert!(usual.abs() < 1e-9 && (most - 50.0).abs() < 1e-9, "{usual} {most}");
        assert!(shares(&[])[0].abs() < 1e-9);
    }
}
