//! Modes under seccomp.

use crate::blocking::forked;
use crate::states::command;
use std::io::{Error, ErrorKind};

pub fn strict() -> Result<(), String> {
    be_strict();
    command()?;
    // Strict mode permits only read, write, exit and sigreturn: printing is a write.
    unsafe { libc::write(1, b"ok\n".as_ptr().cast(), 3) };
    unsafe { libc::madvise(std::ptr::null_mut(), 0, 0) };
    unsafe { libc::write(1, b"bad: unfiltered\n".as_ptr().cast(), 16) };
    Ok(())
}

/// Installs a filter that answers one call with `action` and allows all others.
pub fn filter(nr: i64, action: u32) -> bool {
    const NEW_LISTENER: u64 = 1 << 3;
    let instruction =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, u32::try_from(nr).unwrap_or(0)),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    let flags = if action == libc::SECCOMP_RET_USER_NOTIF { NEW_LISTENER } else { 0 };
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        // We keep the listener's descriptor open, and never read it.
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) >= 0
    }
}

/// Installs a filter that answers madvise with `action`.
pub fn filter_madvise(action: u32) -> Result<(), String> {
    if filter(libc::SYS_madvise, action) { Ok(()) } else { Err("skip: seccomp filters are not permitted".into()) }
}

/// Enters strict mode: only read, write, exit and the return from handlers are allowed.
pub fn be_strict() {
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT, 0, 0, 0) };
}

/// Installs the filter of a torture victim.
pub fn install(action: &str) -> Result<(), String> {
    let action = match action {
        "kill" => libc::SECCOMP_RET_KILL_PROCESS,
        "kill-thread" => libc::SECCOMP_RET_KILL_THREAD,
        "trap" => libc::SECCOMP_RET_TRAP,
        "errno" => libc::SECCOMP_RET_ERRNO | 1,
        "notify" => libc::SECCOMP_RET_USER_NOTIF,
        "trace" => libc::SECCOMP_RET_TRACE,
        "log" => libc::SECCOMP_RET_LOG,
        "allow" => libc::SECCOMP_RET_ALLOW,
        other => return Err(format!("no such action: {other}")),
    };
    filter_madvise(action)
}

/// Whether the filter is still installed, as far as we can test without blocking.
pub fn still_there(action: &str) -> Result<(), String> {
    let madvise = || unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_NORMAL) };
    let mode = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = mode.lines().find_map(|line| line.strip_prefix("Seccomp:")).unwrap_or_default().trim().to_owned();
    let there = match action {
        "" => mode == "0",
        "errno" | "trace" => madvise() == -1,
        "trap" => madvise() == -1 && crate::handlers::forgive(),
        "kill" | "kill-thread" => {
            let child = forked(|| _ = madvise());
            let mut status = 0;
            while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1
                && Error::last_os_error().kind() == ErrorKind::Interrupted
            {}
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS
        }
        _ => mode == "2",
    };
    if there { Ok(()) } else { Err(format!("the filter is gone (mode {mode})")) }
}
