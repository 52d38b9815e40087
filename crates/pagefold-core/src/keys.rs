//! Opaque identities. The host assigns them, and the core only compares them.

use serde::{Deserialize, Serialize};

/// A region. Never reused within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionKey(pub u32);

/// The process that a region belongs to. Never reused within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OwnerKey(pub u32);

/// A trust domain: memory of different domains must not be merged. 0 unless configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DomainKey(pub u16);

/// A NUMA node, by the kernel's number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeKey(pub u16);

/// A set of NUMA nodes. Nodes from 64 on are in no set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeSet(pub u64);

impl NodeSet {
    /// All nodes below 64.
    pub const ALL: Self = Self(u64::MAX);

    /// Whether the set contains a node.
    pub fn has(self, node: NodeKey) -> bool {
        self.0.checked_shr(node.0.into()).is_some_and(|bits| bits & 1 == 1)
    }

    /// The nodes in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl FromIterator<NodeKey> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeKey>>(nodes: I) -> Self {
        Self(nodes.into_iter().fold(0, |bits, node| bits | 1_u64.checked_shl(node.0.into()).unwrap_or(0)))
    }
}

/// Regions of the same executable, mapping and size: likely copies of each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FamilyKey(pub u64);
