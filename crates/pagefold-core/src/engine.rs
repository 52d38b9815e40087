//! One round: plan what to read, judge what was read, account for what was done.
//!
//! ```text
//! observe -> plan -> read -> judge -> apply -> account
//! ```
//!
//! What is read is the [`crate::sampling::ladder`]'s to say, what is marked the [`crate::marking::marker`]'s, and when ksmd scans the
//! [`crate::merging`]r's; a [`crate::governor`] bounds what all of it may cost.

use crate::config::Config;
use crate::governor::{Budget, Governor, Pace, share_ns};
use crate::hash::Digest;
use crate::host::{Actions, Cost, Host, KsmView, Outcome, PageSample, PageState, SamplePlan, Samples, Snapshot};
use crate::index::{Fate, Index, Place, Seen};
use crate::keys::{DomainKey, RegionKey};
use crate::ledger::Ledger;
use crate::limits::{Allowance, Limits};
use crate::marking::lifetimes::Lifetimes;
use crate::marking::marker::{Marker, marked_resident};
use crate::merging::{Merger, Scan};
use crate::placement::placer::Placer;
use crate::region::table::Slots;
use crate::region::{Region, Stage};
use crate::report::{self, Report};
use crate::sampling::ladder::{Ladder, Reading};
use crate::units::{Pages, Permyriad, Vpn};
use std::collections::BTreeSet;

/// While ksmd works it is looked after at least this often, nanoseconds.
const LOOK_NS: u64 = 50_000_000;
/// The share of a core that looking after ksmd may take is this fraction of the governor's.
const LOOK_SHARE: u64 = 10;
/// What a look costs as long as none has been measured, nanoseconds.
const LOOK_COST_NS: u64 = 200_000;
/// Reading stays within its share over this time, so that programs never wait for long, nanoseconds.
const SMOOTH_NS: u64 = 1_000_000_000;
/// Share of a core for visiting merged pages, while copies are being made because merged pages are written.
const VISIT_SHARE: Permyriad = Permyriad(20);
/// Copies of merged pages in one round that are worth looking into.
const BROKEN_MIN: u64 = 16;

/// The judgement of one run.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// The governor in force: the one configured, or the one that `Auto` has chosen.
    governor: Governor,
    budget: Budget,
    allowance: Allowance,
    index: Index,
    slots: Slots,
    ladder: Ladder,
    marker: Marker,
    merger: Merger,
    placer: Placer,
    lifetimes: Lifetimes,
    ledger: Ledger,
    snapshot: Snapshot,
    /// The trust domains of the regions.
    domains: BTreeSet<DomainKey>,
    /// The first snapshot has been taken in: what appears from now on is new.
    running: bool,
    reading: Reading,
    /// `KsmView::broken` at the beginning of the round.
    broken_before: u64,
    /// The current plan looks what becomes of merged pages, because the last round had copies of them.
    visiting: bool,
    /// Pages in the current plan, and those of them that were read.
    planned: u64,
    read: u64,
    /// Pages read at the bottom since the index last aged.
    bottom_pages: u64,
    /// What a round in which nothing is read costs at least, nanoseconds: more, the more processes there are.
    look_cost_ns: u64,
    paused: bool,
}

/// Runs one round on a host; returns how long to wait before the next, in nanoseconds.
pub fn round<H: Host>(engine: &mut Engine, host: &mut H) -> Result<u64, H::Error> {
    let snapshot = host.observe()?;
    let plan = engine.plan(snapshot);
    let samples = host.read(&plan)?;
    let actions = engine.judge(&samples);
    let outcome = host.apply(&actions)?;
    Ok(engine.account(&actions, &outcome))
}

impl Engine {
    /// A judgement that knows nothing yet.
    pub fn new(config: Config) -> Self {
        let governor = if config.governor == Governor::Auto { Governor::Quiet } else { config.governor };
        let (ladder, allowance) = (Ladder::new(config.levels), Allowance::new(config.limits));
        Self {
            config,
            governor,
            budget: Budget::default(),
            allowance,
            index: Index::new(),
            slots: Slots::default(),
            ladder,
            marker: Marker::default(),
            merger: Merger::default(),
            placer: Placer::default(),
            lifetimes: Lifetimes::default(),
            ledger: Ledger::default(),
            snapshot: Snapshot::default(),
            domains: BTreeSet::new(),
            running: false,
            reading: Reading::default(),
            broken_before: 0,
            visiting: false,
            planned: 0,
            read: 0,
            bottom_pages: 0,
            look_cost_ns: LOOK_COST_NS,
            paused: false,
        }
    }

    /// The account so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Takes note of how things stand after the last round.
    pub fn close(&mut self, now_ns: u64, ksm: &KsmView, cost: Cost) {
        self.ledger.look(now_ns, ksm, cost);
    }

    /// The regions under judgement.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.slots.iter()
    }

    /// Scans completed by ksmd on our order.
    pub fn scans(&self) -> u64 {
        self.merger.scans()
    }

    /// Whether reading, marking or merging is under way; if not, only watching goes on.
    pub fn is_busy(&self) -> bool {
        self.reading.foreground || self.marker.is_holding() || self.is_merging() || self.placer.is_busy()
    }

    /// Whether ksmd is at work for us, or about to be.
    fn is_merging(&self) -> bool {
        self.snapshot.ksm.ours && self.merger.is_busy()
    }

    /// Another governor from now on.
    pub fn set_governor(&mut self, governor: Governor) {
        self.config.governor = governor;
        if governor != Governor::Auto {
            self.governor = governor;
        }
    }

    /// Other limits from now on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.config.limits = limits;
        self.allowance.set_limits(limits);
    }

    /// Reads nothing and orders nothing until told to go on. What is merged stays merged.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Everything that is known, for people.
    pub fn report(&self) -> Report {
        let standing = report::Standing {
            config: &self.config,
            governor: self.governor,
            pace: self.pace(),
            now_ns: self.snapshot.now_ns,
            lifetimes: &self.lifetimes,
            ladder: &self.ladder,
            busy: self.is_busy(),
            paused: self.paused,
            merging: self.is_merging(),
            index: (self.index.len(), self.index.bytes()),
            spent_ns: self.budget.spent_ns(crate::governor::WINDOW_NS),
            ksm: self.snapshot.ksm,
            places: self.placer.places(),
        };
        report::report(&standing, &self.slots, &self.ledger)
    }

    /// Whether it was told to pause.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    fn pace(&self) -> Pace {
        self.config.pace(self.governor)
    }

    /// Takes in a look at the machine and plans what to read.
    pub fn plan(&mut self, snapshot: Snapshot) -> SamplePlan {
        let now_ns = snapshot.now_ns;
        // The cost of a sample is everything that its round has cost, so that a share holds for all of it.
        let round_ns = snapshot.cost.pagefold_ns.saturating_sub(self.snapshot.cost.pagefold_ns);
        if self.planned == 0 && round_ns > 0 {
            // Down at once: now and then a look does more, as to count pages, which is no reason to look more seldom.
            let most_ns = self.look_cost_ns + self.look_cost_ns / 16;
            self.look_cost_ns = round_ns.min(most_ns).max(LOOK_COST_NS / 16);
        }
        self.ladder.measured(std::mem::take(&mut self.read), round_ns);
        self.ledger.look(now_ns, &snapshot.ksm, snapshot.cost);
        self.budget.look(now_ns, snapshot.cost);
        self.allowance.turn(now_ns);
        if self.config.governor == Governor::Auto {
            self.governor = Governor::for_memory(self.governor, &snapshot.memory);
        }
        if !self.running || snapshot.regions != self.snapshot.regions {
            self.take_in(&snapshot);
        }
        self.snapshot = snapshot;
        let pace = self.pace();
        if self.paused {
            self.reading = Reading::default();
            return SamplePlan { digest_seed: self.config.seed, ..SamplePlan::default() };
        }
        let fresh = self.ladder.turn(now_ns, pace);
        self.visiting = false;
        let room = self.room_ns(pace) / self.ladder.sample_ns();
        self.reading = self.ladder.plan(&mut self.slots, room, fresh, pace, (&mut self.allowance, &self.config));
        let mut runs = std::mem::take(&mut self.reading.runs);
        if fresh {
            let broken = self.snapshot.ksm.broken;
            let breaking = broken.saturating_sub(self.broken_before) >= BROKEN_MIN;
            self.broken_before = broken;
            self.visiting = breaking && !self.merger.is_busy();
            if self.visiting {
                let visits = share_ns(pace.round_ns, VISIT_SHARE.min(pace.top)) / self.ladder.sample_ns();
                self.ladder.visit(&mut self.slots, visits, &mut self.allowance, &mut runs);
            }
        }
        self.planned = runs.iter().map(|run| u64::from(run.pages)).sum();
        // By region and address: what lies together is read together.
        runs.sort_by_key(|run| (run.region, run.first));
        let mut activity = BTreeSet::new();
        if self.snapshot.nodes.len() > 1 {
            let is_read = |key: RegionKey| runs.binary_search_by_key(&key, |run| run.region).is_ok();
            let asked = |region: &&Region| region.tells_activity() && is_read(region.view.key);
            activity.extend(self.slots.iter().filter(asked).map(|region| region.view.key));
        }
        let looks = self.placer.looks(&self.slots, &self.snapshot, self.merger.is_busy(), self.room_ns(pace));
        let shared = self.several_domains();
        SamplePlan { runs, digest_seed: self.config.seed, shared, activity, looks }
    }

    /// Whether there is memory that must not be merged with other memory in scope.
    fn several_domains(&self) -> bool {
        self.domains.len() > 1
    }

    /// Takes note of the trust domains there are. As long as there is one, nothing is claimed; when a second appears, all
    /// that is marked must be claimed before anything else is marked.
    fn take_in_domains(&mut self, snapshot: &Snapshot) {
        let before = self.several_domains();
        self.domains = snapshot.regions.iter().map(|view| view.domain).collect();
        if self.several_domains() && !before {
            for region in self.slots.iter_mut() {
                region.claimed = false;
                if matches!(region.stage, Stage::Examine(_)) {
                    region.examine(self.ladder.levels());
                }
            }
        }
    }

    /// CPU time that reading may take now: within the share over the governor's window and over a short time.
    fn room_ns(&self, pace: Pace) -> u64 {
        let smooth_ns = share_ns(SMOOTH_NS, pace.top).saturating_sub(self.budget.spent_ns(SMOOTH_NS));
        self.budget.room_ns(pace).min(smooth_ns)
    }

    /// Regions that are new, have changed, or have gone.
    fn take_in(&mut self, snapshot: &Snapshot) {
        let (seed, newborn) = (self.config.seed, self.running);
        let gone =
            self.slots.take_in(&snapshot.regions, seed, |view| Region::new(view, snapshot.now_ns, newborn, seed));
        self.running = true;
        self.take_in_domains(snapshot);
        for region in gone {
            if region.newborn {
                self.lifetimes.gone(region.view.family, snapshot.now_ns - region.seen_ns, snapshot.now_ns);
            }
            let marked = region.marked_resident();
            if marked > Pages(0) {
                self.merger.owe_reaping(marked, snapshot.now_ns);
            }
        }
        if self.slots.want_sweep() {
            let slots = &self.slots;
            self.index.sweep(|place, _| if slots.get(place.slot).is_some() { Fate::Kept } else { Fate::Gone });
            self.slots.swept();
        }
    }

    /// Judges what was read.
    pub fn judge(&mut self, samples: &Samples) -> Actions {
        let (now_ns, several) = (self.snapshot.now_ns, self.several_domains());
        let read = samples.pages.iter().filter(|sample| sample.state.is_read(several)).count() as u64;
        self.ledger.pages_read += read;
        self.read = read;
        self.take_samples(samples);
        self.placer.take(&self.slots, &samples.merged, &self.snapshot, self.config.latencies);
        for (slot, end) in std::mem::take(&mut self.reading.whole) {
            let Some(region) = self.slots.get_mut(slot) else { continue };
            region.stage = Stage::Examine(end);
            if end.0 >= region.view.first.0 + region.view.pages.0 {
                region.judged(now_ns, several);
            }
        }
        if self.paused {
            let scan = self.merger.suspend(&self.snapshot.ksm);
            return Actions { scan, ..Actions::default() };
        }
        if several {
            let levels = self.ladder.levels();
            let owing = self.slots.iter_mut().filter(|region| region.owes_claims());
            owing.for_each(|region| region.examine(levels));
        }
        let pace = self.pace();
        self.reading.foreground |= self.ladder.climb(&mut self.slots, now_ns, &self.lifetimes, pace, &self.config);
        if self.reading.fresh {
            self.end_round();
            self.marker.find_sour(&mut self.slots, now_ns, &self.config);
        }
        let unmark = self.marker.unmark(&self.slots, now_ns, &mut self.allowance).into_iter().collect();
        // First, so that small marks can share a walk.
        self.marker.refresh(&mut self.slots, now_ns, self.snapshot.ksm.broken, &mut self.merger);
        let more = self.reading.foreground;
        let hands = (&mut self.merger, &mut self.allowance);
        let mark = self.marker.marks(&mut self.slots, now_ns, more, several, hands, &self.config);
        let scan = Scan {
            now_ns,
            ksm: &self.snapshot.ksm,
            ksmd_ns: self.snapshot.cost.ksmd_ns,
            marked: marked_resident(&self.slots),
            settled: mark.is_empty() && !self.reading.foreground && !self.marker.is_holding(),
            pace,
            room_ns: self.budget.room_ns(pace),
        };
        let order = self.merger.order(&scan);
        let may_move = if self.snapshot.ksm.ours { self.allowance.moves() } else { 0 };
        let moves = self.placer.moves(may_move, self.budget.room_ns(pace), &self.ledger);
        self.allowance.move_frames(moves.len() as u64);
        Actions { mark, unmark, stop: self.allowance.size(), scan: order, moves }
    }

    /// What is done once a round: those whose duplicates are merged go back to the bottom, and the index ages.
    fn end_round(&mut self) {
        let busy = self.merger.is_busy();
        for region in self.slots.iter_mut() {
            if matches!(region.stage, Stage::Judged(_)) && !region.dirty && !busy {
                region.level = 1;
            }
        }
        let pages: u64 = self.slots.iter().map(|region| region.view.pages.0).sum();
        if self.bottom_pages > pages {
            // By now every page of the bottom has come by about once.
            self.bottom_pages = 0;
            self.index.age();
            let slots = &mut self.slots;
            self.index.sweep(|place, old| {
                let Some(region) = slots.get_mut(place.slot) else { return Fate::Gone };
                // Regions at the bottom are sampled again and again, which renews their entries.
                if old && region.level == 1 { Fate::Renewed } else { Fate::Kept }
            });
            self.slots.swept();
            self.slots.iter_mut().for_each(|region| region.tally.age());
        }
    }

    fn take_samples(&mut self, samples: &Samples) {
        let mut last: Option<(RegionKey, Vpn, u32)> = None;
        for sample in &samples.pages {
            let slot = match last {
                // The blocks of one mapping have slots of their own.
                Some((key, end, slot)) if key == sample.region && sample.page < end => slot,
                _ => match self.slots.find(sample.region, sample.page) {
                    Some(slot) => slot,
                    None => continue,
                },
            };
            if last.is_none_or(|(_, _, known)| known != slot) {
                let end = self.slots.get(slot).map_or(Vpn(0), |region| region.view.first + region.view.pages.0);
                last = Some((sample.region, end, slot));
            }
            self.take_sample(slot, sample);
        }
    }

    fn take_sample(&mut self, slot: u32, sample: &PageSample) {
        let (now_ns, several) = (self.snapshot.now_ns, self.several_domains());
        let Some(region) = self.slots.get_mut(slot) else { return };
        let examined = matches!(region.stage, Stage::Examine(_));
        if examined {
            region.stage = Stage::Examine(sample.page + 1);
        }
        if sample.active && region.tells_activity() {
            region.note_active(sample.page);
        }
        self.placer.sampled(region.view.owner, sample);
        if region.level == 1 {
            self.bottom_pages += 1;
        }
        let offset = region.offset(sample.page);
        let mut duplicate = match sample.state {
            PageState::Absent | PageState::ZeroMapped => {
                // Given back, not broken.
                region.churn.single(offset, now_ns, None);
                return;
            }
            PageState::Shared | PageState::Private => false,
            PageState::Merged => {
                if self.visiting {
                    region.churn.merged(offset, now_ns, sample.digest);
                }
                region.in_marks.sampled += u64::from(!examined);
                true
            }
        };
        let zero = sample.digest == Digest::ZERO;
        let (place, digest) = (Place { slot, offset }, sample.digest.in_domain(region.view.domain));
        let own = region.view.domain;
        let foreign = several && !zero && is_foreign(&self.index, &self.domains, own, sample.digest);
        if foreign {
            region.tally.sampled += u64::from(!examined && !region.is_marked(sample.page));
            duplicate = false;
        } else if !zero && (sample.state == PageState::Merged || several && sample.state == PageState::Shared) {
            // One copy already, and known all the same: others may come that hold it too.
            if let Seen::Twin(first) = self.index.note(digest, place, several && examined) {
                self.credit(first);
            }
        } else if sample.state == PageState::Private {
            region.probe(sample.page, sample.digest, region.stage == Stage::Survey);
            let marked = !examined && region.is_marked(sample.page);
            let claim = several && examined;
            let seen = if zero { Seen::New } else { self.index.note(digest, place, claim) };
            duplicate = zero || seen != Seen::New;
            if marked {
                region.in_marks.sampled += 1;
                region.in_marks.unmerged += u64::from(duplicate);
                region.churn.single(offset, now_ns, duplicate.then_some(sample.digest));
            } else {
                region.tally.sampled += 1;
                region.tally.zero += u64::from(zero);
                region.tally.found += u64::from(!zero && duplicate);
                region.tally.twins += match seen {
                    Seen::New => 0,
                    Seen::Twin(_) => 1,
                    // In both directions: those seen before cannot all be told of their new twin.
                    Seen::Known(before) => 2 * u64::from(before),
                };
            }
            if let Seen::Twin(first) = seen {
                self.credit(first);
            }
        }
        let Some(region) = self.slots.get_mut(slot) else { return };
        if examined {
            let extent = region.extents.entry(sample.page.extent()).or_default();
            extent.resident += 1;
            extent.duplicate += u16::from(duplicate);
            extent.huge += u16::from(sample.huge);
            extent.foreign += u16::from(foreign);
        }
    }

    /// A page seen earlier has got its first twin.
    fn credit(&mut self, place: Place) {
        let Some(region) = self.slots.get_mut(place.slot) else { return };
        let page = region.page_at(place.offset);
        if region.is_marked(page) {
            return;
        }
        if region.is_counted(page) {
            if let Some(extent) = region.extents.get_mut(&page.extent()) {
                // Entries may be out of date: never count more than there is.
                extent.duplicate = (extent.duplicate + 1).min(extent.resident);
                region.dirty = true;
            }
        } else if region.stage == Stage::Survey {
            region.tally.found += 1;
            region.tally.twins += 1;
        }
    }

    /// Accounts for what was done; returns how long to wait before the next round, nanoseconds.
    pub fn account(&mut self, actions: &Actions, outcome: &Outcome) -> u64 {
        self.ledger.act(actions, outcome);
        self.placer.moved(outcome.moved);
        if !actions.mark.is_empty() {
            self.allowance.resize(&outcome.stops);
        }
        self.marker.done(&mut self.slots, self.snapshot.now_ns, outcome, &mut self.merger);
        self.marker.unmarked(self.snapshot.now_ns, outcome);
        self.pause_ns()
    }

    /// The sleep of the sleep-scan cycle (UKSM `T_s`): long enough for the share to hold.
    fn pause_ns(&self) -> u64 {
        let pace = self.pace();
        let look_ns = self.look_cost_ns * LOOK_SHARE * 10_000 / u64::from(pace.top.0.max(1));
        let look_ns = look_ns.clamp(LOOK_NS, SMOOTH_NS);
        let round_ns = self.ladder.ends_ns(pace).saturating_sub(self.snapshot.now_ns);
        if self.paused {
            return pace.round_ns.min(SMOOTH_NS);
        }
        if self.reading.foreground {
            if self.room_ns(pace) < LOOK_COST_NS || self.planned == 0 {
                return look_ns;
            }
            let share = u64::from(pace.top.0).clamp(1, 10_000);
            return self.ladder.sample_ns() * self.planned / share * (10_000 - share);
        }
        if self.is_merging() || self.placer.is_busy() || self.snapshot.ksm.ours && self.marker.is_unmarking() {
            return look_ns.min(round_ns.max(LOOK_NS));
        }
        round_ns.max(LOOK_NS.min(pace.round_ns))
    }
}

/// Whether a content is claimed by a trust domain other than `own`.
fn is_foreign(index: &Index, domains: &BTreeSet<DomainKey>, own: DomainKey, content: Digest) -> bool {
    domains.iter().any(|&domain| domain != own && index.is_claimed(content.in_domain(domain)))
}
