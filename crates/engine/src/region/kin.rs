//! Kin: regions of one family whose equal pages lie at equal offsets, as in clones of one image.

use super::PageSet;
use crate::keys::RegionKey;
use crate::units::{Permyriad, Vpn};

/// A new region gets at most this many samples before we decide whether it's a clone of an older one (its kin).
pub const EARLY_SAMPLES: u64 = 128;
/// At least this many samples must agree with kin's pages.
const AGREEING_MIN: u64 = 16;
/// At most this share of samples may differ from kin's pages.
const DIFFERING_MOST: Permyriad = Permyriad(2_500);

/// How well a region's samples agree with an older region of its family. Zeros don't count.
#[derive(Clone, Copy, Debug, Default)]
pub struct KinSamples {
    /// The older mapping that has equal pages at the same offsets.
    kin: Option<RegionKey>,
    /// How many samples were equal to that mapping's page at the same offset, and how many weren't.
    agreeing: u64,
    differing: u64,
}

impl KinSamples {
    /// Records a sample, and the mapping of the family with an equal page at the same offset.
    pub fn record(&mut self, kin: Option<RegionKey>) {
        if kin.is_some() && kin == self.kin {
            self.agreeing += 1;
        } else if kin.is_some() && self.differing >= 3 * self.agreeing {
            // The first mapping that we saw may have had a page in common with this region by chance.
            *self = Self { kin, agreeing: 1, differing: 0 };
        } else {
            self.differing += 1;
        }
    }

    /// The older mapping, if samples agree with it so well that we may merge the other pages unread.
    pub fn found(&self) -> Option<RegionKey> {
        let differs = Permyriad::of(self.differing, self.agreeing + self.differing) > DIFFERING_MOST;
        if differs || self.agreeing < AGREEING_MIN {
            return None;
        }
        self.kin
    }
}

/// How far we are with merging a region's pages unread. Later we only read the pages that didn't merge.
#[derive(Clone, Debug)]
pub struct KinPass {
    /// The mapping whose pages we keep.
    pub kin: RegionKey,
    /// The next page to merge. `None`: we've tried all pages that we can.
    pub next: Option<Vpn>,
    /// When to try absent pages again, nanoseconds. `None`: we're still going through the region.
    pub again_ns: Option<u64>,
    /// How many pages were absent when we last got through the region. At first, all.
    pub missing: u64,
    /// Pages that differed or couldn't be merged: we don't try them again.
    pub left_out: PageSet,
}

impl KinPass {
    pub fn new(kin: RegionKey, first: Vpn) -> Self {
        Self { kin, next: Some(first), again_ns: None, missing: u64::MAX, left_out: PageSet::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kin_agrees_in_three_quarters_of_enough_samples() {
        // The mapping with an equal page at the same offset, 0 for none.
        let found = |samples: &[u32]| {
            let mut kin = KinSamples::default();
            for &key in samples {
                kin.record((key > 0).then_some(RegionKey(key)));
            }
            kin.found().map_or(0, |key| key.0)
        };
        let odd_first = [vec![2], vec![1; 40]].concat();
        assert_eq!([found(&[1; 15]), found(&[1; 16]), found(&odd_first)], [0, 1, 1]);
        assert_eq!([[0, 1, 1, 1], [0, 0, 1, 1], [1, 2, 1, 2]].map(|samples| found(&samples.repeat(16))), [1, 0, 0]);
    }
}
