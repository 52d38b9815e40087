//! Modes that block in a system call twice: first until its timeout or event, then until a real signal.

use crate::checks::{HANDLED, LONG_MS, WAIT_MS, signals, signals_back};
use crate::handlers;
use crate::hold::call;
use crate::kinds::{self, Kind};
use std::sync::atomic::Ordering;

pub fn pipe() -> [i32; 2] {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

pub fn word(fd: i32) -> u64 {
    u64::from(fd.unsigned_abs())
}

pub fn epoll(fd: i32) -> i32 {
    unsafe {
        let epoll = libc::epoll_create1(0);
        let mut event = libc::epoll_event { events: 1, u64: 0 };
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event);
        epoll
    }
}

pub fn forked(child: impl FnOnce()) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        unsafe { libc::_exit(0) };
    }
    pid
}

pub fn blocking(mode: &str) -> Result<(), String> {
    kinds::TIMEOUT_MS.store(WAIT_MS, Ordering::Relaxed);
    let mut kind = kinds::kind(mode)?;
    let verdict = block_twice(&mut kind);
    (kind.remove)();
    verdict
}

fn block_twice(kind: &mut Kind) -> Result<(), String> {
    let before = signals();
    let args = (kind.args)();
    println!("blocking {}", kind.nr);
    (kind.after)(call(kind.nr, args)?)?;
    if HANDLED.load(Ordering::Relaxed) != 0 {
        return Err("an unexpected handler ran".into());
    }
    kinds::TIMEOUT_MS.store(LONG_MS, Ordering::Relaxed);
    let args = (kind.args)();
    println!("again");
    let answer = call(kind.nr, args)?;
    let handled = HANDLED.load(Ordering::Relaxed);
    if answer != -4 || handled != 1 {
        return Err(format!("a real signal: answered {answer}, not -4, and the handler ran {handled} times"));
    }
    signals_back(&before)?;
    // Undoes the mode's mask, because `main` compares with the mask from before the mode.
    handlers::mask(0);
    Ok(())
}
