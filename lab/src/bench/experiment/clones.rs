//! Serverless-style churn, as in sandboxes for functions and agents: we start clones of a warm image one after another,
//! and time how long each takes to merge with its predecessors.

use super::{Experiment, ExperimentSetting, PolicySequence, are_intact, mib};
use crate::bench::measures::Spread;
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmPaced, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::scratch;
use crate::tenant::{Segment, Tenant, TenantSpec};
use pagefold_procmem::os::fields::number;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "clones",
    claim: "ours: of a clone of a running program, 90 % of what it has in common with those before it is merged within 5 s of its start",
    run,
};

/// The first clones. We don't judge them: they're there when the others start.
const WARM: usize = 3;
/// This many clones are alive at a time.
const ALIVE: usize = 4;
const POLL: Duration = Duration::from_millis(50);

sizes! {
    shared_mib: u64 = 64, quick 8, as "shared_mib";
    own_mib: u64 = 32, quick 4, as "own_mib";
    clones: usize = 8, quick 2, as "clones";
    warm_up_seconds: u64 = 20, quick 8;
    /// Seconds between two starts.
    every: u64 = 8, quick 5, as "seconds_between";
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    let Sizes { shared_mib, own_mib, clones, every, .. } = sizes;
    // A path of its own, so pagefold can find the clones by it.
    let scratch = scratch()?;
    let player = scratch.path().join("clone");
    fs::copy(setting.player, &player)?;
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let policies: [&dyn Policy; 2] = [&KsmPaced { pages: KSM_PAGES, seconds: 0 }, &Pagefold::new(0)];
    for by in policies {
        let name = by.name();
        let merged = sequence.conduct(report, &name, &name, |stage| start_all(stage, by, &player, &sizes))?;
        let Some(merged) = merged else { continue };
        let count = merged.len();
        let spread = Spread::of(merged).unwrap_or(Spread { median: 0.0, min: 0.0, max: 0.0 });
        report.figure(format!("clones of which 90 % was merged before the next start, {name}"), count as f64);
        report.figure(format!("seconds to 90 % of a clone, median, {name}"), spread.median);
        report.figure(format!("seconds to 90 % of a clone, longest, {name}"), spread.max);
        if name == SUBJECT && !setting.quick {
            let longest = if count == clones { spread.max } else { every as f64 };
            report.bar("seconds until 90 % of each clone is merged", Limit::AtMost(5.0), Some(longest));
        }
        rows.push((name, spread.max));
    }
    let subtitle =
        format!("seconds; the slowest of {clones} clones, {shared_mib} MiB each, beside {own_mib} MiB of its own");
    report.picture("time until 90 % of a clone is merged", subtitle, rows);
    Ok(())
}

/// Starts clones one after another under KSM or pagefold. Returns the time from each clone's start until 90 % of its
/// contents in common with the others was merged, if that happened before the next one started.
fn start_all(stage: &mut Stage<'_>, by: &dyn Policy, player: &Path, sizes: &Sizes) -> anyhow::Result<Vec<f64>> {
    let interrupt = stage.setting.interrupt;
    let shared = mib(sizes.shared_mib);
    let every = Duration::from_secs(sizes.every);
    let spec = TenantSpec::new([
        Segment::Shared { pages: shared.0, seed: 1 },
        Segment::Random { pages: mib(sizes.own_mib).0, seed: 2 },
    ]);
    let mut alive = VecDeque::new();
    for _ in 0..WARM {
        alive.push_back(start(by, player, &spec)?);
    }
    stage.merge(by, &["--exe", &player.to_string_lossy()])?;
    interrupt.sleep(Duration::from_secs(sizes.warm_up_seconds))?;
    let mut seconds = Vec::new();
    let mut intact = true;
    for _ in 0..sizes.clones {
        let began = Instant::now();
        let clone = start(by, player, &spec)?;
        let process = Process::open(clone.pid())?;
        alive.push_back(clone);
        let mut is_merged = false;
        while began.elapsed() < every {
            interrupt.sleep(POLL)?;
            if !is_merged && merged(&process)? * 10 >= shared.0 * 9 {
                is_merged = true;
                seconds.push(began.elapsed().as_secs_f64());
            }
        }
        let too_many = alive.len().saturating_sub(ALIVE);
        for mut oldest in alive.drain(..too_many) {
            intact &= are_intact([&mut oldest])?;
        }
    }
    intact &= are_intact(&mut alive)?;
    stage.end()?;
    stage.run.savable_bytes = Some(shared.bytes().0 * ALIVE as u64);
    stage.answered(intact);
    Ok(seconds)
}

fn start(by: &dyn Policy, player: &Path, spec: &TenantSpec) -> anyhow::Result<Tenant> {
    let tenant = Tenant::start(player, spec)?;
    by.mark_new(tenant.pid())?;
    Ok(tenant)
}

/// The number of merged pages in a process.
fn merged(process: &Process) -> Result<u64, ReadError> {
    let text = process.read_file("ksm_stat")?;
    Ok(number(&text, "ksm_merging_pages").unwrap_or(0))
}
