//! Records: what the pages of some processes held, snapshot by snapshot, as what changed from one to the next.
//!
//! No contents are kept, only digests under a key that is thrown away, so that nobody can look up what a page held.

#[cfg(test)]
mod arbitrary;
mod check;
mod deltas;
mod error;
#[cfg(test)]
mod file_tests;
mod reader;
pub mod schema;
mod seal;
mod writer;

pub use deltas::{Deltas, PageTable, Region, State};
pub use error::RecordError;
pub use reader::RecordReader;
pub use writer::{RecordWriter, WriteError, Written, write};

use pagefold_core::host::PageState;
use pagefold_core::units::{Pages, Vpn};

/// Parts of a page that are digested by themselves: of 1 KiB each (CMD, section 4).
pub const PARTS: usize = 4;

/// Where a record comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// `live`, or the name of a generator.
    pub source: String,
    /// Time between two snapshots, nanoseconds.
    pub every_ns: u64,
    /// Names, pids and addresses were left out.
    pub anonymous: bool,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRow {
    /// Its number in this record; never reused.
    pub process: u32,
    /// Its pid, unless the record is anonymous or generated.
    pub pid: Option<i32>,
    /// Its name, unless the record is anonymous.
    pub name: Option<String>,
}

/// A region of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRow {
    /// Its number in this record; never reused.
    pub region: u32,
    /// Its process.
    pub process: u32,
    /// What it is: heap, stack, anonymous memory...
    pub kind: String,
    /// Its first page.
    pub first: Vpn,
    /// Its length.
    pub pages: Pages,
}

/// What a page is found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// How it is held.
    pub state: PageState,
    /// Mapped by a huge page.
    pub huge: bool,
    /// A digest of its contents. 0 is a page of zeros, and nothing else; so are pages without contents.
    pub digest: u128,
    /// Digests of its quarters, under the same key.
    pub parts: [u32; PARTS],
    /// The frame it is in, where that is known: equal numbers are the same memory.
    pub frame: Option<u64>,
}

/// What changed from one snapshot to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A process is there.
    Process(ProcessRow),
    /// A process is there no more, and none of its regions.
    Exit {
        /// The process.
        process: u32,
    },
    /// A region is there: its pages are absent until said otherwise. Or it has other bounds: pages outside them are there
    /// no more, pages inside are what they were.
    Region(RegionRow),
    /// A region is there no more.
    Unmap {
        /// The region.
        region: u32,
    },
    /// A page is another than it was.
    Page {
        /// The region.
        region: u32,
        /// The page.
        page: Vpn,
        /// What it is now.
        now: Page,
    },
}

/// What happened up to a time since the snapshot before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Time since the record began, nanoseconds.
    pub time_ns: u64,
    /// Processes before their regions, regions before their pages.
    pub events: Vec<Event>,
}

/// A whole record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where it comes from.
    pub origin: Origin,
    /// In order of time.
    pub snapshots: Vec<Snapshot>,
}

/// All that is there at a time.
#[derive(Clone, Debug, Default)]
pub struct MemorySnapshot {
    /// Time since the record began, nanoseconds.
    pub time_ns: u64,
    /// The processes, ascending.
    pub processes: Vec<ProcessRow>,
    /// Their regions, ascending by process and address, each with those of its pages that are not absent, ascending.
    pub regions: Vec<(RegionRow, Vec<(Vpn, Page)>)>,
}

/// Something that can be looked at again and again, until it ends.
pub trait Source {
    /// What it cannot go on from.
    type Error;

    /// The next look.
    fn look(&mut self) -> Result<Option<MemorySnapshot>, Self::Error>;
}
