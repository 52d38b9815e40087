//! A [`KsmLease`] is the right to set KSM's knobs. It begins only while no other program drives KSM, records the
//! original value of every knob in a file, and restores its changes when it ends: by [`KsmLease::restore`] or when
//! dropped. After a crash the next start restores them ([`recover`]). Once another program has changed a knob, we never
//! write it again.

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

/// How long a dropped lease waits for ksmd to end a scan.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// Why we couldn't take KSM over.
#[derive(Debug, Error)]
pub enum TakeError {
    #[error("KSM is in use: {0}")]
    InUse(OtherDriver),
    /// We've got the lock, but the process in the state file is alive: it was started with another lock file.
    #[error("KSM is held by process {pid}, which uses another lock file")]
    Busy { pid: i32 },
    /// We can't undo the changes of an earlier run yet, because ksmd is still in a scan that the earlier run ordered.
    #[error("ksmd is still in a scan that an earlier pagefold ordered")]
    Recovering,
    /// Another pagefold holds the lock, or we can't open it.
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Ksm(#[from] KsmError),
    #[error(transparent)]
    Proc(#[from] ReadError),
}

/// Who else drives KSM.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OtherDriver {
    /// `run` is 1. The kernel doesn't show which program set it.
    #[error("ksmd is already running (run is 1)")]
    Running,
    /// The kernel's advisor sets `pages_to_scan`.
    #[error("the kernel's advisor is on ({mode})")]
    Advisor { mode: String },
    /// A program known to set the same knobs.
    #[error("{name} is running (pid {pid})")]
    Program { name: String, pid: i32 },
}

/// The files that a lease uses besides KSM's own.
#[derive(Clone, Debug)]
pub struct KsmPaths {
    pub lock: PathBuf,
    pub state: PathBuf,
    pub proc_root: PathBuf,
}

impl KsmPaths {
    /// Puts lock file and state file into this directory.
    pub fn in_dir(dir: &Path) -> Self {
        Self { lock: dir.join("lock"), state: dir.join("run/ksm-state.json"), ..Self::default() }
    }
}

impl Default for KsmPaths {
    fn default() -> Self {
        Self { lock: LOCK_PATH.into(), state: STATE_PATH.into(), proc_root: "/proc".into() }
    }
}

/// The knobs that a run sets once, at its beginning.
///
/// With a `max_page_sharing` of 4096, ksmd takes 8,500 ns per page (with 256, the kernel's default: 46,600; with 65536:
/// 6,500). Reverse-map walks are a sixteenth as long as with 65536.
pub const INITIAL_KNOBS: [(Knob, u64); 2] = [(Knob::MaxPageSharing, 4096), (Knob::UseZeroPages, 1)];

/// The right to set KSM's knobs. Dropping this restores them.
#[must_use = "KSM is restored when this is dropped"]
#[derive(Debug)]
pub struct KsmLease {
    writer: Arc<KnobWriter>,
    unavailable: Vec<(Knob, u64)>,
    restored: bool,
}

impl KsmLease {
    /// Takes KSM over, and sets the knobs of `initial`. If a run has crashed before, first restores its changes.
    pub fn take(ksm: Arc<Ksm>, paths: &KsmPaths, initial: &[(Knob, u64)]) -> Result<Self, TakeError> {
        let lock = Lock::try_take(&paths.lock)?;
        Self::take_locked(ksm, lock, paths, initial)
    }

    /// Like [`Self::take`], for a caller that already has the lock.
    pub fn take_locked(
        ksm: Arc<Ksm>,
        lock: Lock,
        paths: &KsmPaths,
        initial: &[(Knob, u64)],
    ) -> Result<Self, TakeError> {
        if recover(&ksm, &lock, paths)?.is_some_and(|restored| !restored.pending.is_empty()) {
            return Err(TakeError::Recovering);
        }
        if let Some(other) = other_driver(&ksm, &paths.proc_root)? {
            return Err(TakeError::InUse(other));
        }
        let now = ksm.values()?;
        let mut state = State::new(boot_id(&paths.proc_root)?, Holder::own(&paths.proc_root)?, now.clone());
        // If an earlier run couldn't restore a knob, the knob's original value is the one from before that run.
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

    fn set_once(&mut self, initial: &[(Knob, u64)]) -> Result<(), TakeError> {
        for &(knob, value) in initial {
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

    pub fn ksm(&self) -> &Arc<Ksm> {
        &self.writer.ksm
    }

    /// The initial values that we couldn't set, because the kernel lacks the knob or pages are merged already.
    pub fn unavailable(&self) -> &[(Knob, u64)] {
        &self.unavailable
    }

    /// Checks that every changed knob still has the value that we set. Takes about 4 us.
    ///
    /// # Errors
    /// [`KnobError::Overridden`] from the first difference on: this lease sets no more knobs.
    pub fn check(&self) -> Result<(), KnobError> {
        self.writer.check()
    }

    /// Unmerges everything that's merged on the machine.
    ///
    /// # Errors
    /// [`KnobError::Overridden`] if another program has changed a knob.
    pub fn unmerge_everything(&self) -> Result<(), KnobError> {
        self.writer.set(Knob::Run, 2)?;
        self.writer.set(Knob::Run, 0)
    }

    /// Restores KSM's knobs, waiting at most `limit` for ksmd to end a scan. Merged pages stay merged.
    pub fn restore(mut self, limit: Duration) -> RestoreOutcome {
        self.restored = true;
        let outcome = restore(&self.writer, limit);
        debug!(target: "ksm", deferred = ?outcome.deferred, failed = ?outcome.failed, "KSM's settings are restored");
        outcome
    }

    pub fn state_path(&self) -> &Path {
        &self.writer.state_path
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

/// Restores the knobs that an ended run left changed. `None` if there was nothing to do.
pub fn recover(ksm: &Arc<Ksm>, lock: &Lock, paths: &KsmPaths) -> Result<Option<RestoreOutcome>, TakeError> {
    State::sweep(&paths.state);
    let Some(state) = State::load(&paths.state)? else { return Ok(None) };
    if state.boot_id != boot_id(&paths.proc_root)? {
        State::remove(&paths.state)?;
        return Ok(None);
    }
    let own = Holder::own(&paths.proc_root)?;
    match state.holder {
        // We hold the lock, so a state file with our pid is from an earlier lease of this process.
        Some(holder) if holder != own && holder.is_alive(&paths.proc_root)? => {
            return Err(TakeError::Busy { pid: holder.pid });
        }
        _ => {}
    }
    let mut now = BTreeMap::new();
    for (&knob, values) in &state.turned {
        let Some(value) = ksm.read(knob)? else { continue };
        // If another program has set this value, we expect one of ours instead, so that restoring finds the knob
        // overridden.
        let ours = if state.is_ours(knob, value) { value } else { values.last().copied().unwrap_or(value) };
        now.insert(knob, ours);
    }
    let writer = Arc::new(KnobWriter::new(ksm.clone(), lock.clone(), paths.state.clone(), state, now));
    Ok(Some(restore(&writer, DROP_LIMIT)))
}

/// Restores the knobs that we couldn't restore while pages were merged. `None` if there was nothing to do.
pub fn restore_deferred(ksm: &Arc<Ksm>, paths: &KsmPaths) -> Result<Option<RestoreOutcome>, TakeError> {
    let lock = Lock::try_take(&paths.lock)?;
    recover(ksm, &lock, paths)
}

/// If a pagefold has left knobs changed and its state file isn't here, sets them to the kernel's defaults. `None` if
/// there was nothing to do.
///
/// # Errors
/// [`TakeError::Busy`] if a pagefold that may drive KSM is still running.
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

/// Finds another pagefold that may drive KSM, among the processes that we can see.
fn running_pagefold(proc_root: &Path) -> Result<Option<i32>, TakeError> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    for (pid, _) in programs_named(proc_root, &["pagefold"])? {
        if pid != own && may_drive_ksm(proc_root, pid) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Whether this process is running one of the commands that drive KSM.
fn may_drive_ksm(proc_root: &Path, pid: i32) -> bool {
    let read = Process::open_at(proc_root, pid).and_then(|process| process.read_file("cmdline"));
    let Ok(line) = read else { return false };
    matches!(line.split(|&byte| byte == 0).nth(1), Some(b"run" | b"unmerge" | b"exclude" | b"demo"))
}

/// Finds another program that drives KSM. `None` if there's none.
pub fn other_driver(ksm: &Ksm, proc_root: &Path) -> Result<Option<OtherDriver>, TakeError> {
    let knobs = ksm.knobs()?;
    match knobs.advisor_mode {
        Some(mode) if mode != "none" => return Ok(Some(OtherDriver::Advisor { mode })),
        _ => {}
    }
    if let Some((pid, name)) = programs_named(proc_root, &["ksmtuned"])?.into_iter().next() {
        return Ok(Some(OtherDriver::Program { name, pid }));
    }
    Ok((knobs.run == 1).then_some(OtherDriver::Running))
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
