//! The programs that KSM and UKSM were measured with: no guests, one mapping each.

use super::body::{Body, named};
use super::host_memory::{HostMemory, Memory};
use super::{NS_PER_S, Options, World, show_one, show_region};
use crate::record::{MemorySnapshot, PARTS, ProcessRow};
use pagefold_core::units::Pages;

const KSMPAGES: u64 = 40;
const MIX: u64 = 41;
const BREAKER: u64 = 42;
const SHORT_LIVED: u64 = 43;

/// UKSM, section 8.1.2.
const BREAK_EVERY_NS: u64 = NS_PER_S / 100;
/// UKSM, section 8.1.3: the shortest life at which KSM, scanning hard, merges anything.
const LIFE_NS: u64 = 2 * NS_PER_S;

/// Programs that fill their memory once.
struct Filled {
    machine: HostMemory,
    size: Pages,
    name: &'static str,
    /// When each of them starts, nanoseconds.
    starts_ns: Vec<u64>,
    running: Vec<Memory>,
    body: fn(&mut HostMemory, usize, u64) -> Body,
}

fn filled(
    options: &Options,
    name: &'static str,
    starts_ns: Vec<u64>,
    body: fn(&mut HostMemory, usize, u64) -> Body,
) -> Box<dyn World> {
    let machine = HostMemory::new(options.seed);
    Box::new(Filled { machine, size: options.size, name, starts_ns, running: Vec::new(), body })
}

impl World for Filled {
    fn go_on(&mut self, to_ns: u64) {
        while self.starts_ns.get(self.running.len()).is_some_and(|&start| start <= to_ns) {
            let mut memory = Memory::new(&self.machine, self.size);
            for (number, page) in (0..self.size.0).zip(0..) {
                let body = (self.body)(&mut self.machine, self.running.len(), number);
                memory.write(&mut self.machine, page, body);
            }
            self.running.push(memory);
        }
    }

    fn show(&self, look: &mut MemorySnapshot) {
        for (number, memory) in (0..).zip(&self.running) {
            show_one(look, number, number, format!("{}-{number}", self.name), memory);
        }
    }
}

/// Two programs at once, each further one as much later as leaves the last its time.
fn in_turn(options: &Options) -> Vec<u64> {
    let later = u64::from(options.processes.saturating_sub(2));
    (0..u64::from(options.processes)).map(|number| options.length_ns / (later + 1) * number.saturating_sub(1)).collect()
}

/// `ksmpages.c` of the message: memory that was never written but for the last 8 bytes of each page, which hold its number.
/// So page 0 is zeros, and so are the first three parts of all others.
pub fn ksmpages_worst(options: &Options) -> Box<dyn World> {
    filled(options, "ksmpages", in_turn(options), |_, _, number| match number {
        0 => Body::ZEROS,
        _ => last_word(named(KSMPAGES, number, 0)),
    })
}

/// The same program with 1 instead of the number.
pub fn ksmpages_best(options: &Options) -> Box<dyn World> {
    filled(options, "ksmpages", in_turn(options), |_, _, _| last_word(named(KSMPAGES, 1, 0)))
}

/// UKSM's static mix. Every other program holds what is found nowhere else.
pub fn static_mix(options: &Options) -> Box<dyn World> {
    let at_once = vec![0; usize::try_from(options.processes).unwrap_or(0)];
    filled(options, "mix", at_once, |machine, program, _| match program % 2 {
        0 => Body::named(MIX, 0, 0),
        _ => machine.unique_body(),
    })
}

fn last_word(content: u64) -> Body {
    let mut body = Body::ZEROS;
    body.0[PARTS - 1] = content;
    body
}

/// UKSM's COW breaker. The paper's writes what is there already, which takes merged pages apart and changes nothing that
/// a record could say. So this one counts its passes in the last word of the page: what it has written in a pass is
/// equal again, and merging it pays until the next.
struct Breakers {
    machine: HostMemory,
    programs: Vec<Memory>,
    /// Pages written so far, by each.
    written: u64,
}

impl World for Breakers {
    fn go_on(&mut self, to_ns: u64) {
        while (self.written + 1) * BREAK_EVERY_NS <= to_ns {
            for memory in &mut self.programs {
                let size = memory.size().0;
                let content = named(BREAKER, 1 + self.written / size, 1);
                let page = usize::try_from(self.written % size).unwrap_or(0);
                memory.write_part(&mut self.machine, page, PARTS - 1, content);
            }
            self.written += 1;
        }
    }

    fn show(&self, look: &mut MemorySnapshot) {
        for (number, memory) in (0..).zip(&self.programs) {
            show_one(look, number, number, format!("breaker-{number}"), memory);
        }
    }
}

/// See [`Breakers`].
pub fn cow_breaker(options: &Options) -> Box<dyn World> {
    let mut machine = HostMemory::new(options.seed);
    let mut programs = Vec::new();
    for _ in 0..options.processes {
        let mut memory = Memory::new(&machine, options.size);
        for page in (0..).take(usize::try_from(options.size.0).unwrap_or(0)) {
            memory.write(&mut machine, page, Body::named(BREAKER, 0, 0));
        }
        programs.push(memory);
    }
    Box::new(Breakers { machine, programs, written: 0 })
}

/// UKSM's short-lived memory. Each life is a region of its own.
struct ShortLived {
    machine: HostMemory,
    processes: u32,
    size: Pages,
    /// Lives and gaps so far: even while mapped.
    phase: u64,
    mapped: Vec<Memory>,
}

impl ShortLived {
    fn map(&mut self) {
        for _ in 0..self.processes {
            let mut memory = Memory::new(&self.machine, self.size);
            for page in (0..).take(usize::try_from(self.size.0).unwrap_or(0)) {
                memory.write(&mut self.machine, page, Body::named(SHORT_LIVED, 0, 0));
            }
            self.mapped.push(memory);
        }
    }
}

impl World for ShortLived {
    fn go_on(&mut self, to_ns: u64) {
        while self.phase < to_ns / LIFE_NS {
            self.phase += 1;
            for mut memory in self.mapped.drain(..) {
                memory.give_back(&mut self.machine);
            }
            if self.phase % 2 == 0 {
                self.map();
            }
        }
    }

    fn show(&self, look: &mut MemorySnapshot) {
        for process in 0..self.processes {
            look.processes.push(ProcessRow { process, pid: None, name: Some(format!("short-lived-{process}")) });
        }
        let life = u32::try_from(self.phase / 2).unwrap_or(u32::MAX);
        for (process, memory) in (0..).zip(&self.mapped) {
            show_region(look, process, life * self.processes + process, memory);
        }
    }
}

/// See [`ShortLived`].
pub fn short_lived(options: &Options) -> Box<dyn World> {
    let machine = HostMemory::new(options.seed);
    let mut world =
        ShortLived { machine, processes: options.processes, size: options.size, phase: 0, mapped: Vec::new() };
    world.map();
    Box::new(world)
}
