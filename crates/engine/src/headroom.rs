//! Headroom below cgroup memory limits, for merged pages that stay charged there.
//!
//! A merged page stays charged to one cgroup: the one whose copy was kept. When that cgroup's programs then write to
//! their pages, their new copies come on top of the kept ones that other cgroups still map. So the kernel may kill a
//! program that it wouldn't have killed without merging. With ksmd nobody chooses which copy is kept, and a charge
//! stays as long as anybody maps the page. So we count every page that may be merged as if its copy were kept and never
//! came free:
//!
//! ```text
//! in use + pages that may be merged <= limit - reserve
//! ```
//!
//! The kernel keeps this true even if we don't watch: a write to a merged page moves one page from the second term to
//! the first, and nothing is merged while ksmd rests. So pagefold may safely be stopped or killed after merging. Only a
//! growing program or a lowered limit changes that, and [`crate::relief`] is for those cases.
//!
//! Merged zeros count, too. The kernel's zero page is charged to nobody, but other memory may have filled the freed
//! room by the time programs write to their zeros.
//!
//! A child maps its parent's merged pages, too, so right after a fork the sum counts them twice and may be above the
//! limit. A child that only reads, such as one that saves its parent's memory to a disk, needs no room: if just one of
//! the two writes a page, the cgroup is charged for one copy, as it would be without merging. If both write, pages kept
//! for others come on top of both copies. So while the child is young ([`FORK_NS`]) and the only young one, there's no
//! headroom for more merging, but we only unmerge others' memory once copies of the parent's merged pages no longer
//! fit. If both write everything within the seconds that unmerging takes, the limit can be exceeded by the pages that
//! are kept for others.
//!
//! One case needs no headroom: if a limit applies to every process in scope, copies of merged pages are charged where
//! the pages were charged before, so the cgroup never uses more than it would without merging. This exception ends once
//! a process outside the limit has had memory that may be merged: otherwise each restart of such processes would lift
//! the bound. A process that was outside only until it was moved below the limit doesn't count. When the exception
//! ends, more may be merged below the limit than the sum allows, and processes outside could map all of these pages. On
//! request, processes outside get none of them. With ksmd, nobody outside is merged until we unmerge these pages, which
//! we do once there's something to merge outside. We can't unmerge what another program, or an earlier run, has marked.

use crate::host::LimitView;
use crate::keys::{LimitKey, OwnerKey};
use crate::placement::placer::Stays;
use crate::reserve::Keep;
use crate::units::Pages;
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::slice;

/// For this long after a fork, nanoseconds, we don't unmerge others' memory because of pages that a child shares with
/// its parent: most children that never write them have ended by then.
pub const FORK_NS: u64 = 60_000_000_000;

/// The room left below one limit.
#[derive(Clone, Copy, Debug)]
struct LimitRoom {
    /// When we read the limit for these figures ([`LimitView::read_ns`]).
    read_ns: u64,
    /// How many more pages we may merge.
    left: Pages,
    /// How many more pages we may merge while half of the reserve is lent ([`Headroom::lend`]).
    lent: Pages,
    /// By how much we'd exceed a limit that kills if all pages that may be merged, apart from those of young children,
    /// were charged there for ever. If the cgroup keeps pages for others, a part of the reserve has to be left
    /// ([`cushion`]). A limit that we haven't read yet allows no more merging, but doesn't count as exceeded:
    /// otherwise, anybody could keep ksmd waiting with cgroups that take long to read.
    over: Pages,
    /// At most this many merged pages are charged to the cgroup for others. Its own programs may have rewritten theirs.
    kept: Pages,
    /// Whether a process outside this limit has had memory that may be merged since we began to bound merging below it.
    is_shared: bool,
    /// Whether more was merged below this limit than fits, while it applied to every process in scope.
    is_overfull: bool,
    /// Whether to unmerge this excess, because there's something to merge outside.
    is_to_be_emptied: bool,
}

impl LimitRoom {
    fn take(&mut self, pages: Pages) {
        self.left = self.left.saturating_sub(pages);
        self.lent = self.lent.saturating_sub(pages);
        self.kept += pages;
    }
}

/// How many more pages of each process we may merge.
#[derive(Clone, Debug, Default)]
pub struct Headroom {
    limits: BTreeMap<LimitKey, LimitRoom>,
    of_owner: FxHashMap<OwnerKey, Vec<LimitKey>>,
    /// Limits below which more was merged than fits, while they applied to every process in scope.
    overfull: Vec<LimitKey>,
    /// Whether ksmd merges whatever is marked, and has merged something.
    by_marks: bool,
    /// When we read the limits that apply to pages that may be merged, nanoseconds: the oldest of these times. `None`
    /// if there are no such limits.
    read_ns: Option<u64>,
    lends: bool,
}

impl Headroom {
    /// Sets whether we may use half of the reserve, too, until the next [`Self::look`]. If a page merges with an
    /// already merged one, its cgroup pays nothing, and the reserve is whole again after two scans.
    pub fn lend(&mut self, lends: bool) {
        self.lends = lends;
    }

    /// Recomputes the headroom below every limit that was read since the last call. `mergeable` are the pages that may
    /// be merged already, of every process in scope, `inherited` are those among them that a young child likely has in
    /// common with its parent, and `total` is the machine's memory.
    pub fn look(
        &mut self,
        keep: Keep,
        total: Pages,
        limits: &[LimitView],
        mergeable: &FxHashMap<OwnerKey, Pages>,
        inherited: &FxHashMap<OwnerKey, Pages>,
    ) {
        let before = std::mem::take(&mut self.limits);
        self.of_owner.clear();
        self.overfull.clear();
        self.lends = false;
        self.read_ns = None;
        let held_by_all: Pages = mergeable.values().copied().sum();
        for view in limits {
            let known = before.get(&view.key).copied();
            let was_shared = known.is_some_and(|room| room.is_shared);
            if !was_shared && covers(view, mergeable) || total > Pages(0) && view.limit >= total {
                continue;
            }
            let held = sum_of(mergeable, view);
            let is_shared = was_shared || held < held_by_all;
            if held > Pages(0) && view.limit > Pages(0) {
                self.read_ns = Some(self.read_ns.map_or(view.read_ns, |read_ns| read_ns.min(view.read_ns)));
            }
            let reserve = keep.below(view.limit);
            // When we begin, others may map any merged page.
            let kept = known.map_or(held_by_all, |room| room.kept);
            let over = view.kills.map(|kills| {
                let keeps = held + kept > Pages(0);
                let wanted = held + if keeps { cushion(keep.below(kills.limit)) } else { Pages(0) };
                wanted.saturating_sub(sum_of(inherited, view) + kills.left)
            });
            let now = LimitRoom {
                read_ns: view.read_ns,
                left: view.left.saturating_sub(held + reserve),
                lent: view.left.saturating_sub(held + Pages(reserve.0 / 2)),
                over: over.unwrap_or_default(),
                kept,
                is_shared,
                is_overfull: known.map_or(!is_shared, |room| room.is_overfull) && over.unwrap_or_default() > Pages(0),
                is_to_be_emptied: known.is_some_and(|room| room.is_to_be_emptied),
            };
            let room = match known {
                // What we've used up since we read the limit stays used up.
                Some(room) if room.read_ns == view.read_ns => {
                    LimitRoom { left: now.left.min(room.left), lent: now.lent.min(room.lent), over: room.over, ..now }
                }
                _ => now,
            };
            if room.is_overfull {
                self.overfull.push(view.key);
            }
            self.limits.insert(view.key, room);
            for &owner in &view.owners {
                self.of_owner.entry(owner).or_default().push(view.key);
            }
        }
    }

    /// The limit that leaves a process the least headroom, and how many of its pages we may still merge. `None`: any
    /// number.
    pub fn of(&self, owner: OwnerKey) -> Option<(LimitKey, Pages)> {
        self.of_each(slice::from_ref(&owner))
    }

    /// The limit that leaves these processes the least headroom, and how many pages of each we may still merge. `None`:
    /// any number.
    pub fn of_each(&self, owners: &[OwnerKey]) -> Option<(LimitKey, Pages)> {
        if self.by_marks {
            if let Some(key) = owners.iter().find_map(|&owner| self.keeps_out(owner)) {
                return Some((key, Pages(0)));
            }
        }
        let mut least: Option<(LimitKey, Pages)> = None;
        for (key, processes) in self.count(owners) {
            let Some(room) = self.limits.get(&key) else { continue };
            let left = Pages(self.left(room).0 / processes);
            if least.is_none_or(|(_, least)| left < least) {
                least = Some((key, left));
            }
        }
        least
    }

    /// How many of these processes are below each limit.
    fn count(&self, owners: &[OwnerKey]) -> BTreeMap<LimitKey, u64> {
        let mut counts = BTreeMap::new();
        for owner in owners {
            let Some(keys) = self.of_owner.get(owner) else { continue };
            for &key in keys {
                *counts.entry(key).or_default() += 1;
            }
        }
        counts
    }

    fn left(&self, room: &LimitRoom) -> Pages {
        if self.lends { room.lent } else { room.left }
    }

    /// The limit that leaves a process no headroom at all.
    pub fn full(&self, owner: OwnerKey) -> Option<LimitKey> {
        match self.of(owner) {
            Some((limit, Pages(0))) => Some(limit),
            _ => None,
        }
    }

    /// Whether a process is below a limit, so that its cgroup needs headroom to keep merged pages for other cgroups.
    pub fn is_limited(&self, owner: OwnerKey) -> bool {
        self.of_owner.contains_key(&owner)
    }

    /// When we read the limits that apply to pages that may be merged, nanoseconds: the oldest of these times. `None`
    /// if there are no such limits.
    pub fn read_ns(&self) -> Option<u64> {
        self.read_ns
    }

    /// Notes how many merged pages are charged to a limit's cgroup for others.
    pub fn set_kept(&mut self, key: LimitKey, kept: Pages) {
        if let Some(room) = self.limits.get_mut(&key) {
            room.kept = kept;
        }
    }

    /// The limit that keeps a process out, if any. It doesn't apply to this process, but more was merged below it than
    /// fits while it applied to all in scope: ksmd could have this process map all of these pages.
    pub fn keeps_out(&self, owner: OwnerKey) -> Option<LimitKey> {
        self.overfull.iter().copied().find(|&key| !self.is_below(owner, key))
    }

    /// Whether a limit keeps `owner` from mapping merged pages of process `of` (see [`Self::keeps_out`]).
    pub fn keeps_apart(&self, owner: OwnerKey, of: OwnerKey) -> bool {
        self.overfull.iter().any(|&key| !self.is_below(owner, key) && self.is_below(of, key))
    }

    fn is_below(&self, owner: OwnerKey, key: LimitKey) -> bool {
        self.of_owner.get(&owner).is_some_and(|keys| keys.contains(&key))
    }

    /// Sets whether ksmd merges whatever is marked, and has merged something. Then processes that a limit keeps out
    /// have no headroom.
    pub fn set_by_marks(&mut self, by_marks: bool) {
        self.by_marks = by_marks;
    }

    /// Notes that we have to unmerge the excess below a limit. Returns whether that's new.
    pub fn empty(&mut self, key: LimitKey) -> bool {
        let Some(room) = self.limits.get_mut(&key) else { return false };
        room.is_shared = true;
        !std::mem::replace(&mut room.is_to_be_emptied, true)
    }

    /// Notes that a limit is exceeded even without merging, so that it no longer keeps anybody out.
    pub fn give_up(&mut self, key: LimitKey) {
        if let Some(room) = self.limits.get_mut(&key) {
            room.is_overfull = false;
        }
        self.overfull.retain(|&overfull| overfull != key);
    }

    /// Whether to unmerge the excess below a limit.
    pub fn is_to_be_emptied(&self, key: LimitKey) -> bool {
        self.limits.get(&key).is_some_and(|room| room.is_overfull && room.is_to_be_emptied)
    }

    /// The limits that we'd exceed if all pages that may be merged were charged there for ever, and by how much, the
    /// worst first.
    pub fn exceeded(&self) -> Vec<(LimitKey, Pages)> {
        let mut exceeded = Vec::new();
        for (&key, room) in &self.limits {
            if room.over > Pages(0) {
                exceeded.push((key, room.over));
            }
        }
        exceeded.sort_by_key(|&(key, over)| (Reverse(over), key));
        exceeded
    }

    /// Decides which of two equal pages to keep, `chosen` if possible. The kept page stays charged to its process's
    /// cgroup, whose headroom we use up. The other page needs none, because its charge ends.
    pub fn stays(&mut self, chosen: Stays, known: OwnerKey, new: OwnerKey) -> Stays {
        let candidates = match chosen {
            Stays::Known => [(Stays::Known, known), (Stays::New, new)],
            Stays::New => [(Stays::New, new), (Stays::Known, known)],
            Stays::Both => return Stays::Both,
        };
        for (stays, owner) in candidates {
            if self.take_page(owner) {
                return stays;
            }
        }
        Stays::Both
    }

    /// Uses up headroom for one page of a process. False if there's none.
    pub fn take_page(&mut self, owner: OwnerKey) -> bool {
        self.take_pages(slice::from_ref(&owner))
    }

    /// Uses up headroom for one page of each of these processes, or for none if one of them has too little.
    pub fn take_pages(&mut self, owners: &[OwnerKey]) -> bool {
        let needed = self.count(owners);
        for (key, &pages) in &needed {
            let Some(room) = self.limits.get(key) else { continue };
            if self.left(room) < Pages(pages) {
                return false;
            }
        }
        for (key, pages) in needed {
            if let Some(room) = self.limits.get_mut(&key) {
                room.take(Pages(pages));
            }
        }
        true
    }

    /// Uses up headroom for pages of a process.
    pub fn take(&mut self, owner: OwnerKey, pages: Pages) {
        for key in self.of_owner.get(&owner).into_iter().flatten() {
            if let Some(room) = self.limits.get_mut(key) {
                room.take(pages);
            }
        }
    }
}

/// A cgroup that keeps pages for others must have this much of its limit's reserve left. If it has less, we unmerge
/// them, before a program that grows reaches the limit. We merge up to half of the reserve.
pub(crate) fn cushion(reserve: Pages) -> Pages {
    Pages(reserve.0 / 4)
}

/// How many of these pages are in processes that a limit applies to.
fn sum_of(pages: &FxHashMap<OwnerKey, Pages>, view: &LimitView) -> Pages {
    view.owners.iter().filter_map(|owner| pages.get(owner)).copied().sum()
}

/// Whether a limit applies to every process in scope, so that nobody outside can share a page charged to it.
fn covers(view: &LimitView, scope: &FxHashMap<OwnerKey, Pages>) -> bool {
    if view.owners.len() < scope.len() {
        return false;
    }
    let owners: FxHashSet<OwnerKey> = view.owners.iter().copied().collect();
    scope.keys().all(|owner| owners.contains(owner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::KillLimit;
    use crate::units::Permyriad;
    use std::slice::from_ref;

    fn view(key: u32, limit: u64, left: u64, owners: &[u32], read_ns: u64) -> LimitView {
        let owners = owners.iter().map(|&owner| OwnerKey(owner)).collect();
        let (limit, left) = (Pages(limit), Pages(left));
        LimitView { key: LimitKey(key), limit, left, kills: Some(KillLimit { limit, left }), owners, read_ns }
    }

    /// The headroom of processes 1 to 3. `mergeable` is how many pages of each may be merged.
    fn look(headroom: &mut Headroom, limits: &[LimitView], mergeable: [u64; 3]) -> [Option<(u32, u64)>; 3] {
        let owners = [OwnerKey(1), OwnerKey(2), OwnerKey(3)];
        let mergeable = owners.into_iter().zip(mergeable.map(Pages)).collect();
        headroom.look(Keep::Share(Permyriad(1_000)), Pages(10_000), limits, &mergeable, &FxHashMap::default());
        owners.map(|owner| headroom.of(owner).map(|(key, left)| (key.0, left.0)))
    }

    #[test]
    fn all_that_may_be_merged_fits_beside_what_is_in_use() {
        let limits = [view(7, 1_400, 400, &[1], 5), view(8, 4_000, 1_000, &[1, 2], 5)];
        let found = look(&mut Headroom::default(), &limits, [50, 300, 900]);
        // 400 - 140 (reserve) - 50 and 1000 - 400 (reserve) - (50 + 300).
        assert_eq!(found, [Some((7, 210)), Some((8, 250)), None]);
        assert_eq!(look(&mut Headroom::default(), &limits, [250, 300, 0])[0], Some((7, 10)));
        assert_eq!(look(&mut Headroom::default(), &limits, [300, 300, 0]), [Some((7, 0)), Some((8, 0)), None]);
    }

    #[test]
    fn what_is_used_up_stays_so_until_the_limit_is_read_again() {
        let mut headroom = Headroom::default();
        let limits = [view(7, 1_000, 500, &[1], 5), view(8, 1_500, 600, &[1, 2], 5)];
        assert_eq!(look(&mut headroom, &limits, [0; 3]), [Some((7, 400)), Some((8, 450)), None]);
        headroom.take(OwnerKey(1), Pages(300));
        headroom.take(OwnerKey(3), Pages(300));
        assert_eq!(look(&mut headroom, &limits, [0; 3]), [Some((7, 100)), Some((8, 150)), None]);
        let again = [view(7, 1_000, 800, &[1], 9), view(8, 1_500, 900, &[1, 2], 9)];
        assert_eq!(look(&mut headroom, &again, [300, 0, 0]), [Some((7, 400)), Some((8, 450)), None]);
        assert_eq!(look(&mut headroom, &[], [0; 3]), [None; 3]);
    }

    #[test]
    fn half_of_the_reserve_is_lent_until_the_next_look() {
        let mut headroom = Headroom::default();
        let limits = [view(7, 1_000, 400, &[1], 5)];
        assert_eq!(look(&mut headroom, &limits, [300, 0, 0])[0], Some((7, 0)), "a tenth is the reserve");
        headroom.lend(true);
        assert_eq!(headroom.of(OwnerKey(1)), Some((LimitKey(7), Pages(50))));
        headroom.take(OwnerKey(1), Pages(40));
        assert_eq!(headroom.of(OwnerKey(1)), Some((LimitKey(7), Pages(10))));
        // Now 50 more pages may be merged, and the lent half is used up as well.
        let limits = [view(7, 1_000, 400, &[1], 9)];
        assert_eq!(look(&mut headroom, &limits, [350, 0, 0])[0], Some((7, 0)));
        headroom.lend(true);
        assert_eq!(headroom.full(OwnerKey(1)), Some(LimitKey(7)));
    }

    #[test]
    fn the_page_of_a_process_with_headroom_stays() {
        let mut headroom = Headroom::default();
        look(&mut headroom, &[view(7, 1_000, 101, &[1], 5), view(8, 1_000, 102, &[2], 5)], [0; 3]);
        let (one, two, three) = (OwnerKey(1), OwnerKey(2), OwnerKey(3));
        assert_eq!(headroom.stays(Stays::Known, one, two), Stays::Known);
        assert_eq!(headroom.stays(Stays::Known, one, two), Stays::New, "the first has none left");
        assert_eq!(headroom.stays(Stays::New, two, one), Stays::Known);
        assert_eq!(headroom.stays(Stays::Known, one, two), Stays::Both);
        assert_eq!(headroom.stays(Stays::New, three, two), Stays::Known, "no limit");
        assert_eq!(headroom.stays(Stays::Both, three, three), Stays::Both);
    }

    #[test]
    fn a_limit_on_all_in_scope_or_above_the_machines_memory_needs_none() {
        let covering = view(7, 1_000, 0, &[1, 2, 3, 4], 1);
        let large = view(8, 10_000, 0, &[1], 1);
        assert_eq!(look(&mut Headroom::default(), &[covering, large], [500; 3]), [None; 3]);
    }

    #[test]
    fn a_limit_that_we_do_not_know_stops_merging_but_is_not_exceeded() {
        let mut headroom = Headroom::default();
        look(&mut headroom, &[view(7, 1_000, 100, &[1], 1)], [300, 0, 0]);
        assert_eq!(headroom.exceeded(), [(LimitKey(7), Pages(225))], "a quarter of the reserve has to be left");
        let unknown = LimitView { kills: None, ..view(8, 0, 0, &[1], 2) };
        assert_eq!(look(&mut headroom, &[unknown], [300, 0, 0])[0], Some((8, 0)));
        assert_eq!(headroom.exceeded(), []);
    }

    #[test]
    fn who_keeps_pages_for_others_may_grow() {
        let mut headroom = Headroom::default();
        look(&mut headroom, &[view(7, 1_000, 500, &[1], 1)], [0; 3]);
        headroom.take(OwnerKey(1), Pages(50));
        // Its program has rewritten its pages and grown.
        look(&mut headroom, &[view(7, 1_000, 25, &[1], 2)], [0; 3]);
        assert_eq!(headroom.exceeded(), []);
        look(&mut headroom, &[view(7, 1_000, 24, &[1], 3)], [0; 3]);
        assert_eq!(headroom.exceeded(), [(LimitKey(7), Pages(1))]);
        headroom.set_kept(LimitKey(7), Pages(0));
        look(&mut headroom, &[view(7, 1_000, 24, &[1], 4)], [0; 3]);
        assert_eq!(headroom.exceeded(), [], "none is kept for others");
    }

    #[test]
    fn who_was_outside_counts_once_its_memory_may_be_merged() {
        let mut headroom = Headroom::default();
        let [outside, below] = [view(7, 1_000, 200, &[1, 2], 1), view(7, 1_000, 200, &[1, 2, 3], 2)];
        assert_eq!(look(&mut headroom, from_ref(&outside), [0; 3]), [Some((7, 100)), Some((7, 100)), None]);
        assert_eq!(look(&mut headroom, from_ref(&below), [50; 3]), [None; 3], "it has been moved below the limit");
        // The limit is shared from the second look on, although we haven't read it again in between.
        look(&mut headroom, from_ref(&outside), [0; 3]);
        look(&mut headroom, from_ref(&outside), [0, 0, 50]);
        assert_eq!(look(&mut headroom, from_ref(&below), [0; 3]), [Some((7, 100)); 3]);
    }
}
