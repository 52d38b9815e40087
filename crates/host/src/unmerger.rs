//! Unmerges processes without a run, and without waiting for processes that keep their mmap locks.
//!
//! A thread that we may abandon ([`pagefold_procmem::os::abandonable`]) unmerges each process. If the thread sleeps for
//! longer than usual, we leave it behind and begin with the next process. So a process that holds its own mmap lock
//! can't keep other processes marked. If a user or cgroup has used up its part of the injector's time, its processes
//! come last, and wait until it has some time again.

use crate::scope::ProcessInfo;
use pagefold_inject::unmerge::{UnmergeError, Unmerged, unmerge};
use pagefold_inject::{Injector, InjectorHandle};
use pagefold_procmem::Roots;
use pagefold_procmem::os::abandonable::Job;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// We leave at most this many threads behind at a time.
const LATE_MOST: usize = 64;
/// How long we wait for a thread that computes, such as one that makes many copies, before we leave it behind.
const COMPUTING: Duration = Duration::from_secs(1);
/// If this many threads that we left behind make progress, we wait for the next one: each may be about to copy 2 MiB
/// into the same cgroup, and the margins there have room for some of these steps at once, not for all.
const COMPUTING_MOST: usize = 8;
/// Time between two checks of the threads left behind.
const TICK: Duration = Duration::from_millis(5);
/// How long the injector may take for one call. It may be busy with a process whose mmap lock is held.
const INJECTOR_LIMIT: Duration = Duration::from_secs(1);

/// How long processes wait for their user's or cgroup's part of the injector's time while we unmerge none of them, and
/// the time between two attempts.
const SHARE_LIMIT: Duration = Duration::from_secs(10);
const SHARE_PAUSE: Duration = Duration::from_secs(1);

/// The result of unmerging a process.
#[derive(Clone, Debug)]
pub struct UnmergedProcess {
    pub pid: i32,
    /// Safe to print.
    pub name: String,
    /// Whether the process was selected by its own pid.
    pub is_named: bool,
    pub done: Unmerged,
    /// If we couldn't unmerge all memory of the process, says why.
    pub failure: Option<Arc<UnmergeError>>,
}

#[derive(Debug)]
pub struct Unmerger {
    injector: InjectorHandle,
    roots: Roots,
    late: Vec<Late>,
    /// Processes that wait for their user's or cgroup's part of the injector's time.
    waiting: Vec<(UnmergedProcess, ProcessInfo)>,
}

/// A process that we haven't finished unmerging.
#[derive(Debug)]
struct Late {
    process: UnmergedProcess,
    job: Job<Attempt>,
}

/// An attempt to unmerge a process, and what is done so far.
#[derive(Debug)]
struct Attempt {
    info: ProcessInfo,
    done: Unmerged,
    ran: Result<(), UnmergeError>,
}

impl Unmerger {
    /// Unmerges through this injector.
    pub fn new(injector: &mut Injector, roots: Roots) -> Self {
        injector.set_patience(INJECTOR_LIMIT);
        Self { injector: injector.handle(), roots, late: Vec::new(), waiting: Vec::new() }
    }

    /// Unmerges a process. Returns the processes finished since the last call.
    pub fn unmerge(&mut self, info: ProcessInfo) -> Vec<UnmergedProcess> {
        let mut over = self.take_over();
        while self.late.len() >= LATE_MOST && !self.is_stuck() {
            std::thread::sleep(TICK);
            over.extend(self.take_over());
        }
        let process = UnmergedProcess {
            pid: info.pid(),
            name: info.name.clone(),
            is_named: info.is_named(),
            done: Unmerged::default(),
            failure: None,
        };
        if self.late.len() >= LATE_MOST {
            over.push(process.locked());
            return over;
        }
        over.extend(self.attempt(process, info));
        over
    }

    /// Makes an attempt to unmerge a process. Returns it if we've finished it.
    fn attempt(&mut self, process: UnmergedProcess, info: ProcessInfo) -> Option<UnmergedProcess> {
        let injector = self.injector.clone();
        let roots = self.roots.clone();
        let mut done = process.done.clone();
        let job = Job::start(move || {
            let ran = unmerge(&info.process, &injector, &roots, &mut done);
            Attempt { info, done, ran }
        });
        let mut computing = 0;
        for late in &mut self.late {
            computing += usize::from(!late.job.pending.is_stuck());
        }
        match job.wait(if computing < COMPUTING_MOST { COMPUTING } else { Duration::MAX }) {
            Ok(attempt) => self.end(process, attempt),
            Err(job) => {
                self.late.push(Late { process, job });
                None
            }
        }
    }

    /// Ends an attempt. Returns the process unless it has to wait.
    fn end(&mut self, mut process: UnmergedProcess, attempt: Attempt) -> Option<UnmergedProcess> {
        let Attempt { info, done, ran } = attempt;
        let must_wait = ran.as_ref().is_err_and(UnmergeError::must_wait);
        process.done = done;
        let process = process.over(ran);
        if must_wait {
            self.waiting.push((process, info));
            return None;
        }
        Some(process)
    }

    /// Waits for the processes that we haven't finished. Then tries those again that have to wait.
    pub fn finish(&mut self) -> Vec<UnmergedProcess> {
        let mut over = self.finish_late();
        let mut since = Instant::now();
        while !self.waiting.is_empty() && since.elapsed() < SHARE_LIMIT {
            std::thread::sleep(SHARE_PAUSE);
            let before = over.len();
            for (process, info) in std::mem::take(&mut self.waiting) {
                over.extend(self.attempt(process, info));
            }
            over.extend(self.finish_late());
            // A process that holds us up and then fails doesn't make us wait longer.
            if over[before..].iter().any(|process| process.failure.is_none()) {
                since = Instant::now();
            }
        }
        over.extend(self.waiting.drain(..).map(|(process, _)| process));
        over
    }

    /// Waits for the processes that we haven't finished, as long as one of them makes progress.
    fn finish_late(&mut self) -> Vec<UnmergedProcess> {
        let mut over = self.take_over();
        while !self.late.is_empty() && !self.is_stuck() {
            std::thread::sleep(TICK);
            over.extend(self.take_over());
        }
        over.extend(self.late.drain(..).map(|late| late.process.locked()));
        over
    }

    /// Whether no thread that we left behind makes progress.
    fn is_stuck(&mut self) -> bool {
        self.late.iter_mut().all(|late| late.job.pending.is_stuck())
    }

    /// Removes the processes whose threads have ended from `late`, and returns them.
    fn take_over(&mut self) -> Vec<UnmergedProcess> {
        let mut over = Vec::new();
        for Late { process, job } in std::mem::take(&mut self.late) {
            let has_ended = job.pending.is_over();
            match job.poll() {
                Ok(attempt) => over.extend(self.end(process, attempt)),
                Err(_) if has_ended => {
                    let failed =
                        UnmergeError::Left { pid: process.pid, why: "the thread for it has failed".to_owned() };
                    over.push(process.over(Err(failed)));
                }
                Err(job) => self.late.push(Late { process, job }),
            }
        }
        over
    }
}

impl UnmergedProcess {
    fn over(self, ran: Result<(), UnmergeError>) -> Self {
        Self { failure: ran.err().map(Arc::new), ..self }
    }

    fn locked(self) -> Self {
        let error = UnmergeError::Locked { pid: self.pid, name: self.name.clone() };
        self.over(Err(error))
    }

    /// Whether the process ended before we unmerged it, and wasn't selected by its own pid.
    pub fn is_gone(&self) -> bool {
        !self.is_named && self.failure.as_ref().is_some_and(|error| error.has_ended())
    }
}
