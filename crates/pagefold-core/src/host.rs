//! The one door between judgement and machine.
//!
//! A round goes `observe -> plan -> read -> judge -> apply -> account`; the host does observe, read
//! and apply, and waits between rounds. The live host and the simulated one implement the same trait,
//! so what is tested in virtual time is what runs.

use crate::hash::Digest;
use crate::keys::{DomainKey, FamilyKey, NodeKey, NodeSet, OwnerKey, RegionKey};
use crate::placement::policy::Placement;
use crate::units::{Pages, Permyriad, Vpn};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What judgement asks of a machine. All calls work on whole batches.
pub trait Host {
    /// What the host cannot go on from. What befalls a single target is part of the answers instead.
    type Error;

    /// Takes one consistent look at the scoped regions, at KSM and at the cost so far.
    fn observe(&mut self) -> Result<Snapshot, Self::Error>;

    /// Reads the pages of a plan and returns their digests, in the order of the plan. Pages of a
    /// region that has gone, or can no longer be read, are left out.
    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Self::Error>;

    /// Marks and unmarks spans and hands ksmd its order. Must not wait for ksmd.
    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Self::Error>;

    /// Lets `ns` nanoseconds pass; may return earlier when there is a reason to.
    fn wait(&mut self, ns: u64) -> Result<(), Self::Error>;
}

/// One look at the machine.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Monotonic time of the look, in nanoseconds from any origin.
    pub now_ns: u64,
    /// The regions in scope that may be judged. Those excluded are not here.
    pub regions: Vec<RegionView>,
    /// KSM's state.
    pub ksm: KsmView,
    /// How scarce memory is.
    pub memory: MemoryView,
    /// CPU time spent so far in the run.
    pub cost: Cost,
    /// The machine's memory nodes, ascending. Empty where there is but one.
    pub nodes: Vec<NodeView>,
    /// The processes, on a machine with several memory nodes; else empty.
    pub owners: Vec<OwnerView>,
}

/// A node with memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// The node.
    pub node: NodeKey,
    /// Its memory.
    pub total: Pages,
    /// What of it is free.
    pub free: Pages,
    /// How far each node of the snapshot is from its processors, in the same order: 10 is near (SLIT, ACPI).
    pub distances: Vec<u32>,
}

/// A process, as far as placing its pages goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerView {
    /// The process.
    pub owner: OwnerKey,
    /// The node where it runs; `None` if it may run on several. Then it is the one that most of its memory is on.
    pub home: Option<NodeKey>,
    /// Its nice value, from -20 (first) to 19.
    pub nice: i8,
    /// The nodes its memory may be on (`Mems_allowed`).
    pub allowed: NodeSet,
    /// The policy for it.
    pub placement: Placement,
}

/// A region as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// The region's identity, kept through growth, shrinking and splits.
    pub key: RegionKey,
    /// The process it belongs to.
    pub owner: OwnerKey,
    /// Its family.
    pub family: FamilyKey,
    /// Its trust domain.
    pub domain: DomainKey,
    /// The first page of its address range.
    pub first: Vpn,
    /// The length of its address range.
    pub pages: Pages,
    /// Anonymous pages present in it at the host's last look, which may be some seconds old.
    pub resident: Pages,
    /// How many pages of the range are marked mergeable.
    pub marked: Pages,
}

/// KSM as the host sees it. Counters are the kernel's, machine-wide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmView {
    /// `pages_shared`: merged pages that stand for several.
    pub shared: Pages,
    /// `pages_sharing`: pages saved by them.
    pub sharing: Pages,
    /// `ksm_zero_pages`: pages that map the kernel's zero page instead.
    pub zero: Pages,
    /// `pages_scanned`: pages ksmd has looked at since boot.
    pub scanned: u64,
    /// `full_scans`: completed scans since boot or since the last `run` 2.
    pub full_scans: u64,
    /// An order to ksmd is still being carried out: a kick until its scan has ended (or was found to have
    /// nothing to scan), any other order until it is in force.
    pub busy: bool,
    /// Copies made so far because a merged page was written (`cow_ksm` of vmstat, which counts unmerging too).
    pub broken: u64,
    /// False when KSM is not ours to drive (somebody else turned a knob, dry run): judge on, order nothing.
    pub ours: bool,
}

impl KsmView {
    /// Pages of memory that KSM saves: `pages_sharing` plus `ksm_zero_pages`.
    pub fn saved(&self) -> Pages {
        self.sharing + self.zero
    }
}

/// How scarce memory is on the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryView {
    /// Memory in all; 0 where it is not known.
    pub total: Pages,
    /// What programs could still get without swapping (`MemAvailable`).
    pub available: Pages,
    /// Share of the last 10 s in which some task waited for memory (PSI `some avg10`), where the kernel tells.
    pub pressure: Option<Permyriad>,
}

/// CPU time spent, cumulative over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// By pagefold and its injector, nanoseconds.
    pub pagefold_ns: u64,
    /// By ksmd, nanoseconds.
    pub ksmd_ns: u64,
}

/// The pages to read this round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplePlan {
    /// Runs of neighbouring pages: one run costs little more than one page.
    pub runs: Vec<PageRun>,
    /// Seed for the digests of this run of the program.
    pub digest_seed: u64,
    /// Read fork-shared pages as well, without taking them apart. Private and merged pages are always read.
    pub shared: bool,
    /// Tell of private pages whether they are active: of those in these regions, before they are read.
    pub activity: BTreeSet<RegionKey>,
    /// Pages whose merged frames are looked up, without reading them.
    pub inspect: Vec<PageRun>,
}

/// Neighbouring pages of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The region.
    pub region: RegionKey,
    /// The first page to read.
    pub first: Vpn,
    /// How many.
    pub pages: u32,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// One entry for each page read or found absent, in the plan's order.
    pub pages: Vec<PageSample>,
    /// The merged pages found where they were looked for, in the plan's order.
    pub merged: Vec<MergedSample>,
    /// CPU time the reading took, nanoseconds.
    pub cpu_ns: u64,
}

/// A page that maps a merged frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedSample {
    /// The region.
    pub region: RegionKey,
    /// The page.
    pub page: Vpn,
    /// The frame's number: pages with the same are one.
    pub frame: u64,
    /// The node that the frame is on.
    pub node: NodeKey,
}

/// One page that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    /// The region.
    pub region: RegionKey,
    /// The page.
    pub page: Vpn,
    /// How the page is held.
    pub state: PageState,
    /// Part of a huge page: a merge would split it.
    pub huge: bool,
    /// Its digest; meaningful for `Private` and `Merged`, and for `Shared` where the plan asked for it.
    pub digest: Digest,
    /// Where that was asked: page reclaim keeps it on its active list.
    pub active: bool,
    /// The node it is on, of private pages on a machine with several.
    pub node: Option<NodeKey>,
}

/// How a page is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Nothing anonymous there: not present, swapped out, or the file's own page.
    Absent,
    /// A frame of this process alone: what KSM could merge.
    Private,
    /// Maps the kernel's zero page: holds no memory.
    ZeroMapped,
    /// Already merged by KSM.
    Merged,
    /// Shared with a relative through fork: already one copy.
    Shared,
}

impl PageState {
    /// Whether the contents of such a page are read, `shared` if a plan asks for fork-shared ones.
    pub fn is_read(self, shared: bool) -> bool {
        match self {
            Self::Private | Self::Merged => true,
            Self::Shared => shared,
            Self::Absent | Self::ZeroMapped => false,
        }
    }
}

/// Neighbouring pages of one region to mark or unmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The region.
    pub region: RegionKey,
    /// The first page.
    pub first: Vpn,
    /// The length, in pages of address space.
    pub pages: Pages,
}

/// A span to mark or unmark, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The span.
    pub span: Span,
    /// Why.
    pub why: Why,
}

/// Why a span is marked or unmarked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Marked: so many of its resident pages are zero or have a twin.
    Duplicate {
        /// Those, pages.
        duplicate: Pages,
        /// The resident pages.
        resident: Pages,
    },
    /// Unmarked: this share of its merged pages would be written, and hold the same again, within the horizon.
    CowBroken {
        /// The share.
        ratio: Permyriad,
    },
    /// Somebody asked for it.
    Asked,
}

impl From<Span> for Change {
    fn from(span: Span) -> Self {
        Self { span, why: Why::Asked }
    }
}

/// What is to be done this round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// What to mark mergeable.
    pub mark: Vec<Change>,
    /// What to unmark, which gives each merged page its own copy again.
    pub unmark: Vec<Change>,
    /// How much is done in one stop of a target.
    pub stop: StopSize,
    /// The order to ksmd.
    pub scan: ScanOrder,
    /// Merged frames to be moved to another memory node.
    pub moves: Vec<Move>,
}

/// A merged frame, by a page that maps it, and the node it is to be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The region.
    pub region: RegionKey,
    /// The page.
    pub page: Vpn,
    /// The node.
    pub node: NodeKey,
}

/// How much is done in one stop of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSize {
    /// System calls that mark, at most.
    pub marks: u32,
}

impl Default for StopSize {
    /// Thirty calls were measured at 37 us each.
    fn default() -> Self {
        Self { marks: 32 }
    }
}

/// An order to ksmd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanOrder {
    /// Leave it as it is.
    #[default]
    Keep,
    /// Scan nothing.
    Rest,
    /// Scan everything marked exactly once, without pause.
    Kick {
        /// Visit every page: turn `smart_scan` off for this scan.
        thorough: bool,
    },
    /// Scan in batches, sleeping in between.
    Pace {
        /// Pages in a batch.
        pages_to_scan: u32,
        /// Sleep between batches, milliseconds.
        sleep_ms: u32,
        /// Visit every page: turn `smart_scan` off for these scans.
        thorough: bool,
    },
}

impl ScanOrder {
    /// A kick that leaves `smart_scan` as the administrator set it.
    pub const KICK: Self = Self::Kick { thorough: false };
}

/// What came of the actions.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What came of the spans to mark.
    pub marked: Vec<ChangeResult>,
    /// What came of the spans to unmark.
    pub unmarked: Vec<ChangeResult>,
    /// The stops inflicted on targets this round.
    pub stops: Vec<Stops>,
    /// For how many of the frames to be moved it was done; the kernel refused the others, or they have changed.
    pub moved: u64,
    /// CPU time that moving took, nanoseconds.
    pub move_ns: u64,
}

/// A span that was to be marked or unmarked, and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeResult {
    /// What was asked.
    pub change: Change,
    /// What came of it.
    pub marking: Marking,
}

/// Stops of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stops {
    /// The process.
    pub owner: OwnerKey,
    /// How many.
    pub number: u32,
    /// The longest of them, nanoseconds.
    pub longest_ns: u64,
    /// All of them together, nanoseconds.
    pub total_ns: u64,
}

/// What came of one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// Done, for so many pages of address space (less than asked where mappings had changed).
    Done(Pages),
    /// The target could not be stopped now; asking again later may work.
    Busy,
    /// The target may not be touched, or has gone: do not ask again.
    Refused,
}
