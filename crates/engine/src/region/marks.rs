//! The marks in a region, and samples that show what changed there since ksmd's last visit.

use crate::marking::extents::{Candidate, Counts};
use crate::units::{Pages, Vpn};

/// We need this many samples of marked memory to compute a share.
const SAMPLES_MIN: u64 = 256;

/// The marks of one region.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    /// Spans that this run marked.
    pub spans: Vec<Candidate>,
    /// A number that's higher than that of all regions marked before this one.
    pub number: u64,
    /// Samples of marked memory.
    pub samples: MarkedSamples,
    /// Whether we've already requested scans because another program has marked the whole region.
    pub scanned_whole: bool,
    /// Whether a count of merged pages has found some in these spans.
    pub merges: bool,
    /// Whether we had ksmd visit the spans again because it had merged almost nothing there.
    pub visited_again: bool,
    /// How many pages were resident when ksmd last began to visit all of them twice, less those that have left memory
    /// since: they're new to ksmd if they come back. Pages merge at the second visit.
    pub visited: Pages,
}

impl Marks {
    /// Adds a span, which replaces the spans within it.
    pub fn add(&mut self, span: Candidate) {
        self.spans.retain(|mark| !covers(&span, mark));
        self.spans.push(span);
    }

    /// Removes the span that starts at `first` and is `pages` long.
    pub fn remove(&mut self, first: Vpn, pages: Pages) {
        self.spans.retain(|mark| (mark.first, mark.pages) != (first, pages));
    }

    /// Whether the span that starts at `first` and is `pages` long is marked.
    pub fn has(&self, first: Vpn, pages: Pages) -> bool {
        self.spans.iter().any(|mark| (mark.first, mark.pages) == (first, pages))
    }

    /// The resident pages and duplicates found in the spans.
    pub fn counts(&self) -> Counts {
        self.spans.iter().map(Candidate::counts).sum()
    }

    /// Whether a page lies in one of the spans.
    pub fn contains(&self, page: Vpn) -> bool {
        self.spans.iter().any(|mark| mark.first <= page && page.0 < mark.first.0 + mark.pages.0)
    }

    /// A page of the spans, chosen by `random`.
    pub fn page(&self, random: u64) -> Option<Vpn> {
        let pages: u64 = self.spans.iter().map(|mark| mark.pages.0).sum();
        let mut at = random.checked_rem(pages)?;
        for mark in &self.spans {
            if at < mark.pages.0 {
                return Some(mark.first + at);
            }
            at -= mark.pages.0;
        }
        None
    }
}

/// Samples of marked memory since ksmd last visited it.
#[derive(Clone, Copy, Debug, Default)]
pub struct MarkedSamples {
    pub sampled: u64,
    /// Pages that aren't merged although we know they're duplicates. If the index doesn't keep all contents, each page
    /// that we find also counts for those that we miss.
    pub unmerged: u64,
    /// Sampled pages that ksmd could have merged: pages of zeros, and pages with an unmerged copy in marked memory.
    pub mergeable: u64,
    /// The share of sampled pages that were unmerged duplicates right after ksmd's visit, because their copies had
    /// changed or weren't marked.
    residual: Option<f64>,
}

impl MarkedSamples {
    /// Starts to count from zero. If ksmd visits `all` pages, we measure the residual share again afterwards.
    pub fn restart(&mut self, all: bool) {
        let residual = if all { None } else { self.residual };
        *self = Self { residual, ..Self::default() };
    }

    /// The share of sampled pages that are unmerged duplicates, 0 to 1.
    pub fn unmerged_share(&self) -> f64 {
        if self.sampled == 0 {
            return self.residual.unwrap_or(0.0);
        }
        (self.unmerged as f64 / self.sampled as f64).min(1.0)
    }

    /// The share of pages that became worth merging since ksmd last visited, 0 to 1: a careful estimate.
    pub fn worth(&mut self) -> f64 {
        if self.sampled < SAMPLES_MIN {
            return 0.0;
        }
        let share = self.unmerged_share();
        let Some(residual) = self.residual else {
            *self = Self { residual: Some(share), mergeable: self.mergeable, ..Self::default() };
            return 0.0;
        };
        let uncertainty = 2.0 * (share.max(0.01) / self.sampled as f64).sqrt();
        (share - residual - uncertainty).max(0.0)
    }
}

/// Whether `inner` lies within `outer`.
pub fn covers(outer: &Candidate, inner: &Candidate) -> bool {
    outer.first <= inner.first && inner.first.0 + inner.pages.0 <= outer.first.0 + outer.pages.0
}
