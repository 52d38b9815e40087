//! A red-black tree like the kernel's (`lib/rbtree.c`): the caller compares at every node of a search. So the order may
//! depend on data outside the tree, and may be wrong, as in ksmd's unstable tree, whose pages change.
//!
//! Nodes are elements of one vector, and keep their number until we remove them.

use std::cmp::Ordering;

/// No node: the child of every leaf.
const NIL: u32 = 0;

#[derive(Clone, Copy, Debug, Default)]
struct Node<T> {
    value: T,
    /// The smaller and the larger child.
    below: [u32; 2],
    above: u32,
    red: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct RbTree<T> {
    /// The nodes by their number. Number 0 is [`NIL`], which is black and may be the parent or child of any node.
    nodes: Vec<Node<T>>,
    free: Vec<u32>,
    root: u32,
}

/// Where a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchEnd {
    /// At an equal node.
    Node(u32),
    /// At the place for a new node.
    Leaf(Leaf),
    /// At a node that we can't compare with.
    Stuck(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    above: u32,
    side: usize,
}

impl<T: Copy + Default> Default for RbTree<T> {
    fn default() -> Self {
        Self { nodes: vec![Node::default()], free: Vec::new(), root: NIL }
    }
}

impl<T: Copy + Default> RbTree<T> {
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - 1 - self.free.len()
    }

    pub(crate) fn clear(&mut self) {
        self.nodes.truncate(1);
        self.nodes[0] = Node::default();
        self.free.clear();
        self.root = NIL;
    }

    /// The value of a node, if it exists.
    pub(crate) fn get(&self, node: u32) -> Option<T> {
        (node != NIL).then(|| self.nodes.get(node as usize).map(|node| node.value))?
    }

    pub(crate) fn set(&mut self, node: u32, value: T) {
        self.nodes[node as usize].value = value;
    }

    /// Searches from the root. `compare` compares the value that we search for with a node's. `None` ends the search.
    pub(crate) fn search(&self, mut compare: impl FnMut(u32, T) -> Option<Ordering>) -> SearchEnd {
        let mut leaf = Leaf { above: NIL, side: 0 };
        let mut at = self.root;
        while at != NIL {
            let node = &self.nodes[at as usize];
            let side = match compare(at, node.value) {
                Some(Ordering::Less) => 0,
                Some(Ordering::Greater) => 1,
                Some(Ordering::Equal) => return SearchEnd::Node(at),
                None => return SearchEnd::Stuck(at),
            };
            leaf = Leaf { above: at, side };
            at = node.below[side];
        }
        SearchEnd::Leaf(leaf)
    }

    /// Inserts a node where a search ended, and returns its number. The tree mustn't have changed since the search.
    pub(crate) fn insert(&mut self, leaf: Leaf, value: T) -> u32 {
        let new = Node { value, below: [NIL; 2], above: leaf.above, red: true };
        let at = if let Some(free) = self.free.pop() {
            self.nodes[free as usize] = new;
            free
        } else {
            self.nodes.push(new);
            u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 nodes")
        };
        match leaf.above {
            NIL => self.root = at,
            above => self.nodes[above as usize].below[leaf.side] = at,
        }
        self.balance_new(at);
        at
    }

    /// Restores the rule that no red node has a red parent.
    fn balance_new(&mut self, mut at: u32) {
        while self.is_red(self.above(at)) {
            let (parent, grandparent) = (self.above(at), self.above(self.above(at)));
            let side = self.side(parent);
            let uncle = self.below(grandparent, 1 - side);
            if self.is_red(uncle) {
                for node in [parent, uncle] {
                    self.nodes[node as usize].red = false;
                }
                self.nodes[grandparent as usize].red = true;
                at = grandparent;
                continue;
            }
            if self.side(at) != side {
                at = parent;
                self.rotate(at, side);
            }
            let (parent, grandparent) = (self.above(at), self.above(self.above(at)));
            self.nodes[parent as usize].red = false;
            self.nodes[grandparent as usize].red = true;
            self.rotate(grandparent, 1 - side);
        }
        self.nodes[self.root as usize].red = false;
    }

    pub(crate) fn remove(&mut self, at: u32) {
        let [less, more] = self.nodes[at as usize].below;
        // The node that fills the gap, and whether the paths through it have lost a black node.
        let (filler, lost_black);
        if less == NIL || more == NIL {
            filler = if less == NIL { more } else { less };
            lost_black = !self.is_red(at);
            self.replace(at, filler);
        } else {
            // The successor, which has no smaller child, takes the place of the removed node.
            let mut next = more;
            while self.below(next, 0) != NIL {
                next = self.below(next, 0);
            }
            filler = self.below(next, 1);
            lost_black = !self.is_red(next);
            if self.above(next) == at {
                self.nodes[filler as usize].above = next;
            } else {
                self.replace(next, filler);
                self.nodes[next as usize].below[1] = more;
                self.nodes[more as usize].above = next;
            }
            self.replace(at, next);
            self.nodes[next as usize].below[0] = less;
            self.nodes[less as usize].above = next;
            self.nodes[next as usize].red = self.is_red(at);
        }
        if lost_black {
            self.balance_gap(filler);
        }
        self.nodes[0] = Node::default();
        self.nodes[at as usize].value = T::default();
        self.free.push(at);
    }

    /// Restores the rule that every path has the same number of black nodes, if the paths through `at` lack one.
    fn balance_gap(&mut self, mut at: u32) {
        while at != self.root && !self.is_red(at) {
            let parent = self.above(at);
            let side = usize::from(self.below(parent, 1) == at);
            let mut sibling = self.below(parent, 1 - side);
            if self.is_red(sibling) {
                self.nodes[sibling as usize].red = false;
                self.nodes[parent as usize].red = true;
                self.rotate(parent, side);
                sibling = self.below(parent, 1 - side);
            }
            let [near, far] = [self.below(sibling, side), self.below(sibling, 1 - side)];
            if !self.is_red(near) && !self.is_red(far) {
                self.nodes[sibling as usize].red = true;
                at = parent;
                continue;
            }
            if !self.is_red(far) {
                self.nodes[near as usize].red = false;
                self.nodes[sibling as usize].red = true;
                self.rotate(sibling, 1 - side);
                sibling = self.below(parent, 1 - side);
            }
            self.nodes[sibling as usize].red = self.is_red(parent);
            self.nodes[parent as usize].red = false;
            let far = self.below(sibling, 1 - side);
            self.nodes[far as usize].red = false;
            self.rotate(parent, side);
            at = self.root;
        }
        self.nodes[at as usize].red = false;
    }

    fn replace(&mut self, old: u32, new: u32) {
        let above = self.above(old);
        if above == NIL {
            self.root = new;
        } else {
            let side = self.side(old);
            self.nodes[above as usize].below[side] = new;
        }
        self.nodes[new as usize].above = above;
    }

    /// Rotates a node down to one side. Its child on the other side takes its place.
    fn rotate(&mut self, at: u32, side: usize) {
        let up = self.below(at, 1 - side);
        let between = self.below(up, side);
        self.nodes[at as usize].below[1 - side] = between;
        if between != NIL {
            self.nodes[between as usize].above = at;
        }
        self.replace(at, up);
        self.nodes[up as usize].below[side] = at;
        self.nodes[at as usize].above = up;
    }

    fn is_red(&self, at: u32) -> bool {
        self.nodes[at as usize].red
    }

    fn above(&self, at: u32) -> u32 {
        self.nodes[at as usize].above
    }

    fn below(&self, at: u32, side: usize) -> u32 {
        self.nodes[at as usize].below[side]
    }

    /// On which side of its parent a node is.
    fn side(&self, at: u32) -> usize {
        usize::from(self.below(self.above(at), 1) == at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn find(tree: &RbTree<u64>, key: u64) -> (SearchEnd, u64) {
        let mut steps = 0;
        let found = tree.search(|_, value| {
            steps += 1;
            Some(key.cmp(&value))
        });
        (found, steps)
    }

    /// How many black nodes every path down from a node has.
    fn black_height(tree: &RbTree<u64>, at: u32) -> u32 {
        if at == NIL {
            return 1;
        }
        let node = &tree.nodes[at as usize];
        for below in node.below.into_iter().filter(|&below| below != NIL) {
            assert_eq!(tree.above(below), at);
            assert!(!(node.red && tree.is_red(below)), "red below red");
        }
        let [less, more] = node.below.map(|below| black_height(tree, below));
        assert_eq!(less, more);
        less + u32::from(!node.red)
    }

    fn in_order(tree: &RbTree<u64>, at: u32, all: &mut Vec<u64>) {
        if at != NIL {
            in_order(tree, tree.below(at, 0), all);
            all.push(tree.nodes[at as usize].value);
            in_order(tree, tree.below(at, 1), all);
        }
    }

    proptest! {
        /// Compares the tree with a plain map, and checks both red-black rules.
        #[test]
        fn agrees_with_a_plain_map(steps in proptest::collection::vec((0u64..200, any::<bool>()), 0..800)) {
            let mut tree = RbTree::default();
            let mut model = BTreeMap::new();
            for (key, insert) in steps {
                match (find(&tree, key).0, insert) {
                    (SearchEnd::Leaf(leaf), true) => { model.insert(key, tree.insert(leaf, key)); }
                    (SearchEnd::Node(node), false) => {
                        prop_assert_eq!(model.remove(&key), Some(node), "nodes keep their number");
                        tree.remove(node);
                    }
                    (SearchEnd::Node(node), true) => prop_assert_eq!(model.get(&key), Some(&node)),
                    (SearchEnd::Leaf(_), false) => prop_assert!(!model.contains_key(&key)),
                    (SearchEnd::Stuck(_), _) => unreachable!(),
                }
                black_height(&tree, tree.root);
                prop_assert!(!tree.is_red(tree.root));
            }
            let mut all = Vec::new();
            in_order(&tree, tree.root, &mut all);
            prop_assert_eq!(all, model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(tree.len(), model.len());
        }
    }

    #[test]
    fn a_search_takes_about_log2_steps() {
        let mut tree = RbTree::default();
        let mut keys = pagefold_engine::random::Random::for_purpose(1, 1);
        for _ in 0..100_000 {
            let key = keys.next();
            if let SearchEnd::Leaf(leaf) = find(&tree, key).0 {
                tree.insert(leaf, key);
            }
        }
        let steps: u64 = (0..10_000).map(|_| find(&tree, keys.next()).1).sum();
        let mean = steps as f64 / 10_000.0;
        assert!((16.0..18.5).contains(&mean), "{mean} steps, log2 is 16.6");
    }
}
