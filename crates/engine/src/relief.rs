//! Relief for a cgroup that keeps more merged pages for others than its limit has headroom for.
//!
//! If only merging added pages, [`crate::headroom`] would prevent that. But programs may grow after we merged their
//! pages, or somebody may lower a limit. Unmerging the cgroup's own pages would make things worse: it's charged for its
//! new copies at once, and the kept ones stay for the others. So we give the others copies of their own, charged to
//! them, if they have room.
//!
//! Only in this case do we look up who maps which frame, and which frames are charged to the cgroup. So we know
//! exactly:
//!
//! ```text
//! without merging = in use - frames charged to it + merged pages of its processes
//! at worst        = without merging + frames charged to it that others map
//! ```
//!
//! If a cgroup would exceed its limit even without merging, we can't help: its programs can't all have the memory they
//! want, with or without us.
//!
//! Some of its own pages are marked but not merged, because they were written. If they merged again, they could add to
//! the pages that the cgroup keeps. We unmark them, which costs nothing, and mark them again when there's headroom.

use crate::host::{LimitView, MergedSample, PageRun, RegionView};
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::marking::marker::SPLIT_FROM;
use crate::marking::waiting::{Wait, Waiting};
use crate::placement::inventory::{may_be_merged_anywhere, merged_runs, take_pages};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::reserve::Keep;
use crate::units::{EXTENT_PAGES, Pages, Vpn, count};
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};

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

/// We look up at most this many pages for one cgroup, and in one cycle.
const LOOKED_UP_MOST: u64 = 1 << 22;
const LOOKED_UP_AT_ONCE: u64 = 1 << 16;
/// The first pause between two looks, nanoseconds. It doubles while they find nothing to do.
const PAUSE_NS: u64 = 2_000_000_000;
const PAUSE_MOST_NS: u64 = 600_000_000_000;
/// We look again after only `PAUSE_NS` if things got worse: a cgroup could now exceed its limit by more than at the
/// last look, and the difference is at least one part in this many of the limit.
const WORSE: u64 = 64;

/// A region, by its mapping and its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub region: RegionKey,
    pub first: Vpn,
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

/// What to unmerge for a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relieved {
    /// The limit that needs relief.
    pub limit: LimitKey,
    /// Parts of other processes' regions with pages that are charged to the cgroup.
    pub others: Vec<Part>,
    /// The cgroup's own regions with many marked pages that aren't merged.
    pub own: Vec<Place>,
}

/// Which frames are charged to one cgroup, and who maps them.
#[derive(Debug)]
struct Survey {
    limit: LimitKey,
    members: FxHashSet<OwnerKey>,
    ahead: VecDeque<PageRun>,
    /// Merged pages of the cgroup's processes, by region.
    merged: FxHashMap<Place, u64>,
    /// Merged frames that are charged to the cgroup.
    frames: FxHashSet<u64>,
    /// Charged frames that other processes map, and where.
    outside: Vec<(Part, u64)>,
    /// Other processes' merged pages, whichever cgroup they're charged to.
    copies: FxHashMap<Part, (OwnerKey, Pages)>,
    /// What waits for unmarking, and how many of the cgroup's own pages there are merged. `merged` is without these.
    waiting: Waiting,
    merged_waiting: Pages,
    /// Charged frames that other processes map in spans that we couldn't unmark.
    stuck: FxHashSet<u64>,
}

#[derive(Debug, Default)]
pub struct Relief {
    survey: Option<Survey>,
    /// When we may look again if nothing has got worse, nanoseconds.
    next_ns: u64,
    pause_ns: u64,
    /// Whether this cycle's plan looks pages up.
    is_asking: bool,
    looked: FxHashMap<LimitKey, Look>,
}

/// The last look at a limit.
#[derive(Clone, Copy, Debug)]
struct Look {
    at_ns: u64,
    /// By how much the limit could be exceeded then.
    over: Pages,
    /// Whether something that the look chose couldn't be unmarked.
    was_in_vain: bool,
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

    /// Forgets limits that can't be exceeded any more.
    pub fn keep_only(&mut self, exceeded: &[(LimitKey, Pages)]) {
        self.looked.retain(|key, _| exceeded.iter().any(|(exceeded, _)| exceeded == key));
    }

    /// Whether to look up who maps a cgroup's charged pages: we haven't done so yet, or its limit could now be exceeded
    /// by more than at the last look.
    pub fn is_wanted(&self, view: &LimitView, over: Pages) -> bool {
        let Some(last) = self.looked.get(&view.key) else { return true };
        last.was_in_vain || over.0 > last.over.0 + view.limit.0 / WORSE
    }

    /// Something that we chose can't be unmarked now. Merging has to wait until we've looked again, at all limits,
    /// because we don't know which of them it was for.
    pub fn miss(&mut self) {
        for look in self.looked.values_mut() {
            look.was_in_vain = true;
        }
    }

    /// If it's time, begins to look up who maps the pages charged to a cgroup that may exceed its limit by `over`.
    pub fn begin(&mut self, view: &LimitView, over: Pages, table: &RegionTable, waiting: Waiting, now_ns: u64) {
        if self.is_busy() {
            return;
        }
        let looked_ns = self.looked.get(&view.key).map_or(0, |look| look.at_ns);
        let from_ns = if self.is_wanted(view, over) { looked_ns + PAUSE_NS } else { self.next_ns };
        if looked_ns > 0 && now_ns < from_ns {
            return;
        }
        self.looked.insert(view.key, Look { at_ns: now_ns, over, was_in_vain: false });
        let mut ahead = merged_runs(table);
        for Wait { span, .. } in waiting.iter() {
            // If a region may be merged anywhere, we look up all of it anyway.
            if let Some(region) = table.at(span.region, span.first).filter(|region| !may_be_merged_anywhere(region)) {
                ahead.push_front(region.run(span.first, span.pages));
            }
        }
        let mut left = LOOKED_UP_MOST;
        ahead.retain(|run| {
            let fits = u64::from(run.pages) <= left;
            left -= if fits { u64::from(run.pages) } else { 0 };
            fits
        });
        self.survey = Some(Survey {
            limit: view.key,
            members: view.owners.iter().copied().collect(),
            ahead,
            merged: FxHashMap::default(),
            frames: FxHashSet::default(),
            outside: Vec::new(),
            copies: FxHashMap::default(),
            waiting,
            merged_waiting: Pages(0),
            stuck: FxHashSet::default(),
        });
    }

    /// The pages to look up now, and the limit whose cgroup they may be charged to.
    pub fn inspect(&mut self) -> (Vec<PageRun>, Option<LimitKey>) {
        let Some(survey) = &mut self.survey else { return (Vec::new(), None) };
        self.is_asking = true;
        (take_pages(&mut survey.ahead, LOOKED_UP_AT_ONCE), Some(survey.limit))
    }

    /// Records pages that we looked up. After the last one, returns the parts to unmerge. We take parts where others
    /// hold the most pages charged to the cgroup and have room for the copies, until enough pages come free to restore
    /// the cgroup's reserve.
    pub fn record(
        &mut self,
        table: &RegionTable,
        merged: &[MergedSample],
        budget: CopyBudget<'_>,
        keep: Keep,
        now_ns: u64,
    ) -> Option<Relieved> {
        self.is_asking = false;
        let survey = self.survey.as_mut()?;
        let mut last = None;
        for sample in merged {
            last = table.near(last, sample.region, sample.page);
            if let Some(region) = last {
                survey.add(region, sample);
            }
        }
        if !survey.ahead.is_empty() {
            return None;
        }
        let survey = self.survey.take()?;
        let view = budget.limits.iter().find(|view| view.key == survey.limit);
        let found = view.and_then(|view| survey.relieve(view, keep.below(view.limit), table, budget));
        self.pause_ns = if found.is_none() { (self.pause_ns * 2).clamp(PAUSE_NS, PAUSE_MOST_NS) } else { PAUSE_NS };
        self.next_ns = now_ns + self.pause_ns;
        found
    }
}

fn place_of(region: &Region) -> Place {
    Place { region: region.view.key, first: region.view.first }
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
    fn add(&mut self, region: &Region, sample: &MergedSample) {
        let wait = self.waiting.at(region.view.key, sample.page);
        if sample.charged {
            self.frames.insert(sample.frame);
        }
        if self.members.contains(&region.view.owner) {
            match wait {
                Some(_) => self.merged_waiting += Pages(1),
                None => *self.merged.entry(place_of(region)).or_default() += 1,
            }
            return;
        }
        if wait.is_some_and(|wait| wait.is_stuck) {
            if sample.charged {
                self.stuck.insert(sample.frame);
            }
            return;
        }
        let part = part_of(region, sample.page);
        let (_, copies) = self.copies.entry(part).or_insert((region.view.owner, Pages(0)));
        *copies += Pages(1);
        if sample.charged {
            self.outside.push((part, sample.frame));
        }
    }

    /// How many of the cgroup's own pages wait for unmarking, and could be merged until then.
    fn unmerged_waiting(&self, table: &RegionTable) -> Pages {
        let mut pages = Pages(0);
        for Wait { span, .. } in self.waiting.iter() {
            let region = table.at(span.region, span.first);
            if let Some(region) = region.filter(|region| self.members.contains(&region.view.owner)) {
                pages += span.pages.min(region.resident());
            }
        }
        pages.saturating_sub(self.merged_waiting)
    }

    fn relieve(
        &self,
        view: &LimitView,
        reserve: Pages,
        table: &RegionTable,
        budget: CopyBudget<'_>,
    ) -> Option<Relieved> {
        let used = view.limit.saturating_sub(view.left);
        let merged = Pages(self.merged.values().sum()) + self.merged_waiting;
        let without_merging = (used + merged).saturating_sub(Pages(count(self.frames.len())));
        if without_merging > view.limit {
            return None;
        }
        let mut held: FxHashSet<u64> = self.outside.iter().map(|&(_, frame)| frame).collect();
        held.extend(&self.stuck);
        let mut at_worst = without_merging + Pages(count(held.len())) + self.unmerged_waiting(table);
        let goal = view.limit.saturating_sub(reserve);
        let mut relieved = Relieved { limit: self.limit, others: Vec::new(), own: Vec::new() };
        if at_worst > view.limit {
            let freed = self.choose_others(at_worst.saturating_sub(goal), budget, &mut relieved.others);
            at_worst = at_worst.saturating_sub(freed);
        }
        self.choose_own(table, view.limit.saturating_sub(at_worst), goal.saturating_sub(at_worst), &mut relieved.own);
        (!relieved.others.is_empty() || !relieved.own.is_empty()).then_some(relieved)
    }

    /// Chooses parts of others' regions until `lacking` frames come free. Returns how many do. A frame comes free once
    /// nobody outside maps it, so we take all parts that share frames together.
    fn choose_others(&self, lacking: Pages, mut budget: CopyBudget<'_>, chosen: &mut Vec<Part>) -> Pages {
        let mut frames_in: FxHashMap<Part, Vec<u64>> = FxHashMap::default();
        let mut parts_with: FxHashMap<u64, Vec<Part>> = FxHashMap::default();
        for &(part, frame) in &self.outside {
            if self.stuck.contains(&frame) {
                continue;
            }
            frames_in.entry(part).or_default().push(frame);
            parts_with.entry(frame).or_default().push(part);
        }
        let mut by_size: Vec<Part> = frames_in.keys().copied().collect();
        by_size.sort_by_key(|part| (Reverse(frames_in[part].len()), *part));
        let mut taken: BTreeSet<Part> = BTreeSet::new();
        let mut free: FxHashSet<u64> = FxHashSet::default();
        for part in by_size {
            if Pages(count(free.len())) >= lacking {
                break;
            }
            let together: BTreeSet<Part> =
                frames_in[&part].iter().flat_map(|frame| parts_with[frame].clone()).collect();
            let mut rest = budget.clone();
            let fits = together.difference(&taken).all(|part| {
                let (owner, copies) = self.copies[part];
                rest.take(owner, copies)
            });
            if !fits {
                continue;
            }
            budget = rest;
            taken.extend(&together);
            for part in together {
                let frames = frames_in[&part].iter().copied();
                free.extend(frames.filter(|frame| parts_with[frame].iter().all(|part| taken.contains(part))));
            }
        }
        chosen.extend(taken);
        Pages(count(free.len()))
    }

    /// If more than `most` of the cgroup's pages are marked and not merged, chooses its regions until no more than
    /// `goal` are left.
    fn choose_own(&self, table: &RegionTable, most: Pages, goal: Pages, chosen: &mut Vec<Place>) {
        let mut unmerged = Pages(0);
        let mut regions: Vec<(Pages, Place)> = Vec::new();
        for region in table.iter().filter(|region| self.members.contains(&region.view.owner)) {
            let place = place_of(region);
            let merged = Pages(self.merged.get(&place).copied().unwrap_or_default());
            let pages = region.mergeable().saturating_sub(merged);
            unmerged += pages;
            if pages > Pages(0) && !region.marks.spans.is_empty() {
                regions.push((pages, place));
            }
        }
        if unmerged <= most {
            return;
        }
        regions.sort_by_key(|&(pages, place)| (Reverse(pages), place));
        for (pages, place) in regions {
            if unmerged <= goal {
                break;
            }
            unmerged = unmerged.saturating_sub(pages);
            chosen.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::NodeKey;
    use crate::region::test_view;
    use crate::units::Permyriad;

    const S: u64 = 1_000_000_000;

    /// Regions 1 to 4 of 100 pages, each of the process with its number, all marked.
    fn table() -> RegionTable {
        let mut table = RegionTable::default();
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(100), ..test_view(key, 0, 100) };
        table.update(&[view(1), view(2), view(3), view(4)], 1, |view| Region::new(view, 0, false, 1));
        for region in table.iter_mut() {
            let whole = crate::marking::extents::Candidate {
                first: Vpn(0),
                pages: Pages(100),
                resident: Pages(100),
                duplicate: Pages(100),
            };
            region.marks.add(whole);
        }
        table
    }

    /// A limit on process 1.
    fn limit(limit: u64, used: u64) -> LimitView {
        let (limit, left) = (Pages(limit), Pages(limit - used));
        LimitView { key: LimitKey(7), limit, left, owners: vec![OwnerKey(1)], read_ns: 0 }
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

    fn budget(limits: &[LimitView], spare: u64) -> CopyBudget<'_> {
        CopyBudget { spare: Pages(spare), limits, taken: FxHashMap::default() }
    }

    /// The regions to unmerge, as process numbers: other processes', and the cgroup's own.
    fn relieved(view: &LimitView, shares: &[(u32, u64, u64, bool)]) -> Option<(Vec<u32>, Vec<u32>)> {
        let (mut relief, table) = (Relief::default(), table());
        relief.begin(view, Pages(1), &table, Waiting::default(), S);
        assert_eq!(relief.inspect().1, Some(LimitKey(7)));
        let keep = Keep::Share(Permyriad(1_000));
        let found = relief.record(&table, &samples(shares), budget(std::slice::from_ref(view), u64::MAX), keep, S)?;
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
        assert_eq!(relieved(&limit(130, 129), &[(2, 0, 40, true)]), Some((vec![], vec![1])));
    }

    #[test]
    fn only_extents_with_pages_charged_to_the_cgroup_are_taken_apart() {
        let mut table = RegionTable::default();
        let view = |key| RegionView { owner: OwnerKey(key), marked: Pages(4_096), ..test_view(key, 100, 4_096) };
        table.update(&[view(1), view(2), view(3)], 1, |view| Region::new(view, 0, false, 1));
        // The cgroup keeps 200 pages for process 2, and 50 of them for process 3 as well. Process 2 keeps 1,000 itself.
        let shares = [(1, 100, 1_200, true), (2, 700, 200, true), (3, 700, 50, true), (2, 2_000, 1_000, false)];
        let parts = |spare| {
            let (mut relief, view) = (Relief::default(), limit(1_300, 1_200));
            relief.begin(&view, Pages(1), &table, Waiting::default(), S);
            relief.inspect();
            let budget = budget(std::slice::from_ref(&view), spare);
            let keep = Keep::Share(Permyriad(0));
            let found = relief.record(&table, &samples(&shares), budget, keep, S).unwrap_or_else(|| Relieved {
                limit: view.key,
                others: Vec::new(),
                own: Vec::new(),
            });
            found.others.into_iter().map(|part| (part.region.0, part.first.0, part.pages.0)).collect::<Vec<_>>()
        };
        assert_eq!(parts(1_000), [(2, 512, 512), (3, 512, 512)], "both must let go");
        assert_eq!(parts(100), [], "the copies don't fit");
    }

    #[test]
    fn it_is_looked_again_when_it_is_worse_or_after_a_pause_that_grows() {
        let (mut relief, table, view) = (Relief::default(), table(), limit(640, 500));
        let mut looks = |over: u64, at_ns: u64| {
            let is_wanted = relief.is_wanted(&view, Pages(over));
            relief.begin(&view, Pages(over), &table, Waiting::default(), at_ns);
            let begins = relief.is_busy();
            relief.inspect();
            relief.record(&table, &[], budget(std::slice::from_ref(&view), 0), Keep::Auto, at_ns);
            (is_wanted, begins)
        };
        assert_eq!(looks(30, 10 * S), (true, true));
        assert_eq!(looks(30, 11 * S), (false, false));
        assert_eq!(looks(41, 11 * S), (true, false), "not at once");
        assert_eq!(looks(41, 12 * S), (true, true), "by more than before");
        assert_eq!(looks(41, 15 * S), (false, false));
        assert_eq!(looks(41, 16 * S), (false, true), "after a pause of 4 s");
        assert_eq!(looks(41, 23 * S), (false, false));
        relief.keep_only(&[]);
        assert!(relief.is_wanted(&view, Pages(1)));
    }
}
