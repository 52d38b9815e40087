//! Contents that exist exactly twice: two tenants with the same pages, beside one that shares nothing. This is common
//! among real programs and hard for UKSM: thin sampling rarely finds both copies.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::policy::{Enough, KSM_EVERYTHING, KsmEverything, ORACLE, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::tenant::Segment;
use std::collections::BTreeMap;

pub const EXPERIMENT: Experiment = Experiment {
    name: "pairs",
    claim: "ours: of contents that exist exactly twice, 99 % is saved within three times an oracle's time and 0.6 of the CPU time of \
            KSM scanning everything; also under governors low and quiet, where UKSM finds none within minutes",
    run,
};

const QUIET_SECONDS: u64 = 600;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (copy_mib, most_seconds) = if setting.quick { (32, 20) } else { (512, 120) };
    report.parameters([("twin_mib", copy_mib), ("random_mib", 2 * copy_mib), ("seconds_at_most", most_seconds)]);
    let copy = Segment::Shared { pages: mib(copy_mib).0, seed: 11 };
    let segments = [copy, copy, Segment::Random { pages: mib(2 * copy_mib).0, seed: 12 }];
    let whole = mib(copy_mib).bytes().0;
    let mut governors = vec![("full", most_seconds), ("low", 2 * most_seconds)];
    if !setting.quick {
        report.parameters([("seconds_at_most_quiet", QUIET_SECONDS)]);
        governors.push(("quiet", QUIET_SECONDS));
    }
    let mut sequence = PolicySequence::take(setting)?;
    sequence.run(report, &KsmEverything, || setting.tenants(&segments))?;
    sequence.run(report, &Oracle, || setting.tenants(&segments))?;
    let mut ours = Vec::new();
    for (governor, seconds) in governors {
        let enough = Enough { saved_bytes: whole - whole / 100, seconds: 0 };
        let policy = Pagefold::new(seconds).with(&["--governor", governor]).until(enough);
        sequence.run(report, &policy, || setting.tenants(&segments))?;
        ours.push(policy.name());
    }
    let full = &ours[0];
    report.compare(full);

    let mut rows = Vec::new();
    let mut reached = BTreeMap::new();
    for run in &report.runs {
        if let Some(point) = run.reaching(0.99, whole) {
            rows.push((run.policy.clone(), point.cpu_seconds()));
            reached.insert(run.policy.clone(), point);
        }
    }
    let subtitle = "CPU seconds of pagefold and ksmd; policies that did not reach it are left out";
    report.picture("CPU until 99 % is saved", subtitle, rows);
    for (name, point) in &reached {
        report.figure(format!("seconds to 99 %, {name}"), point.seconds);
        report.figure(format!("CPU seconds to 99 %, {name}"), point.cpu_seconds());
    }
    if setting.quick {
        return Ok(());
    }
    for policy in &ours {
        if let Some(run) = report.run(policy) {
            let share = run.saved_bytes_max as f64 / whole as f64;
            report.bar(format!("share saved of the possible savings, {policy}"), Limit::AtLeast(0.99), Some(share));
        }
    }
    let Some(own) = reached.get(full) else { return Ok(()) };
    if let Some(oracle) = reached.get(ORACLE) {
        let time = own.seconds / oracle.seconds;
        report.bar(format!("time to 99 % relative to the oracle, {full}"), Limit::AtMost(3.0), Some(time));
    }
    if let Some(everything) = reached.get(KSM_EVERYTHING) {
        let cpu = own.cpu_seconds() / everything.cpu_seconds();
        report.bar(format!("CPU time to 99 % relative to ksm-everything, {full}"), Limit::AtMost(0.6), Some(cpu));
    }
    Ok(())
}
