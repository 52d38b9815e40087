//! ksmd's visit of one page, and its cost.

use super::Ksmd;
use super::trees::{Steps, UnstableSearch};
use crate::content;
use crate::knobs::{Classes, Forest};
use crate::memory::{Backing, ItemState, Memory, NONE, PageRef, PageWrites, Region, RmapItem};
use pagefold_engine::units::Vpn;

pub(super) struct VisitCost {
    pub(super) cost_ns: u64,
    /// Whether the visit counts in `pages_scanned`.
    pub(super) counts: bool,
}

impl Ksmd {
    pub(super) fn visit(&mut self, memory: &mut Memory, key: u32, page: u32) -> VisitCost {
        let costs = self.costs;
        let at = page as usize;
        let region = memory.region_mut(key).expect("found by next_stretch just before");
        let (backing, content, mut item) = (region.backing[at], region.content[at], region.items[at]);
        let writes = region.writes.get_mut(at).map(std::mem::take).unwrap_or_default();

        if matches!(backing, Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged) {
            if item.is_live() {
                region.items[at] = RmapItem::NONE;
                self.items -= 1;
                self.leave_unstable((key, page), &mut item);
                self.trees.detach(memory, item.frame);
            }
            return VisitCost { cost_ns: costs.pass_empty_ns, counts: false };
        }
        let class = self.class_of(region, at, writes, item);
        if !item.is_live() {
            item = RmapItem { state: ItemState::Known, ..RmapItem::NONE };
            self.items += 1;
        }
        if backing == Backing::Merged {
            return self.visit_merged(memory, key, page, item);
        }
        let checksum = content::checksum(content);
        if self.persistent() && item.state == ItemState::Unshared && item.class == class && item.checksum == checksum {
            // Nobody has written the page since the last comparison. It stays in its tree, where others can find it.
            self.spared += self.granularity.get();
            return VisitCost { cost_ns: costs.checksum_ns, counts: true };
        }
        self.leave_unstable((key, page), &mut item);
        item.class = class;
        // The record refers to a merged frame, but the page is private. So somebody has written it since.
        let frame = std::mem::replace(&mut item.frame, NONE);
        self.trees.detach(memory, frame);
        let visit = if self.knobs.smart_scan && !self.thorough && is_skipped(&mut item) {
            VisitCost { cost_ns: costs.visit_skipped_ns, counts: false }
        } else {
            let mut cost_ns = costs.checksum_ns;
            if item.checksum != checksum {
                item.checksum = checksum;
            } else if content == 0 && self.knobs.use_zero_pages && !is_pinned(memory, (key, page)) {
                memory.merge_zero(key, page);
                cost_ns += costs.merge_zero_ns;
            } else {
                cost_ns += self.search(memory, (key, page), content, &mut item);
            }
            VisitCost { cost_ns, counts: true }
        };
        if let Some(region) = memory.region_mut(key) {
            region.items[at] = item;
        }
        visit
    }

    /// Whether the unstable trees outlive a scan.
    fn persistent(&self) -> bool {
        matches!(self.knobs.forest, Forest::Classes(_))
    }

    /// Removes a page from the unstable tree (`remove_rmap_item_from_tree`). If a scan has emptied the tree, the page
    /// isn't there any more.
    pub(super) fn leave_unstable(&mut self, page: PageRef, item: &mut RmapItem) {
        if item.state != ItemState::Unshared {
            return;
        }
        if self.persistent() {
            self.trees.remove_unstable(u16::from(item.class), item.node, page);
        }
        item.state = ItemState::Known;
        self.unshared -= 1;
    }

    /// Visits a page that's already merged. After a fork, the child's page has no record yet.
    fn visit_merged(&mut self, memory: &mut Memory, key: u32, page: u32, mut item: RmapItem) -> VisitCost {
        self.leave_unstable((key, page), &mut item);
        let frame = memory.region(key).and_then(|region| region.merged_frame(page)).unwrap_or(NONE);
        if item.frame != frame {
            self.trees.detach(memory, item.frame);
            self.trees.attach(memory, frame);
            item.frame = frame;
        }
        self.trees.follow(memory, frame);
        if let Some(region) = memory.region_mut(key) {
            region.items[page as usize] = item;
        }
        VisitCost { cost_ns: self.costs.visit_merged_ns, counts: true }
    }

    /// The class of a page. If classes depend on writes, we take the class as of the last scan that found the page
    /// written. Taken literally, the paper's rule would never compare anything: a written page is volatile, and an
    /// unwritten one is in the class that isn't compared. A new page counts as wholly written.
    fn class_of(&self, region: &Region, page: usize, writes: PageWrites, item: RmapItem) -> u8 {
        let Forest::Classes(classes) = self.knobs.forest else { return 0 };
        match classes {
            Classes::Address => region.eighths.get(page).copied().unwrap_or_default(),
            _ if writes.times == 0 && item.is_live() => item.class,
            Classes::PageCount => writes.times.saturating_sub(1).min(15),
            Classes::SubPages if writes.times == 0 => 0b1111,
            Classes::SubPages => writes.parts,
        }
    }

    fn tree_of(&mut self, memory: &Memory, (key, page): PageRef, item: &RmapItem) -> u16 {
        match self.knobs.forest {
            Forest::Kernel => {
                let node = memory.region(key).and_then(|region| memory.node_of(region, page)).unwrap_or_default();
                self.trees.of_node(node)
            }
            Forest::Checksum { trees } => u16::try_from((item.checksum >> 1) % u32::from(trees.max(1))).unwrap_or(0),
            Forest::Classes(_) => u16::from(item.class),
        }
    }

    /// Searches the stable tree, then the unstable one. A frame found in the stable tree is kept. If the duplicate is
    /// in the unstable tree, the visited page's frame is kept (`try_to_merge_two_pages`), and determines the node.
    fn search(&mut self, memory: &mut Memory, me: PageRef, content: u64, item: &mut RmapItem) -> u64 {
        let mut steps = Steps::default();
        let (found, merge_ns) = self.find(memory, me, content, item, &mut steps);
        steps.stable = self.granularity.tree_depth(steps.stable);
        steps.unstable = self.granularity.tree_depth(steps.unstable);
        self.counts.search(self.granularity.get(), steps.stable, steps.unstable, found);
        merge_ns
            + steps.stable * self.costs.stable_level_ns
            + steps.dups * self.costs.chain_dup_ns
            + steps.unstable * self.costs.unstable_level_ns
    }

    /// Returns whether there's a duplicate, and the cost of merging.
    fn find(
        &mut self,
        memory: &mut Memory,
        me: PageRef,
        content: u64,
        item: &mut RmapItem,
        steps: &mut Steps,
    ) -> (bool, u64) {
        let tree = self.tree_of(memory, me, item);
        if let Some(frame) = self.trees.find_stable(memory, tree, content, steps) {
            if is_pinned(memory, me) {
                return (true, 0);
            }
            memory.join(me.0, me.1, frame);
            self.trees.attach(memory, frame);
            item.frame = frame;
            return (true, self.costs.merge_stable_ns);
        }
        let (other, at) = match self.trees.find_or_insert_unstable(memory, tree, content, me, steps) {
            UnstableSearch::Partner(other, _) if is_pinned(memory, me) || is_pinned(memory, other) => {
                return (true, 0);
            }
            UnstableSearch::Partner(other, at) => (other, at),
            UnstableSearch::Inserted(at) => {
                item.node = at;
                item.state = ItemState::Unshared;
                self.unshared += 1;
                return (false, 0);
            }
            UnstableSearch::Lost => return (false, 0),
        };
        self.trees.remove_unstable(tree, at, other);
        let node = memory.region(me.0).and_then(|region| memory.node_of(region, me.1)).unwrap_or_default();
        let fork_sharers = fork_sharers(memory, me);
        let frame = self.trees.insert_stable(memory, node, tree, content);
        memory.charge(frame, me.0);
        for (key, page) in [other, me] {
            memory.join(key, page, frame);
            self.trees.attach(memory, frame);
        }
        // Relatives that share the visited page's frame by fork now map the merged frame, too. Their pages get records
        // at ksmd's next visits.
        for (key, page) in fork_sharers {
            memory.join(key, page, frame);
        }
        item.frame = frame;
        if let Some(other) = memory.region_mut(other.0).map(|region| &mut region.items[other.1 as usize]) {
            other.frame = frame;
            if std::mem::replace(&mut other.state, ItemState::Known) == ItemState::Unshared {
                self.unshared -= 1;
            }
        }
        (true, self.costs.merge_pair_ns)
    }
}

/// The pages that share a page's frame by fork. We look only at the same address, because relatives don't move pages
/// here.
pub(super) fn fork_sharers(memory: &Memory, me: PageRef) -> Vec<PageRef> {
    let Some(region) = memory.region(me.0).filter(|_| memory.same_frame(me, me)) else { return Vec::new() };
    let at = Vpn(region.first + u64::from(me.1));
    let pages = memory.live_regions().filter_map(|(key, region)| Some((key, region.offset(at)?)));
    pages.filter(|&page| page != me && memory.same_frame(page, me)).collect()
}

/// Whether a page is pinned. The kernel doesn't merge pages with references that it can't explain
/// (`write_protect_page`).
fn is_pinned(memory: &Memory, page: PageRef) -> bool {
    memory.region(page.0).is_some_and(|region| region.is_pinned(page.1 as usize))
}

/// Whether `smart_scan` skips this visit. Counts visits and skips.
fn is_skipped(item: &mut RmapItem) -> bool {
    let age = item.age;
    item.age = age.saturating_add(1);
    if age < 3 {
        return false;
    }
    if item.skips_left == 0 {
        item.skips_left = match age {
            ..=3 => 1,
            4..=5 => 2,
            6..=8 => 4,
            _ => 8,
        };
        return false;
    }
    item.skips_left -= 1;
    true
}
