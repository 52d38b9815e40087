//! Everything we know about one region, and how far we are with judging it.
//!
//! A [`Region`] has parts with one purpose each: [`Age`] and [`Life`] (how far we are with judging it), [`Survey`]
//! (results of sampling), [`Extents`] (results of reading it whole), [`Marks`] (what we've marked in it), [`Usage`]
//! (what its process does with its pages) and [`Hold`] (why we leave it alone for now).

pub(crate) mod hold;
pub(crate) mod kin;
mod life;
mod marks;
mod survey;
pub mod table;
mod usage;

pub use hold::{Hold, LeaveAlone};
pub use kin::KinPass;
pub use life::{Age, Event, Judgement, Life};
pub use marks::{MarkedSamples, Marks, covers};
pub use survey::{RUN_PAGES, Survey};
pub use usage::{PageSet, Usage};

use crate::config::Config;
use crate::decision::Decision;
use crate::host::{Mechanism, PageRun, PageSample, PageState, RegionView};
use crate::index::OFFSET_BITS;
use crate::keys::RegionKey;
use crate::marking::extents::{Candidate, Counts, Extent, Extents, SplitRule, around, candidates};
use crate::marking::marker::SPLIT_FROM;
use crate::units::{EXTENT_PAGES, Pages, Permyriad, Vpn, low_bits, whole};
use std::collections::BTreeSet;
use std::ops::Range;

/// We don't merge pages that more processes than this share through fork. Merging all their mappings frees only one
/// frame, and each mapping costs ksmd 12 us and 64 bytes of records, or us some 1.5 us on request.
pub const RELATIVES_MOST: u64 = 20;

/// Once we've visited this many pages of a region and found none present, we take the region for empty.
const EMPTY_FROM: u64 = 64;

/// Where we read the pages that a region shares with other processes through fork.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fork {
    /// The region has no relatives in scope.
    #[default]
    Alone,
    /// We read the shared pages in this region, for all its relatives.
    First,
    /// We read the shared pages in the first of its relatives.
    Relative,
    /// We've found duplicates in the first of its relatives. ksmd replaces each mapping separately, so we read the
    /// shared pages here, too.
    Follows,
}

/// A region that we judge: a mapping, or one block of a very large mapping.
#[derive(Clone, Debug)]
pub struct Region {
    /// The host's latest view.
    pub view: RegionView,
    /// Whether the region is a block of a larger mapping. Such mappings may be marked in part.
    pub in_blocks: bool,
    /// When we first saw the region, nanoseconds.
    pub seen_ns: u64,
    pub age: Age,
    pub life: Life,
    /// Results of sampling.
    pub survey: Survey,
    /// Results of reading the region whole.
    pub extents: Extents,
    pub marks: Marks,
    /// How the region's process uses its pages.
    pub usage: Usage,
    pub fork: Fork,
    /// The number of the region's fork family, if regions of related processes in scope overlap it.
    pub relatives: Option<u32>,
    /// If we merge unread pages with an older clone's before we read the rest of the region: how far we are.
    pub kin: Option<KinPass>,
    /// Why we leave the region alone, and until when.
    pub hold: Hold,
    /// What happens to the region next, as we decided at the end of the last cycle.
    pub decision: Decision,
    /// Offsets in the index count from this page.
    base: Vpn,
}

impl Region {
    /// A region that we see for the first time.
    pub fn new(view: RegionView, now_ns: u64, appeared: bool, seed: u64) -> Self {
        Self {
            view,
            in_blocks: false,
            seen_ns: now_ns,
            age: if appeared { Age::New } else { Age::Old },
            life: Life::default(),
            survey: Survey::new(&view, seed),
            extents: Extents::new(),
            marks: Marks::default(),
            usage: Usage::default(),
            fork: Fork::Alone,
            relatives: None,
            kin: None,
            hold: Hold::new(view.left_alone),
            decision: Decision { since_ns: now_ns, ..Decision::default() },
            base: view.first,
        }
    }

    /// Whether `view` shows another region under the same key: its marks are gone, or its size has changed a lot. The
    /// kernel joins a new mapping to a similar neighbour, so a small old region can become the edge of a large new one.
    pub fn is_replaced_by(&self, view: &RegionView) -> bool {
        let is_unmarked = !self.marks.spans.is_empty() && self.view.marked > Pages(0) && view.marked == Pages(0);
        let less = self.view.pages.min(view.pages);
        let more = self.view.pages.max(view.pages);
        is_unmarked || more.0 > 2 * less.0 + EXTENT_PAGES
    }

    /// Adopts the host's latest view. Bounds move as the region grows and shrinks.
    pub fn update(&mut self, view: RegionView, seed: u64) {
        let moved = (view.first, view.pages) != (self.view.first, self.view.pages);
        // Somebody may have unmarked the region since the kernel marked it for us.
        self.usage.named &= view.named || !self.view.named;
        self.view = view;
        self.hold.left_alone = view.left_alone;
        if moved {
            self.usage.keep_only(view.first..self.end());
            self.survey.restart_order(&view, seed);
            self.end_kin();
        }
    }

    /// Whether the region appeared in this cycle.
    pub fn is_new(&self, now_ns: u64) -> bool {
        self.age.appeared() && self.seen_ns == now_ns
    }

    /// Whether this page of this mapping is in the region.
    pub fn holds(&self, key: RegionKey, page: Vpn) -> bool {
        self.view.key == key && self.has(page)
    }

    /// Whether this page of its process is in the region.
    pub fn has(&self, page: Vpn) -> bool {
        (self.view.first..self.end()).contains(&page)
    }

    pub fn run(&self, first: Vpn, pages: Pages) -> PageRun {
        PageRun { region: self.view.key, first, pages: u32::try_from(pages.0).unwrap_or(u32::MAX) }
    }

    /// Whether the region is marked because we asked the kernel to merge a page in it.
    pub fn is_named(&self) -> bool {
        self.view.named || self.usage.named
    }

    /// Whether we read the pages that the region shares through fork.
    pub fn reads_forked(&self) -> bool {
        matches!(self.fork, Fork::First | Fork::Follows)
    }

    /// Whether a page that looks merged may in fact just be shared through fork. In marked mappings, Linux 6.12 shows
    /// both alike. On request, we know which pages we've merged.
    pub fn may_be_shared(&self, sample: &PageSample) -> bool {
        let is_named = self.fork != Fork::Alone && self.is_named();
        is_named && sample.state == PageState::Merged && !self.usage.merged.contains(sample.page)
    }

    /// Whether a page shares its frame with a page of another region through fork. Only meant for pages that aren't
    /// merged.
    pub fn is_same_frame(&self, page: Vpn, other: &Self, other_page: Vpn) -> bool {
        self.view.key != other.view.key && self.view.lineage == other.view.lineage && page == other_page
    }

    /// The share of the region's pages that are shared through fork, once we've read it whole.
    pub fn forked_share(&self) -> f64 {
        let shared: u64 = self.extents.values().map(|extent| u64::from(extent.shared)).sum();
        shared as f64 / self.counts().resident.0.max(1) as f64
    }

    /// The page after the region's last.
    pub fn end(&self) -> Vpn {
        self.view.first + self.view.pages.0
    }

    /// The first page and the length of the next run to sample.
    pub fn next_run(&mut self) -> (Vpn, u64) {
        self.survey.next_run(&self.view)
    }

    /// The share of duplicates in the extents that we didn't mark because they weren't worth it: 0 to 1. It's 0 on
    /// request, which needs no marks, and in a region that we left alone, which may have changed since.
    pub fn left_over(&self, mechanism: Mechanism) -> f64 {
        if !mechanism.by_marks() || self.hold.reason().is_some() {
            return 0.0;
        }
        if let Some(share) = self.life.adopted() {
            return share.fraction();
        }
        let mut unmarked = Counts::default();
        for (number, extent) in &self.extents {
            if !self.is_marked(Vpn(*number * EXTENT_PAGES)) {
                unmarked += extent.counts();
            }
        }
        unmarked.ratio()
    }

    /// The page's offset for the index. It wraps for pages below the base, as in a stack that has grown downwards.
    pub fn offset(&self, page: Vpn) -> u32 {
        low_bits(page.0.wrapping_sub(self.base.0), OFFSET_BITS)
    }

    /// The page at an offset that the index of contents keeps: signed, and cut to [`OFFSET_BITS`].
    pub fn page_at(&self, offset: u32) -> Vpn {
        // Sign-extend the bits that we keep.
        let offset = i64::from(offset) << (64 - OFFSET_BITS) >> (64 - OFFSET_BITS);
        Vpn(self.base.0.wrapping_add_signed(offset))
    }

    /// Roughly how many of the region's pages ksmd has merged: the duplicates among the marked pages that it has
    /// visited.
    pub fn merged_by_ksmd(&self) -> Pages {
        let marked = self.marks.counts();
        let visited = self.marks.visited.0.min(marked.resident.0);
        Pages(whole(marked.duplicate.0 as f64 * visited as f64 / marked.resident.0.max(1) as f64))
    }

    /// How many of the region's pages may be merged by now.
    pub fn merged_at_most(&self) -> Pages {
        self.merged_by_ksmd().max(self.usage.merged.len())
    }

    /// Whether samples show that ksmd has left most of the duplicates in its marked memory unmerged.
    pub fn are_duplicates_unmerged(&self) -> bool {
        2.0 * self.marks.samples.unmerged_share() > self.marks.counts().ratio()
    }

    /// Whether we may request merges of the region's pages: the region was worth reading whole, and we don't leave it
    /// alone.
    pub fn may_be_requested(&self, now_ns: u64, config: &Config) -> bool {
        !self.life.is_surveyed() && self.hold.may_mark(now_ns) && !self.survey.is_volatile(config)
    }

    /// Starts to read the region whole, on the top level. If nothing in it was merged before and it has an older clone,
    /// we first merge unread pages with the clone's.
    pub fn examine(&mut self, top: usize) {
        let is_fresh = self.life.is_surveyed() && self.usage.merged.is_empty();
        let found = self.survey.kin.found().filter(|_| is_fresh);
        self.kin = found.map(|kin| KinPass::new(kin, self.view.first));
        self.life.advance(Event::StartReading { first: self.view.first, top });
        self.extents.clear();
        self.survey.start_examination();
        self.usage.merged_before = self.usage.merged.len();
    }

    /// On request: whether at least this share of the region's pages was merged since we last began to read it whole,
    /// and still is.
    pub fn has_gained(&self, share: Permyriad) -> bool {
        let gained = self.usage.merged.len().saturating_sub(self.usage.merged_before);
        gained > Pages(0) && Permyriad::of(gained.0, self.resident().0) >= share
    }

    /// Whether `other` is an older region of the same family and trust domain, so that equal pages may lie at equal
    /// offsets.
    pub fn is_younger_kin(&self, other: &Self) -> bool {
        let is_kin = self.view.family == other.view.family && self.view.domain == other.view.domain;
        is_kin && (other.seen_ns, other.view.key) < (self.seen_ns, self.view.key)
    }

    /// The next unread page to merge with an older clone's page. It's the region's end if we wait for more to appear.
    pub fn next_for_kin(&self) -> Option<Vpn> {
        self.kin.as_ref()?.next.filter(|_| self.life.is_reading())
    }

    /// Merges no more unread pages.
    pub fn end_kin(&mut self) {
        if let Some(pass) = &mut self.kin {
            pass.next = None;
        }
    }

    /// Whether we may merge a page unread. If it was written after an earlier merge, we must read it first.
    pub fn is_fit_for_kin(&self, page: Vpn, now_ns: u64) -> bool {
        !self.usage.written.contains(page) && !self.usage.is_busy(page, now_ns)
    }

    /// Counts a page that was merged unread, as if we had read it and found it unchanged.
    pub fn count_merged(&mut self, page: Vpn) {
        self.survey.record_unchanged(self.offset(page));
        let extent = self.extents.entry(page.extent()).or_default();
        extent.resident += 1;
        extent.add_duplicates(1);
    }

    /// The next pages to read whole from this one on, at most an extent. Leaves out pages that were merged unread.
    pub fn next_to_read(&self, mut first: Vpn) -> (Vpn, u64) {
        let is_known = |page| self.kin.is_some() && self.usage.merged.contains(page);
        while first < self.end() && is_known(first) {
            first = first + 1;
        }
        let most = self.end().0.saturating_sub(first.0).min(EXTENT_PAGES);
        let pages = (0..most).find(|&number| is_known(first + number)).unwrap_or(most);
        (first, pages)
    }

    /// Whether we may ask the kernel to merge a page: it isn't in use, its program doesn't keep writing to it after
    /// merges, and no process outside its family maps it.
    pub fn may_be_named(&self, page: Vpn, now_ns: u64) -> bool {
        let rests = self.usage.cow_breaks.rests(page) && self.usage.written.contains(page);
        !rests && !self.usage.is_busy(page, now_ns) && !self.usage.outside.contains(page)
    }

    /// The share of the region's pages that we leave alone for a time because merges there don't pay. On request only
    /// pages that were written after a merge count.
    pub fn resting(&self) -> Permyriad {
        let mut pages = 0;
        for (number, _) in self.usage.cow_breaks.resting() {
            let written = self.usage.written.in_extent(number);
            pages += match self.extents.get(&number) {
                Some(extent) if self.usage.written.is_empty() => u64::from(extent.resident),
                _ => written,
            };
        }
        if pages == 0 { Permyriad(0) } else { Permyriad::of(pages, self.counts().resident.0) }
    }

    /// Forgets the digests of the region's pages. If we've merged some of them, we read the region whole again.
    /// Otherwise we let new samples decide.
    pub fn forget_digests(&mut self, top: usize) {
        self.kin = None;
        self.usage.cow_breaks.forget_pages();
        self.survey.forget_digests();
        if self.hold.reason().is_some() {
            self.life.advance(Event::Sink);
        } else if self.life.is_surveyed() || self.usage.merged.is_empty() {
            self.life.advance(Event::Forget);
        } else {
            self.examine(top);
        }
    }

    /// Ends the examination: we've read the whole region.
    pub fn judged(&mut self, now_ns: u64, on_request: bool) {
        self.kin = None;
        self.life.advance(Event::FinishReading { now_ns });
        if on_request {
            // There's no more to do on request; only marking has further steps.
            self.life.advance(Event::Settle);
            self.hold.end_examination(now_ns);
        }
        self.survey.end_examination();
        self.marks.samples = MarkedSamples::default();
        self.usage.activity_known = true;
        self.usage.readings_due = self.usage.readings_due.saturating_sub(1);
    }

    /// Leaves the region alone until `until_ns`, for a temporary reason. It sinks to the bottom level, without marks.
    pub fn leave_until(&mut self, until_ns: u64, reason: LeaveAlone) {
        self.hold.leave_until(until_ns, reason);
        self.life.advance(Event::Settle);
        self.life.advance(Event::Sink);
        self.marks.spans.clear();
        self.usage.cow_breaks.forget_pages();
    }

    /// Whether reading a page can still show if the page's process uses it. Our second read of a page makes it active,
    /// so only the first two reads count: the first two passes of sampling, or the first pass and reading the region
    /// whole.
    pub fn shows_activity(&self) -> bool {
        let cycles = if self.life.is_reading() { 1 } else { 2 };
        !self.usage.activity_known && self.survey.visited() <= cycles * self.view.pages.0
    }

    /// How many pages appeared since ksmd last visited, if the region is marked whole.
    pub fn grown(&self) -> Pages {
        if self.is_marked_whole() { self.view.resident.saturating_sub(self.marks.visited) } else { Pages(0) }
    }

    /// How many of the [`Self::grown`] pages are duplicates if they're like the ones that we marked.
    pub fn grown_duplicates(&self) -> Pages {
        let counts = self.marks.counts();
        let ratio = if counts.resident == Pages(0) { 1.0 } else { counts.ratio() };
        Pages(whole(self.grown().0 as f64 * ratio))
    }

    /// A page anywhere in the marked spans, chosen by `random`.
    pub fn marked_page(&self, random: u64) -> Option<Vpn> {
        if self.is_marked_whole() {
            return Some(self.view.first + random % self.view.pages.0);
        }
        self.marks.page(random)
    }

    /// Whether we've counted a page in its extent.
    pub fn is_counted(&self, page: Vpn) -> bool {
        match self.life.cursor() {
            Some(cursor) => page < cursor,
            None => self.life.is_judged(),
        }
    }

    /// Whether a page lies in a span that this run marked, or the whole region is marked.
    pub fn is_marked(&self, page: Vpn) -> bool {
        self.is_marked_whole() || self.marks.contains(page)
    }

    /// The spans worth marking at a density, at most `cap` of them.
    pub fn spans(&self, config: &Config, plain: Permyriad, cap: usize) -> Vec<Candidate> {
        let above = if self.in_blocks { Pages(0) } else { config.split_above };
        let split = SplitRule { above, spans: cap };
        let density = config.density.thinned(plain);
        let mut spans = candidates(&self.extents, self.view.first, self.view.pages, density, split);
        let mut resting: Vec<Range<u64>> = Vec::new();
        for (extent, _) in self.usage.cow_breaks.resting() {
            match resting.last_mut() {
                Some(run) if run.end == extent => run.end += 1,
                _ => resting.push(extent..extent + 1),
            }
        }
        if self.stays_whole() && !resting.is_empty() {
            return Vec::new();
        }
        for run in resting {
            spans = self.beside(&spans, Vpn(run.start * EXTENT_PAGES), Vpn(run.end * EXTENT_PAGES));
        }
        spans.retain(|span| span.duplicate >= config.span_pages_min);
        spans
    }

    /// The parts of spans before `from` and from `to` on.
    pub fn beside(&self, spans: &[Candidate], from: Vpn, to: Vpn) -> Vec<Candidate> {
        // While we read the region again we only know some of its extents.
        let are_known = self.life.is_judged() && self.life.adopted().is_none();
        let extents = are_known.then_some(&self.extents);
        spans.iter().flat_map(|span| around(extents, span, from, to)).collect()
    }

    /// Whether we never mark or unmark the region in part. Programs more often move or grow small mappings, which fails
    /// once they're split.
    pub fn stays_whole(&self) -> bool {
        !self.in_blocks && self.view.pages < SPLIT_FROM
    }

    /// How many parts of its mapping are marked separately. Marks of a whole mapping, or of all its blocks, don't split
    /// it.
    pub fn parts(&self) -> usize {
        let marked: Pages = self.marks.spans.iter().map(|mark| mark.pages).sum();
        if marked < self.view.pages { self.marks.spans.len() } else { 0 }
    }

    /// The numbers of the region's extents.
    pub fn extent_numbers(&self) -> Range<u64> {
        self.view.first.extent()..self.end().0.div_ceil(EXTENT_PAGES)
    }

    /// Whether the whole region is marked, by us or another program.
    pub fn is_marked_whole(&self) -> bool {
        self.view.marked >= self.view.pages
    }

    /// Where the region's pages may be merged: in all of it if the host sees any marks there or we've merged pages on
    /// request, or else in the spans that we've just marked. Leaves out parts that we know to be empty.
    pub fn mergeable_runs(&self) -> Vec<(Vpn, Pages)> {
        let is_whole = self.view.marked > Pages(0) || self.view.named || !self.usage.merged.is_empty();
        if !is_whole {
            return self.marks.spans.iter().map(|mark| (mark.first, mark.pages)).collect();
        }
        let is_sparse = self.view.resident.0 < self.view.pages.0 / 4;
        if !is_sparse || !self.life.is_judged() {
            let is_empty = is_sparse && self.survey.visited() >= EMPTY_FROM && !self.survey.has_present;
            return if is_empty { Vec::new() } else { vec![(self.view.first, self.view.pages)] };
        }
        let mut numbers: BTreeSet<u64> = self.usage.own.extents().collect();
        for (&number, extent) in &self.extents {
            if extent.resident > 0 {
                numbers.insert(number);
            }
        }
        let mut runs = Vec::new();
        for number in numbers {
            let first = self.view.first.0.max(number * EXTENT_PAGES);
            let end = self.end().0.min((number + 1) * EXTENT_PAGES);
            if first < end {
                runs.push((Vpn(first), Pages(end - first)));
            }
        }
        runs
    }

    /// The region's resident pages and duplicates, once we've read it whole.
    pub fn counts(&self) -> Counts {
        self.extents.values().map(Extent::counts).sum()
    }

    /// The whole region as one span, unless it holds no duplicates.
    pub fn whole(&self) -> Option<Candidate> {
        let RegionView { first, pages, resident, .. } = self.view;
        let duplicate = self.counts().duplicate;
        if duplicate == Pages(0) {
            return None;
        }
        Some(Candidate { first, pages, resident, duplicate })
    }

    /// How many of the region's pages ksmd has merged or may merge: the pages that we or other programs marked.
    pub fn mergeable(&self) -> Pages {
        let marked: Pages = self.marks.spans.iter().map(|mark| mark.pages).sum();
        marked.max(self.view.marked).min(self.resident())
    }

    /// The number of the region's resident pages. For a block of a mapping, we only know the number after reading the
    /// block. Until then we assume that the mapping's resident pages are spread evenly.
    pub fn resident(&self) -> Pages {
        self.view.resident.max(self.counts().resident).min(self.view.pages)
    }

    /// The number of resident pages in marked spans.
    pub fn marked_resident(&self) -> Pages {
        if self.is_marked_whole() { self.view.resident } else { self.marks.counts().resident }
    }
}

#[cfg(test)]
pub(crate) fn test_view(key: u32, first: u64, pages: u64) -> RegionView {
    use crate::keys::{DomainKey, FamilyKey, LastingKey, LineageKey, OwnerKey, RegionKey};
    RegionView {
        key: RegionKey(key),
        owner: OwnerKey(1),
        lasting: LastingKey(1),
        family: FamilyKey(key.into()),
        lineage: LineageKey(key.into()),
        domain: DomainKey(0),
        first: Vpn(first),
        pages: Pages(pages),
        resident: Pages(pages),
        marked: Pages(0),
        merged_somewhere: Pages(0),
        named: false,
        left_alone: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Digest;

    #[test]
    fn pages_are_merged_while_the_next_reading_of_their_region_is_put_off() {
        let (config, view) = (Config::default(), test_view(1, 0, 100));
        let mut region = Region::new(view, 0, false, 7);
        assert!(!region.may_be_requested(5, &config), "it is being sampled");
        region.hold.put_off(5);
        region.examine(4);
        assert!(region.may_be_requested(5, &config));
        region.hold.leave_until(1_000, LeaveAlone::CowBroken);
        assert!(!region.may_be_requested(5, &config), "its merges did not last");
    }

    #[test]
    fn pages_merged_by_position_have_not_changed() {
        let mut region = Region::new(test_view(1, 0, 100), 0, false, 7);
        (0..100).for_each(|page| region.survey.probe(page, Digest(1 << 32), true, |_| true));
        region.examine(4);
        for page in 0..100 {
            if page % 5 == 0 {
                region.survey.probe(page, Digest(2 << 32), false, |_| true);
            } else {
                region.count_merged(Vpn(page.into()));
            }
        }
        assert!(!region.survey.is_volatile(&Config::default()));
    }

    #[test]
    fn offsets_survive_growth_downwards() {
        let view = |first, pages| test_view(1, first, pages);
        let mut region = Region::new(view(1000, 100), 0, false, 7);
        region.update(view(900, 200), 7);
        for page in [900, 999, 1000, 1099] {
            assert_eq!(region.page_at(region.offset(Vpn(page))), Vpn(page));
        }
    }
}
