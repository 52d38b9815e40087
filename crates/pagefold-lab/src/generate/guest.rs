//! A guest's memory, as its kernel hands it out: a free list, a page cache, slabs.

use super::body::Body;
use super::host_memory::{HostMemory, Memory};
use crate::record::PARTS;
use pagefold_core::random::{Random, finalize};
use pagefold_core::units::{Pages, Permyriad};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;

/// The parts of their pages that some kinds of kernel objects are written in, over and over again: counters, list heads
/// and times are at fixed places in an object, and most objects in use share a page with others that are not.
const WRITTEN: [&[usize]; 6] = [&[0], &[1], &[3], &[0, 1], &[0, 2], &[2, 3]];

/// Something that happens at a steady rate.
#[derive(Debug)]
pub struct Rate {
    per_second: Permyriad,
    /// What has come due of the next page, in parts of 10,000,000,000,000.
    part: u128,
}

impl Rate {
    /// Pages in a second, as a share of the guest's memory.
    pub const fn new(per_second: u32) -> Self {
        Self { per_second: Permyriad(per_second), part: 0 }
    }

    /// How many pages come due in a time.
    pub fn due(&mut self, of: Pages, ns: u64) -> usize {
        const WHOLE: u128 = 10_000 * 1_000_000_000;
        self.part += u128::from(of.0) * u128::from(self.per_second.0) * u128::from(ns);
        let due = self.part / WHOLE;
        self.part %= WHOLE;
        usize::try_from(due).unwrap_or(usize::MAX)
    }
}

/// A file, the same in whatever guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    series: u64,
    number: u64,
    pages: usize,
    /// How much of its last page it fills. The rest is zeros.
    last_parts: usize,
}

impl File {
    /// A file out of a series of files that are as long on average.
    pub fn new(series: u64, number: u64, mean_pages: usize) -> Self {
        let chance = usize::try_from(finalize(finalize(series) ^ number) >> 16).unwrap_or(0);
        // From 1 to 2 m - 1 pages.
        Self { series, number, pages: 1 + chance % (2 * mean_pages - 1), last_parts: 1 + (chance >> 32) % PARTS }
    }

    /// A page of a file that grows, in whatever series.
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

/// A guest.
#[derive(Debug)]
pub struct Guest {
    pub memory: Memory,
    /// What is decided in it alone.
    pub chance: Random,
    /// Handed out from the end: what was freed last is used first, as from the kernel's lists.
    free: Vec<usize>,
    /// The page cache, oldest first: whose file, and the pages.
    cache: VecDeque<(File, Vec<usize>)>,
    cached: FxHashSet<(u64, u64)>,
    /// Pages of kernel objects, with the parts that are written.
    slab: Vec<(usize, &'static [usize])>,
}

impl Guest {
    /// A guest that has not touched anything.
    pub fn new(machine: &HostMemory, size: Pages, seed: u64, number: u64) -> Self {
        let memory = Memory::new(machine, size);
        let free = (0..usize::try_from(size.0).unwrap_or(usize::MAX)).rev().collect();
        let chance = Random::for_purpose(seed, finalize(number));
        Self { memory, chance, free, cache: VecDeque::new(), cached: FxHashSet::default(), slab: Vec::new() }
    }

    /// So much of its memory.
    pub fn share(&self, share: Permyriad) -> usize {
        usize::try_from(self.memory.size().0 * u64::from(share.0) / 10_000).unwrap_or(usize::MAX)
    }

    /// A page to use, if need be of the oldest file in the page cache. It holds what it held last.
    pub fn take(&mut self) -> Option<usize> {
        if self.free.is_empty() {
            let (file, pages) = self.cache.pop_front()?;
            self.cached.remove(&(file.series, file.number));
            self.free.extend(pages.into_iter().rev());
        }
        self.free.pop()
    }

    /// Frees pages. Nobody clears them.
    pub fn free(&mut self, pages: impl IntoIterator<Item = usize>) {
        self.free.extend(pages);
    }

    /// A page of zeros, as a program gets it.
    pub fn take_zeros(&mut self, machine: &mut HostMemory) -> Option<usize> {
        let page = self.take()?;
        self.memory.write(machine, page, Body::ZEROS);
        Some(page)
    }

    /// Reads a file into memory that is not to be taken back.
    pub fn map(&mut self, machine: &mut HostMemory, file: &File) -> Vec<usize> {
        let mut pages = Vec::with_capacity(file.pages);
        for at in 0..file.pages {
            let Some(page) = self.take() else { break };
            self.memory.write(machine, page, file.body(at));
            pages.push(page);
        }
        pages
    }

    /// Has pages that hold a file's contents kept until their room is needed.
    pub fn cache(&mut self, file: File, pages: Vec<usize>) {
        self.cached.insert((file.series, file.number));
        self.cache.push_back((file, pages));
    }

    /// Reads a file into the page cache, unless it is there.
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

    /// Takes pages that hold something of its own: kernel tables, heaps full of pointers.
    pub fn fill_own(&mut self, machine: &mut HostMemory, pages: usize) {
        for _ in 0..pages {
            let Some(page) = self.take() else { break };
            let body = machine.unique_body();
            self.memory.write(machine, page, body);
        }
    }

    /// Takes pages for kernel objects of one kind.
    pub fn fill_slab(&mut self, machine: &mut HostMemory, pages: usize) {
        let kind = self.chance.below(WRITTEN.len() as u64);
        let written = WRITTEN[usize::try_from(kind).unwrap_or(0)];
        for _ in 0..pages {
            let Some(page) = self.take() else { break };
            let body = machine.unique_body();
            self.memory.write(machine, page, body);
            self.slab.push((page, written));
        }
    }

    /// Takes pages and leaves them cleared.
    pub fn fill_zeros(&mut self, machine: &mut HostMemory, pages: usize) {
        for _ in 0..pages {
            self.take_zeros(machine);
        }
    }

    /// Writes so many kernel objects, half of the time in a tenth of the pages.
    pub fn write_slab(&mut self, machine: &mut HostMemory, times: usize) {
        let pages = self.slab.len() as u64;
        if pages == 0 {
            return;
        }
        for _ in 0..times {
            let among = if self.chance.chance(Permyriad(5_000)) { pages.div_ceil(10) } else { pages };
            let at = self.below(among);
            let (page, written) = self.slab[at];
            for &part in written {
                let content = machine.unique();
                self.memory.write_part(machine, page, part, content);
            }
        }
    }

    /// A number below another, which must not be 0.
    pub fn below(&mut self, bound: u64) -> usize {
        usize::try_from(self.chance.below(bound)).unwrap_or(0)
    }
}

/// A program's own memory as it grows: pages come cleared, and are written when the program runs again.
#[derive(Debug, Default)]
pub struct Heap {
    pages: Vec<usize>,
    written: usize,
}

impl Heap {
    /// Runs: fills what there is and gets more, up to so many pages.
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

    /// Ends, and frees everything.
    pub fn end(&mut self, guest: &mut Guest) {
        guest.free(self.pages.drain(..));
        self.written = 0;
    }

    /// Its pages.
    pub fn pages(&self) -> &[usize] {
        &self.pages
    }
}
