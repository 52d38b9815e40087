//! The memory of the simulated machine: processes, their regions, and for each page its content id and
//! how it is held. Knows frames and copy-on-write, and nothing of ksmd's scanning.
//!
//! A content id stands for a page's 4096 bytes; id 0 is the page of zeros. A page costs 9 bytes here,
//! 13 once something in its region is merged or forked, and 16 more once ksmd has seen it. Where there are several
//! memory nodes it costs one more once it is read, and two where a region's pages are not all on one node. Where classes
//! are made by writes it costs six more.

mod marks;
mod nodes;

use marks::Marks;
pub(crate) use nodes::{MoveResult, Nodes, ProcessNuma};
use pagefold_core::host::PageState;
use pagefold_core::keys::{DomainKey, FamilyKey, NodeKey, OwnerKey, RegionKey};
use pagefold_core::random::Random;
use pagefold_core::units::{EXTENT_PAGES, Vpn};

/// No frame: the page is attached to none.
pub(crate) const NONE: u32 = u32::MAX;

/// How a page is held. Finer than [`PageState`]: the two kinds of zero mapping count differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    Absent,
    Private,
    /// Read before it was ever written: the zero page, by the fault handler.
    ZeroMapped,
    /// The zero page, by ksmd in place of a page of zeros.
    ZeroMerged,
    /// Maps the merged frame in `Region::frame`.
    Merged,
    /// Maps the fork-shared frame in `Region::frame`, with others as long as that has several users.
    Forked,
}

/// ksmd's record of a page (the kernel's `rmap_item`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmapItem {
    pub(crate) checksum: u32,
    /// The merged frame that the record hangs on; stays set after a write until ksmd's next visit.
    pub(crate) frame: u32,
    /// Where it is in an unstable tree.
    pub(crate) node: u32,
    pub(crate) age: u8,
    pub(crate) skips_left: u8,
    /// The class of its page, where there are classes.
    pub(crate) class: u8,
    pub(crate) state: ItemState,
}

/// Whether ksmd has a record of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemState {
    Absent,
    /// It has one.
    Known,
    /// It has one, and put it into an unstable tree at its last visit (`UNSTABLE_FLAG`): it counts in `pages_unshared`.
    Unshared,
}

impl RmapItem {
    /// No record.
    pub(crate) const NONE: Self =
        Self { checksum: 0, frame: NONE, node: 0, age: 0, skips_left: 0, class: 0, state: ItemState::Absent };

    pub(crate) fn is_live(&self) -> bool {
        self.state != ItemState::Absent
    }
}

/// What was written to a page since ksmd last looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageWrites {
    /// How often.
    pub(crate) times: u8,
    /// Which of its quarters.
    pub(crate) parts: u8,
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) owner: u32,
    pub(crate) family: FamilyKey,
    pub(crate) first: u64,
    pub(crate) content: Vec<u64>,
    pub(crate) backing: Vec<Backing>,
    /// Merged frame or fork share of each page; empty until the first page needs one.
    pub(crate) frame: Vec<u32>,
    /// Empty until ksmd comes by.
    pub(crate) items: Vec<RmapItem>,
    pub(crate) marks: Marks,
    /// For each 2 MiB extent of the region, whether a huge page maps it; empty where none ever did.
    pub(crate) huge: Vec<bool>,
    /// The node of its own frames, unless `nodes` says otherwise.
    node: NodeKey,
    /// That of each page's own frame; empty as long as they are all on one.
    nodes: Vec<NodeKey>,
    /// Its process uses its pages: page reclaim has them on its active list.
    pub(crate) active: bool,
    /// How often each page was read from outside, up to 2; empty until then, and where there is but one node.
    pub(crate) reads: Vec<u8>,
    /// What was written to each page; empty unless that is kept.
    pub(crate) writes: Vec<PageWrites>,
    /// In which eighth of the physical memory each page is; empty unless somebody says so.
    pub(crate) eighths: Vec<u8>,
    /// Writes so far to pages that were merged, or mapped to the zero page by merging.
    pub(crate) broken: u64,
}

impl Region {
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.content.len()).expect("Memory::map admits no longer region")
    }

    pub(crate) fn end(&self) -> u64 {
        self.first + u64::from(self.len())
    }

    pub(crate) fn offset(&self, page: Vpn) -> Option<u32> {
        let offset = page.0.checked_sub(self.first)?;
        u32::try_from(offset).ok().filter(|&offset| offset < self.len())
    }

    fn extent(&self, page: u32) -> usize {
        usize::try_from((self.first + u64::from(page)) / EXTENT_PAGES - self.first / EXTENT_PAGES).unwrap_or(usize::MAX)
    }

    pub(crate) fn is_huge(&self, page: u32) -> bool {
        self.huge.get(self.extent(page)).copied().unwrap_or(false)
    }

    /// A merge splits the huge page that the page is part of.
    pub(crate) fn split(&mut self, page: u32) {
        let extent = self.extent(page);
        if let Some(huge) = self.huge.get_mut(extent) {
            *huge = false;
        }
    }

    /// The merged frame that the page maps.
    pub(crate) fn merged_frame(&self, page: u32) -> Option<u32> {
        (self.backing[page as usize] == Backing::Merged).then(|| self.frame_of(page as usize))
    }

    fn frame_of(&self, page: usize) -> u32 {
        self.frame.get(page).copied().unwrap_or(NONE)
    }

    fn set_frame(&mut self, page: usize, frame: u32) {
        if self.frame.is_empty() {
            self.frame = vec![NONE; self.content.len()];
        }
        self.frame[page] = frame;
    }
}

#[derive(Debug, Default)]
pub(crate) struct Owner {
    /// Its regions, by ascending address.
    pub(crate) regions: Vec<u32>,
    pub(crate) exited: bool,
    /// Marking it is refused.
    pub(crate) untouchable: bool,
    pub(crate) domain: DomainKey,
    pub(crate) place: ProcessNuma,
    /// On ksmd's list.
    pub(crate) registered: bool,
    /// Records of pages that are gone or no longer marked: kept until ksmd comes by.
    pub(crate) stale_items: u64,
    /// How many of them count in `pages_unshared`.
    pub(crate) stale_unshared: u64,
    /// The merged frames that some of them still hang on.
    pub(crate) stale_frames: Vec<u32>,
}

/// A frame that ksmd made out of several (the kernel's `stable_node` and its page).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MergedFrame {
    pub(crate) content: u64,
    /// Pages that map it. At zero the frame is free, whatever ksmd still believes.
    pub(crate) mapped: u32,
    /// Records that hang on it: what ksmd believes.
    pub(crate) items: u32,
    /// Taken out of the stable tree; remains only until the last record has let go.
    pub(crate) pruned: bool,
    /// The node it is on.
    pub(crate) node: NodeKey,
    /// The tree it is in: a node's, where `merge_across_nodes` is off.
    pub(crate) tree: u16,
}

/// One count of the whole memory, exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroundTruth {
    /// Frames in use: private, fork-shared (each once) and merged (each once).
    pub frames: u64,
    /// Those of them that hold nothing but zeros.
    pub zero_frames: u64,
    /// Different contents in them, zeros not counted.
    pub contents: u64,
    /// Pages that map the zero page.
    pub zero_mapped: u64,
    /// Frames that could be saved now: `frames` minus `contents`. All of zeros counts as savable, which
    /// takes `use_zero_pages`; without, one frame of zeros remains.
    pub savable: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) owners: Vec<Owner>,
    regions: Vec<Option<Box<Region>>>,
    pub(crate) frames: Vec<MergedFrame>,
    free_frames: Vec<u32>,
    /// Users of each fork-shared frame.
    shares: Vec<u32>,
    /// Pages that map merged frames.
    pub(crate) merged_pages: u64,
    /// Merged frames in use.
    pub(crate) merged_frames: u64,
    /// Pages that ksmd mapped to the zero page.
    pub(crate) zero_merged: u64,
    /// Writes to merged pages.
    pub(crate) cow_breaks: u64,
    /// Writes are kept, for classes.
    pub(crate) keeps_writes: bool,
    pub(crate) nodes: Nodes,
}

impl Memory {
    /// An empty memory, in which writes are kept for classes or not.
    pub(crate) fn new(keeps_writes: bool) -> Self {
        Self { keeps_writes, ..Self::default() }
    }

    pub(crate) fn add_owner(&mut self, untouchable: bool, domain: DomainKey, place: ProcessNuma) -> OwnerKey {
        self.owners.push(Owner { untouchable, domain, place, ..Owner::default() });
        OwnerKey(u32::try_from(self.owners.len() - 1).expect("fewer than 2^32 processes in a run"))
    }

    pub(crate) fn region(&self, key: u32) -> Option<&Region> {
        self.regions.get(key as usize)?.as_deref()
    }

    pub(crate) fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        self.regions.get_mut(key as usize)?.as_deref_mut()
    }

    /// Maps a region whose pages hold `content` in the states `hold`.
    pub(crate) fn map(
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
            frame: Vec::new(),
            items: Vec::new(),
            marks: Marks::default(),
            huge: Vec::new(),
            node: self.owners[owner.0 as usize].place.home,
            nodes: Vec::new(),
            active: false,
            reads: Vec::new(),
            writes: Vec::new(),
            eighths: Vec::new(),
            broken: 0,
        };
        if huge {
            let extents = region.extent(region.len().max(1) - 1) + 1;
            // A huge page needs its whole, aligned extent.
            let whole =
                |extent: u64| extent * EXTENT_PAGES >= region.first && (extent + 1) * EXTENT_PAGES <= region.end();
            region.huge = (region.first / EXTENT_PAGES..).take(extents).map(whole).collect();
        }
        let end = region.end();
        self.regions.push(Some(Box::new(region)));
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
        self.owners[owner.0 as usize].regions.insert(place, key);
        RegionKey(key)
    }

    /// Drops a region. Its records wait for ksmd.
    pub(crate) fn unmap(&mut self, key: u32) {
        let pages = self.region(key).map_or(0, Region::len);
        for page in 0..pages {
            self.vacate(key, page);
        }
        let Some(mut region) = self.regions[key as usize].take() else { return };
        let owner = &mut self.owners[region.owner as usize];
        owner.regions.retain(|&other| other != key);
        abandon(owner, &mut region.items);
    }

    /// Lets go of what a page maps: it maps nothing.
    fn vacate(&mut self, key: u32, page: u32) {
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
                    self.give_merged(frame);
                }
            }
            Backing::ZeroMerged => self.zero_merged -= 1,
            Backing::Forked => {
                self.shares[frame as usize] -= 1;
                if self.shares[frame as usize] == 0 {
                    self.give_own(key, page);
                }
            }
            Backing::Private => self.give_own(key, page),
            Backing::Absent | Backing::ZeroMapped => {}
        }
    }

    /// The process writes to a page, all of it.
    pub(crate) fn write(&mut self, key: u32, page: u32, content: u64) {
        self.write_parts(key, page, content, u8::MAX);
    }

    /// The process writes to some quarters of a page: it gets a frame of its own if it has none.
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
                let touch = &mut region.writes[page as usize];
                *touch = PageWrites { times: touch.times.saturating_add(1), parts: touch.parts | parts & 0b1111 };
            }
        }
    }

    /// The page maps nothing any more, or the zero page.
    pub(crate) fn drop_page(&mut self, key: u32, page: u32, zero: bool) {
        self.vacate(key, page);
        if let Some(region) = self.region_mut(key) {
            region.content[page as usize] = 0;
            region.backing[page as usize] = if zero { Backing::ZeroMapped } else { Backing::Absent };
        }
    }

    fn make_private(&mut self, key: u32, page: u32) {
        let Some(region) = self.region(key) else { return };
        // The last user of a frame that was shared by fork goes on with it (`wp_can_reuse_anon_folio`).
        let keeps = self.state(region, page) == PageState::Private;
        if keeps {
            let share = region.frame_of(page as usize);
            if region.backing[page as usize] == Backing::Forked {
                self.shares[share as usize] -= 1;
            }
        } else {
            self.vacate(key, page);
            self.take_frame(key, page);
        }
        if let Some(region) = self.region_mut(key) {
            region.backing[page as usize] = Backing::Private;
        }
    }

    /// Gives the merged pages of an unmarked range their own copies again; returns how many it copied.
    /// The range's records wait for ksmd. (The kernel would reuse those of a range that is marked again
    /// before ksmd has come by; here they start afresh.)
    pub(crate) fn unmerge(&mut self, key: u32, range: std::ops::Range<u32>) -> u64 {
        let mut copied = 0;
        for page in range.clone() {
            let merged =
                |region: &Region| matches!(region.backing[page as usize], Backing::Merged | Backing::ZeroMerged);
            if self.region(key).is_some_and(merged) {
                self.make_private(key, page);
                copied += 1;
            }
        }
        if let Some(region) = self.regions[key as usize].as_deref_mut() {
            if let Some(items) = region.items.get_mut(range.start as usize..range.end as usize) {
                abandon(&mut self.owners[region.owner as usize], items);
            }
        }
        copied
    }

    /// Makes a page map a merged frame.
    pub(crate) fn join(&mut self, key: u32, page: u32, frame: u32) {
        self.vacate(key, page);
        if self.frames[frame as usize].mapped == 0 {
            self.merged_frames += 1;
            self.take_merged(frame);
        }
        let merged = &mut self.frames[frame as usize];
        merged.mapped += 1;
        let content = merged.content;
        self.merged_pages += 1;
        if let Some(region) = self.region_mut(key) {
            // The one law of merging; the kernel compares every byte before it.
            assert_eq!(region.content[page as usize], content, "a merge may not change a page");
            region.backing[page as usize] = Backing::Merged;
            region.set_frame(page as usize, frame);
            region.split(page);
        }
    }

    /// Makes a page of zeros map the zero page.
    pub(crate) fn merge_zero(&mut self, key: u32, page: u32) {
        self.vacate(key, page);
        self.zero_merged += 1;
        if let Some(region) = self.region_mut(key) {
            region.backing[page as usize] = Backing::ZeroMerged;
            region.split(page);
        }
    }

    pub(crate) fn new_frame(&mut self, content: u64, node: NodeKey, tree: u16) -> u32 {
        let frame = MergedFrame { content, node, tree, ..MergedFrame::default() };
        if let Some(free) = self.free_frames.pop() {
            self.frames[free as usize] = frame;
            return free;
        }
        self.frames.push(frame);
        u32::try_from(self.frames.len() - 1).expect("fewer than 2^32 merged frames")
    }

    pub(crate) fn free_frame(&mut self, frame: u32) {
        self.free_frames.push(frame);
    }

    #[cfg(test)]
    pub(crate) fn is_free(&self, frame: u32) -> bool {
        self.free_frames.contains(&frame)
    }

    /// Merged frames that exist as records, used or not.
    pub(crate) fn known_frames(&self) -> u64 {
        (self.frames.len() - self.free_frames.len()) as u64
    }

    /// Whether the page shares its frame with a relative.
    fn is_forked(&self, region: &Region, page: u32) -> bool {
        region.backing[page as usize] == Backing::Forked && self.shares[region.frame_of(page as usize) as usize] > 1
    }

    /// Whether both are users of one fork-shared frame.
    pub(crate) fn same_frame(&self, a: (u32, u32), b: (u32, u32)) -> bool {
        let share = |(key, page): (u32, u32)| {
            let region = self.region(key)?;
            (region.backing[page as usize] == Backing::Forked).then(|| region.frame_of(page as usize))
        };
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

    /// Forks a process: the child maps what the parent maps, marks included. Private pages become shared;
    /// merged ones gain a user that hangs on no record until ksmd comes by.
    pub(crate) fn fork(&mut self, parent: OwnerKey) -> OwnerKey {
        let Owner { untouchable, domain, place, .. } = self.owners[parent.0 as usize];
        let child = self.add_owner(untouchable, domain, place);
        for key in self.owners[parent.0 as usize].regions.clone() {
            let Some(mut region) = self.regions[key as usize].take() else { continue };
            for page in 0..region.content.len() {
                match region.backing[page] {
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

    /// SearchCounts everything anew, from the pages themselves.
    pub(crate) fn truth(&self) -> GroundTruth {
        let mut truth = GroundTruth::default();
        let mut contents = rustc_hash::FxHashSet::default();
        let mut counted_shares = vec![false; self.shares.len()];
        let mut counted_frames = vec![false; self.frames.len()];
        for region in self.regions.iter().flatten() {
            for (page, backing) in region.backing.iter().enumerate() {
                let frame = region.frame_of(page) as usize;
                let first_user = match backing {
                    Backing::Absent => false,
                    Backing::ZeroMapped | Backing::ZeroMerged => {
                        truth.zero_mapped += 1;
                        false
                    }
                    Backing::Private => true,
                    Backing::Forked => !std::mem::replace(&mut counted_shares[frame], true),
                    Backing::Merged => !std::mem::replace(&mut counted_frames[frame], true),
                };
                if first_user {
                    truth.frames += 1;
                    truth.zero_frames += u64::from(region.content[page] == 0);
                    contents.insert(region.content[page]);
                }
            }
        }
        contents.remove(&0);
        truth.contents = contents.len() as u64;
        truth.savable = truth.frames - truth.contents;
        truth
    }

    /// The live regions, by owner and address.
    pub(crate) fn live_regions(&self) -> impl Iterator<Item = (u32, &Region)> {
        let keys = self.owners.iter().filter(|owner| !owner.exited).flat_map(|owner| &owner.regions);
        keys.filter_map(|&key| Some((key, self.region(key)?)))
    }
}

/// Hands records over to the owner's heap of stale ones.
fn abandon(owner: &mut Owner, items: &mut [RmapItem]) {
    for item in items.iter_mut().filter(|item| item.is_live()) {
        owner.stale_items += 1;
        owner.stale_unshared += u64::from(item.state == ItemState::Unshared);
        if item.frame != NONE {
            owner.stale_frames.push(item.frame);
        }
        *item = RmapItem::NONE;
    }
}

/// Contents nobody else has: a bijection of a counter, so no two are equal.
#[derive(Debug)]
pub(crate) struct UniqueContents(Random);

impl UniqueContents {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(Random::for_purpose(seed, 0x0041_1757))
    }

    pub(crate) fn next(&mut self) -> u64 {
        loop {
            let id = self.0.next();
            if id != 0 {
                return id;
            }
        }
    }
}
