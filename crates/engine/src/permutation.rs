//! A permutation of `0..len` that needs no table. With it we sample every page of a region once before we sample any
//! twice (UKSM section 5.3).
//!
//! It's a balanced Feistel network over the next power of four, applied until the value is in range.

use crate::random::mix;

/// A keyed permutation of `0..len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    pub fn new(len: u64, key: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), key }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value at `index`, which must be below `len`.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mut value = index;
        loop {
            value = self.encrypt(value);
            // The Feistel network permutes at most four times `len` values, so this takes few rounds on average. It
            // ends: each cycle of a permutation leads back to its first value, which is below `len`.
            if value < self.len {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut left = value >> self.half_bits;
        let mut right = value & mask;
        for round in 0..4 {
            left ^= mix(right ^ self.key.rotate_left(round * 16)) & mask;
            std::mem::swap(&mut left, &mut right);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_value_occurs_exactly_once(len in 1u64..5000, key: u64) {
            let permutation = Permutation::new(len, key);
            let mut seen = vec![false; usize::try_from(len).unwrap()];
            for index in 0..len {
                let value = usize::try_from(permutation.at(index)).unwrap();
                prop_assert!(!seen[value]);
                seen[value] = true;
            }
        }
    }

    #[test]
    fn the_order_is_scattered() {
        let permutation = Permutation::new(100_000, 42);
        let first: Vec<u64> = (0..1000).map(|index| permutation.at(index)).collect();
        let mean = first.iter().sum::<u64>() as f64 / 1000.0;
        assert!((mean - 50_000.0).abs() < 4_000.0, "{mean}");
        assert!(first.windows(2).filter(|pair| pair[1] == pair[0] + 1).count() < 5);
    }
}
