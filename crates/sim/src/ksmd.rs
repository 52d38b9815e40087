//! ksmd: its scans, their order, and how it visits each page, by the rules of Linux's `mm/ksm.c` (6.12), in virtual
//! time.

mod rbtree;
mod request;
mod trees;
mod visit;

use crate::comparisons::SearchCounts;
use crate::costs::Costs;
use crate::granularity::Granularity;
use crate::knobs::Knobs;
use crate::memory::{Memory, RmapItem};
use pagefold_engine::host::ScanOrder;
pub(crate) use request::Kept;
use std::ops::Range;
use trees::Trees;

const NS_PER_MS: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// ksmd is stopped, or no process is registered.
    Idle,
    /// ksmd sleeps between two batches. `None`: forever, after a kick.
    Asleep { until_ns: Option<u64> },
    /// ksmd is in a batch that ends after `left` more pages, or at the end of the scan.
    Scanning { left: u64 },
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// False between two full scans.
    in_scan: bool,
    /// Index into the list of owners.
    owner_index: usize,
    /// The next page of this owner's address space.
    page: u64,
}

#[derive(Debug)]
pub(crate) struct Ksmd {
    pub(crate) trees: Trees,
    costs: Costs,
    knobs: Knobs,
    granularity: Granularity,
    /// The registered processes ("owners"), in the order in which ksmd scans them.
    list: Vec<u32>,
    cursor: Cursor,
    run: bool,
    pages_to_scan: u64,
    /// How many pages too many the last batch visited, because ksmd can't visit part of a simulated page.
    over: u64,
    sleep_ns: Option<u64>,
    state: State,
    /// The virtual time that ksmd has reached in its scan.
    clock_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) scanned: u64,
    pub(crate) full_scans: u64,
    /// How many records exist, including stale ones.
    pub(crate) items: u64,
    /// `pages_unshared`.
    pub(crate) unshared: u64,
    /// Pages that ksmd didn't compare again, because nobody had written them since (CMD, section 3.3).
    pub(crate) spared: u64,
    pub(crate) counts: SearchCounts,
    pub(crate) lost_kicks: u64,
    /// Whether a batch is still running, so that the last order isn't carried out yet.
    pub(crate) busy: bool,
    /// Whether `smart_scan` is off for the ordered scans.
    thorough: bool,
}

impl Ksmd {
    pub(crate) fn new(costs: &Costs, knobs: Knobs) -> Self {
        Self {
            trees: Trees::new(&knobs),
            costs: *costs,
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
                // We can't abort a running batch.
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
            // Only a change of the sleep time wakes ksmd. Each kick writes a new value.
            State::Asleep { .. } if kick || self.sleep_ns != slept_ns => self.start_batch(now_ns),
            // ksmd reads the new sleep time only after the batch.
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
        // This must be at least 1: with empty batches and no sleep, time would stand still.
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

    /// Puts an owner on the list just behind the cursor, so only the next scan reaches it.
    pub(crate) fn register(&mut self, memory: &mut Memory, owner: u32, now_ns: u64) {
        if std::mem::replace(&mut memory.owners[owner as usize].registered, true) {
            return;
        }
        if self.cursor.in_scan {
            self.list.insert(self.cursor.owner_index, owner);
            self.cursor.owner_index += 1;
        } else {
            self.list.push(owner);
        }
        // If the list was empty, ksmd has waited for the first process, not for the end of a sleep.
        if self.state == State::Idle && self.run {
            self.start_batch(now_ns);
        }
    }

    /// Handles the exit of an owner. If ksmd has records of the owner, it moves the owner to just after the cursor.
    pub(crate) fn owner_exited(&mut self, memory: &mut Memory, owner: u32) {
        let Some(place) = self.list.iter().position(|&listed| listed == owner) else { return };
        if self.cursor.in_scan && place == self.cursor.owner_index {
            return;
        }
        self.list.remove(place);
        if self.cursor.in_scan && place < self.cursor.owner_index {
            self.cursor.owner_index -= 1;
        }
        if memory.owners[owner as usize].stale_items == 0 {
            memory.owners[owner as usize].registered = false;
        } else {
            let next = if self.cursor.in_scan { self.cursor.owner_index + 1 } else { 0 };
            self.list.insert(next.min(self.list.len()), owner);
        }
    }

    /// Runs ksmd until `until_ns`. A visit that begins before then is completed.
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

    /// Continues a batch until its end or `until_ns`.
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
                self.spend(self.granularity.scale(visit.cost_ns));
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

    /// Finds the next marked pages, and moves the cursor to the first. `None` at the end of the scan.
    fn next_stretch(&mut self, memory: &mut Memory) -> Option<(u32, Range<u32>)> {
        if self.list.is_empty() {
            self.cursor = Cursor::default();
            return None;
        }
        if !self.cursor.in_scan {
            self.cursor = Cursor { in_scan: true, ..Cursor::default() };
            self.trees.begin_scan();
        }
        while let Some(&owner) = self.list.get(self.cursor.owner_index) {
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

    /// Frees an owner's stale records. Returns how many there were.
    fn free_stale(&mut self, memory: &mut Memory, owner: u32) -> u64 {
        let record = &mut memory.owners[owner as usize];
        let stale = std::mem::take(&mut record.stale_items);
        let frames = std::mem::take(&mut record.stale_frames);
        self.items -= stale;
        self.unshared -= std::mem::take(&mut record.stale_unshared);
        for frame in frames {
            self.trees.detach(memory, frame);
        }
        stale
    }

    /// Frees an owner's stale records, and takes it off the list if it has exited or has no marked pages.
    fn finish_owner(&mut self, memory: &mut Memory, owner: u32) {
        let stale = self.free_stale(memory, owner);
        self.spend(self.costs.visit_owner_ns + self.granularity.scale(stale * self.costs.reap_item_ns));
        let marked = |&key: &u32| memory.region(key).is_some_and(|region| !region.marks.is_empty());
        self.cursor.page = 0;
        if memory.owners[owner as usize].regions.iter().any(marked) {
            self.cursor.owner_index += 1;
        } else {
            memory.owners[owner as usize].registered = false;
            self.list.remove(self.cursor.owner_index);
        }
    }
}

/// The first marked pages of an owner at or after page `at` of its address space.
fn marked_from(memory: &Memory, owner: u32, at: u64) -> Option<(u32, Range<u32>)> {
    let regions = &memory.owners[owner as usize].regions;
    let reached = regions.partition_point(|&key| memory.region(key).is_none_or(|region| region.end() <= at));
    regions[reached..].iter().find_map(|&key| {
        let region = memory.region(key)?;
        let from = u32::try_from(at.saturating_sub(region.first)).ok()?;
        Some((key, region.marks.stretch_from(from)?))
    })
}
