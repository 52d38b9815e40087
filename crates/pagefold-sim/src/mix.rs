//! The only source of chance: a 64-bit bijective mixer (SplitMix64's finaliser) and a stream made of it.
//!
//! Written out rather than taken from a crate, because a scenario's results must stay the same for
//! its seed from one version of the simulator to the next.

use pagefold_core::hash::Digest;
use pagefold_core::units::Permyriad;

/// SplitMix64's increment: odd, so that counting with it visits every 64-bit value.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Scatters `x`. A bijection: different inputs never give the same output.
pub const fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The content id at place `index` of the numbered series of contents `series`; never the zero page's.
pub const fn content_of_series(series: u64, index: u64) -> u64 {
    let id = mix64(mix64(series ^ 0x5e41_e5c0_17e4_7001).wrapping_add(index.wrapping_mul(STEP)));
    if id == 0 { STEP } else { id }
}

/// The digest of a page that holds content `id`, as a run with `seed` would compute it.
pub fn digest(id: u64, seed: u64) -> Digest {
    if id == 0 {
        return Digest::ZERO;
    }
    Digest(mix64(mix64(id).wrapping_add(mix64(seed ^ STEP))).max(1))
}

/// What ksmd remembers of a page's content between visits: 32 bits, as in the kernel. Never 0, which
/// stands for "not seen yet".
#[allow(clippy::cast_possible_truncation)] // the low half is what is wanted
pub const fn checksum(id: u64) -> u32 {
    mix64(id ^ STEP) as u32 | 1
}

/// A stream of pseudo-random numbers.
#[derive(Clone, Debug)]
pub struct Stream(u64);

impl Stream {
    /// A stream of its own for each pair of seed and purpose.
    pub const fn new(seed: u64, purpose: u64) -> Self {
        Self(mix64(seed.wrapping_add(STEP)) ^ mix64(purpose ^ STEP))
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix64(self.0)
    }

    /// A number below `bound`, which must not be zero. Multiply-shift; the bias is below 2^-32 for any
    /// bound that a page count can reach.
    #[allow(clippy::cast_possible_truncation)] // the product's high half is below `bound`
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }

    /// True with the given chance.
    pub fn chance(&mut self, share: Permyriad) -> bool {
        self.below(10_000) < u64::from(share.0)
    }
}
