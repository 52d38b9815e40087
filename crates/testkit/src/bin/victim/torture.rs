//! Victims that run until somebody sends them a byte.
//!
//! `victim torture MODE TRAIT...` prints `ready ADDR LEN PID` (its pid in its own namespace). It then repeats its mode,
//! and checks after each round that nothing has changed unexpectedly. After a byte on standard input it prints `ok
//! rounds=N runs=N eintr=N own=N/N/N short=N`. If it finds something wrong, it prints `bad: REASON` at once. Then it
//! waits for the end of its input. Traits: `filter-ACTION`, `trap-blocked`, `trap-ignored`, `namespaces`.

use crate::checks::{Memory, PAGES, signals, signals_back};
use crate::handlers::{self, FOR_GOOD, INTERRUPTED, RUNS, bit};
use crate::hold::call;
use crate::{hold, kinds, rounds, seccomp};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

pub static ROUNDS: AtomicU64 = AtomicU64::new(0);
static EINTRS: AtomicU64 = AtomicU64::new(0);
/// How many handlers have run for signals that the victim sent itself.
pub static RAISED: AtomicU64 = AtomicU64::new(0);

/// Whether the victim is in strict mode: only read, write, exit and the return from handlers are allowed.
pub static STRICT: AtomicBool = AtomicBool::new(false);

/// How many rounds pass between checks of all memory and all signals.
const ROUNDS_PER_CHECK: u64 = 16;

pub fn main() -> ! {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let (mode, traits) = words.split_first().expect("a mode");
    hold::prepare();
    if has(traits, "namespaces") {
        enter_namespaces();
    }
    let memory = Memory::new();
    set_gs();
    handlers::install();
    if has(traits, "trap-blocked") {
        handlers::mask(bit(libc::SIGTRAP));
    }
    if has(traits, "trap-ignored") {
        crate::checks::handle(libc::SIGTRAP, libc::SIG_IGN, 0);
    }
    let verdict = run(mode, traits, memory);
    if !STRICT.load(Relaxed) {
        handlers::drain();
    }
    end(verdict)
}

/// Reports the verdict, and waits for the end of the input, because the test inspects this process until then.
pub fn end(verdict: Result<(), String>) -> ! {
    match verdict.and_then(|()| handlers::complaint()) {
        Ok(()) => {
            let [interrupted, before, elsewhere] = handlers::own();
            let runs = RUNS.load(Relaxed) - RAISED.load(Relaxed);
            say(format_args!(
                "ok rounds={} runs={runs} eintr={} own={interrupted}/{before}/{elsewhere} short={}\n",
                ROUNDS.load(Relaxed),
                EINTRS.load(Relaxed),
                rounds::SHORT.load(Relaxed),
            ));
        }
        Err(reason) => say(format_args!("bad: {reason}\n")),
    }
    unsafe {
        while libc::read(0, [0_u8; 64].as_mut_ptr().cast(), 64) != 0 {}
        // exit_group ends all threads. In seccomp's strict mode we may only call exit, which ends this one.
        libc::syscall(if STRICT.load(Relaxed) { libc::SYS_exit } else { libc::SYS_exit_group }, 0);
    }
    unreachable!()
}

fn has(traits: &[String], name: &str) -> bool {
    traits.iter().any(|word| word == name)
}

/// Prints without allocating and only by write(2), as strict mode demands.
pub fn say(text: std::fmt::Arguments) {
    let mut line = [0_u8; 1024];
    let mut rest = &mut line[..];
    let _ = rest.write_fmt(text);
    let left = rest.len();
    let length = line.len() - left;
    unsafe { libc::write(1, line.as_ptr().cast(), length) };
}

/// Announces the victim, with its memory and its pid in its own namespace.
pub fn ready(memory: Memory) {
    let pid = unsafe { libc::getpid() };
    say(format_args!("ready {:x} {} {pid}\n", memory.addr.addr(), PAGES * 4096));
}

fn run(mode: &str, traits: &[String], memory: Memory) -> Result<(), String> {
    if let Some(rounds) = rounds::of(mode, traits, memory)? {
        return rounds;
    }
    let kind = kinds::kind(mode)?;
    let action = traits.iter().find_map(|word| word.strip_prefix("filter-"));
    if let Some(action) = action {
        seccomp::install(action)?;
    }
    ready(memory);
    let verdict = block_repeatedly(kind, memory);
    verdict?;
    seccomp::still_there(action.unwrap_or_default())
}

/// Checks the rules of interruption, for any number of signals at any time. The program must see an EINTR exactly when
/// a handler found the thread about to return one from the call. If SA_RESTART restarts the call, a handler without
/// that flag must have run. If we unblock signals only during the call, each handler means an EINTR.
fn block_repeatedly(mut kind: kinds::Kind, memory: Memory) -> Result<(), String> {
    let before = signals();
    let counts = || [&RUNS, &INTERRUPTED, &FOR_GOOD].map(|count| count.load(Relaxed));
    let verdict = until_asked_to_end(memory, &before, || {
        let args = (kind.args)();
        let earlier = counts();
        let answer = call(kind.nr, args)?;
        let now = counts();
        let [runs, interrupted, for_good] = [0, 1, 2].map(|index| now[index] > earlier[index]);
        let eintr = answer == -4;
        if interrupted != eintr || (kind.restarts && for_good != eintr) || (kind.masked && runs != eintr) {
            return Err(format!("answered {answer} after the handlers {earlier:?}, then {now:?}"));
        }
        if answer == -4 {
            EINTRS.fetch_add(1, Relaxed);
            return Ok(());
        }
        (kind.after)(answer)
    });
    (kind.remove)();
    verdict
}

/// Calls `round` until somebody sends a byte, checking everything now and then.
pub fn until_asked_to_end(
    memory: Memory,
    before: &crate::checks::Signals,
    mut round: impl FnMut() -> Result<(), String>,
) -> Result<(), String> {
    loop {
        let last = is_asked_to_end();
        round()?;
        handlers::complaint()?;
        if ROUNDS.fetch_add(1, Relaxed) % ROUNDS_PER_CHECK == 0 || last {
            memory.check()?;
            signals_back(before)?;
        }
        if last {
            return Ok(());
        }
    }
}

/// Announces the victim and calls `round` until asked to end.
pub fn rounds(memory: Memory, round: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    ready(memory);
    until_asked_to_end(memory, &signals(), round)
}

/// Whether somebody has sent a byte.
pub fn is_asked_to_end() -> bool {
    let mut polled = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // poll(2) returns -1 if a signal has come.
    unsafe { libc::poll(&raw mut polled, 1, 0) > 0 }
}

/// Sets the base of gs, which we check later.
fn set_gs() {
    const ARCH_SET_GS: i32 = 0x1001;
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, 0x1234_5678_9000_u64) };
}

/// Continues as the first process of a new pid namespace in a new user namespace. Its parent prints `child PID`.
fn enter_namespaces() {
    unsafe {
        if libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) != 0 {
            println!("bad: skip: user namespaces are not permitted");
            libc::_exit(0);
        }
        let [reader, writer] = crate::blocking::pipe();
        let child = libc::fork();
        if child > 0 {
            println!("child {child}");
            libc::write(writer, [0_u8].as_ptr().cast(), 1);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            libc::_exit(0);
        }
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::read(reader, [0_u8].as_mut_ptr().cast(), 1);
    }
}
