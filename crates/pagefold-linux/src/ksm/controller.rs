//! Ordering scans from ksmd, on a thread that may block.
//!
//! How ksmd answers (read in 6.12's `mm/ksm.c`, each point seen on 6.18 by `tests/ksm_live.rs`):
//!
//! - `pages_to_scan` 4294967295 makes a batch that ends only with the scan. Between two batches ksmd sleeps
//!   until `sleep_millisecs` is *changed*; the same value again does not wake it, nor does `run` 1. From 2^31
//!   on a sleep has no end. So each new value there is a kick, worth one scan: `full_scans` goes up by exactly
//!   one.
//! - A kick written while a scan runs is lost: ksmd reads the new value when it goes to sleep.
//! - With `run` 0 ksmd waits elsewhere: there `run` 1 is the kick, if anything is registered. If it had gone
//!   into an endless sleep before `run` became 0, `run` 1 does not wake it and only a new sleep does.
//! - With nothing registered no kick is answered and `full_scans` stays. The first madvise then wakes ksmd by
//!   itself, for a batch that nobody ordered. `pages_to_scan` 0 makes that batch, and any other, empty.
//! - A scan goes on from where the last batch ended. After paced scanning the first kick only finishes the scan
//!   that was begun.
//! - A kick cannot be aborted: `run` 0 waits for its end (and is then obeyed even if the writer was killed
//!   meanwhile). The cheapest stop of paced scanning is `pages_to_scan` 0 and a new endless sleep: neither
//!   write takes ksmd's mutex, the batch under way is the last.
//!
//! So ksmd rests with `run` 1, `pages_to_scan` 0 and an endless sleep. In that state it used no CPU at all.

use crate::ksm::Knob;
use crate::ksm::knob_writer::Hand;
use crate::ksm::ksmd::Ksmd;
use crate::ksm::lease::{Tenure, TurnError};
use crate::ksm::state_file::ENDLESS_SLEEP;
use crate::os::fault;
use pagefold_core::host::ScanOrder;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// `pages_to_scan` that no scan reaches: the batch ends with the scan.
const WHOLE_SCAN: u64 = u32::MAX as u64;

/// How soon the end of a scan is looked for at first, and how seldom in long ones: with the check of the knobs some 10 us.
const FIRST_LOOK: Duration = Duration::from_micros(500);
const SLOWEST_LOOK: Duration = Duration::from_millis(20);

/// ksmd resting this long after a kick has not heard it: while it waits for a core it
/// does not count as resting, so a busy machine does not look like a deaf one.
const UNHEARD: Duration = Duration::from_millis(30);

/// The same where ksmd itself cannot be seen and only its counters tell.
const UNHEARD_UNSEEN: Duration = Duration::from_millis(200);

/// A kick unheard so often means that nothing is registered.
const KICKS_AT_MOST: u32 = 3;

/// How the driver stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveStatus {
    /// The last order that was begun.
    pub in_force: ScanOrder,
    /// The kernel has not yet done all of it, or another order waits.
    pub under_way: bool,
    /// Kicks answered by a scan.
    pub scans: u64,
    /// Kicks that had to be repeated.
    pub unheard: u64,
    /// Orders to kick that found nothing registered.
    pub empty: u64,
    /// How long the last ordered scan took, nanoseconds.
    pub last_scan_ns: u64,
    /// Why nothing is ordered any more: somebody else turned a knob, or the kernel refused.
    pub stood_down: Option<String>,
}

/// Carries orders to ksmd. Dropping it orders nothing more and leaves the knobs to the [`Tenure`].
#[derive(Debug)]
pub struct Driver {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Desk {
    papers: Mutex<Papers>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Papers {
    next: Option<ScanOrder>,
    quit: bool,
    status: DriveStatus,
}

impl Driver {
    /// Starts the control thread. `ksmd` is `None` where it is hidden; lost kicks are then noticed later.
    pub fn start(tenure: &Tenure, ksmd: Option<Ksmd>) -> io::Result<Self> {
        let desk = Arc::new(Desk::default());
        let hand = tenure.hand().clone();
        // Never scanned since boot: ksmd stands at the beginning. Otherwise nobody can tell.
        let at_start = hand.ksm.pages_scanned().is_ok_and(|pages| pages == 0);
        let smart_scan = hand.standing(Knob::SmartScan);
        let worker = Worker { hand, ksmd, desk: desk.clone(), smart_scan, at_start, pacing: false };
        let thread = std::thread::Builder::new().name("pagefold-ksm".to_owned()).spawn(move || worker.work())?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Gives an order. Does not wait; an order not yet begun is replaced. A kick under way runs to its end.
    pub fn order(&self, order: ScanOrder) {
        if order == ScanOrder::Keep {
            return;
        }
        let mut papers = self.desk.papers();
        if papers.status.stood_down.is_none() {
            papers.next = Some(order);
            papers.status.under_way = true;
            self.desk.bell.notify_all();
        }
    }

    /// Whether the last order is done: the kicked scan has ended, the pace or the rest is in force.
    pub fn idle(&self) -> bool {
        !self.desk.papers().status.under_way
    }

    /// Waits until idle, at most `limit`. True if idle.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        let papers = self.desk.papers();
        let (papers, _) = self
            .desk
            .bell
            .wait_timeout_while(papers, limit, |papers| papers.status.under_way)
            .unwrap_or_else(PoisonError::into_inner);
        !papers.status.under_way
    }

    /// How it stands.
    pub fn status(&self) -> DriveStatus {
        self.desk.papers().status.clone()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.desk.papers().quit = true;
        self.desk.bell.notify_all();
        // Not joined if the kernel blocks it: it then ends by itself after that one write.
        let end = Instant::now() + UNHEARD;
        while let Some(thread) = &self.thread {
            if thread.is_finished() {
                drop(self.thread.take().map(JoinHandle::join));
            } else if Instant::now() >= end {
                break;
            } else {
                std::thread::sleep(FIRST_LOOK);
            }
        }
    }
}

impl Desk {
    fn papers(&self) -> MutexGuard<'_, Papers> {
        self.papers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the worker stops.
enum Stop {
    Quit,
    StandDown(String),
}

impl From<TurnError> for Stop {
    fn from(error: TurnError) -> Self {
        match error {
            TurnError::Ended => Self::Quit,
            other => Self::StandDown(other.to_string()),
        }
    }
}

impl From<crate::ksm::KsmError> for Stop {
    fn from(error: crate::ksm::KsmError) -> Self {
        Self::StandDown(error.to_string())
    }
}

struct Worker {
    hand: Arc<Hand>,
    ksmd: Option<Ksmd>,
    desk: Arc<Desk>,
    /// As it was found, where the kernel has it (Linux 6.7).
    smart_scan: Option<u64>,
    /// The next batch begins a scan, rather than going on within one.
    at_start: bool,
    pacing: bool,
}

impl Worker {
    fn work(mut self) {
        while let Some(order) = self.next_order() {
            let done = match order {
                ScanOrder::Keep => Ok(()),
                ScanOrder::Rest => self.rest(),
                ScanOrder::Kick { thorough } => self.kick(thorough),
                ScanOrder::Pace { pages_to_scan, sleep_ms, thorough } => self.pace(pages_to_scan, sleep_ms, thorough),
            };
            let mut papers = self.desk.papers();
            if let Err(Stop::StandDown(why)) = &done {
                papers.status.stood_down = Some(why.clone());
                papers.next = None;
            }
            papers.status.under_way = papers.next.is_some() && done.is_ok();
            self.desk.bell.notify_all();
            if done.is_err() {
                break;
            }
        }
        let mut papers = self.desk.papers();
        papers.status.under_way = false;
        self.desk.bell.notify_all();
    }

    fn next_order(&self) -> Option<ScanOrder> {
        let papers = self.desk.papers();
        let mut papers = self
            .desk
            .bell
            .wait_while(papers, |papers| !papers.quit && papers.next.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        if papers.quit {
            return None;
        }
        let order = papers.next.take()?;
        papers.status.in_force = order;
        Some(order)
    }

    fn rest(&mut self) -> Result<(), Stop> {
        fault::point("order:rest");
        if self.hand.standing(Knob::Run) != Some(1) {
            return Ok(());
        }
        self.hand.turn(Knob::PagesToScan, 0)?;
        if self.pacing {
            self.hand.turn(Knob::SleepMillisecs, self.fresh_sleep())?;
            self.pacing = false;
        }
        Ok(())
    }

    fn pace(&mut self, pages_to_scan: u32, sleep_ms: u32, thorough: bool) -> Result<(), Stop> {
        // From 2^31 on the kernel would sleep for ever.
        let sleep_ms = u64::from(sleep_ms).min(ENDLESS_SLEEP - 1);
        fault::point("order:pace");
        self.set_smart_scan(thorough)?;
        self.at_start = false;
        self.pacing = true;
        self.hand.turn(Knob::PagesToScan, u64::from(pages_to_scan.max(1)))?;
        self.hand.turn(Knob::SleepMillisecs, sleep_ms)?;
        Ok(self.hand.turn(Knob::Run, 1)?)
    }

    /// Off where no page is to be left out, otherwise as it was found.
    fn set_smart_scan(&self, thorough: bool) -> Result<(), Stop> {
        let Some(usual) = self.smart_scan else { return Ok(()) };
        let value = if thorough { 0 } else { usual };
        Ok(self.hand.turn(Knob::SmartScan, value)?)
    }

    fn kick(&mut self, thorough: bool) -> Result<(), Stop> {
        fault::point("order:kick");
        self.set_smart_scan(thorough)?;
        if self.pacing {
            self.rest()?;
            self.wait_for_rest()?;
        }
        if !self.at_start && self.scan()? {
            let papers = self.desk.papers();
            // Only an order to do something else makes the scan from the beginning superfluous.
            if papers.quit || papers.next.is_some_and(|next| !matches!(next, ScanOrder::Kick { .. })) {
                drop(papers);
                self.at_start = true;
                return self.rest();
            }
        }
        self.at_start = true;
        if !self.scan()? {
            self.desk.papers().status.empty += 1;
        }
        // Empties the batch that ksmd would begin by itself should everything registered go and something come.
        self.rest()
    }

    /// One kick and the wait for its scan. False if nothing is registered.
    fn scan(&mut self) -> Result<bool, Stop> {
        let began = Instant::now();
        let mut before = self.hand.ksm.full_scans()?;
        self.hand.turn(Knob::PagesToScan, WHOLE_SCAN)?;
        self.hand.turn(Knob::SleepMillisecs, self.fresh_sleep())?;
        self.hand.turn(Knob::Run, 1)?;
        let mut kicks = 1;
        let mut quiet = Quiet::default();
        let mut look = FIRST_LOOK;
        loop {
            self.pause(look)?;
            look = (look * 5 / 4).min(SLOWEST_LOOK);
            self.hand.check()?;
            let scans = self.hand.ksm.full_scans()?;
            if scans > before {
                // The count goes up within the batch. A kick before ksmd sleeps would be lost.
                self.wait_for_rest()?;
                let mut papers = self.desk.papers();
                papers.status.scans += 1;
                papers.status.last_scan_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                return Ok(true);
            }
            before = before.min(scans);
            if !self.unheard(&mut quiet)? {
                continue;
            }
            if kicks == KICKS_AT_MOST {
                return Ok(false);
            }
            kicks += 1;
            look = FIRST_LOOK;
            quiet = Quiet::default();
            self.desk.papers().status.unheard += 1;
            self.hand.turn(Knob::SleepMillisecs, self.fresh_sleep())?;
        }
    }

    /// Whether ksmd has been resting for so long that it cannot have heard the kick.
    fn unheard(&self, quiet: &mut Quiet) -> Result<bool, Stop> {
        let scanned = self.hand.ksm.pages_scanned()?;
        let rests = match &self.ksmd {
            // Its state costs more to read than the counter: only ask while that stands still.
            Some(_) if quiet.moves(scanned) => Some(false),
            // One that cannot be looked at is as good as hidden.
            Some(ksmd) => ksmd.rests().ok(),
            None => None,
        };
        Ok(match rests {
            Some(rests) => quiet.lasts(rests, scanned, UNHEARD),
            None => quiet.lasts(true, scanned, UNHEARD_UNSEEN),
        })
    }

    fn wait_for_rest(&self) -> Result<(), Stop> {
        let mut quiet = Quiet::default();
        let mut look = FIRST_LOOK / 10;
        loop {
            let rests = match self.ksmd.as_ref().and_then(|ksmd| ksmd.rests().ok()) {
                Some(rests) => rests,
                None => quiet.lasts(true, self.hand.ksm.pages_scanned()?, SLOWEST_LOOK),
            };
            if rests {
                return Ok(());
            }
            self.pause(look)?;
            look = (look * 5 / 4).min(SLOWEST_LOOK);
        }
    }

    /// A new endless sleep: a kick.
    fn fresh_sleep(&self) -> u64 {
        match self.hand.standing(Knob::SleepMillisecs) {
            Some(now) if (ENDLESS_SLEEP..u64::from(u32::MAX)).contains(&now) => now + 1,
            _ => ENDLESS_SLEEP,
        }
    }

    /// Sleeps, unless the driver is dropped or KSM is given back.
    fn pause(&self, time: Duration) -> Result<(), Stop> {
        let papers = self.desk.papers();
        let (papers, _) = self
            .desk
            .bell
            .wait_timeout_while(papers, time, |papers| !papers.quit)
            .unwrap_or_else(PoisonError::into_inner);
        if papers.quit || self.hand.is_ending() { Err(Stop::Quit) } else { Ok(()) }
    }
}

/// How long ksmd has rested with its counter standing still.
#[derive(Default)]
struct Quiet {
    since: Option<(Instant, u64)>,
    scanned: Option<u64>,
}

impl Quiet {
    /// Whether the counter has moved since it was last seen.
    fn moves(&mut self, scanned: u64) -> bool {
        self.scanned.replace(scanned).is_some_and(|before| before != scanned)
    }

    fn lasts(&mut self, rests: bool, scanned: u64, limit: Duration) -> bool {
        match self.since {
            Some((since, at)) if rests && at == scanned => since.elapsed() >= limit,
            _ => {
                self.since = rests.then(|| (Instant::now(), scanned));
                false
            }
        }
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
