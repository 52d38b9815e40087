//! Reads processes' memory on a thread that we abandon if a read hangs. The kernel may evict a page just before we read
//! it. If the page belongs to a file, our read waits for whoever serves the file (FUSE, NFS), maybe for ever.

use super::scanner::Scanner;
use pagefold_engine::hash::Digest;
use pagefold_engine::host::PageState;
use pagefold_engine::units::Vpn;
use pagefold_procmem::memory::{PageReader, ReadHow};
use pagefold_procmem::os::abandonable::{Job, LIMIT};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::READS;
use std::io;
use std::sync::Arc;

/// One job reads at most this many runs.
const RUNS: usize = 256;

/// A page reader. `None` if a thread that we've abandoned still uses the reader.
#[derive(Debug, Default)]
pub struct ScanReader(pub Option<PageReader>);

impl ScanReader {
    /// Does `work` on another thread. The error is late ([`ReadError::is_late`]) if the work hangs, or if we didn't try
    /// because earlier reads have hung.
    pub fn run<T: Send + 'static>(
        &mut self,
        process: &Arc<Process>,
        work: impl FnOnce(&mut PageReader, &Process) -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, ReadError> {
        let late = ReadError::from_io(process.pid(), "mem", io::ErrorKind::TimedOut.into());
        if READS.admit(process).is_err() {
            return Err(late);
        }
        let mut reader = self.0.take().unwrap_or_default();
        let read = process.clone();
        let mut job = Job::start(move || {
            let result = work(&mut reader, &read);
            (reader, result)
        });
        loop {
            let is_lost = job.pending.is_stuck() || job.pending.is_over();
            match job.wait(LIMIT) {
                Ok((reader, result)) => {
                    self.0 = Some(reader);
                    return result;
                }
                Err(same) if is_lost => {
                    READS.give_up(process, same.pending.alive());
                    return Err(late);
                }
                Err(same) => job = same,
            }
        }
    }

    /// Reads runs of pages, and calls `visit` with the state, frame and digest of each page that we could read.
    pub fn read_runs(
        &mut self,
        process: &Arc<Process>,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        scanner: &mut Scanner,
        mut visit: impl FnMut(&mut Scanner, Vpn, PageState, Option<u64>, Digest),
    ) -> Result<(), ReadError> {
        for runs in runs.chunks(RUNS) {
            let runs = runs.to_vec();
            let digester = scanner.digester.clone();
            let pages = self.run(process, move |reader, process| {
                let mut pages = Vec::new();
                reader.read_runs(process, &runs, how, |view| {
                    pages.extend(view.bytes.map(|bytes| (view.page, view.state, view.frame, digester.digest(bytes))));
                })?;
                Ok(pages)
            })?;
            for (page, state, frame, digest) in pages {
                scanner.count_page();
                visit(scanner, page, state, frame, digest);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_read_that_does_not_return_is_left_behind() {
        let parent = i32::try_from(std::os::unix::process::parent_id()).unwrap();
        let process = Arc::new(Process::open(parent).unwrap());
        let mut reader = ScanReader::default();
        let (_release, held) = channel::<()>();
        let late = reader.run(&process, move |_, _| Ok(held.recv()));
        assert!(late.is_err_and(|error| error.is_late()));
        assert!(reader.run(&process, |_, process| process.stat()).is_err(), "one thread at a time");
    }
}
