//! Lifetimes of regions: short-lived regions aren't worth merging (UKSM sections 5.1 and 5.2).
//!
//! Regions that existed when the run began count as old. We read a new region whole once half of its family's regions
//! that get as old live on long enough for a merge to pay: right away if most of them live long, and later if many end
//! young. If we don't know its family, the region must first outlive some rounds.

use crate::host::Mechanism;
use crate::keys::FamilyKey;
use crate::learned::LearnedFamily;
use std::collections::BTreeMap;

const FAMILIES_MAX: usize = 4_096;
/// We remember this many lives of a family. Older ones don't count, because a family may change.
pub(crate) const LIVES: usize = 8;

/// The lives of one family, nanoseconds.
#[derive(Clone, Debug, Default)]
struct Record {
    /// The lifetimes of the regions that ended most recently: a ring buffer.
    ended: Vec<u64>,
    /// The index in `ended` that the next life overwrites.
    next: usize,
    /// The age of the family's oldest living region when its latest region appeared.
    living: Option<u64>,
    /// When a region of the family last began or ended.
    last_ns: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    families: BTreeMap<FamilyKey, Record>,
}

impl Lifetimes {
    /// Records the end of a region that appeared during the run.
    pub fn record_end(&mut self, family: FamilyKey, age_ns: u64, now_ns: u64) {
        let record = self.record(family, now_ns);
        if record.ended.len() < LIVES {
            record.ended.push(age_ns);
        } else {
            record.ended[record.next] = age_ns;
            record.next = (record.next + 1) % LIVES;
        }
    }

    /// Records that a region appears, and the age of the oldest region of its family in another process, nanoseconds.
    pub fn record_begin(&mut self, family: FamilyKey, oldest_ns: Option<u64>, now_ns: u64) {
        if oldest_ns.is_some() || self.families.contains_key(&family) {
            self.record(family, now_ns).living = oldest_ns;
        }
    }

    fn record(&mut self, family: FamilyKey, now_ns: u64) -> &mut Record {
        if self.families.len() >= FAMILIES_MAX && !self.families.contains_key(&family) {
            let mut ends: Vec<u64> = self.families.values().map(|record| record.last_ns).collect();
            let (_, &mut middle, _) = ends.select_nth_unstable(FAMILIES_MAX / 2);
            self.families.retain(|_, record| record.last_ns > middle);
        }
        let record = self.families.entry(family).or_default();
        record.last_ns = now_ns;
        record
    }

    /// Our knowledge, for another run.
    pub fn learned(&self) -> Vec<LearnedFamily> {
        let mut learned = Vec::new();
        for (&family, record) in &self.families {
            if !record.ended.is_empty() {
                learned.push(LearnedFamily { family, lives_ns: record.ended.clone() });
            }
        }
        learned
    }

    /// Adopts another run's knowledge of families.
    pub fn adopt(&mut self, learned: &[LearnedFamily]) {
        for LearnedFamily { family, lives_ns } in learned.iter().take(FAMILIES_MAX) {
            let ended = lives_ns.iter().copied().take(LIVES).collect();
            self.families.insert(*family, Record { ended, ..Record::default() });
        }
    }

    /// The first age at which at least half of the family's regions that get so old live on long enough for a merge to
    /// pay, nanoseconds. `None` if we know nothing of the family. If a region outlives all others, we expect it to live
    /// as long again. The oldest living region counts as one more life once it's old enough to be worth merging.
    pub fn worth_from_ns(&self, family: FamilyKey, mechanism: Mechanism) -> Option<u64> {
        let record = self.families.get(&family)?;
        let worth_ns = mechanism.worth_ns();
        let mut lives = record.ended.clone();
        lives.extend(record.living.filter(|&age| age >= worth_ns));
        lives.sort_unstable();
        let longest = *lives.last()?;
        let mut ages = vec![0];
        ages.extend(&lives);
        for age in ages {
            let outlive = &lives[lives.partition_point(|&life| life <= age)..];
            let long = outlive.iter().filter(|&&life| life - age >= worth_ns).count();
            if long > 0 && 2 * long >= outlive.len() {
                return Some(age);
            }
        }
        Some(longest.max(worth_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    /// Lifetimes of one family with these lives, in seconds.
    fn with_lives(lives: &[u64]) -> Lifetimes {
        let mut lifetimes = Lifetimes::default();
        for (end, life) in (1..).zip(lives) {
            lifetimes.record_end(FamilyKey(1), life * S, end * 100 * S);
        }
        lifetimes
    }

    fn worth_from(lifetimes: &Lifetimes, mechanism: Mechanism) -> Option<u64> {
        lifetimes.worth_from_ns(FamilyKey(1), mechanism).map(|age| age / S)
    }

    #[test]
    fn a_region_may_be_read_from_the_age_at_which_half_of_its_family_live_on() {
        for (lives, by_ksmd, on_request) in [
            (&[][..], None, None),
            // All regions of the family live long enough to be worth reading, or none do.
            (&[16, 17], Some(0), Some(0)),
            (&[5, 5], Some(8), Some(0)),
            (&[2, 2, 2], Some(8), Some(4)),
            (&[2], Some(8), Some(4)),
            // A region that outlives the short-lived ones lives long.
            (&[1, 1, 1, 60], Some(1), Some(1)),
            (&[1, 60], Some(0), Some(0)),
            (&[3, 5, 6, 7, 7, 30], Some(7), Some(0)),
            // No region is known to have lived much longer than that.
            (&[3, 5, 6, 7, 7, 9], Some(9), Some(0)),
        ] {
            let lifetimes = with_lives(lives);
            let found = [Mechanism::Ksmd, Mechanism::Request].map(|mechanism| worth_from(&lifetimes, mechanism));
            assert_eq!(found, [by_ksmd, on_request], "{lives:?}");
        }
    }

    #[test]
    fn the_oldest_living_one_counts_as_one_life_if_it_is_old_enough() {
        let mut lifetimes = Lifetimes::default();
        lifetimes.record_begin(FamilyKey(1), None, 0);
        assert_eq!((worth_from(&lifetimes, Mechanism::Ksmd), lifetimes.families.len()), (None, 0));
        lifetimes.record_begin(FamilyKey(1), Some(3 * S), 3 * S);
        assert_eq!(worth_from(&lifetimes, Mechanism::Ksmd), None, "a young region says nothing about its family");
        lifetimes.record_begin(FamilyKey(1), Some(300 * S), 300 * S);
        assert_eq!(worth_from(&lifetimes, Mechanism::Ksmd), Some(0));
        let mut lifetimes = with_lives(&[1, 1, 1]);
        lifetimes.record_begin(FamilyKey(1), Some(300 * S), 500 * S);
        assert_eq!(worth_from(&lifetimes, Mechanism::Ksmd), Some(1));
        lifetimes.record_begin(FamilyKey(1), None, 600 * S);
        assert_eq!(worth_from(&lifetimes, Mechanism::Ksmd), Some(8), "it has ended");
    }

    #[test]
    fn old_lives_are_forgotten() {
        let mut lives = vec![60; LIVES];
        assert_eq!(worth_from(&with_lives(&lives), Mechanism::Ksmd), Some(0));
        lives.extend([1; LIVES]);
        let lifetimes = with_lives(&lives);
        assert_eq!(worth_from(&lifetimes, Mechanism::Ksmd), Some(8));
        let mut next = Lifetimes::default();
        next.adopt(&lifetimes.learned());
        assert_eq!(worth_from(&next, Mechanism::Ksmd), Some(8));
        assert_eq!(next.learned(), lifetimes.learned());
    }

    #[test]
    fn the_number_of_families_on_record_is_bounded() {
        let mut lifetimes = Lifetimes::default();
        for family in 0..10_000 {
            lifetimes.record_end(FamilyKey(family), S, family * S);
        }
        assert!((FAMILIES_MAX / 2..=FAMILIES_MAX).contains(&lifetimes.families.len()));
        assert!(lifetimes.families.contains_key(&FamilyKey(9_999)));
    }
}
