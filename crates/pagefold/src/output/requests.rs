//! Merge requests counted in pages, for `status` and the summary of a run.

use pagefold_engine::host::Mechanism;
use pagefold_engine::ledger::RequestCounts;
use pagefold_text::figures::thousands;
use serde::{Deserialize, Serialize};

/// The pages named so far, by result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "they are the keys of the JSON")]
pub struct RequestsView {
    asked_pages: u64,
    merged_pages: u64,
    shared_pages: u64,
    differing_pages: u64,
    failed_pages: u64,
}

impl RequestsView {
    /// The counts of a run. `None` if it doesn't merge on request.
    pub fn of(mechanism: Mechanism, counts: &RequestCounts) -> Option<Self> {
        if mechanism != Mechanism::Request {
            return None;
        }
        Some(Self {
            asked_pages: counts.asked().0,
            merged_pages: counts.merged.0,
            shared_pages: counts.shared.0,
            differing_pages: counts.differing.0,
            failed_pages: counts.failed.0,
        })
    }

    /// The pages by result.
    pub fn by_result(&self) -> [(&'static str, u64); 4] {
        [
            ("merged", self.merged_pages),
            ("shared", self.shared_pages),
            ("differing", self.differing_pages),
            ("failed", self.failed_pages),
        ]
    }

    pub fn sentence(&self) -> String {
        format!(
            "{} pages: {} merged, {} merged already, {} changed meanwhile, {} for later",
            thousands(self.asked_pages),
            thousands(self.merged_pages),
            thousands(self.shared_pages),
            thousands(self.differing_pages),
            thousands(self.failed_pages)
        )
    }
}
