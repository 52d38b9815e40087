//! Chooses the pages that a sampled census reads: runs of neighbouring pages, each chosen independently with a known
//! probability.
//!
//! A run's draw is a random number that depends only on the seed and the run's position. We read the run if its draw is
//! below the sampled fraction. So a larger sample contains the smaller one, and we only read the difference.

use super::RUN_PAGES;
use crate::random::mix;
use crate::units::{Vpn, low_bits};

#[derive(Clone, Copy, Debug)]
pub struct Chooser {
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The run's number, which distinguishes it from other runs of the census.
    pub run: u32,
    /// 0 to 1, uniform, independent of other runs.
    pub value: f64,
}

impl Chooser {
    /// Each seed chooses another sample.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The draw of the run with `page` of a region. Each region of the census must have its own number.
    pub fn draw(&self, region: u32, page: Vpn) -> Draw {
        let position = (page.0 / u64::from(RUN_PAGES)) ^ (u64::from(region) << 40);
        let mixed = mix(mix(position ^ self.seed).wrapping_add(self.seed));
        let run = low_bits(mix(mixed), u32::BITS);
        Draw { run, value: (mixed >> 11) as f64 / (1_u64 << 53) as f64 }
    }

    /// Cuts a range of pages into runs. For runs with a draw in `from..to`, calls `chosen` with the first page, the
    /// number of pages and the run's number.
    pub fn cut(&self, region: u32, first: Vpn, pages: u32, from: f64, to: f64, mut chosen: impl FnMut(Vpn, u32, u32)) {
        let end = first.0 + u64::from(pages);
        let mut at = first.0;
        while at < end {
            let next = (at / u64::from(RUN_PAGES) + 1) * u64::from(RUN_PAGES);
            let draw = self.draw(region, Vpn(at));
            if draw.value >= from && draw.value < to {
                let pages = u32::try_from(next.min(end) - at).unwrap_or(RUN_PAGES);
                chosen(Vpn(at), pages, draw.run);
            }
            at = next;
        }
    }
}

/// The fraction of `pages` to sample first: enough to find pairs of equal pages if they're two per cent of the memory.
/// We read all pages if there are few.
pub fn first_fraction(pages: u64) -> f64 {
    const WORTH_SAMPLING: u64 = 8192;
    if pages < WORTH_SAMPLING {
        return 1.0;
    }
    rounded((3.3 * f64::from(RUN_PAGES) / (super::TARGET_ERROR * pages as f64)).sqrt())
}

/// The next fraction to sample, if `fraction` left an error of `error` (a share of the memory). `None` if that's good
/// enough.
pub fn next_fraction(fraction: f64, error: f64) -> Option<f64> {
    if fraction >= 1.0 || error <= super::TARGET_ERROR {
        return None;
    }
    // The error for pairs is inversely proportional to the fraction.
    Some(rounded(fraction * (1.1 * error / super::TARGET_ERROR).clamp(1.25, 3.0)))
}

/// Beyond two thirds we read everything, because another step would cost more.
fn rounded(fraction: f64) -> f64 {
    if fraction > 0.66 { 1.0 } else { fraction }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_grows_without_reading_twice_and_ends_with_everything() {
        let chooser = Chooser::new(7);
        let mut seen = vec![0; 10_000];
        for (from, to) in [(0.0, 0.1), (0.1, 0.4), (0.4, 1.0)] {
            chooser.cut(3, Vpn(1001), 10_000, from, to, |first, pages, _| {
                for page in first.0..first.0 + u64::from(pages) {
                    seen[usize::try_from(page - 1001).unwrap()] += 1;
                }
            });
            let read = seen.iter().filter(|&&times| times > 0).count();
            let expected = to * 10_000.0;
            assert!((read as f64 - expected).abs() < 500.0, "{read} of {expected}");
        }
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn fractions_grow_to_the_whole() {
        assert!((first_fraction(1000) - 1.0).abs() < 1e-9);
        let mut fraction = first_fraction(1 << 20);
        assert!(fraction < 0.05);
        let mut steps = 0;
        while let Some(next) = next_fraction(fraction, 0.5) {
            assert!(next > fraction);
            fraction = next;
            steps += 1;
        }
        assert!((fraction - 1.0).abs() < 1e-9 && steps < 8);
        assert_eq!(next_fraction(0.1, 0.01), None);
    }
}
