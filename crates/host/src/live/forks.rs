//! Forks of marked programs that aren't targets: a fork may change its user or cgroup before we see it, or there may be
//! too many targets. A fork inherits the marks, so it becomes a target until they're gone. If its user or cgroup has
//! many such forks, it waits, and we keep only a few facts about it.

use super::LiveHost;
use super::refresh::Census;
use super::turns::Pass;
use crate::scope::ProcessInfo;
use crate::scope::exclude::Exclusion;
use crate::targets::Marks;
use pagefold_engine::keys::DomainKey;
use pagefold_procmem::image::image_of;
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::process::Process;
use pagefold_procmem::stalls::{Origin, READS};
use std::collections::VecDeque;
use std::sync::Arc;

/// We try forks that we couldn't read again after this time, nanoseconds.
const RETRY_NS: u64 = 5_000_000_000;

/// Forks that are or were out of scope.
#[derive(Debug, Default)]
pub(super) struct Forks {
    /// Processes out of scope that may be forks of marked programs.
    unread: VecDeque<i32>,
    /// Processes that we couldn't read, because others of their user stall or we have too many files open, and when we
    /// try them again, nanoseconds.
    refused: Vec<i32>,
    retry_ns: u64,
    waiting: VecDeque<WaitingFork>,
}

/// A fork that becomes a target once there's room.
#[derive(Debug)]
struct WaitingFork {
    pid: i32,
    image: u64,
    origin: Origin,
    domain: DomainKey,
}

impl Forks {
    /// Takes out the forks for which there's room now. Forgets the ones that aren't out of scope any more.
    fn take(&mut self, mut has_room: impl FnMut(Origin) -> bool, is_outside: impl Fn(i32) -> bool) -> Vec<i32> {
        let mut taken = Vec::new();
        self.waiting.retain(|fork| {
            let has_room = has_room(fork.origin);
            if has_room {
                taken.push(fork.pid);
            }
            !has_room && is_outside(fork.pid)
        });
        taken
    }

    pub(super) fn images(&self) -> impl Iterator<Item = u64> {
        self.waiting.iter().map(|fork| fork.image)
    }

    pub(super) fn domains(&self) -> impl Iterator<Item = DomainKey> {
        self.waiting.iter().map(|fork| fork.domain)
    }
}

impl LiveHost {
    /// Makes forks of marked programs targets until they're unmarked.
    pub(super) fn add_marked_forks(&mut self) {
        let first_seen = self.discovery.new_processes.take_first_seen();
        if self.actuator.is_none() || self.history.marked.is_empty() {
            return;
        }
        self.forks.unread.extend(first_seen);
        let now_ns = self.now_ns();
        if now_ns >= self.forks.retry_ns {
            self.forks.unread.extend(self.forks.refused.drain(..));
            self.forks.retry_ns = now_ns + RETRY_NS;
        }
        if self.forks.unread.is_empty() && self.forks.waiting.is_empty() {
            return;
        }
        let mut census = Census::of(&self.targets);
        let new_processes = &self.discovery.new_processes;
        let has_room = |origin| {
            let has_room = census.has_room_for_fork(origin);
            if has_room {
                census.add_fork(origin);
            }
            has_room
        };
        let taken = self.forks.take(has_room, |pid| new_processes.is_outside(pid));
        for pid in taken {
            if let Some((info, _)) = self.marked_fork(pid) {
                self.add_fork(info);
            }
        }
        let mut pass = Pass::begin();
        for _ in 0..self.forks.unread.len() {
            if pass.is_over() {
                break;
            }
            let Some(pid) = self.forks.unread.pop_front() else { break };
            let fork = self.marked_fork(pid);
            let origin = fork.as_ref().map(|(info, _)| Origin::of(&info.process)).unwrap_or_default();
            pass.charge(origin);
            let Some((info, image)) = fork else { continue };
            if census.has_room_for_fork(origin) {
                census.add_fork(origin);
                self.add_fork(info);
            } else {
                let domain = self.rules.domain_of(&info);
                self.forks.waiting.push_back(WaitingFork { pid, image, origin, domain });
            }
        }
    }

    fn add_fork(&mut self, info: ProcessInfo) {
        let mut target = self.new_target(info);
        target.request.is_only_reason = true;
        target.set_marked();
        target.request_unmark(Exclusion::OutOfScope, Marks::Mappings);
        self.targets.insert(target.pid(), target);
    }

    /// Reads a process if it's a fork of a program that we marked, and isn't a target. Also returns its image. We skip
    /// a process that makes us wait: only an exec can do that, and after an exec a process has no marks.
    fn marked_fork(&mut self, pid: i32) -> Option<(ProcessInfo, u64)> {
        if self.targets.contains_key(&pid) {
            return None;
        }
        let process = match Process::open_at(&self.rules.roots.proc, pid) {
            Ok(process) => Arc::new(process),
            Err(error) => {
                if error.is_for_lack_of_files() {
                    self.forks.refused.push(pid);
                }
                return None;
            }
        };
        if !process.stat().ok()?.only_forked {
            return None;
        }
        if READS.admit(&process).is_err() {
            // We can't know now whether it has marks.
            self.forks.refused.push(pid);
            return None;
        }
        let same = process.clone();
        let image = match run_abandonable(move || image_of(&same)) {
            Ok(image) => image.ok()?,
            Err(pending) => {
                READS.hold(&process, pending.alive());
                return None;
            }
        };
        self.history.marked.domain(image)?;
        Some((ProcessInfo::of(&process).ok()?, image))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_procmem::stalls::Share;

    /// However many forks one user has, they become targets a few at a time, none is forgotten, and other users' forks
    /// don't wait for them.
    #[test]
    fn forks_wait_until_others_of_their_user_are_unmarked() {
        let user = |user| Origin { user: Some(Share::User(user)), cgroup: None };
        let mut forks = Forks::default();
        for pid in 1..=30_001 {
            let origin = user(if pid > 30_000 { 2 } else { 1 });
            forks.waiting.push_back(WaitingFork { pid, image: 7, origin, domain: DomainKey(0) });
        }
        let mut next_pid = 1;
        while next_pid <= 30_000 {
            let mut census = Census::default();
            let has_room = |origin| {
                let has_room = census.has_room_for_fork(origin);
                census.add_fork(origin);
                has_room
            };
            let taken = forks.take(has_room, |_| true);
            assert!(taken.len() <= 257 && taken.contains(&next_pid), "{}", taken.len());
            assert_eq!(taken.contains(&30_001), next_pid == 1);
            next_pid += i32::try_from(taken.iter().filter(|pid| **pid <= 30_000).count()).unwrap();
        }
        assert_eq!(forks.images().count(), 0);
        forks.waiting.push_back(WaitingFork { pid: 1, image: 7, origin: user(1), domain: DomainKey(0) });
        assert!(forks.take(|_| false, |_| false).is_empty() && forks.waiting.is_empty(), "it has ended");
    }
}
