//! Gives merged frames their places, on a machine with several memory nodes.
//!
//! When ksmd has merged something, every marked span is looked at for merged pages: pages with the same frame are one,
//! and who maps it is known then without asking. Frames with the same sharers are placed together, each node getting its
//! share by [`crate::placement`]. Frames that are where they may stay are left there, so that a second look finds nothing
//! to do: no page goes back and forth. What the look has counted is also what the reports show.

use crate::host::{MergedSample, Move, NodeView, OwnerView, PageRun, PageSample, Snapshot};
use crate::keys::{NodeKey, NodeSet, OwnerKey, RegionKey};
use crate::ledger::Ledger;
use crate::placement::policy::{Carry, Latencies, Placement, Sharer, rebalance, shares};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Pages looked at in one round.
const INSPECT_PAGES: u64 = 65_536;
/// What looking at a page costs, nanoseconds: assumed.
const INSPECT_PAGE_NS: u64 = 150;
/// What moving a frame costs before it has been measured, nanoseconds.
const MOVE_NS: u64 = 5_000;
/// Frames moved in one round: the round should not take much longer than the share of a core allows.
const MOVES_PER_ROUND: u64 = 4_096;
/// Pages that must be saved more, or less, for another look.
const GROWTH_MIN: u64 = 64;
/// Private pages of a process that are remembered by their nodes, after which older ones count half.
const MEMORY_MAX: u64 = 8_192;
/// First pause after a look, nanoseconds; it doubles while looks change nothing.
const PAUSE_NS: u64 = 1_000_000_000;
/// Longest such pause, nanoseconds.
const PAUSE_MAX_NS: u64 = 600_000_000_000;
/// But where a look is long, at least so many times the CPU time of one.
const PAUSE_INSPECTIONS: u64 = 64;
/// A difference of so many parts of the frames with the same sharers is left as it is.
const SLACK: usize = 200;
/// The part of a node's memory that must stay free.
const RESERVE: u64 = 32;
/// Up to so many processes are told apart. Of more, those with the same home, nice value and policy are taken for similar of
/// each other: there are more sets of sharers than could be kept.
const OWNERS_MAX: usize = 16;

/// A merged frame.
#[derive(Clone, Copy, Debug)]
struct Frame {
    node: NodeKey,
    /// Who maps it: an index into the sets of sharers.
    sharers: u32,
    /// Who was found first to map it, who last, and whether his copy was active.
    first: OwnerKey,
    last: (OwnerKey, bool),
    /// A page that maps it.
    region: RegionKey,
    page: Vpn,
}

/// The merged frames, as far as they have been looked at.
#[derive(Debug, Default)]
struct Count {
    frames: FxHashMap<u64, Frame>,
    /// Whom each process is taken for, and up to how many such are counted: see [`OWNERS_MAX`].
    similar: BTreeMap<OwnerKey, (OwnerKey, u32)>,
    /// Sets of sharers, whether their copies were active, and how many such there are: each once, ascending. The first is
    /// empty.
    sets: Vec<Sharers>,
    /// The set that a set becomes with one more, or with one of whom another copy was active.
    with: FxHashMap<(u32, OwnerKey, bool, bool), u32>,
    known: FxHashMap<Sharers, u32>,
    /// Pages that map merged frames, by process and node.
    mapped: BTreeMap<OwnerKey, BTreeMap<NodeKey, u64>>,
}

type Sharers = Vec<((OwnerKey, bool), u32)>;

impl Count {
    /// With nothing counted yet. `home` tells where a process is at home, if that is known.
    fn new(owners: &[OwnerView], home: impl Fn(&OwnerView) -> Option<NodeKey>) -> Self {
        let alike = |a: &OwnerView, b: &OwnerView| {
            let place = |view: &OwnerView| Some((home(view)?, view.nice, view.allowed, view.placement));
            a.owner == b.owner || owners.len() > OWNERS_MAX && place(a).is_some() && place(a) == place(b)
        };
        let mut kinds: Vec<&OwnerView> = Vec::new();
        let mut similar = BTreeMap::new();
        for view in owners {
            let kind = kinds.iter().find(|kind| alike(kind, view)).copied().unwrap_or_else(|| {
                kinds.push(view);
                view
            });
            let most = if view.placement == Placement::Priority { u32::MAX } else { 1 };
            similar.insert(view.owner, (kind.owner, most));
        }
        Self { similar, ..Self::default() }
    }

    fn add(&mut self, owner: OwnerKey, active: bool, sample: &MergedSample) {
        *self.mapped.entry(owner).or_default().entry(sample.node).or_default() += 1;
        let MergedSample { region, page, frame, node } = *sample;
        let before = self.frames.get(&frame).copied();
        // A process that maps it twice counts once, and as active if one of the two is.
        let again = before.filter(|before| before.last.0 == owner).map(|before| before.last.1);
        if again.is_some_and(|was_active| was_active || !active) {
            return;
        }
        let (set, again) = (before.map_or(0, |frame| frame.sharers), again.is_some());
        let (like, most) = self.similar.get(&owner).copied().unwrap_or((owner, 1));
        let sharers = match self.with.get(&(set, like, active, again)) {
            Some(&set) => set,
            None => self.extend(set, (like, most), active, again),
        };
        let entry = self.frames.entry(frame);
        let entry = entry.or_insert(Frame { node, sharers, first: owner, last: (owner, active), region, page });
        (entry.sharers, entry.last) = (sharers, (owner, active));
    }

    fn extend(&mut self, before: u32, (like, most): (OwnerKey, u32), active: bool, again: bool) -> u32 {
        if self.sets.is_empty() {
            self.sets.push(Sharers::new());
        }
        let mut set: BTreeMap<_, u32> = self.sets[before as usize].iter().copied().collect();
        if let Some(idle) = set.get_mut(&(like, false)).filter(|_| again) {
            *idle -= 1;
        }
        let number = set.entry((like, active)).or_default();
        *number = (*number + 1).min(most);
        let set: Sharers = set.into_iter().filter(|&(_, number)| number > 0).collect();
        let next = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        let number = *self.known.entry(set.clone()).or_insert(next);
        if number == next {
            self.sets.push(set);
        }
        self.with.insert((before, like, active, again), number);
        number
    }
}

#[derive(Debug, Default)]
enum Phase {
    /// Nothing to do.
    #[default]
    Rest,
    /// These spans are still to be looked at.
    Inspect(VecDeque<PageRun>, Count),
    /// These frames are to be moved.
    Move(VecDeque<Move>),
}

/// Where the merged pages of one process are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnerPlacement {
    /// The process.
    pub owner: OwnerKey,
    /// Its node.
    pub home: NodeKey,
    /// Its nice value.
    pub nice: i8,
    /// Its policy.
    pub placement: Placement,
    /// Its merged pages by node, ascending.
    pub by_node: Vec<(NodeKey, Pages)>,
    /// How much longer than on its own node an access to its merged pages takes, in the mean: 0.56 is 56 %.
    pub tax: f64,
}

impl OwnerPlacement {
    /// Its merged pages on its own node.
    pub fn local(&self) -> Pages {
        self.by_node.iter().filter(|(node, _)| *node == self.home).map(|&(_, pages)| pages).sum()
    }

    /// Those on other nodes.
    pub fn remote(&self) -> Pages {
        self.by_node.iter().filter(|(node, _)| *node != self.home).map(|&(_, pages)| pages).sum()
    }
}

/// What is merged on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTotal {
    /// The node.
    pub node: NodeKey,
    /// Its memory.
    pub total: Pages,
    /// What of it is free.
    pub free: Pages,
    /// Merged frames on it.
    pub frames: Pages,
}

/// Where merged pages are, as of the last look.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlacementSummary {
    /// The nodes.
    pub nodes: Vec<NodeTotal>,
    /// The processes that have merged pages.
    pub owners: Vec<OwnerPlacement>,
    /// Frames that the policies would have elsewhere.
    pub misplaced: Pages,
}

/// Gives merged frames their places.
#[derive(Debug, Default)]
pub struct Placer {
    phase: Phase,
    places: PlacementSummary,
    /// What the last look was taken for: pages saved, and the processes.
    inspected: Option<(Pages, Vec<OwnerView>)>,
    /// Frames were moved since the last look.
    recount: bool,
    next_ns: u64,
    pause_ns: u64,
    /// What had been used when the look began, and how long after it another may begin, nanoseconds.
    began_cpu_ns: u64,
    least_ns: u64,
    /// Private pages of each process found on each node.
    memory: BTreeMap<OwnerKey, BTreeMap<NodeKey, u64>>,
}

impl Placer {
    /// Whether frames are being looked at or moved.
    pub fn is_busy(&self) -> bool {
        !matches!(self.phase, Phase::Rest)
    }

    /// What the last look has found. `None` where there is but one node.
    pub fn summary(&self) -> Option<&PlacementSummary> {
        (!self.places.nodes.is_empty()).then_some(&self.places)
    }

    /// What is to be looked at now. `merging` while ksmd is about to change it, `room_ns` the CPU time there is.
    pub fn inspect(&mut self, table: &RegionTable, snapshot: &Snapshot, merging: bool, room_ns: u64) -> Vec<PageRun> {
        if snapshot.nodes.len() < 2 {
            // Should there be another again, everything is to be looked at anew.
            (self.phase, self.inspected) = (Phase::Rest, None);
            self.places.nodes.clear();
            return Vec::new();
        }
        if matches!(self.phase, Phase::Move(_)) && !snapshot.ksm.ours {
            // Nothing is done to the machine any more.
            self.phase = Phase::Rest;
        }
        if matches!(self.phase, Phase::Rest) && !merging && self.wants_inspection(snapshot) {
            self.inspected = Some((snapshot.ksm.saved(), self.at_home(snapshot)));
            (self.recount, self.began_cpu_ns) = (false, snapshot.cost.pagefold_ns);
            let count = Count::new(&snapshot.owners, |view| self.home(view));
            self.phase = Phase::Inspect(marked(table), count);
        }
        let Phase::Inspect(ahead, _) = &mut self.phase else { return Vec::new() };
        let mut left = INSPECT_PAGES.min(room_ns / INSPECT_PAGE_NS).max(1_024);
        let mut runs = Vec::new();
        while left > 0 {
            let Some(next) = ahead.front_mut() else { break };
            let pages = u32::try_from(left).unwrap_or(u32::MAX).min(next.pages);
            runs.push(PageRun { pages, ..*next });
            left -= u64::from(pages);
            (next.first, next.pages) = (next.first + u64::from(pages), next.pages - pages);
            if next.pages == 0 {
                ahead.pop_front();
            }
        }
        runs
    }

    fn wants_inspection(&self, snapshot: &Snapshot) -> bool {
        let Some((saved, owners)) = &self.inspected else { return snapshot.ksm.saved() > Pages(0) };
        let now = snapshot.ksm.saved();
        let grown = now.saturating_sub(*saved).0.max(saved.saturating_sub(now).0);
        let inspected_ns = self.next_ns - self.pause_ns;
        if grown > GROWTH_MIN.max(saved.0 / 64) && snapshot.now_ns >= inspected_ns + self.least_ns {
            return true;
        }
        let changed = || self.recount || grown > GROWTH_MIN || *owners != self.at_home(snapshot);
        snapshot.now_ns >= self.next_ns && changed()
    }

    /// The node of a process: where it runs, else where most of its memory is, if that is known.
    fn home(&self, view: &OwnerView) -> Option<NodeKey> {
        view.home.or(most(self.memory.get(&view.owner)))
    }

    fn at_home(&self, snapshot: &Snapshot) -> Vec<OwnerView> {
        snapshot.owners.iter().map(|view| OwnerView { home: self.home(view), ..*view }).collect()
    }

    /// Takes note of the node that a private page is on.
    pub fn record_node(&mut self, owner: OwnerKey, sample: &PageSample) {
        let Some(node) = sample.node else { return };
        let nodes = self.memory.entry(owner).or_default();
        *nodes.entry(node).or_default() += 1;
        if nodes.values().sum::<u64>() > MEMORY_MAX {
            // What was seen long ago says less: a program may move.
            for pages in nodes.values_mut() {
                *pages /= 2;
            }
        }
    }

    /// Takes in what was found where it was looked. When all has been seen, the moves are decided.
    pub fn record(&mut self, table: &RegionTable, merged: &[MergedSample], snapshot: &Snapshot, latencies: Latencies) {
        let Phase::Inspect(ahead, count) = &mut self.phase else { return };
        let mut last: Option<&Region> = None;
        for sample in merged {
            let inside = |region: &&Region| {
                region.view.key == sample.region
                    && (region.view.first..region.view.first + region.view.pages.0).contains(&sample.page)
            };
            let known = last.filter(inside);
            last = known.or_else(|| table.find(sample.region, sample.page).and_then(|slot| table.get(slot)));
            let Some(region) = last else { continue };
            count.add(region.view.owner, region.usage.was_active(sample.page), sample);
        }
        if !ahead.is_empty() {
            return;
        }
        let count = std::mem::take(count);
        self.memory.retain(|owner, _| snapshot.owners.iter().any(|view| view.owner == *owner));
        let moves;
        (self.places, moves) = settle(&count, &snapshot.owners, &self.memory, &snapshot.nodes, latencies);
        let fruitless = moves.len() * SLACK < count.frames.len();
        let inspect_ns = snapshot.cost.pagefold_ns.saturating_sub(self.began_cpu_ns);
        self.least_ns = PAUSE_NS.max(PAUSE_INSPECTIONS * inspect_ns);
        let longer_ns = if fruitless { (self.pause_ns * 2).min(PAUSE_MAX_NS) } else { 0 };
        self.pause_ns = self.least_ns.max(longer_ns);
        self.next_ns = snapshot.now_ns + self.pause_ns;
        self.phase = if moves.is_empty() || !snapshot.ksm.ours { Phase::Rest } else { Phase::Move(moves) };
    }

    /// The frames to move now, at most `most`; the ledger tells what each takes.
    pub fn moves(&mut self, most: u64, room_ns: u64, ledger: &Ledger) -> Vec<Move> {
        let Phase::Move(queue) = &mut self.phase else { return Vec::new() };
        let each_ns = ledger.move_ns.checked_div(ledger.moved.0).map_or(MOVE_NS, |ns| ns.max(100));
        let number = most.min(MOVES_PER_ROUND).min(room_ns / each_ns).min(queue.len() as u64);
        queue.drain(..usize::try_from(number).unwrap_or(0)).collect()
    }

    /// Takes note of frames that were moved.
    pub fn record_moved(&mut self, done: u64) {
        self.places.misplaced = self.places.misplaced.saturating_sub(Pages(done));
        self.recount |= done > 0;
        if matches!(&self.phase, Phase::Move(queue) if queue.is_empty()) {
            self.phase = Phase::Rest;
        }
    }
}

/// Where merged pages are, and how many the policies would have elsewhere: one look, without moving anything.
pub fn summarize(
    merged: &[(OwnerKey, MergedSample)],
    owners: &[OwnerView],
    nodes: &[NodeView],
    latencies: Latencies,
) -> PlacementSummary {
    let mut count = Count::new(owners, |view| view.home);
    for (owner, sample) in merged {
        count.add(*owner, false, sample);
    }
    settle(&count, owners, &BTreeMap::new(), nodes, latencies).0
}

fn settle(
    count: &Count,
    owners: &[OwnerView],
    memory: &BTreeMap<OwnerKey, BTreeMap<NodeKey, u64>>,
    nodes: &[NodeView],
    latencies: Latencies,
) -> (PlacementSummary, VecDeque<Move>) {
    let owners = Owners::of(owners, memory, count);
    let moves = decide(count, &owners, nodes);
    let places = PlacementSummary {
        nodes: totals(count, nodes),
        owners: owners.places(count, nodes, latencies),
        misplaced: Pages(moves.len() as u64),
    };
    (places, moves)
}

/// The marked spans, as runs.
fn marked(table: &RegionTable) -> VecDeque<PageRun> {
    let mut runs = VecDeque::new();
    // Those of one process together, so that one that maps a frame twice is noticed.
    let mut regions: Vec<&Region> = table.iter().collect();
    regions.sort_by_key(|region| region.view.owner);
    for region in regions {
        let key = region.view.key;
        let mut add = |mut first: Vpn, mut pages: u64| {
            while pages > 0 {
                let now = pages.min(u64::from(u32::MAX));
                runs.push_back(PageRun { region: key, first, pages: u32::try_from(now).unwrap_or(u32::MAX) });
                (first, pages) = (first + now, pages - now);
            }
        };
        if region.is_marked_whole() {
            add(region.view.first, region.view.pages.0);
        } else {
            region.marks.spans.iter().for_each(|mark| add(mark.first, mark.pages.0));
        }
    }
    runs
}

/// The node that has the most.
fn most(nodes: Option<&BTreeMap<NodeKey, u64>>) -> Option<NodeKey> {
    nodes?.iter().max_by_key(|&(_, &pages)| pages).map(|(&node, _)| node)
}

/// The processes, each with a home.
struct Owners(BTreeMap<OwnerKey, (OwnerView, NodeKey)>);

impl Owners {
    fn of(views: &[OwnerView], memory: &BTreeMap<OwnerKey, BTreeMap<NodeKey, u64>>, count: &Count) -> Self {
        let with_home = |view: &OwnerView| {
            // Of its own memory, and if none of that is known, of what it has merged.
            let known = || memory.get(&view.owner).or_else(|| count.mapped.get(&view.owner));
            let home = view.home.or_else(|| most(known()))?;
            Some((view.owner, (*view, home)))
        };
        Self(views.iter().filter_map(with_home).collect())
    }

    fn places(&self, count: &Count, nodes: &[NodeView], latencies: Latencies) -> Vec<OwnerPlacement> {
        let of_owner = |(owner, by_node): (&OwnerKey, &BTreeMap<NodeKey, u64>)| {
            let &(view, home) = self.0.get(owner)?;
            Some(OwnerPlacement {
                owner: *owner,
                home,
                nice: view.nice,
                placement: view.placement,
                by_node: by_node.iter().map(|(&node, &pages)| (node, Pages(pages))).collect(),
                tax: tax(by_node, home, nodes, latencies),
            })
        };
        count.mapped.iter().filter_map(of_owner).collect()
    }
}

/// What the merged pages of a process cost it: see [`OwnerPlacement::tax`].
fn tax(by_node: &BTreeMap<NodeKey, u64>, home: NodeKey, nodes: &[NodeView], latencies: Latencies) -> f64 {
    let Some(from) = nodes.iter().find(|view| view.node == home) else { return 0.0 };
    let others = nodes.iter().zip(&from.distances).filter(|(view, _)| view.node != home);
    let nearest = others.map(|(_, &distance)| distance).min().unwrap_or(20);
    let all: u64 = by_node.values().sum();
    let paid = nodes.iter().zip(&from.distances).map(|(view, &distance)| {
        let distance = if view.node == home { 10 } else { distance };
        by_node.get(&view.node).copied().unwrap_or(0) as f64 * latencies.tax(distance, nearest)
    });
    paid.sum::<f64>() / all.max(1) as f64
}

fn totals(count: &Count, nodes: &[NodeView]) -> Vec<NodeTotal> {
    let mut frames: BTreeMap<NodeKey, u64> = BTreeMap::new();
    for frame in count.frames.values() {
        *frames.entry(frame.node).or_default() += 1;
    }
    let total = |view: &NodeView| NodeTotal {
        node: view.node,
        total: view.total,
        free: view.free,
        frames: Pages(frames.get(&view.node).copied().unwrap_or(0)),
    };
    nodes.iter().map(total).collect()
}

/// Which frames move where.
fn decide(count: &Count, owners: &Owners, nodes: &[NodeView]) -> VecDeque<Move> {
    // Those that one process has in common with similar of each other are dealt out by themselves: each has its share then.
    let mut by_sharers: BTreeMap<(u32, OwnerKey), Vec<&Frame>> = BTreeMap::new();
    for frame in count.frames.values() {
        by_sharers.entry((frame.sharers, frame.first)).or_default().push(frame);
    }
    let there: NodeSet = nodes.iter().map(|view| view.node).collect();
    let mut room: BTreeMap<NodeKey, u64> =
        nodes.iter().map(|view| (view.node, view.free.0.saturating_sub(view.total.0 / RESERVE))).collect();
    let mut carry = Carry::default();
    let mut moves = Vec::new();
    for ((set, _), mut frames) in by_sharers {
        let set = &count.sets[set as usize];
        let known =
            || set.iter().filter_map(|&((owner, active), number)| Some((owners.0.get(&owner)?, active, number)));
        let Some(placement) = known().map(|((view, _), ..)| view.placement).next() else { continue };
        let allowed = known().fold(there, |nodes, ((view, _), ..)| nodes.and(view.allowed));
        let alike = |(&(view, home), active, number): (&(OwnerView, NodeKey), bool, u32)| {
            std::iter::repeat_n(Sharer { home, nice: view.nice, active }, number as usize)
        };
        let sharers: Vec<Sharer> = known().flat_map(alike).collect();
        let parts = shares(placement, &sharers, allowed);
        if parts.is_empty() {
            continue;
        }
        frames.sort_unstable_by_key(|frame| (frame.region, frame.page));
        let quotas = carry.quotas(frames.len(), &parts);
        let at: Vec<NodeKey> = frames.iter().map(|frame| frame.node).collect();
        let nodes: Vec<NodeKey> = parts.iter().map(|&(node, _)| node).collect();
        let wanted = rebalance(&at, &nodes, &quotas);
        if wanted.len() * SLACK < frames.len() {
            continue;
        }
        for (position, node) in wanted {
            // A node that is nearly full takes no more: the frame stays where it is.
            let Some(left) = room.get_mut(&node).filter(|left| **left > 0) else { continue };
            *left -= 1;
            let Frame { region, page, node: from, .. } = *frames[position];
            *room.entry(from).or_default() += 1;
            moves.push(Move { region, page, node });
        }
    }
    // What lies together is moved together.
    moves.sort_unstable_by_key(|to| (to.region, to.page));
    moves.into()
}
