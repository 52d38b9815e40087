//! Servers that start their workers before there's work: how much the workers share by fork already, and how much more
//! merging saves.

use super::{Experiment, ExperimentSetting, PolicySequence};
use crate::bench::frames::Held;
use crate::bench::metric::{CPU_VS, Metric};
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{HeldFile, Notes, Observed, Prefork, Target, php_fpm, scratch};
use anyhow::Context;
use pagefold_procmem::process::Process;
use std::cell::RefCell;
use std::collections::BTreeMap;

pub const EXPERIMENT: Experiment = Experiment {
    name: "workers",
    claim: "ours: on gunicorn, puma, node's cluster and php-fpm with four workers each, pagefold saves at least 95 % of what KSM saves \
            by scanning everything, in at most half of its CPU time",
    run,
};

const WORKERS: usize = 4;

/// Of a policy and a server.
const SAVED: Metric = Metric::new("{}: {}, MiB saved by merging", "MiB");

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (file_mib, seconds) = if setting.quick { (2, 10) } else { (16, 60) };
    report.parameters([("file_mib", file_mib), ("workers", WORKERS as u64), ("seconds", seconds)]);
    let kinds: &[Prefork] = if setting.quick { &[Prefork::GunicornPreload, Prefork::PhpFpm] } else { &Prefork::ALL };
    let scratch = scratch()?;
    let held = HeldFile::make(scratch.path(), file_mib)?;
    // We leave a program that has dropped root's rights alone unless it's named.
    let fpm = php_fpm()?.file_name().context("php-fpm has no name")?.to_string_lossy().into_owned();
    let ours = Pagefold::new(seconds).with(&["--allow", &fpm]);
    let ours_name = ours.name();

    let seen: RefCell<Vec<(Prefork, Notes<Held>)>> = RefCell::default();
    let start = || {
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for &kind in kinds {
            setting.interrupt.check()?;
            let mut started = kind.start(scratch.path(), &held, WORKERS)?.into_iter();
            let master = started.next().context("a server without a master")?;
            let workers: Vec<Box<dyn Target>> = started.collect();
            let pids: Vec<i32> = [master.pid()].into_iter().chain(workers.iter().map(|worker| worker.pid())).collect();
            // We check the workers after their master: until then none has answered.
            let (observed, checks) = Observed::start(master, move |_| memory_of(&pids));
            seen.borrow_mut().push((kind, checks));
            targets.push(observed);
            targets.extend(workers);
        }
        Ok(targets)
    };
    // No oracle: it would mark a page shared by fork in only some of its processes. Once merged, the page stays merged
    // in the others until they end, and we can't restore KSM's settings before.
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(KsmEverything), Box::new(ours)];
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    for policy in &policies {
        let name = sequence.run(report, &**policy, start)?.map(|run| run.policy.clone());
        let seen = seen.take();
        if let Some(name) = name {
            put_figures(report, &name, &seen).with_context(|| format!("{name}: a check is missing"))?;
        }
    }
    report.compare(&ours_name);
    if setting.quick {
        return Ok(());
    }
    // KSM counts each process with a merged page, so it also counts pages that fork shared before as saved. We count
    // frames.
    let saved = |policy: &str| report.figure_of(SAVED, [policy, "all"]);
    let saved = saved(&ours_name).zip(saved(KSM_EVERYTHING)).map(|(ours, theirs)| ours / theirs);
    let cpu = report.ratio(CPU_VS, KSM_EVERYTHING);
    report.bar("savings relative to KSM scanning everything", Limit::AtLeast(0.95), saved);
    report.bar("CPU time relative to KSM scanning everything", Limit::AtMost(0.5), cpu);
    Ok(())
}

/// The memory of a server's processes.
fn memory_of(pids: &[i32]) -> anyhow::Result<Held> {
    let processes = pids.iter().map(|&pid| Process::open(pid)).collect::<Result<Vec<_>, _>>()?;
    Held::by(&processes)
}

/// Adds how much each server's processes hold and share by fork, and how much this policy has saved beyond that. `None`
/// if a check is missing.
fn put_figures(report: &mut ExperimentReport, policy: &str, seen: &[(Prefork, Notes<Held>)]) -> Option<()> {
    let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
    for (kind, checks) in seen {
        let checks = checks.borrow();
        let [.., before, during, _] = &checks[..] else { return None };
        let values = [before.by_processes, before.by_processes - before.in_frames, before.in_frames - during.in_frames];
        for name in [kind.name(), "all"] {
            sums.entry(name).or_default().iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
    for (kind, [held, by_fork, merged]) in sums {
        report.figure(format!("{policy}: {kind}, MiB held"), held);
        report.figure(format!("{policy}: {kind}, MiB shared by fork"), by_fork);
        report.figure(SAVED.of([policy, kind]), merged);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    #[allow(clippy::float_cmp)] // exact results
    fn what_is_shared_by_fork_is_not_saved_by_merging() {
        let held = |by_processes, in_frames| Held { by_processes, in_frames };
        let checks = |held: Vec<Held>| Rc::new(RefCell::new(held));
        let mut report = ExperimentReport::new("workers", "");
        let seen = [
            (Prefork::Puma, checks(vec![held(1.0, 1.0), held(100.0, 40.0), held(100.0, 25.0), held(100.0, 100.0)])),
            (Prefork::Gunicorn, checks(vec![held(80.0, 80.0), held(84.0, 30.0), held(84.0, 84.0)])),
        ];
        put_figures(&mut report, "p", &seen).unwrap();
        let figure = |name: &str| report.figures[&format!("p: {name}")];
        assert_eq!((figure("puma, MiB shared by fork"), figure("puma, MiB saved by merging")), (60.0, 15.0));
        assert_eq!((figure("all, MiB held"), figure("all, MiB saved by merging")), (180.0, 65.0));
        assert_eq!(put_figures(&mut report, "p", &[(Prefork::Puma, Notes::default())]), None);
    }
}
