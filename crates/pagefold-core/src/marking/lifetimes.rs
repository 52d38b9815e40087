//! Lifetimes of regions: short-lived regions are not worth merging (UKSM sections 5.1 and 5.2).
//!
//! A region that existed when the run began counts as old. One that appears during the run must first outlive some
//! rounds. If its family is short-lived, it must live twice as long as the others did. If the last one of its family lived long, it
//! needs to live only for a moment where pages are merged on request: mistaken merges cost little there.

use crate::host::Mechanism;
use crate::keys::FamilyKey;
use crate::learned::LearnedFamily;
use std::collections::BTreeMap;

const FAMILIES_MAX: usize = 4_096;
/// The number of short-lived regions from which a family is short-lived.
const SHORT_LIVED_MIN: u32 = 2;

/// A region that lived for at most this time was short-lived, nanoseconds. Merging on request takes microseconds a page, which
/// some seconds of saved memory are worth; marks have to pay for scans and for stopping the process.
const fn short_ns(mechanism: Mechanism) -> u64 {
    match mechanism {
        Mechanism::Ksmd => 60_000_000_000,
        Mechanism::Request => 4_000_000_000,
    }
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// The number of short-lived regions since the last one that was not.
    number: u32,
    /// The longest of their lives, nanoseconds.
    longest_ns: u64,
    /// When the last of them ended, nanoseconds.
    last_ns: u64,
}

/// The lifetimes of families.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    families: BTreeMap<FamilyKey, Record>,
}

impl Lifetimes {
    /// Records the end of a region that appeared during the run.
    pub fn record_end(&mut self, family: FamilyKey, age_ns: u64, now_ns: u64, mechanism: Mechanism) {
        let record = self.families.entry(family).or_insert(Record { number: 0, longest_ns: 0, last_ns: 0 });
        record.last_ns = now_ns;
        if age_ns > short_ns(mechanism) {
            (record.number, record.longest_ns) = (0, 0);
        } else {
            record.number += 1;
            // Older lives fade, because a family may change.
            record.longest_ns = age_ns.max(record.longest_ns / 8 * 7);
        }
        if self.families.len() > FAMILIES_MAX {
            let mut ends: Vec<u64> = self.families.values().map(|record| record.last_ns).collect();
            let (_, &mut middle, _) = ends.select_nth_unstable(FAMILIES_MAX / 2);
            self.families.retain(|_, record| record.last_ns > middle);
        }
    }

    /// What is known, for another run.
    pub fn learned(&self) -> Vec<LearnedFamily> {
        let families = self.families.iter();
        families
            .map(|(&family, record)| LearnedFamily { family, number: record.number, longest_ns: record.longest_ns })
            .collect()
    }

    /// Adopts what another run has learned about families.
    pub fn adopt(&mut self, learned: &[LearnedFamily], mechanism: Mechanism) {
        for &LearnedFamily { family, number, longest_ns } in learned.iter().take(FAMILIES_MAX) {
            let (number, longest_ns) = (number.min(SHORT_LIVED_MIN), longest_ns.min(short_ns(mechanism)));
            self.families.insert(family, Record { number, longest_ns, last_ns: 0 });
        }
    }

    /// Whether the last region of a family lived long.
    pub fn is_long_lived(&self, family: FamilyKey) -> bool {
        self.families.get(&family).is_some_and(|record| record.number == 0)
    }

    /// The age from which a region of a short-lived family no longer counts as short-lived, nanoseconds. `None` for
    /// other families.
    pub fn outlive_ns(&self, family: FamilyKey) -> Option<u64> {
        let record = self.families.get(&family).filter(|record| record.number >= SHORT_LIVED_MIN)?;
        Some(record.longest_ns * 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_family_with_two_short_lived_regions_is_short_lived() {
        let mut lifetimes = Lifetimes::default();
        let family = FamilyKey(1);
        lifetimes.record_end(family, 5 * S, 10 * S, Mechanism::Ksmd);
        assert_eq!(lifetimes.outlive_ns(family), None);
        lifetimes.record_end(family, 4 * S, 20 * S, Mechanism::Ksmd);
        let outlive = lifetimes.outlive_ns(family).unwrap();
        assert!((8 * S..=10 * S).contains(&outlive), "{outlive}");
        assert_eq!(lifetimes.outlive_ns(FamilyKey(2)), None);
        lifetimes.record_end(family, 61 * S, 300 * S, Mechanism::Ksmd);
        assert_eq!(lifetimes.outlive_ns(family), None, "a long-lived region clears the family");
        assert!(lifetimes.is_long_lived(family) && !lifetimes.is_long_lived(FamilyKey(2)));
        lifetimes.record_end(family, S, 400 * S, Mechanism::Ksmd);
        assert!(!lifetimes.is_long_lived(family) && lifetimes.outlive_ns(family).is_none());
    }

    #[test]
    fn merging_on_request_is_worth_it_for_shorter_lives() {
        for (age, short) in [(3 * S, true), (16 * S, false)] {
            let mut lifetimes = Lifetimes::default();
            for end in [20 * S, 40 * S] {
                lifetimes.record_end(FamilyKey(1), age, end, Mechanism::Request);
            }
            assert_eq!(lifetimes.outlive_ns(FamilyKey(1)).is_some(), short);
        }
    }

    #[test]
    fn the_number_of_families_on_record_is_bounded() {
        let mut lifetimes = Lifetimes::default();
        for family in 0..10_000 {
            lifetimes.record_end(FamilyKey(family), S, family * S, Mechanism::Ksmd);
        }
        assert!((FAMILIES_MAX / 2..=FAMILIES_MAX).contains(&lifetimes.families.len()));
        assert!(lifetimes.families.contains_key(&FamilyKey(9_999)));
    }
}
