//! Modes in which the victim is not simply blocked in a call.

use crate::blocking::{buffer, forked, pipe, timespec, word};
use crate::checks::{HANDLED, HARMLESS, LONG_MS};
use crate::hold::call;
use std::io::Write;
use std::sync::atomic::Ordering;

/// Waits for a byte on standard input.
pub fn command() -> Result<u8, String> {
    let mut byte = 0_u8;
    match call(libc::SYS_read, [0, &raw mut byte as u64, 1, 0, 0, 0])? {
        1 => Ok(byte),
        other => Err(format!("reading standard input answered {other}")),
    }
}

pub fn mix(rounds: u64) -> u64 {
    (0..rounds).fold(HARMLESS, |state, round| {
        let state = state ^ (state << 13);
        let state = state ^ (state >> 7);
        (state ^ (state << 17)).wrapping_add(round)
    })
}

pub fn busy() -> Result<(), String> {
    let expected = mix(std::hint::black_box(20_000_000));
    let until = std::time::Instant::now() + std::time::Duration::from_millis(700);
    while std::time::Instant::now() < until {
        if mix(std::hint::black_box(20_000_000)) != expected {
            return Err("a computation went wrong".into());
        }
    }
    Ok(())
}

/// Sleeps forever.
pub fn sleeper() -> Result<(), String> {
    loop {
        match call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0])? {
            0 => {}
            other => return Err(format!("nanosleep answered {other}")),
        }
    }
}

pub fn stopped() -> Result<(), String> {
    unsafe { libc::raise(libc::SIGSTOP) };
    Ok(())
}

pub fn vfork() -> Result<(), String> {
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid == 0 {
        unsafe {
            libc::usleep(800_000);
            libc::_exit(0);
        }
    }
    let reaped = call(libc::SYS_wait4, [u64::MAX, 0, 0, 0, 0, 0])?;
    if reaped == pid { Ok(()) } else { Err(format!("wait4 answered {reaped}, not {pid}")) }
}

pub fn big_write() -> Result<(), String> {
    let [reader, writer] = pipe();
    let bytes = vec![7_u8; 1 << 20];
    forked(|| unsafe {
        libc::close(writer);
        libc::usleep(600_000);
        let mut buffer = vec![0_u8; 1 << 16];
        while libc::read(reader, buffer.as_mut_ptr().cast(), buffer.len()) > 0 {}
    });
    match call(libc::SYS_write, [word(writer), bytes.as_ptr() as u64, 1 << 20, 0, 0, 0])? {
        0x10_0000 => Ok(()),
        other => Err(format!("a write of 1 MiB answered {other}")),
    }
}

/// A receive that must not return early, and threads that may be stopped instead.
pub fn waitall() -> Result<(), String> {
    let mut pair = [0; 2];
    unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) };
    unsafe { libc::write(pair[1], [0_u8; 5].as_ptr().cast(), 5) };
    for _ in 0..2 {
        std::thread::spawn(|| call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0]));
    }
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(600));
        unsafe { libc::write(pair[1], [0_u8; 5].as_ptr().cast(), 5) };
    });
    let all = u64::from(libc::MSG_WAITALL.unsigned_abs());
    match call(libc::SYS_recvfrom, [word(pair[0]), buffer(), 10, all, 0, 0])? {
        10 => Ok(()),
        other => Err(format!("a receive of 10 bytes answered {other}")),
    }
}

pub fn threads() -> Result<(), String> {
    let workers: Vec<_> = (0..6).map(|_| std::thread::spawn(busy)).collect();
    workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a thread panicked".to_owned())?)
}

/// The main thread ends; another thread continues.
pub fn main_exit() -> Result<(), String> {
    std::thread::spawn(|| {
        let verdict = command().map_or_else(|reason| format!("bad: {reason}"), |_| "ok".to_owned());
        println!("{verdict}");
        let _ = std::io::stdout().flush();
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    });
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    Ok(())
}

/// Counts queued real-time signals, none of which may be lost or doubled, until a byte is sent. Prints the count.
pub fn queue() -> Result<(), String> {
    command()?;
    println!("counted {}", HANDLED.load(Ordering::Relaxed));
    Ok(())
}

/// Starts and ends threads and children.
pub fn churn() -> Result<(), String> {
    let until = std::time::Instant::now() + std::time::Duration::from_millis(1500);
    while std::time::Instant::now() < until {
        let thread = std::thread::spawn(|| mix(1000));
        let child = forked(|| {});
        let reaped = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        if reaped != child {
            return Err(format!("waitpid answered {reaped}"));
        }
        if thread.join().is_err() {
            return Err("a thread panicked".into());
        }
    }
    Ok(())
}

/// Executes itself repeatedly, from the main thread and from others.
pub fn execs() -> Result<(), String> {
    use std::os::unix::process::CommandExt;
    let left: u32 = std::env::args().nth(2).and_then(|left| left.parse().ok()).unwrap_or(60);
    if left == 0 {
        return Ok(());
    }
    let again = move || {
        let error = std::process::Command::new("/proc/self/exe").args(["execs", &(left - 1).to_string()]).exec();
        format!("exec: {error}")
    };
    let idle = || drop(call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0]));
    std::thread::spawn(idle);
    std::thread::sleep(std::time::Duration::from_millis(3));
    Err(if left % 2 == 0 { again() } else { std::thread::spawn(again).join().unwrap_or_default() })
}
