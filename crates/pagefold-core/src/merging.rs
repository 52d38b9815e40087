//! When ksmd is worth its walk.
//!
//! A scan visits every marked page, and no page merges before its second visit: the first only stores
//! a checksum (`cmp_and_merge_page`, mm/ksm.c, Linux 6.12). So newly marked memory is due two scans
//! and then none at all: merged pages stay merged while ksmd rests. What changes in it later is due
//! two more once samples show that they would pay. Exited processes are due one scan, because their
//! address spaces are kept until ksmd passes.
//!
//! Small marked sets are scanned by kicks (one scan without pause), large ones in paced batches,
//! because a kick cannot be called back.

use crate::governor::{Pace, share_ns};
use crate::host::{KsmView, ScanOrder};
use crate::units::{Pages, Permyriad};

/// Exited processes wait so long for their reaping, so that many share one scan, nanoseconds.
const REAP_AFTER_NS: u64 = 10_000_000_000;
/// Where what has exited is less than one part in so many of what is marked, it waits longer: ksmd's records of it are
/// 64 bytes a page.
const REAP_PART: u64 = 20;
/// So long, nanoseconds.
const REAP_AT_LAST_NS: u64 = 300_000_000_000;
/// The longest scan that is kicked, nanoseconds: it cannot be called back.
const KICK_NS_MAX: u64 = 3_000_000_000;
/// The share of a core from which scans are kicked rather than paced, parts in 10,000.
const KICK_SHARE: u32 = 9_000;
/// What ksmd takes to merge a page that has no copy in its trees yet, nanoseconds: the dearest that is usual.
const DEAR_NS: u64 = 20_000;
/// What it takes on average to visit a page that was marked of late, nanoseconds.
const USUAL_NS: u64 = 6_000;
/// What it takes to visit one that has been visited twice: merged, or without a copy and mostly skipped, nanoseconds.
const SETTLED_NS: u64 = 700;
/// A scan waits for marks that may come, but no longer than this, nanoseconds.
const SETTLE_NS: u64 = 4_000_000_000;
/// A batch may take the governor's share of this time if all its pages are dear, nanoseconds.
const BATCH_NS: u64 = 500_000_000;

#[derive(Clone, Copy, Debug)]
struct ScanInProgress {
    full_scans: u64,
    saved: Pages,
    /// What ksmd had used when it began, nanoseconds.
    ksmd_ns: u64,
    /// No page is left out by `smart_scan`.
    thorough: bool,
    /// A kick; a paced scan goes on until it is told to rest.
    kicked: bool,
}

/// What an order is decided on.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The time, nanoseconds.
    pub now_ns: u64,
    /// KSM as it stands.
    pub ksm: &'a KsmView,
    /// CPU time that ksmd has used so far, nanoseconds.
    pub ksmd_ns: u64,
    /// Resident memory under marks.
    pub marked: Pages,
    /// No more marks are about to come, so that one scan serves them all.
    pub settled: bool,
    /// What may be used.
    pub pace: Pace,
    /// CPU time that may be spent now, nanoseconds.
    pub room_ns: u64,
}

/// What is due to the marked memory, and the scan under way.
#[derive(Clone, Debug)]
pub struct ScanScheduler {
    due: u32,
    /// Since when one of them waits for marks that may come, to be shared with them.
    ready_since_ns: Option<u64>,
    /// Resident pages that ksmd has not visited twice yet.
    unvisited: Pages,
    /// Some that it has visited often are worth a visit.
    thorough: bool,
    scan_in_progress: Option<ScanInProgress>,
    /// What has exited since when: pages that were marked.
    exited: Pages,
    reap_since_ns: Option<u64>,
    /// Pages merged by the last completed scan.
    last_merged: Pages,
    /// CPU time of the last two, nanoseconds.
    scan_costs_ns: [u64; 2],
    completed: u64,
    /// When the last one ended.
    ended_ns: u64,
    /// ksmd stands somewhere within a scan, because the last one was paced.
    mid_scan: bool,
    /// The last order, so that it is repeated only when it changes.
    last_order: ScanOrder,
    /// What a page costs ksmd, for pacing, nanoseconds; and the counters at the last look.
    page_ns: u64,
    counters: (u64, u64),
}

impl Default for ScanScheduler {
    fn default() -> Self {
        Self {
            due: 0,
            ready_since_ns: None,
            unvisited: Pages(0),
            thorough: false,
            scan_in_progress: None,
            exited: Pages(0),
            reap_since_ns: None,
            last_merged: Pages(0),
            scan_costs_ns: [0; 2],
            completed: 0,
            ended_ns: 0,
            mid_scan: true,
            last_order: ScanOrder::Keep,
            page_ns: DEAR_NS,
            counters: (0, 0),
        }
    }
}

impl ScanScheduler {
    /// So many resident pages have been marked, or have become worth merging in marked spans.
    pub fn request(&mut self, resident: Pages) {
        if resident > Pages(0) {
            self.unvisited += resident;
            // A scan under way has passed some of the new pages already: it counts for nothing.
            self.due = if self.scan_in_progress.is_some() { 3 } else { 2 };
        }
    }

    /// So many pages have become worth merging that ksmd has visited often. After four visits without a merge
    /// `smart_scan` leaves a page out of up to eight scans, whatever it holds by then (`should_skip_rmap_item`, mm/ksm.c,
    /// Linux 6.12): the next scans are to visit every page.
    pub fn request_thorough(&mut self, resident: Pages) {
        self.request(resident);
        self.thorough = true;
    }

    /// So many resident pages that were marked have exited, with their process or by themselves.
    pub fn request_reaping(&mut self, exited: Pages, now_ns: u64) {
        self.exited += exited;
        self.reap_since_ns.get_or_insert(now_ns);
    }

    /// Whether a scan is under way or due.
    pub fn is_busy(&self) -> bool {
        self.scan_in_progress.is_some() || self.due > 0
    }

    /// Whether what is there now will be visited twice.
    pub fn visits_twice(&self) -> bool {
        self.due >= 2
    }

    /// Whether the scan under way visits every page.
    pub fn is_thorough(&self) -> bool {
        self.scan_in_progress.is_some_and(|scan_in_progress| scan_in_progress.thorough)
    }

    /// Whether every page is to be visited, by the scan under way or the next.
    pub fn wants_thorough(&self) -> bool {
        self.thorough
    }

    /// Whether two walks are to begin, so that whatever is marked now gets both.
    pub fn starts_two_scans(&self) -> bool {
        self.scan_in_progress.is_none() && self.visits_twice()
    }

    /// Scans completed.
    pub fn scans(&self) -> u64 {
        self.completed
    }

    /// Pages that the last completed scan merged.
    pub fn last_merged(&self) -> Pages {
        self.last_merged
    }

    /// CPU time that a scan takes in which little merges: the cheaper one of the last two, nanoseconds.
    pub fn scan_cost_ns(&self) -> u64 {
        self.scan_costs_ns[0].min(self.scan_costs_ns[1])
    }

    /// How long ksmd has had nothing to do, nanoseconds.
    pub fn idle_ns(&self, now_ns: u64) -> u64 {
        if self.is_busy() { 0 } else { now_ns.saturating_sub(self.ended_ns) }
    }

    /// The order for this round.
    pub fn order(&mut self, scan: &Inputs<'_>) -> ScanOrder {
        let order = self.decide(scan);
        if order == self.last_order && !matches!(order, ScanOrder::Kick { .. }) {
            return ScanOrder::Keep;
        }
        if order != ScanOrder::Keep {
            self.last_order = order;
        }
        order
    }

    /// The order while the judgement is paused: whatever is under way ends as soon as it can.
    pub fn suspend(&mut self, ksm: &KsmView) -> ScanOrder {
        let rest = ksm.ours && !matches!(self.last_order, ScanOrder::Keep | ScanOrder::Rest);
        if !rest {
            return ScanOrder::Keep;
        }
        self.last_order = ScanOrder::Rest;
        ScanOrder::Rest
    }

    fn decide(&mut self, scan: &Inputs<'_>) -> ScanOrder {
        let Inputs { now_ns, ksm, .. } = *scan;
        self.measure(scan);
        if !ksm.ours {
            // Not ours: what is due stays due until it is, and nothing is under way.
            self.scan_in_progress = None;
            return ScanOrder::Keep;
        }
        let little = self.exited.0 * REAP_PART < scan.marked.0;
        let reap_ns = if little { REAP_AT_LAST_NS } else { REAP_AFTER_NS };
        if self.due == 0 && self.reap_since_ns.is_some_and(|since_ns| now_ns >= since_ns + reap_ns) {
            self.due = 1;
        }
        let goes_on = self.scan_in_progress.is_some();
        if let Some(scan_in_progress) = self.scan_in_progress {
            let answered = ksm.full_scans > scan_in_progress.full_scans;
            if scan_in_progress.kicked && ksm.busy {
                return ScanOrder::Keep;
            }
            if !answered && !scan_in_progress.kicked {
                return self.pace(scan);
            }
            self.finish(scan);
        }
        if self.due == 0 {
            return if self.completed > 0 { ScanOrder::Rest } else { ScanOrder::Keep };
        }
        if !scan.settled && now_ns < *self.ready_since_ns.get_or_insert(now_ns) + SETTLE_NS {
            return ScanOrder::Keep;
        }
        let unvisited = self.unvisited.0.min(scan.marked.0);
        let expected_ns = unvisited * USUAL_NS + (scan.marked.0 - unvisited) * SETTLED_NS;
        let kicked = scan.pace.top.0 >= KICK_SHARE && expected_ns <= KICK_NS_MAX;
        if kicked && expected_ns > scan.room_ns {
            return ScanOrder::Keep;
        }
        if !kicked && self.mid_scan && !goes_on {
            // The rest of a scan that was begun earlier is not one that all the marked pages get.
            self.due += 1;
        }
        self.mid_scan = !kicked;
        self.ready_since_ns = None;
        (self.reap_since_ns, self.exited) = (None, Pages(0));
        let thorough = self.thorough;
        let (full_scans, saved, ksmd_ns) = (ksm.full_scans, ksm.saved(), scan.ksmd_ns);
        self.scan_in_progress = Some(ScanInProgress { full_scans, saved, ksmd_ns, thorough, kicked });
        if kicked { ScanOrder::Kick { thorough } } else { self.pace(scan) }
    }

    /// Batches so small that even dear pages do not break the share, and sleeps by what pages have cost of late.
    fn pace(&mut self, scan: &Inputs<'_>) -> ScanOrder {
        let share = u64::from(scan.pace.top.0).clamp(1, 9_900);
        let batch_ns = share_ns(BATCH_NS, Permyriad(scan.pace.top.0.clamp(1, 9_900)));
        if scan.room_ns < batch_ns * 2 {
            return ScanOrder::Rest;
        }
        let pages = (batch_ns / DEAR_NS).max(32);
        let sleep_ms = (pages * self.page_ns / share * (10_000 - share) / 1_000_000).clamp(1, 60_000);
        // Sleeps that differ by less than a third are not worth an order.
        let sleep_ms = match self.last_order {
            ScanOrder::Pace { sleep_ms: last, .. } if u64::from(last).abs_diff(sleep_ms) * 3 <= sleep_ms => last,
            _ => u32::try_from(sleep_ms).unwrap_or(u32::MAX),
        };
        ScanOrder::Pace {
            pages_to_scan: u32::try_from(pages).unwrap_or(u32::MAX),
            sleep_ms,
            thorough: self.is_thorough(),
        }
    }

    /// What ksmd's pages cost: up at once, down by halves, because what comes next may be dear again.
    fn measure(&mut self, scan: &Inputs<'_>) {
        let (scanned, spent_ns) = (scan.ksm.scanned, scan.ksmd_ns);
        let (pages, ns) = (scanned.saturating_sub(self.counters.0), spent_ns.saturating_sub(self.counters.1));
        if self.scan_in_progress.is_none() {
            self.page_ns = DEAR_NS;
        } else if let Some(page_ns) = ns.checked_div(pages) {
            self.page_ns = page_ns.max(self.page_ns / 2).clamp(100, 10 * DEAR_NS);
        } else if ns == 0 {
            return;
        }
        self.counters = (scanned, spent_ns);
    }

    /// A scan has ended.
    fn finish(&mut self, scan: &Inputs<'_>) {
        let Some(scan_in_progress) = self.scan_in_progress.take() else { return };
        self.completed += 1;
        self.ended_ns = scan.now_ns;
        self.due = self.due.saturating_sub(1);
        if self.due == 0 {
            (self.unvisited, self.thorough) = (Pages(0), false);
        }
        self.last_merged = scan.ksm.saved().saturating_sub(scan_in_progress.saved);
        self.scan_costs_ns = [self.scan_costs_ns[1], scan.ksmd_ns.saturating_sub(scan_in_progress.ksmd_ns)];
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
    }

    impl Fixture {
        fn new() -> Self {
            let ksm = KsmView { ours: true, ..KsmView::default() };
            let pace = Governor::Full.pace();
            Self { scheduler: ScanScheduler::default(), ksm, pace, marked: Pages(1000), now_ns: 0 }
        }
        fn order(&mut self, settled: bool) -> ScanOrder {
            self.now_ns += 50 * MS;
            let scan = Inputs {
                now_ns: self.now_ns,
                ksm: &self.ksm,
                ksmd_ns: 0,
                marked: self.marked,
                settled,
                pace: self.pace,
                room_ns: u64::MAX,
            };
            let order = self.scheduler.order(&scan);
            self.ksm.busy |= order == ScanOrder::KICK;
            order
        }
        fn finish_scan(&mut self, merged: u64) {
            self.ksm.full_scans += 1;
            self.ksm.busy = false;
            self.ksm.sharing += Pages(merged);
        }
    }

    #[test]
    fn marks_are_owed_two_scans_and_then_ksmd_rests() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(false), ScanOrder::Keep, "more marks are about to come");
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.finish_scan(900);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
        assert!(!fixture.scheduler.is_busy());
    }

    #[test]
    fn marks_that_come_during_a_scan_get_two_of_their_own() {
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
    fn two_scans_from_the_beginning_leave_nothing_out_where_all_is_owed() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.scheduler.request_thorough(Pages(500));
        assert!(!fixture.scheduler.is_thorough(), "the one under way goes on as it was begun");
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
    fn a_kick_under_way_is_waited_for_and_an_empty_one_is_over() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        // Nothing was registered any more: the host gives up on it, and no scan is counted by the kernel.
        fixture.ksm.busy = false;
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.ksm.busy = false;
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn a_paced_scan_goes_on_until_it_has_come_round() {
        let mut fixture = Fixture::new();
        fixture.marked = Pages(1 << 23);
        fixture.scheduler.request_reaping(Pages(1 << 23), 0);
        fixture.now_ns = REAP_AFTER_NS;
        assert!(matches!(fixture.order(true), ScanOrder::Pace { .. }));
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Keep, "that was only the end of a scan begun earlier");
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn the_exited_are_reaped_together() {
        let mut fixture = Fixture::new();
        fixture.scheduler.request_reaping(Pages(1000), 0);
        fixture.scheduler.request_reaping(Pages(1000), 5_000 * MS);
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.now_ns = 10_000 * MS;
        assert_eq!(fixture.order(true), ScanOrder::KICK);
        fixture.finish_scan(0);
        assert_eq!(fixture.order(true), ScanOrder::Rest);
    }

    #[test]
    fn large_sets_and_modest_governors_are_paced() {
        let mut fixture = Fixture::new();
        fixture.pace = Governor::Low.pace();
        fixture.scheduler.request(Pages(1));
        assert_eq!(fixture.order(true), ScanOrder::Pace { pages_to_scan: 5_000, sleep_ms: 400, thorough: false });
        let mut fixture = Fixture::new();
        fixture.marked = Pages(1 << 23);
        fixture.scheduler.request(Pages(1));
        assert!(matches!(fixture.order(true), ScanOrder::Pace { .. }));
    }

    #[test]
    fn nothing_is_ordered_while_ksm_is_somebody_elses() {
        let mut fixture = Fixture::new();
        fixture.ksm.ours = false;
        fixture.scheduler.request(Pages(1000));
        assert_eq!(fixture.order(true), ScanOrder::Keep);
        fixture.ksm.ours = true;
        assert_eq!(fixture.order(true), ScanOrder::KICK);
    }
}
