//! Why a region is left alone, and until when.

use crate::keys::LimitKey;
use serde::{Deserialize, Serialize};

/// The first pause between two examinations of a region that bring nothing, and the longest, nanoseconds.
const FIRST_PAUSE_NS: u64 = 10_000_000_000;
const LONGEST_PAUSE_NS: u64 = 600_000_000_000;
/// How long a region is left alone for a reason that passes, nanoseconds.
pub(crate) const LEAVE_NS: u64 = 3_600_000_000_000;

/// A reason to leave a region alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaveAlone {
    /// Its merges did not last. It is left alone for a time.
    CowBroken,
    /// Its merged memory was taken apart, because memory was short. It is left alone for a time.
    TakenBack,
    /// Its merged memory was taken apart, because it was charged to another cgroup that had no headroom for it. It is left alone for a
    /// time.
    Relieved,
    /// Its process refused to be marked. It is left alone for good.
    Refused,
}

/// What keeps a region from being examined or marked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hold {
    reason: Option<LeaveAlone>,
    /// No examination before this time, and no mark if it was COW-broken or taken apart, nanoseconds.
    not_before_ns: u64,
    /// No mark while memory is short.
    short: bool,
    /// Nothing at all while its process is left alone.
    left_alone: bool,
    /// The limit of a cgroup that leaves no headroom for more marks, or for keeping more pages.
    full: Option<LimitKey>,
    /// No mark before this time, because the target could not be stopped, nanoseconds.
    retry_ns: u64,
    /// The last pause between two examinations, nanoseconds.
    pause_ns: u64,
}

impl Hold {
    /// The reason, if there is one.
    pub fn reason(&self) -> Option<LeaveAlone> {
        self.reason
    }

    /// Leaves the region alone until `until_ns`, for a reason that passes.
    pub fn leave_until(&mut self, until_ns: u64, reason: LeaveAlone) {
        self.reason = Some(reason);
        self.not_before_ns = until_ns;
    }

    /// Sets whether memory is short.
    pub fn set_short(&mut self, short: bool) {
        self.short = short;
    }

    /// Sets whether its process is left alone.
    pub fn set_left_alone(&mut self, left_alone: bool) {
        self.left_alone = left_alone;
    }

    /// Sets the limit that leaves no headroom for more.
    pub fn set_full(&mut self, limit: Option<LimitKey>) {
        self.full = limit;
    }

    /// The limit that leaves no headroom for more.
    pub fn full(&self) -> Option<LimitKey> {
        self.full
    }

    /// Leaves the region alone for good, because its process refused to be marked.
    pub fn refuse(&mut self) {
        self.reason = Some(LeaveAlone::Refused);
    }

    /// Ends the hold. Returns the reason there was.
    pub fn end(&mut self) -> Option<LeaveAlone> {
        self.reason.take()
    }

    /// Whether memory is short.
    pub fn is_short(&self) -> bool {
        self.short
    }

    /// When a hold that passes ends, nanoseconds.
    pub fn ends_ns(&self) -> u64 {
        self.not_before_ns
    }

    /// The last pause between two examinations, nanoseconds.
    pub fn pause_ns(&self) -> u64 {
        self.pause_ns
    }

    /// Adopts what another run has found: a reason, for how long it holds, and the last pause.
    pub fn adopt(&mut self, now_ns: u64, reason: Option<LeaveAlone>, hold_ns: u64, pause_ns: u64) {
        self.reason = reason;
        self.not_before_ns = now_ns + hold_ns.min(LEAVE_NS);
        self.pause_ns = pause_ns.min(LONGEST_PAUSE_NS);
    }

    /// Whether the region's process refused to be marked.
    pub fn is_refused(&self) -> bool {
        self.reason == Some(LeaveAlone::Refused)
    }

    /// Whether its process is left alone.
    pub fn is_left_alone(&self) -> bool {
        self.left_alone
    }

    /// Whether the region may be sampled.
    pub fn may_sample(&self) -> bool {
        !self.is_refused() && !self.left_alone
    }

    /// Whether the region may be examined now.
    pub fn may_examine(&self, now_ns: u64) -> bool {
        self.may_sample() && now_ns >= self.not_before_ns
    }

    /// Whether the region may be marked now.
    pub fn may_mark(&self, now_ns: u64) -> bool {
        let allowed = match self.reason {
            None => true,
            Some(LeaveAlone::CowBroken | LeaveAlone::TakenBack | LeaveAlone::Relieved) => now_ns >= self.not_before_ns,
            Some(LeaveAlone::Refused) => false,
        };
        allowed && !self.short && !self.left_alone && now_ns >= self.retry_ns
    }

    /// When marking is tried again after the target couldn't be stopped, nanoseconds.
    pub fn retry_ns(&self) -> u64 {
        self.retry_ns
    }

    /// Marking is tried again at `retry_ns`: the target could not be stopped.
    pub fn retry_at(&mut self, retry_ns: u64) {
        self.retry_ns = retry_ns;
    }

    /// Puts off the next examination: each one must bring something for the next to follow soon. Pauses double.
    pub fn put_off(&mut self, now_ns: u64) {
        self.pause_ns = (self.pause_ns * 2).clamp(FIRST_PAUSE_NS, LONGEST_PAUSE_NS);
        self.not_before_ns = now_ns + self.pause_ns;
    }

    /// The last examination brought something: the next pause is the shortest again.
    pub fn reset_pause(&mut self) {
        self.pause_ns = 0;
    }
}
