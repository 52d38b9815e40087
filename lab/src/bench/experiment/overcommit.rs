//! More memory than there is: we start programs with the same contents one after another below a limit, each as soon as
//! there's room.

use super::{Experiment, ExperimentSetting, PolicySequence, are_intact, mib};
use crate::bench::metric;
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmPaced, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{MemoryLimit, scratch};
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::ensure;
use std::fs;
use std::path::Path;
use std::time::Duration;

pub const EXPERIMENT: Experiment = Experiment {
    name: "overcommit",
    claim: "KSM's tree (2009): 12 GiB are allocated on a machine with 4 GiB (here 1,536 MiB below a limit of 512 MiB)",
    run,
};

/// One page in this many of each program is its own.
const OWN_PART: u64 = 32;
/// Room for the rest of a program's memory, and for the kernel's records of it, bytes.
const MARGIN: u64 = 8 << 20;

sizes! {
    limit_mib: u64 = 512, quick 80, as "limit_mib";
    each_mib: u64 = 128, quick 24, as "each_mib";
    most: usize = 12, quick 4, as "programs_at_most";
    /// A program waits this many seconds for room.
    patience: u64 = 30, quick 10, as "seconds_of_patience";
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    // A path of its own, so pagefold can find the programs by it.
    let scratch = scratch()?;
    let player = scratch.path().join("held");
    fs::copy(setting.player, &player)?;
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let policies: [&dyn Policy; 3] =
        [&NoMerging { seconds: 0 }, &KsmPaced { pages: KSM_PAGES, seconds: 0 }, &Pagefold::new(0)];
    for by in policies {
        let name = by.name();
        let started = sequence.conduct(report, &name, &name, |stage| start_all(stage, by, &player, &sizes))?;
        if let Some(started) = started {
            let held = (started as u64 * sizes.each_mib) as f64;
            report.figure(metric::FITTING_MEMORY.of([&name]), held);
            rows.push((name, held));
        }
    }
    report.picture("programs that fit", format!("MiB; below a limit of {} MiB", sizes.limit_mib), rows);
    if let (false, Some(ours)) = (setting.quick, report.figure_of(metric::FITTING_MEMORY, [SUBJECT])) {
        report.bar(metric::FITTING_OF_LIMIT, Limit::AtLeast(3.0), Some(ours / sizes.limit_mib as f64));
    }
    Ok(())
}

/// Starts programs as long as there's room for the next in time. Returns how many.
fn start_all(stage: &mut Stage<'_>, by: &dyn Policy, player: &Path, sizes: &Sizes) -> anyhow::Result<usize> {
    let interrupt = stage.setting.interrupt;
    let limit = sizes.limit_mib << 20;
    let group = MemoryLimit::make(limit)?;
    let each = mib(sizes.each_mib);
    let own = each.0 / OWN_PART;
    let spec =
        TenantSpec::new([Segment::Shared { pages: each.0 - own, seed: 1 }, Segment::Random { pages: own, seed: 2 }]);
    let enter = group.enter();
    let most_used = limit.saturating_sub(each.bytes().0 + MARGIN);
    let mut tenants = Vec::new();
    while tenants.len() < sizes.most {
        let patience = Duration::from_secs(sizes.patience);
        if interrupt.wait(patience, || anyhow::Ok((group.usage()? <= most_used).then_some(())))?.is_none() {
            break;
        }
        let tenant = Tenant::start_by(&enter.each_ref().map(String::as_str), player, &spec)?;
        by.mark_new(tenant.pid())?;
        tenants.push(tenant);
        // pagefold doesn't start with nothing in scope.
        if tenants.len() == 1 {
            stage.merge(by, &["--exe", &player.to_string_lossy()])?;
        }
    }
    stage.stop_sampling()?;
    let intact = are_intact(&mut tenants)?;
    ensure!(group.kills()? == 0, "the kernel has killed a program");
    // Unmerging needs room for the copies.
    group.lift()?;
    stage.end()?;
    stage.answered(intact);
    Ok(tenants.len())
}
