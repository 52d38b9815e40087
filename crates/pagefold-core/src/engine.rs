//! One round: plan what to read, judge what was read, account for what was done.
//!
//! ```text
//! observe -> plan -> read -> judge -> apply -> account
//! ```
//!
//! A region is first sampled (survey). Where the samples say that enough of it is duplicate it is read
//! whole (examine), its dense extents are marked, and ksmd is given the scans that this is owed
//! ([`crate::merge`]). From then on all regions are sampled at a small share of a core (watch), which
//! shows what has changed since.

use crate::config::Config;
use crate::hash::Digest;
use crate::host::{
    Actions, Cost, Host, KsmView, Marking, Outcome, PageSample, PageState, RegionKey, SamplePlan, Samples, Snapshot,
    Span,
};
use crate::index::{Index, Place, REGION_PAGES_MAX, SLOTS_MAX, Seen};
use crate::ledger::Ledger;
use crate::merge::Merger;
use crate::region::{Region, Stage};
use crate::survey::{self, wants_survey};
use crate::units::{Pages, Vpn};
use std::collections::{BTreeMap, BTreeSet};

/// Duplicates that must have been seen before a region is read whole.
const FOUND_MIN: u64 = 4;
/// While a scan is under way ksmd is looked after this often, nanoseconds.
const SCAN_LOOK_NS: u64 = 50_000_000;
/// Marks wait for other regions that are being read, but no longer than this, nanoseconds.
const HOLD_MARKS_NS: u64 = 2_000_000_000;
/// First pause before a fruitless examination or refresh is repeated, nanoseconds; it doubles each time.
const PAUSE_NS: u64 = 10_000_000_000;
/// Longest such pause, nanoseconds.
const PAUSE_MAX_NS: u64 = 600_000_000_000;
/// A target that could not be stopped is tried again after this, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
/// Pages in marked spans that must have become worth merging before ksmd is woken for them.
const REFRESH_MIN: u64 = 1_024;
/// First guess of what it costs to read one page, nanoseconds.
const READ_NS: u64 = 900;

/// The judgement of one run.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    index: Index,
    slots: Vec<Option<Region>>,
    by_key: BTreeMap<RegionKey, u32>,
    /// Slots that no region holds, but that entries of the index may still name.
    retired: Vec<u32>,
    free: Vec<u32>,
    merger: Merger,
    ledger: Ledger,
    now_ns: u64,
    snapshot: Snapshot,
    /// The examinations in the current plan: slot, and the page up to which it goes.
    examining: Vec<(u32, Vpn)>,
    /// Reading is under way that marks should wait for.
    foreground: bool,
    marks_held_since_ns: Option<u64>,
    next_watch_ns: u64,
    next_refresh_ns: u64,
    refresh_pause_ns: u64,
    refresh_expected: Pages,
    read_ns: u64,
    /// Pages in the current plan.
    planned_pages: u64,
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
        Self {
            config,
            index: Index::new(),
            slots: Vec::new(),
            by_key: BTreeMap::new(),
            retired: Vec::new(),
            free: Vec::new(),
            merger: Merger::default(),
            ledger: Ledger::default(),
            now_ns: 0,
            snapshot: Snapshot::default(),
            examining: Vec::new(),
            foreground: false,
            marks_held_since_ns: None,
            next_watch_ns: 0,
            next_refresh_ns: 0,
            refresh_pause_ns: PAUSE_NS,
            refresh_expected: Pages(0),
            read_ns: READ_NS,
            planned_pages: 0,
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
        self.slots.iter().flatten()
    }

    /// Scans completed by ksmd on our order.
    pub fn scans(&self) -> u64 {
        self.merger.scans()
    }

    /// Whether reading, marking or merging is under way; if not, only watching goes on.
    pub fn is_busy(&self) -> bool {
        self.foreground || self.marks_held_since_ns.is_some() || (self.snapshot.ksm.ours && self.merger.is_busy())
    }

    /// Takes in a look at the machine and plans what to read.
    pub fn plan(&mut self, snapshot: Snapshot) -> SamplePlan {
        self.now_ns = snapshot.now_ns;
        self.ledger.look(snapshot.now_ns, &snapshot.ksm, snapshot.cost);
        self.take_in(&snapshot);
        self.snapshot = snapshot;

        let mut runs = Vec::new();
        self.examining = survey::examinations(&mut self.slots, &mut runs);
        survey::surveys(&mut self.slots, &mut runs);
        self.foreground = !runs.is_empty();
        if self.now_ns >= self.next_watch_ns {
            let share_ns = self.config.governor.round_ns() / 10_000 * u64::from(self.config.watch_share.0);
            survey::watch(&mut self.slots, self.now_ns, share_ns / self.read_ns, &mut runs);
            self.next_watch_ns = self.now_ns + self.config.governor.round_ns();
        }
        self.planned_pages = runs.iter().map(|run| u64::from(run.pages)).sum();
        // By region and address: what lies together is read together.
        runs.sort_by_key(|run| (run.region, run.first));
        SamplePlan { runs, digest_seed: self.config.seed }
    }

    /// Regions that are new, have changed, or have gone.
    fn take_in(&mut self, snapshot: &Snapshot) {
        let mut gone: BTreeSet<RegionKey> = self.by_key.keys().copied().collect();
        for view in snapshot.regions.iter().filter(|view| view.pages.0 > 0 && view.pages.0 <= REGION_PAGES_MAX) {
            gone.remove(&view.key);
            if let Some(&slot) = self.by_key.get(&view.key) {
                if let Some(region) = &mut self.slots[slot as usize] {
                    region.update(*view, self.config.seed);
                }
                continue;
            }
            let region = Region::new(*view, self.now_ns, self.config.seed);
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots.push(None);
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            });
            if slot < SLOTS_MAX {
                self.slots[slot as usize] = Some(region);
                self.by_key.insert(view.key, slot);
            }
        }
        for key in gone {
            let Some(slot) = self.by_key.remove(&key) else { continue };
            if self.slots[slot as usize].take().is_some_and(|region| region.marked_resident() > Pages(0)) {
                self.merger.owe_reaping(self.now_ns);
            }
            self.retired.push(slot);
        }
        if self.retired.len() > 64 + self.by_key.len() / 4 {
            let slots = &self.slots;
            self.index.sweep(|slot| slots[slot as usize].is_some(), |_| false);
            self.free.append(&mut self.retired);
        }
    }

    /// Judges what was read.
    pub fn judge(&mut self, samples: &Samples) -> Actions {
        let read = samples.pages.iter().filter(|sample| sample.state == PageState::Private).count() as u64;
        self.ledger.pages_read += read;
        if read >= 1_000 {
            self.read_ns = ((self.read_ns * 3 + samples.cpu_ns / read) / 4).clamp(50, 100_000);
        }
        let mut last: Option<(RegionKey, u32)> = None;
        for sample in &samples.pages {
            let slot = match last {
                Some((key, slot)) if key == sample.region => slot,
                _ => match self.by_key.get(&sample.region) {
                    Some(&slot) => slot,
                    None => continue,
                },
            };
            last = Some((sample.region, slot));
            self.take_sample(slot, sample);
        }
        for (slot, end) in std::mem::take(&mut self.examining) {
            let Some(region) = &mut self.slots[slot as usize] else { continue };
            region.stage = Stage::Examine(end);
            if end.0 >= region.view.first.0 + region.view.pages.0 {
                region.judged(self.now_ns);
            }
        }
        self.promote();
        let mark = self.marks();
        self.refresh();
        let marked: Pages = self.regions().map(Region::marked_resident).sum();
        let settled = mark.is_empty() && !self.foreground && self.marks_held_since_ns.is_none();
        let merge = self.merger.order(self.now_ns, &self.snapshot.ksm, marked, settled, &self.config);
        Actions { mark, unmark: Vec::new(), merge }
    }

    fn take_sample(&mut self, slot: u32, sample: &PageSample) {
        let Some(region) = &mut self.slots[slot as usize] else { return };
        let examined = matches!(region.stage, Stage::Examine(_));
        if examined {
            region.stage = Stage::Examine(sample.page + 1);
        }
        let mut duplicate = match sample.state {
            PageState::Absent | PageState::ZeroMapped => return,
            PageState::Shared | PageState::Private => false,
            PageState::Merged => true,
        };
        if sample.state == PageState::Private {
            region.probe(sample.page, sample.digest, region.stage == Stage::Survey);
            let marked = !examined && region.is_marked(sample.page);
            let zero = sample.digest == Digest::ZERO;
            let place = Place { slot, offset: region.offset(sample.page) };
            let seen = if zero { Seen::New } else { self.index.note(sample.digest, place) };
            duplicate = zero || seen != Seen::New;
            if marked {
                region.in_marks.0 += 1;
                region.in_marks.1 += u64::from(duplicate);
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
        let Some(region) = &mut self.slots[slot as usize] else { return };
        if examined {
            let extent = region.extents.entry(sample.page.extent()).or_default();
            extent.resident += 1;
            extent.duplicate += u16::from(duplicate);
            extent.huge += u16::from(sample.huge);
        }
    }

    /// A page seen earlier has got its first twin.
    fn credit(&mut self, place: Place) {
        let Some(Some(region)) = self.slots.get_mut(place.slot as usize) else { return };
        let page = region.page_at(place.offset);
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

    /// Regions whose samples say that they are worth reading whole, and their siblings.
    fn promote(&mut self) {
        let resident: u64 = self.regions().map(|region| region.view.resident.0).sum();
        let sampled: u64 = self.regions().map(|region| region.tally.sampled).sum();
        let fraction = sampled as f64 / resident.max(1) as f64;
        let (now_ns, threshold) = (self.now_ns, self.config.duplicate_threshold.fraction());
        let mut families = BTreeSet::new();
        for region in self.slots.iter_mut().flatten() {
            if region.barred || now_ns < region.not_before_ns || matches!(region.stage, Stage::Examine(_)) {
                continue;
            }
            let beyond = if region.stage == Stage::Survey { 0.0 } else { region.left_over() };
            let found = region.tally.found + region.tally.zero;
            if found >= FOUND_MIN && region.estimate(fraction).ratio >= threshold + beyond {
                families.insert(region.view.family);
                if region.stage != Stage::Survey {
                    // Each new examination of the same region must have brought something to be repeated soon.
                    region.pause_ns = (region.pause_ns * 2).clamp(PAUSE_NS, PAUSE_MAX_NS);
                    region.not_before_ns = now_ns + region.pause_ns;
                }
                region.examine();
            }
        }
        // A sibling is worth reading as soon as one is, unless its own samples have said otherwise.
        for region in self.slots.iter_mut().flatten() {
            let open = wants_survey(region) || region.tally.found + region.tally.zero > 0;
            if region.stage == Stage::Survey && open && families.contains(&region.view.family) {
                region.examine();
            }
        }
        let unread = |region: &Region| matches!(region.stage, Stage::Examine(_)) || wants_survey(region);
        let more = self.regions().any(unread);
        self.foreground |= more;
    }

    /// The spans to mark now.
    fn marks(&mut self) -> Vec<Span> {
        let mut per_owner: BTreeMap<_, usize> = BTreeMap::new();
        for region in self.slots.iter().flatten() {
            *per_owner.entry(region.view.owner).or_default() += region.marks.len();
        }
        let mut ready = Vec::new();
        let mut held = false;
        for (slot, region) in (0_u32..).zip(&mut self.slots) {
            let Some(region) = region else { continue };
            if !region.dirty || region.barred || !matches!(region.stage, Stage::Judged(_)) {
                continue;
            }
            if region.is_volatile(&self.config) {
                region.dirty = false;
                region.not_before_ns = self.now_ns + PAUSE_NS;
                continue;
            }
            if self.now_ns < region.seen_ns + self.config.lifetime_ns {
                held = true;
                continue;
            }
            if region.view.marked >= region.view.pages {
                // Marked by somebody else (`pagefold exec`): nothing to mark, but worth a scan.
                region.dirty = false;
                self.merger.owe(region.view.resident);
                continue;
            }
            let room = self.config.spans_per_process.saturating_sub(per_owner[&region.view.owner]);
            let spans = if room == 0 { Vec::new() } else { region.unmarked_candidates(&self.config, room) };
            if spans.is_empty() {
                region.dirty = false;
            } else {
                ready.push((slot, spans));
            }
        }
        if ready.is_empty() {
            self.marks_held_since_ns = held.then_some(self.now_ns);
            return Vec::new();
        }
        // One scan should serve all: wait for the regions that are still being read, for a while.
        let since = *self.marks_held_since_ns.get_or_insert(self.now_ns);
        if self.foreground && self.now_ns - since < HOLD_MARKS_NS {
            return Vec::new();
        }
        self.marks_held_since_ns = None;
        let mut marks = Vec::new();
        for (slot, spans) in ready {
            let Some(region) = &mut self.slots[slot as usize] else { continue };
            region.dirty = false;
            for span in spans {
                marks.push(Span { region: region.view.key, first: span.first, pages: span.pages });
                region.marks.push(span);
            }
        }
        marks
    }

    /// Wakes ksmd for what has become worth merging in spans marked earlier.
    fn refresh(&mut self) {
        if self.merger.is_busy() {
            // What is about to merge is no reason to wake ksmd once more.
            self.slots.iter_mut().flatten().for_each(|region| region.in_marks = (0, 0));
            return;
        }
        if self.now_ns < self.next_refresh_ns {
            return;
        }
        let (mut worth, mut marked) = (0.0, 0);
        for region in self.regions().filter(|region| region.in_marks.0 >= 8) {
            let resident = region.marked_resident().0;
            marked += resident;
            worth += resident as f64 * region.in_marks.1 as f64 / region.in_marks.0 as f64;
        }
        if worth < REFRESH_MIN.max(marked / 50) as f64 {
            return;
        }
        // What the last one brought, against what it was expected to bring.
        let fruitful = self.merger.last_growth().0 * 4 >= self.refresh_expected.0;
        self.refresh_pause_ns = if fruitful { PAUSE_NS } else { (self.refresh_pause_ns * 2).min(PAUSE_MAX_NS) };
        self.next_refresh_ns = self.now_ns + self.refresh_pause_ns;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a page count")]
        let worth = Pages(worth as u64);
        self.refresh_expected = worth;
        self.merger.owe(worth);
        for region in self.slots.iter_mut().flatten() {
            region.in_marks = (0, 0);
        }
    }

    /// Accounts for what was done; returns how long to wait before the next round, nanoseconds.
    pub fn account(&mut self, actions: &Actions, outcome: &Outcome) -> u64 {
        self.ledger.act(&actions.mark, outcome);
        for (span, marking) in actions.mark.iter().zip(&outcome.marked) {
            let Some(&slot) = self.by_key.get(&span.region) else { continue };
            let Some(region) = &mut self.slots[slot as usize] else { continue };
            let Some(at) = region.marks.iter().position(|mark| mark.first == span.first && mark.pages == span.pages)
            else {
                continue;
            };
            match marking {
                Marking::Done(_) => {
                    let resident = region.marks[at].resident;
                    region.pause_ns = 0;
                    self.merger.owe(resident);
                }
                Marking::Busy => {
                    region.marks.remove(at);
                    region.dirty = true;
                    // Age, not a timer of its own, holds the retry back.
                    region.seen_ns = (self.now_ns + RETRY_NS).saturating_sub(self.config.lifetime_ns);
                }
                Marking::Refused => {
                    region.marks.remove(at);
                    region.barred = true;
                }
            }
        }
        self.pause()
    }

    fn pause(&self) -> u64 {
        if self.foreground {
            // Reading goes on; the governor's share decides how much of the time it may take.
            let share = u64::from(self.config.governor.top_share().0);
            let spent_ns = self.read_ns * self.planned_pages;
            return spent_ns / share * 10_000_u64.saturating_sub(share);
        }
        if self.is_busy() {
            return SCAN_LOOK_NS;
        }
        self.next_watch_ns.saturating_sub(self.now_ns).max(SCAN_LOOK_NS)
    }
}
