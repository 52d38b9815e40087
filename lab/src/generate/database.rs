//! A database: a buffer pool of 16 KiB pages that queries update row by row, a circular log buffer, temporary tables.
//!
//! CMD (sections 4 and 5): SysBench on MySQL, one thread; at most 18 % of all pages can be shared under KSM, and a
//! fifth more by scanning sooner, "the probable reason" being "abundant short-lived page sharing opportunities". We
//! assume:
//!
//! - All guests start with the same table and read it in order. An update writes one row (a part of 1 KiB), the
//!   header of its 16 KiB page (in the first KiB) and its trailer (in the last), as in InnoDB's format, with contents
//!   that differ between guests (times, log positions). Half of the updates go to a fifth of the table. Evicted pages
//!   keep their changes.
//! - All guests get the same queries at the same rate and run them at once or seconds later, so sorts and temporary
//!   tables have equal contents for a few seconds. The guests write them page by page and free them.
//! - The guests write the log buffer part by part. Half of its pages are equal in all guests until overwritten.

use super::NS_PER_S;
use super::body::{Body, named};
use super::guest::{Guest, Heap, Rate};
use super::host_memory::HostMemory;
use super::work::{Layout, Work};
use crate::record::PARTS;
use pagefold_engine::random::finalize;
use pagefold_engine::units::{Pages, Permyriad};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

const TABLE: u64 = 30;
const LOG: u64 = 31;
const SORT: u64 = 32;
/// Pages of 4 KiB in an InnoDB page.
const BLOCK: usize = 4;

const POOL: Permyriad = Permyriad(3_000);
/// Size of the table, which doesn't fit in the pool.
const WHOLE: Permyriad = Permyriad(3_600);
const LOG_BUFFER: Permyriad = Permyriad(300);
/// Size, interval, lifetime and maximum delay of temporary tables.
const SORTED: Permyriad = Permyriad(150);
const SORT_EVERY_NS: u64 = 2 * NS_PER_S;
const SORT_LIFE_NS: u64 = 8 * NS_PER_S;
const SORT_LATE_NS: u64 = 3 * NS_PER_S;

type Block = [Body; BLOCK];

#[derive(Debug)]
pub struct Database {
    /// Block numbers and pages in the pool, oldest first.
    pool: VecDeque<(u64, [usize; BLOCK])>,
    blocks: u64,
    pooled: u64,
    /// Current contents of updated blocks.
    changed: FxHashMap<u64, Block>,
    log: Vec<usize>,
    /// Parts of the log written so far.
    logged: u64,
    next_sort: u64,
    /// Number, start and memory of the existing temporary tables.
    sorts: Vec<(u64, u64, Heap)>,
    updates: Rate,
    misses: Rate,
    log_parts: Rate,
    slab: Rate,
}

impl Database {
    pub fn new(guest: &mut Guest) -> Self {
        Self {
            pool: VecDeque::new(),
            blocks: (guest.share(WHOLE) / BLOCK) as u64,
            pooled: (guest.share(POOL) / BLOCK) as u64,
            changed: FxHashMap::default(),
            log: Vec::new(),
            // Guests have logged different amounts so far.
            logged: guest.random.below(1 + guest.share(LOG_BUFFER) as u64),
            next_sort: 0,
            sorts: Vec::new(),
            updates: Rate::new(40),
            misses: Rate::new(40),
            log_parts: Rate::new(150),
            slab: Rate::new(200),
        }
    }

    /// Reads a block of the table into the pool.
    fn read(&mut self, guest: &mut Guest, machine: &mut HostMemory, number: u64, pages: [usize; BLOCK]) {
        let block = self.block(number);
        for (&page, body) in pages.iter().zip(block) {
            guest.memory.write(machine, page, body);
        }
        self.pool.push_back((number, pages));
    }

    fn block(&self, number: u64) -> Block {
        match self.changed.get(&number) {
            Some(block) => *block,
            None => std::array::from_fn(|page| Body::named(TABLE, number, page as u64)),
        }
    }

    fn update(&mut self, guest: &mut Guest, machine: &mut HostMemory) {
        let pooled = self.pool.len() as u64;
        if pooled == 0 {
            return;
        }
        let among = if guest.random.chance(Permyriad(5_000)) { pooled.div_ceil(5) } else { pooled };
        let (number, pages) = self.pool[guest.below(among)];
        let row = guest.below((BLOCK * PARTS) as u64);
        let mut block = self.block(number);
        for place in [0, row, BLOCK * PARTS - 1] {
            let content = machine.unique();
            block[place / PARTS].0[place % PARTS] = content;
            guest.memory.write_part(machine, pages[place / PARTS], place % PARTS, content);
        }
        self.changed.insert(number, block);
    }

    /// Replaces the oldest block in the pool with one that isn't in it.
    fn miss(&mut self, guest: &mut Guest, machine: &mut HostMemory) {
        let number = guest.random.below(self.blocks);
        if self.pool.iter().any(|(there, _)| *there == number) {
            return;
        }
        if let Some((_, pages)) = self.pool.pop_front() {
            self.read(guest, machine, number, pages);
        }
    }

    fn log(&mut self, guest: &mut Guest, machine: &mut HostMemory) {
        if self.log.is_empty() {
            return;
        }
        let page_number = self.logged / PARTS as u64;
        let part = usize::try_from(self.logged % PARTS as u64).unwrap_or(0);
        let page = self.log[usize::try_from(page_number % self.log.len() as u64).unwrap_or(0)];
        let equal = finalize(page_number ^ LOG) % 2 == 0;
        let content = if equal { named(LOG, self.logged, 0) } else { machine.unique() };
        guest.memory.write_part(machine, page, part, content);
        self.logged += 1;
    }

    fn sort(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64) {
        while now_ns >= self.next_sort * SORT_EVERY_NS {
            let begun_ns = self.next_sort * SORT_EVERY_NS + guest.random.below(SORT_LATE_NS);
            self.sorts.push((self.next_sort, begun_ns, Heap::default()));
            self.next_sort += 1;
        }
        let whole = guest.share(SORTED) as u64;
        for (number, begun_ns, heap) in &mut self.sorts {
            let lived = now_ns.saturating_sub(*begun_ns);
            if lived >= SORT_LIFE_NS {
                heap.end(guest);
                continue;
            }
            // Guests write a table in the first quarter of its lifetime.
            let wanted = whole.min(whole * lived * 4 / SORT_LIFE_NS);
            heap.grow(guest, machine, usize::try_from(wanted).unwrap_or(0), |_, at| {
                Body::named(SORT, *number, at as u64)
            });
        }
        self.sorts.retain(|(_, begun_ns, _)| now_ns < begun_ns + SORT_LIFE_NS);
    }
}

impl Work for Database {
    fn layout(&self) -> Layout {
        Layout {
            system: Permyriad(1_100),
            own: Permyriad(4_200),
            slab: Permyriad(600),
            zeros: Permyriad(100),
            steps: self.pooled,
            disorder: Permyriad(100),
            before_ns: 10 * NS_PER_S,
        }
    }

    fn boot(&mut self, guest: &mut Guest, machine: &mut HostMemory, step: u64) {
        let mut pages = [0; BLOCK];
        for page in &mut pages {
            let Some(taken) = guest.take() else { return };
            *page = taken;
        }
        self.read(guest, machine, step, pages);
        let wanted = guest.share(LOG_BUFFER) as u64 * (step + 1) / self.pooled;
        guest.take_up_to(machine, &mut self.log, wanted);
    }

    fn advance(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64, ns: u64) {
        let size = guest.memory.size();
        let due = self.slab.due(size, ns);
        guest.write_slab(machine, due);
        for _ in 0..self.updates.due(size, ns) {
            self.update(guest, machine);
        }
        for _ in 0..self.misses.due(Pages(size.0 / BLOCK as u64), ns) {
            self.miss(guest, machine);
        }
        for _ in 0..self.log_parts.due(size, ns) {
            self.log(guest, machine);
        }
        self.sort(guest, machine, now_ns);
    }
}
