//! All figures that we show to people, each of them once. `status`, `explain`, `top`, metrics and the history are views
//! of them and compute nothing. Most structures here go into the documents `pagefold.status/1` and `pagefold.explain/1`
//! as they are, so they have the documents' keys and units.

use crate::decision::{Decision, DecisionChange, Kind, Reason, Verb};
use crate::governor::Governor;
use crate::host::{Cost, HugeSplits, Mechanism};
use crate::keys::{DomainKey, LimitKey, OwnerKey};
use crate::ledger::RequestCounts;
use crate::placement::inventory::PlacementSummary;
use crate::reserve::Room;
use crate::stops::StopLengths;
use crate::units::{Pages, Permyriad, Vpn, as_bytes, as_fraction, difference, whole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;

#[derive(Clone, Debug)]
pub struct State {
    pub now_ns: u64,
    pub activity: Activity,
    pub memory: MemoryState,
    /// If we merge zeros only: the other pages that we found in marked memory. ksmd visits them, too, and merges equal
    /// ones.
    pub other_bytes: Option<u64>,
    /// Whether memory of another trust domain is still marked. Until it's unmarked we mark and scan nothing.
    pub foreign_marks: bool,
    pub copies: CopyTotals,
    pub reserve: ReserveState,
    pub incidents: Incidents,
    pub work: Work,
    /// Outcomes of the pages we asked the kernel to merge, if we merge on request.
    pub requests: Option<RequestCounts>,
    /// Where merged pages live, on a machine with several NUMA nodes.
    pub placement: Option<PlacementSummary>,
    pub moves: MoveTotals,
    pub totals: RegionTotals,
    /// Processes that have regions or saved memory.
    pub owners: BTreeMap<OwnerKey, OwnerTotal>,
    pub domains: BTreeMap<DomainKey, MemoryTotal>,
    pub regions: Vec<RegionState>,
    /// The last changes of decisions on regions, oldest first.
    pub decisions: Vec<DecisionChange>,
}

impl State {
    /// The memory of one process.
    pub fn owner(&self, owner: OwnerKey) -> OwnerTotal {
        self.owners.get(&owner).copied().unwrap_or_default()
    }

    /// The memory of all processes.
    pub fn all_memory(&self) -> MemoryTotal {
        let mut all = MemoryTotal::default();
        for owner in self.owners.values() {
            all += owner.memory;
        }
        all
    }
}

/// Our limits, and whether we're at work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Activity {
    /// Seconds since the run began.
    pub seconds: f64,
    /// The configured governor.
    pub governor: Governor,
    /// The governor in force: the configured one, or `auto`'s choice.
    pub in_force: Governor,
    /// The share of a core that we may use.
    #[serde(with = "as_fraction")]
    pub allowed_share: Permyriad,
    /// The share of a core used over the last ten seconds, 0 to 1.
    pub used_share: f64,
    pub paused: bool,
    /// Whether we're reading or merging.
    pub busy: bool,
    /// Roughly how long it takes until the memory that we're reading now is read and merged, if nothing changes.
    /// `None`: there's nothing to do, we're paused, or haven't read anything yet.
    pub done_in_seconds: Option<f64>,
    /// Whether we may control KSM.
    pub ksm_driven: bool,
}

/// Memory, and how much of it is merged.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MemoryState {
    /// Memory of the machine that programs can get without swapping.
    pub available_bytes: u64,
    /// Anonymous memory in regions.
    pub resident_bytes: u64,
    /// The memory that the processes would hold if nothing were merged: the Pss of their regions, plus the saving.
    pub unmerged_bytes: u64,
    /// The saving. `None` before the first count, and while KSM merges much more than was counted.
    pub saved_bytes: Option<u64>,
    /// How long ago we counted the saving.
    pub saved_age_seconds: Option<f64>,
    /// Memory needed if programs write to every merged page.
    pub may_return_bytes: u64,
    /// Memory that KSM saves on the machine, by its counters.
    pub saved_machine_bytes: u64,
    /// Estimate: merged pages of exited processes, which KSM's counters contain until ksmd's next scan.
    pub exited_bytes: u64,
    /// Resident pages in marked spans.
    pub marked_bytes: u64,
    /// KSM's records for the marked pages.
    pub metadata_bytes: u64,
}

impl MemoryState {
    /// The saving less KSM's records. May be negative.
    pub fn net_profit_bytes(&self) -> Option<i64> {
        Some(difference(self.saved_bytes?, self.metadata_bytes))
    }
}

/// Copies of merged pages, made because programs wrote them, on the whole machine.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct CopyTotals {
    pub copied_bytes: u64,
    /// Copies in the worst 24 hours.
    pub copied_worst_day_bytes: u64,
}

/// Headroom for COW.
#[derive(Clone, Debug, Default)]
pub struct ReserveState {
    /// How much memory programs took back by writing to merged pages, in the worst hour, halved for each hour
    /// since, and at most what is saved now.
    pub likely_bytes: u64,
    /// How much more memory programs may use on the machine if so much comes back, and if all merged memory does. For
    /// schedulers that place programs here.
    pub headroom_bytes: u64,
    pub headroom_at_worst_bytes: u64,
    /// Address space unmarked because memory was short.
    pub taken_back_bytes: u64,
    pub machine: Room,
    /// The limits without room for all copies or without headroom to merge more, the tightest first.
    pub limits: Vec<LimitState>,
    pub limits_overcommitted: usize,
    pub limits_short: usize,
    /// The limits without headroom to merge more.
    pub full: BTreeSet<LimitKey>,
}

#[derive(Clone, Copy, Debug)]
pub struct LimitState {
    pub key: LimitKey,
    pub room: Room,
}

/// Side effects since the run began, and failures.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Incidents {
    /// Huge pages split on the machine.
    pub splits: HugeSplits,
    /// Huge pages collapsed again.
    pub collapsed: u64,
    /// Spans where the target refused or had ended.
    pub refused_spans: u64,
}

/// Work since the run began, and its cost.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Work {
    pub cpu_seconds: Cost,
    pub pages_read: u64,
    /// Scans that ksmd made for us.
    pub scans: u64,
    pub stops: u64,
    pub longest_stop_us: f64,
    pub total_stop_us: f64,
    pub stop_lengths: StopLengths,
    /// Global rounds completed.
    pub rounds: u64,
    pub index: IndexState,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct IndexState {
    pub contents: usize,
    pub bytes: u64,
}

/// Merged frames that we moved to another NUMA node.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MoveTotals {
    pub moved_pages: u64,
    /// Frames that we couldn't move.
    pub refused_pages: u64,
    /// CPU time of moving.
    pub move_seconds: f64,
}

/// One region. JSON only has its figures: `explain` puts keys, addresses and the next step into words.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionState {
    #[serde(skip)]
    pub owner: OwnerKey,
    #[serde(skip)]
    pub domain: DomainKey,
    #[serde(skip)]
    pub first: Vpn,
    /// The region's length.
    #[serde(rename = "bytes", with = "as_bytes")]
    pub pages: Pages,
    /// Anonymous pages present in the region.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
    pub level: usize,
    pub kind: Kind,
    /// What happens next, and why.
    #[serde(skip)]
    pub decision: Decision,
    /// Seconds since we first saw the region.
    pub age_seconds: f64,
    /// The estimated share of duplicates, 0 to 1. Exact if we've read the region whole.
    pub duplicate_ratio: f64,
    /// The 95 % range of that estimate.
    pub duplicate_range: (f64, f64),
    /// Whether we've read the whole region, so that the ratio is exact.
    pub exact: bool,
    /// The share of the region's pages, 0 to 1, that we leave alone for a time because its program soon writes merged
    /// pages there. `None` if there are none.
    pub cow_ratio: Option<f64>,
    /// Resident pages in its marked spans.
    #[serde(rename = "marked_bytes", with = "as_bytes")]
    pub marked: Pages,
    /// Duplicates that we expect among the marked pages.
    #[serde(rename = "expected_bytes", with = "as_bytes")]
    pub expected: Pages,
    /// Pages in its marked spans that aren't duplicates, as we found them.
    #[serde(skip)]
    pub other: Pages,
}

/// If the range of an estimated share of duplicates is wider than this, we've hardly sampled the region.
const WIDE: f64 = 0.9;

impl RegionState {
    /// Whether we know roughly how much of the region is duplicate.
    pub fn is_known(&self) -> bool {
        let (floor, ceiling) = self.duplicate_range;
        self.exact || ceiling - floor <= WIDE
    }

    /// The region's memory. On request we expect to merge the share of its pages that have a copy or are zeros.
    pub fn memory(&self, mechanism: Mechanism) -> MemoryTotal {
        let resident_bytes = self.resident.bytes().0;
        MemoryTotal {
            resident_bytes,
            unmerged_bytes: 0,
            marked_bytes: self.marked.bytes().0,
            expected_bytes: if mechanism.by_marks() {
                self.expected.bytes().0
            } else {
                whole(resident_bytes as f64 * self.duplicate_ratio)
            },
            unknown_bytes: if self.is_known() { 0 } else { resident_bytes },
        }
    }

    /// The cgroup limit that leaves no headroom to merge more of the region, if there is one.
    pub fn full(&self) -> Option<LimitKey> {
        match self.decision.reason {
            Reason::NoHeadroom(limit) => Some(limit),
            _ => None,
        }
    }
}

/// The memory of one kind of regions.
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
    /// The level's number, from 1.
    pub level: usize,
    /// The share of a core that sampling this level's regions may take.
    #[serde(with = "as_fraction")]
    pub share: Permyriad,
    pub regions: usize,
    /// The level's resident pages.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// How much memory has the same next step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct VerbTotal {
    #[serde(rename = "what")]
    pub verb: Verb,
    pub regions: usize,
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
    /// When the first of these decisions ends, if we know.
    pub soonest_seconds: Option<f64>,
}

/// All regions, summed up in three ways.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RegionTotals {
    pub kinds: Vec<KindTotal>,
    /// The levels of the ladder, from the top.
    pub levels: Vec<LevelTotal>,
    /// The next steps, in the order in which they happen. Steps without a region are left out.
    pub next: Vec<VerbTotal>,
}

impl RegionTotals {
    /// The memory with this next step, if there is any.
    pub fn of_verb(&self, verb: Verb) -> Option<&VerbTotal> {
        self.next.iter().find(|total| total.verb == verb)
    }
}

/// The memory of some regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryTotal {
    pub resident_bytes: u64,
    /// How much memory there would be if nothing were merged. Only filled in for processes, and for all memory.
    pub unmerged_bytes: u64,
    pub marked_bytes: u64,
    /// How much of the memory we expect to be merged. Of equal pages that merge into one, all count.
    pub expected_bytes: u64,
    /// How much of the memory is in regions where we don't know yet how much is duplicate.
    #[serde(default)]
    pub unknown_bytes: u64,
}

impl AddAssign for MemoryTotal {
    fn add_assign(&mut self, other: Self) {
        self.resident_bytes += other.resident_bytes;
        self.unmerged_bytes += other.unmerged_bytes;
        self.marked_bytes += other.marked_bytes;
        self.expected_bytes += other.expected_bytes;
        self.unknown_bytes += other.unknown_bytes;
    }
}

/// The memory of one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnerTotal {
    pub regions: usize,
    pub memory: MemoryTotal,
    /// The process's part of the saving, if we've counted the saving.
    pub saved_bytes: u64,
}
