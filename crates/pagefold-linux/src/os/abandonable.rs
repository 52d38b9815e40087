//! Reads that may never come back.
//!
//! A thread of a program may hold its mmap lock for as long as something lasts that it waits for itself: a page of a file
//! on a frozen file system, a file server that does not answer. Who then reads `smaps`, `pagemap` or `mem` of that
//! program waits with it (`mmap_read_lock_killable` in fs/proc/task_mmu.c: only a fatal signal ends that; in
//! mm/process_vm_access.c not even that does). Seen on 6.18 by `pagefold/tests/crash/stuck.rs`.
//!
//! So such files are read by a thread of their own. Whoever wants to know stops waiting when nothing has moved for
//! [`LIMIT`], and leaves that thread to itself: it ends when its read comes back, or with the process.

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// No read of one program takes so long, even on a busy machine: `smaps` of 100 GiB takes a second.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// To the thread that reads for this one, if there is one that is not stuck.
    static READER: RefCell<Option<Sender<Job>>> = const { RefCell::new(None) };
}

/// A read that has not come back in time.
#[derive(Debug)]
pub(crate) struct Pending(Weak<()>);

impl Pending {
    /// Whether it has come back by now.
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Has `job` done on the thread that reads. Gives up when `progress` has not changed for [`LIMIT`]. Handing it over takes
/// some 10 us.
pub(crate) fn run_abandonable<T: Send + 'static>(
    progress: impl Fn() -> u64,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Pending> {
    let alive = Arc::new(());
    let pending = Pending(Arc::downgrade(&alive));
    let (tell, told) = channel();
    hand_over(Box::new(move || {
        // Whoever has given up does not listen any more.
        let _ = tell.send(job());
        drop(alive);
    }));
    let mut before = progress();
    loop {
        match told.recv_timeout(LIMIT) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                let now = progress();
                if now == before {
                    READER.take();
                    return Err(pending);
                }
                before = now;
            }
            // It has panicked, or there was no thread to be had: that is a read that never comes back, and is over.
            Err(RecvTimeoutError::Disconnected) => return Err(pending),
        }
    }
}

fn hand_over(job: Job) {
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
    fn who_waits_in_vain_goes_on_and_so_do_the_others() {
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
        // What moves is waited for.
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
