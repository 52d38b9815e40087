//! Control of KSM for an experiment. We take it only if no other program uses KSM, and restore
//! everything at the end. If an experiment is killed, the next one restores its settings.

use crate::interrupt::{Interrupt, Interrupted};
use anyhow::Context;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::{KsmPaths, TakeError, recover, restore_deferred};
use pagefold_ksm::lock::{Lock, LockError};
use pagefold_ksm::scan::{self, ScanKnobs};
use pagefold_ksm::state_file::{Holder, State, StateError, boot_id};
use pagefold_ksm::{KSM_ROOT, Knob, Ksm, KsmError};
use pagefold_procmem::process::ReadError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Serializes experiments, and tests that set KSM's knobs. The daemon has another lock, because experiments start it.
pub const LOCK_PATH: &str = "/run/lock/pagefold-ksm.lock";

/// The original values of the knobs, and the values from the experiment. Removed at its end.
pub const STATE_PATH: &str = "/run/pagefold/experiment-state.json";

/// Another experiment holds the lock for minutes at most.
const LOCK_LIMIT: Duration = Duration::from_secs(3600);

/// A scan of some gigabytes takes seconds.
const SCAN_LIMIT: Duration = Duration::from_secs(300);

/// Why an experiment couldn't take or use KSM.
#[derive(Debug, Error)]
pub enum ExperimentError {
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    #[error("{LOCK_PATH} is still held by another experiment")]
    Locked,
    /// ksmd runs, its advisor is on, or pages are merged.
    #[error(
        "KSM is in use and an experiment would disturb it; stop the program that drives it, then write 2 and then 0 to \
         {KSM_ROOT}/run"
    )]
    InUse,
    /// No KSM, or a pid namespace that hides ksmd.
    #[error("ksmd is not found: this kernel has no KSM, or this pid namespace hides its thread")]
    NoKsmd,
    #[error("this kernel's KSM has no advisor (Linux 6.8 and later have)")]
    NoAdvisor,
    /// Something else has changed KSM since, or the kernel didn't unmerge everything.
    #[error(
        "before a measurement KSM must be as after boot, but {what} is {value}; stop the program that drives it and \
         try again"
    )]
    Unclean { what: String, value: u64 },
    /// Every kick was lost.
    #[error("ksmd does not scan: no memory is marked")]
    NothingMarked,
    #[error("ksmd has not finished a scan within {SCAN_LIMIT:?}")]
    ScanLimit,
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Ksm(#[from] KsmError),
    #[error(transparent)]
    Proc(#[from] ReadError),
    /// Restoring the changes of an earlier run.
    #[error(transparent)]
    Take(#[from] TakeError),
    #[error("cannot write {}: {source}", path.display())]
    Advisor { path: PathBuf, source: io::Error },
}

/// KSM, taken for an experiment. When this is dropped, we unmerge everything and restore every knob.
#[derive(Debug)]
pub struct KsmForExperiment {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    state: Mutex<State>,
    /// Released last.
    _lock: Lock,
}

impl KsmForExperiment {
    /// Takes KSM. Waits for other experiments; fails if another program uses KSM.
    pub fn take(interrupt: &Interrupt) -> Result<Self, ExperimentError> {
        let path = Path::new(LOCK_PATH);
        let mut announced = false;
        let lock = interrupt.wait(LOCK_LIMIT, || match Lock::try_take(path) {
            Ok(lock) => Ok(Some(lock)),
            Err(LockError::Held { .. }) => {
                if !announced {
                    eprintln!("waiting for another experiment, which holds {LOCK_PATH}");
                    announced = true;
                }
                Ok(None)
            }
            Err(error) => Err(ExperimentError::Lock(error)),
        })?;
        let lock = lock.ok_or(ExperimentError::Locked)?;
        let ksm = Arc::new(Ksm::open(Path::new(KSM_ROOT))?);
        let ksmd = Ksmd::find()?.ok_or(ExperimentError::NoKsmd)?;
        recover_experiment(&ksm, &lock)?;
        let before = ksm.knobs()?;
        // We don't look at zero pages, because kernels lose count of them.
        if before.run == 1 || before.advisor_on() || ksm.counters()?.pages_sharing.0 > 0 {
            return Err(ExperimentError::InUse);
        }
        let paths = paths();
        let state = State::new(boot_id(&paths.proc_root)?, Holder::own(&paths.proc_root)?, ksm.values()?);
        let mut taken = Self { ksm, ksmd, state: Mutex::new(state), _lock: lock };
        // This also proves that we may write the knobs.
        taken.kernel_defaults()?;
        Ok(taken)
    }

    pub fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    /// A counter that pagefold doesn't use. The kernel may show a negative number for a moment.
    pub fn counter(&self, name: &str) -> anyhow::Result<i64> {
        let path = self.ksm.root().join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(text.trim_ascii().parse()?)
    }

    pub fn ksmd(&self) -> &Ksmd {
        &self.ksmd
    }

    /// Sets every knob to its value after boot, and checks that they have it and that nothing is merged.
    ///
    /// # Errors
    /// If a knob keeps another value, or pages are merged. (The kernel then refuses `max_page_sharing` and
    /// `merge_across_nodes`.)
    pub fn kernel_defaults(&mut self) -> Result<(), ExperimentError> {
        self.set_defaults()?;
        for knob in Knob::ALL {
            match self.ksm.read(knob)? {
                Some(now) if now != knob.default_value() => return Err(unclean(knob.file_name(), now)),
                _ => {}
            }
        }
        if self.ksm.knobs()?.advisor_on() {
            return Err(unclean("advisor_mode", 1));
        }
        // We don't look at zero pages, because kernels lose count of them.
        match self.ksm.counters()?.pages_sharing.0 {
            0 => Ok(()),
            merged => Err(unclean("pages_sharing", merged)),
        }
    }

    fn set_defaults(&self) -> Result<(), ExperimentError> {
        self.set_advisor("none")?;
        for knob in Knob::ALL {
            if self.ksm.read(knob)?.is_some() {
                self.set(knob, knob.default_value())?;
            }
        }
        Ok(())
    }

    pub fn set(&self, knob: Knob, value: u64) -> Result<(), ExperimentError> {
        // While pages are merged the kernel also refuses to write an unchanged max_page_sharing.
        let now = self.ksm.read(knob)?;
        if now != Some(value) || knob == Knob::Run {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.note(knob, now.unwrap_or(value), value) {
                state.save(Path::new(STATE_PATH))?;
            }
            self.ksm.write(knob, value)?;
        }
        Ok(())
    }

    /// Sets the advisor's mode, where the kernel has one (6.8 and later).
    pub fn set_advisor(&self, mode: &str) -> Result<(), ExperimentError> {
        let now = self.ksm.knobs()?.advisor_mode;
        if now.is_none() && mode != "none" {
            return Err(ExperimentError::NoAdvisor);
        }
        if now.is_some_and(|now| now != mode) {
            let path = PathBuf::from(KSM_ROOT).join("advisor_mode");
            fs::write(&path, mode).map_err(|source| ExperimentError::Advisor { path, source })?;
        }
        Ok(())
    }

    /// Makes ksmd scan everything marked once, without a pause, and waits for the end.
    pub fn scan_once(&mut self, interrupt: &Interrupt) -> Result<(), ExperimentError> {
        let knobs = LimitedScan { experiment: self, interrupt, end: Instant::now() + SCAN_LIMIT };
        let is_done = scan::scan_once(&knobs, Some(&self.ksmd))?;
        if is_done { Ok(()) } else { Err(ExperimentError::NothingMarked) }
    }

    /// Stops ksmd. Merged pages stay merged.
    pub fn stop(&self) -> Result<(), ExperimentError> {
        self.set(Knob::Run, 0)?;
        // Changing the sleep wakes ksmd from an endless one, so that it notices the stop.
        self.set(Knob::SleepMillisecs, 20)
    }

    /// Gives every merged page its own copy again and sets the knobs to the kernel's defaults.
    pub fn unmerge(&mut self) -> Result<(), ExperimentError> {
        self.unmerge_pages()?;
        self.set_defaults()
    }

    /// Gives every merged page in marked memory its own copy again. If a page was fork-shared when it was merged, it
    /// stays merged in processes where it isn't marked. As long as these run, the kernel refuses to change
    /// `max_page_sharing`, so we don't restore the knobs here.
    pub fn unmerge_pages(&mut self) -> Result<(), ExperimentError> {
        self.set_advisor("none")?;
        self.stop()?;
        self.set(Knob::Run, 2)?;
        self.set(Knob::Run, 0)
    }

    fn restore(&mut self) -> Result<(), ExperimentError> {
        self.unmerge()?;
        let original = self.state.lock().unwrap_or_else(PoisonError::into_inner).original.clone();
        // We restore in reverse order, so that `run` comes last.
        for (knob, value) in original.into_iter().rev() {
            self.set(knob, value)?;
        }
        State::remove(Path::new(STATE_PATH))?;
        // A `pagefold run` may have had to defer some knobs. Now we can restore them, and update its state file.
        recover_runs(&self.ksm)
    }
}

impl Drop for KsmForExperiment {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            eprintln!("cannot restore KSM's knobs: {error}");
        }
    }
}

/// A scan of an experiment: ends with a signal or at a time limit.
struct LimitedScan<'a> {
    experiment: &'a KsmForExperiment,
    interrupt: &'a Interrupt,
    end: Instant,
}

impl ScanKnobs for LimitedScan<'_> {
    type Error = ExperimentError;

    fn ksm(&self) -> &Ksm {
        &self.experiment.ksm
    }

    fn value(&self, knob: Knob) -> Result<Option<u64>, ExperimentError> {
        Ok(self.experiment.ksm.read(knob)?)
    }

    fn set(&self, knob: Knob, value: u64) -> Result<(), ExperimentError> {
        // A write to `run` waits for the end of ksmd's batch, even if it changes nothing.
        if self.value(knob)? == Some(value) { Ok(()) } else { self.experiment.set(knob, value) }
    }

    fn pause(&self, time: Duration) -> Result<(), ExperimentError> {
        if Instant::now() >= self.end {
            return Err(ExperimentError::ScanLimit);
        }
        Ok(self.interrupt.sleep(time)?)
    }

    /// The lock keeps other experiments out; an administrator who interferes only spoils the measurement.
    fn check(&self) -> Result<(), ExperimentError> {
        Ok(())
    }
}

fn unclean(what: &str, value: u64) -> ExperimentError {
    ExperimentError::Unclean { what: what.to_owned(), value }
}

fn paths() -> KsmPaths {
    KsmPaths { lock: LOCK_PATH.into(), state: STATE_PATH.into(), ..KsmPaths::default() }
}

/// Restores the knobs that a killed experiment has left changed, unless another program has changed them since, and
/// unmerges the pages that it has left merged.
fn recover_experiment(ksm: &Arc<Ksm>, lock: &Lock) -> Result<(), ExperimentError> {
    let paths = paths();
    let Some(left) = State::load(&paths.state)? else { return Ok(()) };
    let this_boot = left.boot_id == boot_id(&paths.proc_root)?;
    let ended = match left.holder {
        Some(holder) => !holder.is_alive(&paths.proc_root)?,
        None => true,
    };
    if this_boot && ended {
        eprintln!("an experiment that was killed has left KSM's knobs changed; restoring them");
        // A `pagefold run` in the experiment may have been killed, too.
        recover_runs(ksm)?;
        if ksm.read(Knob::Run)?.is_some_and(|run| left.is_ours(Knob::Run, run)) {
            ksm.write(Knob::Run, 2)?;
            ksm.write(Knob::Run, 0)?;
            // Some knobs had to wait until nothing was merged.
            recover_runs(ksm)?;
        }
    }
    recover(ksm, lock, &paths)?;
    Ok(())
}

/// Restores the knobs that an ended `pagefold run` left changed.
fn recover_runs(ksm: &Arc<Ksm>) -> Result<(), ExperimentError> {
    match restore_deferred(ksm, &KsmPaths::default()) {
        Ok(_) | Err(TakeError::Lock(LockError::Held { .. })) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
