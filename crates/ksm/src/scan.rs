//! Makes ksmd scan once: we wake it (a kick), and wait for the end of the scan.
//!
//! How ksmd reacts (read in 6.12's `mm/ksm.c`, each point confirmed on 6.18 by `tests/ksm_live.rs`):
//!
//! - `pages_to_scan` 4294967295 makes a batch that ends only with the scan. Between two batches ksmd sleeps until
//!   `sleep_millisecs` *changes*; writing the same value doesn't wake it, nor does `run` 1. A sleep of 2^31 or more has
//!   no end. So each new value of `sleep_millisecs` is a kick, good for one scan: `full_scans` goes up by exactly one.
//! - A kick written during a scan is lost: ksmd only looks for a change from the value that it went to sleep with.
//! - With `run` 0 ksmd waits elsewhere in its code, where `run` 1 is the kick if anything is registered. If it had
//!   begun an endless sleep before `run` became 0, `run` 1 doesn't wake it and only a new sleep does.
//! - With nothing registered no kick starts a scan and `full_scans` stays. The first madvise then wakes ksmd for a
//!   batch that nobody ordered. `pages_to_scan` 0 makes that batch, and any other, empty.
//! - A scan resumes where the last batch ended. After paced scanning the first kick only finishes the current scan.
//! - We can't abort a kicked scan: `run` 0 waits for its end, and then takes effect even if the writer has been killed
//!   since. The cheapest stop of paced scanning is `pages_to_scan` 0 and a new endless sleep: neither write takes
//!   ksmd's mutex, and ksmd stops after the current batch.
//!
//! So ksmd rests with `run` 1, `pages_to_scan` 0 and an endless sleep. In that state it used no CPU at all.

use super::ksmd::Ksmd;
use super::state_file::ENDLESS_SLEEP;
use super::{Knob, Ksm, KsmError};
use std::time::{Duration, Instant};

/// More pages than any scan has, so the batch ends only with the scan.
pub(crate) const WHOLE_SCAN: u64 = u32::MAX as u64;

/// How long we wait between checks for the end of a scan, at first and in long scans. A check takes some 10 us,
/// including the check of the knobs.
pub(crate) const FIRST_CHECK: Duration = Duration::from_micros(500);
const SLOWEST_CHECK: Duration = Duration::from_millis(20);

/// If ksmd rests for this long after a kick, the kick was lost. A ksmd that waits for a core isn't resting, so a busy
/// machine doesn't look like a lost kick.
pub(crate) const LOST_KICK: Duration = Duration::from_millis(30);

/// The same limit where /proc hides ksmd, so that we only see the counters.
const LOST_KICK_UNSEEN: Duration = Duration::from_millis(200);

/// After this many lost kicks we conclude that nothing is registered.
const MAX_KICKS: u32 = 3;

/// How the scan reads and sets knobs, and how the caller ends its waits.
pub trait ScanKnobs {
    type Error: From<KsmError>;

    fn ksm(&self) -> &Ksm;

    fn value(&self, knob: Knob) -> Result<Option<u64>, Self::Error>;

    /// Sets a knob unless it has that value already.
    fn set(&self, knob: Knob, value: u64) -> Result<(), Self::Error>;

    /// Sleeps; fails if the caller wants to stop.
    fn pause(&self, time: Duration) -> Result<(), Self::Error>;

    /// Fails if another program has changed a knob.
    fn check(&self) -> Result<(), Self::Error>;
}

/// Kicks ksmd, and waits until the scan has ended and ksmd rests. Returns false if every kick was lost, because nothing
/// is registered.
pub fn scan_once<K: ScanKnobs>(knobs: &K, ksmd: Option<&Ksmd>) -> Result<bool, K::Error> {
    let mut before = knobs.ksm().full_scans()?;
    knobs.set(Knob::PagesToScan, WHOLE_SCAN)?;
    knobs.set(Knob::SleepMillisecs, fresh_sleep(knobs)?)?;
    knobs.set(Knob::Run, 1)?;
    let mut lost = 0;
    let mut quiet = Quiet::default();
    let mut interval = FIRST_CHECK;
    loop {
        knobs.pause(interval)?;
        interval = (interval * 5 / 4).min(SLOWEST_CHECK);
        knobs.check()?;
        let scans = knobs.ksm().full_scans()?;
        if scans > before {
            // ksmd counts the scan before its batch ends. If we kicked before it sleeps, that kick would be lost.
            wait_for_rest(knobs, ksmd)?;
            return Ok(true);
        }
        before = before.min(scans);
        if !is_lost(knobs, ksmd, &mut quiet)? {
            continue;
        }
        if lost + 1 == MAX_KICKS {
            return Ok(false);
        }
        lost += 1;
        interval = FIRST_CHECK;
        quiet = Quiet::default();
        knobs.set(Knob::SleepMillisecs, fresh_sleep(knobs)?)?;
    }
}

/// Waits until ksmd sleeps between two batches.
pub(crate) fn wait_for_rest<K: ScanKnobs>(knobs: &K, ksmd: Option<&Ksmd>) -> Result<(), K::Error> {
    let mut quiet = Quiet::default();
    let mut interval = FIRST_CHECK / 10;
    loop {
        let rests = match ksmd.and_then(|ksmd| ksmd.rests().ok()) {
            Some(rests) => rests,
            None => quiet.lasts(true, knobs.ksm().pages_scanned()?, SLOWEST_CHECK),
        };
        if rests {
            return Ok(());
        }
        knobs.pause(interval)?;
        interval = (interval * 5 / 4).min(SLOWEST_CHECK);
    }
}

/// An endless sleep that differs from the present value, so writing it is a kick.
pub(crate) fn fresh_sleep<K: ScanKnobs>(knobs: &K) -> Result<u64, K::Error> {
    Ok(match knobs.value(Knob::SleepMillisecs)? {
        Some(now) if (ENDLESS_SLEEP..u64::from(u32::MAX)).contains(&now) => now + 1,
        _ => ENDLESS_SLEEP,
    })
}

/// Whether ksmd has rested long enough that the kick must have been lost.
fn is_lost<K: ScanKnobs>(knobs: &K, ksmd: Option<&Ksmd>, quiet: &mut Quiet) -> Result<bool, K::Error> {
    let scanned = knobs.ksm().pages_scanned()?;
    let rests = match ksmd {
        // ksmd's state costs more to read than the counter, so we only read it while the counter stands still.
        Some(_) if quiet.moves(scanned) => Some(false),
        // If we can't read ksmd's state, we go by the counter alone.
        Some(ksmd) => ksmd.rests().ok(),
        None => None,
    };
    Ok(match rests {
        Some(rests) => quiet.lasts(rests, scanned, LOST_KICK),
        None => quiet.lasts(true, scanned, LOST_KICK_UNSEEN),
    })
}

/// Measures how long ksmd has rested with its counter unchanged.
#[derive(Default)]
struct Quiet {
    since: Option<(Instant, u64)>,
    scanned: Option<u64>,
}

impl Quiet {
    /// Whether the counter has moved since the last call.
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
