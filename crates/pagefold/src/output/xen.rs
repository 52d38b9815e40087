//! Xen's own figures, for `status` and the summary of a run. They come from pagefold-xen, whose runs answer `status`,
//! too.

use pagefold_text::style::human;
use serde::{Deserialize, Serialize};

/// The machine's memory as the hypervisor sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "they are the keys of the JSON")]
pub struct XenView {
    /// Saved by sharing (`sharing_freed_memory` of `xl info`).
    pub saved_bytes: u64,
    /// Frames that are shared, or nominated to be (`sharing_used_memory`).
    pub frames_bytes: u64,
    pub free_bytes: u64,
    /// Pages that this run has made share a frame.
    pub shared_pages: u64,
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
