//! Events in virtual time: processes start and exit, map and unmap, and write.

use super::SimHost;
use crate::content::content_of_series;
use crate::memory::{Backing, Region};
use crate::workload::{Behaviour, Writes};
use pagefold_engine::keys::{FamilyKey, OwnerKey, RegionKey};
use pagefold_engine::random::Random;
use pagefold_engine::units::{EXTENT_PAGES, Pages, Vpn};
use std::cmp::Reverse;

const NS_PER_S: u64 = 1_000_000_000;
/// The shortest interval between two steps of a writer that rewrites random pages.
const CHURN_STEP_NS: u64 = 10_000_000;

/// An event. Events at the same time happen in the order that they were scheduled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Start { process: usize, owner: OwnerKey },
    Exit { owner: OwnerKey },
    Map { mapping: usize, owner: OwnerKey },
    Unmap { region: RegionKey, mapping: usize, owner: OwnerKey },
    Write { writer: usize },
    Step { player: usize },
}

#[derive(Debug)]
pub(super) struct Writer {
    region: RegionKey,
    behaviour: Behaviour,
    stream: Random,
    next_page: u32,
    /// How much is due to be written, in the unit that [`rate`] defines.
    due: u128,
    last_ns: u64,
}

impl SimHost {
    pub(super) fn schedule(&mut self, at_ns: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at_ns, self.scheduled, event)));
    }

    pub(crate) fn schedule_script(&mut self, at_ns: u64, player: usize) {
        self.schedule(at_ns.max(self.now_ns), Event::Step { player });
    }

    pub(crate) fn unmap(&mut self, region: RegionKey) {
        self.memory.unmap(region.0);
        self.residents.remove(&region.0);
        if let Some(scanner) = &mut self.scanner {
            scanner.region_gone(region.0);
        }
    }

    /// Maps a region with all pages absent.
    pub(crate) fn map_empty(&mut self, owner: OwnerKey, family: FamilyKey, first: Vpn, pages: Pages) -> RegionKey {
        let length = usize::try_from(pages.0).unwrap_or(usize::MAX);
        let region = self.memory.map(owner, family, first, (vec![0; length], vec![Backing::Absent; length]), false);
        self.mark_new(region, owner);
        region
    }

    /// Marks a new region if [`Knobs::merge_any`](crate::Knobs::merge_any) is set (`ksm_add_vma`).
    fn mark_new(&mut self, region: RegionKey, owner: OwnerKey) {
        if !self.knobs.merge_any || self.memory.owners[owner.0 as usize].untouchable {
            return;
        }
        if let Some(region) = self.memory.region_mut(region.0) {
            let pages = region.len();
            region.marks.add(0..pages);
        }
        self.ksmd.register(&mut self.memory, owner.0, self.now_ns);
    }

    pub(super) fn advance(&mut self, ns: u64) {
        let until_ns = self.now_ns.saturating_add(ns);
        while let Some(&Reverse((at_ns, _, event))) = self.events.peek() {
            if at_ns > until_ns {
                break;
            }
            self.events.pop();
            self.run_kernel(at_ns);
            self.now_ns = at_ns;
            self.handle(event);
        }
        self.run_kernel(until_ns);
        self.now_ns = until_ns;
    }

    /// Runs ksmd, or the scanner that replaces it.
    fn run_kernel(&mut self, until_ns: u64) {
        match &mut self.scanner {
            None => self.ksmd.run_until(&mut self.memory, until_ns),
            Some(scanner) => scanner.run_until(&mut self.memory, until_ns),
        }
    }

    /// Accounts for CPU time that pagefold spends, and lets the time pass.
    pub(super) fn spend(&mut self, ns: u64) {
        self.pagefold_ns += ns;
        self.advance(ns);
    }

    pub(super) fn handle(&mut self, event: Event) {
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
        // Regions are as far apart as in a real address space.
        let mut next = Vpn(0x5555_5555_5000 / 4096);
        for mapping in std::mem::take(&mut self.processes[process].mappings) {
            let first = Vpn((next.extent() + 2) * EXTENT_PAGES);
            next = first + mapping.pages.0;
            self.mappings.push((mapping, first));
            self.map(self.mappings.len() - 1, owner);
        }
    }

    fn map(&mut self, index: usize, owner: OwnerKey) {
        let (mapping, first) = &self.mappings[index];
        let pages = mapping.populate(&mut self.unique, &mut self.stream);
        let region = self.memory.map(owner, mapping.family, *first, pages, mapping.huge);
        self.memory.place_pages(region.0);
        let (active, behaviour, pages) = (mapping.active, mapping.behaviour.clone(), mapping.pages.0);
        let pinned = mapping.pinned;
        self.mark_new(region, owner);
        if let Some(region) = self.memory.region_mut(region.0) {
            region.active = active;
            if pinned {
                region.pinned = (0..region.len()).collect();
            }
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

    /// The time between two steps of a writer.
    fn write_interval_ns(&self, behaviour: &Behaviour, pages: u64) -> u64 {
        match behaviour {
            Behaviour::CowBreaker { every_ns } => self.granularity.scale((*every_ns).max(1)),
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
        let Some(pages) = self.memory.region(key).map(Region::len) else { return };
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
                    let content = self.content_to_write(writes, &mut writer.stream);
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

    fn content_to_write(&mut self, writes: Writes, stream: &mut Random) -> u64 {
        match writes {
            Writes::Unique => self.unique.next(),
            Writes::Duplicate { series, size } => content_of_series(series, stream.below(size.max(1))),
        }
    }
}

/// How many units of a write come due per page and nanosecond, and how many units make one write.
fn rate(behaviour: &Behaviour) -> (u128, u128) {
    match behaviour {
        Behaviour::Churn { per_second, .. } => (per_second.0.into(), u128::from(NS_PER_S) * 10_000),
        Behaviour::Turnover { every_ns, .. } => (1, u128::from((*every_ns).max(1))),
        Behaviour::Static | Behaviour::CowBreaker { .. } | Behaviour::ShortLived { .. } => (0, 1),
    }
}
