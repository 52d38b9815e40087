//! Records: the page contents of some processes over time, as the changes between snapshots.
//!
//! A record only has digests, and we discard their key, so nobody can look up a page's contents.

#[cfg(test)]
mod arbitrary;
mod check;
mod deltas;
mod error;
#[cfg(test)]
mod file_tests;
mod reader;
pub mod schema;
mod writer;

pub use deltas::{Deltas, PageTable, Region, State};
pub use error::RecordError;
pub use reader::RecordReader;
pub use writer::{RecordWriter, WriteError, Written, write};

use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn};

/// The number of parts of a page, each 1 KiB with its own digest (CMD, section 4).
pub const PARTS: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// `live` or the name of a generator.
    pub source: String,
    /// Time between two snapshots, nanoseconds.
    pub every_ns: u64,
    /// We left out names and PIDs and shifted addresses.
    pub anonymous: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRow {
    /// Number in this record; never reused.
    pub process: u32,
    /// `None` in anonymous and generated records.
    pub pid: Option<i32>,
    /// `None` in anonymous records.
    pub name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRow {
    /// Number in this record; never reused.
    pub region: u32,
    pub process: u32,
    /// Kind of memory: heap, stack, anonymous...
    pub kind: String,
    pub first: Vpn,
    pub pages: Pages,
}

/// The state and content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Absent, private, shared, merged or the zero page.
    pub state: PageState,
    pub huge: bool,
    /// Digest of the content; 0 exactly for pages of zeros and pages without content.
    pub digest: u128,
    /// Digests of the page's quarters under the same key.
    pub parts: [u32; PARTS],
    /// The page frame, if known: equal numbers mean the same memory.
    pub frame: Option<u64>,
}

/// A change from one snapshot to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A process appears or changes its name.
    Process(ProcessRow),
    /// A process ends, with all its regions.
    Exit {
        process: u32,
    },
    /// A region appears, with all pages absent, or changes its bounds: pages outside them are gone, pages inside stay.
    Region(RegionRow),
    Unmap {
        region: u32,
    },
    Page {
        region: u32,
        page: Vpn,
        /// The page's new state and content.
        now: Page,
    },
}

/// The changes since the previous snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Time since the record began, nanoseconds.
    pub time_ns: u64,
    /// Changes: processes precede their regions, regions their pages.
    pub events: Vec<Event>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub origin: Origin,
    pub snapshots: Vec<Snapshot>,
}

/// All processes, regions and pages at one time.
#[derive(Clone, Debug, Default)]
pub struct MemorySnapshot {
    /// Time since the record began, nanoseconds.
    pub time_ns: u64,
    /// The processes, ascending.
    pub processes: Vec<ProcessRow>,
    /// Regions ascending by process and address, each with its present pages in ascending order.
    pub regions: Vec<(RegionRow, Vec<(Vpn, Page)>)>,
}

/// A source of consecutive snapshots.
pub trait Source {
    /// Why we can't take another snapshot.
    type Error;

    /// Takes the next snapshot; `None` at the end.
    fn next_snapshot(&mut self) -> Result<Option<MemorySnapshot>, Self::Error>;
}
