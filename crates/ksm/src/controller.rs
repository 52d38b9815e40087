//! Carries out the daemon's orders to ksmd (scan once, scan at a given pace, rest) on a thread of its own, because
//! writes to KSM's files may block.

use super::files::{Ksm, KsmError};
use super::knob_writer::{KnobError, KnobWriter};
use super::knobs::Knob;
use super::ksmd::Ksmd;
use super::lease::KsmLease;
use super::restore::RestoreOutcome;
use super::scan::{self, FIRST_CHECK, LOST_KICK, ScanKnobs};
use super::state_file::ENDLESS_SLEEP;
use pagefold_engine::host::ScanOrder;
use pagefold_procmem::os::{fault, locked};
use pagefold_procmem::process::ReadError;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;
use tracing::debug;

/// The outcome of the orders to ksmd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KsmdStatus {
    /// Whether an order is waiting or under way.
    pub under_way: bool,
    /// Why the thread no longer sets knobs: another program changed one, or the kernel refused a value.
    pub stood_down: Option<String>,
}

/// Carries out orders to ksmd. Dropping this ends the thread. The knobs stay set until the [`KsmLease`] restores them.
#[derive(Debug)]
pub struct KsmdController {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    orders: Mutex<Orders>,
    /// Signalled at every change of the orders.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    next: Option<ScanOrder>,
    quit: bool,
    status: KsmdStatus,
}

impl KsmdController {
    /// Starts the thread. `ksmd` is `None` where /proc doesn't show ksmd. Then it takes us longer to notice a lost
    /// kick.
    pub fn start(lease: &KsmLease, ksmd: Option<Ksmd>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let writer = lease.writer().clone();
        // Only if ksmd hasn't scanned since boot do we know that it's at the beginning of a scan.
        let at_start = writer.ksm.pages_scanned().is_ok_and(|pages| pages == 0);
        let smart_scan = writer.expected(Knob::SmartScan);
        let worker = Worker { writer, ksmd, shared: shared.clone(), smart_scan, at_start, pacing: false };
        let thread = std::thread::Builder::new().name("pagefold-ksm".to_owned()).spawn(move || worker.work())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Gives an order without waiting. The order replaces one that the thread hasn't begun; a scan under way runs to
    /// its end.
    pub fn order(&self, order: ScanOrder) {
        if order == ScanOrder::Keep {
            return;
        }
        let mut orders = self.shared.orders();
        if orders.status.stood_down.is_none() {
            orders.next = Some(order);
            orders.status.under_way = true;
            self.shared.changed.notify_all();
        }
    }

    /// Whether the last order is carried out: the ordered scan has ended, or ksmd has the new pace, or rests.
    pub fn idle(&self) -> bool {
        !self.shared.orders().status.under_way
    }

    /// Waits until [`Self::idle`], at most `limit`. Returns false if the time is up.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        let orders = self.shared.orders();
        let (orders, _) = self
            .shared
            .changed
            .wait_timeout_while(orders, limit, |orders| orders.status.under_way)
            .unwrap_or_else(PoisonError::into_inner);
        !orders.status.under_way
    }

    pub fn status(&self) -> KsmdStatus {
        self.shared.orders().status.clone()
    }
}

impl Drop for KsmdController {
    fn drop(&mut self) {
        self.shared.orders().quit = true;
        self.shared.changed.notify_all();
        // We don't join a thread that the kernel blocks in a write: it ends by itself after that write.
        let Some(thread) = self.thread.take() else { return };
        let end = Instant::now() + LOST_KICK;
        while !thread.is_finished() {
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(FIRST_CHECK);
        }
        let _ = thread.join();
    }
}

#[derive(Debug, Error)]
pub enum ScanError {
    #[error(transparent)]
    Ksm(#[from] KsmError),
    #[error(transparent)]
    Proc(#[from] ReadError),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// Makes ksmd scan, so that it releases unmarked pages and its counters are right again, then ends the lease. Each scan
/// may take `limit`, and so may restoring the knobs.
pub fn scan_and_restore(lease: KsmLease, limit: Duration) -> Result<RestoreOutcome, ScanError> {
    if lease.ksm().anything_merged()? {
        let controller = KsmdController::start(&lease, Ksmd::find()?).map_err(ScanError::Thread)?;
        // The first scan may only finish one that was begun earlier.
        for _ in 0..2 {
            controller.order(ScanOrder::KICK);
            controller.wait_idle(limit);
        }
    }
    Ok(lease.restore(limit))
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        locked(&self.orders)
    }
}

enum Stop {
    Quit,
    StandDown(String),
}

impl From<KnobError> for Stop {
    fn from(error: KnobError) -> Self {
        match error {
            KnobError::Ended => Self::Quit,
            other => Self::StandDown(other.to_string()),
        }
    }
}

impl From<KsmError> for Stop {
    fn from(error: KsmError) -> Self {
        Self::StandDown(error.to_string())
    }
}

struct Worker {
    writer: Arc<KnobWriter>,
    ksmd: Option<Ksmd>,
    shared: Arc<Shared>,
    /// The original value of `smart_scan`. `None` if the kernel lacks the knob (before Linux 6.7).
    smart_scan: Option<u64>,
    /// Whether ksmd's next batch begins a new scan rather than resuming one.
    at_start: bool,
    pacing: bool,
}

impl Worker {
    fn work(mut self) {
        while let Some(order) = self.next_order() {
            debug!(target: "ksm", "order: {order:?}");
            let done = match order {
                ScanOrder::Keep => Ok(()),
                ScanOrder::Rest => self.rest(),
                ScanOrder::Kick { thorough } => self.kick(thorough),
                ScanOrder::Pace { pages_to_scan, sleep_ms, thorough } => self.pace(pages_to_scan, sleep_ms, thorough),
            };
            let mut orders = self.shared.orders();
            if let Err(Stop::StandDown(why)) = &done {
                debug!(target: "ksm", "standing down: {why}");
                orders.status.stood_down = Some(why.clone());
                orders.next = None;
            }
            orders.status.under_way = orders.next.is_some() && done.is_ok();
            self.shared.changed.notify_all();
            if done.is_err() {
                break;
            }
        }
        let mut orders = self.shared.orders();
        orders.status.under_way = false;
        self.shared.changed.notify_all();
    }

    fn next_order(&self) -> Option<ScanOrder> {
        let orders = self.shared.orders();
        let mut orders = self
            .shared
            .changed
            .wait_while(orders, |orders| !orders.quit && orders.next.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        if orders.quit {
            return None;
        }
        orders.next.take()
    }

    fn rest(&mut self) -> Result<(), Stop> {
        fault::point("order:rest");
        if self.writer.expected(Knob::Run) != Some(1) {
            return Ok(());
        }
        self.writer.set(Knob::PagesToScan, 0)?;
        if self.pacing {
            self.writer.set(Knob::SleepMillisecs, scan::fresh_sleep(self)?)?;
            self.pacing = false;
        }
        Ok(())
    }

    fn pace(&mut self, pages_to_scan: u32, sleep_ms: u32, thorough: bool) -> Result<(), Stop> {
        // To the kernel, a sleep of 2^31 ms or more has no end.
        let sleep_ms = u64::from(sleep_ms).min(ENDLESS_SLEEP - 1);
        fault::point("order:pace");
        self.set_smart_scan(thorough)?;
        self.at_start = false;
        self.pacing = true;
        self.writer.set(Knob::PagesToScan, u64::from(pages_to_scan.max(1)))?;
        self.writer.set(Knob::SleepMillisecs, sleep_ms)?;
        Ok(self.writer.set(Knob::Run, 1)?)
    }

    /// Switches `smart_scan` off for a scan that must skip no page, and back to its original value otherwise.
    fn set_smart_scan(&self, thorough: bool) -> Result<(), Stop> {
        let Some(original) = self.smart_scan else { return Ok(()) };
        let value = if thorough { 0 } else { original };
        Ok(self.writer.set(Knob::SmartScan, value)?)
    }

    fn kick(&mut self, thorough: bool) -> Result<(), Stop> {
        fault::point("order:kick");
        self.set_smart_scan(thorough)?;
        if self.pacing {
            self.rest()?;
            scan::wait_for_rest(self, self.ksmd.as_ref())?;
        }
        if !self.at_start && self.scan()? {
            let orders = self.shared.orders();
            // That scan only finished an earlier one. So ksmd scans again, from the beginning, unless a new order says
            // something other than scan.
            if orders.quit || orders.next.is_some_and(|next| !matches!(next, ScanOrder::Kick { .. })) {
                drop(orders);
                self.at_start = true;
                return self.rest();
            }
        }
        self.at_start = true;
        self.scan()?;
        // If all registered processes end and a new one registers, ksmd begins a batch by itself. Resting now makes
        // that batch empty.
        self.rest()
    }

    /// Makes ksmd scan once. Returns false if nothing is registered.
    fn scan(&mut self) -> Result<bool, Stop> {
        scan::scan_once(self, self.ksmd.as_ref())
    }
}

impl ScanKnobs for Worker {
    type Error = Stop;

    fn ksm(&self) -> &Ksm {
        &self.writer.ksm
    }

    fn value(&self, knob: Knob) -> Result<Option<u64>, Stop> {
        Ok(self.writer.expected(knob))
    }

    fn set(&self, knob: Knob, value: u64) -> Result<(), Stop> {
        Ok(self.writer.set(knob, value)?)
    }

    /// Sleeps. Fails if the controller is dropped or the lease ends.
    fn pause(&self, time: Duration) -> Result<(), Stop> {
        let orders = self.shared.orders();
        let (orders, _) = self
            .shared
            .changed
            .wait_timeout_while(orders, time, |orders| !orders.quit)
            .unwrap_or_else(PoisonError::into_inner);
        if orders.quit || self.writer.is_ending() { Err(Stop::Quit) } else { Ok(()) }
    }

    fn check(&self) -> Result<(), Stop> {
        Ok(self.writer.check()?)
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
