//! What happens to each region next, why, since when, and until when. The engine decides this in one place
//! (`engine/decide.rs`) at the end of each cycle, and keeps it on the region. `explain`, `status`, `top` and the
//! metrics only print a [`Decision`]; none of them derives it again.

use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::marking::profit::Wave;
use crate::units::{Pages, Permyriad, Vpn};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::mem::discriminant;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// We sample the region until there's enough evidence.
    #[default]
    Sample,
    /// We read the whole region.
    Read,
    /// We mark the region. ksmd's scans wait for other regions that we may mark soon.
    Mark,
    /// The region is marked, and ksmd scans it.
    Merge,
    /// We sample the region thinly, to notice changes.
    Watch,
    /// For some time, we only sample the region thinly.
    Wait,
    /// We leave the region alone.
    #[serde(rename = "nothing")]
    Leave,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// The region's process refused our attempt to mark its memory.
    Refused,
    /// We leave the region's process alone.
    ProcessLeftAlone,
    /// The program writes its pages again soon after they've merged, so merges don't pay. We leave this share of the
    /// region's pages alone for a time.
    CowBroken(Permyriad),
    /// Too many of the region's pages change between two visits for merges to last.
    Volatile,
    /// We unmerged the region because memory was short.
    TakenBack,
    /// We unmerged the region because its pages were charged to another cgroup, which has no headroom for them.
    Relieved,
    /// ksmd merged almost none of the region's duplicates, because these pages or their copies are pinned.
    Unmerged,
    /// We couldn't stop the region's process, and will try again.
    Busy,
    /// Marking parts of the region would split mappings, and its process is close to `vm.max_map_count`.
    NoMappings,
    /// The region is too young, or regions of its family have ended young.
    TooYoung,
    /// Merging the region costs more CPU time for each saved page than the governor allows.
    DoesNotPay {
        /// The pages of this region and of others that wait with it: we'd mark them together, so that two scans serve
        /// them all.
        wave: Wave,
        /// A saved page may cost this much CPU time, nanoseconds.
        price_ns: u64,
    },
    /// We haven't marked the region's sparser parts yet: new regions may hold copies of them, and we read the new ones
    /// first. We wait until `until_ns` at most.
    AwaitsNewcomers,
    /// Memory is short.
    MemoryShort,
    /// A cgroup limit leaves no headroom to merge more of the region.
    NoHeadroom(LimitKey),
    /// The region has many duplicates.
    Duplicate,
    /// We're reading the whole region, and have read this many pages so far.
    BeingRead(Pages),
    /// The region's level asks for more samples than we've taken, pages.
    TooFewSamples { sampled: Pages, needed: Pages },
    /// Samples suggest that the region has many duplicates.
    Promising,
    /// Everything worth merging in the region is marked, or merged on request.
    Done,
    /// We've read the whole region. Its duplicates are too scattered to be worth marking.
    Scattered,
    /// The region has too few duplicates to be worth a mark, even if most of its pages are duplicates.
    TooSmall,
    /// This many processes share the region through fork, so merging costs more than it saves.
    SharedByMany(u64),
    /// The region is shared through fork with processes that are out of scope or left alone, which would keep its
    /// frames.
    SharedWithOutsiders,
    /// Samples show few duplicates.
    #[default]
    Sparse,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("its process refused"),
            Self::ProcessLeftAlone => f.write_str("its process is left alone"),
            Self::CowBroken(ratio) => write!(f, "{ratio} COW-broken"),
            Self::Volatile => f.write_str("too many pages change"),
            Self::TakenBack | Self::MemoryShort => f.write_str("memory is short"),
            Self::Relieved | Self::NoHeadroom(_) => f.write_str("a memory limit has no headroom"),
            Self::Unmerged => f.write_str("pinned or not mergeable"),
            Self::Busy => f.write_str("its process couldn't be stopped"),
            Self::NoMappings => f.write_str("its process has no mappings to spare"),
            Self::TooYoung => f.write_str("too young"),
            Self::DoesNotPay { .. } => f.write_str("doesn't pay yet"),
            Self::AwaitsNewcomers => f.write_str("new regions are read first"),
            Self::Duplicate => f.write_str("many duplicates"),
            Self::BeingRead(_) => f.write_str("being read whole"),
            Self::TooFewSamples { .. } => f.write_str("too few samples"),
            Self::Promising => f.write_str("samples show duplicates"),
            Self::Done => f.write_str("done"),
            Self::Scattered => f.write_str("scattered duplicates"),
            Self::TooSmall => f.write_str("too small"),
            Self::SharedByMany(processes) => write!(f, "shared by {processes} processes"),
            Self::SharedWithOutsiders => f.write_str("shared with processes we don't merge"),
            Self::Sparse => f.write_str("few duplicates"),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    pub verb: Verb,
    pub reason: Reason,
    /// When we first made this decision for this reason, nanoseconds.
    pub since_ns: u64,
    /// When the decision ends if nothing else changes, nanoseconds. `None` if we don't know.
    pub until_ns: Option<u64>,
}

impl Decision {
    pub(crate) fn new(verb: Verb, reason: Reason) -> Self {
        Self { verb, reason, since_ns: 0, until_ns: None }
    }

    #[must_use]
    pub(crate) fn until(self, until_ns: u64) -> Self {
        Self { until_ns: Some(until_ns), ..self }
    }

    /// Whether both decisions have the same verb and reason. Their figures may differ, such as how far we've read.
    pub fn is_like(&self, other: &Self) -> bool {
        self.verb == other.verb && discriminant(&self.reason) == discriminant(&other.reason)
    }

    /// How long ago we made the decision, seconds.
    pub fn seconds_stood(&self, now_ns: u64) -> f64 {
        now_ns.saturating_sub(self.since_ns) as f64 / 1e9
    }

    /// How long the decision still holds, seconds. `None` if we don't know.
    pub fn seconds_left(&self, now_ns: u64) -> Option<f64> {
        Some(self.until_ns?.saturating_sub(now_ns) as f64 / 1e9)
    }
}

/// A change of our decision on a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionChange {
    pub owner: OwnerKey,
    pub region: RegionKey,
    /// The region's first page, and its length.
    pub first: Vpn,
    pub pages: Pages,
    pub from: Decision,
    /// The new decision, made at its `since_ns`.
    pub to: Decision,
}

/// The last changes of decisions.
#[derive(Clone, Debug, Default)]
pub struct DecisionLog {
    changes: VecDeque<DecisionChange>,
    /// How many changes there were so far, including those that we no longer keep.
    number: u64,
}

impl DecisionLog {
    /// We keep this many changes.
    pub const MOST: usize = 1_024;

    pub(crate) fn push(&mut self, change: DecisionChange) {
        if self.changes.len() == Self::MOST {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
        self.number += 1;
    }

    /// The changes, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &DecisionChange> {
        self.changes.iter()
    }

    /// How many changes there were so far, including those that we no longer keep.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The changes after the first `number` that we still keep.
    pub fn since(&self, number: u64) -> impl Iterator<Item = &DecisionChange> {
        let new = usize::try_from(self.number.saturating_sub(number)).unwrap_or(usize::MAX);
        self.changes.iter().skip(self.changes.len().saturating_sub(new))
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
    /// Merges don't last, because the program writes the pages.
    CowBroken,
    /// The region is too young to know whether it will last, or regions of its family have ended young.
    ShortLived,
    /// Many duplicates that last: worth merging.
    StaticallyDuplicated,
}

impl Kind {
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

/// Our evidence for duplicates in a region.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    pub kind: Kind,
    /// The share of duplicates, 0 to 1.
    pub ratio: f64,
    /// The 95 % range of the ratio.
    pub range: (f64, f64),
    /// Whether we've read the region whole, so that the ratio is exact.
    pub exact: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_make_no_new_decision() {
        let read = |pages| Decision::new(Verb::Read, Reason::BeingRead(Pages(pages)));
        assert!(read(5).is_like(&read(7).until(9)));
        assert!(!read(5).is_like(&Decision::new(Verb::Read, Reason::Promising)));
        assert!(!read(5).is_like(&Decision { verb: Verb::Watch, ..read(5) }));
    }

    #[test]
    fn the_log_keeps_the_last_changes() {
        let mut log = DecisionLog::default();
        let change = DecisionChange {
            owner: OwnerKey(1),
            region: RegionKey(1),
            first: Vpn(0),
            pages: Pages(1),
            from: Decision::default(),
            to: Decision::default(),
        };
        for page in 0..=DecisionLog::MOST as u64 {
            log.push(DecisionChange { first: Vpn(page), ..change });
        }
        assert_eq!((log.iter().count(), log.iter().next().unwrap().first), (DecisionLog::MOST, Vpn(1)));
        let number = log.number();
        log.push(DecisionChange { first: Vpn(7), ..change });
        assert_eq!(log.since(number).map(|change| change.first).collect::<Vec<_>>(), [Vpn(7)]);
        assert_eq!(log.since(0).count(), DecisionLog::MOST);
    }
}
