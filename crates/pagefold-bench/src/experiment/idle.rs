//! Nothing to merge: what watching costs.

use super::{Experiment, Setting, mib, side_by_side};
use crate::policy::{Policy, SUBJECT};
use crate::programs::Target;
use crate::record::{Limit, Report};
use crate::tenant::{Segment, Tenant, TenantSpec};

/// See the module's opening.
pub const EXPERIMENT: Experiment = Experiment {
    name: "idle",
    claim: "ours: with nothing to merge pagefold and ksmd together take at most half a per cent of a core (UKSM: 0.2 %)",
    run,
};

fn run(setting: &Setting<'_>, report: &mut Report) -> anyhow::Result<()> {
    let (size_mib, seconds) = if setting.quick { (64, 10) } else { (2048, 60) };
    report.parameters.extend([("random_mib", size_mib), ("seconds", seconds)]);
    let spec = TenantSpec::new([Segment::Random { pages: mib(size_mib).0, seed: 3 }]);
    let start = || Ok(vec![Box::new(Tenant::start(setting.player, &spec)?) as Box<dyn Target>]);
    side_by_side(setting, report, &[Policy::Pagefold { seconds }], start)?;
    if let Some(run) = report.run(SUBJECT).cloned() {
        let percent = |cpu_seconds: f64| 100.0 * cpu_seconds / run.seconds.max(f64::MIN_POSITIVE);
        report.figures.extend([
            ("pagefold_percent_of_a_core".to_owned(), percent(run.cpu_pagefold_seconds)),
            ("ksmd_percent_of_a_core".to_owned(), percent(run.cpu_ksmd_seconds)),
        ]);
        if setting.quick {
            return Ok(());
        }
        report.bar("CPU of pagefold and ksmd, per cent of a core", Limit::AtMost(0.5), Some(percent(run.cpu_seconds)));
    }
    Ok(())
}
