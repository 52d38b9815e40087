//! Collects the merged frames: their nodes, and the processes that map them.
//!
//! Pages with the same frame number are one merged page, so inspecting all marked spans shows which processes share
//! each frame. [`super::placer`] places frames with the same sharers together. Reports use the same counts.

use crate::host::{MergedSample, NodeView, OwnerView, PageRun};
use crate::keys::{NodeKey, OwnerKey, RegionKey};
use crate::placement::policy::{Latencies, Placement};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::units::{Pages, Vpn, as_bytes, index};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Up to this many processes, each counts as a sharer of its own. Beyond that, processes with the same home node, nice
/// value, allowed nodes and policy count as one sharer. Otherwise there'd be more sets of sharers than we can keep.
const OWNERS_MAX: usize = 16;
/// We count at most `SHARERS_MAX` kinds of sharers of one frame, and remember at most `EXTENDED_MAX` results of adding
/// a sharer to a set. So a program that forks into many processes with different nice values or nodes costs us some
/// tens of megabytes at most. Beyond these bounds, further sharers don't count.
const SHARERS_MAX: usize = 2 * OWNERS_MAX;
const EXTENDED_MAX: usize = 1 << 14;
/// The distance of a node from itself (SLIT, ACPI).
const LOCAL_DISTANCE: u32 = 10;
/// The assumed distance of the nearest other node if we know none.
const REMOTE_DISTANCE: u32 = 20;

/// Pages of one process, by node.
pub(super) type PagesByNode = BTreeMap<NodeKey, u64>;

/// A process's copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCopy {
    pub owner: OwnerKey,
    /// Whether the process used its copy before the merge.
    pub active: bool,
}

/// The sharers of a frame: each process's copy, and how many sharers it stands for. In a group, the copy of its first
/// process stands for all members.
pub(super) type SharerSet = BTreeMap<PageCopy, u32>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub node: NodeKey,
    /// The number of the frame's [`SharerSet`].
    pub sharers: u32,
    /// The process where we first found the frame.
    pub first: OwnerKey,
    /// The last copy of the frame that we found.
    last: PageCopy,
    /// A page that maps the frame.
    pub region: RegionKey,
    pub page: Vpn,
}

/// The group of processes that a process belongs to, if we count sharers by group.
#[derive(Clone, Copy, Debug)]
struct Group {
    first: OwnerKey,
    /// At most this many of its processes count as sharers of one frame.
    most: u32,
}

/// The merged frames found so far.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    frames: FxHashMap<u64, Frame>,
    groups: BTreeMap<OwnerKey, Group>,
    /// All sets of sharers found, by number. The first is empty.
    sets: Vec<SharerSet>,
    numbers: FxHashMap<SharerSet, u32>,
    /// The set that we get by adding a sharer to a set, or (if the flag is set) by noting that a sharer's copy is
    /// active.
    extended: FxHashMap<(u32, PageCopy, bool), u32>,
    /// Pages that map merged frames.
    mapped: BTreeMap<OwnerKey, PagesByNode>,
}

impl Inventory {
    /// An empty inventory. `home` returns a process's home node, if known.
    pub fn new(owners: &[OwnerView], home: impl Fn(&OwnerView) -> Option<NodeKey>) -> Self {
        let mut firsts: FxHashMap<_, OwnerKey> = FxHashMap::default();
        let mut groups = BTreeMap::new();
        let are_many = owners.len() > OWNERS_MAX;
        for view in owners {
            let first = match home(view) {
                Some(home) if are_many => {
                    *firsts.entry((home, view.nice, view.allowed, view.placement)).or_insert(view.owner)
                }
                _ => view.owner,
            };
            // Only the policy by nice value depends on how many sharers a node has.
            let most = if view.placement == Placement::Priority { u32::MAX } else { 1 };
            groups.insert(view.owner, Group { first, most });
        }
        Self { groups, ..Self::default() }
    }

    /// Adds a page of `owner` that maps a merged frame. `active`: the process's copy was active before the merge. Add
    /// all pages of one process before those of the next.
    pub fn add(&mut self, owner: OwnerKey, active: bool, sample: &MergedSample) {
        *self.mapped.entry(owner).or_default().entry(sample.node).or_default() += 1;
        let MergedSample { region, page, frame, node, .. } = *sample;
        let before = self.frames.get(&frame).copied();
        let again = before.is_some_and(|before| before.last.owner == owner);
        // A process that maps the frame twice counts once, as active if one of the two copies was.
        if again && (!active || before.is_some_and(|before| before.last.active)) {
            return;
        }
        let group = self.groups.get(&owner).copied().unwrap_or(Group { first: owner, most: 1 });
        let copy = PageCopy { owner: group.first, active };
        let set = before.map_or(0, |frame| frame.sharers);
        let sharers = match self.extended.get(&(set, copy, again)) {
            Some(&set) => set,
            None => self.extend(set, copy, again, group.most),
        };
        let last = PageCopy { owner, active };
        let entry = self.frames.entry(frame).or_insert(Frame { node, sharers, first: owner, last, region, page });
        entry.sharers = sharers;
        entry.last = last;
    }

    /// Adds the sharer `copy` to the set `before` or, if we've found that sharer `again`, notes that its copy is
    /// active. Returns the number of the new set, which counts at most `most` sharers like `copy`. If there are too
    /// many sets, or too many sharers in this one, returns `before`.
    fn extend(&mut self, before: u32, copy: PageCopy, again: bool, most: u32) -> u32 {
        if self.sets.is_empty() {
            self.sets.push(SharerSet::new());
        }
        let known = &self.sets[index(before)];
        if self.extended.len() >= EXTENDED_MAX || known.len() >= SHARERS_MAX && !known.contains_key(&copy) {
            return before;
        }
        let mut set = known.clone();
        if again {
            if let Some(idle) = set.get_mut(&PageCopy { active: false, ..copy }) {
                *idle -= 1;
            }
        }
        let number = set.entry(copy).or_default();
        *number = (*number + 1).min(most);
        set.retain(|_, number| *number > 0);
        let next = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        let number = *self.numbers.entry(set.clone()).or_insert(next);
        if number == next {
            self.sets.push(set);
        }
        self.extended.insert((before, copy, again), number);
        number
    }

    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// The frames, by their set of sharers and the process where we first found them. All members of a group have the
    /// same set, so without the process, some members could get more than their share.
    pub fn by_sharers(&self) -> BTreeMap<(u32, OwnerKey), Vec<&Frame>> {
        let mut by_sharers: BTreeMap<_, Vec<&Frame>> = BTreeMap::new();
        for frame in self.frames.values() {
            by_sharers.entry((frame.sharers, frame.first)).or_default().push(frame);
        }
        by_sharers
    }

    /// The set of sharers with this number.
    pub fn sharers(&self, number: u32) -> &SharerSet {
        &self.sets[index(number)]
    }

    /// The processes whose home node we know: the node that a process runs on, or the node of most of its private pages
    /// (`private`), or the node of most of its merged pages.
    pub fn homes(
        &self,
        owners: &[OwnerView],
        private: &BTreeMap<OwnerKey, PagesByNode>,
    ) -> BTreeMap<OwnerKey, OwnerView> {
        let mut homes = BTreeMap::new();
        for view in owners {
            let pages = private.get(&view.owner).or(self.mapped.get(&view.owner));
            let home = view.home.or(most(pages));
            if home.is_some() {
                homes.insert(view.owner, OwnerView { home, ..*view });
            }
        }
        homes
    }

    /// The summary for reports. The policies would place `misplaced` frames elsewhere.
    pub fn summary(
        &self,
        homes: &BTreeMap<OwnerKey, OwnerView>,
        nodes: &[NodeView],
        latencies: Latencies,
        misplaced: Pages,
    ) -> PlacementSummary {
        let mut frames = PagesByNode::new();
        for frame in self.frames.values() {
            *frames.entry(frame.node).or_default() += 1;
        }
        let mut summary = PlacementSummary { misplaced, ..PlacementSummary::default() };
        for &NodeView { node, total, free, .. } in nodes {
            let frames = Pages(frames.get(&node).copied().unwrap_or(0));
            summary.nodes.push(NodeTotal { node, total, free, frames });
        }
        for (&owner, by_node) in &self.mapped {
            let Some(&OwnerView { home: Some(home), nice, placement, .. }) = homes.get(&owner) else { continue };
            let local = by_node.get(&home).copied().unwrap_or(0);
            summary.owners.push(OwnerPlacement {
                owner,
                home,
                nice,
                placement,
                local: Pages(local),
                remote: Pages(by_node.values().sum::<u64>() - local),
                by_node: by_node.iter().map(|(&node, &pages)| NodePages(node, Pages(pages))).collect(),
                tax: tax(by_node, home, nodes, latencies),
            });
        }
        summary
    }
}

/// Where one process's merged pages are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnerPlacement {
    #[serde(skip)]
    pub owner: OwnerKey,
    #[serde(rename = "node")]
    pub home: NodeKey,
    /// The process's nice value, -20 to 19.
    pub nice: i8,
    #[serde(rename = "policy")]
    pub placement: Placement,
    /// The process's merged pages on its home node.
    #[serde(rename = "local_bytes", with = "as_bytes")]
    pub local: Pages,
    /// The process's merged pages on other nodes.
    #[serde(rename = "remote_bytes", with = "as_bytes")]
    pub remote: Pages,
    /// The process's merged pages by node, ascending.
    pub by_node: Vec<NodePages>,
    /// How much longer accesses to the process's merged pages take on average than on its home node: 0.56 is 56 %.
    pub tax: f64,
}

/// A number of pages on a node. In JSON, a pair of node and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePages(pub NodeKey, #[serde(with = "as_bytes")] pub Pages);

/// A node's memory and merged frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTotal {
    pub node: NodeKey,
    #[serde(rename = "total_bytes", with = "as_bytes")]
    pub total: Pages,
    #[serde(rename = "free_bytes", with = "as_bytes")]
    pub free: Pages,
    /// The number of merged frames on the node.
    #[serde(rename = "merged_bytes", with = "as_bytes")]
    pub frames: Pages,
}

/// Where merged pages were at the last inspection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlacementSummary {
    /// The nodes that have memory.
    pub nodes: Vec<NodeTotal>,
    /// The processes that have merged pages.
    pub owners: Vec<OwnerPlacement>,
    /// The number of frames that the policies would place on another node.
    pub misplaced: Pages,
}

/// The pages that may be merged: marked spans, and regions where we merged pages on request.
pub(crate) fn merged_runs(table: &RegionTable) -> VecDeque<PageRun> {
    let mut runs = VecDeque::new();
    // We keep the spans of one process together, so that we notice a frame it maps twice.
    let mut regions: Vec<&Region> = table.iter().collect();
    regions.sort_by_key(|region| region.view.owner);
    for region in regions {
        if may_be_merged_anywhere(region) {
            runs.push_back(region.run(region.view.first, region.view.pages));
        } else {
            for mark in &region.marks.spans {
                runs.push_back(region.run(mark.first, mark.pages));
            }
        }
    }
    runs
}

/// Whether a region's pages may be merged outside our marks as well.
pub(crate) fn may_be_merged_anywhere(region: &Region) -> bool {
    region.is_marked_whole() || !region.usage.merged.is_empty()
}

/// Takes at most `most` pages from the front of the runs.
pub(crate) fn take_pages(runs: &mut VecDeque<PageRun>, most: u64) -> Vec<PageRun> {
    let mut taken = Vec::new();
    let mut left = most;
    while left > 0 {
        let Some(next) = runs.front_mut() else { break };
        let pages = u32::try_from(left).unwrap_or(u32::MAX).min(next.pages);
        taken.push(PageRun { pages, ..*next });
        left -= u64::from(pages);
        next.first = next.first + u64::from(pages);
        next.pages -= pages;
        if next.pages == 0 {
            runs.pop_front();
        }
    }
    taken
}

pub(super) fn most(nodes: Option<&PagesByNode>) -> Option<NodeKey> {
    nodes?.iter().max_by_key(|&(_, &pages)| pages).map(|(&node, _)| node)
}

/// See [`OwnerPlacement::tax`].
fn tax(by_node: &PagesByNode, home: NodeKey, nodes: &[NodeView], latencies: Latencies) -> f64 {
    let Some(from) = nodes.iter().find(|view| view.node == home) else { return 0.0 };
    let mut nearest = u32::MAX;
    for (view, &distance) in nodes.iter().zip(&from.distances) {
        if view.node != home {
            nearest = nearest.min(distance);
        }
    }
    let nearest = if nearest == u32::MAX { REMOTE_DISTANCE } else { nearest };
    let mut weighted = 0.0;
    for (view, &distance) in nodes.iter().zip(&from.distances) {
        let distance = if view.node == home { LOCAL_DISTANCE } else { distance };
        weighted += by_node.get(&view.node).copied().unwrap_or(0) as f64 * latencies.tax(distance, nearest);
    }
    weighted / by_node.values().sum::<u64>().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::NodeSet;

    #[test]
    fn the_sets_of_sharers_are_bounded_however_many_processes_share_frames() {
        const OWNERS: u32 = 200;
        const FRAMES: u64 = 8_000;
        // Processes whose homes we don't know are sharers of their own.
        let view = |owner| OwnerView {
            owner: OwnerKey(owner),
            home: None,
            nice: 0,
            allowed: NodeSet::ALL,
            placement: Placement::default(),
        };
        let owners: Vec<_> = (0..OWNERS).map(view).collect();
        let mut inventory = Inventory::new(&owners, |_| None);
        for owner in 0..OWNERS {
            for frame in 0..FRAMES {
                // Each frame has a different set of sharers.
                if crate::random::mix(u64::from(owner) << 32 | frame) % 4 == 0 {
                    let (region, page, node) = (RegionKey(owner), Vpn(frame), NodeKey(0));
                    let sample = MergedSample { region, page, frame, node, charged: false, mappers: 0 };
                    inventory.add(OwnerKey(owner), false, &sample);
                }
            }
        }
        assert_eq!(inventory.len() as u64, FRAMES);
        assert!(inventory.sets.len() <= EXTENDED_MAX + 1, "{}", inventory.sets.len());
        assert!(inventory.sets.iter().all(|set| set.len() <= SHARERS_MAX));
        let of_first = inventory.sharers(inventory.frames[&0].sharers);
        assert!(!of_first.is_empty() && inventory.mapped.len() == OWNERS as usize);
    }
}
