//! How many cache lines of a page to hash, where we hash pages in place (UKSM section 6.1).
//!
//! Hashing few lines is cheap, but pages that differ may then have the same digest. The kernel compares such pages
//! before it merges them, and that comparison is wasted. From then on we digest pages with that digest by all of their
//! lines, which is enough if few contents are alike. If many are, it's better to hash all pages by more lines. UKSM
//! changes how much of a page it hashes in small steps, towards the greatest benefit. For us a change is costly,
//! because we must read the pages of all processes again. So we only make a change that has paid for itself:
//!
//! - The number of lines rises once wasted comparisons have cost more than stronger hashes of the same pages would
//!   have, plus stronger hashes of everything in the index. It rises at once to the highest number for which that's
//!   true.
//! - We try the lowest number again once it would have saved many times the cost of reading everything again. Each time
//!   that turns out to be wrong, we return to the old number, and the next try must save four times as much.
//!
//! All costs are in cache lines hashed.

use crate::hash::LINES;

/// We hash at least this many lines.
const WEAKEST: u32 = 2;
/// The cost of hashing a page, apart from its lines. Half of it is spent in the kernel.
const PAGE_LINES: u64 = 10;
/// The cost, in cache lines, of comparing two pages that only look alike: 35 for the comparison itself (by instructions
/// counted in a guest), and the rest because we hash the page again, this time all of it.
const COLLISION_LINES: u64 = 256;
/// Wasted comparisons only count once there are this many: pages written after we hashed them always cause some.
const COLLISIONS_MIN: u64 = 256;
/// We halve the counts after this many pages, or after `WINDOW_PARTS` times the contents in the index if that's more.
const WINDOW_PAGES: u64 = 1 << 20;
const WINDOW_PARTS: u64 = 4;
/// We only try [`WEAKEST`] again if it would have saved this many times the cost of reading everything again.
const GAIN_MIN: u64 = 16;
const GAIN_MOST: u64 = 1 << 20;

/// The number of lines, and how much it has cost.
#[derive(Clone, Debug)]
pub struct Strength {
    lines: u32,
    /// Pages hashed, and wasted comparisons, recently.
    pages: u64,
    collisions: u64,
    /// How many cache lines we'd have saved since the last change with the lowest number of lines.
    gain: u64,
    gain_wanted: u64,
    /// The number of lines before we tried the lowest number again.
    before: Option<u32>,
}

impl Default for Strength {
    fn default() -> Self {
        Self { lines: WEAKEST, pages: 0, collisions: 0, gain: 0, gain_wanted: GAIN_MIN, before: None }
    }
}

impl Strength {
    /// How many lines of each page to hash. [`LINES`] means: read and digest the whole page, which costs no more.
    pub fn lines(&self) -> u32 {
        self.lines
    }

    /// Switches to whole pages. Returns whether that's a change.
    pub fn raise_to_full(&mut self) -> bool {
        self.change(LINES)
    }

    /// Records how many pages were hashed and how many of their comparisons were wasted, with `contents` contents in
    /// the index. Returns whether the number of lines has changed: then older digests aren't comparable to new ones.
    pub fn record(&mut self, pages: u64, collisions: u64, contents: u64) -> bool {
        self.pages += pages;
        self.collisions += collisions;
        if let Some(lines) = self.stronger(contents) {
            let before = self.before.take();
            if before.is_some() {
                self.gain_wanted = (self.gain_wanted * 4).min(GAIN_MOST);
            }
            return self.change(before.map_or(lines, |before| before.max(lines)));
        }
        if self.pages > WINDOW_PAGES.max(contents * WINDOW_PARTS) {
            self.pages /= 2;
            self.collisions /= 2;
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

    /// The highest number of lines that would have cost less than the wasted comparisons.
    fn stronger(&self, contents: u64) -> Option<u32> {
        if self.collisions < COLLISIONS_MIN {
            return None;
        }
        let mut lines = LINES;
        while lines > self.lines {
            let more = self.pages * u64::from(lines - self.lines);
            if self.collisions * COLLISION_LINES > more + contents * (PAGE_LINES + u64::from(lines)) {
                return Some(lines);
            }
            lines /= 2;
        }
        None
    }

    fn change(&mut self, lines: u32) -> bool {
        self.pages = 0;
        self.collisions = 0;
        self.gain = 0;
        std::mem::replace(&mut self.lines, lines) != lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs `cycles` cycles. `share` gives the share of wasted comparisons for a number of lines. Returns how often the
    /// number has changed.
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
        // The pages differ in one word only, so they collide unless we hash the line with that word.
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
        // We know the contents of 1 TiB. In 1 GiB of it, most comparisons are wasted on collisions.
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
        /// Whatever the pages are like, if they stay that way, the number of lines changes more and more rarely.
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
