//! Finds out the kernel's "dumpable" attribute of a process: whether others may read its memory.
//!
//! Only the process itself can query it (PR_GET_DUMPABLE). From outside we see it in two ways:
//! - The files below `/proc/PID` belong to the effective user of the process, but to root if it isn't dumpable. That
//!   covers every process in our user namespace that doesn't run as root.
//! - The kernel's ptrace access check passes for a caller with the same users and groups if the target is dumpable or
//!   the caller has CAP_SYS_PTRACE. So for processes of our own users and groups we drop that capability in this thread
//!   for one system call that makes the check.
//!
//! The attribute remains unknown for dumpable processes in other user namespaces, for processes with mixed
//! users, and for processes of our own user that have capabilities which we've dropped (the check fails for these as
//! well). [`ask_inside`] makes such a process query it, which stops the process once; without an injector, a child of
//! ours makes the check from within the process's namespace. If neither is possible, for example while the process
//! sleeps uninterruptibly, the result is `Unknown`, and we leave the process alone until it has answered.

use super::{ProcessInfo, dumpable_beside};
use pagefold_inject::{Batch, Call, Injector, InjectorHandle, Limits};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::status::Status;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// We ask again after this time, because the attribute can change.
const ANSWER_FRESH: Duration = Duration::from_secs(60);
/// How long an answer is valid while we can't ask the process again.
const ANSWER_VALID: Duration = Duration::from_secs(75);
/// The first pause after we couldn't ask a process. It doubles, up to [`ANSWER_FRESH`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const ASKING: Limits = Limits { stop_ns: 20_000_000, call_ns: 100_000_000, calls_per_stop: 1 };

thread_local! {
    static ASKER: RefCell<Option<Asker>> = const { RefCell::new(None) };
}

/// The injector that this thread queries through, and the answers so far.
struct Asker {
    injector: InjectorHandle,
    /// The answers of processes, by pid.
    answers: BTreeMap<i32, Answer>,
}

struct Answer {
    /// Start time, and the program that it runs.
    of: (u64, ProgramId),
    /// The last answer, and when it was given.
    last: Option<(Dumpable, Instant)>,
    /// When to ask again, and how long to pause if that fails.
    next: Instant,
    pause: Duration,
}

/// Makes [`ask_inside`] use this injector in the calling thread.
pub fn ask_through(injector: &Injector) {
    ASKER.set(Some(Asker { injector: injector.handle(), answers: BTreeMap::new() }));
}

/// Makes the process query its attribute (PR_GET_DUMPABLE), which stops it for some tens of microseconds, once a
/// minute. If we can't ask it, earlier answers of the same program are valid for a while, and we ask it again after
/// pauses that double. A thread without an injector stops nobody: it forks a child that makes the access check from
/// within the process's user namespace.
pub fn ask_inside(info: &ProcessInfo) -> Dumpable {
    ASKER.with_borrow_mut(|asker| match asker {
        Some(asker) => asker.ask(&info.process),
        None => dumpable_beside::ask(info),
    })
}

/// Whether [`ask_inside`] would ask the process now rather than give an earlier answer.
pub(crate) fn would_ask(process: &Process) -> bool {
    ASKER.with_borrow(|asker| {
        let Some(asker) = asker else { return false };
        asker.answers.get(&process.pid()).is_none_or(|answer| Instant::now() >= answer.next)
    })
}

impl Asker {
    fn ask(&mut self, process: &Process) -> Dumpable {
        // If we can't read the program of a process we don't ask it.
        let Some(program) = program_of(process) else { return Dumpable::Unknown };
        let of = (process.start_time_ticks(), program);
        let now = Instant::now();
        self.answers.retain(|_, answer| now < answer.next + ANSWER_FRESH);
        let mut answer = match self.answers.remove(&process.pid()) {
            Some(known) if known.of == of => known,
            _ => Answer { of, last: None, next: now, pause: FIRST_PAUSE },
        };
        if now >= answer.next {
            answer.record(now, self.query(process, &program));
        }
        let valid = answer.valid(now);
        self.answers.insert(process.pid(), answer);
        valid
    }

    /// Makes the process query its attribute. `None` if we couldn't ask.
    fn query(&self, process: &Process, program: &ProgramId) -> Option<Dumpable> {
        let call = Call::prctl(libc::PR_GET_DUMPABLE, [0; 4]);
        let batch = Batch { process, program, calls: &[call], limits: &ASKING };
        let results = self.injector.run(batch).ok()?.results;
        // The process may have just executed another program. Then this isn't the answer of its present program.
        let is_same = program_of(process) == Some(*program);
        match results[..] {
            [Ok(1)] if is_same => Some(Dumpable::Yes),
            // 2: only root may read its dumps, as after a change of users.
            [Ok(0 | 2)] => Some(Dumpable::No),
            _ => None,
        }
    }
}

/// The program of a process. If the process has begun an exec, reading waits for it.
fn program_of(process: &Process) -> Option<ProgramId> {
    let key = process.key();
    run_abandonable(move || {
        let process = Process::open(key.0).ok().filter(|process| process.key() == key)?;
        ProgramId::of(&process).ok()
    })
    .ok()?
}

impl Answer {
    fn record(&mut self, now: Instant, answer: Option<Dumpable>) {
        if let Some(dumpable) = answer {
            self.last = Some((dumpable, now));
            self.next = now + ANSWER_FRESH;
            self.pause = FIRST_PAUSE;
        } else {
            self.next = now + self.pause;
            self.pause = (self.pause * 2).min(ANSWER_FRESH);
        }
    }

    fn valid(&self, now: Instant) -> Dumpable {
        match self.last {
            Some((dumpable, at)) if now < at + ANSWER_VALID => dumpable,
            _ => Dumpable::Unknown,
        }
    }
}

/// The attribute of a process, as far as we know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dumpable {
    /// Others may read its memory.
    Yes,
    /// Others must not read its memory.
    No,
    /// Not visible from outside.
    Unknown,
}

/// Finds out the attribute from outside. Unknown for kernel threads and zombies, which have no memory.
pub fn dumpable(info: &ProcessInfo) -> Result<Dumpable, ReadError> {
    if info.stat.kernel_thread || info.stat.is_zombie() {
        return Ok(Dumpable::Unknown);
    }
    let process = &info.process;
    // We open the file again: the kernel determines the owner of a /proc file when it's looked up.
    let metadata = process.open_file("stat")?.metadata();
    let owner = metadata.map_err(|error| ReadError::from_io(process.pid(), "stat", error))?.uid();
    let user = info.uid();
    if owner != user {
        return Ok(Dumpable::No);
    }
    // In another namespace equal owners tell us nothing: the files of a non-dumpable process belong to root of the
    // namespace where it called exec, and that may be this user. The access check passes for the owner of a namespace
    // in any case.
    Ok(match user {
        _ if !is_in_our_user_namespace(process)? => Dumpable::Unknown,
        0 => check_access(process.tid(), &info.status),
        _ => Dumpable::Yes,
    })
}

/// Whether the kernel has user namespaces. If not, all processes are in one.
fn has_user_namespaces() -> bool {
    Path::new("/proc/self/ns/user").exists()
}

fn is_in_our_user_namespace(process: &Process) -> Result<bool, ReadError> {
    let file = match process.open_file("ns/user") {
        Err(ReadError::Absent { .. }) if !has_user_namespaces() => return Ok(true),
        Err(ReadError::Denied { .. }) => return Ok(false),
        file => file?,
    };
    let found = file.metadata();
    let found = found.map_err(|error| ReadError::from_io(process.pid(), "ns/user", error))?;
    Ok(fs::metadata("/proc/self/ns/user").is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino())))
}

/// The ID that a user or group outside of a user namespace has inside. `map` is the text of `/proc/PID/uid_map` or
/// `gid_map`. Each line has the first ID inside, the first outside, and the number of IDs.
pub(super) fn id_inside(map: &[u8], id: u32) -> Option<u32> {
    let text = std::str::from_utf8(map).ok()?;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let mut number = || words.next()?.parse::<u32>().ok();
        let inside = number()?;
        let offset = id.checked_sub(number()?);
        let count = number()?;
        if let Some(offset) = offset.filter(|&offset| offset < count) {
            return inside.checked_add(offset);
        }
    }
    None
}

/// Makes the kernel's access check without CAP_SYS_PTRACE.
fn check_access(pid: i32, status: &Status) -> Dumpable {
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    if status.uids[..3] != [uid; 3] || status.gids[..3] != [gid; 3] {
        return Dumpable::Unknown;
    }
    let Ok(guard) = WithoutPtrace::enter() else { return Dumpable::Unknown };
    match try_access(pid) {
        Ok(()) => Dumpable::Yes,
        Err(libc::EPERM) if guard.permitted() & status.permitted == status.permitted => Dumpable::No,
        // EPERM may also be due to a capability that only the target has (`cap_ptrace_access_check`).
        _ => Dumpable::Unknown,
    }
}

/// Makes the access check (PTRACE_MODE_READ, real credentials) by get_robust_list, which only reads and costs little.
/// The check compares permitted capabilities, which we keep: we only drop the effective one. The error is the kernel's.
pub(super) fn try_access(pid: i32) -> Result<(), i32> {
    let mut head = 0usize;
    let mut length = 0usize;
    // SAFETY: the kernel writes one pointer and one size to the two variables.
    let answer = unsafe { libc::syscall(libc::SYS_get_robust_list, pid, &raw mut head, &raw mut length) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}

/// Removes CAP_SYS_PTRACE from the effective set of this thread until dropped.
pub(super) struct WithoutPtrace {
    before: CapabilitySets,
}

impl WithoutPtrace {
    pub(super) fn enter() -> io::Result<Self> {
        let before = capabilities(None)?;
        let effective = before.effective - CapabilitySet::SYS_PTRACE;
        set_capabilities(None, CapabilitySets { effective, ..before })?;
        Ok(Self { before })
    }

    fn permitted(&self) -> u64 {
        self.before.permitted.bits()
    }
}

impl Drop for WithoutPtrace {
    fn drop(&mut self) {
        // Raising a permitted capability can't fail; if it did, later reads would report Denied.
        let _ = set_capabilities(None, self.before);
    }
}

#[cfg(test)]
#[path = "dumpable_tests.rs"]
mod tests;
