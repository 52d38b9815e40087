//! Taking KSM over, and restoring it.
//!
//! A [`KsmLease`] begins only while no other program drives KSM, records the original value of every knob in a file, and
//! restores what it changed when it ends: by [`KsmLease::restore`], when dropped, or, after a crash, by [`recover`] in
//! the next start. A knob that another program changes meanwhile is never written again.

use super::files::{Ksm, KsmError};
use super::knob_writer::{KnobError, KnobWriter};
use super::knobs::Knob;
use super::lock::{LOCK_PATH, Lock, LockError};
use super::restore::{RestoreOutcome, restore};
use super::state_file::{Holder, STATE_PATH, State, StateError, boot_id};
use pagefold_procmem::list::programs_named;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tracing::debug;

/// For how long a lease that is dropped waits for ksmd.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// Why KSM was not taken over.
#[derive(Debug, Error)]
pub enum TakeError {
    /// Another program drives KSM.
    #[error("KSM is in use: {0}")]
    InUse(OtherDriver),
    /// The lock is free, but the process in the state file lives: it was started with another lock.
    #[error("KSM is held by process {pid}, which uses another lock file")]
    Busy { pid: i32 },
    /// What an earlier run changed is still being restored: ksmd is in a scan that it ordered.
    #[error("ksmd is still in a scan that an earlier pagefold ordered")]
    Recovering,
    /// The lock: another pagefold holds it, or it cannot be opened.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The state file.
    #[error(transparent)]
    State(#[from] StateError),
    /// KSM's files.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// This process in /proc, or the list of processes.
    #[error(transparent)]
    Proc(#[from] ReadError),
}

/// What else drives KSM.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OtherDriver {
    /// `run` is 1. The kernel does not show which program set it.
    #[error("ksmd is already running (run is 1)")]
    Running,
    /// The kernel's advisor sets `pages_to_scan`.
    #[error("the kernel's advisor is on ({mode})")]
    Advisor { mode: String },
    /// A program that sets the same knobs.
    #[error("{name} is running (pid {pid})")]
    Program { name: String, pid: i32 },
}

/// The files that a lease uses besides KSM's own.
#[derive(Clone, Debug)]
pub struct KsmPaths {
    /// The lock file.
    pub lock: PathBuf,
    /// The state file.
    pub state: PathBuf,
    /// `/proc`.
    pub proc_root: PathBuf,
}

impl KsmPaths {
    /// A lock file and a state file in this directory.
    pub fn in_dir(dir: &Path) -> Self {
        Self { lock: dir.join("lock"), state: dir.join("run/ksm-state.json"), ..Self::default() }
    }
}

impl Default for KsmPaths {
    fn default() -> Self {
        Self { lock: LOCK_PATH.into(), state: STATE_PATH.into(), proc_root: "/proc".into() }
    }
}

/// Values for the knobs that are set once, at the beginning of a lease. `None` leaves a knob unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitialKnobs {
    /// Duplicates that share one merged page. Can be changed only while nothing is merged.
    pub max_page_sharing: Option<u64>,
    /// Whether all-zero pages are replaced by the kernel's zero page.
    pub use_zero_pages: Option<bool>,
    /// Whether smart scan is on.
    pub smart_scan: Option<bool>,
    /// Whether pages of different nodes are merged. Can be changed only while nothing is merged.
    pub merge_across_nodes: Option<bool>,
}

impl InitialKnobs {
    /// Every knob unchanged.
    pub const NONE: Self =
        Self { max_page_sharing: None, use_zero_pages: None, smart_scan: None, merge_across_nodes: None };
}

impl Default for InitialKnobs {
    /// With a `max_page_sharing` of 4096 ksmd takes 8,500 ns a page (256, the kernel's default: 46,600; 65536: 6,500),
    /// and reverse-map walks are a sixteenth as long as with 65536.
    fn default() -> Self {
        Self { max_page_sharing: Some(4096), use_zero_pages: Some(true), smart_scan: None, merge_across_nodes: None }
    }
}

/// KSM, taken over. Restored when this is dropped.
#[must_use = "KSM is restored when this is dropped"]
#[derive(Debug)]
pub struct KsmLease {
    writer: Arc<KnobWriter>,
    unavailable: Vec<(Knob, u64)>,
    restored: bool,
}

impl KsmLease {
    /// Takes KSM over. First restores what a crashed run left changed.
    pub fn take(ksm: Arc<Ksm>, paths: &KsmPaths, initial: &InitialKnobs) -> Result<Self, TakeError> {
        let lock = Lock::try_take(&paths.lock)?;
        Self::take_locked(ksm, lock, paths, initial)
    }

    /// Like [`Self::take`], with the lock already taken.
    pub fn take_locked(ksm: Arc<Ksm>, lock: Lock, paths: &KsmPaths, initial: &InitialKnobs) -> Result<Self, TakeError> {
        if recover(&ksm, &lock, paths)?.is_some_and(|restored| !restored.pending.is_empty()) {
            return Err(TakeError::Recovering);
        }
        if let Some(other) = other_driver(&ksm, &paths.proc_root)? {
            return Err(TakeError::InUse(other));
        }
        let now = ksm.values()?;
        let mut state = State::new(boot_id(&paths.proc_root)?, Holder::own(&paths.proc_root)?, now.clone());
        // A knob that an earlier run could not restore still has to get the value from before that run.
        if let Some(earlier) = State::load(&paths.state)? {
            for (knob, values) in earlier.turned {
                if now.get(&knob).is_some_and(|value| values.contains(value)) {
                    state.original.extend(earlier.original.get_key_value(&knob));
                    state.turned.insert(knob, values);
                }
            }
        }
        state.save(&paths.state)?;
        let writer = Arc::new(KnobWriter::new(ksm, lock, paths.state.clone(), state, now));
        let mut lease = Self { writer, unavailable: Vec::new(), restored: false };
        lease.set_once(initial)?;
        debug!(target: "ksm", "KSM's settings are ours");
        Ok(lease)
    }

    fn set_once(&mut self, initial: &InitialKnobs) -> Result<(), TakeError> {
        let wanted = [
            (Knob::MaxPageSharing, initial.max_page_sharing),
            (Knob::UseZeroPages, initial.use_zero_pages.map(u64::from)),
            (Knob::SmartScan, initial.smart_scan.map(u64::from)),
            (Knob::MergeAcrossNodes, initial.merge_across_nodes.map(u64::from)),
        ];
        for (knob, value) in wanted {
            let Some(value) = value else { continue };
            match self.writer.set(knob, value) {
                Ok(()) => {}
                Err(KnobError::Ksm(error)) if error.is_busy() || matches!(error, KsmError::Absent { .. }) => {
                    self.unavailable.push((knob, value));
                }
                Err(KnobError::Ksm(error)) => return Err(error.into()),
                Err(KnobError::State(error)) => return Err(error.into()),
                Err(KnobError::Overridden(_) | KnobError::Ended) => return Err(TakeError::InUse(OtherDriver::Running)),
            }
        }
        Ok(())
    }

    /// KSM's files.
    pub fn ksm(&self) -> &Arc<Ksm> {
        &self.writer.ksm
    }

    /// Initial values that could not be set: the kernel lacks the knob, or pages are merged already.
    pub fn unavailable(&self) -> &[(Knob, u64)] {
        &self.unavailable
    }

    /// Checks that every changed knob still has the value it was set to. Takes about 4 us.
    ///
    /// # Errors
    ///
    /// [`KnobError::Overridden`] from the first difference on: this lease sets no knob any more.
    pub fn check(&self) -> Result<(), KnobError> {
        self.writer.check()
    }

    /// Restores KSM, waiting at most `limit` for ksmd to end a scan. Merged pages stay merged.
    pub fn restore(mut self, limit: Duration) -> RestoreOutcome {
        self.restored = true;
        let outcome = restore(&self.writer, limit);
        debug!(target: "ksm", deferred = ?outcome.deferred, failed = ?outcome.failed, "KSM's settings are restored");
        outcome
    }

    pub(crate) fn writer(&self) -> &Arc<KnobWriter> {
        &self.writer
    }
}

impl Drop for KsmLease {
    fn drop(&mut self) {
        if !self.restored {
            restore(&self.writer, DROP_LIMIT);
        }
    }
}

/// Restores what a run that has ended left changed or had to defer. `None` if there was nothing to do.
pub fn recover(ksm: &Arc<Ksm>, lock: &Lock, paths: &KsmPaths) -> Result<Option<RestoreOutcome>, TakeError> {
    State::sweep(&paths.state);
    let Some(state) = State::load(&paths.state)? else { return Ok(None) };
    if state.boot_id != boot_id(&paths.proc_root)? {
        State::remove(&paths.state)?;
        return Ok(None);
    }
    let own = Holder::own(&paths.proc_root)?;
    // As this process holds the lock, a state file with its pid is from an earlier lease of its own.
    if let Some(holder) = state.holder.filter(|&holder| holder != own) {
        if holder.is_alive(&paths.proc_root)? {
            return Err(TakeError::Busy { pid: holder.pid });
        }
    }
    let mut now = BTreeMap::new();
    for (&knob, values) in &state.turned {
        let Some(value) = ksm.read(knob)? else { continue };
        // A foreign value is compared with one of ours, and so found to be overridden.
        let ours = if state.is_ours(knob, value) { value } else { values.last().copied().unwrap_or(value) };
        now.insert(knob, ours);
    }
    let writer = Arc::new(KnobWriter::new(ksm.clone(), lock.clone(), paths.state.clone(), state, now));
    Ok(Some(restore(&writer, DROP_LIMIT)))
}

/// Restores the knobs that could not be restored while pages were merged. `None` if there was nothing to do.
pub fn restore_deferred(ksm: &Arc<Ksm>, paths: &KsmPaths) -> Result<Option<RestoreOutcome>, TakeError> {
    let lock = Lock::try_take(&paths.lock)?;
    recover(ksm, &lock, paths)
}

/// Gives the knobs that a pagefold has left changed, whose state file is not visible here, the kernel's defaults. `None` if
/// there is nothing to do.
///
/// # Errors
///
/// [`TakeError::Busy`] if a pagefold that may drive KSM still runs.
pub fn restore_orphaned(ksm: &Arc<Ksm>, paths: &KsmPaths) -> Result<Option<RestoreOutcome>, TakeError> {
    let lock = Lock::try_take(&paths.lock)?;
    let orphaned = ksm.knobs()?.orphaned();
    if orphaned.is_empty() || State::load(&paths.state)?.is_some() {
        return Ok(None);
    }
    if let Some(pid) = running_pagefold(&paths.proc_root)? {
        return Err(TakeError::Busy { pid });
    }
    let defaults = orphaned.iter().map(|&(knob, _)| (knob, knob.default_value())).collect();
    let mut state = State::new(boot_id(&paths.proc_root)?, Holder::own(&paths.proc_root)?, defaults);
    state.turned.extend(orphaned.iter().map(|&(knob, value)| (knob, vec![value])));
    state.save(&paths.state)?;
    let now = orphaned.into_iter().collect();
    let writer = Arc::new(KnobWriter::new(ksm.clone(), lock, paths.state.clone(), state, now));
    Ok(Some(restore(&writer, DROP_LIMIT)))
}

/// Another pagefold that may drive KSM, as far as processes are visible.
fn running_pagefold(proc_root: &Path) -> Result<Option<i32>, TakeError> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let drives = |pid: i32| {
        let command = Process::open_at(proc_root, pid).and_then(|process| process.read_file("cmdline"));
        command.is_ok_and(|line| {
            let word = line.split(|&byte| byte == 0).nth(1).unwrap_or_default();
            [&b"run"[..], b"unmerge", b"demo"].contains(&word)
        })
    };
    let running = programs_named(proc_root, &["pagefold"])?;
    Ok(running.into_iter().map(|(pid, _)| pid).find(|&pid| pid != own && drives(pid)))
}

/// Finds out whether another program drives KSM.
pub fn other_driver(ksm: &Ksm, proc_root: &Path) -> Result<Option<OtherDriver>, TakeError> {
    let knobs = ksm.knobs()?;
    if let Some(mode) = knobs.advisor_mode.filter(|mode| mode != "none") {
        return Ok(Some(OtherDriver::Advisor { mode }));
    }
    if let Some((pid, name)) = programs_named(proc_root, &["ksmtuned"])?.into_iter().next() {
        return Ok(Some(OtherDriver::Program { name, pid }));
    }
    Ok((knobs.run == 1).then_some(OtherDriver::Running))
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
