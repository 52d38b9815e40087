//! Describes merge requests in words, for `status` and the summary of a run.

use pagefold_engine::ledger::RequestCounts;
use pagefold_text::figures::thousands;

pub fn sentence(requests: &RequestCounts) -> String {
    format!(
        "{} pages: {} merged, {} already merged before, {} changed meanwhile, {} could not be merged",
        thousands(requests.asked.0),
        thousands(requests.merged.0),
        thousands(requests.shared.0),
        thousands(requests.differing.0),
        thousands(requests.failed.0)
    )
}
