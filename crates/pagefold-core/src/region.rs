//! What is known of one region.

pub mod table;

use crate::config::Config;
use crate::hash::Digest;
use crate::host::RegionView;
use crate::marking::cow_breaks::Churn;
use crate::marking::extents::{Candidate, Cut, Extent, Extents, candidates};
use crate::permutation::Permutation;
use crate::random::mix;
use crate::sampling::estimate::{Estimate, Tally};
use crate::units::{EXTENT_PAGES, Pages, Permyriad, Vpn};
use std::collections::BTreeMap;

/// Neighbouring pages read at one sample point. A run of four costs little more than one page and a
/// half (page-table walk and system call are shared), and shows as much as two scattered pages.
pub const RUN_PAGES: u64 = 4;
/// Pages remembered from the survey, to see what changes.
const PROBES_MAX: usize = 1024;
/// Visits to remembered pages before their changes count.
const PROBES_MIN: u64 = 16;

/// Where a region stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Sampled, to tell whether it is worth reading whole.
    Survey,
    /// Being read whole, up to this page.
    Examine(Vpn),
    /// Read whole at this time; marked where it was dense. Sampled on, to see whether that still holds.
    Judged(u64),
}

/// Whether a region is left alone, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// It is not.
    No,
    /// Its merges did not last: until a time.
    Soured,
    /// Its process refused to be marked: for good.
    Refused,
}

/// What samples of marked memory have shown since ksmd last came by.
#[derive(Clone, Copy, Debug, Default)]
pub struct InMarks {
    /// Pages sampled.
    pub sampled: u64,
    /// Those that were duplicate, by what is known of other pages, and yet not merged.
    pub unmerged: u64,
    /// The share of such pages when ksmd had just come by: their twins have changed, or are not marked.
    residual: Option<f64>,
}

/// Samples in marked memory that make a share.
const IN_MARKS_MIN: u64 = 256;

impl InMarks {
    /// Counts anew. If ksmd visits `all` pages, what is left then is the residue.
    pub fn restart(&mut self, all: bool) {
        *self = Self { residual: self.residual.filter(|_| !all), ..Self::default() };
    }

    /// The share of pages that have become worth merging since ksmd last came by, as far as it is beyond doubt.
    pub fn worth(&mut self) -> f64 {
        if self.sampled < IN_MARKS_MIN {
            return 0.0;
        }
        let share = self.unmerged as f64 / self.sampled as f64;
        let Some(residual) = self.residual else {
            *self = Self { residual: Some(share), ..Self::default() };
            return 0.0;
        };
        let doubt = 2.0 * (share.max(0.01) / self.sampled as f64).sqrt();
        (share - residual - doubt).max(0.0)
    }
}

/// One region under judgement.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct Region {
    /// The host's latest view of it.
    pub view: RegionView,
    /// It is a block of a larger mapping, which may be marked in part.
    pub in_blocks: bool,
    /// Offsets in the index count from here.
    pub base: Vpn,
    /// When it was first seen, nanoseconds.
    pub seen_ns: u64,
    /// It appeared during the run, so that its age is known.
    pub newborn: bool,
    /// Its level on the ladder, from 1.
    pub level: usize,
    /// What its samples have shown since it was last examined.
    pub tally: Tally,
    /// Samples that fell in marked spans.
    pub in_marks: InMarks,
    /// Where it stands.
    pub stage: Stage,
    /// Its extents, once examined.
    pub extents: Extents,
    /// Spans marked in it by this run.
    pub marks: Vec<Candidate>,
    /// How dense its extents must be to be marked.
    pub density: Permyriad,
    /// Somebody else has marked all of it, and ksmd has been sent there once.
    pub scanned_whole: bool,
    /// Pages that were resident when ksmd last set out to visit them twice.
    pub visited: Pages,
    /// Its extents have changed since candidates were last derived from them.
    pub dirty: bool,
    /// Not to be marked or examined again before this time, nanoseconds.
    pub not_before_ns: u64,
    /// Its target could not be stopped: to be tried again at this time, nanoseconds.
    pub retry_ns: u64,
    /// The last pause before it may be examined again, nanoseconds.
    pub pause_ns: u64,
    /// What has become of its merged pages.
    pub churn: Churn,
    /// Whether it is left alone.
    pub alone: Alone,
    /// Its contents were claimed for its domain when it was last read whole: several domains were active.
    pub claimed: bool,
    /// Which of its pages were active when they were first read, by groups of 64 pages. Later reading tells nothing: being
    /// read makes a page active.
    pub active: BTreeMap<u64, u64>,
    /// That is known.
    pub activity_known: bool,
    /// Pages looked at in sampling since it was last read whole, whatever was there.
    pub looked_at: u64,
    order: Permutation,
    next: u64,
    probes: Vec<(u32, u32)>,
    revisited: u64,
    changed: u64,
}

impl Region {
    /// A region seen for the first time.
    pub fn new(view: RegionView, now_ns: u64, newborn: bool, seed: u64) -> Self {
        let mut region = Self {
            view,
            in_blocks: false,
            base: view.first,
            seen_ns: now_ns,
            newborn,
            level: 1,
            tally: Tally::default(),
            in_marks: InMarks::default(),
            stage: Stage::Survey,
            extents: Extents::new(),
            marks: Vec::new(),
            density: Permyriad(10_000),
            visited: Pages(0),
            scanned_whole: false,
            dirty: false,
            not_before_ns: 0,
            retry_ns: 0,
            pause_ns: 0,
            churn: Churn::default(),
            alone: Alone::No,
            claimed: false,
            active: BTreeMap::new(),
            activity_known: false,
            looked_at: 0,
            order: Permutation::new(1, 0),
            next: 0,
            probes: Vec::new(),
            revisited: 0,
            changed: 0,
        };
        region.reorder(seed);
        region
    }

    /// Whether what `view` shows is to be judged as something else: marks do not vanish by themselves, and the kernel
    /// joins a new mapping to a neighbour like it, so that a small old region may be the seam of a large new one.
    pub fn is_replaced_by(&self, view: &RegionView) -> bool {
        let unmarked = !self.marks.is_empty() && self.view.marked > Pages(0) && view.marked == Pages(0);
        let (less, more) = (self.view.pages.min(view.pages), self.view.pages.max(view.pages));
        unmarked || more.0 > 2 * less.0 + EXTENT_PAGES
    }

    /// Takes the host's latest view: bounds move with growth and shrinking.
    pub fn update(&mut self, view: RegionView, seed: u64) {
        let moved = (view.first, view.pages) != (self.view.first, self.view.pages);
        self.view = view;
        if moved {
            self.reorder(seed);
        }
    }

    /// Siblings share their order, so that copies of each other are sampled at the same places.
    fn reorder(&mut self, seed: u64) {
        let units = self.view.pages.0.div_ceil(RUN_PAGES).max(1);
        self.order = Permutation::new(units, mix(seed ^ self.view.family.0));
        self.next = 0;
    }

    /// The next place to sample: a first page and a number of pages. Every page comes once before any
    /// comes twice.
    pub fn next_run(&mut self) -> (Vpn, u64) {
        if self.next >= self.order.len() {
            self.next = 0;
        }
        let unit = self.order.at(self.next);
        self.next += 1;
        let first = unit * RUN_PAGES;
        let pages = RUN_PAGES.min(self.view.pages.0 - first);
        self.looked_at += pages;
        (self.view.first + first, pages)
    }

    /// Places not sampled yet in this cycle.
    pub fn places_left(&self) -> u64 {
        self.order.len().saturating_sub(self.next)
    }

    /// The share of duplicates left in extents that were not worth marking, 0 to 1.
    pub fn left_over(&self) -> f64 {
        let (resident, duplicate) = self
            .extents
            .iter()
            .filter(|(number, _)| !self.is_marked(Vpn(*number * EXTENT_PAGES)))
            .fold((0_u64, 0_u64), |(resident, duplicate), (_, extent)| {
                (resident + u64::from(extent.resident), duplicate + u64::from(extent.duplicate))
            });
        duplicate as f64 / resident.max(1) as f64
    }

    /// The page's offset for the index. Wraps for pages below the base, as a stack grows downwards.
    #[expect(clippy::cast_possible_truncation, reason = "27 bits are kept; regions are shorter than that")]
    pub fn offset(&self, page: Vpn) -> u32 {
        page.0.wrapping_sub(self.base.0) as u32 & ((1 << 27) - 1)
    }

    /// The page at an offset of the index.
    pub fn page_at(&self, offset: u32) -> Vpn {
        // Sign-extend the 27 bits.
        let offset = i64::from(offset) << 37 >> 37;
        Vpn(self.base.0.wrapping_add_signed(offset))
    }

    /// Remembers a sampled page, or compares it with what is remembered of it.
    #[expect(clippy::cast_possible_truncation, reason = "32 bits of a digest are enough to see a change")]
    pub fn probe(&mut self, page: Vpn, digest: Digest, surveying: bool) {
        let (offset, print) = (self.offset(page), (digest.0 >> 16) as u32);
        if surveying {
            if self.probes.len() < PROBES_MAX {
                self.probes.push((offset, print));
            }
        } else if let Ok(at) = self.probes.binary_search_by_key(&offset, |&(offset, _)| offset) {
            self.revisited += 1;
            self.changed += u64::from(self.probes[at].1 != print);
            self.probes[at].1 = print;
        }
    }

    /// Begins to read the region whole, on the top level.
    pub fn examine(&mut self, top: usize) {
        self.level = top;
        self.stage = Stage::Examine(self.view.first);
        self.extents.clear();
        self.probes.sort_unstable();
        self.probes.dedup_by_key(|&mut (offset, _)| offset);
        (self.revisited, self.changed) = (0, 0);
    }

    /// The whole region has been read, `claimed` if its contents were claimed meanwhile.
    pub fn judged(&mut self, now_ns: u64, claimed: bool) {
        self.stage = Stage::Judged(now_ns);
        self.claimed = claimed;
        self.tally = Tally::default();
        self.activity_known = true;
        self.looked_at = 0;
        self.density = Permyriad(10_000);
        self.in_marks = InMarks::default();
        self.dirty = true;
    }

    /// Back to the bottom, unmarked, because its merges did not last: left alone until `until_ns`.
    pub fn sour(&mut self, until_ns: u64) {
        self.alone = Alone::Soured;
        self.level = 1;
        self.marks.clear();
        self.dirty = false;
        self.not_before_ns = until_ns;
        self.churn.forget();
    }

    /// Whether its pages still tell if its process uses them. Being read twice makes a page active, so each may be asked at
    /// its first two readings at most: in the first two cycles of sampling, or in reading it whole after less than one.
    pub fn tells_activity(&self) -> bool {
        let cycles = if matches!(self.stage, Stage::Examine(_)) { 1 } else { 2 };
        !self.activity_known && self.looked_at <= cycles * self.view.pages.0
    }

    /// Takes note of an active page.
    pub fn note_active(&mut self, page: Vpn) {
        *self.active.entry(page.0 / 64).or_default() |= 1 << (page.0 % 64);
    }

    /// Whether a page was active when the region was first read whole.
    pub fn was_active(&self, page: Vpn) -> bool {
        self.active.get(&(page.0 / 64)).is_some_and(|bits| bits >> (page.0 % 64) & 1 == 1)
    }

    /// Takes note of a span that is being marked, in place of those that lie in it.
    pub fn mark(&mut self, span: Candidate) {
        self.marks.retain(|mark| !covers(&span, mark));
        self.marks.push(span);
    }

    /// Pages that have come into being in it, marked as all of it is, since ksmd came by.
    pub fn grown(&self) -> Pages {
        if self.is_marked_whole() { self.view.resident.saturating_sub(self.visited) } else { Pages(0) }
    }

    /// A resident page anywhere in its marked spans, chosen by `luck`.
    pub fn marked_page(&self, luck: u64) -> Option<Vpn> {
        if self.is_marked_whole() {
            return Some(self.view.first + luck % self.view.pages.0);
        }
        let pages: u64 = self.marks.iter().map(|mark| mark.pages.0).sum();
        let mut at = luck.checked_rem(pages)?;
        for mark in &self.marks {
            if at < mark.pages.0 {
                return Some(mark.first + at);
            }
            at -= mark.pages.0;
        }
        None
    }

    /// Whether a page has been counted in its extent.
    pub fn is_counted(&self, page: Vpn) -> bool {
        match self.stage {
            Stage::Survey => false,
            Stage::Examine(cursor) => page < cursor,
            Stage::Judged(_) => true,
        }
    }

    /// Whether a page lies in a span marked by this run, or by somebody else's mark on the whole region.
    pub fn is_marked(&self, page: Vpn) -> bool {
        self.is_marked_whole()
            || self.marks.iter().any(|mark| mark.first <= page && page.0 < mark.first.0 + mark.pages.0)
    }

    /// The estimate from its samples, with `scope_fraction` of the whole scope sampled. Twins are
    /// taken to lie where sampling is as dense as here, or as in the scope if that is thinner.
    pub fn estimate(&self, scope_fraction: f64) -> Estimate {
        let own = self.tally.sampled as f64 / self.view.resident.0.max(1) as f64;
        self.tally.estimate(own.min(scope_fraction).max(1e-6))
    }

    /// Whether too much of it changes between two visits for merging to last: its merges would be COW-broken.
    pub fn is_volatile(&self, config: &Config) -> bool {
        if config.cow_threshold >= Permyriad(10_000) {
            return false;
        }
        self.revisited >= PROBES_MIN && Permyriad::of(self.changed, self.revisited) >= config.cow_threshold
    }

    /// The spans that are worth marking at a density, at most `cap` of them.
    pub fn spans(&self, config: &Config, plain: Permyriad, cap: usize) -> Vec<Candidate> {
        let above = if self.in_blocks { Pages(0) } else { config.split_above };
        let cut = Cut { above, spans: cap };
        let spans = candidates(&self.extents, self.view.first, self.view.pages, config.density.thinned(plain), cut);
        spans.into_iter().filter(|span| span.duplicate >= config.span_pages_min).collect()
    }

    /// Whether its contents must be claimed, by reading it whole again: it is marked, or about to be.
    pub fn owes_claims(&self) -> bool {
        let about_to_be = self.dirty && matches!(self.stage, Stage::Judged(_));
        !self.claimed && (about_to_be || !self.marks.is_empty() && !matches!(self.stage, Stage::Examine(_)))
    }

    /// Pages that are left unmarked because another trust domain holds the same: those in their extents.
    pub fn withheld(&self) -> Pages {
        let held = |extent: &&Extent| extent.foreign > 0;
        Pages(
            self.extents
                .values()
                .filter(held)
                .map(|extent| u64::from(extent.duplicate) + u64::from(extent.foreign))
                .sum(),
        )
    }

    /// Whether somebody has marked all of it.
    pub fn is_marked_whole(&self) -> bool {
        self.view.marked >= self.view.pages
    }

    /// All of it as one span, with the duplicates known.
    pub fn whole(&self) -> Option<Candidate> {
        let duplicate = Pages(self.extents.values().map(|extent| u64::from(extent.duplicate)).sum());
        let whole =
            Candidate { first: self.view.first, pages: self.view.pages, resident: self.view.resident, duplicate };
        (duplicate > Pages(0)).then_some(whole)
    }

    /// Resident pages in the spans marked by this run.
    pub fn marked_resident(&self) -> Pages {
        if self.is_marked_whole() {
            return self.view.resident;
        }
        self.marks.iter().map(|mark| mark.resident).sum()
    }
}

/// Whether one span lies in the other.
pub fn covers(outer: &Candidate, inner: &Candidate) -> bool {
    outer.first <= inner.first && inner.first.0 + inner.pages.0 <= outer.first.0 + outer.pages.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{FamilyKey, OwnerKey, RegionKey};

    fn view(first: u64, pages: u64) -> RegionView {
        RegionView {
            key: RegionKey(1),
            owner: OwnerKey(1),
            family: FamilyKey(1),
            domain: crate::keys::DomainKey(0),
            first: Vpn(first),
            pages: Pages(pages),
            resident: Pages(pages),
            marked: Pages(0),
        }
    }

    #[test]
    fn every_page_is_sampled_once_in_a_cycle() {
        let mut region = Region::new(view(1000, 1003), 0, false, 7);
        let mut seen = vec![0; 1003];
        for _ in 0..1003_u64.div_ceil(RUN_PAGES) {
            let (first, pages) = region.next_run();
            for page in first.0..first.0 + pages {
                seen[usize::try_from(page - 1000).unwrap()] += 1;
            }
        }
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn offsets_survive_growth_downwards() {
        let mut region = Region::new(view(1000, 100), 0, false, 7);
        region.update(view(900, 200), 7);
        for page in [900, 999, 1000, 1099] {
            assert_eq!(region.page_at(region.offset(Vpn(page))), Vpn(page));
        }
    }

    #[test]
    fn a_region_that_rewrites_its_pages_is_volatile() {
        let mut region = Region::new(view(0, 1000), 0, false, 7);
        for page in 0..100 {
            region.probe(Vpn(page), Digest(page << 16), true);
        }
        region.examine(4);
        for page in 0..100 {
            region.probe(Vpn(page), Digest((page + u64::from(page % 2 == 0)) << 16), false);
        }
        assert!(region.is_volatile(&Config::default()));
        region.examine(4);
        for page in 0..100 {
            region.probe(Vpn(page), Digest((page + u64::from(page % 2 == 0)) << 16), false);
        }
        assert!(!region.is_volatile(&Config::default()));
    }
}
