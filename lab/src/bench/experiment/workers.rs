//! Servers that start their workers before there's work: how much the workers share by fork already, and how much more
//! merging saves.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, bar_on_everything, before_and_during, quotient};
use crate::bench::frames::{Held, open_all};
use crate::bench::metric::Metric;
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Pagefold, Policy};
use crate::bench::report::ExperimentReport;
use crate::programs::{HeldFile, Notes, Observed, Prefork, php_fpm, scratch};
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::path::Path;

pub const EXPERIMENT: Experiment = Experiment {
    name: "workers",
    claim: "ours: on gunicorn, puma, node's cluster and php-fpm with four workers each, pagefold saves at least 95 % of what KSM saves \
            by scanning everything, in at most half of its CPU time",
    run,
};

const WORKERS: usize = 4;

/// The two `{}` stand for a policy and a server.
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

    // No oracle: it would mark a page shared by fork in only some of its processes. Once merged, the page stays merged
    // in the others until they end, and we can't restore KSM's settings before.
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(KsmEverything), Box::new(ours)];
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    for policy in &policies {
        let mut seen = Vec::new();
        let run = sequence.run(report, &**policy, || start(setting, kinds, scratch.path(), &held, &mut seen))?;
        if run.is_some() {
            let name = policy.name();
            put_figures(report, &name, &seen).with_context(|| format!("{name}: a check is missing"))?;
        }
    }
    report.compare(&ours_name);
    if !setting.quick {
        // KSM counts each process with a merged page, so it also counts pages that fork shared before as saved. We
        // count frames.
        let own = report.figure_of(SAVED, [&ours_name, "all"]);
        let saved = quotient(own, report.figure_of(SAVED, [KSM_EVERYTHING, "all"]));
        bar_on_everything(report, saved, 0.95, 0.5);
    }
    Ok(())
}

/// Starts the servers, and adds the notes of each.
fn start(
    setting: &ExperimentSetting<'_>,
    kinds: &[Prefork],
    scratch: &Path,
    held: &HeldFile,
    seen: &mut Vec<(Prefork, Notes<Held>)>,
) -> anyhow::Result<Targets> {
    let mut targets = Targets::new();
    for &kind in kinds {
        setting.interrupt.check()?;
        let mut started = kind.start(scratch, held, WORKERS)?;
        let pids: Vec<i32> = started.iter().map(|process| process.pid()).collect();
        ensure!(!pids.is_empty(), "a server without a master");
        // We check the workers after their master: until then none has answered.
        let (master, notes) = Observed::start(started.remove(0), move |_| Held::by(&open_all(pids.iter().copied())?));
        seen.push((kind, notes));
        targets.push(master);
        targets.append(&mut started);
    }
    Ok(targets)
}

/// Adds how much each server's processes hold and share by fork, and how much this policy has saved beyond that. `None`
/// if a check is missing.
fn put_figures(report: &mut ExperimentReport, policy: &str, seen: &[(Prefork, Notes<Held>)]) -> Option<()> {
    let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
    for (kind, checks) in seen {
        let [before, during] = before_and_during(checks)?;
        let values = [before.by_processes, before.shared(), before.in_frames - during.in_frames];
        for name in [kind.name(), "all"] {
            for (sum, value) in sums.entry(name).or_default().iter_mut().zip(values) {
                *sum += value;
            }
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
    use std::cell::RefCell;
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
