//! KSM in the hands of an experiment: taken only when nobody else uses it, and given back as it was in any case. What one that
//! was killed has left turned is put back by the next.

use crate::interrupt::Interrupt;
use anyhow::{Context, bail, ensure};
use pagefold_linux::ksm::ksmd::Ksmd;
use pagefold_linux::ksm::lease::{Places, TakeError, put_back_deferred, recover};
use pagefold_linux::ksm::lock::{Lock, LockError};
use pagefold_linux::ksm::state_file::{Holder, State, boot_id};
use pagefold_linux::ksm::{KSM_ROOT, Knob, Knobs, Ksm};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Experiments and tests that turn KSM's knobs take turns by this lock. The daemon has one of its own: it is among
/// what is measured.
pub const LOCK_PATH: &str = "/run/lock/pagefold-ksm.lock";

/// How the knobs stood before an experiment, and what it has turned them to. One that ends removes it.
pub const STATE_PATH: &str = "/run/pagefold/experiment-state.json";

/// Others hold the lock for minutes at most.
const LOCK_LIMIT: Duration = Duration::from_secs(3600);

/// One batch as long as the whole scan.
const WHOLE_SCAN: u64 = 0xffff_ffff;

/// Sleeps of this many milliseconds and more never end by themselves; a changed one ends the sleep.
const SLEEP_FOR_EVER: u64 = 1 << 31;

/// A scan of some gigabytes takes seconds.
const SCAN_LIMIT: Duration = Duration::from_secs(300);

/// A kick that finds ksmd at the end of a batch is lost. If ksmd rests this long after one, it is given again.
const LOST_KICK: Duration = Duration::from_millis(50);

/// KSM, taken. Everything is unmerged and every knob is put back when dropped.
#[derive(Debug)]
pub struct Steering {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    before: Knobs,
    /// What is in the state file.
    noted: Mutex<State>,
    sleep: u64,
    /// Let go last.
    _lock: Lock,
}

impl Steering {
    /// Takes KSM: waits for other experiments, and refuses if anybody else uses it.
    pub fn take(interrupt: &Interrupt) -> anyhow::Result<Self> {
        let path = Path::new(LOCK_PATH);
        let mut told = false;
        let lock = interrupt.wait(LOCK_LIMIT, || match Lock::try_take(path) {
            Ok(lock) => Ok(Some(lock)),
            Err(LockError::Held { .. }) => {
                if !told {
                    eprintln!("waiting for another experiment, which holds {LOCK_PATH}");
                    told = true;
                }
                Ok(None)
            }
            Err(error) => Err(error.into()),
        })?;
        let lock = lock.with_context(|| format!("{LOCK_PATH} is still held by another experiment"))?;
        let ksm = Arc::new(Ksm::open(Path::new(KSM_ROOT))?);
        let ksmd = Ksmd::find()?.context("there is no ksmd to be seen: this kernel has no KSM")?;
        mend(&ksm, &lock)?;
        let before = ksm.knobs()?;
        ensure!(
            before.run != 1 && !before.advisor_on() && ksm.counters()?.view(true, false).saved().0 == 0,
            "KSM is in use: an experiment would disturb it. Stop what drives it, then write 2 and then 0 to {KSM_ROOT}/run"
        );
        let places = places();
        let mut original = BTreeMap::new();
        for knob in Knob::ALL {
            original.extend(ksm.read(knob)?.map(|value| (knob, value)));
        }
        let noted = State::new(boot_id(&places.proc_root)?, Holder::own(&places.proc_root)?, original);
        let mut steering = Self { ksm, ksmd, before, noted: Mutex::new(noted), sleep: SLEEP_FOR_EVER, _lock: lock };
        // Also the proof that the knobs may be turned.
        steering.kernel_defaults()?;
        Ok(steering)
    }

    /// The knobs as they were found, and as they will be left.
    pub fn before(&self) -> &Knobs {
        &self.before
    }

    /// The counters.
    pub fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    /// ksmd.
    pub fn ksmd(&self) -> &Ksmd {
        &self.ksmd
    }

    /// Sets every knob as a freshly booted kernel has it. Nothing may be merged.
    pub fn kernel_defaults(&mut self) -> anyhow::Result<()> {
        self.set_advisor("none")?;
        self.set(Knob::Run, 0)?;
        for (knob, value) in [
            (Knob::PagesToScan, 100),
            (Knob::SleepMillisecs, 20),
            (Knob::MaxPageSharing, 256),
            (Knob::UseZeroPages, 0),
            (Knob::SmartScan, 1),
            (Knob::MergeAcrossNodes, 1),
        ] {
            if self.ksm.read(knob)?.is_some() {
                self.set(knob, value)?;
            }
        }
        Ok(())
    }

    /// Turns a knob.
    pub fn set(&self, knob: Knob, value: u64) -> anyhow::Result<()> {
        // A write of an unchanged max_page_sharing is refused like any other while pages are merged.
        let now = self.ksm.read(knob)?;
        if now != Some(value) || knob == Knob::Run {
            let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
            if noted.note(knob, now.unwrap_or(value), value) {
                noted.save(Path::new(STATE_PATH))?;
            }
            self.ksm.write(knob, value)?;
        }
        Ok(())
    }

    /// Chooses the advisor, where the kernel has one (6.8 and later).
    pub fn set_advisor(&self, mode: &str) -> anyhow::Result<()> {
        let now = self.ksm.knobs()?.advisor_mode;
        if now.is_none() && mode != "none" {
            bail!("this kernel's KSM has no advisor (Linux 6.8 has)");
        }
        if now.is_some_and(|now| now != mode) {
            let path = PathBuf::from(KSM_ROOT).join("advisor_mode");
            fs::write(&path, mode).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Has ksmd walk everything marked once, without a pause, and waits for its end.
    pub fn scan_once(&mut self, interrupt: &Interrupt) -> anyhow::Result<()> {
        self.set(Knob::PagesToScan, WHOLE_SCAN)?;
        let scans = self.ksm.full_scans()?;
        self.kick()?;
        let mut kicked = Instant::now();
        let done = interrupt.wait(SCAN_LIMIT, || {
            if self.ksm.full_scans()? > scans {
                return Ok(Some(()));
            }
            // It also rests if it has ended the scan since it was asked.
            if kicked.elapsed() > LOST_KICK && self.ksmd.rests()? && self.ksm.full_scans()? == scans {
                self.kick()?;
                kicked = Instant::now();
            }
            Ok(None)
        })?;
        done.with_context(|| format!("ksmd has not ended a scan in {SCAN_LIMIT:?}"))
    }

    fn kick(&mut self) -> anyhow::Result<()> {
        self.sleep = SLEEP_FOR_EVER + (self.sleep + 1) % 2;
        self.set(Knob::SleepMillisecs, self.sleep)?;
        if self.ksm.read(Knob::Run)? != Some(1) {
            self.set(Knob::Run, 1)?;
        }
        Ok(())
    }

    /// Stops ksmd. What is merged stays so.
    pub fn stop(&self) -> anyhow::Result<()> {
        self.set(Knob::Run, 0)?;
        // Changing the sleep wakes ksmd from one without end, so that it notices the stop.
        self.set(Knob::SleepMillisecs, 20)
    }

    /// Gives every merged page its own copy again and puts the knobs on the kernel's defaults.
    pub fn unmerge(&mut self) -> anyhow::Result<()> {
        self.set_advisor("none")?;
        self.stop()?;
        self.set(Knob::Run, 2)?;
        self.set(Knob::Run, 0)?;
        self.kernel_defaults()
    }

    fn give_back(&mut self) -> anyhow::Result<()> {
        self.unmerge()?;
        let Knobs {
            run,
            pages_to_scan,
            sleep_millisecs,
            max_page_sharing,
            use_zero_pages,
            smart_scan,
            merge_across_nodes,
            ..
        } = self.before;
        self.set(Knob::PagesToScan, pages_to_scan)?;
        self.set(Knob::SleepMillisecs, sleep_millisecs)?;
        self.set(Knob::MaxPageSharing, max_page_sharing)?;
        self.set(Knob::UseZeroPages, u64::from(use_zero_pages))?;
        if let Some(smart_scan) = smart_scan {
            self.set(Knob::SmartScan, u64::from(smart_scan))?;
        }
        if let Some(across) = merge_across_nodes {
            self.set(Knob::MergeAcrossNodes, u64::from(across))?;
        }
        self.set(Knob::Run, run)?;
        State::remove(Path::new(STATE_PATH))?;
        // What a `pagefold run` had to leave for later has just been done: let its state file know.
        put_back_for_runs(&self.ksm)
    }
}

fn places() -> Places {
    Places { lock: LOCK_PATH.into(), state: STATE_PATH.into(), ..Places::default() }
}

/// Puts back what an experiment that was killed has left turned, unless somebody else has turned it since, and takes apart
/// what it has left merged.
fn mend(ksm: &Arc<Ksm>, lock: &Lock) -> anyhow::Result<()> {
    let places = places();
    let Some(left) = State::load(&places.state)? else { return Ok(()) };
    let this_boot = left.boot_id == boot_id(&places.proc_root)?;
    let is_over = left.holder.map_or(Ok(true), |holder| holder.is_alive(&places.proc_root).map(|alive| !alive))?;
    if this_boot && is_over {
        eprintln!("an experiment that was killed has left KSM's knobs turned: they are put back");
        // The `pagefold run` in it may have been killed too.
        put_back_for_runs(ksm)?;
        if ksm.read(Knob::Run)?.is_some_and(|run| left.is_ours(Knob::Run, run)) {
            ksm.write(Knob::Run, 2)?;
            ksm.write(Knob::Run, 0)?;
            // What had to wait until nothing was merged.
            put_back_for_runs(ksm)?;
        }
    }
    recover(ksm, lock, &places)?;
    Ok(())
}

/// Puts back what a `pagefold run` that is over has left turned.
fn put_back_for_runs(ksm: &Arc<Ksm>) -> anyhow::Result<()> {
    match put_back_deferred(ksm, &Places::default()) {
        Ok(_) | Err(TakeError::Locked { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Drop for Steering {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            eprintln!("KSM could not be put back as it was: {error:#}");
        }
    }
}
