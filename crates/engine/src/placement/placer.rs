//! Decides which merged frames move to another node, on a machine with several memory nodes.
//!
//! After ksmd has merged something, we inspect all marked spans. Each node then gets its share of the frames with the
//! same sharers, by [`super::policy`]. Frames stay where they are if they may, so that a second inspection finds
//! nothing to do and no page moves back and forth.

use crate::host::{MergedSample, Move, NodeView, OwnerView, PageRun, PageSample, Snapshot};
use crate::keys::{NodeKey, NodeSet, OwnerKey};
use crate::ledger::Ledger;
use crate::placement::inventory::{
    Frame, Inventory, PageCopy, PagesByNode, PlacementSummary, merged_runs, most, take_pages,
};
use crate::placement::policy::{Carry, Latencies, Placement, Sharer, rebalance, shares};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::units::{Pages, Vpn, count, index};
use std::collections::{BTreeMap, VecDeque};

/// We inspect at most this many pages in one round.
const INSPECT_PAGES: u64 = 65_536;
/// We inspect at least this many pages in one round.
const INSPECT_PAGES_MIN: u64 = 1_024;
/// The assumed cost of inspecting a page, nanoseconds.
const INSPECT_PAGE_NS: u64 = 150;
/// We assume that moving a frame costs this much until we've measured it, nanoseconds.
const MOVE_NS: u64 = 5_000;
/// Moving a frame costs at least this much, whatever we've measured, nanoseconds.
const MOVE_NS_MIN: u64 = 100;
/// We move at most this many frames in one round, so that it doesn't take much longer than the share of a core allows.
const MOVES_PER_ROUND: u64 = 4_096;
/// We inspect again once this many saved pages have come or gone.
const GROWTH_MIN: u64 = 64;
/// Once we've counted this many private pages of a process, we halve the counts, so that old ones weigh less.
const PRIVATE_PAGES_MAX: u64 = 8_192;
/// The first pause after an inspection, nanoseconds. It doubles while inspections move little.
const PAUSE_NS: u64 = 1_000_000_000;
/// The longest such pause, nanoseconds.
const PAUSE_MAX_NS: u64 = 600_000_000_000;
/// If two processes have many neighbouring pages in common, we keep the same process's pages throughout a block of this
/// many pages: a page in a run merges at half the cost of a single one.
const CHOICE_PAGES: u64 = 32;
/// If fewer than one in this many frames with the same sharers would move, we leave them as they are.
const SLACK: usize = 200;
/// One part in this many of a node's memory must stay free.
const RESERVE: u64 = 32;

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    /// The runs left to inspect, and the frames found.
    Inspecting(VecDeque<PageRun>, Inventory),
    /// The frames left to move.
    Moving(VecDeque<Move>),
}

/// Inspects merged frames and decides which of them move.
#[derive(Debug, Default)]
pub struct Placer {
    state: State,
    summary: PlacementSummary,
    /// Pages saved and the processes at the last inspection. If they change, we inspect again.
    inspected: Option<(Pages, Vec<OwnerView>)>,
    /// Whether we've moved frames since the last inspection.
    moved: bool,
    next_ns: u64,
    pause_ns: u64,
    /// pagefold's CPU time when the inspection began, nanoseconds.
    began_cpu_ns: u64,
    /// The shortest time from one inspection to the next, nanoseconds.
    least_ns: u64,
    /// The nodes where we found each process's private pages.
    private: BTreeMap<OwnerKey, PagesByNode>,
    /// Rounding errors of the choices made before merging.
    choices: Carry,
    last_choice: Option<Choice>,
}

/// The choice between two copies for a block of neighbouring pages.
#[derive(Clone, Copy, Debug)]
struct Choice {
    copies: [PageCopy; 2],
    block: u64,
    stays: Stays,
}

/// Which of two equal pages to keep when we merge them on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// The page that we knew before.
    Known,
    /// The page that we've just read.
    New,
    /// Both: they must not be merged.
    Both,
}

impl Placer {
    /// Whether we're inspecting or moving frames.
    pub fn is_busy(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// The result of the last inspection. `None` on a machine with one node.
    pub fn summary(&self) -> Option<&PlacementSummary> {
        (!self.summary.nodes.is_empty()).then_some(&self.summary)
    }

    /// The pages to inspect now, with `room_ns` of CPU time left. No inspection begins while ksmd is `merging`.
    pub fn inspect(&mut self, table: &RegionTable, snapshot: &Snapshot, merging: bool, room_ns: u64) -> Vec<PageRun> {
        if snapshot.nodes.len() < 2 {
            // If another node appears, we inspect everything again.
            self.state = State::Idle;
            self.inspected = None;
            self.summary.nodes.clear();
            return Vec::new();
        }
        if matches!(self.state, State::Moving(_)) && !snapshot.ksm.ours {
            self.state = State::Idle;
        }
        if matches!(self.state, State::Idle) && !merging && self.wants_inspection(snapshot) {
            self.inspected = Some((snapshot.ksm.saved(), self.with_homes(snapshot)));
            self.moved = false;
            self.began_cpu_ns = snapshot.cost.pagefold_ns;
            let inventory = Inventory::new(&snapshot.owners, |view| self.home(view));
            self.state = State::Inspecting(merged_runs(table), inventory);
        }
        let State::Inspecting(ahead, _) = &mut self.state else { return Vec::new() };
        take_pages(ahead, INSPECT_PAGES.min(room_ns / INSPECT_PAGE_NS).max(INSPECT_PAGES_MIN))
    }

    fn wants_inspection(&self, snapshot: &Snapshot) -> bool {
        let Some((saved, owners)) = &self.inspected else { return snapshot.ksm.saved() > Pages(0) };
        let grown = snapshot.ksm.saved().0.abs_diff(saved.0);
        let inspected_ns = self.next_ns - self.pause_ns;
        if grown > GROWTH_MIN.max(saved.0 / 64) && snapshot.now_ns >= inspected_ns + self.least_ns {
            return true;
        }
        if snapshot.now_ns < self.next_ns {
            return false;
        }
        self.moved || grown > GROWTH_MIN || *owners != self.with_homes(snapshot)
    }

    /// A process's home node: the node it runs on, or the node of most of its private pages, if known.
    fn home(&self, view: &OwnerView) -> Option<NodeKey> {
        view.home.or(most(self.private.get(&view.owner)))
    }

    fn with_homes(&self, snapshot: &Snapshot) -> Vec<OwnerView> {
        snapshot.owners.iter().map(|view| OwnerView { home: self.home(view), ..*view }).collect()
    }

    /// Counts the node of a private page.
    pub fn record_node(&mut self, owner: OwnerKey, sample: &PageSample) {
        let Some(node) = sample.node else { return };
        let nodes = self.private.entry(owner).or_default();
        *nodes.entry(node).or_default() += 1;
        if nodes.values().sum::<u64>() > PRIVATE_PAGES_MAX {
            // Old counts weigh less, because a process may move to another node.
            for pages in nodes.values_mut() {
                *pages /= 2;
            }
        }
    }

    /// Records inspected pages. After the last one, decides on the moves.
    pub fn record(&mut self, table: &RegionTable, merged: &[MergedSample], snapshot: &Snapshot, latencies: Latencies) {
        let State::Inspecting(ahead, inventory) = &mut self.state else { return };
        let mut last: Option<&Region> = None;
        for sample in merged {
            last = table.near(last, sample.region, sample.page);
            let Some(region) = last else { continue };
            inventory.add(region.view.owner, region.usage.active.contains(sample.page), sample);
        }
        if !ahead.is_empty() {
            return;
        }
        let inventory = std::mem::take(inventory);
        self.private.retain(|owner, _| snapshot.owners.iter().any(|view| view.owner == *owner));
        let moves;
        (self.summary, moves) = decide(&inventory, &snapshot.owners, &self.private, &snapshot.nodes, latencies);
        let fruitless = moves.len() * SLACK < inventory.len();
        let inspect_ns = snapshot.cost.pagefold_ns.saturating_sub(self.began_cpu_ns);
        self.least_ns = PAUSE_NS.max(snapshot.mechanism.inspection_pause() * inspect_ns);
        let longer_ns = if fruitless { (self.pause_ns * 2).min(PAUSE_MAX_NS) } else { 0 };
        self.pause_ns = self.least_ns.max(longer_ns);
        self.next_ns = snapshot.now_ns + self.pause_ns;
        self.state = if moves.is_empty() || !snapshot.ksm.ours { State::Idle } else { State::Moving(moves) };
    }

    /// The frames to move now: at most `most`, and no more than fit into `room_ns` of CPU time by the cost in the
    /// ledger.
    pub fn moves(&mut self, most: u64, room_ns: u64, ledger: &Ledger) -> Vec<Move> {
        let State::Moving(queue) = &mut self.state else { return Vec::new() };
        let each_ns = ledger.move_ns.checked_div(ledger.moved.0).map_or(MOVE_NS, |ns| ns.max(MOVE_NS_MIN));
        let number = most.min(MOVES_PER_ROUND).min(room_ns / each_ns).min(count(queue.len()));
        queue.drain(..usize::try_from(number).unwrap_or(0)).collect()
    }

    /// Which of two equal pages to keep; `page` is the new one. This is nuKSM's choice of the surviving copy (section
    /// 4.2), made before the merge. We assume that a page is on the home node of its process.
    pub fn choose(&mut self, known: PageCopy, new: PageCopy, page: Vpn, snapshot: &Snapshot) -> Stays {
        if snapshot.nodes.len() < 2 || known.owner == new.owner {
            return Stays::Known;
        }
        let copies = [known, new];
        let block = page.0 / CHOICE_PAGES;
        match self.last_choice {
            Some(last) if last.copies == copies && last.block == block => last.stays,
            _ => {
                let stays = self.choose_anew(known, new, snapshot).unwrap_or(Stays::Known);
                self.last_choice = Some(Choice { copies, block, stays });
                stays
            }
        }
    }

    /// `None` if we don't know a process or its home.
    fn choose_anew(&mut self, known: PageCopy, new: PageCopy, snapshot: &Snapshot) -> Option<Stays> {
        let known_view = snapshot.owners.iter().find(|view| view.owner == known.owner)?;
        let new_view = snapshot.owners.iter().find(|view| view.owner == new.owner)?;
        let known = Sharer { home: self.home(known_view)?, nice: known_view.nice, active: known.active };
        let new = Sharer { home: self.home(new_view)?, nice: new_view.nice, active: new.active };
        if known.home == new.home {
            return Some(Stays::Known);
        }
        if known_view.placement == Placement::LocalOnly || new_view.placement == Placement::LocalOnly {
            return Some(Stays::Both);
        }
        let parts = shares(known_view.placement, &[known, new], known_view.allowed.and(new_view.allowed));
        let quotas = self.choices.quotas(1, &parts);
        let chosen = quotas.iter().position(|&quota| quota > 0)?;
        Some(if parts[chosen].0 == new.home { Stays::New } else { Stays::Known })
    }

    pub fn record_moved(&mut self, done: u64) {
        self.summary.misplaced = self.summary.misplaced.saturating_sub(Pages(done));
        self.moved |= done > 0;
        if matches!(&self.state, State::Moving(queue) if queue.is_empty()) {
            self.state = State::Idle;
        }
    }
}

/// Where merged pages are, and how many of them the policies would place elsewhere, from one inspection. Moves nothing.
pub fn summarize(
    merged: &[(OwnerKey, MergedSample)],
    owners: &[OwnerView],
    nodes: &[NodeView],
    latencies: Latencies,
) -> PlacementSummary {
    let mut inventory = Inventory::new(owners, |view| view.home);
    for (owner, sample) in merged {
        inventory.add(*owner, false, sample);
    }
    decide(&inventory, owners, &BTreeMap::new(), nodes, latencies).0
}

/// Summarizes an inventory and decides which frames move where.
fn decide(
    inventory: &Inventory,
    owners: &[OwnerView],
    private: &BTreeMap<OwnerKey, PagesByNode>,
    nodes: &[NodeView],
    latencies: Latencies,
) -> (PlacementSummary, VecDeque<Move>) {
    let homes = inventory.homes(owners, private);
    let moves = decide_moves(inventory, &homes, nodes);
    (inventory.summary(&homes, nodes, latencies, Pages(count(moves.len()))), moves)
}

fn decide_moves(inventory: &Inventory, homes: &BTreeMap<OwnerKey, OwnerView>, nodes: &[NodeView]) -> VecDeque<Move> {
    let existing: NodeSet = nodes.iter().map(|view| view.node).collect();
    let mut room: BTreeMap<NodeKey, u64> = BTreeMap::new();
    for view in nodes {
        room.insert(view.node, view.free.0.saturating_sub(view.total.0 / RESERVE));
    }
    let mut carry = Carry::default();
    let mut moves = Vec::new();
    for ((set, _), mut frames) in inventory.by_sharers() {
        let mut placement = Placement::Kernel;
        let mut allowed = existing;
        let mut sharers = Vec::new();
        for (copy, &number) in inventory.sharers(set) {
            let Some(view) = homes.get(&copy.owner) else { continue };
            let Some(home) = view.home else { continue };
            if sharers.is_empty() {
                placement = view.placement;
            }
            allowed = allowed.and(view.allowed);
            let sharer = Sharer { home, nice: view.nice, active: copy.active };
            sharers.extend(std::iter::repeat_n(sharer, index(number)));
        }
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
            // A nearly full node gets no more: the frame stays where it is.
            let Some(left) = room.get_mut(&node).filter(|left| **left > 0) else { continue };
            *left -= 1;
            let Frame { region, page, node: from, .. } = *frames[position];
            *room.entry(from).or_default() += 1;
            moves.push(Move { region, page, node });
        }
    }
    // We move neighbouring pages together.
    moves.sort_unstable_by_key(|to| (to.region, to.page));
    moves.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_are_given_the_same_choice_and_both_nodes_half_of_them() {
        let node = |node| NodeView { node, total: Pages(1_000), free: Pages(500), distances: vec![10, 20] };
        let owner = |owner, node| OwnerView {
            owner: OwnerKey(owner),
            home: Some(node),
            nice: 0,
            allowed: NodeSet::ALL,
            placement: Placement::Fair,
        };
        let snapshot = Snapshot {
            nodes: vec![node(NodeKey(0)), node(NodeKey(1))],
            owners: vec![owner(1, NodeKey(0)), owner(2, NodeKey(1))],
            ..Snapshot::default()
        };
        let copy = |owner| PageCopy { owner: OwnerKey(owner), active: false };
        let mut placer = Placer::default();
        let choices: Vec<Stays> =
            (0..40 * CHOICE_PAGES).map(|page| placer.choose(copy(1), copy(2), Vpn(page), &snapshot)).collect();
        let runs = choices.chunk_by(|a, b| a == b).count();
        assert!(runs <= 40, "{runs} runs");
        let known = choices.iter().filter(|&&stays| stays == Stays::Known).count();
        assert!(known.abs_diff(choices.len() / 2) <= 32, "{known} of {}", choices.len());
    }
}
