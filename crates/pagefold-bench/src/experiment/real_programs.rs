//! Databases that hold the same data: three redis servers and three MariaDB servers.

use super::{Experiment, Setting, side_by_side};
use crate::policy::Policy;
use crate::programs::{MariaDbData, RedisData, Target};
use crate::record::{Limit, Report};
use anyhow::Context;

/// See the module's opening.
pub const EXPERIMENT: Experiment = Experiment {
    name: "real-programs",
    claim: "ours: on databases with the same data pagefold saves nearly what KSM saves by scanning everything, at half \
            its CPU time or less",
    run,
};

/// Servers of each kind.
const INSTANCES: usize = 3;

fn run(setting: &Setting<'_>, report: &mut Report) -> anyhow::Result<()> {
    let (keys, rows, seconds) = if setting.quick { (10_000, 4_000, 10) } else { (100_000, 80_000, 60) };
    report.parameters.extend([("redis_keys", keys), ("mariadb_rows", rows), ("seconds", seconds)]);
    let scratch = tempfile::Builder::new().prefix("pagefold-bench-").tempdir().context("a scratch directory")?;
    eprintln!("{}: making the data", report.experiment);
    let redis = RedisData::make(scratch.path(), keys)?;
    let mariadb = MariaDbData::make(scratch.path(), rows)?;
    let start = || {
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for instance in 0..INSTANCES {
            targets.push(Box::new(redis.start(scratch.path(), instance)?));
            targets.push(Box::new(mariadb.start(scratch.path(), instance)?));
        }
        Ok(targets)
    };
    let policies = [Policy::KsmEverything, Policy::Oracle, Policy::Pagefold { seconds }];
    side_by_side(setting, report, &policies, start)?;

    let ratio = |report: &Report, name: &str| report.ratios.get(name).copied();
    let measured = ratio(report, "saved_vs_ksm-everything");
    report.bar("saved, of what KSM saves by scanning everything", Limit::AtLeast(0.9), measured);
    let measured = ratio(report, "cpu_vs_ksm-everything");
    report.bar("CPU time, of what KSM takes for it", Limit::AtMost(0.5), measured);
    Ok(())
}
