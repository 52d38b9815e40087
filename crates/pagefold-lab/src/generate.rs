//! Generators: the workloads of the papers, made up from plausible mechanisms instead of recorded. The same options
//! give the same record on every machine.
//!
//! Sizes are those of a small machine, so that a record is made and replayed within seconds. What happens in a second is
//! given as a share of the memory: a scan that takes a 64th of the time of the paper's, over a 64th of the memory, meets as much of it.

mod body;
mod build;
mod database;
mod guest;
mod guests;
mod host_memory;
mod programs;
mod web;
mod work;

#[cfg(test)]
mod tests;

use crate::record::{MemorySnapshot, Origin, ProcessRow, RegionRow, Source};
use host_memory::Memory;
use pagefold_core::units::{PAGE_SIZE, Pages, Vpn};
use std::convert::Infallible;

const NS_PER_S: u64 = 1_000_000_000;
const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_SIZE as u64;

/// Below this, the parts that a workload is made of do not fit in any more.
const LEAST: Pages = Pages(PAGES_PER_MIB);
/// 16 GiB in all: a generator takes about 60 bytes a page, and a look at it as much again.
const MOST: Pages = Pages(16 << 18);
/// The shortest time between two looks, nanoseconds.
const SHORTEST: u64 = 1_000_000;

/// A workload that can be made up.
#[derive(Clone, Copy, Debug)]
pub struct Generator {
    /// What it is called.
    pub name: &'static str,
    /// What it is and where it is from, in a line.
    pub about: &'static str,
    /// What it is made up of unless told otherwise.
    pub usual: Options,
    make: fn(&Options) -> Box<dyn World>,
}

/// What can be chosen of any workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Memory of each guest or program.
    pub size: Pages,
    /// Guests, or programs.
    pub processes: u32,
    /// Length of the record, nanoseconds.
    pub length_ns: u64,
    /// Time between two looks, nanoseconds.
    pub every_ns: u64,
    /// Whoever takes the same gets the same.
    pub seed: u64,
}

/// Options that make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// Too little or too much memory.
    #[error("{0} pages each; choose at least {least} and at most {most} in all", least = LEAST.0, most = MOST.0)]
    Size(u64),
    /// No process, or too many.
    #[error("{0} guests or programs; choose 1 to 64")]
    Processes(u32),
    /// Looks too close to each other, or more time between two than there is in all.
    #[error("a look every {every_ns} ns for {length_ns} ns; choose at least 1 ms, and no more than the length")]
    Every {
        /// Time between two looks.
        every_ns: u64,
        /// The length.
        length_ns: u64,
    },
}

const fn usual(mib: u64, processes: u32) -> Options {
    Options { size: Pages(mib * PAGES_PER_MIB), processes, length_ns: 60 * NS_PER_S, every_ns: NS_PER_S, seed: 1 }
}

/// All there are.
pub const GENERATORS: &[Generator] = &[
    Generator {
        name: "kernel-build",
        about: "guests that compile the same kernel at their own pace (CMD, section 4)",
        usual: usual(128, 4),
        make: guests::kernel_build,
    },
    Generator {
        name: "web-server",
        about: "guests that serve the same web site (CMD, section 4)",
        usual: usual(128, 4),
        make: guests::web_server,
    },
    Generator {
        name: "database",
        about: "guests with the same table, which they update (CMD, section 4)",
        usual: usual(128, 4),
        make: guests::database,
    },
    Generator {
        name: "ksmpages-worst",
        about: "pages equal but for the last 8 bytes, which number them; more copies later (KSM, 2009, worst case)",
        usual: usual(64, 4),
        make: programs::ksmpages_worst,
    },
    Generator {
        name: "ksmpages-best",
        about: "all pages equal; more copies later (KSM, 2009, best case)",
        usual: usual(64, 4),
        make: programs::ksmpages_best,
    },
    Generator {
        name: "static-mix",
        about: "programs whose pages are all equal, and programs whose pages are all different (UKSM, section 8.1.1)",
        usual: usual(128, 2),
        make: programs::static_mix,
    },
    Generator {
        name: "cow-breaker",
        about: "equal pages, of which one is written every 10 ms, in order (UKSM, section 8.1.2)",
        usual: usual(32, 1),
        make: programs::cow_breaker,
    },
    Generator {
        name: "short-lived",
        about: "equal pages, mapped for 2 s and unmapped for 2 s, again and again (UKSM, section 8.1.3)",
        usual: usual(64, 1),
        make: programs::short_lived,
    },
];

impl Generator {
    /// The one of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        GENERATORS.iter().find(|generator| generator.name == name)
    }

    /// Where records made by it come from.
    pub fn origin(&self, options: &Options) -> Origin {
        Origin { source: self.name.to_owned(), every_ns: options.every_ns, anonymous: false }
    }

    /// The workload, at its beginning.
    pub fn start(&self, options: &Options) -> Result<Generated, OptionsError> {
        let Options { size, processes, length_ns, every_ns, .. } = *options;
        if !(1..=64).contains(&processes) {
            return Err(OptionsError::Processes(processes));
        }
        if size < LEAST || size.0.saturating_mul(processes.into()) > MOST.0 {
            return Err(OptionsError::Size(size.0));
        }
        if every_ns < SHORTEST || every_ns > length_ns {
            return Err(OptionsError::Every { every_ns, length_ns });
        }
        Ok(Generated { world: (self.make)(options), options: *options, next_ns: 0 })
    }
}

/// A workload that goes on as it is looked at: at 0, and then as often as was chosen.
pub struct Generated {
    world: Box<dyn World>,
    options: Options,
    next_ns: u64,
}

impl Source for Generated {
    type Error = Infallible;

    fn look(&mut self) -> Result<Option<MemorySnapshot>, Infallible> {
        if self.next_ns > self.options.length_ns {
            return Ok(None);
        }
        let mut look = MemorySnapshot { time_ns: self.next_ns, ..MemorySnapshot::default() };
        self.world.go_on(self.next_ns);
        self.world.show(&mut look);
        self.next_ns += self.options.every_ns;
        Ok(Some(look))
    }
}

/// Programs and their memory, in time.
trait World {
    /// Does all that happens up to a time, nanoseconds. Never called with an earlier one than before.
    fn go_on(&mut self, to_ns: u64);

    /// What there is now.
    fn show(&self, look: &mut MemorySnapshot);
}

/// Adds a process with one region, numbered alike.
fn show_one(look: &mut MemorySnapshot, process: u32, region: u32, name: String, memory: &Memory) {
    look.processes.push(ProcessRow { process, pid: None, name: Some(name) });
    show_region(look, process, region, memory);
}

/// Adds a region to a process that is there.
fn show_region(look: &mut MemorySnapshot, process: u32, region: u32, memory: &Memory) {
    // Far apart, as in address spaces of their own with the usual randomness.
    let first = Vpn(0x7_0000_0000 + u64::from(process) * 0x123_4000);
    let row = RegionRow { region, process, kind: "anonymous".to_owned(), first, pages: memory.size() };
    look.regions.push((row, memory.pages(first)));
}
