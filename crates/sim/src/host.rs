//! Time passes in [`wait`](pagefold_engine::host::Host::wait), and while pagefold works: observing, reading and marking
//! take as long as they cost. Meanwhile ksmd and the processes go on.

mod cgroups;
mod events;
mod inspect;
mod interface;
mod merges;
mod nodes;
#[cfg(test)]
mod properties;

use crate::content::UniqueContents;
use crate::costs::Costs;
use crate::granularity::Granularity;
use crate::knobs::{Classes, Forest, Knobs};
use crate::ksmd::Ksmd;
use crate::memory::Memory;
use crate::scanner::Scanner;
use crate::workload::script::ScriptRun;
use crate::workload::{Mapping, Process};
use cgroups::Cgroups;
use events::{Event, Writer};
use interface::Refreshed;
use nodes::PlacementCache;
use pagefold_engine::host::{LimitView, Mechanism, MemoryView, Span};
use pagefold_engine::keys::{GroupKey, OwnerKey, RegionKey};
use pagefold_engine::random::Random;
use pagefold_engine::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

#[derive(Debug)]
pub struct SimHost {
    now_ns: u64,
    seed: u64,
    costs: Costs,
    knobs: Knobs,
    granularity: Granularity,
    pub(crate) memory: Memory,
    ksmd: Ksmd,
    /// The scanner that runs instead of ksmd, if any.
    scanner: Option<Box<dyn Scanner>>,
    pub(crate) scripts: Vec<ScriptRun>,
    unique: UniqueContents,
    stream: Random,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    processes: Vec<Process>,
    /// Mappings that we haven't populated yet, with their first pages.
    mappings: Vec<(Mapping, Vpn)>,
    writers: Vec<Option<Writer>>,
    /// For each region: when we last counted its resident pages, the count, and the region's part of their frames.
    residents: FxHashMap<u32, (u64, Pages, Pages)>,
    pagefold_ns: u64,
    ours: bool,
    foreign_marks: bool,
    is_starting: bool,
    free: MemoryView,
    limits: Vec<LimitView>,
    cgroups: Cgroups,
    groups: Arc<BTreeMap<OwnerKey, GroupKey>>,
    ignored_orders: u64,
    refreshed: Refreshed,
    placement_cache: PlacementCache,
}

impl SimHost {
    /// If the knobs combine a [forest](Forest) with merging on request, or with nodes kept apart. No kernel does.
    pub fn new(seed: u64, costs: Costs, knobs: Knobs) -> Self {
        assert!(
            knobs.mechanism == Mechanism::Ksmd || knobs.forest == Forest::Kernel,
            "merging on request has no forest"
        );
        let keeps_writes = matches!(knobs.forest, Forest::Classes(Classes::PageCount | Classes::SubPages));
        Self {
            now_ns: 0,
            seed,
            costs,
            knobs,
            granularity: Granularity::new(knobs.granularity),
            memory: Memory::new(keeps_writes),
            ksmd: Ksmd::new(&costs, knobs),
            scanner: None,
            scripts: Vec::new(),
            unique: UniqueContents::new(seed),
            stream: Random::for_purpose(seed, 1),
            events: BinaryHeap::new(),
            scheduled: 0,
            processes: Vec::new(),
            mappings: Vec::new(),
            writers: Vec::new(),
            residents: FxHashMap::default(),
            pagefold_ns: 0,
            ours: true,
            foreign_marks: false,
            is_starting: false,
            free: MemoryView::default(),
            limits: Vec::new(),
            cgroups: Cgroups::default(),
            groups: Arc::default(),
            ignored_orders: 0,
            refreshed: Refreshed::default(),
            placement_cache: PlacementCache::default(),
        }
    }

    /// Runs another scanner instead of ksmd. The scanner ignores scan orders and marks.
    #[must_use]
    pub fn with_scanner(mut self, scanner: impl Scanner + 'static) -> Self {
        self.scanner = Some(Box::new(scanner));
        self
    }

    /// Adds a process. It starts at its start time, or now if that has passed.
    pub fn add(&mut self, process: Process) -> OwnerKey {
        let owner = self.memory.add_owner(process.untouchable, process.domain, process.numa);
        let home = process.numa.home;
        assert!(self.memory.nodes.has(home), "there is no node {}", home.0);
        let start_ns = process.start_ns;
        self.processes.push(process);
        let start = Event::Start { process: self.processes.len() - 1, owner };
        if start_ns <= self.now_ns {
            self.handle(start);
        } else {
            self.schedule(start_ns, start);
        }
        owner
    }

    /// Forks a process now. The child's regions are static.
    pub fn fork(&mut self, parent: OwnerKey) -> OwnerKey {
        let child = self.memory.fork(parent);
        if self.memory.owners[parent.0 as usize].registered {
            self.ksmd.register(&mut self.memory, child.0, self.now_ns);
        }
        child
    }

    pub fn exit(&mut self, owner: OwnerKey) {
        let record = &mut self.memory.owners[owner.0 as usize];
        if std::mem::replace(&mut record.exited, true) {
            return;
        }
        for region in record.regions.clone() {
            self.unmap(RegionKey(region));
        }
        match self.knobs.mechanism {
            Mechanism::Ksmd => self.ksmd.owner_exited(&mut self.memory, owner.0),
            Mechanism::Request => self.ksmd.free_owner(&mut self.memory, owner.0),
        }
    }

    /// Maps private pages with these contents right below a region now. pagefold takes both mappings for one region.
    pub fn map_below(&mut self, region: RegionKey, content: &[u64]) {
        self.memory.map_below(region.0, content);
        self.residents.remove(&region.0);
    }

    /// Writes a content (0: zeros) to a page now. Returns false if there is no such page.
    pub fn write(&mut self, region: RegionKey, page: Vpn, content: u64) -> bool {
        let offset = self.memory.region(region.0).and_then(|region| region.offset(page));
        if let Some(offset) = offset {
            self.memory.write(region.0, offset, content);
        }
        offset.is_some()
    }

    /// Takes a page out of memory, as `MADV_DONTNEED` does.
    pub fn discard(&mut self, region: RegionKey, page: Vpn) {
        if let Some(offset) = self.memory.region(region.0).and_then(|region| region.offset(page)) {
            self.memory.drop_page(region.0, offset, false);
        }
    }

    pub fn pin(&mut self, span: Span, pinned: bool) {
        let Some(region) = self.memory.region_mut(span.region.0) else { return };
        for page in span.first.0..span.first.0 + span.pages.0 {
            match region.offset(Vpn(page)) {
                Some(offset) if pinned => _ = region.pinned.insert(offset),
                Some(offset) => _ = region.pinned.remove(&offset),
                None => {}
            }
        }
    }

    /// Sets whether pagefold controls KSM. While it doesn't, ksmd's settings stay as they are, and scan orders are only
    /// counted.
    pub fn set_ours(&mut self, ours: bool) {
        self.ours = ours;
    }

    /// Sets whether we tell pagefold that memory is still marked in a trust domain other than the one that ksmd merges.
    pub fn set_foreign_marks(&mut self, foreign_marks: bool) {
        self.foreign_marks = foreign_marks;
    }

    /// Sets whether we tell pagefold that regions may still be missing.
    pub fn set_starting(&mut self, is_starting: bool) {
        self.is_starting = is_starting;
    }

    /// Sets whether a process is out of scope. It mustn't have any marks.
    pub fn set_out_of_scope(&mut self, owner: OwnerKey, out_of_scope: bool) {
        self.memory.owners[owner.0 as usize].out_of_scope = out_of_scope;
    }

    /// Sets whether pagefold must leave a process alone, like a traced one. The process's marks stay.
    pub fn leave_alone(&mut self, owner: OwnerKey, left_alone: bool) {
        self.memory.owners[owner.0 as usize].left_alone = left_alone;
    }

    /// Sets whether a process can't be marked, nor its pages named.
    pub fn set_untouchable(&mut self, owner: OwnerKey, untouchable: bool) {
        self.memory.owners[owner.0 as usize].untouchable = untouchable;
    }

    /// Sets how much memory pagefold believes to be free, whatever the processes use.
    pub fn set_memory(&mut self, memory: MemoryView) {
        self.free = memory;
    }

    /// Sets memory limits that pagefold observes, besides those of cgroups. They limit nothing, and their headroom
    /// doesn't depend on what the processes use.
    pub fn set_limits(&mut self, limits: Vec<LimitView>) {
        self.limits = limits;
    }

    /// Sets the groups of processes that share limits.
    pub fn set_groups(&mut self, groups: BTreeMap<OwnerKey, GroupKey>) {
        self.groups = groups.into();
    }
}
