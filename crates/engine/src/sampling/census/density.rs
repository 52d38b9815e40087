//! How dense zeros and duplicates are along a process's memory: the figures of a map like UKSM's figure 1.
//!
//! We divide a process into parts and count the pages read in each: all, zero, and pages with a content that we also
//! saw elsewhere. A sample shows too few duplicates, because it often misses their copies. So we scale up the
//! duplicates that we saw to our estimate for the process and kind of memory.

use super::counts::weight;
use super::{Census, Findings, NO_PART, ReadPage};
use crate::hash::Digest;
use crate::units::index;

/// The pages read in one part, without pages that other processes map, too.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Density {
    /// All pages read.
    pub read: f64,
    /// All-zero pages.
    pub zero: f64,
    /// Pages with a content that another page has, too. An estimate if we've sampled.
    pub duplicate: f64,
}

impl Census {
    /// The density of each of the `parts`, given our findings.
    pub fn densities(&mut self, parts: usize, findings: &Findings) -> Vec<Density> {
        self.sort();
        let correction = self.corrections(findings);
        let mut densities = vec![Density::default(); parts];
        self.each_content(|pages, frames| {
            for page in pages.iter().filter(|page| page.part != NO_PART) {
                let density = &mut densities[index(page.part)];
                density.read += 1.0;
                match frames {
                    None => density.zero += 1.0,
                    Some(frames) if is_duplicate(frames) => density.duplicate += correction[index(page.cell)],
                    Some(_) => {}
                }
            }
        });
        for density in &mut densities {
            density.duplicate = density.duplicate.min(density.read - density.zero);
        }
        densities
    }

    /// How many duplicates each duplicate that we saw stands for, by cell.
    fn corrections(&self, findings: &Findings) -> Vec<f64> {
        // For each cell, the pages read, and the saving that we see in them without any estimate. Zeros don't count.
        let mut read = vec![0.0; self.cells.len()];
        let mut saved = vec![0.0; self.cells.len()];
        self.each_content(|pages, frames| {
            for page in pages {
                let cell = index(page.cell);
                read[cell] += weight(page);
                if let Some(frames) = frames {
                    saved[cell] += weight(page) * (1.0 - 1.0 / frames.max(1.0));
                }
            }
        });
        let mut corrections = vec![1.0; self.cells.len()];
        for (at, cell) in self.cells.iter().enumerate().filter(|&(at, _)| saved[at] > 0.0) {
            let figures = &findings.cells[at];
            let expected = (figures.duplicate_within + figures.duplicate_across) * read[at] / cell.held().max(1.0);
            corrections[at] = (expected / saved[at]).max(1.0);
        }
        corrections
    }

    /// Calls `each` with the pages of each content and the number of frames that hold it: infinity if a merged page
    /// holds it, `None` for zeros.
    fn each_content(&self, mut each: impl FnMut(&[ReadPage], Option<f64>)) {
        for pages in self.pages.chunk_by(|a, b| a.digest == b.digest) {
            let digest = pages[0].digest;
            if digest == Digest::ZERO.0 {
                each(pages, None);
            } else if self.merged.binary_search(&digest).is_ok() {
                each(pages, Some(f64::INFINITY));
            } else {
                each(pages, Some(pages.iter().map(weight).sum()));
            }
        }
    }
}

/// Sums of fractions such as thirds have rounding errors, hence the margin.
fn is_duplicate(frames: f64) -> bool {
    frames > 1.0 + 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::sampling::census::Cell;
    use crate::sampling::census::choose::Chooser;
    use crate::units::{Pages, Vpn};

    /// Two processes of two parts: 20,000 pages that both have, and 20,000 of their own, a quarter zero and the rest
    /// unique.
    fn densities(fraction: f64) -> Vec<Density> {
        let cell = |process| Cell { process, private: Pages(40_000), ..Cell::default() };
        let (mut census, mut random) = (Census::new(vec![cell(0), cell(1)]), Random::new(1));
        for process in 0..2 {
            Chooser::new(3).cut(process, Vpn(0), 40_000, 0.0, fraction, |first, pages, run| {
                for page in first.0..first.0 + u64::from(pages) {
                    let (part, content) = match page {
                        0..20_000 => (0, page + 1),
                        20_000..25_000 => (1, Digest::ZERO.0),
                        _ => (1, (u64::from(process) << 32) + page),
                    };
                    census.add_private(process, run, Some(process * 2 + part), Digest(content));
                }
            });
        }
        // A page that's in no part.
        census.add_private(0, 0, None, Digest(random.below(1 << 60) | 1 << 61));
        let findings = census.findings(fraction);
        census.densities(4, &findings)
    }

    #[test]
    fn a_complete_census_shows_exact_densities() {
        let (equal, mixed) = (
            Density { read: 20_000.0, zero: 0.0, duplicate: 20_000.0 },
            Density { read: 20_000.0, zero: 5_000.0, duplicate: 0.0 },
        );
        assert_eq!(densities(1.0), [equal, mixed, equal, mixed]);
    }

    #[test]
    fn a_sample_shows_about_the_same() {
        for (part, density) in densities(0.2).iter().enumerate() {
            let Density { read, zero, duplicate } = *density;
            assert!((read - 4_000.0).abs() < 600.0, "{density:?}");
            let (zeros, duplicates) = if part % 2 == 0 { (0.0, 1.0) } else { (0.25, 0.0) };
            assert!((zero / read - zeros).abs() < 0.05 && (duplicate / read - duplicates).abs() < 0.2, "{density:?}");
        }
    }

    #[test]
    fn what_a_merged_page_holds_is_a_duplicate() {
        let mut census = Census::new(vec![Cell { private: Pages(1), ..Cell::default() }]);
        census.add_merged(Digest(7));
        census.add_private(0, 0, Some(0), Digest(7));
        let findings = census.findings(1.0);
        assert_eq!(census.densities(1, &findings), [Density { read: 1.0, zero: 0.0, duplicate: 1.0 }]);
    }
}
