//! How long memory lives: regions that come and go are not worth folding (UKSM sections 5.1 and 5.2).
//!
//! A region that was there when the run began is taken to have been there long. One that appears during the run must
//! first outlive some rounds, and if others of its family have gone young, twice as long as they did.

use crate::keys::FamilyKey;
use std::collections::BTreeMap;

/// Families remembered.
const FAMILIES_MAX: usize = 4_096;
/// Regions of a family that must have gone young before the family counts as short-lived.
const DEATHS_MIN: u32 = 2;
/// A region that lived longer than this was not short-lived, nanoseconds.
pub const SHORT_NS: u64 = 60_000_000_000;

#[derive(Clone, Copy, Debug)]
struct Record {
    deaths: u32,
    longest_ns: u64,
    last_ns: u64,
}

/// What is known of families whose regions have gone young.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    families: BTreeMap<FamilyKey, Record>,
}

impl Lifetimes {
    /// A region that appeared during the run has gone at this age.
    pub fn record_end(&mut self, family: FamilyKey, age_ns: u64, now_ns: u64) {
        if age_ns > SHORT_NS {
            self.families.remove(&family);
            return;
        }
        let record = self.families.entry(family).or_insert(Record { deaths: 0, longest_ns: 0, last_ns: 0 });
        record.deaths += 1;
        // Old lives fade, so that a family may change its ways.
        record.longest_ns = age_ns.max(record.longest_ns / 8 * 7);
        record.last_ns = now_ns;
        if self.families.len() > FAMILIES_MAX {
            let oldest = self.families.iter().min_by_key(|(_, record)| record.last_ns).map(|(&family, _)| family);
            oldest.map(|family| self.families.remove(&family));
        }
    }

    /// The age that a region of a short-lived family must reach to be taken for something else, nanoseconds.
    pub fn outlive_ns(&self, family: FamilyKey) -> Option<u64> {
        let record = self.families.get(&family).filter(|record| record.deaths >= DEATHS_MIN)?;
        Some(record.longest_ns * 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_family_is_short_lived_once_two_have_gone_young() {
        let mut lifetimes = Lifetimes::default();
        let family = FamilyKey(1);
        lifetimes.record_end(family, 5 * S, 10 * S);
        assert_eq!(lifetimes.outlive_ns(family), None);
        lifetimes.record_end(family, 4 * S, 20 * S);
        let outlive = lifetimes.outlive_ns(family).unwrap();
        assert!((8 * S..=10 * S).contains(&outlive), "{outlive}");
        assert_eq!(lifetimes.outlive_ns(FamilyKey(2)), None);
        lifetimes.record_end(family, 2 * SHORT_NS, 300 * S);
        assert_eq!(lifetimes.outlive_ns(family), None, "one that stayed clears the family");
    }

    #[test]
    fn memory_of_families_is_bounded() {
        let mut lifetimes = Lifetimes::default();
        for family in 0..10_000 {
            lifetimes.record_end(FamilyKey(family), S, family * S);
        }
        assert_eq!(lifetimes.families.len(), FAMILIES_MAX);
        assert!(lifetimes.families.contains_key(&FamilyKey(9_999)));
    }
}
