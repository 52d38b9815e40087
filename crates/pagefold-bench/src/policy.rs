//! The ways to fold that are compared: KSM left to itself, an oracle, and pagefold.
//!
//! Clocks start when the marks are set. What the peers' marking and the oracle's reading cost is not charged to them;
//! everything that pagefold does is.

use crate::daemon;
use crate::interrupt::Interrupt;
use crate::marking::{Stretch, everything, mark};
use crate::oracle;
use crate::programs::Target;
use crate::record::{Answers, Run, agree, answers};
use crate::sampler::Sampler;
use crate::steering::Steering;
use anyhow::bail;
use pagefold_linux::ksm::Knob;
use pagefold_linux::process::Process;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Copies of one content that share a page, where the policy may choose: most of what longer lists gain against
/// chains of full ones, at a sixteenth of the reverse-map walk.
const LONG_SHARING: u64 = 4096;

/// A batch of the unpaced scan: some tens of milliseconds, so that it can be stopped.
const BATCH_PAGES: u64 = 20_000;

/// Full scans without further savings after which KSM counts as done.
const QUIET_SCANS: u32 = 2;

/// Smart scan leaves a page out of up to eight scans in a row, so it takes nine to see what a scan costs on average.
const LATER_SCANS: u32 = 9;

/// Even a scan of gigabytes with long chains comes to its end in this time.
const EVERYTHING_LIMIT: Duration = Duration::from_secs(600);

/// A way to fold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// KSM with its defaults, everything marked, scanning without a pause until scans bring nothing more.
    KsmEverything,
    /// KSM, everything marked, so many pages every 20 ms, as its users set it.
    KsmPaced {
        /// Pages in a batch.
        pages: u64,
        /// For how long.
        seconds: u64,
    },
    /// KSM with its own advisor, everything marked.
    KsmAdvisor {
        /// For how long.
        seconds: u64,
    },
    /// Every page is known beforehand; dense extents are marked and merged at once.
    Oracle,
    /// `pagefold run`.
    Pagefold {
        /// For how long.
        seconds: u64,
    },
}

/// The name of the policy that experiments are about.
pub const SUBJECT: &str = "pagefold";

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KsmEverything => f.write_str("ksm-everything"),
            Self::KsmPaced { pages, .. } => write!(f, "ksm-{pages}/20ms"),
            Self::KsmAdvisor { .. } => f.write_str("ksm-advisor"),
            Self::Oracle => f.write_str("oracle"),
            Self::Pagefold { .. } => f.write_str(SUBJECT),
        }
    }
}

/// Runs a policy on targets that nobody has marked yet, and gives everything back but the marks: end the targets to
/// be rid of these. `expected` is what the targets are to answer.
pub fn run(
    policy: &Policy,
    targets: &mut [Box<dyn Target>],
    expected: &[Option<String>],
    steering: &mut Steering,
    program: &Path,
    interrupt: &Interrupt,
) -> anyhow::Result<Run> {
    let before = agree(expected, &answers(targets));
    let processes = targets.iter().map(|target| Process::open(target.pid())).collect::<Result<Vec<_>, _>>()?;
    steering.kernel_defaults()?;
    let mut run = Run { policy: policy.to_string(), ..Run::default() };
    let followed = follow(policy, &processes, steering, program, interrupt, &mut run);
    let during = followed.is_ok() && agree(expected, &answers(targets));
    // Whatever went wrong, nothing stays merged.
    steering.unmerge()?;
    followed?;
    let after = agree(expected, &answers(targets));
    run.answers_correct = Answers { before, during, after };
    Ok(run)
}

fn follow(
    policy: &Policy,
    processes: &[Process],
    steering: &mut Steering,
    program: &Path,
    interrupt: &Interrupt,
    run: &mut Run,
) -> anyhow::Result<()> {
    match policy {
        Policy::Pagefold { .. } => {}
        Policy::Oracle => {
            let knowledge = oracle::know(processes)?;
            run.savable_bytes = Some(knowledge.savable.0);
            run.marked_bytes = Some(mark_all(processes, &knowledge.stretches)?);
        }
        _ => {
            let stretches = processes.iter().map(everything).collect::<anyhow::Result<Vec<_>>>()?;
            run.marked_bytes = Some(mark_all(processes, &stretches)?);
        }
    }
    let sampler = Sampler::start()?;
    match *policy {
        Policy::KsmEverything => scan_until_quiet(steering, interrupt)?,
        Policy::KsmPaced { pages, seconds } => {
            steering.set(Knob::PagesToScan, pages)?;
            steering.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(seconds))?;
        }
        Policy::KsmAdvisor { seconds } => {
            steering.set_advisor("scan-time")?;
            steering.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(seconds))?;
        }
        Policy::Oracle => burst(steering, interrupt)?,
        Policy::Pagefold { seconds } => {
            let pids: Vec<i32> = processes.iter().map(Process::pid).collect();
            let ran = daemon::run(program, &pids, Duration::from_secs(seconds), interrupt)?;
            run.cpu_pagefold_seconds = ran.cpu_seconds;
            run.summary = Some(ran.summary);
        }
    }
    run.take_in(&sampler.finish()?);
    if matches!(policy, Policy::KsmEverything | Policy::Oracle) {
        let before_ns = steering.ksmd().cpu_ns()?;
        for _ in 0..LATER_SCANS {
            steering.scan_once(interrupt)?;
        }
        let spent = Duration::from_nanos(steering.ksmd().cpu_ns()?.saturating_sub(before_ns));
        run.cpu_ksmd_seconds_per_later_scan = Some(spent.as_secs_f64() / f64::from(LATER_SCANS));
    }
    Ok(())
}

fn mark_all(processes: &[Process], stretches: &[Vec<Stretch>]) -> anyhow::Result<u64> {
    processes.iter().zip(stretches).map(|(process, stretches)| Ok(mark(process, stretches)?.0)).sum()
}

fn saved_pages(steering: &Steering) -> anyhow::Result<u64> {
    Ok(steering.ksm().counters()?.view(true, false).saved().0)
}

/// Less than this is the coming and going of a living program's pages: one in a thousand, and a few.
fn is_more(saved: u64, before: u64) -> bool {
    saved > before + before / 1000 + 16
}

fn scan_until_quiet(steering: &Steering, interrupt: &Interrupt) -> anyhow::Result<()> {
    steering.set(Knob::PagesToScan, BATCH_PAGES)?;
    steering.set(Knob::SleepMillisecs, 0)?;
    let first = steering.ksm().full_scans()?;
    steering.set(Knob::Run, 1)?;
    let (mut scans, mut most, mut quiet) = (first, 0, 0);
    let done = interrupt.wait(EVERYTHING_LIMIT, || {
        let now = steering.ksm().full_scans()?;
        if now == scans {
            return Ok(None);
        }
        scans = now;
        let saved = saved_pages(steering)?;
        // Nothing can be merged at the first visit.
        quiet = if now < first + 2 || is_more(saved, most) { 0 } else { quiet + 1 };
        most = most.max(saved);
        Ok((quiet >= QUIET_SCANS).then_some(()))
    })?;
    steering.stop()?;
    if done.is_none() {
        bail!("KSM still saves more after {EVERYTHING_LIMIT:?}");
    }
    Ok(())
}

/// Two scans, of which the second merges, and more as long as they save more.
fn burst(steering: &mut Steering, interrupt: &Interrupt) -> anyhow::Result<()> {
    const MOST_SCANS: u32 = 4;
    steering.set(Knob::MaxPageSharing, LONG_SHARING)?;
    steering.set(Knob::UseZeroPages, 1)?;
    let began = Instant::now();
    let mut before = 0;
    for scan in 0..MOST_SCANS {
        steering.scan_once(interrupt)?;
        let saved = saved_pages(steering)?;
        if scan >= 2 && !is_more(saved, before) || began.elapsed() > EVERYTHING_LIMIT {
            break;
        }
        before = saved;
    }
    steering.stop()
}
