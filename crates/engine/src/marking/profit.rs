//! Does merging pay? Weighs the saving against the CPU time.
//!
//! The governor sets the price: the CPU time that a saved page may cost. Work that costs more waits until the batch is
//! big enough, or until ksmd has been idle so long that the cost is small in comparison.

use crate::ledger::METADATA_BYTES_PER_PAGE;
use crate::units::{PAGE_SIZE, Pages, Permyriad, count, whole};
use std::ops::AddAssign;

/// The mean cost of visiting a recently marked page, nanoseconds.
pub const NEW_PAGE_NS: u64 = 6_000;
/// The cost of visiting a page again, nanoseconds: it's merged already, or has no copy and is mostly skipped.
pub const OLD_PAGE_NS: u64 = 700;
/// The cost of a write to a merged page: a page fault and a copy, nanoseconds. For a page of zeros it's less.
const BREAK_NS: f64 = 2_500.0;
const ZERO_BREAK_NS: f64 = 2_000.0;
/// A page that stays saved for this long is worth the governor's price, nanoseconds. At the highest price, a merge pays
/// if the page lasts for at least 45 s until it's written; at the lowest, six minutes.
const WORTH_NS: f64 = 3_600e9;
/// ksmd merges a page at its second visit.
const VISITS: u64 = 2;
/// Work that doesn't pay waits until ksmd has been idle for the work's cost times this, divided by the price,
/// nanoseconds. At the highest price (governor `full`) ksmd then takes a hundredth of a core.
const PATIENCE_NS: u64 = 20_000_000;

/// A wave: pages that ksmd would visit in the same two scans, and merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wave {
    /// Resident pages that ksmd would visit for the first time.
    pub added: Pages,
    /// Marked pages that ksmd would visit again.
    pub walked: Pages,
    /// Duplicates among the added pages.
    pub duplicate: Pages,
}

impl Wave {
    /// ksmd's CPU time for the two scans, nanoseconds.
    pub fn takes_ns(&self) -> u64 {
        VISITS * (self.added.0 * NEW_PAGE_NS + self.walked.0 * OLD_PAGE_NS)
    }

    /// Pages saved, less ksmd's records of the added pages.
    pub fn brings(&self) -> Pages {
        self.duplicate.saturating_sub(Pages(self.added.0 * METADATA_BYTES_PER_PAGE / count(PAGE_SIZE)))
    }

    /// Whether a saved page costs at most `price_ns`.
    pub fn pays(&self, price_ns: u64) -> bool {
        self.takes_ns() <= self.brings().0 * price_ns
    }

    /// Whether to merge the wave now: it pays, or ksmd has been idle for long enough.
    pub fn is_due(&self, price_ns: u64, rested_ns: u64) -> bool {
        self.pays(price_ns) || rested_ns >= self.rest_ns(price_ns)
    }

    /// How long ksmd must have been idle for us to merge the wave although it doesn't pay, nanoseconds.
    pub fn rest_ns(&self, price_ns: u64) -> u64 {
        let ns = u128::from(self.takes_ns()) * u128::from(PATIENCE_NS) / u128::from(price_ns.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

impl AddAssign for Wave {
    fn add_assign(&mut self, other: Self) {
        self.added += other.added;
        self.walked += other.walked;
        self.duplicate += other.duplicate;
    }
}

/// The cost of COW breaks to the program, nanoseconds. `zeros` of them were writes to pages of zeros.
pub fn breaks_cost_ns(breaks: u64, zeros: u64) -> f64 {
    (breaks - zeros) as f64 * BREAK_NS + zeros as f64 * ZERO_BREAK_NS
}

/// The CPU time that a saving is worth, nanoseconds. `saved_ns` adds up how long each page stays saved.
pub fn saved_worth_ns(saved_ns: u64, price_ns: u64) -> f64 {
    saved_ns as f64 / WORTH_NS * price_ns as f64
}

/// The share of duplicates at which it pays to mark more memory, if the scans run anyway.
pub fn paying_density(price_ns: u64) -> Permyriad {
    let records = METADATA_BYTES_PER_PAGE as f64 / PAGE_SIZE as f64;
    let share = (VISITS * NEW_PAGE_NS) as f64 / price_ns as f64 + records;
    Permyriad::of(whole((share * 10_000.0).ceil()), 10_000).min(Permyriad(10_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_pays_by_what_a_page_costs() {
        let wave =
            |added, walked, duplicate| Wave { added: Pages(added), walked: Pages(walked), duplicate: Pages(duplicate) };
        // 12 us for each page added, 1.4 us for each walked, and a 64th of a page for each added page's record.
        let dense = wave(6_400, 0, 6_400);
        assert_eq!((dense.takes_ns(), dense.brings()), (76_800_000, Pages(6_300)));
        assert!(dense.pays(12_200) && !dense.pays(12_100));
        assert_eq!(dense.rest_ns(200_000), 7_680_000_000, "100 times its cost");
        let beside = wave(640, 1_000_000, 640);
        assert!(!beside.pays(150_000), "two scans of all that is marked for little");
        assert!(wave(64_000, 1_000_000, 64_000).pays(150_000));
        assert!(!wave(64_000, 0, 1_000).pays(u64::MAX / 1_000_000), "the records take what it brings");
    }

    #[test]
    fn memory_of_the_paying_density_pays() {
        for price_ns in [20_000, 50_000, 150_000] {
            let density = paying_density(price_ns);
            let wave = |share: u32| Wave {
                added: Pages(1_000_000),
                duplicate: Pages(u64::from(share) * 100),
                ..Wave::default()
            };
            assert!(wave(density.0 + 5).pays(price_ns) && !wave(density.0 - 5).pays(price_ns), "{density}");
        }
        assert_eq!(paying_density(1), Permyriad(10_000));
    }
}
