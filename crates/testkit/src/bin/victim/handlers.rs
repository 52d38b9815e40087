//! The handlers for the signals of the torture test. Each determines where it interrupted the thread, so that we can
//! attribute every EINTR.

use crate::checks::unsigned;
use crate::hold::{after_syscall, spin};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

pub use pagefold_testkit::injection::{ON_STACK, PLAIN, RESTARTING};

/// The counted signals, as a mask.
pub const STORM: u64 = 1 << (PLAIN - 1) | 1 << (RESTARTING - 1) | 1 << (ON_STACK - 1);

const STACK_BYTES: usize = 256 << 10;
const EINTR: i64 = -4;

/// How many times handlers have run.
pub static RUNS: AtomicU64 = AtomicU64::new(0);
/// How many of these runs found the thread about to return EINTR from the checked call.
pub static INTERRUPTED: AtomicU64 = AtomicU64::new(0);
/// Runs that found EINTR for a good reason: they had handled a signal without SA_RESTART.
pub static FOR_GOOD: AtomicU64 = AtomicU64::new(0);
/// Signals that an injected call sent, by where they arrived: during the checked call, before it, or elsewhere.
pub static OWN: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
/// How long a handler computes, in rounds of [`spin`].
pub static SPIN: AtomicU64 = AtomicU64::new(20_000);
static BAD: AtomicU64 = AtomicU64::new(0);
static OWN_PID: AtomicI32 = AtomicI32::new(0);
static STACK: AtomicU64 = AtomicU64::new(0);

const COMPLAINTS: [&str; 5] = [
    "",
    "a handler was not on its stack",
    "a handler's own registers changed",
    "what a handler returns to changed",
    "a system call was sent to a handler",
];

/// Whether a handler found something wrong.
pub fn complaint() -> Result<(), String> {
    match COMPLAINTS[usize::try_from(BAD.load(Relaxed)).unwrap_or(0)] {
        "" => Ok(()),
        what => Err(what.into()),
    }
}

extern "C" fn storm(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    let gregs = unsafe { (*context).uc_mcontext.gregs };
    let mask = unsafe { (&raw const (*context).uc_sigmask).cast::<u64>().read() };
    let rip = gregs[libc::REG_RIP as usize];
    let (rax, before) = (gregs[libc::REG_RAX as usize], rip == after_syscall() - 2);
    // At `restart_syscall` the kernel is about to continue the call, but after a handler that returns EINTR
    // (kernel/signal.c, do_no_restart_syscall).
    let interrupted = (rip == after_syscall() && rax == EINTR) || (before && rax == libc::SYS_restart_syscall);
    RUNS.fetch_add(1, Relaxed);
    if interrupted {
        INTERRUPTED.fetch_add(1, Relaxed);
        FOR_GOOD.fetch_add(u64::from(signal != RESTARTING), Relaxed);
    }
    // SI_USER: an injected kill(2) sent the signal. The test itself uses sigqueue(3).
    if unsafe { (*info).si_code == 0 && (*info).si_pid() == OWN_PID.load(Relaxed) } {
        let kind = if interrupted { 0 } else { 2 - usize::from(before) };
        OWN[kind].fetch_add(1, Relaxed);
    }
    let here = (&raw const gregs).addr();
    let stack = usize::try_from(STACK.load(Relaxed)).unwrap_or(0);
    if (signal == ON_STACK) != (stack..stack + STACK_BYTES).contains(&here) {
        BAD.store(1, Relaxed);
    }
    if spin(SPIN.load(Relaxed)).is_err() {
        BAD.store(2, Relaxed);
    }
    let (gregs_now, mask_now) =
        unsafe { ((*context).uc_mcontext.gregs, (&raw const (*context).uc_sigmask).cast::<u64>().read()) };
    if gregs_now != gregs || mask_now != mask {
        BAD.store(3, Relaxed);
    }
}

extern "C" fn filtered(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    BAD.store(4, Relaxed);
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RAX as usize] = -1 };
}

pub fn install() {
    let stack = Box::leak(vec![0_u8; STACK_BYTES].into_boxed_slice()).as_mut_ptr();
    STACK.store(stack.addr() as u64, Relaxed);
    OWN_PID.store(unsafe { libc::getpid() }, Relaxed);
    alternate_stack(true);
    for (signal, flags) in [(PLAIN, 0), (RESTARTING, libc::SA_RESTART), (ON_STACK, libc::SA_ONSTACK)] {
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = storm as *const () as usize;
            action.sa_flags = flags | libc::SA_SIGINFO;
            // Otherwise a handler that interrupts another one on the alternate stack would run there, too.
            for other in [PLAIN, RESTARTING, ON_STACK] {
                libc::sigaddset(&raw mut action.sa_mask, other);
            }
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    crate::checks::handle(libc::SIGSYS, filtered as *const () as usize, libc::SA_SIGINFO);
    crate::checks::handle(libc::SIGURG, libc::SIG_IGN, 0);
}

/// Forgets an error that we've provoked on purpose. Returns whether there was one.
pub fn forgive() -> bool {
    BAD.swap(0, Relaxed) == 4
}

/// Sets the alternate signal stack to the whole buffer, or to all but 8 KiB of it, so that a test can tell which one is
/// set.
pub fn alternate_stack(whole: bool) -> (usize, usize) {
    let at = usize::try_from(STACK.load(Relaxed)).unwrap_or(0);
    let size = STACK_BYTES - if whole { 0 } else { 8192 };
    let stack = libc::stack_t { ss_sp: at as *mut libc::c_void, ss_flags: 0, ss_size: size };
    unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) };
    (at, size)
}

/// Sets the mask of blocked signals. Returns the old one.
pub fn mask(new: u64) -> u64 {
    let mut old = 0_u64;
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const new, &raw mut old, 8) };
    old
}

/// Unblocks the counted signals, so the handlers of pending ones run before this returns.
pub fn drain() {
    let storm = STORM;
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_UNBLOCK, &raw const storm, 0, 8) };
}

/// The three counts of `OWN`.
pub fn own() -> [u64; 3] {
    [0, 1, 2].map(|kind| OWN[kind].load(Relaxed))
}

pub fn bit(signal: i32) -> u64 {
    1 << (unsigned(i64::from(signal)) - 1)
}
