//! Guests with the same system: their boot, and the memory that doesn't depend on their work.
//!
//! CMD (section 4) boots four guests of 2 GiB at the same time and then starts the same work in each. The paper doesn't
//! describe their memory, only the number of pages that can be shared: at most 1.02e6, 7.45e5 and 3.87e5 of 2.1e6, so
//! 49, 36 and 18 %. We assume:
//!
//! - The system's files (kernel, libraries, programs) are equal, page by page, and stay in memory. So do files that the
//!   work reads into the page cache; the kernel fills the last page of a file with zeros.
//! - Data of the kernel and the programs (tables, heaps) is full of pointers and differs between guests. Part of it
//!   changes constantly, each kind of object in the same KiB of its pages.
//! - Programs get zeroed pages and write them; freed pages keep their content until someone reuses them.
//! - Guests boot concurrently, so they get frames in turns. The order in which a guest touches common memory depends on
//!   the work. CMD_Address finds 71, 39 and 92 % of the sharing: little disorder in the database, which its guests read
//!   from beginning to end, much in files that they read on request.

use super::guest::{File, Guest};
use super::host_memory::HostMemory;
use super::work::{Layout, Work};
use super::{Options, World, show_one};
use crate::record::MemorySnapshot;

/// Series of the system's files.
const SYSTEM: u64 = 1;
/// Mean length of libraries and programs: 64 KiB.
const SYSTEM_FILE_PAGES: usize = 16;
/// Pages taken in one step of the boot.
const CHUNK: usize = 16;
/// Time step of the guests, nanoseconds.
const TICK_NS: u64 = 100_000_000;

#[derive(Clone, Copy)]
enum Step {
    System(u64),
    Own,
    Slab,
    Zeros,
    Work(u64),
}

pub struct Guests<W> {
    machine: HostMemory,
    running: Vec<(Guest, W)>,
    /// Time since the work began.
    now_ns: u64,
    before_ns: u64,
}

/// Boots guests with the same work in each.
pub fn guests<W: Work + 'static>(options: &Options, work: fn(&mut Guest) -> W) -> Box<dyn World> {
    Box::new(Guests::boot(options, work))
}

impl<W: Work> Guests<W> {
    fn boot(options: &Options, work: impl Fn(&mut Guest) -> W) -> Self {
        let mut machine = HostMemory::new(options.seed);
        let mut booting: Vec<(Guest, W, Vec<Step>)> = Vec::new();
        let mut before_ns = 0;
        for number in 0..options.processes {
            let mut guest = Guest::new(&machine, options.size, options.seed, number.into());
            let work = work(&mut guest);
            let layout = work.layout();
            before_ns = layout.before_ns;
            let steps = steps(&layout, &mut guest);
            booting.push((guest, work, steps));
        }
        while booting.iter().any(|(.., steps)| !steps.is_empty()) {
            let turn = machine.random.below(booting.len() as u64);
            let (guest, work, steps) = &mut booting[usize::try_from(turn).unwrap_or(0)];
            match steps.pop() {
                Some(Step::System(number)) => {
                    guest.map(&mut machine, &system_file(number));
                }
                Some(Step::Own) => guest.fill_own(&mut machine, CHUNK),
                Some(Step::Slab) => guest.fill_slab(&mut machine, CHUNK),
                Some(Step::Zeros) => guest.fill_zeros(&mut machine, CHUNK),
                Some(Step::Work(step)) => work.boot(guest, &mut machine, step),
                None => {}
            }
        }
        let running = booting.into_iter().map(|(guest, work, _)| (guest, work)).collect();
        Self { machine, running, now_ns: 0, before_ns }
    }
}

fn system_file(number: u64) -> File {
    File::new(SYSTEM, number, SYSTEM_FILE_PAGES)
}

/// The steps of a guest's boot, last first.
fn steps(layout: &Layout, guest: &mut Guest) -> Vec<Step> {
    let mut left = guest.share(layout.system);
    let mut files = Vec::new();
    for number in 0.. {
        let pages = system_file(number).pages();
        if pages > left {
            break;
        }
        left -= pages;
        files.push(Step::System(number));
    }
    let kinds: [Vec<Step>; 5] = [
        files,
        vec![Step::Own; guest.share(layout.own) / CHUNK],
        vec![Step::Slab; guest.share(layout.slab) / CHUNK],
        vec![Step::Zeros; guest.share(layout.zeros) / CHUNK],
        (0..layout.steps).map(Step::Work).collect(),
    ];
    // We spread each kind over the whole boot and then shift it at random.
    let mut placed: Vec<(u64, Step)> = Vec::new();
    for kind in &kinds {
        for (at, step) in kind.iter().enumerate() {
            let evenly = at as u64 * 10_000 / kind.len() as u64;
            let moved = guest.random.below(u64::from(layout.disorder.0) + 1);
            placed.push((evenly + moved, *step));
        }
    }
    placed.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    placed.into_iter().map(|(_, step)| step).collect()
}

impl<W: Work> World for Guests<W> {
    fn advance(&mut self, to_ns: u64) {
        let to_ns = to_ns + self.before_ns;
        while self.now_ns < to_ns {
            let ns = TICK_NS.min(to_ns - self.now_ns);
            self.now_ns += ns;
            // A random guest begins each round, because the first to run gets the next frames.
            let first = usize::try_from(self.machine.random.below(self.running.len() as u64)).unwrap_or(0);
            self.running.rotate_left(first);
            for (guest, work) in &mut self.running {
                work.advance(guest, &mut self.machine, self.now_ns, ns);
            }
            self.running.rotate_right(first);
        }
    }

    fn show(&self, snapshot: &mut MemorySnapshot) {
        for (number, (guest, _)) in (0..).zip(&self.running) {
            show_one(snapshot, number, number, format!("guest-{number}"), &guest.memory);
        }
    }
}
