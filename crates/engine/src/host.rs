//! The interface between the judgement and a machine.
//!
//! A cycle goes `observe -> plan -> read -> judge -> apply -> account`. The host observes, reads, applies, and waits between
//! cycles. The live machine and the simulated one implement the same trait, so the code that is tested in virtual time is the
//! code that runs.

use crate::hash::{Digest, DigestSet};
use crate::keys::{
    DomainKey, FamilyKey, GroupKey, LastingKey, LimitKey, LineageKey, NodeKey, NodeSet, OwnerKey, RegionKey,
};
use crate::placement::policy::Placement;
use crate::stops::StopLengths;
use crate::units::{Pages, Permyriad, Vpn, as_seconds};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A machine whose memory is judged. All calls work on whole batches.
///
/// # Errors
///
/// Each call fails only with what the host cannot continue from. The failure of a single target is part of the result.
pub trait Host {
    /// What the host cannot continue from.
    type Error;

    /// Takes one consistent snapshot of the regions in scope, of KSM and of the cost so far.
    fn observe(&mut self) -> Result<Snapshot, Self::Error>;

    /// Reads the pages of a plan and returns their digests, in the order of the plan. Leaves out pages of regions that have
    /// ended or can no longer be read.
    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Self::Error>;

    /// Marks and unmarks spans and passes ksmd its order. Must not wait for ksmd.
    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Self::Error>;

    /// Waits for `ns` nanoseconds, or less if there is a reason to return early.
    fn wait(&mut self, ns: u64) -> Result<(), Self::Error>;
}

/// The state of the machine at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Monotonic time, nanoseconds from any origin.
    pub now_ns: u64,
    /// The regions in scope that may be judged, without those excluded.
    pub regions: Vec<RegionView>,
    /// The state of KSM.
    pub ksm: KsmView,
    /// How equal pages are merged.
    pub mechanism: Mechanism,
    /// Whether the host can look up merged frames. If not, KSM's counters say what is saved.
    pub shows_frames: bool,
    /// Whether pages can be hashed in place, by some of their cache lines.
    pub hashes_lines: bool,
    /// How scarce memory is.
    pub memory: MemoryView,
    /// The largest share of the last 10 s in which some task of a cgroup with a judged process waited for a CPU (PSI `some avg10` of
    /// its `cpu.pressure`), if the kernel reports it. May be some seconds old.
    pub cpu_pressure: Option<Permyriad>,
    /// The limits of cgroups on the memory of processes in scope. May be some seconds old.
    pub limits: Arc<[LimitView]>,
    /// The processes that share limits, each with its group.
    pub groups: Arc<BTreeMap<OwnerKey, GroupKey>>,
    /// Whether memory of processes is still marked that are in another trust domain than the one that ksmd merges.
    pub foreign_marks: bool,
    /// CPU time spent so far in the run.
    pub cost: Cost,
    /// The NUMA nodes with memory, ascending. Empty if there is only one.
    pub nodes: Vec<NodeView>,
    /// The processes, on a machine with several nodes. Otherwise empty.
    pub owners: Vec<OwnerView>,
}

/// How equal pages are merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// Spans are marked, and ksmd searches them for equal pages.
    #[default]
    Ksmd,
    /// Pairs of pages are named, and the kernel merges those that are equal (`/dev/ksm`). Nothing is marked or scanned.
    Request,
}

/// A NUMA node with memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// The kernel's number of the node.
    pub node: NodeKey,
    /// All of its memory.
    pub total: Pages,
    /// Its free memory.
    pub free: Pages,
    /// The distance of each node of the snapshot from this node's processors, in the same order (ACPI SLIT: 10 is local).
    pub distances: Vec<u32>,
}

/// What placing a process's pages depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerView {
    /// The process.
    pub owner: OwnerKey,
    /// The node it is bound to; `None` if it may run on several. Then its home is the node with most of its memory.
    pub home: Option<NodeKey>,
    /// Its nice value, from -20 (highest priority) to 19.
    pub nice: i8,
    /// The nodes its memory may be on (`Mems_allowed` in `/proc/PID/status`).
    pub allowed: NodeSet,
    /// The placement policy for it.
    pub placement: Placement,
}

/// A region as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// The identity of the region, which it keeps as it grows, shrinks and is split.
    pub key: RegionKey,
    /// The process it belongs to.
    pub owner: OwnerKey,
    /// The same process, for other runs.
    pub lasting: LastingKey,
    pub family: FamilyKey,
    /// The processes that share memory with it by fork.
    pub lineage: LineageKey,
    /// Its trust domain.
    pub domain: DomainKey,
    /// The first page of its address range.
    pub first: Vpn,
    /// The length of its address range.
    pub pages: Pages,
    /// Anonymous pages present in it. May be some seconds old.
    pub resident: Pages,
    /// Pages of the range that are marked mergeable, where ksmd searches what is marked.
    pub marked: Pages,
    /// Whether pages of it may have been merged on request: the kernel marks a mapping when one of its pages is named.
    pub named: bool,
    /// Whether its process is left alone for now: the region is neither read nor changed, and its marks stay.
    pub left_alone: bool,
}

/// The state of KSM. Counters are the kernel's, for the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmView {
    /// `pages_shared`: merged pages that replace several.
    pub shared: Pages,
    /// `pages_sharing`: pages saved by them.
    pub sharing: Pages,
    /// `ksm_zero_pages`: pages that map the kernel's zero page instead.
    pub zero: Pages,
    /// `pages_scanned`: pages that ksmd has visited since boot.
    pub scanned: u64,
    /// `full_scans`: completed scans since boot or since the last `run` 2.
    pub full_scans: u64,
    /// Whether an order to ksmd is still being carried out: a kick until its scan has ended (or found nothing to scan), any
    /// other order until it is in force.
    pub busy: bool,
    /// Copies made so far because a merged page was written (`cow_ksm` in /proc/vmstat, which counts unmerging too).
    pub broken: u64,
    /// Huge pages split so far. Like `broken`, it may be missing now and then, which looks like 0.
    pub splits: HugeSplits,
    /// False if KSM must not be controlled, because another program has changed a knob or this is a dry run. Judging
    /// continues, and nothing is ordered.
    pub ours: bool,
}

impl KsmView {
    /// The pages that KSM saves: `pages_sharing` plus `ksm_zero_pages`.
    pub fn saved(&self) -> Pages {
        self.sharing + self.zero
    }

    /// The pages of processes that are merged: those saved, and one of each set of equal ones.
    pub fn merged(&self) -> Pages {
        self.shared + self.saved()
    }
}

/// Huge pages that the kernel has split on the whole machine, for whatever reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugeSplits {
    /// `thp_split_page`: into base pages, as a merge of one of them does.
    pub pages: u64,
    /// `thp_split_pmd`: only in the page table of a process, as a mark of a part of one does.
    pub mappings: u64,
}

impl HugeSplits {
    /// Those since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { pages: self.pages.saturating_sub(before.pages), mappings: self.mappings.saturating_sub(before.mappings) }
    }
}

/// How scarce memory is on the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryView {
    /// All memory; 0 if unknown.
    pub total: Pages,
    /// Memory that programs can still get without swapping (`MemAvailable`).
    pub available: Pages,
    pub swap_free: Pages,
    /// The share of the last 10 s in which some task waited for memory (PSI `some avg10`), if the kernel reports it.
    pub pressure: Option<Permyriad>,
}

/// A limit of a cgroup on the memory of its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitView {
    pub key: LimitKey,
    /// How much they may have. 0 if that isn't known yet.
    pub limit: Pages,
    /// How much of it is left. Page cache that the kernel reclaims before it kills counts as left.
    pub left: Pages,
    /// The processes in scope that it concerns.
    pub owners: Vec<OwnerKey>,
    /// When it was last read, nanoseconds.
    pub read_ns: u64,
}

/// CPU time spent since the run began. In JSON, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// By pagefold and its injector, nanoseconds.
    #[serde(rename = "pagefold", with = "as_seconds")]
    pub pagefold_ns: u64,
    /// The part of it that the injector has spent, nanoseconds.
    #[serde(rename = "injector", with = "as_seconds", default)]
    pub injector_ns: u64,
    /// By ksmd, nanoseconds.
    #[serde(rename = "ksmd", with = "as_seconds")]
    pub ksmd_ns: u64,
}

/// The pages to read in this cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplePlan {
    /// Runs of neighbouring pages: one run costs little more than one page.
    pub runs: Vec<PageRun>,
    /// The seed of all digests of this run.
    pub digest_seed: u64,
    /// The number of cache lines of a page to hash in place ([`LineDigester`](crate::hash::LineDigester)). `None`: pages are
    /// read, and digested whole ([`Digester`](crate::hash::Digester)).
    pub lines: Option<u32>,
    /// Digests by so few lines that pages of different contents have. Such pages are digested by all lines instead.
    pub colliding: Arc<DigestSet>,
    /// The regions in which to report, before they are read, which private pages are active.
    pub activity: BTreeSet<RegionKey>,
    /// Pages whose merged frames are looked up, without reading them.
    pub inspect: Vec<PageRun>,
    /// The limit for which to look up whether those frames are charged to its cgroup or one below.
    pub charged_to: Option<LimitKey>,
    /// Whether to count what is saved: how many pages map each of those frames, and each process's merged zeros.
    pub count: bool,
}

/// Neighbouring pages of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub region: RegionKey,
    /// The first page to read.
    pub first: Vpn,
    /// The number of pages.
    pub pages: u32,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// One entry for each page that was read or found absent, in the order of the plan.
    pub pages: Vec<PageSample>,
    /// The merged pages found in the pages to inspect, in the order of the plan.
    pub merged: Vec<MergedSample>,
    /// If the plan asked for a count and nothing was in the way of it.
    pub counted: Option<Counted>,
    /// CPU time of reading, nanoseconds.
    pub cpu_ns: u64,
}

/// A count of what is saved, apart from the frames.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// The pages of each process that map the kernel's zero page instead of a frame of zeros.
    pub zeros: BTreeMap<OwnerKey, (LineageKey, Pages)>,
}

/// A page that maps a merged frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedSample {
    pub region: RegionKey,
    pub page: Vpn,
    /// The number of the frame. Pages with the same frame are one copy.
    pub frame: u64,
    /// The NUMA node of the frame.
    pub node: NodeKey,
    /// If the plan asked for it: whether the frame is charged below the limit.
    pub charged: bool,
    /// If the plan asked for a count: the pages that map the frame, on the whole machine.
    pub mappers: u32,
}

/// One page of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    pub region: RegionKey,
    pub page: Vpn,
    /// How the page is backed.
    pub state: PageState,
    /// Whether it is part of a huge page, which a merge would split.
    pub huge: bool,
    /// Its digest; meaningful for `Private` and `Merged`.
    pub digest: Digest,
    /// If the plan asked for it: whether page reclaim keeps it on its active list.
    pub active: bool,
    /// The NUMA node of a private page, on a machine with several.
    pub node: Option<NodeKey>,
}

/// How a page is backed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// No anonymous page: not present, swapped out, or a page of the file.
    Absent,
    /// A frame of this process alone, which KSM can merge.
    Private,
    /// The kernel's zero page, which takes no memory.
    ZeroMapped,
    /// Already merged by KSM.
    Merged,
    /// Shared through fork: one copy already.
    Shared,
}

impl PageState {
    /// Whether the contents of such a page are read.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Private | Self::Merged)
    }
}

/// Neighbouring pages of one region to mark or unmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub region: RegionKey,
    /// The first page.
    pub first: Vpn,
    /// Its length in pages of address space.
    pub pages: Pages,
}

/// A span to mark or unmark, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub span: Span,
    /// The reason.
    pub why: Why,
}

/// Why a span is marked or unmarked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Marked, because of its duplicates.
    Duplicate {
        /// Pages that are zero or exist elsewhere too.
        duplicate: Pages,
        resident: Pages,
    },
    /// Unmarked, because merges in it do not last.
    CowBroken {
        /// The share of its merged pages expected to be written, and to hold the same content again, within the horizon.
        ratio: Permyriad,
    },
    /// Unmarked, because less memory is left than the reserve.
    MemoryShort,
    /// Unmarked, because its pages are charged to another cgroup, whose limit has no headroom for them.
    Charge,
    /// Requested by a user.
    Asked,
    /// Unmarked, because the memory is excluded now or its process has moved to another trust domain.
    Excluded,
}

impl From<Span> for Change {
    fn from(span: Span) -> Self {
        Self { span, why: Why::Asked }
    }
}

/// What to do in this cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Spans to mark.
    pub mark: Vec<Change>,
    /// Spans to unmark, which gives each merged page its own copy again.
    pub unmark: Vec<Change>,
    /// How much may be done in one stop of a target.
    pub stop: StopSize,
    /// The order to ksmd.
    pub scan: ScanOrder,
    /// Pages to merge with each other, where that is the mechanism.
    pub merge: Vec<MergeRange>,
    /// Merged frames to move to another NUMA node.
    pub moves: Vec<Move>,
}

impl Actions {
    /// Whether they do more than give ksmd an order.
    pub fn change_targets(&self) -> bool {
        let Self { mark, unmark, stop: _, scan: _, merge, moves } = self;
        !(mark.is_empty() && unmark.is_empty() && merge.is_empty() && moves.is_empty())
    }
}

/// Neighbouring pages to merge with others. The kernel merges only those whose contents are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeRange {
    /// The pages that are replaced.
    pub take: PageRun,
    /// What replaces them.
    pub keep: Keep,
}

/// The pages that replace others in a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// As many neighbouring pages, from this one on.
    Run(RegionKey, Vpn),
    /// This page, for all of them.
    Page(RegionKey, Vpn),
    /// The kernel's zero page.
    Zero,
}

impl Keep {
    /// The page that is kept, or the first of them. `None`: the zero page.
    pub fn first(self) -> Option<(RegionKey, Vpn)> {
        match self {
            Self::Run(region, page) | Self::Page(region, page) => Some((region, page)),
            Self::Zero => None,
        }
    }
}

impl MergeRange {
    /// The results of its pages, given one by one: neighbours with the same result together.
    pub fn results(self, pages: &[Merging]) -> impl Iterator<Item = MergeResult> {
        let mut skip = 0;
        pages.chunk_by(|a, b| a == b).map(move |same| {
            let pages = u32::try_from(same.len()).unwrap_or(u32::MAX);
            let range = self.part(skip, pages);
            skip += pages;
            MergeResult { range, merging: same[0] }
        })
    }

    /// The part of `pages` pages that starts `skip` pages behind its start.
    #[must_use]
    pub fn part(self, skip: u32, pages: u32) -> Self {
        let take = PageRun { first: self.take.first + u64::from(skip), pages, ..self.take };
        let keep = match self.keep {
            Keep::Run(region, first) => Keep::Run(region, first + u64::from(skip)),
            other => other,
        };
        Self { take, keep }
    }
}

/// A merged frame, named by a page that maps it, and the node to move it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub region: RegionKey,
    pub page: Vpn,
    pub node: NodeKey,
}

/// How much may be done in one stop of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSize {
    /// The most system calls that mark.
    pub marks: u32,
}

impl Default for StopSize {
    /// 32 calls. Batches of thirty were measured at 37 us a call.
    fn default() -> Self {
        Self { marks: 32 }
    }
}

/// An order to ksmd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanOrder {
    /// Continue as before.
    #[default]
    Keep,
    /// Stop scanning.
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

/// The results of a cycle's actions.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The results of the spans to mark, in any order.
    pub marked: Vec<ChangeResult>,
    /// The results of the spans to unmark, in any order.
    pub unmarked: Vec<ChangeResult>,
    /// The results of merging, in any order: parts of the ranges that were asked for, of pages with the same result.
    pub merges: Vec<MergeResult>,
    /// The stops of targets.
    pub stops: Vec<Stops>,
    /// The number of huge pages put together again in memory that is unmarked because merges in it do not last.
    pub collapsed: u64,
    /// The number of frames moved. The others have changed, or the kernel refused.
    pub moved: u64,
    /// CPU time of moving, nanoseconds.
    pub move_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeResult {
    /// The change that was asked for.
    pub change: Change,
    /// Its result.
    pub marking: Marking,
}

/// The stops of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stops {
    /// The process.
    pub owner: OwnerKey,
    /// The number of stops.
    pub number: u32,
    /// The longest, nanoseconds.
    pub longest_ns: u64,
    /// Their total, nanoseconds.
    pub total_ns: u64,
    /// All of them by length.
    pub lengths: StopLengths,
}

impl Stops {
    /// A single stop.
    pub fn one(owner: OwnerKey, ns: u64) -> Self {
        Self { owner, number: 1, longest_ns: ns, total_ns: ns, lengths: StopLengths::one(ns) }
    }
}

/// The result of marking or unmarking one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// Done for this many pages of address space, less than the span if mappings had changed.
    Done(Pages),
    /// The target could not be stopped now. A later attempt may succeed.
    Busy,
    /// The target must not be touched, or has ended. Do not try again.
    Refused,
}

/// A range of pages, and what came of merging them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeResult {
    pub range: MergeRange,
    /// What came of each of its pages.
    pub merging: Merging,
}

/// What came of merging a page with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Merging {
    /// They were equal, and are one now.
    Merged,
    /// They were one already.
    Shared,
    /// Their contents differ.
    Differs,
    /// One of them is not present, or not mapped any more.
    Absent,
    /// One of them is in use in a way that forbids it now. A later attempt may succeed.
    Busy,
    /// One of them can never be merged.
    Ineligible,
    /// The page to keep has as many sharers as it may have.
    Full,
    /// It was not tried, for example because the process is left alone or has ended.
    Untried,
}
