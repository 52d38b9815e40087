//! Pseudo-random numbers: `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014).
//!
//! We've written it out instead of using a crate, because a seed must give the same digests, samples and simulated
//! scenarios in every version.

use crate::units::Permyriad;

/// Each step adds this to the state. It's odd, so that the state visits every 64-bit value.
pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function: a bijection in which every input bit reaches every output bit. Maps 0 to 0.
pub const fn finalize(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The first number of the generator with this seed: a hash of `seed`, and a bijection.
pub const fn mix(seed: u64) -> u64 {
    finalize(seed.wrapping_add(INCREMENT))
}

/// Undoes [`mix`].
pub const fn unmix(x: u64) -> u64 {
    let x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    (x ^ (x >> 30) ^ (x >> 60)).wrapping_sub(INCREMENT)
}

#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// An independent generator for each pair of seed and purpose.
    pub const fn for_purpose(seed: u64, purpose: u64) -> Self {
        Self(mix(seed) ^ finalize(purpose ^ INCREMENT))
    }

    pub const fn next(&mut self) -> u64 {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(INCREMENT);
        number
    }

    /// A number below `end`, which must not be zero. The bias is below 2^-32 for any `end` below 2^32.
    pub const fn below(&mut self, end: u64) -> u64 {
        ((self.next() as u128 * end as u128) >> 64) as u64
    }

    /// One of `among`, all equally likely.
    ///
    /// # Panics
    /// If `among` is empty.
    pub fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        let index = self.below(among.len() as u64);
        &among[usize::try_from(index).unwrap_or_default()]
    }

    /// True with the given probability.
    pub fn chance(&mut self, probability: Permyriad) -> bool {
        self.below(10_000) < u64::from(probability.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn agrees_with_the_published_generator() {
        let mut random = Random::new(1_234_567);
        let numbers = [(); 3].map(|()| random.next());
        assert_eq!(numbers, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    proptest! {
        #[test]
        fn mix_can_be_undone(x: u64) {
            prop_assert_eq!(unmix(mix(x)), x);
        }

        #[test]
        fn below_is_below(seed: u64, end in 1u64..) {
            prop_assert!(Random::new(seed).below(end) < end);
        }
    }
}
