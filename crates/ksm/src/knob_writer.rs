//! Sets KSM's knobs during a lease and records every change.
//!
//! We record a change in the state file before we make it. Later we compare our record with the kernel's values, and
//! once another program has changed a knob, we make no more changes. We don't hold the record's lock while the kernel
//! blocks a write, so a check never has to wait.

use super::files::{KSM_ROOT, Ksm, KsmError};
use super::knobs::Knob;
use super::ksmd::Ksmd;
use super::lock::Lock;
use super::state_file::{ENDLESS_SLEEP, State, StateError};
use pagefold_procmem::os::{fault, locked};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use thiserror::Error;

/// How often we check whether ksmd's batch has ended.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// Another program, or the advisor, has changed a knob.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("another program changed {knob} from {ours} to {found}")]
pub struct Overridden {
    pub knob: Knob,
    /// The value that we set.
    pub ours: u64,
    /// The value that the kernel has.
    pub found: u64,
}

/// Why we didn't set a knob, or why a check failed.
#[derive(Debug, Error)]
pub enum KnobError {
    /// Another program drives KSM now, so we set nothing more.
    #[error(transparent)]
    Overridden(#[from] Overridden),
    #[error("cannot change KSM's settings: the original ones are being restored")]
    Ended,
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// We couldn't record the change, and so didn't make it.
    #[error(transparent)]
    State(#[from] StateError),
}

/// The one place that sets knobs during a lease.
#[derive(Debug)]
pub(crate) struct KnobWriter {
    pub(crate) ksm: Arc<Ksm>,
    /// The lock that keeps another pagefold from driving KSM. We release it when all knobs are restored, or when the
    /// last thread that may still write ends.
    lock: Mutex<Option<Lock>>,
    pub(crate) state_path: PathBuf,
    /// Allows one write at a time. A thread holds this while the kernel blocks its write.
    writing: Mutex<()>,
    ending: AtomicBool,
    record: Mutex<Record>,
}

#[derive(Debug)]
struct Record {
    state: State,
    expected: BTreeMap<Knob, Expected>,
    overridden: Option<Overridden>,
}

/// The value that a knob should have. While we write a new value, both the old and the new one are right.
#[derive(Clone, Copy, Debug)]
struct Expected {
    value: u64,
    writing: Option<u64>,
}

impl Expected {
    fn at(value: u64) -> Self {
        Self { value, writing: None }
    }

    fn allows(self, value: u64) -> bool {
        self.value == value || self.writing == Some(value)
    }
}

impl KnobWriter {
    pub(crate) fn new(ksm: Arc<Ksm>, lock: Lock, state_path: PathBuf, state: State, now: BTreeMap<Knob, u64>) -> Self {
        let expected = now.into_iter().map(|(knob, value)| (knob, Expected::at(value))).collect();
        Self {
            ksm,
            lock: Mutex::new(Some(lock)),
            state_path,
            writing: Mutex::new(()),
            ending: AtomicBool::new(false),
            record: Mutex::new(Record { state, expected, overridden: None }),
        }
    }

    pub(crate) fn expected(&self, knob: Knob) -> Option<u64> {
        self.record().expected.get(&knob).map(|expected| expected.value)
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Sets a knob, unless another program has changed one. May block as [`Ksm::write`] does.
    pub(crate) fn set(&self, knob: Knob, value: u64) -> Result<(), KnobError> {
        let _one = locked(&self.writing);
        if self.is_ending() {
            return Err(KnobError::Ended);
        }
        {
            let mut record = self.record();
            record.check(&self.ksm)?;
            let Some(expected) = record.expected.get(&knob).copied() else {
                return Err(KsmError::Absent { path: self.ksm.root().join(knob.file_name()) }.into());
            };
            if expected.value == value {
                return Ok(());
            }
            let before = record.state.turned.clone();
            if record.state.note(knob, expected.value, value) {
                if let Err(error) = record.state.save(&self.state_path) {
                    record.state.turned = before;
                    return Err(error.into());
                }
            }
            record.expected.insert(knob, Expected { value: expected.value, writing: Some(value) });
        }
        fault::point_of("turn", knob.file_name());
        let written = self.ksm.write(knob, value);
        fault::point_of("turned", knob.file_name());
        if let Some(expected) = self.record().expected.get_mut(&knob) {
            *expected = Expected::at(if written.is_ok() { value } else { expected.value });
        }
        Ok(written?)
    }

    /// Compares every changed knob with its recorded value.
    pub(crate) fn check(&self) -> Result<(), KnobError> {
        self.record().check(&self.ksm)
    }

    /// Refuses changes from now on.
    pub(crate) fn announce_end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Waits for a write that began before [`Self::announce_end`], so that we restore the knob that it sets, too.
    pub(crate) fn wait_for_write(&self) {
        drop(locked(&self.writing));
    }

    /// All knobs that we've changed, with their original values.
    pub(crate) fn changed(&self) -> BTreeMap<Knob, u64> {
        let record = self.record();
        let changed = record.state.turned.keys();
        changed.filter_map(|knob| Some((*knob, *record.state.original.get(knob)?))).collect()
    }

    /// If this lease made ksmd run, makes it rest after its current batch, and waits until that ends.
    pub(crate) fn rest_ksmd(&self) {
        let running = self.expected(Knob::Run) == Some(1) && self.ksm.root() == Path::new(KSM_ROOT);
        if !running || !self.record().state.turned.contains_key(&Knob::Run) {
            return;
        }
        let Ok(Some(ksmd)) = Ksmd::find() else { return };
        for (knob, value) in [(Knob::PagesToScan, 0), (Knob::SleepMillisecs, ENDLESS_SLEEP)] {
            self.set_signature(knob, value);
        }
        // If we can't read ksmd's state, there's nothing to wait for.
        while let Ok(false) = ksmd.rests() {
            std::thread::sleep(CHECK_EVERY);
        }
    }

    /// If we've changed this knob before, sets it to a value that recovery recognizes as ours even without a record.
    /// Only two knobs have such values, and writing these two never blocks.
    fn set_signature(&self, knob: Knob, value: u64) {
        let Some(expected) = self.expected(knob) else { return };
        let ours = expected != value
            && self.record().state.is_ours(knob, expected)
            && self.ksm.read(knob).is_ok_and(|now| now == Some(expected));
        if ours && self.ksm.write(knob, value).is_ok() {
            self.record().expected.insert(knob, Expected::at(value));
        }
    }

    /// Writes the original value of a knob. Checks and records nothing: the caller has checked the present value.
    pub(crate) fn write_original(&self, knob: Knob, value: u64) -> Result<(), KsmError> {
        let _one = locked(&self.writing);
        self.ksm.write(knob, value)
    }

    pub(crate) fn forget(&self, knob: Knob) {
        self.record().state.turned.remove(&knob);
    }

    /// Ends the lease: releases the lock, and removes the state file unless it still lists knobs that we couldn't
    /// restore.
    pub(crate) fn close(&self) {
        {
            let mut record = self.record();
            record.state.holder = None;
            let nothing_left = record.state.turned.is_empty();
            fault::point("state-closing");
            // If this fails, the next start finds the old file, and restores what is still changed.
            let _ = if nothing_left { State::remove(&self.state_path) } else { record.state.save(&self.state_path) };
        }
        fault::point("state-closed");
        locked(&self.lock).take();
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        locked(&self.record)
    }
}

impl Record {
    /// Compares our record with the kernel's values. A difference is final: from then on every check fails.
    fn check(&mut self, ksm: &Ksm) -> Result<(), KnobError> {
        if let Some(overridden) = &self.overridden {
            return Err(overridden.clone().into());
        }
        for (&knob, expected) in &self.expected {
            // We check `run` even if we haven't changed it: a program that sets `run` drives KSM.
            if knob != Knob::Run && !self.state.turned.contains_key(&knob) {
                continue;
            }
            let Some(found) = ksm.read(knob)? else { continue };
            if !expected.allows(found) {
                let overridden = Overridden { knob, ours: expected.value, found };
                self.overridden = Some(overridden.clone());
                return Err(overridden.into());
            }
        }
        Ok(())
    }
}
