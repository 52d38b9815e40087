//! A kernel build: compilers start and end, sources and objects pass through the page cache.
//!
//! CMD (sections 4 and 5): the build begins when the guests are up; at most 49 % of all pages can be shared. We assume
//! that every guest compiles the same units in the same order at its own pace, reads the sources of a unit before
//! compiling it and writes the objects afterwards. Objects are equal except for one page in twenty (paths, times). A
//! compiler fills its memory once; a tenth of it is equal in all guests (input), the rest is full of pointers. When it
//! ends, the next one gets its pages. The page cache takes the remaining memory.

use super::NS_PER_S;
use super::body::Body;
use super::guest::{File, Guest, Heap, Rate};
use super::host_memory::HostMemory;
use super::work::{Layout, Work, pace};
use pagefold_engine::random::finalize;
use pagefold_engine::units::Permyriad;

const SOURCES: u64 = 10;
const OBJECTS: u64 = 11;
const COMPILER: u64 = 12;
const SOURCE_PAGES: usize = 4;
const OBJECT_PAGES: usize = 6;

const JOBS: usize = 2;
/// Mean duration of a compilation.
const JOB_NS: u64 = 3 * NS_PER_S / 2;
const JOB_SHARE: Permyriad = Permyriad(400);
/// Data that a compiler reads and writes through the page cache.
const READ_SHARE: Permyriad = Permyriad(55);
const WRITTEN_SHARE: Permyriad = Permyriad(30);
/// One in this many pages of an object differs between guests.
const OWN_OBJECT_PAGE: u64 = 20;
/// One in this many pages of a compiler is equal in all guests.
const EQUAL_PAGE: u64 = 10;

#[derive(Debug)]
struct Job {
    unit: u64,
    begun_ns: u64,
    length_ns: u64,
    heap: Heap,
}

#[derive(Debug)]
pub struct Build {
    next_unit: u64,
    jobs: Vec<Job>,
    pace: u64,
    slab: Rate,
}

impl Build {
    pub fn new(guest: &mut Guest) -> Self {
        Self { next_unit: 0, jobs: Vec::new(), pace: pace(&mut guest.random), slab: Rate::new(300) }
    }

    fn begin(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64) -> Job {
        let unit = self.next_unit;
        self.next_unit += 1;
        for file in files(SOURCES, unit, SOURCE_PAGES, guest.share(READ_SHARE)) {
            guest.read(machine, file);
        }
        let length_ns = JOB_NS * self.pace / 1_000 * (500 + guest.random.below(1_001)) / 1_000;
        Job { unit, begun_ns: now_ns, length_ns, heap: Heap::default() }
    }

    fn end(guest: &mut Guest, machine: &mut HostMemory, mut job: Job) {
        for file in files(OBJECTS, job.unit, OBJECT_PAGES, guest.share(WRITTEN_SHARE)) {
            let pages = guest.map(machine, &file);
            for &page in &pages {
                if machine.random.below(OWN_OBJECT_PAGE) == 0 {
                    guest.write_unique(machine, page, 0);
                }
            }
            guest.cache(file, pages);
        }
        job.heap.end(guest);
    }
}

/// Files of a unit with `pages` pages in all, rounded up to whole files.
fn files(series: u64, unit: u64, mean_pages: usize, pages: usize) -> impl Iterator<Item = File> {
    let mut left = pages;
    (0..).map_while(move |at| {
        let file = File::new(series, unit << 16 | at, mean_pages);
        if left == 0 {
            return None;
        }
        left = left.saturating_sub(file.pages());
        Some(file)
    })
}

impl Job {
    fn advance(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64) {
        let whole = guest.share(JOB_SHARE) as u64;
        let wanted = whole * (now_ns - self.begun_ns).min(self.length_ns) / self.length_ns;
        let unit = self.unit;
        self.heap.grow(guest, machine, usize::try_from(wanted).unwrap_or(0), |machine, at| {
            if finalize(unit ^ finalize(at as u64)) % EQUAL_PAGE == 0 {
                Body::named(COMPILER, unit, at as u64)
            } else {
                machine.unique_body()
            }
        });
    }

    fn is_done(&self, now_ns: u64) -> bool {
        now_ns >= self.begun_ns + self.length_ns
    }
}

impl Work for Build {
    fn layout(&self) -> Layout {
        Layout {
            system: Permyriad(2_400),
            own: Permyriad(1_800),
            slab: Permyriad(700),
            zeros: Permyriad(200),
            steps: 0,
            disorder: Permyriad(1_200),
            before_ns: 20 * NS_PER_S,
        }
    }

    fn boot(&mut self, _: &mut Guest, _: &mut HostMemory, _: u64) {}

    fn advance(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64, ns: u64) {
        let due = self.slab.due(guest.memory.size(), ns);
        guest.write_slab(machine, due);
        let (done, mut jobs): (Vec<_>, Vec<_>) = self.jobs.drain(..).partition(|job| job.is_done(now_ns));
        for job in done {
            Self::end(guest, machine, job);
        }
        while jobs.len() < JOBS {
            jobs.push(self.begin(guest, machine, now_ns));
        }
        for job in &mut jobs {
            job.advance(guest, machine, now_ns);
        }
        self.jobs = jobs;
    }
}
