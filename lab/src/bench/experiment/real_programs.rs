//! Databases with the same data: three redis and three MariaDB servers, alone and beside a program that shares nothing.

use super::{Experiment, ExperimentSetting, Targets, bar_on_everything, mib, side_by_side};
use crate::bench::metric::{CPU_VS, SAVED_VS};
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, ORACLE, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{MariaDbData, RedisData, scratch};
use crate::tenant::Segment;

/// The databases alone. Most scanned memory merges, and merging costs every policy the same, so even the oracle takes
/// most of KSM's time.
pub const EXPERIMENT: Experiment = Experiment {
    name: "real-programs",
    claim: "ours: on databases with the same data pagefold saves nine tenths of what KSM saves by scanning everything, in \
            half its CPU time and at most twice an oracle's",
    run: |setting, report| run(setting, report, 0),
};

/// The databases beside memory without duplicates, as on a host with several uses.
pub const MIXED_HOST: Experiment = Experiment {
    name: "mixed-host",
    claim: "ours: beside as much memory again without duplicates pagefold saves nine tenths of what KSM saves by \
            scanning everything, in half its CPU time",
    run: |setting, report| run(setting, report, if setting.quick { 64 } else { 1024 }),
};

/// Servers of each kind.
const INSTANCES: usize = 3;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport, random_mib: u64) -> anyhow::Result<()> {
    let (keys, rows, seconds) = if setting.quick { (10_000, 4_000, 10) } else { (100_000, 80_000, 60) };
    let parameters = [("redis_keys", keys), ("mariadb_rows", rows), ("random_mib", random_mib), ("seconds", seconds)];
    report.parameters(parameters);
    let scratch = scratch()?;
    eprintln!("{}: making the data", report.experiment);
    let redis = RedisData::make(scratch.path(), keys)?;
    let mariadb = MariaDbData::make(scratch.path(), rows)?;
    let mut policies: Vec<Box<dyn Policy>> =
        vec![Box::new(KsmEverything), Box::new(Oracle), Box::new(Pagefold::new(seconds))];
    setting.add_further_peers(&mut policies, seconds);
    side_by_side(setting, report, &policies, || {
        let mut targets = Targets::new();
        for instance in 0..INSTANCES {
            targets.push(Box::new(redis.start(scratch.path(), instance)?));
            targets.push(Box::new(mariadb.start(scratch.path(), instance)?));
        }
        if random_mib > 0 {
            targets.push(setting.tenant(Segment::Random { pages: mib(random_mib).0, seed: 8 })?);
        }
        Ok(targets)
    })?;
    if !setting.quick {
        bar_on_everything(report, report.ratio(SAVED_VS, KSM_EVERYTHING), 0.9, 0.5);
        report.bar("CPU time relative to the oracle", Limit::AtMost(2.0), report.ratio(CPU_VS, ORACLE));
    }
    Ok(())
}
