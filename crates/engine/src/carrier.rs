//! The constants that differ between merging by ksmd and merging on request (`/dev/ksm`).
//!
//! Apart from these constants, only the two planners in [`crate::engine`] depend on the [`Mechanism`].

use crate::host::Mechanism;

/// The constants of one [`Mechanism`].
#[derive(Debug)]
pub(crate) struct Carrier {
    /// With ksmd we mark memory, and ksmd keeps searching it for equal pages. Otherwise we give the kernel pairs of
    /// pages, and must read pages to find more pairs.
    pub by_marks: bool,
    /// How long memory must stay merged to be worth it, nanoseconds. Merging on request takes microseconds a page, but
    /// marks must pay for scans and for stopping the process.
    pub worth_ns: u64,
    /// On a NUMA machine, after each inspection of merged pages, we pause for at least this many times the CPU time
    /// that it took. On request we choose which copy to keep before the merge, so few pages need to move later.
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
