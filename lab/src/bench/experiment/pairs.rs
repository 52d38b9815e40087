//! Contents that exist exactly twice: two tenants with the same pages, beside one that shares nothing. This is common
//! among real programs and hard for UKSM: thin sampling rarely finds both copies.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::policy::{Enough, KSM_EVERYTHING, KsmEverything, ORACLE, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use pagefold_workload::Segment;

pub const EXPERIMENT: Experiment = Experiment {
    name: "pairs",
    claim: "ours: of contents that exist exactly twice, 99 % is saved within three times an oracle's time and 0.6 of the CPU time of \
            KSM scanning everything; also under governors low and quiet, where UKSM finds none within minutes",
    run,
};

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (copy_mib, most_seconds) = if setting.quick { (32, 20) } else { (512, 120) };
    let quiet_seconds = 600;
    report.parameters([("twin_mib", copy_mib), ("random_mib", 2 * copy_mib), ("seconds_at_most", most_seconds)]);
    let copy = Segment::Shared { pages: mib(copy_mib).0, seed: 11 };
    let random = Segment::Random { pages: mib(2 * copy_mib).0, seed: 12 };
    let start = || [copy, copy, random].into_iter().map(|segment| setting.tenant(segment)).collect();
    let whole = mib(copy_mib).bytes().0;
    let at = |governor, seconds| {
        Pagefold::new(seconds)
            .with(&["--governor", governor])
            .until(Enough { saved_bytes: whole - whole / 100, seconds: 0 })
    };
    let mut ours = vec![at("full", most_seconds), at("low", 2 * most_seconds)];
    let full = ours[0].name();
    if !setting.quick {
        report.parameters([("seconds_at_most_quiet", quiet_seconds)]);
        ours.push(at("quiet", quiet_seconds));
    }
    let mut sequence = PolicySequence::take(setting)?;
    sequence.run(report, &KsmEverything, start)?;
    sequence.run(report, &Oracle, start)?;
    for policy in &ours {
        sequence.run(report, policy, start)?;
    }
    report.compare(&full);

    let to_99 = |policy: &str| report.run(policy)?.reaching(0.99, whole);
    let reached: Vec<_> =
        report.runs.iter().filter_map(|run| Some((run.policy.clone(), run.reaching(0.99, whole)?))).collect();
    let (own, oracles, everythings) = (to_99(&full), to_99(ORACLE), to_99(KSM_EVERYTHING));
    let rows = reached.iter().map(|(name, point)| (name.clone(), point.cpu_seconds())).collect();
    report.picture(
        "CPU until 99 % is saved",
        "CPU seconds of pagefold and ksmd; policies that did not reach it are left out",
        rows,
    );
    for (name, point) in reached {
        report.figure(format!("seconds to 99 %, {name}"), point.seconds);
        report.figure(format!("CPU seconds to 99 %, {name}"), point.cpu_seconds());
    }
    if setting.quick {
        return Ok(());
    }
    for policy in ours.iter().map(Policy::name) {
        let share = report.run(&policy).map(|run| run.saved_bytes_max as f64 / whole as f64);
        report.bar(format!("share saved of the possible savings, {policy}"), Limit::AtLeast(0.99), share);
    }
    let time = own.zip(oracles).map(|(own, oracles)| own.seconds / oracles.seconds);
    report.bar(format!("time to 99 % relative to the oracle, {full}"), Limit::AtMost(3.0), time);
    let cpu = own.zip(everythings).map(|(own, everythings)| own.cpu_seconds() / everythings.cpu_seconds());
    report.bar(format!("CPU time to 99 % relative to ksm-everything, {full}"), Limit::AtMost(0.6), cpu);
    Ok(())
}
