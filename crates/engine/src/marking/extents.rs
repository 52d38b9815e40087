//! Picks the spans of a region that are worth marking, by the density of duplicates.
//!
//! Every marked page costs ksmd CPU time in each scan. In real programs duplicates come in short runs, but each 2 MiB
//! extent is about equally dense throughout. So we go by an extent's density: at least half of its pages, or 65 % if it
//! holds huge pages, because merging splits those.
//!
//! Marking part of a mapping splits it, and then mremap(2) on the whole mapping can fail. So we mark all but the
//! largest mappings whole or not at all, by their overall density.

use crate::units::{EXTENT_PAGES, Pages, Permyriad, Vpn};
use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::{AddAssign, Range};

/// Resident pages, and the duplicates among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub resident: Pages,
    pub duplicate: Pages,
}

impl Counts {
    /// The share of duplicates, 0 to 1.
    pub fn ratio(self) -> f64 {
        self.duplicate.0 as f64 / self.resident.0.max(1) as f64
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.resident += other.resident;
        self.duplicate += other.duplicate;
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        let mut sum = Self::default();
        for count in counts {
            sum += count;
        }
        sum
    }
}

/// Pages found in one 2 MiB-aligned extent of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Pages that hold memory: private, merged or shared.
    pub resident: u16,
    /// Pages that are zero, merged already, or have a copy elsewhere. If the index doesn't keep all contents, this is
    /// an estimate, which may be above `resident`.
    pub duplicate: u16,
    /// Pages that belong to a huge page.
    pub huge: u16,
    /// Pages that are shared through fork.
    pub shared: u16,
}

/// How dense an extent must be for us to mark it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Density {
    /// The duplicate share of the resident pages.
    pub plain: Permyriad,
    /// The same share for extents that hold huge pages.
    pub huge: Permyriad,
}

impl Density {
    /// The same densities, but `plain` for extents without huge pages if that's lower.
    #[must_use]
    pub fn thinned(self, plain: Permyriad) -> Self {
        Self { plain: plain.min(self.plain), ..self }
    }
}

impl Default for Density {
    fn default() -> Self {
        Self { plain: Permyriad(5_000), huge: Permyriad(6_500) }
    }
}

impl Extent {
    pub fn is_dense(&self, density: Density) -> bool {
        let Counts { resident, duplicate } = self.counts();
        duplicate > Pages(0) && Permyriad::of(duplicate.0, resident.0) >= self.needed(density)
    }

    pub fn counts(&self) -> Counts {
        let duplicate = self.duplicate.min(self.resident);
        Counts { resident: Pages(self.resident.into()), duplicate: Pages(duplicate.into()) }
    }

    /// Adds duplicates to the count: `pages` is an estimate if the index doesn't keep all contents.
    pub fn add_duplicates(&mut self, pages: u64) {
        self.duplicate = self.duplicate.saturating_add(u16::try_from(pages).unwrap_or(u16::MAX));
    }

    fn needed(self, density: Density) -> Permyriad {
        if self.huge > 0 { density.huge } else { density.plain }
    }
}

/// The extents of a region in which we've read a page, by extent number ([`Vpn::extent`]).
pub type Extents = BTreeMap<u64, Extent>;

/// A range of pages that we may mark in one region, and the pages found in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub first: Vpn,
    /// The length in pages of address space.
    pub pages: Pages,
    /// The number of resident pages in the range.
    pub resident: Pages,
    /// The number of duplicates in the range.
    pub duplicate: Pages,
}

impl Candidate {
    fn new(first: Vpn, end: Vpn, counts: Counts) -> Self {
        Self { first, pages: Pages(end.0 - first.0), resident: counts.resident, duplicate: counts.duplicate }
    }

    pub fn counts(&self) -> Counts {
        Counts { resident: self.resident, duplicate: self.duplicate }
    }
}

/// Which regions we may mark in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRule {
    /// We may mark regions longer than this in part.
    pub above: Pages,
    /// A region has at most this many spans.
    pub spans: usize,
}

/// The spans of `extents` worth marking within the region `first .. first + pages`.
///
/// A region that we may not mark in part is one span if its extents together are dense enough, and none otherwise. A
/// region that we may mark in part is one span if three quarters of its resident pages lie in dense extents and no
/// sparse extent holds huge pages. Otherwise each run of dense extents is a span, and we join spans over their gaps
/// until there are no more than `split` allows.
pub fn candidates(extents: &Extents, first: Vpn, pages: Pages, density: Density, split: SplitRule) -> Vec<Candidate> {
    let end = first + pages.0;
    let mut all = Counts::default();
    let mut in_dense = Pages(0);
    let mut needed = 0;
    let mut has_huge_sparse = false;
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (&number, extent) in extents {
        all += extent.counts();
        needed += u64::from(extent.resident) * u64::from(extent.needed(density).0);
        if !extent.is_dense(density) {
            has_huge_sparse |= extent.huge > 0;
            continue;
        }
        in_dense += extent.counts().resident;
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    let is_whole = if pages <= split.above {
        all.duplicate > Pages(0) && all.duplicate.0 * 10_000 >= needed
    } else {
        in_dense > Pages(0) && in_dense.0 * 4 >= all.resident.0 * 3 && !has_huge_sparse
    };
    if is_whole {
        return vec![Candidate::new(first, end, all)];
    }
    if pages <= split.above {
        return Vec::new();
    }
    join_runs(&mut runs, extents, split.spans);
    let mut spans = Vec::new();
    for run in runs {
        let low = Vpn((run.start * EXTENT_PAGES).clamp(first.0, end.0));
        let high = Vpn((run.end * EXTENT_PAGES).clamp(first.0, end.0));
        spans.push(Candidate::new(low, high, counts_of(extents, run)));
    }
    spans
}

/// Joins runs of extents over the gaps with the fewest resident pages, until at most `most` runs are left.
fn join_runs(runs: &mut Vec<Range<u64>>, extents: &Extents, most: usize) {
    while runs.len() > most.max(1) {
        let gap = |right: &usize| counts_of(extents, runs[right - 1].end..runs[*right].start).resident;
        let Some(right) = (1..runs.len()).min_by_key(gap) else { break };
        runs[right - 1].end = runs[right].end;
        runs.remove(right);
    }
}

fn counts_of(extents: &Extents, run: Range<u64>) -> Counts {
    extents.range(run).map(|(_, extent)| extent.counts()).sum()
}

/// If there's no headroom for all of a span, we cut the span at a multiple of this many pages.
pub const CUT_PAGES: Pages = Pages(64);

/// The beginning of a span: as much as fits into `most` pages. `None` if nothing fits.
pub fn beginning(extents: &Extents, span: &Candidate, most: Pages) -> Option<Candidate> {
    if span.pages <= most {
        return Some(*span);
    }
    let end = Vpn((span.first.0 + most.0) / CUT_PAGES.0 * CUT_PAGES.0);
    part(extents, span, span.first..end)
}

/// The part of a span within `bounds`. We assume that an extent's duplicates are spread evenly. `None` if the span lies
/// outside.
pub fn part(extents: &Extents, span: &Candidate, bounds: Range<Vpn>) -> Option<Candidate> {
    let span_end = span.first + span.pages.0;
    let first = span.first.max(bounds.start);
    let end = span_end.min(bounds.end);
    if end <= first {
        return None;
    }
    let mut counts = Counts::default();
    for (number, extent) in extents.range(first.extent()..end.0.div_ceil(EXTENT_PAGES)) {
        let low = number * EXTENT_PAGES;
        let pages_of = |first: Vpn, end: Vpn| end.0.min(low + EXTENT_PAGES) - first.0.max(low);
        let (pages, all) = (pages_of(first, end), pages_of(span.first, span_end));
        counts.resident += Pages(u64::from(extent.resident) * pages / all);
        counts.duplicate += Pages(extent.counts().duplicate.0 * pages / all);
    }
    Some(Candidate::new(first, end, counts))
}

/// The parts of a span before `from` and from `to` on. Both are bounds of extents. Without extents, we assume that the
/// span's pages are spread evenly.
pub fn around(extents: Option<&Extents>, span: &Candidate, from: Vpn, to: Vpn) -> Vec<Candidate> {
    let end = span.first + span.pages.0;
    if to <= span.first || end <= from {
        return vec![*span];
    }
    let mut parts = Vec::new();
    for (low, high) in [(span.first, from), (to, end)] {
        if low < high {
            let share = |pages: Pages| Pages(pages.0 * (high.0 - low.0) / span.pages.0);
            let counts = match extents {
                Some(extents) => counts_of(extents, low.extent()..high.0.div_ceil(EXTENT_PAGES)),
                None => Counts { resident: share(span.resident), duplicate: share(span.duplicate) },
            };
            parts.push(Candidate::new(low, high, counts));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::count;
    use proptest::prelude::*;

    /// Allows marking regions longer than two extents in part.
    fn split(spans: usize) -> SplitRule {
        SplitRule { above: Pages(2 * EXTENT_PAGES), spans }
    }

    fn extents(densities: &[u16]) -> Extents {
        (0..)
            .zip(densities)
            .map(|(n, &duplicate)| (n, Extent { resident: 512, duplicate, ..Extent::default() }))
            .collect()
    }

    #[test]
    fn dense_neighbours_are_joined_and_sparse_extents_left_out() {
        let spans =
            candidates(&extents(&[0, 300, 400, 10, 0, 500]), Vpn(100), Pages(2972), Density::default(), split(8));
        let ranges: Vec<_> = spans.iter().map(|span| (span.first.0, span.pages.0, span.duplicate.0)).collect();
        assert_eq!(ranges, [(512, 1024, 700), (2560, 512, 500)]);
    }

    #[test]
    fn the_beginning_of_a_span_ends_at_a_multiple_of_64_pages() {
        let all = extents(&[300, 400, 10, 500]);
        let span = Candidate { first: Vpn(100), pages: Pages(1_900), resident: Pages(2_048), duplicate: Pages(1_210) };
        let ends =
            |most| beginning(&all, &span, Pages(most)).map(|part| (part.pages.0, part.resident.0, part.duplicate.0));
        assert_eq!(ends(27), None);
        assert_eq!(ends(411), Some((348, 432, 253)));
        assert_eq!(ends(412), Some((412, 512, 300)));
        assert_eq!(ends(1_500), Some((1_500, 1_606, 778)));
        assert_eq!(ends(1_900), Some((1_900, 2_048, 1_210)));
    }

    #[test]
    fn both_sides_of_a_part_are_left() {
        let all = extents(&[300, 400, 10, 500]);
        let span = Candidate { first: Vpn(100), pages: Pages(1_900), resident: Pages(2_048), duplicate: Pages(1_210) };
        let left = |from, to| {
            let parts = around(Some(&all), &span, Vpn(from), Vpn(to));
            parts.iter().map(|part| (part.first.0, part.pages.0, part.duplicate.0)).collect::<Vec<_>>()
        };
        assert_eq!(left(512, 1_024), [(100, 412, 300), (1_024, 976, 510)]);
        assert_eq!(left(100, 1_024), [(1_024, 976, 510)]);
        assert_eq!(left(100, 2_000), []);
        let parts = around(None, &span, Vpn(512), Vpn(1_024));
        let counts: Vec<_> = parts.iter().map(|part| (part.resident.0, part.duplicate.0)).collect();
        assert_eq!(counts, [(444, 262), (1_052, 621)], "while we read it again");
    }

    #[test]
    fn a_mostly_dense_region_is_marked_whole() {
        let spans = candidates(&extents(&[300, 300, 300, 10]), Vpn(3), Pages(2000), Density::default(), split(8));
        assert_eq!(
            spans,
            [Candidate { first: Vpn(3), pages: Pages(2000), resident: Pages(2048), duplicate: Pages(910) }]
        );
    }

    #[test]
    fn a_region_that_may_not_be_split_is_marked_whole_or_not_at_all() {
        let whole = SplitRule { above: Pages(2048), spans: 8 };
        let of = |densities: &[u16]| candidates(&extents(densities), Vpn(3), Pages(2000), Density::default(), whole);
        let all = |duplicate| [Candidate { first: Vpn(3), pages: Pages(2000), resident: Pages(2048), duplicate }];
        assert_eq!(of(&[512, 0, 512, 0]), all(Pages(1024)));
        assert_eq!(of(&[512, 0, 511, 0]), []);
        assert_eq!(of(&[0, 0, 0, 0]), []);
        // If half of the extents hold huge pages, we need the mean of both densities.
        let mut mixed = extents(&[512, 512, 0, 150]);
        mixed.get_mut(&0).unwrap().huge = 512;
        mixed.get_mut(&3).unwrap().huge = 512;
        assert_eq!(candidates(&mixed, Vpn(0), Pages(2048), Density::default(), whole), []);
        mixed.get_mut(&3).unwrap().duplicate = 160;
        assert_eq!(candidates(&mixed, Vpn(0), Pages(2048), Density::default(), whole).len(), 1);
    }

    #[test]
    fn extents_with_huge_pages_must_be_denser() {
        let mut all = extents(&[300, 0, 0, 0]);
        all.get_mut(&0).unwrap().huge = 512;
        assert!(candidates(&all, Vpn(0), Pages(2048), Density::default(), split(8)).is_empty());
        all.get_mut(&0).unwrap().duplicate = 500;
        assert_eq!(candidates(&all, Vpn(0), Pages(2048), Density::default(), split(8)).len(), 1);
    }

    proptest! {
        #[test]
        fn spans_are_disjoint_inside_the_region_and_at_most_the_cap(
            densities in proptest::collection::vec(0u16..=512, 3..60), first in 0u64..512, cap in 1usize..6,
        ) {
            let all = extents(&densities);
            let pages = Pages(count(densities.len()) * EXTENT_PAGES - first);
            let spans = candidates(&all, Vpn(first), pages, Density::default(), split(cap));
            prop_assert!(spans.len() <= cap);
            let mut last = first;
            for span in &spans {
                prop_assert!(span.first.0 >= last && span.pages.0 > 0 && span.duplicate <= span.resident);
                last = span.first.0 + span.pages.0;
                prop_assert!(last <= first + pages.0);
            }
            // Every dense extent is in a span.
            for (number, extent) in &all {
                if extent.is_dense(Density::default()) && pages.0 > 2 * EXTENT_PAGES {
                    let page = (number * EXTENT_PAGES).max(first);
                    prop_assert!(spans.iter().any(|span| span.first.0 <= page && page < span.first.0 + span.pages.0));
                }
            }
        }
    }
}
