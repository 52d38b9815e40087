//! One page: what backs it, and what ksmd has recorded about it.

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

/// A page, by the key of its region and its offset there.
pub(crate) type PageRef = (u32, u32);

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
