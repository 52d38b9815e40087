//! What runs have saved over time: a file of fixed size, by the minute for a day and by the quarter of an hour for 30 days.
//!
//! A moment has its slot by the time, so a write concerns one slot and nothing else, and the oldest is overwritten. A slot
//! that a crash has torn fails its checksum and is empty. The file is written by a thread of its own, which asks the main loop
//! for the facts as the control socket does: no disk delays it. It is read without a daemon, too.

mod curve;
mod file;
mod writer;

pub use curve::{Point, points};
pub use file::{HistoryFile, read};
pub use writer::start;

use crate::commands::status::Status;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the service keeps it.
pub const DEFAULT_FILE: &str = "/var/lib/pagefold/history";

/// The figures of one time. All but the time are those of `pagefold.status/1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Seconds since 1970.
    pub time: u64,
    pub pid: u64,
    /// Whether nothing was merged, but only found.
    pub dry_run: bool,
    pub saved_bytes: u64,
    /// What is expected to be merged of the memory in scope, the copies that stay included.
    pub expected_bytes: u64,
    pub marked_bytes: u64,
    pub resident_bytes: u64,
    pub available_bytes: u64,
    /// CPU time since the run began.
    pub pagefold_ns: u64,
    pub ksmd_ns: u64,
}

impl Moment {
    /// `None` while it isn't known yet what is saved.
    pub fn of(status: &Status, time: u64) -> Option<Self> {
        let saved_bytes = if status.dry_run { Some(0) } else { status.saved_bytes }?;
        Some(Self {
            time,
            pid: status.pid.into(),
            dry_run: status.dry_run,
            saved_bytes,
            expected_bytes: status.processes.iter().map(|row| row.expected_bytes).sum(),
            marked_bytes: status.marked_bytes,
            resident_bytes: status.resident_bytes,
            available_bytes: status.available_bytes,
            pagefold_ns: status.cpu_seconds.pagefold_ns,
            ksmd_ns: status.cpu_seconds.ksmd_ns,
        })
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
