//! The index: which contents we've seen, a page for each, and how many copies.
//!
//! UKSM keeps two trees of hashes, for merged and unmerged pages (section 5.3), and nuKSM cuts each into a forest so
//! that no tree grows deep (section 4.3). The kernel knows which pages are merged, so we need only one entry for each
//! *content*, with a small count of its copies. Each of our trees holds a range of fingerprints, in a short sorted
//! array. A lookup touches one array of at most [`TREE_MAX`] entries. When a tree outgrows that, we cut all trees in
//! two.
//!
//! Memory: 12 bytes per entry, at most a quarter of slack, no entry for a second copy.
//!
//! The index has a limit. When it's full, we keep only the contents whose fingerprints end in one more zero bit: half
//! of them. Both copies of a content have the same fingerprint, so we go on finding all duplicates among the contents
//! that the index keeps, in whatever order we read them. We see no duplicates among the other contents, but estimate
//! their number from those that we do see ([`Index::stands_for`]).

use crate::hash::Digest;
use crate::units::low_bits;

/// How much memory a full index takes per entry, bytes: 17.9 with what malloc adds, also after it was halved and filled
/// again (measured with 8 million entries and glibc).
pub const ENTRY_BYTES: u64 = 18;
/// When a tree outgrows this many entries (a dozen cache lines), the forest doubles. With 256 entries, a tenth of the
/// instructions for finding duplicates went into moving half a tree at each insertion.
const TREE_MAX: usize = 64;
/// A tree grows by this many entries.
const TREE_STEP: usize = 8;
/// The highest count, which means this many copies or more.
const COUNT_MAX: u8 = 7;
/// Bits of an entry for the fingerprint: the highest bits of the digest.
const FINGERPRINT_BITS: u32 = 40;
/// Bits of an entry for a region's slot.
const SLOT_BITS: u32 = 24;
/// Bits of an entry for the page's offset in its region: 2^27 pages, 512 GiB.
pub const OFFSET_BITS: u32 = 27;
/// Bits of an entry for the count of copies.
const COUNT_BITS: u32 = 3;
/// We number epochs modulo this.
const EPOCHS: u8 = 4;
/// An entry is old at this age, epochs.
const OLD_EPOCHS: u8 = 2;
/// The index can point to at most this many pages of a region.
pub const REGION_PAGES_MAX: u64 = 1 << OFFSET_BITS;
/// The index can point to at most this many regions at a time.
pub const SLOTS_MAX: u32 = (1 << SLOT_BITS) - 1;
/// The slot in an entry whose page is gone, if we also saw its content on other pages.
const NO_SLOT: u32 = SLOTS_MAX;

/// A page: its region's slot in the [region table](crate::region::table), and its offset in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The region's slot, below [`SLOTS_MAX`].
    pub slot: u32,
    /// The page's offset in the region, below [`REGION_PAGES_MAX`].
    pub offset: u32,
}

/// Where we saw a content before, other than on the page that we're recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occurrences {
    /// On no other page.
    None,
    /// On one other page, which now has its first copy.
    One(Location),
    /// On this number of pages, at least two, counted up to 7.
    Several(u8),
}

/// The state of the page that an entry points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageStatus {
    /// The page's region has ended.
    Removed,
    /// The page's region exists. The entry stays.
    Present,
    /// We sample the page's region all the time, which renews its entries, so an old entry is outdated.
    Resampled,
}

/// The key: 40 bits of fingerprint, 24 of slot. The rest: 2 bits of epoch, 3 of count, 27 of offset.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(4))]
struct Entry {
    key: u64,
    rest: u32,
}

impl Entry {
    fn new(fingerprint: u64, location: Location, count: u8, epoch: u8) -> Self {
        let Location { slot, offset } = location;
        let key = fingerprint << SLOT_BITS | u64::from(slot);
        let rest = offset | u32::from(count) << OFFSET_BITS | u32::from(epoch % EPOCHS) << (OFFSET_BITS + COUNT_BITS);
        Self { key, rest }
    }
    fn fingerprint(self) -> u64 {
        self.key >> SLOT_BITS
    }
    fn location(self) -> Location {
        let slot = low_bits(self.key, SLOT_BITS);
        Location { slot, offset: self.rest & ((1 << OFFSET_BITS) - 1) }
    }
    fn count(self) -> u8 {
        u8::try_from(self.rest >> OFFSET_BITS & u32::from(COUNT_MAX)).unwrap_or(COUNT_MAX)
    }
    /// Records that `location` holds the entry's content. Returns where we saw the content before.
    fn record(&mut self, location: Location, epoch: u8) -> Occurrences {
        let first = self.location();
        let count = self.count();
        let fingerprint = self.fingerprint();
        if first.slot == NO_SLOT {
            *self = Self::new(fingerprint, location, count, epoch);
            return Occurrences::Several(count);
        }
        if first == location {
            *self = Self::new(fingerprint, first, count, epoch);
            return if count > 1 { Occurrences::Several(count - 1) } else { Occurrences::None };
        }
        *self = Self::new(fingerprint, first, (count + 1).min(COUNT_MAX), epoch);
        if count > 1 { Occurrences::Several(count) } else { Occurrences::One(first) }
    }
    /// The epoch in which the entry was last renewed.
    fn epoch(self) -> u8 {
        u8::try_from(self.rest >> (OFFSET_BITS + COUNT_BITS)).unwrap_or(0)
    }
}

#[derive(Debug)]
pub struct Index {
    trees: Vec<Vec<Entry>>,
    /// log2 of the number of trees.
    bits: u32,
    len: usize,
    /// At most this many entries.
    most: usize,
    /// We keep only contents whose fingerprints end in this many zero bits.
    zeros: u32,
    epoch: u8,
}

impl Index {
    /// An empty index that grows to at most `most` entries.
    pub fn new(most: usize) -> Self {
        Self { trees: vec![Vec::new()], bits: 0, len: 0, most, zeros: 0, epoch: 0 }
    }

    /// An empty index with the same limit.
    #[must_use]
    pub fn emptied(&self) -> Self {
        Self::new(self.most)
    }

    /// Whether the index keeps a content once it's recorded. Otherwise it's as if we never saw the content.
    pub fn keeps(&self, digest: Digest) -> bool {
        is_kept(fingerprint(digest), self.zeros)
    }

    /// How many contents each content in the index stands for: 1 while the index has room for all.
    pub fn stands_for(&self) -> u64 {
        1 << self.zeros
    }

    /// The number of contents in the index.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How much memory the index takes, bytes.
    pub fn bytes(&self) -> usize {
        let entries: usize = self.trees.iter().map(Vec::capacity).sum();
        entries * size_of::<Entry>() + self.trees.capacity() * size_of::<Vec<Entry>>()
    }

    /// Records a page and returns where we saw its content before.
    ///
    /// If an entry already points to this page, that only renews the entry.
    pub fn record(&mut self, digest: Digest, location: Location) -> Occurrences {
        let fingerprint = fingerprint(digest);
        if !is_kept(fingerprint, self.zeros) {
            return Occurrences::None;
        }
        let epoch = self.epoch;
        let tree = &mut self.trees[tree_of(fingerprint, self.bits)];
        let at = match find(tree, fingerprint) {
            Ok(at) => return tree[at].record(location, epoch),
            Err(at) => at,
        };
        if tree.len() == tree.capacity() {
            tree.reserve_exact(TREE_STEP);
        }
        tree.insert(at, Entry::new(fingerprint, location, 1, epoch));
        self.len += 1;
        if tree.len() > TREE_MAX {
            self.double();
        }
        while self.len > self.most && self.zeros < FINGERPRINT_BITS {
            self.halve();
        }
        Occurrences::None
    }

    /// Drops half of the contents, chosen by their fingerprints. The trees keep their memory, because they soon fill
    /// again.
    fn halve(&mut self) {
        self.zeros += 1;
        self.len = 0;
        for tree in &mut self.trees {
            tree.retain(|entry| is_kept(entry.fingerprint(), self.zeros));
            self.len += tree.len();
        }
    }

    /// The page that a content's entry points to.
    pub fn page_of(&self, digest: Digest) -> Option<Location> {
        self.entry(digest).map(Entry::location).filter(|location| location.slot != NO_SLOT)
    }

    /// The page where we saw a content, if we saw it on no other page.
    pub fn only_page_of(&self, digest: Digest) -> Option<Location> {
        self.entry(digest).filter(|entry| entry.count() == 1).map(Entry::location)
    }

    /// Makes a content's entry, if there is one, point to another page that holds it.
    pub fn point_to(&mut self, digest: Digest, location: Location) {
        let fingerprint = fingerprint(digest);
        let tree = &mut self.trees[tree_of(fingerprint, self.bits)];
        if let Ok(at) = find(tree, fingerprint) {
            tree[at] = Entry::new(fingerprint, location, tree[at].count(), tree[at].epoch());
        }
    }

    fn entry(&self, digest: Digest) -> Option<Entry> {
        let fingerprint = fingerprint(digest);
        let tree = &self.trees[tree_of(fingerprint, self.bits)];
        Some(tree[find(tree, fingerprint).ok()?])
    }

    /// Begins the next epoch. Entries that aren't renewed for two epochs are old.
    pub fn age(&mut self) {
        self.epoch = (self.epoch + 1) % EPOCHS;
    }

    /// Drops entries by the `status` of their page: all entries of removed pages, and old entries of resampled pages.
    /// If we also saw the content on other pages, the entry of a removed page stays until it's old.
    pub fn sweep(&mut self, mut status: impl FnMut(Location) -> PageStatus) {
        let epoch = self.epoch;
        self.len = 0;
        for tree in &mut self.trees {
            tree.retain_mut(|entry| {
                let location = entry.location();
                let old = (epoch + EPOCHS - entry.epoch()) % EPOCHS >= OLD_EPOCHS;
                let status = if location.slot == NO_SLOT { PageStatus::Removed } else { status(location) };
                if status != PageStatus::Removed {
                    return !(old && status == PageStatus::Resampled);
                }
                let stays = entry.count() > 1 && !old;
                if stays {
                    let location = Location { slot: NO_SLOT, offset: 0 };
                    *entry = Entry::new(entry.fingerprint(), location, entry.count(), entry.epoch());
                }
                stays
            });
            tree.shrink_to(tree.len().next_multiple_of(TREE_STEP));
            self.len += tree.len();
        }
        if self.len < self.most / 4 {
            // There's room again for twice as many contents.
            self.zeros = self.zeros.saturating_sub(1);
        }
    }

    /// Cuts every tree in two. One tree can't be cut alone, because we choose among all trees by the same number of
    /// leading bits.
    fn double(&mut self) {
        self.bits += 1;
        let bits = self.bits;
        self.trees = std::mem::take(&mut self.trees)
            .into_iter()
            .enumerate()
            .flat_map(|(number, tree)| {
                let cut = tree.partition_point(|entry| tree_of(entry.fingerprint(), bits) <= 2 * number);
                let (low, high) = tree.split_at(cut);
                [tree_with(low), tree_with(high)]
            })
            .collect();
    }
}

/// The place of a content's entry in its tree, or where to insert it.
fn find(tree: &[Entry], fingerprint: u64) -> Result<usize, usize> {
    tree.binary_search_by_key(&fingerprint, |entry| entry.fingerprint())
}

/// Whether a fingerprint ends in this many zero bits.
fn is_kept(fingerprint: u64, zeros: u32) -> bool {
    fingerprint.trailing_zeros() >= zeros
}

fn fingerprint(digest: Digest) -> u64 {
    digest.0 >> (u64::BITS - FINGERPRINT_BITS)
}

/// The number of a fingerprint's tree: its leading bits.
fn tree_of(fingerprint: u64, bits: u32) -> usize {
    usize::try_from(fingerprint >> (FINGERPRINT_BITS - bits)).unwrap_or(usize::MAX)
}

/// A tree with these entries and little slack.
fn tree_with(entries: &[Entry]) -> Vec<Entry> {
    let mut tree = Vec::with_capacity(entries.len().next_multiple_of(TREE_STEP));
    tree.extend_from_slice(entries);
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::count;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn digest(content: u64) -> Digest {
        Digest(crate::random::mix(content))
    }

    #[test]
    fn the_first_page_of_a_content_is_reported_once() {
        let mut index = Index::new(usize::MAX);
        let (a, b, c) = (
            Location { slot: 1, offset: 7 },
            Location { slot: 2, offset: 9 },
            Location { slot: SLOTS_MAX - 1, offset: 0x7ff_ffff },
        );
        assert_eq!(index.record(digest(5), a), Occurrences::None);
        assert_eq!(index.record(digest(5), a), Occurrences::None);
        assert_eq!(index.record(digest(5), b), Occurrences::One(a));
        assert_eq!(index.record(digest(5), c), Occurrences::Several(2));
        assert_eq!(index.record(digest(5), a), Occurrences::Several(2));
        assert_eq!(index.len(), 1);
        assert_eq!(index.record(digest(6), c), Occurrences::None);
        assert_eq!(index.record(digest(6), a), Occurrences::One(c));
    }

    #[test]
    fn an_entry_can_be_made_to_point_to_another_page() {
        let mut index = Index::new(usize::MAX);
        let page = |slot| Location { slot, offset: 1 };
        index.point_to(digest(0), page(1));
        assert_eq!(index.page_of(digest(0)), None, "nothing was recorded");
        index.record(digest(0), page(1));
        index.record(digest(0), page(2));
        index.point_to(digest(0), page(2));
        assert_eq!(index.page_of(digest(0)), Some(page(2)));
        assert_eq!(index.record(digest(0), page(3)), Occurrences::Several(2), "the count stays");
        index.sweep(|page| if page.slot == 2 { PageStatus::Removed } else { PageStatus::Present });
        assert_eq!(index.page_of(digest(0)), None, "its page has ended");
    }

    #[test]
    fn a_million_contents_take_at_most_sixteen_bytes_each() {
        let mut index = Index::new(usize::MAX);
        for content in 0..1_000_000 {
            let location = Location { slot: 3, offset: content };
            assert_eq!(index.record(digest(content.into()), location), Occurrences::None);
        }
        assert_eq!(index.len(), 1_000_000);
        let per_entry = index.bytes() as f64 / 1e6;
        assert!(per_entry <= 16.0, "{per_entry} bytes per entry");
    }

    #[test]
    fn sweeping_drops_removed_and_outdated_pages() {
        let mut index = Index::new(usize::MAX);
        for content in 0..3000 {
            index.record(digest(content), Location { slot: u32::from(content % 3 == 0), offset: 1 });
        }
        index.sweep(|page| if page.slot == 1 { PageStatus::Present } else { PageStatus::Removed });
        assert_eq!(index.len(), 1000);
        index.age();
        index.record(digest(0), Location { slot: 1, offset: 1 });
        index.age();
        index.sweep(|_| PageStatus::Resampled);
        assert_eq!(index.len(), 1, "only the renewed entry is younger than two epochs");
    }

    #[test]
    fn a_content_of_several_pages_outlives_the_first_of_them() {
        let mut index = Index::new(usize::MAX);
        let page = |slot| Location { slot, offset: 1 };
        index.record(digest(0), page(1));
        index.record(digest(0), page(2));
        index.record(digest(1), page(1));
        let without_first = |page: Location| if page.slot == 1 { PageStatus::Removed } else { PageStatus::Resampled };
        index.sweep(without_first);
        assert_eq!(index.len(), 1, "the other content was on one page only");
        assert_eq!(index.record(digest(0), page(3)), Occurrences::Several(2));
        index.sweep(|page| if page.slot == 3 { PageStatus::Removed } else { PageStatus::Resampled });
        assert_eq!(index.len(), 1);
        index.age();
        index.age();
        index.sweep(without_first);
        assert!(index.is_empty(), "the entry was not renewed for two epochs");
    }

    /// The second copies come long after the first ones, in another order, and after many contents without a copy.
    #[test]
    fn a_full_index_finds_both_copies_of_the_contents_that_it_keeps() {
        const COPIED: u32 = 10_000;
        let mut index = Index::new(5_000);
        let mut record = |content: u32, slot| {
            let seen = index.record(digest(content.into()), Location { slot, offset: content });
            assert!(index.len() <= 5_000 && index.bytes() <= 5_000 * 16);
            seen
        };
        for content in 0..100_000 {
            record(content, 1);
        }
        let found = (0..COPIED).rev().filter(|&content| record(content, 2) != Occurrences::None).count();
        assert_eq!(index.stands_for(), 32);
        assert!(count(found).abs_diff(u64::from(COPIED) / 32) < 60, "{found}");
        // Most regions end, and the index has room again.
        for _ in 0..10 {
            index.sweep(|page| if page.slot == 2 { PageStatus::Present } else { PageStatus::Removed });
        }
        assert_eq!(index.stands_for(), 1);
    }

    proptest! {
        /// Compares the index with a plain map.
        #[test]
        fn agrees_with_a_plain_map(records in proptest::collection::vec((0u64..400, 0u32..3, 0u32..50), 0..3000)) {
            let mut index = Index::new(usize::MAX);
            let mut model: HashMap<u64, (Location, u8)> = HashMap::new();
            for (content, slot, offset) in records {
                let location = Location { slot, offset };
                let expected = match model.get_mut(&content) {
                    None => { model.insert(content, (location, 1)); Occurrences::None }
                    Some((first, count)) if *first == location => if *count > 1 { Occurrences::Several(*count - 1) } else { Occurrences::None },
                    Some((first, count)) => {
                        let before = *count;
                        *count = (before + 1).min(COUNT_MAX);
                        if before > 1 { Occurrences::Several(before) } else { Occurrences::One(*first) }
                    }
                };
                prop_assert_eq!(index.record(digest(content), location), expected);
            }
            prop_assert_eq!(index.len(), model.len());
        }
    }
}
