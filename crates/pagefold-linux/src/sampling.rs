//! Reading the pages of a plan, on a thread that may be left behind (see [`crate::patience`]).

use crate::memory::{PageReader, ReadHow};
use crate::patience::{Pending, patiently};
use crate::process::{Process, ReadError};
use pagefold_core::hash::{Digest, Digester};
use pagefold_core::host::{PageSample, PageState, RegionKey};
use pagefold_core::units::Vpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// What is to be read of one region.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) region: RegionKey,
    pub(crate) process: Arc<Process>,
    pub(crate) runs: Vec<(Vpn, u32)>,
    pub(crate) how: ReadHow,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) reader: PageReader,
    pub(crate) pages: Vec<PageSample>,
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
pub(crate) fn sample(
    mut reader: PageReader,
    pieces: Vec<Piece>,
    digester: Digester,
    shared: bool,
) -> Result<Sampled, (i32, Pending)> {
    let progress = Arc::new(Progress::default());
    let told = progress.clone();
    let work = move || {
        let mut pages = Vec::with_capacity(pieces.iter().flat_map(|piece| &piece.runs).map(|run| run.1 as usize).sum());
        let mut failed = Vec::new();
        for Piece { region, process, runs, how } in pieces {
            if told.given_up.load(Ordering::Relaxed) {
                break;
            }
            told.pid.store(process.pid(), Ordering::Relaxed);
            let read = reader.read_runs(&process, &runs, how, |view| {
                let digest = match view.bytes {
                    Some(bytes) if view.state == PageState::Private || shared => digester.digest(bytes),
                    _ => Digest::default(),
                };
                pages.push(PageSample { region, page: view.page, state: view.state, huge: view.huge, digest });
                told.pages.fetch_add(1, Ordering::Relaxed);
            });
            if let Err(error) = read {
                failed.push((process.pid(), error));
            }
        }
        Sampled { reader, pages, failed }
    };
    patiently(|| progress.pages.load(Ordering::Relaxed), work).map_err(|pending| {
        progress.given_up.store(true, Ordering::Relaxed);
        (progress.pid.load(Ordering::Relaxed), pending)
    })
}
