//! Everything that one run learns and the next run adopts, so that a restart doesn't search all memory again.
//!
//! We keep verdicts on families and on regions of living processes, in counts of pages. We keep neither digests nor
//! anything else that would let somebody guess contents. So the next run knows no contents at first. It reads a
//! region's contents again when a new region of the same family appears, or when the region's samples differ.
//!
//! All of it is a hint and marks nothing by itself: a run only marks a region after reading it whole, and rights,
//! exclusions and trust domains come from the host alone. Whatever a saved file says, all it can do is cost time.

use crate::config::{Config, Only};
use crate::host::Mechanism;
use crate::keys::{FamilyKey, LastingKey};
use crate::marking::extents::Candidate;
use crate::region::table::RegionTable;
use crate::region::{Age, Event, LeaveAlone, Region};
use crate::sampling::estimate::Tally;
use crate::sampling::ladder::wants_more;
use crate::units::{Pages, Permyriad, Vpn, whole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// We keep at most this many regions, and at most this many spans of each.
const REGIONS_MAX: usize = 16_384;
const SPANS_MAX: usize = 64;
/// We forget regions that haven't appeared this long after a run began, nanoseconds.
const APPEAR_NS: u64 = 600_000_000_000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    /// How the run merged pages.
    pub mechanism: Mechanism,
    /// Which pages were worth merging.
    pub only: Only,
    pub families: Vec<LearnedFamily>,
    pub regions: Vec<LearnedRegion>,
}

/// How long regions of a family live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedFamily {
    pub family: FamilyKey,
    /// The last lives that ended, nanoseconds.
    pub lives_ns: Vec<u64>,
}

/// The verdict on one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedRegion {
    pub process: LastingKey,
    pub family: FamilyKey,
    pub first: Vpn,
    /// The region's length.
    pub pages: Pages,
    /// Anonymous pages present in the region.
    pub resident: Pages,
    /// Present pages that ksmd has visited twice.
    pub visited: Pages,
    /// Whether we've read the whole region, not only sampled it.
    pub judged: bool,
    /// The share of duplicates in the extents that weren't marked.
    pub left_over: Permyriad,
    /// Samples since we last read the region whole.
    pub tally: Tally,
    /// Pages visited for these samples.
    pub sampled: u64,
    /// The region's marks: first page, length, resident pages, duplicates.
    pub marks: Vec<(Vpn, Pages, Pages, Pages)>,
    /// Why we leave the region alone, if we do.
    pub hold: Option<LeaveAlone>,
    /// For how much longer we won't read the region whole again, nanoseconds.
    pub hold_ns: u64,
    /// The last pause between two readings of the whole region, nanoseconds.
    pub pause_ns: u64,
}

impl Learned {
    /// The same knowledge after `passed_ns` more nanoseconds.
    #[must_use]
    pub fn after(mut self, passed_ns: u64) -> Self {
        for region in &mut self.regions {
            region.hold_ns = region.hold_ns.saturating_sub(passed_ns);
        }
        self
    }
}

/// The verdict on a region that we save for the next run. `None` if it may change soon, or while we leave a part of the
/// region alone because merges there didn't pay. While ksmd is `busy`, we save no page as visited by ksmd, because
/// pages that we've marked may not be merged yet.
pub(crate) fn verdict(
    region: &Region,
    now_ns: u64,
    busy: bool,
    thin_waits: bool,
    config: &Config,
) -> Option<LearnedRegion> {
    let left_over = region.left_over(config.mechanism);
    let waits = thin_waits && left_over >= config.thinnest_density.fraction();
    let rests = region.hold.reason().is_none() && region.usage.cow_breaks.resting().next().is_some();
    let will_hold = if region.life.is_judged() {
        !region.life.is_worth_marking() && !waits
    } else {
        !region.life.is_reading() && !wants_more(region, config)
    };
    // A refusal lasts for the whole run, so we don't save it: each run asks the process once.
    if !will_hold || rests || region.hold.is_refused() || region.marks.spans.len() > SPANS_MAX {
        return None;
    }
    let spans = region.marks.spans.iter();
    let marks = spans.map(|mark| (mark.first, mark.pages, mark.resident, mark.duplicate)).collect();
    Some(LearnedRegion {
        process: region.view.lasting,
        family: region.view.family,
        first: region.view.first,
        pages: region.view.pages,
        resident: region.view.resident,
        visited: if busy { Pages(0) } else { region.marks.visited },
        judged: region.life.is_judged(),
        left_over: Permyriad::of(whole(left_over * 10_000.0), 10_000),
        tally: region.survey.tally,
        sampled: region.survey.visited(),
        marks,
        hold: region.hold.reason(),
        hold_ns: region.hold.ends_ns().saturating_sub(now_ns),
        pause_ns: region.hold.pause_ns,
    })
}

/// An earlier run's verdicts on regions that haven't appeared yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdicts {
    pending: BTreeMap<(LastingKey, Vpn), LearnedRegion>,
    /// When we forget the pending verdicts, nanoseconds.
    until_ns: Option<u64>,
}

impl Verdicts {
    pub fn new(regions: Vec<LearnedRegion>) -> Self {
        let mut pending = BTreeMap::new();
        for region in regions.into_iter().take(REGIONS_MAX) {
            pending.insert((region.process, region.first), region);
        }
        Self { pending, until_ns: None }
    }

    /// All verdicts: this run's, and the earlier one's on regions that haven't appeared yet.
    pub fn with(&self, regions: impl Iterator<Item = LearnedRegion>) -> Vec<LearnedRegion> {
        let mut all: Vec<_> = regions.chain(self.pending.values().cloned()).collect();
        // We keep the largest regions, because reading them again costs most.
        all.sort_by_key(|region| (std::cmp::Reverse(region.resident), region.process, region.first));
        all.truncate(REGIONS_MAX);
        all
    }

    /// Gives newly appeared regions their saved verdicts. Returns how many resident pages are marked in these regions,
    /// and how many of those pages ksmd may not have visited yet.
    pub fn give(&mut self, table: &mut RegionTable, now_ns: u64) -> (Pages, Pages) {
        let mut marked = Pages(0);
        let mut unvisited = Pages(0);
        if self.pending.is_empty() {
            return (marked, unvisited);
        }
        for region in table.iter_mut().filter(|region| region.seen_ns == now_ns && region.life.is_surveyed()) {
            let Some(verdict) = self.pending.remove(&(region.view.lasting, region.view.first)) else { continue };
            if fits(&verdict, region) {
                adopt(region, &verdict, now_ns);
                marked += region.marked_resident();
                if verdict.visited == Pages(0) {
                    unvisited += region.marked_resident();
                }
            }
        }
        if now_ns >= *self.until_ns.get_or_insert(now_ns + APPEAR_NS) {
            self.pending.clear();
        }
        (marked, unvisited)
    }
}

/// Whether a verdict fits the region as it is now, and its figures are plausible.
fn fits(verdict: &LearnedRegion, region: &Region) -> bool {
    let view = &region.view;
    let same = verdict.family == view.family && verdict.pages == view.pages;
    let as_full = verdict.resident.0.abs_diff(view.resident.0) <= view.resident.0 / 8;
    // Tallies are halved after every pass over the bottom level, so they stay small.
    let few = 16 * view.pages.0 + 4_096;
    let Tally { sampled, zero, found, copies } = verdict.tally;
    let can_be = sampled.max(zero).max(found) <= few
        && copies.max(verdict.sampled) < 1 << 40
        && verdict.left_over <= Permyriad(10_000)
        && verdict.hold != Some(LeaveAlone::Refused);
    same && as_full && can_be && marks_fit(verdict, region)
}

/// Whether a verdict's marks can be in this region.
fn marks_fit(verdict: &LearnedRegion, region: &Region) -> bool {
    let mut marks = verdict.marks.clone();
    marks.sort_unstable();
    let mut next = region.view.first.0;
    let mut marked = Pages(0);
    for (first, pages, resident, duplicate) in marks {
        let end = first.0.saturating_add(pages.0);
        let is_span = first.0 >= next && pages > Pages(0) && end <= region.end().0;
        if !is_span || duplicate > resident || resident > pages {
            return false;
        }
        next = end;
        marked += pages;
    }
    // If the marks are gone, the region isn't the same any more.
    let are_there = verdict.marks.is_empty() || verdict.judged && region.view.marked > Pages(0);
    // We don't know a block's own marks, only its share of the mapping's.
    let are_all = region.in_blocks || marked <= region.view.marked;
    are_there && are_all && verdict.marks.len() <= SPANS_MAX
}

fn adopt(region: &mut Region, verdict: &LearnedRegion, now_ns: u64) {
    region.age = Age::Old;
    region.survey.adopt(verdict.tally, verdict.sampled);
    region.hold.adopt(now_ns, verdict.hold, verdict.hold_ns, verdict.pause_ns);
    if verdict.judged {
        region.life.advance(Event::Adopt { now_ns, left_over: verdict.left_over });
        for &(first, pages, resident, duplicate) in &verdict.marks {
            region.marks.spans.push(Candidate { first, pages, resident, duplicate });
        }
        region.marks.scanned_whole = verdict.visited > Pages(0);
        // The earlier run has judged marks that ksmd had visited. We don't judge them again, because the pages' copies
        // may be gone by now.
        region.marks.merges = verdict.visited > Pages(0);
        let visited = if verdict.visited > Pages(0) { verdict.visited } else { region.view.resident };
        region.marks.visited = visited.min(region.view.resident);
    }
}

/// We don't know the contents of adopted regions. If a new region of their family appears, we read one of the adopted
/// regions whole again, so that we find the pages that the two have in common.
pub(crate) fn read_for_newcomers(table: &mut RegionTable, now_ns: u64, top: usize) {
    if !table.iter().any(is_adopted) {
        return;
    }
    let mut sought = BTreeSet::new();
    for region in table.iter().filter(|region| region.is_new(now_ns)) {
        sought.insert(region.view.family);
    }
    for region in table.iter_mut() {
        if is_adopted(region) && sought.remove(&region.view.family) {
            region.examine(top);
        }
    }
}

/// Whether we know the region's marks only from an earlier run.
fn is_adopted(region: &Region) -> bool {
    region.life.adopted().is_some() && !region.marks.spans.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::hold::LEAVE_NS;
    use crate::region::test_view;

    fn table(marked: u64) -> RegionTable {
        let view = crate::host::RegionView { marked: Pages(marked), ..test_view(1, 1_000, 500) };
        let mut table = RegionTable::default();
        table.update(&[view], 5, |view| Region::new(view, 7, false, 5));
        table
    }

    fn marked() -> LearnedRegion {
        LearnedRegion {
            process: LastingKey(1),
            family: FamilyKey(1),
            first: Vpn(1_000),
            pages: Pages(500),
            resident: Pages(490),
            visited: Pages(490),
            judged: true,
            left_over: Permyriad(0),
            tally: Tally::default(),
            sampled: 3,
            marks: vec![(Vpn(1_000), Pages(500), Pages(490), Pages(400))],
            hold: None,
            hold_ns: 0,
            pause_ns: 0,
        }
    }

    fn adopts(verdict: LearnedRegion, marked: u64) -> bool {
        let mut table = table(marked);
        Verdicts::new(vec![verdict]).give(&mut table, 7);
        table.iter().next().unwrap().life.adopted().is_some()
    }

    #[test]
    fn a_verdict_is_adopted_by_the_same_region_alone() {
        assert!(adopts(marked(), 500));
        assert!(!adopts(marked(), 0), "its marks have been removed");
        assert!(!adopts(marked(), 499), "some of its marks have been removed");
        assert!(!adopts(LearnedRegion { process: LastingKey(2), ..marked() }, 500));
        assert!(!adopts(LearnedRegion { family: FamilyKey(2), ..marked() }, 500));
        assert!(!adopts(LearnedRegion { first: Vpn(1_001), ..marked() }, 500));
        assert!(!adopts(LearnedRegion { pages: Pages(501), ..marked() }, 500));
        assert!(!adopts(LearnedRegion { resident: Pages(300), ..marked() }, 500), "it has been filled since");
    }

    #[test]
    fn what_cannot_be_true_is_not_adopted() {
        let spans = |marks: &[(u64, u64, u64, u64)]| {
            let marks = marks.iter().map(|&(a, b, c, d)| (Vpn(a), Pages(b), Pages(c), Pages(d))).collect();
            adopts(LearnedRegion { marks, ..marked() }, 500)
        };
        assert!(spans(&[(1_100, 100, 100, 100), (1_000, 100, 90, 80)]));
        assert!(!spans(&[(999, 100, 100, 100)]) && !spans(&[(1_401, 100, 100, 100)]));
        assert!(!spans(&[(1_000, 100, 100, 100), (1_099, 100, 100, 100)]), "the marks overlap");
        assert!(!spans(&[(1_000, 0, 0, 0)]) && !spans(&[(1_000, u64::MAX, 1, 1)]));
        assert!(!spans(&[(1_000, u64::MAX, 1, 1), (1_000, u64::MAX, 1, 1)]));
        assert!(!spans(&[(1_000, 100, 101, 100)]) && !spans(&[(1_000, 100, 90, 91)]));
        assert!(!adopts(LearnedRegion { judged: false, ..marked() }, 500), "marks need a whole reading");
        let tally = Tally { sampled: u64::MAX, ..Tally::default() };
        assert!(!adopts(LearnedRegion { tally, ..marked() }, 500));
        assert!(!adopts(LearnedRegion { left_over: Permyriad(10_001), ..marked() }, 500));
        assert!(!adopts(LearnedRegion { hold: Some(LeaveAlone::Refused), ..marked() }, 500), "a refusal isn't adopted");
    }

    #[test]
    fn no_region_is_left_alone_for_longer_than_an_hour() {
        let mut table = table(500);
        let hold = Some(LeaveAlone::CowBroken);
        let verdict = LearnedRegion { hold, hold_ns: u64::MAX / 2, pause_ns: u64::MAX, ..marked() };
        Verdicts::new(vec![verdict]).give(&mut table, 7);
        let region = table.iter().next().unwrap();
        assert!(!region.hold.may_mark(LEAVE_NS) && region.hold.may_mark(LEAVE_NS + 7));
    }

    #[test]
    fn verdicts_wait_for_their_regions_for_a_while() {
        let mut verdicts = Verdicts::new(vec![marked()]);
        let mut empty = RegionTable::default();
        verdicts.give(&mut empty, 0);
        verdicts.give(&mut empty, APPEAR_NS - 1);
        assert_eq!(verdicts.with(std::iter::empty()).len(), 1);
        verdicts.give(&mut empty, APPEAR_NS);
        assert_eq!(verdicts.with(std::iter::empty()).len(), 0);
    }
}
