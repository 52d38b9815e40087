//! Finds memory where merges don't pay because programs soon write the merged pages. We have no hook in the page fault
//! handler, so we look at single merged pages again and again.
//!
//! UKSM calls memory COW-broken if half of its merges of a round are undone (section 5.2). We apply a similar rule only
//! before we merge anything ([`Survey::is_volatile`](crate::region::Survey::is_volatile)). We judge merged memory by
//! cost ([`breaks_cost_ns`]), extent by extent: a program that keeps rewriting its data doesn't touch the zeros of the
//! heap around it. `n` breaks may be `2 * sqrt(n)` too many by chance, so four are no evidence.
//!
//! An extent that doesn't pay rests: we leave it alone for a time. With ksmd we unmark it. On request only its written
//! pages rest, because the others are still merged, so we only count breaks of written pages. After the rest we try the
//! extent for as long as it rested, on request with few of its written pages. If that doesn't pay, the extent rests for
//! twice as long.

use crate::hash::Digest;
use crate::marking::profit::{breaks_cost_ns, saved_worth_ns};
use crate::random::mix;
use crate::region::hold::rest_ns;
use crate::units::{EXTENT_PAGES, Vpn, whole};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// We observe at most this many pages in one region.
pub const PROBES_MAX: usize = 2_048;
/// We halve our counts each time this long has passed, nanoseconds. A page counts as merged for at most this long, so
/// that we notice if a program changes its ways.
const MEMORY_NS: u64 = 600_000_000_000;
/// When we try an extent again on request, we only merge one in this many of its written pages.
const TRIED_PART: u64 = 8;
/// We only observe as many pages as we can visit again within this time, nanoseconds. If a page is written and merged
/// again between two visits, we believe that it stayed merged.
const VISIT_AGAIN_NS: u64 = 20_000_000_000;

/// Observed breaks of a region's merged pages, and the extents where we leave pages alone because of them.
#[derive(Clone, Debug, Default)]
pub struct CowBreaks {
    /// Pages under observation.
    probes: BTreeMap<Vpn, Probe>,
    /// The search for the next page to visit starts here.
    next: Vpn,
    /// How many pages we can visit often enough. `None` before the first visits.
    visitable: Option<usize>,
    /// Observations that have ended, by extent.
    ended: BTreeMap<u64, BreakTally>,
    /// Extents with breaks since we last judged them. We only judge these again, because only a break can make a
    /// verdict worse.
    broken: BTreeSet<u64>,
    /// When we last halved `ended`, nanoseconds.
    forgot_ns: u64,
    /// Extents that we leave alone for a time, or try again after that.
    rests: BTreeMap<u64, Rest>,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    /// When the page was merged, when we first saw it merged, and when we last saw it merged, nanoseconds.
    since_ns: u64,
    first_ns: u64,
    last_ns: u64,
    /// 32 bits of the digest of the page's content, enough to notice a change.
    fingerprint: u32,
}

impl Probe {
    fn merged_ns(&self, until_ns: u64) -> u64 {
        until_ns.saturating_sub(self.since_ns).min(MEMORY_NS)
    }
}

/// How long pages stayed merged in all, and how often programs wrote them.
#[derive(Clone, Copy, Debug, Default)]
pub struct BreakTally {
    merged_ns: u64,
    breaks: u64,
    /// How many of the breaks were writes to pages of zeros.
    zeros: u64,
}

impl BreakTally {
    /// Whether the breaks certainly cost more than the saving is worth.
    fn is_loss(&self, price_ns: u64) -> bool {
        let certain = self.certain_breaks() / self.breaks.max(1) as f64;
        certain * breaks_cost_ns(self.breaks, self.zeros) > saved_worth_ns(self.merged_ns, price_ns)
    }

    /// The number of breaks, less those that may be chance.
    fn certain_breaks(&self) -> f64 {
        let breaks = self.breaks as f64;
        (breaks - 2.0 * breaks.sqrt()).max(0.0)
    }

    /// How long a page stays merged, nanoseconds.
    pub fn lasts_ns(&self) -> u64 {
        self.merged_ns / self.breaks.max(1)
    }

    fn add(&mut self, other: &Self) {
        self.merged_ns += other.merged_ns;
        self.breaks += other.breaks;
        self.zeros += other.zeros;
    }
}

/// An extent that we leave alone for a time, and then try again for as long.
#[derive(Clone, Copy, Debug)]
struct Rest {
    /// How often in a row the extent has rested.
    times: u32,
    phase: RestPhase,
}

#[derive(Clone, Copy, Debug)]
enum RestPhase {
    Resting {
        until_ns: u64,
    },
    /// The extent may be merged again. Its trial begins once a page of it is merged.
    Over,
    Trial {
        until_ns: u64,
    },
}

impl CowBreaks {
    /// Records a page that has been merged since `since_ns`. Pages of resting extents don't count, because we're about
    /// to unmark them.
    pub fn record_merged(&mut self, page: Vpn, since_ns: u64, now_ns: u64, digest: Digest) {
        match self.rests.get_mut(&page.extent()) {
            Some(Rest { phase: RestPhase::Resting { .. }, .. }) => return,
            Some(Rest { times, phase: phase @ RestPhase::Over }) => {
                *phase = RestPhase::Trial { until_ns: since_ns + rest_ns(*times) };
            }
            Some(Rest { phase: RestPhase::Trial { .. }, .. }) | None => {}
        }
        let found = Probe { since_ns, first_ns: now_ns, last_ns: now_ns, fingerprint: digest.fingerprint() };
        match self.probes.get_mut(&page) {
            Some(probe) if probe.fingerprint == found.fingerprint => {
                probe.last_ns = now_ns;
                if now_ns >= probe.first_ns + MEMORY_NS {
                    // The merged page lasts, so we observe another one in its place.
                    self.probes.remove(&page);
                    self.ended.entry(page.extent()).or_default().merged_ns += MEMORY_NS;
                }
                return;
            }
            // Perhaps the program didn't write the page but gave it back to the kernel: then the next read maps the
            // zero page.
            Some(_) if digest == Digest::ZERO => self.forget_page(page),
            // The page was written and merged again since our last visit.
            Some(_) => self.record_written(page, now_ns),
            None => {}
        }
        if self.has_room() {
            self.probes.insert(page, found);
        }
    }

    /// Records a page that isn't merged: if it was, its program has written it.
    pub fn record_written(&mut self, page: Vpn, now_ns: u64) {
        let Some(probe) = self.probes.remove(&page) else { return };
        let is_zero = probe.fingerprint == Digest::ZERO.fingerprint();
        // The page was written at some time since our last visit. We take the middle.
        let merged_ns = probe.merged_ns(probe.last_ns.midpoint(now_ns));
        let ended = BreakTally { merged_ns, breaks: 1, zeros: u64::from(is_zero) };
        self.ended.entry(page.extent()).or_default().add(&ended);
        self.broken.insert(page.extent());
    }

    /// Stops observing a page without counting a break, for example if its program has given it back.
    pub fn forget_page(&mut self, page: Vpn) {
        self.probes.remove(&page);
    }

    /// Stops observing a page if different contents share its fingerprint. From now on we hash such a page in another
    /// way, and its new digest would look like a write.
    pub fn forget_colliding(&mut self, page: Vpn, is_shared: impl Fn(u32) -> bool) {
        if self.probes.get(&page).is_some_and(|probe| is_shared(probe.fingerprint)) {
            self.forget_page(page);
        }
    }

    /// Adapts how many pages we observe to how many we visit in each round.
    pub fn set_visits(&mut self, visits: u64, round_ns: u64) {
        let often_enough = visits.saturating_mul(VISIT_AGAIN_NS) / round_ns.max(1);
        self.visitable = usize::try_from(often_enough).ok();
    }

    pub fn has_room(&self) -> bool {
        self.probes.len() < self.visitable.unwrap_or(PROBES_MAX).min(PROBES_MAX)
    }

    pub fn observed(&self) -> usize {
        self.probes.len()
    }

    /// The next observed page to visit. We visit each page once before we visit any twice.
    pub fn next_visit(&mut self) -> Option<Vpn> {
        let after = self.probes.range(self.next..).next().or_else(|| self.probes.iter().next());
        let page = *after?.0;
        self.next = page + 1;
        Some(page)
    }

    /// Runs of extents that were written since the last call and where merges don't pay: breaks cost more than the
    /// saving is worth, at `price_ns` an hour for each saved page. `whole`: judge these extents as one.
    pub fn losses(&mut self, now_ns: u64, price_ns: u64, whole: Option<Range<u64>>) -> Vec<(Range<u64>, BreakTally)> {
        if now_ns >= self.forgot_ns + MEMORY_NS {
            self.forgot_ns = now_ns;
            self.ended.retain(|_, tally| {
                *tally =
                    BreakTally { merged_ns: tally.merged_ns / 2, breaks: tally.breaks / 2, zeros: tally.zeros / 2 };
                tally.merged_ns > 0
            });
        }
        let broken = std::mem::take(&mut self.broken);
        if broken.is_empty() {
            return Vec::new();
        }
        let mut losses: Vec<(Range<u64>, BreakTally)> = Vec::new();
        if let Some(extents) = whole {
            let tally = self.tally(extents.clone());
            if tally.is_loss(price_ns) {
                losses.push((extents, tally));
            }
            return losses;
        }
        for extent in broken {
            let tally = self.tally(extent..extent + 1);
            if !tally.is_loss(price_ns) {
                continue;
            }
            match losses.last_mut() {
                Some((last, sum)) if last.end == extent => {
                    last.end += 1;
                    sum.add(&tally);
                }
                _ => losses.push((extent..extent + 1, tally)),
            }
        }
        losses
    }

    /// The sum of our observations in some extents.
    fn tally(&self, extents: Range<u64>) -> BreakTally {
        let mut sum = BreakTally::default();
        for tally in self.ended.range(extents.clone()) {
            sum.add(tally.1);
        }
        for (_, probe) in self.probes.range(pages_of(extents)) {
            sum.merged_ns += probe.merged_ns(probe.last_ns);
        }
        sum
    }

    /// Leaves extents alone for a time, and forgets our observations there.
    pub fn rest(&mut self, extents: Range<u64>, now_ns: u64) {
        let pages = pages_of(extents.clone());
        self.probes.retain(|page, _| !pages.contains(page));
        for extent in extents {
            self.ended.remove(&extent);
            let times = self.rests.get(&extent).map_or(0, |rest| rest.times + 1);
            self.rests.insert(extent, Rest { times, phase: RestPhase::Resting { until_ns: now_ns + rest_ns(times) } });
        }
    }

    /// Ends rests (times when we leave an extent alone) and the trials after them, if their time is over. Returns
    /// whether any rest ended. With ksmd (`by_marks`) a trial only begins once a page is merged again, which may take
    /// long. On request it begins at once: we only try few of the pages, and they may have no copy.
    pub fn end_rests(&mut self, now_ns: u64, by_marks: bool) -> bool {
        let mut any = false;
        self.rests.retain(|_, rest| match rest.phase {
            RestPhase::Resting { until_ns } if now_ns >= until_ns => {
                let trial = RestPhase::Trial { until_ns: now_ns + rest_ns(rest.times) };
                rest.phase = if by_marks { RestPhase::Over } else { trial };
                any = true;
                true
            }
            RestPhase::Trial { until_ns } => now_ns < until_ns,
            RestPhase::Resting { .. } | RestPhase::Over => true,
        });
        any
    }

    /// The extents that we leave alone for now, in ascending order, and when we try each of them again.
    pub fn resting(&self) -> impl Iterator<Item = (u64, u64)> {
        self.rests.iter().filter_map(|(&extent, rest)| match rest.phase {
            RestPhase::Resting { until_ns } => Some((extent, until_ns)),
            RestPhase::Over | RestPhase::Trial { .. } => None,
        })
    }

    /// Whether we leave a written page alone: because its extent rests, or we only try other pages of the extent.
    pub fn rests(&self, page: Vpn) -> bool {
        let Some(rest) = self.rests.get(&page.extent()) else { return false };
        matches!(rest.phase, RestPhase::Resting { .. }) || mix(page.0) % TRIED_PART > 0
    }

    /// Forgets everything outside of these pages: the region has shrunk.
    pub fn keep_only(&mut self, pages: Range<Vpn>) {
        let extents = pages.start.extent()..pages.end.0.div_ceil(EXTENT_PAGES);
        self.probes.retain(|page, _| pages.contains(page));
        self.ended.retain(|extent, _| extents.contains(extent));
        self.broken.retain(|extent| extents.contains(extent));
        self.rests.retain(|extent, _| extents.contains(extent));
    }

    /// How many breaks a merged page has per million seconds, at least.
    pub fn rate(&self) -> u64 {
        let all = self.tally(0..u64::MAX / EXTENT_PAGES);
        whole(all.certain_breaks() * 1_000_000.0) / (all.merged_ns / 1_000_000_000).max(1)
    }

    /// Stops observing all pages, because they're no longer merged. Their breaks still count.
    pub fn forget_pages(&mut self) {
        self.probes.clear();
    }
}

fn pages_of(extents: Range<u64>) -> Range<Vpn> {
    Vpn(extents.start * EXTENT_PAGES)..Vpn(extents.end * EXTENT_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::governor::Governor;
    use crate::units::EXTENT_PAGES;

    const S: u64 = 1_000_000_000;
    const DATA: Digest = Digest(7 << 16);

    /// The price of the governor `full`: a page must last for 45 s, a page of zeros for 36 s.
    fn price_ns() -> u64 {
        Governor::Full.pace().price_ns
    }

    /// Merges each extent's first `pages` pages and writes them `every_s` seconds later, all of it `times` times.
    fn written(breaks: &mut CowBreaks, extents: &[u64], pages: u64, every_s: u64, times: u64, digest: Digest) {
        for time in 0..times {
            for extent in extents {
                for page in extent * EXTENT_PAGES..extent * EXTENT_PAGES + pages {
                    let from_ns = time * every_s * S;
                    breaks.record_merged(Vpn(page), from_ns, from_ns, digest);
                    // Seen at the moment of the write.
                    breaks.record_merged(Vpn(page), from_ns, from_ns + every_s * S, digest);
                    breaks.record_written(Vpn(page), from_ns + every_s * S);
                }
            }
        }
    }

    /// The extents that don't pay, each judged separately.
    fn losses(breaks: &mut CowBreaks) -> Vec<u64> {
        breaks.losses(0, price_ns(), None).into_iter().flat_map(|(extents, _)| extents).collect()
    }

    #[test]
    fn merges_pay_if_pages_last_for_longer_than_their_breaks_cost() {
        for (every_s, digest, is_loss) in
            [(40, DATA, true), (50, DATA, false), (30, Digest::ZERO, true), (40, Digest::ZERO, false)]
        {
            let mut breaks = CowBreaks::default();
            // Enough breaks that chance hardly matters.
            written(&mut breaks, &[1], 500, every_s, 10, digest);
            assert_eq!(losses(&mut breaks), Vec::from_iter(is_loss.then_some(1)), "every {every_s} s");
        }
    }

    #[test]
    fn few_breaks_are_no_evidence() {
        for (number, is_loss) in [(4, false), (5, true)] {
            let mut breaks = CowBreaks::default();
            written(&mut breaks, &[1], number, 1, 1, DATA);
            assert_eq!(losses(&mut breaks), Vec::from_iter(is_loss.then_some(1)), "{number} breaks");
        }
    }

    #[test]
    fn breaks_say_nothing_about_other_extents_unless_the_region_is_judged_whole() {
        let mut breaks = CowBreaks::default();
        written(&mut breaks, &[1, 3, 4], 100, 5, 2, DATA);
        for page in 0..100 {
            let page = Vpn(2 * EXTENT_PAGES + page);
            breaks.record_merged(page, 0, 60 * S, Digest::ZERO);
        }
        let whole = Some(0..20);
        let mut as_one = breaks.clone();
        assert_eq!(losses(&mut breaks), [1, 3, 4]);
        assert_eq!(losses(&mut breaks), [], "until they're written again");
        assert_eq!(as_one.clone().losses(0, price_ns(), whole.clone())[0].0, 0..20);
        for extent in 5..30 {
            for page in 0..100 {
                as_one.record_merged(Vpn(extent * EXTENT_PAGES + page), 0, 300 * S, Digest::ZERO);
            }
        }
        assert!(as_one.losses(0, price_ns(), whole).is_empty(), "all together pay");
    }

    #[test]
    fn neighbouring_losses_are_one() {
        let mut breaks = CowBreaks::default();
        for extent in [1, 2, 4] {
            written(&mut breaks, &[extent], 100, 4 + extent, 2, DATA);
        }
        let found: Vec<_> = breaks.losses(0, price_ns(), None).into_iter().map(|(extents, _)| extents).collect();
        assert_eq!(found, [1..3, 4..5]);
    }

    #[test]
    fn pages_that_stay_merged_outweigh_breaks_beside_them() {
        let mut breaks = CowBreaks::default();
        written(&mut breaks, &[1], 20, 5, 2, DATA);
        for page in 100..200 {
            breaks.record_merged(Vpn(EXTENT_PAGES + page), 0, 60 * S, DATA);
        }
        assert_eq!(losses(&mut breaks), []);
    }

    #[test]
    fn a_program_that_changes_its_ways_is_noticed() {
        let mut breaks = CowBreaks::default();
        for page in 0..100 {
            breaks.record_merged(Vpn(page), 0, 100_000 * S, DATA);
            breaks.record_written(Vpn(page), 100_000 * S);
        }
        assert_eq!(losses(&mut breaks), []);
        written(&mut breaks, &[0], 100, 5, 20, DATA);
        assert_eq!(losses(&mut breaks), [0]);
    }

    #[test]
    fn pages_given_back_are_not_broken_and_changed_ones_are() {
        let mut breaks = CowBreaks::default();
        for page in 0..100 {
            breaks.record_merged(Vpn(page), 0, 0, DATA);
            breaks.forget_page(Vpn(page));
            breaks.record_written(Vpn(page), S);
        }
        for page in 0..100 {
            breaks.record_merged(Vpn(page), 0, 0, DATA);
            // Read after it was given back.
            breaks.record_merged(Vpn(page), S, S, Digest::ZERO);
        }
        assert_eq!((losses(&mut breaks), breaks.rate()), (vec![], 0));
        breaks.forget_pages();
        for digest in [DATA, Digest(8 << 16)] {
            (0..100).for_each(|page| breaks.record_merged(Vpn(page), S, S, digest));
        }
        assert_eq!(losses(&mut breaks), [0]);
    }

    #[test]
    fn an_extent_rests_for_longer_each_time_and_is_tried_with_few_pages() {
        let mut breaks = CowBreaks::default();
        let named = |breaks: &CowBreaks| (0..512).filter(|&page| !breaks.rests(Vpn(page))).count();
        let mut now_ns = 0;
        for minutes in [5, 10, 20, 40, 60, 60] {
            breaks.rest(0..1, now_ns);
            assert_eq!((named(&breaks), breaks.rests(Vpn(512))), (0, false));
            now_ns += minutes * 60 * S;
            assert!(!breaks.end_rests(now_ns - 1, false) && breaks.end_rests(now_ns, false));
            now_ns += minutes * 60 * S - 1;
            assert!(!breaks.end_rests(now_ns, false));
            assert!((40..90).contains(&named(&breaks)), "{} of 512", named(&breaks));
            assert_eq!(breaks.resting().count(), 0);
        }
        assert!(!breaks.end_rests(now_ns + 1, false) && named(&breaks) == 512, "it has paid for as long as it rested");
        breaks.rest(0..1, now_ns);
        assert_eq!(breaks.resting().next(), Some((0, now_ns + 300 * S)), "it begins anew");
        assert!(breaks.end_rests(now_ns + 100_000 * S, false), "however late we look");
    }

    #[test]
    fn with_ksmd_a_trial_begins_once_a_page_is_merged() {
        let mut breaks = CowBreaks::default();
        breaks.rest(0..1, 0);
        assert!(breaks.end_rests(300 * S, true));
        assert!(!breaks.end_rests(10_000 * S, true));
        breaks.record_merged(Vpn(7), 10_000 * S, 10_000 * S, DATA);
        let ends_after = |breaks: &mut CowBreaks, seconds: u64| {
            breaks.end_rests((10_000 + seconds) * S, true);
            breaks.rests.is_empty()
        };
        assert!(!ends_after(&mut breaks, 299) && ends_after(&mut breaks, 300));
    }

    #[test]
    fn pages_are_observed_if_we_can_visit_them_often_enough() {
        let mut breaks = CowBreaks::default();
        breaks.set_visits(8, 2 * S);
        (0..1_000).for_each(|page| breaks.record_merged(Vpn(page), 0, 0, DATA));
        assert_eq!(breaks.observed(), 80);
        breaks.set_visits(u64::MAX, 2 * S);
        assert!(breaks.has_room());
    }

    #[test]
    fn a_digest_that_changes_because_contents_share_it_is_no_break() {
        let mut breaks = CowBreaks::default();
        for page in 0..100 {
            breaks.record_merged(Vpn(page), 0, 0, DATA);
            breaks.forget_colliding(Vpn(page), |print| print == DATA.fingerprint());
            breaks.record_merged(Vpn(page), S, S, Digest(8 << 16));
        }
        assert_eq!((losses(&mut breaks), breaks.observed()), (vec![], 100));
    }

    #[test]
    fn unmarking_what_rests_is_no_break() {
        let mut breaks = CowBreaks::default();
        breaks.rest(0..1, 0);
        for page in 0..100 {
            breaks.record_merged(Vpn(page), 0, S, DATA);
            breaks.record_written(Vpn(page), 2 * S);
        }
        assert_eq!((breaks.observed(), breaks.rate()), (0, 0));
    }

    #[test]
    fn what_a_region_loses_is_forgotten() {
        let mut breaks = CowBreaks::default();
        written(&mut breaks, &[1, 5], 100, 5, 2, DATA);
        for extent in [2, 3, 6] {
            breaks.rest(extent..extent + 1, 0);
        }
        for page in 0..200 {
            breaks.record_merged(Vpn(4 * EXTENT_PAGES + page), 0, 0, DATA);
        }
        breaks.keep_only(Vpn(3 * EXTENT_PAGES)..Vpn(4 * EXTENT_PAGES + 100));
        assert_eq!(breaks.observed(), 100);
        assert_eq!(breaks.resting().map(|(extent, _)| extent).collect::<Vec<_>>(), [3]);
        assert_eq!((losses(&mut breaks), breaks.rate()), (vec![], 0));
    }

    #[test]
    fn pages_that_last_make_room_for_others() {
        let mut breaks = CowBreaks::default();
        for at_ns in [0, MEMORY_NS] {
            (0..10_000).for_each(|page| breaks.record_merged(Vpn(page), at_ns, at_ns, DATA));
            assert_eq!(breaks.has_room(), at_ns > 0 && breaks.observed() < PROBES_MAX);
        }
    }

    #[test]
    fn visits_cycle_through_all_pages() {
        let mut breaks = CowBreaks::default();
        assert_eq!(breaks.next_visit(), None);
        for page in [5, 1, 9] {
            breaks.record_merged(Vpn(page), 0, 0, DATA);
        }
        let visits: Vec<_> = (0..7).filter_map(|_| breaks.next_visit()).map(|page| page.0).collect();
        assert_eq!(visits, [1, 5, 9, 1, 5, 9, 1]);
    }
}
