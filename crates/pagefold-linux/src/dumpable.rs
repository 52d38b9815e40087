//! Whether a process lets others look at its memory: the kernel's "dumpable" attribute, seen from outside.
//!
//! Only the process itself can ask for it (PR_GET_DUMPABLE). From outside it shows in two ways:
//! - The files below `/proc/PID` belong to the process's effective user, but to root where it is not dumpable. That
//!   tells of every process that does not run as root (or as its container's root).
//! - The kernel's permission check for looking into a process lets somebody with the very same users and groups pass,
//!   but then asks that the target be dumpable, or that the asker have CAP_SYS_PTRACE. So for a process of our own
//!   users and groups we put that capability down for one system call, in this thread only, and ask.
//!
//! What is left, root's processes in containers with a user namespace of their own and processes of mixed users, is
//! unknown. `Unknown` is for the caller to weigh: the deny list and the flags of the mappings still apply.

use crate::process::{Process, ReadError};
use crate::status::Status;
use std::io;
use std::os::unix::fs::MetadataExt;

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
    let Ok(_guard) = WithoutPtrace::enter() else { return Dumpable::Unknown };
    // get_robust_list only reads, costs nothing and makes the check (PTRACE_MODE_READ, real credentials). It compares
    // permitted capabilities, which we keep: only the effective one is put down.
    let mut head = 0usize;
    let mut length = 0usize;
    // SAFETY: the kernel writes one pointer and one size to the two addresses, which live on this stack.
    let answer = unsafe { libc::syscall(libc::SYS_get_robust_list, pid, &raw mut head, &raw mut length) };
    match (answer, io::Error::last_os_error().raw_os_error()) {
        (0, _) => Dumpable::Yes,
        (_, Some(libc::EPERM)) => Dumpable::No,
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
