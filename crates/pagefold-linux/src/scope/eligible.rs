//! The mappings of a process that may be marked.

use crate::inject::mark::PageSpan;
use crate::proc::maps::{VmaDetail, read_smaps};
use crate::proc::process::{Process, ReadError};
use crate::scope::exclude::vma_exclusion;

/// The mappings that no rule of [`super::exclude`] leaves out.
pub fn eligible_mappings(process: &Process) -> Result<Vec<VmaDetail>, ReadError> {
    let mut details = read_smaps(process)?;
    details.retain(|detail| vma_exclusion(detail).is_none());
    Ok(details)
}

/// Each eligible mapping as a whole.
pub fn eligible_spans(process: &Process) -> Result<Vec<PageSpan>, ReadError> {
    let details = eligible_mappings(process)?;
    Ok(details.iter().map(|detail| PageSpan { first: detail.vma.first(), pages: detail.vma.pages() }).collect())
}
