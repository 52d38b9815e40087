//! Counts how long we stop targets, in fixed classes.

use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// The upper bounds of the histogram's buckets, nanoseconds. One more bucket holds all longer stops.
pub const LENGTHS_NS: [u64; 11] =
    [25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 100_000_000];

/// How many stops there were in each class of [`LENGTHS_NS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopLengths(pub [u64; LENGTHS_NS.len() + 1]);

impl StopLengths {
    pub fn one(ns: u64) -> Self {
        let mut lengths = Self::default();
        lengths.add(ns);
        lengths
    }

    pub fn add(&mut self, ns: u64) {
        self.0[LENGTHS_NS.partition_point(|&most| most < ns)] += 1;
    }
}

impl AddAssign for StopLengths {
    fn add_assign(&mut self, other: Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count = count.saturating_add(more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_has_the_stops_up_to_its_longest() {
        let mut lengths = StopLengths::default();
        for ns in [0, 25_000, 25_001, 10_000_000, 100_000_000, 100_000_001, u64::MAX] {
            lengths.add(ns);
        }
        assert_eq!(lengths.0, [2, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 2]);
        lengths += lengths;
        assert_eq!(lengths.0, [4, 2, 0, 0, 0, 0, 0, 0, 2, 0, 2, 4]);
        assert!(LENGTHS_NS.is_sorted());
    }
}
