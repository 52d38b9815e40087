//! How we react to regions that appeared, changed or ended since the last cycle.

use super::Engine;
use crate::host::Snapshot;
use crate::index::PageStatus;
use crate::keys::{FamilyKey, OwnerKey, RegionKey};
use crate::learned::read_for_newcomers;
use crate::region::{Age, Region};
use crate::units::Pages;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;

/// A family with new regions.
struct NewFamily {
    owner: OwnerKey,
    /// The age of the family's oldest region in another process, nanoseconds.
    oldest_ns: Option<u64>,
}

impl Engine {
    pub(super) fn update_regions(&mut self, snapshot: &Snapshot) {
        let seed = self.config.seed;
        let now_ns = snapshot.now_ns;
        let appeared = self.running;
        let ended = self.table.update(&snapshot.regions, seed, |view| Region::new(view, now_ns, appeared, seed));
        let is_first = !std::mem::replace(&mut self.running, true);
        let (adopted, unvisited) = self.experience.verdicts.give(&mut self.table, now_ns);
        if adopted > Pages(0) {
            self.ksmd.marker.adopt(now_ns, snapshot.ksm.broken);
            self.ksmd.scheduler.request(unvisited);
        }
        read_for_newcomers(&mut self.table, now_ns, self.ladder.levels());
        let mut ended_keys = FxHashSet::default();
        let mut gone: FxHashSet<OwnerKey> = FxHashSet::default();
        for region in ended {
            ended_keys.insert(region.view.key);
            gone.insert(region.view.owner);
            // Perhaps we only cut its mapping in another way.
            let next = self.table.at(region.view.key, region.view.first);
            let is_cut_anew = next.is_some_and(|next| next.in_blocks != region.in_blocks);
            if region.age.appeared() && !is_cut_anew {
                self.experience.lifetimes.record_end(region.view.family, now_ns - region.seen_ns, now_ns);
            }
            if region.marked_resident() > Pages(0) {
                self.ksmd.scheduler.request_reaping(region.merged_by_ksmd(), now_ns);
            }
        }
        for region in self.table.iter() {
            gone.remove(&region.view.owner);
        }
        self.saving.forget(&gone);
        self.judge_by_family(now_ns);
        self.find_relatives();
        self.note_merged_before(now_ns, is_first, &ended_keys);
        self.find_again(ended_keys);
        if self.table.wants_sweep() {
            let table = &self.table;
            self.contents.index.sweep(|page| match table.get(page.slot) {
                Some(_) => PageStatus::Present,
                None => PageStatus::Removed,
            });
            self.table.release_slots();
        }
    }

    /// Notes new regions that are marked already: an earlier run has merged pages there, or we have, and the mapping
    /// has grown or moved since then. `ended` are the mappings of regions that have ended.
    fn note_merged_before(&mut self, now_ns: u64, is_first: bool, ended: &FxHashSet<RegionKey>) {
        let mut children = Vec::new();
        for (slot, region) in self.table.numbered_mut() {
            if region.seen_ns != now_ns || !region.view.named {
                continue;
            }
            if is_first || region.relatives.is_none() || ended.contains(&region.view.key) {
                region.usage.readings_due = 1;
            } else {
                children.push(slot);
            }
        }
        self.inherit_merged(&children);
    }

    /// After a fork, a child maps its parent's merged pages, too, and gets a copy of each that it writes.
    fn inherit_merged(&mut self, children: &[u32]) {
        let mut inherited = Vec::new();
        for &slot in children {
            let Some(child) = self.table.get(slot) else { continue };
            let parents = self.parent(child).map(|parent| {
                let mut merged = parent.usage.merged.clone();
                merged.keep_only(&(child.view.first..child.end()));
                (merged, parent.usage.readings_due)
            });
            inherited.push((slot, parents));
        }
        for (slot, parents) in inherited {
            let Some(child) = self.table.get_mut(slot) else { continue };
            match parents {
                Some((merged, readings_due)) => {
                    child.usage.merged_before = merged.len();
                    child.usage.merged = merged;
                    child.usage.readings_due = readings_due;
                }
                None => child.usage.readings_due = 1,
            }
        }
    }

    /// Sets the age at which each new region becomes worth merging, by the lifetimes of its family.
    fn judge_by_family(&mut self, now_ns: u64) {
        let mut families: BTreeMap<FamilyKey, NewFamily> = BTreeMap::new();
        for region in self.table.iter().filter(|region| region.is_new(now_ns)) {
            families.insert(region.view.family, NewFamily { owner: region.view.owner, oldest_ns: None });
        }
        if families.is_empty() {
            return;
        }
        for region in self.table.iter().filter(|region| !region.is_new(now_ns)) {
            let Some(family) = families.get_mut(&region.view.family) else { continue };
            if family.owner != region.view.owner {
                family.oldest_ns = family.oldest_ns.max(Some(now_ns - region.seen_ns));
            }
        }
        let lifetimes = &mut self.experience.lifetimes;
        for (&key, family) in &families {
            lifetimes.record_begin(key, family.oldest_ns, now_ns);
        }
        for region in self.table.iter_mut().filter(|region| region.is_new(now_ns)) {
            region.age = Age::of_new(lifetimes.worth_from_ns(region.view.family, self.config.mechanism));
        }
    }

    /// The index may know some contents only from pages of regions that have ended. For each region that has ended, we
    /// read one of its partners (regions with common pages) whole again, so that new regions find these contents.
    fn find_again(&mut self, mut ended: FxHashSet<RegionKey>) {
        for region in self.table.iter_mut().filter(|region| region.life.is_judged() || region.kin.is_some()) {
            if region.usage.partner.is_some_and(|partner| ended.remove(&partner)) {
                region.examine(self.ladder.levels());
            }
        }
    }
}
