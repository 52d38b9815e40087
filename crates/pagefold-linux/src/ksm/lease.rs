//! Taking KSM over, and giving it back as it was.
//!
//! KSM's knobs belong to whoever set them. A [`Tenure`] begins only while nobody else drives KSM,
//! remembers in a file how every knob stood, and puts back what it turned when it ends: by
//! [`Tenure::restore`], by being dropped, or, after a crash, by [`recover`] in the next start. When
//! somebody else turns a knob meanwhile, that knob is theirs: it is never written again.

use crate::ksm::knob_writer::{Hand, give_back};
use crate::ksm::lock::{Lock, LockError};
use crate::ksm::state_file::{Holder, State, StateError, boot_id};
use crate::ksm::{Knob, Ksm, KsmError};
use crate::proc::process::ReadError;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// For how long a tenure that is dropped waits for ksmd.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// Why KSM was not taken over.
#[derive(Debug, Error)]
pub enum TakeError {
    /// Another pagefold holds the lock.
    #[error("KSM is driven by another pagefold{}", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Locked {
        /// Its pid, where known.
        pid: Option<i32>,
    },
    /// Somebody else drives KSM.
    #[error("KSM is in use: {0}")]
    InUse(OtherDriver),
    /// The lock is free, yet the process named in the state file lives: it was started with another lock.
    #[error("KSM is held by process {pid}, which uses another lock file")]
    Busy {
        /// The process.
        pid: i32,
    },
    /// What an earlier run left turned is still being put back: ksmd is in a scan that it ordered.
    #[error("ksmd is still in a scan that an earlier pagefold ordered")]
    Recovering,
    /// The lock file.
    #[error(transparent)]
    Lock(LockError),
    /// The state file.
    #[error(transparent)]
    State(#[from] StateError),
    /// KSM's files.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// Our own entry in /proc, or the list of processes.
    #[error(transparent)]
    Proc(#[from] ReadError),
}

impl From<LockError> for TakeError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Held { pid } => Self::Locked { pid },
            other => Self::Lock(other),
        }
    }
}

/// Who else drives KSM.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OtherDriver {
    /// `run` is 1, by whom the kernel does not tell.
    #[error("ksmd is already running (run is 1)")]
    Running,
    /// The kernel's advisor sets pages_to_scan.
    #[error("the kernel's advisor is on ({mode})")]
    Advisor {
        /// Its mode.
        mode: String,
    },
    /// A program that turns the same knobs.
    #[error("{name} is running (pid {pid})")]
    Program {
        /// Its name.
        name: String,
        /// Its pid.
        pid: i32,
    },
}

/// Somebody else turned a knob, or let the advisor turn it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("somebody else turned {knob}: it was {ours} and is {theirs}")]
pub struct Usurped {
    /// The knob.
    pub knob: Knob,
    /// What it should stand at.
    pub ours: u64,
    /// What it stands at.
    pub theirs: u64,
}

/// Why a knob was not turned, or a check failed.
#[derive(Debug, Error)]
pub enum TurnError {
    /// Somebody else has turned it: stand down.
    #[error(transparent)]
    Usurped(#[from] Usurped),
    /// The tenure is being given back.
    #[error("KSM is being given back")]
    Ended,
    /// The kernel.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// The state file: nothing is turned that is not noted first.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Where the lock, the state and the processes are.
#[derive(Clone, Debug)]
pub struct Places {
    /// The lock file.
    pub lock: PathBuf,
    /// The state file.
    pub state: PathBuf,
    /// `/proc`.
    pub proc_root: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            lock: crate::ksm::lock::LOCK_PATH.into(),
            state: crate::ksm::state_file::STATE_PATH.into(),
            proc_root: "/proc".into(),
        }
    }
}

/// How the knobs that are set once should stand. `None` leaves a knob alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Copies of one content that share one page. Only possible while nothing is merged.
    pub max_page_sharing: Option<u64>,
    /// All-zero pages map the kernel's zero page.
    pub use_zero_pages: Option<bool>,
    /// Smart scan.
    pub smart_scan: Option<bool>,
    /// Pages of different memory nodes are merged. Only possible while nothing is.
    pub merge_across_nodes: Option<bool>,
}

impl Default for Wishes {
    /// 4096 has most of what 65536 gains against chains (8,500 and 6,500 ns a page, 46,600 with the
    /// kernel's 256), while reverse-map walks stay a sixteenth as long.
    fn default() -> Self {
        Self { max_page_sharing: Some(4096), use_zero_pages: Some(true), smart_scan: None, merge_across_nodes: None }
    }
}

/// KSM, taken over. Gives it back when dropped.
#[must_use = "KSM is given back when this is dropped"]
#[derive(Debug)]
pub struct Tenure {
    hand: Arc<Hand>,
    not_granted: Vec<(Knob, u64)>,
    given_back: bool,
}

/// What came of giving KSM back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Knobs that stand as they did before, with that value.
    pub put_back: Vec<(Knob, u64)>,
    /// Knobs that cannot be put back while pages are merged, with the value they should get. They stay in the
    /// state file for [`put_back_deferred`].
    pub deferred: Vec<(Knob, u64)>,
    /// Knobs that somebody else has turned: left as they are.
    pub left: Vec<Usurped>,
    /// Knobs that the kernel would not let be put back, and why. They stay in the state file.
    pub failed: Vec<(Knob, String)>,
    /// Knobs not yet put back when the time was over, because ksmd is in a scan. A thread is still at it; if
    /// the process ends first, the next start goes on from the state file.
    pub pending: Vec<(Knob, u64)>,
}

impl Restored {
    /// Everything stands as it did before, or as somebody else wants it.
    pub fn is_complete(&self) -> bool {
        self.deferred.is_empty() && self.failed.is_empty() && self.pending.is_empty()
    }
}

impl Tenure {
    /// Takes KSM over. Puts back first what a crashed run left turned.
    pub fn take(ksm: Arc<Ksm>, places: &Places, wishes: &Wishes) -> Result<Self, TakeError> {
        let lock = Lock::try_take(&places.lock)?;
        Self::take_locked(ksm, lock, places, wishes)
    }

    /// The same with the lock already in hand.
    pub fn take_locked(ksm: Arc<Ksm>, lock: Lock, places: &Places, wishes: &Wishes) -> Result<Self, TakeError> {
        if recover(&ksm, &lock, places)?.is_some_and(|restored| !restored.pending.is_empty()) {
            return Err(TakeError::Recovering);
        }
        if let Some(other) = other_driver(&ksm, &places.proc_root)? {
            return Err(TakeError::InUse(other));
        }
        let mut now = BTreeMap::new();
        for knob in Knob::ALL {
            if let Some(value) = ksm.read(knob)? {
                now.insert(knob, value);
            }
        }
        let mut state = State::new(boot_id(&places.proc_root)?, Holder::own(&places.proc_root)?, now.clone());
        // A knob that an earlier run could not put back has its first owner's value still to come.
        if let Some(earlier) = State::load(&places.state)? {
            for (knob, values) in earlier.turned {
                if now.get(&knob).is_some_and(|value| values.contains(value)) {
                    state.original.extend(earlier.original.get_key_value(&knob));
                    state.turned.insert(knob, values);
                }
            }
        }
        state.save(&places.state)?;
        let hand = Arc::new(Hand::new(ksm, lock, places.state.clone(), state, now));
        let mut tenure = Self { hand, not_granted: Vec::new(), given_back: false };
        tenure.set_once(wishes)?;
        Ok(tenure)
    }

    fn set_once(&mut self, wishes: &Wishes) -> Result<(), TakeError> {
        let wanted = [
            (Knob::MaxPageSharing, wishes.max_page_sharing),
            (Knob::UseZeroPages, wishes.use_zero_pages.map(u64::from)),
            (Knob::SmartScan, wishes.smart_scan.map(u64::from)),
            (Knob::MergeAcrossNodes, wishes.merge_across_nodes.map(u64::from)),
        ];
        for (knob, value) in wanted {
            let Some(value) = value else { continue };
            match self.hand.turn(knob, value) {
                Ok(()) => {}
                Err(TurnError::Ksm(error)) if error.is_busy() || matches!(error, KsmError::Absent { .. }) => {
                    self.not_granted.push((knob, value));
                }
                Err(TurnError::Ksm(error)) => return Err(error.into()),
                Err(TurnError::State(error)) => return Err(error.into()),
                Err(TurnError::Usurped(_) | TurnError::Ended) => return Err(TakeError::InUse(OtherDriver::Running)),
            }
        }
        Ok(())
    }

    /// KSM.
    pub fn ksm(&self) -> &Arc<Ksm> {
        &self.hand.ksm
    }

    /// Wishes that could not be granted: the kernel lacks the knob, or pages are merged already.
    pub fn not_granted(&self) -> &[(Knob, u64)] {
        &self.not_granted
    }

    /// Looks whether every knob we turned still stands as we left it. About 4 us. After a failure nothing
    /// more is ordered from ksmd until the end of the tenure.
    pub fn check(&self) -> Result<(), TurnError> {
        self.hand.check()
    }

    /// Gives KSM back, waiting at most `limit` for ksmd to end a scan. Merged pages stay merged.
    pub fn restore(mut self, limit: Duration) -> Restored {
        self.given_back = true;
        give_back(&self.hand, limit)
    }

    pub(crate) fn hand(&self) -> &Arc<Hand> {
        &self.hand
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        if !self.given_back {
            give_back(&self.hand, DROP_LIMIT);
        }
    }
}

/// Puts back what a run that is gone left turned, and what had to be deferred. `None` if there was nothing to do.
pub fn recover(ksm: &Arc<Ksm>, lock: &Lock, places: &Places) -> Result<Option<Restored>, TakeError> {
    State::sweep(&places.state);
    let Some(state) = State::load(&places.state)? else { return Ok(None) };
    if state.boot_id != boot_id(&places.proc_root)? {
        State::remove(&places.state)?;
        return Ok(None);
    }
    let own = Holder::own(&places.proc_root)?;
    // With the lock in hand, a state file of our own pid is of an earlier tenure of ours.
    if let Some(holder) = state.holder.filter(|&holder| holder != own) {
        if holder.is_alive(&places.proc_root)? {
            return Err(TakeError::Busy { pid: holder.pid });
        }
    }
    let mut now = BTreeMap::new();
    for (&knob, values) in &state.turned {
        let Some(value) = ksm.read(knob)? else { continue };
        // What is not ours any more is compared with one of our values, and so found to be usurped.
        let ours = if state.is_ours(knob, value) { value } else { values.last().copied().unwrap_or(value) };
        now.insert(knob, ours);
    }
    let hand = Arc::new(Hand::new(ksm.clone(), lock.clone(), places.state.clone(), state, now));
    Ok(Some(give_back(&hand, DROP_LIMIT)))
}

/// Puts back the knobs that could not be put back while pages were merged. `None` if there was nothing to do.
pub fn put_back_deferred(ksm: &Arc<Ksm>, places: &Places) -> Result<Option<Restored>, TakeError> {
    let lock = Lock::try_take(&places.lock)?;
    recover(ksm, &lock, places)
}

/// Whether somebody else drives KSM.
pub fn other_driver(ksm: &Ksm, proc_root: &Path) -> Result<Option<OtherDriver>, TakeError> {
    let knobs = ksm.knobs()?;
    if let Some(mode) = knobs.advisor_mode.filter(|mode| mode != "none") {
        return Ok(Some(OtherDriver::Advisor { mode }));
    }
    if let Some((pid, name)) = crate::proc::list::programs_named(proc_root, &["ksmtuned"])?.into_iter().next() {
        return Ok(Some(OtherDriver::Program { name, pid }));
    }
    Ok((knobs.run == 1).then_some(OtherDriver::Running))
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
