//! Opaque identities. The host assigns them, and the core only compares them.

use serde::{Deserialize, Serialize};

/// A region's key, unique among current regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionKey(pub u32);

/// The key of the process that a region belongs to, unique among processes in scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OwnerKey(pub u32);

/// A number for the process that a region belongs to. It stays the same in every run of pagefold until the machine
/// restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LastingKey(pub u64);

/// Processes forked from each other, without an exec since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LineageKey(pub u64);

/// The key of a limit on some processes' memory, unique among current limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LimitKey(pub u32);

/// Gives out numbers for keys. After the last number it begins again and skips the ones in use.
///
/// A program that maps and unmaps thousands of mappings a second uses up all 2^32 numbers within days.
#[derive(Clone, Debug, Default)]
pub struct KeyCounter {
    last: u32,
}

impl KeyCounter {
    pub fn after(last: u32) -> Self {
        Self { last }
    }

    pub fn is_new(&self) -> bool {
        self.last == 0
    }

    /// The next number that isn't in use. Never 0.
    pub fn take(&mut self, is_in_use: impl Fn(u32) -> bool) -> u32 {
        loop {
            self.last = self.last.checked_add(1).unwrap_or(1);
            if !is_in_use(self.last) {
                return self.last;
            }
        }
    }
}

/// A trust domain: memory of different domains must not be merged. 0 unless configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DomainKey(pub u16);

/// Processes that share limits: the number of their [`GroupLimits`](crate::limits::GroupLimits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey(pub u16);

/// A NUMA node, by the kernel's number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeKey(pub u16);

/// A set of NUMA nodes. Nodes numbered 64 or higher are in no set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeSet(pub u64);

impl NodeSet {
    /// All nodes below 64.
    pub const ALL: Self = Self(u64::MAX);

    pub fn has(self, node: NodeKey) -> bool {
        self.0.checked_shr(node.0.into()).is_some_and(|bits| bits & 1 == 1)
    }

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

/// Regions of the same executable, mapping and size, which are likely copies of each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FamilyKey(pub u64);
