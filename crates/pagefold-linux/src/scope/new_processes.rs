//! Who has come into scope since the last look.
//!
//! A full resolution looks at every process of the machine, some 60 us each. So a process that was not meant is not
//! looked at again for a while, and where no process has been started (the last pid given out, in `/proc/loadavg`)
//! not even the list is read.
//!
//! A process is not at once what it will be: it forks, joins its cgroup, changes its user, calls exec. So one that is new
//! is looked at for some seconds. An older one that turns into what is meant is noticed by the next full look.

use crate::os::cpu::own_cpu_ns;
use crate::os::fault;
use crate::proc::Roots;
use crate::scope::{ScopeError, ScopeSpec, Scoped, resolve_among};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// For how long a process is new, nanoseconds.
const NEW_NS: u64 = 3_000_000_000;
/// What reading the list takes for each process, nanoseconds, and the one part in so many of the time that it may take:
/// on a machine with more than 300 processes that starts others all the time, it is read less often than every second.
const LIST_NS: u64 = 1_000;
const LIST_SHARE: u64 = 3_333;
/// Full looks may take one part in so many of the time.
const FULL_SHARE: u64 = 10_000;
/// Full looks are at least this far apart, nanoseconds.
const FULL_AGAIN_NS: u64 = 10_000_000_000;
/// However much they take, one is due after this, nanoseconds.
const FULL_AT_LAST_NS: u64 = 300_000_000_000;

/// What is known of the processes that are not in scope.
#[derive(Debug)]
pub struct Newcomers {
    /// Absent where we may see processes only.
    loadavg: Option<File>,
    last_pid: Option<Vec<u8>>,
    /// Processes not meant, with the time when they were first seen.
    strangers: HashMap<i32, u64>,
    /// Some of them are new.
    unsettled: bool,
    listed_ns: u64,
    next_list_ns: u64,
    next_full_ns: u64,
}

impl Newcomers {
    /// Nobody is known yet.
    pub fn new(roots: &Roots) -> Self {
        // However this fails: without it the list is read every time.
        let loadavg = File::open(roots.proc.join("loadavg")).ok();
        Self {
            loadavg,
            last_pid: None,
            strangers: HashMap::new(),
            unsettled: true,
            listed_ns: 0,
            next_list_ns: 0,
            next_full_ns: 0,
        }
    }

    /// Reads the list of processes the next time, whether or not one was started.
    pub fn look_again(&mut self) {
        self.unsettled = true;
    }

    /// The processes that have come into scope. Those that are `known` are not looked at.
    pub fn find(
        &mut self,
        now_ns: u64,
        spec: &ScopeSpec,
        roots: &Roots,
        known: impl Fn(i32) -> bool,
    ) -> Result<Vec<Scoped>, ScopeError> {
        let last_pid = self.last_pid_given();
        let full = now_ns >= self.next_full_ns;
        let nobody_new = !self.unsettled && last_pid.is_some() && last_pid == self.last_pid;
        if !full && (nobody_new || now_ns < self.next_list_ns) {
            return Ok(Vec::new());
        }
        let before_ns = own_cpu_ns();
        let mut strangers = HashMap::with_capacity(self.strangers.len());
        let mut listed = 0;
        let found = resolve_among(spec, roots, |pid| {
            listed += 1;
            if known(pid) {
                return false;
            }
            let since_ns = self.strangers.get(&pid).copied().unwrap_or(now_ns);
            strangers.insert(pid, since_ns);
            // Whoever was new the last time has a second look, however long ago that was.
            full || now_ns < since_ns + NEW_NS || since_ns == self.listed_ns
        })?;
        for scoped in &found {
            strangers.remove(&scoped.process.pid());
        }
        self.unsettled = strangers.values().any(|since_ns| now_ns < since_ns + NEW_NS);
        self.strangers = strangers;
        self.last_pid = last_pid;
        self.listed_ns = now_ns;
        self.next_list_ns = now_ns + listed * LIST_NS * LIST_SHARE;
        if full {
            let spent_ns = own_cpu_ns() - before_ns;
            self.next_full_ns = now_ns + (spent_ns * FULL_SHARE).clamp(FULL_AGAIN_NS, FULL_AT_LAST_NS);
        }
        Ok(found)
    }

    /// The last pid given out, as text; `None` where the kernel does not tell us.
    fn last_pid_given(&self) -> Option<Vec<u8>> {
        let mut buffer = [0; 128];
        let loadavg = self.loadavg.as_ref()?;
        let length = fault::io("read:loadavg").and_then(|()| loadavg.read_at(&mut buffer, 0)).ok()?;
        // "0.20 0.18 0.12 1/80 11206"
        buffer[..length].trim_ascii_end().rsplit(|&byte| byte == b' ').next().map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
#[path = "new_processes_tests.rs"]
mod tests;
