//! Jobs that may never return, on a thread that may be abandoned.
//!
//! A thread of a program may hold its mmap lock while it waits: for a page of a file on a frozen file system, or for a
//! file server that doesn't respond. As long as it waits, our reads of that program's `smaps`, `pagemap` and `mem`
//! block. Only a fatal signal ends such a read (`mmap_read_lock_killable` in fs/proc/task_mmu.c), and nothing at all
//! ends process_vm_readv (mm/process_vm_access.c). `pagefold/tests/trust/worst.rs` shows this on 6.18. An exec makes
//! readers wait in the same way (`exec_update_lock`).
//!
//! So a separate thread does anything that can block, or that a program can make long: 65,000 mappings with long names
//! take a second. The caller waits for a short time, and then goes on without the result. While a job sleeps, the
//! caller waits only as long as its budget for sleeping jobs lasts, which earlier jobs may have used up. The thread
//! ends when its job returns, or with the process. A job is stuck when it makes no progress for [`LIMIT`]. Two things
//! count as progress: the job reports each part of a long list that it has read ([`advance`]), and the thread uses CPU
//! time. The kernel walks the page tables of a large mapping in one read, 10 ns per page, but a thread that waits for a
//! lock or a page uses no CPU time.

use crate::os::cpu::clock_ns;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// A job without progress for this long is stuck, even on a busy machine.
pub const LIMIT: Duration = Duration::from_millis(if cfg!(test) { 1_500 } else { 3_000 });
/// How long we wait for a job. Also each thread's budget for waiting while its jobs sleep: such waits use it up, and it
/// grows again by 1/[`REGAINED`] of the time that passes.
pub const PATIENCE: Duration = Duration::from_millis(250);
const REGAINED: u32 = 4;
/// How often a waiting caller checks whether the job sleeps. Also the shortest wait.
const TICK: Duration = Duration::from_millis(5);

type Work = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Sends jobs to the reading thread that belongs to this thread, if it has one that isn't busy.
    static READER: RefCell<Option<Sender<Work>>> = const { RefCell::new(None) };
    /// The signs of progress of the job that this thread runs, if it is a reading thread.
    static SIGNS: RefCell<Option<Arc<Signs>>> = const { RefCell::new(None) };
    /// How much of its budget ([`PATIENCE`]) this thread had left, and when that was.
    static LEFT: Cell<(Duration, Option<Instant>)> = const { Cell::new((PATIENCE, None)) };
}

/// Takes `lost` from this thread's budget for sleeping jobs ([`PATIENCE`]). Returns whether any is left.
fn lose_patience(lost: Duration) -> bool {
    let (left, at) = LEFT.get();
    let regained = at.map_or(PATIENCE, |at| at.elapsed() / REGAINED);
    let left = (left + regained).min(PATIENCE).saturating_sub(lost);
    LEFT.set((left, Some(Instant::now())));
    !left.is_zero()
}

/// Signs that a job is not stuck.
#[derive(Debug, Default)]
struct Signs {
    steps: AtomicU64,
    /// The job's thread; 0 before it begins.
    tid: AtomicI32,
    clock: OnceLock<libc::clockid_t>,
    /// Whether the job is waiting for somebody other than its target process.
    is_elsewhere: AtomicBool,
}

impl Signs {
    /// Tracks the calling thread's progress from now on.
    fn begin(self: &Arc<Self>) {
        let mut clock = 0;
        // SAFETY: `clock` outlives the call, which is about this thread.
        let known = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
        // SAFETY: takes no argument.
        let tid = unsafe { libc::gettid() };
        if known == 0 {
            let _ = self.clock.set(clock);
        }
        self.tid.store(tid, Ordering::Relaxed);
        SIGNS.set(Some(self.clone()));
    }

    /// A number that grows while the job makes progress.
    fn sum(&self) -> u64 {
        // We can't read the clock once the thread has ended.
        let cpu_ns = self.clock.get().and_then(|&clock| clock_ns(clock).ok()).unwrap_or(0);
        self.steps.load(Ordering::Relaxed).wrapping_add(cpu_ns / 1_000_000)
    }
}

/// Whether a thread of this process is asleep: neither running nor waiting for a processor.
pub fn is_asleep(tid: i32) -> bool {
    let stat = std::fs::read(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
    let name_end = stat.iter().rposition(|&byte| byte == b')').unwrap_or(0);
    tid != 0 && stat.get(name_end + 2) != Some(&b'R')
}

/// Reports that the job of this thread has made progress.
pub fn advance() {
    SIGNS.with_borrow(|signs| {
        if let Some(signs) = signs {
            signs.steps.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Runs `work`, during which the job may wait for somebody other than its target process. The job doesn't count as
/// stuck meanwhile.
pub fn elsewhere<T>(work: impl FnOnce() -> T) -> T {
    set_elsewhere(true);
    let done = work();
    set_elsewhere(false);
    advance();
    done
}

fn set_elsewhere(is_elsewhere: bool) {
    SIGNS.with_borrow(|signs| {
        if let Some(signs) = signs {
            signs.is_elsewhere.store(is_elsewhere, Ordering::Relaxed);
        }
    });
}

/// A job whose caller has stopped waiting.
#[derive(Debug)]
pub struct Pending {
    alive: Weak<()>,
    signs: Arc<Signs>,
    /// The last sign of progress, and when we saw it.
    seen: (u64, Instant),
}

impl Pending {
    pub fn is_over(&self) -> bool {
        self.alive.strong_count() == 0
    }

    /// How long the job has made no progress, as far as we've seen.
    pub fn idle(&mut self) -> Duration {
        let now = self.signs.sum();
        if now != self.seen.0 || self.signs.is_elsewhere.load(Ordering::Relaxed) {
            self.seen = (now, Instant::now());
        }
        self.seen.1.elapsed()
    }

    /// Whether the job has made no progress for [`LIMIT`].
    pub fn is_stuck(&mut self) -> bool {
        !self.is_over() && self.idle() >= LIMIT
    }

    pub fn is_asleep(&self) -> bool {
        is_asleep(self.signs.tid.load(Ordering::Relaxed))
    }

    /// Whether the job's target keeps it waiting.
    pub fn waits_for_target(&self) -> bool {
        !self.is_over() && self.is_asleep() && !self.signs.is_elsewhere.load(Ordering::Relaxed)
    }

    /// Can be upgraded until the job is over.
    pub fn alive(&self) -> Weak<()> {
        self.alive.clone()
    }
}

#[derive(Debug)]
pub struct Job<T> {
    result: Receiver<T>,
    pub pending: Pending,
}

impl<T: Send + 'static> Job<T> {
    /// Starts the job on the reading thread. That takes some 10 us more than to run it on this thread.
    pub fn start(job: impl FnOnce() -> T + Send + 'static) -> Self {
        let alive = Arc::new(());
        let signs = Arc::new(Signs::default());
        let pending = Pending { alive: Arc::downgrade(&alive), signs: signs.clone(), seen: (0, Instant::now()) };
        let (sender, result) = channel();
        send_to_reader(Box::new(move || {
            signs.begin();
            // A caller that has stopped waiting may have dropped its receiver.
            let _ = sender.send(job());
            drop(alive);
        }));
        Self { result, pending }
    }

    /// Waits up to `most` for the result, but while the job sleeps, only until this thread's budget is used up. Gives
    /// the job back if it isn't done by then, or has panicked, or couldn't be started.
    pub fn wait(self, most: Duration) -> Result<T, Self> {
        let began = Instant::now();
        loop {
            match self.result.recv_timeout(TICK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(self),
                Err(RecvTimeoutError::Timeout) => {
                    let is_patient = !self.pending.is_asleep() || lose_patience(TICK);
                    if !is_patient || began.elapsed() >= most {
                        // This job still keeps the reading thread busy, so later jobs need another thread.
                        READER.take();
                        return Err(self);
                    }
                }
            }
        }
    }

    /// Waits up to `time` for the result, whether the job sleeps or not.
    pub fn wait_for(self, time: Duration) -> Result<T, Self> {
        self.result.recv_timeout(time).map_err(|_| {
            READER.take();
            self
        })
    }

    pub fn poll(self) -> Result<T, Self> {
        self.result.try_recv().map_err(|_| self)
    }

    /// Stops waiting. The receiver gets the result later.
    pub fn leave(self) -> (Receiver<T>, Pending) {
        (self.result, self.pending)
    }
}

/// Runs `job` on the reading thread. Abandons it when it takes too long ([`PATIENCE`]).
pub fn run_abandonable<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Result<T, Pending> {
    Job::start(job).wait(PATIENCE).map_err(|job| job.pending)
}

fn send_to_reader(mut work: Work) {
    if let Some(sender) = READER.take() {
        match sender.send(work) {
            Ok(()) => return READER.set(Some(sender)),
            Err(unsent) => work = unsent.0,
        }
    }
    let (sender, jobs) = channel::<Work>();
    let spawned = std::thread::Builder::new().name("pagefold-reads".to_owned()).spawn(move || {
        for job in jobs {
            job();
        }
    });
    if spawned.is_ok() && sender.send(work).is_ok() {
        READER.set(Some(sender));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_until_over(pending: &Pending) {
        while !pending.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns one line per read, after a pause each time.
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
        let _ = crate::maps::each_mapping(maps, crate::maps::Names::All, |_| {
            read += 1;
            std::ops::ControlFlow::Continue(())
        });
        read
    }

    /// A job isn't stuck if the kernel walks page tables for long in one read, or prints a long list slowly.
    #[test]
    #[cfg_attr(not(feature = "live"), ignore = "takes 7 s")]
    fn long_jobs_are_not_stuck_while_they_make_progress() {
        let computes = || {
            let end = Instant::now() + LIMIT * 5 / 4;
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        };
        assert!(Job::start(computes).wait(LIMIT * 3).is_ok());
        let began = Instant::now();
        let mut pending = run_abandonable(computes).unwrap_err();
        assert!(began.elapsed() < LIMIT && !pending.waits_for_target(), "nobody waits for it");
        while !pending.is_over() {
            assert!(!pending.is_stuck());
            std::thread::sleep(TICK);
        }
        let mut job = Job::start(|| mappings(Slow(0)));
        let read = loop {
            job = match job.wait(LIMIT) {
                Ok(read) => break read,
                Err(job) => job,
            };
            assert!(!job.pending.is_stuck());
        };
        assert_eq!(read, 8);
    }

    #[test]
    fn stuck_jobs_are_abandoned_and_later_ones_run() {
        assert_eq!(run_abandonable(|| 7).unwrap(), 7);
        let (release, held) = channel::<()>();
        let began = Instant::now();
        let mut pending = run_abandonable(move || held.recv()).unwrap_err();
        assert!(began.elapsed() >= PATIENCE && !pending.is_over() && !pending.is_stuck());
        assert_eq!(run_abandonable(|| 8).unwrap(), 8);
        std::thread::sleep(LIMIT);
        assert!(pending.is_stuck());
        drop(release);
        wait_until_over(&pending);
        assert!(!pending.is_stuck());
        wait_until_over(&run_abandonable(|| -> () { panic!("as a test") }).unwrap_err());
    }

    /// A job that waits for somebody other than its target isn't stuck, and doesn't count as a stall of the target.
    #[test]
    fn a_target_is_not_to_blame_for_a_wait_elsewhere() {
        let (release, held) = channel::<()>();
        let (release_target, target) = channel::<()>();
        let job = Job::start(move || {
            let _ = elsewhere(|| held.recv());
            target.recv()
        });
        let mut job = job.wait(LIMIT).unwrap_err();
        assert!(job.pending.is_asleep() && !job.pending.waits_for_target());
        std::thread::sleep(LIMIT);
        assert!(!job.pending.is_stuck() && !job.pending.is_over());
        drop(release);
        while !job.pending.waits_for_target() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(job.pending.idle() < PATIENCE);
        drop(release_target);
        wait_until_over(&job.pending);
    }

    /// While many jobs sleep at once, we spend about a quarter of the time waiting for them.
    #[test]
    fn the_time_spent_waiting_is_limited() {
        let began = Instant::now();
        let mut held = Vec::new();
        for _ in 0..20 {
            let (release, wait) = channel::<()>();
            held.push((release, run_abandonable(move || wait.recv()).unwrap_err()));
        }
        let took = began.elapsed();
        assert!(took < PATIENCE * 20 / 2, "{took:?}");
        assert_eq!(run_abandonable(|| 9).unwrap(), 9);
        for (release, pending) in held {
            drop(release);
            wait_until_over(&pending);
        }
        // A job that computes, rather than sleeps, is abandoned once its caller's time limit is over.
        let (release, wait) = channel::<()>();
        let job = Job::start(move || while wait.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {});
        let job = job.wait(TICK).unwrap_err();
        drop(release);
        wait_until_over(&job.pending);
        assert!(job.poll().is_ok());
    }
}
