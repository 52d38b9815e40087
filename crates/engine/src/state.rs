//! All figures that we show to people. `status`, `explain`, `top`, metrics and the history are views of them and
//! compute nothing.

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

/// One region. JSON only has its figures: `explain` puts keys, addresses and the next step into words.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionState {
    #[serde(skip)]
    pub owner: OwnerKey,
    #[serde(skip)]
    pub domain: DomainKey,
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
    /// Seconds since we first saw it.
    pub age_seconds: f64,
    /// The estimated share of duplicates, 0 to 1. Exact if we've read the region whole.
    pub duplicate_ratio: f64,
    /// The 95 % range of that estimate.
    pub duplicate_range: (f64, f64),
    /// Whether we've read it whole, so that the ratio is exact.
    pub exact: bool,
    /// The share of its merged pages, 0 to 1, that its program writes with the same content within the horizon. `None`
    /// if we saw no merged page written.
    pub cow_ratio: Option<f64>,
    /// Resident pages in its marked spans.
    #[serde(rename = "marked_bytes", with = "as_bytes")]
    pub marked: Pages,
    /// Duplicates that we expect among them.
    #[serde(rename = "expected_bytes", with = "as_bytes")]
    pub expected: Pages,
    /// Other pages that we found in its marked spans.
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
    /// The level's resident pages.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// The engine's state.
#[derive(Clone, Debug)]
pub struct State {
    /// The configured governor.
    pub governor: Governor,
    /// The governor in force: the configured one, or `auto`'s choice.
    pub in_force: Governor,
    /// The share of a core that we may use.
    pub top_share: Permyriad,
    /// The share of a core used over the last ten seconds, 0 to 1.
    pub used_share: f64,
    /// Global rounds completed.
    pub rounds: u64,
    /// Whether we're reading or merging.
    pub busy: bool,
    pub paused: bool,
    /// Whether we may control KSM.
    pub drives_ksm: bool,
    /// Whether memory of another trust domain is still marked. Until it's unmarked we mark and scan nothing.
    pub foreign_marks: bool,
    /// How scarce the machine's memory is.
    pub memory: MemoryView,
    /// Headroom for COW.
    pub reserve: Reserve,
    /// The saving, `None` before the first count.
    pub saving: Option<Saving>,
    /// Pages needed if programs write to every merged one.
    pub may_return: Pages,
    /// Pages that KSM saves on the machine, by its counters.
    pub saved_machine: Pages,
    /// Roughly how many merged pages of exited processes KSM's counters contain until ksmd's next scan.
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
    pub ledger: Ledger,
    /// Where merged pages live, on a machine with several NUMA nodes.
    pub placement: Option<PlacementSummary>,
    pub regions: Vec<RegionState>,
}
