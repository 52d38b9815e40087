//! A private page is allocated on the node of its process, at the first write. If that node is full or offline, we take
//! the nearest one with room (the kernel's zone lists). We never run out of memory: if no node has room, we use the
//! nearest one anyway, and its free memory stays at zero.

use super::{Backing, Memory, Region};
use pagefold_engine::host::NodeView;
use pagefold_engine::keys::{NodeKey, NodeSet};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::Pages;
use rustc_hash::FxHashMap;

/// The kernel's default distances (SLIT): to the node itself, and to any other.
const LOCAL_DISTANCE: u32 = 10;
const REMOTE_DISTANCE: u32 = 20;

/// The node that a process runs on, and the rules that place its pages.
#[derive(Clone, Copy, Debug)]
pub struct ProcessNuma {
    pub home: NodeKey,
    /// Whether the process is bound to `home`.
    pub bound: bool,
    pub nice: i8,
    pub allowed: NodeSet,
    pub placement: Placement,
}

impl Default for ProcessNuma {
    fn default() -> Self {
        Self { home: NodeKey(0), bound: true, nice: 0, allowed: NodeSet::ALL, placement: Placement::default() }
    }
}

#[derive(Clone, Debug)]
struct Node {
    total: u64,
    used: u64,
    online: bool,
    distances: Vec<u32>,
}

/// The nodes, numbered from 0. Empty on a machine with a single node.
#[derive(Clone, Debug, Default)]
pub struct Nodes(Vec<Node>);

impl Nodes {
    pub fn new(totals: &[Pages]) -> Self {
        if totals.len() < 2 {
            return Self::default();
        }
        let distances =
            |own| (0..totals.len()).map(|to| if to == own { LOCAL_DISTANCE } else { REMOTE_DISTANCE }).collect();
        let node =
            |(own, total): (usize, &Pages)| Node { total: total.0, used: 0, online: true, distances: distances(own) };
        Self(totals.iter().enumerate().map(node).collect())
    }

    pub(crate) fn set_distances(&mut self, distances: &[&[u32]]) {
        assert!(distances.len() == self.0.len() && distances.iter().all(|row| row.len() == self.0.len()));
        for (node, row) in self.0.iter_mut().zip(distances) {
            node.distances = row.to_vec();
        }
    }

    /// Whether we have to track where frames are.
    pub fn is_tracked(&self) -> bool {
        !self.0.is_empty()
    }

    pub(crate) fn has(&self, node: NodeKey) -> bool {
        usize::from(node.0) < self.0.len().max(1)
    }

    pub(crate) fn online(&self) -> NodeSet {
        (0..).map(NodeKey).zip(&self.0).filter(|(_, node)| node.online).map(|(key, _)| key).collect()
    }

    fn room(&self, node: NodeKey) -> u64 {
        let Node { total, used, online, .. } = &self.0[usize::from(node.0)];
        if *online { total.saturating_sub(*used) } else { 0 }
    }

    /// Allocates a frame on the wanted node, or on the nearest allowed one with room.
    fn allocate(&mut self, wanted: NodeKey, allowed: NodeSet) -> NodeKey {
        if !self.is_tracked() {
            return NodeKey(0);
        }
        let online = self.online();
        // A process whose nodes are all offline may use the others (kernel/cgroup/cpuset.c).
        let allowed = if allowed.and(online).0 == 0 { online } else { allowed.and(online) };
        let at = if allowed.has(wanted) && self.room(wanted) > 0 {
            wanted
        } else {
            let distances = &self.0[usize::from(wanted.0)].distances;
            let nearest = (0..).map(NodeKey).zip(distances).filter(|(node, _)| allowed.has(*node));
            let nearest = nearest.min_by_key(|&(node, distance)| (self.room(node) == 0, distance));
            nearest.map_or(wanted, |(node, _)| node)
        };
        self.allocate_at(at);
        at
    }

    fn allocate_at(&mut self, node: NodeKey) {
        if let Some(node) = self.0.get_mut(usize::from(node.0)) {
            node.used += 1;
        }
    }

    fn free(&mut self, node: NodeKey) {
        if let Some(node) = self.0.get_mut(usize::from(node.0)) {
            node.used -= 1;
        }
    }

    /// The nodes that pagefold sees. If fewer than two are online, it sees none.
    pub(crate) fn views(&self) -> Vec<NodeView> {
        let online = || (0_u16..).zip(&self.0).filter(|(_, node)| node.online);
        if online().count() < 2 {
            return Vec::new();
        }
        let view = |(key, node): (u16, &Node)| NodeView {
            node: NodeKey(key),
            total: Pages(node.total),
            free: Pages(node.total.saturating_sub(node.used)),
            distances: online().map(|(to, _)| node.distances[usize::from(to)]).collect(),
        };
        online().map(view).collect()
    }

    /// The frames in use on each node.
    pub fn used(&self) -> Vec<u64> {
        self.0.iter().map(|node| node.used).collect()
    }
}

impl Region {
    /// The node of a page's private or fork-shared frame.
    fn private_node(&self, page: usize) -> NodeKey {
        self.nodes.get(page).copied().unwrap_or(self.node)
    }

    #[cfg(test)]
    pub(crate) fn tracked_nodes(&self) -> usize {
        self.nodes.len()
    }

    fn set_node(&mut self, page: usize, node: NodeKey) {
        if self.nodes.is_empty() {
            if node == self.node {
                return;
            }
            self.nodes = vec![self.node; self.content.len()];
        }
        self.nodes[page] = node;
    }
}

impl Memory {
    /// The node of the frame that a page maps, if any.
    pub fn node_of(&self, region: &Region, page: u32) -> Option<NodeKey> {
        let page = page as usize;
        match region.backing[page] {
            Backing::Merged => Some(self.frames[region.frame[page] as usize].node),
            Backing::Private | Backing::Forked => Some(region.private_node(page)),
            Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged => None,
        }
    }

    /// Allocates frames for the private pages of a new region, on the node of its process.
    pub fn place_pages(&mut self, key: u32) {
        if !self.nodes.is_tracked() {
            return;
        }
        let Some(mut region) = self.regions[key as usize].take() else { return };
        let numa = self.owners[region.owner as usize].numa;
        region.node = numa.home;
        for page in 0..region.backing.len() {
            if region.backing[page] == Backing::Private {
                let node = self.nodes.allocate(region.node, numa.allowed);
                region.set_node(page, node);
            }
        }
        self.regions[key as usize] = Some(region);
    }

    /// Allocates a private frame for a page, on the node of its process.
    pub(super) fn allocate_private(&mut self, key: u32, page: u32) {
        if !self.nodes.is_tracked() {
            return;
        }
        let Some(region) = self.regions[key as usize].as_deref_mut() else { return };
        let numa = self.owners[region.owner as usize].numa;
        let node = self.nodes.allocate(numa.home, numa.allowed);
        region.set_node(page as usize, node);
        if let Some(reads) = region.reads.get_mut(page as usize) {
            *reads = 0;
        }
    }

    pub(super) fn free_private(&mut self, region: u32, page: usize) {
        let node = self.region(region).map_or(NodeKey(0), |region| region.private_node(page));
        self.nodes.free(node);
    }

    /// Counts a merged frame as used, on its node.
    pub(super) fn allocate_merged(&mut self, frame: u32) {
        self.nodes.allocate_at(self.frames[frame as usize].node);
    }

    /// Counts a merged frame as free.
    pub(super) fn free_merged(&mut self, frame: u32) {
        self.nodes.free(self.frames[frame as usize].node);
    }

    /// Moves the merged frame of a page, for all pages that map it (`move_pages` with `MPOL_MF_MOVE_ALL`). Refuses if
    /// the page isn't merged, the process may not use the node, or the node is full.
    pub(crate) fn move_frame(&mut self, key: u32, page: u32, to: NodeKey) -> MoveResult {
        let found = self.region(key).and_then(|region| Some((region.merged_frame(page)?, region.owner)));
        let Some((frame, owner)) = found else { return MoveResult::Refused };
        let allowed = self.owners[owner as usize].numa.allowed.and(self.nodes.online());
        let from = self.frames[frame as usize].node;
        if !allowed.has(to) {
            return MoveResult::Refused;
        }
        if from == to {
            return MoveResult::There;
        }
        if self.nodes.room(to) == 0 {
            return MoveResult::Refused;
        }
        self.free_merged(frame);
        self.frames[frame as usize].node = to;
        self.allocate_merged(frame);
        MoveResult::Done
    }

    /// Takes a node offline and moves its frames to the others. Returns false, and does nothing, if these have too
    /// little room or there are none.
    pub(crate) fn remove_node(&mut self, gone: NodeKey) -> bool {
        let others: Vec<NodeKey> = (0..)
            .map(NodeKey)
            .take(self.nodes.0.len())
            .filter(|&node| node != gone && self.nodes.online().has(node))
            .collect();
        let room: u64 = others.iter().map(|&node| self.nodes.room(node)).sum();
        let Some(leaving) = self.nodes.0.get_mut(usize::from(gone.0)).filter(|node| node.online) else { return false };
        if others.is_empty() || leaving.used > room {
            return false;
        }
        leaving.online = false;
        // A fork-shared frame moves only once, for all its pages.
        let mut went: FxHashMap<u32, NodeKey> = FxHashMap::default();
        for at in 0..self.regions.len() {
            let Some(mut region) = self.regions[at].take() else { continue };
            let allowed = self.owners[region.owner as usize].numa.allowed;
            for page in 0..region.backing.len() {
                if !matches!(region.backing[page], Backing::Private | Backing::Forked)
                    || region.private_node(page) != gone
                {
                    continue;
                }
                let shared = (region.backing[page] == Backing::Forked).then(|| region.frame[page]);
                let node = shared.and_then(|share| went.get(&share).copied()).unwrap_or_else(|| {
                    self.nodes.free(gone);
                    self.nodes.allocate(gone, allowed)
                });
                went.extend(shared.map(|share| (share, node)));
                region.set_node(page, node);
            }
            self.regions[at] = Some(region);
        }
        for frame in self.frames.iter_mut().filter(|frame| frame.mapped > 0 && frame.node == gone) {
            self.nodes.free(gone);
            frame.node = self.nodes.allocate(gone, NodeSet::ALL);
        }
        true
    }

    pub(crate) fn restore_node(&mut self, back: NodeKey) {
        if let Some(node) = self.nodes.0.get_mut(usize::from(back.0)) {
            node.online = true;
        }
    }

    pub(crate) fn merged_by_node(&self) -> Vec<Pages> {
        let mut frames = vec![Pages(0); self.nodes.0.len().max(1)];
        for frame in self.frames.iter().filter(|frame| frame.mapped > 0) {
            frames[usize::from(frame.node.0)] += Pages(1);
        }
        frames
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveResult {
    Done,
    There,
    Refused,
}
