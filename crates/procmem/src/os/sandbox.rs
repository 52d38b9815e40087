//! Takes away what our own process doesn't need any more: system calls by a seccomp filter, files by Landlock.
//!
//! Both hold for the calling thread and the threads that it starts, and can't be undone. The injector must be started
//! by a process without a seccomp filter: under one, a tracer may not suspend its targets' filters. A thread under
//! Landlock can read no other process. docs/privileges.md says what stays possible.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// System calls that change the machine, start, control or signal other processes, or that we just don't use.
#[rustfmt::skip]
const FORBIDDEN: &[libc::c_long] = &[
    // Programs.
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_fork, libc::SYS_vfork, libc::SYS_personality,
    // Other processes.
    libc::SYS_ptrace, libc::SYS_process_vm_writev, libc::SYS_pidfd_getfd, libc::SYS_kcmp, libc::SYS_process_mrelease,
    libc::SYS_migrate_pages, libc::SYS_tkill, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_pidfd_send_signal,
    // Users and keys.
    libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid, libc::SYS_setresuid,
    libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_setgroups, libc::SYS_add_key,
    libc::SYS_request_key, libc::SYS_keyctl,
    // Namespaces and file systems.
    libc::SYS_setns, libc::SYS_unshare, libc::SYS_chroot, libc::SYS_pivot_root, libc::SYS_mount, libc::SYS_umount2,
    libc::SYS_open_tree, libc::SYS_move_mount, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount,
    libc::SYS_fspick, libc::SYS_mount_setattr, libc::SYS_open_by_handle_at, libc::SYS_fanotify_init,
    libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_acct,
    // The kernel and the machine.
    libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load,
    libc::SYS_kexec_file_load, libc::SYS_reboot, libc::SYS_syslog, libc::SYS_bpf, libc::SYS_perf_event_open,
    libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_userfaultfd,
    libc::SYS_modify_ldt, libc::SYS_ioperm, libc::SYS_iopl, libc::SYS_settimeofday, libc::SYS_clock_settime,
    libc::SYS_adjtimex, libc::SYS_clock_adjtime, libc::SYS_sethostname, libc::SYS_setdomainname,
];

/// We allow the call only if the low half of this argument, after masking, has this value.
struct Condition {
    call: libc::c_long,
    argument: u32,
    mask: u32,
    value: u32,
}

fn conditions() -> [Condition; 4] {
    const THREAD: u32 = libc::CLONE_THREAD.unsigned_abs();
    const NAMESPACES: u32 = 0x7e02_0000;
    let own = std::process::id();
    [
        // We start threads, but no processes.
        Condition { call: libc::SYS_clone, argument: 0, mask: THREAD | NAMESPACES, value: THREAD },
        Condition { call: libc::SYS_kill, argument: 0, mask: u32::MAX, value: own },
        Condition { call: libc::SYS_tgkill, argument: 0, mask: u32::MAX, value: own },
        // The sockets for metrics are open by now. All others are local: control, the injector, databases of users.
        Condition { call: libc::SYS_socket, argument: 0, mask: u32::MAX, value: libc::AF_UNIX.unsigned_abs() },
    ]
}

/// From now on, system calls that the daemon doesn't need fail with EPERM.
///
/// # Errors
/// If the kernel lacks seccomp filters, or doesn't let us install one without no_new_privs.
pub fn forbid_calls() -> io::Result<()> {
    install(&mut filter(libc::EPERM))
}

fn filter(errno: i32) -> Vec<libc::sock_filter> {
    // Offsets in `struct seccomp_data`.
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const ARGUMENTS: u32 = 16;
    const X86_64: u32 = 0xc000_003e;
    const X32: u32 = 0x4000_0000;
    let refuse = end(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs());
    let allow = end(libc::SECCOMP_RET_ALLOW);
    let mut code = vec![
        load(ARCHITECTURE),
        compare(libc::BPF_JEQ, X86_64, 1, 0),
        refuse,
        load(NUMBER),
        compare(libc::BPF_JGE, X32, 0, 1),
        refuse,
    ];
    for &call in FORBIDDEN {
        code.extend([compare(libc::BPF_JEQ, number(call), 0, 1), refuse]);
    }
    // A filter can't see the flags of clone3, which are in memory. If there's no clone3, the C libraries use clone.
    let absent = end(libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs());
    code.extend([compare(libc::BPF_JEQ, number(libc::SYS_clone3), 0, 1), absent]);
    for Condition { call, argument, mask, value } in conditions() {
        code.extend([
            compare(libc::BPF_JEQ, number(call), 0, 5),
            load(ARGUMENTS + 8 * argument),
            instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, mask, 0, 0),
            compare(libc::BPF_JEQ, value, 0, 1),
            allow,
            refuse,
        ]);
    }
    code.push(allow);
    code
}

fn number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

/// Compares with `value`. Skips `if_true` instructions if the comparison holds, else `if_false`.
fn compare(how: u32, value: u32, if_true: u8, if_false: u8) -> libc::sock_filter {
    instruction(libc::BPF_JMP | how | libc::BPF_K, value, if_true, if_false)
}

fn end(action: u32) -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, action, 0, 0)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k }
}

fn install(code: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: u16::try_from(code.len()).unwrap_or(0), filter: code.as_mut_ptr() };
    let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: the program and its instructions outlive the call, which copies them.
    let answer = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps the thread from opening, making and removing files, and from reading and tracing other processes. It can go on
/// using the descriptors that this process has.
///
/// # Errors
/// If the kernel lacks Landlock (before Linux 5.13, or not among its `lsm=`), or doesn't let us restrict ourselves.
pub fn forbid_files() -> io::Result<()> {
    const GET_VERSION: u32 = 1;
    // SAFETY: without attributes, this call only returns the version.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u64>(), 0_usize, GET_VERSION) };
    // How many rights to files this version knows. We restrict all of them, and allow no exception.
    let rights = match version {
        ..1 => return Err(io::Error::last_os_error()),
        1 => 13,
        2 => 14,
        3 | 4 => 15,
        _ => 16,
    };
    let restricted = (1_u64 << rights) - 1;
    // SAFETY: the kernel reads the 8 bytes of `restricted`, which is all of the attributes that the first version has.
    let ruleset = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const restricted, 8_usize, 0_u32) };
    let ruleset = i32::try_from(ruleset).unwrap_or(-1);
    if ruleset < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let ruleset = unsafe { OwnedFd::from_raw_fd(ruleset) };
    // SAFETY: takes numbers only.
    let answer = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0_u32) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[path = "sandbox_tests.rs"]
mod tests;
