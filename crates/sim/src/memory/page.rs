//! One page: its backing, and ksmd's record of it.

/// No frame.
pub(crate) const NONE: u32 = u32::MAX;

/// The backing of a page. Finer than [`PageState`](pagefold_engine::host::PageState), because the two kinds of zero
/// mapping count differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    Absent,
    Private,
    /// The zero page, which the kernel maps when a page is read before its first write.
    ZeroMapped,
    /// The zero page, which ksmd maps instead of a page of zeros.
    ZeroMerged,
    /// The merged frame in `Region::frame`.
    Merged,
    /// The fork-shared frame in `Region::frame`. Counts as private once no other page maps it.
    Forked,
}

/// A page: the key of its region, and its offset there.
pub type PageRef = (u32, u32);

/// ksmd's record of a page (the kernel's `rmap_item`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmapItem {
    pub(crate) checksum: u32,
    /// The merged frame that the record refers to. Somebody may have written the page since; ksmd clears this at its
    /// next visit.
    pub(crate) frame: u32,
    /// The page's node in an unstable tree.
    pub(crate) node: u32,
    pub(crate) age: u8,
    pub(crate) skips_left: u8,
    /// The class of the page, if the trees are divided by class.
    pub(crate) class: u8,
    pub(crate) state: ItemState,
}

/// The state of ksmd's record of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemState {
    Absent,
    Known,
    /// The last visit put the page into an unstable tree (`UNSTABLE_FLAG`). Counts in `pages_unshared`.
    Unshared,
}

impl RmapItem {
    pub(crate) const NONE: Self =
        Self { checksum: 0, frame: NONE, node: 0, age: 0, skips_left: 0, class: 0, state: ItemState::Absent };

    pub(crate) fn is_live(&self) -> bool {
        self.state != ItemState::Absent
    }
}

/// Writes to a page since ksmd's last visit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageWrites {
    pub(crate) times: u8,
    /// Which quarters were written, one bit each.
    pub(crate) parts: u8,
}
