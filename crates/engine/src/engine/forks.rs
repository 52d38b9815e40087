//! Pages that processes share through fork.
//!
//! Relatives (processes forked from each other) map the same frame at the same address, so we read such a page in one
//! of them only, and their regions don't count as copies of each other. Each process goes on to map memory of its own
//! right beside its inherited memory, and we take the two for one region. So relatives' regions overlap, but needn't
//! begin at the same address. If another program has equal pages, merging has to replace each relative's mapping
//! separately: until the last one is replaced, the frame stays.
//!
//! With ksmd we mark the pages in each relative. So once we find duplicates in the region where we read the shared
//! pages, we read and judge its relatives' regions as well.
//!
//! On request we have the kernel replace the page in each relative. The frame that it keeps becomes a merged one for
//! everybody who maps it, but the kernel only marks mappings with a page that we gave it, and memory can only be
//! unmerged where it's marked. So before the first merge we get all relatives' mappings marked: we ask the kernel to
//! replace one page of each with that same page.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageRun, PageSample, PageState, RegionView, Span};
use crate::index::Location;
use crate::keys::{LineageKey, OwnerKey, RegionKey};
use crate::region::table::RegionTable;
use crate::region::{Fork, RELATIVES_MOST, Region};
use crate::requests::{IndexedPage, Pair};
use crate::sampling::ladder::may_be_promoted;
use crate::units::{Vpn, count, index};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};

/// We don't merge a family with more regions than this. A process can split inherited memory into any number of
/// regions, and for each page we walk all of them.
const MEMBERS_MOST: usize = 512;

/// Overlapping regions of processes that were forked from each other.
#[derive(Debug)]
struct ForkFamily {
    /// The slots of these regions in the table.
    members: Vec<u32>,
    /// How many processes the members belong to.
    processes: u64,
    /// The process in which we read the shared pages.
    reader: OwnerKey,
    /// The process whose region appeared last, and when the last region of the other processes appeared, nanoseconds.
    youngest: OwnerKey,
    others_seen_ns: u64,
    /// Whether we may merge all members. If one of them keeps the frame, merging the others saves nothing.
    is_ours: bool,
    /// Whether processes outside the family map most of its shared pages, too.
    has_outsiders: bool,
}

impl ForkFamily {
    /// `None` if all these regions belong to one process.
    fn of(members: Vec<u32>, table: &RegionTable) -> Option<Self> {
        let regions: Vec<&Region> = table.all_in(&members).collect();
        let owners: FxHashSet<OwnerKey> = regions.iter().map(|region| region.view.owner).collect();
        if owners.len() < 2 {
            return None;
        }
        // The oldest process is likely the others' ancestor. But a server may fork its workers from a younger process
        // that has loaded their data, so we only consider large regions.
        let largest = regions.iter().map(|region| region.view.pages).max()?;
        let large = regions.iter().filter(|region| 2 * region.view.pages.0 >= largest.0);
        let reader = large.min_by_key(|region| region.view.key)?.view.owner;
        let youngest = regions.iter().max_by_key(|region| region.seen_ns)?.view.owner;
        let others = regions.iter().filter(|region| region.view.owner != youngest);
        let others_seen_ns = others.map(|region| region.seen_ns).max()?;
        let domain = regions[0].view.domain;
        let may_be_merged = regions.iter().all(|region| region.hold.may_sample() && region.view.domain == domain);
        let is_ours = may_be_merged && members.len() <= MEMBERS_MOST;
        let processes = count(owners.len());
        Some(Self { members, processes, reader, youngest, others_seen_ns, is_ours, has_outsiders: false })
    }
}

/// All families. A region's [`relatives`](Region::relatives) is the number of its family.
#[derive(Debug, Default)]
pub(super) struct ForkFamilies(Vec<ForkFamily>);

impl ForkFamilies {
    fn of(table: &RegionTable) -> Self {
        let mut places: Vec<(LineageKey, Vpn, u32)> = Vec::new();
        for (slot, region) in table.numbered() {
            places.push((region.view.lineage, region.view.first, slot));
        }
        places.sort_unstable();
        let mut families = Vec::new();
        let mut members = Vec::new();
        let mut last = LineageKey::default();
        let mut end = Vpn(0);
        for (lineage, first, slot) in places {
            if lineage != last || first >= end {
                families.extend(ForkFamily::of(std::mem::take(&mut members), table));
                end = first;
            }
            members.push(slot);
            last = lineage;
            end = end.max(table.get(slot).map_or(first, Region::end));
        }
        families.extend(ForkFamily::of(members, table));
        Self(families)
    }

    fn get(&self, region: &Region) -> Option<&ForkFamily> {
        self.0.get(index(region.relatives?))
    }

    /// The regions of a region's family. `None` also if there are too many to search.
    fn members(&self, region: &Region) -> Option<&[u32]> {
        let members = &self.get(region)?.members;
        if members.len() <= MEMBERS_MOST { Some(members) } else { None }
    }
}

/// A page in the middle of the addresses that two regions have in common. One process has likely inherited it from the
/// other.
fn page_in_common(one: &Region, other: &Region) -> Option<Vpn> {
    let first = one.view.first.max(other.view.first);
    let end = one.end().min(other.end());
    if first >= end {
        return None;
    }
    Some(first + (end.0 - first.0) / 2)
}

impl Engine {
    /// Finds the regions that processes have in common through fork, and decides in which of them we read the shared
    /// pages.
    pub(super) fn find_relatives(&mut self) {
        self.fork_families = ForkFamilies::of(&self.table);
        for region in self.table.iter_mut() {
            region.relatives = None;
        }
        for (number, family) in (0..).zip(&self.fork_families.0) {
            for &slot in &family.members {
                if let Some(region) = self.table.get_mut(slot) {
                    region.relatives = Some(number);
                }
            }
        }
        for region in self.table.iter_mut() {
            region.fork = match self.fork_families.get(region) {
                Some(family) if family.is_ours && family.processes <= RELATIVES_MOST => {
                    if region.view.owner == family.reader {
                        Fork::First
                    } else if region.fork == Fork::Follows {
                        Fork::Follows
                    } else {
                        Fork::Relative
                    }
                }
                _ => Fork::Alone,
            };
        }
    }

    /// The family of a region, if we may merge all its members and they aren't too many.
    fn fork_family(&self, region: &Region) -> Option<&ForkFamily> {
        if region.fork == Fork::Alone {
            return None;
        }
        self.fork_families.get(region)
    }

    /// How many processes share a region through fork, if that's too many for merging to pay.
    pub(super) fn crowd(&self, region: &Region) -> Option<u64> {
        let family = self.fork_families.get(region)?;
        let are_many = family.processes > RELATIVES_MOST || family.members.len() > MEMBERS_MOST;
        if !are_many || !region.survey.is_mostly_forked() {
            return None;
        }
        Some(family.processes)
    }

    /// Whether a region is mostly shared through fork with processes that we don't merge: they're out of scope or left
    /// alone, and would keep the frames.
    pub(super) fn has_outsiders(&self, region: &Region) -> bool {
        if !region.survey.is_mostly_forked() {
            return false;
        }
        self.fork_family(region).is_none_or(|family| family.has_outsiders)
    }

    /// Notes for each family whether processes outside it map most of its shared pages, too. We leave such pages
    /// unread.
    pub(super) fn note_outsiders(&mut self) {
        for family in &mut self.fork_families.0 {
            let mut members = self.table.all_in(&family.members);
            family.has_outsiders = members.any(|member| member.reads_forked() && member.survey.is_mostly_forked());
        }
    }

    /// Whether a region belongs to a child forked within this time, nanoseconds, as the only one of its family. A child
    /// that writes a snapshot is alone. Workers, which may write all that they share, are several.
    pub(super) fn is_only_young_child(&self, region: &Region, within_ns: u64) -> bool {
        let is_young = |seen_ns| self.snapshot.now_ns < seen_ns + within_ns;
        let Some(family) = self.fork_families.get(region) else { return false };
        region.view.owner == family.youngest && is_young(region.seen_ns) && !is_young(family.others_seen_ns)
    }

    /// Of a new region's older relatives, the one with the most merged pages. The new region maps these, too. `None`
    /// also if there are too many relatives to search.
    pub(super) fn parent(&self, child: &Region) -> Option<&Region> {
        let mut parent: Option<&Region> = None;
        for region in self.table.all_in(self.fork_families.members(child)?) {
            if region.seen_ns >= child.seen_ns {
                continue;
            }
            let is_better = parent.is_none_or(|parent| region.usage.merged.len() > parent.usage.merged.len());
            if is_better && page_in_common(region, child).is_some() {
                parent = Some(region);
            }
        }
        parent
    }

    /// The mappings in `runs` where we read pages that are shared through fork, each with all regions of its families.
    /// So the host can tell if other processes map such a page, too: they'd keep the frame, and on request it would
    /// become a merged one for them as well.
    pub(super) fn forked_among(&self, runs: &[PageRun]) -> BTreeMap<RegionKey, Vec<Span>> {
        let mut families: BTreeMap<RegionKey, BTreeSet<u32>> = BTreeMap::new();
        for run in runs {
            let Some(region) = self.table.at(run.region, run.first) else { continue };
            if !region.reads_forked() {
                continue;
            }
            families.entry(run.region).or_default().extend(region.relatives);
        }
        let mut forked = BTreeMap::new();
        for (key, numbers) in families {
            let mut spans = Vec::new();
            for number in numbers {
                let Some(family) = self.fork_families.0.get(index(number)) else { continue };
                for region in self.table.all_in(&family.members) {
                    let RegionView { key, first, pages, .. } = region.view;
                    spans.push(Span { region: key, first, pages });
                }
            }
            forked.insert(key, spans);
        }
        forked
    }

    /// With ksmd, reads the relatives of regions that have duplicates, if they share pages through fork. On
    /// request, marks relatives of marked regions, because a relative may have been forked just before we marked its
    /// parent.
    pub(super) fn follow_relatives(&mut self) {
        if !self.by_marks() {
            self.mark_relatives();
            return;
        }
        let least = self.config.threshold().fraction();
        // For each family with duplicates in its first member: whether that member shared pages when we read it.
        let mut found: FxHashMap<Option<u32>, bool> = FxHashMap::default();
        for region in self.table.iter() {
            let is_judged_first = region.fork == Fork::First && region.life.is_judged();
            if is_judged_first && region.counts().ratio() >= least {
                *found.entry(region.relatives).or_default() |= region.forked_share() >= least;
            }
        }
        let now_ns = self.snapshot.now_ns;
        let pace = self.pace();
        for region in self.table.iter_mut() {
            if region.fork != Fork::Relative {
                continue;
            }
            let Some(&first_shares) = found.get(&region.relatives) else { continue };
            // If the fork came after we had read the first relative, only the others' samples show what they share.
            let has_outsiders = self.fork_families.get(region).is_some_and(|family| family.has_outsiders);
            let shares = region.life.is_surveyed() && region.survey.is_mostly_forked() && !has_outsiders;
            if (first_shares || shares) && may_be_promoted(region, now_ns, pace, &self.config) {
                region.fork = Fork::Follows;
                region.examine(self.ladder.levels());
                self.plan.reading.foreground = true;
            }
        }
    }

    /// Records whether a page has a frame of its own, which we can't tell any more once it's merged. If relatives share
    /// a frame of zeros, it counts as the frame of the one in which we read the shared pages.
    pub(super) fn record_frame(&mut self, slot: u32, sample: &PageSample) {
        let Some(region) = self.table.get(slot) else { return };
        let is_zero = sample.digest == Digest::ZERO;
        let is_own = match sample.state {
            PageState::ZeroMapped | PageState::Merged => return,
            PageState::Private => {
                (is_zero || region.relatives.is_some()) && !self.may_be_left(region, sample.page, is_zero)
            }
            PageState::Shared => is_zero && region.fork == Fork::First && !sample.outsiders,
            PageState::Absent => false,
        };
        let Some(region) = self.table.get_mut(slot) else { return };
        if is_own {
            region.usage.own.insert(sample.page);
        } else if !region.usage.own.is_empty() {
            region.usage.own.remove(sample.page);
        }
    }

    /// Whether a page may be private only because ksmd merged it in the relatives, who shared its frame through fork
    /// until then. We record zeros that relatives share as one relative's own ([`Self::record_frame`]).
    fn may_be_left(&self, region: &Region, page: Vpn, is_zero: bool) -> bool {
        let Some(family) = self.fork_family(region) else { return false };
        for relative in self.table.all_in(&family.members) {
            let is_other = relative.view.key != region.view.key && relative.has(page);
            if is_other && relative.is_marked(page) && (is_zero || !relative.usage.own.contains(page)) {
                return true;
            }
        }
        false
    }

    fn mark_relatives(&mut self) {
        let mut unmarked = Vec::new();
        for (slot, region) in self.table.numbered() {
            if region.is_named() {
                continue;
            }
            let Some(family) = self.fork_family(region) else { continue };
            for relative in self.table.all_in(&family.members) {
                if !relative.is_named() {
                    continue;
                }
                if let Some(page) = page_in_common(region, relative) {
                    unmarked.push(IndexedPage::new(region, slot, page));
                    break;
                }
            }
        }
        for page in unmarked {
            self.requests.mark(page);
        }
    }

    /// Extends this cycle's pairs to the same pages of all relatives. A pair waits until all relatives' mappings are
    /// marked. We drop a pair if one of these pages may not be merged now.
    pub(super) fn name_relatives(&mut self) {
        let mut marking = FxHashSet::default();
        let mut instead: FxHashMap<Location, IndexedPage> = FxHashMap::default();
        for mut pair in self.requests.take_pairs() {
            let kept = pair.keep;
            if let Some(keep) = kept {
                if let Some(&other) = instead.get(&keep.location) {
                    pair.keep_instead(other);
                }
            }
            let Some(pages) = self.pages_of_fork_families(&pair) else { continue };
            if let Some(keep) = pair.keep {
                pair.keep_mappers = self.known_mappers(keep);
            }
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
            } else if !self.has_headroom_for(&pair, &pages) {
                self.note_headroom(pair.take.location.slot);
            } else if !self.requests.name(pair, &pages) {
                // The page to keep can't have that many sharers. From now on we keep the other one for the content.
                self.contents.index.point_to(pair.digest, pair.take.location);
                let Some(keep) = kept else { continue };
                let Some(region) = self.table.get(pair.take.location.slot) else { continue };
                if self.room.headroom.take_page(region.view.owner) {
                    instead.insert(keep.location, pair.take);
                }
            }
        }
    }

    /// Uses up headroom for copies of a pair's pages, one for each process that shares them through fork. False if
    /// there isn't enough for all. The page to keep and pages that are merged already have their headroom.
    fn has_headroom_for(&mut self, pair: &Pair, pages: &[IndexedPage]) -> bool {
        let mut owners = Vec::new();
        for page in pages {
            let Some(region) = self.table.get(page.location.slot) else { continue };
            if Some(*page) != pair.keep && !region.usage.merged.contains(page.page) {
                owners.push(region.view.owner);
            }
        }
        self.room.headroom.take_pages(&owners)
    }

    /// A pair's pages that are shared through fork, in each relative. `None` if one of them may not be merged now.
    fn pages_of_fork_families(&self, pair: &Pair) -> Option<Vec<IndexedPage>> {
        let mut pages = Vec::new();
        for named in [Some(pair.take), pair.keep].into_iter().flatten() {
            let region = self.table.get(named.location.slot).filter(|region| region.view.key == named.region)?;
            let Some(family) = self.fork_family(region) else { continue };
            for &slot in &family.members {
                let relative = self.table.get(slot)?;
                if !relative.has(named.page) {
                    continue;
                }
                let page = IndexedPage::new(relative, slot, named.page);
                if !relative.hold.may_mark(self.snapshot.now_ns) {
                    return None;
                }
                let is_left_alone = page != named && !relative.may_be_named(named.page, self.snapshot.now_ns);
                if !is_left_alone {
                    pages.push(page);
                }
            }
        }
        Some(pages)
    }

    /// How many processes map a page, as far as we know: the members of its family that have this address, except those
    /// that we know to have a page of their own there.
    fn known_mappers(&self, page: IndexedPage) -> u32 {
        let Some(region) = self.table.get(page.location.slot) else { return 1 };
        let Some(family) = self.fork_family(region) else { return 1 };
        if region.usage.own.contains(page.page) {
            return 1;
        }
        let mut known = 0;
        for relative in self.table.all_in(&family.members) {
            known += u32::from(relative.has(page.page) && !relative.usage.own.contains(page.page));
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::host::Snapshot;
    use crate::keys::DomainKey;
    use crate::marking::extents::Extent;
    use crate::region::Event;
    use crate::region::test_view;
    use std::time::{Duration, Instant};

    /// Three processes of one lineage and one of another, with a region each.
    fn engine(change: impl Fn(&mut RegionView)) -> Engine {
        let mut engine = Engine::new(Config::default());
        let mut regions = Vec::new();
        for (key, lineage) in [(1, 7), (2, 7), (3, 7), (4, 8)] {
            let view = test_view(key, 1_000, 100);
            let mut view = RegionView { owner: OwnerKey(key), lineage: LineageKey(lineage), ..view };
            change(&mut view);
            regions.push(view);
        }
        engine.plan(Snapshot { regions, ..Snapshot::default() });
        engine
    }

    fn forks(change: impl Fn(&mut RegionView)) -> Vec<Fork> {
        engine(change).regions().map(|region| region.fork).collect()
    }

    /// We read and judged the first relative before the others were forked.
    #[test]
    fn relatives_that_share_pages_are_read_even_if_the_first_shared_none_when_we_read_it() {
        let mut engine = engine(|_| ());
        for region in engine.table.iter_mut() {
            if region.fork == Fork::First {
                region.extents.insert(0, Extent { resident: 100, duplicate: 100, ..Extent::default() });
                region.life.advance(Event::StartReading { first: region.view.first, top: 4 });
                region.life.advance(Event::FinishReading { now_ns: 0 });
            }
            if region.view.owner == OwnerKey(2) {
                region.survey.record_forked();
            }
        }
        engine.follow_relatives();
        let forks: Vec<Fork> = engine.regions().map(|region| region.fork).collect();
        assert_eq!(forks, [Fork::First, Fork::Follows, Fork::Relative, Fork::Alone]);
    }

    #[test]
    fn the_first_of_a_family_is_read_for_all_if_we_may_merge_all() {
        let family = [Fork::First, Fork::Relative, Fork::Relative, Fork::Alone];
        assert_eq!(forks(|_| ()), family);
        assert_eq!(forks(|view| view.left_alone = view.owner == OwnerKey(4)), family);
        assert_eq!(forks(|view| view.left_alone = view.owner == OwnerKey(2)), [Fork::Alone; 4]);
        assert_eq!(forks(|view| view.domain = DomainKey(u16::from(view.owner == OwnerKey(3)))), [Fork::Alone; 4]);
        // They've mapped memory of their own below.
        let allocate = |view: &mut RegionView| view.first = Vpn(1_000 - 30 * u64::from(view.owner.0));
        assert_eq!(forks(allocate), family);
        let elsewhere = [Fork::First, Fork::Relative, Fork::Alone, Fork::Alone];
        assert_eq!(forks(|view| view.first = Vpn(1_000 + 100 * u64::from(view.owner == OwnerKey(3)))), elsewhere);
        // The first worker has loaded the data, and forked the second.
        let by_worker = [Fork::Relative, Fork::First, Fork::Relative, Fork::Alone];
        assert_eq!(forks(|view| view.pages.0 = if view.owner == OwnerKey(1) { 10 } else { 90 }), by_worker);
    }

    /// A child splits its inherited memory into many regions.
    #[test]
    fn the_only_young_child_is_found_in_little_time() {
        const MAPPINGS: u64 = 200;
        const REGIONS: u64 = 500;
        let mut views = Vec::new();
        for mapping in 0..MAPPINGS {
            let first = mapping * 2 * REGIONS;
            views.push((1, first, REGIONS));
            views.extend((first..first + REGIONS).map(|page| (2, page, 1)));
        }
        let views: Vec<RegionView> = (0..)
            .zip(views)
            .map(|(key, (owner, first, pages))| RegionView {
                owner: OwnerKey(owner),
                lineage: LineageKey(7),
                ..test_view(key, first, pages)
            })
            .collect();
        let mut engine = Engine::new(Config::default());
        engine.table.update(&views, 5, |view| Region::new(view, u64::from(view.owner.0) * 10, false, 5));
        engine.find_relatives();
        let mut young_at = |now_ns| {
            engine.snapshot.now_ns = now_ns;
            let before = Instant::now();
            let young = engine.regions().filter(|region| engine.is_only_young_child(region, 15)).count();
            let took = before.elapsed();
            assert!(took < Duration::from_millis(25), "{took:?}");
            count(young)
        };
        assert_eq!(young_at(20), 0, "its parent is as young");
        assert_eq!(young_at(25), MAPPINGS * REGIONS);
        assert_eq!(young_at(35), 0);
    }
}
