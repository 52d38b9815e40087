//! Marks from outside, as the peers get them: whole mappings, or given spans.

use anyhow::{Context, ensure};
use pagefold_core::units::{Bytes, Pages, Vpn};
use pagefold_linux::inject::{Call, Limits, inject};
use pagefold_linux::proc::maps::{VmaDetail, read_smaps};
use pagefold_linux::proc::process::Process;
use pagefold_linux::scope::exclude::vma_exclusion;
use std::time::{Duration, Instant};

/// `MADV_MERGEABLE`, include/uapi/asm-generic/mman-common.h.
const MADV_MERGEABLE: i32 = 12;

/// A target that is too busy to be stopped is asked again, for so long at most.
const RETRY_LIMIT: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Pages of one process that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first page.
    pub first: Vpn,
    /// How many.
    pub pages: Pages,
}

/// The mappings of a process that may be marked, by the rules that pagefold itself goes by.
pub fn eligible(process: &Process) -> anyhow::Result<Vec<VmaDetail>> {
    let mut details = read_smaps(process)?;
    details.retain(|detail| vma_exclusion(detail).is_none());
    Ok(details)
}

/// Each eligible mapping as a whole.
pub fn everything(process: &Process) -> anyhow::Result<Vec<Stretch>> {
    let details = eligible(process)?;
    Ok(details.iter().map(|detail| Stretch { first: detail.vma.first(), pages: detail.vma.pages() }).collect())
}

/// Marks stretches of a process, all of them or none, and returns their length.
pub fn mark(process: &Process, stretches: &[Stretch]) -> anyhow::Result<Bytes> {
    let calls: Vec<Call> = stretches
        .iter()
        .map(|stretch| Call::madvise(stretch.first.address(), stretch.pages.bytes().0, MADV_MERGEABLE))
        .collect();
    if calls.is_empty() {
        return Ok(Bytes(0));
    }
    let pid = process.pid();
    let end = Instant::now() + RETRY_LIMIT;
    let report = loop {
        match inject(process, &calls, &Limits::default()) {
            // It was in the middle of something. Marking twice does no harm.
            Err(error) if error.is_passing() && Instant::now() < end => std::thread::sleep(RETRY_PAUSE),
            done => break done.with_context(|| format!("marking process {pid}"))?,
        }
    };
    let refused = report.results.iter().filter(|result| result.is_err()).count();
    ensure!(
        report.results.len() == calls.len() && refused == 0,
        "{refused} of {} marks were refused in process {pid}",
        calls.len()
    );
    Ok(stretches.iter().map(|stretch| stretch.pages).sum::<Pages>().bytes())
}
