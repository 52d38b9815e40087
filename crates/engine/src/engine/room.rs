//! Room for the copies that programs get when they write to merged pages, on the machine and below cgroup limits. Where
//! there's too little, we stop merging, or unmerge.

use super::Engine;
use crate::headroom::{FORK_NS, Headroom};
use crate::host::{LimitView, MergedSample, Snapshot, Why};
use crate::keys::OwnerKey;
use crate::marking::extents::CUT_PAGES;
use crate::region::table::RegionTable;
use crate::region::{LeaveAlone, Region};
use crate::relief::{Charged, CopyBudget, Kept, Part, Place, Relief};
use crate::reserve::Reserve;
use crate::units::Pages;
use rustc_hash::FxHashMap;

#[derive(Debug, Default)]
pub(super) struct CopyRoom {
    /// Whether enough memory is free for copies of merged pages.
    pub reserve: Reserve,
    /// How much we may still merge below cgroup limits.
    pub headroom: Headroom,
    /// Unmerges pages for cgroups that keep too many merged pages for other cgroups.
    pub relief: Relief,
    /// Whether a cgroup may exceed its limit, and we haven't found out yet who maps the pages charged to it.
    needs_relief: bool,
}

impl Engine {
    /// Checks that there's room for copies of merged pages. Where memory is short, we stop merging.
    pub(super) fn look_at_reserve(&mut self) {
        let Snapshot { now_ns, ksm, memory, limits, .. } = &self.snapshot;
        if !self.room.reserve.is_due(*now_ns) {
            return;
        }
        self.room.reserve.count_copies(*now_ns, ksm.broken);
        let planner = self.planner();
        let worst = by_owner(&self.table, limits, |region| planner.may_return(region));
        let worst_of = |owner| worst.get(&owner).copied().unwrap_or_default();
        let returns = self.returns_at_worst();
        if self.room.reserve.look(self.config.reserve.keep, memory, returns, limits, worst_of) {
            for region in self.table.iter_mut() {
                region.hold.short = self.room.reserve.is_short_for(region.view.owner);
            }
        }
    }

    /// Works out how much we may still merge below cgroup limits. Regions that had no headroom are judged again once
    /// they have some.
    pub(super) fn look_at_headroom(&mut self) {
        let planner = self.planner();
        let Snapshot { memory, limits, .. } = &self.snapshot;
        let waiting = self.ksmd.marker.unmarking.waiting().by_region(&self.table);
        let mergeable_in = |region: &Region| {
            // Memory that waits for unmarking is still merged, though it's no longer among the marks.
            let waiting = waiting.get(&Place::of(region)).copied().unwrap_or_default();
            (planner.mergeable(region) + waiting).min(region.resident())
        };
        let mergeable = by_owner(&self.table, limits, mergeable_in);
        let inherited_in =
            |region: &Region| if self.is_only_young_child(region, FORK_NS) { mergeable_in(region) } else { Pages(0) };
        let inherited = by_owner(&self.table, limits, inherited_in);
        let by_marks = self.by_marks();
        self.room.headroom.set_by_marks(by_marks && self.snapshot.ksm.merged() > Pages(0));
        self.room.headroom.look(self.config.reserve.keep, memory.total, limits, &mergeable, &inherited);
        if by_marks {
            self.empty_overfull_limits();
        }
        self.look_for_relief();
        let mut is_merging = self.judge_full_again();
        is_merging |= self.ksmd.scheduler.is_busy() || self.table.iter().any(|region| region.life.is_worth_marking());
        if !is_merging && self.by_marks() {
            self.room.headroom.lend(true);
            let is_wanted = self.judge_full_again();
            self.room.headroom.lend(is_wanted);
        }
    }

    /// If a limit keeps out a process that has something to merge, or has memory that may be merged already, starts to
    /// unmerge the excess below that limit.
    fn empty_overfull_limits(&mut self) {
        for region in self.table.iter() {
            let Some(key) = self.room.headroom.keeps_out(region.view.owner) else { continue };
            let wants = region.hold.full == Some(key) || self.planner().mergeable(region) > Pages(0);
            if wants && self.room.headroom.empty(key) {
                self.room.relief.forget(key);
            }
        }
    }

    /// Judges regions again that had no headroom and now have some. Returns whether there are any.
    fn judge_full_again(&mut self) -> bool {
        let planner = self.planner();
        let now_ns = self.snapshot.now_ns;
        let top = self.ladder.levels();
        let mut any = false;
        for region in self.table.iter_mut().filter(|region| region.hold.full.is_some()) {
            match self.room.headroom.of(region.view.owner) {
                Some((limit, left)) if left < CUT_PAGES => region.hold.full = Some(limit),
                _ if region.life.is_judged() => {
                    planner.judge_again(region, now_ns, top);
                    any = true;
                }
                _ => {}
            }
        }
        any
    }

    /// If a cgroup may exceed its limit, starts to look for pages that are charged to it but that other cgroups map.
    fn look_for_relief(&mut self) {
        let Snapshot { now_ns, ksm, limits, .. } = &self.snapshot;
        self.room.needs_relief = false;
        if self.ksmd.marker.unmarking.take_missed() {
            self.room.relief.miss();
        }
        if !ksm.ours || ksm.merged() == Pages(0) {
            return;
        }
        let mut exceeded = self.room.headroom.exceeded();
        self.room.relief.keep_only(&exceeded, *now_ns);
        // Each limit gets its turn, even if others are exceeded by more.
        exceeded.sort_by_key(|&(key, _)| self.room.relief.looked_ns(key));
        for (key, over) in exceeded {
            let Some(view) = limits.iter().find(|view| view.key == key) else { continue };
            self.room.needs_relief |= self.room.relief.is_wanted(view, over);
            if !self.ksmd.marker.unmarking.is_giving_room() && self.room.relief.is_due(view, over, *now_ns) {
                let waiting = self.ksmd.marker.unmarking.waiting();
                let empties = self.room.headroom.is_to_be_emptied(key);
                self.room.relief.begin(view, over, empties, &self.table, &waiting, *now_ns);
            }
        }
    }

    /// Whether ksmd may not merge now, because a cgroup may already keep too many merged pages for other cgroups.
    pub(super) fn may_not_merge(&self) -> bool {
        self.room.needs_relief || self.room.relief.is_busy() || self.ksmd.marker.unmarking.is_relieving()
    }

    /// Unmerges regions that map pages charged to a cgroup without headroom, if the copies fit on the machine and below
    /// the limits of the regions' own processes.
    pub(super) fn relieve(&mut self, merged: &[MergedSample]) {
        let Snapshot { now_ns, memory, limits, .. } = &self.snapshot;
        let keep = self.config.reserve.keep;
        let spare = self.room.reserve.spare(memory);
        let budget = CopyBudget { spare, limits, taken: FxHashMap::default() };
        let by_marks = self.by_marks();
        let memory = Charged { table: &self.table, waiting: &self.ksmd.marker.unmarking.waiting(), by_marks };
        let relieved = self.room.relief.record(memory, merged, budget, keep, *now_ns);
        if let Some(Kept { limit, pages, is_too_large }) = self.room.relief.take_kept() {
            self.room.headroom.set_kept(limit, pages);
            if is_too_large {
                self.room.headroom.give_up(limit);
            }
        }
        let Some(relieved) = relieved else { return };
        for Part { region, first, pages } in relieved.others {
            let Some(region) = self.table.at_mut(region, first) else { continue };
            self.ksmd.marker.unmarking.hurry(region.view.key, first, first + pages.0);
            // Another program's marks aren't ours to undo.
            if !by_marks || !region.marks.spans.is_empty() {
                self.ksmd.marker.take_apart(region, first, pages, *now_ns, Why::Charge, LeaveAlone::Relieved);
            }
        }
        if by_marks {
            for place in relieved.own {
                if let Some(region) = self.table.at_mut(place.region, place.first) {
                    self.ksmd.marker.give_up(region, relieved.limit);
                }
            }
        }
    }

    /// Unmerges memory step by step if memory is short and the config allows it.
    pub(super) fn take_back(&mut self) {
        if !self.config.reserve.take_back || !self.snapshot.ksm.ours {
            return;
        }
        let Snapshot { now_ns, memory, limits, .. } = &self.snapshot;
        if let Some(step) = self.room.reserve.step(*now_ns, memory, limits) {
            self.ksmd.marker.take_back(&mut self.table, *now_ns, &step);
        }
    }
}

/// Sums up pages of each process's regions, if there are limits to compare them with.
fn by_owner(
    table: &RegionTable,
    limits: &[LimitView],
    pages_of: impl Fn(&Region) -> Pages,
) -> FxHashMap<OwnerKey, Pages> {
    let mut sums: FxHashMap<OwnerKey, Pages> = FxHashMap::default();
    if limits.is_empty() {
        return sums;
    }
    for region in table.iter() {
        *sums.entry(region.view.owner).or_default() += pages_of(region);
    }
    sums
}
