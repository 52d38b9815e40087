//! UKSM's work on one page: hashing, the two trees, and merging (UKSM sections 5.3 and 6).
//!
//! The trees are hash maps from contents; we compute the cost of a search in a tree ordered by hash from their sizes. A
//! content id of 64 bits stands for the page and for its hash at any strength: pages that differ never share a hash.

use pagefold_sim::memory::{Backing, Memory, PageRef};
use pagefold_sim::{Costs, Granularity, SearchCounts};
use rustc_hash::FxHashMap;

/// Words in a page, and so the full strength.
const WORDS: u32 = 1024;
/// Words in a cache line, as a power of two.
const LINE_WORDS_LOG2: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SampleOutcome {
    /// No page is mapped there, except possibly the zero page.
    Absent,
    /// Merged before.
    AlreadyMerged,
    /// No duplicate was found.
    Alone,
    /// Merged with a merged page or the zero page.
    Joined,
    /// Merged with a page of the unmerged tree.
    Paired(PageRef),
}

#[derive(Debug)]
pub(super) struct Search {
    costs: Costs,
    granularity: Granularity,
    zero_pages: bool,
    pub(super) hash_ns: u64,
    /// `T_rs`: the merged frame of each content.
    merged: FxHashMap<u64, u32>,
    /// `T_rus`: for each content, a page that had it when we sampled the page.
    unmerged: FxHashMap<u64, PageRef>,
    pub(super) counts: SearchCounts,
}

/// The depth of a balanced tree.
fn levels(nodes: u64) -> u64 {
    u64::from(u64::BITS - nodes.leading_zeros())
}

/// The cost of hashing `strength` words of a page: the words, and the cache lines that contain them.
fn hash_ns(costs: &Costs, strength: u32) -> u64 {
    let strength = strength.clamp(1, WORDS);
    // The probability that we don't touch a line, (1 - strength / 1024)^16, in 2^-20.
    let mut missed = u64::from(WORDS - strength) << 10;
    for _ in 0..LINE_WORDS_LOG2 {
        missed = (missed * missed) >> 20;
    }
    ((costs.hash_words_ns * u64::from(strength)) >> 10) + ((costs.hash_lines_ns * ((1 << 20) - missed)) >> 20)
}

impl Search {
    /// `granularity`: how many real pages a simulated page stands for. `strength`: words hashed of a page.
    pub(super) fn new(costs: &Costs, granularity: Granularity, strength: u32, zero_pages: bool) -> Self {
        let hash_ns = hash_ns(costs, strength);
        let merged = FxHashMap::default();
        let unmerged = FxHashMap::default();
        Self { costs: *costs, granularity, zero_pages, hash_ns, merged, unmerged, counts: SearchCounts::default() }
    }

    #[cfg(test)]
    pub(super) fn merged(&self) -> &FxHashMap<u64, u32> {
        &self.merged
    }

    /// Samples a page, and merges it if possible. Returns the outcome and the cost. The page stands for `weight`
    /// samples.
    pub(super) fn visit(&mut self, memory: &mut Memory, me: PageRef, weight: u64) -> (SampleOutcome, u64) {
        let (key, page) = me;
        let found = memory.region(key).and_then(|region| {
            let at = page as usize;
            Some((*region.backing.get(at)?, *region.content.get(at)?))
        });
        let content = match found {
            // Sampled pages aren't adjacent, so each one takes its own page-table walk.
            None | Some((Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged, _)) => {
                return (SampleOutcome::Absent, weight * self.costs.visit_merged_ns);
            }
            Some((Backing::Merged, _)) => return (SampleOutcome::AlreadyMerged, weight * self.costs.visit_merged_ns),
            Some((Backing::Private | Backing::Forked, content)) => content,
        };
        let cost_ns = weight * (self.costs.sample_ns + self.hash_ns);
        if content == 0 && self.zero_pages {
            // We know the hash of zeros without a tree; one comparison follows.
            self.counts.search(weight, 1, 0, true);
            memory.merge_zero(key, page);
            return (SampleOutcome::Joined, cost_ns + self.granularity.scale(self.costs.merge_zero_ns));
        }
        let (fate, search_ns) = self.search(memory, me, content, weight);
        (fate, cost_ns + search_ns)
    }

    /// Searches the merged tree, then the unmerged one.
    fn search(&mut self, memory: &mut Memory, me: PageRef, content: u64, weight: u64) -> (SampleOutcome, u64) {
        let mut steps = levels(self.granularity.scale(self.merged.len() as u64));
        if let Some(frame) = self.find_merged(memory, content) {
            self.count_path(steps, weight);
            self.counts.search(weight, 1, 0, true);
            memory.join(me.0, me.1, frame);
            let merge_ns = self.granularity.scale(self.costs.merge_stable_ns);
            return (SampleOutcome::Joined, weight * steps * self.costs.hash_level_ns + merge_ns);
        }
        self.count_path(steps, weight);
        let unmerged = levels(self.granularity.scale(self.unmerged.len() as u64));
        self.count_path(unmerged, weight);
        steps += unmerged;
        let mut cost_ns = weight * steps * self.costs.hash_level_ns;
        let mut compared = 0;
        // Nothing protects the pages of the unmerged tree: programs may have written or unmapped them, or they've been
        // merged.
        if let Some(&other) = self.unmerged.get(&content) {
            let now = if other == me || memory.same_frame(other, me) { None } else { unmerged_content(memory, other) };
            compared = u64::from(now.is_some());
            if now == Some(content) {
                self.counts.search(weight, 0, compared, true);
                self.pair(memory, other, me, content);
                return (SampleOutcome::Paired(other), cost_ns + self.granularity.scale(self.costs.merge_pair_ns));
            }
            cost_ns += weight * compared * self.costs.compare_page_ns;
        }
        self.counts.search(weight, 0, compared, false);
        self.unmerged.insert(content, me);
        (SampleOutcome::Alone, cost_ns)
    }

    /// Counts the hash comparisons of `times` searches.
    fn count_path(&mut self, steps: u64, times: u64) {
        self.counts.hashes += times * steps;
        self.counts.deepest = self.counts.deepest.max(steps);
    }

    /// The merged frame of a content. Removes a frame that's no longer mapped, and returns none.
    fn find_merged(&mut self, memory: &mut Memory, content: u64) -> Option<u32> {
        let &frame = self.merged.get(&content)?;
        if memory.frames[frame as usize].mapped > 0 {
            return Some(frame);
        }
        self.merged.remove(&content);
        memory.free_frame(frame);
        None
    }

    /// Merges two pages. We keep the page from the tree ("we move the page to `T_rs`"), which determines the node.
    fn pair(&mut self, memory: &mut Memory, other: PageRef, me: PageRef, content: u64) {
        self.unmerged.remove(&content);
        let node = memory.region(other.0).and_then(|region| memory.node_of(region, other.1)).unwrap_or_default();
        let frame = memory.new_frame(content, node, 0);
        memory.charge(frame, other.0);
        for (key, page) in [other, me] {
            memory.join(key, page, frame);
        }
        self.merged.insert(content, frame);
    }

    pub(super) fn empty_unmerged(&mut self) {
        self.unmerged.clear();
    }

    /// Frees the frames that are no longer mapped, once there are many.
    pub(super) fn prune(&mut self, memory: &mut Memory) {
        let in_use = usize::try_from(memory.merged_frames).unwrap_or(usize::MAX);
        if self.merged.len().saturating_sub(in_use) <= self.merged.len() / 8 {
            return;
        }
        self.merged.retain(|_, &mut frame| {
            let used = memory.frames[frame as usize].mapped > 0;
            if !used {
                memory.free_frame(frame);
            }
            used
        });
    }
}

/// The content of a page, if it's present and not merged.
fn unmerged_content(memory: &Memory, (key, page): PageRef) -> Option<u64> {
    let region = memory.region(key)?;
    match region.backing.get(page as usize)? {
        Backing::Private | Backing::Forked => Some(region.content[page as usize]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashing_costs_what_was_measured() {
        // pagefold-lab bench hash: the paper's hash at the strengths that the controller found; within a fifth.
        for (words, measured_ns) in [(360_u32, 1_388_u64), (1_024, 2_400)] {
            let found_ns = hash_ns(&Costs::default(), words);
            assert!(found_ns.abs_diff(measured_ns) * 5 < measured_ns, "{words} words: {found_ns} ns");
        }
        assert!(hash_ns(&Costs::default(), 1) < 50, "measured: 50 ns, including the index");
    }
}
