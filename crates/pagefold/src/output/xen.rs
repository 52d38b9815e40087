//! Xen's own figures, for `status` and the summary of a run. Only pagefold-xen's runs have them, but the commands for
//! both kinds of runs are the same.

use pagefold_text::style::human;
use serde::{Deserialize, Serialize};

/// The machine's memory as the hypervisor sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "they are the keys of the JSON")]
pub struct XenView {
    /// Memory saved by sharing (`sharing_freed_memory` of `xl info`).
    pub saved_bytes: u64,
    /// Frames that are shared, or nominated for sharing (`sharing_used_memory`).
    pub frames_bytes: u64,
    pub free_bytes: u64,
    /// Pages for which this run has made guests share a frame.
    pub shared_pages: u64,
}

impl XenView {
    pub fn sentence(&self) -> String {
        format!(
            "shares the pairs of pages that this run gives it; whole machine: {} saved, {} in frames shared or nominated, {} free",
            human(self.saved_bytes),
            human(self.frames_bytes),
            human(self.free_bytes)
        )
    }
}
