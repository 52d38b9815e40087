//! UKSM's copy-on-write breaker (section 8.1.2): a program rewrites the pages of memory with one content, one every 10
//! ms. We count merged pages in the page tables, since KSM's counters lag when COW breaks merges.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::activity::Activity;
use crate::bench::metric;
use crate::bench::page_tables::mean_saved_bytes;
use crate::bench::policy::{KsmSteered, NoMerging, Pagefold};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun};
use crate::tenant::Segment;
use pagefold_engine::units::{Permyriad, whole};

pub const EXPERIMENT: Experiment = Experiment {
    name: "cow-breaker",
    claim: "UKSM: 2 GiB, one whole page written every 10 ms with the same content, in order: left alone by default; with the \
            filter off and equal CPU of 2, 10 and 20 % KSM saves a third to a fifth (required: at most a fifth, on average)",
    run,
};

/// Lower limit for KSM's savings, so that the ratio is finite.
const LEAST_SAVED: f64 = 1_048_576.0;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, seconds) = match (setting.quick, setting.emulated) {
        (true, _) => (32, 3),
        (_, true) => (512, 60),
        _ => (2048, 60),
    };
    let every_us = 10_000;
    report.parameters([("same_mib", size_mib), ("write_every_us", every_us), ("seconds", seconds)]);
    let spec = Activity::Breaker { every_us }.of_tenant([Segment::Same { pages: mib(size_mib).0, seed: 9 }]);
    let mut sequence = PolicySequence::take(setting)?;
    sequence.exact = true;
    let start = || Ok(vec![setting.active_tenant(&spec)?]);
    let baseline = sequence.run(report, &NoMerging { seconds }, start)?.and_then(|run| writing(run));
    if let Some(run) = sequence.run(report, &Pagefold::new(seconds), start)?.cloned() {
        left_alone(setting, report, &run, mib(size_mib).0, baseline);
    }

    let shares: &[u64] = if setting.quick { &[10] } else { &[2, 10, 20] };
    let mut ratios = Vec::new();
    let mut rows = Vec::new();
    for &percent in shares {
        let ours = Pagefold::new(seconds).with(&["--cow-threshold", "100", "--top-share", &percent.to_string()]);
        let Some(own) = sequence.run(report, &ours, start)?.cloned() else { continue };
        // KSM gets the share that pagefold took, not the share it may take.
        let theirs = KsmSteered { share: taken(&own), seconds };
        let Some(peer) = sequence.run(report, &theirs, start)?.cloned() else { continue };
        let own_mean = mean_saved_bytes(&own.in_page_tables);
        let peer_mean = mean_saved_bytes(&peer.in_page_tables);
        let ratio = own_mean / peer_mean.max(LEAST_SAVED);
        for (name, value) in [
            ("MiB saved on average, pagefold", own_mean / LEAST_SAVED),
            ("MiB saved on average, KSM", peer_mean / LEAST_SAVED),
            ("MiB saved at the end, pagefold", saved_at_end(&own) / LEAST_SAVED),
            ("MiB saved at the end, KSM", saved_at_end(&peer) / LEAST_SAVED),
            ("CPU, per cent of a core, pagefold", 100.0 * own.cpu_seconds / own.seconds),
            ("CPU, per cent of a core, KSM", 100.0 * peer.cpu_seconds / peer.seconds),
            ("saved on average, against KSM", ratio),
            ("saved at the end, against KSM", saved_at_end(&own) / saved_at_end(&peer).max(LEAST_SAVED)),
        ] {
            report.figure(format!("top share {percent} %: {name}"), value);
        }
        rows.push((format!("pagefold, {percent} %"), own_mean / LEAST_SAVED));
        rows.push((format!("KSM, as {percent} %"), peer_mean / LEAST_SAVED));
        ratios.push(ratio);
    }
    let subtitle = format!("MiB on average over {seconds} s, from the page tables");
    report.picture("memory saved at equal CPU, with the filter off", subtitle, rows);
    if !setting.quick {
        report.bar(metric::SAVED_UNFILTERED, Limit::AtLeast(5.0), ratios.into_iter().reduce(f64::min));
    }
    Ok(())
}

/// Adds the figures and bars of the default settings: how much we merge, and the effect on the writer.
fn left_alone(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    run: &PolicyRun,
    pages: u64,
    baseline: Option<Writing>,
) {
    let shares: Vec<f64> = run.in_page_tables.iter().map(|sample| sample.merged_pages as f64 / pages as f64).collect();
    report.figure("default: share merged at most", shares.iter().copied().fold(0.0, f64::max));
    let at_end = shares.last().copied();
    if let Some(at_end) = at_end {
        report.figure(metric::MERGED_AT_END, at_end);
    }
    let writing = writing(run);
    for (name, writing) in [("without merging", baseline), ("default", writing)] {
        if let Some(Writing { pages_per_second, us_per_page, latest_us }) = writing {
            report.figure(format!("{name}: pages written a second"), pages_per_second);
            report.figure(format!("{name}: us to write a page"), us_per_page);
            report.figure(format!("{name}: the latest write, us late"), latest_us);
        }
    }
    if setting.quick {
        return;
    }
    report.bar(metric::MERGED_AT_END, Limit::AtMost(0.01), at_end);
    if let (Some(own), Some(baseline)) = (writing, baseline) {
        let speed = own.pages_per_second / baseline.pages_per_second;
        report.bar("default: the writer's speed relative to that without merging", Limit::AtLeast(0.99), Some(speed));
    }
}

/// The speed of a writer during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Writing {
    pages_per_second: f64,
    us_per_page: f64,
    latest_us: f64,
}

fn writing(run: &PolicyRun) -> Option<Writing> {
    let (before, after) = run.counters.first()?;
    let pages = (after.pages_written - before.pages_written) as f64;
    let seconds = after.seconds - before.seconds;
    if pages <= 0.0 || seconds <= 0.0 {
        return None;
    }
    Some(Writing {
        pages_per_second: pages / seconds,
        us_per_page: (after.writing_seconds - before.writing_seconds) * 1e6 / pages,
        latest_us: after.latest_us,
    })
}

fn saved_at_end(run: &PolicyRun) -> f64 {
    run.in_page_tables.last().map_or(0.0, |sample| sample.saved_bytes as f64)
}

/// The share of a core that a run took.
fn taken(run: &PolicyRun) -> Permyriad {
    Permyriad::of(whole(run.cpu_seconds * 1e6), whole(run.seconds * 1e6))
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;
    use pagefold_report::activity::ActivityCounters;

    #[test]
    fn a_writers_speed_is_over_the_time_between_two_answers() {
        let counters = |seconds, pages_written, writing_seconds| ActivityCounters {
            seconds,
            pages_written,
            writing_seconds,
            latest_us: 70.0,
            ..ActivityCounters::default()
        };
        let counters = vec![(counters(10.0, 1000, 0.5), counters(20.0, 1990, 0.995))];
        let run = PolicyRun { counters, cpu_seconds: 0.25, seconds: 10.0, ..PolicyRun::default() };
        let writing = writing(&run).unwrap();
        assert_eq!((writing.pages_per_second, writing.latest_us), (99.0, 70.0));
        assert!((writing.us_per_page - 500.0).abs() < 1e-6);
        assert_eq!(taken(&run), Permyriad(250));
        assert_eq!(super::writing(&PolicyRun::default()), None);
    }
}
