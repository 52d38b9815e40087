//! The ways to fold that are compared: KSM left to itself, an oracle, and pagefold.
//!
//! Clocks start when the marks are set. What the peers' marking and the oracle's reading cost is not charged to them;
//! everything that pagefold does is.

use crate::bench::daemon;
use crate::bench::oracle;
use crate::bench::page_tables::PageTables;
use crate::bench::report::{Answers, PolicyRun, agree, answers};
use crate::bench::sampler::Sampler;
use crate::programs::Target;
use anyhow::bail;
use pagefold_core::units::Permyriad;
use pagefold_linux::inject::mark::{PageSpan, mark};
use pagefold_linux::ksm::Knob;
use pagefold_linux::ksm::experiment::KsmForExperiment;
use pagefold_linux::os::interrupt::Interrupt;
use pagefold_linux::proc::process::Process;
use pagefold_linux::scope::eligible::eligible_spans;
use pagefold_workload::ActivityCounters;
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
    /// KSM, everything marked, a batch every 20 ms, whose size is set again and again so that ksmd takes this share of
    /// a core.
    KsmSteered {
        /// Of a core, in hundredths of a per cent.
        share: Permyriad,
        /// For how long.
        seconds: u64,
    },
    /// Nobody folds anything.
    Nobody {
        /// For how long.
        seconds: u64,
    },
    /// Every page is known beforehand; dense extents are marked and merged at once.
    Oracle,
    /// `pagefold run`.
    Pagefold {
        /// For how long at most.
        seconds: u64,
        /// Further options of it.
        options: Vec<String>,
        /// When to end it earlier.
        enough: Option<Enough>,
    },
}

/// When a daemon has done what it was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enough {
    /// So much is saved,
    pub saved_bytes: u64,
    /// and so much time has passed.
    pub seconds: u64,
}

impl Policy {
    /// `pagefold run` as it is by default.
    pub fn pagefold(seconds: u64) -> Self {
        Self::pagefold_with(seconds, &[])
    }

    /// `pagefold run` with further options.
    pub fn pagefold_with(seconds: u64, options: &[&str]) -> Self {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Self::Pagefold { seconds, options, enough: None }
    }

    /// The same, ended when it is enough. Only for pagefold.
    #[must_use]
    pub fn until(self, enough: Enough) -> Self {
        match self {
            Self::Pagefold { seconds, options, .. } => Self::Pagefold { seconds, options, enough: Some(enough) },
            other => other,
        }
    }
}

/// The name of the policy that experiments are about.
pub const SUBJECT: &str = "pagefold";

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KsmEverything => f.write_str("ksm-everything"),
            Self::KsmPaced { pages, .. } => write!(f, "ksm-{pages}/20ms"),
            Self::KsmAdvisor { seconds } => write!(f, "ksm-advisor/{seconds}s"),
            Self::KsmSteered { share, .. } => write!(f, "ksm at {:.2} %", 100.0 * share.fraction()),
            Self::Nobody { .. } => f.write_str("nobody"),
            Self::Oracle => f.write_str("oracle"),
            Self::Pagefold { options, .. } => {
                f.write_str(SUBJECT)?;
                options.iter().try_for_each(|option| write!(f, " {option}"))
            }
        }
    }
}

/// Runs a policy on targets that nobody has marked yet, and gives everything back but the marks: end the targets to
/// be rid of these. `expected` is what the targets are to answer; with `exact` their page tables are read meanwhile.
pub fn run(
    policy: &Policy,
    targets: &mut [Box<dyn Target>],
    expected: &[Option<String>],
    exact: bool,
    steering: &mut KsmForExperiment,
    program: &Path,
    interrupt: &Interrupt,
) -> anyhow::Result<PolicyRun> {
    let before = agree(expected, &answers(targets));
    let processes = targets.iter().map(|target| Process::open(target.pid())).collect::<Result<Vec<_>, _>>()?;
    steering.kernel_defaults()?;
    let mut run = PolicyRun { policy: policy.to_string(), ..PolicyRun::default() };
    let done_before = counters(targets)?;
    let page_tables = if exact { Some(PageTables::watch(&processes)?) } else { None };
    let followed = follow(policy, &processes, steering, program, interrupt, &mut run);
    let done_after = counters(targets);
    let looks = page_tables.map(PageTables::finish).transpose();
    let during = followed.is_ok() && agree(expected, &answers(targets));
    // Whatever went wrong, nothing stays merged.
    steering.unmerge()?;
    followed?;
    run.counters = done_before.into_iter().zip(done_after?).collect();
    run.take_looks(looks?.unwrap_or_default());
    let after = agree(expected, &answers(targets));
    run.answers_correct = Answers { before, during, after };
    Ok(run)
}

fn counters(targets: &mut [Box<dyn Target>]) -> anyhow::Result<Vec<ActivityCounters>> {
    targets.iter_mut().filter_map(|target| target.counters().transpose()).collect()
}

fn follow(
    policy: &Policy,
    processes: &[Process],
    steering: &mut KsmForExperiment,
    program: &Path,
    interrupt: &Interrupt,
    run: &mut PolicyRun,
) -> anyhow::Result<()> {
    match policy {
        Policy::Pagefold { .. } | Policy::Nobody { .. } => {}
        Policy::Oracle => {
            let knowledge = oracle::know(processes)?;
            run.savable_bytes = Some(knowledge.savable.0);
            run.marked_bytes = Some(mark_all(processes, &knowledge.stretches)?);
        }
        _ => {
            let stretches = processes.iter().map(eligible_spans).collect::<Result<Vec<_>, _>>()?;
            run.marked_bytes = Some(mark_all(processes, &stretches)?);
        }
    }
    let sampler = Sampler::start()?;
    match policy {
        Policy::KsmEverything => scan_until_quiet(steering, interrupt)?,
        Policy::KsmPaced { pages, seconds } => {
            steering.set(Knob::PagesToScan, *pages)?;
            steering.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
        }
        Policy::KsmAdvisor { seconds } => {
            steering.set_advisor("scan-time")?;
            steering.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
        }
        Policy::Oracle => burst(steering, interrupt)?,
        Policy::KsmSteered { share, seconds } => {
            steer(share.fraction(), Duration::from_secs(*seconds), steering, interrupt)?;
        }
        Policy::Nobody { seconds } => interrupt.sleep(Duration::from_secs(*seconds))?,
        Policy::Pagefold { seconds, options, enough } => {
            let pids: Vec<i32> = processes.iter().map(Process::pid).collect();
            let mut daemon = daemon::run(program, &pids, options)?;
            sampler.watch(daemon.meter()?);
            interrupt.wait(Duration::from_secs(*seconds), || {
                let (now, ended) = (sampler.last(), daemon.has_ended()?);
                let done = enough.is_some_and(|enough| {
                    now.saved_bytes >= enough.saved_bytes && now.seconds >= enough.seconds as f64
                });
                anyhow::Ok((ended || done).then_some(()))
            })?;
            let ran = daemon.end(interrupt)?;
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

fn mark_all(processes: &[Process], stretches: &[Vec<PageSpan>]) -> anyhow::Result<u64> {
    processes.iter().zip(stretches).map(|(process, stretches)| Ok(mark(process, stretches)?.0)).sum()
}

fn saved_pages(steering: &KsmForExperiment) -> anyhow::Result<u64> {
    Ok(steering.ksm().counters()?.view(true, false).saved().0)
}

/// Less than this is the coming and going of a living program's pages: one in a thousand, and a few.
fn is_more(saved: u64, before: u64) -> bool {
    saved > before + before / 1000 + 16
}

fn scan_until_quiet(steering: &KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
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
        anyhow::Ok((quiet >= QUIET_SCANS).then_some(()))
    })?;
    steering.stop()?;
    if done.is_none() {
        bail!("KSM still saves more after {EVERYTHING_LIMIT:?}");
    }
    Ok(())
}

/// Sets the size of ksmd's batches every half second, so that it has taken `share` of a core by the end of the next
/// half second: what it took too much or too little before is made up for.
fn steer(share: f64, time: Duration, steering: &KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
    const EVERY: Duration = Duration::from_millis(500);
    let began = Instant::now();
    let spent_then = steering.ksmd().cpu_ns()?;
    let (mut pages, mut spent) = (100.0, 0.0);
    steering.set(Knob::PagesToScan, 100)?;
    steering.set(Knob::Run, 1)?;
    while began.elapsed() < time {
        interrupt.sleep(EVERY.min(time.saturating_sub(began.elapsed())))?;
        let now = Duration::from_nanos(steering.ksmd().cpu_ns()?.saturating_sub(spent_then)).as_secs_f64();
        let wanted = share * (began.elapsed() + EVERY).as_secs_f64() - now;
        pages = next_batch(pages, now - spent, wanted);
        spent = now;
        steering.set(Knob::PagesToScan, whole_pages(pages))?;
    }
    Ok(steering.stop()?)
}

/// The batch with which ksmd spends `wanted` seconds, if it spent `spent` with batches of `pages`. What a page costs
/// changes with what is found in it, so no step is larger than fourfold.
fn next_batch(pages: f64, spent: f64, wanted: f64) -> f64 {
    let factor = if spent > 0.0 { wanted / spent } else { 4.0 };
    (pages * factor.clamp(0.25, 4.0)).clamp(1.0, 100_000.0)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and 100,000")]
fn whole_pages(pages: f64) -> u64 {
    pages.round() as u64
}

/// Two scans, of which the second merges, and more as long as they save more.
fn burst(steering: &mut KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
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
    Ok(steering.stop()?)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_variants_apart() {
        let names = [
            Policy::pagefold(1),
            Policy::pagefold_with(1, &["--governor", "low"]),
            Policy::KsmSteered { share: Permyriad(250), seconds: 1 },
            Policy::KsmAdvisor { seconds: 120 },
        ];
        assert_eq!(
            names.map(|policy| policy.to_string()),
            ["pagefold", "pagefold --governor low", "ksm at 2.50 %", "ksm-advisor/120s"]
        );
    }

    #[test]
    fn batches_follow_what_is_wanted_and_stay_within_bounds() {
        assert_eq!(next_batch(100.0, 0.5, 0.25), 50.0);
        assert_eq!(next_batch(100.0, 0.0, 0.25), 400.0);
        assert_eq!(next_batch(100.0, 0.5, -1.0), 25.0);
        assert_eq!((next_batch(1.0, 1.0, 0.0), next_batch(90_000.0, 1.0, 9.0)), (1.0, 100_000.0));
        // A page that costs 10 us: within a few steps 5 % of a core are taken, 20 ms between batches.
        let mut pages = 100.0;
        for _ in 0..6 {
            let spent = pages * 25.0 * 10e-6;
            pages = next_batch(pages, spent, 0.05 * 0.5);
        }
        assert_eq!(pages, 100.0);
    }
}
