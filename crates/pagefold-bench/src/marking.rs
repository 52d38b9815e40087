//! Marks from outside, as the peers get them: whole mappings, or given spans.

use anyhow::{Context, ensure};
use pagefold_core::units::{Bytes, Pages, Vpn};
use pagefold_linux::exclude::vma_exclusion;
use pagefold_linux::maps::{VmaDetail, parse_smaps};
use pagefold_linux::process::Process;

/// `MADV_MERGEABLE`, include/uapi/asm-generic/mman-common.h.
const MADV_MERGEABLE: i32 = 12;

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
    let text = process.read_file("smaps")?;
    let mut details = parse_smaps(&text).map_err(|what| process.malformed("smaps", what))?;
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
    // Until the injector is there: an outside program (pid, then address length pairs).
    let _ = MADV_MERGEABLE;
    let mut run = std::process::Command::new("/tmp/injmark");
    run.arg(process.pid().to_string());
    for stretch in stretches {
        run.arg(stretch.first.address().to_string()).arg(stretch.pages.bytes().0.to_string());
    }
    let out = run.output().context("injmark")?;
    ensure!(out.status.success(), "injmark: {}", String::from_utf8_lossy(&out.stderr));
    Ok(stretches.iter().map(|stretch| stretch.pages).sum::<Pages>().bytes())
}
