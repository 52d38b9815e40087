//! Contents of pages and databases that follow from two numbers.

use pagefold_engine::random::{Random, finalize};
use pagefold_engine::units::PAGE_SIZE;

const WORDS: usize = PAGE_SIZE / 8;

/// Fills a page with content number `number` of sequence `seed`. Contents are incompressible, and different for each
/// pair.
pub fn fill(page: &mut [u8], seed: u64, number: u64) {
    let mut words = Random::new(finalize(finalize(seed).wrapping_add(number)));
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&words.next().to_le_bytes());
    }
}

/// Fills a page with content 0 of sequence `seed`, but replaces the last word by `number`.
pub fn fill_but_tail(page: &mut [u8], seed: u64, number: u64) {
    fill(page, seed, 0);
    if let Some(tail) = page.chunks_exact_mut(8).nth(WORDS - 1) {
        tail.copy_from_slice(&number.to_le_bytes());
    }
}

/// A value of printable characters, like those in databases.
pub fn printable(seed: u64, number: u64, length: usize) -> Vec<u8> {
    let mut words = Random::new(finalize(finalize(seed).wrapping_add(number)));
    let mut value = Vec::with_capacity(length + 8);
    while value.len() < length {
        value.extend(words.next().to_le_bytes().map(|byte| b'0' + byte % 64));
    }
    value.truncate(length);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn contents_are_reproducible_and_differ_by_seed_and_number() {
        let mut seen = HashSet::new();
        for seed in 0..8 {
            for number in 0..8 {
                let mut page = [0; PAGE_SIZE];
                fill(&mut page, seed, number);
                let mut again = [1; PAGE_SIZE];
                fill(&mut again, seed, number);
                assert_eq!(page, again);
                assert!(seen.insert(page), "{seed} {number}");
            }
        }
    }

    #[test]
    fn only_tails_differ() {
        let (mut one, mut other) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        fill_but_tail(&mut one, 5, 1);
        fill_but_tail(&mut other, 5, 2);
        assert_eq!(one[..PAGE_SIZE - 8], other[..PAGE_SIZE - 8]);
        assert_ne!(one, other);
    }

    #[test]
    fn printable_values_have_the_given_length() {
        let value = printable(1, 2, 1001);
        assert_eq!(value.len(), 1001);
        assert!(value.iter().all(|byte| (b'0'..b'0' + 64).contains(byte)));
        assert_ne!(value, printable(1, 3, 1001));
    }
}
