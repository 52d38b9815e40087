//! The cost of watching memory without duplicates, after the first sampling.

use super::{Experiment, ExperimentSetting, PolicySequence, mib, need_memory};
use crate::bench::guest::GuestMachine;
use crate::bench::metric;
use crate::bench::policy::{Pagefold, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::bench::sampler::spent_between;
use crate::tenant::Segment;

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
    // The sizes are ascending: we judge the last one.
    let tenants: &[usize] = if setting.quick { &[1] } else { &[1, 4] };
    let (tenant_mib, settle, seconds) = if setting.quick { (64, 2, 5) } else { (TENANT_MIB, 30, 60) };
    report.parameters([("settling_seconds", settle), ("seconds", seconds), ("tenant_mib", tenant_mib)]);
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    for &count in tenants {
        let watched_mib = count as u64 * tenant_mib;
        need_memory(watched_mib + watched_mib / 2)?;
        let segments = vec![Segment::Random { pages: mib(tenant_mib).0, seed: 3 }; count];
        // The number of answers depends on the number of targets.
        sequence.expected = None;
        let policy = Pagefold::new(settle + seconds);
        let Some(run) = sequence.run(report, &policy, || setting.tenants(&segments))? else { continue };
        let gib = format!("{:.2} GiB", watched_mib as f64 / 1024.0);
        run.policy = format!("{SUBJECT}, {gib}");
        let whole = 100.0 * run.cpu_seconds / run.seconds;
        let spent = spent_between(&run.points, settle as f64, (settle + seconds) as f64);
        let Some((ksmd, daemon, time)) = spent else { continue };
        let both = 100.0 * (daemon + ksmd) / time;
        report.figure(format!("{gib}: pagefold, per cent of a core"), 100.0 * daemon / time);
        report.figure(format!("{gib}: ksmd, per cent of a core"), 100.0 * ksmd / time);
        report.figure(format!("{gib}: both over the whole run, per cent of a core"), whole);
        rows.push((gib, both));
    }
    let judged = rows.last().cloned();
    let subtitle = format!("per cent of a core, pagefold and ksmd, over {seconds} s after {settle} s of settling");
    report.picture("watching memory without duplicates", subtitle, rows);
    if let (false, Some((gib, percent))) = (setting.quick, judged) {
        report.bar(metric::CPU_WATCHING.of([&gib]), Limit::AtMost(0.2), Some(percent));
    }
    Ok(())
}
