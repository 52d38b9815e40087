//! Memory nodes: how much there is on each, where a frame lives, and moving it.
//!
//! A private page lives where its process ran when it was first written; if that node is full or away, on the nearest
//! with room (the kernel's zone lists). The simulator never runs out of memory: where no node has room, the frame lives
//! on the nearest all the same, and nothing is free there.

use super::{Backing, Memory, Region};
use pagefold_core::host::NodeView;
use pagefold_core::keys::{NodeKey, NodeSet};
use pagefold_core::placement::policy::Placement;
use pagefold_core::units::Pages;
use rustc_hash::FxHashMap;

/// The kernel's distances (SLIT): to itself, and to another node where the firmware does not tell.
const NEAR: u32 = 10;
const FAR: u32 = 20;

/// Where a process runs, and what placing its pages asks of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessNuma {
    pub(crate) home: NodeKey,
    /// It may run there only.
    pub(crate) bound: bool,
    pub(crate) nice: i8,
    pub(crate) allowed: NodeSet,
    pub(crate) placement: Placement,
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
    /// To each node.
    distances: Vec<u32>,
}

/// The nodes, numbered from 0. None are kept where there is but one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes(Vec<Node>);

impl Nodes {
    pub(crate) fn new(totals: &[Pages]) -> Self {
        if totals.len() < 2 {
            return Self::default();
        }
        let distances = |own| (0..totals.len()).map(|to| if to == own { NEAR } else { FAR }).collect();
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

    /// Whether anything has to be kept of where frames are.
    pub(crate) fn several(&self) -> bool {
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

    /// Takes a frame for a page: on the node wanted, or the nearest that is allowed and has room.
    fn take(&mut self, wanted: NodeKey, allowed: NodeSet) -> NodeKey {
        if !self.several() {
            return NodeKey(0);
        }
        let online = self.online();
        // A process all of whose nodes have gone may use the others (kernel/cgroup/cpuset.c).
        let allowed = if allowed.and(online).0 == 0 { online } else { allowed.and(online) };
        let at = if allowed.has(wanted) && self.room(wanted) > 0 {
            wanted
        } else {
            let distances = &self.0[usize::from(wanted.0)].distances;
            let nearest = (0..).map(NodeKey).zip(distances).filter(|(node, _)| allowed.has(*node));
            let nearest = nearest.min_by_key(|&(node, distance)| (self.room(node) == 0, distance));
            nearest.map_or(wanted, |(node, _)| node)
        };
        self.take_at(at);
        at
    }

    fn take_at(&mut self, node: NodeKey) {
        if let Some(node) = self.0.get_mut(usize::from(node.0)) {
            node.used += 1;
        }
    }

    fn give(&mut self, node: NodeKey) {
        if let Some(node) = self.0.get_mut(usize::from(node.0)) {
            node.used -= 1;
        }
    }

    /// The nodes as pagefold sees them: none, if fewer than two are there.
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

    #[cfg(test)]
    pub(crate) fn used(&self) -> Vec<u64> {
        self.0.iter().map(|node| node.used).collect()
    }
}

impl Region {
    /// The node of a page's own frame, or of one it shares by fork.
    fn own_node(&self, page: usize) -> NodeKey {
        self.nodes.get(page).copied().unwrap_or(self.node)
    }

    #[cfg(test)]
    pub(crate) fn keeps_nodes(&self) -> usize {
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
    /// The node that a page's frame is on, if it has one.
    pub(crate) fn node_of(&self, region: &Region, page: u32) -> Option<NodeKey> {
        let page = page as usize;
        match region.backing[page] {
            Backing::Merged => Some(self.frames[region.frame[page] as usize].node),
            Backing::Private | Backing::Forked => Some(region.own_node(page)),
            Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged => None,
        }
    }

    /// Gives the private pages of a new region their frames: on the node named, or where its process runs.
    pub(crate) fn settle(&mut self, key: u32, named: Option<NodeKey>) {
        if !self.nodes.several() {
            return;
        }
        let Some(mut region) = self.regions[key as usize].take() else { return };
        let place = self.owners[region.owner as usize].place;
        region.node = named.unwrap_or(place.home);
        for page in
            (0..region.backing.len()).filter(|&page| region.backing[page] == Backing::Private).collect::<Vec<_>>()
        {
            let node = self.nodes.take(region.node, place.allowed);
            region.set_node(page, node);
        }
        self.regions[key as usize] = Some(region);
    }

    /// A page gets a frame of its own, where its process runs.
    pub(super) fn take_frame(&mut self, key: u32, page: u32) {
        if !self.nodes.several() {
            return;
        }
        let Some(region) = self.regions[key as usize].as_deref_mut() else { return };
        let place = self.owners[region.owner as usize].place;
        let node = self.nodes.take(place.home, place.allowed);
        region.set_node(page as usize, node);
        if let Some(reads) = region.reads.get_mut(page as usize) {
            *reads = 0;
        }
    }

    /// A frame that a page had for itself, or shared by fork, is free.
    pub(super) fn give_own(&mut self, region: u32, page: usize) {
        let node = self.region(region).map_or(NodeKey(0), |region| region.own_node(page));
        self.nodes.give(node);
    }

    /// A merged frame comes into use, where it was found.
    pub(super) fn take_merged(&mut self, frame: u32) {
        self.nodes.take_at(self.frames[frame as usize].node);
    }

    /// A merged frame is used no longer.
    pub(super) fn give_merged(&mut self, frame: u32) {
        self.nodes.give(self.frames[frame as usize].node);
    }

    /// Moves the merged frame that a page maps, for all who map it (`move_pages` with `MPOL_MF_MOVE_ALL`). Refused if it
    /// is none, the process may not use the node, or nothing is free there.
    pub(crate) fn move_frame(&mut self, key: u32, page: u32, to: NodeKey) -> MoveResult {
        let found = self.region(key).and_then(|region| Some((region.merged_frame(page)?, region.owner)));
        let Some((frame, owner)) = found else { return MoveResult::Refused };
        let allowed = self.owners[owner as usize].place.allowed.and(self.nodes.online());
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
        self.give_merged(frame);
        self.frames[frame as usize].node = to;
        self.take_merged(frame);
        MoveResult::Done
    }

    /// Takes a node's memory offline: its frames move to the others. False, and nothing is done, if they have not the
    /// room, or there is no other.
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
        // A frame that relatives share is one to all of them.
        let mut went: FxHashMap<u32, NodeKey> = FxHashMap::default();
        for at in 0..self.regions.len() {
            let Some(mut region) = self.regions[at].take() else { continue };
            let allowed = self.owners[region.owner as usize].place.allowed;
            for page in 0..region.backing.len() {
                if !matches!(region.backing[page], Backing::Private | Backing::Forked) || region.own_node(page) != gone
                {
                    continue;
                }
                let shared = (region.backing[page] == Backing::Forked).then(|| region.frame[page]);
                let node = shared.and_then(|share| went.get(&share).copied()).unwrap_or_else(|| {
                    self.nodes.give(gone);
                    self.nodes.take(gone, allowed)
                });
                went.extend(shared.map(|share| (share, node)));
                region.set_node(page, node);
            }
            self.regions[at] = Some(region);
        }
        for frame in self.frames.iter_mut().filter(|frame| frame.mapped > 0 && frame.node == gone) {
            self.nodes.give(gone);
            frame.node = self.nodes.take(gone, NodeSet::ALL);
        }
        true
    }

    pub(crate) fn restore_node(&mut self, back: NodeKey) {
        if let Some(node) = self.nodes.0.get_mut(usize::from(back.0)) {
            node.online = true;
        }
    }

    /// Merged frames in use on each node.
    pub(crate) fn merged_by_node(&self) -> Vec<Pages> {
        let mut frames = vec![Pages(0); self.nodes.0.len().max(1)];
        for frame in self.frames.iter().filter(|frame| frame.mapped > 0) {
            frames[usize::from(frame.node.0)] += Pages(1);
        }
        frames
    }
}

/// What came of moving a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveResult {
    Done,
    There,
    Refused,
}
