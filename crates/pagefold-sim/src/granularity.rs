//! Grains: one simulated page that stands for several neighbouring pages with the same fate, so that memories of a size
//! that would not fit can be simulated.
//!
//! What is done to every page of a granularity costs as often. A tree of so many simulated pages has as many times the nodes, and is
//! deeper by the logarithm. A sample is another matter: it looks at one page, and what it is good for is that it meets
//! another sample of the same content. With `n` of `L` pages sampled on each side `n * n / L` of them meet
//! ([`pagefold_core::sampling::estimate::samples_for_evidence`]). Of `L / g` simulated pages that takes the root of `g` times fewer samples, so
//! a sampled granularity costs the root of `g` samples: as many meetings for as much time.

/// Pages that a simulated page stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granularity(u64);

impl Granularity {
    /// Panics unless it is a power of two.
    pub(crate) fn new(pages: u32) -> Self {
        assert!(pages.is_power_of_two(), "a granularity is 1, 2, 4, 8 ... pages");
        Self(pages.into())
    }

    /// Pages in one.
    pub(crate) const fn get(self) -> u64 {
        self.0
    }

    /// Pages in so many, or the cost of doing something to each page.
    pub(crate) const fn all(self, simulated_pages: u64) -> u64 {
        simulated_pages * self.0
    }

    /// Steps by which a search in a tree is longer than it is among simulated pages, if it made any.
    pub(crate) const fn deeper(self, steps: u64) -> u64 {
        if steps == 0 { 0 } else { steps + self.0.ilog2() as u64 }
    }

    /// Samples that one stands for where one in `every` pages is sampled: all, if that is each of them, and the root where
    /// no two fall into the same granularity.
    pub(crate) fn samples(self, every: u64) -> u64 {
        (self.0 * self.0 / every.clamp(1, self.0)).isqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grain_of_one_page_is_a_page() {
        let page = Granularity::new(1);
        assert_eq!((page.all(7), page.deeper(7), page.samples(1), page.samples(1_000)), (7, 7, 1, 1));
    }

    #[test]
    fn samples_count_for_more_the_closer_they_lie() {
        let granularity = Granularity::new(64);
        assert_eq!([1, 4, 16, 64, 1_000].map(|every| granularity.samples(every)), [64, 32, 16, 8, 8]);
        assert_eq!((granularity.deeper(0), granularity.deeper(5)), (0, 11));
    }
}
