//! Reads that may never return, on a thread that may be abandoned.
//!
//! A thread of a program may hold its mmap lock while it waits: for a page of a file on a frozen file system, or for a
//! file server that does not respond. Meanwhile reads of `smaps`, `pagemap` and `mem` of that program block
//! (`mmap_read_lock_killable` in fs/proc/task_mmu.c: only a fatal signal ends that; in mm/process_vm_access.c not even
//! that does). Observed on 6.18 by `pagefold/tests/crash/stuck.rs`.
//!
//! So such files are read by a separate thread. If it makes no progress for [`LIMIT`] the caller abandons it; it ends when
//! its read returns, or with the process. Progress is what the job reports, each part of a long list that has been read
//! ([`advance`]), and the CPU time of the thread: the kernel walks the page tables of a large mapping in one read, 10 ns per page,
//! but a thread that waits for a lock or a page uses none.

use crate::os::cpu::clock_ns;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Without progress for this long a read is stuck, even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Sends jobs to the reading thread of this thread, if it has one that is not stuck.
    static READER: RefCell<Option<Sender<Job>>> = const { RefCell::new(None) };
    /// The signs of life of the job that this thread runs, if it is a reading thread.
    static SIGNS: RefCell<Option<Arc<Signs>>> = const { RefCell::new(None) };
}

/// Signs that a job is not stuck.
#[derive(Debug, Default)]
struct Signs {
    steps: AtomicU64,
    /// The CPU clock of its thread.
    clock: OnceLock<libc::clockid_t>,
}

impl Signs {
    /// Makes this thread show them.
    fn begin(self: &Arc<Self>) {
        let mut clock = 0;
        // SAFETY: `clock` outlives the call; the thread is this one.
        if unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) } == 0 {
            let _ = self.clock.set(clock);
        }
        SIGNS.set(Some(self.clone()));
    }

    /// A number that grows while the job makes progress.
    fn sum(&self) -> u64 {
        // The clock cannot be read once the thread has ended.
        let cpu_ns = self.clock.get().and_then(|&clock| clock_ns(clock).ok()).unwrap_or(0);
        self.steps.load(Ordering::Relaxed).wrapping_add(cpu_ns / 1_000_000)
    }
}

/// Whether a thread of this process sleeps. Neither running nor waiting for a processor counts.
pub(crate) fn is_asleep(tid: i32) -> bool {
    let stat = std::fs::read(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
    let state = stat.iter().rposition(|&byte| byte == b')').and_then(|end| stat.get(end + 2));
    tid != 0 && state != Some(&b'R')
}

/// Shows that the job which this thread runs makes progress.
pub(crate) fn advance() {
    SIGNS.with_borrow(|signs| signs.iter().for_each(|signs| _ = signs.steps.fetch_add(1, Ordering::Relaxed)));
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
    let signs = Arc::new(Signs::default());
    let progress = {
        let signs = signs.clone();
        move || progress().wrapping_add(signs.sum())
    };
    send_to_reader(Box::new(move || {
        signs.begin();
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

    /// Reads one line in each of some pauses.
    struct Slow(u32);

    impl std::io::Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            std::thread::sleep(LIMIT / 4);
            self.0 += 1;
            let line = format!("{:x}000-{:x}000 rw-p 00000000 00:00 0 \n", self.0, self.0 + 1);
            let line = if self.0 > 8 { "" } else { &line };
            buffer[..line.len()].copy_from_slice(line.as_bytes());
            Ok(line.len())
        }
    }

    fn mappings(maps: impl std::io::Read) -> u32 {
        let mut read = 0;
        let _ = crate::proc::maps::each_mapping(maps, crate::proc::maps::Names::All, |_| {
            read += 1;
            std::ops::ControlFlow::Continue(())
        });
        read
    }

    /// The kernel walks page tables for long in one read, or prints a long list slowly: neither is stuck.
    #[test]
    fn long_jobs_are_not_stuck_while_they_make_progress() {
        let computes = || {
            let end = Instant::now() + LIMIT * 5 / 4;
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        };
        assert!(run_abandonable(|| 0, computes).is_ok());
        assert_eq!(run_abandonable(|| 0, || mappings(Slow(0))).unwrap(), 8);
    }

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
