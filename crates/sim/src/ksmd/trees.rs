//! The trees are red-black trees like the kernel's, ordered by content id, and every step of a search counts as a
//! comparison. We simulate a search's side effects, too. It walks a chain on its path. If it meets a merged frame
//! that's no longer mapped, it removes that and starts again. It ends at a page of the unstable tree that is gone.
//!
//! There is one pair of trees, or one per memory node if `merge_across_nodes` is off, or a forest ([`Forest`]). When a
//! frame has moved to another node, ksmd's next visit moves it to that node's tree. If that tree has a frame with the
//! same content, both stay (the kernel would move the pages of one to the other).

use super::rbtree::{RbTree, SearchEnd};
use crate::knobs::{Forest, Knobs};
use crate::memory::{ItemState, Memory, NONE, PageRef};
use pagefold_engine::keys::NodeKey;

/// Stands for no tree: the frame was made on request and ksmd hasn't visited it yet (the kernel's `migrate_nodes`).
pub(super) const NO_TREE: u16 = u16::MAX;

/// A node of a stable tree: one content.
#[derive(Clone, Copy, Debug, Default)]
struct StableNode {
    content: u64,
    /// The content's merged frame, or [`NONE`] if it has several.
    frame: u32,
    /// The content's chain, if it has several frames.
    chain: u32,
}

/// The merged frames of a content that has more than one.
#[derive(Debug, Default)]
struct Chain {
    /// The frames. A search tries the last one first.
    dups: Vec<u32>,
    /// The number of frames that have reached `max_page_sharing`.
    full: usize,
}

impl Chain {
    /// How many frames a search walks in this chain. It stops at the first frame with room, which then moves to the
    /// front. So it walks one frame on average, or all of them if all are full.
    fn walk(&self) -> u64 {
        if self.full == self.dups.len() { self.full as u64 } else { 1 }
    }
}

#[derive(Debug, Default)]
struct TreePair {
    stable: RbTree<StableNode>,
    unstable: RbTree<PageRef>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steps {
    /// How many pages of the stable tree were compared.
    pub(crate) stable: u64,
    /// How many full frames of chains were walked.
    pub(crate) dups: u64,
    /// How many pages of the unstable tree were compared.
    pub(crate) unstable: u64,
}

#[derive(Debug)]
pub(crate) struct Trees {
    /// One pair for all pages, or one per node, or one per tree of the forest.
    pairs: Vec<TreePair>,
    chains: Vec<Chain>,
    free_chains: Vec<u32>,
    max_page_sharing: u32,
    across_nodes: bool,
    /// Whether the unstable trees survive the end of a scan.
    persistent: bool,
    /// `pages_shared`.
    pub(crate) shared: u64,
    /// `pages_sharing`.
    pub(crate) sharing: u64,
}

impl Trees {
    pub(crate) fn new(knobs: &Knobs) -> Self {
        assert!(knobs.max_page_sharing >= 2, "the kernel refuses max_page_sharing below 2");
        assert!(knobs.merge_across_nodes || knobs.forest == Forest::Kernel, "a forest requires merge_across_nodes");
        let mut pairs = Vec::new();
        pairs.resize_with(knobs.forest.trees(), TreePair::default);
        Self {
            pairs,
            chains: Vec::new(),
            free_chains: Vec::new(),
            max_page_sharing: knobs.max_page_sharing,
            across_nodes: knobs.merge_across_nodes,
            persistent: matches!(knobs.forest, Forest::Classes(_)),
            shared: 0,
            sharing: 0,
        }
    }

    /// The tree for pages on a node.
    pub(crate) fn of_node(&mut self, node: NodeKey) -> u16 {
        if self.across_nodes {
            return 0;
        }
        if self.pairs.len() <= usize::from(node.0) {
            self.pairs.resize_with(usize::from(node.0) + 1, TreePair::default);
        }
        node.0
    }

    /// How many pages and contents are in each pair of trees.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.pairs.iter().map(|pair| (pair.stable.len() + pair.unstable.len()) as u64).collect()
    }

    /// Empties the unstable trees, unless they're divided by class.
    pub(crate) fn begin_scan(&mut self) {
        if !self.persistent {
            self.pairs.iter_mut().for_each(|pair| pair.unstable.clear());
        }
    }

    pub(super) fn is_full(&self, memory: &Memory, frame: u32) -> bool {
        memory.frames[frame as usize].items >= self.max_page_sharing
    }

    /// Finds the tree's node for a content, or the place for one.
    fn locate(&self, tree: u16, content: u64) -> SearchEnd {
        self.pairs[usize::from(tree)].stable.search(|_, there| Some(content.cmp(&there.content)))
    }

    fn chain_of(&mut self, tree: u16, content: u64) -> Option<&mut Chain> {
        if tree == NO_TREE {
            return None;
        }
        let SearchEnd::Node(node) = self.locate(tree, content) else { return None };
        let chain = self.pairs[usize::from(tree)].stable.get(node)?.chain;
        self.chains.get_mut(chain as usize)
    }

    /// Adds a merged frame to a tree. Searches try it `first`, or last.
    fn add(&mut self, memory: &Memory, tree: u16, frame: u32, first: bool) {
        let content = memory.frames[frame as usize].content;
        let node = match self.locate(tree, content) {
            SearchEnd::Node(node) => node,
            SearchEnd::Leaf(leaf) => {
                self.pairs[usize::from(tree)].stable.insert(leaf, StableNode { content, frame, chain: NONE });
                return;
            }
            SearchEnd::Stuck(_) => return,
        };
        let Some(mut there) = self.pairs[usize::from(tree)].stable.get(node) else { return };
        let full = usize::from(self.is_full(memory, frame));
        if there.frame != NONE {
            let chain = Chain { dups: vec![there.frame], full: usize::from(self.is_full(memory, there.frame)) };
            there = StableNode { frame: NONE, chain: self.new_chain(chain), ..there };
            self.pairs[usize::from(tree)].stable.set(node, there);
        }
        let chain = &mut self.chains[there.chain as usize];
        chain.dups.insert(if first { chain.dups.len() } else { 0 }, frame);
        chain.full += full;
    }

    /// Removes a merged frame from its tree, if it is in one.
    fn drop(&mut self, memory: &Memory, frame: u32) {
        let merged = memory.frames[frame as usize];
        if merged.tree == NO_TREE {
            return;
        }
        let full = usize::from(self.is_full(memory, frame));
        let SearchEnd::Node(node) = self.locate(merged.tree, merged.content) else { return };
        let stable = &mut self.pairs[usize::from(merged.tree)].stable;
        let Some(there) = stable.get(node) else { return };
        if there.frame == frame {
            stable.remove(node);
            return;
        }
        let Some(chain) = self.chains.get_mut(there.chain as usize) else { return };
        // The order of the frames doesn't matter, except which one is last.
        chain.dups.retain(|&other| other != frame);
        chain.full -= full;
        if let [only] = chain.dups[..] {
            stable.set(node, StableNode { frame: only, chain: NONE, ..there });
            *chain = Chain::default();
            self.free_chains.push(there.chain);
        }
    }

    fn new_chain(&mut self, chain: Chain) -> u32 {
        if let Some(free) = self.free_chains.pop() {
            self.chains[free as usize] = chain;
            return free;
        }
        self.chains.push(chain);
        u32::try_from(self.chains.len() - 1).expect("fewer than 2^32 chains")
    }

    /// Moves a merged frame to the tree of its node, or puts it there if it was in no tree.
    pub(crate) fn follow(&mut self, memory: &mut Memory, frame: u32) {
        let merged = memory.frames[frame as usize];
        let there = merged.tree != NO_TREE && (self.across_nodes || merged.tree == merged.node.0);
        if there || merged.pruned {
            return;
        }
        self.drop(memory, frame);
        let tree = self.of_node(merged.node);
        memory.frames[frame as usize].tree = tree;
        // We add it as the last to try: if any frame of the content has room, searches must first try one that has.
        self.add(memory, tree, frame, false);
    }

    /// The merged frame with this content that has room for another page (`stable_tree_search`).
    pub(crate) fn find_stable(
        &mut self,
        memory: &mut Memory,
        tree: u16,
        content: u64,
        steps: &mut Steps,
    ) -> Option<u32> {
        loop {
            let mut dead = NONE;
            let found = self.pairs[usize::from(tree)].stable.search(|_, there| {
                match self.chains.get(there.chain as usize) {
                    None if memory.frames[there.frame as usize].mapped == 0 => {
                        dead = there.frame;
                        return None;
                    }
                    chain => steps.dups += chain.map_or(0, Chain::walk),
                }
                steps.stable += 1;
                Some(content.cmp(&there.content))
            });
            let node = match found {
                SearchEnd::Leaf(_) => return None,
                SearchEnd::Node(node) => self.pairs[usize::from(tree)].stable.get(node)?,
                SearchEnd::Stuck(_) => {
                    self.prune(memory, dead);
                    continue;
                }
            };
            let frame = match self.chains.get_mut(node.chain as usize) {
                None => Some(node.frame).filter(|&frame| !self.is_full(memory, frame))?,
                Some(chain) => {
                    let last = chain.dups.len() - 1;
                    let room = |&frame: &u32| memory.frames[frame as usize].items < self.max_page_sharing;
                    let any_room = chain.full < chain.dups.len();
                    if any_room && !room(&chain.dups[last]) {
                        let place = chain.dups.iter().position(room)?;
                        chain.dups.swap(place, last);
                    }
                    // A search removes a frame that's no longer mapped: the one that it would use, or one in a full
                    // chain that it walks.
                    let unused = |&frame: &u32| memory.frames[frame as usize].mapped == 0;
                    let dead = if any_room {
                        Some(chain.dups[last]).filter(unused)
                    } else {
                        chain.dups.iter().copied().find(unused)
                    };
                    match dead {
                        Some(frame) => {
                            self.prune(memory, frame);
                            continue;
                        }
                        None if any_room => chain.dups[last],
                        None => return None,
                    }
                }
            };
            if self.across_nodes || memory.frames[frame as usize].node.0 == tree {
                return Some(frame);
            }
            self.follow(memory, frame);
        }
    }

    /// Creates a merged frame in a stable tree.
    pub(crate) fn insert_stable(&mut self, memory: &mut Memory, node: NodeKey, tree: u16, content: u64) -> u32 {
        let frame = memory.new_frame(content, node, tree);
        self.add(memory, tree, frame, true);
        frame
    }

    /// Adds a record to a merged frame.
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
            if let Some(chain) = self.chain_of(tree, content) {
                chain.full += 1;
            }
        }
    }

    /// Takes a record off a merged frame. If the frame is no longer mapped, ksmd notices that now.
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
                if let Some(chain) = self.chain_of(tree, content) {
                    chain.full -= 1;
                }
            }
        }
        let merged = &mut memory.frames[frame as usize];
        merged.items -= 1;
        if merged.items == 0 && merged.pruned {
            memory.free_frame(frame);
        }
    }

    /// Removes a frame that is no longer mapped from the tree and the counters.
    fn prune(&mut self, memory: &mut Memory, frame: u32) {
        self.drop(memory, frame);
        let merged = &mut memory.frames[frame as usize];
        merged.pruned = true;
        if merged.items > 0 {
            self.shared -= 1;
            self.sharing -= u64::from(merged.items - 1);
        } else {
            memory.free_frame(frame);
        }
    }

    /// Finds an earlier page that still has this content, or inserts the page itself into the unstable tree
    /// (`unstable_tree_search_insert`).
    pub(crate) fn find_or_insert_unstable(
        &mut self,
        memory: &Memory,
        tree: u16,
        content: u64,
        me: PageRef,
        steps: &mut Steps,
    ) -> UnstableSearch {
        use crate::memory::Backing::{Forked, Private};
        loop {
            let mut relative = false;
            let found = self.pairs[usize::from(tree)].unstable.search(|node, (key, page)| {
                let region = memory.region(key)?;
                // Pages in the unstable tree aren't write-protected. After its insertion, this one may have been written,
                // merged, or unmarked and marked again. In the last case it has no item until ksmd's next visit.
                let item = region.items.get(page as usize)?;
                let comparable = matches!(region.backing[page as usize], Private | Forked)
                    && region.marks.contains(page)
                    && item.state == ItemState::Unshared
                    && item.node == node
                    && (!self.persistent || u16::from(item.class) == tree);
                if !comparable {
                    return None;
                }
                relative = memory.same_frame((key, page), me);
                if relative {
                    return None;
                }
                steps.unstable += 1;
                Some(content.cmp(&region.content[page as usize]))
            });
            let unstable = &mut self.pairs[usize::from(tree)].unstable;
            match found {
                SearchEnd::Leaf(leaf) => return UnstableSearch::Inserted(unstable.insert(leaf, me)),
                SearchEnd::Node(node) => {
                    let Some(partner) = unstable.get(node) else { return UnstableSearch::Lost };
                    let on_node = || memory.region(partner.0).and_then(|region| memory.node_of(region, partner.1));
                    let apart = !self.across_nodes && on_node() != Some(NodeKey(tree));
                    return if apart { UnstableSearch::Lost } else { UnstableSearch::Partner(partner, node) };
                }
                // In a persistent tree, a page that is gone would block its path for ever.
                SearchEnd::Stuck(node) if self.persistent && !relative => unstable.remove(node),
                SearchEnd::Stuck(_) => return UnstableSearch::Lost,
            }
        }
    }

    /// Removes a page from an unstable tree if it is at this node.
    pub(crate) fn remove_unstable(&mut self, tree: u16, node: u32, me: PageRef) {
        let unstable = &mut self.pairs[usize::from(tree)].unstable;
        if unstable.get(node) == Some(me) {
            unstable.remove(node);
        }
    }

    /// Recounts the chains, and compares with their counters.
    #[cfg(test)]
    pub(crate) fn check_counters(&self, memory: &Memory) {
        for (frame, merged) in (0_u32..).zip(&memory.frames) {
            if memory.is_free(frame) || merged.pruned || merged.tree == NO_TREE {
                continue;
            }
            let SearchEnd::Node(node) = self.locate(merged.tree, merged.content) else {
                panic!("frame {frame} is in no tree");
            };
            let there = self.pairs[usize::from(merged.tree)].stable.get(node).unwrap();
            match self.chains.get(there.chain as usize) {
                None => assert_eq!(there.frame, frame),
                Some(chain) => {
                    assert!(chain.dups.len() > 1 && chain.dups.contains(&frame));
                    let full = |&&dup: &&u32| self.is_full(memory, dup);
                    assert_eq!(chain.full, chain.dups.iter().filter(full).count());
                }
            }
        }
        let contents: usize = self.pairs.iter().map(|pair| pair.stable.len()).sum();
        assert!(contents <= memory.frames.len(), "a content without a frame");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnstableSearch {
    /// A page with the same content, and its node.
    Partner(PageRef, u32),
    /// No page has the same content. The visited page is now in the tree, at this node.
    Inserted(u32),
    /// The search has met a page that ksmd can't compare with. ksmd will try again at a later visit.
    Lost,
}
