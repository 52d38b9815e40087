//! Reading the pages of a plan, on a thread that may be left behind (see [`crate::os::abandonable`]).

use crate::os::abandonable::{Pending, patiently};
use crate::proc::memory::{PageReader, PageView, ReadHow};
use crate::proc::numa::Topology;
use crate::proc::process::{Process, ReadError};
use pagefold_core::hash::Digester;
use pagefold_core::host::{MergedSample, PageSample, PageState};
use pagefold_core::keys::RegionKey;
use pagefold_core::units::Vpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Pages of one region.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) region: RegionKey,
    pub(crate) process: Arc<Process>,
    pub(crate) runs: Vec<(Vpn, u32)>,
}

/// All that is to be done.
#[derive(Debug)]
pub(crate) struct Work {
    /// What is read.
    pub(crate) reads: Vec<(Piece, ReadHow)>,
    /// Where merged frames are looked for.
    pub(crate) looks: Vec<Piece>,
    pub(crate) digester: Digester,
    /// On a machine with several memory nodes.
    pub(crate) topology: Option<Arc<Topology>>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) reader: PageReader,
    pub(crate) pages: Vec<PageSample>,
    pub(crate) merged: Vec<MergedSample>,
    /// Processes that could not be read to the end.
    pub(crate) failed: Vec<(i32, ReadError)>,
}

/// How far it has come.
#[derive(Debug, Default)]
struct Progress {
    pid: AtomicI32,
    pages: AtomicU64,
    given_up: AtomicBool,
}

/// Reads. The error is the process whose memory does not come back, and with it the reader and what was read so far.
pub(crate) fn sample(mut reader: PageReader, work: Work) -> Result<Sampled, (i32, Pending)> {
    let Work { reads, looks, digester, topology } = work;
    let progress = Arc::new(Progress::default());
    let told = progress.clone();
    let work = move || {
        let mut pages =
            Vec::with_capacity(reads.iter().flat_map(|(piece, _)| &piece.runs).map(|run| run.1 as usize).sum());
        let mut failed = Vec::new();
        for (Piece { region, process, runs }, how) in reads {
            if told.given_up.load(Ordering::Relaxed) {
                break;
            }
            told.pid.store(process.pid(), Ordering::Relaxed);
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
                told.pages.fetch_add(1, Ordering::Relaxed);
            });
            if let Err(error) = read {
                failed.push((process.pid(), error));
            }
        }
        let mut merged = Vec::new();
        for Piece { region, process, runs } in looks {
            if told.given_up.load(Ordering::Relaxed) {
                break;
            }
            told.pid.store(process.pid(), Ordering::Relaxed);
            let looked = reader.merged_frames(&process, &runs, |page, frame| {
                let node = topology.as_ref().and_then(|nodes| nodes.node_of(frame));
                merged.extend(node.map(|node| MergedSample { region, page, frame, node }));
                told.pages.fetch_add(1, Ordering::Relaxed);
            });
            if let Err(error) = looked {
                failed.push((process.pid(), error));
            }
        }
        Sampled { reader, pages, merged, failed }
    };
    patiently(|| progress.pages.load(Ordering::Relaxed), work).map_err(|pending| {
        progress.given_up.store(true, Ordering::Relaxed);
        (progress.pid.load(Ordering::Relaxed), pending)
    })
}
