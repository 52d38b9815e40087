//! The state of the simulated machine, for tests and experiments. pagefold can't see it.

use super::SimHost;
use crate::comparisons::SearchCounts;
use crate::memory::GroundTruth;
use pagefold_engine::host::{Cost, HugeSplits, KsmView, PageState, Span};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::units::{Bytes, Pages, Vpn};

impl SimHost {
    /// Counts the whole memory exactly, page by page.
    pub fn truth(&self) -> GroundTruth {
        let GroundTruth { frames, zero_frames, contents, zero_mapped, savable } = self.memory.truth();
        let [frames, zero_frames, contents, zero_mapped, savable] =
            [frames, zero_frames, contents, zero_mapped, savable].map(|count| self.granularity.scale(count));
        GroundTruth { frames, zero_frames, contents, zero_mapped, savable }
    }
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }
    pub fn cost(&self) -> Cost {
        let ksmd_ns = self.scanner.as_ref().map_or(self.ksmd.cpu_ns, |scanner| scanner.cpu_ns());
        Cost { pagefold_ns: self.pagefold_ns, ksmd_ns, ..Cost::default() }
    }
    /// KSM's counters. As in the kernel, they lag behind writes, unmarking and exits until ksmd visits the pages.
    pub fn ksm(&self) -> KsmView {
        let seen = self.ksm_as_observed();
        let pages = |seen: Pages| Pages(self.granularity.scale(seen.0));
        let (shared, sharing, zero) = (pages(seen.shared), pages(seen.sharing), pages(seen.zero));
        KsmView { shared, sharing, zero, broken: self.granularity.scale(seen.broken), ..seen }
    }
    /// KSM's counters as pagefold sees them: in simulated pages, except for `scanned`, because pagefold derives rates
    /// from it.
    pub(super) fn ksm_as_observed(&self) -> KsmView {
        KsmView {
            shared: Pages(self.ksmd.trees.shared),
            sharing: Pages(self.ksmd.trees.sharing),
            zero: Pages(self.memory.zero_merged),
            scanned: self.scanner.as_ref().map_or(self.ksmd.scanned, |scanner| scanner.scanned()),
            full_scans: self.ksmd.full_scans,
            broken: self.memory.cow_breaks,
            splits: HugeSplits::default(),
            busy: self.ksmd.busy,
            ours: self.ours,
        }
    }
    /// Pages that map a merged frame.
    pub fn merged_pages(&self) -> Pages {
        Pages(self.granularity.scale(self.memory.merged_pages))
    }
    /// Merged pages in unmarked memory, where nobody can unmerge them.
    pub fn merged_unmarked(&self) -> Pages {
        let mut pages = 0;
        for (_, region) in self.memory.live_regions() {
            let unmarked = (0..region.len()).filter(|&page| !region.marks.contains(page));
            pages += unmarked.filter(|&page| region.merged_frame(page).is_some()).count() as u64;
        }
        Pages(self.granularity.scale(pages))
    }
    /// How many frames are saved now: merged pages minus the frames that they share, plus merged pages of zeros.
    pub fn saved(&self) -> Pages {
        Pages(self.granularity.scale(self.memory.merged_pages - self.memory.merged_frames + self.memory.zero_merged))
    }
    /// Writes to merged pages so far.
    pub fn cow_breaks(&self) -> u64 {
        self.granularity.scale(self.memory.cow_breaks)
    }
    pub fn counts(&self) -> SearchCounts {
        self.scanner.as_ref().map_or(self.ksmd.counts, |scanner| scanner.counts())
    }
    /// Pages that ksmd didn't compare again, because nobody had written them since (only with classes).
    pub fn spared(&self) -> u64 {
        self.ksmd.spared
    }
    /// KSM's counters `pages_unshared` and `pages_volatile`.
    pub fn unshared_and_volatile(&self) -> (u64, u64) {
        let (trees, unshared) = (&self.ksmd.trees, self.ksmd.unshared);
        let volatile = self.ksmd.items.saturating_sub(trees.shared + trees.sharing + unshared);
        (self.granularity.scale(unshared), self.granularity.scale(volatile))
    }
    /// How many contents and pages are in each tree of the forest, or of each class. Shows how balanced the trees are.
    pub fn tree_sizes(&self) -> Vec<u64> {
        self.ksmd.trees.sizes().into_iter().map(|pages| self.granularity.scale(pages)).collect()
    }
    /// The size of KSM's records: 64 bytes for each page and each merged frame, 48 for each process.
    pub fn metadata(&self) -> Bytes {
        let records = self.granularity.scale(self.ksmd.items + self.memory.known_frames());
        Bytes(64 * records + 48 * self.ksmd.registered().len() as u64)
    }
    /// How many processes have exited while ksmd still holds their address space.
    pub fn unreaped(&self) -> usize {
        self.ksmd.registered().iter().filter(|&&owner| self.memory.owners[owner as usize].exited).count()
    }
    /// Kicks that arrived during a scan and so had no effect.
    pub fn lost_kicks(&self) -> u64 {
        self.ksmd.lost_kicks
    }
    /// Scan orders that arrived while pagefold didn't control KSM.
    pub fn ignored_orders(&self) -> u64 {
        self.ignored_orders
    }
    /// Whether ksmd is in a batch.
    pub fn is_scanning(&self) -> bool {
        self.ksmd.is_scanning()
    }
    /// The regions of a process, by address.
    pub fn regions_of(&self, owner: OwnerKey) -> Vec<RegionKey> {
        self.memory.owners[owner.0 as usize].regions.iter().map(|&key| RegionKey(key)).collect()
    }
    /// A span that covers the whole region.
    pub fn span_of(&self, region: RegionKey) -> Option<Span> {
        let found = self.memory.region(region.0)?;
        Some(Span { region, first: Vpn(found.first), pages: Pages(u64::from(found.len())) })
    }
    /// The content of a page, and its state.
    pub fn page(&self, region: RegionKey, page: Vpn) -> Option<(u64, PageState)> {
        let region = self.memory.region(region.0)?;
        let offset = region.offset(page)?;
        Some((region.content[offset as usize], self.memory.state(region, offset)))
    }

    #[cfg(test)]
    pub(super) fn parts(&self) -> (&crate::memory::Memory, &crate::ksmd::Ksmd) {
        (&self.memory, &self.ksmd)
    }
}
