//! Estimates a region's duplicate ratio from a sample.
//!
//! We only see that a sampled page is a duplicate if we sampled a copy, too. If we sample a fraction `f` of the memory,
//! we find a page with `k` copies with probability `1 - (1-f)^k`. So UKSM's raw ratio (section 5.2) shows little of
//! contents that exist twice: one in a hundred of them if we sample one per cent. We can measure two figures: the share
//! of samples found to be duplicates, `h = d (1 - (1-f)^k)`, and the number of copies seen per sample, `c = d k f`.
//! They yield both `k` and the duplicate ratio `d`.
//!
//! If `k f` is well below one, samples hardly distinguish a few copies from one, and the estimate tends towards one
//! copy, so towards too high a ratio: by a factor of `k` at worst. We use the estimate to decide which regions to read
//! whole, so too high a ratio costs reading, but too low a ratio would cost the saving.

use crate::units::whole;
use serde::{Deserialize, Serialize};

/// Counts of a region's sampled pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tally {
    /// Sampled pages that hold memory.
    pub sampled: u64,
    /// Zero pages.
    pub zero: u64,
    /// Other pages with a content that we saw elsewhere, too.
    pub found: u64,
    /// How many copies of all sampled pages we've seen.
    pub copies: u64,
}

/// An estimated duplicate ratio, with its confidence bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The share of pages that are zero or have a copy in scope, 0 to 1.
    pub ratio: f64,
    /// The lower 95 % confidence bound.
    pub floor: f64,
    /// The upper 95 % confidence bound.
    pub ceiling: f64,
}

impl Tally {
    /// Sampled pages that are zero or that we saw elsewhere, too.
    pub fn duplicates(&self) -> u64 {
        self.zero + self.found
    }

    /// Halves all counts, so that new samples weigh more than old ones.
    pub fn age(&mut self) {
        let Self { sampled, zero, found, copies } = self;
        for count in [sampled, zero, found, copies] {
            *count /= 2;
        }
    }

    /// Estimates the duplicate ratio if we sampled the fraction `fraction` (0 to 1) of the memory that holds the
    /// copies.
    pub fn estimate(&self, fraction: f64) -> Estimate {
        if self.sampled == 0 {
            return Estimate { ratio: 0.0, floor: 0.0, ceiling: 1.0 };
        }
        let n = self.sampled as f64;
        let zero = self.zero as f64 / n;
        let found = self.found as f64;
        let fraction = fraction.clamp(1e-6, 1.0);
        // If we found none, we don't know k and assume one copy, which is hardest to find.
        let chance = match self.found {
            0 => fraction,
            _ => chance_of_discovery(fraction, self.copies as f64 / found),
        };
        // The upper 95 % bound of a Poisson count, to within a few per cent (3 for a count of 0).
        let most = found + 1.9 * (found + 0.6).sqrt() + 1.5;
        let ratio = zero + (found / n / chance).min(1.0 - zero);
        // The lower 95 % bound of all duplicates seen.
        let seen = self.duplicates() as f64;
        let least = (seen - 1.9 * seen.sqrt()).max(0.0);
        Estimate { ratio, floor: ratio * least / seen.max(1.0), ceiling: (zero + most / n / chance).min(1.0) }
    }
}

/// This many bisections find the number of copies to within 0.01 %.
const BISECTIONS: u32 = 18;

/// `1 - (1-f)^k` for the `k` at which a page found to be a duplicate shows `copies_per_found` copies on average.
///
/// `k f / (1 - (1-f)^k)` grows from 1 at `k = 1` without bound, so bisection finds `k`.
fn chance_of_discovery(fraction: f64, copies_per_found: f64) -> f64 {
    if copies_per_found <= 1.0 {
        return fraction;
    }
    let log_missed = (-fraction).ln_1p();
    let chance = |copies: f64| -(copies * log_missed).exp_m1();
    let mut low = 1.0_f64;
    let mut high = 64.0 / fraction;
    for _ in 0..BISECTIONS {
        let k = (low * high).sqrt();
        if k * fraction / chance(k) < copies_per_found { low = k } else { high = k }
    }
    chance(low).max(fraction)
}

/// How many samples a region of `pages` pages needs until we see about `evidence` copies. We assume that the share
/// `ratio` of its pages have a copy, and that we sample the copies as densely: from `n` of `R` pages on each side, we
/// see `n * n / R * ratio` copies.
pub fn samples_for_evidence(pages: u64, ratio: f64, evidence: f64) -> u64 {
    whole((evidence * pages as f64 / ratio.max(1e-4)).sqrt().ceil()).min(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_corrected_for_the_sampled_fraction() {
        // Each page has one copy, and we sample 1 % of all pages. So for one sample in a hundred, its copy is a sample,
        // too.
        let tally = Tally { sampled: 5000, zero: 0, found: 50, copies: 50 };
        let estimate = tally.estimate(0.01);
        assert!((estimate.ratio - 1.0).abs() < 0.01, "{estimate:?}");
        // A third of the pages are pairs.
        let tally = Tally { sampled: 15000, zero: 0, found: 50, copies: 50 };
        assert!((tally.estimate(0.01).ratio - 0.333).abs() < 0.01);
    }

    #[test]
    fn a_frequent_content_needs_no_correction() {
        let tally = Tally { sampled: 1000, zero: 0, found: 400, copies: 2800 };
        assert!((tally.estimate(0.01).ratio - 0.4).abs() < 0.05);
    }

    #[test]
    fn zero_pages_count_as_they_are() {
        let tally = Tally { sampled: 1000, zero: 360, found: 0, copies: 0 };
        assert!((tally.estimate(0.01).ratio - 0.36).abs() < 1e-9);
    }

    #[test]
    fn the_upper_bound_falls_with_evidence_if_no_copy_is_found() {
        let pages = 100_000;
        let sampled = samples_for_evidence(pages, 0.1, 3.0);
        let tally = Tally { sampled, ..Tally::default() };
        let ceiling = tally.estimate(sampled as f64 / pages as f64).ceiling;
        assert!(ceiling > 0.05 && ceiling < 0.2, "{ceiling}");
        assert!((Tally::default().estimate(0.5).ceiling - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn the_estimate_is_close_in_simulation() {
        // A share d of a memory of 200,000 pages has contents with k copies, and we sample the fraction f.
        for (copies, duplicate, fraction) in [(1_u64, 0.5, 0.02), (2, 0.6, 0.01), (5, 0.3, 0.01), (40, 0.2, 0.01)] {
            let pages = 200_000_u64;
            let group = copies + 1;
            let grouped = whole(pages as f64 * duplicate) / group * group;
            let mut counts = std::collections::HashMap::new();
            let mut tally = Tally::default();
            for page in 0..pages {
                let draw = crate::random::mix(page ^ copies << 40) as f64 / u64::MAX as f64;
                if draw < fraction {
                    *counts.entry(if page < grouped { page / group } else { page + pages }).or_insert(0_u64) += 1;
                    tally.sampled += 1;
                }
            }
            for count in counts.into_values().filter(|&count| count > 1) {
                tally.found += count;
                tally.copies += count * (count - 1);
            }
            let ratio = tally.estimate(fraction).ratio;
            let too_high = if copies as f64 * fraction < 0.2 { copies as f64 } else { 1.5 };
            assert!(ratio > 0.6 * duplicate, "k {copies}: {ratio} for {duplicate}");
            assert!(ratio < 1.4 * duplicate * too_high, "k {copies}: {ratio} for {duplicate}");
        }
    }
}
