//! What is known about one region, and where it stands.
//!
//! A [`Region`] is made of parts with one purpose each: [`Survey`] (what sampling has shown), [`Extents`] (what reading it
//! whole has shown), [`Marks`] (what is marked in it), [`Usage`] (what its process does with its pages) and [`Hold`] (why it
//! is left alone for now).

pub(crate) mod hold;
mod marks;
mod survey;
pub mod table;
mod usage;

pub use hold::{Hold, LeaveAlone};
pub use marks::{MarkedSamples, Marks, covers};
pub use survey::{RUN_PAGES, Survey};
pub use usage::{PageSet, Usage};

use crate::config::Config;
use crate::host::{Mechanism, RegionView};
use crate::index::OFFSET_BITS;
use crate::marking::extents::{Candidate, Extents, SplitRule, candidates};
use crate::units::{EXTENT_PAGES, Pages, Permyriad, Vpn, low_bits, whole};

/// How far the judgement of a region has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Being sampled, to decide whether it is worth reading whole.
    Survey,
    /// Being read whole; pages below this one have been read.
    Examine(Vpn),
    /// Read whole at this time, nanoseconds, and marked where it was dense. Sampling goes on, to see whether that still
    /// holds.
    Judged(u64),
}

/// One region under judgement: a mapping, or one block of a very large mapping.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Region {
    /// The host's latest view of it.
    pub view: RegionView,
    /// Whether it is a block of a larger mapping, which may be marked in part.
    pub in_blocks: bool,
    /// When it was first seen, nanoseconds.
    pub seen_ns: u64,
    /// Whether it appeared during the run. The age of regions that were there before is unknown.
    pub appeared: bool,
    /// The age from which merging it is worth it, by the lives of its family when it appeared, nanoseconds. `None` if none were known.
    pub worth_from_ns: Option<u64>,
    /// Whether it has not reached that age: it is not sampled either.
    pub young: bool,
    /// Its level on the ladder, from 1.
    pub level: usize,
    /// How far its judgement has come.
    pub stage: Stage,
    /// What sampling has shown.
    pub survey: Survey,
    /// What reading it whole has shown.
    pub extents: Extents,
    /// How dense an extent must be to be marked: the full density, or less once the denser ones are merged.
    pub density: Permyriad,
    /// Whether `extents` or `density` have changed since spans were last derived from them.
    pub changed: bool,
    pub marks: Marks,
    /// What its process does with its pages.
    pub usage: Usage,
    /// Why and until when it is left alone.
    pub hold: Hold,
    /// The share of duplicates left unmarked, if an earlier run has judged the region and its pages have not been read since.
    pub adopted: Option<Permyriad>,
    /// Offsets in the index count from this page.
    base: Vpn,
}

impl Region {
    /// A region seen for the first time.
    pub fn new(view: RegionView, now_ns: u64, appeared: bool, seed: u64) -> Self {
        let mut hold = Hold::default();
        hold.set_left_alone(view.left_alone);
        Self {
            view,
            in_blocks: false,
            seen_ns: now_ns,
            appeared,
            worth_from_ns: None,
            young: false,
            level: 1,
            stage: Stage::Survey,
            survey: Survey::new(&view, seed),
            extents: Extents::new(),
            density: Permyriad(10_000),
            changed: false,
            marks: Marks::default(),
            usage: Usage::default(),
            hold,
            adopted: None,
            base: view.first,
        }
    }

    /// Whether `view` shows another region under the same key. Marks do not vanish by themselves, and the kernel joins a new
    /// mapping to a similar neighbour, so a small old region can become the edge of a large new one.
    pub fn is_replaced_by(&self, view: &RegionView) -> bool {
        let unmarked = !self.marks.spans.is_empty() && self.view.marked > Pages(0) && view.marked == Pages(0);
        let (less, more) = (self.view.pages.min(view.pages), self.view.pages.max(view.pages));
        unmarked || more.0 > 2 * less.0 + EXTENT_PAGES
    }

    /// Adopts the host's latest view: bounds move as the region grows and shrinks.
    pub fn update(&mut self, view: RegionView, seed: u64) {
        let moved = (view.first, view.pages) != (self.view.first, self.view.pages);
        self.view = view;
        self.hold.set_left_alone(view.left_alone);
        if moved {
            self.survey.restart_order(&view, seed);
        }
    }

    /// The page after its last.
    pub fn end(&self) -> Vpn {
        self.view.first + self.view.pages.0
    }

    /// The next run of pages to sample: its first page and its length.
    pub fn next_run(&mut self) -> (Vpn, u64) {
        self.survey.next_run(&self.view)
    }

    /// The share of duplicates in extents that were not worth marking, 0 to 1. Where pages are merged on request, there are none, and
    /// none are known of a region that was left alone: it may have changed.
    pub fn left_over(&self, mechanism: Mechanism) -> f64 {
        if mechanism == Mechanism::Request || self.hold.reason().is_some() {
            return 0.0;
        }
        if let Some(share) = self.adopted {
            return share.fraction();
        }
        let (resident, duplicate) = self
            .extents
            .iter()
            .filter(|(number, _)| !self.is_marked(Vpn(*number * EXTENT_PAGES)))
            .fold((0_u64, 0_u64), |(resident, duplicate), (_, extent)| {
                (resident + u64::from(extent.resident), duplicate + u64::from(extent.duplicate))
            });
        duplicate as f64 / resident.max(1) as f64
    }

    /// The page's offset for the index. Wraps for pages below the base, because a stack grows downwards.
    pub fn offset(&self, page: Vpn) -> u32 {
        low_bits(page.0.wrapping_sub(self.base.0), OFFSET_BITS)
    }

    /// The page at an offset of the index.
    pub fn page_at(&self, offset: u32) -> Vpn {
        // Sign-extend the bits that are kept.
        let offset = i64::from(offset) << (64 - OFFSET_BITS) >> (64 - OFFSET_BITS);
        Vpn(self.base.0.wrapping_add_signed(offset))
    }

    /// About how many of its pages ksmd has merged: the duplicates in what it has visited.
    pub fn merged_by_ksmd(&self) -> Pages {
        let marked =
            self.marks.spans.iter().fold((0, 0), |sum, mark| (sum.0 + mark.resident.0, sum.1 + mark.duplicate.0));
        let visited = self.marks.visited().0.min(marked.0);
        Pages(whole(marked.1 as f64 * visited as f64 / (marked.0.max(1)) as f64))
    }

    /// Whether its pages may be merged on request: it was worth reading whole, and is not left alone.
    pub fn may_be_requested(&self, now_ns: u64, config: &Config) -> bool {
        self.stage != Stage::Survey && self.hold.may_mark(now_ns) && !self.survey.is_volatile(config)
    }

    /// Starts to read the region whole, on the top level.
    pub fn examine(&mut self, top: usize) {
        self.usage.forget_written();
        self.adopted = None;
        self.level = top;
        self.stage = Stage::Examine(self.view.first);
        self.extents.clear();
        self.survey.start_examination();
    }

    /// Forgets the digests of its pages. A region in which pages have merged is read whole again; of any other, samples show anew
    /// whether that is worth it.
    pub fn forget_digests(&mut self, top: usize) {
        self.usage.cow_breaks.forget_pages();
        self.survey.forget_digests();
        self.level = 1;
        if self.hold.reason().is_none() {
            if self.stage == Stage::Survey || self.usage.merged.is_empty() {
                self.stage = Stage::Survey;
            } else {
                self.examine(top);
            }
        }
    }

    /// Ends the examination: the whole region has been read.
    pub fn judged(&mut self, now_ns: u64) {
        self.stage = Stage::Judged(now_ns);
        self.survey.end_examination();
        self.density = Permyriad(10_000);
        self.changed = true;
        self.marks.samples = MarkedSamples::default();
        self.usage.activity_known = true;
        self.usage.merged_before = false;
    }

    /// When it was last read whole, nanoseconds. `None` if it is not judged.
    pub fn judged_ns(&self) -> Option<u64> {
        match self.stage {
            Stage::Judged(at_ns) => Some(at_ns),
            Stage::Survey | Stage::Examine(_) => None,
        }
    }

    /// Returns the region to the bottom level, unmarked, for a reason that passes. It is left alone until `until_ns`.
    pub fn leave_until(&mut self, until_ns: u64, reason: LeaveAlone) {
        self.hold.leave_until(until_ns, reason);
        self.level = 1;
        self.marks.spans.clear();
        self.changed = false;
        self.usage.cow_breaks.forget_pages();
    }

    /// Whether reading a page can still show if its process uses it. Being read twice makes a page active, so only its first
    /// two reads count: those of the first two cycles of sampling, or of reading the region whole after less than one.
    pub fn shows_activity(&self) -> bool {
        let cycles = if matches!(self.stage, Stage::Examine(_)) { 1 } else { 2 };
        !self.usage.activity_known && self.survey.visited() <= cycles * self.view.pages.0
    }

    /// The number of pages that appeared, in a region marked whole, since ksmd last visited it.
    pub fn grown(&self) -> Pages {
        if self.is_marked_whole() { self.marks.not_visited(self.view.resident) } else { Pages(0) }
    }

    /// A page anywhere in the marked spans, chosen by `random`.
    pub fn marked_page(&self, random: u64) -> Option<Vpn> {
        if self.is_marked_whole() {
            return Some(self.view.first + random % self.view.pages.0);
        }
        self.marks.page(random)
    }

    /// Whether a page has been counted in its extent.
    pub fn is_counted(&self, page: Vpn) -> bool {
        match self.stage {
            Stage::Survey => false,
            Stage::Examine(cursor) => page < cursor,
            Stage::Judged(_) => true,
        }
    }

    /// Whether a page lies in a span marked by this run, or the whole region is marked.
    pub fn is_marked(&self, page: Vpn) -> bool {
        self.is_marked_whole() || self.marks.contains(page)
    }

    /// The spans worth marking at a density, at most `cap` of them.
    pub fn spans(&self, config: &Config, plain: Permyriad, cap: usize) -> Vec<Candidate> {
        let above = if self.in_blocks { Pages(0) } else { config.split_above };
        let split = SplitRule { above, spans: cap };
        let spans = candidates(&self.extents, self.view.first, self.view.pages, config.density.thinned(plain), split);
        spans.into_iter().filter(|span| span.duplicate >= config.span_pages_min).collect()
    }

    /// Whether all of it is marked, by whatever program.
    pub fn is_marked_whole(&self) -> bool {
        self.view.marked >= self.view.pages
    }

    /// Where its pages may be merged: in what is marked, by whatever program, or in all of it if pages of it were named.
    pub fn mergeable_runs(&self) -> Vec<(Vpn, Pages)> {
        let is_whole = self.view.marked > Pages(0) || self.view.named || !self.usage.merged.is_empty();
        if !is_whole {
            return self.marks.spans.iter().map(|mark| (mark.first, mark.pages)).collect();
        }
        let is_sparse = self.view.resident.0 < self.view.pages.0 / 4;
        if !is_sparse || !matches!(self.stage, Stage::Judged(_)) {
            return vec![(self.view.first, self.view.pages)];
        }
        let mut runs = Vec::new();
        for (number, extent) in &self.extents {
            if extent.resident > 0 {
                let first = self.view.first.0.max(number * EXTENT_PAGES);
                let end = self.end().0.min((number + 1) * EXTENT_PAGES);
                runs.push((Vpn(first), Pages(end.saturating_sub(first))));
            }
        }
        runs
    }

    /// All of it as one span, unless it holds no duplicates.
    pub fn whole(&self) -> Option<Candidate> {
        let duplicate = Pages(self.extents.values().map(|extent| u64::from(extent.duplicate)).sum());
        let whole =
            Candidate { first: self.view.first, pages: self.view.pages, resident: self.view.resident, duplicate };
        (duplicate > Pages(0)).then_some(whole)
    }

    /// The number of its pages that are merged or may be at any time: those marked, by whatever program; or those merged on request.
    pub fn mergeable(&self, on_request: bool) -> Pages {
        if on_request && !self.usage.merged_before {
            return self.usage.merged.len();
        }
        if on_request { self.resident() } else { self.marked_pages().max(self.view.marked).min(self.resident()) }
    }

    /// The share of duplicates among its pages, 0 to 1, if it was read whole.
    pub fn exact_ratio(&self) -> f64 {
        let mut resident = 0;
        let mut duplicate = 0;
        for extent in self.extents.values() {
            resident += u64::from(extent.resident);
            duplicate += u64::from(extent.duplicate);
        }
        duplicate as f64 / resident.max(1) as f64
    }

    /// The number of its resident pages. Those of a block are known from reading it; until then, they're taken to be spread evenly over
    /// the mapping.
    pub fn resident(&self) -> Pages {
        let read = self.extents.values().map(|extent| u64::from(extent.resident)).sum();
        self.view.resident.max(Pages(read)).min(self.view.pages)
    }

    /// The length of the spans marked by this run.
    pub fn marked_pages(&self) -> Pages {
        self.marks.spans.iter().map(|mark| mark.pages).sum()
    }

    /// The number of its pages that can be wanted back at worst: duplicates in what is marked, or on request in all that was read.
    pub fn may_return(&self, on_request: bool) -> Pages {
        if !on_request {
            return self.marks.spans.iter().map(|mark| mark.duplicate).sum();
        }
        let is_read = matches!(self.stage, Stage::Judged(_));
        Pages(if is_read { self.extents.values().map(|extent| u64::from(extent.duplicate)).sum() } else { 0 })
    }

    /// The number of resident pages in marked spans.
    pub fn marked_resident(&self) -> Pages {
        if self.is_marked_whole() {
            return self.view.resident;
        }
        self.marks.spans.iter().map(|mark| mark.resident).sum()
    }
}

/// An unmarked region with all pages resident.
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
        named: false,
        left_alone: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn offsets_survive_growth_downwards() {
        let view = |first, pages| test_view(1, first, pages);
        let mut region = Region::new(view(1000, 100), 0, false, 7);
        region.update(view(900, 200), 7);
        for page in [900, 999, 1000, 1099] {
            assert_eq!(region.page_at(region.offset(Vpn(page))), Vpn(page));
        }
    }
}
