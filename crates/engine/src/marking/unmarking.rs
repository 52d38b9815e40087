//! The queues of spans to unmark.
//!
//! A span that we can't unmark now is put off, and nothing waits for it. Otherwise, one program that can't be stopped,
//! or has no room for copies, would keep all others from getting memory back.

use crate::host::{Change, ChangeResult, Marking, Outcome, Span, Why};
use crate::keys::{OwnerKey, RegionKey};
use crate::limits::Allowance;
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::relief::Place;
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::mem::discriminant;

/// If we couldn't unmark a span, we leave its process alone for this long, nanoseconds. The pause doubles with each
/// failure.
const PAUSE_NS: u64 = 1_000_000_000;
/// The longest such pause, nanoseconds.
const PAUSE_MOST_NS: u64 = 10_000_000_000;
/// If a target has no mappings to spare, we try the span again after this time, nanoseconds.
pub(super) const MAPPINGS_AGAIN_NS: u64 = 300_000_000_000;

#[derive(Clone, Debug, Default)]
pub struct Unmarking {
    /// Spans to unmark first, mostly because programs or a cgroup limit need the memory.
    urgent: Queue,
    /// Spans that only cost time, because programs soon write the pages merged there.
    broken: Queue,
    /// The processes where we couldn't unmark a span.
    pauses: BTreeMap<OwnerKey, Pause>,
    /// Whether we had put off the span that we're unmarking now.
    is_retry: bool,
    missed_urgent: bool,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    changes: VecDeque<Change>,
    /// Changes to try again, by that time and a serial number.
    put_off: BTreeMap<(u64, u64), Change>,
    number: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    until_ns: u64,
    pause_ns: u64,
}

impl Unmarking {
    /// Queues a span. If it continues the last queued span, we extend that one instead.
    pub fn queue(&mut self, span: Span, why: Why) {
        let changes = &mut self.queue_for(why).changes;
        match changes.back_mut() {
            Some(Change { span: last, why: other })
                if discriminant(other) == discriminant(&why)
                    && last.region == span.region
                    && last.end() == span.first =>
            {
                last.pages += span.pages;
            }
            _ => changes.push_back(Change { span, why }),
        }
    }

    fn queue_for(&mut self, why: Why) -> &mut Queue {
        if is_urgent(why) { &mut self.urgent } else { &mut self.broken }
    }

    /// Makes spans from `first` to `end` urgent if they wait because of COW breaks: a cgroup limit needs the memory
    /// now.
    pub fn hurry(&mut self, key: RegionKey, first: Vpn, end: Vpn) {
        let wants = |span: &Span| span.region == key && span.first < end && first < span.end();
        let mut wanted: Vec<Change> = Vec::new();
        self.broken.changes.retain(|change| {
            if wants(&change.span) {
                wanted.push(*change);
            }
            !wants(&change.span)
        });
        self.broken.put_off.retain(|_, change| {
            if wants(&change.span) {
                wanted.push(*change);
            }
            !wants(&change.span)
        });
        for Change { span, why } in wanted {
            let (from, to) = (span.first.max(first), span.end().min(end));
            self.queue(Span { first: from, pages: Pages(to.0 - from.0), ..span }, Why::Charge);
            for (start, stop) in [(span.first, from), (to, span.end())] {
                if start < stop {
                    self.queue(Span { first: start, pages: Pages(stop.0 - start.0), ..span }, why);
                }
            }
        }
    }

    /// Whether there are spans to unmark now.
    pub fn is_due(&self, now_ns: u64) -> bool {
        self.urgent.is_due(now_ns) || self.broken.is_due(now_ns)
    }

    /// Whether there are urgent spans that we haven't tried yet.
    pub fn is_giving_room(&self) -> bool {
        !self.urgent.changes.is_empty()
    }

    /// Whether a limit relies on spans that we haven't tried yet, or couldn't unmark since the last
    /// [`Unmarking::take_missed`].
    pub fn is_relieving(&self) -> bool {
        self.missed_urgent || self.urgent.changes.iter().any(|change| change.why == Why::Charge)
    }

    /// Whether, since the last call, we had to put off an urgent span.
    pub fn take_missed(&mut self) -> bool {
        std::mem::take(&mut self.missed_urgent)
    }

    /// Whether we leave a process alone for now because we couldn't unmark a span there.
    pub fn pauses(&self, owner: OwnerKey, now_ns: u64) -> bool {
        self.pauses.get(&owner).is_some_and(|pause| now_ns < pause.until_ns)
    }

    /// The span to unmark now. We take one span at a time, because unmarking copies the merged pages in it. But we take
    /// all of that span, because unmarking a part would split its mapping.
    pub fn next(&mut self, table: &RegionTable, now_ns: u64, allowance: &mut Allowance) -> Option<Change> {
        while let Some((change, is_retry)) = self.urgent.pop(now_ns).or_else(|| self.broken.pop(now_ns)) {
            // If the table has no such region, it has ended.
            let Some(region) = table.at(change.span.region, change.span.first) else { continue };
            let owner = region.view.owner;
            self.is_retry = is_retry;
            if self.pauses(owner, now_ns) {
                self.put_off(change, self.pauses[&owner].until_ns);
            } else if region.hold.left_alone || allowance.stops_left(owner) == 0 {
                self.put_off(change, now_ns + PAUSE_NS);
            } else {
                allowance.use_stops(owner, 1);
                return Some(change);
            }
        }
        None
    }

    fn put_off(&mut self, change: Change, until_ns: u64) {
        self.missed_urgent |= is_urgent(change.why) && !self.is_retry;
        let queue = self.queue_for(change.why);
        queue.number += 1;
        queue.put_off.insert((until_ns, queue.number), change);
    }

    /// Records the outcome of unmarking.
    pub fn record(&mut self, table: &RegionTable, now_ns: u64, outcome: &Outcome) {
        for &ChangeResult { change, marking } in &outcome.unmarked {
            let Some(region) = table.at(change.span.region, change.span.first) else { continue };
            let owner = region.view.owner;
            if let Marking::Done(_) = marking {
                self.pauses.remove(&owner);
                continue;
            }
            let until_ns = self.pause(owner, now_ns);
            // Even if the target refused, the mapping may still be marked by then.
            let is_soon = marking == Marking::Busy;
            self.put_off(change, if is_soon { until_ns } else { now_ns + MAPPINGS_AGAIN_NS });
        }
    }

    /// Leaves a process alone for a time. Returns until when.
    fn pause(&mut self, owner: OwnerKey, now_ns: u64) -> u64 {
        self.pauses.retain(|_, pause| now_ns < pause.until_ns + PAUSE_MOST_NS);
        let before_ns = self.pauses.get(&owner).map_or(0, |pause| pause.pause_ns);
        let pause_ns = (before_ns * 2).clamp(PAUSE_NS, PAUSE_MOST_NS);
        let until_ns = now_ns + pause_ns;
        self.pauses.insert(owner, Pause { until_ns, pause_ns });
        until_ns
    }

    /// The spans in the queues.
    pub fn waiting(&self) -> Waiting {
        let mut waiting = Waiting::default();
        for change in self.urgent.changes.iter().chain(&self.broken.changes).chain(self.broken.put_off.values()) {
            waiting.add(change.span, false);
        }
        for change in self.urgent.put_off.values() {
            waiting.add(change.span, true);
        }
        waiting
    }
}

fn is_urgent(why: Why) -> bool {
    !matches!(why, Why::CowBroken { .. })
}

impl Queue {
    /// Takes the next span: a new one, or else one that it's time to try again. Also returns whether we had put the
    /// span off before.
    fn pop(&mut self, now_ns: u64) -> Option<(Change, bool)> {
        if let Some(change) = self.changes.pop_front() {
            return Some((change, false));
        }
        let first = self.put_off.first_entry().filter(|entry| entry.key().0 <= now_ns)?;
        Some((first.remove(), true))
    }

    fn is_due(&self, now_ns: u64) -> bool {
        let first = self.put_off.first_key_value();
        !self.changes.is_empty() || first.is_some_and(|(&(at_ns, _), _)| at_ns <= now_ns)
    }
}

/// Spans that wait for unmarking, by their mapping and first page. Until they're unmarked, their pages may be merged.
#[derive(Clone, Debug, Default)]
pub struct Waiting(BTreeMap<(RegionKey, Vpn), Wait>);

#[derive(Clone, Copy, Debug)]
pub struct Wait {
    pub span: Span,
    /// Whether unmarking the span is urgent, but we had to put it off.
    pub is_stuck: bool,
}

impl Waiting {
    fn add(&mut self, span: Span, is_stuck: bool) {
        self.0.insert((span.region, span.first), Wait { span, is_stuck });
    }

    pub fn iter(&self) -> impl Iterator<Item = &Wait> {
        self.0.values()
    }

    /// The span that a page lies in.
    pub fn at(&self, region: RegionKey, page: Vpn) -> Option<Wait> {
        let (_, &wait) = self.0.range((region, Vpn(0))..=(region, page)).next_back()?;
        if page >= wait.span.end() {
            return None;
        }
        Some(wait)
    }

    /// Whether a part of a region waits for unmarking.
    pub fn has_part_of(&self, region: &Region) -> bool {
        let key = region.view.key;
        let last = self.0.range((key, Vpn(0))..(key, region.end())).next_back();
        last.is_some_and(|(_, wait)| wait.span.end() > region.view.first)
    }

    /// How much of each region waits for unmarking.
    pub fn by_region(&self, table: &RegionTable) -> FxHashMap<Place, Pages> {
        let mut waiting: FxHashMap<Place, Pages> = FxHashMap::default();
        for Wait { span, .. } in self.iter() {
            let mut at = span.first;
            // A span may lie in several blocks of a mapping.
            while at < span.end() {
                let Some(region) = table.at(span.region, at) else { break };
                let to = region.end().min(span.end());
                *waiting.entry(Place::of(region)).or_default() += Pages(to.0 - at.0);
                at = to;
            }
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::RegionView;
    use crate::limits::Limits;
    use crate::region::test_view;

    const S: u64 = 1_000_000_000;

    /// Regions 1 and 2 of two processes.
    fn table() -> RegionTable {
        let mut table = RegionTable::default();
        let views = [1, 2].map(|key| RegionView { owner: OwnerKey(key), ..test_view(key, 0, 4_096) });
        table.update(&views, 1, |view| Region::new(view, 0, false, 1));
        table
    }

    fn queue(unmarking: &mut Unmarking, region: u32, first: u64) {
        unmarking.queue(Span { region: RegionKey(region), first: Vpn(first), pages: Pages(100) }, Why::Charge);
    }

    /// Tries the next span, with this outcome. Returns its region and its first page.
    fn step(unmarking: &mut Unmarking, table: &RegionTable, now_ns: u64, marking: Marking) -> Option<(u32, u64)> {
        let change = unmarking.next(table, now_ns, &mut Allowance::new(Limits::default(), &[]))?;
        let outcome = Outcome { unmarked: vec![ChangeResult { change, marking }], ..Outcome::default() };
        unmarking.record(table, now_ns, &outcome);
        Some((change.span.region.0, change.span.first.0))
    }

    #[test]
    fn a_span_that_cannot_be_unmarked_waits_alone() {
        let (mut unmarking, table) = (Unmarking::default(), table());
        queue(&mut unmarking, 1, 0);
        let mut tries = Vec::new();
        for at_s in 1..30 {
            if step(&mut unmarking, &table, at_s * S, Marking::Busy).is_some() {
                tries.push((at_s, unmarking.take_missed()));
            }
            assert!(!unmarking.is_giving_room() && !unmarking.is_relieving());
            assert!(unmarking.waiting().at(RegionKey(1), Vpn(50)).is_some_and(|wait| wait.is_stuck));
        }
        assert_eq!(tries, [(1, true), (2, false), (4, false), (8, false), (16, false), (26, false)]);
    }

    #[test]
    fn one_try_is_enough_for_all_spans_of_a_process() {
        let (mut unmarking, table) = (Unmarking::default(), table());
        for first in [0, 1_000, 2_000] {
            queue(&mut unmarking, 1, first);
        }
        queue(&mut unmarking, 2, 0);
        let done = Marking::Done(Pages(100));
        assert_eq!(step(&mut unmarking, &table, S, Marking::Busy), Some((1, 0)));
        assert_eq!(step(&mut unmarking, &table, S, done), Some((2, 0)), "another process");
        assert_eq!(step(&mut unmarking, &table, S, done), None);
        assert!(!unmarking.is_giving_room() && unmarking.pauses(OwnerKey(1), S));
        for first in [0, 1_000, 2_000] {
            assert_eq!(step(&mut unmarking, &table, 2 * S, done), Some((1, first)));
        }
        assert_eq!(unmarking.waiting().iter().count(), 0);
    }

    #[test]
    fn what_the_host_refuses_stays_accounted_for_while_its_mapping_exists() {
        let (mut unmarking, mut table) = (Unmarking::default(), table());
        queue(&mut unmarking, 1, 0);
        assert_eq!(step(&mut unmarking, &table, S, Marking::Refused), Some((1, 0)));
        assert_eq!(unmarking.waiting().iter().count(), 1);
        assert_eq!(step(&mut unmarking, &table, 301 * S, Marking::Refused), Some((1, 0)));
        table.update(&[], 1, |view| Region::new(view, 0, false, 1));
        assert_eq!(step(&mut unmarking, &table, 601 * S, Marking::Refused), None);
        assert_eq!(unmarking.waiting().iter().count(), 0);
    }
}
