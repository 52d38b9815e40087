//! Unmerging processes without a run, and without waiting for those that keep their memory maps locked.
//!
//! Each process is unmerged by a thread that may be abandoned ([`pagefold_procmem::os::abandonable`]). If that sleeps for longer than usual, it is
//! left to itself and the next process is begun. So whoever locks its memory map keeps no other process marked.

use crate::scope::Scoped;
use pagefold_inject::unmerge::{UnmergeError, Unmerged, unmerge};
use pagefold_inject::{Injector, InjectorHandle};
use pagefold_procmem::Roots;
use pagefold_procmem::os::abandonable::Job;
use std::sync::Arc;
use std::time::Duration;

/// Threads that are left to themselves at a time.
const LATE_MOST: usize = 64;
/// How often they are looked at.
const TICK: Duration = Duration::from_millis(5);
/// How long the injector may take for one call. It may be busy with a process whose memory map is locked.
const INJECTOR_LIMIT: Duration = Duration::from_secs(1);

/// What has come of unmerging a process.
#[derive(Clone, Debug)]
pub struct UnmergedProcess {
    pub pid: i32,
    /// Its name, safe to print.
    pub name: String,
    /// Whether it was selected by its own pid.
    pub is_named: bool,
    /// What was done.
    pub done: Unmerged,
    /// Why it is not unmerged, or not completely, if so.
    pub failure: Option<Arc<UnmergeError>>,
}

/// Unmerges processes.
#[derive(Debug)]
pub struct Unmerger {
    injector: InjectorHandle,
    roots: Roots,
    late: Vec<Late>,
}

/// A process whose unmerging has not ended yet.
#[derive(Debug)]
struct Late {
    process: UnmergedProcess,
    job: Job<(Unmerged, Result<(), UnmergeError>)>,
}

impl Unmerger {
    /// Unmerges through this injector.
    pub fn new(injector: &mut Injector, roots: Roots) -> Self {
        injector.set_patience(INJECTOR_LIMIT);
        Self { injector: injector.handle(), roots, late: Vec::new() }
    }

    /// Unmerges a process. Returns those that have been dealt with since the last call.
    pub fn unmerge(&mut self, scoped: Scoped) -> Vec<UnmergedProcess> {
        let mut over = self.take_over();
        while self.late.len() >= LATE_MOST && !self.is_stuck() {
            std::thread::sleep(TICK);
            over.extend(self.take_over());
        }
        let process = UnmergedProcess {
            pid: scoped.process.pid(),
            name: scoped.name.clone(),
            is_named: scoped.is_named(),
            done: Unmerged::default(),
            failure: None,
        };
        if self.late.len() >= LATE_MOST {
            over.push(process.locked());
            return over;
        }
        let (injector, roots) = (self.injector.clone(), self.roots.clone());
        let job = Job::start(move || {
            let mut done = Unmerged::default();
            let ran = unmerge(&scoped.process, &injector, &roots, &mut done);
            (done, ran)
        });
        // One that computes is waited for until it has ended.
        match job.wait(Duration::MAX) {
            Ok((done, ran)) => over.push(process.over(done, ran)),
            Err(job) => self.late.push(Late { process, job }),
        }
        over
    }

    /// Waits for the others, as long as one makes progress.
    pub fn finish(&mut self) -> Vec<UnmergedProcess> {
        let mut over = self.take_over();
        while !self.late.is_empty() && !self.is_stuck() {
            std::thread::sleep(TICK);
            over.extend(self.take_over());
        }
        over.extend(self.late.drain(..).map(|late| late.process.locked()));
        over
    }

    /// Whether none makes progress.
    fn is_stuck(&mut self) -> bool {
        self.late.iter_mut().all(|late| late.job.pending.is_stuck())
    }

    /// Takes those that have ended.
    fn take_over(&mut self) -> Vec<UnmergedProcess> {
        let mut over = Vec::new();
        for Late { process, job } in std::mem::take(&mut self.late) {
            let has_ended = job.pending.is_over();
            match job.poll() {
                Ok((done, ran)) => over.push(process.over(done, ran)),
                Err(_) if has_ended => {
                    let failed =
                        UnmergeError::Left { pid: process.pid, why: "the thread for it has failed".to_owned() };
                    over.push(process.over(Unmerged::default(), Err(failed)));
                }
                Err(job) => self.late.push(Late { process, job }),
            }
        }
        over
    }
}

impl UnmergedProcess {
    fn over(self, done: Unmerged, ran: Result<(), UnmergeError>) -> Self {
        Self { done, failure: ran.err().map(Arc::new), ..self }
    }

    fn locked(self) -> Self {
        let error = UnmergeError::Locked { pid: self.pid, name: self.name.clone() };
        self.over(Unmerged::default(), Err(error))
    }

    /// Whether it ended before it was unmerged, and was not selected by its own pid.
    pub fn is_gone(&self) -> bool {
        !self.is_named && self.failure.as_ref().is_some_and(|error| error.has_ended())
    }
}
