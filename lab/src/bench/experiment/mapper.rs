//! The effect on a program that constantly maps and unmaps memory: to read its memory, we take its `mmap_lock`.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::policy::{NO_MERGING, NoMerging, Pagefold, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun};
use crate::programs::Target;
use pagefold_workload::{Activity, Segment, Tenant, TenantSpec};

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
    let held = || TenantSpec::new([Segment::Shared { pages: mib(size_mib).0, seed: 13 }]);
    let start = || {
        let mut mapper = Tenant::start(setting.player, &held().with_activity(Activity::Mapper { pages: 16 }))?;
        let copy = Tenant::start(setting.player, &held())?;
        mapper.begin()?;
        Ok(vec![Box::new(mapper) as Box<dyn Target>, Box::new(copy)])
    };
    let mut sequence = PolicySequence::take(setting)?;
    for _ in 0..if setting.quick { 1 } else { TURNS } {
        sequence.run(report, &NoMerging { seconds }, start)?;
        sequence.run(report, &Pagefold::new(seconds), start)?;
    }
    let of = |policy: &str| {
        let runs = report.runs.iter().filter(|run| run.policy == policy);
        runs.flat_map(speeds).collect::<Vec<u64>>()
    };
    let (baseline, merged) = (of(NO_MERGING), of(SUBJECT));
    let ratio = |of: fn(&[u64]) -> Option<f64>| Some(of(&merged)? / of(&baseline)?);
    for (name, ratio) in [("on average", ratio(mean)), ("in the slowest second", ratio(slowest))] {
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
        report.bar("the mapper's speed relative to that without merging", Limit::AtLeast(0.95), ratio(mean));
    }
    Ok(())
}

/// Maps in each tenth of a second of a run.
fn speeds(run: &PolicyRun) -> Vec<u64> {
    run.counters.first().map(|(_, after)| after.maps.clone()).unwrap_or_default()
}

fn mean(speeds: &[u64]) -> Option<f64> {
    (!speeds.is_empty()).then(|| speeds.iter().sum::<u64>() as f64 / speeds.len() as f64)
}

/// The smallest mean of ten consecutive tenths.
fn slowest(speeds: &[u64]) -> Option<f64> {
    speeds.windows(10).map(|second| second.iter().sum::<u64>()).min().map(|maps| maps as f64 / 10.0)
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
