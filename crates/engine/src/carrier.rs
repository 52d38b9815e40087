//! The two carriers of merged pages, ksmd and requests: how they differ, as constants.
//!
//! Nothing else in the engine asks which of them it is, but for the [`Mechanism`]'s two planners in
//! [`crate::engine`].

use crate::host::Mechanism;

/// How we merge pages with one [`Mechanism`].
#[derive(Debug)]
pub(crate) struct Carrier {
    /// Whether we mark memory, and ksmd searches it for equal pages again and again. Otherwise we name pairs of pages,
    /// and nothing but our own reading finds more of them.
    pub by_marks: bool,
    /// How long memory must stay merged to be worth it, nanoseconds. Merging on request takes microseconds a page, but
    /// marks must pay for scans and for stopping the process.
    pub worth_ns: u64,
    /// Where inspections of memory nodes are long, we pause for at least this many times the CPU time of one. On
    /// request we choose the copy that stays before the merge, so little is left to move.
    pub inspection_pause: u64,
}

static KSMD: Carrier = Carrier { by_marks: true, worth_ns: 8_000_000_000, inspection_pause: 64 };
static REQUEST: Carrier = Carrier { by_marks: false, worth_ns: 4_000_000_000, inspection_pause: 1_024 };

impl Mechanism {
    pub(crate) fn carrier(self) -> &'static Carrier {
        match self {
            Self::Ksmd => &KSMD,
            Self::Request => &REQUEST,
        }
    }
}
