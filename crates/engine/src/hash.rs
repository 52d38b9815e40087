//! The digest of a page: a 64-bit hash of its contents.
//!
//! A digest is a hint. The kernel compares pages byte for byte before it merges them, so a collision costs time and
//! never data.

use crate::keys::DomainKey;
use crate::random::{INCREMENT, finalize, mix};
use crate::units::{PAGE_SIZE, low_bits};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

pub type PageBytes = [u8; PAGE_SIZE];

/// A 64-bit hash of a page's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub u64);

impl Digest {
    /// The digest of a page of zeros, and of no other page.
    pub const ZERO: Self = Self(0);

    /// 32 bits of the digest, enough to notice a change.
    pub(crate) fn fingerprint(self) -> u32 {
        low_bits(self.0 >> 16, u32::BITS)
    }

    /// Mixes a trust domain into the digest, so that equal contents of two domains differ. Mixing it in again takes it
    /// out. Zeros and domain 0 keep their digests.
    #[must_use]
    pub fn in_domain(self, domain: DomainKey) -> Self {
        if self == Self::ZERO || domain == DomainKey(0) { self } else { Self(self.0 ^ mix(u64::from(domain.0))) }
    }
}

pub type DigestSet = FxHashSet<Digest>;

/// Computes digests: XXH3 with a secret derived from a seed, so that nobody can prepare pages that collide.
///
/// We derive the secret once. Given a seed, XXH3 itself would derive it for every page, which is a fifth of a digest's
/// cost.
#[derive(Clone, Debug)]
pub struct Digester {
    seed: u64,
    secret: [u8; SECRET_BYTES],
}

/// The length of XXH3's default secret, bytes.
const SECRET_BYTES: usize = 192;

impl Digester {
    /// Digests with different seeds can't be compared.
    pub fn new(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        for (word, count) in secret.chunks_exact_mut(8).zip(0..) {
            word.copy_from_slice(&mix(seed.wrapping_add(mix(count))).to_le_bytes());
        }
        Self { seed, secret }
    }

    pub fn digest(&self, page: &PageBytes) -> Digest {
        if is_zero(page) {
            return Digest::ZERO;
        }
        Digest(self.hash(page).max(1))
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        // This fails only if the secret is too short, and ours isn't.
        XxHash3_64::oneshot_with_seed_and_secret(self.seed, &self.secret, bytes).unwrap_or_default()
    }
}

/// The number of cache lines in a page.
pub const LINES: u32 = 64;
const LINE_BYTES: usize = PAGE_SIZE / LINES as usize;

/// Digests pages by some of their cache lines, as the kernel hashes them in place: `struct ksm_hash` in
/// `kernel/include/linux/ksm.h` defines the hash and the order of the lines, which depend on a key.
///
/// Most different contents already differ in a few lines (UKSM section 6). Where we know that different pages have the
/// same hash, we digest pages with that hash by all of their lines. We always do so for the hash of zeros, because
/// barely used memory is zero in most places. So [`Digest::ZERO`] still means a page of zeros.
#[derive(Clone, Debug)]
pub struct LineDigester {
    key: u64,
    lines: u32,
    /// One key for each word of a line.
    keys: [u64; LINE_BYTES / 8],
    /// Line `n` of the order is at `(n * step + first) % LINES`.
    step: u64,
    first: u64,
}

impl LineDigester {
    /// Digests pages by `lines` of their cache lines, 1 to [`LINES`]. Digests with different keys or numbers of lines
    /// can't be compared.
    pub fn new(key: u64, lines: u32) -> Self {
        let order = keyed_word(key, 8);
        let keys = [0, 1, 2, 3, 4, 5, 6, 7].map(|number| keyed_word(key, number));
        Self { key, lines: lines.clamp(1, LINES), keys, step: order | 1, first: order >> 32 }
    }

    pub fn key(&self) -> u64 {
        self.key
    }

    pub fn lines(&self) -> u32 {
        self.lines
    }

    /// The kernel's hash of the first `lines` lines of a page.
    pub fn hash(&self, page: &PageBytes, lines: u32) -> u64 {
        self.hash_lines(lines, |line| {
            let at = line * LINE_BYTES;
            std::array::from_fn(|word| word_of(&page[at + word * 8..][..8]))
        })
    }

    fn hash_lines(&self, lines: u32, words: impl Fn(usize) -> [u64; LINE_BYTES / 8]) -> u64 {
        let mut hash = self.key;
        for number in 0..u64::from(lines.min(LINES)) {
            let line = number.wrapping_mul(self.step).wrapping_add(self.first) % u64::from(LINES);
            let words = words(usize::try_from(line).unwrap_or(0));
            let mut sum = 0_u64;
            for at in [0, 2, 4, 6] {
                sum = sum.wrapping_add(fold(words[at] ^ self.keys[at], words[at + 1] ^ self.keys[at + 1]));
            }
            hash = (hash ^ sum).wrapping_mul(INCREMENT).rotate_left(29);
        }
        hash
    }

    fn hash_of_zeros(&self, lines: u32) -> u64 {
        self.hash_lines(lines, |_| [0; LINE_BYTES / 8])
    }

    /// Digests a run of pages. `change(first, hashes, from, to)` must extend each hash from `from` cache lines to `to`,
    /// starting at page `first`. As in the kernel, a hash of 0 means that a page has none: unless `from` is 0, `change`
    /// must skip such pages. They get no digest. `colliding` are digests that pages with different contents have in
    /// common.
    ///
    /// # Errors
    /// Any error of `change`.
    pub fn digests<E>(
        &self,
        hashes: &mut [u64],
        colliding: &DigestSet,
        mut change: impl FnMut(usize, &mut [u64], u32, u32) -> Result<(), E>,
        mut digest: impl FnMut(usize, Digest),
    ) -> Result<(), E> {
        change(0, hashes, 0, self.lines)?;
        let zeros = self.hash_of_zeros(self.lines);
        let mut first = hashes.len();
        let mut end = 0;
        for (at, hash) in hashes.iter_mut().enumerate().filter(|(_, hash)| **hash != 0) {
            if *hash == zeros || colliding.contains(&Digest(*hash)) {
                first = first.min(at);
                end = at + 1;
            } else {
                digest(at, Digest(std::mem::take(hash)));
            }
        }
        if first < end && self.lines < LINES {
            change(first, &mut hashes[first..end], self.lines, LINES)?;
        }
        let zeros = self.hash_of_zeros(LINES);
        for (at, &hash) in hashes.iter().enumerate().filter(|(_, hash)| **hash != 0) {
            digest(at, if hash == zeros { Digest::ZERO } else { Digest(hash) });
        }
        Ok(())
    }
}

/// A word of randomness from a key.
fn keyed_word(key: u64, number: u64) -> u64 {
    finalize(key.wrapping_add((number + 1).wrapping_mul(INCREMENT)))
}

/// XORs the two halves of the 128-bit product.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    let halves = (product as u64, (product >> 64) as u64);
    halves.0 ^ halves.1
}

/// Whether every byte is zero. In real data, the first cache line is usually not all zero. We look at words: in a
/// program linked for size, looking byte by byte takes 16,000 instructions for a page of zeros, and word by word 800.
pub fn is_zero(page: &PageBytes) -> bool {
    page.chunks_exact(LINE_BYTES).all(|line| line.chunks_exact(8).fold(0, |bits, bytes| bits | word_of(bytes)) == 0)
}

/// The word of eight bytes.
fn word_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_page_of_zeros_has_the_digest_zero() {
        let digester = Digester::new(7);
        let mut page = [0; PAGE_SIZE];
        assert_eq!(digester.digest(&page), Digest::ZERO);
        for at in 0..PAGE_SIZE {
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

    /// A page of bytes that follow no simple pattern.
    fn counting() -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = u8::try_from((at * 7 + at / 256) % 256).unwrap();
        }
        page
    }

    /// Another program computed these values from the definition in the header.
    #[test]
    fn hashes_of_lines_are_those_of_the_definition() {
        let known = [
            (0, [0, 0x171f_563d_d7c9_bd02, 0xa9a1_7b38_c32f_6118, 0x85ea_3912_ab35_8902, 0xbd80_7b1b_dec3_6ddd]),
            (1, [1, 0xe8ed_e3eb_4e0a_3c65, 0x7860_0dcf_fa0e_7300, 0xfe0d_962c_19a6_73e4, 0x3e39_5798_1450_4652]),
            (
                0x0123_4567_89ab_cdef,
                [
                    0x0123_4567_89ab_cdef,
                    0xee2c_dc88_e65e_4ef5,
                    0x41e8_4efc_27d2_3dee,
                    0x2464_e78a_ce52_7b23,
                    0xd146_d076_8686_fa76,
                ],
            ),
        ];
        for (key, hashes) in known {
            let digester = LineDigester::new(key, 4);
            assert_eq!([0, 1, 4, 8, 64].map(|lines| digester.hash(&counting(), lines)), hashes, "{key}");
        }
        assert_eq!(LineDigester::new(1, 4).hash(&[0; PAGE_SIZE], 64), 0xaa82_ff14_9f32_f459);
    }

    #[test]
    fn every_line_counts_once() {
        for key in [0, 7, u64::MAX] {
            let digester = LineDigester::new(key, LINES);
            let mut first_seen = [0; LINES as usize];
            for at in (0..PAGE_SIZE).step_by(LINE_BYTES) {
                let mut page = counting();
                page[at + 17] ^= 1;
                let differs = |&lines: &u32| digester.hash(&page, lines) != digester.hash(&counting(), lines);
                first_seen[at / LINE_BYTES] = (1..=LINES).find(differs).unwrap();
                assert!((first_seen[at / LINE_BYTES]..=LINES).all(|lines| differs(&lines)));
            }
            first_seen.sort_unstable();
            assert!(first_seen.iter().copied().eq(1..=LINES));
        }
    }

    /// The pages' digests, computed with a stand-in for the kernel, and how many hashes by all lines the stand-in
    /// computed.
    fn line_digests(lines: u32, pages: &[Option<PageBytes>]) -> (Vec<Option<Digest>>, u32) {
        let digester = LineDigester::new(7, lines);
        let (mut digests, mut strong) = (vec![None; pages.len()], 0);
        let mut hashes = vec![99; pages.len()];
        let change = |first: usize, hashes: &mut [u64], from: u32, to: u32| {
            for (hash, page) in hashes.iter_mut().zip(&pages[first..]) {
                *hash = match page {
                    Some(page) if from == 0 || *hash != 0 => {
                        strong += u32::from(from > 0);
                        digester.hash(page, to)
                    }
                    _ => 0,
                };
            }
            Ok::<(), ()>(())
        };
        digester.digests(&mut hashes, &DigestSet::default(), change, |at, digest| digests[at] = Some(digest)).unwrap();
        (digests, strong)
    }

    #[test]
    fn pages_of_zeros_are_recognized_whatever_the_number_of_lines() {
        for lines in [1, 4, 8, 63, 64] {
            let mut pages = vec![Some(counting()), None, Some([0; PAGE_SIZE]), Some(counting()), Some([0; PAGE_SIZE])];
            for at in (0..PAGE_SIZE).step_by(LINE_BYTES) {
                let mut page = [0; PAGE_SIZE];
                page[at] = 1;
                pages.push(Some(page));
            }
            let (digests, strong) = line_digests(lines, &pages);
            let found: Vec<usize> = (0..pages.len()).filter(|&at| digests[at] == Some(Digest::ZERO)).collect();
            assert_eq!(found, [2, 4], "{lines}");
            assert!(digests[1].is_none() && digests[0].is_some() && digests[0] == digests[3]);
            let mut sparse: Vec<_> = digests[5..].to_vec();
            sparse.sort_unstable();
            sparse.dedup();
            assert_eq!(sparse.len(), LINES as usize, "pages that are hardly used are told apart");
            // Only pages with zeros in all hashed lines are hashed again.
            assert_eq!(strong, if lines == LINES { 0 } else { 2 + LINES - lines });
        }
    }
}
