//! A frame that a request has merged is in no tree until ksmd visits one of its pages. When a process exits, the kernel
//! frees its records at once. If a merged page is written or unmapped, its record stays until the same address is
//! merged again, ksmd visits it, or its process exits. So KSM's counters may be too high. (We don't count records that
//! the kernel leaves to forked processes.)

use super::Ksmd;
use super::trees::NO_TREE;
use super::visit::fork_sharers;
use crate::memory::{Backing, ItemState, Memory, PageRef, RmapItem};
use pagefold_engine::host::Merging;
use pagefold_engine::keys::NodeKey;

/// The page that a merge keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Page(PageRef),
    Zero,
}

/// An anonymous page that is present.
struct Present {
    content: u64,
    node: NodeKey,
    merged: Option<u32>,
    pinned: bool,
}

impl Present {
    fn at(memory: &Memory, (key, page): PageRef) -> Option<Self> {
        let region = memory.region(key)?;
        match region.backing.get(page as usize)? {
            Backing::Absent | Backing::ZeroMapped | Backing::ZeroMerged => None,
            Backing::Private | Backing::Merged | Backing::Forked => Some(Self {
                content: region.content[page as usize],
                node: memory.node_of(region, page)?,
                merged: region.merged_frame(page),
                pinned: region.is_pinned(page as usize),
            }),
        }
    }
}

impl Ksmd {
    /// Merges a page with the kept one if they're equal, and if the kept one is merged already or at most
    /// `keep_mappers` processes map it (0: any number).
    pub(crate) fn merge(&mut self, memory: &mut Memory, take: PageRef, kept: Kept, keep_mappers: u32) -> Merging {
        match kept {
            Kept::Zero => self.merge_with_zero(memory, take),
            Kept::Page(keep) => self.merge_pages(memory, take, keep, keep_mappers),
        }
    }

    fn merge_with_zero(&mut self, memory: &mut Memory, take: PageRef) -> Merging {
        let (key, page) = take;
        let Some(Present { content, pinned, .. }) = Present::at(memory, take) else {
            let backing = memory.region(key).and_then(|region| region.backing.get(page as usize));
            let zero = matches!(backing, Some(Backing::ZeroMapped | Backing::ZeroMerged));
            return if zero { Merging::Shared } else { Merging::Absent };
        };
        if pinned {
            return Merging::Busy;
        }
        self.counts.search(self.granularity.get(), 1, 0, content == 0);
        if content != 0 {
            return Merging::Differs;
        }
        memory.merge_zero(key, page);
        Merging::Merged
    }

    fn merge_pages(&mut self, memory: &mut Memory, take: PageRef, keep: PageRef, keep_mappers: u32) -> Merging {
        if take == keep {
            return Merging::Shared;
        }
        let (Some(taken), Some(kept)) = (Present::at(memory, take), Present::at(memory, keep)) else {
            return Merging::Absent;
        };
        if taken.merged.is_some() && taken.merged == kept.merged || memory.same_frame(take, keep) {
            return Merging::Shared;
        }
        if !self.knobs.merge_across_nodes && taken.node != kept.node {
            return Merging::Ineligible;
        }
        if taken.pinned || kept.merged.is_none() && kept.pinned {
            return Merging::Busy;
        }
        if kept.merged.is_some_and(|frame| self.trees.is_full(memory, frame)) {
            return Merging::Full;
        }
        let (stable, equal) = (u64::from(kept.merged.is_some()), taken.content == kept.content);
        self.counts.search(self.granularity.get(), stable, 1 - stable, equal);
        if !equal {
            return Merging::Differs;
        }
        let mappers = memory.region(keep.0).map_or(0, |region| memory.mappers(region, keep.1));
        if kept.merged.is_none() && keep_mappers > 0 && mappers > keep_mappers {
            return Merging::Full;
        }
        let frame = kept.merged.unwrap_or_else(|| self.keep(memory, keep, &kept));
        self.join(memory, take, frame);
        Merging::Merged
    }

    /// Makes a page's frame a merged one, for all processes that share it by fork. Only the named page gets a record.
    fn keep(&mut self, memory: &mut Memory, keep: PageRef, kept: &Present) -> u32 {
        let sharers = fork_sharers(memory, keep);
        let frame = memory.new_frame(kept.content, kept.node, NO_TREE);
        memory.charge(frame, keep.0);
        self.join(memory, keep, frame);
        for (key, page) in sharers {
            memory.join(key, page, frame);
        }
        frame
    }

    /// Maps a merged frame at a page. The page's new record replaces any earlier one.
    fn join(&mut self, memory: &mut Memory, (key, page): PageRef, frame: u32) {
        memory.join(key, page, frame);
        let Some(region) = memory.region_mut(key) else { return };
        if region.items.is_empty() {
            region.items = vec![RmapItem::NONE; region.content.len()];
        }
        let item = &mut region.items[page as usize];
        let mut before = std::mem::replace(item, RmapItem { state: ItemState::Known, frame, ..RmapItem::NONE });
        self.items += u64::from(!before.is_live());
        self.leave_unstable((key, page), &mut before);
        self.trees.attach(memory, frame);
        self.trees.detach(memory, before.frame);
    }

    /// Frees the records of an owner that has exited, and takes it off ksmd's list.
    pub(crate) fn free_owner(&mut self, memory: &mut Memory, owner: u32) {
        self.free_stale(memory, owner);
        memory.owners[owner as usize].registered = false;
        let Some(place) = self.list.iter().position(|&listed| listed == owner) else { return };
        self.list.remove(place);
        if self.cursor.in_scan && place <= self.cursor.owner_index {
            if place == self.cursor.owner_index {
                self.cursor.page = 0;
            } else {
                self.cursor.owner_index -= 1;
            }
        }
    }
}
