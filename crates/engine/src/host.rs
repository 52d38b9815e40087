//! The interface between the engine and a machine.
//!
//! A cycle goes `observe -> plan -> read -> judge -> apply -> account`. The host observes, reads, applies, and waits
//! between cycles. The live machine and the simulated one implement the same trait, so the code that we test in virtual
//! time is the code that runs.

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

/// A machine whose memory we judge. All calls work on whole batches.
///
/// # Errors
///
/// Calls only return errors that the host can't continue from. If only one target fails, the result says so instead.
pub trait Host {
    /// Errors that the host can't continue from.
    type Error;

    /// Takes one consistent snapshot of the regions in scope, of KSM and of the cost so far.
    fn observe(&mut self) -> Result<Snapshot, Self::Error>;

    /// Reads the pages of a plan and returns their digests, in the order of the plan. Leaves out pages of regions that
    /// have ended or can't be read any more.
    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Self::Error>;

    /// Marks, unmarks, merges and moves memory, and gives ksmd its order. Must not wait for ksmd.
    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Self::Error>;

    /// Waits for `ns` nanoseconds, or less if there's a reason to return early.
    fn wait(&mut self, ns: u64) -> Result<(), Self::Error>;
}

/// The state of the machine at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Monotonic time, nanoseconds from any origin.
    pub now_ns: u64,
    /// The regions in scope that we may judge, without excluded ones.
    pub regions: Vec<RegionView>,
    /// Whether some regions of processes that ran at the start may still be missing. An earlier run may have merged
    /// them, so we can't count the saving yet.
    pub is_starting: bool,
    pub ksm: KsmView,
    /// How the kernel merges equal pages.
    pub mechanism: Mechanism,
    /// Whether the host can look up merged frames. If not, we take the saving from KSM's counters.
    pub shows_frames: bool,
    /// Whether samples show that no other process maps a merged page any more ([`PageSample::lone`]).
    pub shows_lone: bool,
    /// Whether pages can be hashed in place, by some of their cache lines.
    pub hashes_lines: bool,
    pub memory: MemoryView,
    /// The share of the last 10 s in which some task waited for a CPU (PSI `some avg10` in `cpu.pressure`): the highest
    /// of all cgroups with a process that we judge and no quota in effect. `None` if the kernel doesn't report it. May
    /// be some seconds old.
    pub cpu_pressure: Option<Permyriad>,
    /// Cgroup limits on the memory of processes in scope. May be some seconds old.
    pub limits: Arc<[LimitView]>,
    /// The processes that share limits, each with its group.
    pub groups: Arc<BTreeMap<OwnerKey, GroupKey>>,
    /// Each process's part of the frames in its regions. As in Pss, the pages that map a frame share it equally. May be
    /// some seconds old. Processes without a figure count with their resident pages.
    pub held: Arc<BTreeMap<OwnerKey, Pages>>,
    /// Whether any process outside the trust domain that ksmd merges still has marked memory.
    pub foreign_marks: bool,
    /// CPU time spent so far in the run.
    pub cost: Cost,
    /// The NUMA nodes with memory, ascending. Empty if there's only one.
    pub nodes: Vec<NodeView>,
    /// The processes, on a machine with several nodes. Otherwise empty.
    pub owners: Vec<OwnerView>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// We mark spans, and ksmd searches them for equal pages.
    #[default]
    Ksmd,
    /// We give the kernel pairs of pages through `/dev/ksm`, and it merges the equal ones. We mark and scan nothing.
    Request,
}

/// A NUMA node with memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// The kernel's number of the node.
    pub node: NodeKey,
    pub total: Pages,
    pub free: Pages,
    /// The distance of each node in the snapshot from this node's processors, in the snapshot's order (ACPI SLIT: 10 is
    /// local).
    pub distances: Vec<u32>,
}

/// Everything about a process that we need to place its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerView {
    pub owner: OwnerKey,
    /// The node that the process is bound to. `None` if it may run on several nodes: then its home is the node with
    /// most of its memory.
    pub home: Option<NodeKey>,
    /// The process's nice value, from -20 (highest priority) to 19.
    pub nice: i8,
    /// The nodes its memory may be on (`Mems_allowed` in `/proc/PID/status`).
    pub allowed: NodeSet,
    pub placement: Placement,
}

/// A region as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// The region's identity, which stays the same when the region grows, shrinks or is split.
    pub key: RegionKey,
    /// The process that the region belongs to.
    pub owner: OwnerKey,
    /// A key of the process that's the same in every run.
    pub lasting: LastingKey,
    pub family: FamilyKey,
    /// Processes with this key were forked from each other, and may share memory.
    pub lineage: LineageKey,
    pub domain: DomainKey,
    /// The first page of the region's address range.
    pub first: Vpn,
    /// The length of the region's address range.
    pub pages: Pages,
    /// Anonymous pages present in the region. May be some seconds old.
    pub resident: Pages,
    /// How many pages of the range are marked mergeable, if ksmd does the merging.
    pub marked: Pages,
    /// How many of the resident pages KSM has merged, where we can't tell which (`shows_lone` is false). Otherwise 0.
    pub merged_somewhere: Pages,
    /// Whether the mapping is marked because we asked the kernel to merge one of its pages. Then its pages may be
    /// merged.
    pub named: bool,
    /// Whether we leave the region's process alone for now. Then we neither read nor change the region, and its marks
    /// stay.
    pub left_alone: bool,
}

/// The state of KSM. Counters are the kernel's, for the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmView {
    /// `pages_shared`: merged frames, each in place of several pages.
    pub shared: Pages,
    /// `pages_sharing`: pages that merging saves.
    pub sharing: Pages,
    /// `ksm_zero_pages`: pages that map the kernel's zero page instead.
    pub zero: Pages,
    /// `pages_scanned`: pages that ksmd has visited since boot.
    pub scanned: u64,
    /// `full_scans`: completed scans since boot or since the last `run` 2.
    pub full_scans: u64,
    /// Whether ksmd is still carrying out an order: a kick until its scan has ended (or found nothing to scan), any
    /// other order until it's in force.
    pub busy: bool,
    /// Copies made so far because programs wrote merged pages (`cow_ksm` in `/proc/vmstat`, which counts unmerging,
    /// too).
    pub broken: u64,
    /// Huge pages split so far. Like `broken`, this is 0 now and then, when the host couldn't read it.
    pub splits: HugeSplits,
    /// False if we must not control KSM, because another program has changed a knob or this is a dry run. We go on
    /// judging, but order nothing.
    pub ours: bool,
}

impl KsmView {
    /// The pages that KSM saves: `pages_sharing` plus `ksm_zero_pages`.
    pub fn saved(&self) -> Pages {
        self.sharing + self.zero
    }

    /// All pages that map merged frames: the saved ones, plus one for each frame.
    pub fn merged(&self) -> Pages {
        self.shared + self.saved()
    }
}

/// Huge pages that the kernel has split on the whole machine, for whatever reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugeSplits {
    /// `thp_split_page`: into base pages, as when one of them is merged.
    pub pages: u64,
    /// `thp_split_pmd`: only in a process's page table, as when part of a huge page is marked.
    pub mappings: u64,
}

impl HugeSplits {
    /// Splits since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { pages: self.pages.saturating_sub(before.pages), mappings: self.mappings.saturating_sub(before.mappings) }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryView {
    /// All memory but the pool of huge pages, 0 if unknown.
    pub total: Pages,
    /// Memory that programs can still get without swapping: `MemAvailable`, and ZFS's cache.
    pub available: Pages,
    /// Free swap, as far as programs in scope may use it.
    pub swap_free: Pages,
    /// The share of the last 10 s in which some task waited for memory (PSI `some avg10`), if the kernel reports it.
    pub pressure: Option<Permyriad>,
}

/// A cgroup's limit on the memory of its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitView {
    pub key: LimitKey,
    /// How much memory the cgroup's processes may have. 0 if we don't know yet.
    pub limit: Pages,
    /// How much of the limit is left. Page cache that the kernel would reclaim before it kills a process counts as
    /// left.
    pub left: Pages,
    /// The tightest limit where the kernel kills. Above `memory.high` it only throttles. `None` if there's none, or if
    /// we don't know it yet.
    pub kills: Option<KillLimit>,
    /// The processes in scope that the limit applies to.
    pub owners: Vec<OwnerKey>,
    /// When the host last read the limit, nanoseconds.
    pub read_ns: u64,
}

/// A memory limit at which the kernel kills processes, and how much of it is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillLimit {
    pub limit: Pages,
    pub left: Pages,
}

/// CPU time spent since the run began. In JSON, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// CPU time of pagefold and its injector, nanoseconds.
    #[serde(rename = "pagefold", with = "as_seconds")]
    pub pagefold_ns: u64,
    /// The injector's part of `pagefold_ns`, nanoseconds.
    #[serde(rename = "injector", with = "as_seconds")]
    pub injector_ns: u64,
    /// CPU time of ksmd, nanoseconds.
    #[serde(rename = "ksmd", with = "as_seconds")]
    pub ksmd_ns: u64,
}

impl Cost {
    /// CPU time of pagefold, its injector and ksmd, nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.pagefold_ns + self.ksmd_ns
    }

    /// CPU time of pagefold without its injector, nanoseconds.
    pub fn own_ns(&self) -> u64 {
        self.pagefold_ns.saturating_sub(self.injector_ns)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplePlan {
    /// Runs of neighbouring pages: one run costs little more than one page.
    pub runs: Vec<PageRun>,
    /// The seed of all digests of this run.
    pub digest_seed: u64,
    /// How many cache lines of a page to hash in place ([`LineDigester`](crate::hash::LineDigester)). `None`: read
    /// pages and digest them whole ([`Digester`](crate::hash::Digester)).
    pub lines: Option<u32>,
    /// Digests by `lines` lines that pages with different contents have in common. Pages with such a digest must be
    /// digested by all lines instead.
    pub colliding: Arc<DigestSet>,
    /// For private pages of these regions, also report whether the page was active before we read it, and whether it's
    /// a merged page that nobody else maps any more.
    pub activity: BTreeSet<RegionKey>,
    /// In these regions, also read pages that are shared through fork. Each region comes with all regions of its
    /// family, itself included, for [`PageSample::outsiders`].
    pub forked: BTreeMap<RegionKey, Vec<Span>>,
    /// Look up the merged frames of these pages, without reading them.
    pub inspect: Vec<PageRun>,
    /// Look up whether the frames of `inspect` are charged to this limit's cgroup or one below.
    pub charged_to: Option<LimitKey>,
    /// Whether to count the saving: how many pages map each frame of `inspect`, and how many merged zeros each process
    /// has.
    pub count: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub region: RegionKey,
    pub first: Vpn,
    pub pages: u32,
}

/// The results of a plan.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// One entry for each page that was read or found absent, in the order of the plan.
    pub pages: Vec<PageSample>,
    /// Mappings in the plan that the host didn't get to, because reading took too long.
    pub unread: BTreeSet<RegionKey>,
    /// The merged pages among the pages to inspect, in the order of the plan.
    pub merged: Vec<MergedSample>,
    /// The count, if the plan asked for one and nothing prevented it.
    pub counted: Option<Counted>,
    /// CPU time of reading, nanoseconds.
    pub cpu_ns: u64,
}

/// The results of counting the saving, apart from merged frames.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// How many pages of each process ksmd has mapped to the kernel's zero page instead of a frame of zeros.
    pub zeros: BTreeMap<OwnerKey, (LineageKey, Pages)>,
    /// The inspected pages that are shared through fork or map the kernel's zero page, for whatever reason. `zeros`
    /// doesn't count all of them: if a merge splits a huge page, the kernel maps the zero page in place of the zeros in
    /// it, too (Linux 6.12).
    pub others: Vec<StateSample>,
}

/// The state of a page that we looked up without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSample {
    pub region: RegionKey,
    pub page: Vpn,
    pub state: PageState,
}

/// A page that maps a merged frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedSample {
    pub region: RegionKey,
    pub page: Vpn,
    /// The number of the frame. Pages with the same frame are one copy.
    pub frame: u64,
    pub node: NodeKey,
    /// If the plan asked for it: whether the frame is charged to the limit's cgroup or one below.
    pub charged: bool,
    /// If the plan asked for a count: how many pages map the frame, on the whole machine.
    pub mappers: u32,
}

/// One page of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    pub region: RegionKey,
    pub page: Vpn,
    pub state: PageState,
    /// Whether the page is part of a huge page, which a merge would split.
    pub huge: bool,
    /// The page's digest, if we read pages in this state ([`PageState::is_read`]).
    pub digest: Digest,
    /// If the plan asked for it: whether page reclaim keeps the page on its active list.
    pub active: bool,
    /// If the plan asked for it: whether a page that looks private is a merged one that only this process still maps,
    /// because others wrote theirs.
    pub lone: bool,
    /// If the plan asked for it, for a page shared through fork: whether processes outside the family map it, or may.
    pub outsiders: bool,
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
    /// KSM has merged it already.
    Merged,
    /// Shared through fork: related processes map the same frame.
    Shared,
}

impl PageState {
    /// Whether we read pages in this state. `forked`: whether we read pages shared through fork.
    pub fn is_read(self, forked: bool) -> bool {
        matches!(self, Self::Private | Self::Merged) || forked && self == Self::Shared
    }
}

/// Neighbouring pages of one region to mark or unmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub region: RegionKey,
    pub first: Vpn,
    /// The span's length in pages of address space.
    pub pages: Pages,
}

impl Span {
    pub fn end(&self) -> Vpn {
        self.first + self.pages.0
    }
}

/// A span to mark or unmark, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub span: Span,
    pub why: Why,
}

/// Why we mark or unmark a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Marked because of the span's duplicates.
    Duplicate {
        /// Pages that are zero or exist elsewhere, too.
        duplicate: Pages,
        resident: Pages,
    },
    /// Unmarked because merges in the span don't last.
    CowBroken {
        /// How long a merged page lasts there until its program writes it, nanoseconds.
        lasts_ns: u64,
    },
    /// Unmarked because less memory is left than the reserve.
    MemoryShort,
    /// Unmarked because its pages are charged to another cgroup, with a limit that has no headroom for them.
    Charge,
    /// Unmarked because ksmd merged almost none of its duplicates: these pages or their copies are pinned.
    Unmerged,
    /// A user asked for it.
    Asked,
    /// Unmarked because the memory is excluded now or its process has moved to another trust domain.
    Excluded,
}

impl From<Span> for Change {
    fn from(span: Span) -> Self {
        Self { span, why: Why::Asked }
    }
}

/// The actions of a cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    pub mark: Vec<Change>,
    /// Spans to unmark, which gives each merged page its own copy again.
    pub unmark: Vec<Change>,
    /// How much to do in one stop of a target.
    pub stop: StopSize,
    pub scan: ScanOrder,
    /// Pages to merge with each other, if we merge on request.
    pub merge: Vec<MergeRange>,
    /// Merged frames to move to another NUMA node.
    pub moves: Vec<Move>,
}

impl Actions {
    /// Whether the actions change any target. Orders to ksmd don't.
    pub fn change_targets(&self) -> bool {
        let Self { mark, unmark, stop: _, scan: _, merge, moves } = self;
        !(mark.is_empty() && unmark.is_empty() && merge.is_empty() && moves.is_empty())
    }
}

/// Neighbouring pages to merge with others. The kernel only merges pages with equal contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeRange {
    /// The pages to replace.
    pub take: PageRun,
    /// The pages to keep in their place.
    pub keep: Keep,
    /// Only merge if the page to keep is merged already. Otherwise the kept page's cgroup would have to pay for one
    /// more page, and has no headroom for it.
    pub needs_merged: bool,
    /// Only replace pages that no other process maps, because we haven't read them. All others count as absent.
    pub needs_own: bool,
    /// Only keep pages that are merged already, or that at most this many processes map. If more processes map a page,
    /// we don't see all that share it through fork, and those would get it merged, too. 0 for the zero page.
    pub keep_mappers: u32,
}

/// The pages to keep in a merge, in place of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// As many neighbouring pages as the merge replaces, starting with this one.
    Run(RegionKey, Vpn),
    /// This one page, in place of the whole range.
    Page(RegionKey, Vpn),
    /// The kernel's zero page.
    Zero,
}

impl Keep {
    /// The page to keep, or the first of them. `None`: the zero page.
    pub fn first(self) -> Option<(RegionKey, Vpn)> {
        match self {
            Self::Run(region, page) | Self::Page(region, page) => Some((region, page)),
            Self::Zero => None,
        }
    }
}

impl MergeRange {
    /// Turns one outcome for each page of the range into results, one for each run of equal outcomes.
    pub fn results(self, pages: &[Merging]) -> impl Iterator<Item = MergeResult> {
        let mut skip = 0;
        pages.chunk_by(|a, b| a == b).map(move |same| {
            let pages = u32::try_from(same.len()).unwrap_or(u32::MAX);
            let range = self.part(skip, pages);
            skip += pages;
            MergeResult { range, merging: same[0] }
        })
    }

    /// The part of the range that starts `skip` pages after its start and is `pages` long.
    #[must_use]
    pub fn part(self, skip: u32, pages: u32) -> Self {
        let take = PageRun { first: self.take.first + u64::from(skip), pages, ..self.take };
        let keep = match self.keep {
            Keep::Run(region, first) => Keep::Run(region, first + u64::from(skip)),
            other => other,
        };
        Self { take, keep, ..self }
    }
}

/// A merged frame, given by a page that maps it, and the node to move it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub region: RegionKey,
    pub page: Vpn,
    pub node: NodeKey,
}

/// How much to do in one stop of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSize {
    /// At most this many system calls that mark memory.
    pub marks: u32,
}

impl Default for StopSize {
    /// 32 calls. We measured 37 us a call in batches of thirty.
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
    /// The results for the spans to mark, in any order.
    pub marked: Vec<ChangeResult>,
    /// The results for the spans to unmark, in any order.
    pub unmarked: Vec<ChangeResult>,
    /// The results of merging, in any order: parts of the ranges we asked for, each of pages with the same result.
    pub merges: Vec<MergeResult>,
    pub stops: Vec<Stops>,
    /// Huge pages collapsed again in memory that we unmarked because merges there don't last.
    pub collapsed: u64,
    /// How many frames moved. The others had changed, or the kernel refused to move them.
    pub moved: u64,
    /// CPU time of moving, nanoseconds.
    pub move_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeResult {
    /// The change we asked for.
    pub change: Change,
    pub marking: Marking,
}

/// The stops of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stops {
    pub owner: OwnerKey,
    pub number: u32,
    /// The longest stop, nanoseconds.
    pub longest_ns: u64,
    /// The total of all stops, nanoseconds.
    pub total_ns: u64,
    pub lengths: StopLengths,
}

impl Stops {
    pub fn one(owner: OwnerKey, ns: u64) -> Self {
        Self { owner, number: 1, longest_ns: ns, total_ns: ns, lengths: StopLengths::one(ns) }
    }
}

/// The result of marking or unmarking one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// This many pages of address space are marked or unmarked: fewer than the span's if its mappings had changed.
    Done(Pages),
    /// The host had no time left for the target. The next attempt comes in the next cycle.
    Untried,
    /// The host couldn't stop the target. A later attempt may succeed.
    Busy,
    /// The change would split mappings, and the target is close to `vm.max_map_count`. A later attempt may succeed.
    NoMappings,
    /// We must not touch the target, or it has ended. Don't try again.
    Refused,
}

/// A range of pages, and the outcome of merging them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeResult {
    pub range: MergeRange,
    /// The outcome for each of its pages.
    pub merging: Merging,
}

/// The outcome of merging a page with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Merging {
    /// The two pages were equal and are one page now.
    Merged,
    /// The two pages were one page already.
    Shared,
    /// The two pages' contents differ.
    Differs,
    /// One of the pages isn't present, isn't mapped any more, or doesn't meet [`MergeRange::needs_merged`] or
    /// [`MergeRange::needs_own`].
    Absent,
    /// One of the pages is in use in a way that prevents a merge now. A later attempt may succeed.
    Busy,
    /// One of the pages can never be merged.
    Ineligible,
    /// The page to keep can't have more sharers, or already has more than we know of ([`MergeRange::keep_mappers`]).
    Full,
    /// The host didn't try, for example because it leaves the process alone, or the process has ended.
    Untried,
    /// The host gave up waiting for a call that was under way. The pages may be merged now, or later.
    Unknown,
}
