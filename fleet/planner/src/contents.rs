//! Numbers the sampled contents of a fleet.
//!
//! A content that only one unit holds can't be shared, so we keep only contents that two or more units hold, a small
//! part in most fleets. Numbers ascend with the digests. So the sample at a lower rate is the beginning of the sample
//! at a higher rate, and we can compare units whose rates differ.

use crate::fleet::{DIGESTS_END, DOMAIN_BITS, Fleet, Unit, UnitId};
use crate::regression::{Moments, shortfall};
use pagefold_engine::units::{PAGE_BYTES, count, index};

/// The highest level: one content in 2^40 is sampled.
const LEVELS_END: u8 = 40;
/// How many of a key's highest bits we look up in a table. The table says where keys with these bits begin, which
/// shortens a search.
const TABLE_BITS: u32 = 20;
/// The lowest of these bits in a digest.
const TABLE_SHIFT: u32 = 63 - TABLE_BITS;

/// How much memory the samples of all workloads may take together, bytes.
const SAMPLES_BYTES: usize = 1 << 30;
/// How many contents a sample has at least and at most, as logarithms to base 2.
const LG_SAMPLED: (u32, u32) = (6, 12);

/// How many contents to sample of each workload if there are `workloads` of them, as a logarithm to base 2.
pub fn lg_sampled(workloads: usize) -> u8 {
    let contents = SAMPLES_BYTES / size_of::<u64>() / workloads.max(1);
    let lg = contents.max(1).ilog2().clamp(LG_SAMPLED.0, LG_SAMPLED.1);
    u8::try_from(lg).unwrap_or(12)
}

/// The contents of all units, without those that only one unit holds.
#[derive(Debug)]
pub struct Contents {
    /// The numbers of all units' contents, one unit after the other.
    held: Vec<u32>,
    /// Where each unit's contents begin in `held`, and where the last ones end.
    starts: Vec<usize>,
    /// What we know of each unit's sample.
    samples: Vec<Sampled>,
    keys: Vec<u64>,
}

/// What we know of a unit's sample, apart from its contents.
#[derive(Clone, Copy, Debug)]
struct Sampled {
    /// One content in 2^level was sampled.
    level: u8,
    /// How many more pages the unit holds than the sample stands for.
    shortfall: i64,
    /// How many sampled contents only this unit holds.
    alone: u32,
}

impl Contents {
    /// Numbers the contents of a fleet.
    pub fn of(fleet: &Fleet) -> Self {
        let keys = shared_keys(fleet);
        let table = table(&keys);
        let mut held = Vec::new();
        let mut starts = vec![0];
        let mut samples = Vec::new();
        let mut found: Vec<u32> = Vec::new();
        for unit in &fleet.units {
            let level = level(unit);
            let mut seen = 0;
            found.clear();
            for key in unit_keys(unit, level) {
                seen += 1;
                let slot = index_of(key);
                let among = table[slot]..table[slot + 1];
                if let Ok(at) = keys[among.clone()].binary_search(&key) {
                    found.push(u32::try_from(among.start + at).unwrap_or(u32::MAX));
                }
            }
            let alone = u32::try_from(seen - count(found.len())).unwrap_or(u32::MAX);
            samples.push(Sampled { level, shortfall: shortfall(unit.held.0, seen, level), alone });
            found.sort_unstable();
            found.dedup();
            // We cut a sample that would stand for more pages than the unit has. Otherwise a host without room would
            // seem to have some.
            let pages = unit.memory.0 / PAGE_BYTES;
            let mut kept = 0;
            found.retain(|&content| {
                let fits = kept < most_below(pages, sparsest(keys[index(content)])).min(pages >> level);
                kept += u64::from(fits);
                fits
            });
            held.append(&mut found);
            starts.push(held.len());
        }
        held.shrink_to_fit();
        Self { held, starts, samples, keys }
    }

    /// The contents that a unit holds, ascending.
    pub fn of_unit(&self, unit: UnitId) -> &[u32] {
        &self.held[self.starts[unit.index()]..self.starts[unit.index() + 1]]
    }

    /// The level of a unit's sample: one content in 2^level was sampled.
    pub fn level(&self, unit: UnitId) -> u8 {
        self.samples[unit.index()].level
    }

    /// How many more pages a unit holds than its sample stands for. By chance a sample has too many or too few
    /// contents, so we limit the difference to what chance makes likely.
    pub fn shortfall(&self, unit: UnitId) -> i64 {
        self.samples[unit.index()].shortfall
    }

    /// How many sampled contents only this unit holds.
    pub fn alone(&self, unit: UnitId) -> u32 {
        self.samples[unit.index()].alone
    }

    /// The part of a regression's sums that comes from contents that only this unit holds.
    pub(crate) fn moments_alone(&self, unit: UnitId) -> Moments {
        Moments::of(self.alone(unit), 1, self.level(unit))
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no two units hold anything in common.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// How many pages a unit's contents stand for.
    pub fn pages(&self, unit: UnitId) -> u64 {
        pages(self.level(unit)) * count(self.of_unit(unit).len())
    }

    /// How many contents two units have in common, and how many they hold together. Counts only contents that both
    /// would have sampled.
    pub fn overlap(&self, a: UnitId, b: UnitId) -> (usize, usize) {
        let end = DIGESTS_END >> self.level(a).max(self.level(b));
        let [a, b] = [a, b].map(|unit| {
            let held = self.of_unit(unit);
            &held[..held.partition_point(|&content| self.keys[index(content)] < end)]
        });
        let common = common(a, b);
        (common, a.len() + b.len() - common)
    }
}

/// The highest level at which we'd still sample a content.
fn sparsest(key: u64) -> u8 {
    u8::try_from(key.leading_zeros().saturating_sub(1)).unwrap_or(LEVELS_END).min(LEVELS_END)
}

/// How many contents a level is likely to sample from `pages` pages at most: two standard deviations above the expected
/// number, rounded up. With another unit's sample at that level, each of them stands for 2^level pages.
fn most_below(pages: u64, level: u8) -> u64 {
    let expected = pages >> level;
    expected + 2 * expected.isqrt() + 1
}

/// How many pages a content stands for that was sampled at this level.
pub(crate) const fn pages(level: u8) -> u64 {
    1 << level
}

/// How many elements two ascending lists have in common.
fn common(a: &[u32], b: &[u32]) -> usize {
    let mut at_a = 0;
    let mut at_b = 0;
    let mut common = 0;
    while at_a < a.len() && at_b < b.len() {
        let order = a[at_a].cmp(&b[at_b]);
        common += usize::from(order.is_eq());
        at_a += usize::from(order.is_le());
        at_b += usize::from(order.is_ge());
    }
    common
}

/// The lowest level at which all samples of a unit are complete. We round rates down to powers of two, so that a host
/// has few different ones.
fn level(unit: &Unit) -> u8 {
    let lowest = unit.samples.iter().map(|sample| sample.threshold).min().unwrap_or(DIGESTS_END);
    (0..LEVELS_END).find(|&level| DIGESTS_END >> level <= lowest).unwrap_or(LEVELS_END)
}

/// The keys of a unit's contents, as sampled at a level. A key comes twice if two of the unit's workloads hold the
/// content.
fn unit_keys(unit: &Unit, level: u8) -> impl Iterator<Item = u64> {
    let end = DIGESTS_END >> level;
    unit.samples.iter().flat_map(move |sample| {
        let below = sample.digests.iter().filter(move |&&digest| digest < end);
        below.map(|&digest| key(digest, sample.domain))
    })
}

fn key(digest: u64, domain: u32) -> u64 {
    (digest >> DOMAIN_BITS) << DOMAIN_BITS | u64::from(domain)
}

/// The keys that at least two units hold, ascending.
fn shared_keys(fleet: &Fleet) -> Vec<u64> {
    let mut all = 0;
    for unit in &fleet.units {
        all += unit.samples.iter().map(|sample| sample.digests.len()).sum::<usize>();
    }
    let mut keys = Vec::with_capacity(all);
    let mut of_unit = Vec::new();
    for unit in &fleet.units {
        of_unit.extend(unit_keys(unit, level(unit)));
        // Several workloads of a unit count as one holder.
        of_unit.sort_unstable();
        of_unit.dedup();
        keys.append(&mut of_unit);
    }
    keys.sort_unstable();
    let mut shared = Vec::new();
    for equal in keys.chunk_by(|a, b| a == b) {
        if equal.len() > 1 {
            shared.push(equal[0]);
        }
    }
    // Numbers have 32 bits. No fleet that fits into memory has more contents.
    shared.truncate(index(u32::MAX));
    shared
}

fn index_of(key: u64) -> usize {
    usize::try_from(key >> TABLE_SHIFT).unwrap_or(usize::MAX).min((1 << TABLE_BITS) - 1)
}

/// Where the keys with each value of the highest bits begin, and where the last ones end.
fn table(keys: &[u64]) -> Vec<usize> {
    let mut table = Vec::with_capacity((1 << TABLE_BITS) + 1);
    let mut at = 0;
    for slot in 0..1 << TABLE_BITS {
        at += keys[at..].iter().take_while(|&&key| index_of(key) < slot).count();
        table.push(at);
    }
    table.push(keys.len());
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Host, HostId, Sample};
    use pagefold_engine::units::{Bytes, Pages};

    fn unit(domain: u32, threshold: u64, digests: &[u64]) -> Unit {
        let samples = vec![Sample { domain, threshold, digests: digests.to_vec() }];
        let (host, memory) = (HostId(0), Bytes(1 << 40));
        Unit {
            host,
            memory,
            held: Pages(0),
            cpu_millicores: 0,
            workloads: 1,
            pinned: false,
            apart: Vec::new(),
            samples,
        }
    }

    fn contents(units: Vec<Unit>) -> Contents {
        Contents::of(&Fleet { hosts: vec![Host { memory: Bytes(0), cpu_millicores: 0 }], units })
    }

    /// Digests that differ in their highest bits.
    fn digests(numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
        numbers.into_iter().map(|number| number << 40).collect()
    }

    #[test]
    fn a_sample_stands_for_no_more_than_its_unit_has() {
        let sparse = |memory| Unit { memory, ..unit(0, DIGESTS_END >> 20, &digests([5, 7])) };
        let of = |pages: u64| contents(vec![sparse(Bytes(pages * PAGE_BYTES)), unit(0, DIGESTS_END, &digests([5, 7]))]);
        let held = |pages| of(pages).pages(UnitId(0));
        assert_eq!([held(1), held((1 << 20) - 1), held(1 << 20), held(1 << 30)], [0, 0, 1 << 20, 1 << 21]);
    }

    /// A small unit lies: it claims all contents of a large unit's sample.
    #[test]
    fn a_sample_is_as_dense_as_its_unit_is_large() {
        let low = |number: u64| number << 40;
        let whole: Vec<u64> = (0..4000).map(low).collect();
        let threshold = low(4001);
        let large = unit(0, threshold, &whole);
        let small = |pages: u64| Unit { memory: Bytes(pages * PAGE_BYTES), ..unit(0, DIGESTS_END, &whole) };
        let held = |pages: u64| {
            let contents = contents(vec![large.clone(), small(pages)]);
            (contents.level(UnitId(0)), count(contents.overlap(UnitId(0), UnitId(1)).0))
        };
        let (level, overlap) = held(1 << 20);
        assert_eq!(level, 12);
        assert_eq!(overlap, 256 + 2 * 16 + 1);
        assert_eq!(held(1 << 30).1, held(1 << 31).1);
        // A truthful sample isn't cut, because it's as dense as its level says.
        let spread: Vec<u64> = (0..4096).map(|number| number * (DIGESTS_END / 4096)).collect();
        let honest = Unit { memory: Bytes(4096 * PAGE_BYTES), ..unit(0, DIGESTS_END, &spread) };
        assert_eq!(contents(vec![honest.clone(), honest]).of_unit(UnitId(0)).len(), 4096);
    }

    #[test]
    fn what_one_unit_alone_holds_is_left_out() {
        let contents = contents(vec![
            unit(0, DIGESTS_END, &digests([5, 1, 9])),
            unit(0, DIGESTS_END, &digests([9, 7, 5])),
            unit(0, DIGESTS_END, &digests([8])),
        ]);
        assert_eq!(contents.len(), 2);
        assert_eq!([0, 1, 2].map(|id| contents.of_unit(UnitId(id)).to_vec()), [vec![0, 1], vec![0, 1], vec![]]);
        assert_eq!(contents.overlap(UnitId(0), UnitId(1)), (2, 2));
        assert_eq!(contents.overlap(UnitId(0), UnitId(2)), (0, 2));
    }

    #[test]
    fn equal_contents_of_two_domains_are_two_contents() {
        let held = digests(1..50);
        let contents =
            contents(vec![unit(1, DIGESTS_END, &held), unit(2, DIGESTS_END, &held), unit(1, DIGESTS_END, &held)]);
        assert_eq!(contents.overlap(UnitId(0), UnitId(1)), (0, 49));
        assert_eq!(contents.overlap(UnitId(0), UnitId(2)), (49, 49));
    }

    #[test]
    fn samples_at_different_rates_are_compared_at_the_lower() {
        let spread: Vec<u64> = (0..1024).map(|number| number * (DIGESTS_END / 1024)).collect();
        let low: Vec<u64> = spread.iter().copied().filter(|&digest| digest < DIGESTS_END / 3).collect();
        let contents = contents(vec![unit(0, DIGESTS_END, &spread), unit(0, DIGESTS_END / 3, &low)]);
        // The rate of a third is rounded down to a quarter.
        assert_eq!((contents.level(UnitId(0)), contents.level(UnitId(1))), (0, 2));
        assert_eq!(contents.overlap(UnitId(0), UnitId(1)), (256, 256));
        assert_eq!(contents.pages(UnitId(1)), 1024);
    }
}
