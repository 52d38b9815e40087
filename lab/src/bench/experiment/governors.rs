//! The governors: the share of a core each takes, and the time each takes for the same work (UKSM's static mix,
//! smaller). We measure the CPU time of pagefold, its injector and ksmd from outside.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::metric;
use crate::bench::policy::{Enough, Pagefold};
use crate::bench::report::{ExperimentReport, Limit};
use crate::bench::sampler::largest_share;
use crate::tenant::Segment;

pub const EXPERIMENT: Experiment = Experiment {
    name: "governors",
    claim: "UKSM: full, medium, low and quiet take at most 95, 50, 20 and 1 % of a core; each step halves the CPU and \
            doubles the time of a round",
    run,
};

/// Names and shares of a core, fastest first.
const GOVERNORS: [(&str, f64); 4] = [(metric::FULL, 0.95), ("medium", 0.50), ("low", 0.20), (metric::QUIET, 0.01)];

/// Shares must hold over this length of time.
const WINDOW_SECONDS: f64 = 10.0;

/// Tolerances, as a part of the share and in seconds per window: ksmd's CPU time lags by up to a tick, and a sample
/// takes its readings one after another.
const ERROR_OF_SHARE: f64 = 0.05;
const ERROR_SECONDS: f64 = 0.02;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    // With one per cent of a core, 512 MiB would take a quarter of an hour.
    let (size_mib, quiet_mib, least, most) = if setting.quick { (32, 8, 3, 20) } else { (512, 64, 15, 600) };
    let governors = if setting.quick { &GOVERNORS[..3] } else { &GOVERNORS[..] };
    report.parameters([("same_mib", size_mib), ("random_mib", size_mib), ("seconds_at_least", least)]);
    if !setting.quick {
        report.parameters([("same_mib_quiet", quiet_mib), ("random_mib_quiet", quiet_mib)]);
    }
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let mut faster: Option<(&str, f64)> = None;
    for &(governor, share) in governors {
        let mib_now = if governor == metric::QUIET { quiet_mib } else { size_mib };
        let pages = mib(mib_now).0;
        let segments = [Segment::Same { pages, seed: 1 }, Segment::Random { pages, seed: 2 }];
        let whole = mib(mib_now).bytes().0;
        let enough = Enough { saved_bytes: whole - whole / 100, seconds: least };
        let policy = Pagefold::new(most).with(&["--governor", governor]).until(enough);
        let start = || setting.tenants(&segments);
        let Some(run) = sequence.run(report, &policy, start)?.cloned() else { continue };
        let over_ten = largest_share(&run.points, WINDOW_SECONDS);
        let over_one = largest_share(&run.points, 1.0);
        report.figure(metric::LARGEST_SHARE.of([governor, "10"]), 100.0 * over_ten);
        report.figure(metric::LARGEST_SHARE.of([governor, "1"]), 100.0 * over_one);
        rows.push((format!("{governor}, of {:.0} % allowed", 100.0 * share), 100.0 * over_ten));
        if let Some(point) = run.reaching(0.9, whole) {
            // Scaled to the same amount of work.
            let scaled = point.seconds * size_mib as f64 / mib_now as f64;
            report.figure(format!("{governor}: seconds to 90 % of {mib_now} MiB"), point.seconds);
            if let Some((before, seconds)) = faster.replace((governor, scaled)) {
                let note = if mib_now == size_mib { "" } else { ", scaled by size" };
                report.put_ratio(format!("seconds to 90 %, {governor} of {before}{note}"), scaled / seconds);
            }
        }
        if setting.quick {
            continue;
        }
        let saved = run.saved_bytes_max as f64 / whole as f64;
        report.bar(format!("{governor}: share saved of the possible savings"), Limit::AtLeast(0.9), Some(saved));
        let limit = 100.0 * (share * (1.0 + ERROR_OF_SHARE) + ERROR_SECONDS / WINDOW_SECONDS);
        let name = format!(
            "{governor}: per cent of a core over any 10 s ({:.0} % allowed; sampling error 5 % of it and 20 ms)",
            100.0 * share
        );
        report.bar(name, Limit::AtMost(limit), Some(100.0 * over_ten));
    }
    let subtitle = "largest share of a core over any 10 s, per cent; pagefold, its injector and ksmd";
    report.picture("CPU of the governors", subtitle, rows);
    Ok(())
}
