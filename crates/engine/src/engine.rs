//! The engine: everything that we know and decide during one run.
//!
//! [`cycle()`] is the place to begin: it observes, plans, reads, judges, applies and accounts.
//! [`crate::sampling::ladder`] decides what we read, [`crate::marking::marker`] what we mark, [`crate::merging`] when
//! ksmd scans, and [`crate::placement::placer`] which merged pages move. A [`crate::governor`] caps the cost of it all.

mod contents;
mod cycle;
mod decide;
mod forks;
mod kin;
mod pacing;
mod planner;
mod regions;
mod room;
mod samples;
mod state;
mod unmerged;

pub use cycle::{Cycle, count_saving, cycle};

use crate::config::Config;
use crate::decision::DecisionLog;
use crate::governor::{Governor, Pace};
use crate::holdings::Holdings;
use crate::host::{Cost, KsmView, Snapshot};
use crate::index::Index;
use crate::keys::OwnerKey;
use crate::learned::{Learned, Verdicts, verdict};
use crate::ledger::Ledger;
use crate::limits::{GroupLimits, Limits};
use crate::marking::lifetimes::Lifetimes;
use crate::marking::marker::Marker;
use crate::merging::ScanScheduler;
use crate::placement::placer::Placer;
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::requests::Requests;
use crate::reserve::{Reserve, ReserveSettings};
use crate::sampling::ladder::Ladder;
use crate::saving::{Saving, SavingCounter};
use crate::state::State;
use crate::strength::Strength;
use crate::units::Pages;

use contents::Contents;
use cycle::Plan;
use forks::ForkFamilies;
use kin::KinRecords;
use pacing::Spending;
use planner::Planner;
use room::CopyRoom;

/// Our knowledge and decisions during one run.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// The machine as we last saw it.
    snapshot: Snapshot,
    /// Whether we've seen the first snapshot. Regions that appear later are new.
    running: bool,
    /// Everything we read in this cycle.
    plan: Plan,
    /// How much CPU time and work we've spent, and how much we may still spend.
    spending: Spending,
    /// The regions in scope, and our verdicts on them.
    table: RegionTable,
    /// Which regions we sample, and how densely.
    ladder: Ladder,
    /// The contents that we've seen.
    contents: Contents,
    /// Our marks for ksmd, and its scans.
    ksmd: Ksmd,
    /// The pairs of pages that we ask the kernel to merge, if we merge on request.
    requests: Requests,
    /// The families of forked processes whose shared pages we merge.
    fork_families: ForkFamilies,
    /// Which merged pages move to another memory node.
    placer: Placer,
    /// Whether there's room for the copies if programs write to merged pages.
    room: CopyRoom,
    /// How much we save.
    saving: SavingCounter,
    /// What the processes hold, and would hold if nothing were merged.
    holdings: Holdings,
    /// Experience with earlier regions, by which we judge new regions.
    experience: Experience,
    ledger: Ledger,
    /// The last changes of decisions.
    decisions: DecisionLog,
}

#[derive(Debug, Default)]
struct Ksmd {
    marker: Marker,
    scheduler: ScanScheduler,
}

#[derive(Debug, Default)]
struct Experience {
    /// How long regions of each family live.
    lifetimes: Lifetimes,
    /// An earlier run's verdicts.
    verdicts: Verdicts,
    /// For each family, whether it pays to merge unread pages with an older clone's pages at the same offsets.
    kin: KinRecords,
}

impl Engine {
    pub fn new(config: Config) -> Self {
        Self {
            snapshot: Snapshot::default(),
            running: false,
            plan: Plan::default(),
            spending: Spending::new(&config),
            table: RegionTable::default(),
            ladder: Ladder::new(config.levels),
            contents: Contents::new(Index::new(config.contents_most), Strength::default()),
            ksmd: Ksmd::default(),
            requests: Requests::default(),
            fork_families: ForkFamilies::default(),
            placer: Placer::default(),
            room: CopyRoom::default(),
            saving: SavingCounter::default(),
            holdings: Holdings::default(),
            experience: Experience::default(),
            ledger: Ledger::default(),
            decisions: DecisionLog::default(),
            config,
        }
    }

    /// Everything the next run can adopt. If we merge on request, that's without regions: we know merged pages by their
    /// digests, which we don't save, so the next run judges all regions from scratch.
    pub fn learned(&self) -> Learned {
        let mut regions = Vec::new();
        if self.by_marks() {
            let now_ns = self.snapshot.now_ns;
            let is_busy = self.ksmd.scheduler.is_busy();
            let waits = self.ksmd.marker.has_thin_waiting();
            let ours = self.table.iter().filter_map(|region| verdict(region, now_ns, is_busy, waits, &self.config));
            regions = self.experience.verdicts.with(ours);
        }
        let families = self.experience.lifetimes.learned();
        Learned { mechanism: self.config.mechanism, only: self.config.only, families, regions }
    }

    /// Adopts an earlier run's knowledge before the first cycle, unless that run merged different pages or by another
    /// mechanism.
    pub fn adopt(&mut self, learned: Learned) {
        if learned.mechanism == self.config.mechanism && learned.only == self.config.only {
            self.experience.lifetimes.adopt(&learned.families);
            let regions = if self.by_marks() { learned.regions } else { Vec::new() };
            self.experience.verdicts = Verdicts::new(regions);
        }
    }

    /// The last changes of decisions.
    pub fn decisions(&self) -> &DecisionLog {
        &self.decisions
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Records the state after the last cycle.
    pub fn close(&mut self, now_ns: u64, ksm: &KsmView, cost: Cost) {
        self.ledger.observe(now_ns, ksm, self.exited(ksm), cost);
    }

    /// The latest count of the saving. `None` before the first count. Also `None` if, since the last count, KSM has
    /// merged many more pages or we can't tell how many merges have ended.
    pub fn saving(&self) -> Option<&Saving> {
        self.saving.known(self.snapshot.ksm.saved())
    }

    /// How many pages programs need if they write to every merged page. With ksmd we take our own count or KSM's,
    /// whichever is higher: KSM's covers other programs' memory, too, but lacks the zeros of huge pages that ksmd has
    /// split. On request we don't use KSM's count, because only ksmd's scans would keep it up to date.
    pub fn returns_at_worst(&self) -> Pages {
        let of_machine = self.snapshot.ksm.saved();
        match self.saving.latest() {
            Some(saving) if self.by_marks() => saving.returns_at_worst.max(of_machine),
            Some(saving) => saving.returns_at_worst,
            None => of_machine,
        }
    }

    /// Roughly how many of the pages that KSM counts as merged have been unmapped. Programs may also have unmapped
    /// pages that ksmd hadn't merged yet, so the result is at most KSM's count less the merged pages of living
    /// processes.
    fn exited(&self, ksm: &KsmView) -> Pages {
        let exited = self.ksmd.scheduler.exited();
        if exited == Pages(0) {
            return exited;
        }
        let living = self.table.iter().map(Region::merged_by_ksmd).sum();
        exited.min(ksm.merged().saturating_sub(living))
    }

    /// We look for duplicates among one in this many contents: 1 unless the index is full.
    pub fn contents_one_in(&self) -> u64 {
        self.contents.index.stands_for()
    }

    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.table.iter()
    }

    pub fn reserve(&self) -> &Reserve {
        &self.room.reserve
    }

    /// How many scans ksmd has completed on our orders.
    pub fn scans(&self) -> u64 {
        self.ksmd.scheduler.scans()
    }

    /// Whether we're reading, marking, merging or moving. Otherwise we only watch.
    pub fn is_busy(&self) -> bool {
        let is_holding = self.ksmd.marker.is_holding();
        self.plan.reading.foreground || is_holding || self.is_merging() || self.placer.is_busy()
    }

    /// Whether ksmd scans for us, or will soon.
    fn is_merging(&self) -> bool {
        self.snapshot.ksm.ours && self.ksmd.scheduler.is_busy()
    }

    pub fn set_governor(&mut self, governor: Governor) {
        self.config.governor = governor;
        if governor != Governor::Auto {
            self.spending.governor = governor;
        }
    }

    pub fn set_limits(&mut self, limits: Limits, groups: Vec<GroupLimits>) {
        self.spending.allowance.set_limits(limits, &groups);
        self.config.limits = limits;
        self.config.groups = groups;
    }

    /// Takes up to `most` pages from the process's reading allowance, for a caller that reads them itself.
    pub fn take_pages(&mut self, owner: OwnerKey, most: u64) -> u64 {
        let allowance = &mut self.spending.allowance;
        let pages = if self.spending.paused { 0 } else { allowance.pages_left(owner).min(most) };
        allowance.use_pages(owner, pages);
        pages
    }

    pub fn set_reserve(&mut self, reserve: ReserveSettings) {
        self.config.reserve = reserve;
    }

    /// Pauses or resumes. While paused, we read, mark and order nothing, and merged pages stay merged.
    pub fn set_paused(&mut self, paused: bool) {
        self.spending.paused = paused;
    }

    pub fn is_paused(&self) -> bool {
        self.spending.paused
    }

    /// All figures that we show to people.
    pub fn state(&self) -> State {
        state::state(self)
    }

    fn pace(&self) -> Pace {
        self.config.pace(self.spending.governor)
    }

    fn by_marks(&self) -> bool {
        self.config.mechanism.by_marks()
    }

    fn planner(&self) -> &'static dyn Planner {
        planner::of(self.config.mechanism)
    }
}
