//! The KSM tree's worst case: two programs with the same pages, which all differ from one another in the last eight
//! bytes only, so that every comparison of a search reads two whole pages. We also measure how merging affects a
//! program that reads a word of every page, before and after, in that case and in the best one, where all pages are
//! equal.

use super::{Experiment, ExperimentSetting, mib, side_by_side};
use crate::bench::measures::median;
use crate::bench::metric;
use crate::bench::policy::ksm::mark_eligible;
use crate::bench::policy::{Enough, KsmEverything, KsmPaced, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Failure};
use crate::ksm_control::KsmForExperiment;
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::ensure;
use pagefold_engine::units::Pages;
use pagefold_procmem::process::Process;
use std::time::Instant;

pub const EXPERIMENT: Experiment = Experiment {
    name: "tails",
    claim: "KSM's tree (2009): where pages differ in the last 8 bytes only, 10 MB/s are merged (here at a quarter of the size), and a word of \
            every page is read as fast as before; 4 times as fast where all pages were equal",
    run,
};

const READS: usize = 31;

/// Scans that merge everything: the first one only notes checksums, and one merges after the other.
const SCANS: u32 = 4;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, seconds) = if setting.quick { (16, 8) } else { (256, 120) };
    report.parameters([("each_mib", size_mib), ("seconds_at_most", seconds), ("reads", READS as u64)]);
    let pages = mib(size_mib);
    let tails = Segment::Tails { pages: pages.0, seed: 7 };
    let enough = Enough { saved_bytes: pages.bytes().0 - pages.bytes().0 / 100, seconds: 0 };
    let ours = Pagefold::new(seconds).with(&["--governor", "full"]).until(enough);
    let name = ours.name();
    let mut policies: Vec<Box<dyn Policy>> =
        vec![Box::new(ours), Box::new(KsmEverything), Box::new(KsmPaced { pages: 2000, seconds }), Box::new(Oracle)];
    setting.add_further_peers(&mut policies, seconds);
    side_by_side(setting, report, &policies, || setting.tenants(&[tails; 2]))?;
    report.compare(&name);
    if !setting.policies.is_empty() {
        return Ok(());
    }
    for (case, segment) in [(metric::WORST_CASE, tails), (metric::BEST_CASE, Segment::Same { pages: pages.0, seed: 7 })]
    {
        if let Err(error) = read(setting, report, case, segment) {
            setting.interrupt.check()?;
            report.failures.push(Failure { policy: format!("reading, {case}"), error: format!("{error:#}") });
        }
    }
    Ok(())
}

/// Measures how long one of two equal programs takes to read, before and after both are merged.
fn read(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    case: &str,
    segment: Segment,
) -> anyhow::Result<()> {
    eprintln!("{}: reading, {case}", report.experiment);
    let mut ksm = KsmForExperiment::take(setting.interrupt)?;
    let spec = TenantSpec::new([segment]);
    let mut tenants = [Tenant::start(setting.player, &spec)?, Tenant::start(setting.player, &spec)?];
    let before = read_us(&mut tenants[0], segment.pages())?;
    for tenant in &tenants {
        mark_eligible(&Process::open(tenant.pid())?)?;
    }
    for _ in 0..SCANS {
        ksm.scan_once(setting.interrupt)?;
    }
    ksm.stop()?;
    let saved = ksm.ksm().counters()?.view(true, false).saved();
    // Both programs' pages except the copies that stay: at most one page of two.
    ensure!(saved.0 >= segment.pages().0 * 9 / 10, "only {} pages were merged", saved.0);
    let after = read_us(&mut tenants[0], segment.pages())?;
    ksm.unmerge()?;
    report.figure(format!("{case}: us to read a word of every page, before"), before);
    report.figure(format!("{case}: us to read a word of every page, merged"), after);
    report.figure(metric::READING_SPEED.of([case]), before / after);
    Ok(())
}

/// The median time that a tenant takes to read a word of each page, without the time to ask it.
fn read_us(tenant: &mut Tenant, pages: Pages) -> anyhow::Result<f64> {
    let mut medians = [0.0; 2];
    for (median_us, pages) in medians.iter_mut().zip([pages, Pages(0)]) {
        let mut times = [0.0; READS];
        for time in &mut times {
            let began = Instant::now();
            tenant.touch(pages)?;
            *time = began.elapsed().as_secs_f64() * 1e6;
        }
        *median_us = median(times);
    }
    Ok(medians[0] - medians[1])
}
