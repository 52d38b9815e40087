//! From what a sample shows to what the region holds.
//!
//! A sampled page is known to be a duplicate only if its twin was sampled too. With a fraction `f` of
//! the memory sampled, a page with `k` copies is found out with probability `1 - (1-f)^k`, so the raw
//! ratio of UKSM (section 5.2) says next to nothing about contents that exist twice: at one per cent
//! it shows one in a hundred of them. Two figures can be measured, the share of samples found out
//! `h = d (1 - (1-f)^k)` and the copies seen a sample `c = d k f`; together they give both `k` and the
//! duplicate ratio `d`.
//!
//! Where `k f` is well below one, samples hardly tell few copies from one, and the estimate leans
//! towards one twin, that is, towards too high a ratio: by a factor of `k` at worst. It decides which
//! regions are read whole, so an error on this side costs a reading and one on the other would cost
//! the saving.

/// What the samples of a region have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pages sampled that hold memory of their own.
    pub sampled: u64,
    /// Those that were zero.
    pub zero: u64,
    /// Those, not zero, whose content was seen elsewhere too.
    pub found: u64,
    /// The copies seen, over all sampled pages.
    pub copies: u64,
}

/// The estimated duplicate ratio, and how sure it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Share of pages that are zero or have a twin in scope, 0 to 1.
    pub ratio: f64,
    /// The smallest share that the samples leave room for (95 %).
    pub floor: f64,
    /// The largest share that the samples leave room for (95 %).
    pub ceiling: f64,
}

impl Tally {
    /// Halves what was seen so far, so that what a region holds now counts for more than what it once held.
    pub fn age(&mut self) {
        let Self { sampled, zero, found, copies } = self;
        for count in [sampled, zero, found, copies] {
            *count /= 2;
        }
    }

    /// Estimates the duplicate ratio from samples taken at coverage `fraction` (0 to 1) of the memory
    /// in which the copies lie.
    pub fn estimate(&self, fraction: f64) -> Estimate {
        if self.sampled == 0 {
            return Estimate { ratio: 0.0, floor: 0.0, ceiling: 1.0 };
        }
        let n = self.sampled as f64;
        let zero = self.zero as f64 / n;
        let found = self.found as f64;
        let fraction = fraction.clamp(1e-6, 1.0);
        let chance = chance_of_discovery(fraction, self.copies as f64 / found.max(1.0));
        let twinned = |found: f64| (found / n / chance).min(1.0 - zero);
        // The upper 95 % bound of a Poisson count, to within a few per cent (3 for a count of 0).
        let most = found + 1.9 * (found + 0.6).sqrt() + 1.5;
        // With nothing found, nothing is known of k: assume the hardest case, one twin.
        let hardest = if self.found == 0 { fraction } else { chance };
        let ratio = zero + twinned(found);
        // The lower bound, by the same rule, on all that speaks for duplicates.
        let seen = (self.found + self.zero) as f64;
        let least = (seen - 1.9 * seen.sqrt()).max(0.0);
        Estimate { ratio, floor: ratio * least / seen.max(1.0), ceiling: (zero + most / n / hardest).min(1.0) }
    }
}

/// `1 - (1-f)^k` for the `k` at which a page found out shows `twins_per_found` copies on average.
///
/// `k f / (1 - (1-f)^k)` grows from 1 at `k = 1` without bound, so bisection finds `k`.
fn chance_of_discovery(fraction: f64, twins_per_found: f64) -> f64 {
    let chance = |k: f64| 1.0 - (1.0 - fraction).powf(k);
    let (mut low, mut high) = (1.0_f64, 64.0 / fraction);
    for _ in 0..50 {
        let k = (low * high).sqrt();
        if k * fraction / chance(k) < twins_per_found { low = k } else { high = k }
    }
    chance(low).max(fraction)
}

/// Samples after which a region of `pages` pages, sampled as densely as its twin, would have shown
/// about `evidence` copies if the share `ratio` of it were duplicate: with `n` of `R` pages sampled on each side
/// `n * n / R * ratio` copies meet.
pub fn samples_for_evidence(pages: u64, ratio: f64, evidence: f64) -> u64 {
    let samples = (evidence * pages as f64 / ratio.max(1e-4)).sqrt().ceil();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a root of a page count")]
    let samples = samples as u64;
    samples.min(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_corrected_by_coverage() {
        // 1 % sampled on both sides, everything a pair: one sample in a hundred meets its twin.
        let tally = Tally { sampled: 5000, zero: 0, found: 50, copies: 50 };
        let estimate = tally.estimate(0.01);
        assert!((estimate.ratio - 1.0).abs() < 0.01, "{estimate:?}");
        // A third of it pairs.
        let tally = Tally { sampled: 15000, zero: 0, found: 50, copies: 50 };
        assert!((tally.estimate(0.01).ratio - 0.333).abs() < 0.01);
    }

    #[test]
    fn one_content_needs_no_correction() {
        let tally = Tally { sampled: 1000, zero: 0, found: 400, copies: 2800 };
        assert!((tally.estimate(0.01).ratio - 0.4).abs() < 0.05);
    }

    #[test]
    fn zero_pages_count_as_they_are() {
        let tally = Tally { sampled: 1000, zero: 360, found: 0, copies: 0 };
        assert!((tally.estimate(0.01).ratio - 0.36).abs() < 1e-9);
    }

    #[test]
    fn nothing_found_leaves_room_only_as_far_as_evidence_goes() {
        let pages = 100_000;
        let sampled = samples_for_evidence(pages, 0.1, 3.0);
        let tally = Tally { sampled, ..Tally::default() };
        let ceiling = tally.estimate(sampled as f64 / pages as f64).ceiling;
        assert!(ceiling > 0.05 && ceiling < 0.2, "{ceiling}");
        assert!((Tally::default().estimate(0.5).ceiling - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a page count")]
    fn the_estimate_meets_the_truth_in_simulation() {
        // Contents with k copies in memory of 200,000 pages, a share d of them; sample f of all.
        for (copies, duplicate, fraction) in [(1_u64, 0.5, 0.02), (2, 0.6, 0.01), (5, 0.3, 0.01), (40, 0.2, 0.01)] {
            let pages = 200_000_u64;
            let group = copies + 1;
            let grouped = (pages as f64 * duplicate) as u64 / group * group;
            let mut counts = std::collections::HashMap::new();
            let mut tally = Tally::default();
            for page in 0..pages {
                let luck = crate::random::mix(page ^ copies << 40) as f64 / u64::MAX as f64;
                if luck < fraction {
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
