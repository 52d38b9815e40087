//! Digests of pages under a key that we throw away: equal pages have equal digests within a record, and nobody can look
//! up contents elsewhere.
//!
//! XXH3 with a random secret isn't cryptographic. An attacker who can read the record and write recorded memory could
//! learn about the key while it's in use, but not afterwards.

use crate::record::PARTS;
use pagefold_engine::hash::PageBytes;
use pagefold_engine::units::PAGE_SIZE;
use twox_hash::{XxHash3_64, XxHash3_128};

/// A key of XXH3's default secret length.
pub type Key = [u8; 192];

#[derive(Clone)]
pub struct Digests {
    key: Key,
}

impl Digests {
    /// Digests under a key: use a random one, for one record only.
    pub const fn new(key: Key) -> Self {
        Self { key }
    }

    /// Digests a page and its quarters. Zeros, and only zeros, have digest 0.
    pub fn of(&self, page: &PageBytes) -> (u128, [u32; PARTS]) {
        let mut parts = [0; PARTS];
        for (part, bytes) in parts.iter_mut().zip(page.chunks(PAGE_SIZE / PARTS)) {
            if bytes.iter().any(|&byte| byte != 0) {
                *part = self.part(bytes);
            }
        }
        if parts == [0; PARTS] {
            return (0, parts);
        }
        // The only possible error is a key that's too short.
        let digest = XxHash3_128::oneshot_with_secret(&self.key, page).unwrap_or_default();
        (digest.max(1), parts)
    }

    #[expect(clippy::cast_possible_truncation, reason = "32 bits are enough to see that a quarter has changed")]
    fn part(&self, bytes: &[u8]) -> u32 {
        let digest = XxHash3_64::oneshot_with_secret(&self.key, bytes).unwrap_or_default();
        (digest as u32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(first: u8) -> Key {
        std::array::from_fn(|at| first.wrapping_mul(31).wrapping_add(u8::try_from(at).unwrap().wrapping_mul(97)))
    }

    #[test]
    fn exactly_zeros_have_digest_zero() {
        let digests = Digests::new(key(1));
        let mut page = [0; PAGE_SIZE];
        assert_eq!(digests.of(&page), (0, [0; PARTS]));
        for at in [0, 1023, 1024, PAGE_SIZE - 1] {
            page[at] = 1;
            let (digest, parts) = digests.of(&page);
            assert!(digest != 0);
            let held: Vec<usize> = (0..PARTS).filter(|&part| parts[part] != 0).collect();
            assert_eq!(held, [at / 1024]);
            page[at] = 0;
        }
    }

    #[test]
    fn every_byte_and_the_key_change_the_digest() {
        let (one, other) = (Digests::new(key(1)), Digests::new(key(2)));
        let mut page = [0x5a; PAGE_SIZE];
        let (digest, parts) = one.of(&page);
        assert_eq!(one.clone().of(&page), (digest, parts));
        // Equal quarters have equal digests.
        assert_eq!(parts, [parts[0]; PARTS]);
        assert!(other.of(&page).0 != digest && other.of(&page).1[0] != parts[0]);
        for at in 0..PAGE_SIZE {
            page[at] ^= 1;
            let (changed, changed_parts) = one.of(&page);
            let differing: Vec<usize> = (0..PARTS).filter(|&part| parts[part] != changed_parts[part]).collect();
            assert!(changed != digest && differing == [at / 1024], "{at}");
            page[at] ^= 1;
        }
    }
}
