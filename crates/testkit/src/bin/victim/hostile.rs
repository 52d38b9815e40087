//! Targets that try to get themselves harmed, or to escape their sandbox, while we inject calls into them.
//!
//! `victim hostile KIND`, for `inject/tests/attack.rs`, prints `ready ADDR LEN` and attacks until the test sends a
//! byte. Then it prints `ok`, `ok absent: FEATURE...` if the machine lacks something that it needs, or `bad: REASON`.
//! Each kind checks itself all the time.
//!
//! The injector must choose the thread that attacks. So no other thread may suit it better, and nothing blocks in a
//! call that the injector can interrupt, not even to wait for input.

mod stacks;
mod states;
mod traps;

use crate::checks::{Memory, TRAPPED, handle, report, signals, signals_back, trapped};
use crate::system::{WRITABLE, anonymous, map};
use crate::torture::is_asked_to_end;
use std::arch::asm;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Set when the test has asked for the verdict.
static DONE: AtomicBool = AtomicBool::new(false);
/// Features that this machine lacks.
static ABSENT: Mutex<Vec<&str>> = Mutex::new(Vec::new());

pub fn main(kind: &str) {
    crate::hold::prepare();
    let memory = Memory::new();
    memory.announce();
    let verdict = match kind {
        "code-swap" => code_swap(),
        "trapped-calls" => trapped_calls(),
        "breakpoints" => breakpoints(),
        "epoll" => epoll(),
        "coroutines" => stacks::coroutines(memory),
        "local-coroutines" => stacks::local_coroutines(memory),
        "alternate-stacks" => stacks::alternate_stacks(memory),
        "local-alternate-stacks" => stacks::local_alternate_stacks(memory),
        "lazy-stack" => stacks::lazy_stack(memory),
        "extended-states" => states::extended_states(memory),
        "shadow-stack" => states::shadow_stack(memory),
        "userfaultfd" => states::lazy_memory(memory),
        "users" => states::users(memory),
        "io-uring" => states::ring(memory),
        "dispatch" => traps::dispatch(memory),
        "page-faults" => traps::page_faults(memory),
        "forged-faults" => traps::forged_faults(memory),
        "emulator" => traps::emulator(memory),
        other => Err(format!("there is no kind {other}")),
    };
    match (verdict.and_then(|()| memory.check()), ABSENT.lock().unwrap().as_slice()) {
        (Ok(()), absent @ [_, ..]) => println!("ok absent: {}", absent.join(", ")),
        (verdict, _) => report(verdict),
    }
}

/// Whether the test has asked for the verdict. Only one in 64 calls reads the input.
fn done() -> bool {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    if CALLS.fetch_add(1, Ordering::Relaxed) % 64 == 0 && is_asked_to_end() {
        DONE.store(true, Ordering::Relaxed);
    }
    DONE.load(Ordering::Relaxed)
}

/// Calls `round` until the test asks for the verdict, checking memory and signals now and then.
fn rounds(memory: Memory, mut round: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let before = signals();
    let mut made = 0_u32;
    loop {
        let last = done();
        round()?;
        made += 1;
        if last || made % 16 == 0 {
            memory.check()?;
            signals_back(&before)?;
        }
        if last {
            return Ok(());
        }
    }
}

/// Attacks while another thread writes and checks `areas` all the time. Nothing else may write there, not even for a
/// moment.
fn watched(areas: &[&[AtomicU64]], attack: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut value = 0;
            for word in areas.iter().copied().flatten() {
                word.store(0, Ordering::Relaxed);
            }
            while !over.load(Ordering::Relaxed) {
                for (area, words) in areas.iter().enumerate() {
                    for (at, word) in words.iter().enumerate() {
                        let found = word.swap(value + 1, Ordering::Relaxed);
                        if found != value {
                            DONE.store(true, Ordering::Relaxed);
                            return Err(format!("word {at} of live memory {area} was {found:x}, not {value:x}"));
                        }
                    }
                }
                value += 1;
            }
            Ok(())
        });
        let attacked = attack();
        over.store(true, Ordering::Relaxed);
        watcher.join().unwrap().and(attacked)
    })
}

/// Makes all mapped code of files writable, so that nobody can rely on an instruction in it.
fn make_code_writable() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains(" r-xp ") && line.contains('/')) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let (start, end) = (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
        let access = WRITABLE | libc::PROT_EXEC;
        let changed = unsafe { libc::mprotect(start as *mut libc::c_void, end - start, access) };
        assert_eq!(changed, 0, "{line}");
    }
}

/// A thread sleeps at a `syscall` instruction, which a sibling keeps replacing by a jump to a call that the filter
/// denies.
fn code_swap() -> Result<(), String> {
    const SWAPPED: usize = 32;
    const FORBIDDEN: usize = 96;
    let directory = std::env::temp_dir().join(format!("pagefold-escape-{}", std::process::id()));
    let path = std::ffi::CString::new(directory.to_str().unwrap()).unwrap();
    let timeout = libc::timespec { tv_sec: 3600, tv_nsec: 0 };
    let fd = unsafe { libc::memfd_create(c"code".as_ptr(), 0) };
    assert_eq!(unsafe { libc::ftruncate(fd, 4096) }, 0);
    let writable = map(4096, WRITABLE, libc::MAP_SHARED, fd);
    let code = map(4096, libc::PROT_READ | libc::PROT_EXEC, libc::MAP_SHARED, fd);
    let mov = |register: &[u8], value: u64| [register, &value.to_le_bytes()].concat();
    // nanosleep(timeout, NULL), for ever.
    let mut sleeping = [mov(&[0x48, 0xbf], (&raw const timeout) as u64), vec![0x31, 0xf6, 0xb8, 35, 0, 0, 0]].concat();
    assert!(sleeping.len() <= SWAPPED);
    sleeping.resize(SWAPPED, 0x90);
    sleeping.extend([0x0f, 0x05, 0xeb, 0u8.wrapping_sub(36)]);
    // mkdir(path, 0700), and back.
    let back = -i32::try_from(FORBIDDEN + 10 + 5 + 5 + 2 + 5).unwrap();
    let mut forbidden = mov(&[0x48, 0xbf], path.as_ptr() as u64);
    forbidden.extend([0xbe, 0xc0, 1, 0, 0, 0xb8, 83, 0, 0, 0, 0x0f, 0x05, 0xe9]);
    forbidden.extend(back.to_le_bytes());
    unsafe {
        std::ptr::copy_nonoverlapping(sleeping.as_ptr(), writable, sleeping.len());
        std::ptr::copy_nonoverlapping(forbidden.as_ptr(), writable.add(FORBIDDEN), forbidden.len());
    }
    let stack = anonymous(65536);
    make_code_writable();
    assert!(crate::seccomp::filter(libc::SYS_mkdir, libc::SECCOMP_RET_ERRNO | 1), "seccomp filters are not permitted");
    let (code, top) = (code as usize, stack as usize + 65536 - 64);
    std::thread::spawn(move || unsafe {
        // The thread runs on a stack that doesn't look like a thread's, so that the injector can't leave a signal frame
        // there.
        asm!("mov rsp, {top}", "jmp {code}", top = in(reg) top, code = in(reg) code, options(noreturn));
    });
    // This thread never rests, so the injector doesn't choose it.
    let word = unsafe { &*writable.add(SWAPPED).cast::<std::sync::atomic::AtomicU16>() };
    let jump = u16::from_le_bytes([0xeb, u8::try_from(FORBIDDEN - SWAPPED - 2).unwrap()]);
    std::thread::sleep(std::time::Duration::from_millis(50));
    while !done() {
        for _ in 0..1000 {
            word.store(jump, Ordering::Relaxed);
            std::hint::spin_loop();
            word.store(u16::from_le_bytes([0x0f, 0x05]), Ordering::Relaxed);
            std::hint::spin_loop();
        }
        if directory.exists() {
            let _ = std::fs::remove_dir(&directory);
            return Err("a call that the filter denies has succeeded".into());
        }
    }
    Ok(())
}

/// Repeats `act` until the test asks for the verdict. Each time must run the handler, which counts.
fn each_is_handled(what: &str, act: impl Fn(), handled: impl Fn() -> u64) -> Result<(), String> {
    let mut made = 0;
    while !done() {
        act();
        made += 1;
        let seen = handled();
        if seen != made {
            return Err(format!("{made} {what}, and {seen} signals came"));
        }
    }
    Ok(())
}

/// Makes calls that a filter turns into SIGSYS.
fn trapped_calls() -> Result<(), String> {
    handle(libc::SIGSYS, trapped as *const () as usize, libc::SA_SIGINFO);
    crate::seccomp::filter_madvise(libc::SECCOMP_RET_TRAP)?;
    each_is_handled(
        "calls were denied",
        || _ = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_NORMAL) },
        || TRAPPED.load(Ordering::Relaxed),
    )
}

static BREAKPOINTS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_breakpoint(_: i32) {
    BREAKPOINTS.fetch_add(1, Ordering::Relaxed);
}

/// Runs into its own breakpoints.
fn breakpoints() -> Result<(), String> {
    handle(libc::SIGTRAP, count_breakpoint as *const () as usize, 0);
    each_is_handled("breakpoints", || unsafe { asm!("int3") }, || BREAKPOINTS.load(Ordering::Relaxed))
}

/// Waits for events that don't come, while no signal comes. So no wait may answer EINTR.
fn epoll() -> Result<(), String> {
    let fd = unsafe { libc::epoll_create1(0) };
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    while !done() {
        let answer = unsafe { libc::epoll_wait(fd, &raw mut event, 1, 20) };
        if answer != 0 {
            return Err(format!("epoll_wait answered {answer}: {}", std::io::Error::last_os_error()));
        }
    }
    Ok(())
}
