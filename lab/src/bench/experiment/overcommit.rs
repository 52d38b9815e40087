//! More memory than there is: we start programs with the same contents one after another below a limit, each as soon as
//! there's room.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::metric;
use crate::bench::policy::ksm::{KSM_PAGES, mark_eligible};
use crate::bench::policy::{KsmPaced, Marks, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit};
use crate::programs::{MemoryLimit, scratch};
use anyhow::ensure;
use pagefold_engine::units::{Bytes, Pages};
use pagefold_procmem::process::Process;
use pagefold_workload::{Segment, Tenant, TenantSpec, Verdict};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "overcommit",
    claim: "KSM's tree (2009): 12 GiB are allocated on a machine with 4 GiB (here 1,536 MiB below a limit of 512 MiB)",
    run,
};

/// One page in this many of each program is its own.
const OWN_PART: u64 = 32;
/// Room for the rest of a program's memory, and for the kernel's records of it, bytes.
const MARGIN: u64 = 8 << 20;
const POLL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
struct Sizes {
    limit: Bytes,
    each: Pages,
    most: usize,
    /// A program waits this long for room.
    patience: Duration,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (limit_mib, each_mib, most, patience) = if setting.quick { (80, 24, 4, 10) } else { (512, 128, 12, 30) };
    report.parameters([
        ("limit_mib", limit_mib),
        ("each_mib", each_mib),
        ("programs_at_most", most),
        ("seconds_of_patience", patience),
    ]);
    let (limit, patience) = (Bytes(limit_mib << 20), Duration::from_secs(patience));
    let sizes = Sizes { limit, each: mib(each_mib), most: usize::try_from(most)?, patience };
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
            let held = started as f64 * sizes.each.bytes().mib();
            report.figure(metric::FITTING_MEMORY.of([&name]), held);
            rows.push((name, held));
        }
    }
    let ours = rows.iter().find(|(name, _)| name == SUBJECT).map(|(_, held)| held / sizes.limit.mib());
    report.picture("programs that fit", format!("MiB; below a limit of {limit_mib} MiB"), rows);
    if !setting.quick {
        report.bar(metric::FITTING_OF_LIMIT, Limit::AtLeast(3.0), ours);
    }
    Ok(())
}

/// Starts programs as long as there's room for the next in time. Returns how many.
fn start_all(stage: &mut Stage<'_>, by: &dyn Policy, player: &Path, sizes: &Sizes) -> anyhow::Result<usize> {
    let interrupt = stage.setting.interrupt;
    let group = MemoryLimit::make(sizes.limit.0)?;
    let own = sizes.each.0 / OWN_PART;
    let spec = TenantSpec::new([
        Segment::Shared { pages: sizes.each.0 - own, seed: 1 },
        Segment::Random { pages: own, seed: 2 },
    ]);
    let enter = group.enter();
    let entering: Vec<&str> = enter.iter().map(String::as_str).collect();
    let start = || -> anyhow::Result<Tenant> {
        let tenant = Tenant::start_by(&entering, player, &spec)?;
        if by.marks() == Marks::Everything {
            let process = Process::open(tenant.pid())?;
            mark_eligible(&process)?;
        }
        Ok(tenant)
    };
    // pagefold doesn't start with nothing in scope.
    let mut tenants = vec![start()?];
    stage.merge(by, &["--exe", &player.to_string_lossy()])?;
    let needed = sizes.each.bytes().0 + MARGIN;
    while tenants.len() < sizes.most {
        let began = Instant::now();
        let mut has_room = group.usage()? + needed <= sizes.limit.0;
        while !has_room && began.elapsed() < sizes.patience {
            interrupt.sleep(POLL)?;
            has_room = group.usage()? + needed <= sizes.limit.0;
        }
        if !has_room {
            break;
        }
        tenants.push(start()?);
    }
    stage.stop_sampling()?;
    let mut intact = true;
    for tenant in &mut tenants {
        intact &= tenant.verify()? == Verdict::Intact;
    }
    ensure!(group.kills()? == 0, "the kernel has killed a program");
    // Unmerging needs room for the copies.
    group.lift()?;
    stage.end()?;
    stage.run.answers_correct = Answers { before: true, during: intact, after: intact };
    Ok(tenants.len())
}
