//! Counts the contents of one workload's pages: how many there are, and how many pages have each. Also makes the sketch
//! of them.

use crate::key::Content;
use crate::sketch::{LG_NOMINAL, MAX_THETA, SKETCH_ENTRIES, Sketch};
use datasketches::common::ResizeFactor;
use datasketches::tuple::{DefaultUpdatePolicy, TupleSketch, TupleSketchBuilder};
use pagefold_engine::units::{Pages, whole};

/// The smallest number of copies in each class but the first.
const CLASSES_FROM: [u64; CLASSES - 1] = [2, 3, 16, 256];
/// Classes of contents by their number of copies: 1, 2, 3 to 15, 16 to 255, 256 and more.
pub const CLASSES: usize = 5;

/// Counts pages as they are read. Takes at most 8192 entries of 16 bytes.
#[derive(Debug)]
pub struct Counter {
    kept: TupleSketch<DefaultUpdatePolicy<u64>>,
    pages: u64,
}

#[derive(Clone, Debug)]
pub struct Counted {
    pub sketch: Sketch,
    pub pages: Pages,
    /// How many of the pages merging could free: all but one of each content.
    pub spare: Pages,
    /// All pages by the number of copies of their content. They add up to [`Self::pages`].
    pub by_copies: [Pages; CLASSES],
}

impl Default for Counter {
    fn default() -> Self {
        Self::new()
    }
}

impl Counter {
    pub fn new() -> Self {
        // The table grows with the contents, because many workloads are small.
        let builder = TupleSketchBuilder::new(DefaultUpdatePolicy::default());
        let Ok(kept) = builder.lg_k(LG_NOMINAL).resize_factor(ResizeFactor::X2).build() else {
            unreachable!("the size is one that the library permits")
        };
        Self { kept, pages: 0 }
    }

    /// Counts a page. Callers count pages of zeros themselves: that's one content, which nearly all workloads have.
    pub fn add(&mut self, content: Content) {
        self.kept.update(content.0, 1_u64);
        self.pages += 1;
    }

    pub fn pages(&self) -> Pages {
        Pages(self.pages)
    }

    pub fn finish(mut self) -> Counted {
        self.kept.trim();
        let theta = if self.kept.is_estimation_mode() { self.kept.theta64() } else { MAX_THETA };
        let mut kept: Vec<(u64, u64)> = self.kept.iter().map(|entry| (entry.hash(), *entry.summary())).collect();
        kept.sort_unstable();
        let hashes = kept.iter().map(|(hash, _)| *hash).collect();
        let Ok(sketch) = Sketch::of_hashes(hashes, theta) else { unreachable!("what the library keeps is a sketch") };
        kept.truncate(SKETCH_ENTRIES);
        let share = sketch.theta() as f64 / MAX_THETA as f64;
        let sampled = Sampled::of(kept.iter().map(|(_, copies)| *copies));
        let by_copies = sampled.divide(share, self.pages);
        let pages = Pages(self.pages);
        Counted { sketch, pages, spare: pages.saturating_sub(sampled.contents(&by_copies)), by_copies }
    }
}

/// A sample of contents, by their number of copies.
#[derive(Default)]
struct Sampled {
    contents: [u64; CLASSES],
    pages: [u64; CLASSES],
    /// Each content's number of copies squared, summed over all classes but the last.
    squares: f64,
}

impl Sampled {
    fn of(copies: impl Iterator<Item = u64>) -> Self {
        let mut sampled = Self::default();
        for copies in copies {
            let class = CLASSES_FROM.partition_point(|&from| copies >= from);
            sampled.contents[class] += 1;
            sampled.pages[class] += copies;
            if class < CLASSES - 1 {
                sampled.squares += (copies as f64).powi(2);
            }
        }
        sampled
    }

    /// Divides all `pages` into classes. A `share` of the contents was sampled.
    ///
    /// A content with very many copies is in the sample or it isn't. By the sample alone, we'd estimate 100,000 copies
    /// of one content as none or as ten million. But we know the number of all pages. So the pages that the other
    /// classes leave over belong to the last class, if there are more of them than chance explains.
    fn divide(&self, share: f64, pages: u64) -> [Pages; CLASSES] {
        let mut estimated = self.pages.map(|sampled| sampled as f64 / share);
        let rest: f64 = estimated[..CLASSES - 1].iter().sum();
        let chance = 2.0 * (self.squares * (1.0 - share)).sqrt() / share;
        let left = pages as f64 - rest;
        estimated[CLASSES - 1] = if self.pages[CLASSES - 1] > 0 || left > chance { left.max(0.0) } else { 0.0 };
        let all: f64 = estimated.iter().sum();
        // We round so that the classes add up to `pages`.
        let mut so_far = 0.0;
        let mut given = 0;
        estimated.map(|estimated| {
            so_far += estimated;
            let until = if all > 0.0 { whole((so_far / all * pages as f64).round()).min(pages) } else { 0 };
            let class = until.saturating_sub(given);
            given = given.max(until);
            Pages(class)
        })
    }

    /// How many different contents the pages have. `by_copies`: the number of pages in each class. Since we know the
    /// number of all pages, this is far better than the sketch's own estimate where few pages have copies.
    fn contents(&self, by_copies: &[Pages; CLASSES]) -> Pages {
        let mut contents = 0.0;
        for (class, pages) in by_copies.iter().enumerate() {
            contents += pages.0 as f64 * self.contents[class] as f64 / self.pages[class].max(1) as f64;
        }
        Pages(whole(contents.round()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(copies: &[(u64, u64)]) -> Counted {
        let mut counter = Counter::new();
        let mut number = 0_u64;
        for &(contents, copies) in copies {
            for _ in 0..contents {
                number += 1;
                (0..copies).for_each(|_| counter.add(Content(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))));
            }
        }
        counter.finish()
    }

    #[test]
    fn few_contents_are_counted_exactly() {
        let counted = counted(&[(1000, 1), (500, 2), (100, 15), (20, 16), (3, 255), (2, 256), (1, 5000)]);
        assert_eq!(counted.by_copies, [1000, 1000, 1500, 320 + 765, 512 + 5000].map(Pages));
        assert_eq!(counted.pages, Pages(1000 + 1000 + 1500 + 1085 + 5512));
        assert_eq!(counted.spare, Pages(500 + 1400 + 300 + 762 + 510 + 4999));
        assert_eq!(Counter::new().finish().by_copies, [Pages(0); CLASSES]);
    }

    #[test]
    fn many_contents_are_estimated_and_add_up() {
        let counted = counted(&[(200_000, 1), (50_000, 2), (10_000, 8), (1, 300_000)]);
        assert_eq!(counted.by_copies.iter().map(|pages| pages.0).sum::<u64>(), counted.pages.0);
        for (found, truth) in counted.by_copies.iter().zip([200_000, 100_000, 80_000, 0, 300_000_u64]) {
            assert!(found.0.abs_diff(truth) < 25_000, "{counted:?}");
        }
        assert!(counted.spare.0.abs_diff(50_000 + 70_000 + 299_999) < 15_000);
        // Without copies nothing is left over, whatever the sketch's own estimate of the contents.
        assert_eq!(super::tests::counted(&[(300_000, 1)]).spare, Pages(0));
        assert!(super::tests::counted(&[(300_000, 1), (3000, 2)]).spare.0.abs_diff(3000) < 1000);
        // Chance alone must not make a content look as if it had many copies.
        assert_eq!(super::tests::counted(&[(300_000, 1), (100_000, 3)]).by_copies[CLASSES - 1], Pages(0));
    }
}
