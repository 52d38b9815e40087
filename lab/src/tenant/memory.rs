//! Memory that we fill as a [`Segment`] says.

use super::Segment;
use crate::contents::fill;
use crate::contents::fill_but_tail;
use anyhow::Context;
use memmap2::{Advice, MmapMut};
use pagefold_engine::random::finalize;
use pagefold_engine::units::PAGE_SIZE;
use std::time::{Duration, Instant};

/// Neighbours in permuted memory are this many pages apart in `Shared`. A prime, so we reach all pages of a segment
/// unless it divides their number.
const STRIDE: u64 = 7919;

/// Coprime to a hundred, so multiplying a page's number by it spreads the pages with the common content.
const SPREAD: u64 = 37;

/// Bytes of a cache line, and lines of a page.
const LINE: usize = 64;
const LINES: usize = PAGE_SIZE / LINE;

pub struct FilledSegment {
    segment: Segment,
    memory: MmapMut,
    length: usize,
}

impl FilledSegment {
    /// Maps and fills a segment, with huge pages if `huge` and the kernel has them.
    pub fn new(segment: Segment, huge: bool) -> anyhow::Result<Self> {
        let length =
            usize::try_from(segment.pages().0)?.checked_mul(PAGE_SIZE).context("a segment that is too long")?;
        let memory = MmapMut::map_anon(length).context("a segment's memory")?;
        if huge {
            memory.advise(Advice::HugePage).context("MADV_HUGEPAGE")?;
        }
        let mut filled = Self { segment, memory, length };
        for (page, number) in filled.pages_mut().chunks_exact_mut(PAGE_SIZE).zip(0..) {
            write(segment, page, number);
        }
        Ok(filled)
    }

    fn pages(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    pub fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.length]
    }

    /// The number of pages whose content differs from the one we wrote.
    pub fn damaged(&self) -> u64 {
        let mut wanted = [0; PAGE_SIZE];
        let mut damaged = 0;
        for (page, number) in self.pages().chunks_exact(PAGE_SIZE).zip(0..) {
            write(self.segment, &mut wanted, number);
            damaged += u64::from(*page != wanted);
        }
        damaged
    }

    pub fn first_words(&self) -> impl Iterator<Item = u64> {
        self.pages().chunks_exact(PAGE_SIZE).map(first_word)
    }

    /// Reads one word after the other for a time. Each word's page depends on the word before, so no processor can read
    /// ahead. In each page we always read the same cache line, so we wait for the page's address more than for its
    /// contents. Returns nanoseconds per read.
    pub fn chase(&self, time: Duration) -> f64 {
        const BATCH: u64 = 1024;
        let pages = (self.length / PAGE_SIZE).max(1) as u64;
        let began = Instant::now();
        let mut page = 0;
        let mut reads = 0;
        while began.elapsed() < time {
            for number in reads..reads + BATCH {
                let at = page * PAGE_SIZE + page % LINES * LINE;
                let word = first_word(&self.pages()[at..]);
                page = usize::try_from(finalize(word ^ number) % pages).unwrap_or(0);
            }
            reads += BATCH;
        }
        std::hint::black_box(page);
        began.elapsed().as_secs_f64() * 1e9 / reads.max(1) as f64
    }

    /// Writes page `number` again and returns the number of the next one.
    pub fn rewrite_page(&mut self, number: usize) -> usize {
        let segment = self.segment;
        if let Some(page) = self.pages_mut().chunks_exact_mut(PAGE_SIZE).nth(number) {
            write(segment, page, number as u64);
        }
        if (number + 1) * PAGE_SIZE < self.length { number + 1 } else { 0 }
    }

    /// Writes to every page without changing it, which undoes every merge.
    pub fn rewrite(&mut self) {
        for page in self.pages_mut().chunks_exact_mut(PAGE_SIZE) {
            // Without black_box the compiler could optimize away storing the value that we've just read.
            page[0] = std::hint::black_box(page[0]);
        }
    }
}

fn first_word(page: &[u8]) -> u64 {
    u64::from_le_bytes(page.first_chunk().copied().unwrap_or_default())
}

fn write(segment: Segment, page: &mut [u8], number: u64) {
    // Each kind has sequences of its own, so equal seeds of two kinds make no duplicates.
    match segment {
        Segment::Same { seed, .. } => fill(page, finalize(seed) ^ 1, 0),
        Segment::Thin { seed, percent, .. } if number * SPREAD % 100 < percent => fill(page, finalize(seed) ^ 1, 0),
        Segment::Random { seed, .. } | Segment::Thin { seed, .. } => {
            fill(page, finalize(finalize(seed) ^ u64::from(std::process::id())) ^ 2, number);
        }
        Segment::Zero { .. } => std::hint::black_box(page).fill(0),
        Segment::Shared { seed, .. } => fill(page, finalize(seed) ^ 3, number),
        Segment::Permuted { seed, pages } => fill(page, finalize(seed) ^ 3, number * STRIDE % pages),
        Segment::Pairs { seed, pages } => fill(page, finalize(seed) ^ 4, number % (pages / 2).max(1)),
        Segment::Tails { seed, .. } => fill_but_tail(page, finalize(seed) ^ 5, number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn copies(filled: &[&FilledSegment]) -> HashMap<Vec<u8>, usize> {
        let mut copies = HashMap::new();
        for page in filled.iter().flat_map(|filled| filled.pages().chunks_exact(PAGE_SIZE)) {
            *copies.entry(page.to_vec()).or_insert(0) += 1;
        }
        copies
    }

    #[test]
    fn segments_hold_the_contents_their_kind_promises() {
        let make = |segment| FilledSegment::new(segment, false).unwrap();
        let same = make(Segment::Same { pages: 8, seed: 7 });
        assert_eq!(copies(&[&same]).len(), 1);
        assert!(same.pages().iter().any(|&byte| byte != 0));
        assert_eq!(same.pages().as_ptr().align_offset(PAGE_SIZE), 0);
        let pairs = make(Segment::Pairs { pages: 8, seed: 7 });
        assert!(copies(&[&pairs]).values().all(|&count| count == 2));
        let (shared, copy) = (make(Segment::Shared { pages: 8, seed: 7 }), make(Segment::Shared { pages: 8, seed: 7 }));
        assert_eq!(copies(&[&shared]).len(), 8);
        assert!(copies(&[&shared, &copy]).values().all(|&count| count == 2));
        let (random, tails) = (make(Segment::Random { pages: 8, seed: 7 }), make(Segment::Tails { pages: 8, seed: 7 }));
        assert_eq!(copies(&[&random, &tails, &shared, &same, &pairs]).len(), 8 + 8 + 8 + 1 + 4);
        let permuted = make(Segment::Permuted { pages: 8, seed: 7 });
        assert!(copies(&[&shared, &permuted]).values().all(|&count| count == 2));
        assert_ne!(shared.pages()[PAGE_SIZE..], permuted.pages()[PAGE_SIZE..]);
        let thin = make(Segment::Thin { pages: 200, seed: 7, percent: 8 });
        assert_eq!(copies(&[&thin]).len(), 200 - 16 + 1);
        assert!(make(Segment::Zero { pages: 3 }).pages().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_chase_reads_for_its_time() {
        let filled = FilledSegment::new(Segment::Random { pages: 64, seed: 1 }, true).unwrap();
        let began = Instant::now();
        let ns = filled.chase(Duration::from_millis(20));
        assert!(began.elapsed() >= Duration::from_millis(20) && (0.1..1e6).contains(&ns), "{ns}");
    }

    #[test]
    fn damage_is_counted_by_page_and_rewriting_is_not_damage() {
        let mut filled = FilledSegment::new(Segment::Random { pages: 5, seed: 1 }, false).unwrap();
        filled.rewrite();
        assert_eq!(filled.damaged(), 0);
        filled.pages_mut()[3 * PAGE_SIZE - 1] ^= 0x80;
        filled.pages_mut()[4 * PAGE_SIZE] ^= 1;
        assert_eq!(filled.damaged(), 2);
    }
}
