//! ksmd: when it scans, in which order, and what one visit to a page does. By the rules of Linux's
//! `mm/ksm.c` (6.12), in virtual time.

use crate::content;
mod rbtree;
mod trees;

use crate::comparisons::SearchCounts;
use crate::costs::Costs;
use crate::granularity::Granularity;
use crate::knobs::{Classes, Forest, Knobs};
use crate::memory::{Backing, ItemState, Memory, NONE, PageWrites, Region, RmapItem};
use pagefold_core::host::ScanOrder;
use pagefold_core::units::Vpn;
use std::ops::Range;
use trees::{Steps, Trees, UnstableSearch};

const NS_PER_MS: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Stopped, or nothing is registered: waits for the one or the other.
    Idle,
    /// Between batches, for ever after a kick.
    Asleep { until_ns: Option<u64> },
    /// In a batch that ends after so many pages more, or at the end of the scan.
    Scanning { left: u64 },
}

/// Where the scan stands.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// False between two full scans.
    in_scan: bool,
    /// Place in the list of owners.
    place: usize,
    /// The next page of that owner.
    page: u64,
}

#[derive(Debug)]
pub(crate) struct Ksmd {
    pub(crate) trees: Trees,
    costs: Costs,
    knobs: Knobs,
    granularity: Granularity,
    /// Registered owners, in the order of the scan.
    list: Vec<u32>,
    cursor: Cursor,
    run: bool,
    pages_to_scan: u64,
    /// Pages by which the last batch went too far: it ends with a whole granularity.
    over: u64,
    sleep_ns: Option<u64>,
    state: State,
    /// ksmd's own time while it scans.
    clock_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) scanned: u64,
    pub(crate) full_scans: u64,
    /// Records that exist, stale ones included.
    pub(crate) items: u64,
    /// `pages_unshared`.
    pub(crate) unshared: u64,
    /// Pages that were not compared again because they had not been written (CMD, section 3.3).
    pub(crate) spared: u64,
    pub(crate) counts: SearchCounts,
    pub(crate) lost_kicks: u64,
    /// The last order waits for the batch under way: to be done, or to be over.
    pub(crate) busy: bool,
    /// `smart_scan` is off for the scans ordered.
    thorough: bool,
}

/// What became of a visit.
struct VisitCost {
    cost_ns: u64,
    /// SearchCounts as scanned.
    counts: bool,
}

impl Ksmd {
    pub(crate) fn new(costs: Costs, knobs: Knobs) -> Self {
        Self {
            trees: Trees::new(&knobs),
            costs,
            knobs,
            granularity: Granularity::new(knobs.granularity),
            list: Vec::new(),
            cursor: Cursor::default(),
            run: false,
            pages_to_scan: 100,
            over: 0,
            sleep_ns: Some(20 * NS_PER_MS),
            state: State::Idle,
            clock_ns: 0,
            cpu_ns: 0,
            scanned: 0,
            full_scans: 0,
            items: 0,
            unshared: 0,
            spared: 0,
            counts: SearchCounts::default(),
            lost_kicks: 0,
            busy: false,
            thorough: false,
        }
    }

    pub(crate) fn is_scanning(&self) -> bool {
        matches!(self.state, State::Scanning { .. })
    }

    /// Owners on the list.
    pub(crate) fn registered(&self) -> &[u32] {
        &self.list
    }

    pub(crate) fn order(&mut self, order: ScanOrder, now_ns: u64) {
        let slept_ns = self.sleep_ns;
        if order != ScanOrder::Keep {
            self.busy = self.is_scanning();
        }
        match order {
            ScanOrder::Keep => return,
            ScanOrder::Rest => {
                self.run = false;
                // A batch goes on to its end; nothing can abort it.
                if !self.is_scanning() {
                    self.state = State::Idle;
                }
                return;
            }
            ScanOrder::Kick { thorough } => {
                (self.pages_to_scan, self.sleep_ns, self.thorough) = (u64::from(u32::MAX), None, thorough);
            }
            ScanOrder::Pace { pages_to_scan, sleep_ms, thorough } => {
                self.thorough = thorough;
                (self.pages_to_scan, self.sleep_ns) = (u64::from(pages_to_scan), Some(u64::from(sleep_ms) * NS_PER_MS));
            }
        }
        self.run = true;
        let kick = matches!(order, ScanOrder::Kick { .. });
        match self.state {
            State::Idle => self.start_batch(now_ns),
            // Only a CHANGE of the sleep wakes ksmd. Each kick writes a new value.
            State::Asleep { .. } if kick || self.sleep_ns != slept_ns => self.start_batch(now_ns),
            // The new sleep is read only after the batch, so it wakes nobody.
            State::Scanning { .. } if kick => self.lost_kicks += 1,
            State::Asleep { .. } | State::Scanning { .. } => {}
        }
        self.busy |= kick && self.is_scanning();
    }

    fn start_batch(&mut self, now_ns: u64) {
        self.clock_ns = now_ns;
        if !self.run || self.list.is_empty() {
            self.state = State::Idle;
            return;
        }
        self.state = State::Scanning { left: self.pages_to_scan.saturating_sub(self.over) };
        self.over = self.over.saturating_sub(self.pages_to_scan);
        // Never free of charge, or batches of no pages without sleep would stop time.
        self.spend(self.costs.wake_ns.max(1));
    }

    fn end_batch(&mut self) {
        self.busy = false;
        self.state = if self.run && !self.list.is_empty() {
            State::Asleep { until_ns: self.sleep_ns.map(|sleep_ns| self.clock_ns + sleep_ns) }
        } else {
            State::Idle
        };
    }

    /// Puts an owner on the list, just behind the cursor: the scan under way does not reach it, the next does.
    pub(crate) fn register(&mut self, memory: &mut Memory, owner: u32, now_ns: u64) {
        if std::mem::replace(&mut memory.owners[owner as usize].registered, true) {
            return;
        }
        if self.cursor.in_scan {
            self.list.insert(self.cursor.place, owner);
            self.cursor.place += 1;
        } else {
            self.list.push(owner);
        }
        // ksmd with an empty list waits for the first to come, not for its sleep to end.
        if self.state == State::Idle && self.run {
            self.start_batch(now_ns);
        }
    }

    /// An owner has exited. If ksmd holds records of it, it moves to just after the cursor.
    pub(crate) fn owner_exited(&mut self, memory: &mut Memory, owner: u32) {
        let Some(place) = self.list.iter().position(|&listed| listed == owner) else { return };
        if self.cursor.in_scan && place == self.cursor.place {
            return;
        }
        self.list.remove(place);
        if self.cursor.in_scan && place < self.cursor.place {
            self.cursor.place -= 1;
        }
        if memory.owners[owner as usize].stale_items == 0 {
            memory.owners[owner as usize].registered = false;
        } else {
            let next = if self.cursor.in_scan { self.cursor.place + 1 } else { 0 };
            self.list.insert(next.min(self.list.len()), owner);
        }
    }

    /// Lets ksmd work until `until_ns`. A visit begun before is finished.
    pub(crate) fn run_until(&mut self, memory: &mut Memory, until_ns: u64) {
        loop {
            match self.state {
                State::Asleep { until_ns: Some(wake_ns) } if wake_ns < until_ns => self.start_batch(wake_ns),
                State::Scanning { left } if self.clock_ns < until_ns => self.scan(memory, until_ns, left),
                _ => return,
            }
        }
    }

    fn spend(&mut self, ns: u64) {
        self.clock_ns += ns;
        self.cpu_ns += ns;
    }

    /// Goes on with a batch up to its end or to `until_ns`.
    fn scan(&mut self, memory: &mut Memory, until_ns: u64, mut left: u64) {
        while self.clock_ns < until_ns {
            if left == 0 {
                return self.end_batch();
            }
            let Some((key, pages)) = self.next_stretch(memory) else {
                // A batch never crosses the end of a scan.
                return self.end_batch();
            };
            for page in pages {
                let visit = self.visit(memory, key, page);
                self.spend(self.granularity.all(visit.cost_ns));
                self.cursor.page += 1;
                if visit.counts {
                    self.scanned += self.granularity.get();
                    self.over += self.granularity.get().saturating_sub(left);
                    left = left.saturating_sub(self.granularity.get());
                }
                if left == 0 || self.clock_ns >= until_ns {
                    break;
                }
            }
        }
        self.state = State::Scanning { left };
    }

    /// The next marked pages, and the cursor on the first of them. `None` at the end of the scan.
    fn next_stretch(&mut self, memory: &mut Memory) -> Option<(u32, Range<u32>)> {
        if self.list.is_empty() {
            self.cursor = Cursor::default();
            return None;
        }
        if !self.cursor.in_scan {
            self.cursor = Cursor { in_scan: true, ..Cursor::default() };
            self.trees.begin_scan();
        }
        while let Some(&owner) = self.list.get(self.cursor.place) {
            if let Some((key, stretch)) = marked_from(memory, owner, self.cursor.page) {
                if let Some(region) = memory.region_mut(key) {
                    self.cursor.page = region.first + u64::from(stretch.start);
                    if region.items.is_empty() {
                        region.items = vec![RmapItem::NONE; region.content.len()];
                    }
                }
                return Some((key, stretch));
            }
            self.finish_owner(memory, owner);
        }
        self.cursor = Cursor::default();
        self.full_scans += 1;
        None
    }

    /// Frees the stale records of an owner, and lets go of it if it has exited or has nothing marked.
    fn finish_owner(&mut self, memory: &mut Memory, owner: u32) {
        let record = &mut memory.owners[owner as usize];
        let stale = std::mem::take(&mut record.stale_items);
        let frames = std::mem::take(&mut record.stale_frames);
        self.items -= stale;
        self.unshared -= std::mem::take(&mut record.stale_unshared);
        self.spend(self.costs.visit_owner_ns + self.granularity.all(stale * self.costs.reap_item_ns));
        for frame in frames {
            self.trees.detach(memory, frame);
        }
        let marked = |&key: &u32| memory.region(key).is_some_and(|region| !region.marks.is_empty());
        self.cursor.page = 0;
        if memory.owners[owner as usize].regions.iter().any(marked) {
            self.cursor.place += 1;
        } else {
            memory.owners[owner as usize].registered = false;
            self.list.remove(self.cursor.place);
        }
    }

    /// One page.
    fn visit(&mut self, memory: &mut Memory, key: u32, page: u32) -> VisitCost {
        let costs = self.costs;
        let at = page as usize;
        let region = memory.region_mut(key).expect("next_stretch found it and nothing runs in between");
        let (backing, content, mut item) = (region.backing[at], region.content[at], region.items[at]);
        let touch = region.writes.get_mut(at).map(std::mem::take).unwrap_or_default();

        if matches!(backing, Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged) {
            if item.is_live() {
                region.items[at] = RmapItem::NONE;
                self.items -= 1;
                self.leave_unstable((key, page), &mut item);
                self.trees.detach(memory, item.frame);
            }
            return VisitCost { cost_ns: costs.pass_empty_ns, counts: false };
        }
        let class = self.class_of(region, at, touch, item);
        if !item.is_live() {
            item = RmapItem { state: ItemState::Known, ..RmapItem::NONE };
            self.items += 1;
        }
        if backing == Backing::Merged {
            return self.visit_merged(memory, key, page, item);
        }
        let checksum = content::checksum(content);
        if self.lasting() && item.state == ItemState::Unshared && item.class == class && item.checksum == checksum {
            // Compared before, and not written since: it stays in its tree for others to find.
            self.spared += self.granularity.get();
            return VisitCost { cost_ns: costs.checksum_ns, counts: true };
        }
        self.leave_unstable((key, page), &mut item);
        item.class = class;
        // Hung on a merged frame but private: written since.
        let frame = std::mem::replace(&mut item.frame, NONE);
        self.trees.detach(memory, frame);
        let visit = if self.knobs.smart_scan && !self.thorough && is_skipped(&mut item) {
            VisitCost { cost_ns: costs.visit_skipped_ns, counts: false }
        } else {
            let mut cost_ns = costs.checksum_ns;
            if item.checksum != checksum {
                item.checksum = checksum;
            } else if content == 0 && self.knobs.use_zero_pages {
                memory.merge_zero(key, page);
                cost_ns += costs.merge_zero_ns;
            } else {
                cost_ns += self.search(memory, (key, page), content, &mut item);
            }
            VisitCost { cost_ns, counts: true }
        };
        if let Some(region) = memory.region_mut(key) {
            region.items[at] = item;
        }
        visit
    }

    /// UnstableSearch trees that last, with records that know their place in them.
    fn lasting(&self) -> bool {
        matches!(self.knobs.forest, Forest::Classes(_))
    }

    /// A page that was in an unstable tree has to be sorted in anew (`remove_rmap_item_from_tree`). Where trees live for a
    /// scan, its place there is gone already.
    fn leave_unstable(&mut self, page: (u32, u32), item: &mut RmapItem) {
        if item.state != ItemState::Unshared {
            return;
        }
        if self.lasting() {
            self.trees.remove_unstable(u16::from(item.class), item.node, page);
        }
        item.state = ItemState::Known;
        self.unshared -= 1;
    }

    /// A page that maps a merged frame already. After a fork, the child's has no record there yet.
    fn visit_merged(&mut self, memory: &mut Memory, key: u32, page: u32, mut item: RmapItem) -> VisitCost {
        self.leave_unstable((key, page), &mut item);
        let frame = memory.region(key).and_then(|region| region.merged_frame(page)).unwrap_or(NONE);
        if item.frame != frame {
            self.trees.detach(memory, item.frame);
            self.trees.attach(memory, frame);
            item.frame = frame;
        }
        self.trees.follow(memory, frame);
        if let Some(region) = memory.region_mut(key) {
            region.items[page as usize] = item;
        }
        VisitCost { cost_ns: self.costs.visit_merged_ns, counts: true }
    }

    /// The class of a page. By writes it is that of the last scan in which it was written: those who read the paper
    /// closely find that a page which was written is volatile and looked at no further, and one that was not is of the
    /// class that is never compared, so that nothing would ever be. A page that has come into being was written whole.
    fn class_of(&self, region: &Region, page: usize, touch: PageWrites, item: RmapItem) -> u8 {
        let Forest::Classes(classes) = self.knobs.forest else { return 0 };
        match classes {
            Classes::Address => region.eighths.get(page).copied().unwrap_or_default(),
            _ if touch.times == 0 && item.is_live() => item.class,
            Classes::PageCount => touch.times.saturating_sub(1).min(15),
            Classes::SubPages if touch.times == 0 => 0b1111,
            Classes::SubPages => touch.parts,
        }
    }

    /// The tree for a page.
    fn tree_of(&mut self, memory: &Memory, (key, page): (u32, u32), item: &RmapItem) -> u16 {
        match self.knobs.forest {
            Forest::Kernel => {
                let node = memory.region(key).and_then(|region| memory.node_of(region, page)).unwrap_or_default();
                self.trees.of_node(node)
            }
            Forest::Checksum { trees } => u16::try_from((item.checksum >> 1) % u32::from(trees.max(1))).unwrap_or(0),
            Forest::Classes(_) => u16::from(item.class),
        }
    }

    /// The stable tree, then the unstable one. What is found in the stable tree stays where it is; of two found in the
    /// unstable one, the page that is being visited stays (`try_to_merge_two_pages`), and so decides the node.
    fn search(&mut self, memory: &mut Memory, me: (u32, u32), content: u64, item: &mut RmapItem) -> u64 {
        let (tree, mut steps) = (self.tree_of(memory, me, item), Steps::default());
        let (found, merge_ns) = self.find(memory, (tree, me), content, item, &mut steps);
        (steps.stable, steps.unstable) =
            (self.granularity.deeper(steps.stable), self.granularity.deeper(steps.unstable));
        self.counts.search(self.granularity.get(), steps.stable, steps.unstable, found);
        merge_ns
            + steps.stable * self.costs.stable_level_ns
            + steps.dups * self.costs.chain_dup_ns
            + steps.unstable * self.costs.unstable_level_ns
    }

    /// Whether a partner was found, and what merging took.
    fn find(
        &mut self,
        memory: &mut Memory,
        (tree, me): (u16, (u32, u32)),
        content: u64,
        item: &mut RmapItem,
        steps: &mut Steps,
    ) -> (bool, u64) {
        if let Some(frame) = self.trees.find_stable(memory, tree, content, steps) {
            memory.join(me.0, me.1, frame);
            self.trees.attach(memory, frame);
            item.frame = frame;
            return (true, self.costs.merge_stable_ns);
        }
        let (other, at) = match self.trees.find_or_insert_unstable(memory, tree, content, me, steps) {
            UnstableSearch::Partner(other, at) => (other, at),
            UnstableSearch::Inserted(at) => {
                (item.node, item.state) = (at, ItemState::Unshared);
                self.unshared += 1;
                return (false, 0);
            }
            UnstableSearch::Lost => return (false, 0),
        };
        self.trees.remove_unstable(tree, at, other);
        let node = memory.region(me.0).and_then(|region| memory.node_of(region, me.1)).unwrap_or_default();
        let relatives = relatives(memory, me);
        let frame = self.trees.insert_stable(memory, node, tree, content);
        for (key, page) in [other, me] {
            memory.join(key, page, frame);
            self.trees.attach(memory, frame);
        }
        // It is the very frame of the page that is being visited, so they map it too. Records come with ksmd's visits.
        for (key, page) in relatives {
            memory.join(key, page, frame);
        }
        item.frame = frame;
        if let Some(other) = memory.region_mut(other.0).map(|region| &mut region.items[other.1 as usize]) {
            other.frame = frame;
            if std::mem::replace(&mut other.state, ItemState::Known) == ItemState::Unshared {
                self.unshared -= 1;
            }
        }
        (true, self.costs.merge_pair_ns)
    }
}

/// The first marked pages of an owner at or after a page of its address space.
fn marked_from(memory: &Memory, owner: u32, at: u64) -> Option<(u32, Range<u32>)> {
    let regions = &memory.owners[owner as usize].regions;
    let reached = regions.partition_point(|&key| memory.region(key).is_none_or(|region| region.end() <= at));
    regions[reached..].iter().find_map(|&key| {
        let region = memory.region(key)?;
        let from = u32::try_from(at.saturating_sub(region.first)).ok()?;
        Some((key, region.marks.stretch_from(from)?))
    })
}

/// Who shares the frame of a page by fork: at the same place in other address spaces, for nothing moves within one.
fn relatives(memory: &Memory, me: (u32, u32)) -> Vec<(u32, u32)> {
    let Some(region) = memory.region(me.0).filter(|_| memory.same_frame(me, me)) else { return Vec::new() };
    let at = Vpn(region.first + u64::from(me.1));
    let pages = memory.live_regions().filter_map(|(key, region)| Some((key, region.offset(at)?)));
    pages.filter(|&page| page != me && memory.same_frame(page, me)).collect()
}

/// `smart_scan`: whether this visit is left out; counts the visits that were made or left out.
fn is_skipped(item: &mut RmapItem) -> bool {
    let age = item.age;
    item.age = age.saturating_add(1);
    if age < 3 {
        return false;
    }
    if item.skips_left == 0 {
        item.skips_left = match age {
            ..=3 => 1,
            4..=5 => 2,
            6..=8 => 4,
            _ => 8,
        };
        return false;
    }
    item.skips_left -= 1;
    true
}
