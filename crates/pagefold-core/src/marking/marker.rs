//! What to mark, when, and what to unmark again.
//!
//! A scan by ksmd walks everything that is marked, so marks wait for each other and one scan serves them all. Spans
//! whose merges do not last are unmarked and left alone.

use crate::config::Config;
use crate::host::{Change, ChangeResult, Marking, Outcome, Span, Why};
use crate::keys::RegionKey;
use crate::limits::Allowance;
use crate::marking::cow_breaks::Churn;
use crate::marking::extents::Candidate;
use crate::merging::Merger;
use crate::region::table::Slots;
use crate::region::{Alone, Region, Stage, covers};
use crate::units::{Pages, Permyriad, Vpn};
use std::collections::{BTreeMap, VecDeque};

/// Marks wait for other regions that are being read, but no longer than this, nanoseconds.
const HOLD_NS: u64 = 2_000_000_000;
/// Marks that bring less than one part in so many of what is marked are small: the walk costs more than they bring.
const SMALL: u64 = 20;
/// Pages that have come into being in marked memory are worth a walk at once when they are one part in so many of it,
/// and later when they are less.
const GROWN: u64 = 8;
/// Small marks wait so long at least for others to share the walk with, and so long at most, nanoseconds.
const HOLD_SMALL_NS: u64 = 10_000_000_000;
const HOLD_SMALL_MAX_NS: u64 = 600_000_000_000;
/// But where a walk is long, so many times the CPU time of one.
const HOLD_WALKS: u64 = 32;
/// First pause before ksmd is woken again for what has changed, nanoseconds; it doubles while that is fruitless.
const PAUSE_NS: u64 = 10_000_000_000;
/// Longest such pause, nanoseconds.
const PAUSE_MAX_NS: u64 = 600_000_000_000;
/// A region whose merges did not last is left alone for this long, nanoseconds.
const SOUR_NS: u64 = 3_600_000_000_000;
/// A target that could not be stopped is tried again after this, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
/// Pages in marked spans that must have become worth merging before ksmd is woken for them.
const REFRESH_MIN: u64 = 1_024;
/// Those that it has visited often wait, the longer the fewer they are: as long as this for as many as are marked,
/// nanoseconds.
const PATIENCE_NS: f64 = 40e9;

/// The thinnest extents wait until ksmd has rested for so long, nanoseconds: each walk for what grows would visit all their
/// pages, up to 24 for nothing for each duplicate.
const CALM_NS: u64 = 15_000_000_000;

/// Decides on marks.
#[derive(Clone, Debug)]
pub struct Marker {
    held_since_ns: Option<u64>,
    /// Some of the thinnest extents wait until ksmd has rested.
    thinnest_wait: bool,
    /// Resident pages that each of the last marks adds to those marked before.
    fresh: BTreeMap<(RegionKey, Vpn), Pages>,
    /// They are small, and wait for a walk to share.
    patient: bool,
    /// Spans to be unmarked, and when to go on with them.
    unmarking: VecDeque<Change>,
    next_unmark_ns: u64,
    next_refresh_ns: u64,
    /// When ksmd last set out to visit all pages twice, and the copies of merged pages that had been made by then.
    walked_ns: u64,
    walked_broken: u64,
    /// When it last did so leaving out none of them.
    thorough_ns: u64,
    refresh_pause_ns: u64,
    refresh_expected: Pages,
}

impl Default for Marker {
    fn default() -> Self {
        Self {
            held_since_ns: None,
            thinnest_wait: false,
            fresh: BTreeMap::new(),
            patient: false,
            unmarking: VecDeque::new(),
            next_unmark_ns: 0,
            next_refresh_ns: 0,
            walked_ns: 0,
            walked_broken: 0,
            thorough_ns: 0,
            refresh_pause_ns: PAUSE_NS,
            refresh_expected: Pages(0),
        }
    }
}

impl Marker {
    /// Whether marks are ready and wait for others. Small ones wait for a walk, and no walk waits for them.
    pub fn is_holding(&self) -> bool {
        self.held_since_ns.is_some() && !self.patient
    }

    /// The spans to mark now. `more` if regions are being read that may soon be marked as well. With several trust domains
    /// only what is claimed for its own.
    pub fn marks(
        &mut self,
        slots: &mut Slots,
        now_ns: u64,
        more: bool,
        several_domains: bool,
        (merger, allowance): (&mut Merger, &mut Allowance),
        config: &Config,
    ) -> Vec<Change> {
        let rested = merger.rested_ns(now_ns) >= CALM_NS;
        if rested && self.thinnest_wait || slots.iter().any(|region| region.dirty) {
            self.thinnest_wait = thin_out(slots, rested, config);
        }
        let ready = ready(slots, now_ns, several_domains, config);
        if ready.is_empty() {
            self.held_since_ns = None;
            return Vec::new();
        }
        let held_ns = now_ns - *self.held_since_ns.get_or_insert(now_ns);
        let bring = |(slot, spans): &(u32, Vec<Candidate>)| slots.get(*slot).map_or(0, |region| gain(region, spans).1);
        let brings: u64 = ready.iter().map(bring).sum();
        let waits_ns = hold_small_ns(brings, marked_resident(slots).0, merger.walk_ns());
        let small = held_ns < waits_ns && !merger.is_about_to_come_twice();
        self.patient = small && !(more && held_ns < HOLD_NS);
        if small || more && held_ns < HOLD_NS {
            return Vec::new();
        }
        self.held_since_ns = None;
        self.fresh.clear();
        let mut marks = Vec::new();
        for (slot, mut spans) in ready {
            let Some(region) = slots.get_mut(slot) else { continue };
            // It stays dirty: where stops are too few for all of it the next round goes on.
            let calls = u64::from(allowance.size().marks);
            let may = allowance.stops(region.view.owner) * calls;
            spans.truncate(usize::try_from(may).unwrap_or(usize::MAX));
            allowance.stop(region.view.owner, (spans.len() as u64).div_ceil(calls));
            if std::mem::replace(&mut region.alone, Alone::No) == Alone::Soured {
                region.churn = Churn::default();
            }
            if region.is_marked_whole() {
                region.scanned_whole = true;
                merger.owe(region.view.resident);
                continue;
            }
            for span in spans {
                self.fresh.insert((region.view.key, span.first), Pages(gain(region, &[span]).0));
                let why = Why::Duplicate { duplicate: span.duplicate, resident: span.resident };
                marks.push(Change { span: span_of(region, &span), why });
                region.mark(span);
            }
        }
        marks
    }

    /// Takes note of spans whose pages are written and hold the same again, so that merging them does not last: they are
    /// to be unmarked.
    pub fn find_sour(&mut self, slots: &mut Slots, now_ns: u64, config: &Config) {
        if config.cow_threshold >= Permyriad(10_000) {
            return;
        }
        let sour = |churn: &Churn| churn.ratio(config.cow_horizon_ns) >= config.cow_threshold;
        // A writer that goes through a mapping is in one block of it at a time.
        let mut mappings: BTreeMap<_, Churn> = BTreeMap::new();
        for region in slots.iter() {
            mappings.entry(region.view.key).or_default().add(&region.churn);
        }
        for region in slots.iter_mut().filter(|region| !region.marks.is_empty()) {
            if !sour(&region.churn) {
                let mapping = &mappings[&region.view.key];
                if !sour(mapping) {
                    continue;
                }
                // It goes by what its mapping has shown, and says so.
                region.churn = mapping.clone();
            }
            let why = Why::CowBroken { ratio: region.churn.ratio(config.cow_horizon_ns) };
            self.unmarking.extend(region.marks.iter().map(|mark| Change { span: span_of(region, mark), why }));
            region.sour(now_ns + SOUR_NS);
        }
    }

    /// Whether spans wait to be unmarked.
    pub fn is_unmarking(&self) -> bool {
        !self.unmarking.is_empty()
    }

    /// The span to unmark now, one at a time: its merged pages are copied. Whole, because part of it would split its
    /// mapping.
    pub fn unmark(&mut self, slots: &Slots, now_ns: u64, allowance: &mut Allowance) -> Option<Change> {
        if now_ns < self.next_unmark_ns {
            return None;
        }
        loop {
            let front = *self.unmarking.front()?;
            let region = slots.find(front.span.region, front.span.first).and_then(|slot| slots.get(slot));
            if let Some(owner) = region.map(|region| region.view.owner) {
                if allowance.stops(owner) == 0 {
                    return None;
                }
                allowance.stop(owner, 1);
                return self.unmarking.pop_front();
            }
            // It has gone.
            self.unmarking.pop_front();
        }
    }

    /// Takes note of what came of unmarking: where there was no room for the copies, or the target could not be stopped,
    /// it is tried again later.
    pub fn unmarked(&mut self, now_ns: u64, outcome: &Outcome) {
        for result in &outcome.unmarked {
            if result.marking == Marking::Busy {
                self.unmarking.push_front(result.change);
                self.next_unmark_ns = now_ns + PAUSE_NS;
            }
        }
    }

    /// Wakes ksmd for what has become worth merging in spans marked earlier.
    pub fn refresh(&mut self, slots: &mut Slots, now_ns: u64, broken: u64, merger: &mut Merger) {
        let marked = marked_resident(slots).0;
        if merger.comes_twice() || marked == 0 {
            slots.iter_mut().for_each(|region| region.visited = region.view.resident);
            (self.walked_ns, self.walked_broken) = (now_ns, broken);
            self.thorough_ns = if merger.owes_all() { now_ns } else { self.thorough_ns };
        }
        if merger.is_busy() {
            // What is about to merge is no reason to wake ksmd once more.
            let all = merger.owes_all();
            slots.iter_mut().for_each(|region| region.in_marks.restart(all));
            return;
        }
        let grown: Pages = slots.iter().map(Region::grown).sum();
        // Merged pages that were written hold something new, as often as not something that others hold too.
        let renewed = grown + Pages(broken.saturating_sub(self.walked_broken) / 2);
        let hold_ns = hold_small_ns(renewed.0, marked, merger.walk_ns()).max(HOLD_SMALL_NS);
        let waits_ns = if renewed.0 >= marked / GROWN { 0 } else { hold_ns };
        if renewed.0 >= REFRESH_MIN && now_ns >= self.walked_ns + waits_ns {
            merger.owe(renewed);
            return;
        }
        if now_ns < self.next_refresh_ns {
            return;
        }
        let (mut worth, mut marked) = (0.0, 0);
        for region in slots.iter_mut() {
            let resident = region.marked_resident().0;
            marked += resident;
            worth += resident as f64 * region.in_marks.worth();
        }
        let waits_ns = PATIENCE_NS * marked as f64 / worth.max(1.0);
        let is_due = worth >= (marked / SMALL) as f64 || now_ns as f64 >= self.thorough_ns as f64 + waits_ns;
        if worth < REFRESH_MIN as f64 || !is_due {
            return;
        }
        // What the last one brought, against what it was expected to bring.
        let fruitful = merger.last_growth().0 * 4 >= self.refresh_expected.0;
        self.refresh_pause_ns = if fruitful { PAUSE_NS } else { (self.refresh_pause_ns * 2).min(PAUSE_MAX_NS) };
        self.next_refresh_ns = now_ns + self.refresh_pause_ns;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a page count")]
        let worth = Pages(worth as u64);
        self.refresh_expected = worth;
        merger.owe_all(worth);
    }

    /// Takes note of what came of the marks.
    pub fn done(&mut self, slots: &mut Slots, now_ns: u64, outcome: &Outcome, merger: &mut Merger) {
        for ChangeResult { change: Change { span, .. }, marking } in &outcome.marked {
            let Some(region) = slots.find(span.region, span.first).and_then(|slot| slots.get_mut(slot)) else {
                continue;
            };
            let of_span = |mark: &Candidate| mark.first == span.first && mark.pages == span.pages;
            let Some(at) = region.marks.iter().position(of_span) else { continue };
            match marking {
                Marking::Done(_) => {
                    region.pause_ns = 0;
                    let fresh = self.fresh.get(&(span.region, span.first)).copied();
                    merger.owe(fresh.unwrap_or_default().max(Pages(1)));
                }
                Marking::Busy => {
                    region.marks.remove(at);
                    region.dirty = true;
                    region.retry_ns = now_ns + RETRY_NS;
                }
                Marking::Refused => {
                    region.marks.remove(at);
                    region.alone = Alone::Refused;
                }
            }
        }
    }
}

/// How long marks that bring so many pages wait for others, nanoseconds: the longer the less they bring, and the longer
/// the walk takes.
fn hold_small_ns(brings: u64, marked: u64, walk_ns: u64) -> u64 {
    let part = marked / brings.max(1);
    let waits_ns = (HOLD_SMALL_NS * part / SMALL).min(HOLD_SMALL_MAX_NS);
    if part < SMALL { 0 } else { waits_ns.max(HOLD_WALKS * walk_ns) }
}

/// The regions with something to mark, and their spans. Those that somebody else has marked whole (`pagefold exec`) are
/// worth a scan all the same.
fn ready(slots: &mut Slots, now_ns: u64, several_domains: bool, config: &Config) -> Vec<(u32, Vec<Candidate>)> {
    let mut per_owner: BTreeMap<_, usize> = BTreeMap::new();
    for region in slots.iter() {
        *per_owner.entry(region.view.owner).or_default() += region.marks.len();
    }
    let mut ready = Vec::new();
    for (slot, region) in slots.numbered_mut() {
        let left_alone = match region.alone {
            Alone::No => false,
            Alone::Soured => now_ns < region.not_before_ns,
            Alone::Refused => true,
        };
        if !region.dirty || left_alone || !matches!(region.stage, Stage::Judged(_)) || now_ns < region.retry_ns {
            continue;
        }
        if region.is_volatile(config) {
            region.sour(now_ns + PAUSE_NS);
            continue;
        }
        if several_domains && !region.claimed {
            continue;
        }
        let room = config.spans_per_process.saturating_sub(per_owner[&region.view.owner]);
        let spans: Vec<Candidate> = if region.is_marked_whole() {
            region.whole().into_iter().filter(|_| region.marks.is_empty() && !region.scanned_whole).collect()
        } else if room == 0 {
            Vec::new()
        } else {
            let spans = region.spans(config, region.density, room).into_iter();
            spans.filter(|span| !region.marks.iter().any(|mark| covers(mark, span))).collect()
        };
        if spans.is_empty() {
            region.dirty = false;
        } else {
            ready.push((slot, spans));
        }
    }
    ready
}

/// A candidate as a span of its region.
fn span_of(region: &Region, mark: &Candidate) -> Span {
    Span { region: region.view.key, first: mark.first, pages: mark.pages }
}

/// What spans would add to the marks of a region: resident pages, and duplicates.
fn gain(region: &Region, spans: &[Candidate]) -> (u64, u64) {
    let inside = |mark: &&Candidate| spans.iter().any(|span| covers(span, mark));
    let known = region.marks.iter().filter(inside).fold((0, 0), add);
    let all = spans.iter().fold((0, 0), add);
    (all.0.saturating_sub(known.0), all.1.saturating_sub(known.1))
}

/// Dense extents first, and then thinner ones, the densest regions first, as long as enough of all that is to be marked is
/// duplicate. They are worth their metadata, 64 bytes for each page marked against a page for each merged; the yield
/// bounds what ksmd walks for nothing. Where there is nothing denser, the thin ones are all there is: no yield is asked. The
/// thinnest come last, once ksmd has `rested`, for then its walks are rare. Returns whether some wait for that.
fn thin_out(slots: &mut Slots, rested: bool, config: &Config) -> bool {
    let dense = |region: &Region| total(region, region.density, config);
    let mut chosen = slots.iter().map(dense).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1));
    for density in config.thin_densities {
        let yield_min = if chosen.1 == 0 { density } else { config.yield_min };
        thin_to(slots, density, config, |resident, duplicate| {
            let with = (chosen.0 + resident, chosen.1 + duplicate);
            let may = Permyriad::of(with.1, with.0) >= yield_min;
            chosen = if may { with } else { chosen };
            may
        });
    }
    let mut wait = false;
    thin_to(slots, config.thinnest_density, config, |_, _| {
        wait |= !rested;
        rested
    });
    wait
}

/// Lets the extents of regions be so thin, the densest regions first, where `may` of the resident pages and duplicates that this
/// adds says so.
fn thin_to(slots: &mut Slots, density: Permyriad, config: &Config, mut may: impl FnMut(u64, u64) -> bool) {
    let mut thinner = Vec::new();
    for (slot, region) in slots.numbered_mut() {
        if region.density <= density || region.alone != Alone::No || region.is_volatile(config) {
            continue;
        }
        let all = total(region, density, config);
        if all.1 < config.span_pages_min.0 {
            continue;
        }
        let known = total(region, region.density, config);
        let (resident, duplicate) = (all.0.saturating_sub(known.0), all.1.saturating_sub(known.1));
        if duplicate >= config.span_pages_min.0 {
            thinner.push((Permyriad::of(duplicate, resident), slot, resident, duplicate));
        }
    }
    thinner.sort_unstable_by(|a, b| b.cmp(a));
    for (_, slot, resident, duplicate) in thinner {
        if let Some(region) = slots.get_mut(slot).filter(|_| may(resident, duplicate)) {
            (region.density, region.dirty) = (density, true);
        }
    }
}

/// Resident pages and duplicates in the extents of a region that are so dense, unless all of it is marked already.
fn total(region: &Region, density: Permyriad, config: &Config) -> (u64, u64) {
    if !matches!(region.stage, Stage::Judged(_)) || region.is_marked_whole() {
        return (0, 0);
    }
    region.spans(config, density, config.spans_per_process).iter().fold((0, 0), add)
}

fn add((resident, duplicate): (u64, u64), span: &Candidate) -> (u64, u64) {
    (resident + span.resident.0, duplicate + span.duplicate.0)
}

/// Resident pages in all spans marked by this run.
pub fn marked_resident(slots: &Slots) -> Pages {
    slots.iter().map(Region::marked_resident).sum()
}
