//! Why we leave a region alone, and until when.

use crate::keys::LimitKey;
use serde::{Deserialize, Serialize};

/// If examining a region brings nothing, we pause before the next time: the first and the longest pause, nanoseconds.
const FIRST_PAUSE_NS: u64 = 10_000_000_000;
const LONGEST_PAUSE_NS: u64 = 600_000_000_000;
/// How long we leave memory alone the first time, nanoseconds: a region that didn't merge, or an extent where merges
/// didn't pay.
const REST_NS: u64 = 300_000_000_000;
/// How long we leave a region alone for a temporary reason at most, nanoseconds.
pub(crate) const LEAVE_NS: u64 = 3_600_000_000_000;

/// How long to leave memory alone, nanoseconds, if we've already done so `times` times in a row: twice as long each
/// time.
pub(crate) fn rest_ns(times: u32) -> u64 {
    (REST_NS << times.min(8)).min(LEAVE_NS)
}

/// Why we leave a region alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaveAlone {
    /// Merges in the region didn't last. Temporary.
    CowBroken,
    /// We unmerged the region because memory was short. Temporary.
    TakenBack,
    /// We unmerged the region because another cgroup was charged for it and had no headroom. Temporary.
    Relieved,
    /// ksmd merged almost none of the region's duplicates. Temporary.
    Unmerged,
    /// The region's process refused our attempt to mark its memory. Lasts for the whole run.
    Refused,
}

/// Why we don't examine or mark a region now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hold {
    reason: Option<LeaveAlone>,
    /// Before this time, nanoseconds, we don't read the region whole. If there's a `reason`, we don't mark it either.
    not_before_ns: u64,
    /// The last pause between two examinations, nanoseconds. 0 once an examination has brought something.
    pub pause_ns: u64,
    /// Memory is short: no marks.
    pub short: bool,
    /// We leave the process alone: we neither read nor mark anything.
    pub left_alone: bool,
    /// The cgroup limit that leaves no headroom for more marks, or for keeping more pages for others.
    pub full: Option<LimitKey>,
    /// How often in a row ksmd merged almost none of the region's duplicates.
    pub unmerged: u32,
    /// We couldn't stop the target, or it has no mappings to spare: no marks before this time, nanoseconds.
    pub retry_ns: u64,
    /// Whether we wait until `retry_ns` because the target has no mappings to spare.
    pub lacks_mappings: bool,
}

impl Hold {
    pub fn new(left_alone: bool) -> Self {
        Self { left_alone, ..Self::default() }
    }

    pub fn reason(&self) -> Option<LeaveAlone> {
        self.reason
    }

    /// Leaves the region alone until `until_ns`, for a temporary reason.
    pub fn leave_until(&mut self, until_ns: u64, reason: LeaveAlone) {
        self.reason = Some(reason);
        self.not_before_ns = until_ns;
    }

    /// How long to leave the region alone because ksmd merged almost none of its duplicates, nanoseconds: twice as long
    /// each time.
    pub fn next_unmerged_ns(&mut self) -> u64 {
        let pause_ns = rest_ns(self.unmerged);
        self.unmerged += 1;
        pause_ns
    }

    /// Leaves the region alone for the whole run, because its process refused our attempt to mark its memory.
    pub fn refuse(&mut self) {
        self.reason = Some(LeaveAlone::Refused);
    }

    pub fn end(&mut self) {
        self.reason = None;
    }

    /// When a temporary hold ends, nanoseconds.
    pub fn ends_ns(&self) -> u64 {
        self.not_before_ns
    }

    /// Adopts another run's findings: why it left the region alone, for how much longer, and its last pause.
    pub fn adopt(&mut self, now_ns: u64, reason: Option<LeaveAlone>, hold_ns: u64, pause_ns: u64) {
        self.reason = reason;
        self.not_before_ns = now_ns + hold_ns.min(LEAVE_NS);
        self.pause_ns = pause_ns.min(LONGEST_PAUSE_NS);
    }

    pub fn is_refused(&self) -> bool {
        self.reason == Some(LeaveAlone::Refused)
    }

    pub fn may_sample(&self) -> bool {
        !self.is_refused() && !self.left_alone
    }

    pub fn may_examine(&self, now_ns: u64) -> bool {
        self.may_sample() && now_ns >= self.not_before_ns
    }

    pub fn may_mark(&self, now_ns: u64) -> bool {
        let is_over = self.reason.is_none() || now_ns >= self.not_before_ns;
        self.may_sample() && is_over && !self.short && now_ns >= self.retry_ns
    }

    /// An examination that we had put off has ended: the next one waits as long, so that other regions get a turn.
    pub fn end_examination(&mut self, now_ns: u64) {
        self.not_before_ns = self.not_before_ns.max(now_ns + self.pause_ns);
    }

    /// Puts off the next examination: for twice as long each time, until an examination brings something.
    pub fn put_off(&mut self, now_ns: u64) {
        self.pause_ns = (self.pause_ns * 2).clamp(FIRST_PAUSE_NS, LONGEST_PAUSE_NS);
        self.not_before_ns = now_ns + self.pause_ns;
    }
}
