//! Compile jobs, two at a time: how much we save in short-lived processes, and the cost of merging them.

use super::rounds::{Rounds, parts};
use super::{Experiment, ExperimentSetting, PolicySequence, shuffled};
use crate::bench::frames::{Held, zero_pages};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KSM, KsmPaced, Marks, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{ExperimentReport, Limit, in_round};
use crate::bench::sampling::SamplingThread;
use crate::programs::{Compiler, scratch};
use pagefold_engine::units::whole;
use pagefold_procmem::os::cpu::reaped_children_cpu_ns;
use pagefold_procmem::process::Process;
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
const MIB: f64 = 1_048_576.0;

sizes! {
    rounds: u64 = 3, quick 1, as "rounds";
    jobs: usize = 36, quick 4, as "jobs";
    functions: u64 = 400, quick 40, as "functions_in_a_source";
}

/// Figures of each policy and round.
const SECONDS: &str = ": seconds a job";
const CPU_SECONDS: &str = ": CPU seconds a job";

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    report.parameters([("seed", SEED)]);
    let scratch = scratch()?;
    let compiler = Compiler::make(scratch.path(), sizes.functions)?;
    let policies: Vec<Box<dyn Policy>> = vec![
        Box::new(Pagefold::new(0)),
        Box::new(NoMerging { seconds: 0 }),
        Box::new(KsmPaced { pages: KSM_PAGES, seconds: 0 }),
    ];
    let mut sequence = PolicySequence::take(setting)?;
    let mut felt = Rounds::default();
    for round in 0..sizes.rounds {
        for by in shuffled(&policies, Some(SEED + round)) {
            let name = by.name();
            let in_round = in_round(&name, round + 1);
            let figures =
                sequence.conduct(report, &name, &in_round, |stage| compile_all(stage, &**by, &compiler, &sizes))?;
            for (figure, value) in figures.into_iter().flatten() {
                felt.add(&name, round, figure, value);
            }
        }
    }
    felt.put(report, &policies, sizes.rounds);
    for name in [SUBJECT, KSM] {
        for (what, figure) in [("time", SECONDS), ("CPU time", CPU_SECONDS)] {
            let Some(spread) = felt.relative_to_unmerged(name, figure) else { continue };
            for (which, value) in parts(spread) {
                report.figure(format!("{name}: {what} of a job relative to no merging, {which}"), value);
            }
        }
    }
    let rows = felt.medians(SECONDS);
    report.picture("time of a compile job", "seconds, two at a time; median of the rounds", rows);
    if !setting.quick {
        let time = felt.relative_to_unmerged(SUBJECT, SECONDS).map(|time| time.median);
        report.bar("time of a job relative to no merging", Limit::AtMost(1.01), time);
    }
    Ok(())
}

/// Runs the jobs under a policy, and returns the figures.
fn compile_all(
    stage: &mut Stage<'_>,
    by: &dyn Policy,
    compiler: &Compiler,
    sizes: &Sizes,
) -> anyhow::Result<[(&'static str, f64); 5]> {
    let setting = stage.setting;
    let interrupt = setting.interrupt;
    // pagefold doesn't start with nothing in scope.
    let idle = compiler.start_idle()?;
    let exe = compiler.path();
    stage.merge(by, &["--exe", &exe.to_string_lossy()])?;
    // `pagefold exec` permits merging all their memory, and processes inherit that.
    let exec = [setting.program.as_os_str(), OsStr::new("exec")];
    let starting = if by.marks() == Marks::Everything { &exec[..] } else { &[] };
    interrupt.sleep(HEAD_START)?;
    let memory = SamplingThread::start(INTERVAL, move |_| memory_of(&exe));
    let spent_ns = reaped_children_cpu_ns();
    let jobs = compiler.run_all(starting, sizes.jobs, interrupt)?;
    let spent = Duration::from_nanos(reaped_children_cpu_ns().saturating_sub(spent_ns));
    let memory = memory.finish()?;
    stage.stop_sampling()?;
    stage.end()?;
    drop(idle);

    let mut most_saved: f64 = 0.0;
    for now in &memory {
        most_saved = most_saved.max(now.shared());
    }
    let mean = Held::mean(&memory);
    let saved = mean.shared();
    let mut took = Duration::ZERO;
    let mut right = true;
    for job in &jobs {
        took += job.0;
        right &= job.1;
    }
    stage.answered(right);
    let run = &mut stage.run;
    run.forget_curve();
    run.saved_bytes = whole(saved * MIB);
    run.saved_bytes_max = whole(most_saved * MIB);
    let count = jobs.len().max(1) as f64;
    Ok([
        (SECONDS, took.as_secs_f64() / count),
        (CPU_SECONDS, spent.as_secs_f64() / count),
        (": CPU ms of pagefold and ksmd a job", 1e3 * run.cpu_seconds / count),
        (": MiB held by the compilers, mean over time", mean.by_processes),
        (": MiB saved, mean over time", saved),
    ])
}

/// The anonymous memory of all processes that run a program. Merging saves frames, and zero pages take none.
fn memory_of(exe: &Path) -> anyhow::Result<Held> {
    let mut sum = Held::default();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        if !fs::read_link(entry.path().join("exe")).is_ok_and(|link| link == exe) {
            continue;
        }
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        // A process may end at any time, and then holds nothing.
        if let Ok(held) = memory_of_one(pid) {
            sum.by_processes += held.by_processes;
            sum.in_frames += held.in_frames;
        }
    }
    Ok(sum)
}

fn memory_of_one(pid: i32) -> anyhow::Result<Held> {
    let process = Process::open(pid)?;
    let mut held = Held::by([&process])?;
    held.by_processes += zero_pages(&process.read_file("ksm_stat")?)?.bytes().mib();
    Ok(held)
}
