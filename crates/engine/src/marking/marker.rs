//! Decides what to mark, when, and what to unmark again.
//!
//! A ksmd scan walks everything that's marked, so marks wait for each other and share one scan. We unmark spans where
//! merges don't last, and leave them alone.

use crate::config::{Config, Only};
use crate::governor::Pace;
use crate::headroom::Headroom;
use crate::host::{Change, ChangeResult, Marking, Outcome, RegionView, Span, Why};
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::limits::Allowance;
use crate::marking::budget::Budget;
use crate::marking::extents::{Candidate, Counts, beginning};
use crate::marking::profit::{Wave, paying_density};
use crate::marking::unmarking::{MAPPINGS_AGAIN_NS, Unmarking, Waiting};
use crate::merging::ScanScheduler;
use crate::region::hold::LEAVE_NS;
use crate::region::table::RegionTable;
use crate::region::{Event, Fork, LeaveAlone, Region, covers};
use crate::reserve::Step;
use crate::units::{EXTENT_PAGES, Pages, Permyriad, Vpn, count, whole};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// Marks wait at most this long for other regions that we're reading, nanoseconds.
const HOLD_NS: u64 = 2_000_000_000;
/// The first pause before we wake ksmd again for changes, nanoseconds. It doubles while scans bring little.
const REFRESH_NS: u64 = 10_000_000_000;
/// The longest such pause, nanoseconds.
const REFRESH_MAX_NS: u64 = 600_000_000_000;
/// If we can't stop a target, we try again to mark it after this time, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
/// If there's no headroom for all of a mapping, we mark part of it, but only of mappings that are at least this long.
/// Programs more often move or grow smaller mappings, which fails once a mapping is split.
pub(crate) const SPLIT_FROM: Pages = Pages(4 * EXTENT_PAGES);
/// We only wake ksmd once this many pages in marked spans have become worth merging.
const REFRESH_MIN: u64 = 1_024;

#[derive(Clone, Debug, Default)]
pub struct Marker {
    held_since_ns: Option<u64>,
    /// How many regions we've marked so far.
    marked: u64,
    /// Marks that wait because they don't pay at the governor's price: `thin` in extents with few duplicates, `small`
    /// in dense extents that together save too little.
    thin: Wave,
    small: Wave,
    /// The price for which we last lowered the density, nanoseconds, and when we may lower it for the next region.
    price_ns: u64,
    thin_at_ns: u64,
    /// The latest marks, by where they start.
    latest: BTreeMap<(RegionKey, Vpn), LatestMark>,
    /// How many duplicates the scans for the last marks should merge, with each other or with pages marked earlier.
    expected: Pages,
    pub unmarking: Unmarking,
    next_refresh_ns: u64,
    /// When ksmd last began to visit all pages twice, and `KsmView::broken` at that time.
    visited_ns: u64,
    visited_broken: u64,
    refresh_pause_ns: u64,
    refresh_expected: Pages,
    /// The same as `refresh_*`, for scans that visit pages which appeared in marked memory or were rewritten there.
    renewal_pause_ns: u64,
    renewal_expected: Pages,
}

/// A mark that the host hasn't reported on yet.
#[derive(Clone, Copy, Debug, Default)]
struct LatestMark {
    /// How many of its pages no earlier mark covers, and how many of them are duplicates.
    added: Pages,
    duplicate: Pages,
    /// Whether other memory was marked before: ksmd may find copies there.
    joins: bool,
}

/// The scan scheduler, and the allowance and headroom that marks use up.
#[derive(Debug)]
pub struct Means<'a> {
    pub scheduler: &'a mut ScanScheduler,
    pub allowance: &'a mut Allowance,
    pub headroom: &'a mut Headroom,
}

impl Marker {
    /// Whether marks are ready and scans should wait for them. No scan waits for marks that don't pay yet.
    pub fn is_holding(&self) -> bool {
        self.held_since_ns.is_some() && self.small == Wave::default()
    }

    /// Whether extents with few duplicates wait because they don't pay yet.
    pub fn has_thin_waiting(&self) -> bool {
        self.thin.added > Pages(0)
    }

    /// If a region's marks wait because they don't pay yet: the pages that wait with them, which we'd mark together.
    pub fn waits(&self, region: &Region, config: &Config) -> Option<Wave> {
        if region.life.is_worth_marking() {
            return if self.small.added > Pages(0) { Some(self.small) } else { None };
        }
        let is_thin = self.has_thin_waiting() && thinner(region, config.thinnest_density, u64::MAX, config).is_some();
        if is_thin { Some(self.thin) } else { None }
    }

    /// If a region's sparser extents wait until we've read new regions, which may hold copies of them: when that wait
    /// ends at the latest, nanoseconds.
    pub fn awaits_newcomers_until_ns(&self, region: &Region, now_ns: u64, pace: Pace, config: &Config) -> Option<u64> {
        if self.thin_at_ns == u64::MAX || config.only == Only::Zeros {
            return None;
        }
        let until_ns = region.life.judgement()?.at_ns + config.probation_rounds * pace.round_ns;
        if until_ns <= now_ns {
            return None;
        }
        thinner(region, config.thinnest_density, u64::MAX, config)?;
        Some(until_ns)
    }

    /// Takes over the marks of an earlier run of pagefold, which has had ksmd visit them. `broken` is how many merged
    /// pages have been written so far: only later writes are a reason for another scan.
    pub fn adopt(&mut self, now_ns: u64, broken: u64) {
        self.visited_ns = now_ns;
        self.visited_broken = broken;
    }

    /// The spans to mark now. `more` means that we're reading regions that we may mark soon.
    pub fn mark(
        &mut self,
        table: &mut RegionTable,
        now_ns: u64,
        more: bool,
        pace: Pace,
        means: Means,
        config: &Config,
    ) -> Vec<Change> {
        let rested_ns = means.scheduler.idle_ns(now_ns);
        let marked = marked_resident(table);
        self.thin_out(table, marked, now_ns, rested_ns, pace, config);
        self.small = Wave::default();
        let mut ready = Vec::new();
        if table.iter().any(|region| region.life.is_worth_marking()) {
            let waiting = self.unmarking.waiting();
            ready = self::ready(table, &waiting, now_ns, means.headroom.clone(), config);
        }
        if ready.is_empty() {
            self.held_since_ns = None;
            return Vec::new();
        }
        let held_ns = now_ns - *self.held_since_ns.get_or_insert(now_ns);
        if more && held_ns < HOLD_NS {
            return Vec::new();
        }
        // If two scans are about to start, they visit the marked pages anyway.
        let walked = if means.scheduler.starts_two_scans() { Pages(0) } else { marked };
        let mut wave = Wave { walked, ..Wave::default() };
        for (slot, spans) in &ready {
            let Some(region) = table.get(*slot) else { continue };
            wave += gain(region, spans);
        }
        if !wave.is_due(pace.price_ns, rested_ns) {
            self.small = wave;
            return Vec::new();
        }
        self.held_since_ns = None;
        sort_by_headroom(&mut ready, table, means.headroom);
        self.take_marks(table, ready, marked > Pages(0), means)
    }

    /// Adds marks for these spans, as far as their processes have stops left. `joins`: other memory is marked already.
    fn take_marks(
        &mut self,
        table: &mut RegionTable,
        ready: Vec<(u32, Vec<Candidate>)>,
        joins: bool,
        means: Means,
    ) -> Vec<Change> {
        let Means { scheduler, allowance, headroom } = means;
        self.latest.clear();
        let mut marks = Vec::new();
        for (slot, mut spans) in ready {
            let Some(region) = table.get_mut(slot) else { continue };
            // If the process has no stops left, the region stays worth marking, and the next round goes on with its
            // other spans.
            let calls = u64::from(allowance.stop_size().marks);
            let may = allowance.stops_left(region.view.owner) * calls;
            spans.truncate(usize::try_from(may).unwrap_or(usize::MAX));
            allowance.use_stops(region.view.owner, count(spans.len()).div_ceil(calls));
            if region.is_marked_whole() {
                region.marks.scanned_whole = true;
                scheduler.request(region.view.resident);
                continue;
            }
            if region.marks.spans.is_empty() {
                self.marked += 1;
                region.marks.number = self.marked;
            }
            let before = region.mergeable();
            for span in spans {
                let Wave { added, duplicate, .. } = gain(region, &[span]);
                self.latest.insert((region.view.key, span.first), LatestMark { added, duplicate, joins });
                let why = Why::Duplicate { duplicate: span.duplicate, resident: span.resident };
                marks.push(Change { span: span_of(region, &span), why });
                region.marks.add(span);
            }
            headroom.take(region.view.owner, region.mergeable().saturating_sub(before));
        }
        marks
    }

    /// Lowers the density at which we mark extents to one that pays, if something has changed since the last time.
    /// Recently judged regions wait: copies of their pages may be in memory that's too young to read, and a page only
    /// merges once its copy is marked, too. The sparsest extents come last, all together, once ksmd has been idle so
    /// long that their cost is small in comparison.
    fn thin_out(
        &mut self,
        table: &mut RegionTable,
        marked: Pages,
        now_ns: u64,
        rested_ns: u64,
        pace: Pace,
        config: &Config,
    ) {
        let has_rested = self.has_thin_waiting() && rested_ns >= self.thin.rest_ns(pace.price_ns);
        let is_due = has_rested || now_ns >= self.thin_at_ns || self.price_ns != pace.price_ns;
        if !is_due && !table.iter().any(|region| region.life.is_worth_marking()) {
            return;
        }
        let wait_ns = config.probation_rounds * pace.round_ns;
        let has_newcomers = table.iter().any(|region| region.age.appeared() && now_ns < region.seen_ns + wait_ns);
        let until_ns = if has_newcomers { now_ns.saturating_sub(wait_ns) } else { now_ns };
        self.price_ns = pace.price_ns;
        self.thin_at_ns = u64::MAX;
        for judgement in table.iter().filter_map(|region| region.life.judgement()) {
            if judgement.at_ns > until_ns {
                self.thin_at_ns = self.thin_at_ns.min(judgement.at_ns + wait_ns);
            }
        }
        self.thin = Wave { walked: marked, ..Wave::default() };
        if config.only == Only::Zeros {
            // In sparser extents, ksmd would also merge pages other than zeros, between programs.
            return;
        }
        thin_to(table, paying_density(pace.price_ns).max(config.thinnest_density), until_ns, config);
        for region in table.iter() {
            self.thin += thinner(region, config.thinnest_density, until_ns, config).unwrap_or_default();
        }
        if self.has_thin_waiting() && rested_ns >= self.thin.rest_ns(pace.price_ns) {
            thin_to(table, config.thinnest_density, until_ns, config);
            self.thin = Wave::default();
        }
    }

    /// Finds extents where merges don't pay because the program soon writes the pages again. We queue their marks for
    /// unmarking, leave the extents alone for a time, and may mark them again after that. We skip a region while
    /// earlier spans of it wait for unmarking.
    pub fn find_cow_broken(&mut self, table: &mut RegionTable, now_ns: u64, top: usize, pace: Pace, config: &Config) {
        if !config.filters_cow_breaks() {
            return;
        }
        let by_marks = config.mechanism.by_marks();
        let waiting = self.unmarking.waiting();
        let mut parts_of = parts_by_owner(table);
        for region in table.iter_mut() {
            if waiting.has_part_of(region) {
                continue;
            }
            let is_over = region.hold.may_mark(now_ns) && region.usage.cow_breaks.end_rests(now_ns, by_marks);
            if is_over && by_marks {
                if region.life.adopted().is_some() {
                    region.examine(top);
                } else {
                    region.life.advance(Event::Reopen);
                }
            }
            let whole = (by_marks && region.stays_whole()).then(|| region.extent_numbers());
            let parts = parts_of.entry(region.view.owner).or_default();
            for (extents, tally) in region.usage.cow_breaks.losses(now_ns, pace.price_ns, whole) {
                let why = Why::CowBroken { lasts_ns: tally.lasts_ns() };
                if self.unmark_extents(region, &extents, why, parts, config.spans_per_process) {
                    region.usage.cow_breaks.rest(extents, now_ns);
                }
            }
        }
    }

    /// Queues the marks of some extents for unmarking. Returns whether we may leave the extents alone: we may not if
    /// their process would then have more than `most` marked parts of mappings. It has `parts` now.
    fn unmark_extents(
        &mut self,
        region: &mut Region,
        extents: &Range<u64>,
        why: Why,
        parts: &mut usize,
        most: usize,
    ) -> bool {
        let first = region.view.first.max(Vpn(extents.start * EXTENT_PAGES));
        let end = region.end().min(Vpn(extents.end * EXTENT_PAGES));
        if first >= end {
            return false;
        }
        if region.marks.spans.is_empty() {
            return true;
        }
        let before = region.parts();
        let marks = std::mem::take(&mut region.marks.spans);
        region.marks.spans = region.beside(&marks, first, end);
        let after = region.parts();
        let all = parts.saturating_sub(before) + after;
        if after > before && all > most {
            region.marks.spans = marks;
            return false;
        }
        *parts = all;
        self.queue_within(region.view.key, &marks, first, end, why);
        true
    }

    /// Memory is short: queues one region's spans for unmarking. Among the regions that `step` has room for, we choose
    /// the one whose merged pages are written most often, or else the one with the fewest duplicates per page that ksmd
    /// visits.
    pub fn take_back(&mut self, table: &mut RegionTable, now_ns: u64, step: &Step) {
        if self.unmarking.is_giving_room() {
            return;
        }
        let allowed = table
            .iter_mut()
            .filter(|region| may_be_taken_back(region, step) && !self.unmarking.pauses(region.view.owner, now_ns));
        let Some(region) = allowed.min_by_key(|region| worth_keeping(region)) else { return };
        let RegionView { first, pages, .. } = region.view;
        self.take_apart(region, first, pages, now_ns, Why::MemoryShort, LeaveAlone::TakenBack);
    }

    /// Queues a part of a region for unmarking, by whole extents, and leaves the region alone for a time. The region's
    /// other extents stay marked, or merged on request.
    pub fn take_apart(
        &mut self,
        region: &mut Region,
        first: Vpn,
        pages: Pages,
        now_ns: u64,
        why: Why,
        reason: LeaveAlone,
    ) {
        let key = region.view.key;
        let end = first + pages.0;
        let kept = region.beside(&region.marks.spans, first, end);
        if region.marks.spans.is_empty() {
            for page in first.0..end.0 {
                region.usage.forget_merged(Vpn(page));
            }
            self.unmarking.queue(Span { region: key, first, pages }, why);
        }
        let any = self.queue_within(key, &region.marks.spans, first, end, why);
        if !any && !region.marks.spans.is_empty() {
            // The region's marks lie elsewhere.
            return;
        }
        region.leave_until(now_ns + LEAVE_NS, reason);
        region.marks.spans = kept;
    }

    /// Queues the parts of marks from `first` to `end` for unmarking. Returns whether there are any.
    fn queue_within(&mut self, region: RegionKey, marks: &[Candidate], first: Vpn, end: Vpn, why: Why) -> bool {
        let mut any = false;
        for mark in marks {
            let (from, to) = (mark.first.max(first), end.min(mark.first + mark.pages.0));
            if from < to {
                self.unmarking.queue(Span { region, first: from, pages: Pages(to.0 - from.0) }, why);
                any = true;
            }
        }
        any
    }

    /// Queues a region's spans for unmarking, because ksmd merged almost none of its duplicates.
    pub fn give_back_unmerged(&mut self, region: &mut Region, now_ns: u64) {
        for mark in std::mem::take(&mut region.marks.spans) {
            self.unmarking.queue(span_of(region, &mark), Why::Unmerged);
        }
        region.marks.visited_again = false;
        let pause_ns = region.hold.next_unmerged_ns();
        region.leave_until(now_ns + pause_ns, LeaveAlone::Unmerged);
    }

    /// Queues a region's spans for unmarking, because a limit has no headroom for them. We mark them again once it has.
    pub fn give_up(&mut self, region: &mut Region, limit: LimitKey) {
        for mark in std::mem::take(&mut region.marks.spans) {
            self.unmarking.queue(span_of(region, &mark), Why::Charge);
        }
        region.life.advance(Event::Settle);
        region.hold.full = Some(limit);
        region.usage.cow_breaks.forget_pages();
    }

    /// Requests scans for pages in marked spans that have become worth merging.
    pub fn refresh(
        &mut self,
        table: &mut RegionTable,
        now_ns: u64,
        broken: u64,
        scheduler: &mut ScanScheduler,
        pace: Pace,
    ) {
        let marked = marked_resident(table);
        if scheduler.visits_twice() || marked == Pages(0) {
            for region in table.iter_mut() {
                region.marks.visited = region.view.resident;
            }
            self.visited_ns = now_ns;
            self.visited_broken = broken;
        }
        if scheduler.is_busy() {
            // Pages that are about to merge are no reason for another scan.
            let all = scheduler.wants_thorough();
            for region in table.iter_mut() {
                region.marks.samples.restart(all);
            }
            return;
        }
        let price_ns = pace.price_ns;
        let rested_ns = scheduler.idle_ns(now_ns);
        let expected = std::mem::take(&mut self.expected);
        // A thorough scan visits every page as if it were new.
        let thorough = |duplicate| Wave { added: marked, walked: Pages(0), duplicate };
        if scheduler.merged().0 * 4 < expected.0 && thorough(expected).is_due(price_ns, rested_ns) {
            // smart_scan skipped the partners of these pages, because earlier visits had found no copies of them.
            scheduler.request_thorough(expected);
            return;
        }
        // A merged page that's written gets a new content, and about half of the time other pages hold that, too.
        let rewritten = Pages(broken.saturating_sub(self.visited_broken) / 2);
        let (mut renewed, mut likely) = (rewritten, rewritten);
        for region in table.iter() {
            renewed += region.grown();
            likely += region.grown_duplicates();
        }
        let wave = Wave { added: renewed, walked: marked.saturating_sub(renewed), duplicate: renewed };
        let next_renewal_ns = self.visited_ns + self.renewal_pause_ns.max(REFRESH_NS);
        if renewed.0 >= REFRESH_MIN && now_ns >= next_renewal_ns && wave.is_due(price_ns, rested_ns) {
            // A heap may give pages back and take new ones all the time, with contents that nobody else has. Then we
            // pause longer.
            let was_fruitful = scheduler.last_merged().0 * 4 >= self.renewal_expected.0;
            self.renewal_pause_ns = pause_after(was_fruitful, self.renewal_pause_ns);
            self.renewal_expected = likely;
            scheduler.request(renewed);
            return;
        }
        if now_ns < self.next_refresh_ns {
            return;
        }
        let mut worth = 0.0;
        for region in table.iter_mut() {
            worth += region.marked_resident().0 as f64 * region.marks.samples.worth();
        }
        let worth = Pages(whole(worth));
        if worth.0 < REFRESH_MIN || !thorough(worth).is_due(price_ns, rested_ns) {
            return;
        }
        // Compare what the last refresh merged with our expectation.
        let was_fruitful = scheduler.last_merged().0 * 4 >= self.refresh_expected.0;
        self.refresh_pause_ns = pause_after(was_fruitful, self.refresh_pause_ns);
        self.next_refresh_ns = now_ns + self.refresh_pause_ns;
        self.refresh_expected = worth;
        scheduler.request_thorough(worth);
    }

    pub fn record_marked(
        &mut self,
        table: &mut RegionTable,
        now_ns: u64,
        outcome: &Outcome,
        scheduler: &mut ScanScheduler,
    ) {
        let mut is_marked = false;
        for ChangeResult { change: Change { span, .. }, marking } in &outcome.marked {
            let Some(region) = table.at_mut(span.region, span.first) else { continue };
            if !region.marks.has(span.first, span.pages) {
                continue;
            }
            match marking {
                Marking::Done(_) => {
                    is_marked = true;
                    region.hold.pause_ns = 0;
                    let mark = self.latest.get(&(span.region, span.first)).copied().unwrap_or_default();
                    scheduler.request(mark.added.max(Pages(1)));
                    if mark.joins {
                        self.expected += mark.duplicate;
                    }
                }
                Marking::Untried | Marking::Busy | Marking::NoMappings => {
                    region.marks.remove(span.first, span.pages);
                    region.life.advance(Event::Reopen);
                    region.hold.lacks_mappings = *marking == Marking::NoMappings;
                    let pause_ns = match marking {
                        Marking::NoMappings => MAPPINGS_AGAIN_NS,
                        Marking::Busy => RETRY_NS,
                        _ => 0,
                    };
                    region.hold.retry_ns = now_ns + pause_ns;
                }
                Marking::Refused => {
                    region.marks.remove(span.first, span.pages);
                    region.hold.refuse();
                }
            }
        }
        let mut marked = table.iter().filter(|region| region.marked_resident() > Pages(0));
        if is_marked && marked.any(|region| region.fork != Fork::Alone) {
            // ksmd compares no page with one that has the same frame. So in the second scan, only one of the relatives
            // that share a frame through fork may find its copy.
            scheduler.request_another();
        }
    }
}

/// The pause after a scan for changes: longer each time while scans bring little.
fn pause_after(was_fruitful: bool, pause_ns: u64) -> u64 {
    if was_fruitful { REFRESH_NS } else { (pause_ns * 2).min(REFRESH_MAX_NS) }
}

/// Of two equal pages, ksmd keeps the one in the process that was marked later. So we mark the processes with the most
/// headroom last.
fn sort_by_headroom(ready: &mut [(u32, Vec<Candidate>)], table: &RegionTable, headroom: &Headroom) {
    ready.sort_by_key(|(slot, _)| {
        let left = table.get(*slot).and_then(|region| headroom.of(region.view.owner));
        left.map_or(Pages(u64::MAX), |(_, left)| left)
    });
}

/// The regions with something to mark, and their spans. We include regions that another program has marked whole
/// (`pagefold exec`), because they're worth a scan. We leave out anything without headroom.
fn ready(
    table: &mut RegionTable,
    waiting: &Waiting,
    now_ns: u64,
    headroom: Headroom,
    config: &Config,
) -> Vec<(u32, Vec<Candidate>)> {
    let mut budget = Budget::new(table, headroom, config);
    let parts_of = parts_by_owner(table);
    let mut ready = Vec::new();
    for (slot, region) in table.numbered_mut() {
        if !region.life.is_worth_marking() || !region.hold.may_mark(now_ns) {
            continue;
        }
        if waiting.has_part_of(region) {
            // We look at the region again once we no longer leave its extents alone.
            region.life.advance(Event::Settle);
            continue;
        }
        // In marked memory, most of the unmerged pages that we sample have just been written, so there samples can't
        // tell us whether the region is volatile.
        if region.marks.spans.is_empty() && region.survey.is_volatile(config) {
            region.hold.put_off(now_ns);
            region.leave_until(region.hold.ends_ns(), LeaveAlone::CowBroken);
            continue;
        }
        region.hold.end();
        let spans = if region.is_marked_whole() {
            marked_by_another(region, &budget.headroom)
        } else {
            let parts = parts_of.get(&region.view.owner).copied().unwrap_or(0);
            let room = config.spans_per_process.saturating_sub(parts - region.parts());
            new_spans(region, room, &mut budget, config)
        };
        if spans.is_empty() {
            region.life.advance(Event::Settle);
        } else {
            ready.push((slot, spans));
        }
    }
    ready
}

/// The span of a region that another program has marked whole, unless we've had it scanned.
fn marked_by_another(region: &mut Region, headroom: &Headroom) -> Vec<Candidate> {
    // These pages are marked, so headroom counts them already. It's enough if any is left.
    region.hold.full = headroom.full(region.view.owner);
    let is_new = region.marks.spans.is_empty() && !region.marks.scanned_whole;
    if is_new && region.hold.full.is_none() { Vec::from_iter(region.whole()) } else { Vec::new() }
}

/// The spans to mark in a region that aren't marked yet. The region may have `room` spans in all, its present marks
/// included.
fn new_spans(region: &mut Region, room: usize, budget: &mut Budget, config: &Config) -> Vec<Candidate> {
    let Some(judgement) = region.life.judgement() else { return Vec::new() };
    if room == 0 {
        return Vec::new();
    }
    let mut spans = region.spans(config, judgement.density, room);
    fit(&mut spans, region, budget, config);
    spans.retain(|span| !region.marks.spans.iter().any(|mark| covers(mark, span)));
    // Marks that no new span covers stay, so they use up room as well.
    let kept = region.marks.spans.iter().filter(|mark| !spans.iter().any(|span| covers(span, mark))).count();
    spans.truncate(room.saturating_sub(kept));
    spans
}

/// How many parts of mappings are marked in each process.
fn parts_by_owner(table: &RegionTable) -> BTreeMap<OwnerKey, usize> {
    let mut parts_of = BTreeMap::new();
    for region in table.iter() {
        *parts_of.entry(region.view.owner).or_default() += region.parts();
    }
    parts_of
}

/// Cuts a region's spans down to the headroom that the region has left, and takes that headroom.
fn fit(spans: &mut Vec<Candidate>, region: &mut Region, budget: &mut Budget, config: &Config) {
    region.hold.full = None;
    let mut marked = Pages(0);
    for mark in &region.marks.spans {
        if !spans.iter().any(|span| covers(span, mark)) {
            marked += mark.pages;
        }
    }
    let wanted = marked + spans.iter().map(|span| span.pages).sum();
    let wanted = wanted.min(region.resident());
    let Some((limit, most)) = budget.most(region) else { return };
    if wanted <= most {
        budget.take(region, spans, wanted);
        return;
    }
    region.hold.full = Some(limit);
    if region.view.pages < SPLIT_FROM {
        spans.clear();
    }
    let parts: Vec<Candidate> = spans.iter().flat_map(|span| budget.parts(region, span)).collect();
    spans.clear();
    for span in parts {
        let Some(part) = beginning(&region.extents, &span, most.saturating_sub(marked)) else { continue };
        if part.duplicate >= config.span_pages_min {
            marked += part.pages;
            spans.push(part);
        }
    }
    budget.take(region, spans, marked);
}

fn span_of(region: &Region, mark: &Candidate) -> Span {
    Span { region: region.view.key, first: mark.first, pages: mark.pages }
}

/// Whether `step` allows us to unmark a region because memory is short.
fn may_be_taken_back(region: &Region, step: &Step) -> bool {
    !region.marks.spans.is_empty()
        && !region.hold.left_alone
        && step.allows(region.view.owner, region.marks.counts().duplicate)
}

/// Orders regions by how much their marks are worth: how rarely their pages are written, then how dense they are.
fn worth_keeping(region: &Region) -> (Reverse<u64>, Permyriad, Pages) {
    let Counts { resident, duplicate } = region.marks.counts();
    (Reverse(region.usage.cow_breaks.rate()), Permyriad::of(duplicate.0, resident.0), duplicate)
}

/// The pages that spans would add to a region's marks.
fn gain(region: &Region, spans: &[Candidate]) -> Wave {
    let mut known = Counts::default();
    for mark in &region.marks.spans {
        if spans.iter().any(|span| covers(span, mark)) {
            known += mark.counts();
        }
    }
    between(known, spans.iter().map(Candidate::counts).sum())
}

/// The pages that `all` adds to `known`.
fn between(known: Counts, all: Counts) -> Wave {
    let added = all.resident.saturating_sub(known.resident);
    Wave { added, walked: Pages(0), duplicate: all.duplicate.saturating_sub(known.duplicate) }
}

/// Lowers the density that extents must have for us to mark them, in regions where that gives us more to mark.
fn thin_to(table: &mut RegionTable, density: Permyriad, until_ns: u64, config: &Config) {
    for region in table.iter_mut() {
        if thinner(region, density, until_ns, config).is_some() {
            region.life.advance(Event::Thin { density });
        }
    }
}

/// The pages that a lower density adds to a region's marks, if they're enough for a mark.
fn thinner(region: &Region, density: Permyriad, until_ns: u64, config: &Config) -> Option<Wave> {
    let judgement = region.life.judgement()?;
    let is_held = region.hold.reason().is_some() || region.survey.is_volatile(config);
    if judgement.density <= density || judgement.at_ns > until_ns || is_held {
        return None;
    }
    let all = total(region, density, config);
    if all.duplicate < config.span_pages_min {
        return None;
    }
    let wave = between(total(region, judgement.density, config), all);
    (wave.duplicate >= config.span_pages_min).then_some(wave)
}

/// The pages in extents of a region that are at least this dense. No pages if the region is marked whole.
fn total(region: &Region, density: Permyriad, config: &Config) -> Counts {
    if region.is_marked_whole() {
        return Counts::default();
    }
    region.spans(config, density, config.spans_per_process).iter().map(Candidate::counts).sum()
}

/// Resident pages in all spans that this run marked, and in all regions that are marked whole.
pub fn marked_resident(table: &RegionTable) -> Pages {
    table.iter().map(Region::marked_resident).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Digest;
    use crate::host::Mechanism;
    use crate::limits::Limits;
    use crate::region::test_view;

    const S: u64 = 1_000_000_000;
    const SMALL: Pages = Pages(1_000);
    const LARGE: Pages = Pages(40 * EXTENT_PAGES);

    /// A region at page 100, marked whole, whose program soon writes merged pages in these extents.
    fn written(pages: Pages, extents: &[u64]) -> RegionTable {
        let mut table = RegionTable::default();
        table.update(&[test_view(1, 100, pages.0)], 1, |view| Region::new(view, 0, false, 1));
        let region = table.at_mut(RegionKey(1), Vpn(100)).unwrap();
        region.marks.add(Candidate { first: Vpn(100), pages, resident: pages, duplicate: pages });
        write(region, extents);
        table
    }

    fn write(region: &mut Region, extents: &[u64]) {
        for extent in extents {
            for page in extent * EXTENT_PAGES + 200..extent * EXTENT_PAGES + 300 {
                region.usage.cow_breaks.record_merged(Vpn(page), 0, 0, Digest(7 << 16));
                // Merges last for a different time in each extent.
                region.usage.cow_breaks.record_written(Vpn(page), S + extent);
            }
        }
    }

    fn extent(number: u64) -> Span {
        Span { region: RegionKey(1), first: Vpn(number * 512), pages: Pages(512) }
    }

    fn region(table: &mut RegionTable) -> &mut Region {
        table.iter_mut().next().unwrap()
    }

    fn find(marker: &mut Marker, table: &mut RegionTable, now_ns: u64, config: &Config) {
        marker.find_cow_broken(table, now_ns, 4, config.pace(config.governor), config);
    }

    /// The bounds of the span that we unmark now, and the reason.
    fn unmark(marker: &mut Marker, table: &RegionTable, now_ns: u64) -> Option<(u64, u64, Why)> {
        let mut allowance = Allowance::new(Limits::default(), &[]);
        let Change { span, why } = marker.unmarking.next(table, now_ns, &mut allowance)?;
        Some((span.first.0, span.first.0 + span.pages.0, why))
    }

    #[test]
    fn neighbouring_extents_are_unmarked_together() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3, 4]), Config::default());
        find(&mut marker, &mut table, S, &config);
        // We find this extent later, but before the others are unmarked.
        marker.unmarking.queue(extent(5), Why::CowBroken { lasts_ns: 9 });
        assert!(matches!(unmark(&mut marker, &table, S), Some((1_536, 3_072, Why::CowBroken { .. }))));
        assert_eq!(unmark(&mut marker, &table, S), None);
        let left: Vec<_> = region(&mut table).marks.spans.iter().map(|mark| (mark.first.0, mark.pages.0)).collect();
        assert_eq!(left, [(100, 1_436), (2_560, 100 + LARGE.0 - 2_560)]);
    }

    #[test]
    fn whoever_needs_memory_does_not_wait_for_breaks() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3, 20]), Config::default());
        find(&mut marker, &mut table, S, &config);
        let change = Change { span: extent(3), why: Why::CowBroken { lasts_ns: S } };
        assert_eq!(unmark(&mut marker, &table, S).map(|(first, ..)| first), Some(1_536));
        let no_room = ChangeResult { change, marking: Marking::Busy };
        marker.unmarking.record(&table, S, &Outcome { unmarked: vec![no_room], ..Outcome::default() });
        assert_eq!((unmark(&mut marker, &table, S), marker.unmarking.is_giving_room()), (None, false));
        let (why, reason) = (Why::MemoryShort, LeaveAlone::TakenBack);
        marker.take_apart(region(&mut table), Vpn(100), Pages(412), 2 * S, why, reason);
        assert_eq!(unmark(&mut marker, &table, 2 * S), Some((100, 512, why)));
        assert_eq!(unmark(&mut marker, &table, 2 * S).map(|(first, ..)| first), Some(1_536));
        assert_eq!(unmark(&mut marker, &table, 2 * S).map(|(first, ..)| first), Some(20 * 512));
    }

    #[test]
    fn nothing_waits_for_spans_whose_target_has_no_mappings_to_spare() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3, 20]), Config::default());
        let (why, marking) = (Why::MemoryShort, Marking::NoMappings);
        let unmarked = vec![ChangeResult { change: Change { span: extent(3), why }, marking }];
        marker.unmarking.record(&table, S, &Outcome { unmarked, ..Outcome::default() });
        assert!(!marker.unmarking.is_due(S) && marker.unmarking.waiting().has_part_of(region(&mut table)));
        marker.take_apart(region(&mut table), Vpn(100), Pages(412), S, why, LeaveAlone::TakenBack);
        assert_eq!(unmark(&mut marker, &table, 2 * S), Some((100, 512, why)));
        assert_eq!(unmark(&mut marker, &table, 301 * S), Some((1_536, 2_048, why)));
        let mut table = written(SMALL, &[]);
        judge(region(&mut table));
        let span = Span { region: RegionKey(1), first: Vpn(100), pages: SMALL };
        let change = Change { span, why };
        let outcome = Outcome { marked: vec![ChangeResult { change, marking }], ..Outcome::default() };
        marker.record_marked(&mut table, S, &outcome, &mut ScanScheduler::default());
        assert!(region(&mut table).hold.lacks_mappings);
        assert_eq!([300, 301].map(|at| ready_spans(&marker, &mut table, at * S, &config)), [0, 1]);
    }

    #[test]
    fn only_a_busy_target_waits_for_the_next_attempt() {
        for (marking, ready) in [(Marking::Untried, [1, 1]), (Marking::Busy, [0, 1])] {
            let (mut marker, mut table, config) = (Marker::default(), written(SMALL, &[]), Config::default());
            judge(region(&mut table));
            let span = Span { region: RegionKey(1), first: Vpn(100), pages: SMALL };
            let change = Change { span, why: Why::MemoryShort };
            let outcome = Outcome { marked: vec![ChangeResult { change, marking }], ..Outcome::default() };
            marker.record_marked(&mut table, S, &outcome, &mut ScanScheduler::default());
            let at = [S, S + RETRY_NS];
            assert_eq!(at.map(|now_ns| ready_spans(&marker, &mut table, now_ns, &config)), ready, "{marking:?}");
        }
    }

    #[test]
    fn a_rest_goes_on_until_its_memory_is_unmarked() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3]), Config::default());
        find(&mut marker, &mut table, S, &config);
        let later_ns = 1_000 * S;
        find(&mut marker, &mut table, later_ns, &config);
        assert_eq!(region(&mut table).usage.cow_breaks.resting().count(), 1, "the copies have no room");
        unmark(&mut marker, &table, later_ns).unwrap();
        find(&mut marker, &mut table, later_ns, &config);
        assert_eq!(region(&mut table).usage.cow_breaks.resting().count(), 0);
    }

    #[test]
    fn a_small_mapping_is_given_back_whole() {
        let (mut marker, mut table, config) = (Marker::default(), written(SMALL, &[1]), Config::default());
        find(&mut marker, &mut table, S, &config);
        assert_eq!(unmark(&mut marker, &table, S).map(|(first, end, _)| (first, end)), Some((100, 1_100)));
        let region = region(&mut table);
        assert!(region.marks.spans.is_empty());
        // The mapping grows: its new extent can't be marked separately.
        region.update(test_view(1, 100, SMALL.0 + 512), 1);
        for extent in 0..4 {
            let full = crate::marking::extents::Extent { resident: 400, duplicate: 400, ..Default::default() };
            region.extents.insert(extent, full);
        }
        assert_eq!(region.spans(&config, Permyriad(5_000), 64), []);
    }

    #[test]
    fn a_process_gets_only_so_many_parts() {
        let config = Config { spans_per_process: 2, ..Config::default() };
        let (mut marker, mut table) = (Marker::default(), written(LARGE, &[3, 10, 20]));
        find(&mut marker, &mut table, S, &config);
        assert_eq!(region(&mut table).parts(), 2, "the second one would make it three");
        assert_eq!(region(&mut table).usage.cow_breaks.resting().count(), 1);
        // Unmarking an extent at the edge adds no marked part.
        write(region(&mut table), &[2, 39]);
        unmark(&mut marker, &table, S).unwrap();
        find(&mut marker, &mut table, S, &config);
        assert_eq!((region(&mut table).parts(), region(&mut table).usage.cow_breaks.resting().count()), (2, 2));
        // On request nothing is split.
        let config = Config { mechanism: Mechanism::Request, ..config };
        let (mut marker, mut table) = (Marker::default(), written(LARGE, &[3, 10, 20]));
        region(&mut table).marks.spans.clear();
        find(&mut marker, &mut table, S, &config);
        assert_eq!(region(&mut table).usage.cow_breaks.resting().count(), 3);
        assert!(!marker.unmarking.is_due(S));
    }

    #[test]
    fn extents_that_a_region_lost_are_forgotten() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3, 39]), Config::default());
        region(&mut table).update(test_view(1, 100, 35 * EXTENT_PAGES), 1);
        find(&mut marker, &mut table, S, &config);
        assert_eq!(unmark(&mut marker, &table, S).map(|(first, ..)| first), Some(1_536));
        assert_eq!(unmark(&mut marker, &table, S), None);
    }

    #[test]
    fn marks_keep_their_counts_while_their_region_is_read_again() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3]), Config::default());
        region(&mut table).examine(4);
        find(&mut marker, &mut table, S, &config);
        assert_eq!(region(&mut table).marks.counts().duplicate.0, LARGE.0 - 512);
    }

    /// Makes a region look judged and worth marking, with duplicates everywhere.
    fn judge(region: &mut Region) {
        region.examine(4);
        for number in region.extent_numbers() {
            let full = crate::marking::extents::Extent { resident: 400, duplicate: 400, ..Default::default() };
            region.extents.insert(number, full);
        }
        region.judged(S, false);
    }

    /// How many spans may be marked now.
    fn ready_spans(marker: &Marker, table: &mut RegionTable, now_ns: u64, config: &Config) -> usize {
        let ready = ready(table, &marker.unmarking.waiting(), now_ns, Headroom::default(), config);
        ready.iter().map(|(_, spans)| spans.len()).sum()
    }

    #[test]
    fn what_was_unmarked_is_marked_again_after_its_rest_and_only_once_it_was_unmarked() {
        let config = Config { spans_per_process: 2, ..Config::default() };
        let (mut marker, mut table) = (Marker::default(), written(LARGE, &[10]));
        judge(region(&mut table));
        assert_eq!(ready_spans(&marker, &mut table, S, &config), 0, "all is marked");
        find(&mut marker, &mut table, S, &config);
        region(&mut table).life.advance(Event::Reopen);
        assert_eq!(ready_spans(&marker, &mut table, 400 * S, &config), 0);
        assert!(!region(&mut table).life.is_worth_marking());
        unmark(&mut marker, &table, S).unwrap();
        find(&mut marker, &mut table, 400 * S, &config);
        // The region already has all the parts that its process may have. Marking all of it again leaves one.
        assert_eq!(ready_spans(&marker, &mut table, 400 * S, &config), 1);
    }

    #[test]
    fn marked_memory_that_is_written_keeps_its_marks_until_it_is_unmarked() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[10]), Config::default());
        find(&mut marker, &mut table, S, &config);
        unmark(&mut marker, &table, S).unwrap();
        let region = region(&mut table);
        judge(region);
        for round in 0..9 {
            for page in 0..100 {
                region.survey.probe(page, Digest((round + 1) << 16), round == 0, |_| true);
            }
        }
        assert!(region.survey.is_volatile(&config));
        ready_spans(&marker, &mut table, 2 * S, &config);
        assert_eq!(table.iter().map(Region::parts).sum::<usize>(), 2);
    }

    #[test]
    fn what_waits_because_of_breaks_is_unmarked_at_once_if_a_limit_needs_it() {
        let (mut marker, mut table, config) = (Marker::default(), written(LARGE, &[3]), Config::default());
        find(&mut marker, &mut table, S, &config);
        let (why, reason) = (Why::Charge, LeaveAlone::Relieved);
        marker.take_apart(region(&mut table), Vpn(1_536), Pages(512), S, why, reason);
        assert!(
            !marker.unmarking.is_giving_room() && region(&mut table).hold.reason().is_none(),
            "its marks lie elsewhere"
        );
        marker.unmarking.hurry(RegionKey(1), Vpn(1_600), Vpn(1_700));
        assert!(marker.unmarking.is_giving_room());
        assert_eq!(unmark(&mut marker, &table, S), Some((1_600, 1_700, why)));
        assert_eq!(unmark(&mut marker, &table, S).map(|(first, end, _)| (first, end)), Some((1_536, 1_600)));
        assert_eq!(unmark(&mut marker, &table, S).map(|(first, end, _)| (first, end)), Some((1_700, 2_048)));
    }
}
