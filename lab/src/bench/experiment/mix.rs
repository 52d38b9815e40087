//! A host of small services: caches with the same entries, and interpreters of four languages with the same data.

use super::{Experiment, ExperimentSetting, PolicySequence};
use crate::bench::metric::{CPU_VS, SAVED_VS};
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{HeldFile, MemcachedData, NODE, PHP, PYTHON, RUBY, Target, scratch};

pub const EXPERIMENT: Experiment = Experiment {
    name: "mix",
    claim: "ours: on three memcached, four node, four python, three ruby and three php, pagefold saves at least 95 % of what KSM \
            saves by scanning everything, in at most a quarter of its CPU time",
    run,
};

const CACHES: usize = 3;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (entries, shared_mib, seconds) = if setting.quick { (1_000, 2, 6) } else { (12_000, 8, 60) };
    report.parameters([("memcached_entries", entries), ("shared_mib", shared_mib), ("seconds", seconds)]);
    let scratch = scratch()?;
    let (caches, held) = (MemcachedData::new(entries)?, HeldFile::make(scratch.path(), shared_mib)?);
    let start = || {
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for instance in 0..CACHES {
            targets.push(Box::new(caches.start(scratch.path(), instance)?));
        }
        for (language, instances) in [(&NODE, 4), (&PYTHON, 4), (&RUBY, 3), (&PHP, 3)] {
            for instance in 0..instances {
                targets.push(Box::new(held.start(language, instance)?));
            }
        }
        Ok(targets)
    };
    // We leave a program that has dropped root's rights alone unless it's named.
    let ours = Pagefold::new(seconds).with(&["--allow", "memcached"]);
    let mut sequence = PolicySequence::take(setting)?;
    sequence.run(report, &KsmEverything, start)?;
    if !setting.quick {
        sequence.run(report, &Oracle, start)?;
    }
    sequence.run(report, &ours, start)?;
    report.compare(&ours.name());
    if setting.quick {
        return Ok(());
    }
    let (saved, cpu) = (report.ratio(SAVED_VS, KSM_EVERYTHING), report.ratio(CPU_VS, KSM_EVERYTHING));
    report.bar("savings relative to KSM scanning everything", Limit::AtLeast(0.95), saved);
    report.bar("CPU time relative to KSM scanning everything", Limit::AtMost(0.25), cpu);
    Ok(())
}
