//! The digest of a page: a 64-bit hash of its contents.
//!
//! A digest is a hint. Pages with equal digests are merged only after the kernel has compared them
//! byte for byte, so a collision costs time and never data.

use crate::keys::DomainKey;
use crate::random::mix;
use crate::units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// The contents of one page.
pub type PageBytes = [u8; PAGE_SIZE];

/// A 64-bit hash of a page's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub u64);

impl Digest {
    /// The digest that stands for a page of zeros; no other page gets it.
    pub const ZERO: Self = Self(0);

    /// The same content as a trust domain's own, apart from that of all others. Zeros belong to nobody.
    #[must_use]
    pub fn in_domain(self, domain: DomainKey) -> Self {
        if self == Self::ZERO || domain == DomainKey(0) { self } else { Self(self.0 ^ mix(u64::from(domain.0))) }
    }
}

/// Digests pages: XXH3 with a secret made from a seed, so that nobody can prepare pages that collide.
///
/// The secret is made once: XXH3 itself, given a seed, makes it anew for every page, a fifth of the digest's cost.
#[derive(Clone, Debug)]
pub struct Digester {
    seed: u64,
    secret: [u8; SECRET_BYTES],
}

/// XXH3's usual length of a secret.
const SECRET_BYTES: usize = 192;

impl Digester {
    /// The digester of a run. Digests of different seeds have nothing to do with each other.
    pub fn new(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        for (word, count) in secret.chunks_exact_mut(8).zip(0..) {
            word.copy_from_slice(&mix(seed.wrapping_add(mix(count))).to_le_bytes());
        }
        Self { seed, secret }
    }

    /// Digests a page.
    pub fn digest(&self, page: &PageBytes) -> Digest {
        if is_zero(page) {
            return Digest::ZERO;
        }
        Digest(self.hash(page).max(1))
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        // The only error is a secret that is too short.
        XxHash3_64::oneshot_with_seed_and_secret(self.seed, &self.secret, bytes).unwrap_or_default()
    }
}

/// Whether every byte is zero. Pages of real data are told apart within the first cache line.
pub fn is_zero(page: &PageBytes) -> bool {
    page.chunks(256).all(|chunk| chunk.iter().fold(0, |seen, byte| seen | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_zero_and_nothing_else_is() {
        let digester = Digester::new(7);
        let mut page = [0; PAGE_SIZE];
        assert_eq!(digester.digest(&page), Digest::ZERO);
        for at in [0, 255, 256, PAGE_SIZE - 1] {
            page[at] = 1;
            assert_ne!(digester.digest(&page), Digest::ZERO, "{at}");
            page[at] = 0;
        }
    }

    #[test]
    fn every_byte_and_the_seed_count() {
        let (one, other) = (Digester::new(7), Digester::new(8));
        let mut page = [0x5a; PAGE_SIZE];
        let digest = one.digest(&page);
        assert_eq!(digest, Digester::new(7).digest(&page));
        assert_ne!(digest, other.digest(&page));
        for at in 0..PAGE_SIZE {
            page[at] ^= 1;
            assert_ne!(one.digest(&page), digest, "{at}");
            page[at] ^= 1;
        }
    }
}
