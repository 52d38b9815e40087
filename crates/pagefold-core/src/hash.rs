//! The digest of a page: a 64-bit hash of its contents.
//!
//! A digest is a hint. The kernel compares pages byte for byte before it merges them, so a collision costs time and
//! never data.

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
    /// The digest of a page of zeros, and of no other page.
    pub const ZERO: Self = Self(0);

    /// The digest of this content within a trust domain, distinct from those in other domains. Zeros belong to no
    /// domain.
    #[must_use]
    pub fn in_domain(self, domain: DomainKey) -> Self {
        if self == Self::ZERO || domain == DomainKey(0) { self } else { Self(self.0 ^ mix(u64::from(domain.0))) }
    }
}

/// Computes digests: XXH3 with a secret derived from a seed, so that pages that collide cannot be prepared.
///
/// The secret is derived once. XXH3 itself, given a seed, derives it for every page, which is a fifth of the cost of a
/// digest.
#[derive(Clone, Debug)]
pub struct Digester {
    seed: u64,
    secret: [u8; SECRET_BYTES],
}

/// XXH3's default length of a secret, bytes.
const SECRET_BYTES: usize = 192;

impl Digester {
    /// A digester. Digests of different seeds cannot be compared.
    pub fn new(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        for (word, count) in secret.chunks_exact_mut(8).zip(0..) {
            word.copy_from_slice(&mix(seed.wrapping_add(mix(count))).to_le_bytes());
        }
        Self { seed, secret }
    }

    /// The digest of a page.
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

/// Whether every byte is zero. In pages of real data, the first cache line usually shows that it is not.
pub fn is_zero(page: &PageBytes) -> bool {
    page.chunks(256).all(|chunk| chunk.iter().fold(0, |bits, byte| bits | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_page_of_zeros_has_the_digest_zero() {
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
    fn the_digest_depends_on_every_byte_and_on_the_seed() {
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
