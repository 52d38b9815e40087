//! A program that forks without exec, before and after ksmd merges its memory.
//!
//! Replaying a record drops pages shared by fork, so the model gets the changes directly.

use pagefold_engine::keys::FamilyKey;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::Step;
use pagefold_testkit::holder::Change;

/// The parent, and an unrelated process with some of the same contents.
pub const PROGRAMS: u32 = 2;
pub const PAGES: u64 = 8_000;
pub const SCANS: u64 = 9;

/// The changes before a scan.
pub fn changes(scan: u64) -> Vec<(u32, Change)> {
    let write = |program, first, pages, content| (program, Change::Write { first, pages, content, step: 1 });
    match scan {
        1 => vec![
            // Unique pages, pairs, and copies of the other process's pages.
            write(0, 0, 2_000, 1 << 20),
            write(0, 2_000, 500, 2 << 20),
            write(0, 2_500, 500, 2 << 20),
            write(0, 3_000, 1_000, 3 << 20),
            write(1, 0, 1_000, 3 << 20),
            write(1, 1_000, 1_000, 4 << 20),
            // More zeros than one merged page can have mappings.
            (0, Change::Write { first: 7_000, pages: 300, content: 0, step: 0 }),
        ],
        // Changes before the fork that precedes all merging.
        2 => vec![write(0, 0, 200, 5 << 20), write(0, 2_000, 100, 6 << 20)],
        4 => vec![write(0, 200, 200, 7 << 20), write(0, 3_000, 100, 8 << 20)],
        5 => vec![write(0, 5_000, 1_000, 9 << 20), write(0, 6_000, 1_000, 9 << 20), write(1, 2_000, 300, 9 << 20)],
        7 => vec![(0, Change::Drop { first: 2_500, pages: 200 }), write(0, 400, 100, 10 << 20)],
        _ => Vec::new(),
    }
}

/// The processes that fork before a scan, after its changes.
pub fn forks(scan: u64) -> Vec<u32> {
    if matches!(scan, 2 | 5) { vec![0] } else { Vec::new() }
}

/// Starts a process with all memory mapped and none populated.
pub fn start(program: u32) -> [Step; 2] {
    let (first, pages) = (Vpn(1 << 20), Pages(PAGES));
    let map = Step::Map { process: program, region: program, family: FamilyKey(0), first, pages };
    [Step::Start { process: program }, map]
}

/// The steps of a change in the model.
pub fn steps(program: u32, change: Change) -> Vec<Step> {
    let at = |page: u64| Vpn((1 << 20) + page);
    match change {
        Change::Write { first, pages, content, step } => {
            let write = |page| {
                let content = content + page * step;
                Step::Write { region: program, page: at(first + page), content, parts: 0b1111, eighth: 0 }
            };
            (0..pages).map(write).collect()
        }
        Change::Drop { first, pages } => {
            (first..first + pages).map(|page| Step::Drop { region: program, page: at(page), zero: false }).collect()
        }
    }
}
