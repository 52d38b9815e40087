//! ksmd's two trees and its counters, by the rules of Linux's `mm/ksm.c`.
//!
//! The trees are hash maps here: what a search finds is the same, and what it costs is computed from the
//! tree's size. Expected costs stand for exact ones in two places: every search is charged the full depth
//! of a balanced tree, and a chain is charged to unrelated searches by the mean share that cross it.
//!
//! There is one pair of trees, or where `merge_across_nodes` is off one for each memory node. A frame that has moved to
//! another node goes to that node's tree when ksmd comes by it; should that have one of the same content already, both
//! stay (the kernel would bring the pages of the one over to the other).

use crate::memory::{Memory, NONE};
use pagefold_core::host::NodeKey;
use rustc_hash::FxHashMap;

/// A page, by region and offset.
pub(crate) type PageRef = (u32, u32);

/// All merged frames of one content. More than one makes it a chain.
#[derive(Debug, Default)]
struct Chain {
    /// The frames; the one that searches try first is the last.
    dups: Vec<u32>,
    /// How many of them have no room left.
    full: usize,
}

impl Chain {
    /// Frames that a search crossing this chain walks: up to the first with room. When one with room is
    /// found it moves to the front, so in the mean that is one, or all.
    fn walk(&self) -> u64 {
        match self.dups.len() {
            0 | 1 => 0,
            all if self.full == all => all as u64,
            _ => 1,
        }
    }
}

/// A stable and an unstable tree.
#[derive(Debug, Default)]
struct Pair {
    stable: FxHashMap<u64, Chain>,
    unstable: FxHashMap<u64, PageRef>,
    /// The walks of all chains together.
    chain_walks: u64,
}

#[derive(Debug)]
pub(crate) struct Trees {
    /// The first for all nodes, or one for each.
    pairs: Vec<Pair>,
    max_page_sharing: u32,
    across_nodes: bool,
    /// `pages_shared`.
    pub(crate) shared: u64,
    /// `pages_sharing`.
    pub(crate) sharing: u64,
}

/// The depth of a balanced tree.
fn levels(nodes: usize) -> u64 {
    u64::from(usize::BITS - nodes.leading_zeros())
}

impl Trees {
    pub(crate) fn new(max_page_sharing: u32, across_nodes: bool) -> Self {
        assert!(max_page_sharing >= 2, "the kernel refuses max_page_sharing below 2");
        Self { pairs: vec![Pair::default()], max_page_sharing, across_nodes, shared: 0, sharing: 0 }
    }

    /// The number of the tree for pages on a node.
    pub(crate) fn of(&mut self, node: NodeKey) -> u16 {
        if self.across_nodes {
            return 0;
        }
        if self.pairs.len() <= usize::from(node.0) {
            self.pairs.resize_with(usize::from(node.0) + 1, Pair::default);
        }
        node.0
    }

    pub(crate) fn stable_levels(&self, tree: u16) -> u64 {
        levels(self.pairs[usize::from(tree)].stable.len())
    }

    pub(crate) fn unstable_levels(&self, tree: u16) -> u64 {
        levels(self.pairs[usize::from(tree)].unstable.len())
    }

    /// Full duplicates that one search walks on its way, in thousandths: of n nodes a search crosses
    /// log2(n), so it crosses a given chain with a chance of log2(n) / n.
    pub(crate) fn crossed_dups_milli(&self, tree: u16) -> u64 {
        let pair = &self.pairs[usize::from(tree)];
        pair.chain_walks * 1000 * self.stable_levels(tree) / (pair.stable.len() as u64).max(1)
    }

    /// The unstable tree lives for one scan.
    pub(crate) fn forget_unstable(&mut self) {
        self.pairs.iter_mut().for_each(|pair| pair.unstable.clear());
    }

    /// Puts a merged frame into the tree of the node that it is on now.
    pub(crate) fn follow(&mut self, memory: &mut Memory, frame: u32) {
        let merged = memory.frames[frame as usize];
        let tree = self.of(merged.node);
        if merged.tree == tree || merged.pruned {
            return;
        }
        let full = usize::from(merged.items >= self.max_page_sharing);
        self.on_chain(merged.tree, merged.content, |chain| {
            chain.dups.retain(|&other| other != frame);
            chain.full -= full;
        });
        memory.frames[frame as usize].tree = tree;
        self.on_chain(tree, merged.content, |chain| {
            // Where a search tries first is one with room, if there is any.
            chain.dups.insert(0, frame);
            chain.full += full;
        });
    }

    /// The merged frame that a page with this content may join, if there is one with room.
    pub(crate) fn find_stable(&mut self, memory: &mut Memory, tree: u16, content: u64) -> Option<u32> {
        loop {
            let chain = self.pairs[usize::from(tree)].stable.get_mut(&content)?;
            let last = chain.dups.len().checked_sub(1)?;
            let room = |&frame: &u32| memory.frames[frame as usize].items < self.max_page_sharing;
            if chain.full < chain.dups.len() && !room(&chain.dups[last]) {
                let place = chain.dups.iter().position(room)?;
                chain.dups.swap(place, last);
            }
            // A search throws out the frames that have died meanwhile: the one it would take, or, where
            // it walks a full chain to its end, any of them.
            let unused = |&frame: &u32| memory.frames[frame as usize].mapped == 0;
            let dead = if chain.full < chain.dups.len() {
                Some(chain.dups[last]).filter(unused)
            } else {
                chain.dups.iter().copied().find(unused)
            };
            match dead {
                Some(frame) => self.prune(memory, frame),
                None if chain.full < chain.dups.len() => {
                    let frame = chain.dups[last];
                    if self.across_nodes || memory.frames[frame as usize].node.0 == tree {
                        return Some(frame);
                    }
                    self.follow(memory, frame);
                }
                None => return None,
            }
        }
    }

    /// A new merged frame, in the stable tree.
    pub(crate) fn insert_stable(&mut self, memory: &mut Memory, node: NodeKey, content: u64) -> u32 {
        let tree = self.of(node);
        let frame = memory.new_frame(content, node, tree);
        self.on_chain(tree, content, |chain| chain.dups.push(frame));
        frame
    }

    /// Changes a chain and keeps the sum of the walks.
    fn on_chain(&mut self, tree: u16, content: u64, change: impl FnOnce(&mut Chain)) {
        let pair = &mut self.pairs[usize::from(tree)];
        let chain = pair.stable.entry(content).or_default();
        pair.chain_walks -= chain.walk();
        change(chain);
        pair.chain_walks += chain.walk();
        if chain.dups.is_empty() {
            pair.stable.remove(&content);
        }
    }

    /// Hangs one more record on a merged frame.
    pub(crate) fn attach(&mut self, memory: &mut Memory, frame: u32) {
        let merged = &mut memory.frames[frame as usize];
        merged.items += 1;
        if merged.items == 1 {
            self.shared += 1;
        } else {
            self.sharing += 1;
        }
        if merged.items == self.max_page_sharing {
            let (tree, content) = (merged.tree, merged.content);
            self.on_chain(tree, content, |chain| chain.full += 1);
        }
    }

    /// Takes a record off a merged frame. If nobody uses the frame any more, ksmd notices now.
    pub(crate) fn detach(&mut self, memory: &mut Memory, frame: u32) {
        if frame == NONE {
            return;
        }
        let merged = memory.frames[frame as usize];
        if merged.mapped == 0 && !merged.pruned {
            self.prune(memory, frame);
        }
        let merged = &mut memory.frames[frame as usize];
        if !merged.pruned {
            if merged.items > 1 {
                self.sharing -= 1;
            } else {
                self.shared -= 1;
            }
            if merged.items == self.max_page_sharing {
                let (tree, content) = (merged.tree, merged.content);
                self.on_chain(tree, content, |chain| chain.full -= 1);
            }
        }
        let merged = &mut memory.frames[frame as usize];
        merged.items -= 1;
        if merged.items == 0 && merged.pruned {
            memory.free_frame(frame);
        }
    }

    /// Takes a frame that nobody maps any more out of the tree and the counters.
    fn prune(&mut self, memory: &mut Memory, frame: u32) {
        let max = self.max_page_sharing;
        let merged = &mut memory.frames[frame as usize];
        merged.pruned = true;
        let (tree, content, items) = (merged.tree, merged.content, merged.items);
        if items > 0 {
            self.shared -= 1;
            self.sharing -= u64::from(items - 1);
        }
        self.on_chain(tree, content, |chain| {
            // The place of the last one matters, that of the others does not.
            chain.dups.retain(|&other| other != frame);
            // Forks may exceed the limit by attaching to a full frame.
            chain.full -= usize::from(items >= max);
        });
        if items == 0 {
            memory.free_frame(frame);
        }
    }

    /// The page seen earlier in this scan that has this content still, if any.
    pub(crate) fn find_unstable(&self, memory: &Memory, tree: u16, content: u64, me: PageRef) -> Option<PageRef> {
        use crate::memory::Hold::{Forked, Private};
        let &(key, page) = self.pairs[usize::from(tree)].unstable.get(&content)?;
        let region = memory.region(key)?;
        // Nothing protects the pages of the unstable tree: it may have been written, merged, or unmarked, and marked
        // again since, which leaves it without a record until ksmd's next visit.
        let usable = region.content[page as usize] == content
            && matches!(region.hold[page as usize], Private | Forked)
            && region.marks.contains(page)
            && region.items[page as usize].live
            && (self.across_nodes || memory.node_of(region, page) == Some(NodeKey(tree)))
            && !memory.same_frame((key, page), me);
        usable.then_some((key, page))
    }

    pub(crate) fn insert_unstable(&mut self, tree: u16, content: u64, me: PageRef) {
        self.pairs[usize::from(tree)].unstable.insert(content, me);
    }

    pub(crate) fn remove_unstable(&mut self, tree: u16, content: u64) {
        self.pairs[usize::from(tree)].unstable.remove(&content);
    }

    /// Counts the chains anew and compares.
    #[cfg(test)]
    pub(crate) fn check_books(&self, memory: &Memory) {
        for (tree, pair) in self.pairs.iter().enumerate() {
            let mut walks = 0;
            for (content, chain) in &pair.stable {
                assert!(!chain.dups.is_empty());
                let full = |&&dup: &&u32| memory.frames[dup as usize].items >= self.max_page_sharing;
                assert_eq!(chain.full, chain.dups.iter().filter(full).count());
                let belongs = |&dup: &u32| {
                    let frame = memory.frames[dup as usize];
                    (frame.content, usize::from(frame.tree)) == (*content, tree)
                };
                assert!(chain.dups.iter().all(belongs));
                walks += chain.walk();
            }
            assert_eq!(pair.chain_walks, walks);
        }
    }
}
