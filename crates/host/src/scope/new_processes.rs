//! Finds processes that have come into scope since the last call.
//!
//! A full resolution examines every process of the machine, some 60 us each. So we don't examine a process out of scope
//! again for a while, and if no process has been started (the last pid in `/proc/loadavg` is unchanged) we don't even
//! read the list of processes.
//!
//! A new process changes in its first moments: it forks, joins its cgroup, changes its user, calls exec. So we examine
//! it repeatedly for some seconds. If an older process comes into scope, the next full pass finds it.
//!
//! A call examines processes for [`MOST`] at most, and the next call goes on with the others.

use crate::scope::{ProcessInfo, ScopeError, ScopeSpec, Selection};
use pagefold_procmem::Roots;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::os::fault;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// One call examines processes for this long at most, not counting the last one: users can make that slow, for example
/// by unit files.
const MOST: Duration = Duration::from_millis(250);
/// How long a process counts as new, nanoseconds.
const NEW_NS: u64 = 3_000_000_000;
/// Cost of reading the list, nanoseconds per process. Reading may take 1/`LIST_SHARE` of the time: if a machine has
/// more than 300 processes and keeps starting others, we read the list less often than every second, but at least every
/// `LIST_MAX_NS`.
const LIST_NS: u64 = 1_000;
const LIST_SHARE: u64 = 3_333;
/// Longest time between two lists, nanoseconds: nobody can delay our search for new processes by having many idle ones.
const LIST_MAX_NS: u64 = 5_000_000_000;
/// Full passes may take 1/`FULL_SHARE` of the time.
const FULL_SHARE: u64 = 10_000;
/// Shortest time between full passes, nanoseconds.
const FULL_MIN_NS: u64 = 10_000_000_000;
/// Longest time between full passes, whatever they cost, nanoseconds.
const FULL_MAX_NS: u64 = 300_000_000_000;

/// Tracks processes out of scope to find the ones that come into scope.
#[derive(Debug)]
pub struct NewProcesses {
    /// Absent if only processes are visible in /proc (`ProcSubset=pid`).
    loadavg: Option<File>,
    last_pid: Option<Vec<u8>>,
    /// Processes out of scope, with the time when we first saw them.
    outside: HashMap<i32, u64>,
    /// Processes of `outside` that we first examined after the last [`Self::take_first_seen`].
    first_seen: Vec<i32>,
    /// Processes of `outside` that are in scope, but that our caller has turned away because there are too many. Also
    /// the ones that we couldn't examine because we had too many files open.
    turned_away: HashSet<i32>,
    /// Processes of `outside` that we had no time to examine, and the order in which we'll do so.
    postponed: HashMap<i32, usize>,
    most: Duration,
    /// Whether we must read the next list in any case, for example because processes of `outside` are new.
    unsettled: bool,
    listed_ns: u64,
    next_list_ns: u64,
    next_full_ns: u64,
}

impl NewProcesses {
    pub fn new(roots: &Roots) -> Self {
        // Whatever the error: without the file we read the list every time.
        let loadavg = File::open(roots.proc.join("loadavg")).ok();
        Self {
            loadavg,
            last_pid: None,
            outside: HashMap::new(),
            first_seen: Vec::new(),
            turned_away: HashSet::new(),
            postponed: HashMap::new(),
            most: MOST,
            unsettled: true,
            listed_ns: 0,
            next_list_ns: 0,
            next_full_ns: 0,
        }
    }

    /// Makes the next call read the list of processes, even if no process was started.
    pub fn invalidate(&mut self) {
        self.unsettled = true;
    }

    /// Makes the next call examine all processes.
    pub fn examine_all(&mut self) {
        self.next_full_ns = 0;
    }

    /// Notes that our caller doesn't track a process any more. The next call examines it, in case it has come into
    /// scope.
    pub fn leave(&mut self, pid: i32) {
        self.outside.insert(pid, self.listed_ns);
        self.unsettled = true;
    }

    /// Notes that our caller tracks a process that we've found. Without this call we count it as out of scope.
    pub fn join(&mut self, pid: i32) {
        self.outside.remove(&pid);
    }

    /// Notes that our caller won't track a process that we've found, because there are too many.
    pub fn turn_away(&mut self, pid: i32) {
        self.turned_away.insert(pid);
    }

    /// Whether a process was out of scope, or turned away, when we last looked.
    pub fn is_outside(&self, pid: i32) -> bool {
        self.outside.contains_key(&pid)
    }

    /// How many processes in scope our caller has turned away, as far as we've examined them.
    pub fn turned_away(&self) -> usize {
        self.turned_away.len()
    }

    /// Whether we've examined all processes of the last list that we had to examine.
    pub fn has_examined_all(&self) -> bool {
        self.postponed.is_empty()
    }

    /// Forgets the processes that we had no time to examine: nothing is in scope any more.
    pub fn forget_postponed(&mut self) {
        self.postponed.clear();
    }

    /// The processes that we've seen and examined for the first time since the last call.
    pub fn take_first_seen(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.first_seen)
    }

    /// Finds the processes that have come into scope. We don't examine the ones that our caller tracks already
    /// (`known`).
    pub fn find(
        &mut self,
        now_ns: u64,
        spec: &ScopeSpec,
        roots: &Roots,
        known: impl Fn(i32) -> bool,
    ) -> Result<Vec<ProcessInfo>, ScopeError> {
        let last_pid = self.last_pid_given();
        let full = now_ns >= self.next_full_ns;
        let none_started = !self.unsettled && last_pid.is_some() && last_pid == self.last_pid;
        if !full && (none_started || now_ns < self.next_list_ns) {
            return Ok(Vec::new());
        }
        let before_ns = own_cpu_ns();
        let began = Instant::now();
        let mut selection = Selection::of_existing(&spec.0, roots);
        let mut outside = HashMap::with_capacity(self.outside.len());
        let mut listed = 0;
        let candidates = selection.candidates(|pid| {
            listed += 1;
            if known(pid) {
                return false;
            }
            let since_ns = self.outside.get(&pid).copied().unwrap_or(now_ns);
            outside.insert(pid, since_ns);
            // We examine each process at least twice, even if we first saw it in the last list long ago.
            let is_new = now_ns < since_ns + NEW_NS || since_ns == self.listed_ns;
            full || is_new || self.postponed.contains_key(&pid)
        })?;
        let mut candidates: Vec<i32> = candidates.into_iter().collect();
        candidates.sort_by_key(|pid| {
            let place = self.postponed.get(pid).copied().unwrap_or(usize::MAX);
            (!selection.is_named(*pid), place, outside.get(pid).copied())
        });
        let mut found = Vec::new();
        let mut postponed = HashMap::new();
        let mut unexamined = Vec::new();
        for (at, pid) in candidates.into_iter().enumerate() {
            if at > 0 && began.elapsed() >= self.most && !selection.is_named(pid) {
                postponed.insert(pid, at);
                continue;
            }
            match selection.find(pid) {
                Err(error) if error.is_for_lack_of_files() && !selection.is_named(pid) => unexamined.push(pid),
                examined => found.extend(examined?),
            }
        }
        let is_first_seen = |pid: &&i32| !self.outside.contains_key(pid) || self.postponed.contains_key(pid);
        let examined = outside.keys().filter(|pid| !postponed.contains_key(pid));
        self.first_seen.extend(examined.filter(is_first_seen));
        self.unsettled = !postponed.is_empty() || outside.values().any(|since_ns| now_ns < since_ns + NEW_NS);
        // A full pass finds them again if they're still in scope, and then our caller decides about them.
        self.turned_away.retain(|pid| !full && outside.contains_key(pid));
        self.turned_away.extend(unexamined);
        self.outside = outside;
        self.last_pid = last_pid;
        self.listed_ns = now_ns;
        self.next_list_ns = now_ns;
        if postponed.is_empty() {
            self.next_list_ns += (listed * LIST_NS * LIST_SHARE).min(LIST_MAX_NS);
        }
        self.postponed = postponed;
        if full {
            let spent_ns = own_cpu_ns() - before_ns;
            self.next_full_ns = now_ns + (spent_ns * FULL_SHARE).clamp(FULL_MIN_NS, FULL_MAX_NS);
        }
        Ok(found)
    }

    /// The last pid that the kernel allocated, as text; `None` if it isn't visible: then we read the list every time.
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
