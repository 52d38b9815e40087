//! Threads on stacks of their own making, with other threads' live data directly below.
//!
//! There are coroutines like those of Lua, Boost and Go, which switch by `swapcontext` or by hand, or when a signal
//! comes at any instruction; alternate stacks of every size and place; and a stack that another thread populates on
//! demand.
#![allow(clippy::large_stack_arrays, reason = "data on a stack is what some of this is about")]

use super::states::{Doze, Faults};
use super::{rounds, watched};
use crate::checks::{Memory, handle};
use crate::hold::{spin, spinning};
use crate::system::{anonymous, nanosleep_us, sleep_us, spawn_on};
use std::arch::{asm, global_asm};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed};

const COROUTINES: usize = 4;
/// A slot holds data that another thread checks, and above it a coroutine's stack.
const SLOT: usize = 128 << 10;
const DATA: usize = 16 << 10;
/// The lower end of a coroutine's stack also serves as a stack of this size. Only code written for it runs there.
const SMALL: usize = 256;

struct Scheduler {
    contexts: [libc::ucontext_t; COROUTINES],
    slots: *mut u8,
    current: usize,
    complaint: Option<String>,
}

static SCHEDULER: AtomicPtr<Scheduler> = AtomicPtr::new(null_mut());
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static PREEMPTIONS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn hostile_preempted();
}

// Continues a coroutine where a signal interrupted it, once others have run. The handler has stored the interrupted
// address below the red zone.
global_asm!(
    "
.globl hostile_preempted
hostile_preempted:
    pushfq
    .irp r, rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15
    push \\r
    .endr
    cld
    mov rbp, rsp
    sub rsp, 16384
    and rsp, -64
    lea rdi, [rsp + 512]
    xor eax, eax
    mov ecx, 8
    rep stosq
    mov eax, -1
    mov edx, -1
    xsave64 [rsp]
    mov rbx, rsp
    fninit
    call {switch}
    mov rsp, rbx
    mov eax, -1
    mov edx, -1
    xrstor64 [rsp]
    mov rsp, rbp
    .irp r, r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax
    pop \\r
    .endr
    popfq
    ret 128
",
    switch = sym switch,
);

extern "C" fn switch() {
    unsafe {
        let scheduler = SCHEDULER.load(Relaxed);
        let from = (*scheduler).current;
        let to = (from + 1) % COROUTINES;
        (*scheduler).current = to;
        libc::swapcontext(&raw mut (*scheduler).contexts[from], &raw const (*scheduler).contexts[to]);
    }
}

extern "C" fn preempt(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let [rip, rsp] = [libc::REG_RIP, libc::REG_RSP].map(|register| usize::try_from(register).unwrap_or(0));
    SIGNALS.fetch_add(1, Relaxed);
    if spinning().contains(&registers[rip]) {
        registers[rsp] -= 136;
        unsafe { (registers[rsp] as *mut i64).write(registers[rip]) };
        registers[rip] = hostile_preempted as *const () as i64;
        PREEMPTIONS.fetch_add(1, Relaxed);
    }
}

/// Sleeps or computes on a stack of a few words.
fn on_small_stack(top: *mut u8, sleeps: bool) -> Result<(), String> {
    const LIVE: u64 = 0x5eed_5eed_5eed_5eed;
    let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    let (first, second): (u64, u64);
    unsafe {
        asm!(
            "mov r12, rsp", "mov rsp, {top}", "push {live}", "push {live}",
            "test {sleeps}, {sleeps}", "jz 2f",
            "mov eax, 35", "xor esi, esi", "syscall", "jmp 3f",
            "2: mov ecx, 60000", "4: dec ecx", "jnz 4b",
            "3: pop {first}", "pop {second}", "mov rsp, r12",
            top = in(reg) top, live = in(reg) LIVE, sleeps = in(reg) u64::from(sleeps),
            first = lateout(reg) first, second = lateout(reg) second, in("rdi") &raw const time,
            out("rax") _, out("rsi") _, out("rcx") _, out("r11") _, out("r12") _,
        );
    }
    if (first, second) == (LIVE, LIVE) { Ok(()) } else { Err(format!("a small stack held {first:x} {second:x}")) }
}

fn coroutine_round(small: *mut u8) -> Result<(), String> {
    spin(200_000)?;
    on_small_stack(small, false)?;
    on_small_stack(small, true)?;
    let signals = SIGNALS.load(Relaxed);
    match nanosleep_us(50)? {
        0 => Ok(()),
        -4 if SIGNALS.load(Relaxed) > signals => Ok(()),
        other => Err(format!("nanosleep answered {other} on a coroutine's stack")),
    }
}

extern "C" fn coroutine() {
    let scheduler = SCHEDULER.load(Relaxed);
    loop {
        let slot = unsafe { (*scheduler).slots.add((*scheduler).current * SLOT) };
        if let Err(reason) = coroutine_round(slot.wrapping_add(DATA + SMALL)) {
            unsafe { (*scheduler).complaint = Some(reason) };
        }
        switch();
    }
}

/// Runs coroutines in `slots`. The first one is the caller.
fn run_coroutines(memory: Memory, slots: *mut u8) -> Result<(), String> {
    let contexts = unsafe { std::mem::zeroed() };
    let mut scheduler = Scheduler { contexts, slots, current: 0, complaint: None };
    SCHEDULER.store(&raw mut scheduler, Relaxed);
    let scheduler = &raw mut scheduler;
    for at in 1..COROUTINES {
        unsafe {
            let context = &raw mut (*scheduler).contexts[at];
            libc::getcontext(context);
            (*context).uc_stack.ss_sp = slots.add(at * SLOT + DATA).cast();
            (*context).uc_stack.ss_size = SLOT - DATA;
            libc::makecontext(context, coroutine, 0);
        }
    }
    let data: Vec<&[AtomicU64]> = (0..COROUTINES).map(|at| words(slots.wrapping_add(at * SLOT), DATA)).collect();
    handle(libc::SIGURG, preempt as *const () as usize, libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART);
    let (thread, over) = (unsafe { libc::gettid() }, AtomicBool::new(false));
    let verdict = std::thread::scope(|scope| {
        scope.spawn(|| {
            let doze = Doze::new();
            while !over.load(Relaxed) {
                doze.doze();
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGURG) };
            }
        });
        let verdict = watched(&data, || {
            rounds(memory, || unsafe {
                coroutine_round(slots.add(DATA + SMALL))?;
                switch();
                (*scheduler).complaint.take().map_or(Ok(()), Err)
            })
        });
        over.store(true, Relaxed);
        verdict
    });
    verdict?;
    if SIGNALS.load(Relaxed) > 500 && PREEMPTIONS.load(Relaxed) == 0 {
        Err("no coroutine was preempted".into())
    } else {
        Ok(())
    }
}

fn words(start: *mut u8, bytes: usize) -> &'static [AtomicU64] {
    unsafe { std::slice::from_raw_parts(start.cast(), bytes / 8) }
}

pub fn coroutines(memory: Memory) -> Result<(), String> {
    run_coroutines(memory, anonymous(COROUTINES * SLOT))
}

/// Coroutines whose stacks are a local array of a thread.
pub fn local_coroutines(memory: Memory) -> Result<(), String> {
    in_thread(move || {
        run_coroutines(memory, std::hint::black_box(&mut [0_u64; COROUTINES * SLOT / 8]).as_mut_ptr().cast())
    })
}

/// Waits in calls that the injector doesn't interrupt.
fn stay_away(over: &AtomicBool) {
    let doze = Doze::new();
    while !over.load(Relaxed) {
        doze.doze();
    }
}

/// Attacks in a thread with a large stack. Meanwhile the main thread is in a call that the injector doesn't interrupt.
fn in_thread(attack: impl FnOnce() -> Result<(), String> + Send) -> Result<(), String> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = || {
            let verdict = attack();
            over.store(true, Relaxed);
            verdict
        };
        let thread = std::thread::Builder::new().stack_size(4 << 20).spawn_scoped(scope, run).unwrap();
        stay_away(&over);
        thread.join().unwrap()
    })
}

static ON_STACK: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Sleeps and computes on the alternate stack. Uses little of it.
extern "C" fn on_alternate_stack(_: i32) {
    let here = 0_u64;
    let (lowest, highest) = (ON_STACK.load(Relaxed), ON_STACK.load(Relaxed) + (128 << 10));
    let time = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    let answer: i64;
    unsafe {
        asm!(
            "mov ecx, 60000", "2: dec ecx", "jnz 2b", "xor esi, esi", "syscall",
            inout("rax") libc::SYS_nanosleep => answer, in("rdi") &raw const time, out("rsi") _, out("rcx") _, out("r11") _,
        );
    }
    if answer == 0 && (lowest..highest).contains(&(&raw const here).addr()) {
        HANDLED.fetch_add(1, Relaxed);
    }
}

/// Handles signals on each of the alternate stacks, in turn.
fn run_alternate_stacks(memory: Memory, stacks: &[(*mut u8, usize)], data: &[&[AtomicU64]]) -> Result<(), String> {
    const AUTODISARM: i32 = 1 << 31;
    handle(libc::SIGUSR1, on_alternate_stack as *const () as usize, libc::SA_ONSTACK);
    let mut turn = 0;
    let round = || {
        let (place, size) = stacks[turn % stacks.len()];
        let flags = if turn / stacks.len() % 2 == 0 { 0 } else { AUTODISARM };
        turn += 1;
        let stack = libc::stack_t { ss_sp: place.cast(), ss_flags: flags, ss_size: size };
        let (mut own, mut now): (libc::stack_t, libc::stack_t) = unsafe { std::mem::zeroed() };
        let handled = HANDLED.load(Relaxed);
        ON_STACK.store(place.addr(), Relaxed);
        unsafe {
            if libc::sigaltstack(&raw const stack, &raw mut own) != 0 {
                return Err(format!("an alternate stack of {size} bytes: {}", std::io::Error::last_os_error()));
            }
            libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), libc::SIGUSR1);
            libc::sigaltstack(&raw const own, &raw mut now);
        }
        if HANDLED.load(Relaxed) != handled + 1 {
            return Err(format!("a handler did not run, not once, or not on its stack of {size} bytes"));
        }
        if (now.ss_sp, now.ss_flags, now.ss_size) != (stack.ss_sp, flags, size) {
            return Err(format!("an alternate stack became {:?} {:x} {}", now.ss_sp, now.ss_flags, now.ss_size));
        }
        Ok(())
    };
    watched(data, || rounds(memory, round))
}

/// The smallest size with which the kernel delivers a signal, plus room for the handler.
fn smallest() -> usize {
    let smallest = usize::try_from(unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) }).unwrap_or(0);
    (smallest.max(2048) + 1024).next_multiple_of(64)
}

/// Alternate stacks in the middle of a mapping, at its lower edge with nothing mapped below, and above a guard page.
pub fn alternate_stacks(memory: Memory) -> Result<(), String> {
    let large = 64 << 10;
    let middle = anonymous(DATA + large + DATA);
    let mapped = [anonymous(large), anonymous(large)];
    unsafe {
        libc::munmap(mapped[0].cast(), 4096);
        libc::mprotect(mapped[1].cast(), 4096, libc::PROT_NONE);
    }
    let [edge, guarded] = mapped.map(|start| start.wrapping_add(4096));
    let within = middle.wrapping_add(DATA);
    let stacks =
        [(within, smallest()), (within, large), (edge, smallest()), (guarded, smallest()), (edge, large - 4096)];
    run_alternate_stacks(memory, &stacks, &[words(middle, DATA), words(within.wrapping_add(large), DATA)])
}

/// Alternate stacks within the thread's own stack, with live data below.
pub fn local_alternate_stacks(memory: Memory) -> Result<(), String> {
    in_thread(move || {
        let mut room = [0_u64; (DATA + (64 << 10)) / 8];
        let data: *mut u8 = std::hint::black_box(&mut room).as_mut_ptr().cast();
        let place = data.wrapping_add(DATA);
        run_alternate_stacks(memory, &[(place, smallest()), (place, 64 << 10)], &[words(data, DATA)])
    })
}

/// A thread's stack that another thread populates on demand. It answers each fault after a while, with old data.
pub fn lazy_stack(memory: Memory) -> Result<(), String> {
    let length = 1 << 20;
    let stack = anonymous(length);
    unsafe { libc::mprotect(stack.cast(), 4096, libc::PROT_NONE) };
    let stack = stack.wrapping_add(4096);
    let Some(faults) = Faults::on(stack, length - 4096) else {
        return Err("skip: userfaultfd is not permitted".into());
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| faults.answer(&over));
        let mut verdict = Ok(());
        let attack = || {
            verdict = rounds(memory, || round_on_lazy_stack(stack));
            over.store(true, Relaxed);
        };
        unsafe {
            let thread = spawn_on(stack, length - 4096, Box::new(attack));
            stay_away(&over);
            libc::pthread_join(thread, null_mut());
        }
        verdict
    })
}

/// Gives back the stack below its own frames, then sleeps and computes.
fn round_on_lazy_stack(stack: *mut u8) -> Result<(), String> {
    let here = 0_u64;
    let unused = ((&raw const here).addr() - stack.addr() - (32 << 10)) & !4095;
    unsafe { libc::madvise(stack.cast(), unused, libc::MADV_DONTNEED) };
    spin(60_000)?;
    sleep_us(50)
}
