//! The kernel's side of pagefold's requests to merge.

use super::SimHost;
use crate::ksmd::Kept;
use crate::memory::PageRef;
use pagefold_engine::host::{Keep, Mechanism, MergeRange, MergeResult, Merging, Outcome, PageRun, PageState};
use pagefold_engine::keys::{DomainKey, RegionKey};
use pagefold_engine::units::{Permyriad, Vpn};

/// The kernel merges at most this many pages at once (`PAGEVEC_SIZE`).
const BATCH_PAGES: u32 = 31;

impl SimHost {
    pub(super) fn merge_ranges(&mut self, ranges: &[MergeRange], outcome: &mut Outcome) {
        for &range in ranges {
            let cost_ns = self.merge_range(range, &mut outcome.merges);
            self.spend(cost_ns);
        }
    }

    /// Merges one range. Returns the cost in nanoseconds.
    fn merge_range(&mut self, range: MergeRange, results: &mut Vec<MergeResult>) -> u64 {
        if !self.may_merge(&range) {
            results.push(MergeResult { range, merging: Merging::Untried });
            return 0;
        }
        self.mark_named(&range);
        let mut cost_ns = u64::from(range.take.pages.div_ceil(BATCH_PAGES)) * self.costs.request_run_ns;
        let mut pages = Vec::new();
        for number in 0..range.take.pages {
            let (merging, page_ns) = self.merge_page(&range.part(number, 1));
            cost_ns += page_ns;
            pages.push(merging);
        }
        if self.is_late() {
            pages.fill(Merging::Unknown);
        }
        results.extend(range.results(&pages));
        self.granularity.scale(cost_ns)
    }

    /// Whether pagefold gives up waiting now.
    pub(super) fn is_late(&mut self) -> bool {
        self.knobs.late > Permyriad(0) && self.stream.chance(self.knobs.late)
    }

    /// Whether the kernel merges on request, and pagefold's live host would pass this range on. Both processes must be
    /// alive, touchable and in one trust domain, and the two sides mustn't overlap.
    fn may_merge(&self, range: &MergeRange) -> bool {
        let PageRun { region: take, first, pages } = range.take;
        let can = self.knobs.mechanism == Mechanism::Request && self.ours;
        let Some(domain) = self.domain_to_merge(take).filter(|_| can) else { return false };
        let Some((keep, _)) = range.keep.first() else { return true };
        let overlaps =
            matches!(range.keep, Keep::Run(_, keeps) if keep == take && keeps.0.abs_diff(first.0) < u64::from(pages));
        self.domain_to_merge(keep) == Some(domain) && !overlaps
    }

    /// The trust domain of a region's process. `None` if the process has exited or can't be touched.
    fn domain_to_merge(&self, region: RegionKey) -> Option<DomainKey> {
        self.memory.owner_of(region.0).filter(|owner| !owner.exited && !owner.untouchable).map(|owner| owner.domain)
    }

    /// Marks the mappings of both sides as a whole, as the kernel does.
    fn mark_named(&mut self, range: &MergeRange) {
        let PageRun { region, first, pages } = range.take;
        for (key, first) in std::iter::once((region, first)).chain(range.keep.first()) {
            let Some(region) = self.memory.region_mut(key.0) else { continue };
            let Some(page) = region.offset(first) else { continue };
            let owner = region.owner;
            region.marks.add(region.mappings_at(page, pages));
            self.ksmd.register(&mut self.memory, owner, self.now_ns);
        }
    }

    /// Merges the only page of a range. Returns the cost in nanoseconds.
    fn merge_page(&mut self, range: &MergeRange) -> (Merging, u64) {
        let place = |region: RegionKey, page: Vpn| Some((region.0, self.memory.region(region.0)?.offset(page)?));
        let kept = match range.keep.first() {
            None => Some(Kept::Zero),
            Some((region, page)) => place(region, page).map(Kept::Page),
        };
        let (Some(take), Some(kept)) = (place(range.take.region, range.take.first), kept) else {
            return (Merging::Absent, self.costs.request_pass_ns);
        };
        let merged = |(key, page)| self.memory.region(key).and_then(|region| region.merged_frame(page)).is_some();
        if range.needs_merged && matches!(kept, Kept::Page(keep) if !merged(keep)) {
            return (Merging::Absent, self.costs.pagemap_ns);
        }
        if range.needs_own && !self.is_own(take) {
            return (Merging::Absent, self.costs.pagemap_ns);
        }
        let looked_ns = if range.needs_own { self.costs.pagemap_ns } else { 0 };
        let merge_ns = match kept {
            Kept::Zero => self.costs.request_zero_ns,
            Kept::Page(keep) if merged(keep) => self.costs.request_join_ns,
            Kept::Page(_) => self.costs.request_pair_ns,
        };
        if self.stream.chance(self.knobs.busy) {
            return (Merging::Busy, self.costs.request_differs_ns);
        }
        let merging = self.ksmd.merge(&mut self.memory, take, kept, range.keep_mappers);
        let cost_ns = match merging {
            Merging::Merged => merge_ns,
            Merging::Differs | Merging::Busy | Merging::Full => self.costs.request_differs_ns,
            Merging::Shared | Merging::Absent | Merging::Ineligible | Merging::Untried | Merging::Unknown => {
                self.costs.request_pass_ns
            }
        };
        (merging, looked_ns + cost_ns)
    }

    /// Whether the process has a page for itself.
    fn is_own(&self, (key, page): PageRef) -> bool {
        self.memory.region(key).is_some_and(|region| self.memory.state(region, page) == PageState::Private)
    }
}
