//! We use one-permutation min-hash: we divide contents into classes at random. For each class, the probability that two
//! units have the same lowest digest is their likeness (common contents divided by all contents of both), whatever the
//! rates of their samples. We compare units that agree in a class, but each only with few of the units before it. With
//! a likeness of a half, one pair in 4,000 agrees in none of 12 classes; with a third, one in 130.

use crate::contents::Contents;
use crate::fleet::UnitId;
use pagefold_engine::random::finalize;
use pagefold_engine::units::{count, index};
use rustc_hash::FxHashMap;

const CLASSES: usize = 12;
/// How many groups we remember, by their first members, for one content of a class. A content that everything holds
/// (data of a C library) is the lowest of its class for many groups, and without this limit we'd compare all of these
/// with each other.
const GROUPS_PER_CLASS: usize = 4;
/// A unit belongs to a group if its likeness to the group's first member is at least this fraction.
const LIKE: (usize, usize) = (1, 2);

/// Divides units into groups. The other members of a group are like its first one.
pub fn groups(contents: &Contents, units: impl Iterator<Item = UnitId>) -> Vec<Vec<UnitId>> {
    let mut groups: Vec<Vec<UnitId>> = Vec::new();
    let mut known: FxHashMap<u32, [u32; GROUPS_PER_CLASS]> = FxHashMap::default();
    for unit in units {
        let lowest = lowest_of_classes(contents.of_unit(unit));
        let mut near: Vec<u32> = Vec::new();
        for content in &lowest {
            if let Some(kept) = known.get(content) {
                near.extend(kept);
            }
        }
        near.retain(|&group| group != u32::MAX);
        near.sort_unstable();
        near.dedup();
        let mut best = None;
        let mut best_common = LIKE.0;
        let mut best_all = LIKE.1;
        for group in near {
            let (common, all) = contents.overlap(groups[index(group)][0], unit);
            // We compare fractions without rounding: a/b >= c/d if ad >= cb.
            if common > 0 && common * best_all >= best_common * all {
                best = Some(group);
                best_common = common;
                best_all = all;
            }
        }
        if let Some(group) = best {
            groups[index(group)].push(unit);
            continue;
        }
        let group = u32::try_from(groups.len()).unwrap_or(u32::MAX);
        groups.push(vec![unit]);
        for content in lowest {
            let kept = known.entry(content).or_insert([u32::MAX; GROUPS_PER_CLASS]);
            if let Some(free) = kept.iter_mut().find(|kept| **kept == u32::MAX) {
                *free = group;
            }
        }
    }
    groups
}

/// The contents with the lowest digest in each class.
fn lowest_of_classes(held: &[u32]) -> Vec<u32> {
    let mut lowest = [None; CLASSES];
    let mut missing = lowest.len();
    for &content in held {
        let class = usize::try_from(finalize(u64::from(content) + 1) % count(CLASSES)).unwrap_or(0);
        if lowest[class].is_none() {
            lowest[class] = Some(content);
            missing -= 1;
            if missing == 0 {
                break;
            }
        }
    }
    lowest.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{DIGESTS_END, Fleet, Host, Sample, Unit};
    use pagefold_engine::random::Random;
    use pagefold_engine::units::Bytes;

    /// Units of several kinds, sampled at several rates. All hold the same half of contents; units of a kind also hold
    /// the same other half.
    #[test]
    fn units_of_a_kind_are_a_group() {
        let mut random = Random::new(7);
        let mut digests = |number: usize| -> Vec<u64> { (0..number).map(|_| random.next() >> 1).collect() };
        let base = digests(500);
        let kinds: Vec<Vec<u64>> = (0..20).map(|_| digests(1000)).collect();
        let unit = |number: usize| {
            let threshold = DIGESTS_END >> (number / 20 % 2);
            let held = base.iter().chain(&kinds[number % 20]).copied();
            Unit {
                workloads: 1,
                memory: Bytes(1 << 40),
                samples: vec![Sample { domain: 0, threshold, digests: held.filter(|&d| d < threshold).collect() }],
                ..Unit::default()
            }
        };
        let hosts = vec![Host { memory: Bytes(0), cpu_millicores: 0 }];
        let fleet = Fleet { hosts, units: (0..200).map(unit).collect() };
        let contents = Contents::of(&fleet);
        let groups = groups(&contents, fleet.unit_ids());
        assert_eq!(groups.len(), 20);
        for group in groups {
            assert_eq!(group.len(), 10);
            assert!(group.iter().all(|unit| unit.0 % 20 == group[0].0 % 20), "{group:?}");
        }
    }
}
