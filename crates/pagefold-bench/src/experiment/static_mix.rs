//! UKSM's static mix: one program full of one content beside one full of random pages.

use super::{Experiment, Setting, mib, side_by_side};
use crate::policy::{Policy, SUBJECT};
use crate::programs::Target;
use crate::record::{Limit, Report};
use crate::tenant::{Segment, Tenant, TenantSpec};

/// See the module's opening.
pub const EXPERIMENT: Experiment = Experiment {
    name: "static-mix",
    claim: "UKSM: one program fills 4 GiB with one page content, another 4 GiB at random; all is merged in 5 s, and a CPU \
            second saves 12.6 times what it does under KSM at 1000 pages per 20 ms (here at half the size)",
    run,
};

fn run(setting: &Setting<'_>, report: &mut Report) -> anyhow::Result<()> {
    let (size_mib, seconds) = if setting.quick { (64, 10) } else { (2048, 120) };
    report.parameters.extend([("same_mib", size_mib), ("random_mib", size_mib), ("seconds", seconds)]);
    let pages = mib(size_mib).0;
    let specs = [Segment::Same { pages, seed: 1 }, Segment::Random { pages, seed: 2 }]
        .map(|segment| TenantSpec::new([segment]));
    let start = || {
        let start = |spec| Ok(Box::new(Tenant::start(setting.player, spec)?) as Box<dyn Target>);
        specs.iter().map(start).collect()
    };
    let paced = Policy::KsmPaced { pages: 1000, seconds };
    let mut policies = vec![Policy::Pagefold { seconds }, paced.clone(), Policy::Oracle];
    if setting.all_peers {
        // The advisor aims at 200 s a scan, and a merge takes two.
        policies.push(Policy::KsmAdvisor { seconds: if setting.quick { seconds } else { 420 } });
    }
    side_by_side(setting, report, &policies, start)?;

    if setting.quick {
        return Ok(());
    }
    let ratio = |report: &Report, name: &str| report.ratios.get(name).copied();
    let saved_in_time = report.run(SUBJECT).map(|run| run.saved_mib_within(5.0));
    report.bar("MiB saved within 5 s", Limit::AtLeast(2000.0 / 2048.0 * size_mib as f64), saved_in_time);
    let measured = ratio(report, &format!("saved_per_cpu_second_vs_{paced}"));
    report.bar(format!("saved per CPU second, against {paced}"), Limit::AtLeast(15.0), measured);
    Ok(())
}
