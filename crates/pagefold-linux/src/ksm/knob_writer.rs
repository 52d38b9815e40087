//! The hand that turns KSM's knobs during a tenure, and the book of what it turned.
//!
//! Every write goes through here: it is noted in the state file first, refused once somebody else has
//! turned a knob, and compared later with what the kernel says. The book is never locked while the kernel
//! blocks a write, so that checks stay prompt.

use crate::ksm::ksmd::Ksmd;
use crate::ksm::lease::{Restored, TurnError, Usurped};
use crate::ksm::lock::Lock;
use crate::ksm::state_file::{ENDLESS_SLEEP, State};
use crate::ksm::{KSM_ROOT, Knob, Ksm, KsmError};
use crate::os::fault;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

/// How often ksmd is looked at while it ends its batch.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The order in which knobs are put back, the reverse of that in which they are turned. `run` comes
/// first: the others then change nothing that still moves.
const PUT_BACK_ORDER: [Knob; 7] = [
    Knob::Run,
    Knob::SleepMillisecs,
    Knob::PagesToScan,
    Knob::SmartScan,
    Knob::UseZeroPages,
    Knob::MergeAcrossNodes,
    Knob::MaxPageSharing,
];

/// The one place from which knobs are turned during a tenure.
#[derive(Debug)]
pub(crate) struct Hand {
    pub(crate) ksm: Arc<Ksm>,
    /// Let go when everything is put back, or with the last thread that may still write.
    lock: Mutex<Option<Lock>>,
    state_path: PathBuf,
    /// One write at a time; held while the kernel blocks.
    turning: Mutex<()>,
    ending: AtomicBool,
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    state: State,
    now: BTreeMap<Knob, Standing>,
    usurped: Option<Usurped>,
}

/// What a knob stands at as far as we know. While a write is under way it may be either value.
#[derive(Clone, Copy, Debug)]
struct Standing {
    value: u64,
    writing: Option<u64>,
}

impl Standing {
    fn agrees(self, value: u64) -> bool {
        self.value == value || self.writing == Some(value)
    }
}

enum PutBack {
    Done(u64),
    Deferred(u64),
    Left(Usurped),
    Failed(String),
}

impl Hand {
    pub(crate) fn new(ksm: Arc<Ksm>, lock: Lock, state_path: PathBuf, state: State, now: BTreeMap<Knob, u64>) -> Self {
        let now = now.into_iter().map(|(knob, value)| (knob, Standing { value, writing: None })).collect();
        Self {
            ksm,
            lock: Mutex::new(Some(lock)),
            state_path,
            turning: Mutex::new(()),
            ending: AtomicBool::new(false),
            book: Mutex::new(Book { state, now, usurped: None }),
        }
    }

    /// What `knob` stands at by our book.
    pub(crate) fn standing(&self, knob: Knob) -> Option<u64> {
        self.book().now.get(&knob).map(|standing| standing.value)
    }

    /// Whether the tenure is being given back.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Turns a knob, unless somebody else has. May block as [`Ksm::write`] does.
    pub(crate) fn turn(&self, knob: Knob, value: u64) -> Result<(), TurnError> {
        let _one = lock(&self.turning);
        if self.is_ending() {
            return Err(TurnError::Ended);
        }
        {
            let mut book = self.book();
            book.agree(&self.ksm)?;
            let Some(standing) = book.now.get(&knob).copied() else {
                return Err(KsmError::Absent { path: self.ksm.root().join(knob.file_name()) }.into());
            };
            if standing.value == value {
                return Ok(());
            }
            let noted = book.state.turned.clone();
            if book.state.note(knob, standing.value, value) {
                if let Err(error) = book.state.save(&self.state_path) {
                    book.state.turned = noted;
                    return Err(error.into());
                }
            }
            book.now.insert(knob, Standing { value: standing.value, writing: Some(value) });
        }
        fault::point_of("turn", knob.file_name());
        let written = self.ksm.write(knob, value);
        fault::point_of("turned", knob.file_name());
        let mut book = self.book();
        if let Some(standing) = book.now.get_mut(&knob) {
            standing.writing = None;
            if written.is_ok() {
                standing.value = value;
            }
        }
        Ok(written?)
    }

    pub(crate) fn check(&self) -> Result<(), TurnError> {
        self.book().agree(&self.ksm)
    }

    /// What is still turned, in the order of putting back, each with the value it should get.
    fn to_put_back(&self) -> Vec<(Knob, u64)> {
        let book = self.book();
        let turned = PUT_BACK_ORDER.into_iter().filter(|knob| book.state.turned.contains_key(knob));
        turned.filter_map(|knob| Some((knob, rest_value(knob, *book.state.original.get(&knob)?)))).collect()
    }

    /// Has ksmd do nothing after its present batch, and waits for the end of that, if it is us who had it run.
    fn have_ksmd_rest(&self) {
        let running = self.standing(Knob::Run) == Some(1) && self.ksm.root() == Path::new(KSM_ROOT);
        if !running || !self.book().state.turned.contains_key(&Knob::Run) {
            return;
        }
        let Ok(Some(ksmd)) = Ksmd::find() else { return };
        for (knob, value) in [(Knob::PagesToScan, 0), (Knob::SleepMillisecs, ENDLESS_SLEEP)] {
            self.calm(knob, value);
        }
        // Where it cannot be read there is nothing to wait for.
        while let Ok(false) = ksmd.rests() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Turns a knob that was ours before to a value known as ours. Neither of the two blocks.
    fn calm(&self, knob: Knob, value: u64) {
        let Some(standing) = self.standing(knob).filter(|&now| now != value) else { return };
        let ours =
            self.book().state.is_ours(knob, standing) && self.ksm.read(knob).is_ok_and(|now| now == Some(standing));
        if ours && self.ksm.write(knob, value).is_ok() {
            self.book().now.insert(knob, Standing { value, writing: None });
        }
    }

    fn put_back(&self, knob: Knob, value: u64) -> PutBack {
        let _one = lock(&self.turning);
        let Some(standing) = self.book().now.get(&knob).copied() else {
            return PutBack::Failed("the knob has vanished".to_owned());
        };
        match self.ksm.read(knob) {
            Ok(Some(found)) if found == value => return PutBack::Done(value),
            Ok(Some(found)) if found != standing.value => {
                return PutBack::Left(Usurped { knob, ours: standing.value, theirs: found });
            }
            Ok(_) => {}
            Err(error) => return PutBack::Failed(error.to_string()),
        }
        match self.ksm.write(knob, value) {
            Ok(()) => PutBack::Done(value),
            Err(error) if error.is_busy() => PutBack::Deferred(value),
            Err(error) => PutBack::Failed(error.to_string()),
        }
    }

    /// Strikes a knob from the state, or keeps it there for later, so that a crash from here on knows.
    fn settle(&self, knob: Knob, outcome: &PutBack) {
        if matches!(outcome, PutBack::Done(_) | PutBack::Left(_)) {
            self.book().state.turned.remove(&knob);
        }
    }

    /// The end of a tenure: the file goes, or stays with what could not be put back, and the lock is free.
    fn close(&self) {
        {
            let mut book = self.book();
            book.state.holder = None;
            let nothing_left = book.state.turned.is_empty();
            fault::point("state-closing");
            // Should this fail, the next start finds every knob as it was, or what is left to do, and tries again.
            let _ = if nothing_left { State::remove(&self.state_path) } else { book.state.save(&self.state_path) };
        }
        fault::point("state-closed");
        lock(&self.lock).take();
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        lock(&self.book)
    }
}

impl Book {
    /// Compares the knobs in our hand with the kernel's. What was found once stays found.
    fn agree(&mut self, ksm: &Ksm) -> Result<(), TurnError> {
        if let Some(usurped) = &self.usurped {
            return Err(usurped.clone().into());
        }
        for (&knob, standing) in &self.now {
            // `run` matters before we have turned it: whoever turns it wants to drive.
            if knob != Knob::Run && !self.state.turned.contains_key(&knob) {
                continue;
            }
            if let Some(theirs) = ksm.read(knob)?.filter(|&value| !standing.agrees(value)) {
                let usurped = Usurped { knob, ours: standing.value, theirs };
                self.usurped = Some(usurped.clone());
                return Err(usurped.into());
            }
        }
        Ok(())
    }
}

/// What to put a knob back to. A `run` that was 2 (stopped, unmerged) becomes 0: writing 2 would unmerge all
/// that was saved, and either way ksmd is stopped.
fn rest_value(knob: Knob, original: u64) -> u64 {
    if knob == Knob::Run && original == 2 { 0 } else { original }
}

/// Puts everything back on a thread of its own, and waits for that at most `limit`.
///
/// A write to `run` blocks as long as ksmd's batch lasts, which is for ever where a program keeps its mmap lock from ksmd;
/// and who is blocked there cannot even be killed, so that this process would not end either. So ksmd's next batch is
/// made empty first, which never blocks, and `run` is written when ksmd rests. If the process ends before that, ksmd does
/// nothing once its batch has ended, and the next start goes on from the state file.
pub(crate) fn give_back(hand: &Arc<Hand>, limit: Duration) -> Restored {
    hand.ending.store(true, Ordering::Release);
    let progress = Arc::new(Mutex::new(Restored { pending: hand.to_put_back(), ..Restored::default() }));
    let (done, wait) = mpsc::channel::<()>();
    let work = {
        let (hand, progress) = (hand.clone(), progress.clone());
        move || {
            // A write that began before the end was announced comes first, and is put back with the others.
            drop(lock(&hand.turning));
            hand.have_ksmd_rest();
            for (knob, value) in hand.to_put_back() {
                fault::point_of("put-back", knob.file_name());
                let outcome = hand.put_back(knob, value);
                fault::point_of("was-put-back", knob.file_name());
                hand.settle(knob, &outcome);
                let mut progress = lock(&progress);
                progress.pending.retain(|(pending, _)| *pending != knob);
                match outcome {
                    PutBack::Done(value) => progress.put_back.push((knob, value)),
                    PutBack::Deferred(value) => progress.deferred.push((knob, value)),
                    PutBack::Left(usurped) => progress.left.push(usurped),
                    PutBack::Failed(why) => progress.failed.push((knob, why)),
                }
            }
            hand.close();
            let _ = done.send(());
        }
    };
    match std::thread::Builder::new().name("pagefold-ksm-back".to_owned()).spawn(work) {
        // A disconnect means that the thread is done too.
        Ok(_) => drop(wait.recv_timeout(limit)),
        Err(error) => lock(&progress).failed.push((Knob::Run, format!("no thread to put it back: {error}"))),
    }
    lock(&progress).clone()
}

/// A poisoned lock here guards plain values that are valid at any moment: go on, putting knobs back matters more.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
