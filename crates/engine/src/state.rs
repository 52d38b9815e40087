//! Every figure that anybody is shown: `status`, `explain`, `top`, metrics and the history are views of it, and compute nothing.

use crate::decision::{Decision, Kind, Reason};
use crate::governor::Governor;
use crate::host::MemoryView;
use crate::keys::{DomainKey, LimitKey, OwnerKey};
use crate::ledger::Ledger;
use crate::placement::inventory::PlacementSummary;
use crate::reserve::Reserve;
use crate::saving::Saving;
use crate::units::{Bytes, Pages, Permyriad, Vpn, as_bytes, as_fraction};
use serde::{Deserialize, Serialize};

/// One region. JSON has its figures only: keys, addresses and what happens next are for `explain` to put into words.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionState {
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
    /// What happens next, and why.
    #[serde(skip)]
    pub decision: Decision,
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

impl RegionState {
    /// The limit of a cgroup that leaves no headroom to merge more of it.
    pub fn full(&self) -> Option<LimitKey> {
        match self.decision.reason {
            Reason::NoHeadroom(limit) => Some(limit),
            _ => None,
        }
    }
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
pub struct State {
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
    pub regions: Vec<RegionState>,
}
