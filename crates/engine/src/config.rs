//! The engine's settings. [`crate::range`] has their permitted ranges.

use crate::governor::{Governor, Pace};
use crate::hash::Digest;
use crate::host::Mechanism;
use crate::limits::{GroupLimits, Limits};
use crate::marking::extents::Density;
use crate::named;
use crate::placement::policy::Latencies;
use crate::reserve::ReserveSettings;
use crate::units::{BLOCK_PAGES, Pages, Permyriad};
use serde::{Deserialize, Serialize};

/// A named set of settings for one purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// Merge long-lived memory, at little cost.
    #[default]
    Default,
    /// Also merge memory that only lives for seconds: rounds of 85 ms (UKSM section 8.1.3), and regions needn't be old.
    Sensitive,
}

impl Preset {
    const NAMES: [(&'static str, Self); 2] = [("default", Self::Default), ("sensitive", Self::Sensitive)];
}

named!(Preset, "preset");

/// Which pages are worth merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Only {
    /// All pages with equal contents.
    #[default]
    All,
    /// Only pages of zeros, by mapping the kernel's zero page. Programs then share no pages with each other.
    Zeros,
}

impl Only {
    const NAMES: [(&'static str, Self); 2] = [("all", Self::All), ("zeros", Self::Zeros)];
}

named!(Only, "kind of pages");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How much CPU time we may use.
    pub governor: Governor,
    /// How the host merges equal pages.
    pub mechanism: Mechanism,
    /// Which pages are worth merging.
    pub only: Only,
    /// The share of one core for pagefold and ksmd together (UKSM `p`), if it's not the governor's.
    pub top_share: Option<Permyriad>,
    /// How long a global round takes, nanoseconds (UKSM `t`), if it's not the governor's time.
    pub round_ns: Option<u64>,
    /// How much we may do to the processes per second: pages read, stops, pages moved.
    pub limits: Limits,
    /// The limits of groups of processes, by their [`GroupKey`](crate::keys::GroupKey).
    pub groups: Vec<GroupLimits>,
    /// The number of levels on which we sample regions (UKSM `N`).
    pub levels: usize,
    /// The share of one core for sampling the bottom level (0.2 % in UKSM).
    pub bottom_share: Permyriad,
    /// The duplicate ratio at which a region goes to a higher level (UKSM `V_dup`).
    pub duplicate_threshold: Permyriad,
    /// The same ratio when we merge on request. It's lower, because then merging costs time for the duplicates only,
    /// not for every marked page.
    pub request_threshold: Permyriad,
    /// We leave a region alone if this share of its pages changes between two visits (UKSM `V_cow`). At 100 % we also
    /// merge where COW breaks cost more than merges save.
    pub cow_threshold: Permyriad,
    /// The age a region must have before it goes to a higher level (UKSM `V_life`), nanoseconds.
    pub lifetime_ns: u64,
    /// A region that appears during the run must outlive this many global rounds before it goes to a higher level.
    pub probation_rounds: u64,
    /// We mark an extent if its share of duplicates is at least this high.
    pub density: Density,
    /// Once ksmd has been idle for long enough, we also mark sparser extents, down to this share. Below 3 %, ksmd's
    /// records (64 bytes for each page) take more than the duplicates give back.
    pub thinnest_density: Permyriad,
    /// A span must hold this many duplicates to be worth a system call in the target.
    pub span_pages_min: Pages,
    /// We mark mappings up to this length whole or not at all: mremap(2) can't move or grow a mapping that marks have
    /// split.
    pub split_above: Pages,
    /// We mark at most this many parts of mappings in one process: each may split a mapping in three.
    pub spans_per_process: usize,
    /// How long local and remote memory accesses take. We place pages on NUMA nodes by these figures.
    pub latencies: Latencies,
    /// How many contents the index holds at most.
    pub contents_most: usize,
    /// Memory that we keep free for COW copies.
    pub reserve: ReserveSettings,
    /// The seed of every permutation and digest.
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            governor: Governor::default(),
            mechanism: Mechanism::default(),
            only: Only::default(),
            top_share: None,
            round_ns: None,
            limits: Limits::default(),
            groups: Vec::new(),
            levels: 4,
            bottom_share: Permyriad(15),
            duplicate_threshold: Permyriad(600),
            request_threshold: Permyriad(100),
            cow_threshold: Permyriad(5_000),
            lifetime_ns: 100_000_000,
            probation_rounds: 2,
            density: Density::default(),
            thinnest_density: Permyriad(400),
            span_pages_min: Pages(16),
            split_above: BLOCK_PAGES,
            spans_per_process: 64,
            latencies: Latencies::default(),
            contents_most: usize::MAX,
            reserve: ReserveSettings::default(),
            seed: 0,
        }
    }
}

impl Config {
    pub fn of_preset(preset: Preset) -> Self {
        match preset {
            Preset::Default => Self::default(),
            Preset::Sensitive => {
                Self { round_ns: Some(85_000_000), lifetime_ns: 0, probation_rounds: 0, ..Self::default() }
            }
        }
    }

    /// The governor's pace, with the configured share of a core and round time if there are any.
    pub fn pace(&self, governor: Governor) -> Pace {
        let Pace { top, round_ns, price_ns } = governor.pace();
        Pace { top: self.top_share.unwrap_or(top), round_ns: self.round_ns.unwrap_or(round_ns), price_ns }
    }

    /// The duplicate ratio at which we promote a region.
    pub fn threshold(&self) -> Permyriad {
        if self.mechanism.by_marks() {
            self.duplicate_threshold
        } else {
            self.request_threshold.min(self.duplicate_threshold)
        }
    }

    /// Whether a page with this digest is worth merging with equal ones.
    pub(crate) fn counts(&self, digest: Digest) -> bool {
        self.only == Only::All || digest == Digest::ZERO
    }

    /// Whether we leave memory alone if its merges don't last.
    pub fn filters_cow_breaks(&self) -> bool {
        self.cow_threshold < Permyriad(10_000)
    }

    /// How old a region that appears during the run must be before we may read it whole and mark it, nanoseconds.
    pub fn probation_ns(&self, pace: Pace) -> u64 {
        self.lifetime_ns.max(self.probation_rounds * pace.round_ns)
    }
}
