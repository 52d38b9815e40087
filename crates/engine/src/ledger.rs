//! The ledger: how much we saved and at what cost. `status`, metrics and summaries are views of it.

mod copies;

pub use copies::Copies;

use crate::host::{Actions, Cost, HugeSplits, KsmView, Marking, MergeResult, Merging, Outcome, Why};
use crate::saving::Saving;
use crate::stops::StopLengths;
use crate::units::{Pages, count};
use serde::{Deserialize, Serialize};

/// When the curve has this many points, we drop every second one.
const CURVE_MOST: usize = 1 << 14;

/// Kernel memory for each marked page that ksmd has visited, bytes (`struct ksm_rmap_item`, mm/ksm.c).
pub const METADATA_BYTES_PER_PAGE: u64 = 64;

/// Pages we asked the kernel to merge, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    #[serde(rename = "asked_pages")]
    pub asked: Pages,
    #[serde(rename = "merged_pages")]
    pub merged: Pages,
    /// Pages that were already merged.
    #[serde(rename = "shared_pages")]
    pub shared: Pages,
    /// Pages that the kernel compared and found unequal. They were written since we read them, or only had equal
    /// hashes.
    #[serde(rename = "differing_pages")]
    pub differing: Pages,
    /// Pages that weren't merged for another reason.
    #[serde(rename = "failed_pages")]
    pub failed: Pages,
}

impl RequestCounts {
    fn add(&mut self, result: &MergeResult) {
        let count = match result.merging {
            Merging::Merged => &mut self.merged,
            Merging::Shared => &mut self.shared,
            Merging::Differs => &mut self.differing,
            Merging::Absent
            | Merging::Busy
            | Merging::Ineligible
            | Merging::Full
            | Merging::Untried
            | Merging::Unknown => &mut self.failed,
        };
        let pages = Pages(result.range.take.pages.into());
        *count += pages;
        self.asked += pages;
    }
}

/// The account of one run.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Pages that KSM saves on the machine by its counters, without `exited`.
    pub saved_machine: Pages,
    /// Frames saved for the processes in scope, by the latest count ([`crate::saving`]).
    pub saved: Option<Pages>,
    /// Roughly how many merged pages of exited processes KSM's counters still contain until ksmd's next scan.
    pub exited: Pages,
    /// Pages of address space that this run marked.
    pub marked: Pages,
    /// Pages of address space that this run unmarked.
    pub unmarked: Pages,
    /// Pages unmarked because memory was short.
    pub taken_back: Pages,
    pub spans: u64,
    /// Spans where the target refused or had ended.
    pub refused: u64,
    /// Copies of merged pages made because programs wrote them.
    pub copies: Copies,
    /// Huge pages split on the machine since the run began.
    pub splits: HugeSplits,
    /// Huge pages split before the run.
    pub splits_before: HugeSplits,
    /// Huge pages collapsed again in memory that we unmarked because merges there didn't last.
    pub collapsed: u64,
    pub pages_read: u64,
    /// Outcomes of the pages we asked the kernel to merge.
    pub requests: RequestCounts,
    pub stops: u64,
    /// The longest stop, nanoseconds.
    pub longest_stop_ns: u64,
    /// The total time of all stops, nanoseconds.
    pub total_stop_ns: u64,
    pub stop_lengths: StopLengths,
    /// Merged frames moved to another NUMA node.
    pub moved: Pages,
    /// Frames that we couldn't move.
    pub not_moved: Pages,
    /// CPU time of moving frames, nanoseconds. Part of `cost`.
    pub move_ns: u64,
    pub cost: Cost,
    /// When the run began, nanoseconds.
    pub began_ns: u64,
    /// The time of the last observation, nanoseconds.
    pub now_ns: u64,
    /// Pages saved by this run over time: (nanoseconds since the start, pages). One point for each change, and fewer in
    /// a long run.
    pub curve: Vec<(u64, Pages)>,
}

impl Ledger {
    /// Records the state of the machine. `exited` is the number of pages that KSM counts as merged although they're
    /// gone.
    pub fn observe(&mut self, now_ns: u64, ksm: &KsmView, exited: Pages, cost: Cost) {
        if self.began_ns == 0 {
            self.began_ns = now_ns;
            self.splits_before = ksm.splits;
        }
        self.now_ns = now_ns;
        self.cost = cost;
        self.exited = exited;
        self.saved_machine = ksm.saved().saturating_sub(exited);
        self.copies.observe(now_ns, ksm.broken);
        let HugeSplits { pages, mappings } = ksm.splits.since(self.splits_before);
        self.splits = HugeSplits { pages: pages.max(self.splits.pages), mappings: mappings.max(self.splits.mappings) };
    }

    /// Records a count of the saving.
    pub fn record_saving(&mut self, saving: &Saving) {
        let saved = saving.saved;
        self.saved = Some(saved);
        if self.curve.last().map(|&(_, last)| last) != Some(saved) {
            self.curve.push((saving.counted_ns.saturating_sub(self.began_ns), saved));
            if self.curve.len() >= CURVE_MOST {
                let mut number = 0_u32;
                self.curve.retain(|_| {
                    number += 1;
                    number == 1 || number % 2 == 0
                });
            }
        }
    }

    /// Records the outcome of a cycle's actions.
    pub fn record(&mut self, actions: &Actions, outcome: &Outcome) {
        for result in &outcome.unmarked {
            if let Marking::Done(pages) = result.marking {
                self.unmarked += pages;
                if result.change.why == Why::MemoryShort {
                    self.taken_back += pages;
                }
            }
        }
        for result in &outcome.marked {
            match result.marking {
                Marking::Done(pages) => {
                    self.marked += pages;
                    self.spans += 1;
                }
                Marking::Refused => self.refused += 1,
                Marking::Untried | Marking::Busy | Marking::NoMappings => {}
            }
        }
        outcome.merges.iter().for_each(|result| self.requests.add(result));
        self.collapsed += outcome.collapsed;
        self.moved += Pages(outcome.moved);
        self.not_moved += Pages(count(actions.moves.len()).saturating_sub(outcome.moved));
        self.move_ns += outcome.move_ns;
        for stops in &outcome.stops {
            self.stops += u64::from(stops.number);
            self.longest_stop_ns = self.longest_stop_ns.max(stops.longest_ns);
            self.total_stop_ns += stops.total_ns;
            self.stop_lengths += stops.lengths;
        }
    }

    /// Seconds from the start until the saving reached 90 % of its present value and stayed above that. `None` if the
    /// saving has never been below: the memory was merged before the run.
    pub fn seconds_to_90_percent(&self) -> Option<f64> {
        let goal = self.saved?.0 * 9 / 10;
        if goal == 0 {
            return None;
        }
        let last_below = self.curve.iter().rposition(|&(_, saved)| saved.0 < goal)?;
        self.curve.get(last_below + 1).map(|&(ns, _)| ns as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saving(second: u64, saved: u64) -> Saving {
        Saving { saved: Pages(saved), counted_ns: second * 1_000_000_000, ..Saving::default() }
    }

    #[test]
    fn the_curve_is_bounded_and_ends_with_the_last_change() {
        let mut ledger = Ledger::default();
        for second in 1..=100_000_u64 {
            ledger.observe(second * 1_000_000_000, &KsmView::default(), Pages(0), Cost::default());
            ledger.record_saving(&saving(second, second));
        }
        assert!((CURVE_MOST / 4..CURVE_MOST).contains(&ledger.curve.len()), "{}", ledger.curve.len());
        assert_eq!(ledger.curve.last(), Some(&(99_999_000_000_000, Pages(100_000))));
        assert!(ledger.curve.is_sorted());
    }

    #[test]
    fn splits_count_from_the_beginning_of_the_run() {
        let mut ledger = Ledger::default();
        let mut at = |second: u64, pages, mappings| {
            let ksm = KsmView { splits: HugeSplits { pages, mappings }, ..KsmView::default() };
            ledger.observe(second * 1_000_000_000, &ksm, Pages(0), Cost::default());
            (ledger.splits.pages, ledger.splits.mappings)
        };
        assert_eq!(at(1, 1_000, 2_000), (0, 0));
        assert_eq!(at(2, 1_003, 2_001), (3, 1));
        assert_eq!(at(3, 0, 0), (3, 1), "they could not be read");
        assert_eq!(at(4, 1_004, 2_005), (4, 5));
    }

    #[test]
    fn ninety_per_cent_must_last() {
        let mut ledger = Ledger::default();
        for (second, saved) in [(1, 0), (2, 100), (3, 10), (4, 95), (5, 100), (6, 100)] {
            ledger.observe(second * 1_000_000_000, &KsmView::default(), Pages(0), Cost::default());
            ledger.record_saving(&saving(second, saved));
        }
        assert_eq!(ledger.seconds_to_90_percent(), Some(3.0));
        assert_eq!(ledger.saved, Some(Pages(100)));
        assert_eq!(Ledger::default().seconds_to_90_percent(), None);
        let mut merged_before = Ledger::default();
        merged_before.observe(1, &KsmView::default(), Pages(0), Cost::default());
        merged_before.record_saving(&saving(0, 100));
        assert_eq!(merged_before.seconds_to_90_percent(), None);
    }
}
