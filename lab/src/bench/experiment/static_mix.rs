//! UKSM's static mix (section 8.1.1): a program filled with one page content beside one filled with random pages.

use super::{Experiment, ExperimentSetting, mib, side_by_side};
use crate::bench::metric::SAVED_PER_CPU_SECOND_VS;
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmAdvisor, KsmPaced, ORACLE, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::tenant::Segment;
use pagefold_engine::units::Pages;

pub const EXPERIMENT: Experiment = Experiment {
    name: "static-mix",
    claim: "UKSM: one program fills 4 GiB with one page content, another 4 GiB at random; all is merged in 5 s, and a CPU \
            second saves 12.6 times what it does under KSM at 1000 pages per 20 ms (here at half the size; required: 20 \
            times, more than under KSM's advisor, 0.6 of an oracle's, and at most twice an oracle's time)",
    run,
};

/// The advisor aims at 200 s per scan, the kernel's default rate takes as long, and merging takes two scans.
const LONG_SECONDS: u64 = 440;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, seconds) = if setting.quick { (64, 6) } else { (2048, 120) };
    report.parameters([("same_mib", size_mib), ("random_mib", size_mib), ("seconds", seconds)]);
    let pages = mib(size_mib).0;
    let segments = [Segment::Same { pages, seed: 1 }, Segment::Random { pages, seed: 2 }];
    let ours = Pagefold::new(seconds).with(&["--governor", "full"]);
    let ours_name = ours.name();
    let paced = KsmPaced { pages: KSM_PAGES, seconds };
    let advised = KsmAdvisor { at_cap: false, seconds };
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(ours), Box::new(paced), Box::new(Oracle)];
    if !setting.quick {
        policies.push(Box::new(advised));
    }
    setting.add_further_peers(&mut policies, if setting.quick { seconds } else { LONG_SECONDS });
    side_by_side(setting, report, &policies, || setting.tenants(&segments))?;
    report.compare(&ours_name);

    // All but one of the equal pages.
    let whole = Pages(pages.saturating_sub(1)).bytes().0;
    let oracles = report.run(ORACLE).and_then(|run| run.reaching(0.99, whole));
    let Some(run) = report.run(&ours_name).cloned() else { return Ok(()) };
    report.figure("MiB saved within 5 s", run.saved_mib_within(5.0));
    if setting.quick {
        return Ok(());
    }
    let saved = run.saved_bytes_max as f64 / whole as f64;
    report.bar("share saved of the possible savings", Limit::AtLeast(0.99), Some(saved));
    if let (Some(own), Some(oracle)) = (run.reaching(0.99, whole), oracles) {
        report.bar("time to 99 % relative to the oracle", Limit::AtMost(2.0), Some(own.seconds / oracle.seconds));
    }
    for (peer, limit) in [(paced.name().as_str(), 20.0), (ORACLE, 0.6)] {
        let measured = report.ratio(SAVED_PER_CPU_SECOND_VS, peer);
        report.bar(format!("savings per CPU second relative to {peer}"), Limit::AtLeast(limit), measured);
    }
    // A difference rather than a ratio, since the advisor may have saved nothing.
    let advised = advised.name();
    if let (Some(own), Some(advisor)) = (run.mib_per_cpu_second(), report.run(&advised)) {
        let more = own - advisor.mib_per_cpu_second().unwrap_or(0.0);
        let name = format!("MiB per CPU second beyond those of {advised}");
        report.bar(name, Limit::AtLeast(f64::MIN_POSITIVE), Some(more));
    }
    Ok(())
}
