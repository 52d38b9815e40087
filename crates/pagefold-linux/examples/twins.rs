//! A program whose memory holds the same pages several times, for tests that read it or have it merged.
//!
//! `twins TWINS FORKED PRIVATE` maps three regions of that many pages:
//! - twins: every content twice, marked MADV_MERGEABLE;
//! - forked: every page different, shared with a child by fork;
//! - private: every page different, written by the parent after the fork.
//!
//! It prints `ready CHILD TWINS_AT FORKED_AT PRIVATE_AT` (pid, then hexadecimal addresses) and waits for the end of its
//! input. Then it checks every page and exits with 0 if all of them are as they were written.

use std::io::{Read, Write};
use std::ptr;

const PAGE: usize = 4096;

/// The word that fills page `index` of region `region`; twins have the same.
fn word(region: u64, index: usize) -> u64 {
    let index = if region == 1 { index / 2 } else { index } as u64;
    (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ region << 56
}

struct Region {
    number: u64,
    words: &'static mut [u64],
}

impl Region {
    fn map(number: u64, pages: usize) -> Self {
        let length = pages.max(1) * PAGE;
        // SAFETY: a new private mapping of that length, kept until the program ends.
        let words = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(ptr::null_mut(), length, protection, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED, "no memory");
            libc::madvise(start, length, libc::MADV_NOHUGEPAGE);
            std::slice::from_raw_parts_mut(start.cast::<u64>(), pages * PAGE / 8)
        };
        Self { number, words }
    }

    fn fill(&mut self) {
        for (index, page) in self.words.chunks_exact_mut(PAGE / 8).enumerate() {
            page.fill(word(self.number, index));
        }
    }

    fn is_intact(&self) -> bool {
        let mut pages = self.words.chunks_exact(PAGE / 8).enumerate();
        pages.all(|(index, page)| page.iter().all(|&seen| seen == word(self.number, index)))
    }

    fn mark(&mut self) {
        let (start, length) = (self.words.as_mut_ptr(), self.words.len() * 8);
        // SAFETY: the range is this region's mapping; the advice keeps its contents.
        let answer = unsafe { libc::madvise(start.cast(), length, libc::MADV_MERGEABLE) };
        assert_eq!(answer, 0, "this kernel has no KSM");
    }
}

fn main() {
    let counts: Vec<usize> =
        std::env::args().skip(1).map(|count| count.parse().expect("page counts are numbers")).collect();
    let [twins, forked, private] = counts[..] else { panic!("usage: twins TWINS FORKED PRIVATE") };
    let mut regions = [Region::map(1, twins), Region::map(2, forked), Region::map(3, private)];
    regions[0].fill();
    regions[1].fill();
    if twins > 0 {
        regions[0].mark();
    }
    // SAFETY: the program has one thread; the child only waits.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child == 0 {
        // SAFETY: the child is killed with its parent, and does nothing else.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
    regions[2].fill();
    let [a, b, c] = regions.each_ref().map(|region| region.words.as_ptr() as u64);
    println!("ready {child} {a:x} {b:x} {c:x}");
    std::io::stdout().flush().expect("the caller listens");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    let intact = regions.iter().all(Region::is_intact);
    // SAFETY: the child is our own and not reaped before.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, ptr::null_mut(), 0);
    }
    std::process::exit(i32::from(!intact));
}
