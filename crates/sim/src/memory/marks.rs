//! The marked ranges of one region. They're sorted and disjoint, and we join them where they touch, as the kernel joins
//! adjacent VMAs with equal flags.

use std::ops::Range;

/// Which pages of a region are marked mergeable, by offset in the region.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks(Vec<Range<u32>>);

impl Marks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.0.iter().map(|range| u64::from(range.end - range.start)).sum()
    }

    pub(crate) fn contains(&self, page: u32) -> bool {
        self.next_at(page).is_some_and(|range| range.start <= page)
    }

    /// The first range that ends after `page`.
    fn next_at(&self, page: u32) -> Option<&Range<u32>> {
        self.0.get(self.0.partition_point(|range| range.end <= page))
    }

    /// The marked pages at or after `page`, up to the next gap.
    pub(crate) fn stretch_from(&self, page: u32) -> Option<Range<u32>> {
        self.next_at(page).map(|range| range.start.max(page)..range.end)
    }

    pub(crate) fn add(&mut self, new: Range<u32>) {
        if new.is_empty() {
            return;
        }
        let low = self.0.partition_point(|range| range.end < new.start);
        let high = self.0.partition_point(|range| range.start <= new.end);
        let joined = self.0[low..high].iter().fold(new, |all, r| all.start.min(r.start)..all.end.max(r.end));
        self.0.splice(low..high, [joined]);
    }

    pub(crate) fn remove(&mut self, gone: &Range<u32>) {
        if gone.is_empty() {
            return;
        }
        let keep = |range: &Range<u32>| {
            [
                range.start..range.end.min(gone.start).max(range.start),
                range.start.max(gone.end).min(range.end)..range.end,
            ]
        };
        self.0 = self.0.iter().flat_map(keep).filter(|range| !range.is_empty()).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn agrees_with_a_bitmap(steps in prop::collection::vec((any::<bool>(), 0u32..64, 0u32..20), 1..40)) {
            let (mut marks, mut bits) = (Marks::default(), [false; 96]);
            for (add, start, length) in steps {
                let range = start..start + length;
                bits[start as usize..(start + length) as usize].fill(add);
                if add { marks.add(range) } else { marks.remove(&range) }
                for (page, bit) in (0..96).zip(bits) {
                    prop_assert_eq!(marks.contains(page), bit);
                }
                prop_assert_eq!(marks.pages(), bits.iter().filter(|bit| **bit).count() as u64);
                prop_assert!(marks.0.windows(2).all(|pair| pair[0].end < pair[1].start), "not joined: {:?}", marks);
            }
        }
    }
}
