//! One cycle: plan what to read, judge the samples, account for the work.
//!
//! ```text
//! observe -> plan -> read -> judge -> apply -> account
//! ```
//!
//! [`crate::sampling::ladder`] decides what we read, [`crate::marking::marker`] what we mark, [`crate::merging`] when
//! ksmd scans, and [`crate::placement::placer`] which merged pages move. A [`crate::governor`] caps the cost of it all.

mod decide;
mod pacing;
mod regions;
mod samples;
mod state;

use crate::config::Config;
use crate::decision::DecisionLog;
use crate::governor::{Budget, Governor, Pace, share_ns};
use crate::hash::{DigestSet, LINES};
use crate::headroom::Headroom;
use crate::host::{
    Actions, Cost, Host, KsmView, Mechanism, MergedSample, Move, Outcome, PageRun, SamplePlan, Samples, Snapshot, Why,
};
use crate::index::{Index, PageStatus};
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::learned::{Learned, Verdicts, verdict};
use crate::ledger::Ledger;
use crate::limits::{Allowance, GroupLimits, Limits};
use crate::marking::lifetimes::Lifetimes;
use crate::marking::marker::{Marker, Means, SPLIT_FROM, marked_resident};
use crate::merging::{Inputs, ScanScheduler};
use crate::placement::placer::Placer;
use crate::region::table::RegionTable;
use crate::region::{Event, LeaveAlone, Region};
use crate::relief::{Relief, UNMERGE_STEP, margin_below};
use crate::requests::Requests;
use crate::reserve::{Reserve, ReserveSettings};
use crate::sampling::ladder::{Ladder, ReadPlan};
use crate::saving::{Saving, SavingCounter};
use crate::state::State;
use crate::strength::Strength;
use crate::units::{EXTENT_PAGES, Pages, Permyriad, count};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;
use std::sync::Arc;

/// We remember at most this many digests that collide: pages with different contents have them.
const COLLIDING_MOST: usize = 1 << 16;
/// Share of a core for visiting merged pages while programs write to them, which copies them.
const VISIT_SHARE: Permyriad = Permyriad(20);
/// We visit merged pages once at least this many were copied in one round.
const BROKEN_MIN: u64 = 16;

/// Our knowledge and decisions during one run.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// The governor in force: the configured one, or `Auto`'s choice.
    governor: Governor,
    budget: Budget,
    /// CPU time spent on reading and by ksmd only.
    smooth: Budget,
    allowance: Allowance,
    index: Index,
    table: RegionTable,
    ladder: Ladder,
    marker: Marker,
    scheduler: ScanScheduler,
    requests: Requests,
    saving: SavingCounter,
    /// Whether the last cycle counted the saving.
    has_counted: bool,
    reserve: Reserve,
    headroom: Headroom,
    relief: Relief,
    /// Whether we still have to find out who holds pages charged to a cgroup that may exceed its limit.
    needs_relief: bool,
    strength: Strength,
    /// Digests that collide at this strength: pages with different contents have them.
    colliding: Arc<DigestSet>,
    /// The same digests as surveys remember them.
    colliding_fingerprints: FxHashSet<u32>,
    placer: Placer,
    lifetimes: Lifetimes,
    verdicts: Verdicts,
    ledger: Ledger,
    decisions: DecisionLog,
    snapshot: Snapshot,
    /// Whether we've seen the first snapshot: regions that appear from then on are new.
    running: bool,
    reading: ReadPlan,
    /// `KsmView::broken` when the round began.
    broken_before: u64,
    /// Whether the current plan visits merged pages, because programs broke some in the last round.
    visiting: bool,
    /// Pages in the current plan, and how many of them we read.
    planned: u64,
    read: u64,
    /// Pages we read on the bottom level since the index last aged.
    bottom_pages: u64,
    /// CPU time of all our reading, nanoseconds, and (`reading_ns`) of the last cycle's, `None` if that cycle changed
    /// targets.
    read_ns: u64,
    reading_ns: Option<u64>,
    /// A cycle costs at least this much besides reading, nanoseconds. Grows with the number of processes.
    observe_cost_ns: u64,
    paused: bool,
}

/// The result of one cycle.
#[derive(Debug)]
pub struct Cycle {
    /// How long to wait before the next cycle, nanoseconds.
    pub wait_ns: u64,
    pub outcome: Outcome,
}

/// Counts the saving once more at the end of a run.
///
/// # Errors
///
/// Host errors that we can't continue from.
pub fn count_saving<H: Host>(engine: &mut Engine, host: &mut H) -> Result<(), H::Error> {
    let snapshot = host.observe()?;
    // Whatever else that plans is not read any more.
    engine.plan(snapshot);
    engine.saving.count_now();
    let inspect = engine.plan_count();
    let samples = host.read(&SamplePlan { inspect, count: true, ..SamplePlan::default() })?;
    engine.record_saving(&samples);
    Ok(())
}

/// Runs one cycle on a host.
///
/// # Errors
///
/// Host errors that we can't continue from. If only one target fails, the outcome says so instead.
pub fn cycle<H: Host>(engine: &mut Engine, host: &mut H) -> Result<Cycle, H::Error> {
    let snapshot = host.observe()?;
    let plan = engine.plan(snapshot);
    let samples = host.read(&plan)?;
    let actions = engine.judge(&samples);
    let outcome = host.apply(&actions)?;
    Ok(Cycle { wait_ns: engine.account(&actions, &outcome), outcome })
}

impl Engine {
    /// An engine that knows nothing yet.
    pub fn new(config: Config) -> Self {
        let governor = if config.governor == Governor::Auto { Governor::Quiet } else { config.governor };
        let (ladder, allowance) = (Ladder::new(config.levels), Allowance::new(config.limits, &config.groups));
        Self {
            config,
            governor,
            budget: Budget::default(),
            smooth: Budget::default(),
            allowance,
            index: Index::new(),
            table: RegionTable::default(),
            ladder,
            marker: Marker::default(),
            scheduler: ScanScheduler::default(),
            requests: Requests::default(),
            saving: SavingCounter::default(),
            has_counted: false,
            reserve: Reserve::default(),
            headroom: Headroom::default(),
            relief: Relief::default(),
            needs_relief: false,
            strength: Strength::default(),
            colliding: Arc::default(),
            colliding_fingerprints: FxHashSet::default(),
            placer: Placer::default(),
            lifetimes: Lifetimes::default(),
            verdicts: Verdicts::default(),
            ledger: Ledger::default(),
            decisions: DecisionLog::default(),
            snapshot: Snapshot::default(),
            running: false,
            reading: ReadPlan::default(),
            broken_before: 0,
            visiting: false,
            planned: 0,
            read: 0,
            bottom_pages: 0,
            read_ns: 0,
            reading_ns: Some(0),
            observe_cost_ns: pacing::OBSERVE_COST_NS,
            paused: false,
        }
    }

    /// Everything the next run can adopt. We know pages merged on request by their digests and don't save those, so the
    /// next run judges such regions anew.
    pub fn learned(&self) -> Learned {
        let Config { mechanism, only, .. } = self.config;
        let (now_ns, busy) = (self.snapshot.now_ns, self.scheduler.is_busy());
        let wait = self.marker.has_thin_waiting();
        let verdicts = self.table.iter().filter_map(|region| verdict(region, now_ns, busy, wait, &self.config));
        let regions = if self.on_request() { Vec::new() } else { self.verdicts.with(verdicts) };
        Learned { mechanism, only, families: self.lifetimes.learned(), regions }
    }

    /// Adopts an earlier run's knowledge before the first cycle, unless that run had another task.
    pub fn adopt(&mut self, learned: Learned) {
        if (learned.mechanism, learned.only) == (self.config.mechanism, self.config.only) {
            self.lifetimes.adopt(&learned.families);
            self.verdicts = Verdicts::new(if self.on_request() { Vec::new() } else { learned.regions });
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

    /// The latest count of the saving, `None` before the first one.
    pub fn saving(&self) -> Option<&Saving> {
        self.saving.latest()
    }

    /// The pages to look up now to count the saving.
    fn plan_count(&mut self) -> Vec<PageRun> {
        if !self.snapshot.shows_frames || self.snapshot.ksm.merged() == Pages(0) {
            return Vec::new();
        }
        let busy = self.is_busy();
        self.saving.plan(&self.table, self.snapshot.now_ns, busy, self.reading.foreground)
    }

    /// Pages we need if programs write to every merged one. With marks we use KSM's counters: ksmd corrects them as it
    /// passes by, and they include other programs' memory. On request ksmd never passes by, so we count ourselves.
    pub fn returns_at_worst(&self) -> Pages {
        match self.saving.latest() {
            Some(saving) if self.on_request() => saving.returns_at_worst,
            _ => self.snapshot.ksm.saved(),
        }
    }

    fn record_saving(&mut self, samples: &Samples) {
        let now_ns = self.snapshot.now_ns;
        self.saving.record(&self.table, &samples.merged, samples.counted.as_ref(), now_ns);
        self.record_counted();
    }

    fn record_counted(&mut self) {
        if let Some(saving) = self.saving.latest() {
            self.ledger.record_saving(saving);
        }
    }

    /// Roughly how many of the pages that KSM counts as merged are gone. At most as many as it counts beyond living
    /// processes' pages: a program may have unmapped memory before ksmd came to merge it.
    fn exited(&self, ksm: &KsmView) -> Pages {
        let exited = self.scheduler.exited();
        if exited == Pages(0) {
            return exited;
        }
        let living = self.table.iter().map(Region::merged_by_ksmd).sum();
        exited.min(ksm.merged().saturating_sub(living))
    }

    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.table.iter()
    }

    /// How many scans ksmd has completed on our orders.
    pub fn scans(&self) -> u64 {
        self.scheduler.scans()
    }

    /// Whether we're reading, marking, merging or moving. Otherwise we only watch.
    pub fn is_busy(&self) -> bool {
        self.reading.foreground || self.marker.is_holding() || self.is_merging() || self.placer.is_busy()
    }

    /// Whether ksmd scans for us, or will soon.
    fn is_merging(&self) -> bool {
        self.snapshot.ksm.ours && self.scheduler.is_busy()
    }

    pub fn set_governor(&mut self, governor: Governor) {
        self.config.governor = governor;
        if governor != Governor::Auto {
            self.governor = governor;
        }
    }

    pub fn set_limits(&mut self, limits: Limits, groups: Vec<GroupLimits>) {
        self.allowance.set_limits(limits, &groups);
        (self.config.limits, self.config.groups) = (limits, groups);
    }

    /// Takes up to `most` pages from the process's reading allowance, for someone else's reading.
    pub fn take_pages(&mut self, owner: OwnerKey, most: u64) -> u64 {
        let pages = if self.paused { 0 } else { self.allowance.pages_left(owner).min(most) };
        self.allowance.use_pages(owner, pages);
        pages
    }

    pub fn set_reserve(&mut self, reserve: ReserveSettings) {
        self.config.reserve = reserve;
    }

    /// Pauses or resumes. While paused, we read, mark and order nothing, and merged pages stay merged.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// All figures that we show to people.
    pub fn state(&self) -> State {
        state::state(self)
    }

    fn pace(&self) -> Pace {
        self.config.pace(self.governor)
    }

    /// Adopts a snapshot of the machine and plans what to read.
    pub fn plan(&mut self, snapshot: Snapshot) -> SamplePlan {
        let now_ns = snapshot.now_ns;
        self.config.mechanism = snapshot.mechanism;
        self.record_cost(&snapshot);
        self.allowance.advance(now_ns);
        self.allowance.set_groups(snapshot.groups.clone(), self.ladder.sample_ns());
        if self.config.governor == Governor::Auto {
            self.governor = Governor::chosen(self.governor, &snapshot.memory, snapshot.cpu_pressure);
        }
        if !self.running || snapshot.regions != self.snapshot.regions {
            self.update_regions(&snapshot);
            self.saving.note_change();
        }
        if snapshot.ksm.broken >= self.snapshot.ksm.broken + BROKEN_MIN {
            self.saving.note_change();
        }
        let limits_were_read = !Arc::ptr_eq(&self.snapshot.limits, &snapshot.limits);
        self.snapshot = snapshot;
        if limits_were_read {
            self.look_at_headroom();
        }
        if !self.snapshot.shows_frames {
            self.saving.adopt_counter(self.snapshot.ksm.saved(), now_ns);
            self.record_counted();
        } else if self.snapshot.ksm.merged() == Pages(0) {
            self.saving.adopt_none(now_ns);
            self.record_counted();
        }
        self.look_at_reserve();
        let (pace, lines) = (self.pace(), self.lines());
        if self.paused {
            self.reading = ReadPlan::default();
            let inspect = self.plan_count();
            let count = self.saving.is_asking();
            return SamplePlan { digest_seed: self.config.seed, lines, inspect, count, ..SamplePlan::default() };
        }
        let new_round = self.ladder.start_round(now_ns, pace);
        let room = self.room_ns(pace) / self.ladder.sample_ns();
        self.reading = self.ladder.plan(&mut self.table, room, new_round, pace, &mut self.allowance, &self.config);
        let mut runs = std::mem::take(&mut self.reading.runs);
        self.visiting = new_round && self.is_breaking() && !self.scheduler.is_busy();
        if self.visiting {
            let visits = share_ns(pace.round_ns, VISIT_SHARE.min(pace.top)) / self.ladder.sample_ns();
            self.ladder.visit_merged(&mut self.table, visits, &mut self.allowance, &mut runs);
        }
        self.planned = runs.iter().map(|run| u64::from(run.pages)).sum();
        // We read neighbouring pages together.
        runs.sort_by_key(|run| (run.region, run.first));
        let mut activity = BTreeSet::new();
        if self.snapshot.nodes.len() > 1 {
            let is_read = |key: RegionKey| runs.binary_search_by_key(&key, |run| run.region).is_ok();
            let asked = |region: &&Region| region.shows_activity() && is_read(region.view.key);
            activity.extend(self.table.iter().filter(asked).map(|region| region.view.key));
        }
        let (merging, room_ns) = (self.scheduler.is_busy(), self.room_ns(pace));
        let mut inspect = self.placer.inspect(&self.table, &self.snapshot, merging, room_ns);
        let mut charged_to = None;
        if inspect.is_empty() {
            (inspect, charged_to) = self.relief.inspect();
        }
        if inspect.is_empty() {
            inspect = self.plan_count();
        }
        let count = self.saving.is_asking();
        let colliding = self.colliding.clone();
        SamplePlan { runs, digest_seed: self.config.seed, lines, colliding, activity, inspect, charged_to, count }
    }

    /// Whether we can hash pages in part: the kernel hashes them, and compares pages before it merges them.
    fn hashes_lines(&self) -> bool {
        self.snapshot.hashes_lines && self.on_request()
    }

    /// How many cache lines to hash of each page; `None` means whole pages. We also hash whole pages if nothing gets
    /// merged: then our reports rest on digests alone.
    fn lines(&mut self) -> Option<u32> {
        if !self.hashes_lines() {
            return None;
        }
        if !self.snapshot.ksm.ours && self.strength.raise_to_full() {
            self.forget_digests();
        }
        Some(self.strength.lines()).filter(|&lines| lines < LINES)
    }

    /// Forgets all digests because new ones won't be comparable. Regions without merged pages are surveyed again, not
    /// read whole right away: their pages looked alike because they differ in few bytes, and with more lines hashed
    /// most no longer do.
    fn forget_digests(&mut self) {
        self.index = Index::new();
        self.colliding = Arc::default();
        self.colliding_fingerprints.clear();
        self.bottom_pages = 0;
        let top = self.ladder.levels();
        self.table.iter_mut().for_each(|region| region.forget_digests(top));
    }

    /// Checks that there's room if merged pages come back as copies. Where memory is short, we stop merging.
    fn look_at_reserve(&mut self) {
        let Snapshot { now_ns, ksm, memory, limits, .. } = &self.snapshot;
        if !self.reserve.is_due(*now_ns) {
            return;
        }
        self.reserve.count_copies(*now_ns, ksm.broken, self.marker.is_unmarking());
        let mut worst: FxHashMap<OwnerKey, Pages> = FxHashMap::default();
        if !limits.is_empty() {
            let on_request = self.on_request();
            for region in self.table.iter() {
                *worst.entry(region.view.owner).or_default() += region.may_return(on_request);
            }
        }
        let worst_of = |owner| worst.get(&owner).copied().unwrap_or_default();
        if self.reserve.look(self.config.reserve.keep, memory, self.returns_at_worst(), limits, worst_of) {
            for region in self.table.iter_mut() {
                region.hold.short = self.reserve.is_short_for(region.view.owner);
            }
        }
    }

    /// Works out how much we may still merge below cgroup limits. Regions that had no headroom are judged again once
    /// there is some.
    fn look_at_headroom(&mut self) {
        let on_request = self.on_request();
        let Snapshot { now_ns, memory, limits, .. } = &self.snapshot;
        let mut scope = FxHashSet::default();
        let mut mergeable: FxHashMap<OwnerKey, Pages> = FxHashMap::default();
        if !limits.is_empty() {
            for region in self.table.iter() {
                scope.insert(region.view.owner);
                *mergeable.entry(region.view.owner).or_default() += region.mergeable(on_request);
            }
        }
        self.headroom.look(self.config.reserve.keep, memory.total, limits, &scope, &mergeable);
        self.needs_relief = false;
        if self.snapshot.ksm.ours && self.snapshot.ksm.merged() > Pages(0) {
            let exceeded = self.headroom.exceeded();
            self.relief.keep_only(&exceeded);
            for (key, over) in exceeded {
                let Some(view) = limits.iter().find(|view| view.key == key) else { continue };
                self.needs_relief |= self.relief.is_wanted(view, over);
                if !self.marker.is_unmarking() {
                    self.relief.begin(view, over, &self.table, *now_ns);
                }
            }
        }
        let levels = self.ladder.levels();
        for region in self.table.iter_mut().filter(|region| region.hold.full.is_some()) {
            let headroom = self.headroom.of(region.view.owner);
            if headroom.is_some_and(|(_, left)| left < Pages(EXTENT_PAGES)) || !region.life.is_judged() {
                continue;
            }
            if !on_request {
                region.life.advance(Event::Reopen);
            } else if region.hold.may_examine(*now_ns) {
                region.hold.full = None;
                region.hold.put_off(*now_ns);
                region.examine(levels);
            }
        }
    }

    /// Whether ksmd may not merge now, because a cgroup may already keep too many pages for others.
    fn may_not_merge(&self) -> bool {
        self.needs_relief || self.relief.is_busy() || self.marker.is_relieving(self.snapshot.now_ns)
    }

    /// Unmerges regions that hold pages charged to a cgroup without headroom for them, as far as their copies fit on
    /// the machine and below their own processes' limits.
    fn relieve(&mut self, merged: &[MergedSample]) {
        let Snapshot { now_ns, memory, limits, .. } = &self.snapshot;
        let on_request = self.config.mechanism == Mechanism::Request;
        let keep = self.config.reserve.keep;
        let Some(relieved) = self.relief.record(&self.table, merged, limits, keep, *now_ns) else { return };
        let mut spare = self.reserve.spare(memory);
        let mut taken: FxHashMap<LimitKey, Pages> = FxHashMap::default();
        for (key, page) in relieved.others {
            let Some(region) = self.table.at_mut(key, page) else { continue };
            // Another program's marks aren't ours to undo.
            if !on_request && region.marks.spans.is_empty() {
                continue;
            }
            let (owner, merged) = (region.view.owner, region.mergeable(on_request));
            let mut copies = merged.min(spare);
            for view in limits.iter().filter(|view| view.owners.contains(&owner)) {
                let used = taken.get(&view.key).copied().unwrap_or_default() + UNMERGE_STEP + margin_below(view.limit);
                copies = copies.min(view.left.saturating_sub(used));
            }
            // We don't split small mappings.
            if copies < merged.min(Pages(EXTENT_PAGES)) || copies < merged && region.view.pages < SPLIT_FROM {
                continue;
            }
            spare = spare - copies;
            for view in limits.iter().filter(|view| view.owners.contains(&owner)) {
                *taken.entry(view.key).or_default() += copies;
            }
            self.marker.take_apart(region, merged - copies, *now_ns, Why::Charge, LeaveAlone::Relieved);
        }
        // On request, we don't merge anything again without headroom.
        for (key, page) in relieved.own.into_iter().filter(|_| !on_request) {
            if let Some(region) = self.table.at_mut(key, page) {
                self.marker.give_up(region, relieved.limit);
            }
        }
    }

    pub fn reserve(&self) -> &Reserve {
        &self.reserve
    }

    /// Unmerges memory step by step if memory is short and the config allows it.
    fn take_back(&mut self) {
        if !self.config.reserve.take_back || !self.snapshot.ksm.ours {
            return;
        }
        let Snapshot { now_ns, memory, limits, .. } = &self.snapshot;
        if let Some(step) = self.reserve.step(*now_ns, memory, limits) {
            self.marker.take_back(&mut self.table, *now_ns, &step);
        }
    }

    /// Whether enough merged pages were copied since the last round to go and find out which.
    fn is_breaking(&mut self) -> bool {
        let broken = self.snapshot.ksm.broken;
        broken.saturating_sub(std::mem::replace(&mut self.broken_before, broken)) >= BROKEN_MIN
    }

    fn on_request(&self) -> bool {
        self.config.mechanism == Mechanism::Request
    }

    /// Judges the samples.
    pub fn judge(&mut self, samples: &Samples) -> Actions {
        let (now_ns, on_request) = (self.snapshot.now_ns, self.on_request());
        self.read = samples.pages.iter().map(|sample| u64::from(sample.state.is_read())).sum();
        (self.read_ns, self.reading_ns) = (self.read_ns + samples.cpu_ns, Some(samples.cpu_ns));
        self.ledger.pages_read += self.read;
        self.record_samples(samples);
        if self.saving.is_asking() {
            self.has_counted = true;
            self.record_saving(samples);
        } else if self.relief.is_asking() {
            self.relieve(&samples.merged);
        } else {
            self.placer.record(&self.table, &samples.merged, &self.snapshot, self.config.latencies);
        }
        for (slot, end) in std::mem::take(&mut self.reading.whole) {
            let Some(region) = self.table.get_mut(slot) else { continue };
            region.life.advance(Event::ReadTo(end));
            if end >= region.end() {
                region.judged(now_ns, on_request);
            }
        }
        if self.paused {
            self.requests.clear();
            return Actions { scan: self.scheduler.suspend(&self.snapshot.ksm), ..Actions::default() };
        }
        let pace = self.pace();
        self.reading.foreground |= self.ladder.promote(&mut self.table, now_ns, pace, &self.config);
        if self.reading.new_round {
            self.end_round();
            self.marker.find_cow_broken(&mut self.table, now_ns, &self.config);
        }
        if self.on_request() {
            return self.request();
        }
        self.take_back();
        let unmark = self.marker.unmark(&self.table, now_ns, &mut self.allowance).into_iter().collect();
        // Comes before new marks, so that small ones can share its scans.
        if !self.reserve.is_short() {
            self.marker.refresh(&mut self.table, now_ns, self.snapshot.ksm.broken, &mut self.scheduler, pace);
        }
        if self.snapshot.foreign_marks {
            // Otherwise ksmd would merge memory of two trust domains.
            let scan = self.scheduler.suspend(&self.snapshot.ksm);
            return Actions { unmark, stop: self.allowance.stop_size(), scan, ..Actions::default() };
        }
        let more = self.reading.foreground;
        let means =
            Means { scheduler: &mut self.scheduler, allowance: &mut self.allowance, headroom: &mut self.headroom };
        let mark = self.marker.mark(&mut self.table, now_ns, more, pace, means, &self.config);
        let inputs = Inputs {
            now_ns,
            ksm: &self.snapshot.ksm,
            ksmd_ns: self.snapshot.cost.ksmd_ns,
            marked: marked_resident(&self.table),
            settled: mark.is_empty() && !self.reading.foreground && !self.marker.is_holding(),
            pace,
            room_ns: self.budget.room_ns(pace),
            hold: self.may_not_merge(),
            limits_read_ns: self.headroom.read_ns(),
        };
        let scan = self.scheduler.order(&inputs);
        let moves = self.moves();
        Actions { mark, unmark, stop: self.allowance.stop_size(), scan, merge: Vec::new(), moves }
    }

    fn request(&mut self) -> Actions {
        if !self.snapshot.ksm.ours {
            self.requests.clear();
        }
        let unmark = self.marker.unmark(&self.table, self.snapshot.now_ns, &mut self.allowance).into_iter().collect();
        let (merge, moves) = (self.requests.ranges(), self.moves());
        Actions { unmark, merge, moves, ..Actions::default() }
    }

    /// The merged frames to move to another NUMA node.
    fn moves(&mut self) -> Vec<Move> {
        let may_move = if self.snapshot.ksm.ours { self.allowance.moves_left() } else { 0 };
        let moves = self.placer.moves(may_move, self.budget.room_ns(self.pace()), &self.ledger);
        self.allowance.use_moves(count(moves.len()));
        moves
    }

    /// Once a round, regions with all their duplicates merged return to the bottom level, and the index ages.
    fn end_round(&mut self) {
        let busy = self.scheduler.is_busy();
        for region in self.table.iter_mut() {
            if region.life.is_judged() && !region.life.is_worth_marking() && !busy {
                region.life.advance(Event::Sink);
            }
        }
        let pages: u64 = self.table.iter().map(|region| region.view.pages.0).sum();
        if self.bottom_pages > pages {
            // By now we've sampled every page of the bottom level about once.
            self.bottom_pages = 0;
            self.index.age();
            self.requests.age();
            let table = &self.table;
            self.index.sweep(|page| match table.get(page.slot) {
                None => PageStatus::Removed,
                // We keep sampling regions on the bottom level, which renews their entries.
                Some(region) if region.life.level() == 1 && region.hold.may_sample() => PageStatus::Resampled,
                Some(_) => PageStatus::Present,
            });
            self.table.release_slots();
            self.table.iter_mut().for_each(|region| region.survey.tally.age());
        }
    }

    /// Accounts for the actions' outcome and returns how long to wait before the next cycle, nanoseconds.
    pub fn account(&mut self, actions: &Actions, outcome: &Outcome) -> u64 {
        self.ledger.record(actions, outcome);
        self.reading_ns = self.reading_ns.filter(|_| !actions.change_targets());
        let (mut collisions, colliding) = (0, Arc::make_mut(&mut self.colliding));
        let spared = self.requests.record(&outcome.merges, &mut self.table, &mut self.index, |digest| {
            collisions += 1;
            colliding.insert(digest);
            self.colliding_fingerprints.insert(digest.fingerprint());
        });
        collisions += spared;
        if colliding.len() > COLLIDING_MOST || self.strength.lines() == LINES {
            colliding.clear();
            self.colliding_fingerprints.clear();
        }
        let compares = self.hashes_lines() && self.snapshot.ksm.ours;
        if compares && self.strength.record(self.read, collisions, count(self.index.len())) {
            self.forget_digests();
        }
        self.placer.record_moved(outcome.moved);
        if !actions.mark.is_empty() {
            self.allowance.adapt_stop_size(&outcome.stops);
        }
        self.marker.record_marked(&mut self.table, self.snapshot.now_ns, outcome, &mut self.scheduler);
        self.marker.record_unmarked(self.snapshot.now_ns, outcome);
        self.decide_all();
        self.wait_ns()
    }
}
