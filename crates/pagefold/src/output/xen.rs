//! Xen's own figures, as `status` and the summary of a run have them.

use pagefold_cli::style::human;
use pagefold_core::units::Pages;
use pagefold_xen::host::XenFigures;
use serde::{Deserialize, Serialize};

/// What the hypervisor says of the machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "they are the keys of the JSON")]
pub struct XenView {
    /// Saved by sharing (`sharing_freed_memory` of `xl info`).
    saved_bytes: u64,
    /// Frames that are shared, or nominated to be (`sharing_used_memory`).
    frames_bytes: u64,
    free_bytes: u64,
    /// Pages that this run has made share a frame.
    shared_pages: u64,
}

impl From<XenFigures> for XenView {
    fn from(figures: XenFigures) -> Self {
        let bytes = |pages: Pages| pages.bytes().0;
        let memory = figures.memory;
        Self {
            saved_bytes: bytes(memory.saved),
            frames_bytes: bytes(memory.frames),
            free_bytes: bytes(memory.free),
            shared_pages: figures.shares,
        }
    }
}

impl XenView {
    pub fn sentence(&self) -> String {
        format!(
            "shares what this run names: {} saved on the whole machine, {} in frames that are shared or nominated, {} free",
            human(self.saved_bytes),
            human(self.frames_bytes),
            human(self.free_bytes)
        )
    }
}
