//! The knobs in sysfs that set how ksmd scans and merges (Documentation/admin-guide/mm/ksm.rst).

use super::state_file::ENDLESS_SLEEP;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A numeric knob of KSM that we may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// 0: stop; 1: scan; 2: stop and unmerge everything.
    Run,
    /// How many pages ksmd scans in one batch.
    PagesToScan,
    /// How long ksmd sleeps between batches, milliseconds.
    SleepMillisecs,
    /// How many duplicates may share one merged page. For more, the kernel keeps another copy.
    MaxPageSharing,
    /// Whether the kernel's zero page replaces all-zero pages.
    UseZeroPages,
    /// Whether pages of different NUMA nodes are merged with each other.
    MergeAcrossNodes,
    /// Whether some scans skip pages that have never merged (6.7 and later).
    SmartScan,
}

impl Knob {
    pub const ALL: [Self; 7] = [
        Self::Run,
        Self::PagesToScan,
        Self::SleepMillisecs,
        Self::MaxPageSharing,
        Self::UseZeroPages,
        Self::MergeAcrossNodes,
        Self::SmartScan,
    ];

    /// The kernel's default (mm/ksm.c, Linux 6.18).
    pub const fn default_value(self) -> u64 {
        match self {
            Self::Run | Self::UseZeroPages => 0,
            Self::PagesToScan => 100,
            Self::SleepMillisecs => 20,
            Self::MaxPageSharing => 256,
            Self::MergeAcrossNodes | Self::SmartScan => 1,
        }
    }

    /// The name of the knob's file in sysfs.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::PagesToScan => "pages_to_scan",
            Self::SleepMillisecs => "sleep_millisecs",
            Self::MaxPageSharing => "max_page_sharing",
            Self::UseZeroPages => "use_zero_pages",
            Self::MergeAcrossNodes => "merge_across_nodes",
            Self::SmartScan => "smart_scan",
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.file_name())
    }
}

/// The values of all knobs. `None`: this kernel lacks the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knobs {
    pub run: u64,
    pub pages_to_scan: u64,
    pub sleep_millisecs: u64,
    pub max_page_sharing: u64,
    pub use_zero_pages: bool,
    /// Absent without CONFIG_NUMA.
    pub merge_across_nodes: Option<bool>,
    pub smart_scan: Option<bool>,
    /// The advisor's mode, `none` or `scan-time` (6.8).
    pub advisor_mode: Option<String>,
}

impl Knobs {
    /// The value of a knob. `None` if this kernel lacks it.
    pub fn value(&self, knob: Knob) -> Option<u64> {
        match knob {
            Knob::Run => Some(self.run),
            Knob::PagesToScan => Some(self.pages_to_scan),
            Knob::SleepMillisecs => Some(self.sleep_millisecs),
            Knob::MaxPageSharing => Some(self.max_page_sharing),
            Knob::UseZeroPages => Some(self.use_zero_pages.into()),
            Knob::MergeAcrossNodes => self.merge_across_nodes.map(u64::from),
            Knob::SmartScan => self.smart_scan.map(u64::from),
        }
    }

    /// The knobs that differ from the kernel's defaults, with their values, if a pagefold has ended without restoring
    /// KSM. We recognize this by values that only pagefold sets: an endless sleep, or a batch that scans everything.
    /// There may be no state file, because the file system at /run was lost or isn't the one that we see.
    pub fn orphaned(&self) -> Vec<(Knob, u64)> {
        if self.sleep_millisecs < ENDLESS_SLEEP && self.pages_to_scan != u64::from(u32::MAX) {
            return Vec::new();
        }
        let mut changed = Vec::new();
        for knob in Knob::ALL {
            match self.value(knob) {
                Some(value) if value != knob.default_value() => changed.push((knob, value)),
                _ => {}
            }
        }
        changed
    }

    /// Whether the kernel's advisor sets `pages_to_scan`.
    pub fn advisor_on(&self) -> bool {
        !matches!(self.advisor_mode.as_deref(), None | Some("none"))
    }
}
