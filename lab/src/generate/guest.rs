//! A guest's memory as its kernel manages it: free list, page cache, slabs.

use super::body::Body;
use super::host_memory::{HostMemory, Memory};
use crate::record::PARTS;
use pagefold_engine::random::{Random, finalize};
use pagefold_engine::units::{Pages, Permyriad};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;

/// For each kind of kernel object, the parts of its pages that the kernel writes repeatedly: counters, list heads and
/// times are at fixed offsets in an object, and most objects in use share a page with idle ones.
const WRITTEN: [&[usize]; 6] = [&[0], &[1], &[3], &[0, 1], &[0, 2], &[2, 3]];

/// A steady rate of events.
#[derive(Debug)]
pub struct Rate {
    per_second: Permyriad,
    /// The fraction of the next page that is due, in units of 1/10,000,000,000,000.
    part: u128,
}

impl Rate {
    /// A rate in pages per second, as a share of the guest's memory.
    pub const fn new(per_second: u32) -> Self {
        Self { per_second: Permyriad(per_second), part: 0 }
    }

    /// The number of pages due in `ns` nanoseconds.
    pub fn due(&mut self, of: Pages, ns: u64) -> usize {
        const WHOLE: u128 = 10_000 * 1_000_000_000;
        self.part += u128::from(of.0) * u128::from(self.per_second.0) * u128::from(ns);
        let due = self.part / WHOLE;
        self.part %= WHOLE;
        usize::try_from(due).unwrap_or(usize::MAX)
    }
}

/// A file with the same content in all guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    series: u64,
    number: u64,
    pages: usize,
    /// Parts in use in the last page. The others are zeros.
    last_parts: usize,
}

impl File {
    /// A file of a series with this mean length.
    pub fn new(series: u64, number: u64, mean_pages: usize) -> Self {
        let chance = usize::try_from(finalize(finalize(series) ^ number) >> 16).unwrap_or(0);
        // The length is from 1 to 2 m - 1 pages.
        Self { series, number, pages: 1 + chance % (2 * mean_pages - 1), last_parts: 1 + (chance >> 32) % PARTS }
    }

    /// One page of a growing file.
    pub fn growing(series: u64) -> Self {
        Self { series, number: 0, pages: 1, last_parts: PARTS }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    fn body(&self, page: usize) -> Body {
        let body = Body::named(self.series, self.number, page as u64);
        if page + 1 == self.pages { body.ending(self.last_parts) } else { body }
    }
}

#[derive(Debug)]
pub struct Guest {
    pub memory: Memory,
    /// Random numbers specific to the guest.
    pub random: Random,
    /// Free pages, used from the end: last freed, first used, as in the kernel's lists.
    free: Vec<usize>,
    /// The page cache, oldest file first.
    cache: VecDeque<(File, Vec<usize>)>,
    cached: FxHashSet<(u64, u64)>,
    /// Pages of kernel objects with the parts that are written.
    slab: Vec<(usize, &'static [usize])>,
}

impl Guest {
    pub fn new(machine: &HostMemory, size: Pages, seed: u64, number: u64) -> Self {
        let memory = Memory::new(machine, size);
        let free = (0..usize::try_from(size.0).unwrap_or(usize::MAX)).rev().collect();
        let random = Random::for_purpose(seed, finalize(number));
        Self { memory, random, free, cache: VecDeque::new(), cached: FxHashSet::default(), slab: Vec::new() }
    }

    /// A share of the guest's memory, in pages.
    pub fn share(&self, share: Permyriad) -> usize {
        usize::try_from(self.memory.size().0 * u64::from(share.0) / 10_000).unwrap_or(usize::MAX)
    }

    /// Takes a page, if necessary from the oldest file in the page cache. The page keeps its old content.
    pub fn take(&mut self) -> Option<usize> {
        if self.free.is_empty() {
            let (file, pages) = self.cache.pop_front()?;
            self.cached.remove(&(file.series, file.number));
            self.free.extend(pages.into_iter().rev());
        }
        self.free.pop()
    }

    /// Frees pages without clearing them.
    pub fn free(&mut self, pages: impl IntoIterator<Item = usize>) {
        self.free.extend(pages);
    }

    /// Takes a page of zeros, as programs do.
    pub fn take_zeros(&mut self, machine: &mut HostMemory) -> Option<usize> {
        let page = self.take()?;
        self.memory.write(machine, page, Body::ZEROS);
        Some(page)
    }

    /// Reads a file into pages outside the page cache.
    pub fn map(&mut self, machine: &mut HostMemory, file: &File) -> Vec<usize> {
        let mut pages = Vec::with_capacity(file.pages);
        for at in 0..file.pages {
            let Some(page) = self.take() else { break };
            self.memory.write(machine, page, file.body(at));
            pages.push(page);
        }
        pages
    }

    /// Adds the pages of a file to the page cache.
    pub fn cache(&mut self, file: File, pages: Vec<usize>) {
        self.cached.insert((file.series, file.number));
        self.cache.push_back((file, pages));
    }

    /// Reads a file into the page cache, unless it's already there.
    pub fn read(&mut self, machine: &mut HostMemory, file: File) {
        if !self.has(&file) {
            let pages = self.map(machine, &file);
            self.cache(file, pages);
        }
    }

    /// Whether a file is in the page cache.
    pub fn has(&self, file: &File) -> bool {
        self.cached.contains(&(file.series, file.number))
    }

    /// Fills pages with content specific to the guest: kernel tables, heaps full of pointers.
    pub fn fill_own(&mut self, machine: &mut HostMemory, pages: usize) {
        for _ in 0..pages {
            let Some(page) = self.take() else { break };
            let body = machine.unique_body();
            self.memory.write(machine, page, body);
        }
    }

    /// Fills pages with kernel objects of one kind.
    pub fn fill_slab(&mut self, machine: &mut HostMemory, pages: usize) {
        let kind = self.random.below(WRITTEN.len() as u64);
        let written = WRITTEN[usize::try_from(kind).unwrap_or(0)];
        for _ in 0..pages {
            let Some(page) = self.take() else { break };
            let body = machine.unique_body();
            self.memory.write(machine, page, body);
            self.slab.push((page, written));
        }
    }

    pub fn fill_zeros(&mut self, machine: &mut HostMemory, pages: usize) {
        for _ in 0..pages {
            self.take_zeros(machine);
        }
    }

    /// Takes pages of zeros until there are `wanted`.
    pub fn take_up_to(&mut self, machine: &mut HostMemory, pages: &mut Vec<usize>, wanted: u64) {
        let more = usize::try_from(wanted).unwrap_or(usize::MAX).saturating_sub(pages.len());
        pages.extend((0..more).map_while(|_| self.take_zeros(machine)));
    }

    /// Writes content specific to the guest to a part of a page.
    pub fn write_unique(&mut self, machine: &mut HostMemory, page: usize, part: usize) {
        let content = machine.unique();
        self.memory.write_part(machine, page, part, content);
    }

    /// Writes kernel objects `times` times, half of them in a tenth of the pages.
    pub fn write_slab(&mut self, machine: &mut HostMemory, times: usize) {
        let pages = self.slab.len() as u64;
        if pages == 0 {
            return;
        }
        for _ in 0..times {
            let among = if self.random.chance(Permyriad(5_000)) { pages.div_ceil(10) } else { pages };
            let at = self.below(among);
            let (page, written) = self.slab[at];
            for &part in written {
                self.write_unique(machine, page, part);
            }
        }
    }

    /// A random number below `bound`, which mustn't be 0.
    pub fn below(&mut self, bound: u64) -> usize {
        usize::try_from(self.random.below(bound)).unwrap_or(0)
    }
}

/// The growing memory of a program, which gets cleared pages and writes them when it runs again.
#[derive(Debug, Default)]
pub struct Heap {
    pages: Vec<usize>,
    written: usize,
}

impl Heap {
    /// Writes the pages allocated before and allocates more, up to `pages` in all.
    pub fn grow(
        &mut self,
        guest: &mut Guest,
        machine: &mut HostMemory,
        pages: usize,
        mut body: impl FnMut(&mut HostMemory, usize) -> Body,
    ) {
        for (at, &page) in self.pages.iter().enumerate().skip(self.written) {
            let body = body(machine, at);
            guest.memory.write(machine, page, body);
        }
        self.written = self.pages.len();
        let more = pages.saturating_sub(self.pages.len());
        self.pages.extend((0..more).map_while(|_| guest.take_zeros(machine)));
    }

    pub fn end(&mut self, guest: &mut Guest) {
        guest.free(self.pages.drain(..));
        self.written = 0;
    }

    pub fn pages(&self) -> &[usize] {
        &self.pages
    }
}
