//! A web server: files that stay in the page cache, buffers and objects that each request writes.
//!
//! CMD (sections 4 and 5): requests to a local site, 24 at a time; at most 36 % of all pages can be shared. We assume
//! that every guest has the same site, slightly larger than its page cache, and reads files in its own order. A request
//! goes to the first half of a buffer and the response header to the third quarter; the server sends files from the
//! page cache. Each line of the log fills the next part of a page. A worker ends after some time, and the next one gets
//! its memory.

use super::NS_PER_S;
use super::guest::{File, Guest, Heap, Rate};
use super::host_memory::HostMemory;
use super::work::{Layout, Work};
use crate::record::PARTS;
use pagefold_engine::units::{Pages, Permyriad};

const SITE: u64 = 20;
const LOG: u64 = 21;
const FILE_PAGES: usize = 8;
/// The part of the site that the server reads before the record begins, and the whole site.
const READ: Permyriad = Permyriad(3_500);
const WHOLE: Permyriad = Permyriad(4_100);
const BUFFERS: Permyriad = Permyriad(600);
const WORKER: Permyriad = Permyriad(100);
const WORKERS: usize = 4;
/// Maximum number of tries to find a file that isn't in the page cache.
const TRIES: usize = 16;
const WORKER_NS: u64 = 8 * NS_PER_S;

#[derive(Debug)]
pub struct Web {
    preloaded: u64,
    files: u64,
    buffers: Vec<usize>,
    /// End times and memory of the workers.
    workers: Vec<(u64, Heap)>,
    /// The current page of the log and its next part.
    log: Option<(usize, usize)>,
    requests: Rate,
    misses: Rate,
    lines: Rate,
    slab: Rate,
}

impl Web {
    pub fn new(guest: &mut Guest) -> Self {
        let mean = FILE_PAGES as u64;
        Self {
            preloaded: guest.share(READ) as u64 / mean,
            files: guest.share(WHOLE) as u64 / mean,
            buffers: Vec::new(),
            workers: Vec::new(),
            log: None,
            requests: Rate::new(150),
            misses: Rate::new(60),
            lines: Rate::new(20),
            slab: Rate::new(600),
        }
    }

    fn request(&mut self, guest: &mut Guest, machine: &mut HostMemory) {
        if self.buffers.is_empty() {
            return;
        }
        let page = self.buffers[guest.below(self.buffers.len() as u64)];
        for part in 0..3 {
            guest.write_unique(machine, page, part);
        }
    }

    /// Reads a file that isn't in the page cache.
    fn miss(&self, guest: &mut Guest, machine: &mut HostMemory) {
        for _ in 0..TRIES {
            let file = File::new(SITE, guest.random.below(self.files), FILE_PAGES);
            if !guest.has(&file) {
                return guest.read(machine, file);
            }
        }
    }

    fn line(&mut self, guest: &mut Guest, machine: &mut HostMemory) {
        let (page, part) = match self.log {
            Some((page, part)) if part < PARTS => (page, part),
            _ => {
                let Some(page) = guest.take_zeros(machine) else { return };
                guest.cache(File::growing(LOG), vec![page]);
                (page, 0)
            }
        };
        guest.write_unique(machine, page, part);
        self.log = Some((page, part + 1));
    }

    /// Starts and ends workers, which fill their memory in the first quarter of their lives and keep writing to it.
    fn work(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64) {
        while self.workers.len() < WORKERS {
            // The first ones have staggered lives, so that workers end one after the other.
            let life = WORKER_NS * (1 + self.workers.len() as u64) / WORKERS as u64;
            self.workers.push((now_ns + life, Heap::default()));
        }
        let whole = guest.share(WORKER) as u64;
        for (end_ns, heap) in &mut self.workers {
            if *end_ns <= now_ns {
                heap.end(guest);
                *end_ns = now_ns + WORKER_NS;
            }
            let lived = (now_ns + WORKER_NS).saturating_sub(*end_ns);
            let wanted = whole.min(whole * lived * 4 / WORKER_NS);
            heap.grow(guest, machine, usize::try_from(wanted).unwrap_or(0), |machine, _| machine.unique_body());
            // The stack grows down: the worker writes the end of its first page constantly.
            if let Some(&stack) = heap.pages().first() {
                guest.write_unique(machine, stack, PARTS - 1);
            }
        }
    }
}

impl Work for Web {
    fn layout(&self) -> Layout {
        Layout {
            system: Permyriad(1_300),
            own: Permyriad(2_900),
            slab: Permyriad(1_000),
            zeros: Permyriad(200),
            steps: self.preloaded,
            disorder: Permyriad(10_000),
            before_ns: 2 * NS_PER_S,
        }
    }

    fn boot(&mut self, guest: &mut Guest, machine: &mut HostMemory, step: u64) {
        guest.read(machine, File::new(SITE, step, FILE_PAGES));
        // Requests allocate the buffers.
        let wanted = guest.share(BUFFERS) as u64 * (step + 1) / self.preloaded;
        guest.take_up_to(machine, &mut self.buffers, wanted);
    }

    fn advance(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64, ns: u64) {
        let size = guest.memory.size();
        let due = self.slab.due(size, ns);
        guest.write_slab(machine, due);
        for _ in 0..self.requests.due(size, ns) {
            self.request(guest, machine);
        }
        for _ in 0..self.misses.due(Pages(size.0 / FILE_PAGES as u64), ns) {
            self.miss(guest, machine);
        }
        for _ in 0..self.lines.due(size, ns) {
            self.line(guest, machine);
        }
        self.work(guest, machine, now_ns);
    }
}
