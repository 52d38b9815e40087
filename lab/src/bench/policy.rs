//! The compared ways to merge: plain KSM and what drives it, UKSM, an oracle, and pagefold.
//!
//! Time is measured from when the marks are set. The peers' marking, what ksmtuned runs and the oracle's reading are not charged to
//! them; everything that pagefold does is.

mod ksmtuned;
pub mod merger;
pub mod uksm;
mod uksmd;

use crate::bench::experiment::ExperimentSetting;
use crate::bench::report::{Answers, PolicyRun, agree};
use crate::bench::sampler::Sampler;
use crate::bench::sampling::SamplingThread;
use crate::bench::sysfs::Changed;
use crate::bench::{daemon, oracle, page_tables};
use crate::programs::{Target, answers};
use anyhow::{Context, bail};
use ksmtuned::Ksmtuned;
use pagefold_engine::units::{Permyriad, whole};
use pagefold_host::scope::eligible::eligible_spans;
use pagefold_inject::mark::{PageSpan, mark};
use pagefold_ksm::experiment::{ExperimentError, KsmForExperiment};
use pagefold_ksm::{KSM_ROOT, Knob};
use pagefold_procmem::os::fields::kib;
use pagefold_procmem::os::interrupt::Interrupt;
use pagefold_procmem::process::Process;
use pagefold_workload::ActivityCounters;
use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use uksm::Uksm;

/// `max_page_sharing` where the policy may choose: most of the gain of longer lists over chains of full ones, at a
/// sixteenth of the reverse-map walk.
const LONG_SHARING: u64 = 4096;

/// Pages that ksmd scans each 20 ms, as commonly configured.
pub const KSM_PAGES: u64 = 1000;

/// Pages in a batch of the unpaced scan: some tens of milliseconds, so that it can be stopped.
const BATCH_PAGES: u64 = 20_000;

/// Number of ksmd scans without further savings after which KSM counts as done.
const QUIET_SCANS: u32 = 2;

/// Smart scan skips a page in up to eight scans in a row, so the average cost of a scan takes nine.
const LATER_SCANS: u32 = 9;

/// Enough time for a scan of gigabytes with long chains.
const EVERYTHING_LIMIT: Duration = Duration::from_secs(600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// KSM with its defaults, everything marked, scanning without a pause until scans save nothing more.
    KsmEverything,
    /// KSM, everything marked, a fixed number of pages every 20 ms, as commonly configured.
    KsmPaced {
        pages: u64,
        seconds: u64,
    },
    /// KSM with its own advisor, everything marked.
    KsmAdvisor {
        seconds: u64,
    },
    /// The same at its cap: a whole core, and scans of a second as its aim, so that the core is what limits it.
    KsmAdvisorAtCap {
        seconds: u64,
    },
    /// KSM, everything marked, under ksmtuned with its defaults, or with a threshold that makes it start on any machine.
    Ksmtuned {
        always: bool,
        seconds: u64,
    },
    /// KSM by uksmd's rules.
    Uksmd {
        seconds: u64,
    },
    /// The kernel's UKSM, which needs no marks.
    Uksm {
        governor: &'static str,
        seconds: u64,
    },
    /// KSM, everything marked, a batch every 20 ms whose size is adjusted so that ksmd takes this share of a core.
    KsmSteered {
        share: Permyriad,
        seconds: u64,
    },
    NoMerging {
        seconds: u64,
    },
    /// All pages are read beforehand; extents with many duplicates are marked and merged at once.
    Oracle,
    /// `pagefold run`.
    Pagefold {
        /// Longest duration.
        seconds: u64,
        /// Further options of `pagefold run`.
        options: Vec<String>,
        /// When to end earlier.
        enough: Option<Enough>,
    },
}

/// The savings and time after which a daemon may end early: both must be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enough {
    pub saved_bytes: u64,
    pub seconds: u64,
}

impl Policy {
    /// `pagefold run` with its defaults.
    pub fn pagefold(seconds: u64) -> Self {
        Self::pagefold_with(seconds, &[])
    }

    /// `pagefold run` with further options.
    pub fn pagefold_with(seconds: u64, options: &[&str]) -> Self {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Self::Pagefold { seconds, options, enough: None }
    }

    /// Ends the run early when `enough` is reached. Other policies than pagefold ignore it.
    #[must_use]
    pub fn until(self, enough: Enough) -> Self {
        match self {
            Self::Pagefold { seconds, options, .. } => Self::Pagefold { seconds, options, enough: Some(enough) },
            other => other,
        }
    }
}

pub use pagefold_report::policy::{KSM, KSM_EVERYTHING, NO_MERGING, ORACLE, SUBJECT};

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KsmEverything => f.write_str(KSM_EVERYTHING),
            Self::KsmPaced { pages, .. } => write!(f, "ksm-{pages}/20ms"),
            Self::KsmAdvisor { seconds } => write!(f, "ksm-advisor/{seconds}s"),
            Self::KsmAdvisorAtCap { seconds } => write!(f, "ksm-advisor at its cap/{seconds}s"),
            Self::Ksmtuned { always: false, seconds } => write!(f, "ksmtuned/{seconds}s"),
            Self::Ksmtuned { always: true, seconds } => {
                let (name, value) = ksmtuned::ALWAYS;
                write!(f, "ksmtuned {name}={value}/{seconds}s")
            }
            Self::Uksmd { seconds } => write!(f, "uksmd's rules/{seconds}s"),
            Self::Uksm { governor, .. } => write!(f, "uksm {governor}"),
            Self::KsmSteered { share, .. } => write!(f, "ksm at {:.2} %", 100.0 * share.fraction()),
            Self::NoMerging { .. } => f.write_str(NO_MERGING),
            Self::Oracle => f.write_str(ORACLE),
            Self::Pagefold { options, .. } => {
                f.write_str(SUBJECT)?;
                options.iter().try_for_each(|option| write!(f, " {option}"))
            }
        }
    }
}

/// Runs a policy on unmarked targets and unmerges everything afterwards. The marks stay until the targets end.
/// `expected` are the targets' correct answers; with `exact` their page tables are sampled.
pub fn run(
    setting: &ExperimentSetting<'_>,
    control: &mut KsmForExperiment,
    policy: &Policy,
    targets: &mut [Box<dyn Target>],
    expected: &[Option<String>],
    exact: bool,
) -> anyhow::Result<PolicyRun> {
    let before = agree(expected, &answers(targets));
    let processes = targets.iter().map(|target| Process::open(target.pid())).collect::<Result<Vec<_>, _>>()?;
    control.kernel_defaults()?;
    let mut run = PolicyRun { policy: policy.to_string(), ..PolicyRun::default() };
    let counters_before = counters(targets)?;
    let sampling = if exact { Some(page_tables::watch(&processes)?) } else { None };
    let applied = apply(setting, control, policy, &processes, &mut run);
    let counters_after = counters(targets);
    let samples = sampling.map(SamplingThread::finish).transpose();
    let during = applied.is_ok() && agree(expected, &answers(targets));
    // Unmerge even after a failure. The knobs follow when the targets have ended, before the next policy.
    control.unmerge_pages()?;
    applied?;
    run.counters = counters_before.into_iter().zip(counters_after?).collect();
    run.set_page_table_samples(samples?.unwrap_or_default());
    let after = agree(expected, &answers(targets));
    run.answers_correct = Answers { before, during, after };
    Ok(run)
}

/// Runs one of UKSM's governors, or none, on a kernel that has it in place of KSM. It cannot unmerge, so the answers after the run come
/// from merged memory, too.
pub fn run_uksm(
    setting: &ExperimentSetting<'_>,
    uksm: &Uksm,
    policy: &Policy,
    targets: &mut [Box<dyn Target>],
    expected: &[Option<String>],
) -> anyhow::Result<PolicyRun> {
    let before = agree(expected, &answers(targets));
    let mut run = PolicyRun { policy: policy.to_string(), ..PolicyRun::default() };
    let counters_before = counters(targets)?;
    let sampler = Sampler::start_uksm(uksm.clone())?;
    run.began = Some(Instant::now());
    let (driven, seconds) = match policy {
        Policy::Uksm { governor, seconds } => (Some(uksm.drive(governor)?), *seconds),
        Policy::NoMerging { seconds } => (None, *seconds),
        other => bail!("this kernel has UKSM in place of KSM: {other} cannot run"),
    };
    setting.interrupt.sleep(Duration::from_secs(seconds))?;
    run.set_samples(&sampler.finish()?);
    let during = agree(expected, &answers(targets));
    drop(driven);
    run.counters = counters_before.into_iter().zip(counters(targets)?).collect();
    run.answers_correct = Answers { before, during, after: agree(expected, &answers(targets)) };
    Ok(run)
}

fn counters(targets: &mut [Box<dyn Target>]) -> anyhow::Result<Vec<ActivityCounters>> {
    targets.iter_mut().filter_map(|target| target.counters().transpose()).collect()
}

fn apply(
    setting: &ExperimentSetting<'_>,
    control: &mut KsmForExperiment,
    policy: &Policy,
    processes: &[Process],
    run: &mut PolicyRun,
) -> anyhow::Result<()> {
    let interrupt = setting.interrupt;
    match policy {
        Policy::Pagefold { .. } | Policy::NoMerging { .. } | Policy::Uksmd { .. } | Policy::Uksm { .. } => {}
        Policy::Oracle => {
            let knowledge = oracle::survey(processes)?;
            run.savable_bytes = Some(knowledge.savable.0);
            run.marked_bytes = Some(mark_all(processes, &knowledge.spans)?);
        }
        _ => {
            let spans = processes.iter().map(eligible_spans).collect::<Result<Vec<_>, _>>()?;
            run.marked_bytes = Some(mark_all(processes, &spans)?);
        }
    }
    let sampler = Sampler::start()?;
    let scanned_before = control.ksm().counters()?.pages_scanned;
    run.began = Some(Instant::now());
    match policy {
        Policy::KsmEverything => scan_until_quiet(control, interrupt)?,
        Policy::KsmPaced { pages, seconds } => {
            scan_paced(control, *pages)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
        }
        Policy::KsmAdvisor { seconds } => {
            control.set_advisor("scan-time")?;
            control.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
        }
        Policy::KsmAdvisorAtCap { seconds } => {
            let limit = |file: &str, value| Changed::to(Path::new(KSM_ROOT).join(file), value);
            let _limits = [limit("advisor_max_cpu", "100")?, limit("advisor_target_scan_time", "1")?];
            control.set_advisor("scan-time")?;
            control.set(Knob::Run, 1)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
        }
        Policy::Ksmtuned { always, seconds } => {
            let tuned = Ksmtuned::start(if *always { &[ksmtuned::ALWAYS] } else { &[] }, interrupt)?;
            interrupt.sleep(Duration::from_secs(*seconds))?;
            drop(tuned);
        }
        Policy::Uksmd { seconds } => {
            let time = Duration::from_secs(*seconds);
            run.marked_bytes = Some(uksmd::follow(control, processes, time, interrupt)?);
        }
        Policy::Uksm { .. } => bail!("this kernel has no {}: it lacks UKSM", uksm::ROOT),
        Policy::Oracle => burst(control, interrupt)?,
        Policy::KsmSteered { share, seconds } => {
            steer(share.fraction(), Duration::from_secs(*seconds), control, interrupt)?;
        }
        Policy::NoMerging { seconds } => interrupt.sleep(Duration::from_secs(*seconds))?,
        Policy::Pagefold { seconds, options, enough } => {
            let pids: Vec<i32> = processes.iter().map(Process::pid).collect();
            let mut daemon = daemon::run(setting.program, &pids, options)?;
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
    run.set_samples(&sampler.finish()?);
    if matches!(policy, Policy::Ksmtuned { .. }) && control.ksm().counters()?.pages_scanned == scanned_before {
        run.remark = Some(never_started()?);
    }
    if matches!(policy, Policy::KsmEverything | Policy::Oracle) {
        let before_ns = control.ksmd().cpu_ns()?;
        for _ in 0..LATER_SCANS {
            control.scan_once(interrupt)?;
        }
        let spent = Duration::from_nanos(control.ksmd().cpu_ns()?.saturating_sub(before_ns));
        run.cpu_ksmd_seconds_per_later_scan = Some(spent.as_secs_f64() / f64::from(LATER_SCANS));
    }
    Ok(())
}

/// What there is to say of a ksmtuned that has not started ksmd, by its own reckoning of free memory.
fn never_started() -> anyhow::Result<String> {
    let meminfo = fs::read("/proc/meminfo")?;
    let of = |key| kib(&meminfo, key).map_err(anyhow::Error::msg).context("/proc/meminfo");
    let free = (of("MemFree")? + of("Buffers")? + of("Cached")?) as f64 / of("MemTotal")? as f64;
    Ok(format!(
        "It never started ksmd: by default it does when less than 20 % of memory is free or cached, and {:.0} % was.",
        100.0 * free
    ))
}

fn mark_all(processes: &[Process], spans: &[Vec<PageSpan>]) -> anyhow::Result<u64> {
    processes.iter().zip(spans).map(|(process, spans)| Ok(mark(process, spans)?.0)).sum()
}

/// Marks all of a process that no rule leaves out. Returns the bytes marked.
pub fn mark_eligible(process: &Process) -> anyhow::Result<u64> {
    Ok(mark(process, &eligible_spans(process)?)?.0)
}

/// Lets ksmd scan so many pages each 20 ms, its pause after [`KsmForExperiment::kernel_defaults`].
fn scan_paced(control: &KsmForExperiment, pages: u64) -> Result<(), ExperimentError> {
    control.set(Knob::PagesToScan, pages)?;
    control.set(Knob::Run, 1)
}

fn saved_pages(control: &KsmForExperiment) -> anyhow::Result<u64> {
    Ok(control.ksm().counters()?.view(true, false).saved().0)
}

/// Returns whether savings grew by more than the fluctuation of a running program's pages: one in a thousand, and a
/// few.
fn is_more(saved: u64, before: u64) -> bool {
    saved > before + before / 1000 + 16
}

fn scan_until_quiet(control: &KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
    control.set(Knob::PagesToScan, BATCH_PAGES)?;
    control.set(Knob::SleepMillisecs, 0)?;
    let first = control.ksm().full_scans()?;
    control.set(Knob::Run, 1)?;
    let (mut scans, mut most, mut quiet) = (first, 0, 0);
    let done = interrupt.wait(EVERYTHING_LIMIT, || {
        let now = control.ksm().full_scans()?;
        if now == scans {
            return Ok(None);
        }
        scans = now;
        let saved = saved_pages(control)?;
        // The first scan cannot merge anything.
        quiet = if now < first + 2 || is_more(saved, most) { 0 } else { quiet + 1 };
        most = most.max(saved);
        anyhow::Ok((quiet >= QUIET_SCANS).then_some(()))
    })?;
    control.stop()?;
    if done.is_none() {
        bail!("KSM's savings still grow after {EVERYTHING_LIMIT:?}");
    }
    Ok(())
}

/// Sets the size of ksmd's batches every half second so that by the end of the next one it has taken `share` of a core
/// on average since the start.
fn steer(share: f64, time: Duration, control: &KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
    const EVERY: Duration = Duration::from_millis(500);
    let began = Instant::now();
    let spent_then = control.ksmd().cpu_ns()?;
    let (mut pages, mut spent) = (100.0, 0.0);
    scan_paced(control, 100)?;
    while began.elapsed() < time {
        interrupt.sleep(EVERY.min(time.saturating_sub(began.elapsed())))?;
        let now = Duration::from_nanos(control.ksmd().cpu_ns()?.saturating_sub(spent_then)).as_secs_f64();
        let wanted = share * (began.elapsed() + EVERY).as_secs_f64() - now;
        pages = next_batch(pages, now - spent, wanted);
        spent = now;
        control.set(Knob::PagesToScan, whole(pages.round()))?;
    }
    Ok(control.stop()?)
}

/// The batch size with which ksmd spends `wanted` seconds, given that it spent `spent` with batches of `pages`. The
/// cost of a page varies with its content, so a step is at most fourfold.
fn next_batch(pages: f64, spent: f64, wanted: f64) -> f64 {
    let factor = if spent > 0.0 { wanted / spent } else { 4.0 };
    (pages * factor.clamp(0.25, 4.0)).clamp(1.0, 100_000.0)
}

/// Runs two ksmd scans, of which the second merges, and up to two more while they save more.
fn burst(control: &mut KsmForExperiment, interrupt: &Interrupt) -> anyhow::Result<()> {
    const MOST_SCANS: u32 = 4;
    control.set(Knob::MaxPageSharing, LONG_SHARING)?;
    control.set(Knob::UseZeroPages, 1)?;
    let began = Instant::now();
    let mut before = 0;
    for scan in 0..MOST_SCANS {
        control.scan_once(interrupt)?;
        let saved = saved_pages(control)?;
        if scan >= 2 && !is_more(saved, before) || began.elapsed() > EVERYTHING_LIMIT {
            break;
        }
        before = saved;
    }
    Ok(control.stop()?)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn variants_have_distinct_names() {
        assert_eq!(Policy::KsmPaced { pages: KSM_PAGES, seconds: 1 }.to_string(), KSM);
        let names = [
            Policy::pagefold(1),
            Policy::pagefold_with(1, &["--governor", "low"]),
            Policy::KsmSteered { share: Permyriad(250), seconds: 1 },
            Policy::KsmAdvisor { seconds: 120 },
            Policy::KsmAdvisorAtCap { seconds: 120 },
            Policy::Ksmtuned { always: false, seconds: 120 },
            Policy::Ksmtuned { always: true, seconds: 120 },
            Policy::Uksmd { seconds: 120 },
            Policy::Uksm { governor: "quiet", seconds: 120 },
        ];
        assert_eq!(
            names.map(|policy| policy.to_string()),
            [
                "pagefold",
                "pagefold --governor low",
                "ksm at 2.50 %",
                "ksm-advisor/120s",
                "ksm-advisor at its cap/120s",
                "ksmtuned/120s",
                "ksmtuned KSM_THRES_COEF=100/120s",
                "uksmd's rules/120s",
                "uksm quiet",
            ]
        );
    }

    #[test]
    fn batches_follow_the_wanted_time_within_bounds() {
        assert_eq!(next_batch(100.0, 0.5, 0.25), 50.0);
        assert_eq!(next_batch(100.0, 0.0, 0.25), 400.0);
        assert_eq!(next_batch(100.0, 0.5, -1.0), 25.0);
        assert_eq!((next_batch(1.0, 1.0, 0.0), next_batch(90_000.0, 1.0, 9.0)), (1.0, 100_000.0));
        // With 10 us a page and 20 ms between batches, a few steps reach 5 % of a core.
        let mut pages = 100.0;
        for _ in 0..6 {
            let spent = pages * 25.0 * 10e-6;
            pages = next_batch(pages, spent, 0.05 * 0.5);
        }
        assert_eq!(pages, 100.0);
    }
}
