//! Marks a process from outside with a plain `madvise`, without the pacing and checks of the live host. For experiments
//! and the demonstration, which mark programs that they've started.

use crate::{Call, InjectError, Limits, inject};
use pagefold_engine::units::{Bytes, Pages, Vpn};
use pagefold_procmem::process::Process;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long we keep trying a target that is too busy to be stopped, and the pause between tries.
pub(super) const RETRY_LIMIT: Duration = Duration::from_secs(5);
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Why we didn't mark a process.
#[derive(Debug, Error)]
pub enum MarkError {
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// The kernel refused some of the calls, or we didn't make them.
    #[error("{refused} of {calls} marks were refused in process {pid}")]
    Refused { pid: i32, refused: usize, calls: usize },
}

/// Consecutive pages of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpan {
    pub first: Vpn,
    pub pages: Pages,
}

/// Marks all spans and returns their total length.
pub fn mark(process: &Process, spans: &[PageSpan]) -> Result<Bytes, MarkError> {
    let mut calls = Vec::new();
    for span in spans {
        calls.push(Call::madvise(span.first.address(), span.pages.bytes().0, libc::MADV_MERGEABLE));
    }
    if calls.is_empty() {
        return Ok(Bytes(0));
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
    if done < calls.len() {
        return Err(MarkError::Refused { pid: process.pid(), refused: calls.len() - done, calls: calls.len() });
    }
    Ok(spans.iter().map(|span| span.pages).sum::<Pages>().bytes())
}
