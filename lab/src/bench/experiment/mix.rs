//! A host of small services: caches with the same entries, and interpreters of four languages with the same data.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, bar_on_everything};
use crate::bench::metric::SAVED_VS;
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Oracle, Pagefold, Policy};
use crate::bench::report::ExperimentReport;
use crate::programs::{HeldFile, MemcachedData, NODE, PHP, PYTHON, RUBY, scratch};
use std::path::Path;

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
    let caches = MemcachedData::new(entries)?;
    let held = HeldFile::make(scratch.path(), shared_mib)?;
    // We leave a program that has dropped root's rights alone unless it's named.
    let ours = Pagefold::new(seconds).with(&["--allow", "memcached"]);
    let policies: &[&dyn Policy] =
        if setting.quick { &[&KsmEverything, &ours] } else { &[&KsmEverything, &Oracle, &ours] };
    let mut sequence = PolicySequence::take(setting)?;
    for &policy in policies {
        sequence.run(report, policy, || start(&caches, &held, scratch.path()))?;
    }
    report.compare(&ours.name());
    if !setting.quick {
        bar_on_everything(report, report.ratio(SAVED_VS, KSM_EVERYTHING), 0.95, 0.25);
    }
    Ok(())
}

fn start(caches: &MemcachedData, held: &HeldFile, scratch: &Path) -> anyhow::Result<Targets> {
    let mut targets = Targets::new();
    for instance in 0..CACHES {
        targets.push(Box::new(caches.start(scratch, instance)?));
    }
    for (language, instances) in [(&NODE, 4), (&PYTHON, 4), (&RUBY, 3), (&PHP, 3)] {
        for instance in 0..instances {
            targets.push(Box::new(held.start(language, instance)?));
        }
    }
    Ok(targets)
}
