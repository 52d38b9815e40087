//! Processes and their regions.

use super::marks::Marks;
use super::nodes::ProcessNuma;
use super::page::{Backing, ItemState, NONE, PageWrites, RmapItem};
use pagefold_engine::keys::{DomainKey, FamilyKey, NodeKey};
use pagefold_engine::units::{EXTENT_PAGES, Pages, Vpn};
use std::collections::BTreeSet;
use std::ops::Range;

#[derive(Debug, Default)]
pub struct Region {
    pub owner: u32,
    pub(crate) family: FamilyKey,
    pub(crate) first: u64,
    /// Where the upper of its two mappings begins, if it consists of two ([`Memory::map_below`]).
    ///
    /// [`Memory::map_below`]: super::Memory::map_below
    pub(crate) seam: u32,
    pub content: Vec<u64>,
    pub backing: Vec<Backing>,
    /// The merged or fork-shared frame of each page. Empty until a page needs it.
    pub(crate) frame: Vec<u32>,
    /// ksmd's records. Empty until ksmd's first visit.
    pub(crate) items: Vec<RmapItem>,
    pub(crate) marks: Marks,
    /// Whether a huge page maps each 2 MiB extent. Empty if none ever did.
    pub(crate) huge: Vec<bool>,
    /// The node of the region's private frames, unless `nodes` says otherwise.
    pub(super) node: NodeKey,
    /// The node of each page's private frame. Empty while all are on one node.
    pub(super) nodes: Vec<NodeKey>,
    /// Pages that the kernel may not replace or share, because a device or io_uring uses them.
    pub(crate) pinned: BTreeSet<u32>,
    /// Whether the process uses these pages, so that page reclaim has them on its active list.
    pub(crate) active: bool,
    /// How often each page was read from outside, at most 2. Empty until the first read, and on a machine with one
    /// node.
    pub(crate) reads: Vec<u8>,
    /// The writes to each page since ksmd's last visit. Empty unless we record them.
    pub(crate) writes: Vec<PageWrites>,
    /// Which eighth of physical memory each page is in. Empty unless a script sets it.
    pub(crate) eighths: Vec<u8>,
    /// How many writes there have been to merged pages, including merged zeros.
    pub broken: u64,
}

impl Region {
    /// How many pages map merged frames. Those that map the zero page don't count.
    pub(crate) fn merged(&self) -> Pages {
        let mut merged = Pages(0);
        for backing in &self.backing {
            merged += Pages(u64::from(*backing == Backing::Merged));
        }
        merged
    }

    #[allow(clippy::len_without_is_empty, reason = "a region may be empty, and nobody asks")]
    pub fn len(&self) -> u32 {
        u32::try_from(self.content.len()).expect("checked by Memory::map")
    }

    pub(crate) fn end(&self) -> u64 {
        self.first + u64::from(self.len())
    }

    pub(crate) fn offset(&self, page: Vpn) -> Option<u32> {
        let offset = page.0.checked_sub(self.first)?;
        u32::try_from(offset).ok().filter(|&offset| offset < self.len())
    }

    /// The mapping that contains a page, and the upper one as well if any of the `pages` from that page on is there.
    pub(crate) fn mappings_at(&self, page: u32, pages: u32) -> Range<u32> {
        let start = if page < self.seam { 0 } else { self.seam };
        let end = if page + pages <= self.seam { self.seam } else { self.len() };
        start..end
    }

    pub(super) fn extent(&self, page: u32) -> usize {
        usize::try_from((self.first + u64::from(page)) / EXTENT_PAGES - self.first / EXTENT_PAGES).unwrap_or(usize::MAX)
    }

    pub(crate) fn is_huge(&self, page: u32) -> bool {
        self.huge.get(self.extent(page)).copied().unwrap_or(false)
    }

    pub(crate) fn is_pinned(&self, page: usize) -> bool {
        u32::try_from(page).is_ok_and(|page| self.pinned.contains(&page))
    }

    /// Splits the huge page that contains a page.
    pub(crate) fn split(&mut self, page: u32) {
        let extent = self.extent(page);
        if let Some(huge) = self.huge.get_mut(extent) {
            *huge = false;
        }
    }

    /// The frame of a page that was or is shared through fork.
    pub fn forked_frame(&self, page: u32) -> Option<u32> {
        let page = page as usize;
        (self.backing[page] == Backing::Forked).then(|| self.frame_of(page))
    }

    pub fn merged_frame(&self, page: u32) -> Option<u32> {
        (self.backing[page as usize] == Backing::Merged).then(|| self.frame_of(page as usize))
    }

    pub(super) fn frame_of(&self, page: usize) -> u32 {
        self.frame.get(page).copied().unwrap_or(NONE)
    }

    pub(super) fn set_frame(&mut self, page: usize, frame: u32) {
        if self.frame.is_empty() {
            self.frame = vec![NONE; self.content.len()];
        }
        self.frame[page] = frame;
    }
}

#[derive(Debug, Default)]
pub struct Owner {
    /// The process's regions, by address.
    pub regions: Vec<u32>,
    pub(crate) exited: bool,
    /// How often a region was mapped or unmapped.
    pub(crate) changes: u64,
    /// Whether the process can't be marked.
    pub(crate) untouchable: bool,
    pub(crate) domain: DomainKey,
    /// The process's first ancestor by fork, or itself.
    pub(crate) lineage: u32,
    /// Whether we tell pagefold to leave the process alone.
    pub(crate) left_alone: bool,
    /// Whether pagefold doesn't know the process.
    pub(crate) out_of_scope: bool,
    pub(crate) numa: ProcessNuma,
    /// Whether the process is on ksmd's list.
    pub(crate) registered: bool,
    /// How many records are of pages that are gone or no longer marked. They exist until ksmd's next visit.
    pub(crate) stale_items: u64,
    /// How many stale records count in `pages_unshared`.
    pub(crate) stale_unshared: u64,
    /// The merged frames that the stale records still refer to.
    pub(crate) stale_frames: Vec<u32>,
}

impl Owner {
    pub(super) fn make_stale(&mut self, items: &mut [RmapItem]) {
        for item in items.iter_mut().filter(|item| item.is_live()) {
            self.stale_items += 1;
            self.stale_unshared += u64::from(item.state == ItemState::Unshared);
            if item.frame != NONE {
                self.stale_frames.push(item.frame);
            }
            *item = RmapItem::NONE;
        }
    }
}
