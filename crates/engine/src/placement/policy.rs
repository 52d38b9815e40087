//! Decides on which memory node a merged page lives: the policies (nuKSM, sections 4.1 and 4.2).
//!
//! KSM keeps the copy that it finds last. That puts nearly all merged pages on one node and slows down every access by
//! the processes on the others. nuKSM chooses at random, at each merge, which copy to keep. Our pages are merged
//! already and we know all sharers of each page, so each node gets exactly its share of the pages with the same
//! sharers.

use crate::keys::{NodeKey, NodeSet};
use crate::named;
use crate::random::mix;
use crate::units::{count, whole};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Merged pages go to the nodes with an active copy. If all copies were active, or none, each sharer's node gets an
    /// equal share.
    #[default]
    Fair,
    /// Each sharer's node gets a share by the sharer's nice value.
    Priority,
    /// We don't merge pages across nodes.
    LocalOnly,
    /// Merged pages stay where KSM put them.
    Kernel,
}

impl Placement {
    const NAMES: [(&'static str, Self); 4] =
        [("fair", Self::Fair), ("priority", Self::Priority), ("local-only", Self::LocalOnly), ("kernel", Self::Kernel)];
}

named!(Placement, "placement");

/// A process that maps a merged page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharer {
    pub home: NodeKey,
    /// The process's nice value, -20 to 19.
    pub nice: i8,
    /// Whether the process's copy was active before the merge.
    pub active: bool,
}

impl Sharer {
    /// nuKSM's `snice`: the nice value from 1 (highest priority) to 40.
    fn snice(self) -> f64 {
        f64::from(self.nice) + 21.0
    }
}

/// Each node's share of the pages with these sharers, by ascending node. The shares add up to 1, or there are none if
/// the pages stay where they are. Only `allowed` nodes have a share.
pub fn shares(placement: Placement, sharers: &[Sharer], allowed: NodeSet) -> Vec<(NodeKey, f64)> {
    let mut weights: BTreeMap<NodeKey, f64> = BTreeMap::new();
    match placement {
        Placement::Kernel | Placement::LocalOnly => return Vec::new(),
        Placement::Fair => {
            let some_active = sharers.iter().any(|sharer| sharer.active);
            for sharer in sharers {
                if sharer.active || !some_active {
                    weights.insert(sharer.home, 1.0);
                }
            }
        }
        Placement::Priority => {
            // The weight is 1 - snice / sum of snice. The weights of K sharers add up to K - 1, so we scale them below.
            let sum: f64 = sharers.iter().map(|sharer| sharer.snice()).sum();
            for sharer in sharers {
                let share = if sharers.len() == 1 { 1.0 } else { 1.0 - sharer.snice() / sum };
                *weights.entry(sharer.home).or_default() += share;
            }
        }
    }
    weights.retain(|&node, _| allowed.has(node));
    let sum: f64 = weights.values().sum();
    weights.into_iter().map(|(node, weight)| (node, weight / sum)).collect()
}

/// The rounding errors for each set of shares. The next pages with the same shares make up for them.
#[derive(Clone, Debug, Default)]
pub struct Carry(BTreeMap<Vec<(NodeKey, u64)>, Vec<f64>>);

impl Carry {
    /// How many of `pages` pages each node should have. The numbers add up to `pages`.
    pub fn quotas(&mut self, pages: usize, shares: &[(NodeKey, f64)]) -> Vec<usize> {
        let key = shares.iter().map(|&(node, share)| (node, share.to_bits())).collect();
        let due = self.0.entry(key).or_insert_with(|| vec![0.0; shares.len()]);
        for (due, (_, share)) in due.iter_mut().zip(shares) {
            *due += share * pages as f64;
        }
        let mut quotas: Vec<usize> = due.iter().map(|&due| usize::try_from(whole(due)).unwrap_or(pages)).collect();
        while quotas.iter().sum::<usize>() > pages {
            if let Some(most) = (0..quotas.len()).max_by_key(|&at| quotas[at]) {
                quotas[most] -= 1;
            }
        }
        while quotas.iter().sum::<usize>() < pages {
            let left: Vec<f64> = (0..quotas.len()).map(|at| due[at] - quotas[at] as f64).collect();
            let Some(most) = (0..quotas.len()).max_by(|&a, &b| left[a].total_cmp(&left[b])) else { break };
            quotas[most] += 1;
        }
        for (due, &quota) in due.iter_mut().zip(&quotas) {
            *due -= quota as f64;
        }
        quotas
    }
}

/// A node that gets pages from others.
struct Receiver {
    node: NodeKey,
    wants: usize,
    got: usize,
}

/// The moves that give each of `nodes` its quota of pages: `(position, node)`, by position. `at` is the present node of
/// each page. The pages that move are spread evenly, because programs use neighbours together. But they form no
/// pattern, because some programs use every second page.
pub fn rebalance(at: &[NodeKey], nodes: &[NodeKey], quotas: &[usize]) -> Vec<(usize, NodeKey)> {
    let mut have: BTreeMap<NodeKey, usize> = BTreeMap::new();
    for &node in at {
        *have.entry(node).or_default() += 1;
    }
    let mut receivers = Vec::new();
    let mut missing = 0;
    // How many pages each node has beyond its quota.
    let mut excess = have.clone();
    for (&node, &quota) in nodes.iter().zip(quotas) {
        let pages = have.get(&node).copied().unwrap_or(0);
        if pages < quota {
            receivers.push(Receiver { node, wants: quota - pages, got: 0 });
            missing += quota - pages;
        }
        excess.insert(node, pages.saturating_sub(quota));
    }
    let mut visited: BTreeMap<NodeKey, usize> = BTreeMap::new();
    let mut moves = Vec::new();
    for position in shuffled(at.len()) {
        let node = at[position];
        let nth = visited.entry(node).or_default();
        let moves_now = (*nth + 1) * excess[&node] / have[&node] > *nth * excess[&node] / have[&node];
        *nth += 1;
        if !moves_now {
            continue;
        }
        // The page goes to the node that lags furthest behind its part of the moves so far.
        let behind = |receiver: &Receiver| {
            let due = (receiver.wants * (moves.len() + 1)).checked_div(missing).unwrap_or(0);
            due.saturating_sub(receiver.got) * 2 + usize::from(receiver.got < receiver.wants)
        };
        let open = receivers.iter_mut().filter(|receiver| receiver.got < receiver.wants);
        let Some(to) = open.max_by_key(|receiver| behind(receiver)) else { break };
        to.got += 1;
        moves.push((position, to.node));
    }
    moves.sort_unstable_by_key(|&(position, _)| position);
    moves
}

/// The positions, shuffled within short stretches.
fn shuffled(positions: usize) -> Vec<usize> {
    const STRETCH: usize = 64;
    let mut order: Vec<usize> = (0..positions).collect();
    for stretch in order.chunks_mut(STRETCH) {
        stretch.sort_unstable_by_key(|&position| mix(count(position)));
    }
    order
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latencies {
    /// How long an access to the local node takes, nanoseconds.
    pub local_ns: u32,
    /// How long an access to the nearest other node takes, nanoseconds.
    pub remote_ns: u32,
}

impl Default for Latencies {
    /// An idle two-socket machine (Xeon E5, measured by Intel's Memory Latency Checker).
    fn default() -> Self {
        Self { local_ns: 89, remote_ns: 139 }
    }
}

impl Latencies {
    /// How much longer an access to a node at `distance` takes than a local one: 0.56 is 56 %. `nearest` is the
    /// distance of the nearest other node. Distances are the kernel's (SLIT), 10 for the local node.
    pub fn tax(self, distance: u32, nearest: u32) -> f64 {
        let steps = f64::from(distance.saturating_sub(10)) / f64::from(nearest.saturating_sub(10).max(1));
        steps * (f64::from(self.remote_ns) / f64::from(self.local_ns.max(1)) - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sharer(home: u16, nice: i8, active: bool) -> Sharer {
        Sharer { home: NodeKey(home), nice, active }
    }

    #[test]
    fn a_lone_sharer_gets_all_and_nodes_that_are_not_allowed_nothing() {
        assert_eq!(shares(Placement::Priority, &[sharer(4, 19, true)], NodeSet::ALL), [(NodeKey(4), 1.0)]);
        let allowed: NodeSet = [NodeKey(1)].into_iter().collect();
        let two = [sharer(0, 0, false), sharer(1, 0, false)];
        assert_eq!(shares(Placement::Fair, &two, allowed), [(NodeKey(1), 1.0)]);
        assert_eq!(shares(Placement::Fair, &two[..1], allowed), []);
        assert_eq!(shares(Placement::Kernel, &two, NodeSet::ALL), []);
        assert!(!NodeSet::ALL.has(NodeKey(64)));
    }

    #[test]
    fn rounding_is_made_up_for_across_single_pages() {
        let mut carry = Carry::default();
        let half = [(NodeKey(0), 0.5), (NodeKey(1), 0.5)];
        let (mut first, mut second) = (0, 0);
        for _ in 0..101 {
            let quotas = carry.quotas(1, &half);
            (first, second) = (first + quotas[0], second + quotas[1]);
        }
        assert_eq!((first.min(second), first + second), (50, 101));
    }

    #[test]
    fn the_tax_grows_with_the_distance() {
        let latencies = Latencies::default();
        assert!((latencies.tax(21, 21) - 50.0 / 89.0).abs() < 1e-9);
        assert!((latencies.tax(32, 21) - 2.0 * 50.0 / 89.0).abs() < 1e-9);
        assert!(latencies.tax(10, 21).abs() < 1e-9);
    }

    #[test]
    fn moved_pages_are_spread_over_strides_and_stretches() {
        let at = vec![NodeKey(1); 8_192];
        let moves = rebalance(&at, &[NodeKey(0), NodeKey(1)], &[4_096, 4_096]);
        for stride in [2, 3, 4, 8, 16, 64] {
            for first in 0..stride {
                let number = moves.iter().filter(|(position, _)| position % stride == first).count() as f64;
                let share = number / (8_192 / stride) as f64;
                assert!((0.3..0.7).contains(&share), "{share} of the pages at {first} by {stride}");
            }
        }
        // In every short stretch about half of the pages move, too.
        for stretch in 0..64 {
            let inside = moves.iter().filter(|(position, _)| position / 128 == stretch).count();
            assert!((48..=80).contains(&inside), "{inside} of 128");
        }
    }

    proptest! {
        #[test]
        fn every_node_has_its_quota_after_the_moves(
            at in proptest::collection::vec(0_u16..5, 0..300), weights in proptest::collection::vec(0.01_f64..1.0, 1..4),
        ) {
            let at: Vec<NodeKey> = at.into_iter().map(NodeKey).collect();
            let sum: f64 = weights.iter().sum();
            let shares: Vec<_> = (0..).map(NodeKey).zip(weights.iter().map(|weight| weight / sum)).collect();
            let nodes: Vec<NodeKey> = shares.iter().map(|&(node, _)| node).collect();
            let quotas = Carry::default().quotas(at.len(), &shares);
            let moves = rebalance(&at, &nodes, &quotas);
            let mut after = at.clone();
            for &(position, node) in &moves {
                prop_assert!(after[position] != node);
                after[position] = node;
            }
            for (node, quota) in nodes.iter().zip(&quotas) {
                prop_assert_eq!(after.iter().filter(|at| *at == node).count(), *quota);
            }
            prop_assert!(moves.windows(2).all(|pair| pair[0].0 < pair[1].0));
            // A second rebalancing moves nothing.
            prop_assert!(rebalance(&after, &nodes, &quotas).is_empty());
        }
    }
}
