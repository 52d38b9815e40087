//! Programs that write merged memory, for up to an hour: how much stays saved, and how many COW breaks it costs. We
//! compare pagefold on both kinds of kernel with plain KSM, where ksmd scans everything with the kernel's defaults.

mod common;

use common::{MIB, Machine, SECOND, host, requested};
use pagefold_engine::host::{Actions, Host, ScanOrder};
use pagefold_engine::keys::FamilyKey;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::{Costs, Knobs, Script, SimHost, Step};

const PROCESSES: u32 = 2;
/// The size of each process's mapping, pages.
const PAGES: u64 = 16 * MIB;
const FIRST: u64 = 512;
const HOUR: u64 = 3_600;
const HALF_HOUR: u64 = HOUR / 2;
/// Seconds until the programs begin to write. Before that they fill their memory.
const BEGIN: u64 = 30;

/// What became of a program's memory.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Pages saved on average.
    saved: u64,
    /// How many merged pages the programs wrote.
    breaks: u64,
}

/// The same program with plain KSM, and with pagefold on both kinds of kernel.
#[derive(Debug)]
struct Comparison {
    ksm: Outcome,
    ksmd: Outcome,
    request: Outcome,
}

impl Comparison {
    fn of(name: &str, seconds: u64, workload: impl Fn(&mut Writer)) -> Self {
        let mut writer = Writer { seconds, steps: Vec::new() };
        workload(&mut writer);
        writer.steps.sort_by_key(|step| step.0);
        let script: Script = writer.steps.into();
        let ksmd = pagefold(host(), &script, seconds);
        let request = pagefold(requested(), &script, seconds);
        let found = Self { ksm: plain_ksm(&script, seconds), ksmd, request };
        println!("{name}: {found:?}");
        found
    }

    /// Asserts that pagefold saves at least this share of what plain KSM does.
    #[track_caller]
    fn assert_saves(&self, percent: u64) {
        for (carrier, outcome) in [("ksmd", self.ksmd), ("request", self.request)] {
            assert!(outcome.saved * 100 >= self.ksm.saved * percent, "{carrier}: {self:?}");
        }
    }

    /// Asserts that programs break at most this many merges.
    #[track_caller]
    fn assert_breaks(&self, most: u64) {
        for (carrier, outcome) in [("ksmd", self.ksmd), ("request", self.request)] {
            assert!(outcome.breaks <= most, "{carrier}: {self:?}");
        }
    }
}

/// Writes the script of two processes with a mapping each.
struct Writer {
    seconds: u64,
    steps: Vec<(u64, Step)>,
}

impl Writer {
    /// Writes a page of both processes. `content` is 0 for zeros.
    fn both(&mut self, at_ns: u64, page: u64, content: u64) {
        for process in 0..PROCESSES {
            self.one(at_ns, process, page, content);
        }
    }

    fn one(&mut self, at_ns: u64, region: u32, page: u64, content: u64) {
        let page = Vpn(FIRST + page);
        self.steps.push((at_ns, Step::Write { region, page, content, parts: 0b1111, eighth: 0 }));
    }

    /// Starts both processes, each with a mapping of this many pages, and fills those.
    fn fill(&mut self, pages: u64, content: impl Fn(u64) -> u64) {
        for process in 0..PROCESSES {
            let map =
                Step::Map { process, region: process, family: FamilyKey(1), first: Vpn(FIRST), pages: Pages(pages) };
            self.steps.extend([(0, Step::Start { process }), (0, map)]);
        }
        for page in 0..pages {
            self.both(0, page, content(page));
        }
    }

    /// Calls `write` so many times in each second, with the time and a number.
    fn repeat(&mut self, per_second: u64, mut write: impl FnMut(&mut Self, u64, u64)) {
        for number in 0..(self.seconds - BEGIN) * per_second {
            write(self, BEGIN * SECOND + number * SECOND / per_second, number);
        }
    }
}

/// A content that pages have in common. Each place in each version of a program's data has one.
fn shared(version: u64, place: u64) -> u64 {
    (version + 1) << 24 | (place + 1)
}

fn unique(process: u32, number: u64) -> u64 {
    (u64::from(process) + 1) << 56 | (number + 1)
}

fn plain_ksm(script: &Script, seconds: u64) -> Outcome {
    let mut sim =
        SimHost::new(7, Costs::default(), Knobs { merge_any: true, use_zero_pages: true, ..Knobs::default() });
    sim.play(script.clone());
    let scan = ScanOrder::Pace { pages_to_scan: 100, sleep_ms: 20, thorough: false };
    let Ok(_) = sim.apply(&Actions { scan, ..Actions::default() });
    let mut saved = 0;
    for _ in 0..seconds {
        let Ok(()) = sim.wait(SECOND);
        saved += sim.saved().0;
    }
    Outcome { saved: saved / seconds, breaks: sim.cow_breaks() }
}

fn pagefold(host: SimHost, script: &Script, seconds: u64) -> Outcome {
    let mut sim = Machine::new(host);
    sim.play(script.clone());
    let mut saved = 0;
    let mut last_ns = 0;
    sim.run_and(seconds, |host| {
        saved += host.saved().0 * (host.now_ns() - last_ns);
        last_ns = host.now_ns();
    });
    Outcome { saved: saved / last_ns, breaks: sim.cow_breaks() }
}

/// A program that rewrites its data page by page, all of it every eight seconds, and has unused zeros beside it.
#[test]
fn a_walker_beside_zeros() {
    const PAGES: u64 = 8 * MIB;
    const WALKED: u64 = 2 * MIB;
    let found = Comparison::of("walker", HOUR, |writer| {
        let content = |page| if page < WALKED { shared(0, page) } else { 0 };
        writer.fill(PAGES, content);
        writer.repeat(64, |writer, at_ns, number| writer.both(at_ns, number % WALKED, content(number % WALKED)));
    });
    found.assert_saves(98);
    // If the pages were merged again at once, 128 merges would break each second.
    found.assert_breaks(4 * u64::from(PROCESSES) * WALKED);
}

/// A heap with young objects, which change all the time, and old ones, which are written now and then.
#[test]
fn a_heap_of_young_and_old_objects() {
    const YOUNG: u64 = 4 * MIB;
    let found = Comparison::of("heap", HOUR, |writer| {
        writer.fill(PAGES, |page| shared(0, page));
        writer.repeat(200, |writer, at_ns, number| {
            writer.both(at_ns, number % YOUNG, shared(1 + number % 3, number % YOUNG));
        });
        writer.repeat(2, |writer, at_ns, number| {
            let page = YOUNG + number * 17 % (PAGES - YOUNG);
            writer.both(at_ns, page, shared(0, page));
        });
    });
    found.assert_saves(98);
    let old = 2 * u64::from(PROCESSES) * HOUR;
    // The young objects are merged four times: at first, and after rests of 5, 10 and 20 minutes.
    found.assert_breaks(old + 5 * u64::from(PROCESSES) * YOUNG);
}

/// A garbage collector that moves all live objects to the other half of the heap every five minutes, and leaves zeros.
#[test]
fn a_collector_that_moves() {
    const HALF: u64 = PAGES / 2;
    let found = Comparison::of("collector", HALF_HOUR, |writer| {
        writer.fill(PAGES, |page| if page < HALF { shared(0, page) } else { 0 });
        for round in 1..HALF_HOUR / 300 {
            let from = round % 2 * HALF;
            for place in 0..HALF {
                let at_ns = round * 300 * SECOND + place * 100_000;
                writer.both(at_ns, from + place, shared(0, (place + round * 37) % HALF));
                writer.both(at_ns + 1, HALF - from + place, 0);
            }
        }
    });
    found.assert_saves(95);
}

/// A log in a ring buffer, which new contents overwrite every 16 seconds, beside a program's data.
#[test]
fn a_ring_buffer() {
    const RING: u64 = 8 * MIB;
    let found = Comparison::of("ring", HALF_HOUR, |writer| {
        writer.fill(PAGES, |page| shared(0, page));
        writer.repeat(128, |writer, at_ns, number| writer.both(at_ns, number % RING, shared(1, number)));
    });
    found.assert_saves(98);
    found.assert_breaks(4 * u64::from(PROCESSES) * RING);
}

/// Guests that read the same files. Every few minutes each page of their page caches is replaced by one that the other
/// guest has, too.
#[test]
fn guests_that_use_their_page_cache() {
    const FILES: u64 = 32 * MIB;
    let found = Comparison::of("page cache", HOUR, |writer| {
        writer.fill(PAGES, |page| shared(0, page));
        writer.repeat(8, |writer, at_ns, number| {
            writer.one(at_ns, 0, number * 5_003 % PAGES, shared(0, number * 7_919 % FILES));
            writer.one(at_ns, 1, number * 4_001 % PAGES, shared(0, (number + 100) * 7_919 % FILES));
        });
    });
    found.assert_saves(80);
}

/// Workers with the same memory. Every ten minutes half of one worker's changes, and five minutes later it changes
/// back.
#[test]
fn workers_that_diverge_and_come_back() {
    const PAGES: u64 = 32 * MIB;
    let found = Comparison::of("workers", HALF_HOUR, |writer| {
        writer.fill(PAGES, |page| shared(0, page));
        for round in 1..3 {
            for page in 0..PAGES / 2 {
                let at_ns = round * 600 * SECOND + page * 1_000_000;
                writer.one(at_ns, 1, page, unique(1, round << 20 | page));
                writer.one(at_ns + 300 * SECOND, 1, page, shared(0, page));
            }
        }
    });
    found.assert_saves(90);
    found.assert_breaks(found.ksm.breaks);
}
