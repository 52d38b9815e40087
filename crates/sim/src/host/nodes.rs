//! Shows pagefold the simulated machine's memory nodes, and moves merged frames between them.

use super::SimHost;
use crate::memory::{Backing, MergedFrame, MoveResult, Nodes};
use pagefold_engine::host::{MergedSample, Move, NodeView, Outcome, OwnerView, PageRun, PageState, StateSample};
use pagefold_engine::keys::{LimitKey, LineageKey, NodeKey, OwnerKey, RegionKey};
use pagefold_engine::units::{Pages, Vpn};
use std::collections::BTreeMap;

/// How often pagefold observes nodes and processes, nanoseconds, and the part of its time that this may take: one in so
/// many. As on a live machine.
const REFRESH_NS: u64 = 2_000_000_000;
const REFRESH_PART: u64 = 1_000;

/// The last observation of nodes and processes.
#[derive(Debug, Default)]
pub(super) struct PlacementCache {
    nodes: Vec<NodeView>,
    owners: Vec<OwnerView>,
    next_ns: u64,
    moved: u64,
}

impl SimHost {
    /// Sets the sizes of the memory nodes, numbered from 0. Their distances are the kernel's defaults: 10 to itself, 20
    /// to any other.
    #[must_use]
    pub fn with_nodes(mut self, totals: &[Pages]) -> Self {
        assert!(self.processes.is_empty(), "set the nodes before adding processes");
        self.memory.nodes = Nodes::new(totals);
        self
    }

    /// Sets the distances between nodes: one row per node, as in the kernel's SLIT.
    #[must_use]
    pub fn with_distances(mut self, distances: &[&[u32]]) -> Self {
        self.memory.nodes.set_distances(distances);
        self
    }

    /// Takes a node offline and moves its frames to the others. Returns false, and does nothing, if these have too
    /// little room.
    pub fn remove_node(&mut self, node: u16) -> bool {
        self.memory.remove_node(NodeKey(node))
    }

    /// Brings a node back online, empty.
    pub fn restore_node(&mut self, node: u16) {
        self.memory.restore_node(NodeKey(node));
    }

    /// Binds a process to the processors of another node. Its pages stay where they are.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn set_home(&mut self, owner: OwnerKey, node: u16) {
        assert!(self.memory.nodes.has(NodeKey(node)), "there is no node {node}");
        self.memory.owners[owner.0 as usize].numa.home = NodeKey(node);
    }

    pub fn set_nice(&mut self, owner: OwnerKey, nice: i8) {
        self.memory.owners[owner.0 as usize].numa.nice = nice;
    }

    /// The node that a page's frame is on, if it has one.
    pub fn node_of(&self, region: RegionKey, page: Vpn) -> Option<NodeKey> {
        let region = self.memory.region(region.0)?;
        self.memory.node_of(region, region.offset(page)?)
    }

    /// How many merged frames each node has.
    pub fn frames_by_node(&self) -> Vec<Pages> {
        self.memory.merged_by_node().into_iter().map(|frames| Pages(self.granularity.scale(frames.0))).collect()
    }

    /// How many pages of a process map merged frames on each node.
    pub fn merged_of(&self, owner: OwnerKey) -> BTreeMap<NodeKey, Pages> {
        let mut pages: BTreeMap<NodeKey, Pages> = BTreeMap::new();
        for region in self.memory.owners[owner.0 as usize].regions.iter().filter_map(|&key| self.memory.region(key)) {
            let merged = (0..region.len()).filter(|&page| region.backing[page as usize] == Backing::Merged);
            for node in merged.filter_map(|page| self.memory.node_of(region, page)) {
                *pages.entry(node).or_default() += Pages(self.granularity.get());
            }
        }
        pages
    }

    /// Frames moved by pagefold so far.
    pub fn moved(&self) -> u64 {
        self.granularity.scale(self.placement_cache.moved)
    }

    /// The nodes and processes as last observed, and the cost in nanoseconds.
    pub(super) fn observe_nodes(&mut self, owners: &[OwnerKey]) -> (Vec<NodeView>, Vec<OwnerView>, u64) {
        let mut price_ns = 0;
        if !self.memory.nodes.is_tracked() {
            return (Vec::new(), Vec::new(), 0);
        }
        if self.now_ns >= self.placement_cache.next_ns || self.placement_cache.owners.len() != owners.len() {
            let all_ns = owners.len() as u64 * self.costs.process_numa_ns;
            self.placement_cache.next_ns = self.now_ns + (all_ns * REFRESH_PART).max(REFRESH_NS);
            self.placement_cache.nodes = self.memory.nodes.views();
            let online = self.memory.nodes.online();
            let view = |&owner: &OwnerKey| {
                let numa = self.memory.owners[owner.0 as usize].numa;
                // If a process's node has no memory, it has no home.
                let home = Some(numa.home).filter(|&home| numa.bound && online.has(home));
                OwnerView { owner, home, nice: numa.nice, allowed: numa.allowed.and(online), placement: numa.placement }
            };
            let there = !self.placement_cache.nodes.is_empty();
            self.placement_cache.owners = owners.iter().filter(|_| there).map(view).collect();
            let files = (self.placement_cache.nodes.len() + self.placement_cache.owners.len()) as u64;
            price_ns = files * self.costs.process_numa_ns;
        }
        (self.placement_cache.nodes.clone(), self.placement_cache.owners.clone(), price_ns)
    }

    /// Finds merged pages in a run, and other shared ones. Returns what this would cost on a real machine, nanoseconds.
    pub(super) fn find_merged_pages(
        &self,
        run: &PageRun,
        charged_to: Option<LimitKey>,
        found: &mut Vec<MergedSample>,
        others: &mut Vec<StateSample>,
    ) -> u64 {
        let Some(region) = self.memory.region(run.region.0) else { return 0 };
        let mut cost_ns = 0;
        for number in run.first.0..run.first.0.saturating_add(u64::from(run.pages)) {
            let Some(offset) = region.offset(Vpn(number)) else { continue };
            cost_ns += self.costs.pagemap_ns;
            let state = self.memory.state(region, offset);
            if matches!(state, PageState::ZeroMapped | PageState::Shared) {
                others.push(StateSample { region: run.region, page: Vpn(number), state });
            }
            // We skip kpageflags for pages that pagemap shows as exclusive.
            if matches!(state, PageState::Merged | PageState::ZeroMapped | PageState::Shared) {
                cost_ns += self.costs.kpageflags_ns;
            }
            let Some(frame) = region.merged_frame(offset) else { continue };
            let MergedFrame { node, mapped, .. } = self.memory.frames[frame as usize];
            let charged = charged_to.is_some_and(|limit| self.is_charged(frame, limit));
            let page = Vpn(number);
            found.push(MergedSample { region: run.region, page, frame: frame.into(), node, charged, mappers: mapped });
        }
        cost_ns
    }

    pub(super) fn merged_zeros(&self) -> BTreeMap<OwnerKey, (LineageKey, Pages)> {
        let mut zeros = BTreeMap::new();
        for (_, region) in self.memory.live_regions() {
            let lineage = LineageKey(self.memory.owners[region.owner as usize].lineage.into());
            let found = region.backing.iter().filter(|backing| **backing == Backing::ZeroMerged).count();
            let (_, pages) = zeros.entry(OwnerKey(region.owner)).or_insert((lineage, Pages(0)));
            *pages += Pages(found as u64);
        }
        zeros
    }

    /// Records that we read pages from outside. The second read makes a page active (`mark_page_accessed`).
    pub(super) fn record_read(&mut self, run: &PageRun) {
        if !self.memory.nodes.is_tracked() {
            return;
        }
        let Some(region) = self.memory.region_mut(run.region.0) else { return };
        if region.reads.is_empty() {
            region.reads = vec![0; region.content.len()];
        }
        for number in run.first.0..run.first.0.saturating_add(u64::from(run.pages)) {
            if let Some(offset) = region.offset(Vpn(number)) {
                let reads = &mut region.reads[offset as usize];
                *reads = (*reads + 1).min(2);
            }
        }
    }

    pub(super) fn move_frames(&mut self, moves: &[Move], outcome: &mut Outcome) {
        for Move { region, page, node } in moves {
            let offset = self.memory.region(region.0).and_then(|region| region.offset(*page));
            let Some(offset) = offset else { continue };
            let result = self.memory.move_frame(region.0, offset, *node);
            self.placement_cache.moved += u64::from(result == MoveResult::Done);
            outcome.moved += u64::from(result != MoveResult::Refused);
            let cost_ns = if result == MoveResult::Done { self.costs.move_frame_ns } else { self.costs.pagemap_ns };
            outcome.move_ns += self.granularity.scale(cost_ns);
        }
        self.spend(outcome.move_ns);
    }
}
