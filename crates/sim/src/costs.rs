//! The cost of each step, in nanoseconds of CPU time, as measured on a Linux 6.18 machine (2 virtual cores) unless a
//! field says that it's an assumption.

/// Defines [`Costs`] from each cost and its measured or assumed value.
macro_rules! costs {
    ($($(#[$doc:meta])* $name:ident: $ns:literal,)*) => {
        /// The cost of pagefold's and ksmd's work.
        ///
        /// We've fitted the costs of ksmd's tree levels and merges: together with the others they reproduce the totals
        /// measured for whole bursts (see `calibration.rs` in the tests of the lab).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Costs {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Default for Costs {
            fn default() -> Self {
                Self { $($name: $ns,)* }
            }
        }

        impl Costs {
            /// The costs on a slower machine: at 100 per cent the same, at 200 per cent twice as high.
            #[must_use]
            pub fn slower(self, percent: u64) -> Self {
                Self { $($name: self.$name * percent / 100,)* }
            }
        }
    };
}

costs! {
    /// Starting a run of adjacent pages. With [`Self::read_page_ns`]: 1000 ns for a single page, 560 per page in runs
    /// of eight.
    read_run_ns: 500,
    /// Each page of a run: copying (350 to 430 measured) and hashing it.
    read_page_ns: 500,
    /// Reading a page's pagemap entry, in batches.
    pagemap_ns: 33,
    /// Reading a frame's kpageflags (is it merged, is it active), in batches.
    kpageflags_ns: 100,
    /// Hashing pages in place: starting a run of adjacent pages. Derived from counted instructions: a third of what
    /// starting to read a run takes.
    hash_run_ns: 175,
    /// Hashing pages in place: finding each page. Derived from 130 counted instructions.
    hash_page_ns: 20,
    /// Hashing pages in place: each of the first cache lines, fetched one by one. In user space 2 lines took 0.20 of
    /// the time of copying and digesting a page, 8 lines 0.55, and 64 lines 1.4 (medians, 512 MiB, 2 virtual cores,
    /// other programs running).
    hash_line_ns: 50,
    /// Hashing pages in place: all lines of a page.
    hash_whole_ns: 800,
    /// Moving one merged frame to another node, in batches (3,000 to 5,000 measured).
    move_frame_ns: 4_000,
    /// Reading the free memory of a node, or a process's node, nice value and allowed nodes: two or three small files
    /// (4 to 6 us each measured).
    process_numa_ns: 15_000,
    /// Reading KSM's counters and CPU clocks. Assumed.
    observe_ns: 20_000,
    /// Refreshing what we know of an unchanged process: the live host's figure.
    refresh_owner_ns: 1_000,
    /// Opening the files of a changed process to survey it, whatever its size. Assumed.
    survey_owner_ns: 25_000,
    /// Surveying one region: its line of `maps` (1.1 us measured, to print it in the kernel and to read it).
    survey_region_ns: 1_100,
    /// Counting resident pages, for each page of address range (`PAGEMAP_SCAN`: 12 to 41 measured).
    count_page_ns: 12,
    /// Stopping and resuming a process, without the calls made in between.
    stop_ns: 20_000,
    /// One `madvise` injected into a stopped process (37 us in a batch of thirty).
    inject_ns: 37_000,
    /// Copying a merged page when its span is unmarked: a fault and a copy. Assumed.
    unmerge_page_ns: 1_000,

    /// Waking ksmd for a batch: two context switches. Assumed.
    wake_ns: 3_000,
    /// ksmd passing an entry with nothing to merge: absent, or the zero page.
    pass_empty_ns: 24,
    /// ksmd visiting a page that is merged already.
    visit_merged_ns: 300,
    /// ksmd skipping a page by `smart_scan`: it only finds the page and its record. Assumed.
    visit_skipped_ns: 150,
    /// ksmd mapping a page and computing its checksum.
    checksum_ns: 1_200,
    /// One level of the stable tree.
    stable_level_ns: 100,
    /// One level of the unstable tree: the comparison, plus the owner's lock and a page-table walk.
    unstable_level_ns: 280,
    /// Walking past one full duplicate in a chain.
    chain_dup_ns: 38,
    /// Merging a page with a merged one.
    merge_stable_ns: 700,
    /// Merging two pages and inserting them into the stable tree.
    merge_pair_ns: 3_300,
    /// Mapping the zero page instead of a page of zeros. Assumed to cost as much as a stable merge.
    merge_zero_ns: 700,
    /// Freeing the record of a page that is gone. Assumed.
    reap_item_ns: 50,
    /// Switching to the next process. Assumed.
    visit_owner_ns: 2_000,

    /// Merging on request: starting a batch of up to 31 adjacent pages. We derived this and the next five from
    /// measurements of whole calls in User Mode Linux, so they lack the cost of a real processor's TLB. With
    /// [`Self::request_pair_ns`]: 1.46 us per page in long runs and 3 us for a single page.
    request_run_ns: 1_600,
    /// Merging on request: each page that we merge with a private one.
    request_pair_ns: 1_410,
    /// Merging on request: each page that we merge with a merged one (0.96 us in long runs).
    request_join_ns: 910,
    /// Merging on request: each page of zeros (0.5 us in long runs).
    request_zero_ns: 450,
    /// Merging on request: each page that differs only at its end. From counted instructions: 0.61 of a merge's.
    request_differs_ns: 840,
    /// Merging on request: each page that the kernel needn't compare (0.07 us in long runs).
    request_pass_ns: 20,

    /// UKSM's scanner walking to a page, without hashing it: ksmd's visit minus its checksum (1200 minus 605, XXH64
    /// measured).
    sample_ns: 600,
    /// UKSM's hash over all 1024 words of a page, without fetching them. With [`Self::hash_lines_ns`] it reproduces the
    /// measured time of a whole visit (340 ns for 21 words, 1388 for 360, 2400 for all).
    hash_words_ns: 1_560,
    /// Fetching all of a page's 64 cache lines in random order.
    hash_lines_ns: 840,
    /// One level of a tree ordered by hash: no page is read. Assumed.
    hash_level_ns: 20,
    /// Comparing two pages that differ. Assumed.
    compare_page_ns: 300,
}
