//! Keeps track of stalled processes: our read of the process, or our attempt to make a call in it, doesn't return. Also
//! limits the time that such attempts take.
//!
//! We can't end a thread of ours that waits for such a process. So at most one thread waits for each process, and we
//! try the process again only after a pause, which grows to an hour. We also limit the number of waiting threads, in
//! all and for the processes of one user or one cgroup. So no user or cgroup can keep us from trying other processes.
//!
//! The injector serves one process at a time. So the processes of one user, or of one cgroup, may take one second of
//! its time at once, and a sixth of its time from then on.

use crate::image::effective_user;
use crate::os::locked;
use crate::process::{Process, ProcessKey};
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

/// We try no process while this many threads of ours are waiting.
const THREADS_MOST: usize = 64;
/// If this many processes of one user or cgroup are stalled or pausing, we try no others of that user or cgroup.
const SHARE_MOST: usize = 8;
/// How many processes we remember. Beyond that we forget the ones whose pause ends first.
const REMEMBERED: usize = 1024;
/// We leave a process alone for `FIRST_PAUSE` after its first stall, and after each further stall for `PAUSE_FACTOR`
/// times as long as before. Reads pause for at most `LONGEST_PAUSE`. We forget a stall after ten times its pause. The
/// first pause is short: large programs hold their mmap lock for a long time when they fork.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_FACTOR: u32 = 3;
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// The processes of one user or one cgroup may take `BURST` of the injector's time at once, and 1/`TIME_SHARE` of the
/// time that passes.
const BURST: Duration = Duration::from_secs(1);
const TIME_SHARE: u32 = 6;
/// This much of a request's time is free, because an ordinary request takes as much on a busy machine.
const FREE: Duration = Duration::from_millis(20);

/// Attempts to make a system call in a process. Pauses last 10 s at most: on an overloaded machine any program is late,
/// and the call may be about to unmark a secret.
pub static ATTEMPTS: Stalls = Stalls::new(Duration::from_secs(10));
/// Reads of a process's memory and mappings.
pub static READS: Stalls = Stalls::new(LONGEST_PAUSE);
/// The injector's time that we spend on requests for calls.
pub static REQUESTS: TimeShares = TimeShares::new(FREE, Duration::MAX);
/// The main loop's time that we spend on passes over the targets.
pub static PASSES: TimeShares = TimeShares::new(Duration::ZERO, BURST.saturating_mul(2));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Stalled,
    /// Too many processes of its user or cgroup have stalled, or too many in all.
    OthersStalled,
}

#[derive(Debug)]
pub struct Stalls(Mutex<Register>);

impl Stalls {
    const fn new(longest_pause: Duration) -> Self {
        Self(Mutex::new(Register { longest_pause, entries: BTreeMap::new() }))
    }

    pub fn admit(&self, process: &Process) -> Result<(), Refusal> {
        locked(&self.0).admit(process.key(), || Origin::of(process), Instant::now())
    }

    /// Records that a thread of ours is busy with a process: we don't try the process again while `alive` exists.
    pub fn hold(&self, process: &Process, alive: Weak<()>) {
        locked(&self.0).hold(process.key(), alive, Origin::of(process), Instant::now());
    }

    /// Records that we've given up a process, while our thread `alive` is still busy with it. We don't try the process
    /// again before a pause is over.
    pub fn give_up(&self, process: &Process, alive: Weak<()>) {
        locked(&self.0).give_up(process.key(), alive, Origin::of(process), Instant::now());
    }

    pub fn has_thread(&self, process: &Process) -> bool {
        locked(&self.0).entries.get(&process.key()).is_some_and(Entry::has_thread)
    }

    /// Whether we must not try a process because it has stalled.
    pub fn is_in_force(&self, process: &Process) -> bool {
        locked(&self.0).entries.get(&process.key()).is_some_and(|entry| entry.is_in_force(Instant::now()))
    }

    /// How much longer a process's pause lasts. A thread of ours that still waits for the process doesn't count here.
    pub fn pause(&self, process: &Process) -> Duration {
        let register = locked(&self.0);
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
    /// Whether we've given up the process because this thread didn't return.
    is_late: bool,
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
    longest_pause: Duration,
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
        let shares = origin().shares();
        let mut threads = 0;
        let mut taken = [0; 2];
        for entry in in_force {
            threads += usize::from(entry.has_thread());
            for (share, taken) in shares.iter().zip(&mut taken) {
                *taken += usize::from(share.is_some() && entry.origin.shares().contains(share));
            }
        }
        let is_full = threads >= THREADS_MOST || taken.iter().any(|&taken| taken >= SHARE_MOST);
        if is_full { Err(Refusal::OthersStalled) } else { Ok(()) }
    }

    fn hold(&mut self, key: ProcessKey, thread: Weak<()>, origin: Origin, now: Instant) {
        let new = Entry { thread: Weak::new(), origin, pause: Duration::ZERO, until: now, is_late: false };
        let entry = self.entries.entry(key).or_insert(new);
        entry.is_late &= entry.thread.ptr_eq(&thread);
        entry.thread = thread;
        entry.origin = origin;
        while self.entries.len() > REMEMBERED {
            // We keep the entries of threads that haven't returned, because these threads still count.
            let over = self.entries.iter().filter(|(_, entry)| !entry.has_thread());
            let Some((&key, _)) = over.min_by_key(|(_, entry)| entry.until) else { break };
            self.entries.remove(&key);
        }
    }

    fn give_up(&mut self, key: ProcessKey, thread: Weak<()>, origin: Origin, now: Instant) {
        self.hold(key, thread, origin, now);
        let Some(entry) = self.entries.get_mut(&key) else { return };
        if entry.is_late && entry.has_thread() {
            return;
        }
        let is_repeated = now < entry.until + entry.pause * 10;
        entry.pause = if is_repeated { (entry.pause * PAUSE_FACTOR).min(self.longest_pause) } else { FIRST_PAUSE };
        entry.until = now + entry.pause;
        entry.is_late = true;
    }
}

/// How much of a thread's time the processes of each user and cgroup have taken.
#[derive(Debug)]
pub struct TimeShares {
    spent: Mutex<Spent>,
    /// This much of each request is free.
    free: Duration,
    /// We count at most this much time in excess of a user's or cgroup's part.
    excess_most: Duration,
}

impl TimeShares {
    pub const fn new(free: Duration, excess_most: Duration) -> Self {
        Self { spent: Mutex::new(Spent(BTreeMap::new())), free, excess_most }
    }

    /// Whether a process of this origin may take more time now.
    pub fn admits(&self, origin: Origin, now: Instant) -> bool {
        self.excess(origin, now) <= BURST
    }

    /// By how much the user or the cgroup has exceeded its part of the time; the larger excess counts.
    pub fn excess(&self, origin: Origin, now: Instant) -> Duration {
        locked(&self.spent).excess(origin, now)
    }

    /// Records that a process has taken this much time. Find out `origin` before, because the process may end
    /// meanwhile.
    pub fn charge(&self, origin: Origin, took: Duration, now: Instant) {
        let took = took.saturating_sub(self.free);
        if !took.is_zero() {
            locked(&self.spent).charge(origin, took, self.excess_most, now);
        }
    }
}

/// For each user or cgroup: by how much it had exceeded its part of the time, and when that was. Since then, the excess
/// has shrunk by 1/[`TIME_SHARE`] of the time that has passed.
#[derive(Debug)]
struct Spent(BTreeMap<Share, (Duration, Instant)>);

impl Spent {
    fn level(&self, share: Share, now: Instant) -> Duration {
        let Some(&(level, at)) = self.0.get(&share) else { return Duration::ZERO };
        level.saturating_sub(now.saturating_duration_since(at) / TIME_SHARE)
    }

    fn excess(&self, origin: Origin, now: Instant) -> Duration {
        let levels = origin.shares().into_iter().flatten().map(|share| self.level(share, now));
        levels.max().unwrap_or_default()
    }

    fn charge(&mut self, origin: Origin, took: Duration, most: Duration, now: Instant) {
        for share in origin.shares().into_iter().flatten() {
            let level = self.level(share, now);
            self.0.insert(share, ((level + took).min(most), now));
        }
        self.0.retain(|_, &mut (level, at)| now.saturating_duration_since(at) / TIME_SHARE < level);
    }
}

/// A group of processes to which a limit applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Share {
    User(u32),
    /// A user namespace that root has made, by its inode: a container, say. It has many user IDs.
    Namespace(u64),
    /// A hash of the beginnings of cgroups' paths.
    Cgroup(u64),
}

/// Where a process comes from, by facts that its user can't freely choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The user who made the process's user namespace, because one user may have many user IDs inside a namespace. If
    /// root made it, the namespace itself. Without a namespace, the process's user. `None` for root's own processes:
    /// they're many, so only their cgroups count.
    pub user: Option<Share>,
    /// Equal for all processes that hide their cgroups by paths of over 4 KiB. `None` in the root cgroup, where every
    /// user's processes may be.
    pub cgroup: Option<Share>,
}

impl Origin {
    pub fn shares(self) -> [Option<Share>; 2] {
        [self.user, self.cgroup]
    }

    pub fn of(process: &Process) -> Self {
        let cgroups = process.read_file("cgroup").unwrap_or_else(|_| b"unreadable".to_vec());
        let user = match user_namespace(process) {
            Some((Some(user), _)) if user != 0 => Some(Share::User(user)),
            Some((_, inode)) => Some(Share::Namespace(inode)),
            None => match effective_user(process) {
                Ok(0) => None,
                user => Some(Share::User(user.unwrap_or(u32::MAX))),
            },
        };
        Self { user, cgroup: cgroup_share(&cgroups) }
    }
}

/// The share of the cgroups in the text of `/proc/PID/cgroup`. Only the beginning of a path counts, because whoever has
/// a delegated cgroup can make others below it.
fn cgroup_share(text: &[u8]) -> Option<Share> {
    let mut hash = DefaultHasher::new();
    let mut is_root = true;
    for line in text.split(|&byte| byte == b'\n') {
        is_root &= line.is_empty() || line.ends_with(b":/");
        for part in line.split(|&byte| byte == b'/').take(1 + roots_levels(line)) {
            part.hash(&mut hash);
        }
    }
    if is_root { None } else { Some(Share::Cgroup(hash.finish())) }
}

/// How many levels at the beginning of a cgroup's path usually only root creates: a slice and the unit or container in
/// it, or in Kubernetes everything down to a pod's container. We count only two below user.slice, because users can
/// begin as many sessions as they like.
fn roots_levels(line: &[u8]) -> usize {
    let mut names = line.split(|&byte| byte == b'/').skip(1);
    match names.clone().next() {
        Some(b"kubepods") => return 4,
        Some(b"user.slice") => return 2,
        _ => {}
    }
    let slices = names.position(|name| !name.ends_with(b".slice")).unwrap_or(0);
    2.max(slices + 1)
}

/// Of the user namespaces that contain a process, the one directly below our own: its owner, if known, and its inode.
fn user_namespace(process: &Process) -> Option<(Option<u32>, u64)> {
    const NS_GET_PARENT: libc::Ioctl = 0xb702;
    const NS_GET_OWNER_UID: libc::Ioctl = 0xb704;
    let mut namespace = process.open_file("ns/user").ok()?;
    let mut found = None;
    loop {
        // SAFETY: takes no argument, and returns a descriptor. Fails for our own namespace.
        let parent = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
        if parent < 0 {
            return found;
        }
        let mut user = 0_u32;
        // SAFETY: the call writes one number.
        let failed = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID, &raw mut user) };
        let owner = if failed == 0 { Some(user) } else { None };
        found = Some((owner, namespace.metadata().ok()?.ino()));
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

    fn register() -> Register {
        Register { longest_pause: LONGEST_PAUSE, entries: BTreeMap::new() }
    }

    fn from(user: u32, cgroup: u64) -> Origin {
        let user = if user == 0 { None } else { Some(Share::User(user)) };
        Origin { user, cgroup: Some(Share::Cgroup(cgroup)) }
    }

    #[test]
    fn pauses_grow_to_an_hour_and_processes_are_forgotten() {
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
        assert_eq!(last, LONGEST_PAUSE);
        register.give_up((2, 1), Weak::new(), origin, now);
        register.give_up((2, 1), Weak::new(), origin, now + FIRST_PAUSE * 12);
        assert_eq!(register.entries[&(2, 1)].pause, FIRST_PAUSE, "the first one was long ago");
        for pid in 0..2000 {
            register.give_up((pid, 2), Weak::new(), origin, now);
        }
        assert!(register.entries.len() <= REMEMBERED);
    }

    /// However many processes of one user, of root in one container, or of a container's many users stall, we still try
    /// other users' processes.
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
        assert_eq!(register.admit((1, 1), || from(1, 0), now + LONGEST_PAUSE), Err(Refusal::Stalled), "one at a time");
        let more = stalls(&mut register, &mut (10_000..).map(|user| from(user, u64::from(user))));
        assert_eq!(more, THREADS_MOST - 3 * SHARE_MOST);
        drop(threads);
        assert_eq!(register.admit((-1, 1), || from(2, 7000), now + LONGEST_PAUSE), Ok(()));
    }

    /// While a thread is busy with a process we don't try the process. Once the thread has returned, no pause follows.
    #[test]
    fn a_process_is_free_again_once_its_thread_has_returned() {
        let mut register = register();
        let now = Instant::now();
        let thread = Arc::new(());
        register.hold((1, 1), Arc::downgrade(&thread), from(1, 1), now);
        assert_eq!(register.admit((1, 1), || from(1, 1), now), Err(Refusal::Stalled));
        // The thread takes too long.
        register.give_up((2, 1), Arc::downgrade(&thread), from(1, 1), now);
        drop(thread);
        assert_eq!(register.admit((1, 1), || from(1, 1), now), Ok(()));
        assert_eq!(register.admit((2, 1), || from(1, 1), now), Err(Refusal::Stalled));
        // A short wait doesn't make us forget an earlier long one.
        let later = now + FIRST_PAUSE;
        register.hold((2, 1), Weak::new(), from(1, 1), later);
        register.give_up((2, 1), Weak::new(), from(1, 1), later);
        assert_eq!(register.entries[&(2, 1)].pause, FIRST_PAUSE * PAUSE_FACTOR);
    }

    /// A thousand processes of one user, of one cgroup, or of root in one cgroup take as much time as they can get.
    #[test]
    fn nobody_takes_more_than_a_share_of_the_time() {
        const MINUTE: Duration = Duration::from_secs(60);
        let origins: [fn(u32) -> Origin; 3] =
            [|process| from(process, 7), |process| from(7, process.into()), |_| from(0, 7)];
        for origin in origins {
            for attempt in [Duration::from_millis(30), Duration::from_millis(250), Duration::from_millis(2500)] {
                let spent = TimeShares::new(Duration::ZERO, Duration::MAX);
                let begun = Instant::now();
                let mut now = begun;
                let mut taken = Duration::ZERO;
                let mut process = 0;
                while now < begun + MINUTE {
                    process = (process + 1) % 1000;
                    if spent.admits(origin(process), now) {
                        now += attempt;
                        taken += attempt;
                        spent.charge(origin(process), attempt, now);
                    } else {
                        now += Duration::from_millis(1);
                    }
                    assert!(spent.admits(from(9, 9), now) && spent.admits(from(0, 9), now));
                }
                assert!(taken <= MINUTE / TIME_SHARE + BURST + attempt, "{taken:?}");
                assert!(taken + attempt > MINUTE / TIME_SHARE, "{taken:?}");
                spent.charge(from(9, 9), attempt, now + MINUTE);
                assert_eq!(locked(&spent.spent).0.len(), 2, "the others are forgotten");
            }
        }
    }

    /// A service, user or container doesn't get more shares by making cgroups below its own.
    #[test]
    fn only_the_beginning_of_a_cgroup_counts() {
        let of = |path: &str| cgroup_share(format!("4:memory:/\n0::{path}\n").as_bytes());
        let in_pod = |rest: &str| of(&format!("/kubepods.slice/kubepods-burstable.slice/kubepods-a-pod1.slice/{rest}"));
        for (one, other) in [
            ("/system.slice/lxc.service", "/system.slice/lxc.service/a/b"),
            ("/user.slice/user-7.slice/user@7.service/a", "/user.slice/user-7.slice/user@7.service/b"),
            ("/user.slice/user-7.slice/user@7.service/a", "/user.slice/user-7.slice/session-1.scope"),
            ("/user.slice/user-7.slice/session-1.scope", "/user.slice/user-7.slice/session-2.scope"),
            ("/docker/1/a", "/docker/1/b"),
            ("/kubepods/burstable/pod1/2/a", "/kubepods/burstable/pod1/2/b"),
        ] {
            assert_eq!(of(one), of(other), "{one}");
        }
        assert_eq!(in_pod("cri-2.scope/a.slice"), in_pod("cri-2.scope/b.slice"));
        let others =
            ["/a.slice/b.service", "/a.slice/c.service", "/docker/1", "/docker/2", "/kubepods/burstable/pod1/2"];
        let mut shares = others.map(of).to_vec();
        shares.extend([in_pod("cri-2.scope"), in_pod("cri-3.scope"), of("/kubepods/burstable/pod2/2")]);
        shares.extend([of("/user.slice/user-7.slice/session-1.scope"), of("/user.slice/user-8.slice/session-1.scope")]);
        shares.sort_unstable();
        shares.dedup();
        assert_eq!(shares.len(), 10);
        assert_eq!(of("/"), None);
    }

    /// A process in a user namespace counts for the user who made it, whatever its own user is; or for the namespace,
    /// if root has made it.
    #[test]
    #[cfg_attr(not(feature = "live"), ignore = "needs root")]
    fn users_of_namespaces_count_for_their_owner() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(user_namespace(&own), None);
        let user = effective_user(&own).unwrap();
        assert_eq!(Origin::of(&own).user, (user != 0).then_some(Share::User(user)));
        if !pagefold_testkit::is_root() {
            return pagefold_testkit::skip_unsupported("needs root");
        }
        let mut users = Vec::new();
        for maker in ["--reuid=4321", "--reuid=0"] {
            let mut inside = Command::new("setpriv")
                .args([maker, "--clear-groups", "unshare", "-Ur", "unshare", "-Ur", "sh", "-c", "echo; read line"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let began = inside.stdout.as_mut().unwrap().read(&mut [0]).unwrap();
            let process = Process::open(i32::try_from(inside.id()).unwrap()).unwrap();
            users.push(Origin::of(&process).user);
            drop(inside.stdin.take());
            inside.wait().unwrap();
            if began == 0 {
                return pagefold_testkit::skip_unsupported("users may not make namespaces");
            }
        }
        assert!(matches!(users[..], [Some(Share::User(4321)), Some(Share::Namespace(_))]), "{users:?}");
    }
}
