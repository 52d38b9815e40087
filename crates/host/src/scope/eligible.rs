//! The mappings of a process that we may mark.

use crate::scope::exclude::vma_exclusion;
use pagefold_inject::mark::PageSpan;
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::process::{Process, ReadError};

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
