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

/// Up to this many processes, each is a sharer of its own. If there are more, processes with the same home node, nice
/// value, allowed nodes and policy form a group, or there would be more sets of sharers than we can keep.
const OWNERS_MAX: usize = 16;
/// The distance of a node from itself (SLIT, ACPI).
const LOCAL_DISTANCE: u32 = 10;
/// The assumed distance of the nearest other node if we know none.
const REMOTE_DISTANCE: u32 = 20;

/// Pages of one process, by node.
pub(super) type PagesByNode = BTreeMap<NodeKey, u64>;

/// The sharers of a frame, ascending: a process (or the first of a group), whether its copy was active, and how many
/// such sharers there are.
pub(super) type SharerSet = Vec<((OwnerKey, bool), u32)>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub node: NodeKey,
    /// The number of its [`SharerSet`].
    pub sharers: u32,
    /// The process where we first found it.
    pub first: OwnerKey,
    /// The process where we last found it, and whether that copy was active.
    last: (OwnerKey, bool),
    /// A page that maps it.
    pub region: RegionKey,
    pub page: Vpn,
}

/// A process's group.
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
    /// The set that a set becomes with another sharer, or when another copy of a sharer turns out to be active.
    extended: FxHashMap<(u32, OwnerKey, bool, bool), u32>,
    /// Pages that map merged frames.
    mapped: BTreeMap<OwnerKey, PagesByNode>,
}

impl Inventory {
    /// An empty inventory. `home` returns a process's home node, if known.
    pub fn new(owners: &[OwnerView], home: impl Fn(&OwnerView) -> Option<NodeKey>) -> Self {
        let is_same_group = |a: &OwnerView, b: &OwnerView| {
            let traits = |view: &OwnerView| Some((home(view)?, view.nice, view.allowed, view.placement));
            a.owner == b.owner || owners.len() > OWNERS_MAX && traits(a).is_some() && traits(a) == traits(b)
        };
        let mut firsts: Vec<&OwnerView> = Vec::new();
        let mut groups = BTreeMap::new();
        for view in owners {
            let first = firsts.iter().find(|first| is_same_group(first, view)).copied().unwrap_or_else(|| {
                firsts.push(view);
                view
            });
            // Only shares by nice value depend on the number of sharers on a node.
            let most = if view.placement == Placement::Priority { u32::MAX } else { 1 };
            groups.insert(view.owner, Group { first: first.owner, most });
        }
        Self { groups, ..Self::default() }
    }

    /// Adds a page of `owner` that maps a merged frame. `active`: the process's copy was active before the merge. Pages
    /// of one process must be added one after the other.
    pub fn add(&mut self, owner: OwnerKey, active: bool, sample: &MergedSample) {
        *self.mapped.entry(owner).or_default().entry(sample.node).or_default() += 1;
        let MergedSample { region, page, frame, node, .. } = *sample;
        let before = self.frames.get(&frame).copied();
        // A process that maps the frame twice counts once, as active if one of the two copies was.
        let again = before.filter(|before| before.last.0 == owner).map(|before| before.last.1);
        if again.is_some_and(|was_active| was_active || !active) {
            return;
        }
        let (set, again) = (before.map_or(0, |frame| frame.sharers), again.is_some());
        let group = self.groups.get(&owner).copied().unwrap_or(Group { first: owner, most: 1 });
        let sharers = match self.extended.get(&(set, group.first, active, again)) {
            Some(&set) => set,
            None => self.extend(set, group, active, again),
        };
        let entry = self.frames.entry(frame);
        let entry = entry.or_insert(Frame { node, sharers, first: owner, last: (owner, active), region, page });
        (entry.sharers, entry.last) = (sharers, (owner, active));
    }

    /// The number of the set with one more sharer than the set `before`, or (`again`) with the sharer active now.
    fn extend(&mut self, before: u32, group: Group, active: bool, again: bool) -> u32 {
        if self.sets.is_empty() {
            self.sets.push(SharerSet::new());
        }
        let mut set: BTreeMap<_, u32> = self.sets[index(before)].iter().copied().collect();
        if let Some(idle) = set.get_mut(&(group.first, false)).filter(|_| again) {
            *idle -= 1;
        }
        let number = set.entry((group.first, active)).or_default();
        *number = (*number + 1).min(group.most);
        let set: SharerSet = set.into_iter().filter(|&(_, number)| number > 0).collect();
        let next = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        let number = *self.numbers.entry(set.clone()).or_insert(next);
        if number == next {
            self.sets.push(set);
        }
        self.extended.insert((before, group.first, active, again), number);
        number
    }

    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// The frames, by their set of sharers and the process where we first found them. We keep frames that one process
    /// shares with others of a group apart, so that each process gets its share of them.
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

    /// Each process's home node, if we know it: the node it runs on, else the node of most of its private pages
    /// (`private`), else of most of its merged pages.
    pub fn homes(
        &self,
        owners: &[OwnerView],
        private: &BTreeMap<OwnerKey, PagesByNode>,
    ) -> BTreeMap<OwnerKey, (OwnerView, NodeKey)> {
        let with_home = |view: &OwnerView| {
            let pages = || private.get(&view.owner).or_else(|| self.mapped.get(&view.owner));
            let home = view.home.or_else(|| most(pages()))?;
            Some((view.owner, (*view, home)))
        };
        owners.iter().filter_map(with_home).collect()
    }

    /// The summary for reports. The policies would place `misplaced` frames elsewhere.
    pub fn summary(
        &self,
        homes: &BTreeMap<OwnerKey, (OwnerView, NodeKey)>,
        nodes: &[NodeView],
        latencies: Latencies,
        misplaced: Pages,
    ) -> PlacementSummary {
        let mut frames = PagesByNode::new();
        for frame in self.frames.values() {
            *frames.entry(frame.node).or_default() += 1;
        }
        let total = |view: &NodeView| NodeTotal {
            node: view.node,
            total: view.total,
            free: view.free,
            frames: Pages(frames.get(&view.node).copied().unwrap_or(0)),
        };
        let of_owner = |(owner, by_node): (&OwnerKey, &PagesByNode)| {
            let &(view, home) = homes.get(owner)?;
            let local = by_node.get(&home).copied().unwrap_or(0);
            Some(OwnerPlacement {
                owner: *owner,
                home,
                nice: view.nice,
                placement: view.placement,
                local: Pages(local),
                remote: Pages(by_node.values().sum::<u64>() - local),
                by_node: by_node.iter().map(|(&node, &pages)| NodePages(node, Pages(pages))).collect(),
                tax: tax(by_node, home, nodes, latencies),
            })
        };
        PlacementSummary {
            nodes: nodes.iter().map(total).collect(),
            owners: self.mapped.iter().filter_map(of_owner).collect(),
            misplaced,
        }
    }
}

/// Where one process's merged pages are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnerPlacement {
    #[serde(skip)]
    pub owner: OwnerKey,
    #[serde(rename = "node")]
    pub home: NodeKey,
    /// Its nice value, -20 to 19.
    pub nice: i8,
    #[serde(rename = "policy")]
    pub placement: Placement,
    /// Its merged pages on its home node.
    #[serde(rename = "local_bytes", with = "as_bytes")]
    pub local: Pages,
    /// Its merged pages on other nodes.
    #[serde(rename = "remote_bytes", with = "as_bytes")]
    pub remote: Pages,
    /// Its merged pages by node, ascending.
    pub by_node: Vec<NodePages>,
    /// How much longer an access to its merged pages takes than on its home node, on average: 0.56 is 56 %.
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
    /// The number of merged frames on it.
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
        let key = region.view.key;
        let mut add = |mut first: Vpn, mut left: u64| {
            while left > 0 {
                let pages = u32::try_from(left).unwrap_or(u32::MAX);
                runs.push_back(PageRun { region: key, first, pages });
                (first, left) = (first + u64::from(pages), left - u64::from(pages));
            }
        };
        if region.is_marked_whole() || !region.usage.merged.is_empty() {
            add(region.view.first, region.view.pages.0);
        } else {
            region.marks.spans.iter().for_each(|mark| add(mark.first, mark.pages.0));
        }
    }
    runs
}

pub(super) fn most(nodes: Option<&PagesByNode>) -> Option<NodeKey> {
    nodes?.iter().max_by_key(|&(_, &pages)| pages).map(|(&node, _)| node)
}

/// See [`OwnerPlacement::tax`].
fn tax(by_node: &PagesByNode, home: NodeKey, nodes: &[NodeView], latencies: Latencies) -> f64 {
    let Some(from) = nodes.iter().find(|view| view.node == home) else { return 0.0 };
    let others = nodes.iter().zip(&from.distances).filter(|(view, _)| view.node != home);
    let nearest = others.map(|(_, &distance)| distance).min().unwrap_or(REMOTE_DISTANCE);
    let all: u64 = by_node.values().sum();
    let weighted = nodes.iter().zip(&from.distances).map(|(view, &distance)| {
        let distance = if view.node == home { LOCAL_DISTANCE } else { distance };
        by_node.get(&view.node).copied().unwrap_or(0) as f64 * latencies.tax(distance, nearest)
    });
    weighted.sum::<f64>() / all.max(1) as f64
}
