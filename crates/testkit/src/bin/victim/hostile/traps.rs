//! Programs that handle their own traps: one that handles its own system calls, one that uses page faults as a virtual
//! machine does for safepoints, and one that emulates another program's calls, as gVisor does.

use super::rounds;
use crate::checks::{Memory, handle};
use crate::system::{ANONYMOUS, map};
use std::arch::asm;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

static SELECTOR: AtomicU8 = AtomicU8::new(0);
static CAUGHT: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

/// A system call number that no kernel has.
const EMULATED: i64 = 0x4321;

fn emulated(argument: u64) -> u64 {
    argument.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

fn emulated_call(argument: u64) -> u64 {
    let answer: u64;
    unsafe {
        asm!("syscall", inout("rax") EMULATED => answer, in("rdi") argument, out("rcx") _, out("r11") _);
    }
    answer
}

extern "C" fn dispatched(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const SYS_USER_DISPATCH: i32 = 2;
    SELECTOR.store(0, Relaxed);
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let [rax, rdi] = [libc::REG_RAX, libc::REG_RDI].map(|register| usize::try_from(register).unwrap_or(0));
    let code = unsafe { (*info).si_code };
    CAUGHT.fetch_add(1, Relaxed);
    WRONG.fetch_add(u64::from(code != SYS_USER_DISPATCH || registers[rax] != EMULATED), Relaxed);
    let argument = u64::from_ne_bytes(registers[rdi].to_ne_bytes());
    registers[rax] = i64::from_ne_bytes(emulated(argument).to_ne_bytes());
}

/// Handles its own system calls (`PR_SET_SYSCALL_USER_DISPATCH`), as Wine does. Each must run the handler.
pub fn dispatch(memory: Memory) -> Result<(), String> {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    handle(libc::SIGSYS, dispatched as *const () as usize, libc::SA_SIGINFO);
    let selector = SELECTOR.as_ptr().addr();
    if unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, selector) } != 0 {
        return Err("skip: the kernel has no syscall user dispatch".into());
    }
    let mut made = 0_u64;
    rounds(memory, || {
        made += 1;
        SELECTOR.store(1, Relaxed);
        let answer = emulated_call(made);
        let (caught, wrong) = (CAUGHT.load(Relaxed), WRONG.load(Relaxed));
        if answer == emulated(made) && caught == made && wrong == 0 {
            return Ok(());
        }
        Err(format!("call {made} answered {answer:x}; {caught} signals came, {wrong} of them wrong"))
    })
}

extern "C" fn page_fault(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const PAGE_FAULT: i64 = 14;
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = |register: i32| usize::try_from(register).unwrap_or(0);
    let (address, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
    // The thread has written through rsi, to inaccessible memory.
    let right = i64::try_from(address) == Ok(registers[at(libc::REG_RSI)])
        && registers[at(libc::REG_CR2)] == registers[at(libc::REG_RSI)]
        && registers[at(libc::REG_TRAPNO)] == PAGE_FAULT
        && registers[at(libc::REG_ERR)] & 6 == 6
        && (code == 1 || code == 2);
    CAUGHT.fetch_add(1, Relaxed);
    WRONG.fetch_add(u64::from(!right), Relaxed);
    // mov [rsi], rdx: three bytes.
    registers[at(libc::REG_RIP)] += 3;
}

/// Writes to inaccessible memory, as the JVM does for safepoints and null checks. Each write must run the handler once,
/// with the right address and cause.
pub fn page_faults(memory: Memory) -> Result<(), String> {
    handle(libc::SIGSEGV, page_fault as *const () as usize, libc::SA_SIGINFO);
    let page = map(4096, libc::PROT_NONE, ANONYMOUS, -1);
    let mut made = 0;
    rounds(memory, || {
        made += 1;
        let place = if made % 2 == 0 { 8 } else { page as u64 + made % 4096 / 8 * 8 };
        let (kept, after): (u64, u64);
        unsafe { asm!("mov [rsi], rdx", inout("rsi") place => kept, inout("rdx") made => after) };
        let (caught, wrong) = (CAUGHT.load(Relaxed), WRONG.load(Relaxed));
        if caught == made && wrong == 0 && (kept, after) == (place, made) {
            return Ok(());
        }
        Err(format!("{made} faults, {caught} signals, {wrong} of them wrong, rsi {kept:x} rdx {after:x}"))
    })
}

extern "C" fn forged_fault(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let address = unsafe { (*info).si_addr().addr() };
    WRONG.fetch_add(u64::from(address != FORGED), Relaxed);
    CAUGHT.fetch_add(1, Relaxed);
}

/// An address where no program has memory.
const FORGED: usize = 0x1234;

/// Sends itself signals that look like the kernel's for a fault; each must come. Only the main thread may send these.
/// It blocks them itself, so another thread gets them. The main thread is in the kernel most of the time, so the
/// injector stops the other thread.
pub fn forged_faults(memory: Memory) -> Result<(), String> {
    static IS_RUNNING: AtomicBool = AtomicBool::new(false);
    handle(libc::SIGSEGV, forged_fault as *const () as usize, libc::SA_SIGINFO);
    std::thread::spawn(|| {
        IS_RUNNING.store(true, Relaxed);
        loop {
            std::hint::spin_loop();
        }
    });
    while !IS_RUNNING.load(Relaxed) {
        std::thread::yield_now();
    }
    unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut blocked, libc::SIGSEGV);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut());
    }
    // Signal and errno, code, address.
    let mut info = [0_u64; 16];
    info[0] = u64::from(libc::SIGSEGV.unsigned_abs());
    info[1] = 1;
    info[2] = FORGED as u64;
    let mut sent = 0;
    rounds(memory, || {
        let own = std::process::id();
        if unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, own, libc::SIGSEGV, info.as_ptr()) } != 0 {
            return Err(format!("sending: {}", std::io::Error::last_os_error()));
        }
        sent += 1;
        let began = std::time::Instant::now();
        while CAUGHT.load(Relaxed) < sent && began.elapsed().as_secs() < 5 {
            std::thread::yield_now();
        }
        let (caught, wrong) = (CAUGHT.load(Relaxed), WRONG.load(Relaxed));
        if caught == sent && wrong == 0 {
            return Ok(());
        }
        Err(format!("{sent} signals sent, {caught} came, {wrong} of them wrong"))
    })
}

/// Runs a child that only makes calls that this program emulates (`PTRACE_SYSEMU`).
pub fn emulator(memory: Memory) -> Result<(), String> {
    const PTRACE_SYSEMU: u32 = 31;
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            let mut turn = 1;
            while emulated_call(turn) == emulated(turn) && crate::hold::spin(3000).is_ok() {
                turn += 1;
            }
            // The parent doesn't expect this call.
            asm!("syscall", "ud2", in("rax") EMULATED + 1, options(noreturn));
        }
    }
    let mut turn = 0;
    let wait = || {
        let mut status = 0;
        if unsafe { libc::waitpid(child, &raw mut status, 0) } == child { Ok(status) } else { Err("waitpid failed") }
    };
    wait()?;
    let verdict = rounds(memory, || unsafe {
        turn += 1;
        if libc::ptrace(PTRACE_SYSEMU, child, 0, 0) != 0 {
            return Err(format!("resuming the child: {}", std::io::Error::last_os_error()));
        }
        let status = wait()?;
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut registers);
        if status != (libc::SIGTRAP << 8 | 0x7f) || (registers.orig_rax, registers.rdi) != (EMULATED as u64, turn) {
            let [call, argument] = [registers.orig_rax, registers.rdi];
            return Err(format!("turn {turn}: the child stopped with {status:x} in call {call:x} with {argument:x}"));
        }
        registers.rax = emulated(turn);
        libc::ptrace(libc::PTRACE_SETREGS, child, 0, &raw const registers);
        Ok(())
    });
    unsafe { libc::kill(child, libc::SIGKILL) };
    verdict
}
