//! The machine that programs run on: frames, handed out on first touch, and the memory of each program.

use super::body::Body;
use crate::record::Page;
use pagefold_core::random::{Random, finalize};
use pagefold_core::units::{Pages, Vpn};
use std::ops::Range;

/// The first frames are the machine's own.
const FIRST_FRAME: u64 = 1 << 12;

/// The kernel hands out single pages from lists of each processor, which it refills by runs of up to so many from
/// one place (`pcp->batch`, mm/page_alloc.c): programs that fill their memory at a time interleave by such runs.
const RUN: u64 = 63;

/// Frames, contents that are found nowhere else, and chance.
#[derive(Debug)]
pub struct HostMemory {
    key: u64,
    made: u64,
    next_frame: u64,
    given_back: Vec<u64>,
    pub chance: Random,
}

impl HostMemory {
    /// A machine with nothing on it.
    pub fn new(seed: u64) -> Self {
        Self {
            key: finalize(seed),
            made: 0,
            next_frame: FIRST_FRAME,
            given_back: Vec::new(),
            chance: Random::for_purpose(seed, 0x6d61_6368),
        }
    }

    /// A content that is found nowhere else. Never zeros.
    pub fn unique(&mut self) -> u64 {
        self.made += 1;
        // Odd multiplier: a bijection, so two of them differ; apart from named ones by as many bits as they have.
        finalize(self.made ^ 0x756e_6971_7565_0000).max(1)
    }

    /// A page of contents that are found nowhere else.
    pub fn unique_body(&mut self) -> Body {
        Body(std::array::from_fn(|_| self.unique()))
    }

    /// Some frames side by side.
    fn run(&mut self) -> Range<u64> {
        // What was given back last is used first.
        if let Some(frame) = self.given_back.pop() {
            return frame..frame + 1;
        }
        let first = self.next_frame;
        self.next_frame += 1 + self.chance.below(RUN);
        first..self.next_frame
    }
}

/// A page that is there.
#[derive(Clone, Copy, Debug)]
struct Held {
    body: Body,
    frame: u64,
}

/// The memory of a program.
#[derive(Debug)]
pub struct Memory {
    key: u64,
    pages: Vec<Option<Held>>,
    run: Range<u64>,
}

impl Memory {
    /// Memory that nobody has touched.
    pub fn new(machine: &HostMemory, size: Pages) -> Self {
        let size = usize::try_from(size.0).unwrap_or(usize::MAX);
        Self { key: machine.key, pages: vec![None; size], run: 0..0 }
    }

    /// Its size, touched or not.
    pub fn size(&self) -> Pages {
        Pages(self.pages.len() as u64)
    }

    /// Writes a whole page.
    pub fn write(&mut self, machine: &mut HostMemory, page: usize, body: Body) {
        self.held(machine, page).body = body;
    }

    /// Writes something into one part of a page.
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

    /// Unmaps everything.
    pub fn give_back(&mut self, machine: &mut HostMemory) {
        machine.given_back.extend(self.pages.iter_mut().rev().filter_map(Option::take).map(|held| held.frame));
    }

    /// What a record says of it, mapped from a page on.
    pub fn pages(&self, first: Vpn) -> Vec<(Vpn, Page)> {
        let numbered = (first.0..).zip(&self.pages);
        numbered
            .filter_map(|(page, held)| held.as_ref().map(|held| (Vpn(page), held.body.page(self.key, held.frame))))
            .collect()
    }
}
