//! Hashes of part of a page whose strength we can change later (UKSM section 6.2).
//!
//! A few words are enough to tell most pages apart. The strength is the number of words hashed, in a random order that
//! is the same for all pages. Given the page, we can convert a hash to another strength at a cost in proportion to the
//! difference. Only hashes of the same strength are comparable.
//!
//! [`WordHash`] is the paper's. [`LineHash`] is ours: it hashes whole cache lines, since fetching a word costs as much
//! as fetching its line, and has 64 bits instead of 32, so that millions of contents don't collide by chance.

use pagefold_engine::hash::{Digest, PageBytes, is_zero};
use pagefold_engine::permutation::Permutation;
use pagefold_engine::random::{INCREMENT, mix, unmix};
use pagefold_engine::units::PAGE_SIZE;
use std::fmt::Debug;

/// A hash whose strength we can increase and decrease step by step.
pub trait PartialHash {
    /// The hash value. The default is a hash of strength 0.
    type State: Copy + Debug + Default + Eq + Into<u64>;

    /// The strength that hashes the whole page. We treat higher ones as this.
    const FULL: u32;

    /// Increases the strength of a page's hash from `from` to `to`, which mustn't be lower.
    fn forward(&self, page: &PageBytes, state: Self::State, from: u32, to: u32) -> Self::State;

    /// Decreases the strength of a page's hash from `from` to `to`, which mustn't be higher.
    fn backward(&self, page: &PageBytes, state: Self::State, from: u32, to: u32) -> Self::State;

    /// Changes the strength of a page's hash from `from` to `to`.
    fn change(&self, page: &PageBytes, state: Self::State, from: u32, to: u32) -> Self::State {
        if from <= to { self.forward(page, state, from, to) } else { self.backward(page, state, from, to) }
    }

    fn hash(&self, page: &PageBytes, strength: u32) -> Self::State {
        self.forward(page, Self::State::default(), 0, strength)
    }
}

/// The paper's hash: 32-bit words, derived from Jenkins's one-at-a-time hash (figures 5 and 7). Strength in words.
///
/// An attacker can construct collisions: only the order of the words is secret, and at full strength even the secret
/// order protects little. A page of zeros has hash 0 at any strength, but so may other pages.
#[derive(Clone, Debug)]
pub struct WordHash {
    order: Box<[u16; WordHash::WORDS]>,
}

/// The shifts that the paper chose among all pairs, for their avalanche and the cost of decreasing the strength.
const PAPER_SHIFTS: Shifts = Shifts { left: 19, right: 16 };

/// shiftl and shiftr in the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shifts {
    left: u32,
    right: u32,
}

impl Shifts {
    /// One iteration of the loop of figure 5.
    #[inline]
    fn add(self, hash: u32, word: u32) -> u32 {
        let hash = hash.wrapping_add(word);
        let hash = hash.wrapping_add(hash << self.left);
        hash ^ hash >> self.right
    }

    /// Undoes [`Self::add`], by the functions of figure 7.
    #[inline]
    fn remove(self, hash: u32, word: u32) -> u32 {
        self.reverse_add(self.reverse_xor(hash)).wrapping_sub(word)
    }

    #[inline]
    fn reverse_add(self, hash: u32) -> u32 {
        // The series n - (n << s) + (n << 2s) - ... ends once all bits are shifted out.
        let mut sum = hash;
        let mut term = hash << self.left;
        let mut minus = true;
        while term != 0 {
            sum = if minus { sum.wrapping_sub(term) } else { sum.wrapping_add(term) };
            minus = !minus;
            term <<= self.left;
        }
        sum
    }

    #[inline]
    fn reverse_xor(self, hash: u32) -> u32 {
        let mut sum = hash;
        let mut term = hash >> self.right;
        while term != 0 {
            sum ^= term;
            term >>= self.right;
        }
        sum
    }
}

impl WordHash {
    const WORDS: usize = PAGE_SIZE / 4;

    /// A hash with the word order given by `seed`.
    pub fn new(seed: u64) -> Self {
        let order = Permutation::new(Self::WORDS as u64, seed);
        let mut places = Box::new([0; Self::WORDS]);
        for (place, index) in places.iter_mut().zip(0..) {
            *place = u16::try_from(order.at(index)).unwrap_or_default();
        }
        Self { order: places }
    }

    /// The words between two strengths, in hash order.
    #[inline]
    fn words<'a>(&'a self, page: &'a PageBytes, from: u32, to: u32) -> impl DoubleEndedIterator<Item = u32> + 'a {
        let [from, to] = [from, to].map(|strength| strength.min(Self::FULL) as usize);
        self.order[from.min(to)..to].iter().map(|&place| {
            let at = usize::from(place) % Self::WORDS * 4;
            u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
        })
    }
}

impl PartialHash for WordHash {
    type State = u32;
    const FULL: u32 = 1024;

    fn forward(&self, page: &PageBytes, state: u32, from: u32, to: u32) -> u32 {
        self.words(page, from, to).fold(state, |hash, word| PAPER_SHIFTS.add(hash, word))
    }

    fn backward(&self, page: &PageBytes, state: u32, from: u32, to: u32) -> u32 {
        self.words(page, to, from).rev().fold(state, |hash, word| PAPER_SHIFTS.remove(hash, word))
    }
}

/// Our hash: cache lines of 64 bytes. Strength in lines.
///
/// We condense each line to 64 bits with its own keys: add a key to each word, multiply the words in pairs, add the
/// products in 128 bits (NH, from UMAC: Black et al., CRYPTO 1999), and fold the sum by one more multiplication. The
/// hash is the sum of the condensed lines. A sum doesn't depend on the order: the processor can handle lines
/// independently, we read them in ascending order of address, and to remove a line we subtract. Nobody can construct
/// collisions without the seed.
#[derive(Clone, Debug)]
pub struct LineHash {
    /// The lines hashed at each strength: bit n of entry s for line n.
    masks: [u64; LineHash::COUNT + 1],
    /// The sum of a page of zeros at each strength.
    zeros: [u64; LineHash::COUNT + 1],
    keys: Box<[[u64; LINE_WORDS]; LineHash::COUNT]>,
    fold: u64,
}

const LINE_BYTES: usize = 64;
const LINE_WORDS: usize = LINE_BYTES / 8;

impl LineHash {
    const COUNT: usize = PAGE_SIZE / LINE_BYTES;

    /// A hash with the keys given by `seed`. Digests of different seeds are unrelated.
    pub fn new(seed: u64) -> Self {
        let mut key = mix(seed);
        let mut next_key = || {
            key = key.wrapping_add(INCREMENT);
            mix(key ^ seed.rotate_left(32))
        };
        let mut keys = Box::new([[0; LINE_WORDS]; Self::COUNT]);
        keys.as_flattened_mut().fill_with(&mut next_key);
        let fold = next_key() | 1;
        let order = Permutation::new(Self::COUNT as u64, next_key());
        let mut masks = [0; Self::COUNT + 1];
        for strength in 1..=Self::COUNT {
            masks[strength] = masks[strength - 1] | 1 << order.at(strength as u64 - 1);
        }
        let mut lines = Self { masks, zeros: [0; Self::COUNT + 1], keys, fold };
        lines.zeros = masks.map(|mask| lines.sum(&[0; PAGE_SIZE], mask));
        lines
    }

    /// Digests a page at a strength. Recognizes pages of zeros at any strength.
    pub fn digest(&self, page: &PageBytes, strength: u32) -> Digest {
        let strength = (strength as usize).min(Self::COUNT);
        let sum = self.sum(page, self.masks[strength]);
        // Only now do we have to read the rest of the page.
        if sum == self.zeros[strength] && is_zero(page) {
            return Digest::ZERO;
        }
        Digest(mix(sum).max(1))
    }

    /// Converts the digest of a page from strength `from` to `to`.
    ///
    /// One hash in 2^64 has digest 1 instead of 0, so we convert it incorrectly.
    pub fn redigest(&self, page: &PageBytes, digest: Digest, from: u32, to: u32) -> Digest {
        if digest == Digest::ZERO {
            return digest;
        }
        Digest(mix(self.change(page, unmix(digest.0), from, to)).max(1))
    }

    fn mask(&self, strength: u32) -> u64 {
        self.masks[(strength as usize).min(Self::COUNT)]
    }

    #[inline]
    fn line(page: &PageBytes, line: usize) -> [u64; LINE_WORDS] {
        let at = line % Self::COUNT * LINE_BYTES;
        std::array::from_fn(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&page[at + word * 8..][..8]);
            u64::from_le_bytes(bytes)
        })
    }

    #[inline]
    fn condense(&self, page: &PageBytes, line: usize) -> u64 {
        let words = Self::line(page, line);
        let keys = &self.keys[line % Self::COUNT];
        let mut sum = 0_u128;
        for at in [0, 2, 4, 6] {
            let a = u128::from(words[at].wrapping_add(keys[at]));
            let b = u128::from(words[at + 1].wrapping_add(keys[at + 1]));
            sum = sum.wrapping_add(a.wrapping_mul(b));
        }
        #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
        let low = sum as u64;
        low.wrapping_mul(self.fold) ^ (sum >> 64) as u64
    }

    /// The sum of the condensed lines of a mask.
    #[inline]
    fn sum(&self, page: &PageBytes, mut mask: u64) -> u64 {
        let mut sum = 0_u64;
        if mask == u64::MAX {
            for line in 0..Self::COUNT {
                sum = sum.wrapping_add(self.condense(page, line));
            }
            return sum;
        }
        while mask != 0 {
            sum = sum.wrapping_add(self.condense(page, mask.trailing_zeros() as usize));
            mask &= mask - 1;
        }
        sum
    }
}

impl PartialHash for LineHash {
    type State = u64;
    const FULL: u32 = 64;

    fn forward(&self, page: &PageBytes, state: u64, from: u32, to: u32) -> u64 {
        state.wrapping_add(self.sum(page, self.mask(to) & !self.mask(from)))
    }

    fn backward(&self, page: &PageBytes, state: u64, from: u32, to: u32) -> u64 {
        state.wrapping_sub(self.sum(page, self.mask(from) & !self.mask(to)))
    }
}

#[cfg(test)]
#[path = "progressive_tests.rs"]
mod tests;
