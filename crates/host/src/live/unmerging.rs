//! Unmerges processes when an administrator asks for it, and keeps them out of merging until they're included again.
//!
//! A process that's kept out is excluded, so we remove its marks like those of any other excluded process
//! ([`super::withdrawing`]): we go on until none is left, whatever happens in between. The administrator's request
//! waits for that, but only for a while. Until the marks are gone, even processes out of scope are targets.

use super::LiveHost;
use crate::scope::kept_out::KeptOutError;
use crate::scope::{
    ProcessInfo, ScopeError, ScopeSpec, own_pid, resolve_for_including, resolve_for_undoing, resolve_for_undoing_again,
};
use crate::unmerger::UnmergedProcess;
use pagefold_inject::unmerge::{UnmergeError, Unmerged, need_memory};
use pagefold_procmem::process::{ProcessKey, ReadError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// How long a request waits for processes that we couldn't unmerge at once, nanoseconds. If a process makes progress,
/// the request waits for up to `WAIT_MOST_NS`.
const WAIT_NS: u64 = 2_000_000_000;
const WAIT_MOST_NS: u64 = 10_000_000_000;
/// If unmerging a process makes no progress for this long, we assume that the process keeps its mmap lock.
const LOCKED: Duration = Duration::from_secs(1);
/// How many times we search again for processes to unmerge: a child forked meanwhile has its parent's marks.
const PASSES: u32 = 5;

/// Why we refuse a request.
#[derive(Debug, Error)]
pub enum RequestRefusal {
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// We can't change the list of kept-out processes.
    #[error(transparent)]
    KeptOut(#[from] KeptOutError),
    /// The run changes nothing.
    #[error("a dry run marks nothing")]
    DryRun,
}

/// A request to unmerge processes, while we carry it out.
#[derive(Debug)]
pub struct Unmerging {
    spec: ScopeSpec,
    /// The user who made the request.
    by: u32,
    began_ns: u64,
    passes: u32,
    /// All processes found so far.
    found: BTreeSet<ProcessKey>,
    waiting: Vec<Waiting>,
    over: Vec<UnmergedProcess>,
}

#[derive(Debug)]
struct Waiting {
    key: ProcessKey,
    name: String,
    is_named: bool,
}

enum State {
    Ended,
    /// The process has no marked memory any more.
    Done(Unmerged),
    /// We're unmerging the process, or haven't tried yet.
    UnderWay(Unmerged),
    /// Our last try to unmerge the process has failed, or makes no progress.
    Failed(Unmerged, Arc<UnmergeError>),
}

impl LiveHost {
    /// Unmerges the processes that a scope selects, in the run's scope or not, and keeps them out, because user `by`
    /// asked for it.
    pub fn unmerge(&mut self, spec: ScopeSpec, by: u32) -> Result<Unmerging, RequestRefusal> {
        if self.actuator.is_none() {
            return Err(RequestRefusal::DryRun);
        }
        let found = resolve_for_undoing(&spec, &self.rules.roots, &self.own_pids())?;
        self.rules.kept_out.keep_out(&spec, &found, by, &self.rules.roots)?;
        let mut unmerging = Unmerging {
            spec,
            by,
            began_ns: self.now_ns(),
            passes: PASSES,
            found: BTreeSet::new(),
            waiting: Vec::new(),
            over: Vec::new(),
        };
        for info in found {
            self.begin_to_unmerge(&mut unmerging, info);
        }
        self.judge_again();
        Ok(unmerging)
    }

    /// Returns the results of a request once we needn't wait for it any longer.
    pub fn poll_unmerging(&mut self, unmerging: &mut Unmerging) -> Option<Vec<UnmergedProcess>> {
        let waited_ns = self.now_ns().saturating_sub(unmerging.began_ns);
        let mut failed = Vec::new();
        let mut is_under_way = false;
        for one in std::mem::take(&mut unmerging.waiting) {
            match self.state_of(&one) {
                State::Done(done) => unmerging.over.push(one.over(done, None)),
                State::Ended if one.is_named => {
                    let error = UnmergeError::from(ReadError::Vanished { pid: one.key.0 });
                    unmerging.over.push(one.over(Unmerged::default(), Some(Arc::new(error))));
                }
                State::Ended => {}
                State::UnderWay(done) => {
                    is_under_way |= waited_ns < WAIT_MOST_NS;
                    let error = UnmergeError::UnderWay { pid: one.key.0, name: one.name.clone() };
                    failed.push((one, done, Arc::new(error)));
                }
                State::Failed(done, error) => {
                    is_under_way |= waited_ns < WAIT_NS;
                    failed.push((one, done, error));
                }
            }
        }
        if !is_under_way && unmerging.passes > 0 {
            unmerging.passes -= 1;
            let before = unmerging.found.len();
            let own = self.own_pids();
            for info in resolve_for_undoing_again(&unmerging.spec, &unmerging.found, &self.rules.roots, &own) {
                self.begin_to_unmerge(unmerging, info);
            }
            is_under_way = unmerging.found.len() > before;
        }
        if is_under_way {
            unmerging.waiting.extend(failed.into_iter().map(|(one, ..)| one));
            return None;
        }
        let mut over = std::mem::take(&mut unmerging.over);
        over.extend(failed.into_iter().map(|(one, done, error)| one.over(done, Some(error))));
        over.sort_by_key(|one| one.pid);
        Some(over)
    }

    /// Lets in again the processes that a scope selects. Returns the pids and names of the processes that were kept
    /// out.
    pub fn include(&mut self, spec: &ScopeSpec) -> Result<Vec<(i32, String)>, RequestRefusal> {
        let found = resolve_for_including(spec, &self.rules.roots, &self.own_pids())?;
        let mut included = Vec::new();
        for info in self.rules.kept_out.include(spec, &found, &self.rules.roots)? {
            included.push((info.pid(), info.name.clone()));
        }
        self.judge_again();
        Ok(included)
    }

    /// Forgets processes out of scope that were targets only until they were unmerged. Call it after taking the events
    /// and polling the requests.
    pub fn forget_unmerged(&mut self) {
        let reported = &mut self.reported;
        let new_processes = &mut self.discovery.new_processes;
        self.targets.retain(|pid, target| {
            let is_over = target.request.is_only_reason && target.pending.is_none();
            if is_over {
                reported.remove(pid);
                new_processes.leave(*pid);
            }
            !is_over
        });
    }

    fn begin_to_unmerge(&mut self, unmerging: &mut Unmerging, info: ProcessInfo) {
        let key = info.process.key();
        // If the target is an earlier process with this pid, which has ended, the next refresh notices.
        let is_other = self.targets.get(&key.0).is_some_and(|target| target.info.process.key() != key);
        if is_other || !unmerging.found.insert(key) {
            return;
        }
        let waiting = Waiting { key, name: info.name.clone(), is_named: info.is_named() };
        match need_memory(&info.process) {
            Err(error) if error.has_ended() && !waiting.is_named => return,
            Err(error) => {
                unmerging.over.push(waiting.over(Unmerged::default(), Some(Arc::new(error))));
                return;
            }
            Ok(()) => {}
        }
        unmerging.waiting.push(waiting);
        if !self.targets.contains_key(&key.0) {
            let mut target = self.new_target(ProcessInfo { by_pid: None, ..info });
            target.request.is_only_reason = true;
            self.targets.insert(key.0, target);
        }
        if let Some(target) = self.targets.get_mut(&key.0) {
            target.unmerge(unmerging.by);
        }
        self.schedule.next_ns = 0;
    }

    fn state_of(&mut self, one: &Waiting) -> State {
        let pid = one.key.0;
        let target = match self.targets.get(&pid) {
            Some(target) if target.info.process.key() == one.key => target,
            _ => return State::Ended,
        };
        let done = target.request.done.clone();
        let Some(pending) = &target.pending else { return State::Done(done) };
        let locked = Arc::new(UnmergeError::Locked { pid, name: one.name.clone() });
        if let Some(job) = self.withdrawing.jobs.get_mut(&pid) {
            let makes_progress = job.pending.idle() < LOCKED;
            return if makes_progress { State::UnderWay(done) } else { State::Failed(done, locked) };
        }
        match &pending.problem {
            None => State::UnderWay(done),
            Some(problem) if problem.is_late() => State::Failed(done, locked),
            Some(problem) => State::Failed(done, problem.clone()),
        }
    }

    /// The pids of this process and its injector.
    pub(super) fn own_pids(&self) -> Vec<i32> {
        let mut pids = vec![own_pid()];
        if let Some(actuator) = &self.actuator {
            pids.extend(i32::try_from(actuator.injector.pid()));
        }
        pids
    }
}

impl Waiting {
    fn over(self, done: Unmerged, failure: Option<Arc<UnmergeError>>) -> UnmergedProcess {
        let Self { key, name, is_named } = self;
        UnmergedProcess { pid: key.0, name, is_named, done, failure }
    }
}
