//! Generators of the papers' workloads from plausible mechanisms. Equal options give equal records on every machine.
//!
//! Default sizes are small, so that generating and replaying a record takes seconds. Rates are shares of the memory per
//! second: a scan over a 64th of a paper's memory in a 64th of the time meets the same share of changes.

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
use pagefold_engine::units::{PAGE_SIZE, Pages, Vpn};
use std::convert::Infallible;

const NS_PER_S: u64 = 1_000_000_000;
const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_SIZE as u64;

/// Minimum size: the parts of a workload don't fit into less memory.
const MIN_SIZE: Pages = Pages(PAGES_PER_MIB);
/// Maximum size of all processes, 16 GiB: a generator takes about 60 bytes per page, and a snapshot as much again.
const MAX_SIZE: Pages = Pages(16 << 18);
/// Minimum time between two snapshots, nanoseconds.
const MIN_INTERVAL_NS: u64 = 1_000_000;

#[derive(Clone, Copy, Debug)]
pub struct Generator {
    pub name: &'static str,
    /// One line of description with its source.
    pub about: &'static str,
    pub defaults: Options,
    make: fn(&Options) -> Box<dyn World>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Memory of each guest or program.
    pub size: Pages,
    pub processes: u32,
    /// Length of the record, nanoseconds.
    pub length_ns: u64,
    /// Time between two snapshots, nanoseconds.
    pub every_ns: u64,
    /// Equal seeds give equal records.
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    #[error("{0} pages each; choose at least {least} and at most {most} in all", least = MIN_SIZE.0, most = MAX_SIZE.0)]
    Size(u64),
    #[error("{0} guests or programs; choose 1 to 64")]
    Processes(u32),
    #[error("a snapshot every {every_ns} ns for {length_ns} ns; choose at least 1 ms, and no more than the length")]
    Every {
        /// Time between two snapshots.
        every_ns: u64,
        length_ns: u64,
    },
}

const fn defaults(mib: u64, processes: u32) -> Options {
    Options { size: Pages(mib * PAGES_PER_MIB), processes, length_ns: 60 * NS_PER_S, every_ns: NS_PER_S, seed: 1 }
}

pub const GENERATORS: &[Generator] = &[
    Generator {
        name: "kernel-build",
        about: "guests that compile the same kernel at their own pace (CMD, section 4)",
        defaults: defaults(128, 4),
        make: |options| guests::guests(options, build::Build::new),
    },
    Generator {
        name: "web-server",
        about: "guests that serve the same web site (CMD, section 4)",
        defaults: defaults(128, 4),
        make: |options| guests::guests(options, web::Web::new),
    },
    Generator {
        name: "database",
        about: "guests that update their copies of a table (CMD, section 4)",
        defaults: defaults(128, 4),
        make: |options| guests::guests(options, database::Database::new),
    },
    Generator {
        name: "ksmpages-worst",
        about: "pages that differ only in the last 8 bytes (their number); more copies later (KSM, 2009, worst case)",
        defaults: defaults(64, 4),
        make: programs::ksmpages_worst,
    },
    Generator {
        name: "ksmpages-best",
        about: "equal pages; more copies later (KSM, 2009, best case)",
        defaults: defaults(64, 4),
        make: programs::ksmpages_best,
    },
    Generator {
        name: "static-mix",
        about: "programs with equal pages and programs with unique pages (UKSM, section 8.1.1)",
        defaults: defaults(128, 2),
        make: programs::static_mix,
    },
    Generator {
        name: "cow-breaker",
        about: "equal pages, one of which is written every 10 ms, in order (UKSM, section 8.1.2)",
        defaults: defaults(32, 1),
        make: programs::cow_breaker,
    },
    Generator {
        name: "short-lived",
        about: "equal pages, alternately mapped and unmapped for 2 s (UKSM, section 8.1.3)",
        defaults: defaults(64, 1),
        make: programs::short_lived,
    },
];

impl Generator {
    pub fn named(name: &str) -> Option<&'static Self> {
        GENERATORS.iter().find(|generator| generator.name == name)
    }

    pub fn origin(&self, options: &Options) -> Origin {
        Origin { source: self.name.to_owned(), every_ns: options.every_ns, anonymous: false }
    }

    pub fn start(&self, options: &Options) -> Result<Generated, OptionsError> {
        let Options { size, processes, length_ns, every_ns, .. } = *options;
        if !(1..=64).contains(&processes) {
            return Err(OptionsError::Processes(processes));
        }
        if size < MIN_SIZE || size.0.saturating_mul(processes.into()) > MAX_SIZE.0 {
            return Err(OptionsError::Size(size.0));
        }
        if every_ns < MIN_INTERVAL_NS || every_ns > length_ns {
            return Err(OptionsError::Every { every_ns, length_ns });
        }
        Ok(Generated { world: (self.make)(options), options: *options, next_ns: 0 })
    }
}

/// A running workload, which each snapshot advances. The first snapshot is at time 0.
pub struct Generated {
    world: Box<dyn World>,
    options: Options,
    next_ns: u64,
}

impl Source for Generated {
    type Error = Infallible;

    fn next_snapshot(&mut self) -> Result<Option<MemorySnapshot>, Infallible> {
        if self.next_ns > self.options.length_ns {
            return Ok(None);
        }
        let mut snapshot = MemorySnapshot { time_ns: self.next_ns, ..MemorySnapshot::default() };
        self.world.advance(self.next_ns);
        self.world.show(&mut snapshot);
        self.next_ns += self.options.every_ns;
        Ok(Some(snapshot))
    }
}

trait World {
    /// Runs until a time in nanoseconds, which never decreases.
    fn advance(&mut self, to_ns: u64);

    /// Adds all processes and regions to a snapshot.
    fn show(&self, snapshot: &mut MemorySnapshot);
}

fn show_one(snapshot: &mut MemorySnapshot, process: u32, region: u32, name: String, memory: &Memory) {
    snapshot.processes.push(ProcessRow { process, pid: None, name: Some(name) });
    show_region(snapshot, process, region, memory);
}

fn show_region(snapshot: &mut MemorySnapshot, process: u32, region: u32, memory: &Memory) {
    // Far apart, as with address space randomization.
    let first = Vpn(0x7_0000_0000 + u64::from(process) * 0x123_4000);
    let row = RegionRow { region, process, kind: "anonymous".to_owned(), first, pages: memory.size() };
    snapshot.regions.push((row, memory.pages(first)));
}
