//! WordPress sites in containers of their own, under constant page loads (UKSM, section 8.2.2): how much memory they
//! take when merged, and the cost of merging.

use super::{Experiment, ExperimentSetting, PolicySequence};
use crate::bench::clients::Clients;
use crate::bench::frames::{Held, open_all};
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
use anyhow::{Context, ensure};
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

sizes! {
    workers: usize = 4, quick 2, as "apache_workers";
    posts: u64 = 20, quick 2, as "posts";
    /// Page loads a second of each container.
    rate: u64 = 2, quick 3, as "page_loads_per_second_each";
    seconds: u64 = 60, quick 6, as "seconds";
}

/// Page loads and memory samples beside a policy.
struct Beside {
    clients: Vec<Clients>,
    memory: SamplingThread<Option<(Instant, Held)>>,
}

/// The results for one policy.
#[derive(Clone, Debug)]
struct Measured {
    /// Anonymous memory, MiB, on average over time and at the end.
    mean: Held,
    end: Held,
    /// The latencies of page loads, ascending.
    latencies: Vec<Duration>,
    /// Why the first page load failed, if any did.
    failure: Option<String>,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let Sizes { workers, posts, rate, seconds } = Sizes::of(setting, report);
    report.parameters([("containers", CONTAINERS as u64)]);
    let scratch = scratch()?;
    let image = WordPress::make(scratch.path(), posts)?;

    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(NoMerging { seconds }), Box::new(Pagefold::new(seconds))];
    if !setting.quick {
        policies.push(Box::new(KsmPaced { pages: KSM_PAGES, seconds }));
        policies.push(Box::new(Pagefold::new(seconds).with(&["--governor", "quiet"])));
    }
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut base = None;
    let mut rows = Vec::new();
    for policy in &policies {
        let mut beside = None;
        let run = sequence.run(report, &**policy, || {
            let mut sites = Vec::new();
            for number in 0..CONTAINERS {
                setting.interrupt.check()?;
                sites.push(image.start(scratch.path(), number, workers)?);
            }
            beside = Some(Beside::start(&sites, Duration::from_nanos(1_000_000_000 / rate))?);
            Ok(sites.into_iter().flat_map(Site::targets).collect())
        })?;
        let (Some(beside), Some(run)) = (beside, run) else { continue };
        let name = run.policy.clone();
        let began = run.began.context("the run has not begun")?;
        let measured = beside.finish(began, began + Duration::from_secs(seconds)).with_context(|| name.clone())?;
        if let Some(failure) = &measured.failure {
            eprintln!("{}: {name}: a page load failed: {failure}", EXPERIMENT.name);
            run.answers_correct.during = false;
        }
        report.latencies.push(Latencies {
            policy: name.clone(),
            server: "wordpress".to_owned(),
            when: "under load".to_owned(),
            histogram: Histogram::of(measured.latencies.iter().copied()),
        });
        put_figures(report, &name, &measured, base.as_ref());
        rows.push((name.clone(), measured.mean.in_frames));
        if name == NO_MERGING {
            base = Some(measured);
        }
    }
    report.compare(SUBJECT);
    report.picture("anonymous memory of three containers", "MiB; on average over time", rows);
    if !setting.quick {
        put_bars(report);
    }
    Ok(())
}

impl Beside {
    /// Starts page loads of all containers, and samples their memory.
    fn start(sites: &[Site], every: Duration) -> anyhow::Result<Self> {
        let mut clients = Vec::new();
        for site in sites {
            let visitors: Vec<Visitor> = (0..CLIENTS).map(|_| site.visitor()).collect();
            let visits = visitors.into_iter().map(|visitor| move |number| visitor.visit(usize::try_from(number)?));
            clients.push(Clients::start(every, visits));
        }
        let processes = open_all(sites.iter().flat_map(Site::pids))?;
        let memory = SamplingThread::start(LOOK, move |_| {
            // Looking fails at the end: the processes end before the sampling does.
            let held = Held::by(&processes).ok();
            Ok(held.map(|held| (Instant::now(), held)))
        });
        Ok(Self { clients, memory })
    }

    /// Ends both. Returns the results between two instants.
    fn finish(self, from: Instant, to: Instant) -> anyhow::Result<Measured> {
        let mut within = Vec::new();
        for (at, held) in self.memory.finish()?.into_iter().flatten() {
            if (from..to).contains(&at) {
                within.push(held);
            }
        }
        let end = *within.last().context("the memory was not looked at")?;
        let mut latencies = Vec::new();
        let mut failure = None;
        for clients in self.clients {
            let requests = clients.finish()?;
            latencies.extend(requests.latencies().between(from, to));
            failure = failure.or(requests.failure_before(to).map(str::to_owned));
        }
        ensure!(!latencies.is_empty(), "no page was loaded");
        latencies.sort_unstable();
        Ok(Measured { mean: Held::mean(&within), end, latencies, failure })
    }
}

impl Measured {
    /// The milliseconds that this share of the page loads didn't exceed.
    fn ms(&self, share: f64) -> f64 {
        percentile(&self.latencies, share).unwrap_or_default().as_secs_f64() * 1e3
    }
}

/// `base` has the results without merging.
fn put_figures(report: &mut ExperimentReport, name: &str, measured: &Measured, base: Option<&Measured>) {
    let p50 = measured.ms(0.5);
    let p99 = measured.ms(0.99);
    let Held { by_processes, in_frames } = measured.mean;
    report.figure(format!("{name}: MiB of anonymous memory on average"), in_frames);
    report.figure(format!("{name}: MiB of anonymous memory at the end"), measured.end.in_frames);
    report.figure(format!("{name}: MiB by process on average, shared pages counted in each"), by_processes);
    report.figure(format!("{name}: page loads"), measured.latencies.len() as f64);
    report.figure(format!("{name}: p50 of a page load, ms"), p50);
    report.figure(format!("{name}: p99 of a page load, ms"), p99);
    if let Some(base) = base {
        report.figure(MEMORY_OF_UNMERGED.of([name]), in_frames / base.mean.in_frames);
        let at_the_end = measured.end.in_frames / base.end.in_frames;
        report.figure(format!("{name}: anonymous memory at the end relative to no merging"), at_the_end);
        report.figure(format!("{name}: p50 relative to no merging"), p50 / base.ms(0.5));
        report.figure(format!("{name}: p99 relative to no merging"), p99 / base.ms(0.99));
    }
    if let (Some(run), true) = (report.run(name), name != NO_MERGING) {
        let [usual, most] = shares(&run.points);
        report.figure(CPU_MEDIAN_SECOND.of([name]), usual);
        report.figure(CPU_BUSIEST_SECOND.of([name]), most);
    }
}

/// pagefold's and ksmd's share of a core in the median and in the busiest second, per cent.
fn shares(points: &[SamplerPoint]) -> [f64; 2] {
    let mut shares = Vec::new();
    let mut from = 0.0;
    while points.last().is_some_and(|last| from + 1.0 <= last.seconds) {
        if let Some((ksmd, daemon, seconds)) = spent_between(points, from, from + 1.0) {
            shares.push(100.0 * (ksmd + daemon) / seconds);
        }
        from += 1.0;
    }
    [median(shares), 100.0 * largest_share(points, 1.0)]
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
