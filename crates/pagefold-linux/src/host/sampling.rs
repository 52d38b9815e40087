//! Reads the pages of a plan on a thread that may be abandoned (see [`crate::os::abandonable`]).

use crate::os::abandonable::{Pending, advance, run_abandonable};
use crate::os::numa::Topology;
use crate::proc::memory::{PageReader, PageView, ReadHow};
use crate::proc::process::{Process, ReadError};
use pagefold_core::hash::Digester;
use pagefold_core::host::{MergedSample, PageSample, PageState};
use pagefold_core::keys::RegionKey;
use pagefold_core::units::Vpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Pages of one region.
#[derive(Debug)]
pub(crate) struct RegionRuns {
    pub(crate) region: RegionKey,
    pub(crate) process: Arc<Process>,
    pub(crate) runs: Vec<(Vpn, u32)>,
}

/// The pages to read.
#[derive(Debug)]
pub(crate) struct SamplingJob {
    /// Pages to sample.
    pub(crate) reads: Vec<(RegionRuns, ReadHow)>,
    /// Pages to search for merged frames.
    pub(crate) looks: Vec<RegionRuns>,
    pub(crate) digester: Digester,
    /// On machines with several memory nodes.
    pub(crate) topology: Option<Arc<Topology>>,
}

/// The pages read.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) reader: PageReader,
    pub(crate) pages: Vec<PageSample>,
    pub(crate) merged: Vec<MergedSample>,
    /// Processes that could not be read completely.
    pub(crate) failed: Vec<(i32, ReadError)>,
}

/// Progress of the reading thread.
#[derive(Debug, Default)]
struct Progress {
    pid: AtomicI32,
    given_up: AtomicBool,
}

/// Reads the pages. The error names the process whose read does not return; the reader and the pages read so far are
/// lost with it.
pub(crate) fn sample(mut reader: PageReader, work: SamplingJob) -> Result<Sampled, (i32, Pending)> {
    let SamplingJob { reads, looks, digester, topology } = work;
    let progress = Arc::new(Progress::default());
    let shared = progress.clone();
    let work = move || {
        let expected =
            reads.iter().flat_map(|(piece, _)| &piece.runs).map(|run| usize::try_from(run.1).unwrap_or(0)).sum();
        let mut pages = Vec::with_capacity(expected);
        let mut failed = Vec::new();
        for (RegionRuns { region, process, runs }, how) in reads {
            if shared.given_up.load(Ordering::Relaxed) {
                break;
            }
            shared.pid.store(process.pid(), Ordering::Relaxed);
            let read = reader.read_runs(&process, &runs, how, |view| {
                let digest = view.bytes.map(|bytes| digester.digest(bytes)).unwrap_or_default();
                let node = match &topology {
                    Some(nodes) if view.state == PageState::Private => {
                        view.frame.and_then(|frame| nodes.node_of(frame))
                    }
                    _ => None,
                };
                let PageView { page, state, huge, active, .. } = view;
                pages.push(PageSample { region, page, state, huge, digest, active, node });
                advance();
            });
            if let Err(error) = read {
                failed.push((process.pid(), error));
            }
        }
        let mut merged = Vec::new();
        for RegionRuns { region, process, runs } in looks {
            if shared.given_up.load(Ordering::Relaxed) {
                break;
            }
            shared.pid.store(process.pid(), Ordering::Relaxed);
            let looked = reader.merged_frames(&process, &runs, |page, frame| {
                let node = topology.as_ref().and_then(|nodes| nodes.node_of(frame));
                merged.extend(node.map(|node| MergedSample { region, page, frame, node }));
                advance();
            });
            if let Err(error) = looked {
                failed.push((process.pid(), error));
            }
        }
        Sampled { reader, pages, merged, failed }
    };
    run_abandonable(work).map_err(|pending| {
        progress.given_up.store(true, Ordering::Relaxed);
        (progress.pid.load(Ordering::Relaxed), pending)
    })
}
