//! Compile jobs, two at a time: how much we save in short-lived processes, and the cost of merging them.

use super::{Experiment, ExperimentSetting, PolicySequence, shuffled, sort_runs};
use crate::bench::measures::{Spread, median};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmPaced, Marks, NO_MERGING, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit, in_round};
use crate::bench::sampling::SamplingThread;
use crate::programs::{Compiler, scratch};
use anyhow::Context;
use pagefold_engine::units::{Bytes, PAGE_SIZE, whole};
use pagefold_procmem::os::cpu::reaped_children_cpu_ns;
use pagefold_procmem::os::fields::{kib, number};
use pagefold_procmem::process::Process;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::Duration;

pub const EXPERIMENT: Experiment = Experiment {
    name: "build",
    claim: "ours: compile jobs that are over in seconds take at most 1 % longer beside pagefold than without it (UKSM: 1.5 to 3 % on SPEC CPU)",
    run,
};

/// The seed for the order of policies in each round.
const SEED: u64 = 16;
/// A policy runs for this long before the first job.
const HEAD_START: Duration = Duration::from_secs(2);
/// Time between two samples of the jobs' memory. A sample takes about 2 ms.
const INTERVAL: Duration = Duration::from_millis(250);

struct Sizes {
    rounds: u64,
    jobs: usize,
    functions: u64,
}

/// A policy's effect on the jobs of one round.
#[derive(Clone, Copy, Debug)]
struct Felt {
    /// Mean time from start to end of a job, and CPU time of a job and its children.
    seconds: f64,
    cpu_seconds: f64,
    /// CPU time of pagefold and ksmd for each job.
    policy_cpu_seconds: f64,
    /// Anonymous memory of the compilers, and the part that we saved: means over time.
    held_mib: f64,
    saved_mib: f64,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = if setting.quick {
        Sizes { rounds: 1, jobs: 4, functions: 40 }
    } else {
        Sizes { rounds: 3, jobs: 36, functions: 400 }
    };
    report.parameters([
        ("rounds", sizes.rounds),
        ("jobs", sizes.jobs as u64),
        ("functions_in_a_source", sizes.functions),
        ("seed", SEED),
    ]);
    let scratch = scratch()?;
    let compiler = Compiler::make(scratch.path(), sizes.functions)?;
    let policies: [&dyn Policy; 3] =
        [&Pagefold::new(0), &NoMerging { seconds: 0 }, &KsmPaced { pages: KSM_PAGES, seconds: 0 }];
    let mut sequence = PolicySequence::take(setting)?;
    let mut felt: BTreeMap<String, Vec<Felt>> = BTreeMap::new();
    let mut ratios: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for round in 0..sizes.rounds {
        let mut measured: BTreeMap<String, Felt> = BTreeMap::new();
        for &by in shuffled(&policies, Some(SEED + round)) {
            let name = by.name();
            let in_round = in_round(&name, round + 1);
            let felt = sequence.conduct(report, &name, &in_round, |stage| compile_all(stage, by, &compiler, &sizes))?;
            measured.extend(felt.map(|felt| (name, felt)));
        }
        let base = measured.get(NO_MERGING).copied();
        for (name, one) in measured {
            if let Some(base) = base.filter(|_| name != NO_MERGING) {
                let ratio = (one.seconds / base.seconds, one.cpu_seconds / base.cpu_seconds);
                ratios.entry(name.clone()).or_default().push(ratio);
            }
            felt.entry(name).or_default().push(one);
        }
    }
    // By round, and in the order above within a round.
    let names: Vec<String> =
        (1..=sizes.rounds).flat_map(|round| policies.map(|policy| in_round(&policy.name(), round))).collect();
    sort_runs(report, &names);
    put_figures(report, &felt, &ratios);
    if !setting.quick {
        let ratio = ratios.get(SUBJECT).map(|ratios| median(ratios.iter().map(|ratio| ratio.0)));
        report.bar("time of a job relative to no merging", Limit::AtMost(1.01), ratio);
    }
    Ok(())
}

fn put_figures(
    report: &mut ExperimentReport,
    felt: &BTreeMap<String, Vec<Felt>>,
    ratios: &BTreeMap<String, Vec<(f64, f64)>>,
) {
    let mut rows = Vec::new();
    for (name, all) in felt {
        let middle = |value: fn(&Felt) -> f64| median(all.iter().map(value));
        report.figure(format!("{name}: seconds a job"), middle(|felt| felt.seconds));
        report.figure(format!("{name}: CPU seconds a job"), middle(|felt| felt.cpu_seconds));
        report
            .figure(format!("{name}: CPU ms of pagefold and ksmd a job"), middle(|felt| felt.policy_cpu_seconds * 1e3));
        report.figure(format!("{name}: MiB held by the compilers, mean over time"), middle(|felt| felt.held_mib));
        report.figure(format!("{name}: MiB saved, mean over time"), middle(|felt| felt.saved_mib));
        rows.push((name.clone(), middle(|felt| felt.seconds)));
    }
    for (name, all) in ratios {
        for (what, of) in [("time", (|ratio| ratio.0) as fn(&(f64, f64)) -> f64), ("CPU time", |ratio| ratio.1)] {
            let Some(spread) = Spread::of(all.iter().map(of)) else { continue };
            for (which, value) in [("lowest", spread.min), ("highest", spread.max), ("median", spread.median)] {
                report.figure(format!("{name}: {what} of a job relative to no merging, {which}"), value);
            }
        }
    }
    report.picture("time of a compile job", "seconds, two at a time; median of the rounds", rows);
}

/// Runs the jobs under a policy.
fn compile_all(stage: &mut Stage<'_>, by: &dyn Policy, compiler: &Compiler, sizes: &Sizes) -> anyhow::Result<Felt> {
    let (setting, interrupt) = (stage.setting, stage.setting.interrupt);
    // pagefold doesn't start with nothing in scope.
    let idle = compiler.start_idle()?;
    stage.merge(by, &["--exe", &compiler.path().to_string_lossy()])?;
    // `pagefold exec` permits merging all their memory, and processes inherit that.
    let exec = [setting.program.as_os_str(), OsStr::new("exec")];
    let starting = if by.marks() == Marks::Everything { &exec[..] } else { &[] };
    interrupt.sleep(HEAD_START)?;
    let exe = compiler.path();
    let memory = SamplingThread::start(INTERVAL, move |_| Ok(memory_of(&exe)));
    let spent_ns = reaped_children_cpu_ns();
    let jobs = compiler.run_all(starting, sizes.jobs, interrupt)?;
    let spent = Duration::from_nanos(reaped_children_cpu_ns().saturating_sub(spent_ns));
    let memory = memory.finish()?;
    stage.stop_sampling()?;
    stage.end()?;
    drop(idle);

    let run = &mut stage.run;
    let right = jobs.iter().all(|job| job.1);
    run.forget_curve();
    let mean = |of: fn(&(f64, f64)) -> f64| memory.iter().map(of).sum::<f64>() / memory.len().max(1) as f64;
    let (held, saved) = (mean(|now| now.0), mean(|now| now.1));
    run.saved_bytes = whole(saved);
    run.saved_bytes_max = whole(memory.iter().map(|now| now.1).fold(0.0, f64::max));
    run.answers_correct = Answers { before: true, during: right, after: right };
    let count = jobs.len().max(1) as f64;
    Ok(Felt {
        seconds: jobs.iter().map(|job| job.0.as_secs_f64()).sum::<f64>() / count,
        cpu_seconds: spent.as_secs_f64() / count,
        policy_cpu_seconds: run.cpu_seconds / count,
        held_mib: Bytes(whole(held)).mib(),
        saved_mib: Bytes(whole(saved)).mib(),
    })
}

/// The anonymous memory of all processes that run a program, and the part that merging saves: pages that others share,
/// and zero pages. Bytes.
fn memory_of(exe: &Path) -> (f64, f64) {
    let mut sum = (0.0, 0.0);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        if fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|link| link == exe) {
            // A process may end at any time, and then holds nothing.
            if let Ok((held, saved)) = memory_of_one(pid) {
                sum = (sum.0 + held, sum.1 + saved);
            }
        }
    }
    sum
}

fn memory_of_one(pid: i32) -> anyhow::Result<(f64, f64)> {
    let process = Process::open(pid)?;
    let (rollup, ksm) = (process.read_file("smaps_rollup")?, process.read_file("ksm_stat")?);
    let bytes = |key| kib(&rollup, key).map(|kib| kib as f64 * 1024.0).map_err(anyhow::Error::msg);
    let zeros = number::<u64>(&ksm, "ksm_zero_pages").map_err(anyhow::Error::msg).context("ksm_stat")?;
    let (anonymous, zeros) = (bytes("Anonymous")?, zeros as f64 * PAGE_SIZE as f64);
    Ok((anonymous + zeros, anonymous - bytes("Pss_Anon")? + zeros))
}
