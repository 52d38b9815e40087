//! Marks processes with a plain `madvise`, without the pacing and checks of the live host.

use anyhow::ensure;
use nix::libc::MADV_MERGEABLE;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_host::scope::exclude::vma_exclusion;
use pagefold_inject::{Call, Limits, inject};
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::process::{Process, ReadError};
use std::time::{Duration, Instant};

/// How long we keep trying a target that is too busy to be stopped, and the pause between tries.
const RETRY_LIMIT: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Consecutive pages of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpan {
    pub first: Vpn,
    pub pages: Pages,
}

/// The mappings that no rule of pagefold leaves out.
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

/// Marks all spans and returns their total length in bytes.
pub fn mark(process: &Process, spans: &[PageSpan]) -> anyhow::Result<u64> {
    let mut calls = Vec::new();
    for span in spans {
        calls.push(Call::madvise(span.first.address(), span.pages.bytes().0, MADV_MERGEABLE));
    }
    if calls.is_empty() {
        return Ok(0);
    }
    let end = Instant::now() + RETRY_LIMIT;
    let report = loop {
        match inject(process, &calls, &Limits::default()) {
            // Marking twice does no harm.
            Err(error) if error.is_passing() && Instant::now() < end => std::thread::sleep(RETRY_PAUSE),
            done => break done?,
        }
    };
    let done = report.results.iter().filter(|result| result.is_ok()).count();
    let refused = calls.len() - done;
    ensure!(refused == 0, "{refused} of {} marks were refused in process {}", calls.len(), process.pid());
    Ok(spans.iter().map(|span| span.pages).sum::<Pages>().bytes().0)
}
