//! The table of regions. Each region has a numbered slot, and entries of the index point to slots.
//!
//! We judge a very large mapping in blocks, each a region of its own: some parts of a virtual machine's guest memory
//! are worth merging and others aren't. A program may reserve far more than it uses, and each region costs us about
//! 1 KB, so we only cut a mapping that holds enough memory for its blocks.

use crate::host::RegionView;
use crate::index::{REGION_PAGES_MAX, SLOTS_MAX};
use crate::keys::RegionKey;
use crate::region::Region;
use crate::units::{BLOCK_PAGES, Pages, Vpn, index};
use std::collections::{BTreeMap, BTreeSet};

/// The block size of mappings that we don't cut: the whole address space.
const WHOLE_BITS: u32 = 52;
/// A mapping has at most this many blocks. Larger mappings get larger blocks.
const BLOCKS_MAX: u64 = 256;
/// We cut a mapping once its blocks hold this many resident pages on average, and join them again at a quarter of that.
const RESIDENT_MIN: u64 = 1_024;

/// A block of a mapping. A mapping that isn't cut is one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    key: RegionKey,
    /// log2 of the block's size in pages.
    bits: u32,
    /// How many blocks of that size come before this one in the address space.
    number: u64,
}

#[derive(Clone, Copy, Debug)]
struct CutMapping {
    /// log2 of the size of the mapping's blocks in pages.
    bits: u32,
    first: Vpn,
    pages: Pages,
}

/// The regions by slot.
#[derive(Debug, Default)]
pub struct RegionTable {
    regions: Vec<Option<Region>>,
    by_block: BTreeMap<Block, u32>,
    /// The mappings that we cut.
    cut: BTreeMap<RegionKey, CutMapping>,
    /// Empty slots that entries of the index may still point to.
    retired: Vec<u32>,
    /// Empty slots that no entry of the index points to.
    free: Vec<u32>,
}

impl RegionTable {
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().flatten()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Region> {
        self.regions.iter_mut().flatten()
    }

    pub fn numbered(&self) -> impl Iterator<Item = (u32, &Region)> {
        (0..).zip(&self.regions).filter_map(|(slot, region)| Some((slot, region.as_ref()?)))
    }

    pub fn numbered_mut(&mut self) -> impl Iterator<Item = (u32, &mut Region)> {
        (0..).zip(&mut self.regions).filter_map(|(slot, region)| Some((slot, region.as_mut()?)))
    }

    pub fn get(&self, slot: u32) -> Option<&Region> {
        self.regions.get(index(slot))?.as_ref()
    }

    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Region> {
        self.regions.get_mut(index(slot))?.as_mut()
    }

    /// The regions in these slots.
    pub fn all_in<'a>(&'a self, slots: &'a [u32]) -> impl Iterator<Item = &'a Region> {
        slots.iter().filter_map(|&slot| self.get(slot))
    }

    /// The slot of the region that holds a page.
    pub fn find(&self, key: RegionKey, page: Vpn) -> Option<u32> {
        let bits = self.cut.get(&key).map_or(WHOLE_BITS, |mapping| mapping.bits);
        self.by_block.get(&Block { key, bits, number: page.0 >> bits }).copied()
    }

    /// The first page and the length of a whole mapping.
    pub fn mapping(&self, key: RegionKey) -> Option<(Vpn, Pages)> {
        if let Some(mapping) = self.cut.get(&key) {
            return Some((mapping.first, mapping.pages));
        }
        self.at(key, Vpn(0)).map(|region| (region.view.first, region.view.pages))
    }

    /// The share of all pages in scope that we've sampled, 0 to 1.
    pub fn sampled(&self) -> f64 {
        let resident: Pages = self.iter().map(|region| region.view.resident).sum();
        let sampled: u64 = self.iter().map(|region| region.survey.tally.sampled).sum();
        sampled as f64 / resident.0.max(1) as f64
    }

    /// The region that holds a page. Mostly that's `last`, the region of the page looked up before.
    pub fn near<'a>(&'a self, last: Option<&'a Region>, key: RegionKey, page: Vpn) -> Option<&'a Region> {
        last.filter(|region| region.holds(key, page)).or_else(|| self.at(key, page))
    }

    /// The region that holds a page.
    pub fn at(&self, key: RegionKey, page: Vpn) -> Option<&Region> {
        self.get(self.find(key, page)?)
    }

    pub fn at_mut(&mut self, key: RegionKey, page: Vpn) -> Option<&mut Region> {
        self.get_mut(self.find(key, page)?)
    }

    /// Adopts the host's latest view of all mappings: updates known regions, creates others with `new`, and returns the
    /// ones that have ended.
    pub fn update(&mut self, views: &[RegionView], seed: u64, new: impl Fn(RegionView) -> Region) -> Vec<Region> {
        let mut missing: BTreeSet<_> = self.by_block.keys().copied().collect();
        let mut ended = Vec::new();
        let before = std::mem::take(&mut self.cut);
        for view in views.iter().filter(|view| view.pages.0 > 0) {
            // A mapping too long for one region is cut even if it holds little, but coarsely. That doesn't count here.
            let is_cut = before.get(&view.key).is_some_and(|mapping| 1 << mapping.bits < REGION_PAGES_MAX / 2);
            let bits = block_bits(view, is_cut);
            let mut is_as_long = true;
            if bits != WHOLE_BITS {
                is_as_long = before.get(&view.key).is_some_and(|mapping| mapping.pages == view.pages);
                self.cut.insert(view.key, CutMapping { bits, first: view.first, pages: view.pages });
            }
            for (number, view) in blocks(*view, bits) {
                let block = Block { key: view.key, bits, number };
                missing.remove(&block);
                ended.extend(self.update_block(block, view, seed, is_as_long, &new));
            }
        }
        ended.extend(missing.into_iter().filter_map(|block| self.remove(block)));
        ended
    }

    /// Adopts the host's latest view of one block. Returns the region that was there, if another one has taken its
    /// place.
    fn update_block(
        &mut self,
        block: Block,
        view: RegionView,
        seed: u64,
        is_as_long: bool,
        new: &impl Fn(RegionView) -> Region,
    ) -> Option<Region> {
        let in_blocks = block.bits != WHOLE_BITS;
        let Some(&slot) = self.by_block.get(&block) else {
            self.put(block, Region { in_blocks, ..new(view) });
            return None;
        };
        let region = self.get_mut(slot)?;
        if region.is_replaced_by(&view) {
            return Some(std::mem::replace(region, Region { in_blocks, ..new(view) }));
        }
        region.update(view, seed);
        // Pages that left memory are new to ksmd if they come back. If the mapping has another length, we divide its
        // pages among its blocks in another way, and don't know whether any have left.
        if is_as_long {
            region.marks.visited = region.marks.visited.min(view.resident);
        }
        None
    }

    /// Puts a region into an empty slot. Drops it if the index can't point to any more slots.
    fn put(&mut self, block: Block, region: Region) {
        let next = u32::try_from(self.regions.len()).unwrap_or(SLOTS_MAX);
        let slot = self.free.pop().unwrap_or(next);
        if slot == next {
            if slot >= SLOTS_MAX {
                return;
            }
            self.regions.push(None);
        }
        self.regions[index(slot)] = Some(region);
        self.by_block.insert(block, slot);
    }

    fn remove(&mut self, block: Block) -> Option<Region> {
        let slot = self.by_block.remove(&block)?;
        self.retired.push(slot);
        self.regions[index(slot)].take()
    }

    /// Whether enough slots wait to be freed that sweeping the index is worth it.
    pub fn wants_sweep(&self) -> bool {
        self.retired.len() > 64 + self.by_block.len() / 4
    }

    /// Frees retired slots, after a sweep of the index has removed all entries that point to them.
    pub fn release_slots(&mut self) {
        self.free.append(&mut self.retired);
    }
}

/// The block size for a mapping, as a power of two. A mapping that `is_cut` already may hold less memory and stays cut.
fn block_bits(view: &RegionView, is_cut: bool) -> u32 {
    let pages = view.pages.0;
    let most = REGION_PAGES_MAX / 2;
    let size = pages.div_ceil(BLOCKS_MAX).clamp(BLOCK_PAGES.0, most).next_power_of_two();
    let resident_min = if is_cut { RESIDENT_MIN / 4 } else { RESIDENT_MIN };
    let is_filled = view.resident.0 >= pages.div_ceil(size) * resident_min;
    if pages <= BLOCK_PAGES.0 || !is_filled && pages <= most {
        return WHOLE_BITS;
    }
    let size = if is_filled { size } else { most };
    size.trailing_zeros()
}

/// The blocks of a mapping. They start at multiples of their size, so they stay in place when the mapping grows. The
/// host only knows how many pages of the whole mapping are resident, marked and merged. We divide these numbers among
/// the blocks by length.
fn blocks(view: RegionView, bits: u32) -> impl Iterator<Item = (u64, RegionView)> {
    let end = view.first.0 + view.pages.0;
    (view.first.0 >> bits..=(end - 1) >> bits).map(move |number| {
        let first = (number << bits).max(view.first.0);
        let pages = Pages(((number + 1) << bits).min(end) - first);
        let resident = part_of(view.resident, pages, view.pages);
        let marked = part_of(view.marked, pages, view.pages);
        let merged_somewhere = part_of(view.merged_somewhere, pages, view.pages);
        (number, RegionView { first: Vpn(first), pages, resident, marked, merged_somewhere, ..view })
    })
}

/// How many of a mapping's `total` pages are in a block of it, if they're spread evenly.
fn part_of(total: Pages, block: Pages, mapping: Pages) -> Pages {
    let part = u128::from(total.0) * u128::from(block.0) / u128::from(mapping.0);
    Pages(u64::try_from(part).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{FamilyKey, KeyCounter};
    use crate::region::test_view;

    fn view(key: u32, first: u64, pages: u64) -> RegionView {
        RegionView { family: FamilyKey(7), ..test_view(key, first, pages) }
    }

    fn update(table: &mut RegionTable, views: &[RegionView]) -> usize {
        table.update(views, 1, |view| Region::new(view, 0, false, 1)).len()
    }

    #[test]
    fn large_mappings_are_cut_into_blocks_that_stay_in_place() {
        let mut table = RegionTable::default();
        let whole = view(1, 1_000, 4 * BLOCK_PAGES.0);
        assert_eq!(update(&mut table, &[whole, view(2, 1 << 40, 500)]), 0);
        assert_eq!(table.iter().count(), 6);
        let pages: u64 = table.iter().map(|region| region.view.pages.0).sum();
        assert_eq!(pages, 4 * BLOCK_PAGES.0 + 500);
        let slot = table.find(RegionKey(1), Vpn(BLOCK_PAGES.0 + 3)).unwrap();
        assert_eq!(table.get(slot).unwrap().view.first, Vpn(BLOCK_PAGES.0));
        // When the mapping grows, its blocks stay the same.
        update(&mut table, &[view(1, 1_000, 5 * BLOCK_PAGES.0), view(2, 1 << 40, 500)]);
        assert_eq!(table.find(RegionKey(1), Vpn(BLOCK_PAGES.0 + 3)), Some(slot));
        assert!(table.iter().all(|region| region.in_blocks == (region.view.key == RegionKey(1))));
        assert_eq!(update(&mut table, &[view(2, 1 << 40, 500)]), 6);
        assert_eq!(table.find(RegionKey(1), Vpn(BLOCK_PAGES.0 + 3)), None);
    }

    #[test]
    fn a_mapping_is_cut_once_it_holds_enough_memory() {
        let mut table = RegionTable::default();
        let blocks = |table: &mut RegionTable, pages, resident| {
            update(table, &[RegionView { resident: Pages(resident), ..view(1, 0, pages) }]);
            table.iter().count()
        };
        // 256 GiB, of which the program uses ever more, and then less again.
        let pages = 256 * BLOCK_PAGES.0;
        let uses = [1, 255 << 10, 256 << 10, 1 << 25, 64 << 10, 60 << 10, 255 << 10];
        assert_eq!(uses.map(|resident| blocks(&mut table, pages, resident)), [1, 1, 256, 256, 256, 1, 1]);
        assert!(!table.iter().next().unwrap().in_blocks);
        // The index can't hold the offsets of a terabyte.
        assert_eq!(blocks(&mut table, 4 * pages, 1), 4);
    }

    #[test]
    fn reserved_address_space_costs_no_regions() {
        let mut table = RegionTable::default();
        let sparse = |key: u32| RegionView { resident: Pages(1), ..view(key, u64::from(key) << 27, 1 << 26) };
        let views: Vec<_> = (1..=450).map(sparse).collect();
        update(&mut table, &views);
        assert_eq!(table.iter().count(), 450);
    }

    #[test]
    fn a_smaller_mapping_is_not_cut() {
        let mut table = RegionTable::default();
        update(&mut table, &[view(1, BLOCK_PAGES.0 - 5, BLOCK_PAGES.0)]);
        assert_eq!(table.iter().count(), 1);
        assert!(!table.iter().next().unwrap().in_blocks);
        assert!(table.find(RegionKey(1), Vpn(BLOCK_PAGES.0 + 3)).is_some());
    }

    #[test]
    fn a_mapping_that_lost_its_marks_is_a_new_region() {
        use crate::marking::extents::Candidate;
        let mut table = RegionTable::default();
        let marked = |pages| RegionView { marked: Pages(pages), ..view(1, 0, 1_000) };
        update(&mut table, &[marked(0)]);
        let span = Candidate { first: Vpn(0), pages: Pages(1_000), resident: Pages(1_000), duplicate: Pages(900) };
        table.iter_mut().next().unwrap().marks.add(span);
        assert_eq!(update(&mut table, &[marked(0)]), 0, "the host has not observed it since");
        assert_eq!(update(&mut table, &[marked(1_000)]), 0);
        assert_eq!(update(&mut table, &[marked(0)]), 1);
        assert!(table.iter().next().unwrap().marks.spans.is_empty());
    }

    #[test]
    fn a_small_region_that_became_a_large_one_is_a_new_region() {
        let mut table = RegionTable::default();
        update(&mut table, &[view(1, 1_000, 33)]);
        assert_eq!(update(&mut table, &[view(1, 1_000, 40)]), 0);
        assert_eq!(update(&mut table, &[view(1, 1_000, 128_040)]), 1);
        assert_eq!(update(&mut table, &[view(1, 1_000, 200_000)]), 0);
        assert_eq!(update(&mut table, &[view(1, 1_000, 33)]), 1);
    }

    /// More regions come and go than there are keys. A region that stays keeps its key, and slots are reused.
    #[test]
    fn keys_and_slots_last_through_any_churn() {
        const LIVE: usize = 200;
        let mut table = RegionTable::default();
        let mut keys = KeyCounter::after(u32::MAX - 20_000);
        let lasting = [view(1, 1 << 40, 10), view(u32::MAX - 5_000, 1 << 41, 10), view(77, 1 << 42, 10)];
        let mut slots = 0;
        for round in 0..500_u64 {
            let mut views = lasting.to_vec();
            for number in 0..LIVE as u64 {
                let key = keys.take(|key| views.iter().any(|view| view.key == RegionKey(key)));
                views.push(view(key, (round << 20) + number * 100, 1 + number));
            }
            update(&mut table, &views);
            if table.wants_sweep() {
                table.release_slots();
            }
            assert_eq!(table.iter().count(), LIVE + lasting.len());
            for stays in &lasting {
                let slot = table.find(stays.key, stays.first).unwrap();
                assert_eq!(table.get(slot).unwrap().view.first, stays.first);
            }
            slots = slots.max(table.regions.len());
        }
        assert!(slots < 4 * LIVE, "{slots} slots");
        assert!(table.cut.len() <= LIVE + lasting.len() && table.by_block.len() == LIVE + lasting.len());
    }

    #[test]
    fn the_largest_address_space_has_few_blocks() {
        let mut table = RegionTable::default();
        update(&mut table, &[view(1, 0, 1 << 34)]);
        assert!(table.iter().count() <= 257, "{}", table.iter().count());
        assert!(table.iter().all(|region| region.view.pages.0 <= REGION_PAGES_MAX));
    }
}
