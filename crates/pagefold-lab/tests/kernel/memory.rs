//! What the programs hold, and what they do to it before each scan.

use pagefold_testkit::holder::Change;

/// Where things are, in pages of a program, before they are multiplied.
const UNIQUE: (u64, u64) = (0, 4000);
const PAIRS: (u64, u64) = (4000, 2000);
const TRIPLES: (u64, u64) = (6000, 1500);
const CHAIN: (u64, u64) = (7500, 700);
const ZEROS: (u64, u64) = (8200, 300);
const SPARE: (u64, u64) = (8500, 400);
/// Behind all that and not multiplied: contents that are there about as often as a merged page has room for.
const BRIMS: u64 = 8900;
const BRIM_CONTENTS: u64 = 20;
const BRIM_PAGES: u64 = 257 * BRIM_CONTENTS + 86;
/// What a merged page has room for (`max_page_sharing`).
const ROOM: u64 = 256;

/// Contents: for each kind another range. Fresh ones are never used again.
const FRESH: u64 = 1 << 40;
const OWN: u64 = 1 << 32;
const PAIR: u64 = 2 << 32;
const TRIPLE: u64 = 3 << 32;
const ONE: u64 = 4 << 32;

/// The programs: three from the beginning, and one that comes later.
pub const PROGRAMS: usize = 4;
pub const SCANS: usize = 12;
/// The scan before which the last program comes, and that before which another ends.
const COMES: usize = 6;
const LATE: usize = 3;
const ENDS: (usize, usize) = (9, 1);

/// A course of deeds, on areas so many times as large.
pub struct Course {
    times: u64,
    fresh: u64,
}

impl Course {
    pub fn new(times: u64) -> Self {
        Self { times, fresh: FRESH }
    }

    /// Pages of each program.
    pub fn pages(&self) -> u64 {
        BRIMS * self.times + BRIM_PAGES
    }

    /// Who marks its memory before a scan, after its deeds.
    pub fn marks(scan: usize) -> Vec<usize> {
        match scan {
            1 => (0..LATE).collect(),
            COMES => vec![LATE],
            _ => Vec::new(),
        }
    }

    /// Who ends before a scan.
    pub fn ends(scan: usize) -> Option<usize> {
        (scan == ENDS.0).then_some(ENDS.1)
    }

    /// A part of an area: from a page of it, so many.
    fn part(&self, area: (u64, u64), from: u64, pages: u64) -> (u64, u64) {
        assert!(from + pages <= area.1);
        ((area.0 + from) * self.times, pages * self.times)
    }

    fn write(&self, area: (u64, u64), from: u64, pages: u64, content: u64, step: u64) -> Change {
        let (first, pages) = self.part(area, from, pages);
        Change::Write { first, pages, content, step }
    }

    fn fresh(&mut self, area: (u64, u64), from: u64, pages: u64) -> Change {
        let deed = self.write(area, from, pages, self.fresh, 1);
        self.fresh += pages * self.times;
        deed
    }

    fn give_back(&self, area: (u64, u64), from: u64, pages: u64) -> Change {
        let (first, pages) = self.part(area, from, pages);
        Change::Drop { first, pages }
    }

    /// What a program holds when it marks its memory.
    fn all(&self, program: usize) -> Vec<Change> {
        let own = OWN + program as u64 * 100 * UNIQUE.1 * self.times;
        let pairs = PAIR + program as u64 * PAIRS.1 * self.times;
        let mut deeds = vec![
            self.write(UNIQUE, 0, UNIQUE.1, own, 1),
            self.write(PAIRS, 0, PAIRS.1 / 2, pairs, 1),
            self.write(PAIRS, PAIRS.1 / 2, PAIRS.1 / 2, pairs, 1),
            self.write(TRIPLES, 0, TRIPLES.1, TRIPLE, 1),
            self.write(CHAIN, 0, CHAIN.1, ONE, 0),
            self.write(ZEROS, 0, ZEROS.1, 0, 0),
        ];
        // Exactly as many as there is room for in the first program, one more in the second, two more in three of them.
        let brim = BRIMS * self.times;
        let alone = [ROOM, ROOM + 1, 0, 0][program];
        deeds.extend((0..BRIM_CONTENTS).map(|number| {
            let content = ONE + 1 + program as u64 * BRIM_CONTENTS + number;
            Change::Write { first: brim + number * alone, pages: alone, content, step: 0 }
        }));
        let first = brim + BRIM_CONTENTS * alone;
        deeds.push(Change::Write { first, pages: ROOM.div_ceil(3), content: ONE + (1 << 20), step: 0 });
        deeds
    }

    /// What programs do before a scan, in this order.
    pub fn deeds(&mut self, scan: usize) -> Vec<(usize, Change)> {
        let come = Self::marks(scan);
        let mut deeds: Vec<(usize, Change)> =
            come.iter().flat_map(|&program| self.all(program).into_iter().map(move |deed| (program, deed))).collect();
        if scan == 1 {
            return deeds;
        }
        // What changes all the time, every second time, every third time.
        let there = |program: usize| (program != LATE || scan > COMES) && !(program == ENDS.1 && scan >= ENDS.0);
        for program in (0..PROGRAMS).filter(|&program| there(program)) {
            deeds.push((program, self.fresh(UNIQUE, 0, 200)));
            if scan % 2 == 0 {
                deeds.push((program, self.fresh(UNIQUE, 200, 200)));
            }
            if scan % 3 == 0 {
                deeds.push((program, self.fresh(UNIQUE, 400, 200)));
            }
        }
        let (times, own) = (self.times, |page: u64| OWN + page);
        deeds.extend(match scan {
            4 => vec![(0, self.fresh(PAIRS, 0, 150))],
            5 => vec![(1, self.fresh(CHAIN, 0, 200)), (2, self.give_back(TRIPLES, 100, 200))],
            6 => vec![(0, self.write(SPARE, 0, 200, TRIPLE, 1)), (0, self.fresh(SPARE, 200, 100))],
            // As they were before.
            7 => vec![(0, self.write(PAIRS, 0, 75, PAIR, 1)), (1, self.write(CHAIN, 0, 100, ONE, 0))],
            8 => vec![(2, self.fresh(ZEROS, 0, 100)), (1, self.write(UNIQUE, 1000, 100, 0, 0))],
            10 => vec![
                (0, self.give_back(CHAIN, 0, 300)),
                (2, self.write(TRIPLES, 100, 200, TRIPLE + 100 * times, 1)),
                // The same once more: what is merged is taken apart by it.
                (2, self.write(TRIPLES, 400, 200, TRIPLE + 400 * times, 1)),
            ],
            // What another program has held alone all the time.
            11 => vec![(3, self.write(UNIQUE, 2000, 300, own(2000 * times), 1))],
            12 => vec![(0, self.give_back(UNIQUE, 3000, 500))],
            _ => Vec::new(),
        });
        deeds
    }
}
