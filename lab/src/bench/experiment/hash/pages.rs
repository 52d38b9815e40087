//! The sets of pages to hash.

use crate::contents::{fill, fill_but_tail, printable};
use pagefold_engine::hash::PageBytes;
use pagefold_engine::random::finalize;
use pagefold_engine::units::PAGE_SIZE;

/// A page at an aligned address, so its cache lines are the processor's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[repr(C, align(4096))]
pub struct TestPage(pub PageBytes);

impl TestPage {
    pub const ZERO: Self = Self([0; PAGE_SIZE]);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSet {
    /// No two pages have the same word at the same offset.
    Random,
    /// Equal except for one word, at a different offset in each page.
    OneWord,
    /// Equal except for the last eight bytes.
    Tails,
    /// All equal.
    Identical,
    /// A fifth each: text records padded with zeros; zeros; copies of ten pages with 5 % of the bytes changed;
    /// unchanged copies; random pages.
    Mix,
}

impl PageSet {
    pub const ALL: [Self; 5] = [Self::Random, Self::OneWord, Self::Tails, Self::Identical, Self::Mix];

    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::OneWord => "one-word",
            Self::Tails => "tails",
            Self::Identical => "identical",
            Self::Mix => "mix",
        }
    }

    pub fn fill(self, pages: &mut [TestPage]) {
        for (TestPage(page), number) in pages.iter_mut().zip(0..) {
            match self {
                Self::Random => fill(page, 1, number),
                Self::OneWord => {
                    fill(page, 2, 0);
                    let at = offset(number) / 4 * 4;
                    // Differs from the original word, and in each page.
                    page[at..at + 4].copy_from_slice(&u32::try_from(number).unwrap_or_default().to_le_bytes());
                }
                Self::Tails => fill_but_tail(page, 3, number),
                Self::Identical => fill(page, 4, 0),
                Self::Mix => fill_mixed(page, number),
            }
        }
    }
}

/// A pseudo-random offset in a page.
fn offset(number: u64) -> usize {
    usize::try_from(finalize(number ^ 0x5eed) % PAGE_SIZE as u64).unwrap_or_default()
}

fn fill_mixed(page: &mut PageBytes, number: u64) {
    match finalize(number) % 5 {
        0 => {
            // Records of 512 bytes: a common header, a key, a value of variable length, zeros.
            page.fill(0);
            for (record, nth) in page.chunks_exact_mut(512).zip(0..) {
                let key = number * 8 + nth;
                let length = 32 + usize::try_from(finalize(key) % 320).unwrap_or_default();
                record[..16].copy_from_slice(b"record\0\x01\0\0\0\0utf8");
                record[16..24].copy_from_slice(&key.to_le_bytes());
                record[24..24 + length].copy_from_slice(&printable(5, key, length));
            }
        }
        1 => page.fill(0),
        2 => {
            fill(page, 6, number % 10);
            for change in 0..PAGE_SIZE as u64 / 20 {
                page[offset(number << 16 | change)] = 0xa5;
            }
        }
        3 => fill(page, 7, finalize(number) / 5 % 3000),
        _ => fill(page, 8, number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn pages(set: PageSet) -> Vec<TestPage> {
        let mut pages = vec![TestPage::ZERO; 500];
        set.fill(&mut pages);
        pages
    }

    #[test]
    fn sets_have_the_expected_number_of_distinct_pages() {
        let distinct = |set| pages(set).into_iter().collect::<HashSet<_>>().len();
        assert_eq!([PageSet::Random, PageSet::OneWord, PageSet::Tails].map(distinct), [500; 3]);
        assert_eq!(distinct(PageSet::Identical), 1);
        assert!((300..500).contains(&distinct(PageSet::Mix)), "{}", distinct(PageSet::Mix));
    }

    #[test]
    fn one_word_differs_at_different_offsets() {
        let pages = pages(PageSet::OneWord);
        let places: HashSet<Vec<usize>> = pages
            .windows(2)
            .map(|pair| (0..1024).filter(|word| pair[0].0[word * 4..][..4] != pair[1].0[word * 4..][..4]).collect())
            .collect();
        assert!(places.iter().all(|place| (1..=2).contains(&place.len())));
        assert!(places.len() > 450);
    }
}
