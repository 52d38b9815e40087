//! Pages that processes share through fork.
//!
//! Relatives map the same frame at the same address, so we read such a page in one of them only, and their regions don't
//! count as copies of each other. If another program has equal pages, merging has to replace the mapping of each relative
//! by itself: until the last one is replaced, the frame stays. So once the first region has duplicates, we read and judge
//! its relatives as well.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageSample, PageState};
use crate::keys::{LineageKey, RegionKey};
use crate::region::{Fork, Region};
use crate::units::Vpn;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;

/// Relatives have a region at the same place.
fn place(region: &Region) -> (LineageKey, Vpn) {
    (region.view.lineage, region.view.first)
}

impl Engine {
    /// Finds the regions that processes have in common through fork, and says where we read their pages.
    pub(super) fn find_relatives(&mut self) {
        let mut relatives: FxHashMap<_, (RegionKey, usize)> = FxHashMap::default();
        for region in self.table.iter() {
            let (first, number) = relatives.entry(place(region)).or_insert((region.view.key, 0));
            *first = (*first).min(region.view.key);
            *number += 1;
        }
        for region in self.table.iter_mut() {
            let (first, number) = relatives[&place(region)];
            region.fork = match region.fork {
                _ if number == 1 => Fork::Alone,
                _ if region.view.key == first => Fork::First,
                Fork::Follows => Fork::Follows,
                Fork::Alone | Fork::First | Fork::Relative => Fork::Relative,
            };
        }
    }

    /// The regions where we read pages that are shared through fork.
    pub(super) fn plan_forked(&self) -> BTreeSet<RegionKey> {
        self.table.iter().filter(|region| region.reads_forked()).map(|region| region.view.key).collect()
    }

    /// Reads the relatives of regions that have duplicates.
    pub(super) fn follow_relatives(&mut self) {
        let least = self.config.threshold().fraction();
        let mut found = FxHashSet::default();
        for region in self.table.iter() {
            if region.fork == Fork::First && region.life.is_judged() && region.counts().ratio() >= least {
                found.insert(place(region));
            }
        }
        for region in self.table.iter_mut() {
            let is_found = region.fork == Fork::Relative && found.contains(&place(region));
            if is_found && region.hold.may_examine(self.snapshot.now_ns) {
                region.fork = Fork::Follows;
                region.examine(self.ladder.levels());
            }
        }
    }

    /// Whether we've seen a fork-shared page's content only on a relative's same page, which is the same frame.
    pub(super) fn is_relatives(&self, region: &Region, sample: &PageSample, digest: Digest) -> bool {
        if sample.state != PageState::Shared {
            return false;
        }
        let Some(only) = self.contents.index.only_page_of(digest) else { return false };
        let Some(other) = self.table.get(only.slot) else { return false };
        other.view.key != region.view.key
            && other.view.lineage == region.view.lineage
            && other.page_at(only.offset) == sample.page
    }
}
