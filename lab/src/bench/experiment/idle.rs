//! The cost of watching memory without duplicates, after the first sampling.

use super::{Experiment, ExperimentSetting, PolicySequence, mib, need_memory};
use crate::bench::guest::GuestMachine;
use crate::bench::metric;
use crate::bench::policy::{Pagefold, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::bench::sampler::spent_between;
use pagefold_workload::Segment;

pub const EXPERIMENT: Experiment = Experiment {
    name: "idle",
    claim: "UKSM: with nothing to merge UKSM takes 0.2 % of a core (required: for pagefold and ksmd together, watching 8 GiB)",
    run,
};

const TENANT_MIB: u64 = 2048;

/// The emulated machine: 1.5 times the watched memory, and room for the kernel.
pub fn machine(quick: bool) -> GuestMachine {
    if quick { GuestMachine::small(quick) } else { GuestMachine::new(4 * TENANT_MIB * 3 / 2 + 1024, quick) }
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    // In ascending order: we judge the last one.
    let (tenant_mib, tenants, settle, seconds): (u64, &[u64], u64, u64) =
        if setting.quick { (64, &[1], 2, 5) } else { (TENANT_MIB, &[1, 4], 30, 60) };
    report.parameters([("settling_seconds", settle), ("seconds", seconds), ("tenant_mib", tenant_mib)]);
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let mut judged = None;
    for &count in tenants {
        let gib = (count * tenant_mib) as f64 / 1024.0;
        need_memory(count * tenant_mib + count * tenant_mib / 2)?;
        let segment = Segment::Random { pages: mib(tenant_mib).0, seed: 3 };
        let start = || (0..count).map(|_| setting.tenant(segment)).collect();
        // The number of answers depends on the number of targets.
        sequence.expected = None;
        let Some(run) = sequence.run(report, &Pagefold::new(settle + seconds), start)? else { continue };
        run.policy = format!("{SUBJECT}, {gib:.2} GiB");
        let (whole, points) = (100.0 * run.cpu_seconds / run.seconds, run.points.clone());
        let Some((ksmd, daemon, time)) = spent_between(&points, settle as f64, (settle + seconds) as f64) else {
            continue;
        };
        let percent = |spent: f64| 100.0 * spent / time;
        report.figure(format!("{gib:.2} GiB: pagefold, per cent of a core"), percent(daemon));
        report.figure(format!("{gib:.2} GiB: ksmd, per cent of a core"), percent(ksmd));
        report.figure(format!("{gib:.2} GiB: both over the whole run, per cent of a core"), whole);
        rows.push((format!("{gib:.2} GiB"), percent(daemon + ksmd)));
        judged = Some((gib, percent(daemon + ksmd)));
    }
    report.picture(
        "watching memory without duplicates",
        format!("per cent of a core, pagefold and ksmd, over {seconds} s after {settle} s of settling"),
        rows,
    );
    if let (false, Some((gib, percent))) = (setting.quick, judged) {
        report.bar(metric::CPU_WATCHING.of([&format!("{gib:.2} GiB")]), Limit::AtMost(0.2), Some(percent));
    }
    Ok(())
}
