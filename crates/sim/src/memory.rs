//! The memory of the simulated machine: processes, their regions, and for each page its content and its backing.
//! Implements frames and copy-on-write; ksmd's scanning is elsewhere.
//!
//! A content id stands for a page's 4096 bytes; 0 is the page of zeros. A page takes 9 bytes here, 13 once any page of
//! its region is merged or forked, and 16 more once ksmd has visited it. With several memory nodes it takes one more
//! once it's read, and two more if its region is on several nodes. With classes by writes it takes six more.

mod ground_truth;
mod marks;
mod nodes;
mod page;
mod region;

pub use ground_truth::GroundTruth;
pub(crate) use nodes::MoveResult;
pub use nodes::{Nodes, ProcessNuma};
pub use page::{Backing, PageRef};
pub(crate) use page::{ItemState, NONE, PageWrites, RmapItem};
use pagefold_engine::host::{PageState, Span};
use pagefold_engine::keys::{DomainKey, FamilyKey, NodeKey, OwnerKey, RegionKey};
use pagefold_engine::units::{EXTENT_PAGES, Vpn};
pub use region::{Owner, Region};
use std::collections::BTreeSet;
use std::ops::Range;

/// A frame that several pages share after a merge (the kernel's `stable_node` and its page).
#[derive(Clone, Copy, Debug, Default)]
pub struct MergedFrame {
    pub content: u64,
    /// How many pages map the frame. At 0 it's free, although ksmd may not have noticed.
    pub mapped: u32,
    /// How many of ksmd's records refer to the frame.
    pub(crate) items: u32,
    /// Whether ksmd has removed the frame from the stable tree. We keep it until no record refers to it.
    pub(crate) pruned: bool,
    pub(crate) node: NodeKey,
    /// The process whose copy was kept. The frame stays charged to this process's cgroup.
    pub(crate) payer: u32,
    /// The stable tree that the frame is in: its node's if `merge_across_nodes` is off.
    pub(crate) tree: u16,
}

#[derive(Debug, Default)]
pub struct Memory {
    pub owners: Vec<Owner>,
    /// The processes that have any regions.
    mapping_owners: BTreeSet<u32>,
    regions: Vec<Option<Box<Region>>>,
    /// The owner of each region, also of regions that have ended.
    region_owners: Vec<u32>,
    pub frames: Vec<MergedFrame>,
    free_frames: Vec<u32>,
    /// How many pages map each fork-shared frame.
    shares: Vec<u32>,
    /// How many pages map merged frames.
    pub merged_pages: u64,
    pub merged_frames: u64,
    /// How many pages of zeros ksmd has replaced by the zero page.
    pub zero_merged: u64,
    /// Writes to merged pages.
    pub(crate) cow_breaks: u64,
    /// Whether we record writes, for classes.
    pub(crate) keeps_writes: bool,
    pub nodes: Nodes,
}

impl Memory {
    /// An empty memory. `keeps_writes`: record writes, for classes.
    pub(crate) fn new(keeps_writes: bool) -> Self {
        Self { keeps_writes, ..Self::default() }
    }

    pub fn add_owner(&mut self, untouchable: bool, domain: DomainKey, numa: ProcessNuma) -> OwnerKey {
        let key = u32::try_from(self.owners.len()).expect("fewer than 2^32 processes in a run");
        self.owners.push(Owner { untouchable, domain, numa, lineage: key, ..Owner::default() });
        OwnerKey(key)
    }

    pub fn region(&self, key: u32) -> Option<&Region> {
        self.regions.get(key as usize)?.as_deref()
    }

    pub(crate) fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        self.regions.get_mut(key as usize)?.as_deref_mut()
    }

    /// The process that a region belongs to, or belonged to while it was mapped.
    pub(crate) fn owner_of(&self, key: u32) -> Option<&Owner> {
        self.owners.get(*self.region_owners.get(key as usize)? as usize)
    }

    /// Maps a region with the given contents and backing.
    pub fn map(
        &mut self,
        owner: OwnerKey,
        family: FamilyKey,
        first: Vpn,
        pages: (Vec<u64>, Vec<Backing>),
        huge: bool,
    ) -> RegionKey {
        let (content, backing) = pages;
        assert!(
            content.len() == backing.len() && u32::try_from(content.len()).is_ok(),
            "a region has below 2^32 pages"
        );
        let key = u32::try_from(self.regions.len()).expect("fewer than 2^32 regions in a run");
        let mut region = Region {
            owner: owner.0,
            family,
            first: first.0,
            content,
            backing,
            node: self.owners[owner.0 as usize].numa.home,
            ..Region::default()
        };
        if huge {
            let extents = region.extent(region.len().max(1) - 1) + 1;
            // A huge page needs a whole, aligned extent.
            let whole =
                |extent: u64| extent * EXTENT_PAGES >= region.first && (extent + 1) * EXTENT_PAGES <= region.end();
            region.huge = (region.first / EXTENT_PAGES..).take(extents).map(whole).collect();
        }
        let end = region.end();
        self.regions.push(Some(Box::new(region)));
        self.region_owners.push(owner.0);
        let of_owner = &self.owners[owner.0 as usize].regions;
        let place =
            of_owner.partition_point(|&other| self.regions[other as usize].as_ref().is_some_and(|r| r.first < first.0));
        let clear = |other: Option<&u32>, free: &dyn Fn(&Region) -> bool| {
            other.is_none_or(|&other| self.regions[other as usize].as_deref().is_none_or(free))
        };
        assert!(
            clear(of_owner.get(place), &|r| r.first >= end)
                && clear(place.checked_sub(1).and_then(|before| of_owner.get(before)), &|r| r.end() <= first.0),
            "regions of one process must not overlap"
        );
        self.mapping_owners.insert(owner.0);
        let owner = &mut self.owners[owner.0 as usize];
        owner.regions.insert(place, key);
        owner.changes += 1;
        RegionKey(key)
    }

    /// Maps private pages with these contents right below a region, before anything in it is marked. pagefold takes both
    /// mappings for one region. The kernel doesn't join them: it can't join new memory to a mapping that it has forked.
    pub fn map_below(&mut self, key: u32, content: &[u64]) {
        let region = self.region_mut(key).expect("a region that is mapped");
        let is_plain = region.items.is_empty() && region.marks.is_empty() && region.pinned.is_empty();
        assert!(is_plain && region.huge.is_empty() && region.nodes.is_empty() && region.reads.is_empty());
        assert!(region.writes.is_empty() && region.eighths.is_empty() && region.seam == 0);
        region.first -= content.len() as u64;
        region.seam = u32::try_from(content.len()).expect("a region has below 2^32 pages");
        region.content.splice(0..0, content.iter().copied());
        region.backing.splice(0..0, content.iter().map(|_| Backing::Private));
        if !region.frame.is_empty() {
            region.frame.splice(0..0, content.iter().map(|_| NONE));
        }
        let owner = region.owner;
        self.owners[owner as usize].changes += 1;
    }

    /// Unmaps a region. ksmd's records of it become stale.
    pub fn unmap(&mut self, key: u32) {
        let pages = self.region(key).map_or(0, Region::len);
        for page in 0..pages {
            self.unmap_page(key, page);
        }
        let Some(mut region) = self.regions[key as usize].take() else { return };
        let owner = &mut self.owners[region.owner as usize];
        owner.regions.retain(|&other| other != key);
        if owner.regions.is_empty() {
            self.mapping_owners.remove(&region.owner);
        }
        owner.changes += 1;
        owner.make_stale(&mut region.items);
    }

    /// Unmaps a page and frees its frame if no other page maps it.
    fn unmap_page(&mut self, key: u32, page: u32) {
        let page = page as usize;
        let Some(region) = self.regions[key as usize].as_deref_mut() else { return };
        let frame = region.frame_of(page);
        match std::mem::replace(&mut region.backing[page], Backing::Absent) {
            Backing::Merged => {
                self.merged_pages -= 1;
                let merged = &mut self.frames[frame as usize];
                merged.mapped -= 1;
                if merged.mapped == 0 {
                    self.merged_frames -= 1;
                    self.free_merged(frame);
                }
            }
            Backing::ZeroMerged => self.zero_merged -= 1,
            Backing::Forked => {
                self.shares[frame as usize] -= 1;
                if self.shares[frame as usize] == 0 {
                    self.free_private(key, page);
                }
            }
            Backing::Private => self.free_private(key, page),
            Backing::Absent | Backing::ZeroMapped => {}
        }
    }

    pub fn write(&mut self, key: u32, page: u32, content: u64) {
        self.write_parts(key, page, content, u8::MAX);
    }

    /// Writes some quarters of a page. The page gets a frame of its own if it has none.
    pub(crate) fn write_parts(&mut self, key: u32, page: u32, content: u64, parts: u8) {
        let keeps_writes = self.keeps_writes;
        if let Some(region) = self.region_mut(key) {
            let backing = region.backing[page as usize];
            region.broken += u64::from(matches!(backing, Backing::Merged | Backing::ZeroMerged));
            self.cow_breaks += u64::from(backing == Backing::Merged);
        }
        self.make_private(key, page);
        if let Some(region) = self.region_mut(key) {
            region.content[page as usize] = content;
            if keeps_writes {
                region.writes.resize(region.content.len(), PageWrites::default());
                let writes = &mut region.writes[page as usize];
                *writes = PageWrites { times: writes.times.saturating_add(1), parts: writes.parts | parts & 0b1111 };
            }
        }
    }

    /// Unmaps a page, or replaces it by the zero page.
    pub fn drop_page(&mut self, key: u32, page: u32, zero: bool) {
        self.unmap_page(key, page);
        if let Some(region) = self.region_mut(key) {
            region.content[page as usize] = 0;
            region.backing[page as usize] = if zero { Backing::ZeroMapped } else { Backing::Absent };
        }
    }

    fn make_private(&mut self, key: u32, page: u32) {
        let Some(region) = self.region(key) else { return };
        // The last page that maps a fork-shared frame keeps that (`wp_can_reuse_anon_folio`).
        let keeps = self.state(region, page) == PageState::Private;
        if keeps {
            let share = region.frame_of(page as usize);
            if region.backing[page as usize] == Backing::Forked {
                self.shares[share as usize] -= 1;
            }
        } else {
            self.unmap_page(key, page);
            self.allocate_private(key, page);
        }
        if let Some(region) = self.region_mut(key) {
            region.backing[page as usize] = Backing::Private;
        }
    }

    /// Unmarks a range, and copies each merged page of its marked parts. Returns the number of copies. Where nothing is
    /// marked, the kernel does nothing. ksmd's records of the range become stale. (If the range is marked again before
    /// ksmd's next visit, the kernel would reuse them; we make new ones.)
    pub(crate) fn unmerge(&mut self, key: u32, range: &Range<u32>) -> u64 {
        let mut copied = 0;
        for page in range.clone() {
            let is_merged = |region: &Region| {
                let backing = region.backing[page as usize];
                region.marks.contains(page) && matches!(backing, Backing::Merged | Backing::ZeroMerged)
            };
            if self.region(key).is_some_and(is_merged) {
                self.make_private(key, page);
                copied += 1;
            }
        }
        if let Some(region) = self.regions[key as usize].as_deref_mut() {
            region.marks.remove(range);
            if let Some(items) = region.items.get_mut(range.start as usize..range.end as usize) {
                self.owners[region.owner as usize].make_stale(items);
            }
        }
        copied
    }

    /// Makes a page map a merged frame.
    pub fn join(&mut self, key: u32, page: u32, frame: u32) {
        self.split(key, page);
        self.unmap_page(key, page);
        if self.frames[frame as usize].mapped == 0 {
            self.merged_frames += 1;
            self.allocate_merged(frame);
        }
        let merged = &mut self.frames[frame as usize];
        merged.mapped += 1;
        let content = merged.content;
        self.merged_pages += 1;
        if let Some(region) = self.region_mut(key) {
            // Merging mustn't change a page. The kernel compares every byte first.
            assert_eq!(region.content[page as usize], content, "a merge must not change a page");
            region.backing[page as usize] = Backing::Merged;
            region.set_frame(page as usize, frame);
        }
    }

    /// Makes a page of zeros map the zero page.
    pub fn merge_zero(&mut self, key: u32, page: u32) {
        self.split(key, page);
        if self.region(key).is_none_or(|region| region.backing[page as usize] == Backing::ZeroMapped) {
            return;
        }
        self.unmap_page(key, page);
        self.zero_merged += 1;
        if let Some(region) = self.region_mut(key) {
            region.backing[page as usize] = Backing::ZeroMerged;
        }
    }

    /// Splits the huge page that contains a page, as a merge does. Linux 6.12 then maps the zero page in place of its
    /// zeros (`try_to_map_unused_to_zeropage`), and KSM doesn't count these.
    fn split(&mut self, key: u32, page: u32) {
        let Some(region) = self.region_mut(key) else { return };
        if !region.is_huge(page) {
            return;
        }
        region.split(page);
        let extent = region.extent(page);
        let mut zeros = Vec::new();
        for other in (0..region.len()).filter(|&other| region.extent(other) == extent) {
            let is_zero = region.backing[other as usize] == Backing::Private && region.content[other as usize] == 0;
            if is_zero && !region.is_pinned(other as usize) {
                zeros.push(other);
            }
        }
        for zero in zeros {
            self.drop_page(key, zero, true);
        }
    }

    pub fn new_frame(&mut self, content: u64, node: NodeKey, tree: u16) -> u32 {
        let frame = MergedFrame { content, node, tree, ..MergedFrame::default() };
        if let Some(free) = self.free_frames.pop() {
            self.frames[free as usize] = frame;
            return free;
        }
        self.frames.push(frame);
        u32::try_from(self.frames.len() - 1).expect("fewer than 2^32 merged frames")
    }

    /// Charges a merged frame to the process whose copy is kept: the one of region `kept`.
    pub fn charge(&mut self, frame: u32, kept: u32) {
        self.frames[frame as usize].payer = self.region_owners[kept as usize];
    }

    pub fn free_frame(&mut self, frame: u32) {
        self.free_frames.push(frame);
    }

    #[cfg(test)]
    pub(crate) fn is_free(&self, frame: u32) -> bool {
        self.free_frames.contains(&frame)
    }

    /// How many merged frames have a record, mapped or not.
    pub fn known_frames(&self) -> u64 {
        (self.frames.len() - self.free_frames.len()) as u64
    }

    /// Whether pagefold's live host would know the regions of a process. If pagefold leaves a process alone, the host
    /// only keeps the regions while something is marked.
    pub(crate) fn shows_regions(&self, owner: u32) -> bool {
        let owner = &self.owners[owner as usize];
        let mut regions = owner.regions.iter().filter_map(|&key| self.region(key));
        !owner.out_of_scope && (!owner.left_alone || regions.any(|region| region.marks.pages() > 0))
    }

    /// Whether a fork-shared or merged page's frame is also mapped outside these regions.
    pub(crate) fn has_outsiders(&self, region: &Region, page: u32, family: &[Span]) -> bool {
        let backing = region.backing[page as usize];
        let frame = region.frame_of(page as usize);
        let place = Vpn(region.first + u64::from(page));
        let mut known = 0;
        for span in family.iter().filter(|span| span.first <= place && place < span.end()) {
            let Some(member) = self.region(span.region.0) else { continue };
            let Some(page) = member.offset(place) else { continue };
            known += u32::from(member.backing[page as usize] == backing && member.frame_of(page as usize) == frame);
        }
        self.mappers(region, page) > known
    }

    /// How many pages map the frame of a page, 0 if it has none of its own.
    pub(crate) fn mappers(&self, region: &Region, page: u32) -> u32 {
        let frame = region.frame_of(page as usize) as usize;
        match region.backing[page as usize] {
            Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged => 0,
            Backing::Private => 1,
            Backing::Merged => self.frames[frame].mapped,
            Backing::Forked => self.shares[frame],
        }
    }

    /// Whether the page shares its frame with a process related by fork.
    fn is_forked(&self, region: &Region, page: u32) -> bool {
        region.backing[page as usize] == Backing::Forked && self.shares[region.frame_of(page as usize) as usize] > 1
    }

    /// Whether both pages map the same fork-shared frame.
    pub fn same_frame(&self, a: (u32, u32), b: (u32, u32)) -> bool {
        let share = |(key, page): (u32, u32)| self.region(key)?.forked_frame(page);
        share(a).is_some_and(|mine| share(b) == Some(mine))
    }

    pub(crate) fn state(&self, region: &Region, page: u32) -> PageState {
        match region.backing[page as usize] {
            Backing::Absent => PageState::Absent,
            Backing::ZeroMapped | Backing::ZeroMerged => PageState::ZeroMapped,
            Backing::Merged => PageState::Merged,
            Backing::Forked if self.is_forked(region, page) => PageState::Shared,
            Backing::Private | Backing::Forked => PageState::Private,
        }
    }

    /// Forks a process. The child has the parent's mappings, including marks. Private pages become shared. The child
    /// maps the parent's merged frames, too, where it has no records until ksmd's next visit.
    pub fn fork(&mut self, parent: OwnerKey) -> OwnerKey {
        let Owner { untouchable, domain, numa, lineage, .. } = self.owners[parent.0 as usize];
        let child = self.add_owner(untouchable, domain, numa);
        self.owners[child.0 as usize].lineage = lineage;
        for key in self.owners[parent.0 as usize].regions.clone() {
            let Some(mut region) = self.regions[key as usize].take() else { continue };
            for page in 0..region.len() as usize {
                match region.backing[page] {
                    // The child gets a copy.
                    Backing::Private if region.is_pinned(page) => {}
                    Backing::Private => {
                        let share = u32::try_from(self.shares.len()).expect("fewer than 2^32 fork-shared frames");
                        self.shares.push(2);
                        region.backing[page] = Backing::Forked;
                        region.set_frame(page, share);
                    }
                    Backing::Forked => self.shares[region.frame[page] as usize] += 1,
                    Backing::Merged => {
                        self.frames[region.frame[page] as usize].mapped += 1;
                        self.merged_pages += 1;
                    }
                    Backing::ZeroMerged => self.zero_merged += 1,
                    Backing::Absent | Backing::ZeroMapped => {}
                }
            }
            let pages = (region.content.clone(), region.backing.clone());
            let copy = self.map(child, region.family, Vpn(region.first), pages, false);
            if let Some(copy) = self.region_mut(copy.0) {
                copy.frame.clone_from(&region.frame);
                copy.marks.clone_from(&region.marks);
                copy.seam = region.seam;
                copy.huge.clone_from(&region.huge);
                copy.node = region.node;
                copy.nodes.clone_from(&region.nodes);
                copy.active = region.active;
                copy.reads.clone_from(&region.reads);
            }
            self.regions[key as usize] = Some(region);
        }
        child
    }

    /// The regions, by process and address.
    pub fn live_regions(&self) -> impl Iterator<Item = (u32, &Region)> {
        let keys = self.mapping_owners.iter().flat_map(|&owner| &self.owners[owner as usize].regions);
        keys.filter_map(|&key| Some((key, self.region(key)?)))
    }
}
