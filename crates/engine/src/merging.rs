//! Decides when ksmd scans.
//!
//! A scan visits every marked page, and no page merges before its second visit: the first only stores a checksum
//! (`cmp_and_merge_page`, mm/ksm.c, Linux 6.12). So newly marked memory needs two scans, and none after that: merged
//! pages stay merged while ksmd rests. Later changes need two more once samples show that they'd pay. Exited processes
//! need one scan, because the kernel keeps their address spaces until ksmd visits them.
//!
//! We scan small marked sets by kicks (one scan without pause) and large ones in paced batches, because we can't abort
//! a kick.

use crate::governor::{Pace, period_ns, share_ns};
use crate::host::{KsmView, ScanOrder};
use crate::marking::profit::{NEW_PAGE_NS, OLD_PAGE_NS};
use crate::units::{Pages, Permyriad};

/// Exited processes wait to be reaped for this many times the scan's CPU time, so that several can share one scan.
/// Waiting is cheap: ksmd's records take only 64 bytes a page.
const REAP_SHARE: u64 = 500;
/// The shortest and the longest time that reaping waits, nanoseconds.
const REAP_AFTER_NS: u64 = 700_000_000;
const REAP_AT_LATEST_NS: u64 = 300_000_000_000;
/// A scan waits at most this long for us to read cgroup limits again, nanoseconds. With many cgroups that may take
/// longer.
const LIMITS_NS: u64 = 10_000_000_000;
/// The longest scan that we kick, nanoseconds.
const KICK_NS_MAX: u64 = 3_000_000_000;
/// If the governor allows at least this share of a core (parts in 10,000), we kick scans instead of pacing them.
const KICK_SHARE: u32 = 9_000;
/// The highest usual cost of a page, nanoseconds: the page is merged, and ksmd's trees don't hold its content yet.
const HIGHEST_PAGE_NS: u64 = 20_000;
/// The cost of freeing ksmd's record of a page that's gone, nanoseconds.
const EXITED_PAGE_NS: u64 = 100;
/// A scan waits at most this long for marks that may follow, nanoseconds, or for as long as the scan itself takes if
/// that's longer.
const SETTLE_NS: u64 = 4_000_000_000;
/// Batches are so small that they take at most the governor's share of this time, nanoseconds, even if all pages have
/// the highest cost.
const BATCH_NS: u64 = 500_000_000;

#[derive(Clone, Copy, Debug)]
struct ScanInProgress {
    /// KSM's counters when the scan began.
    full_scans: u64,
    saved: Pages,
    scanned: u64,
    /// Whether the scan visits every page, without `smart_scan`.
    thorough: bool,
    /// Whether we kicked the scan. A paced scan continues until we order ksmd to rest.
    kicked: bool,
}

/// Everything that our next order to ksmd depends on.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub now_ns: u64,
    pub ksm: &'a KsmView,
    /// CPU time that ksmd has used so far, nanoseconds.
    pub ksmd_ns: u64,
    /// Resident pages in marked memory.
    pub marked: Pages,
    /// Whether we're done marking for now. Otherwise scans wait, so that one scan serves all marks.
    pub settled: bool,
    pub pace: Pace,
    /// CPU time that we may spend now, nanoseconds.
    pub room_ns: u64,
    /// Whether nothing may be merged now. Then no scan begins, and a paced scan rests.
    pub hold: bool,
    /// When we last read the cgroup limits, and so knew where there's headroom, nanoseconds. `None`: there are no
    /// limits.
    pub limits_read_ns: Option<u64>,
}

/// The scans that marked memory still needs, and the scan in progress.
#[derive(Clone, Debug, Default)]
pub struct ScanScheduler {
    due: u32,
    /// Since when a due scan has been waiting for marks that may follow.
    ready_since_ns: Option<u64>,
    /// Resident pages that ksmd hasn't visited twice yet.
    unvisited: Pages,
    /// Whether the next scans must visit every page.
    thorough: bool,
    scan_in_progress: Option<ScanInProgress>,
    /// Merged pages of exited processes that KSM's counters still contain: how many wait to be reaped, since when, and
    /// how many the scan in progress reaps.
    exited: Pages,
    reap_since_ns: Option<u64>,
    reaping: Pages,
    /// Pages merged by the last completed scan, and by all scans since ksmd last had nothing to do.
    last_merged: Pages,
    merged: Pages,
    completed: u64,
    ended_ns: u64,
    /// Whether we kicked the last scan. Once a kick has ended, ksmd isn't in the middle of a scan.
    between_scans: bool,
    /// The last order. We only send a new one if it differs.
    last_order: ScanOrder,
    /// The cost of a page during a scan, nanoseconds, by which we pace ksmd, and the counters that we derived it from.
    page_ns: u64,
    scanned: u64,
    ksmd_ns: u64,
}

impl ScanScheduler {
    /// Requests two scans: `resident` pages have been marked, or have become worth merging in marked spans.
    pub fn request(&mut self, resident: Pages) {
        if resident > Pages(0) {
            if !self.is_busy() {
                self.merged = Pages(0);
            }
            self.unvisited += resident;
            // A scan in progress has already passed some of the new pages, so it doesn't count.
            self.due = if self.scan_in_progress.is_some() { 3 } else { 2 };
        }
    }

    /// Adds a scan to the ones just requested.
    pub fn request_another(&mut self) {
        self.due += 1;
    }

    /// Requests two scans that visit every page: `resident` pages that ksmd has visited often have become worth
    /// merging. After four visits without a merge, `smart_scan` skips a page in up to eight scans, even if its content
    /// has changed (`should_skip_rmap_item`, mm/ksm.c, Linux 6.12).
    pub fn request_thorough(&mut self, resident: Pages) {
        self.request(resident);
        self.thorough = true;
    }

    /// Requests a scan to reap marked memory that was unmapped or whose process has exited. About `merged` pages of it
    /// were merged.
    pub fn request_reaping(&mut self, merged: Pages, now_ns: u64) {
        self.exited += merged;
        self.reap_since_ns.get_or_insert(now_ns);
    }

    /// Roughly how many of the pages that KSM counts as merged are gone. KSM counts them until ksmd visits them
    /// (`remove_rmap_item_from_tree`, mm/ksm.c, Linux 6.12).
    pub fn exited(&self) -> Pages {
        self.exited + self.reaping
    }

    pub fn is_busy(&self) -> bool {
        self.scan_in_progress.is_some() || self.due > 0
    }

    /// Whether pages that we mark now will get two visits from ksmd.
    pub fn visits_twice(&self) -> bool {
        self.due >= 2
    }

    pub fn is_thorough(&self) -> bool {
        self.scan_in_progress.is_some_and(|scan| scan.thorough)
    }

    /// Whether a scan in progress or due visits every page.
    pub fn wants_thorough(&self) -> bool {
        self.thorough
    }

    /// Whether two scans are about to start, so that pages we mark now get both.
    pub fn starts_two_scans(&self) -> bool {
        self.scan_in_progress.is_none() && self.visits_twice()
    }

    pub fn scans(&self) -> u64 {
        self.completed
    }

    /// Pages merged by the last completed scan.
    pub fn last_merged(&self) -> Pages {
        self.last_merged
    }

    /// Pages merged by all scans since ksmd last had nothing to do.
    pub fn merged(&self) -> Pages {
        self.merged
    }

    /// How long ksmd has had nothing to do, nanoseconds.
    pub fn idle_ns(&self, now_ns: u64) -> u64 {
        if self.is_busy() { 0 } else { now_ns.saturating_sub(self.ended_ns) }
    }

    pub fn order(&mut self, inputs: &Inputs<'_>) -> ScanOrder {
        let order = self.decide(inputs);
        if order == self.last_order && !matches!(order, ScanOrder::Kick { .. }) {
            return ScanOrder::Keep;
        }
        if order != ScanOrder::Keep {
            self.last_order = order;
        }
        order
    }

    /// The order while we're paused, or while a scan would merge memory of two trust domains: a scan in progress ends
    /// as soon as it can.
    pub fn suspend(&mut self, ksm: &KsmView) -> ScanOrder {
        if !ksm.ours || matches!(self.last_order, ScanOrder::Keep | ScanOrder::Rest) {
            return ScanOrder::Keep;
        }
        self.last_order = ScanOrder::Rest;
        ScanOrder::Rest
    }

    fn decide(&mut self, inputs: &Inputs<'_>) -> ScanOrder {
        let Inputs { now_ns, ksm, .. } = *inputs;
        self.measure(inputs);
        if !ksm.ours {
            // We drop the scan in progress. Scans that are due remain so until we control KSM again.
            self.scan_in_progress = None;
            return ScanOrder::Keep;
        }
        let scan_ns = inputs.marked.0 * OLD_PAGE_NS + self.exited.0 * EXITED_PAGE_NS;
        let reap_ns = (scan_ns * REAP_SHARE).clamp(REAP_AFTER_NS, REAP_AT_LATEST_NS);
        if self.due == 0 && self.reap_since_ns.is_some_and(|since_ns| now_ns >= since_ns + reap_ns) {
            self.due = 1;
        }
        let continues = self.scan_in_progress.is_some();
        let in_batches = self.scan_in_progress.is_some_and(|scan| !scan.kicked);
        if let Some(scan) = self.scan_in_progress {
            if scan.kicked && ksm.busy {
                return ScanOrder::Keep;
            }
            if !scan.kicked && ksm.full_scans == scan.full_scans {
                return if inputs.hold { ScanOrder::Rest } else { self.pace(inputs) };
            }
            self.finish(inputs);
            if ksm.full_scans < scan.full_scans {
                // Somebody has set `run` to 2 and back to 1: nothing is merged any more, and ksmd counts from 0.
                self.request(inputs.marked);
            }
        }
        if self.due == 0 {
            return if self.completed > 0 { ScanOrder::Rest } else { ScanOrder::Keep };
        }
        if inputs.hold || self.waits_for_limits(inputs) {
            return if in_batches { ScanOrder::Rest } else { ScanOrder::Keep };
        }
        let expected_ns = self.scan_ns(inputs.marked, Pages(0));
        let waits_ns = period_ns(expected_ns, inputs.pace.top).max(SETTLE_NS);
        if !inputs.settled && now_ns < *self.ready_since_ns.get_or_insert(now_ns) + waits_ns {
            return ScanOrder::Keep;
        }
        let kicked = inputs.pace.top.0 >= KICK_SHARE && expected_ns <= KICK_NS_MAX;
        if kicked && expected_ns > inputs.room_ns {
            return ScanOrder::Keep;
        }
        if !kicked && !self.between_scans && !continues {
            // A paced scan may start in the middle of an earlier one and miss some marked pages, so we need one more.
            self.due += 1;
        }
        self.between_scans = kicked;
        self.ready_since_ns = None;
        self.reap_since_ns = None;
        self.reaping += std::mem::take(&mut self.exited);
        let thorough = self.thorough;
        self.scan_in_progress = Some(ScanInProgress {
            full_scans: ksm.full_scans,
            saved: ksm.saved(),
            scanned: ksm.scanned,
            thorough,
            kicked,
        });
        if kicked { ScanOrder::Kick { thorough } } else { self.pace(inputs) }
    }

    /// The CPU time of a scan, nanoseconds, once `unmarked` more pages are marked.
    fn scan_ns(&self, marked: Pages, unmarked: Pages) -> u64 {
        let unvisited = self.unvisited.min(marked);
        (unvisited + unmarked).0 * NEW_PAGE_NS + (marked - unvisited).0 * OLD_PAGE_NS
    }

    /// The CPU time that the remaining scans need, nanoseconds, once `unmarked` more pages are marked.
    pub fn left_ns(&self, ksm: &KsmView, marked: Pages, unmarked: Pages) -> u64 {
        let scan_ns = self.scan_ns(marked, unmarked);
        if unmarked > Pages(0) {
            return 2 * scan_ns;
        }
        let visited = self.scan_in_progress.map_or(0, |scan| ksm.scanned.saturating_sub(scan.scanned));
        let part_ns = scan_ns * visited.min(marked.0) / marked.0.max(1);
        (u64::from(self.due) * scan_ns).saturating_sub(part_ns)
    }

    /// Whether we haven't read the cgroup limits since the last scan. A page written before or during that scan isn't
    /// merged before the next one. So if we read the limits in between, we notice in time that a cgroup has no headroom
    /// for the page.
    fn waits_for_limits(&self, inputs: &Inputs<'_>) -> bool {
        let is_known = inputs.limits_read_ns.is_none_or(|read_ns| read_ns >= self.ended_ns);
        self.completed > 0 && !is_known && inputs.now_ns < self.ended_ns + LIMITS_NS
    }

    /// Paces ksmd. Batches are so small that they stay within the share even if all pages have the highest cost. The
    /// sleeps in between depend on the recent cost of pages.
    fn pace(&mut self, inputs: &Inputs<'_>) -> ScanOrder {
        let share = Permyriad(inputs.pace.top.0.clamp(1, 9_900));
        let batch_ns = share_ns(BATCH_NS, share);
        if inputs.room_ns < batch_ns * 2 {
            return ScanOrder::Rest;
        }
        let pages = (batch_ns / HIGHEST_PAGE_NS).max(32);
        let share = u64::from(share.0);
        let sleep_ms = (pages * self.page_ns / share * (10_000 - share) / 1_000_000).clamp(1, 60_000);
        // A sleep that differs by less than a third isn't worth an order.
        let sleep_ms = match self.last_order {
            ScanOrder::Pace { sleep_ms: last, .. } if u64::from(last).abs_diff(sleep_ms) * 3 <= sleep_ms => last,
            _ => u32::try_from(sleep_ms).unwrap_or(u32::MAX),
        };
        let pages_to_scan = u32::try_from(pages).unwrap_or(u32::MAX);
        ScanOrder::Pace { pages_to_scan, sleep_ms, thorough: self.is_thorough() }
    }

    /// Updates the cost of a page: upwards at once, downwards by halves, because the next pages may cost more again.
    fn measure(&mut self, inputs: &Inputs<'_>) {
        let pages = inputs.ksm.scanned.saturating_sub(self.scanned);
        let ns = inputs.ksmd_ns.saturating_sub(self.ksmd_ns);
        if self.scan_in_progress.is_none() {
            self.page_ns = HIGHEST_PAGE_NS;
        } else if let Some(page_ns) = ns.checked_div(pages) {
            self.page_ns = page_ns.max(self.page_ns / 2).clamp(100, 10 * HIGHEST_PAGE_NS);
        } else if ns == 0 {
            return;
        }
        self.scanned = inputs.ksm.scanned;
        self.ksmd_ns = inputs.ksmd_ns;
    }

    /// The scan in progress has ended.
    fn finish(&mut self, inputs: &Inputs<'_>) {
        let Some(scan) = self.scan_in_progress.take() else { return };
        self.completed += 1;
        self.ended_ns = inputs.now_ns;
        self.due = self.due.saturating_sub(1);
        if scan.kicked || self.due == 0 {
            self.reaping = Pages(0);
        }
        if self.due == 0 {
            self.unvisited = Pages(0);
            self.thorough = false;
        }
        self.last_merged = inputs.ksm.saved().saturating_sub(scan.saved);
        self.merged += self.last_merged;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::governor::Governor;

    const MS: u64 = 1_000_000;

    struct Fixture {
        scheduler: ScanScheduler,
        ksm: KsmView,
        pace: Pace,
        marked: Pages,
        now_ns: u64,
        hold: bool,
        limits_read_ns: Option<u64>,
    }

    impl Fixture {
        fn new() -> Self {
            let ksm = KsmView { ours: true, ..KsmView::default() };
            let pace = Governor::Full.pace();
            Self {
                scheduler: ScanScheduler::default(),
                ksm,
                pace,
                marked: Pages(1000),
                now_ns: 0,
                hold: false,
                limits_read_ns: None,
            }
        }
        fn order(&mut self, settled: bool) -> ScanOrder {
            self.now_ns += 50 * MS;
            let inputs = Inputs {
                now_ns: self.now_ns,
                ksm: &self.ksm,
                ksmd_ns: 0,
                marked: self.marked,
                settled,
                pace: self.pace,
                room_ns: u64::MAX,
                hold: self.hold,
                limits_read_ns: self.limits_read_ns,
            };
            let order = self.scheduler.order(&inputs);
            self.ksm.busy |= matches!(order, ScanOrder::Kick { .. });
            order
        }
        fn finish_scan(&mut self, merged: u64) {
            self.ksm.full_scans += 1;
            self.ksm.busy = false;
            self.ksm.sharing += Pages(merged);
        }
    }

    #[test]
    fn marks_are_due_two_scans_and_then_ksmd_rests() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(false), ScanOrder::Keep, "more marks are about to follow");
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.finish_scan(900);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
        assert!(!fixture.scheduler.is_busy());
    }

    #[test]
    fn nothing_is_scanned_while_nothing_may_be_merged() {
        for governor in [Governor::Full, Governor::Low] {
            let mut fixture = Fixture::new();
            fixture.pace = governor.pace();
            fixture.scheduler.request(Pages(1000));
            fixture.hold = true;
            assert_eq!(fixture.order(true), ScanOrder::Keep);
            fixture.hold = false;
            let begun = fixture.order(true);
            assert!(matches!(begun, ScanOrder::Kick { .. } | ScanOrder::Pace { .. }), "{begun:?}");
            fixture.hold = true;
            let stands_still = if governor == Governor::Full { ScanOrder::Keep } else { ScanOrder::Rest };
            assert_eq!(fixture.order(true), stands_still, "a kick cannot be aborted");
            fixture.finish_scan(0);
            fixture.order(true);
            assert_eq!(fixture.order(true), ScanOrder::Keep, "it rests between two scans");
            fixture.hold = false;
            assert_eq!(std::mem::discriminant(&fixture.order(true)), std::mem::discriminant(&begun));
        }
    }

    #[test]
    fn a_scan_waits_until_limits_were_read_after_the_one_before() {
        let mut fixture = Fixture::new();
        fixture.limits_read_ns = Some(0);
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.limits_read_ns = Some(fixture.now_ns);
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.finish_scan(900);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.now_ns += LIMITS_NS;
        assert_eq!(fixture.order(true), ScanOrder::KICK, "not for ever");
    }

    #[test]
    fn a_scan_waits_for_more_marks_as_long_as_it_takes_itself() {
        for (governor, waits_ns) in [(Governor::Full, SETTLE_NS), (Governor::Quiet, 30_000_000_000)] {
            let mut fixture = Fixture::new();
            (fixture.pace, fixture.marked) = (governor.pace(), Pages(50_000));
            fixture.scheduler.request(fixture.marked);
            assert_eq!(fixture.order(false), ScanOrder::Keep);
            fixture.now_ns = waits_ns - 50 * MS;
            assert_eq!(fixture.order(false), ScanOrder::Keep, "{governor}");
            assert_ne!(fixture.order(false), ScanOrder::Keep, "{governor}");
        }
    }

    #[test]
    fn marks_made_during_a_scan_get_two_scans_of_their_own() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.scheduler.request(Pages(500));
        for _ in 0..2 {
            fixture.finish_scan(10);
            assert_eq!(fixture.order(true), ScanOrder::KICK);
        }
        fixture.finish_scan(10);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn what_several_scans_have_merged_is_added_up_until_ksmd_rests() {
        let mut fixture = Fixture::new();
        for merged in [[0, 900, 10], [5, 60, 700]] {
            fixture.scheduler.request(Pages(1000));
            assert_eq!((fixture.order(true), fixture.scheduler.merged()), (ScanOrder::KICK, Pages(0)));
            // Pages marked during a scan get two more scans. The last of the three merges few of the pages marked
            // before.
            fixture.scheduler.request(Pages(10));
            for pages in merged {
                fixture.finish_scan(pages);
                fixture.order(true);
            }
            assert!(!fixture.scheduler.is_busy());
            assert_eq!(fixture.scheduler.merged(), Pages(merged.iter().sum()));
        }
    }

    #[test]
    fn a_thorough_request_gets_two_scans_that_visit_every_page() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.scheduler.request_thorough(Pages(500));
        assert!(!fixture.scheduler.is_thorough(), "the scan in progress continues as it began");
        for _ in 0..2 {
            fixture.finish_scan(10);
            assert_eq!(fixture.order(true), ScanOrder::Kick { thorough: true });
            assert!(fixture.scheduler.is_thorough());
        }
        fixture.finish_scan(10);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
        fixture.scheduler.request(Pages(500));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        assert!(!fixture.scheduler.is_thorough());
    }

    #[test]
    fn a_kick_is_waited_for_unless_ksmd_had_nothing_to_scan() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        // ksmd had no memory to scan any more: the kernel counts no scan, and the host reports that the order is done.
        fixture.ksm.busy = false;
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.ksm.busy = false;
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn a_paced_scan_continues_until_every_page_was_visited() {
        let mut fixture = Fixture::new();
        fixture.marked = Pages(1 << 23);
        fixture.scheduler.request_reaping(Pages(1 << 23), 0);
        fixture.now_ns = REAP_AT_LATEST_NS;
        assert!(matches!(fixture.order(true), ScanOrder::Pace { .. }));
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Keep, "that was only the end of an earlier scan");
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn all_gets_two_scans_after_somebody_has_unmerged_it() {
        for governor in [Governor::Full, Governor::Low] {
            let mut fixture = Fixture::new();
            fixture.pace = governor.pace();
            fixture.ksm.full_scans = 57;
            fixture.scheduler.request(Pages(1000));
            let begun = fixture.order(true);
            fixture.ksm.full_scans = 0;
            fixture.ksm.busy = false;
            fixture.order(true);
            fixture.finish_scan(0);
            fixture.order(true);
            assert!(fixture.scheduler.is_busy(), "{begun:?}");
            fixture.finish_scan(900);
            assert_eq!(fixture.order(true), ScanOrder::Rest, "{begun:?}");
        }
    }

    #[test]
    fn exited_processes_are_reaped_together_and_the_later_the_more_a_scan_costs() {
        for (marked, wait_ns) in [(1_000, REAP_AFTER_NS), (20_000, 7_100 * MS), (1 << 20, REAP_AT_LATEST_NS)] {
            let mut fixture = Fixture::new();
            fixture.marked = Pages(marked);
            fixture.scheduler.request_reaping(Pages(1_000), 0);
            fixture.scheduler.request_reaping(Pages(1_000), 500 * MS);
            fixture.now_ns = wait_ns - 51 * MS;
            assert_eq!(fixture.order(true), ScanOrder::Keep, "{marked} pages");
            assert_eq!(fixture.scheduler.exited(), Pages(2_000));
            fixture.now_ns = wait_ns;
            assert_eq!(fixture.order(true), ScanOrder::KICK, "{marked} pages");
            fixture.scheduler.request_reaping(Pages(10), wait_ns);
            assert_eq!(fixture.scheduler.exited(), Pages(2_010));
            fixture.finish_scan(0);
            assert_eq!(fixture.order(true), ScanOrder::Rest);
            assert_eq!(fixture.scheduler.exited(), Pages(10), "the last one exited during the scan");
        }
    }

    #[test]
    fn large_sets_and_low_governors_are_paced() {
        let mut fixture = Fixture::new();
        fixture.pace = Governor::Low.pace();
        fixture.scheduler.request(Pages(1));
        assert_eq!(fixture.order(true), ScanOrder::Pace { pages_to_scan: 5_000, sleep_ms: 400, thorough: false });
        let mut fixture = Fixture::new();
        fixture.marked = Pages(1 << 23);
        fixture.scheduler.request(Pages(1));
        assert!(matches!(fixture.order(true), ScanOrder::Pace { .. }));
    }
}
