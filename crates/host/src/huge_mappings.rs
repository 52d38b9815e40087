//! Remembers which memory of a process had huge pages before we marked it, so that we can give them back.

use pagefold_engine::units::Vpn;
use pagefold_procmem::collapse::extents;
use std::collections::VecDeque;

/// We collapse at most this many extents in a cycle. Each takes half a millisecond, and holds the process's mmap lock
/// for a part of that time.
const EXTENTS_MOST: usize = 16;
/// Per process, we remember at most `MAPPINGS_MOST` mappings that had huge pages when we marked them, and queue at most
/// `WAITING_MOST` extents. We leave the rest to khugepaged.
const MAPPINGS_MOST: usize = 64;
const WAITING_MOST: usize = 4_096;

/// Address ranges of a process that had huge pages.
#[derive(Debug, Default)]
pub(crate) struct HugeMappings {
    /// Ranges that had huge pages when we marked them.
    marked: Vec<(u64, u64)>,
    extents: VecDeque<Vpn>,
}

impl HugeMappings {
    /// Records a mapping that we're about to mark.
    pub(crate) fn record(&mut self, start: u64, end: u64) {
        if self.marked.len() < MAPPINGS_MOST && !self.marked.contains(&(start, end)) {
            self.marked.push((start, end));
        }
    }

    /// Queues the parts of an unmarked range that had huge pages, to be collapsed again.
    pub(super) fn wanted(&mut self, start: u64, end: u64) {
        for &(from, to) in &self.marked {
            let room = WAITING_MOST.saturating_sub(self.extents.len());
            self.extents.extend(extents(from.max(start), to.min(end)).take(room));
        }
    }

    /// Whether any extents wait to be collapsed.
    pub(super) fn is_waiting(&self) -> bool {
        !self.extents.is_empty()
    }

    /// The extents to collapse in this cycle.
    pub(super) fn next(&mut self) -> Vec<Vpn> {
        self.extents.drain(..self.extents.len().min(EXTENTS_MOST)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_huge_and_is_unmarked_waits_within_bounds() {
        const MIB: u64 = 1 << 20;
        let mut huge = HugeMappings::default();
        huge.record(2 * MIB, 8 * MIB);
        huge.record(2 * MIB, 8 * MIB);
        huge.record(100 * MIB, 1 << 40);
        huge.wanted(0, 5 * MIB);
        let addresses = |extents: Vec<Vpn>| extents.into_iter().map(Vpn::address).collect::<Vec<_>>();
        assert_eq!(addresses(huge.next()), [2 * MIB]);
        assert!(!huge.is_waiting());
        huge.wanted(0, u64::MAX);
        assert_eq!((huge.next().len(), huge.extents.len()), (EXTENTS_MOST, WAITING_MOST - EXTENTS_MOST));
        (0..1_000).for_each(|at| huge.record(at, at + 1));
        assert_eq!(huge.marked.len(), MAPPINGS_MOST);
    }
}
