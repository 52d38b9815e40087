//! The simulated host: [`Host`] over simulated memory and ksmd, in virtual time.
//!
//! Time passes in [`Host::wait`], and while pagefold itself works: observing, reading and marking take as
//! long as they cost. ksmd and the processes go on meanwhile.

#[cfg(test)]
mod laws;
mod nodes;

use crate::comparisons::SearchCounts;
use crate::content::{content_of_series, digest};
use crate::costs::Costs;
use crate::granularity::Granularity;
use crate::knobs::{Classes, Forest, Knobs};
use crate::ksmd::Ksmd;
use crate::memory::{Backing, GroundTruth, Memory, UniqueContents};
use crate::uksmd::{UksmSettings, Uksmd};
use crate::workload::script::ScriptRun;
use crate::workload::{Behaviour, Mapping, Process, Writes};
use nodes::PlacementCache;
use pagefold_core::hash::Digest;
use pagefold_core::host::{
    Actions, Change, ChangeResult, Cost, Host, KsmView, Marking, MemoryView, Outcome, PageSample, PageState,
    RegionView, Run, SamplePlan, Samples, ScanOrder, Snapshot, Span, Stops,
};
use pagefold_core::keys::{FamilyKey, OwnerKey, RegionKey};
use pagefold_core::random::Random;
use pagefold_core::region::RUN_PAGES;
use pagefold_core::units::{Bytes, EXTENT_PAGES, Pages, Vpn};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::convert::Infallible;
use std::ops::Range;

const NS_PER_S: u64 = 1_000_000_000;
/// Churn is applied in steps of at least this.
const CHURN_STEP_NS: u64 = 10_000_000;

/// What happens at a time. Of two events at one time, the one scheduled first comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Start { process: usize, owner: OwnerKey },
    Exit { owner: OwnerKey },
    Map { mapping: usize, owner: OwnerKey },
    Unmap { region: RegionKey, mapping: usize, owner: OwnerKey },
    Write { writer: usize },
    Step { player: usize },
}

/// Somebody who writes to a region.
#[derive(Debug)]
struct Writer {
    region: RegionKey,
    behaviour: Behaviour,
    stream: Random,
    next_page: u32,
    /// Writes due and not made yet, in the parts of a page that [`rate`] reckons in.
    due: u128,
    last_ns: u64,
}

/// A simulated machine.
#[derive(Debug)]
pub struct SimHost {
    now_ns: u64,
    seed: u64,
    costs: Costs,
    knobs: Knobs,
    granularity: Granularity,
    pub(crate) memory: Memory,
    ksmd: Ksmd,
    /// UKSM's scanner, where it stands in the place of ksmd.
    uksmd: Option<Uksmd>,
    pub(crate) scripts: Vec<ScriptRun>,
    unique: UniqueContents,
    stream: Random,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    processes: Vec<Process>,
    /// Mappings as they are to be populated, and where.
    mappings: Vec<(Mapping, Vpn)>,
    writers: Vec<Option<Writer>>,
    /// When a region's resident pages were counted, and how many there were.
    residents: FxHashMap<u32, (u64, Pages)>,
    pagefold_ns: u64,
    ours: bool,
    free: MemoryView,
    ignored_orders: u64,
    placement_cache: PlacementCache,
}

impl SimHost {
    /// An empty machine at time 0, ksmd at rest.
    pub fn new(seed: u64, costs: Costs, knobs: Knobs) -> Self {
        let keeps_writes = matches!(knobs.forest, Forest::Classes(Classes::PageCount | Classes::SubPages));
        Self {
            now_ns: 0,
            seed,
            costs,
            knobs,
            granularity: Granularity::new(knobs.granularity),
            memory: Memory::new(keeps_writes),
            ksmd: Ksmd::new(costs, knobs),
            uksmd: None,
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
            free: MemoryView::default(),
            ignored_orders: 0,
            placement_cache: PlacementCache::default(),
        }
    }

    /// With UKSM in the kernel in the place of ksmd, which takes no orders and heeds no marks.
    #[must_use]
    pub fn with_uksm(mut self, settings: UksmSettings) -> Self {
        self.uksmd = Some(Uksmd::new(self.costs, settings).with_granularity(self.granularity));
        self
    }

    /// Adds a process. It starts at its time, or now if that has passed.
    pub fn add(&mut self, process: Process) -> OwnerKey {
        let owner = self.memory.add_owner(process.untouchable, process.domain, process.place);
        let named = process.mappings.iter().filter_map(|mapping| mapping.node);
        for node in named.chain([process.place.home]) {
            assert!(self.memory.nodes.has(node), "there is no node {}", node.0);
        }
        let start_ns = process.start_ns;
        self.processes.push(process);
        let start = Event::Start { process: self.processes.len() - 1, owner };
        if start_ns <= self.now_ns {
            self.happen(start);
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

    /// Ends a process now.
    pub fn exit(&mut self, owner: OwnerKey) {
        let record = &mut self.memory.owners[owner.0 as usize];
        if std::mem::replace(&mut record.exited, true) {
            return;
        }
        for region in record.regions.clone() {
            self.unmap(RegionKey(region));
        }
        self.ksmd.owner_exited(&mut self.memory, owner.0);
    }

    /// Writes a content (0: zeros) to a page now; false when there is no such page.
    pub fn write(&mut self, region: RegionKey, page: Vpn, content: u64) -> bool {
        let offset = self.memory.region(region.0).and_then(|region| region.offset(page));
        if let Some(offset) = offset {
            self.memory.write(region.0, offset, content);
        }
        offset.is_some()
    }

    /// Takes KSM away (somebody else drives it) or gives it back. While away, ksmd stands as it stood
    /// and orders are ignored and counted.
    pub fn set_ours(&mut self, ours: bool) {
        self.ours = ours;
    }

    /// How scarce memory is from now on. It is not reckoned from what the processes hold.
    pub fn set_memory(&mut self, memory: MemoryView) {
        self.free = memory;
    }

    // What tests may know and pagefold may not.

    /// An exact count of the whole memory. Looks at every page.
    pub fn truth(&self) -> GroundTruth {
        let GroundTruth { frames, zero_frames, contents, zero_mapped, savable } = self.memory.truth();
        let [frames, zero_frames, contents, zero_mapped, savable] =
            [frames, zero_frames, contents, zero_mapped, savable].map(|count| self.granularity.all(count));
        GroundTruth { frames, zero_frames, contents, zero_mapped, savable }
    }
    /// The virtual time.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }
    /// CPU time spent so far.
    pub fn cost(&self) -> Cost {
        let ksmd_ns = self.uksmd.as_ref().map_or(self.ksmd.cpu_ns, |uksmd| uksmd.cpu_ns);
        Cost { pagefold_ns: self.pagefold_ns, ksmd_ns }
    }
    /// KSM's counters now. Like the kernel's they lag behind writes, unmarks and exits until ksmd comes by.
    pub fn ksm(&self) -> KsmView {
        let seen = self.ksm_seen();
        let pages = |seen: Pages| Pages(self.granularity.all(seen.0));
        let (shared, sharing, zero) = (pages(seen.shared), pages(seen.sharing), pages(seen.zero));
        KsmView { shared, sharing, zero, broken: self.granularity.all(seen.broken), ..seen }
    }
    /// The same as pagefold sees it: in simulated pages but for what ksmd has scanned, by which it reckons rates.
    fn ksm_seen(&self) -> KsmView {
        KsmView {
            shared: Pages(self.ksmd.trees.shared),
            sharing: Pages(self.ksmd.trees.sharing),
            zero: Pages(self.memory.zero_merged),
            scanned: self.uksmd.as_ref().map_or(self.ksmd.scanned, |uksmd| uksmd.scanned),
            full_scans: self.ksmd.full_scans,
            broken: self.memory.cow_breaks,
            busy: self.ksmd.busy,
            ours: self.ours,
        }
    }
    /// Pages that map a merged frame.
    pub fn merged_pages(&self) -> Pages {
        Pages(self.granularity.all(self.memory.merged_pages))
    }
    /// Frames saved now, in truth: merged pages less the frames they share, and folded pages of zeros.
    pub fn saved(&self) -> Pages {
        Pages(self.granularity.all(self.memory.merged_pages - self.memory.merged_frames + self.memory.zero_merged))
    }
    /// Writes to merged pages so far.
    pub fn cow_breaks(&self) -> u64 {
        self.granularity.all(self.memory.cow_breaks)
    }
    /// Comparisons made so far.
    pub fn counts(&self) -> SearchCounts {
        self.uksmd.as_ref().map_or(self.ksmd.counts, Uksmd::counts)
    }
    /// Pages that ksmd did not compare again because they had not been written since it last did (only with classes).
    pub fn spared(&self) -> u64 {
        self.ksmd.spared
    }
    /// `pages_unshared` and `pages_volatile`.
    pub fn unshared_and_volatile(&self) -> (u64, u64) {
        let (trees, unshared) = (&self.ksmd.trees, self.ksmd.unshared);
        let volatile = self.ksmd.items.saturating_sub(trees.shared + trees.sharing + unshared);
        (self.granularity.all(unshared), self.granularity.all(volatile))
    }
    /// Contents in ksmd's stable trees, and pages in its unstable ones.
    pub fn tree_nodes(&self) -> (u64, u64) {
        let (stable, unstable) = self.ksmd.trees.nodes();
        (self.granularity.all(stable), self.granularity.all(unstable))
    }
    /// Contents and pages in each tree of the forest, or in those of each class: how balanced they are.
    pub fn tree_sizes(&self) -> Vec<u64> {
        self.ksmd.trees.sizes().into_iter().map(|pages| self.granularity.all(pages)).collect()
    }
    /// What KSM's records take: 64 bytes for each page's and each merged frame's, 48 for each process's.
    pub fn metadata(&self) -> Bytes {
        let records = self.granularity.all(self.ksmd.items + self.memory.known_frames());
        Bytes(64 * records + 48 * self.ksmd.registered().len() as u64)
    }
    /// Processes that have exited and whose address space ksmd still holds.
    pub fn unreaped(&self) -> usize {
        self.ksmd.registered().iter().filter(|&&owner| self.memory.owners[owner as usize].exited).count()
    }
    /// Kicks that came while a scan ran.
    pub fn lost_kicks(&self) -> u64 {
        self.ksmd.lost_kicks
    }
    /// Orders that came while KSM was not ours.
    pub fn ignored_orders(&self) -> u64 {
        self.ignored_orders
    }
    /// Whether ksmd is in a batch.
    pub fn is_scanning(&self) -> bool {
        self.ksmd.is_scanning()
    }
    /// The regions of a process, by address.
    pub fn regions_of(&self, owner: OwnerKey) -> Vec<RegionKey> {
        self.memory.owners[owner.0 as usize].regions.iter().map(|&key| RegionKey(key)).collect()
    }
    /// The whole of a region, as a span.
    pub fn span_of(&self, region: RegionKey) -> Option<Span> {
        let found = self.memory.region(region.0)?;
        Some(Span { region, first: Vpn(found.first), pages: Pages(u64::from(found.len())) })
    }
    /// What a process sees in a page, and how the page is held.
    pub fn page(&self, region: RegionKey, page: Vpn) -> Option<(u64, PageState)> {
        let region = self.memory.region(region.0)?;
        let offset = region.offset(page)?;
        Some((region.content[offset as usize], self.memory.state(region, offset)))
    }

    #[cfg(test)]
    pub(crate) fn parts(&self) -> (&Memory, &Ksmd) {
        (&self.memory, &self.ksmd)
    }

    // Time.

    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at_ns, self.scheduled, event)));
    }

    pub(crate) fn schedule_script(&mut self, at_ns: u64, player: usize) {
        self.schedule(at_ns.max(self.now_ns), Event::Step { player });
    }

    pub(crate) fn unmap(&mut self, region: RegionKey) {
        self.memory.unmap(region.0);
        self.residents.remove(&region.0);
        if let Some(uksmd) = &mut self.uksmd {
            uksmd.region_gone(region.0);
        }
    }

    /// Maps a region in which nothing is yet.
    pub(crate) fn map_empty(&mut self, owner: OwnerKey, family: FamilyKey, first: Vpn, pages: Pages) -> RegionKey {
        let length = usize::try_from(pages.0).unwrap_or(usize::MAX);
        let region = self.memory.map(owner, family, first, (vec![0; length], vec![Backing::Absent; length]), false);
        self.mark_any(region, owner);
        region
    }

    /// What is mapped is marked at once, if all is (`ksm_add_vma`).
    fn mark_any(&mut self, region: RegionKey, owner: OwnerKey) {
        if !self.knobs.merge_any || self.memory.owners[owner.0 as usize].untouchable {
            return;
        }
        if let Some(region) = self.memory.region_mut(region.0) {
            let pages = region.len();
            region.marks.add(0..pages);
        }
        self.ksmd.register(&mut self.memory, owner.0, self.now_ns);
    }

    fn advance(&mut self, ns: u64) {
        let until_ns = self.now_ns.saturating_add(ns);
        while let Some(&Reverse((at_ns, _, event))) = self.events.peek() {
            if at_ns > until_ns {
                break;
            }
            self.events.pop();
            self.run_kernel(at_ns);
            self.now_ns = at_ns;
            self.happen(event);
        }
        self.run_kernel(until_ns);
        self.now_ns = until_ns;
    }

    /// Lets the kernel's thread work.
    fn run_kernel(&mut self, until_ns: u64) {
        match &mut self.uksmd {
            None => self.ksmd.run_until(&mut self.memory, until_ns),
            Some(uksmd) => uksmd.run_until(&mut self.memory, until_ns),
        }
    }

    /// pagefold works: costs CPU, and time.
    fn spend(&mut self, ns: u64) {
        self.pagefold_ns += ns;
        self.advance(ns);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Start { process, owner } => self.start(process, owner),
            Event::Exit { owner } => self.exit(owner),
            Event::Map { mapping, owner } if !self.memory.owners[owner.0 as usize].exited => self.map(mapping, owner),
            Event::Map { .. } => {}
            Event::Step { player } => self.step(player),
            Event::Unmap { region, mapping, owner } => {
                self.unmap(region);
                if let Behaviour::ShortLived { life_ns } = self.mappings[mapping].0.behaviour {
                    self.schedule(self.now_ns + life_ns, Event::Map { mapping, owner });
                }
            }
            Event::Write { writer } => self.run_writer(writer),
        }
    }

    fn start(&mut self, process: usize, owner: OwnerKey) {
        if let Some(exit_ns) = self.processes[process].exit_ns {
            self.schedule(exit_ns.max(self.now_ns), Event::Exit { owner });
        }
        // Address spaces of their own, apart as far as the layout of a real one would put them.
        let mut next = Vpn(0x5555_5555_5000 / 4096);
        for mapping in std::mem::take(&mut self.processes[process].mappings) {
            let first = mapping.first.unwrap_or(Vpn((next.extent() + 2) * EXTENT_PAGES));
            next = first + mapping.pages.0;
            self.mappings.push((mapping, first));
            self.map(self.mappings.len() - 1, owner);
        }
    }

    fn map(&mut self, index: usize, owner: OwnerKey) {
        let (mapping, first) = &self.mappings[index];
        let pages = mapping.populate(&mut self.unique, &mut self.stream);
        let region = self.memory.map(owner, mapping.family, *first, pages, mapping.huge);
        self.memory.settle(region.0, mapping.node);
        let active = mapping.active;
        let behaviour = mapping.behaviour.clone();
        let pages = mapping.pages.0;
        self.mark_any(region, owner);
        if let Some(region) = self.memory.region_mut(region.0) {
            region.active = active;
        }
        match behaviour {
            Behaviour::Static => {}
            Behaviour::ShortLived { life_ns } => {
                self.schedule(self.now_ns + life_ns.max(1), Event::Unmap { region, mapping: index, owner });
            }
            behaviour => {
                let first_ns = self.now_ns + self.write_interval_ns(&behaviour, pages);
                let stream = Random::for_purpose(self.seed, (u64::from(region.0) << 8) | 2);
                let writer = Writer { region, behaviour, stream, next_page: 0, due: 0, last_ns: self.now_ns };
                self.writers.push(Some(writer));
                self.schedule(first_ns, Event::Write { writer: self.writers.len() - 1 });
            }
        }
    }

    /// How long a writer pauses.
    fn write_interval_ns(&self, behaviour: &Behaviour, pages: u64) -> u64 {
        match behaviour {
            Behaviour::CowBreaker { every_ns } => self.granularity.all((*every_ns).max(1)),
            Behaviour::Churn { per_second, .. } => {
                let page_ns = NS_PER_S * 10_000 / (u64::from(per_second.0) * pages).max(1);
                page_ns.max(CHURN_STEP_NS)
            }
            Behaviour::Turnover { every_ns, .. } => (every_ns / pages.max(1)).max(CHURN_STEP_NS),
            Behaviour::Static | Behaviour::ShortLived { .. } => u64::MAX / 2,
        }
    }

    fn run_writer(&mut self, index: usize) {
        let Some(mut writer) = self.writers[index].take() else { return };
        let key = writer.region.0;
        let Some(pages) = self.memory.region(key).map(crate::memory::Region::len) else { return };
        match writer.behaviour {
            Behaviour::CowBreaker { .. } => {
                let page = writer.next_page % pages;
                writer.next_page = page + 1;
                let content = self.memory.region(key).map_or(0, |region| region.content[page as usize]);
                self.memory.write(key, page, content);
            }
            Behaviour::Churn { writes, .. } | Behaviour::Turnover { writes, .. } => {
                let passed_ns = self.now_ns - writer.last_ns;
                writer.last_ns = self.now_ns;
                let (in_a_ns, one) = rate(&writer.behaviour);
                writer.due += u128::from(passed_ns) * in_a_ns * u128::from(pages);
                while writer.due >= one {
                    writer.due -= one;
                    let content = match writes {
                        Writes::Unique => self.unique.next(),
                        Writes::Duplicate { series, size } => {
                            content_of_series(series, writer.stream.below(size.max(1)))
                        }
                    };
                    let page = u32::try_from(writer.stream.below(u64::from(pages))).unwrap_or(0);
                    self.memory.write(key, page, content);
                }
            }
            Behaviour::Static | Behaviour::ShortLived { .. } => return,
        }
        let next_ns = self.now_ns + self.write_interval_ns(&writer.behaviour, u64::from(pages));
        self.writers[index] = Some(writer);
        self.schedule(next_ns, Event::Write { writer: index });
    }

    // The four calls, each priced.

    fn view(&mut self, key: u32, owner: u32, price_ns: &mut u64) -> Option<RegionView> {
        let region = self.memory.region(key)?;
        let pages = Pages(u64::from(region.len()));
        let (counted_ns, mut resident) = self.residents.get(&key).copied().unwrap_or_default();
        if counted_ns == 0 || self.now_ns >= counted_ns + self.knobs.resident_age_ns {
            let there =
                |backing: &&Backing| !matches!(backing, Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged);
            resident = Pages(region.backing.iter().filter(there).count() as u64);
            *price_ns += self.granularity.all(pages.0 * self.costs.count_page_ns);
            self.residents.insert(key, (self.now_ns.max(1), resident));
        }
        *price_ns += self.costs.observe_region_ns;
        Some(RegionView {
            key: RegionKey(key),
            owner: OwnerKey(owner),
            family: region.family,
            domain: self.memory.owners[owner as usize].domain,
            first: Vpn(region.first),
            pages,
            resident,
            marked: Pages(region.marks.pages()),
        })
    }

    /// Samples one run; returns what it cost.
    fn read_run(&self, run: &Run, plan: &SamplePlan, samples: &mut Vec<PageSample>) -> u64 {
        let Some(region) = self.memory.region(run.region.0) else { return 0 };
        let (mut looked_at, mut read) = (0, 0);
        let (several, asked) = (self.memory.nodes.several(), plan.activity.contains(&run.region));
        let mut looked_up = 0;
        for number in run.first.0..run.first.0.saturating_add(u64::from(run.pages)) {
            let Some(offset) = region.offset(Vpn(number)) else { continue };
            let state = self.memory.state(region, offset);
            looked_at += 1;
            let is_read = state.is_read(plan.shared);
            read += u64::from(is_read);
            let found = if is_read { digest(region.content[offset as usize], plan.digest_seed) } else { Digest::ZERO };
            let private = state == PageState::Private;
            let huge = private && region.is_huge(offset);
            looked_up += u64::from(private && asked);
            let in_use = || region.active || region.reads.get(offset as usize).is_some_and(|&reads| reads > 1);
            samples.push(PageSample {
                region: run.region,
                page: Vpn(number),
                state,
                huge,
                digest: found,
                active: private && asked && in_use(),
                node: if several && private { self.memory.node_of(region, offset) } else { None },
            });
        }
        let started = if read > 0 { self.costs.read_run_ns } else { 0 };
        // What is longer than a sample is read whole.
        let times =
            if u64::from(run.pages) > RUN_PAGES { self.granularity.get() } else { self.granularity.samples(u64::MAX) };
        let pages_ns =
            looked_at * self.costs.pagemap_ns + looked_up * self.costs.kpageflags_ns + read * self.costs.read_page_ns;
        times * (started + pages_ns)
    }

    /// Marks or unmarks spans, one stop for all of a process.
    fn change_marks(&mut self, changes: &[Change], mark: bool, outcome: &mut Outcome) -> Vec<ChangeResult> {
        let mut stops: BTreeMap<u32, (bool, u64)> = BTreeMap::new();
        let mut results = Vec::with_capacity(changes.len());
        for &change in changes {
            let span = &change.span;
            let Some((owner, range)) = self.target(span) else {
                results.push(ChangeResult { change, marking: Marking::Refused });
                continue;
            };
            let (busy, stop_ns) =
                stops.entry(owner).or_insert_with(|| (self.stream.chance(self.knobs.busy), self.costs.stop_ns));
            if *busy {
                results.push(ChangeResult { change, marking: Marking::Busy });
                continue;
            }
            *stop_ns += self.costs.inject_ns;
            let marking = Marking::Done(Pages(u64::from(range.end - range.start)));
            results.push(ChangeResult { change, marking });
            if mark {
                if let Some(region) = self.memory.region_mut(span.region.0) {
                    region.marks.add(range);
                }
                self.ksmd.register(&mut self.memory, owner, self.now_ns);
            } else {
                if let Some(region) = self.memory.region_mut(span.region.0) {
                    region.marks.remove(&range);
                }
                *stop_ns +=
                    self.granularity.all(self.memory.unmerge(span.region.0, range) * self.costs.unmerge_page_ns);
            }
        }
        for (owner, (busy, stop_ns)) in stops {
            if !busy {
                let owner = OwnerKey(owner);
                outcome.stops.push(Stops { owner, number: 1, longest_ns: stop_ns, total_ns: stop_ns });
            }
            self.spend(stop_ns);
        }
        results
    }

    /// The process to be stopped for a span, and the part of the span that exists.
    fn target(&self, span: &Span) -> Option<(u32, Range<u32>)> {
        let region = self.memory.region(span.region.0)?;
        let place = |page: u64| u32::try_from(page.clamp(region.first, region.end()) - region.first).ok();
        let range = place(span.first.0)?..place(span.first.0.saturating_add(span.pages.0))?;
        (!range.is_empty() && !self.memory.owners[region.owner as usize].untouchable).then_some((region.owner, range))
    }
}

/// The parts of each page that come due in a nanosecond, and how many make a page.
fn rate(behaviour: &Behaviour) -> (u128, u128) {
    match behaviour {
        Behaviour::Churn { per_second, .. } => (per_second.0.into(), u128::from(NS_PER_S) * 10_000),
        Behaviour::Turnover { every_ns, .. } => (1, u128::from((*every_ns).max(1))),
        Behaviour::Static | Behaviour::CowBreaker { .. } | Behaviour::ShortLived { .. } => (0, 1),
    }
}

impl Host for SimHost {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let live: Vec<(u32, u32)> = self.memory.live_regions().map(|(key, region)| (key, region.owner)).collect();
        let mut price_ns = 0;
        let mut owners: Vec<OwnerKey> = Vec::new();
        let mut regions = Vec::with_capacity(live.len());
        for (key, owner) in live {
            if owners.last() != Some(&OwnerKey(owner)) {
                owners.push(OwnerKey(owner));
                price_ns += self.costs.observe_owner_ns;
            }
            regions.extend(self.view(key, owner, &mut price_ns));
        }
        let (now_ns, ksm) = (self.now_ns, self.ksm_seen());
        let (nodes, owners, places_ns) = self.look_at_places(&owners);
        self.spend(price_ns + places_ns);
        Ok(Snapshot { now_ns, regions, ksm, memory: self.free, cost: self.cost(), nodes, owners })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        let mut pages = Vec::with_capacity(plan.runs.iter().map(|run| run.pages as usize).sum());
        let mut cpu_ns = 0;
        for run in &plan.runs {
            cpu_ns += self.read_run(run, plan, &mut pages);
            self.note_read(run);
        }
        let mut merged = Vec::new();
        cpu_ns += plan.looks.iter().map(|run| self.look_for_merged(run, &mut merged)).sum::<u64>();
        self.spend(cpu_ns);
        Ok(Samples { pages, merged, cpu_ns })
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        let mut outcome = Outcome::default();
        outcome.unmarked = self.change_marks(&actions.unmark, false, &mut outcome);
        outcome.marked = self.change_marks(&actions.mark, true, &mut outcome);
        self.place(&actions.moves, &mut outcome);
        if self.ours {
            self.ksmd.order(actions.scan, self.now_ns);
        } else if actions.scan != ScanOrder::Keep {
            self.ignored_orders += 1;
        }
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.advance(ns);
        Ok(())
    }
}
