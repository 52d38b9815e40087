//! Ordering scans from ksmd, on a thread that may block.
//!
//! [`super::scan`] describes how ksmd reacts to its knobs.

use crate::ksm::knob_writer::Hand;
use crate::ksm::ksmd::Ksmd;
use crate::ksm::lease::{Tenure, TurnError};
use crate::ksm::scan::{self, FIRST_CHECK, LOST_KICK, ScanKnobs};
use crate::ksm::state_file::ENDLESS_SLEEP;
use crate::ksm::{Knob, Ksm};
use crate::os::fault;
use pagefold_core::host::ScanOrder;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
        let end = Instant::now() + LOST_KICK;
        while let Some(thread) = &self.thread {
            if thread.is_finished() {
                drop(self.thread.take().map(JoinHandle::join));
            } else if Instant::now() >= end {
                break;
            } else {
                std::thread::sleep(FIRST_CHECK);
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
            self.hand.turn(Knob::SleepMillisecs, scan::fresh_sleep(self)?)?;
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
            scan::wait_for_rest(self, self.ksmd.as_ref())?;
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

    /// One scan. False if nothing is registered.
    fn scan(&mut self) -> Result<bool, Stop> {
        let scan = scan::scan_once(self, self.ksmd.as_ref())?;
        let mut papers = self.desk.papers();
        papers.status.unheard += u64::from(scan.lost);
        if scan.done {
            papers.status.scans += 1;
            papers.status.last_scan_ns = u64::try_from(scan.took.as_nanos()).unwrap_or(u64::MAX);
        }
        Ok(scan.done)
    }
}

impl ScanKnobs for Worker {
    type Error = Stop;

    fn ksm(&self) -> &Ksm {
        &self.hand.ksm
    }

    fn value(&self, knob: Knob) -> Result<Option<u64>, Stop> {
        Ok(self.hand.standing(knob))
    }

    fn set(&self, knob: Knob, value: u64) -> Result<(), Stop> {
        Ok(self.hand.turn(knob, value)?)
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

    fn check(&self) -> Result<(), Stop> {
        Ok(self.hand.check()?)
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
