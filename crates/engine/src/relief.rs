//! Relief for a cgroup that keeps more merged pages for others than its limit has headroom for.
//!
//! Thanks to [`crate::headroom`], merging doesn't cause that. But programs may grow after we merged their pages, or
//! somebody may lower a limit. Unmerging the cgroup's own pages would make things worse: it's charged for its new
//! copies at once, and keeps the merged ones for other cgroups. So we give the other cgroups copies of their own,
//! charged to them, if they have room.
//!
//! Only in this case do we look up who maps which frame, and which frames are charged to the cgroup. So we know
//! exactly:
//!
//! ```text
//! without merging = in use - frames charged to it + merged pages of its processes
//! at worst        = without merging + frames charged to it that others map
//! ```
//!
//! We only do this below limits where the kernel kills. Being throttled, above `memory.high`, is no reason to take
//! others' merged memory apart.
//!
//! If a cgroup would exceed its limit even without merging, we can't help: its programs need more memory than it
//! allows.
//!
//! Some of its own pages are marked but not merged, because they were written. If they merged again, they could add to
//! the pages that the cgroup keeps. We unmark them, which costs nothing, and mark them again when there's headroom.

use crate::headroom::cushion;
use crate::host::{KillLimit, LimitView, MergedSample, PageRun, RegionView};
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::marking::marker::SPLIT_FROM;
use crate::marking::unmarking::{Wait, Waiting};
use crate::placement::inventory::{may_be_merged_anywhere, merged_runs, take_pages};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::reserve::Keep;
use crate::units::{EXTENT_PAGES, Pages, Vpn, count};
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Unmerging makes copies in steps of this many pages. Each step needs a margin besides: 32 MiB that the process and
/// its neighbours may allocate during the step, and 2 MiB that the kernel charges in advance on each processor that
/// copies (`MEMCG_CHARGE_BATCH`, mm/memcontrol.c).
pub const UNMERGE_STEP: Pages = Pages(EXTENT_PAGES);
/// See [`UNMERGE_STEP`].
pub const UNMERGE_MARGIN: Pages = Pages(8_704);

/// The margin below a limit: at most a quarter of the limit, or we could unmerge nothing in a small cgroup.
pub fn margin_below(limit: Pages) -> Pages {
    UNMERGE_MARGIN.min(Pages(limit.0 / 4))
}

/// We look up at most `LOOKED_UP_AT_ONCE` pages in one cycle. A survey ends once it has found `FOUND_MOST` merged pages
/// (20 MB where all were charged frames) or after `LASTS_MOST_NS` nanoseconds, because ksmd rests meanwhile. The
/// cgroup's own pages get half of each. Of pages that we haven't looked at, we assume the worst: the cgroup's own are
/// all merged, and others keep all frames that are charged to it. But we don't know who keeps them, so the next survey
/// begins there. If a frame that we expected to come free is mapped there, too, that survey finds it.
const LOOKED_UP_AT_ONCE: u64 = 1 << 16;
const FOUND_MOST: usize = 1 << 18;
const LASTS_MOST_NS: u64 = 10_000_000_000;
/// To choose parts, we compare at most this many pairs of a frame and a part that maps it.
const COMPARED_MOST: usize = 1 << 22;
/// The first pause between two surveys of who maps the charged pages, nanoseconds. It doubles while they find nothing
/// to unmerge.
const PAUSE_NS: u64 = 2_000_000_000;
const PAUSE_MOST_NS: u64 = 600_000_000_000;
/// We survey again after only `PAUSE_NS` if a cgroup could now exceed its limit by more than at its last survey, and
/// the difference is at least one part in this many of the limit.
const WORSE: u64 = 256;

/// A region, by its mapping and its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub region: RegionKey,
    pub first: Vpn,
}

impl Place {
    pub fn of(region: &Region) -> Self {
        Self { region: region.view.key, first: region.view.first }
    }
}

/// The part of a region that we unmerge at once: an extent, or all of a mapping that we don't split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    pub region: RegionKey,
    pub first: Vpn,
    pub pages: Pages,
}

/// The room for copies, on the machine and below limits.
#[derive(Clone, Debug)]
pub struct CopyBudget<'a> {
    pub spare: Pages,
    pub limits: &'a [LimitView],
    /// Copies already planned below each limit.
    pub taken: FxHashMap<LimitKey, Pages>,
}

impl CopyBudget<'_> {
    /// Takes room for copies of a process's pages. False if there isn't enough.
    fn take(&mut self, owner: OwnerKey, copies: Pages) -> bool {
        if copies > self.spare {
            return false;
        }
        self.spare = self.spare - copies;
        for view in self.limits.iter().filter(|view| view.owners.contains(&owner)) {
            let taken = self.taken.entry(view.key).or_default();
            *taken += copies;
            if *taken + UNMERGE_STEP + margin_below(view.limit) > view.left {
                return false;
            }
        }
        true
    }
}

/// The memory that's marked or merged, and so may be charged to a cgroup.
#[derive(Clone, Copy, Debug)]
pub struct Charged<'a> {
    pub table: &'a RegionTable,
    pub waiting: &'a Waiting,
    /// Whether ksmd merges memory where it's marked. Otherwise the kernel only merges pages that we give it.
    pub by_marks: bool,
}

impl Charged<'_> {
    /// Whether we can't unmerge a page now: its process can't be stopped, or another program has marked it.
    fn is_stuck(&self, region: &Region, page: Vpn) -> bool {
        if region.hold.left_alone {
            return true;
        }
        match self.waiting.at(region.view.key, page) {
            Some(wait) => wait.is_stuck,
            None => self.by_marks && !region.marks.contains(page),
        }
    }
}

/// The memory to unmerge, so that a cgroup stays below its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relieved {
    /// The limit that needs relief.
    pub limit: LimitKey,
    /// Parts of other processes' regions with pages that are charged to the cgroup.
    pub others: Vec<Part>,
    /// The cgroup's own regions with many marked pages that aren't merged.
    pub own: Vec<Place>,
}

/// A part of another process's region, and how many of its pages are merged, whichever cgroup they're charged to.
#[derive(Clone, Copy, Debug)]
struct FoundPart {
    part: Part,
    owner: OwnerKey,
    copies: Pages,
    has_charged: bool,
}

/// A run's place in the order of surveys.
type Turn = (OwnerKey, RegionKey, Vpn);

/// Which frames are charged to one cgroup, and who maps them.
#[derive(Debug, Default)]
struct Survey {
    limit: LimitKey,
    /// Whether to unmerge all of the cgroup's memory if others could map too much of it.
    empties: bool,
    began_ns: u64,
    members: FxHashSet<OwnerKey>,
    /// The pages that we still have to look up: of the cgroup's processes, and of others.
    own: VecDeque<PageRun>,
    others: VecDeque<PageRun>,
    /// How many merged pages we've found.
    found: usize,
    /// Without merging, the cgroup might use up to this much less than we compute, because we didn't look up all pages.
    unseen: Pages,
    /// Merged pages of the cgroup's processes, by region.
    merged: FxHashMap<Place, u64>,
    /// Merged frames that are charged to the cgroup.
    frames: FxHashSet<u64>,
    /// Other processes' parts with pages that are charged to the cgroup. The last one may have none yet.
    parts: Vec<FoundPart>,
    /// Charged frames that other processes map, in pairs of the part's index and the frame, in order.
    outside: Vec<(u32, u64)>,
    /// How many of the cgroup's own pages are merged and wait for unmarking. They don't count in `merged`.
    merged_waiting: Pages,
    /// Charged frames that other processes map where we can't unmerge them.
    stuck: FxHashSet<u64>,
}

/// What a survey has found in a limit's cgroup.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    pub limit: LimitKey,
    /// How many merged pages the cgroup keeps for others at most.
    pub pages: Pages,
    /// Whether the cgroup would exceed its limit even without merging.
    pub is_too_large: bool,
}

#[derive(Debug, Default)]
pub struct Relief {
    survey: Option<Survey>,
    /// What a survey that has just ended has found in the cgroup.
    kept: Option<Kept>,
    /// Whether this cycle's plan looks pages up.
    is_asking: bool,
    looked: FxHashMap<LimitKey, Look>,
}

/// The last survey for a limit.
#[derive(Clone, Copy, Debug)]
struct Look {
    at_ns: u64,
    /// How long we wait before the next survey if nothing gets worse, nanoseconds.
    pause_ns: u64,
    /// By how much the limit could be exceeded when the survey began.
    over: Pages,
    /// Whether something that a survey chose couldn't be unmarked.
    was_in_vain: bool,
    /// Where the next survey begins to look at other processes, if the last one didn't get to all.
    next: Option<Turn>,
}

impl Relief {
    /// Whether we're looking up pages.
    pub fn is_busy(&self) -> bool {
        self.survey.is_some()
    }

    /// Whether this cycle's plan looks pages up for us.
    pub fn is_asking(&self) -> bool {
        self.is_asking
    }

    /// When we last surveyed for a limit, nanoseconds; 0 if we haven't.
    pub fn looked_ns(&self, limit: LimitKey) -> u64 {
        self.looked.get(&limit).map_or(0, |look| look.at_ns)
    }

    /// Forgets limits that can't be exceeded any more. We keep those with recent surveys, so that a limit that's
    /// lowered and raised all the time doesn't cause more surveys, or the same one again and again.
    pub fn keep_only(&mut self, exceeded: &[(LimitKey, Pages)], now_ns: u64) {
        self.looked.retain(|key, look| {
            now_ns < look.at_ns + look.pause_ns.max(PAUSE_NS) || exceeded.iter().any(|(exceeded, _)| exceeded == key)
        });
    }

    /// Whether to look up who maps a cgroup's charged pages: we haven't done so yet, or its limit could now be exceeded
    /// by more than at the last survey.
    pub fn is_wanted(&self, view: &LimitView, over: Pages) -> bool {
        let Some(last) = self.looked.get(&view.key) else { return true };
        last.was_in_vain || over.0 > last.over.0 + view.kills.map_or(0, |kills| kills.limit.0 / WORSE)
    }

    /// The findings of a survey that has ended since the last call, if there is one.
    pub fn take_kept(&mut self) -> Option<Kept> {
        self.kept.take()
    }

    /// Forgets what surveys for a limit have found, so that the next one is due now.
    pub fn forget(&mut self, limit: LimitKey) {
        self.looked.remove(&limit);
    }

    /// Called if something that we chose can't be unmarked now. Merging has to wait for new surveys of all limits,
    /// because we don't know for which of them we chose it.
    pub fn miss(&mut self) {
        for look in self.looked.values_mut() {
            look.was_in_vain = true;
        }
    }

    /// Whether it's time to look up who maps the pages charged to a cgroup that may exceed its limit by `over`.
    pub fn is_due(&self, view: &LimitView, over: Pages, now_ns: u64) -> bool {
        if self.is_busy() {
            return false;
        }
        let Some(last) = self.looked.get(&view.key) else { return true };
        now_ns >= last.at_ns + if self.is_wanted(view, over) { PAUSE_NS } else { last.pause_ns }
    }

    /// Begins to look up who maps a cgroup's charged pages. `empties`: if others could map too many of them, unmerges
    /// all of the cgroup's own memory.
    pub fn begin(
        &mut self,
        view: &LimitView,
        over: Pages,
        empties: bool,
        table: &RegionTable,
        waiting: &Waiting,
        now_ns: u64,
    ) {
        let last = self.looked.get(&view.key).copied();
        let pause_ns = last.map_or(0, |last| last.pause_ns);
        let next = last.and_then(|last| last.next);
        self.looked.insert(view.key, Look { at_ns: now_ns, pause_ns, over, was_in_vain: false, next: None });
        let mut runs = merged_runs(table);
        for Wait { span, .. } in waiting.iter() {
            // If a region may be merged anywhere, we look up all of it anyway.
            let Some(region) = table.at(span.region, span.first) else { continue };
            if !may_be_merged_anywhere(region) {
                runs.push_back(region.run(span.first, span.pages));
            }
        }
        let members: FxHashSet<OwnerKey> = view.owners.iter().copied().collect();
        let mut own = VecDeque::new();
        let mut others: BTreeMap<Turn, PageRun> = BTreeMap::new();
        for run in runs {
            match table.at(run.region, run.first) {
                Some(region) if members.contains(&region.view.owner) => own.push_back(run),
                Some(region) => drop(others.insert((region.view.owner, run.region, run.first), run)),
                None => {}
            }
        }
        self.survey = Some(Survey {
            limit: view.key,
            empties,
            began_ns: now_ns,
            members,
            own,
            others: in_turn(&others, next),
            ..Survey::default()
        });
    }

    /// The pages to look up now, and the limit whose cgroup they may be charged to.
    pub fn inspect(&mut self) -> (Vec<PageRun>, Option<LimitKey>) {
        let Some(survey) = &mut self.survey else { return (Vec::new(), None) };
        self.is_asking = true;
        // As long as others have pages to look up, at least half are theirs, even if we look rarely.
        let most = if survey.others.is_empty() { LOOKED_UP_AT_ONCE } else { LOOKED_UP_AT_ONCE / 2 };
        let mut runs = take_pages(&mut survey.own, most);
        let own: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        runs.extend(take_pages(&mut survey.others, LOOKED_UP_AT_ONCE - own));
        (runs, Some(survey.limit))
    }

    /// Records pages that we looked up. After the last one, returns the parts to unmerge. We take parts where others
    /// hold the most pages charged to the cgroup and have room for the copies, until enough pages come free to restore
    /// the cgroup's reserve.
    pub fn record(
        &mut self,
        memory: Charged<'_>,
        merged: &[MergedSample],
        budget: CopyBudget<'_>,
        keep: Keep,
        now_ns: u64,
    ) -> Option<Relieved> {
        self.is_asking = false;
        let survey = self.survey.as_mut()?;
        let mut last = None;
        for sample in merged {
            last = memory.table.near(last, sample.region, sample.page);
            if let Some(region) = last {
                survey.add(memory, region, sample);
            }
        }
        survey.found += merged.len();
        let lasted_ns = now_ns.saturating_sub(survey.began_ns);
        if survey.found >= FOUND_MOST / 2 || lasted_ns >= LASTS_MOST_NS / 2 {
            survey.skip_own(memory.table);
        }
        if survey.found >= FOUND_MOST || lasted_ns >= LASTS_MOST_NS {
            let next = survey.skip_others(memory.table);
            if let Some(look) = self.looked.get_mut(&survey.limit) {
                look.next = next;
            }
        }
        if !survey.own.is_empty() || !survey.others.is_empty() {
            return None;
        }
        let survey = self.survey.take()?;
        let view = budget.limits.iter().find(|view| view.key == survey.limit);
        let own = survey.own_unmerged(memory);
        let may_merge: Pages = own.marked.iter().map(|region| region.pages).sum();
        let limit = view.and_then(|view| view.kills);
        // Others may still join the frames that only the cgroup maps.
        let charged = Pages(count(survey.frames.len()));
        self.kept = Some(Kept {
            limit: survey.limit,
            pages: charged + survey.unseen + may_merge + own.waiting,
            is_too_large: limit.is_some_and(|kills| survey.is_too_large(kills)),
        });
        let found = limit.and_then(|limit| survey.relieve(own, limit, keep.below(limit.limit), budget));
        if let Some(look) = self.looked.get_mut(&survey.limit) {
            let most_ns = if look.next.is_none() { PAUSE_MOST_NS } else { PAUSE_MOST_NS / 10 };
            look.at_ns = now_ns;
            look.pause_ns = if found.is_none() { (look.pause_ns * 2).clamp(PAUSE_NS, most_ns) } else { PAUSE_NS };
        }
        found
    }
}

/// The runs in the order in which we look them up, beginning where the last survey ended (`next`).
fn in_turn(runs: &BTreeMap<Turn, PageRun>, next: Option<Turn>) -> VecDeque<PageRun> {
    let mut ordered: VecDeque<PageRun> = runs.values().copied().collect();
    let Some(next) = next else { return ordered };
    ordered.rotate_left(runs.range(..next).count());
    let (_, region, page) = next;
    let Some(last) = ordered.back_mut() else { return ordered };
    let seen = u32::try_from(page.0.saturating_sub(last.first.0)).unwrap_or(u32::MAX);
    if last.region == region && (1..last.pages).contains(&seen) {
        // The last survey has seen only the first pages of this run.
        let rest = PageRun { region, first: page, pages: last.pages - seen };
        last.pages = seen;
        ordered.push_front(rest);
    }
    ordered
}

/// The part of a region that a page is in. We don't split small mappings.
fn part_of(region: &Region, page: Vpn) -> Part {
    let RegionView { key, first, pages, .. } = region.view;
    if pages < SPLIT_FROM {
        return Part { region: key, first, pages };
    }
    let from = first.max(Vpn(page.extent() * EXTENT_PAGES));
    let end = region.end().min(Vpn((page.extent() + 1) * EXTENT_PAGES));
    Part { region: key, first: from, pages: Pages(end.0 - from.0) }
}

impl Survey {
    fn add(&mut self, memory: Charged<'_>, region: &Region, sample: &MergedSample) {
        if sample.charged {
            self.frames.insert(sample.frame);
        }
        if self.members.contains(&region.view.owner) {
            match memory.waiting.at(region.view.key, sample.page) {
                Some(_) => self.merged_waiting += Pages(1),
                None => *self.merged.entry(Place::of(region)).or_default() += 1,
            }
            return;
        }
        if memory.is_stuck(region, sample.page) {
            if sample.charged {
                self.stuck.insert(sample.frame);
            }
            return;
        }
        let part = part_of(region, sample.page);
        // We look pages up in order, so a part's pages come together.
        if self.parts.last().is_none_or(|last| last.part != part) {
            self.parts.pop_if(|last| !last.has_charged);
            self.parts.push(FoundPart { part, owner: region.view.owner, copies: Pages(0), has_charged: false });
        }
        let number = u32::try_from(self.parts.len() - 1).unwrap_or(u32::MAX);
        let Some(last) = self.parts.last_mut() else { return };
        last.copies += Pages(1);
        if sample.charged {
            last.has_charged = true;
            self.outside.push((number, sample.frame));
        }
    }

    /// Looks up no more of the cgroup's own pages, and counts them as merged.
    fn skip_own(&mut self, table: &RegionTable) {
        for run in std::mem::take(&mut self.own) {
            let Some(region) = table.at(run.region, run.first) else { continue };
            let merged = self.merged.entry(Place::of(region)).or_default();
            let more = u64::from(run.pages).min(region.resident().0.saturating_sub(*merged));
            *merged += more;
            // In truth these pages may not be merged, or may map as many frames that are charged to the cgroup.
            self.unseen += Pages(2 * more);
        }
    }

    /// Looks up no more of others' pages. Returns where the next survey has to begin.
    fn skip_others(&mut self, table: &RegionTable) -> Option<Turn> {
        let mut next = None;
        for run in std::mem::take(&mut self.others) {
            let Some(region) = table.at(run.region, run.first) else { continue };
            next = next.or(Some((region.view.owner, run.region, run.first)));
            self.unseen += Pages(run.pages.into()).min(region.resident());
        }
        next
    }

    fn relieve(&self, own: OwnUnmerged, kills: KillLimit, reserve: Pages, budget: CopyBudget<'_>) -> Option<Relieved> {
        if self.is_too_large(kills) {
            return None;
        }
        let KillLimit { limit, .. } = kills;
        let without_merging = self.without_merging(kills);
        let mut at_worst = without_merging + self.held_outside() + own.waiting;
        let goal = limit.saturating_sub(reserve);
        let mut relieved = Relieved { limit: self.limit, others: Vec::new(), own: Vec::new() };
        let charged = Pages(count(self.frames.len())) + self.unseen;
        if self.empties && without_merging + charged + cushion(reserve) > limit {
            for region in own.marked.iter().filter(|region| region.is_ours) {
                relieved.own.push(region.place);
            }
            if !relieved.own.is_empty() {
                return Some(relieved);
            }
        }
        if at_worst + cushion(reserve) > limit {
            let freed = self.choose_others(at_worst.saturating_sub(goal), budget, &mut relieved.others);
            at_worst = at_worst.saturating_sub(freed);
        }
        own.choose(limit.saturating_sub(at_worst), goal.saturating_sub(at_worst), &mut relieved.own);
        if relieved.others.is_empty() && relieved.own.is_empty() {
            return None;
        }
        Some(relieved)
    }

    /// How many pages the cgroup would use without merging.
    fn without_merging(&self, kills: KillLimit) -> Pages {
        let used = kills.limit.saturating_sub(kills.left);
        let merged = Pages(self.merged.values().sum()) + self.merged_waiting;
        (used + merged).saturating_sub(Pages(count(self.frames.len())))
    }

    /// Whether the cgroup would certainly exceed its limit without merging.
    fn is_too_large(&self, kills: KillLimit) -> bool {
        self.without_merging(kills).saturating_sub(self.unseen) > kills.limit
    }

    /// How many charged frames others map.
    fn held_outside(&self) -> Pages {
        let mut held: FxHashSet<u64> = self.outside.iter().map(|&(_, frame)| frame).collect();
        held.extend(&self.stuck);
        Pages(count(held.len()))
    }

    /// Chooses parts of others' regions until `lacking` frames come free. Returns how many do. A frame comes free once
    /// nobody outside maps it, so we take all parts that share frames together.
    fn choose_others(&self, lacking: Pages, budget: CopyBudget<'_>, chosen: &mut Vec<Part>) -> Pages {
        let mut by_part = self.outside.clone();
        by_part.retain(|(_, frame)| !self.stuck.contains(frame));
        let mut by_frame: Vec<(u64, u32)> = by_part.iter().map(|&(part, frame)| (frame, part)).collect();
        by_frame.sort_unstable();
        let mut by_size: Vec<&[(u32, u64)]> = by_part.chunk_by(|a, b| a.0 == b.0).collect();
        by_size.sort_by_key(|pages| (Reverse(pages.len()), self.part(pages[0].0).part));
        let mut held: FxHashMap<u64, u64> = FxHashMap::default();
        for &(_, frame) in &by_part {
            *held.entry(frame).or_default() += 1;
        }
        let mut choice = Choice {
            survey: self,
            by_part: &by_part,
            by_frame: &by_frame,
            budget,
            full: FxHashSet::default(),
            taken: BTreeSet::new(),
            held,
            free: Pages(0),
            compared: 0,
        };
        for pages in by_size {
            while !choice.taken.contains(&pages[0].0) && choice.free < lacking {
                let together = choice.sharing(pages);
                if together.is_empty() || choice.compared >= COMPARED_MOST {
                    break;
                }
                choice.take(&together);
            }
        }
        let parts: BTreeSet<Part> = choice.taken.into_iter().map(|part| self.part(part).part).collect();
        chosen.extend(parts);
        choice.free
    }

    fn part(&self, number: u32) -> &FoundPart {
        &self.parts[number as usize]
    }

    /// The cgroup's own pages that may still be merged.
    fn own_unmerged(&self, memory: Charged<'_>) -> OwnUnmerged {
        let waiting = memory.waiting.by_region(memory.table);
        let mut own = OwnUnmerged::default();
        for region in memory.table.iter().filter(|region| self.members.contains(&region.view.owner)) {
            let place = Place::of(region);
            let merged = Pages(self.merged.get(&place).copied().unwrap_or_default());
            let waiting = waiting.get(&place).copied().unwrap_or_default().min(region.resident());
            // Pages that wait for unmarking may still be marked in the kernel. They count as `waiting` only.
            let marked = region.mergeable().min(region.resident().saturating_sub(waiting));
            own.waiting += waiting;
            let is_ours = !region.marks.spans.is_empty();
            own.marked.push(Unmerged { pages: marked.saturating_sub(merged), place, is_ours });
        }
        // On request, the kernel only merges pages that we give it.
        own.waiting = if memory.by_marks { own.waiting.saturating_sub(self.merged_waiting) } else { Pages(0) };
        own
    }
}

/// The parts that we choose, and the frames that come free by that.
struct Choice<'a> {
    survey: &'a Survey,
    /// Pairs of a part and a charged frame in it that can come free, sorted by part and sorted by frame.
    by_part: &'a [(u32, u64)],
    by_frame: &'a [(u64, u32)],
    budget: CopyBudget<'a>,
    /// Processes without room for the copies that they'd need. Frames that they map can't come free.
    full: FxHashSet<OwnerKey>,
    taken: BTreeSet<u32>,
    /// For each frame, how many pages map it in parts that we haven't taken. And how many frames nobody maps any more.
    held: FxHashMap<u64, u64>,
    free: Pages,
    compared: usize,
}

impl Choice<'_> {
    /// The parts that share frames with these pages of a part, as far as the frames can come free.
    fn sharing(&mut self, pages: &[(u32, u64)]) -> BTreeSet<u32> {
        let mut together = BTreeSet::new();
        for frame in distinct(pages) {
            let sharers = equal_to(self.by_frame, frame);
            self.compared += sharers.len();
            if !sharers.iter().any(|&(_, part)| self.full.contains(&self.survey.part(part).owner)) {
                together.extend(sharers.iter().map(|&(_, part)| part));
            }
        }
        together
    }

    /// Takes these parts, or notes a process that has no room for its copies.
    fn take(&mut self, together: &BTreeSet<u32>) {
        let mut rest = self.budget.clone();
        for &part in together.difference(&self.taken) {
            let FoundPart { owner, copies, .. } = *self.survey.part(part);
            if !rest.take(owner, copies) {
                self.full.insert(owner);
                return;
            }
        }
        self.budget = rest;
        for &part in together {
            if !self.taken.insert(part) {
                continue;
            }
            for (_, frame) in equal_to(self.by_part, part) {
                let Some(held) = self.held.get_mut(frame) else { continue };
                *held -= 1;
                if *held == 0 {
                    self.free += Pages(1);
                }
            }
        }
    }
}

/// The frames of a part's pages, each once: any number of pages may map the same one.
fn distinct(pages: &[(u32, u64)]) -> BTreeSet<u64> {
    pages.iter().map(|&(_, frame)| frame).collect()
}

/// The pairs that begin with `first`, among sorted pairs.
fn equal_to<A: Ord + Copy, B>(pairs: &[(A, B)], first: A) -> &[(A, B)] {
    let from = pairs.partition_point(|pair| pair.0 < first);
    let to = pairs.partition_point(|pair| pair.0 <= first);
    &pairs[from..to]
}

/// A cgroup's own pages that aren't merged, and may still be.
#[derive(Debug, Default)]
struct OwnUnmerged {
    marked: Vec<Unmerged>,
    /// Pages that wait for unmarking.
    waiting: Pages,
}

/// Pages of one region.
#[derive(Debug)]
struct Unmerged {
    pages: Pages,
    place: Place,
    /// Whether we marked some of the region.
    is_ours: bool,
}

impl OwnUnmerged {
    /// If marked regions have more than `most` unmerged pages, chooses regions until the others have no more than
    /// `goal`.
    fn choose(mut self, most: Pages, goal: Pages, chosen: &mut Vec<Place>) {
        let mut left: Pages = self.marked.iter().map(|region| region.pages).sum();
        if left <= most {
            return;
        }
        self.marked.sort_by_key(|region| (Reverse(region.pages), region.place));
        for Unmerged { pages, place, is_ours } in self.marked {
            if left <= goal {
                break;
            }
            if is_ours && pages > Pages(0) {
                left = left.saturating_sub(pages);
                chosen.push(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::NodeKey;
    use crate::marking::extents::Candidate;
    use crate::region::test_view;
    use crate::units::Permyriad;
    use std::sync::LazyLock;
    use std::time::{Duration, Instant};

    const S: u64 = 1_000_000_000;

    /// Regions 1 to 4 of 100 pages, each of the process with its number, all marked.
    fn table() -> RegionTable {
        let mut table = RegionTable::default();
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(100), ..test_view(key, 0, 100) };
        table.update(&[view(1), view(2), view(3), view(4)], 1, |view| Region::new(view, 0, false, 1));
        mark_all(&mut table);
        table
    }

    fn mark_all(table: &mut RegionTable) {
        for region in table.iter_mut() {
            let RegionView { first, pages, .. } = region.view;
            region.marks.add(Candidate { first, pages, resident: pages, duplicate: pages });
        }
    }

    /// A limit on process 1.
    fn limit(limit: u64, used: u64) -> LimitView {
        let (limit, left) = (Pages(limit), Pages(limit - used));
        let kills = Some(KillLimit { limit, left });
        LimitView { key: LimitKey(7), limit, left, kills, owners: vec![OwnerKey(1)], read_ns: 0 }
    }

    /// Pages that map merged frames. Each of `shares` gives a region, its first page and frame, how many there are, and
    /// whether the frames are charged to the cgroup.
    fn samples(shares: &[(u32, u64, u64, bool)]) -> Vec<MergedSample> {
        let mut samples = Vec::new();
        for &(key, first, pages, charged) in shares {
            for page in (first..first + pages).map(Vpn) {
                let frame = page.0 + 1_000 * u64::from(!charged);
                samples.push(MergedSample {
                    region: RegionKey(key),
                    page,
                    frame,
                    node: NodeKey(0),
                    charged,
                    mappers: 2,
                });
            }
        }
        samples
    }

    fn charged(table: &RegionTable) -> Charged<'_> {
        // No span waits.
        static NONE: LazyLock<Waiting> = LazyLock::new(Waiting::default);
        Charged { table, waiting: &NONE, by_marks: true }
    }

    fn budget(limits: &[LimitView], spare: u64) -> CopyBudget<'_> {
        CopyBudget { spare: Pages(spare), limits, taken: FxHashMap::default() }
    }

    /// The regions to unmerge, as process numbers: other processes', and the cgroup's own.
    fn relieved(view: &LimitView, shares: &[(u32, u64, u64, bool)]) -> Option<(Vec<u32>, Vec<u32>)> {
        let (mut relief, table) = (Relief::default(), table());
        relief.begin(view, Pages(1), false, &table, &Waiting::default(), S);
        assert_eq!(relief.inspect().1, Some(LimitKey(7)));
        let keep = Keep::Share(Permyriad(1_000));
        let found =
            relief.record(charged(&table), &samples(shares), budget(std::slice::from_ref(view), u64::MAX), keep, S)?;
        assert!(!relief.is_busy());
        let others = found.others.into_iter().map(|part| part.region.0).collect();
        Some((others, found.own.into_iter().map(|place| place.region.0).collect()))
    }

    #[test]
    fn those_are_taken_apart_that_hold_what_is_charged_to_the_cgroup() {
        // The cgroup holds 60 pages for itself, and 40 that it shares with others.
        let shared = [(1, 0, 40, true), (2, 0, 40, true), (3, 0, 30, true), (4, 0, 20, false)];
        assert_eq!(relieved(&limit(200, 100), &shared), None, "at worst 140, and 60 more are marked");
        assert_eq!(relieved(&limit(199, 100), &shared), Some((vec![], vec![1])), "its own that may be merged anew");
        // All 40 frames that processes 2 and 3 hold must come free.
        assert_eq!(relieved(&limit(130, 100), &shared), Some((vec![2, 3], vec![1])));
        let apart = [(1, 0, 40, true), (2, 0, 30, true), (3, 30, 10, true)];
        assert_eq!(relieved(&limit(135, 100), &apart), Some((vec![2], vec![1])), "18 less are enough");
        // Without merging the cgroup would hold 100 pages, more than its limit of 99.
        assert_eq!(relieved(&limit(99, 90), &[(1, 0, 90, true), (2, 0, 90, true), (1, 90, 10, false)]), None);
        // The cgroup's program has written to all its pages, and the cgroup holds 40 for others.
        assert_eq!(relieved(&limit(160, 140), &[(2, 0, 40, true)]), Some((vec![], vec![1])));
        assert_eq!(relieved(&limit(150, 146), &[(2, 0, 40, true)]), Some((vec![], vec![1])));
        assert_eq!(relieved(&limit(150, 148), &[(2, 0, 40, true)]), Some((vec![2], vec![1])), "before it reaches it");
    }

    #[test]
    fn pages_that_cannot_be_unmerged_are_not_counted_on() {
        let view = limit(130, 100);
        let shared = samples(&[(1, 0, 40, true), (2, 0, 40, true), (3, 0, 30, true)]);
        let others = |change: fn(&mut Region)| {
            let (mut relief, mut table) = (Relief::default(), table());
            change(table.at_mut(RegionKey(3), Vpn(0)).unwrap());
            relief.begin(&view, Pages(1), false, &table, &Waiting::default(), S);
            relief.inspect();
            let budget = budget(std::slice::from_ref(&view), u64::MAX);
            let found = relief.record(charged(&table), &shared, budget, Keep::Share(Permyriad(1_000)), S);
            found.unwrap().others.iter().map(|part| part.region.0).collect::<Vec<_>>()
        };
        assert_eq!(others(|_| ()), [2, 3]);
        // 30 of the 40 frames can't come free. For the other ten, process 2 is enough.
        assert_eq!(others(|region| region.hold.left_alone = true), [2]);
        assert_eq!(others(|region| region.marks.spans.clear()), [2], "another program marked it");
    }

    #[test]
    fn only_extents_with_pages_charged_to_the_cgroup_are_taken_apart() {
        let mut table = RegionTable::default();
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(4_096), ..test_view(key, 100, 4_096) };
        table.update(&[view(1), view(2), view(3)], 1, |view| Region::new(view, 0, false, 1));
        mark_all(&mut table);
        // The cgroup keeps 200 pages for process 2, and 50 of them for process 3 as well. Process 2 keeps 1,000 itself.
        let shares = [(1, 100, 1_200, true), (2, 700, 200, true), (3, 700, 50, true), (2, 2_000, 1_000, false)];
        let parts = |spare| {
            let (mut relief, view) = (Relief::default(), limit(1_300, 1_200));
            relief.begin(&view, Pages(1), false, &table, &Waiting::default(), S);
            relief.inspect();
            let budget = budget(std::slice::from_ref(&view), spare);
            let keep = Keep::Share(Permyriad(0));
            let found = relief
                .record(charged(&table), &samples(&shares), budget, keep, S)
                .unwrap_or_else(|| Relieved { limit: view.key, others: Vec::new(), own: Vec::new() });
            found.others.into_iter().map(|part| (part.region.0, part.first.0, part.pages.0)).collect::<Vec<_>>()
        };
        assert_eq!(parts(1_000), [(2, 512, 512), (3, 512, 512)], "both must let go");
        assert_eq!(parts(100), [], "the copies don't fit");
    }

    /// Surveys until one finds something or the last ends. Returns how many pages each looked up, and the processes
    /// whose memory is taken apart.
    fn surveys(table: &RegionTable, view: &LimitView, number: u64, charged_of: u32) -> (Vec<u64>, Vec<u32>) {
        let mut relief = Relief::default();
        let mut looked = Vec::new();
        for at_ns in (1..=number).map(|number| number * 60 * S) {
            relief.begin(view, Pages(1), false, table, &Waiting::default(), at_ns);
            looked.push(0);
            while relief.is_busy() {
                let mut samples = Vec::new();
                for run in relief.inspect().0 {
                    let is_charged = run.region == RegionKey(charged_of);
                    *looked.last_mut().unwrap() += u64::from(run.pages);
                    let first = u64::from(run.region.0) << 20 | run.first.0;
                    for page in 0..u64::from(run.pages) {
                        samples.push(MergedSample {
                            region: run.region,
                            page: run.first + page,
                            frame: first + page,
                            node: NodeKey(0),
                            charged: is_charged,
                            mappers: 2,
                        });
                    }
                }
                let budget = budget(std::slice::from_ref(view), u64::MAX);
                if let Some(relieved) = relief.record(charged(table), &samples, budget, Keep::Auto, at_ns) {
                    let others: BTreeSet<u32> = relieved.others.iter().map(|part| part.region.0).collect();
                    return (looked, others.into_iter().collect());
                }
            }
        }
        (looked, Vec::new())
    }

    #[test]
    fn a_survey_is_bounded_and_the_next_one_looks_at_the_rest() {
        const EACH: u64 = FOUND_MOST as u64 / 2;
        for own in [100, 2 * EACH] {
            let mut table = RegionTable::default();
            let view =
                |key, pages| RegionView { owner: OwnerKey(key), marked: Pages(pages), ..test_view(key, 0, pages) };
            let views = [view(1, own), view(2, EACH), view(3, EACH), view(4, EACH), view(5, EACH)];
            table.update(&views, 1, |view| Region::new(view, 0, false, 1));
            mark_all(&mut table);
            // All that's charged to the cgroup is kept for process 4.
            let view = limit(own + EACH - 1, EACH);
            let (looked, others) = surveys(&table, &view, 4, 4);
            assert_eq!(others, [4]);
            assert!(looked.len() >= 2, "{looked:?}");
            let most = FOUND_MOST as u64 + LOOKED_UP_AT_ONCE;
            assert!(looked.iter().all(|&pages| pages <= most), "{looked:?}");
        }
    }

    /// A process without room for its copies may map any number of the frames, any number of times.
    #[test]
    fn who_has_no_room_keeps_only_frames_that_it_maps_from_relief() {
        const EACH: u64 = 1_500;
        const MAPPINGS: u32 = 90;
        let view = |key, owner| RegionView { owner: OwnerKey(owner), marked: Pages(EACH), ..test_view(key, 0, EACH) };
        let mut views = vec![view(1, 1), view(2, 2)];
        views.extend((3..MAPPINGS).map(|key| view(key, 3)));
        let mut table = RegionTable::default();
        table.update(&views, 1, |view| Region::new(view, 0, false, 1));
        mark_all(&mut table);
        let mut shared = samples(&[(1, 0, EACH, true), (2, 0, EACH, true)]);
        for key in 3..MAPPINGS {
            for mut sample in samples(&[(key, 0, EACH, true)]) {
                sample.frame %= 30;
                shared.push(sample);
            }
        }
        let limits = [
            limit(2_000, 1_900),
            LimitView { key: LimitKey(8), owners: vec![OwnerKey(3)], left: Pages(0), ..limit(2_000, 2_000) },
        ];
        let mut relief = Relief::default();
        relief.begin(&limits[0], Pages(1), false, &table, &Waiting::default(), S);
        relief.inspect();
        let found = relief.record(charged(&table), &shared, budget(&limits, u64::MAX), Keep::Auto, S + LASTS_MOST_NS);
        let others = found.unwrap().others;
        assert_eq!(others.iter().map(|part| part.region.0).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn many_parts_that_share_frames_are_chosen_in_little_time() {
        const SHARERS: u32 = 2_000;
        const FRAMES: u64 = 64;
        let mut table = RegionTable::default();
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(FRAMES), ..test_view(key, 0, FRAMES) };
        let views: Vec<_> = (1..=SHARERS).map(view).collect();
        table.update(&views, 1, |view| Region::new(view, 0, false, 1));
        mark_all(&mut table);
        let shares: Vec<_> = (1..=SHARERS).map(|key| (key, 0, FRAMES, true)).collect();
        let view = limit(130, 100);
        let mut relief = Relief::default();
        relief.begin(&view, Pages(1), false, &table, &Waiting::default(), S);
        while !relief.inspect().0.is_empty() {}
        let before = Instant::now();
        let budget = budget(std::slice::from_ref(&view), u64::MAX);
        let found = relief.record(charged(&table), &samples(&shares), budget, Keep::Share(Permyriad(1_000)), S);
        let took = before.elapsed();
        assert_eq!(count(found.unwrap().others.len()), u64::from(SHARERS) - 1, "all but the cgroup's own");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    #[test]
    fn a_survey_ends_in_time() {
        let mut table = RegionTable::default();
        let pages = 4 * LOOKED_UP_AT_ONCE;
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(pages), ..test_view(key, 0, pages) };
        table.update(&[view(1), view(2)], 1, |view| Region::new(view, 0, false, 1));
        mark_all(&mut table);
        let (mut relief, view) = (Relief::default(), limit(640, 500));
        relief.begin(&view, Pages(1), false, &table, &Waiting::default(), S);
        for (at_ns, key) in [(2, 1), (7, 1), (11, 2)] {
            assert_eq!(relief.inspect().0[0].region, RegionKey(key));
            relief.record(charged(&table), &[], budget(std::slice::from_ref(&view), 0), Keep::Auto, at_ns * S);
        }
        assert!(!relief.is_busy());
        relief.begin(&view, Pages(1), false, &table, &Waiting::default(), 20 * S);
        let others = &relief.survey.as_ref().unwrap().others;
        let found: Vec<_> = others.iter().map(|run| (run.region.0, run.first.0, u64::from(run.pages))).collect();
        let half = pages / 2;
        assert_eq!(found, [(2, half, half), (2, 0, half)], "the half that was left comes first");
    }

    #[test]
    fn it_is_looked_again_when_it_is_worse_or_after_a_pause_that_grows() {
        let (mut relief, table, view) = (Relief::default(), table(), limit(640, 500));
        let mut looks = |over: u64, at_ns: u64| {
            let is_wanted = relief.is_wanted(&view, Pages(over));
            let begins = relief.is_due(&view, Pages(over), at_ns);
            if begins {
                relief.begin(&view, Pages(over), false, &table, &Waiting::default(), at_ns);
            }
            relief.inspect();
            relief.record(charged(&table), &[], budget(std::slice::from_ref(&view), 0), Keep::Auto, at_ns);
            (is_wanted, begins)
        };
        assert_eq!(looks(30, 10 * S), (true, true));
        assert_eq!(looks(30, 11 * S), (false, false));
        assert_eq!(looks(41, 11 * S), (true, false), "not at once");
        assert_eq!(looks(41, 12 * S), (true, true), "by more than before");
        assert_eq!(looks(41, 15 * S), (false, false));
        assert_eq!(looks(41, 16 * S), (false, true), "after a pause of 4 s");
        assert_eq!(looks(41, 23 * S), (false, false));
        relief.keep_only(&[], 23 * S);
        assert!(!relief.is_wanted(&view, Pages(1)), "its pause isn't over");
        relief.keep_only(&[], 24 * S);
        assert!(relief.is_wanted(&view, Pages(1)));
    }
}
