//! Granularity: one simulated page can stand for several adjacent real pages that are treated alike. So we can simulate
//! memories that are too large to simulate page by page.
//!
//! An operation on a simulated page costs as much as on all of its real pages. A tree of `n` simulated pages has `n *
//! g` nodes and is deeper by the logarithm of `g`. Samples are an exception: a sample is useful when it meets another
//! sample of the same content. With `n` of `L` pages sampled on each side, `n * n / L` meet
//! ([`pagefold_engine::sampling::estimate::samples_for_evidence`]). Among `L / g` simulated pages, as many meetings
//! take `sqrt(g)` times fewer samples. So a simulated sample costs as much as `sqrt(g)` real ones.

/// The number of real pages that a simulated page stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity(u64);

impl Granularity {
    /// # Panics
    /// Unless `pages` is a power of two.
    pub fn new(pages: u32) -> Self {
        assert!(pages.is_power_of_two(), "a granularity is 1, 2, 4, 8 ... pages");
        Self(pages.into())
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    /// How many real pages `simulated_pages` stand for. Also the cost for this many simulated pages, given the cost for
    /// one.
    pub const fn scale(self, simulated_pages: u64) -> u64 {
        simulated_pages * self.0
    }

    /// The depth of a search among real pages, given the depth among simulated ones. An empty search stays empty.
    pub(crate) const fn tree_depth(self, steps: u64) -> u64 {
        if steps == 0 { 0 } else { steps + self.0.ilog2() as u64 }
    }

    /// How many real samples one simulated sample stands for if we sample one in `every` pages. That's the number of
    /// its real pages if `every` is 1, and the square root of that if no two samples fall into one simulated page.
    pub fn samples(self, every: u64) -> u64 {
        (self.0 * self.0 / every.clamp(1, self.0)).isqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_granularity_of_one_changes_nothing() {
        let page = Granularity::new(1);
        assert_eq!((page.scale(7), page.tree_depth(7), page.samples(1), page.samples(1_000)), (7, 7, 1, 1));
    }

    #[test]
    fn closer_samples_weigh_more() {
        let granularity = Granularity::new(64);
        assert_eq!([1, 4, 16, 64, 1_000].map(|every| granularity.samples(every)), [64, 32, 16, 8, 8]);
        assert_eq!((granularity.tree_depth(0), granularity.tree_depth(5)), (0, 11));
    }
}
