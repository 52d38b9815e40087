//! When ksmd is worth its walk.
//!
//! A scan visits every marked page, and no page merges before its second visit: the first only stores
//! a checksum (`cmp_and_merge_page`, mm/ksm.c, Linux 6.12). So newly marked memory is owed two scans
//! and then none at all: merged pages stay merged while ksmd rests. What changes in it later is owed
//! two more once samples show that they would pay. Exited processes are owed one scan, because their
//! address spaces are kept until ksmd passes.
//!
//! Small marked sets are scanned by kicks (one scan without pause), large ones in paced batches,
//! because a kick cannot be called back.

use crate::config::Config;
use crate::host::{KsmView, MergeOrder};
use crate::units::Pages;

/// Exited processes wait so long for their reaping, so that many share one scan, nanoseconds.
const REAP_AFTER_NS: u64 = 10_000_000_000;
/// Pages in a paced batch: about a tenth of a second.
const BATCH_PAGES: u32 = 32_768;
/// What a paced batch is reckoned to take at first, nanoseconds.
const BATCH_NS: u64 = 100_000_000;

#[derive(Clone, Copy, Debug)]
struct Flight {
    full_scans: u64,
    saved: Pages,
    /// A kick; a paced scan goes on until it is told to rest.
    kicked: bool,
}

/// What is owed to the marked memory, and the scan under way.
#[derive(Clone, Debug, Default)]
pub struct Merger {
    owed: u32,
    flight: Option<Flight>,
    reap_since_ns: Option<u64>,
    /// Pages merged by the last completed scan.
    last_growth: Pages,
    completed: u64,
}

impl Merger {
    /// So many resident pages have been marked, or have become worth merging in marked spans.
    pub fn owe(&mut self, resident: Pages) {
        if resident > Pages(0) {
            // A scan under way has passed some of the new pages already: it counts for nothing.
            self.owed = if self.flight.is_some() { 3 } else { 2 };
        }
    }

    /// A process with marked memory has exited.
    pub fn owe_reaping(&mut self, now_ns: u64) {
        self.reap_since_ns.get_or_insert(now_ns);
    }

    /// Whether a scan is under way or owed.
    pub fn is_busy(&self) -> bool {
        self.flight.is_some() || self.owed > 0
    }

    /// Scans completed.
    pub fn scans(&self) -> u64 {
        self.completed
    }

    /// Pages that the last completed scan merged.
    pub fn last_growth(&self) -> Pages {
        self.last_growth
    }

    /// The order for this round. `settled` says that no more marks are about to come, so that one scan
    /// serves them all; `marked` is the resident memory under marks.
    pub fn order(&mut self, now_ns: u64, ksm: &KsmView, marked: Pages, settled: bool, config: &Config) -> MergeOrder {
        if !ksm.ours {
            // Not ours: what is owed stays owed until it is, and nothing is under way.
            self.flight = None;
            return MergeOrder::Keep;
        }
        if self.reap_since_ns.is_some_and(|since| now_ns.saturating_sub(since) >= REAP_AFTER_NS) && self.owed == 0 {
            self.owed = 1;
        }
        if let Some(flight) = self.flight {
            let answered = ksm.full_scans > flight.full_scans;
            if ksm.busy || !(answered || flight.kicked) {
                return MergeOrder::Keep;
            }
            self.land(ksm);
        }
        if self.owed == 0 || !settled {
            return if self.owed == 0 && self.completed > 0 { MergeOrder::Rest } else { MergeOrder::Keep };
        }
        let order = scan_order(marked, config);
        self.reap_since_ns = None;
        self.flight =
            Some(Flight { full_scans: ksm.full_scans, saved: ksm.saved(), kicked: order == MergeOrder::Kick });
        order
    }

    /// A scan has ended.
    fn land(&mut self, ksm: &KsmView) {
        let Some(flight) = self.flight.take() else { return };
        self.completed += 1;
        self.owed = self.owed.saturating_sub(1);
        self.last_growth = ksm.saved().saturating_sub(flight.saved);
    }
}

/// A kick for a small marked set at full governor; batches with sleeps that keep the share otherwise.
fn scan_order(marked: Pages, config: &Config) -> MergeOrder {
    let share = u64::from(config.governor.top_share().0);
    if marked <= config.kick_pages_max && share >= 9_000 {
        return MergeOrder::Kick;
    }
    let rest_ns = BATCH_NS * 10_000_u64.saturating_sub(share) / share;
    let sleep_ms = u32::try_from(rest_ns / 1_000_000).unwrap_or(u32::MAX).clamp(1, 60_000);
    MergeOrder::Pace { pages_to_scan: BATCH_PAGES, sleep_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    struct Bench {
        merger: Merger,
        ksm: KsmView,
        config: Config,
        now_ns: u64,
    }

    impl Bench {
        fn new() -> Self {
            let ksm = KsmView { ours: true, ..KsmView::default() };
            Self { merger: Merger::default(), ksm, config: Config::default(), now_ns: 0 }
        }
        fn order(&mut self, settled: bool) -> MergeOrder {
            self.now_ns += 50 * MS;
            let order = self.merger.order(self.now_ns, &self.ksm, Pages(1000), settled, &self.config);
            self.ksm.busy |= order == MergeOrder::Kick;
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
        let mut bench = Bench::new();
        assert_eq!(bench.order(true), MergeOrder::Keep);
        bench.merger.owe(Pages(1000));
        assert_eq!(bench.order(false), MergeOrder::Keep, "more marks are about to come");
        assert_eq!(bench.order(true), MergeOrder::Kick);
        assert_eq!(bench.order(true), MergeOrder::Keep);
        bench.finish_scan(0);
        assert_eq!(bench.order(true), MergeOrder::Kick);
        bench.finish_scan(900);
        assert_eq!(bench.order(true), MergeOrder::Rest);
        assert!(!bench.merger.is_busy());
    }

    #[test]
    fn marks_that_come_during_a_scan_get_two_of_their_own() {
        let mut bench = Bench::new();
        bench.merger.owe(Pages(1000));
        assert_eq!(bench.order(true), MergeOrder::Kick);
        bench.merger.owe(Pages(500));
        for _ in 0..2 {
            bench.finish_scan(10);
            assert_eq!(bench.order(true), MergeOrder::Kick);
        }
        bench.finish_scan(10);
        assert_eq!(bench.order(true), MergeOrder::Rest);
    }

    #[test]
    fn a_kick_under_way_is_waited_for_and_an_empty_one_is_over() {
        let mut bench = Bench::new();
        bench.merger.owe(Pages(1000));
        assert_eq!(bench.order(true), MergeOrder::Kick);
        assert_eq!(bench.order(true), MergeOrder::Keep);
        // Nothing was registered any more: the host gives up on it, and no scan is counted by the kernel.
        bench.ksm.busy = false;
        assert_eq!(bench.order(true), MergeOrder::Kick);
        bench.ksm.busy = false;
        assert_eq!(bench.order(true), MergeOrder::Rest);
    }

    #[test]
    fn a_paced_scan_goes_on_until_it_has_come_round() {
        let mut bench = Bench::new();
        bench.config.kick_pages_max = Pages(10);
        bench.merger.owe_reaping(0);
        bench.now_ns = REAP_AFTER_NS;
        assert!(matches!(bench.order(true), MergeOrder::Pace { .. }));
        assert_eq!(bench.order(true), MergeOrder::Keep);
        bench.finish_scan(0);
        assert_eq!(bench.order(true), MergeOrder::Rest);
    }

    #[test]
    fn the_exited_are_reaped_together() {
        let mut bench = Bench::new();
        bench.merger.owe_reaping(0);
        bench.merger.owe_reaping(5_000 * MS);
        assert_eq!(bench.order(true), MergeOrder::Keep);
        bench.now_ns = 10_000 * MS;
        assert_eq!(bench.order(true), MergeOrder::Kick);
        bench.finish_scan(0);
        assert_eq!(bench.order(true), MergeOrder::Rest);
    }

    #[test]
    fn large_sets_and_modest_governors_are_paced() {
        let mut bench = Bench::new();
        bench.config.governor = crate::config::Governor::Low;
        bench.merger.owe(Pages(1));
        assert_eq!(bench.order(true), MergeOrder::Pace { pages_to_scan: BATCH_PAGES, sleep_ms: 400 });
        let mut bench = Bench::new();
        bench.config.kick_pages_max = Pages(10);
        bench.merger.owe(Pages(1));
        assert!(matches!(bench.order(true), MergeOrder::Pace { .. }));
    }

    #[test]
    fn nothing_is_ordered_while_ksm_is_somebody_elses() {
        let mut bench = Bench::new();
        bench.ksm.ours = false;
        bench.merger.owe(Pages(1000));
        assert_eq!(bench.order(true), MergeOrder::Keep);
        bench.ksm.ours = true;
        assert_eq!(bench.order(true), MergeOrder::Kick);
    }
}
