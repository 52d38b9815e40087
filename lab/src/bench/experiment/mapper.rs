//! The effect on a program that constantly maps and unmaps memory: to read its memory, we take its `mmap_lock`.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, mib, quotient};
use crate::activity::Activity;
use crate::bench::policy::{NO_MERGING, NoMerging, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::tenant::Segment;

pub const EXPERIMENT: Experiment = Experiment {
    name: "mapper",
    claim: "a program that maps and unmaps without a pause keeps at least 0.95 of its speed while it is sampled and merged",
    run,
};

/// Turns with and without merging alternate, so that other load affects both.
const TURNS: usize = 3;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, seconds) = if setting.quick { (32, 4) } else { (1024, 20) };
    report.parameters([("shared_mib", size_mib), ("map_pages", 16), ("seconds", seconds)]);
    let segment = Segment::Shared { pages: mib(size_mib).0, seed: 13 };
    let mut sequence = PolicySequence::take(setting)?;
    for _ in 0..if setting.quick { 1 } else { TURNS } {
        let policies: [&dyn Policy; 2] = [&NoMerging { seconds }, &Pagefold::new(seconds)];
        for policy in policies {
            sequence.run(report, policy, || start(setting, segment))?;
        }
    }
    let baseline = speeds(report, NO_MERGING);
    let merged = speeds(report, SUBJECT);
    let on_average = quotient(mean(&merged), mean(&baseline));
    let in_slowest = quotient(slowest(&merged), slowest(&baseline));
    for (name, ratio) in [("on average", on_average), ("in the slowest second", in_slowest)] {
        if let Some(ratio) = ratio {
            report.figure(format!("the mapper's speed {name}, of that without merging"), ratio);
        }
    }
    for (name, speeds) in [("without merging", &baseline), (SUBJECT, &merged)] {
        if let Some(mean) = mean(speeds) {
            report.figure(format!("{name}: maps a second"), mean * 10.0);
        }
    }
    if !setting.quick {
        report.bar("the mapper's speed relative to that without merging", Limit::AtLeast(0.95), on_average);
    }
    Ok(())
}

/// Starts the mapper and a program with the same contents.
fn start(setting: &ExperimentSetting<'_>, segment: Segment) -> anyhow::Result<Targets> {
    let spec = Activity::Mapper { pages: 16 }.of_tenant([segment]);
    let copy = setting.tenant(segment)?;
    Ok(vec![setting.active_tenant(&spec)?, copy])
}

/// How many times the tenant mapped memory in each tenth of a second of a policy's runs.
fn speeds(report: &ExperimentReport, policy: &str) -> Vec<u64> {
    let mut maps = Vec::new();
    for run in &report.runs {
        match run.counters.first() {
            Some((_, after)) if run.policy == policy => maps.extend(&after.maps),
            _ => {}
        }
    }
    maps
}

fn mean(speeds: &[u64]) -> Option<f64> {
    if speeds.is_empty() { None } else { Some(speeds.iter().sum::<u64>() as f64 / speeds.len() as f64) }
}

/// The smallest mean of ten consecutive tenths.
fn slowest(speeds: &[u64]) -> Option<f64> {
    speeds.windows(10).filter_map(mean).min_by(f64::total_cmp)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn the_slowest_second_is_ten_consecutive_tenths() {
        let mut speeds = vec![100; 30];
        speeds[7..12].fill(0);
        assert_eq!(slowest(&speeds), Some(50.0));
        assert_eq!(mean(&[1, 2]), Some(1.5));
        assert_eq!((slowest(&speeds[..9]), mean(&[])), (None, None));
    }
}
