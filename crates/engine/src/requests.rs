//! Decides which pages to merge with which, where the kernel merges pages on request.
//!
//! When we read a page and the index knows its content from another page, the two make a pair. Both must be in regions
//! that were worth reading whole: old enough, not volatile, and not left alone. At the end of a cycle we give its pairs
//! to the kernel, as ranges of pages. The kernel compares each pair once, so it visits nothing but these pages and
//! searches nothing.

use crate::hash::Digest;
use crate::headroom::Headroom;
use crate::host::{Keep, MergeRange, MergeResult, Merging, PageRun};
use crate::index::{Index, Location};
use crate::keys::RegionKey;
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::units::Vpn;
use rustc_hash::{FxHashMap, FxHashSet};

/// Once this many pages share a kept page, we keep another page for its content: KSM's default `max_page_sharing` is
/// 256.
const SHARERS_MOST: u16 = 255;
/// We count sharers for at most this many kept pages. Beyond that we restart the counts, and the kernel tells us which
/// pages are full.
const COUNTED_MOST: usize = 1 << 16;

/// If this many pages differ and none is equal, that can't be chance.
const DIFFERING_MIN: u64 = 1024;

/// We put a pair off to the next cycle at most this often.
const PUT_OFF_MOST: u8 = 3;

/// The sets of contents in [`Requests`] hold at most this many. We empty a full set.
const LEFT_MOST: usize = 1 << 20;

/// A page, as the host knows it, and its place in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexedPage {
    pub region: RegionKey,
    pub page: Vpn,
    pub location: Location,
}

impl IndexedPage {
    pub fn new(region: &Region, slot: u32, page: Vpn) -> Self {
        Self { region: region.view.key, page, location: Location { slot, offset: region.offset(page) } }
    }
}

/// A page to replace, and an equal one to keep in its place.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub take: IndexedPage,
    /// `None`: the zero page.
    pub keep: Option<IndexedPage>,
    pub digest: Digest,
    /// See [`MergeRange::needs_merged`].
    needs_merged: bool,
    /// Whether we haven't read the page itself, but a relative's page at the same address.
    is_relative: bool,
    /// Whether we haven't read the page to take, but expect both to be equal, because they're at equal offsets of two
    /// clones.
    by_position: bool,
    /// See [`MergeRange::keep_mappers`].
    pub keep_mappers: u32,
    /// How often we've put the pair off.
    put_off: u8,
}

impl Pair {
    fn new(take: IndexedPage, keep: Option<IndexedPage>, digest: Digest) -> Self {
        let keep_mappers = u32::from(keep.is_some());
        Self {
            take,
            keep,
            digest,
            needs_merged: false,
            is_relative: false,
            by_position: false,
            keep_mappers,
            put_off: 0,
        }
    }

    /// Keeps another page, which nothing is merged with yet.
    pub fn keep_instead(&mut self, keep: IndexedPage) {
        self.keep = Some(keep);
        self.needs_merged = false;
    }

    /// Whether one range may hold both pairs: they're of the same regions, and both are by position or neither is.
    fn is_alike(&self, other: &Self) -> bool {
        let slot = |page: IndexedPage| page.location.slot;
        let are_same = slot(self.take) == slot(other.take) && self.keep.map(slot) == other.keep.map(slot);
        are_same && self.by_position == other.by_position
    }
}

/// Digests that pages with different contents turned out to have in common.
#[derive(Debug, Default)]
pub struct Collisions {
    pub digests: Vec<Digest>,
    /// Pages that the host didn't compare. It stops trying if all pages before them differed, and we assume that these
    /// would have differed, too.
    pub spared: u64,
}

/// The pairs found in one cycle.
#[derive(Debug, Default)]
pub struct Requests {
    pairs: Vec<Pair>,
    /// Pairs for the next cycle: their relatives' mappings aren't marked yet, or the page to keep was in use.
    put_off: Vec<Pair>,
    /// The pages that the pairs keep, and whether each [needs to be merged](MergeRange::needs_merged) already. The
    /// first pair with a kept page decides that for the others, too: if we took no headroom for it, there's none for
    /// them either.
    kept: FxHashMap<Location, bool>,
    /// For each kept page: how many pages we've asked to merge with it so far.
    sharers: FxHashMap<Location, u16>,
    /// Contents for which we now keep another page, because the old one was written or is gone, as 32 bits of their
    /// digests. Pages that are still merged with the old one get merged with the new one when we next read them. We
    /// can't tell which of them is the last, so we forget a content once we've sampled all pages about once more.
    left_behind: FxHashSet<u32>,
    left_behind_before: FxHashSet<u32>,
    /// Contents of pairs that differed or had an absent page, until two pages with that content turn out to be merged
    /// already.
    differing: FxHashSet<u32>,
}

impl Requests {
    pub fn add_zero(&mut self, take: IndexedPage) {
        self.pairs.push(Pair::new(take, None, Digest::ZERO));
    }

    /// Asks to merge a page with the one kept for its content. False if the kept page already has all the sharers it
    /// may have.
    pub fn add(&mut self, take: IndexedPage, keep: IndexedPage, digest: Digest, needs_merged: bool) -> bool {
        if !self.add_sharers(keep, 1) {
            return false;
        }
        let needs_merged = *self.kept.entry(keep.location).or_insert(needs_merged);
        self.pairs.push(Pair { needs_merged, ..Pair::new(take, Some(keep), digest) });
        true
    }

    /// Asks to merge an unread page with an older clone's at the same offset. We know neither content, and the kernel
    /// counts the sharers.
    pub fn add_by_position(&mut self, take: IndexedPage, keep: IndexedPage) {
        self.pairs.push(Pair { by_position: true, ..Pair::new(take, Some(keep), Digest::ZERO) });
    }

    /// Counts more sharers of a kept page. False if it can't have that many.
    fn add_sharers(&mut self, keep: IndexedPage, more: usize) -> bool {
        if self.sharers.len() >= COUNTED_MOST {
            self.sharers.clear();
        }
        let sharers = self.sharers.entry(keep.location).or_default();
        let all = usize::from(*sharers) + more;
        let is_possible = all <= usize::from(SHARERS_MOST);
        if is_possible {
            *sharers = u16::try_from(all).unwrap_or(SHARERS_MOST);
        }
        is_possible
    }

    /// Takes out the cycle's pairs. The caller puts each of them back with its relatives ([`Self::name`]).
    pub fn take_pairs(&mut self) -> Vec<Pair> {
        std::mem::take(&mut self.pairs)
    }

    /// Asks to merge a pair, together with these pages of relatives. False if the page to keep can't have that many
    /// sharers.
    pub fn name(&mut self, pair: Pair, relatives: &[IndexedPage]) -> bool {
        let sharers = relatives.iter().filter(|page| page.page == pair.take.page).count();
        if pair.keep.is_some_and(|keep| !self.add_sharers(keep, sharers)) {
            return false;
        }
        self.pairs.push(pair);
        for &take in relatives {
            if take != pair.take && Some(take) != pair.keep {
                self.pairs.push(Pair { take, is_relative: true, ..pair });
            }
        }
        true
    }

    /// Has the kernel mark the mapping of a page, by asking it to replace the page with that same page. The kernel
    /// marks the mapping before it notices that both are the same.
    pub fn mark(&mut self, page: IndexedPage) {
        self.pairs.push(Pair { is_relative: true, ..Pair::new(page, Some(page), Digest::ZERO) });
    }

    /// Puts a pair off to the next cycle, or drops it if we've put it off too often.
    pub fn put_off(&mut self, pair: Pair) {
        if pair.put_off < PUT_OFF_MOST {
            self.put_off.push(Pair { put_off: pair.put_off + 1, ..pair });
        }
    }

    /// Records that we keep another page for a content, because the old one no longer has it.
    pub fn leave_behind(&mut self, digest: Digest) {
        remember(&mut self.left_behind, digest);
    }

    /// Called when we've sampled all pages about once since the last call.
    pub fn age(&mut self) {
        self.left_behind_before = std::mem::take(&mut self.left_behind);
    }

    /// Whether pages may still be merged with one that we no longer keep for this content.
    pub fn is_left_behind(&self, digest: Digest) -> bool {
        let content = digest.fingerprint();
        self.left_behind.contains(&content) || self.left_behind_before.contains(&content)
    }

    /// Whether one of the pairs keeps this page.
    pub fn is_kept(&self, page: Location) -> bool {
        self.kept.contains_key(&page)
    }

    /// The ranges to merge, sorted by the pages they replace.
    pub fn ranges(&mut self) -> Vec<MergeRange> {
        self.pairs.sort_unstable_by_key(|pair| (pair.take.region, pair.take.page, pair.by_position));
        self.pairs.dedup_by_key(|pair| (pair.take.region, pair.take.page));
        let mut ranges: Vec<MergeRange> = Vec::new();
        let mut before: Option<&Pair> = None;
        for pair in &self.pairs {
            let is_alike = before.replace(pair).is_some_and(|before| before.is_alike(pair));
            let continues = is_alike && ranges.last_mut().is_some_and(|last| extend(last, pair));
            if !continues {
                let take = PageRun { region: pair.take.region, first: pair.take.page, pages: 1 };
                let keep = match pair.keep {
                    None => Keep::Zero,
                    // This pair only marks a mapping ([`Self::mark`]): a run of pages can't replace itself.
                    Some(keep) if keep == pair.take => Keep::Page(keep.region, keep.page),
                    Some(keep) => Keep::Run(keep.region, keep.page),
                };
                let Pair { needs_merged, by_position: needs_own, keep_mappers, .. } = *pair;
                ranges.push(MergeRange { take, keep, needs_merged, needs_own, keep_mappers });
            }
        }
        ranges
    }

    /// Drops the cycle's pairs without merging them.
    pub fn clear(&mut self) {
        self.pairs.clear();
        self.put_off.clear();
        self.kept.clear();
    }

    /// Goes on with the pairs that we've put off. For the pages that they keep we take headroom again, because it may
    /// have been recomputed since.
    pub fn go_on(&mut self, table: &RegionTable, headroom: &mut Headroom) {
        self.pairs = std::mem::take(&mut self.put_off);
        for pair in &mut self.pairs {
            let Some(keep) = pair.keep else { continue };
            let Some(region) = table.get(keep.location.slot) else { continue };
            let owner = region.view.owner;
            let needs_merged = match self.kept.get(&keep.location) {
                Some(&needs_merged) => needs_merged,
                None if region.usage.merged.contains(keep.page) => headroom.is_limited(owner),
                None => !headroom.take_page(owner),
            };
            self.kept.insert(keep.location, needs_merged);
            pair.needs_merged = needs_merged;
        }
    }

    pub fn record(
        &mut self,
        results: &[MergeResult],
        table: &mut RegionTable,
        index: &mut Index,
        now_ns: u64,
    ) -> Collisions {
        let mut collisions = Collisions::default();
        let mut merged = 0;
        let mut differing = 0;
        let mut untried = 0;
        for result in results {
            let pages = u64::from(result.range.take.pages);
            match result.merging {
                // We hadn't read these pages, so their outcome says nothing about digests.
                _ if result.range.needs_own => {}
                Merging::Merged | Merging::Shared => merged += pages,
                Merging::Differs => differing += pages,
                Merging::Untried => untried += pages,
                Merging::Absent | Merging::Ineligible | Merging::Full | Merging::Busy | Merging::Unknown => {}
            }
            for at in 0..result.range.take.pages {
                let page = result.range.part(at, 1);
                collisions.digests.extend(self.record_page(page, result.merging, table, index, now_ns));
            }
        }
        // We do this last, because by now we know which of the kept pages are merged.
        for result in results.iter().filter(|result| result.merging == Merging::Busy) {
            for at in 0..result.range.take.pages {
                self.record_busy(result.range.part(at, 1), table, index, now_ns);
            }
        }
        self.pairs.clear();
        self.kept.clear();
        if merged == 0 && differing >= DIFFERING_MIN {
            collisions.spared = untried;
        }
        collisions
    }

    /// Records the outcome of one page. Returns the page's digest if it turns out to collide.
    fn record_page(
        &mut self,
        page: MergeRange,
        merging: Merging,
        table: &mut RegionTable,
        index: &mut Index,
        now_ns: u64,
    ) -> Option<Digest> {
        let PageRun { region, first, .. } = page.take;
        let kept = page.keep.first();
        if kept == Some((region, first)) {
            let is_marked =
                !matches!(merging, Merging::Untried | Merging::Busy | Merging::Ineligible | Merging::Unknown);
            match table.at_mut(region, first) {
                Some(region) if is_marked => region.usage.named = true,
                _ => {}
            }
            return None;
        }
        match merging {
            Merging::Merged | Merging::Shared => {
                let digest = self.pair_of(region, first).map_or(Digest::ZERO, |pair| pair.digest);
                let was_merged = set_merged(table, region, first, kept.map(|(partner, _)| partner), digest, now_ns);
                if let Some((partner, kept)) = kept {
                    set_merged(table, partner, kept, Some(region), digest, now_ns);
                }
                if merging == Merging::Merged && !was_merged {
                    return None;
                }
            }
            Merging::Unknown => {
                for (region, page) in std::iter::once((region, first)).chain(kept) {
                    if let Some(region) = table.at_mut(region, page) {
                        // We may be reading the region now, and have passed the page already.
                        region.usage.readings_due = 2;
                    }
                }
                return None;
            }
            Merging::Busy | Merging::Untried => return None,
            Merging::Differs | Merging::Absent | Merging::Ineligible | Merging::Full => {}
        }
        let pair = self.pair_of(region, first)?;
        if pair.by_position {
            // We've read neither page: there's no content for the index.
            return None;
        }
        if merging == Merging::Merged {
            // The page was merged before. Other pages may still be merged with its old partner.
            self.leave_behind(pair.digest);
            return None;
        }
        if pair.is_relative {
            // We hadn't read the relative's page, and its program has written it: we learn nothing from that.
            return None;
        }
        if merging == Merging::Shared {
            self.differing.remove(&pair.digest.fingerprint());
            return None;
        }
        // From now on, the page that was to be replaced is the one that we keep for this content.
        index.point_to(pair.digest, pair.take.location);
        if matches!(merging, Merging::Differs | Merging::Absent) {
            return self.record_mismatch(merging, pair, table);
        }
        None
    }

    /// Records a pair whose pages aren't equal. Returns the digest if it turns out to collide.
    fn record_mismatch(&mut self, merging: Merging, pair: Pair, table: &RegionTable) -> Option<Digest> {
        let Pair { take, digest, needs_merged, .. } = pair;
        self.leave_behind(digest);
        if merging == Merging::Absent && needs_merged {
            // The page to keep isn't merged any more, so nobody compared the two.
            return None;
        }
        // One mismatch may only mean that the kept page was just written. Two in a row mean that the digests collide.
        let differed_before = self.differing.contains(&digest.fingerprint());
        remember(&mut self.differing, digest);
        if merging != Merging::Differs || !differed_before {
            return None;
        }
        // The pair's digest has the domain mixed in. Mixing it in again takes it out.
        let own = table.get(take.location.slot);
        Some(own.map_or(digest, |own| digest.in_domain(own.view.domain)))
    }

    /// Records that one page of a pair is in use. A merged page never prevents a merge, so if the kept page is merged,
    /// the other one is in use. Otherwise we don't know which, and assume that it's the kept page, so that it blocks no
    /// other merges.
    fn record_busy(&mut self, page: MergeRange, table: &mut RegionTable, index: &mut Index, now_ns: u64) {
        let PageRun { region, first, .. } = page.take;
        // If we hadn't read the page, we read it next. If it's still in use then, we find out which page to pair it
        // with.
        let Some(pair) = self.pair_of(region, first).filter(|pair| !pair.by_position) else { return };
        let mut busy = (region, first);
        if let Some(keep) = pair.keep.filter(|keep| *keep != pair.take) {
            let is_merged = table.at(keep.region, keep.page).is_none_or(|kept| kept.usage.merged.contains(keep.page));
            if !is_merged {
                busy = (keep.region, keep.page);
            }
        }
        let Some(region) = table.at_mut(busy.0, busy.1) else { return };
        region.usage.record_busy(busy.1, now_ns);
        if busy == (pair.take.region, pair.take.page) || pair.is_relative {
            return;
        }
        match index.page_of(pair.digest) {
            // The index already has another page for this content.
            Some(known) if Some(known) != pair.keep.map(|keep| keep.location) => {
                if let Some(other) = table.get(known.slot) {
                    let keep = IndexedPage::new(other, known.slot, other.page_at(known.offset));
                    self.put_off(Pair { keep: Some(keep), ..pair });
                }
            }
            _ => index.point_to(pair.digest, pair.take.location),
        }
    }

    fn pair_of(&self, region: RegionKey, page: Vpn) -> Option<Pair> {
        let at = self.pairs.binary_search_by_key(&(region, page), |pair| (pair.take.region, pair.take.page)).ok()?;
        Some(self.pairs[at])
    }
}

/// Makes a range one page longer if the pair continues it.
fn extend(range: &mut MergeRange, pair: &Pair) -> bool {
    let PageRun { region, first, pages } = range.take;
    let follows = pair.take.region == region && pair.take.page == first + u64::from(pages);
    if !follows || pair.needs_merged != range.needs_merged || pair.keep_mappers != range.keep_mappers {
        return false;
    }
    let next = pair.keep.map(|keep| (keep.region, keep.page));
    let continues = match range.keep {
        Keep::Zero => next.is_none(),
        Keep::Run(region, page) if pages == 1 && next == Some((region, page)) => {
            range.keep = Keep::Page(region, page);
            true
        }
        Keep::Run(region, page) => next == Some((region, page + u64::from(pages))),
        Keep::Page(region, page) => next == Some((region, page)),
    };
    range.take.pages += u32::from(continues);
    continues
}

/// Records that a page is merged with a page of the region `partner`, or with the zero page. Returns whether it was
/// merged before.
fn set_merged(
    table: &mut RegionTable,
    region: RegionKey,
    page: Vpn,
    partner: Option<RegionKey>,
    digest: Digest,
    now_ns: u64,
) -> bool {
    let Some(region) = table.at_mut(region, page) else { return false };
    // The pair's digest has the domain mixed in. Mixing it in again takes it out.
    let was_merged = region.usage.record_merged(page, now_ns, digest.in_domain(region.view.domain));
    region.usage.named = true;
    if partner.is_some_and(|partner| partner != region.view.key) {
        region.usage.partner = partner;
    }
    was_merged
}

/// Adds a content to a set of contents. If the set is full, we empty it first.
fn remember(contents: &mut FxHashSet<u32>, digest: Digest) {
    if contents.len() >= LEFT_MOST {
        contents.clear();
    }
    contents.insert(digest.fingerprint());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Region, test_view};

    /// A page of region 1 in slot 0, or of region 2 in slot 1.
    fn page(slot: u32, page: u64) -> IndexedPage {
        let location = Location { slot, offset: u32::try_from(page).unwrap() };
        IndexedPage { region: RegionKey(slot + 1), page: Vpn(page), location }
    }

    /// Merges page `take` of region 1 with page `keep` of region 2.
    fn requests(pairs: &[(u64, Option<u64>)]) -> Requests {
        let mut requests = Requests::default();
        for &(take, keep) in pairs {
            match keep {
                None => requests.add_zero(page(0, take)),
                Some(keep) => assert!(requests.add(page(0, take), page(1, keep), Digest(take + 1), false)),
            }
        }
        requests
    }

    fn range(first: u64, pages: u32, keep: Keep) -> MergeRange {
        MergeRange {
            take: PageRun { region: RegionKey(1), first: Vpn(first), pages },
            keep,
            needs_merged: false,
            needs_own: false,
            keep_mappers: u32::from(keep != Keep::Zero),
        }
    }

    #[test]
    fn neighbouring_pairs_make_one_range() {
        let kept = |page| Keep::Run(RegionKey(2), Vpn(page));
        let pairs = [
            (6, Some(16)),
            (5, Some(15)),
            (7, Some(17)),
            (8, Some(3)),
            (9, Some(3)),
            (10, Some(3)),
            (12, None),
            (13, None),
        ];
        let ranges = [range(5, 3, kept(15)), range(8, 3, Keep::Page(RegionKey(2), Vpn(3))), range(12, 2, Keep::Zero)];
        assert_eq!(requests(&pairs).ranges(), ranges);
    }

    #[test]
    fn a_page_is_kept_for_as_many_others_as_the_kernel_allows() {
        let mut requests = Requests::default();
        let named = (0..300).filter(|&taken| requests.add(page(0, taken), page(1, 0), Digest(7), false));
        assert_eq!(named.count(), usize::from(SHARERS_MOST));
    }

    #[test]
    fn a_page_is_kept_until_the_pairs_are_forgotten() {
        let mut requests = requests(&[(5, Some(15))]);
        let kept = |requests: &Requests, slot, number| requests.is_kept(page(slot, number).location);
        assert!(kept(&requests, 1, 15) && !kept(&requests, 1, 5) && !kept(&requests, 0, 5));
        requests.clear();
        assert!(!kept(&requests, 1, 15));
    }

    #[test]
    fn a_page_that_could_not_be_merged_is_kept_instead() {
        let mut table = RegionTable::default();
        table.update(&[test_view(1, 0, 100), test_view(2, 0, 100)], 1, |view| Region::new(view, 0, false, 1));
        let mut index = Index::new(usize::MAX);
        let mut requests = requests(&[(5, Some(15)), (6, Some(16))]);
        for digest in [6, 7] {
            index.record(Digest(digest << 24), page(1, 9).location);
        }
        for pair in &mut requests.pairs {
            pair.digest = Digest(pair.digest.0 << 24);
        }
        let whole = requests.ranges()[0];
        let results = [
            MergeResult { range: whole.part(1, 1), merging: Merging::Differs },
            MergeResult { range: whole.part(0, 1), merging: Merging::Merged },
        ];
        let collisions = requests.record(&results, &mut table, &mut index, 0);
        assert!(collisions.digests.is_empty(), "the page may just have been written");
        assert!(requests.is_left_behind(Digest(7 << 24)) && !requests.is_left_behind(Digest(6 << 24)));
        assert_eq!(index.page_of(Digest(7 << 24)), Some(page(0, 6).location));
        assert_eq!(index.page_of(Digest(6 << 24)), Some(page(1, 9).location));
        let merged = |key, page| {
            let slot = table.find(RegionKey(key), Vpn(page)).unwrap();
            table.get(slot).unwrap().usage.merged.contains(Vpn(page))
        };
        assert!(merged(1, 5) && merged(2, 15) && !merged(1, 6) && !merged(2, 16));
        assert!(requests.ranges().is_empty(), "they are named once");
        requests.add(page(0, 6), page(1, 16), Digest(7 << 24), false);
        let collisions = requests.record(&results[..1], &mut table, &mut index, 0);
        assert_eq!(collisions.digests, [Digest(7 << 24)], "it differs again");
    }

    #[test]
    fn what_is_not_tried_counts_once_all_that_was_tried_differs() {
        let result = |first, pages, merging| MergeResult { range: range(first, pages, Keep::Zero), merging };
        let spared = |results: &[MergeResult]| {
            let (mut table, mut index) = (RegionTable::default(), Index::new(usize::MAX));
            Requests::default().record(results, &mut table, &mut index, 0).spared
        };
        let (differing, untried) = (result(0, 1024, Merging::Differs), result(1024, 500, Merging::Untried));
        assert_eq!(spared(&[differing, untried]), 500);
        assert_eq!(spared(&[result(0, 1000, Merging::Differs), untried]), 0, "too few to say");
        assert_eq!(spared(&[differing, result(2000, 1, Merging::Merged), untried]), 0);
    }
}
