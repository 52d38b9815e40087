//! The savings of runs over time: a file of fixed size, with one record (a moment) per minute for a day and one per
//! quarter of an hour for 30 days.
//!
//! A moment's time determines its slot, so a write touches only that slot and overwrites the oldest moment. If a crash
//! has torn a slot, its checksum fails, and we treat the slot as empty. A thread writes the file and asks the main loop
//! for the facts as the control socket does, so no disk delays the main loop. Reading the file needs no daemon.

mod curve;
mod file;
mod writer;

pub use curve::{Point, points};
pub use file::{HistoryFile, read};
pub use writer::start;

use crate::commands::status::Status;
use pagefold_engine::units::as_seconds;
use serde::{Serialize, Serializer};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where the service keeps the history.
pub const DEFAULT_FILE: &str = "/var/lib/pagefold/history";

/// The figures at one time. All except the time come from `pagefold.status/1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Seconds since 1970.
    #[serde(serialize_with = "as_utc")]
    pub time: u64,
    pub pid: u64,
    /// Whether the run only found duplicates and merged nothing.
    pub dry_run: bool,
    pub saved_bytes: u64,
    /// The memory in scope that we expect to be merged, including the copies that stay.
    pub expected_bytes: u64,
    pub marked_bytes: u64,
    pub resident_bytes: u64,
    pub available_bytes: u64,
    /// CPU time since the run began.
    #[serde(rename = "pagefold_cpu_seconds", with = "as_seconds")]
    pub pagefold_ns: u64,
    #[serde(rename = "ksmd_cpu_seconds", with = "as_seconds")]
    pub ksmd_ns: u64,
}

impl Moment {
    /// `None` while we don't know yet how much is saved.
    pub fn of(status: &Status, time: u64) -> Option<Self> {
        let saved_bytes = if status.run.dry_run { Some(0) } else { status.memory.saved_bytes }?;
        Some(Self {
            time,
            pid: status.pid.into(),
            dry_run: status.run.dry_run,
            saved_bytes,
            expected_bytes: status.expected_bytes(),
            marked_bytes: status.memory.marked_bytes,
            resident_bytes: status.memory.resident_bytes,
            available_bytes: status.memory.available_bytes,
            pagefold_ns: status.work.cpu_seconds.pagefold_ns,
            ksmd_ns: status.work.cpu_seconds.ksmd_ns,
        })
    }

    /// How much the run saved. For a dry run: how much memory we'd expect to be merged.
    pub fn result_bytes(&self) -> u64 {
        if self.dry_run { self.expected_bytes } else { self.saved_bytes }
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A time in seconds since 1970, as RFC 3339.
pub fn utc(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn as_utc<S: Serializer>(seconds: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&utc(*seconds))
}
