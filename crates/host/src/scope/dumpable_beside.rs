//! Makes the kernel's access check from within a process's user namespace, without stopping the process.

use super::ProcessInfo;
use super::dumpable::{Dumpable, WithoutPtrace, id_inside, try_access};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use std::fs::File;
use std::os::fd::AsRawFd;

/// Exit codes of the child that makes the check.
const YES: i32 = 10;
const NO: i32 = 11;
const UNKNOWN: i32 = 12;
/// Tells the kernel to keep an ID. We use it if our ID is the process's, because the namespace need not map it.
const KEEP: u32 = u32::MAX;
/// The check takes less than a millisecond.
const LIMIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

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
    match exit_code(child) {
        Some(YES) => Dumpable::Yes,
        Some(NO) => Dumpable::No,
        _ => Dumpable::Unknown,
    }
}

/// Waits until the child ends, for [`LIMIT`] at most, because the namespace's root can stop it. Then kills it.
fn exit_code(child: i32) -> Option<i32> {
    // -1 if we couldn't fork.
    let child = Pid::from_raw(child.max(0))?;
    if let Ok(pidfd) = pidfd_open(child, PidfdFlags::empty()) {
        let _ = retry_on_intr(|| poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&LIMIT)));
    }
    // A child that has ended keeps its exit code.
    let _ = kill_process(child, Signal::KILL);
    let (_, status) = retry_on_intr(|| waitpid(Some(child), WaitOptions::empty())).ok()??;
    status.exit_status()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    #[allow(clippy::zombie_processes)] // `exit_code` waits for them.
    fn a_child_that_was_stopped_is_not_waited_for() {
        let spawn = |script: &str| {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            i32::try_from(child.id()).unwrap()
        };
        let stopped = spawn("kill -STOP $$; exit 10");
        assert_eq!(exit_code(stopped), None);
        assert!(!std::path::Path::new(&format!("/proc/{stopped}")).exists(), "it's killed and reaped");
        assert_eq!(exit_code(spawn("exit 10")), Some(YES));
        assert_eq!(exit_code(-1), None, "fork failed");
    }
}
