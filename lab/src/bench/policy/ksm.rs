//! KSM by itself, with the kernel's own ways to drive it, and at its best.

use super::{KSM_EVERYTHING, Kernel, Marks, NO_MERGING, ORACLE, Policy, Stage};
use crate::bench::marks::{eligible_spans, mark};
use crate::bench::sysfs::Changed;
use crate::ksm_control::{ExperimentError, KsmForExperiment};
use anyhow::ensure;
use pagefold_engine::units::{Permyriad, whole};
use pagefold_ksm::{KSM_ROOT, Knob};
use pagefold_procmem::process::Process;
use std::path::Path;
use std::time::{Duration, Instant};

/// `max_page_sharing` if the policy may choose: most of the gain of longer lists over chains of full lists, for a
/// sixteenth of the reverse-map walk.
const LONG_SHARING: u64 = 4096;

/// ksmd scans this many pages each 20 ms, as commonly configured.
pub const KSM_PAGES: u64 = 1000;

/// Batch size of the unpaced scan, pages: some tens of milliseconds, so that we can stop it.
const BATCH_PAGES: u64 = 20_000;

/// KSM counts as done after this many ksmd scans without further savings.
const QUIET_SCANS: u32 = 2;

/// We average the cost of a scan over nine scans, because smart scan skips a page in up to eight in a row.
const LATER_SCANS: u32 = 9;

/// Long enough for a scan of gigabytes with long chains.
const EVERYTHING_LIMIT: Duration = Duration::from_secs(600);

/// Merges nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoMerging {
    pub seconds: u64,
}

impl Policy for NoMerging {
    fn name(&self) -> String {
        NO_MERGING.to_owned()
    }

    fn marks(&self) -> Marks {
        Marks::None
    }

    fn runs_on(&self, _kernel: &Kernel) -> bool {
        true
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        stage.sleep(self.seconds)
    }
}

/// KSM with a fixed number of pages every 20 ms.
#[derive(Clone, Copy, Debug)]
pub struct KsmPaced {
    pub pages: u64,
    pub seconds: u64,
}

impl Policy for KsmPaced {
    fn name(&self) -> String {
        format!("ksm-{}/20ms", self.pages)
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        scan_paced(stage.ksm()?, self.pages)?;
        stage.sleep(self.seconds)
    }
}

/// KSM with its own advisor, or with that advisor at its cap: a whole core, and one-second scans as its target, so that
/// the core is the limit.
#[derive(Clone, Copy, Debug)]
pub struct KsmAdvisor {
    pub at_cap: bool,
    pub seconds: u64,
}

impl Policy for KsmAdvisor {
    fn name(&self) -> String {
        let cap = if self.at_cap { " at its cap" } else { "" };
        format!("ksm-advisor{cap}/{}s", self.seconds)
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        if self.at_cap {
            for (file, value) in [("advisor_max_cpu", "100"), ("advisor_target_scan_time", "1")] {
                stage.undo_at_end(Changed::to(Path::new(KSM_ROOT).join(file), value)?);
            }
        }
        let ksm = stage.ksm()?;
        ksm.set_advisor("scan-time")?;
        ksm.set(Knob::Run, 1)?;
        stage.sleep(self.seconds)
    }
}

/// KSM with a batch every 20 ms. We adjust the batches so that ksmd takes this share of a core.
#[derive(Clone, Copy, Debug)]
pub struct KsmSteered {
    pub share: Permyriad,
    pub seconds: u64,
}

impl Policy for KsmSteered {
    fn name(&self) -> String {
        format!("ksm at {:.2} %", 100.0 * self.share.fraction())
    }

    /// Sets ksmd's batch size every half second, so that by the end of the next half second it has taken the share of a
    /// core on average since the start.
    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        const EVERY: Duration = Duration::from_millis(500);
        let interrupt = stage.setting.interrupt;
        let control = stage.ksm()?;
        let time = Duration::from_secs(self.seconds);
        let began = Instant::now();
        let spent_then = control.ksmd().cpu_ns()?;
        let mut pages = 100.0;
        let mut spent = 0.0;
        scan_paced(control, 100)?;
        while began.elapsed() < time {
            interrupt.sleep(EVERY.min(time.saturating_sub(began.elapsed())))?;
            let now = Duration::from_nanos(control.ksmd().cpu_ns()?.saturating_sub(spent_then)).as_secs_f64();
            let wanted = self.share.fraction() * (began.elapsed() + EVERY).as_secs_f64() - now;
            pages = next_batch(pages, now - spent, wanted);
            spent = now;
            control.set(Knob::PagesToScan, whole(pages.round()))?;
        }
        Ok(control.stop()?)
    }
}

/// KSM with its defaults, scanning without a pause until scans save nothing more.
#[derive(Clone, Copy, Debug)]
pub struct KsmEverything;

impl Policy for KsmEverything {
    fn name(&self) -> String {
        KSM_EVERYTHING.to_owned()
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        let interrupt = stage.setting.interrupt;
        let control = stage.ksm()?;
        control.set(Knob::PagesToScan, BATCH_PAGES)?;
        control.set(Knob::SleepMillisecs, 0)?;
        let first = control.ksm().full_scans()?;
        control.set(Knob::Run, 1)?;
        let mut scans = first;
        let mut most = 0;
        let mut quiet = 0;
        let done = interrupt.wait(EVERYTHING_LIMIT, || {
            let now = control.ksm().full_scans()?;
            if now == scans {
                return Ok(None);
            }
            scans = now;
            let saved = saved_pages(control)?;
            // The first scan can't merge anything.
            quiet = if now < first + 2 || is_more(saved, most) { 0 } else { quiet + 1 };
            most = most.max(saved);
            anyhow::Ok(if quiet >= QUIET_SCANS { Some(()) } else { None })
        })?;
        control.stop()?;
        ensure!(done.is_some(), "KSM's savings still grow after {EVERYTHING_LIMIT:?}");
        measure_later_scans(stage)
    }
}

/// Reads all pages beforehand, then marks and merges extents with many duplicates at once.
#[derive(Clone, Copy, Debug)]
pub struct Oracle;

impl Policy for Oracle {
    fn name(&self) -> String {
        ORACLE.to_owned()
    }

    fn marks(&self) -> Marks {
        Marks::Duplicates
    }

    /// Runs two ksmd scans (the second merges), and up to two more while they save more.
    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        const MOST_SCANS: u32 = 4;
        let interrupt = stage.setting.interrupt;
        let control = stage.ksm()?;
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
        control.stop()?;
        measure_later_scans(stage)
    }
}

/// Measures the CPU time of a scan once nothing is left to merge, beside the samples.
fn measure_later_scans(stage: &mut Stage<'_>) -> anyhow::Result<()> {
    stage.stop_sampling()?;
    let interrupt = stage.setting.interrupt;
    let ksm = stage.ksm()?;
    let before_ns = ksm.ksmd().cpu_ns()?;
    for _ in 0..LATER_SCANS {
        ksm.scan_once(interrupt)?;
    }
    let spent = Duration::from_nanos(ksm.ksmd().cpu_ns()?.saturating_sub(before_ns));
    stage.run.cpu_ksmd_seconds_per_later_scan = Some(spent.as_secs_f64() / f64::from(LATER_SCANS));
    Ok(())
}

/// Marks all of a process that no rule excludes. Returns the bytes marked.
pub fn mark_eligible(process: &Process) -> anyhow::Result<u64> {
    mark(process, &eligible_spans(process)?)
}

/// Lets ksmd scan `pages` each 20 ms, its pause after [`KsmForExperiment::kernel_defaults`].
fn scan_paced(control: &KsmForExperiment, pages: u64) -> Result<(), ExperimentError> {
    control.set(Knob::PagesToScan, pages)?;
    control.set(Knob::Run, 1)
}

fn saved_pages(control: &KsmForExperiment) -> anyhow::Result<u64> {
    Ok(control.ksm().counters()?.view(true, false).saved().0)
}

/// Whether savings grew by more than a running program's pages fluctuate: one in a thousand, and a few.
fn is_more(saved: u64, before: u64) -> bool {
    saved > before + before / 1000 + 16
}

/// The batch size for ksmd to spend `wanted` seconds, given that it spent `spent` with batches of `pages`. The cost of
/// a page varies with its content, so we step at most fourfold.
fn next_batch(pages: f64, spent: f64, wanted: f64) -> f64 {
    let factor = if spent > 0.0 { wanted / spent } else { 4.0 };
    (pages * factor.clamp(0.25, 4.0)).clamp(1.0, 100_000.0)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

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
