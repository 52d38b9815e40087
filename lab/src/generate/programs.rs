//! The programs of the KSM and UKSM measurements: one mapping each, no guests.

use super::body::{Body, named};
use super::host_memory::{HostMemory, Memory};
use super::{NS_PER_S, Options, World, show_one, show_region};
use crate::record::{MemorySnapshot, PARTS, ProcessRow};
use pagefold_engine::units::Pages;

const KSMPAGES: u64 = 40;
const MIX: u64 = 41;
const BREAKER: u64 = 42;
const SHORT_LIVED: u64 = 43;

/// UKSM, section 8.1.2.
const BREAK_EVERY_NS: u64 = NS_PER_S / 100;
/// UKSM, section 8.1.3: the shortest life at which KSM, scanning hard, merges anything.
const LIFE_NS: u64 = 2 * NS_PER_S;

/// Memory with a content for each page, by its number.
fn filled(machine: &mut HostMemory, size: Pages, body: impl Fn(&mut HostMemory, u64) -> Body) -> Memory {
    let mut memory = Memory::new(machine, size);
    for (number, page) in (0..size.0).zip(0..) {
        let body = body(machine, number);
        memory.write(machine, page, body);
    }
    memory
}

/// Programs that fill their memory once, when they start.
struct Filled {
    machine: HostMemory,
    size: Pages,
    name: &'static str,
    /// Start times, nanoseconds.
    starts_ns: Vec<u64>,
    running: Vec<Memory>,
    body: fn(&mut HostMemory, usize, u64) -> Body,
}

fn filled_once(
    options: &Options,
    name: &'static str,
    starts_ns: Vec<u64>,
    body: fn(&mut HostMemory, usize, u64) -> Body,
) -> Filled {
    let machine = HostMemory::new(options.seed);
    Filled { machine, size: options.size, name, starts_ns, running: Vec::new(), body }
}

/// Start times: all programs at 0.
fn at_once(options: &Options) -> Vec<u64> {
    vec![0; usize::try_from(options.processes).unwrap_or(0)]
}

impl World for Filled {
    fn advance(&mut self, to_ns: u64) {
        while self.starts_ns.get(self.running.len()).is_some_and(|&start| start <= to_ns) {
            let number = self.running.len();
            let memory = filled(&mut self.machine, self.size, |machine, page| (self.body)(machine, number, page));
            self.running.push(memory);
        }
    }

    fn show(&self, snapshot: &mut MemorySnapshot) {
        for (number, memory) in (0..).zip(&self.running) {
            show_one(snapshot, number, number, format!("{}-{number}", self.name), memory);
        }
    }
}

/// Start times: two programs at 0, the others evenly spaced so that the last also has its share of time.
fn in_turn(options: &Options) -> Vec<u64> {
    let later = u64::from(options.processes.saturating_sub(2));
    (0..u64::from(options.processes)).map(|number| options.length_ns / (later + 1) * number.saturating_sub(1)).collect()
}

/// `ksmpages.c` from KSM's announcement: zeros, except for the last 8 bytes of each page, which hold the page's number.
/// So page 0 is all zeros, as are the first three parts of the others.
pub fn ksmpages_worst(options: &Options) -> Box<dyn World> {
    Box::new(filled_once(options, "ksmpages", in_turn(options), |_, _, number| match number {
        0 => Body::ZEROS,
        _ => last_word(named(KSMPAGES, number, 0)),
    }))
}

/// The same program, but with 1 in place of the page's number.
pub fn ksmpages_best(options: &Options) -> Box<dyn World> {
    Box::new(filled_once(options, "ksmpages", in_turn(options), |_, _, _| last_word(named(KSMPAGES, 1, 0))))
}

/// UKSM's static mix. Every other program has unique pages.
pub fn static_mix(options: &Options) -> Box<dyn World> {
    Box::new(filled_once(options, "mix", at_once(options), |machine, program, _| match program % 2 {
        0 => Body::named(MIX, 0, 0),
        _ => machine.unique_body(),
    }))
}

fn last_word(content: u64) -> Body {
    let mut body = Body::ZEROS;
    body.0[PARTS - 1] = content;
    body
}

/// UKSM's COW breaker. The paper's program rewrites the existing content, which unmerges pages without a change that a
/// record could show. Ours writes the number of its pass to the last word of the page: pages written in the same pass
/// are equal, and merging them pays until the next pass.
struct Breakers {
    programs: Filled,
    /// Pages written so far by each program.
    written: u64,
}

impl World for Breakers {
    fn advance(&mut self, to_ns: u64) {
        self.programs.advance(to_ns);
        while (self.written + 1) * BREAK_EVERY_NS <= to_ns {
            for memory in &mut self.programs.running {
                let size = memory.size().0;
                let content = named(BREAKER, 1 + self.written / size, 1);
                let page = usize::try_from(self.written % size).unwrap_or(0);
                memory.write_part(&mut self.programs.machine, page, PARTS - 1, content);
            }
            self.written += 1;
        }
    }

    fn show(&self, snapshot: &mut MemorySnapshot) {
        self.programs.show(snapshot);
    }
}

pub fn cow_breaker(options: &Options) -> Box<dyn World> {
    let programs = filled_once(options, "breaker", at_once(options), |_, _, _| Body::named(BREAKER, 0, 0));
    Box::new(Breakers { programs, written: 0 })
}

/// UKSM's short-lived memory. Each mapping is a new region.
struct ShortLived {
    machine: HostMemory,
    processes: u32,
    size: Pages,
    /// Number of the current phase: even while mapped, odd while unmapped.
    phase: u64,
    mapped: Vec<Memory>,
}

impl ShortLived {
    fn map(&mut self) {
        for _ in 0..self.processes {
            self.mapped.push(filled(&mut self.machine, self.size, |_, _| Body::named(SHORT_LIVED, 0, 0)));
        }
    }
}

impl World for ShortLived {
    fn advance(&mut self, to_ns: u64) {
        while self.phase < to_ns / LIFE_NS {
            self.phase += 1;
            for mut memory in self.mapped.drain(..) {
                memory.unmap(&mut self.machine);
            }
            if self.phase % 2 == 0 {
                self.map();
            }
        }
    }

    fn show(&self, snapshot: &mut MemorySnapshot) {
        for process in 0..self.processes {
            snapshot.processes.push(ProcessRow { process, pid: None, name: Some(format!("short-lived-{process}")) });
        }
        let life = u32::try_from(self.phase / 2).unwrap_or(u32::MAX);
        for (process, memory) in (0..).zip(&self.mapped) {
            show_region(snapshot, process, life * self.processes + process, memory);
        }
    }
}

pub fn short_lived(options: &Options) -> Box<dyn World> {
    let machine = HostMemory::new(options.seed);
    let Options { processes, size, .. } = *options;
    let mut world = ShortLived { machine, processes, size, phase: 0, mapped: Vec::new() };
    world.map();
    Box::new(world)
}
