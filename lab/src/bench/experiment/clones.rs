//! Serverless-style churn, as in sandboxes for functions and agents: we start clones of a warm image one after another,
//! and time how long each takes to merge with its predecessors.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::measures::median;
use crate::bench::policy::ksm::{KSM_PAGES, mark_eligible};
use crate::bench::policy::{KsmPaced, Marks, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit};
use crate::programs::scratch;
use pagefold_engine::units::{Pages, whole};
use pagefold_procmem::os::fields::number;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_workload::{Segment, Tenant, TenantSpec, Verdict};
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

struct Sizes {
    shared: Pages,
    own: Pages,
    clones: usize,
    warm_up: Duration,
    /// The time between two starts.
    every: Duration,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (shared_mib, own_mib, clones, warm_up, every) =
        if setting.quick { (8, 4, 2, 8, 5) } else { (64, 32, 8, 20, 8) };
    report.parameters([
        ("shared_mib", shared_mib),
        ("own_mib", own_mib),
        ("clones", clones),
        ("seconds_between", every),
    ]);
    let sizes = Sizes {
        shared: mib(shared_mib),
        own: mib(own_mib),
        clones: usize::try_from(clones)?,
        warm_up: Duration::from_secs(warm_up),
        every: Duration::from_secs(every),
    };
    // A path of its own, so pagefold can find the clones by it.
    let scratch = scratch()?;
    let player = scratch.path().join("clone");
    fs::copy(setting.player, &player)?;
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    let policies: [&dyn Policy; 2] = [&KsmPaced { pages: KSM_PAGES, seconds: 0 }, &Pagefold::new(0)];
    for by in policies {
        let name = by.name();
        let seconds = sequence.conduct(report, &name, &name, |stage| start_all(stage, by, &player, &sizes))?;
        let Some(seconds) = seconds else { continue };
        let merged = seconds.iter().flatten().copied();
        let longest = merged.clone().fold(0.0, f64::max);
        report.figure(
            format!("clones of which 90 % was merged before the next start, {name}"),
            merged.clone().count() as f64,
        );
        report.figure(format!("seconds to 90 % of a clone, median, {name}"), median(merged));
        report.figure(format!("seconds to 90 % of a clone, longest, {name}"), longest);
        rows.push((name.clone(), longest));
        if name == SUBJECT && !setting.quick {
            let all = seconds.iter().all(Option::is_some);
            let longest = if all { longest } else { sizes.every.as_secs_f64() };
            report.bar("seconds until 90 % of each clone is merged", Limit::AtMost(5.0), Some(longest));
        }
    }
    let subtitle =
        format!("seconds; the slowest of {clones} clones, {shared_mib} MiB each, beside {own_mib} MiB of its own");
    report.picture("time until 90 % of a clone is merged", subtitle, rows);
    Ok(())
}

/// Starts clones one after another under KSM or pagefold. Returns the time from each clone's start until 90 % of its
/// contents in common with the others is merged, if that happens before the next one starts.
fn start_all(stage: &mut Stage<'_>, by: &dyn Policy, player: &Path, sizes: &Sizes) -> anyhow::Result<Vec<Option<f64>>> {
    let interrupt = stage.setting.interrupt;
    let spec = TenantSpec::new([
        Segment::Shared { pages: sizes.shared.0, seed: 1 },
        Segment::Random { pages: sizes.own.0, seed: 2 },
    ]);
    let start = || -> anyhow::Result<(Tenant, Process)> {
        let tenant = Tenant::start(player, &spec)?;
        let process = Process::open(tenant.pid())?;
        if by.marks() == Marks::Everything {
            mark_eligible(&process)?;
        }
        Ok((tenant, process))
    };
    let mut alive = VecDeque::new();
    for _ in 0..WARM {
        alive.push_back(start()?.0);
    }
    stage.merge(by, &["--exe", &player.to_string_lossy()])?;
    interrupt.sleep(sizes.warm_up)?;
    let (mut seconds, mut intact) = (Vec::new(), true);
    for _ in 0..sizes.clones {
        let began = Instant::now();
        let (tenant, process) = start()?;
        alive.push_back(tenant);
        let mut reached = None;
        while began.elapsed() < sizes.every {
            interrupt.sleep(POLL)?;
            if reached.is_none() && merged(&process)? * 10 >= sizes.shared.0 * 9 {
                reached = Some(began.elapsed().as_secs_f64());
            }
        }
        seconds.push(reached);
        while alive.len() > ALIVE {
            if let Some(mut oldest) = alive.pop_front() {
                intact &= oldest.verify()? == Verdict::Intact;
            }
        }
    }
    for tenant in &mut alive {
        intact &= tenant.verify()? == Verdict::Intact;
    }
    stage.end()?;
    stage.run.savable_bytes = Some(Pages(sizes.shared.0 * whole(ALIVE as f64)).bytes().0);
    stage.run.answers_correct = Answers { before: true, during: intact, after: intact };
    Ok(seconds)
}

/// The number of merged pages in a process.
fn merged(process: &Process) -> Result<u64, ReadError> {
    let text = process.read_file("ksm_stat")?;
    Ok(number(&text, "ksm_merging_pages").unwrap_or(0))
}
