//! Keeps track of processes in which our reads, or our attempts to make a call, don't return.
//!
//! We can't end a thread that waits for such a process. So each process has one waiting thread at most, and we try the
//! process again only after a pause, which grows to hours. We also limit the number of waiting threads, in all and for
//! the processes of one user or one cgroup, so that no user or cgroup can keep us from trying other processes.

use crate::image::effective_user;
use crate::process::{Process, ProcessKey};
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// We try no process while this many threads are waiting.
const THREADS_MOST: usize = 64;
/// The limit for one user, and for one cgroup. Threads that have returned count until we may try their process again.
const SHARE_MOST: usize = 8;
/// How many processes we remember. Beyond that we forget those whose pause ends first.
const REMEMBERED: usize = 1024;

pub static ATTEMPTS: Stalls =
    Stalls::new(Pauses { first: Duration::from_secs(60), factor: 6, longest: Duration::from_secs(6 * 3600) });
/// Reads of memory and mappings. The first pause is short: large programs hold their mmap lock for long when they fork.
pub static READS: Stalls =
    Stalls::new(Pauses { first: Duration::from_secs(1), factor: 3, longest: Duration::from_secs(3600) });

/// How long we leave a process alone: after its first stall, the factor by which each further stall lengthens that, and
/// at most. We forget a stall after ten times its pause.
#[derive(Clone, Copy, Debug)]
struct Pauses {
    first: Duration,
    factor: u32,
    longest: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Stalled,
    /// Other processes of its user or cgroup, or very many, have stalled.
    OthersStalled,
}

#[derive(Debug)]
pub struct Stalls(Mutex<Register>);

impl Stalls {
    const fn new(pauses: Pauses) -> Self {
        Self(Mutex::new(Register { pauses, entries: BTreeMap::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Register> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn admit(&self, process: &Process) -> Result<(), Refusal> {
        self.lock().admit(process.key(), || Origin::of(process), Instant::now())
    }

    /// Records that we've given up on a process, while its thread `alive` is still waiting.
    pub fn give_up(&self, process: &Process, alive: Weak<()>) {
        self.lock().give_up(process.key(), alive, Origin::of(process), Instant::now());
    }

    /// Whether we must not try a process because it has stalled.
    pub fn is_in_force(&self, process: &Process) -> bool {
        self.lock().entries.get(&process.key()).is_some_and(|entry| entry.is_in_force(Instant::now()))
    }

    /// How long we must not try a process, not counting the time until its thread returns.
    pub fn pause(&self, process: &Process) -> Duration {
        let register = self.lock();
        let entry = register.entries.get(&process.key());
        entry.map_or(Duration::ZERO, |entry| entry.until.saturating_duration_since(Instant::now()))
    }
}

#[derive(Debug)]
struct Entry {
    thread: Weak<()>,
    origin: Origin,
    pause: Duration,
    until: Instant,
}

impl Entry {
    fn has_thread(&self) -> bool {
        self.thread.strong_count() > 0
    }

    fn is_in_force(&self, now: Instant) -> bool {
        self.has_thread() || now < self.until
    }
}

#[derive(Debug)]
struct Register {
    pauses: Pauses,
    entries: BTreeMap<ProcessKey, Entry>,
}

impl Register {
    fn admit(&self, key: ProcessKey, origin: impl FnOnce() -> Origin, now: Instant) -> Result<(), Refusal> {
        if self.entries.get(&key).is_some_and(|entry| entry.is_in_force(now)) {
            return Err(Refusal::Stalled);
        }
        let in_force: Vec<&Entry> = self.entries.values().filter(|entry| entry.is_in_force(now)).collect();
        if in_force.is_empty() {
            return Ok(());
        }
        let Origin { user, cgroup } = origin();
        let mut threads = 0;
        let mut in_cgroup = 0;
        let mut of_user = 0;
        for entry in in_force {
            threads += usize::from(entry.has_thread());
            in_cgroup += usize::from(entry.origin.cgroup == cgroup);
            // Root's processes are many, so only their cgroups count.
            of_user += usize::from(user != 0 && entry.origin.user == user);
        }
        let is_full = threads >= THREADS_MOST || in_cgroup >= SHARE_MOST || of_user >= SHARE_MOST;
        if is_full { Err(Refusal::OthersStalled) } else { Ok(()) }
    }

    fn give_up(&mut self, key: ProcessKey, thread: Weak<()>, origin: Origin, now: Instant) {
        let Pauses { first, factor, longest } = self.pauses;
        let pause = match self.entries.get(&key) {
            Some(former) if now < former.until + former.pause * 10 => (former.pause * factor).min(longest),
            _ => first,
        };
        self.entries.insert(key, Entry { thread, origin, pause, until: now + pause });
        while self.entries.len() > REMEMBERED {
            // We go on counting threads that haven't returned.
            let over = self.entries.iter().filter(|(_, entry)| !entry.has_thread());
            let Some((&key, _)) = over.min_by_key(|(_, entry)| entry.until) else { break };
            self.entries.remove(&key);
        }
    }
}

/// Where a process comes from, by facts that its user can't freely choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Origin {
    /// The user who made the process's user namespace, because users may have many user IDs in theirs. If that's root,
    /// the process's own user.
    user: u32,
    /// A hash of its cgroups.
    cgroup: u64,
}

impl Origin {
    fn of(process: &Process) -> Self {
        let mut cgroup = DefaultHasher::new();
        process.read_file("cgroup").unwrap_or_default().hash(&mut cgroup);
        let user = match namespace_owner(process) {
            Some(user) if user != 0 => user,
            _ => effective_user(process).unwrap_or(u32::MAX),
        };
        Self { user, cgroup: cgroup.finish() }
    }
}

/// The owner of the user namespace directly below our own that contains a process.
fn namespace_owner(process: &Process) -> Option<u32> {
    const NS_GET_PARENT: libc::Ioctl = 0xb702;
    const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;
    let mut namespace = process.open_file("ns/user").ok()?;
    let mut owner = None;
    loop {
        // SAFETY: takes no argument, and returns a descriptor. Fails for our own namespace.
        let parent = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
        if parent < 0 {
            return owner;
        }
        let mut user = 0_u32;
        // SAFETY: the call writes one number.
        let failed = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID, &raw mut user) };
        owner = if failed == 0 { Some(user) } else { None };
        // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
        namespace = unsafe { File::from_raw_fd(parent) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::sync::Arc;

    const SIX_HOURS: Duration = Duration::from_secs(6 * 3600);

    fn register() -> Register {
        let Register { pauses, .. } = *ATTEMPTS.lock();
        Register { pauses, entries: BTreeMap::new() }
    }

    fn from(user: u32, cgroup: u64) -> Origin {
        Origin { user, cgroup }
    }

    #[test]
    fn pauses_grow_to_hours_and_processes_are_forgotten() {
        let mut register = register();
        let mut now = Instant::now();
        let mut last = Duration::ZERO;
        let origin = from(1, 1);
        for _ in 0..10 {
            register.give_up((1, 1), Weak::new(), origin, now);
            let until = register.entries[&(1, 1)].until;
            assert!(until - now >= last);
            last = until - now;
            assert_eq!(register.admit((1, 1), || origin, now + last / 2), Err(Refusal::Stalled));
            assert_eq!(register.admit((1, 1), || origin, until), Ok(()));
            now = until;
        }
        assert_eq!(last, SIX_HOURS);
        register.give_up((2, 1), Weak::new(), origin, now);
        register.give_up((2, 1), Weak::new(), origin, now + SIX_HOURS);
        assert_eq!(register.entries[&(2, 1)].pause, register.pauses.first, "the first one was long ago");
        for pid in 0..2000 {
            register.give_up((pid, 2), Weak::new(), origin, now);
        }
        assert!(register.entries.len() <= REMEMBERED);
    }

    /// Other users' processes are tried however many processes of one user, of root in one container, or of a
    /// container's many users stall.
    #[test]
    fn nobody_keeps_other_users_from_being_tried() {
        let mut register = register();
        let now = Instant::now();
        let threads: Vec<_> = (0..THREADS_MOST).map(|_| Arc::new(())).collect();
        let mut pid = 0;
        let mut stall = |register: &mut Register, origin| {
            pid += 1;
            let admitted = register.admit((pid, 1), || origin, now);
            if admitted.is_ok() {
                register.give_up((pid, 1), Arc::downgrade(&threads[0]), origin, now);
            }
            admitted.is_ok()
        };
        let mut stalls = |register: &mut Register, origins: &mut dyn Iterator<Item = Origin>| {
            origins.take(1000).filter(|&origin| stall(register, origin)).count()
        };
        assert_eq!(stalls(&mut register, &mut (0..).map(|cgroup| from(1, cgroup))), SHARE_MOST);
        assert_eq!(stalls(&mut register, &mut (0..).map(|_| from(0, 5000))), SHARE_MOST);
        assert_eq!(stalls(&mut register, &mut (2000..).map(|user| from(user, 6000))), SHARE_MOST);
        for origin in [from(2, 7000), from(0, 7001)] {
            assert_eq!(register.admit((-1, 1), || origin, now), Ok(()), "{origin:?}");
        }
        assert_eq!(register.admit((1, 1), || from(1, 0), now + SIX_HOURS), Err(Refusal::Stalled), "one at a time");
        let more = stalls(&mut register, &mut (10_000..).map(|user| from(user, u64::from(user))));
        assert_eq!(more, THREADS_MOST - 3 * SHARE_MOST);
        drop(threads);
        assert_eq!(register.admit((-1, 1), || from(2, 7000), now + SIX_HOURS), Ok(()));
    }

    /// A process in a user namespace counts for the user who made it, whatever its own user is.
    #[test]
    #[cfg_attr(not(feature = "live"), ignore = "needs root")]
    fn users_of_namespaces_count_for_their_owner() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(namespace_owner(&own), None);
        assert_eq!(Origin::of(&own), Origin { user: effective_user(&own).unwrap(), ..Origin::of(&own) });
        if !pagefold_testkit::is_root() {
            return pagefold_testkit::skip_unsupported("needs root");
        }
        let mut inside = Command::new("setpriv")
            .args(["--reuid=4321", "--clear-groups", "unshare", "-Ur", "unshare", "-Ur", "sh", "-c", "echo; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let began = inside.stdout.as_mut().unwrap().read(&mut [0]).unwrap();
        let process = Process::open(i32::try_from(inside.id()).unwrap()).unwrap();
        let owner = namespace_owner(&process);
        drop(inside.stdin.take());
        inside.wait().unwrap();
        if began == 0 {
            return pagefold_testkit::skip_unsupported("users may not make namespaces");
        }
        assert_eq!(owner, Some(4321));
    }
}
