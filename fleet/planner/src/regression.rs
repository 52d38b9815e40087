//! What samples say of a host, corrected by what is known.
//!
//! Chance decides whether a content that many units hold is in their samples, so what they are estimated to share may be far
//! off. But how many pages each unit holds is known, and when samples stand for more of them, they stand for more of the
//! shared ones, too. So what a host shares is corrected by what its units hold beyond that for which their samples stand,
//! times the slope of the regression of shared pages on held ones over all contents (regression estimation: Cochran,
//! Sampling Techniques, 1977, chapter 7).

use pagefold_engine::units::difference;

/// Sums over the contents of a host, each weighted by the variance that its sampling adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    /// Of the squares of held pages.
    squares: u128,
    /// Of held pages times shared ones.
    products: u128,
}

impl Moments {
    /// A number of contents, each with so many holders that have the level. Holders of other levels count as if they had it.
    pub fn of(contents: u32, holders: u16, level: u8) -> Self {
        let pages = 1_u128 << level;
        // Below 2^112. What a host can have does not overflow the sums; what a hostile one invents may, and says nothing then.
        let variance = u128::from(contents) * pages * (pages - 1);
        let weighted = variance.wrapping_mul(u128::from(holders));
        let others = u128::from(holders.saturating_sub(1));
        Self { squares: weighted.wrapping_mul(u128::from(holders)), products: weighted.wrapping_mul(others) }
    }

    /// Puts others in the place of some that were counted.
    pub fn exchange(&mut self, before: Self, after: Self) {
        self.squares = self.squares.wrapping_sub(before.squares).wrapping_add(after.squares);
        self.products = self.products.wrapping_sub(before.products).wrapping_add(after.products);
    }

    /// Shared pages for each held one, from 0 to 1.
    pub fn slope(self) -> f64 {
        if self.squares == 0 { 0.0 } else { (self.products as f64 / self.squares as f64).min(1.0) }
    }

    /// How many more pages are shared, if so many more are held than samples stand for.
    pub fn correction(self, shortfall: i64) -> i64 {
        #[expect(clippy::cast_possible_truncation, reason = "no larger than the shortfall")]
        let pages = (self.slope() * shortfall as f64).round() as i64;
        pages
    }
}

/// How many more of `held` pages there are than so many contents sampled at a level stand for: at most three standard deviations.
/// More is not chance.
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
        // Without sharing nothing is corrected, nor where all contents were sampled.
        assert_eq!([Moments::of(20, 1, 6), Moments::of(20, 5, 0)].map(|moments| moments.correction(300)), [0, 0]);
    }

    #[test]
    fn more_than_chance_explains_is_not_corrected() {
        assert_eq!(shortfall(1000, 1000, 0), 0);
        assert_eq!([15, 16, 14].map(|sampled| shortfall(1024, sampled, 6)), [64, 0, 128]);
        // Three standard deviations are 3 √(1024 · 63).
        assert_eq!([shortfall(1024, 0, 6), shortfall(1024, 99, 6)], [759, -759]);
        // A unit whose size is not known, or is not what its sample says.
        assert_eq!(
            [shortfall(0, 99, 6), shortfall(9, 1, 40), shortfall(u64::MAX, 0, 40)],
            [0, -9, 3 * i64::from(u32::MAX)]
        );
    }
}
