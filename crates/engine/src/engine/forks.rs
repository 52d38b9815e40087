//! Pages that processes share through fork.
//!
//! Relatives map the same frame at the same address, so we read such a page in one of them only, and their regions
//! don't count as copies of each other. If another program has equal pages, merging has to replace each relative's
//! mapping separately: until the last one is replaced, the frame stays.
//!
//! With ksmd we mark each relative. So once the first region has duplicates, we read and judge its relatives as well.
//!
//! On request we name the page in each relative. The frame that stays becomes a merged one for everybody who maps it,
//! but the kernel only marks the mappings that we name, and memory can only be unmerged where it's marked. So all
//! relatives' mappings get marked before the first page is merged: we name one page of each as its own replacement.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageSample, PageState};
use crate::keys::{DomainKey, LineageKey, RegionKey};
use crate::region::{Fork, Region};
use crate::requests::{IndexedPage, Pair};
use crate::sampling::ladder::may_be_promoted;
use crate::units::{Vpn, count};
use rustc_hash::{FxHashMap, FxHashSet};

/// With more relatives than this, we don't read the pages that they share. Each mapping costs ksmd 12 us and 64 bytes of
/// records, while all of them together free one frame.
const RELATIVES_MOST: u64 = 20;

/// The regions of related processes at the same address.
#[derive(Debug)]
struct Family {
    first: RegionKey,
    /// The slots of these regions in the table.
    members: Vec<u32>,
    domain: DomainKey,
    /// Whether we may merge all of them. If one keeps the frame, merging the others saves nothing.
    is_ours: bool,
}

/// The families that we may merge.
#[derive(Debug, Default)]
pub(super) struct Families(FxHashMap<(LineageKey, Vpn), Family>);

/// Identifies a region's family: relatives have the region at the same address.
pub(super) fn place(region: &Region) -> (LineageKey, Vpn) {
    (region.view.lineage, region.view.first)
}

impl Engine {
    /// Finds the regions that processes have in common through fork, and decides in which of them we read the shared
    /// pages.
    pub(super) fn find_relatives(&mut self) {
        let mut families: FxHashMap<_, Family> = FxHashMap::default();
        for (slot, region) in self.table.numbered_mut() {
            let first = region.view.key;
            let domain = region.view.domain;
            let new = || Family { first, members: Vec::new(), domain, is_ours: true };
            let family = families.entry(place(region)).or_insert_with(new);
            family.first = family.first.min(first);
            family.members.push(slot);
            family.is_ours &= region.hold.may_sample() && domain == family.domain;
        }
        for region in self.table.iter_mut() {
            region.has_relatives = families[&place(region)].members.len() > 1;
        }
        families.retain(|_, family| family.is_ours && (2..=RELATIVES_MOST).contains(&count(family.members.len())));
        for region in self.table.iter_mut() {
            region.fork = match (families.get(&place(region)), region.fork) {
                (None, _) => Fork::Alone,
                (Some(family), _) if region.view.key == family.first => Fork::First,
                (Some(_), Fork::Follows) => Fork::Follows,
                (Some(_), Fork::Alone | Fork::First | Fork::Relative) => Fork::Relative,
            };
        }
        self.families = Families(families);
    }

    /// With ksmd, reads the relatives of regions that have duplicates among the pages that they share through fork. On
    /// request, marks relatives of marked regions, because a relative may have been forked just before we marked its
    /// parent.
    pub(super) fn follow_relatives(&mut self) {
        if !self.carrier().by_marks {
            self.mark_relatives();
            return;
        }
        let least = self.config.threshold().fraction();
        let mut found = FxHashSet::default();
        for region in self.table.iter() {
            let is_judged_first = region.fork == Fork::First && region.life.is_judged();
            if is_judged_first && region.counts().ratio() >= least && region.forked_share() >= least {
                found.insert(place(region));
            }
        }
        let now_ns = self.snapshot.now_ns;
        let pace = self.pace();
        for region in self.table.iter_mut() {
            let is_found = region.fork == Fork::Relative && found.contains(&place(region));
            if is_found && may_be_promoted(region, now_ns, pace, &self.config) {
                region.fork = Fork::Follows;
                region.examine(self.ladder.levels());
                self.plan.reading.foreground = true;
            }
        }
    }

    /// Records whether a page has a frame of its own. Among relatives that share a frame of zeros, we take it for the
    /// first one's. Once a page is merged, we can't tell any more.
    pub(super) fn record_frame(&mut self, slot: u32, sample: &PageSample) {
        let Some(region) = self.table.get(slot) else { return };
        let is_zero = sample.digest == Digest::ZERO;
        let is_own = match sample.state {
            PageState::ZeroMapped | PageState::Merged => return,
            PageState::Private => is_zero || region.has_relatives && !self.may_be_left(region, sample.page),
            PageState::Shared => is_zero && region.fork == Fork::First,
            PageState::Absent => false,
        };
        let Some(region) = self.table.get_mut(slot) else { return };
        if is_own {
            region.usage.own.insert(sample.page);
        } else if !region.usage.own.is_empty() {
            region.usage.own.remove(sample.page);
        }
    }

    /// Whether a private page may just be left over: it was shared through fork until ksmd gave the relatives a merged
    /// frame instead.
    fn may_be_left(&self, region: &Region, page: Vpn) -> bool {
        let Some(family) = self.families.0.get(&place(region)) else { return false };
        for relative in family.members.iter().filter_map(|&slot| self.table.get(slot)) {
            if relative.view.key != region.view.key && relative.is_marked(page) && !relative.usage.own.contains(page) {
                return true;
            }
        }
        false
    }

    fn mark_relatives(&mut self) {
        for family in self.families.0.values() {
            let mut unnamed = Vec::new();
            for &slot in &family.members {
                if let Some(region) = self.table.get(slot).filter(|region| !region.is_named()) {
                    unnamed.push(IndexedPage::new(region, slot, region.view.first));
                }
            }
            if unnamed.len() < family.members.len() {
                for page in unnamed {
                    self.requests.mark(page);
                }
            }
        }
    }

    /// Names the pages of this cycle's pairs in all relatives, too. A pair waits until all relatives' mappings are
    /// marked. We drop it if one of these pages may not be merged now.
    pub(super) fn name_relatives(&mut self) {
        let mut marking = FxHashSet::default();
        for pair in self.requests.take_pairs() {
            let Some(pages) = self.pages_of_families(&pair) else { continue };
            let mut is_marked = true;
            for &page in &pages {
                let is_named = self.table.get(page.location.slot).is_some_and(Region::is_named);
                is_marked &= is_named;
                if !is_named && marking.insert(page.location.slot) {
                    self.requests.mark(page);
                }
            }
            if !is_marked {
                self.requests.put_off(pair);
            } else if !self.requests.name(pair, &pages) {
                // The page to keep can't have that many sharers.
                self.contents.index.point_to(pair.digest, pair.take.location);
            }
        }
    }

    /// The pages of a pair that are shared through fork, in all relatives. `None` if one of them may not be merged now.
    fn pages_of_families(&self, pair: &Pair) -> Option<Vec<IndexedPage>> {
        let mut pages = Vec::new();
        for named in [Some(pair.take), pair.keep].into_iter().flatten() {
            let region = self.table.get(named.location.slot).filter(|region| region.view.key == named.region)?;
            let Some(family) = self.families.0.get(&place(region)) else { continue };
            for &slot in &family.members {
                let relative = self.table.get(slot)?;
                let page = IndexedPage::new(relative, slot, named.page);
                if !relative.hold.may_mark(self.snapshot.now_ns) {
                    return None;
                }
                let is_left_alone = page != named && !relative.may_be_named(named.page, self.snapshot.now_ns);
                if relative.holds(page.region, page.page) && !is_left_alone {
                    pages.push(page);
                }
            }
        }
        Some(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::host::{RegionView, Snapshot};
    use crate::keys::OwnerKey;
    use crate::region::test_view;

    /// Three processes of one lineage and one of another, with a region each.
    fn forks(change: impl Fn(&mut RegionView)) -> Vec<Fork> {
        let mut engine = Engine::new(Config::default());
        let mut regions = Vec::new();
        for (key, lineage) in [(1, 7), (2, 7), (3, 7), (4, 8)] {
            let view = test_view(key, 1_000, 100);
            let mut view = RegionView { owner: OwnerKey(key), lineage: LineageKey(lineage), ..view };
            change(&mut view);
            regions.push(view);
        }
        engine.plan(Snapshot { regions, ..Snapshot::default() });
        engine.regions().map(|region| region.fork).collect()
    }

    #[test]
    fn the_first_of_a_family_is_read_for_all_if_we_may_merge_all() {
        let family = [Fork::First, Fork::Relative, Fork::Relative, Fork::Alone];
        assert_eq!(forks(|_| ()), family);
        assert_eq!(forks(|view| view.left_alone = view.owner == OwnerKey(4)), family);
        assert_eq!(forks(|view| view.left_alone = view.owner == OwnerKey(2)), [Fork::Alone; 4]);
        assert_eq!(forks(|view| view.domain = DomainKey(u16::from(view.owner == OwnerKey(3)))), [Fork::Alone; 4]);
        let elsewhere = [Fork::First, Fork::Relative, Fork::Alone, Fork::Alone];
        assert_eq!(forks(|view| view.first = Vpn(1_000 + u64::from(view.owner == OwnerKey(3)))), elsewhere);
    }
}
