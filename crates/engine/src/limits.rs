//! How much we may do to targets in any second: pages read, stops, and how long one stop may be.
//!
//! A governor bounds pagefold's CPU time, while limits bound how much targets may notice. Reading a page briefly takes
//! the target's `mmap_lock`, which slows down a target that maps and unmaps all the time. A stop takes time from any
//! target. A group of processes can have lower limits, and its own share of a core, like a governor's.

use crate::governor::share_ns;
use crate::host::{StopSize, Stops};
use crate::keys::{GroupKey, OwnerKey};
use crate::units::Permyriad;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The limits hold over any period of this length, nanoseconds.
const WINDOW_NS: u64 = 1_000_000_000;

/// How much we may do to targets, per second or per stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pages read from one process per second.
    pub pages_per_process: u64,
    /// Pages read from all processes per second.
    pub pages: u64,
    /// Stops of one process per second.
    pub stops_per_process: u64,
    /// Stops of all processes per second.
    pub stops: u64,
    /// Merged frames moved to another NUMA node per second.
    pub moves: u64,
    /// How long a stop should last at most, nanoseconds. This is a goal, not a guarantee: the target's core may be
    /// busy. After a longer stop, the next one does half as much.
    pub longest_stop_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pages_per_process: 1_000_000,
            pages: 2_000_000,
            stops_per_process: 50,
            stops: 500,
            moves: 100_000,
            longest_stop_ns: 10_000_000,
        }
    }
}

/// Limits for all processes of a group together, in addition to the run's own limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupLimits {
    /// The share of one core that we may use to read and judge the group's memory.
    pub share: Option<Permyriad>,
    /// Pages read from the group's processes per second.
    pub pages: Option<u64>,
    /// Stops of the group's processes per second.
    pub stops: Option<u64>,
}

impl GroupLimits {
    /// How many pages we may read per second if each takes `page_ns`.
    fn pages(&self, page_ns: u64) -> u64 {
        let pages = self.pages.unwrap_or(u64::MAX);
        match self.share {
            Some(share) => pages.min(share_ns(WINDOW_NS, share) / page_ns.max(1)),
            None => pages,
        }
    }
}

/// A count over the last second.
#[derive(Clone, Debug, Default)]
struct Window {
    done: VecDeque<(u64, u64)>,
    sum: u64,
}

impl Window {
    fn advance(&mut self, now_ns: u64) {
        while let Some(&(at_ns, number)) = self.done.front() {
            if at_ns + WINDOW_NS > now_ns {
                break;
            }
            self.done.pop_front();
            self.sum -= number;
        }
    }

    fn add(&mut self, now_ns: u64, number: u64) {
        match self.done.back_mut() {
            Some((at_ns, done)) if *at_ns == now_ns => *done += number,
            _ => self.done.push_back((now_ns, number)),
        }
        self.sum += number;
    }
}

/// Everything done within the last second.
#[derive(Clone, Debug, Default)]
struct Done {
    pages: Window,
    stops: Window,
    moves: Window,
}

impl Done {
    fn advance(&mut self, now_ns: u64) {
        for window in [&mut self.pages, &mut self.stops, &mut self.moves] {
            window.advance(now_ns);
        }
    }
}

#[derive(Clone, Debug)]
struct Group {
    limits: GroupLimits,
    done: Done,
}

/// Enforces the limits: knows how much we may still do now.
#[derive(Clone, Debug)]
pub struct Allowance {
    limits: Limits,
    now_ns: u64,
    size: StopSize,
    all: Done,
    each: BTreeMap<OwnerKey, Done>,
    groups: Vec<Group>,
    members: Arc<BTreeMap<OwnerKey, GroupKey>>,
    /// The cost of a page that we read, nanoseconds.
    page_ns: u64,
}

impl Allowance {
    pub fn new(limits: Limits, groups: &[GroupLimits]) -> Self {
        let mut new = Self {
            limits,
            now_ns: 0,
            size: StopSize::default(),
            all: Done::default(),
            each: BTreeMap::new(),
            groups: Vec::new(),
            members: Arc::default(),
            page_ns: 0,
        };
        new.set_limits(limits, groups);
        new
    }

    pub fn set_limits(&mut self, limits: Limits, groups: &[GroupLimits]) {
        self.limits = limits;
        self.groups = groups.iter().map(|&limits| Group { limits, done: Done::default() }).collect();
    }

    /// Sets the groups of processes, and the cost of a page that we read, nanoseconds.
    pub fn set_groups(&mut self, members: Arc<BTreeMap<OwnerKey, GroupKey>>, page_ns: u64) {
        self.members = members;
        self.page_ns = page_ns;
    }

    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.all.advance(now_ns);
        self.groups.iter_mut().for_each(|group| group.done.advance(now_ns));
        self.each.retain(|_, done| {
            done.advance(now_ns);
            done.pages.sum + done.stops.sum > 0
        });
    }

    fn group_of(&self, owner: OwnerKey) -> Option<&Group> {
        self.groups.get(usize::from(self.members.get(&owner)?.0))
    }

    /// Applies `add` to all counts that concern a process.
    fn record(&mut self, owner: OwnerKey, add: impl Fn(&mut Done)) {
        add(&mut self.all);
        add(self.each.entry(owner).or_default());
        let Some(group) = self.members.get(&owner) else { return };
        if let Some(group) = self.groups.get_mut(usize::from(group.0)) {
            add(&mut group.done);
        }
    }

    /// How many pages of a process we may read now.
    pub fn pages_left(&self, owner: OwnerKey) -> u64 {
        let own = self.each.get(&owner).map_or(0, |done| done.pages.sum);
        let all = self.limits.pages.saturating_sub(self.all.pages.sum);
        let left = self.limits.pages_per_process.saturating_sub(own).min(all);
        match self.group_of(owner) {
            Some(group) => left.min(group.limits.pages(self.page_ns).saturating_sub(group.done.pages.sum)),
            None => left,
        }
    }

    /// Records pages that we're about to read.
    pub fn use_pages(&mut self, owner: OwnerKey, pages: u64) {
        let now_ns = self.now_ns;
        self.record(owner, |done| done.pages.add(now_ns, pages));
    }

    /// How often we may stop a process now.
    pub fn stops_left(&self, owner: OwnerKey) -> u64 {
        let own = self.each.get(&owner).map_or(0, |done| done.stops.sum);
        let all = self.limits.stops.saturating_sub(self.all.stops.sum);
        let left = self.limits.stops_per_process.saturating_sub(own).min(all);
        match self.group_of(owner) {
            Some(group) => left.min(group.limits.stops.unwrap_or(u64::MAX).saturating_sub(group.done.stops.sum)),
            None => left,
        }
    }

    /// Records stops that are about to happen.
    pub fn use_stops(&mut self, owner: OwnerKey, number: u64) {
        let now_ns = self.now_ns;
        self.record(owner, |done| done.stops.add(now_ns, number));
    }

    /// How many merged frames we may move now.
    pub fn moves_left(&self) -> u64 {
        self.limits.moves.saturating_sub(self.all.moves.sum)
    }

    /// Records merged frames that we're about to move.
    pub fn use_moves(&mut self, number: u64) {
        self.all.moves.add(self.now_ns, number);
    }

    pub fn stop_size(&self) -> StopSize {
        self.size
    }

    /// Adapts how much we do in one stop to how long the last ones took: less after one that was too long, more while
    /// they're short.
    pub fn adapt_stop_size(&mut self, stops: &[Stops]) {
        let now = self.size.marks;
        let limit_ns = self.limits.longest_stop_ns;
        self.size.marks = match stops.iter().map(|stops| stops.longest_ns).max() {
            Some(longest_ns) if longest_ns > limit_ns => (now / 2).max(1),
            Some(longest_ns) if longest_ns < limit_ns / 2 => (now + now / 4 + 1).min(StopSize::default().marks),
            _ => now,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_second_exceeds_the_limits(
            steps in proptest::collection::vec((0_u64..300_000_000, 0_u32..4, 0_u64..200), 1..200),
            pages_per_process in 64_u64..300, pages in 64_u64..600,
        ) {
            let limits = Limits { pages_per_process, pages, ..Limits::default() };
            let mut allowance = Allowance::new(limits, &[]);
            let (mut now_ns, mut done) = (0, Vec::new());
            for (later_ns, owner, wanted) in steps {
                now_ns += later_ns;
                allowance.advance(now_ns);
                let number = wanted.min(allowance.pages_left(OwnerKey(owner)));
                allowance.use_pages(OwnerKey(owner), number);
                done.push((now_ns, owner, number));
            }
            for &(from_ns, _, _) in &done {
                let inside = || done.iter().filter(|(at_ns, _, _)| (from_ns..from_ns + WINDOW_NS).contains(at_ns));
                prop_assert!(inside().map(|(_, _, number)| number).sum::<u64>() <= pages);
                for owner in 0..4 {
                    let own = inside().filter(|(_, who, _)| *who == owner);
                    prop_assert!(own.map(|(_, _, number)| number).sum::<u64>() <= pages_per_process);
                }
            }
        }
    }

    #[test]
    fn the_allowance_is_restored_after_a_second() {
        let mut allowance = Allowance::new(Limits { stops_per_process: 2, stops: 3, ..Limits::default() }, &[]);
        allowance.advance(5);
        allowance.use_stops(OwnerKey(1), 2);
        allowance.use_stops(OwnerKey(2), 1);
        assert_eq!([1, 2, 3].map(|owner| allowance.stops_left(OwnerKey(owner))), [0, 0, 0]);
        allowance.advance(4 + WINDOW_NS);
        assert_eq!(allowance.stops_left(OwnerKey(1)), 0);
        allowance.advance(5 + WINDOW_NS);
        assert_eq!([1, 2, 3].map(|owner| allowance.stops_left(OwnerKey(owner))), [2, 2, 2]);
        assert!(allowance.each.is_empty());
    }

    #[test]
    fn a_group_has_limits_together_and_others_do_not_have_them() {
        let one = GroupLimits { share: Some(Permyriad(100)), ..GroupLimits::default() };
        let two = GroupLimits { pages: Some(70), stops: Some(3), ..GroupLimits::default() };
        let mut allowance = Allowance::new(Limits::default(), &[one, two]);
        let members = [(1, 0), (2, 0), (3, 1)].map(|(owner, group)| (OwnerKey(owner), GroupKey(group)));
        // A hundredth of a second is enough for 10,000 pages.
        allowance.set_groups(Arc::new(members.into()), 1_000);
        allowance.use_pages(OwnerKey(1), 9_000);
        allowance.use_stops(OwnerKey(3), 2);
        let left = |allowance: &Allowance| [1, 2, 3, 4].map(|owner| allowance.pages_left(OwnerKey(owner)));
        assert_eq!(left(&allowance), [1_000, 1_000, 70, 1_000_000]);
        assert_eq!([2, 3, 4].map(|owner| allowance.stops_left(OwnerKey(owner))), [50, 1, 50]);
        allowance.advance(WINDOW_NS);
        assert_eq!(left(&allowance), [10_000, 10_000, 70, 1_000_000]);
        // A group that was taken out of the settings.
        allowance.set_limits(Limits::default(), &[one]);
        assert_eq!(left(&allowance)[2], 1_000_000);
    }

    #[test]
    fn long_stops_shrink_the_next_one_and_short_stops_grow_it() {
        let mut allowance = Allowance::new(Limits::default(), &[]);
        let mut stop = |longest_ns| {
            let stops = Stops::one(OwnerKey(1), longest_ns);
            allowance.adapt_stop_size(&[stops]);
            allowance.stop_size().marks
        };
        assert_eq!(stop(10_000_001), 16);
        assert_eq!(stop(7_000_000), 16);
        assert_eq!((0..20).map(|_| stop(60_000_000)).last(), Some(1));
        assert_eq!((0..40).map(|_| stop(100_000)).last(), Some(32));
    }
}
