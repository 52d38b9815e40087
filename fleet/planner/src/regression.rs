//! Corrects the estimates for a host by numbers that we know.
//!
//! Chance decides whether a content that many units hold is in their samples, so an estimate of the shared pages may be
//! far off. But we know how many pages each unit holds. If the samples stand for too many pages, they also stand for
//! too many shared ones. So we correct a host's shared pages by the number of pages that its units hold beyond those
//! that their samples stand for, times the slope of the regression of shared pages on held ones over all contents
//! (regression estimation: Cochran, Sampling Techniques, 1977, chapter 7).

use pagefold_engine::units::difference;

/// Sums over the contents of a host, each weighted by the variance that its sampling adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    /// The sum of the squares of held pages.
    squares: u128,
    /// The sum of held pages times shared ones.
    products: u128,
}

impl Moments {
    /// The sums for `contents` contents with `holders` holders each, all of this level. Holders of other levels count
    /// as if they were of this one.
    pub fn of(contents: u32, holders: u16, level: u8) -> Self {
        let pages = 1_u128 << level;
        // The variance is below 2^112. A real host's numbers don't overflow the sums. A hostile host may invent numbers
        // that do; then the sums mean nothing.
        let variance = u128::from(contents) * pages * (pages - 1);
        let weighted = variance.wrapping_mul(u128::from(holders));
        let others = u128::from(holders.saturating_sub(1));
        Self { squares: weighted.wrapping_mul(u128::from(holders)), products: weighted.wrapping_mul(others) }
    }

    /// Replaces sums that were added before by others.
    pub fn exchange(&mut self, before: Self, after: Self) {
        self.squares = self.squares.wrapping_sub(before.squares).wrapping_add(after.squares);
        self.products = self.products.wrapping_sub(before.products).wrapping_add(after.products);
    }

    /// Shared pages per held page, from 0 to 1.
    pub fn slope(self) -> f64 {
        if self.squares == 0 { 0.0 } else { (self.products as f64 / self.squares as f64).min(1.0) }
    }

    /// How many more pages are shared if the units hold `shortfall` more pages than the samples stand for.
    pub fn correction(self, shortfall: i64) -> i64 {
        #[expect(clippy::cast_possible_truncation, reason = "no larger than the shortfall")]
        let pages = (self.slope() * shortfall as f64).round() as i64;
        pages
    }
}

/// How many more pages are held than `sampled` contents of a level stand for, limited to three standard deviations. A
/// larger difference isn't chance.
pub fn shortfall(held: u64, sampled: u64, level: u8) -> i64 {
    let pages = 1_u64 << level;
    let most = difference((3 * held.saturating_mul(pages - 1).isqrt()).min(held), 0);
    difference(held, sampled.saturating_mul(pages)).clamp(-most, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_corrected_by_what_is_known() {
        // Ten contents with four holders, and twenty that one unit holds: of 40 + 20 pages 30 are shared.
        let mut moments = Moments::of(10, 4, 6);
        moments.exchange(Moments::default(), Moments::of(20, 1, 6));
        assert!((moments.slope() - 120.0 / 180.0).abs() < 1e-12);
        assert_eq!([moments.correction(300), moments.correction(-3)], [200, -2]);
        // We correct nothing if nothing is shared, or if all contents were sampled.
        assert_eq!([Moments::of(20, 1, 6), Moments::of(20, 5, 0)].map(|moments| moments.correction(300)), [0, 0]);
    }

    #[test]
    fn more_than_chance_explains_is_not_corrected() {
        assert_eq!(shortfall(1000, 1000, 0), 0);
        assert_eq!([15, 16, 14].map(|sampled| shortfall(1024, sampled, 6)), [64, 0, 128]);
        // Three standard deviations are 3 √(1024 · 63).
        assert_eq!([shortfall(1024, 0, 6), shortfall(1024, 99, 6)], [759, -759]);
        // Units whose size we don't know, or whose sample contradicts it.
        assert_eq!(
            [shortfall(0, 99, 6), shortfall(9, 1, 40), shortfall(u64::MAX, 0, 40)],
            [0, -9, 3 * i64::from(u32::MAX)]
        );
    }
}
