//! The memory of the test programs and its changes before each scan.

use pagefold_testkit::holder::Change;

/// First page and length of the areas of a program, before scaling.
const UNIQUE: (u64, u64) = (0, 4000);
const PAIRS: (u64, u64) = (4000, 2000);
const TRIPLES: (u64, u64) = (6000, 1500);
const CHAIN: (u64, u64) = (7500, 700);
const ZEROS: (u64, u64) = (8200, 300);
const SPARE: (u64, u64) = (8500, 400);
/// An area after all others, which isn't scaled: contents with about as many copies as a merged page can have.
const LIMIT_FIRST: u64 = 8900;
const LIMIT_CONTENTS: u64 = 20;
const LIMIT_PAGES: u64 = 257 * LIMIT_CONTENTS + 86;
/// Maximum mappings of a merged page (`max_page_sharing`).
const MAX_SHARING: u64 = 256;

/// Ranges of contents by kind. We use each fresh content only once.
const FRESH: u64 = 1 << 40;
const OWN: u64 = 1 << 32;
const PAIR: u64 = 2 << 32;
const TRIPLE: u64 = 3 << 32;
const ONE: u64 = 4 << 32;

/// The programs: three from the beginning and one that starts later.
pub const PROGRAMS: usize = 4;
pub const SCANS: usize = 12;
/// The scan before which the last program starts, and its number; the scan before which another ends, and its number.
const STARTS: usize = 6;
const LATE: usize = 3;
const ENDS: (usize, usize) = (9, 1);

/// A schedule of changes, on areas scaled by a factor.
pub struct Schedule {
    times: u64,
    fresh: u64,
}

impl Schedule {
    pub fn new(times: u64) -> Self {
        Self { times, fresh: FRESH }
    }

    pub fn pages(&self) -> u64 {
        LIMIT_FIRST * self.times + LIMIT_PAGES
    }

    /// The programs that mark their memory before a scan, after the changes.
    pub fn marks(scan: usize) -> Vec<usize> {
        match scan {
            1 => (0..LATE).collect(),
            STARTS => vec![LATE],
            _ => Vec::new(),
        }
    }

    /// The program that ends before a scan.
    pub fn ends(scan: usize) -> Option<usize> {
        (scan == ENDS.0).then_some(ENDS.1)
    }

    /// The scaled first page and length of a part of an area.
    fn part(&self, area: (u64, u64), from: u64, pages: u64) -> (u64, u64) {
        assert!(from + pages <= area.1);
        ((area.0 + from) * self.times, pages * self.times)
    }

    fn write(&self, area: (u64, u64), from: u64, pages: u64, content: u64, step: u64) -> Change {
        let (first, pages) = self.part(area, from, pages);
        Change::Write { first, pages, content, step }
    }

    fn fresh(&mut self, area: (u64, u64), from: u64, pages: u64) -> Change {
        let change = self.write(area, from, pages, self.fresh, 1);
        self.fresh += pages * self.times;
        change
    }

    fn discard(&self, area: (u64, u64), from: u64, pages: u64) -> Change {
        let (first, pages) = self.part(area, from, pages);
        Change::Drop { first, pages }
    }

    /// Fills the memory of a program before it is marked.
    fn all(&self, program: usize) -> Vec<Change> {
        let own = OWN + program as u64 * 100 * UNIQUE.1 * self.times;
        let pairs = PAIR + program as u64 * PAIRS.1 * self.times;
        let mut changes = vec![
            self.write(UNIQUE, 0, UNIQUE.1, own, 1),
            self.write(PAIRS, 0, PAIRS.1 / 2, pairs, 1),
            self.write(PAIRS, PAIRS.1 / 2, PAIRS.1 / 2, pairs, 1),
            self.write(TRIPLES, 0, TRIPLES.1, TRIPLE, 1),
            self.write(CHAIN, 0, CHAIN.1, ONE, 0),
            self.write(ZEROS, 0, ZEROS.1, 0, 0),
        ];
        // Copies: exactly the maximum in the first program, one more in the second, two more over three programs.
        let first = LIMIT_FIRST * self.times;
        let alone = [MAX_SHARING, MAX_SHARING + 1, 0, 0][program];
        changes.extend((0..LIMIT_CONTENTS).map(|number| {
            let content = ONE + 1 + program as u64 * LIMIT_CONTENTS + number;
            Change::Write { first: first + number * alone, pages: alone, content, step: 0 }
        }));
        let first = first + LIMIT_CONTENTS * alone;
        changes.push(Change::Write { first, pages: MAX_SHARING.div_ceil(3), content: ONE + (1 << 20), step: 0 });
        changes
    }

    /// The changes before a scan, in this order.
    pub fn changes(&mut self, scan: usize) -> Vec<(usize, Change)> {
        let come = Self::marks(scan);
        let mut changes: Vec<(usize, Change)> = come
            .iter()
            .flat_map(|&program| self.all(program).into_iter().map(move |change| (program, change)))
            .collect();
        if scan == 1 {
            return changes;
        }
        // Pages that change before every scan, every second and every third.
        let there = |program: usize| (program != LATE || scan > STARTS) && !(program == ENDS.1 && scan >= ENDS.0);
        for program in (0..PROGRAMS).filter(|&program| there(program)) {
            changes.push((program, self.fresh(UNIQUE, 0, 200)));
            if scan % 2 == 0 {
                changes.push((program, self.fresh(UNIQUE, 200, 200)));
            }
            if scan % 3 == 0 {
                changes.push((program, self.fresh(UNIQUE, 400, 200)));
            }
        }
        let (times, own) = (self.times, |page: u64| OWN + page);
        changes.extend(match scan {
            4 => vec![(0, self.fresh(PAIRS, 0, 150))],
            5 => vec![(1, self.fresh(CHAIN, 0, 200)), (2, self.discard(TRIPLES, 100, 200))],
            6 => vec![(0, self.write(SPARE, 0, 200, TRIPLE, 1)), (0, self.fresh(SPARE, 200, 100))],
            // Restores former contents.
            7 => vec![(0, self.write(PAIRS, 0, 75, PAIR, 1)), (1, self.write(CHAIN, 0, 100, ONE, 0))],
            8 => vec![(2, self.fresh(ZEROS, 0, 100)), (1, self.write(UNIQUE, 1000, 100, 0, 0))],
            10 => vec![
                (0, self.discard(CHAIN, 0, 300)),
                (2, self.write(TRIPLES, 100, 200, TRIPLE + 100 * times, 1)),
                // Rewrites the same content, which unmerges the pages.
                (2, self.write(TRIPLES, 400, 200, TRIPLE + 400 * times, 1)),
            ],
            // Writes contents that only another program has had so far.
            11 => vec![(3, self.write(UNIQUE, 2000, 300, own(2000 * times), 1))],
            12 => vec![(0, self.discard(UNIQUE, 3000, 500))],
            _ => Vec::new(),
        });
        changes
    }
}
