//! Pages that processes share through fork.
//!
//! Relatives map the same frame at the same address, so we read such a page in one of them only, and their regions don't
//! count as copies of each other. If another program has equal pages, merging has to replace the mapping of each relative
//! by itself: until the last one is replaced, the frame stays. So once the first region has duplicates, we read and judge
//! its relatives as well.
//!
//! Only with ksmd: on request the kernel merges a fork-shared page for all relatives at once, and marks the mapping of one.
//! The others would hold merged memory that no mark shows.

use super::Engine;
use crate::keys::{DomainKey, LineageKey, RegionKey};
use crate::region::{Fork, Region};
use crate::sampling::ladder::may_be_promoted;
use crate::units::Vpn;
use rustc_hash::{FxHashMap, FxHashSet};

/// With more relatives than this, we don't read the pages that they share. Each mapping costs ksmd 12 us and 64 bytes of
/// records, while all of them together free one frame.
const RELATIVES_MOST: u64 = 20;

/// The regions that relatives have at one place.
struct Family {
    first: RegionKey,
    number: u64,
    domain: DomainKey,
    /// Whether we may merge all of them. If one keeps the frame, merging the others saves nothing.
    is_ours: bool,
}

/// Relatives have a region at the same place.
fn place(region: &Region) -> (LineageKey, Vpn) {
    (region.view.lineage, region.view.first)
}

impl Engine {
    /// Finds the regions that processes have in common through fork, and says where we read their pages.
    pub(super) fn find_relatives(&mut self) {
        if !self.carrier().by_marks {
            return;
        }
        let mut families: FxHashMap<_, Family> = FxHashMap::default();
        for region in self.table.iter() {
            let first = region.view.key;
            let domain = region.view.domain;
            let family = families.entry(place(region)).or_insert(Family { first, number: 0, domain, is_ours: true });
            family.first = family.first.min(first);
            family.number += 1;
            family.is_ours &= region.hold.may_sample() && domain == family.domain;
        }
        for region in self.table.iter_mut() {
            let family = &families[&place(region)];
            region.fork = match region.fork {
                _ if !(2..=RELATIVES_MOST).contains(&family.number) || !family.is_ours => Fork::Alone,
                _ if region.view.key == family.first => Fork::First,
                Fork::Follows => Fork::Follows,
                Fork::Alone | Fork::First | Fork::Relative => Fork::Relative,
            };
        }
    }

    /// Reads the relatives of regions that have duplicates among the pages that they share through fork.
    pub(super) fn follow_relatives(&mut self) {
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
