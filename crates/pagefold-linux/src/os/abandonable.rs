//! Reads that may never return, on a thread that may be abandoned.
//!
//! A thread of a program may hold its mmap lock while it waits: for a page of a file on a frozen file system, or for a
//! file server that does not respond. Meanwhile reads of `smaps`, `pagemap` and `mem` of that program block
//! (`mmap_read_lock_killable` in fs/proc/task_mmu.c: only a fatal signal ends that; in mm/process_vm_access.c not even
//! that does). Observed on 6.18 by `pagefold/tests/crash/stuck.rs`.
//!
//! So such files are read by a separate thread. If it makes no progress for [`LIMIT`] the caller abandons it; it ends when
//! its read returns, or with the process.

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Longer than any read of one program takes, even on a busy machine: `smaps` of 100 GiB takes a second.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Sends jobs to the reading thread of this thread, if it has one that is not stuck.
    static READER: RefCell<Option<Sender<Job>>> = const { RefCell::new(None) };
}

/// A read that has been abandoned.
#[derive(Debug)]
pub(crate) struct Pending(Weak<()>);

impl Pending {
    /// Whether the read has returned.
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Runs `job` on the reading thread, which takes some 10 us more than a call. Abandons it when `progress` has not changed
/// for [`LIMIT`].
pub(crate) fn run_abandonable<T: Send + 'static>(
    progress: impl Fn() -> u64,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Pending> {
    let alive = Arc::new(());
    let pending = Pending(Arc::downgrade(&alive));
    let (sender, result) = channel();
    send_to_reader(Box::new(move || {
        // A caller that has abandoned the job has dropped its receiver.
        let _ = sender.send(job());
        drop(alive);
    }));
    let mut before = progress();
    loop {
        match result.recv_timeout(LIMIT) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                let now = progress();
                if now == before {
                    READER.take();
                    return Err(pending);
                }
                before = now;
            }
            // The job has panicked, or no thread could be started: the read has failed and is over.
            Err(RecvTimeoutError::Disconnected) => return Err(pending),
        }
    }
}

fn send_to_reader(job: Job) {
    let job = match READER.take() {
        None => job,
        Some(sender) => match sender.send(job) {
            Ok(()) => {
                READER.set(Some(sender));
                return;
            }
            Err(unsent) => unsent.0,
        },
    };
    let (sender, jobs) = channel::<Job>();
    let work = move || {
        for job in jobs {
            job();
        }
    };
    let spawned = std::thread::Builder::new().name("pagefold-reads".to_owned()).spawn(work);
    if spawned.is_ok() && sender.send(job).is_ok() {
        READER.set(Some(sender));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    #[test]
    fn stuck_jobs_are_abandoned_and_later_ones_run() {
        assert_eq!(run_abandonable(|| 0, || 7).unwrap(), 7);
        let (release, held) = channel::<()>();
        let began = Instant::now();
        let pending = run_abandonable(|| 0, move || held.recv()).unwrap_err();
        assert!(began.elapsed() >= LIMIT && !pending.is_over());
        assert_eq!(run_abandonable(|| 0, || 8).unwrap(), 8);
        drop(release);
        while !pending.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A slow job that makes progress is not abandoned.
        let steps = Arc::new(AtomicU64::new(0));
        let moving = steps.clone();
        let slow = move || {
            for _ in 0..10 {
                std::thread::sleep(LIMIT / 8);
                moving.fetch_add(1, Ordering::Relaxed);
            }
            9
        };
        assert_eq!(run_abandonable(|| steps.load(Ordering::Relaxed), slow).unwrap(), 9);
        let failed = run_abandonable(|| 0, || -> () { panic!("as a test") }).unwrap_err();
        while !failed.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
