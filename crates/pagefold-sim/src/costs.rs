//! The cost of each step, in nanoseconds of CPU time, as measured on a Linux 6.18 machine (2 virtual cores) unless a
//! field says that it is an assumption.

/// The cost of pagefold's and ksmd's work.
///
/// The costs of ksmd's tree levels and merges are fitted: together with the others they reproduce the totals measured
/// for whole bursts (see `tests/calibration.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Starting a run of adjacent pages. With [`Self::read_page_ns`]: 1000 ns for a single page, 560 per page in runs
    /// of eight.
    pub read_run_ns: u64,
    /// Each page of a run: copying (350 to 430 measured) and hashing it.
    pub read_page_ns: u64,
    /// Reading a page's pagemap entry, in batches.
    pub pagemap_ns: u64,
    /// Reading a frame's kpageflags (merged, active), in batches.
    pub kpageflags_ns: u64,
    /// Moving one merged frame to another node, in batches (3,000 to 5,000 measured).
    pub move_frame_ns: u64,
    /// Reading the free memory of a node, or a process's node, nice value and allowed nodes: two or three small files
    /// (4 to 6 us each measured).
    pub process_numa_ns: u64,
    /// Observing one process of any size: opening its files, reading `ksm_stat` (5 us measured). Assumed.
    pub observe_owner_ns: u64,
    /// Observing one region: its line of `maps` (1.1 us measured to produce and read it).
    pub observe_region_ns: u64,
    /// Counting resident pages, per page of address range (`PAGEMAP_SCAN`: 12 to 41 measured).
    pub count_page_ns: u64,
    /// Stopping and resuming a process, without the calls made in between.
    pub stop_ns: u64,
    /// One `madvise` injected into a stopped process (37 us in a batch of thirty).
    pub inject_ns: u64,
    /// Giving a merged page its own copy when its span is unmarked: a fault and a copy. Assumed.
    pub unmerge_page_ns: u64,

    /// Waking ksmd for a batch: two context switches. Assumed.
    pub wake_ns: u64,
    /// ksmd passing an entry with nothing to merge: absent, or the zero page.
    pub pass_empty_ns: u64,
    /// ksmd visiting a page that is merged already.
    pub visit_merged_ns: u64,
    /// ksmd skipping a page by `smart_scan`: only finds it and its record. Assumed.
    pub visit_skipped_ns: u64,
    /// ksmd mapping a page and computing its checksum.
    pub checksum_ns: u64,
    /// One level of the stable tree.
    pub stable_level_ns: u64,
    /// One level of the unstable tree: the comparison, plus the owner's lock and a page-table walk.
    pub unstable_level_ns: u64,
    /// Walking past one full duplicate in a chain.
    pub chain_dup_ns: u64,
    /// Merging a page with a merged one.
    pub merge_stable_ns: u64,
    /// Merging two pages and inserting them into the stable tree.
    pub merge_pair_ns: u64,
    /// Mapping the zero page instead of a page of zeros. Assumed to cost as much as a stable merge.
    pub merge_zero_ns: u64,
    /// Freeing the record of a page that is gone. Assumed.
    pub reap_item_ns: u64,
    /// Switching to the next process. Assumed.
    pub visit_owner_ns: u64,

    /// UKSM's scanner walking to a page without hashing it: the cost of ksmd minus the checksum (1200 minus 605,
    /// XXH64 measured).
    pub sample_ns: u64,
    /// UKSM's hash over all 1024 words of a page, without fetching them. With [`Self::hash_lines_ns`] it reproduces
    /// the measurements (340 ns for 21 words with everything that belongs to a scan, 1388 for 360, 2400 for all).
    pub hash_words_ns: u64,
    /// Fetching all of a page's 64 cache lines in random order.
    pub hash_lines_ns: u64,
    /// One level of a tree ordered by hash: no page is read. Assumed.
    pub hash_level_ns: u64,
    /// Comparing two pages that differ. Assumed.
    pub compare_page_ns: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            read_run_ns: 500,
            read_page_ns: 500,
            pagemap_ns: 33,
            kpageflags_ns: 100,
            move_frame_ns: 4_000,
            process_numa_ns: 15_000,
            observe_owner_ns: 25_000,
            observe_region_ns: 1_100,
            count_page_ns: 12,
            stop_ns: 20_000,
            inject_ns: 37_000,
            unmerge_page_ns: 1_000,
            wake_ns: 3_000,
            pass_empty_ns: 24,
            visit_merged_ns: 300,
            visit_skipped_ns: 150,
            checksum_ns: 1_200,
            stable_level_ns: 100,
            unstable_level_ns: 280,
            chain_dup_ns: 38,
            merge_stable_ns: 700,
            merge_pair_ns: 3_300,
            merge_zero_ns: 700,
            reap_item_ns: 50,
            visit_owner_ns: 2_000,
            sample_ns: 600,
            hash_words_ns: 1_560,
            hash_lines_ns: 840,
            hash_level_ns: 20,
            compare_page_ns: 300,
        }
    }
}

impl Costs {
    /// The costs on a slower machine: at 100 per cent the same, at 200 per cent twice as high.
    #[must_use]
    pub fn slower(self, percent: u64) -> Self {
        let slow = |ns: u64| ns * percent / 100;
        Self {
            read_run_ns: slow(self.read_run_ns),
            read_page_ns: slow(self.read_page_ns),
            pagemap_ns: slow(self.pagemap_ns),
            kpageflags_ns: slow(self.kpageflags_ns),
            move_frame_ns: slow(self.move_frame_ns),
            process_numa_ns: slow(self.process_numa_ns),
            observe_owner_ns: slow(self.observe_owner_ns),
            observe_region_ns: slow(self.observe_region_ns),
            count_page_ns: slow(self.count_page_ns),
            stop_ns: slow(self.stop_ns),
            inject_ns: slow(self.inject_ns),
            unmerge_page_ns: slow(self.unmerge_page_ns),
            wake_ns: slow(self.wake_ns),
            pass_empty_ns: slow(self.pass_empty_ns),
            visit_merged_ns: slow(self.visit_merged_ns),
            visit_skipped_ns: slow(self.visit_skipped_ns),
            checksum_ns: slow(self.checksum_ns),
            stable_level_ns: slow(self.stable_level_ns),
            unstable_level_ns: slow(self.unstable_level_ns),
            chain_dup_ns: slow(self.chain_dup_ns),
            merge_stable_ns: slow(self.merge_stable_ns),
            merge_pair_ns: slow(self.merge_pair_ns),
            merge_zero_ns: slow(self.merge_zero_ns),
            reap_item_ns: slow(self.reap_item_ns),
            visit_owner_ns: slow(self.visit_owner_ns),
            sample_ns: slow(self.sample_ns),
            hash_words_ns: slow(self.hash_words_ns),
            hash_lines_ns: slow(self.hash_lines_ns),
            hash_level_ns: slow(self.hash_level_ns),
            compare_page_ns: slow(self.compare_page_ns),
        }
    }
}
