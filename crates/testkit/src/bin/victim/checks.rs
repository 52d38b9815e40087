//! The checks that a victim makes: of its memory, its signals, its registers.

use crate::system::{ANONYMOUS, WRITABLE, map};
use std::sync::atomic::{AtomicU64, Ordering};

pub const PAGES: usize = 64;
pub const LONG_MS: i64 = 20_000;
pub const HARMLESS: u64 = 0xfeed_face_cafe_beef;

pub static HANDLED: AtomicU64 = AtomicU64::new(0);
pub static TRAPPED: AtomicU64 = AtomicU64::new(0);

pub extern "C" fn count(_signal: i32) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

pub extern "C" fn trapped(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    TRAPPED.fetch_add(1, Ordering::Relaxed);
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -1 };
}

pub fn unsigned(number: i64) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}

/// Memory to mark, with unique contents.
#[derive(Clone, Copy)]
pub struct Memory {
    pub addr: *mut u64,
    seed: u64,
}

unsafe impl Send for Memory {}

impl Memory {
    pub fn new() -> Self {
        let length = PAGES * 4096;
        // Odd, and different for each victim, so that no two pages are equal. We don't use the pid: it's 1 in every pid
        // namespace.
        let mut seed = 0_u64;
        assert_eq!(unsafe { libc::getrandom((&raw mut seed).cast(), 8, 0) }, 8);
        seed |= 1;
        unsafe {
            // We leave an inaccessible page on either side, so that the kernel doesn't join the mapping with another
            // one.
            let addr = map(length + 2 * 4096, libc::PROT_NONE, ANONYMOUS, -1).add(4096).cast::<u64>();
            assert_eq!(libc::mprotect(addr.cast(), length, WRITABLE), 0);
            (0..PAGES * 512).for_each(|word| addr.add(word).write_volatile((word as u64 + 1).wrapping_mul(seed)));
            Self { addr, seed }
        }
    }

    /// Tells the test where the memory is.
    pub fn announce(&self) {
        println!("ready {:x} {}", self.addr as u64, PAGES * 4096);
    }

    pub fn check(&self) -> Result<(), String> {
        let intact = (0..PAGES * 512)
            .all(|word| unsafe { self.addr.add(word).read_volatile() } == (word as u64 + 1).wrapping_mul(self.seed));
        if intact { Ok(()) } else { Err("memory changed".into()) }
    }
}

pub fn report(verdict: Result<(), String>) {
    match verdict {
        Ok(()) => println!("ok"),
        Err(reason) => println!("bad: {reason}"),
    }
}

pub fn handle(signal: i32, handler: usize, flags: i32) {
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

/// A process's signal state, and the base of gs.
#[derive(Clone, Debug, PartialEq)]
pub struct Signals {
    mask: u64,
    /// Handler, flags, mask and restorer of each signal.
    actions: Vec<[u64; 4]>,
    /// Address, flags and size of the alternate stack.
    stack: (usize, i32, usize),
    /// The base of gs, which no library uses.
    gs: u64,
}

pub fn signals() -> Signals {
    const ARCH_GET_GS: i32 = 0x1004;
    let (mut mask, mut gs) = (0_u64, 0_u64);
    let mut stack: libc::stack_t = unsafe { std::mem::zeroed() };
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, 0, std::ptr::null::<u64>(), &raw mut mask, 8);
        libc::sigaltstack(std::ptr::null(), &raw mut stack);
        libc::syscall(libc::SYS_arch_prctl, ARCH_GET_GS, &raw mut gs);
    }
    let action = |signal: i32| {
        let mut action = [0_u64; 4];
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, std::ptr::null::<u64>(), action.as_mut_ptr(), 8) };
        match (signal, action[0]) {
            // The C library uses these signals, and sets their handlers when it first needs them.
            (32 | 33, _) => [0; 4],
            // For the default action and for ignored signals the flags mean nothing.
            (_, plain @ 0..=1) => [plain, 0, 0, 0],
            _ => action,
        }
    };
    let stack = (stack.ss_sp.addr(), stack.ss_flags, stack.ss_size);
    Signals { mask, actions: (1..=64).map(action).collect(), stack, gs }
}

pub fn signals_back(before: &Signals) -> Result<(), String> {
    let now = signals();
    if now == *before {
        return Ok(());
    }
    let changed = now.actions.iter().zip(&before.actions).position(|(now, before)| now != before);
    Err(format!(
        "signals changed: mask {:x} after {:x}, the handler of {:?}, stack {:x?} after {:x?}, gs {:x} after {:x}",
        now.mask,
        before.mask,
        changed.map(|index| index + 1),
        now.stack,
        before.stack,
        now.gs,
        before.gs
    ))
}
