//! The contents that we've seen, as digests, and how much of a page a digest covers.

use super::Engine;
use crate::hash::{Digest, DigestSet, LINES};
use crate::index::{Index, PageStatus};
use crate::region::table::RegionTable;
use crate::strength::Strength;
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// We remember at most this many colliding digests: digests that pages with different contents have in common.
const COLLIDING_MOST: usize = 1 << 16;

#[derive(Debug)]
pub(super) struct Contents {
    pub index: Index,
    pub strength: Strength,
    /// Digests that pages with different contents have in common, at the present strength.
    pub colliding: Arc<DigestSet>,
    /// The same digests, cut to the 32 bits that surveys keep.
    pub colliding_fingerprints: FxHashSet<u32>,
    /// Pages we read on the bottom level since the index last aged.
    pub bottom_pages: u64,
}

impl Contents {
    pub fn new(index: Index, strength: Strength) -> Self {
        let colliding = Arc::default();
        Self { index, strength, colliding, colliding_fingerprints: FxHashSet::default(), bottom_pages: 0 }
    }

    /// Drops entries of the index that nothing has renewed for some time.
    pub fn age(&mut self, table: &RegionTable) {
        self.bottom_pages = 0;
        self.index.age();
        self.index.sweep(|page| match table.get(page.slot) {
            None => PageStatus::Removed,
            // We keep sampling regions on the bottom level, which renews their entries.
            Some(region) if region.life.level() == 1 && region.hold.may_sample() => PageStatus::Resampled,
            Some(_) => PageStatus::Present,
        });
    }

    /// Remembers digests that pages with different contents have in common.
    pub fn note_colliding(&mut self, digests: &[Digest]) {
        let colliding = Arc::make_mut(&mut self.colliding);
        for &digest in digests {
            colliding.insert(digest);
            self.colliding_fingerprints.insert(digest.fingerprint());
        }
        if colliding.len() > COLLIDING_MOST || self.strength.lines() == LINES {
            colliding.clear();
            self.colliding_fingerprints.clear();
        }
    }
}

impl Engine {
    /// Whether we may have the kernel hash only a part of each page. We may if we merge on request, because then the
    /// kernel compares whole pages before it merges them.
    pub(super) fn hashes_lines(&self) -> bool {
        self.snapshot.hashes_lines && !self.by_marks()
    }

    /// How many cache lines to hash of each page; `None` means whole pages. If we merge nothing, we also hash whole
    /// pages, because then no byte comparison backs up the digests in our reports.
    pub(super) fn lines(&mut self) -> Option<u32> {
        if !self.hashes_lines() {
            return None;
        }
        if !self.snapshot.ksm.ours && self.contents.strength.raise_to_full() {
            self.forget_digests();
        }
        let lines = self.contents.strength.lines();
        if lines < LINES { Some(lines) } else { None }
    }

    /// Forgets all digests, because new ones will cover more or fewer cache lines and can't be compared with them. We
    /// sample regions without merged pages again instead of reading them whole right away: most of their pages only
    /// looked equal because we hashed few lines of them.
    pub(super) fn forget_digests(&mut self) {
        self.contents = Contents::new(self.contents.index.emptied(), self.contents.strength.clone());
        let top = self.ladder.levels();
        self.table.iter_mut().for_each(|region| region.forget_digests(top));
    }
}
