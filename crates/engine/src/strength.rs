//! How many cache lines of a page are hashed, where pages are hashed in place (UKSM section 6.1).
//!
//! Few lines cost little, but pages that differ may have the same digest. The kernel compares such pages before it merges
//! them, so the comparison is in vain. From then on pages with that digest are digested by all of their lines, which is enough
//! where few contents are alike. If many are, all pages are better hashed by more lines. UKSM moves its strength in small steps
//! towards the greatest benefit. Here the digests are of pages in other processes: after a change all of them must be read
//! again. So a change must have paid for itself:
//!
//! - The number rises once comparisons in vain have cost more than the stronger hashes of the same pages would have, plus
//!   those of everything that is indexed. It rises at once to the highest number that this is true of.
//! - The lowest number is tried again when it would have saved many times what reading everything again costs. Each time this
//!   turns out to be wrong, the number is what it was before, and four times as much must be saved before the next try.
//!
//! All costs are in cache lines hashed.

use crate::hash::LINES;

/// The fewest lines.
const WEAKEST: u32 = 2;
/// The cost of a page beside that of its lines: half of it is the kernel's.
const PAGE_LINES: u64 = 10;
/// The cost of a comparison in vain: 35 lines for the comparison itself (by instructions counted in a guest), and what it costs that the page has not met its
/// copy, and is read again by all lines.
const COLLISION_LINES: u64 = 256;
/// The number of comparisons in vain from which they count. There are always some, of pages that were written meanwhile.
const COLLISIONS_MIN: u64 = 256;
/// Comparisons are counted over so many pages at least, and over this many times those indexed. Then counts are halved.
const WINDOW_PAGES: u64 = 1 << 20;
const WINDOW_PARTS: u64 = 4;
/// How many times the cost of reading everything again must be saved for the lowest number to be tried.
const GAIN_MIN: u64 = 16;
const GAIN_MOST: u64 = 1 << 20;

/// The number of lines, and what it has cost.
#[derive(Clone, Debug)]
pub struct Strength {
    lines: u32,
    /// Pages hashed, and pages compared in vain, recently.
    pages: u64,
    collisions: u64,
    /// What the lowest number would have saved since the last change.
    gain: u64,
    gain_wanted: u64,
    /// The number before the lowest one was tried again.
    before: Option<u32>,
}

impl Default for Strength {
    fn default() -> Self {
        Self { lines: WEAKEST, pages: 0, collisions: 0, gain: 0, gain_wanted: GAIN_MIN, before: None }
    }
}

impl Strength {
    /// The number of lines to hash of each page. [`LINES`]: read and digest it, which costs no more than hashing all lines.
    pub fn lines(&self) -> u32 {
        self.lines
    }

    /// Whole pages from now on. Returns whether that is a change.
    pub fn raise_to_full(&mut self) -> bool {
        self.change(LINES)
    }

    /// Records pages that were hashed and those of them that were compared in vain, with so many contents in the index. Returns
    /// whether the number of lines has changed: then digests from before cannot be compared with those to come.
    pub fn record(&mut self, pages: u64, collisions: u64, contents: u64) -> bool {
        self.pages += pages;
        self.collisions += collisions;
        let penalty = self.collisions * COLLISION_LINES;
        let pays = |&lines: &u32| {
            let more = u64::from(lines - self.lines);
            penalty > self.pages * more + contents * (PAGE_LINES + u64::from(lines))
        };
        let stronger = (self.lines + 1..=LINES).filter(|lines| lines.is_power_of_two()).rev().find(pays);
        if let Some(lines) = stronger.filter(|_| self.collisions >= COLLISIONS_MIN) {
            let before = self.before.take();
            if before.is_some() {
                self.gain_wanted = (self.gain_wanted * 4).min(GAIN_MOST);
            }
            return self.change(before.map_or(lines, |before| before.max(lines)));
        }
        if self.pages > WINDOW_PAGES.max(contents * WINDOW_PARTS) {
            (self.pages, self.collisions) = (self.pages / 2, self.collisions / 2);
        }
        let less = u64::from(self.lines - WEAKEST);
        self.gain = (self.gain + pages * less).saturating_sub(collisions * COLLISION_LINES);
        let again = contents.max(WINDOW_PAGES) * (PAGE_LINES + u64::from(WEAKEST));
        if self.gain <= again.saturating_mul(self.gain_wanted) {
            return false;
        }
        self.before = Some(self.lines);
        self.change(WEAKEST)
    }

    fn change(&mut self, lines: u32) -> bool {
        (self.pages, self.collisions, self.gain) = (0, 0, 0);
        std::mem::replace(&mut self.lines, lines) != lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pages of which this share is compared in vain at a number of lines. Returns how often the number has changed.
    fn run(strength: &mut Strength, cycles: u64, contents: u64, share: impl Fn(u32) -> f64) -> u32 {
        let mut changes = 0;
        for _ in 0..cycles {
            let collisions = crate::units::whole(10_000.0 * share(strength.lines()));
            changes += u32::from(strength.record(10_000, collisions, contents));
        }
        changes
    }

    #[test]
    fn pages_that_differ_everywhere_need_few_lines() {
        let mut strength = Strength::default();
        assert_eq!(run(&mut strength, 100_000, 1_000_000, |_| 0.0), 0);
        assert_eq!(strength.lines(), WEAKEST);
    }

    #[test]
    fn pages_alike_but_for_one_word_are_hashed_whole_after_one_change() {
        let mut strength = Strength::default();
        // A page collides unless its word is among those hashed.
        let alike = |lines: u32| f64::from(LINES - lines) / f64::from(LINES);
        assert_eq!(run(&mut strength, 10, 10, alike), 1);
        assert_eq!(strength.lines(), LINES);
    }

    #[test]
    fn the_number_rises_as_far_as_the_collisions_pay_for() {
        for (share, lines) in [(0.001, 2), (0.01, 4), (0.05, 8), (0.06, 16), (0.12, 32), (0.5, 64)] {
            let mut strength = Strength::default();
            let found = run(&mut strength, 200, 100, |lines| if lines == WEAKEST { share } else { 0.0 });
            assert_eq!((strength.lines(), found), (lines, u32::from(lines > WEAKEST)), "{share}");
        }
    }

    #[test]
    fn few_collisions_do_not_make_everything_be_read_again() {
        let mut strength = Strength::default();
        // A tebibyte is known, and a gibibyte of it is alike.
        for _ in 0..26 {
            assert!(!strength.record(10_000, 9_000, 1 << 28));
        }
        assert_eq!(run(&mut strength, 10_000, 1 << 28, |_| 0.0), 0);
    }

    #[test]
    fn the_lowest_number_is_tried_when_pages_are_no_longer_alike() {
        let mut strength = Strength::default();
        run(&mut strength, 10, 10, |_| 1.0);
        assert_eq!(strength.lines(), LINES);
        assert_eq!(run(&mut strength, 1_000, 100_000, |_| 0.0), 1);
        assert_eq!(strength.lines(), WEAKEST);
    }

    #[test]
    fn hashing_whole_pages_is_a_change_once() {
        let mut strength = Strength::default();
        assert!(strength.raise_to_full() && !strength.raise_to_full());
        assert_eq!(strength.lines(), LINES);
    }

    proptest! {
        /// Whatever the pages are like, as long as they stay so: the number changes rarely, and ever more rarely.
        #[test]
        fn the_number_does_not_oscillate(
            shares in proptest::collection::vec(0.0f64..1.0, 6), contents in 0u64..10_000_000,
        ) {
            // Stronger hashes never collide more.
            let share = |lines: u32| {
                let at = (lines / WEAKEST).ilog2() as usize;
                if lines == LINES { 0.0 } else { shares[..=at].iter().product() }
            };
            let mut strength = Strength::default();
            let early = run(&mut strength, 100_000, contents, share);
            let late = run(&mut strength, 100_000, contents, share);
            prop_assert!(early <= 16 && late <= 4, "{early}, then {late}");
        }
    }
}
