//! What differs between merging by ksmd and merging on request (`/dev/ksm`), apart from the two planners in
//! [`crate::engine`].

use crate::host::Mechanism;

impl Mechanism {
    /// With ksmd we mark memory, and ksmd keeps searching it for equal pages. Otherwise we give the kernel pairs of
    /// pages, and must read pages to find more pairs.
    pub(crate) fn by_marks(self) -> bool {
        self == Self::Ksmd
    }

    /// How long memory must stay merged to be worth it, nanoseconds. Merging on request takes microseconds a page, but
    /// marks must pay for scans and for stopping the process.
    pub(crate) fn worth_ns(self) -> u64 {
        if self.by_marks() { 8_000_000_000 } else { 4_000_000_000 }
    }

    /// On a NUMA machine, after each inspection of merged pages, we pause for at least this many times the CPU time
    /// that it took. On request we choose which copy to keep before the merge, so few pages need to move later.
    pub(crate) fn inspection_pause(self) -> u64 {
        if self.by_marks() { 64 } else { 1_024 }
    }
}
