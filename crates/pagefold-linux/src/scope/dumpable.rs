//! Whether a process lets others look at its memory: the kernel's "dumpable" attribute, seen from outside.
//!
//! Only the process itself can ask for it (PR_GET_DUMPABLE). From outside it shows in two ways:
//! - The files below `/proc/PID` belong to the process's effective user, but to root where it is not dumpable. That
//!   tells of every process that does not run as root (or as its container's root).
//! - The kernel's permission check for looking into a process lets somebody with the very same users and groups pass,
//!   but then asks that the target be dumpable, or that the asker have CAP_SYS_PTRACE. So for a process of our own
//!   users and groups we put that capability down for one system call, in this thread only, and ask.
//!
//! What is left, root's processes in containers with a user namespace of their own, processes of mixed users, and those
//! of our own user that have capabilities which we have given up (the kernel's check fails for these as well), is
//! unknown from outside. [`ask_inside`] has the process itself asked, by one stop of it. Where nobody can, `Unknown` is
//! for the caller to weigh: the deny list and the flags of the mappings still apply.

use crate::inject::{Beside, Call, Injector, Limits};
use crate::proc::process::{Process, ReadError};
use crate::proc::status::Status;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// How long the answer of a process counts: it may change its mind.
const ANSWER_COUNTS: Duration = Duration::from_secs(60);
/// One that does not stop within this time is asked again when its answer would have ceased to count.
const ASKING: Limits = Limits { stop_ns: 20_000_000, call_ns: 100_000_000, calls_per_stop: 1 };

thread_local! {
    static ASKER: RefCell<Option<Asker>> = const { RefCell::new(None) };
}

/// By whom this thread has processes asked, and what they have answered.
struct Asker {
    injector: Beside,
    /// By pid: start time, when it was asked, what it said.
    answers: BTreeMap<i32, (u64, Instant, Dumpable)>,
}

/// From now on [`ask_inside`] asks through this injector, for the calling thread, as long as it is there.
pub fn ask_through(injector: &Injector) {
    ASKER.set(Some(Asker { injector: injector.beside(), answers: BTreeMap::new() }));
}

/// Has the process say it by itself (PR_GET_DUMPABLE), where this thread has somebody who asks. That stops the process
/// for some tens of microseconds, at most once a minute.
pub fn ask_inside(process: &Process) -> Dumpable {
    ASKER.with_borrow_mut(|asker| asker.as_mut().map_or(Dumpable::Unknown, |asker| asker.ask(process)))
}

impl Asker {
    fn ask(&mut self, process: &Process) -> Dumpable {
        let (pid, start) = (process.pid(), process.start_time_ticks());
        self.answers.retain(|_, (_, at, _)| at.elapsed() < ANSWER_COUNTS);
        if let Some((.., answer)) = self.answers.get(&pid).filter(|(of, ..)| *of == start) {
            return *answer;
        }
        let call = Call::prctl(libc::PR_GET_DUMPABLE, [0; 4]);
        let answer = match self.injector.run(process, &[call], &ASKING).map(|report| report.results) {
            Ok(results) if results == [Ok(1)] => Dumpable::Yes,
            // 2: only root reads its dumps, as after a change of users.
            Ok(results) if matches!(results[..], [Ok(0 | 2)]) => Dumpable::No,
            _ => Dumpable::Unknown,
        };
        self.answers.insert(pid, (start, Instant::now(), answer));
        answer
    }
}

/// What is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dumpable {
    /// Others may look.
    Yes,
    /// Others may not look.
    No,
    /// It cannot be told from outside.
    Unknown,
}

/// Finds out. The process must not be a zombie, which has no memory to be asked about.
pub fn dumpable(process: &Process, status: &Status) -> Result<Dumpable, ReadError> {
    // Opened anew: the kernel settles a /proc file's owner when it is looked up.
    let metadata = process.open_file("stat")?.metadata();
    let owner = metadata.map_err(|error| ReadError::from_io(process.pid(), "stat", error))?.uid();
    let user = status.effective_uid();
    if owner != user {
        return Ok(Dumpable::No);
    }
    // From here on the owner is the user in any case where the user is the root that such files are given to.
    let namespace_root = root_of(&process.read_file("uid_map")?);
    Ok(match user {
        0 => ask_the_kernel(process.pid(), status),
        user if Some(user) == namespace_root => Dumpable::Unknown,
        _ => Dumpable::Yes,
    })
}

/// The user outside that is root inside, by the text of `/proc/PID/uid_map`: lines of inside, outside, count.
fn root_of(uid_map: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(uid_map).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some("0")).then(|| words.next()?.parse().ok())?
    })
}

/// Runs the kernel's check without CAP_SYS_PTRACE.
fn ask_the_kernel(pid: i32, status: &Status) -> Dumpable {
    // SAFETY: these calls only return numbers.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    if status.uids[..3] != [uid; 3] || status.gids[..3] != [gid; 3] {
        return Dumpable::Unknown;
    }
    let Ok(guard) = WithoutPtrace::enter() else { return Dumpable::Unknown };
    // get_robust_list only reads, costs nothing and makes the check (PTRACE_MODE_READ, real credentials). It compares
    // permitted capabilities, which we keep: only the effective one is put down.
    let mut head = 0usize;
    let mut length = 0usize;
    // SAFETY: the kernel writes one pointer and one size to the two addresses, which live on this stack.
    let answer = unsafe { libc::syscall(libc::SYS_get_robust_list, pid, &raw mut head, &raw mut length) };
    match (answer, io::Error::last_os_error().raw_os_error()) {
        (0, _) => Dumpable::Yes,
        (_, Some(libc::EPERM)) if guard.permitted() & status.permitted == status.permitted => Dumpable::No,
        // Or it is for a capability that the process has and we have not (`cap_ptrace_access_check`).
        _ => Dumpable::Unknown,
    }
}

const CAP_SYS_PTRACE: u32 = 19;

/// This thread without CAP_SYS_PTRACE in its effective set, until dropped.
struct WithoutPtrace {
    before: [CapData; 2],
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

impl WithoutPtrace {
    fn enter() -> io::Result<Self> {
        let mut before = [CapData::default(); 2];
        capability(libc::SYS_capget, &mut before)?;
        let mut without = before;
        without[0].effective &= !(1 << CAP_SYS_PTRACE);
        capability(libc::SYS_capset, &mut without)?;
        Ok(Self { before })
    }

    fn permitted(&self) -> u64 {
        u64::from(self.before[0].permitted) | u64::from(self.before[1].permitted) << 32
    }
}

impl Drop for WithoutPtrace {
    fn drop(&mut self) {
        // Taking back what is permitted cannot fail; if it did, later reads would say Denied, loudly.
        let _ = capability(libc::SYS_capset, &mut self.before);
    }
}

fn capability(call: libc::c_long, data: &mut [CapData; 2]) -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = CapHeader { version: VERSION_3, pid: 0 };
    // SAFETY: version 3 takes a header and two data structs; pid 0 is this thread.
    let answer = unsafe { libc::syscall(call, &raw mut header, data.as_mut_ptr()) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "dumpable_tests.rs"]
mod tests;
