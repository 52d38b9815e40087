//! What happens to each region next, why, and until when. The engine decides it in one place (`engine/decide.rs`): `explain`, `status`, `top` and the
//! metrics print a [`Decision`], and none of them works the reason out again.

use crate::keys::LimitKey;
use crate::marking::profit::Wave;
use crate::units::{Pages, Permyriad};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What happens to a region next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// We sample it until there's enough evidence.
    #[default]
    Sample,
    /// We read all of it.
    Read,
    /// We mark it. Scans wait for other regions that may be marked soon.
    Mark,
    /// It's marked, and ksmd scans it.
    Merge,
    /// We sample it thinly, to see what changes.
    Watch,
    /// Nothing is done with it but thin sampling, for some time.
    Wait,
    /// We leave it alone.
    #[serde(rename = "nothing")]
    Leave,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sample => "sample",
            Self::Read => "read",
            Self::Mark => "mark",
            Self::Merge => "merge",
            Self::Watch => "watch",
            Self::Wait => "wait",
            Self::Leave => "nothing",
        })
    }
}

/// Why that happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// Its process refused to be marked.
    Refused,
    /// Its process is left alone.
    ProcessLeftAlone,
    /// Its pages are written and hold the same contents again: merges don't last.
    CowBroken(Permyriad),
    /// Too many of its pages change between two visits for merges to last.
    Volatile,
    /// Its merged memory was taken apart, because memory was short.
    TakenBack,
    /// Its merged memory was taken apart, because it was charged to a cgroup without headroom for it.
    Relieved,
    /// Its process couldn't be stopped. We try again.
    Busy,
    /// It's too young, or like memory that ended young.
    TooYoung,
    /// Merging it costs more than the governor pays.
    DoesNotPay {
        /// Two scans for all that waits.
        wave: Wave,
        /// What a page saved may cost, CPU time in nanoseconds.
        price_ns: u64,
    },
    /// Its thinner parts wait, for the time given at most, until newcomers have been read: they may have copies of more of it.
    AwaitsNewcomers,
    /// Memory is short.
    MemoryShort,
    /// The limit of a cgroup leaves no headroom to merge more of it.
    NoHeadroom(LimitKey),
    /// It has many duplicates.
    Duplicate,
    /// It's being read; so many of its pages have been.
    BeingRead(Pages),
    /// Its level asks for more samples than have been taken, pages.
    TooFewSamples { sampled: Pages, needed: Pages },
    /// Samples suggest that it has many duplicates.
    Promising,
    /// All that is worth it has been marked, or on request merged.
    Done,
    /// It was read whole. Its duplicates are too thinly spread to be marked.
    Scattered,
    /// Samples show few duplicates.
    #[default]
    Sparse,
}

/// What happens to a region next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    pub verb: Verb,
    pub reason: Reason,
    /// When that changes if nothing else does, nanoseconds. `None` if that isn't known.
    pub until_ns: Option<u64>,
}

impl Decision {
    pub(crate) fn new(verb: Verb, reason: Reason) -> Self {
        Self { verb, reason, until_ns: None }
    }

    #[must_use]
    pub(crate) fn until(self, until_ns: u64) -> Self {
        Self { until_ns: Some(until_ns), ..self }
    }

    /// For how long it holds, seconds.
    pub fn seconds_left(&self, now_ns: u64) -> Option<f64> {
        Some(self.until_ns?.saturating_sub(now_ns) as f64 / 1e9)
    }
}

/// The kind of a region (UKSM section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Not sampled enough yet.
    Unknown,
    /// Few duplicates.
    Sparse,
    /// Its merges do not last, because its pages are written.
    CowBroken,
    /// Too young to know whether it stays, or of a family whose regions ended young.
    ShortLived,
    /// Duplicates that stay: worth merging.
    StaticallyDuplicated,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::StaticallyDuplicated, Self::Sparse, Self::CowBroken, Self::ShortLived, Self::Unknown];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Sparse => "sparse",
            Self::CowBroken => "COW-broken",
            Self::ShortLived => "short-lived",
            Self::StaticallyDuplicated => "statically duplicated",
        })
    }
}

/// What is known of the duplicates of a region.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    pub kind: Kind,
    /// The share of duplicates, 0 to 1.
    pub ratio: f64,
    /// The 95 % range of it.
    pub range: (f64, f64),
    /// Whether the region was read whole, so that the ratio is exact.
    pub exact: bool,
}
