//! Makes the kernel's access check from within a process's user namespace, without stopping the process.

use super::ProcessInfo;
use super::dumpable::{Dumpable, WithoutPtrace, id_inside, try_access};
use std::fs::File;
use std::os::fd::AsRawFd;

/// Exit codes of the child that makes the check.
const YES: i32 = 10;
const NO: i32 = 11;
const UNKNOWN: i32 = 12;
/// With this the kernel keeps an ID. The child keeps ours if they're the process's: its namespace need not map them.
const KEEP: u32 = u32::MAX;

/// Whether others may read the memory of a process in another user namespace. From outside, the kernel's ptrace
/// check passes just because we own the namespace, and tells us nothing. So a child enters the namespace as the same user
/// and asks from there.
pub(super) fn ask(info: &ProcessInfo) -> Dumpable {
    let process = &info.process;
    let ids = |file: &str, ids: &[u32; 4], own: u32| {
        if ids[..3] != [ids[0]; 3] {
            return None;
        }
        if ids[0] == own {
            return Some(KEEP);
        }
        id_inside(&process.read_file(file).ok()?, ids[0])
    };
    let own_user = rustix::process::getuid().as_raw();
    let own_group = rustix::process::getgid().as_raw();
    let Some(user) = ids("uid_map", &info.status.uids, own_user) else { return Dumpable::Unknown };
    let Some(group) = ids("gid_map", &info.status.gids, own_group) else { return Dumpable::Unknown };
    let Ok(namespace) = process.open_file("ns/user") else { return Dumpable::Unknown };
    // SAFETY: the child makes system calls only, on memory of its own, and ends by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let end = check(&namespace, user, group, process.tid());
        // SAFETY: ends the child, without running anything of its parent's.
        unsafe { libc::_exit(end) };
    }
    let mut status = 0;
    // SAFETY: `child` is our own, and the kernel writes one int.
    while child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return Dumpable::Unknown;
        }
    }
    match (child > 0 && libc::WIFEXITED(status)).then(|| libc::WEXITSTATUS(status)) {
        Some(YES) => Dumpable::Yes,
        Some(NO) => Dumpable::No,
        _ => Dumpable::Unknown,
    }
}

/// Makes the check in a child. Its memory is a copy of ours, so first we keep the namespace's root from reading it.
fn check(namespace: &File, user: u32, group: u32, pid: i32) -> i32 {
    // SAFETY: these calls take numbers and a descriptor, and change this process only.
    let entered = unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0) == 0
            && libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWUSER) == 0
            && libc::syscall(libc::SYS_setresgid, group, group, group) == 0
            && libc::syscall(libc::SYS_setresuid, user, user, user) == 0
    };
    if !entered {
        return UNKNOWN;
    }
    let Ok(_without) = WithoutPtrace::enter() else { return UNKNOWN };
    match try_access(pid) {
        Ok(()) => YES,
        // We have all capabilities of this namespace but for ptrace, so the attribute must be the reason.
        Err(libc::EPERM) => NO,
        Err(_) => UNKNOWN,
    }
}
