//! The host: frames, allocated on first touch, and the memory of each program.

use super::body::Body;
use crate::record::Page;
use pagefold_engine::random::{Random, finalize};
use pagefold_engine::units::{Pages, Vpn};
use std::ops::Range;

/// The first frame available to programs.
const FIRST_FRAME: u64 = 1 << 12;

/// Maximum length of a run of frames. The kernel allocates single pages from per-CPU lists, which it refills with up to
/// this many contiguous pages (`pcp->batch`, mm/page_alloc.c): concurrently growing programs interleave in such runs.
const RUN: u64 = 63;

/// A source of frames, unique contents and random numbers.
#[derive(Debug)]
pub struct HostMemory {
    key: u64,
    made: u64,
    next_frame: u64,
    freed: Vec<u64>,
    pub random: Random,
}

impl HostMemory {
    pub fn new(seed: u64) -> Self {
        Self {
            key: finalize(seed),
            made: 0,
            next_frame: FIRST_FRAME,
            freed: Vec::new(),
            random: Random::for_purpose(seed, 0x6d61_6368),
        }
    }

    /// A unique content. Never zeros.
    pub fn unique(&mut self) -> u64 {
        self.made += 1;
        // `finalize` is a bijection, so unique contents differ from each other, and from named ones with high
        // probability.
        finalize(self.made ^ 0x756e_6971_7565_0000).max(1)
    }

    /// A page of unique contents.
    pub fn unique_body(&mut self) -> Body {
        Body(std::array::from_fn(|_| self.unique()))
    }

    /// Allocates contiguous frames.
    fn run(&mut self) -> Range<u64> {
        // Last freed, first used.
        if let Some(frame) = self.freed.pop() {
            return frame..frame + 1;
        }
        let first = self.next_frame;
        self.next_frame += 1 + self.random.below(RUN);
        first..self.next_frame
    }
}

#[derive(Clone, Copy, Debug)]
struct Held {
    body: Body,
    frame: u64,
}

#[derive(Debug)]
pub struct Memory {
    key: u64,
    pages: Vec<Option<Held>>,
    run: Range<u64>,
}

impl Memory {
    pub fn new(machine: &HostMemory, size: Pages) -> Self {
        let size = usize::try_from(size.0).unwrap_or(usize::MAX);
        Self { key: machine.key, pages: vec![None; size], run: 0..0 }
    }

    /// The size, touched or not.
    pub fn size(&self) -> Pages {
        Pages(self.pages.len() as u64)
    }

    pub fn write(&mut self, machine: &mut HostMemory, page: usize, body: Body) {
        self.held(machine, page).body = body;
    }

    pub fn write_part(&mut self, machine: &mut HostMemory, page: usize, part: usize, content: u64) {
        self.held(machine, page).body.0[part] = content;
    }

    fn held(&mut self, machine: &mut HostMemory, page: usize) -> &mut Held {
        let run = &mut self.run;
        self.pages[page].get_or_insert_with(|| {
            if run.is_empty() {
                *run = machine.run();
            }
            let frame = run.start;
            run.start += 1;
            Held { body: Body::ZEROS, frame }
        })
    }

    pub fn unmap(&mut self, machine: &mut HostMemory) {
        for page in self.pages.iter_mut().rev() {
            machine.freed.extend(page.take().map(|held| held.frame));
        }
    }

    /// The pages as a record has them, mapped from `first` on.
    pub fn pages(&self, first: Vpn) -> Vec<(Vpn, Page)> {
        let mut pages = Vec::new();
        for (page, held) in (first.0..).zip(&self.pages) {
            if let Some(held) = held {
                pages.push((Vpn(page), held.body.page(self.key, held.frame)));
            }
        }
        pages
    }
}
