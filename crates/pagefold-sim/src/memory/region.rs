//! Processes and their regions.

use super::marks::Marks;
use super::nodes::ProcessNuma;
use super::page::{Backing, ItemState, NONE, PageWrites, RmapItem};
use pagefold_core::keys::{DomainKey, FamilyKey, NodeKey};
use pagefold_core::units::{EXTENT_PAGES, Vpn};

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
    pub(super) node: NodeKey,
    /// That of each page's own frame; empty as long as they are all on one.
    pub(super) nodes: Vec<NodeKey>,
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

    pub(super) fn extent(&self, page: u32) -> usize {
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

impl Owner {
    /// Hands records over to the owner's heap of stale ones.
    pub(super) fn abandon(&mut self, items: &mut [RmapItem]) {
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
