//! What is known and what happens next, for people: `status`, `explain` and metrics are views of it.

use crate::governor::Governor;
use crate::host::MemoryView;
use crate::keys::{DomainKey, LimitKey, OwnerKey};
use crate::ledger::Ledger;
use crate::marking::profit::Wave;
use crate::placement::inventory::PlacementSummary;
use crate::reserve::Reserve;
use crate::saving::Saving;
use crate::units::{Bytes, Pages, Permyriad, Vpn, as_bytes, as_fraction};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a region (UKSM section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Not sampled enough yet.
    Unknown,
    /// Few duplicates.
    Sparse,
    /// Its merges do not last, because its pages are written.
    CowBroken,
    /// Too young to know whether it stays, or of a family whose regions ended young.
    ShortLived,
    /// Duplicates that stay: worth merging.
    StaticallyDuplicated,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::StaticallyDuplicated, Self::Sparse, Self::CowBroken, Self::ShortLived, Self::Unknown];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Sparse => "sparse",
            Self::CowBroken => "COW-broken",
            Self::ShortLived => "short-lived",
            Self::StaticallyDuplicated => "statically duplicated",
        })
    }
}

/// What happens to a region next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Next {
    /// It is sampled until there is enough evidence.
    Sample {
        /// Samples taken so far, pages.
        sampled: Pages,
        /// Samples that its level asks for, pages.
        needed: Pages,
    },
    /// It is being read whole.
    Read {
        /// Pages of its range read so far.
        read: Pages,
    },
    /// Its duplicates wait for marks.
    Mark,
    /// Marked: ksmd is merging it.
    Merge,
    /// Sampled thinly for what changes.
    Watch,
    /// Left alone for some time, and then judged again.
    Wait {
        /// How long it is still left alone, nanoseconds.
        ns: u64,
    },
    /// Merging it does not pay. It waits until enough has come together or ksmd has rested.
    Defer {
        /// Two scans for all that waits.
        wave: Wave,
        /// What a page saved may cost, CPU time in nanoseconds.
        price_ns: u64,
        /// When ksmd will have rested long enough, nanoseconds from now.
        ns: u64,
    },
    /// Left alone while its process is.
    Stay,
    /// Left alone: its process refused to be marked.
    #[default]
    Nothing,
}

impl Next {
    /// Its name in `status` and `explain`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sample { .. } => "sample",
            Self::Read { .. } => "read",
            Self::Mark => "mark",
            Self::Merge => "merge",
            Self::Watch => "watch",
            Self::Wait { .. } | Self::Defer { .. } => "wait",
            Self::Stay | Self::Nothing => "nothing",
        }
    }

    /// For how many seconds the region waits at most.
    pub fn wait_seconds(&self) -> Option<f64> {
        match self {
            Self::Wait { ns } | Self::Defer { ns, .. } => Some(*ns as f64 / 1e9),
            _ => None,
        }
    }
}

/// One region. JSON has its figures only: keys, addresses and what happens next are for `explain` to put into words.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionReport {
    /// Its process.
    #[serde(skip)]
    pub owner: OwnerKey,
    /// Its trust domain.
    #[serde(skip)]
    pub domain: DomainKey,
    /// Its first page.
    #[serde(skip)]
    pub first: Vpn,
    /// Its length.
    #[serde(rename = "bytes", with = "as_bytes")]
    pub pages: Pages,
    /// Anonymous pages present in it.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
    pub level: usize,
    pub kind: Kind,
    /// What happens next.
    #[serde(skip)]
    pub next: Next,
    /// Seconds since it was first seen.
    pub age_seconds: f64,
    /// The estimated share of duplicates, 0 to 1. Exact if the region was read whole.
    pub duplicate_ratio: f64,
    /// The 95 % range of that estimate.
    pub duplicate_range: (f64, f64),
    /// Whether it was read whole, so that the ratio is exact.
    pub exact: bool,
    /// The share of its merged pages, 0 to 1, that are written and hold the same content again within the horizon. `None` if
    /// no merged page was seen written.
    pub cow_ratio: Option<f64>,
    /// Whether its merged memory was taken apart, because memory was short.
    #[serde(skip)]
    pub taken_back: bool,
    /// Whether its merged memory was taken apart, because it was charged to another cgroup without headroom for it.
    #[serde(skip)]
    pub relieved: bool,
    /// Whether memory is short for its process, so that nothing more of it is merged.
    #[serde(skip)]
    pub short: bool,
    /// The limit of a cgroup that leaves no headroom to merge more of it.
    #[serde(skip)]
    pub full: Option<LimitKey>,
    /// Resident pages in its marked spans.
    #[serde(rename = "marked_bytes", with = "as_bytes")]
    pub marked: Pages,
    /// Duplicates expected among them.
    #[serde(rename = "expected_bytes", with = "as_bytes")]
    pub expected: Pages,
    /// Other pages that were found in its marked spans.
    #[serde(skip)]
    pub other: Pages,
}

/// How much memory is of one kind.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct KindTotal {
    pub kind: Kind,
    pub regions: usize,
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// How much memory is on one level of the ladder.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LevelTotal {
    /// Its number, from 1.
    pub level: usize,
    /// The share of a core it may use.
    #[serde(with = "as_fraction")]
    pub share: Permyriad,
    pub regions: usize,
    /// Their resident pages.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// The state of the judgement.
#[derive(Clone, Debug)]
pub struct EngineReport {
    /// The governor configured.
    pub governor: Governor,
    /// The governor in force: the one configured, or the one that `auto` has chosen.
    pub in_force: Governor,
    /// The share of a core that may be used.
    pub top_share: Permyriad,
    /// The share of a core used over the last ten seconds, 0 to 1.
    pub used_share: f64,
    /// Global rounds completed.
    pub rounds: u64,
    /// Whether reading or merging is under way.
    pub busy: bool,
    /// Whether it is paused.
    pub paused: bool,
    /// Whether it may control KSM.
    pub drives_ksm: bool,
    /// Whether nothing is marked or scanned before memory of another trust domain is unmarked.
    pub foreign_marks: bool,
    /// How scarce the machine's memory is.
    pub memory: MemoryView,
    /// Whether there is room for what can come back.
    pub reserve: Reserve,
    /// What merging saves; `None` until it has been counted.
    pub saving: Option<Saving>,
    /// The pages needed if programs write to all merged ones.
    pub may_return: Pages,
    /// Pages that KSM saves on the machine, by its counters.
    pub saved_machine: Pages,
    /// Merged pages of exited processes that KSM's counters contain until ksmd's next scan, about.
    pub exited: Pages,
    /// Resident pages in marked spans.
    pub marked: Pages,
    /// Contents in the index.
    pub index_entries: usize,
    /// Memory of the index.
    pub index_bytes: Bytes,
    pub kinds: Vec<KindTotal>,
    /// Totals by level, from the top.
    pub levels: Vec<LevelTotal>,
    /// What was saved and what it cost.
    pub ledger: Ledger,
    /// Where merged pages live, on a machine with several NUMA nodes.
    pub placement: Option<PlacementSummary>,
    pub regions: Vec<RegionReport>,
}
