//! One cycle, from top to bottom: read this first.
//!
//! ```text
//! observe -> plan -> read -> judge -> apply -> account
//! ```
//!
//! The host observes, reads and applies. We plan what to read, judge the samples, and account for the work.

use super::Engine;
use super::pacing::OBSERVE_NS;
use crate::governor::{Governor, share_ns};
use crate::host::{Actions, Counted, Host, Marking, Move, Outcome, PageRun, SamplePlan, Samples, Snapshot};
use crate::keys::RegionKey;
use crate::region::{Event, Region};
use crate::sampling::ladder::ReadPlan;
use crate::saving::Activity;
use crate::units::{Pages, Permyriad, count};
use std::collections::BTreeSet;
use std::sync::Arc;

/// While programs write to merged pages, we visit merged pages to see which ones last. Visits may take this share of a
/// core.
const VISIT_SHARE: Permyriad = Permyriad(20);
/// We visit merged pages once at least this many were copied in one round.
const BROKEN_MIN: u64 = 16;
/// A page that we read costs as much as this many pages of the plan that turn out to be absent, or that we don't read.
const UNREAD_PART: u64 = 8;

#[derive(Debug)]
pub struct Cycle {
    /// How long to wait before the next cycle, nanoseconds.
    pub wait_ns: u64,
    pub outcome: Outcome,
}

/// Everything we read in one cycle.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub reading: ReadPlan,
    /// Pages in the plan, and how many of them we read.
    pub pages: u64,
    pub read: u64,
    /// Unread pages that we ask the kernel to merge with an older clone's pages at the same offsets.
    pub named: u64,
    /// Whether we visit merged pages, because programs wrote to some in the last round.
    pub visiting: bool,
    /// `KsmView::broken` when the round began.
    pub broken_before: u64,
    /// Whether we counted the saving.
    pub has_counted: bool,
}

impl Plan {
    /// If we read few of the plan's pages: how many pages read would cost as much as the whole plan did.
    pub fn effort_for_holes(&self) -> Option<u64> {
        let done = self.read + self.named;
        let effort = done + self.pages.saturating_sub(done) / UNREAD_PART;
        (done < self.pages / UNREAD_PART).then_some(effort)
    }
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

/// Counts the saving once more at the end of a run.
///
/// # Errors
///
/// Host errors that we can't continue from.
pub fn count_saving<H: Host>(engine: &mut Engine, host: &mut H) -> Result<(), H::Error> {
    let snapshot = host.observe()?;
    // We don't carry out this plan, but only read the pages that the count needs.
    engine.plan(snapshot);
    engine.saving.count_now();
    let inspect = engine.plan_count();
    let samples = host.read(&SamplePlan { inspect, count: true, ..SamplePlan::default() })?;
    engine.record_saving(&samples);
    Ok(())
}

impl Engine {
    /// Adopts a snapshot of the machine and plans what to read.
    pub fn plan(&mut self, snapshot: Snapshot) -> SamplePlan {
        self.record_cost(&snapshot);
        self.adopt_snapshot(snapshot);
        self.adopt_saving();
        self.holdings.follow(&self.snapshot.held, self.saving.latest(), self.snapshot.now_ns);
        self.look_at_reserve();
        self.requests.go_on(&self.table, &mut self.room.headroom);
        self.plan = Plan { broken_before: self.plan.broken_before, ..Plan::default() };
        let mut plan = SamplePlan { digest_seed: self.config.seed, lines: self.lines(), ..SamplePlan::default() };
        if !self.spending.paused {
            plan.colliding = self.contents.colliding.clone();
            plan.runs = self.plan_runs();
            let has_nodes = self.snapshot.nodes.len() > 1;
            // Once all other sharers of a merged page have written theirs, this page no longer looks merged.
            // `PageSample::lone` shows that it wasn't written, so we ask for that where we observe COW breaks.
            let is_observed = |region: &Region| region.usage.cow_breaks.observed() > 0;
            let wants_flags = |region: &Region| {
                is_observed(region) || has_nodes && region.shows_activity() || self.may_be_charged_elsewhere(region)
            };
            plan.activity = self.keys_among(&plan.runs, wants_flags);
            plan.forked = self.forked_among(&plan.runs);
            self.plan_inspection(&mut plan);
        }
        if plan.inspect.is_empty() {
            plan.inspect = self.plan_count();
        }
        plan.count = self.saving.is_asking();
        plan
    }

    pub fn judge(&mut self, samples: &Samples) -> Actions {
        self.record_reading(samples);
        self.record_inspection(samples);
        self.end_examinations(&samples.unread);
        if self.spending.paused {
            self.requests.clear();
            return Actions { scan: self.ksmd.scheduler.suspend(&self.snapshot.ksm), ..Actions::default() };
        }
        if self.plan.reading.new_round {
            self.follow_relatives();
        }
        let now_ns = self.snapshot.now_ns;
        let pace = self.pace();
        self.welcome_clones();
        self.plan.reading.foreground |= self.ladder.promote(&mut self.table, now_ns, pace, &self.config);
        // We promote regions before we look for memory that didn't merge: new ones may just have become old enough to
        // be read.
        if self.plan.has_counted {
            self.find_unmerged(&samples.merged, samples.counted.as_ref());
        } else if self.snapshot.shows_frames && self.is_nothing_merged() {
            self.find_unmerged(&[], Some(&Counted::default()));
        }
        if self.plan.reading.new_round {
            self.end_round();
            let top = self.ladder.levels();
            self.ksmd.marker.find_cow_broken(&mut self.table, now_ns, top, pace, &self.config);
        }
        self.planner().actions(self)
    }

    /// Accounts for the actions' outcome and returns how long to wait before the next cycle, nanoseconds.
    pub fn account(&mut self, actions: &Actions, outcome: &Outcome) -> u64 {
        let now_ns = self.snapshot.now_ns;
        self.ledger.record(actions, outcome);
        self.saving.note_unmarked(&self.table, &outcome.unmarked);
        self.spending.changed_targets |= actions.change_targets();
        self.account_for_pairs(outcome);
        self.placer.record_moved(outcome.moved);
        if !actions.mark.is_empty() {
            self.spending.allowance.adapt_stop_size(&outcome.stops);
        }
        self.ksmd.marker.record_marked(&mut self.table, now_ns, outcome, &mut self.ksmd.scheduler);
        self.ksmd.marker.unmarking.record(&self.table, now_ns, outcome);
        self.decide_all();
        if outcome.marked.iter().any(|result| result.marking == Marking::Untried) {
            return self.wait_ns().min(OBSERVE_NS);
        }
        self.wait_ns()
    }

    fn adopt_snapshot(&mut self, snapshot: Snapshot) {
        self.config.mechanism = snapshot.mechanism;
        self.spending.allowance.advance(snapshot.now_ns);
        self.spending.allowance.set_groups(snapshot.groups.clone(), self.ladder.sample_ns());
        if self.config.governor == Governor::Auto {
            let in_force = self.spending.governor;
            self.spending.governor = Governor::chosen(in_force, &snapshot.memory, snapshot.cpu_pressure);
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
    }

    /// Takes the saving from KSM's counters if the host can't look up frames, or if nothing is merged.
    fn adopt_saving(&mut self) {
        let Snapshot { now_ns, ksm, shows_frames, .. } = &self.snapshot;
        if !shows_frames {
            self.saving.adopt_counter(ksm.saved(), *now_ns);
        } else if self.is_nothing_merged() {
            self.saving.adopt_none(*now_ns);
        }
        if self.saving().is_none() {
            self.saving.note_change();
        }
        self.record_counted();
    }

    /// Whether we know that nothing is merged on the whole machine. KSM doesn't count zeros of huge pages that it has
    /// split, so we also check whether any region may have such zeros.
    fn is_nothing_merged(&self) -> bool {
        let may_be = |region: &Region| !region.usage.own.is_empty() && !region.mergeable_runs().is_empty();
        self.snapshot.ksm.merged() == Pages(0) && !self.table.iter().any(may_be)
    }

    /// The pages to read for the ladder, and the merged pages to visit.
    fn plan_runs(&mut self) -> Vec<PageRun> {
        let pace = self.pace();
        let new_round = self.ladder.start_round(self.snapshot.now_ns, pace);
        let room = self.spending.room_ns(pace) / self.ladder.sample_ns();
        let allowance = &mut self.spending.allowance;
        self.plan.reading = self.ladder.plan(&mut self.table, room, new_round, pace, allowance, &self.config);
        let mut runs = std::mem::take(&mut self.plan.reading.runs);
        if new_round {
            let broken = self.snapshot.ksm.broken;
            let is_breaking = broken.saturating_sub(self.plan.broken_before) >= BROKEN_MIN;
            self.plan.broken_before = broken;
            self.plan.visiting = is_breaking && !self.ksmd.scheduler.is_busy();
        }
        if self.plan.visiting {
            let visits = share_ns(pace.round_ns, VISIT_SHARE.min(pace.top)) / self.ladder.sample_ns();
            self.ladder.visit_merged(&mut self.table, visits, pace.round_ns, allowance, &mut runs);
        }
        self.plan.pages = runs.iter().map(|run| u64::from(run.pages)).sum();
        // We read neighbouring pages together. Mappings that the host didn't get to last time come first, so that one
        // slow mapping can't keep us from the others again and again.
        let missed = self.table.iter().filter(|region| region.survey.is_unread());
        let missed: BTreeSet<RegionKey> = missed.map(|region| region.view.key).collect();
        runs.sort_by_key(|run| (!missed.contains(&run.region), run.region, run.first));
        runs
    }

    /// The keys of the mappings in `runs` that have a region which `is_wanted` accepts.
    fn keys_among(&self, runs: &[PageRun], is_wanted: impl Fn(&Region) -> bool) -> BTreeSet<RegionKey> {
        let mut keys = BTreeSet::new();
        for run in runs {
            if self.table.at(run.region, run.first).is_some_and(&is_wanted) {
                keys.insert(run.region);
            }
        }
        keys
    }

    /// Plans which merged pages to look up, to learn their memory nodes. If none are due for that, we look for pages
    /// that are charged to a cgroup short of headroom.
    fn plan_inspection(&mut self, plan: &mut SamplePlan) {
        let is_merging = self.ksmd.scheduler.is_busy();
        let room_ns = self.spending.room_ns(self.pace());
        plan.inspect = self.placer.inspect(&self.table, &self.snapshot, is_merging, room_ns);
        if plan.inspect.is_empty() {
            (plan.inspect, plan.charged_to) = self.room.relief.inspect();
        }
    }

    /// The pages to look up now to count the saving.
    fn plan_count(&mut self) -> Vec<PageRun> {
        if !self.snapshot.shows_frames || self.snapshot.is_starting || self.is_nothing_merged() {
            return Vec::new();
        }
        let activity = Activity { busy: self.is_busy(), reading: self.plan.reading.foreground };
        self.saving.plan(&self.table, self.snapshot.now_ns, activity, self.snapshot.ksm.saved())
    }

    fn record_reading(&mut self, samples: &Samples) {
        self.spending.record_reading(samples.cpu_ns);
        self.record_samples(samples);
        self.ledger.pages_read += self.plan.read;
    }

    /// Records the merged pages that we looked up, for the part of the engine that asked for them.
    fn record_inspection(&mut self, samples: &Samples) {
        if self.saving.is_asking() {
            self.plan.has_counted = true;
            self.record_saving(samples);
        } else if self.room.relief.is_asking() {
            self.relieve(&samples.merged);
        } else {
            self.placer.record(&self.table, &samples.merged, &self.snapshot, self.config.latencies);
        }
    }

    fn record_saving(&mut self, samples: &Samples) {
        let Snapshot { now_ns, ksm, .. } = &self.snapshot;
        self.saving.record(&self.table, &samples.merged, samples.counted.as_ref(), ksm.saved(), *now_ns);
        self.record_counted();
    }

    fn record_counted(&mut self) {
        if let Some(saving) = self.saving.latest() {
            self.ledger.record_saving(saving);
        }
    }

    /// Notes how far we are in the regions that we're reading whole, and judges the ones that we've read to the end. If
    /// the host didn't get to a mapping, we plan to read the same pages again.
    fn end_examinations(&mut self, unread: &BTreeSet<RegionKey>) {
        for region in self.table.iter_mut() {
            region.survey.record_planned(!unread.contains(&region.view.key));
        }
        let by_marks = self.by_marks();
        for (slot, end) in std::mem::take(&mut self.plan.reading.whole) {
            let Some(region) = self.table.get_mut(slot) else { continue };
            if unread.contains(&region.view.key) {
                continue;
            }
            region.life.advance(Event::ReadTo(end));
            if end >= region.end() {
                region.judged(self.snapshot.now_ns, !by_marks);
            }
        }
    }

    /// Called once a round. Reads regions again that may have more merged pages than we know, moves regions with
    /// nothing left to mark to the bottom level, and ages the index if it's time.
    fn end_round(&mut self) {
        let is_busy = self.ksmd.scheduler.is_busy();
        let now_ns = self.snapshot.now_ns;
        let top = self.ladder.levels();
        let mut pages = 0;
        for region in self.table.iter_mut() {
            pages += region.view.pages.0;
            let is_due = region.usage.readings_due > 0 && !region.life.is_reading();
            if is_due && self.room.headroom.is_limited(region.view.owner) && region.hold.may_examine(now_ns) {
                region.examine(top);
            }
            if region.life.is_settled() && !is_busy {
                region.life.advance(Event::Sink);
            }
        }
        if self.contents.bottom_pages > pages {
            // By now we've sampled every page of the bottom level about once.
            self.contents.age(&self.table);
            self.requests.age();
            self.table.release_slots();
            self.table.iter_mut().for_each(|region| region.survey.age());
        }
    }

    /// The merged frames to move to another NUMA node.
    pub(super) fn moves(&mut self) -> Vec<Move> {
        let may_move = if self.snapshot.ksm.ours { self.spending.allowance.moves_left() } else { 0 };
        let room_ns = self.spending.total.room_ns(self.pace());
        let moves = self.placer.moves(may_move, room_ns, &self.ledger);
        self.spending.allowance.use_moves(count(moves.len()));
        moves
    }

    /// Records what became of the pairs of pages that we asked the kernel to merge.
    fn account_for_pairs(&mut self, outcome: &Outcome) {
        let now_ns = self.snapshot.now_ns;
        self.record_kin(&outcome.merges);
        let index = &mut self.contents.index;
        let collisions = self.requests.record(&outcome.merges, &mut self.table, index, now_ns);
        self.contents.note_colliding(&collisions.digests);
        let number = count(collisions.digests.len()) + collisions.spared;
        let contents = count(self.contents.index.len());
        let compares = self.hashes_lines() && self.snapshot.ksm.ours;
        if compares && self.contents.strength.record(self.plan.read, number, contents) {
            self.forget_digests();
        }
    }
}
