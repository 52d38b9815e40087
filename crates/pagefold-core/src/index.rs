//! The index: which contents have been seen, where first, and how often.
//!
//! UKSM keeps two trees of hashes, one of merged pages and one of unmerged (section 5.3); nuKSM cuts
//! each into a forest so that no tree grows deep (section 4.3). Here the kernel holds the merged pages,
//! and what is kept is one entry per *content*, with a bit of its multiplicity. The forest is by range
//! of the fingerprint, and each tree is a short sorted array: a look-up touches one array of at most
//! [`TREE_MAX`] entries, and a tree that outgrows that is simply cut in the middle with all the others.
//!
//! Memory: 12 bytes an entry, at most a quarter of slack, no entry for a second copy.

use crate::hash::Digest;

/// Entries in one tree before the forest doubles. 256 x 12 bytes fit well within a first-level cache,
/// and moving half of them on insertion costs less than the cache miss that finds them.
const TREE_MAX: usize = 256;
/// Entries by which a tree grows.
const TREE_STEP: usize = 32;
/// A count this high means "many".
const COUNT_MAX: u8 = 7;
/// Bits of an entry that hold the page's offset in its region: 2^27 pages, 512 GiB.
pub const OFFSET_BITS: u32 = 27;
/// Pages of the largest region the index can point into.
pub const REGION_PAGES_MAX: u64 = 1 << OFFSET_BITS;
/// Regions the index can tell apart at one time.
pub const SLOTS_MAX: u32 = (1 << SLOT_BITS) - 1;
const SLOT_BITS: u32 = 23;
/// The slot of contents whose noted page has gone while others are known to hold them.
const NOBODY: u32 = SLOTS_MAX;

/// Where a page was seen: the engine's slot number of the region, and the page's offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Slot of the region, below [`SLOTS_MAX`].
    pub slot: u32,
    /// Offset in the region, below [`REGION_PAGES_MAX`].
    pub offset: u32,
}

/// What the index knew of a content when a page with it came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Never seen, or seen on this very page only.
    New,
    /// Seen once before, elsewhere: that page has just got its first twin.
    Once(Place),
    /// Seen on so many pages before, at least two (7 means many).
    Often(u8),
}

/// What has become of the page that an entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is in no region any more.
    Gone,
    /// The entry stays, until the page has gone.
    Kept,
    /// The page comes by again and again and renews its entry: one that is old is of what it no longer holds.
    Renewed,
}

/// 40 bits of fingerprint, 1 of claim, 23 of slot; 27 of offset, 3 of count, 2 of epoch.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(4))]
struct Entry {
    print_slot: u64,
    rest: u32,
}

impl Entry {
    fn new(print: u64, claimed: bool, place: Place, count: u8, epoch: u8) -> Self {
        let rest = place.offset | u32::from(count) << OFFSET_BITS | u32::from(epoch & 3) << (OFFSET_BITS + 3);
        Self { print_slot: print << 24 | u64::from(claimed) << SLOT_BITS | u64::from(place.slot), rest }
    }
    fn print(self) -> u64 {
        self.print_slot >> 24
    }
    #[expect(clippy::cast_possible_truncation, reason = "24 bits are kept")]
    fn place(self) -> Place {
        Place { slot: self.print_slot as u32 & SLOTS_MAX, offset: self.rest & ((1 << OFFSET_BITS) - 1) }
    }
    fn is_claimed(self) -> bool {
        self.print_slot >> SLOT_BITS & 1 == 1
    }
    fn count(self) -> u8 {
        (self.rest >> OFFSET_BITS) as u8 & COUNT_MAX
    }
    fn epoch(self) -> u8 {
        (self.rest >> (OFFSET_BITS + 3)) as u8 & 3
    }
}

/// The forest.
#[derive(Debug)]
pub struct Index {
    trees: Vec<Vec<Entry>>,
    /// log2 of the number of trees.
    bits: u32,
    len: usize,
    epoch: u8,
}

impl Default for Index {
    fn default() -> Self {
        Self { trees: vec![Vec::new()], bits: 0, len: 0, epoch: 0 }
    }
}

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Contents tracked.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is tracked.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> usize {
        let entries: usize = self.trees.iter().map(Vec::capacity).sum();
        entries * size_of::<Entry>() + self.trees.capacity() * size_of::<Vec<Entry>>()
    }

    /// Takes note of a page and tells what was known of its content. With `claim` the content is [claimed](Self::is_claimed)
    /// from now on.
    ///
    /// Seeing the page that an entry already points to changes nothing but the entry's age.
    pub fn note(&mut self, digest: Digest, place: Place, claim: bool) -> Seen {
        let print = digest.0 >> 24;
        let epoch = self.epoch;
        let tree = &mut self.trees[tree_of(print, self.bits)];
        let at = tree.partition_point(|entry| entry.print() < print);
        if let Some(entry) = tree.get_mut(at).filter(|entry| entry.print() == print) {
            let (first, count, claimed) = (entry.place(), entry.count(), entry.is_claimed() || claim);
            if first.slot == NOBODY {
                *entry = Entry::new(print, claimed, place, count, epoch);
                return Seen::Often(count);
            }
            if first == place {
                *entry = Entry::new(print, claimed, first, count, epoch);
                return if count > 1 { Seen::Often(count - 1) } else { Seen::New };
            }
            *entry = Entry::new(print, claimed, first, (count + 1).min(COUNT_MAX), epoch);
            return if count > 1 { Seen::Often(count) } else { Seen::Once(first) };
        }
        if tree.len() == tree.capacity() {
            tree.reserve_exact(TREE_STEP);
        }
        tree.insert(at, Entry::new(print, claim, place, 1, epoch));
        self.len += 1;
        if tree.len() > TREE_MAX {
            self.double();
        }
        Seen::New
    }

    /// Whether a content has been claimed: it is in memory that has been read whole, and may be marked.
    pub fn is_claimed(&self, digest: Digest) -> bool {
        let print = digest.0 >> 24;
        let tree = &self.trees[tree_of(print, self.bits)];
        let at = tree.partition_point(|entry| entry.print() < print);
        tree.get(at).is_some_and(|entry| entry.print() == print && entry.is_claimed())
    }

    /// Begins the next epoch, for the entries noted from now on.
    pub fn age(&mut self) {
        self.epoch = (self.epoch + 1) & 3;
    }

    /// Drops the entries whose page has gone, and those that no page has renewed for two epochs although pages like theirs
    /// renew them. `fate` is asked about an entry's page, and whether the entry is so old. Contents that were seen on other
    /// pages too outlive the page that was noted for them, until nobody has renewed them for two epochs.
    pub fn sweep(&mut self, mut fate: impl FnMut(Place, bool) -> Fate) {
        let epoch = self.epoch;
        self.len = 0;
        for tree in &mut self.trees {
            tree.retain_mut(|entry| {
                let place = entry.place();
                let old = (epoch + 4 - entry.epoch()) & 3 >= 2;
                let fate = if place.slot == NOBODY { Fate::Gone } else { fate(place, old) };
                if fate != Fate::Gone {
                    return !(old && fate == Fate::Renewed);
                }
                let kept = entry.count() > 1 && !old;
                if kept {
                    let place = Place { slot: NOBODY, offset: 0 };
                    *entry = Entry::new(entry.print(), entry.is_claimed(), place, entry.count(), entry.epoch());
                }
                kept
            });
            tree.shrink_to(tree.len().next_multiple_of(TREE_STEP));
            self.len += tree.len();
        }
    }

    /// Cuts every tree in two. All at once, because the bits that choose a tree are counted for all.
    fn double(&mut self) {
        self.bits += 1;
        let bits = self.bits;
        self.trees = std::mem::take(&mut self.trees)
            .into_iter()
            .enumerate()
            .flat_map(|(number, tree)| {
                let cut = tree.partition_point(|entry| tree_of(entry.print(), bits) <= 2 * number);
                let (low, high) = tree.split_at(cut);
                [tidy(low), tidy(high)]
            })
            .collect();
    }
}

/// The tree that a 40-bit fingerprint belongs to: its leading bits.
#[expect(clippy::cast_possible_truncation, reason = "at most 40 bits of a 64-bit usize")]
fn tree_of(print: u64, bits: u32) -> usize {
    (print >> (40 - bits)) as usize
}

fn tidy(entries: &[Entry]) -> Vec<Entry> {
    let mut tree = Vec::with_capacity(entries.len().next_multiple_of(TREE_STEP));
    tree.extend_from_slice(entries);
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn digest(content: u64) -> Digest {
        Digest(crate::random::mix(content))
    }

    #[test]
    fn first_twin_is_credited_once() {
        let mut index = Index::new();
        let (a, b, c) =
            (Place { slot: 1, offset: 7 }, Place { slot: 2, offset: 9 }, Place { slot: 0x7f_fffe, offset: 0x7ff_ffff });
        assert_eq!(index.note(digest(5), a, false), Seen::New);
        assert_eq!(index.note(digest(5), a, false), Seen::New);
        assert_eq!(index.note(digest(5), b, false), Seen::Once(a));
        assert_eq!(index.note(digest(5), c, false), Seen::Often(2));
        assert_eq!(index.note(digest(5), a, false), Seen::Often(2));
        assert_eq!(index.len(), 1);
        assert_eq!(index.note(digest(6), c, false), Seen::New);
        assert_eq!(index.note(digest(6), a, false), Seen::Once(c));
    }

    #[test]
    fn a_million_contents_take_at_most_sixteen_bytes_each() {
        let mut index = Index::new();
        for content in 0..1_000_000 {
            #[expect(clippy::cast_possible_truncation)]
            let place = Place { slot: 3, offset: content as u32 };
            assert_eq!(index.note(digest(content), place, false), Seen::New);
        }
        assert_eq!(index.len(), 1_000_000);
        let per_entry = index.bytes() as f64 / 1e6;
        assert!(per_entry <= 16.0, "{per_entry} bytes an entry");
    }

    #[test]
    fn sweeping_forgets_the_dead_and_the_outdated() {
        let mut index = Index::new();
        for content in 0..3000 {
            index.note(digest(content), Place { slot: u32::from(content % 3 == 0), offset: 1 }, false);
        }
        index.sweep(|place, _| if place.slot == 1 { Fate::Kept } else { Fate::Gone });
        assert_eq!(index.len(), 1000);
        index.age();
        index.note(digest(0), Place { slot: 1, offset: 1 }, false);
        index.age();
        index.sweep(|_, _| Fate::Renewed);
        assert_eq!(index.len(), 1, "only the renewed entry is younger than two epochs");
    }

    #[test]
    fn what_several_pages_hold_outlives_the_one_that_was_noted() {
        let mut index = Index::new();
        let place = |slot| Place { slot, offset: 1 };
        index.note(digest(0), place(1), false);
        index.note(digest(0), place(2), false);
        index.note(digest(1), place(1), false);
        let but_the_first = |place: Place, _| if place.slot == 1 { Fate::Gone } else { Fate::Renewed };
        index.sweep(but_the_first);
        assert_eq!(index.len(), 1, "nobody else held the other");
        assert_eq!(index.note(digest(0), place(3), false), Seen::Often(2));
        index.sweep(|place, _| if place.slot == 3 { Fate::Gone } else { Fate::Renewed });
        assert_eq!(index.len(), 1);
        index.age();
        index.age();
        index.sweep(but_the_first);
        assert!(index.is_empty(), "for two epochs nobody has had it");
    }

    proptest! {
        /// Against a plain map: what is known of a content is what was noted of it.
        #[test]
        fn agrees_with_a_plain_map(notes in proptest::collection::vec((0u64..400, 0u32..3, 0u32..50), 0..3000)) {
            let mut index = Index::new();
            let mut model: HashMap<u64, (Place, u8)> = HashMap::new();
            for (content, slot, offset) in notes {
                let place = Place { slot, offset };
                let expected = match model.get_mut(&content) {
                    None => { model.insert(content, (place, 1)); Seen::New }
                    Some((first, count)) if *first == place => if *count > 1 { Seen::Often(*count - 1) } else { Seen::New },
                    Some((first, count)) => {
                        let before = *count;
                        *count = (before + 1).min(COUNT_MAX);
                        if before > 1 { Seen::Often(before) } else { Seen::Once(*first) }
                    }
                };
                prop_assert_eq!(index.note(digest(content), place, false), expected);
            }
            prop_assert_eq!(index.len(), model.len());
        }
    }
}
