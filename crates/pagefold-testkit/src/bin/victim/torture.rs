//! Victims that go on until they are told to end.
//!
//! `victim torture MODE TRAIT...` prints `ready ADDR LEN PID` (its pid as it sees it), then does the same thing again
//! and again, checking after each round that nothing has changed that it did not change itself. A byte on standard
//! input ends it: it prints `ok rounds=N runs=N eintr=N own=N/N/N short=N`, or, at once, `bad: REASON`, and waits for the end
//! of its input. Traits: `filter-ACTION`, `trap-blocked`, `trap-ignored`, `namespaces`.

use crate::checks::{Memory, PAGES, call, signals, signals_back};
use crate::handlers::{self, FOR_GOOD, INTERRUPTED, RUNS, bit};
use crate::{hold, kinds, rounds, seccomp};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Rounds made.
pub static ROUNDS: AtomicU64 = AtomicU64::new(0);
/// EINTRs answered.
static EINTRS: AtomicU64 = AtomicU64::new(0);
/// Handlers run for signals that the victim sent itself.
pub static RAISED: AtomicU64 = AtomicU64::new(0);

/// Nothing is permitted but read, write, exit and the return from handlers.
pub static STRICT: AtomicBool = AtomicBool::new(false);

/// Rounds between looks at all memory and all signals.
const ROUNDS_PER_LOOK: u64 = 16;

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
    let verdict = endure(mode, traits, memory);
    if !STRICT.load(Relaxed) {
        handlers::drain();
    }
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
    leave()
}

/// Ends with the input: until then the test looks at this process.
pub fn leave() -> ! {
    unsafe {
        while libc::read(0, [0_u8; 64].as_mut_ptr().cast(), 64) != 0 {}
        // The others, if there are any, go too; strict mode permits only the end of the thread.
        libc::syscall(if STRICT.load(Relaxed) { libc::SYS_exit } else { libc::SYS_exit_group }, 0);
    }
    unreachable!()
}

fn has(traits: &[String], name: &str) -> bool {
    traits.iter().any(|word| word == name)
}

/// Prints without allocating or anything but write(2), for those who may do no more.
pub fn say(text: std::fmt::Arguments) {
    let mut line = [0_u8; 1024];
    let mut rest = &mut line[..];
    let _ = rest.write_fmt(text);
    let left = rest.len();
    let length = line.len() - left;
    unsafe { libc::write(1, line.as_ptr().cast(), length) };
}

fn ready(memory: Memory) {
    let pid = unsafe { libc::getpid() };
    say(format_args!("ready {:x} {} {pid}\n", memory.addr.addr(), PAGES * 4096));
}

fn endure(mode: &str, traits: &[String], memory: Memory) -> Result<(), String> {
    if let Some(rounds) = rounds::of(mode, traits, memory)? {
        return rounds;
    }
    let kind = kinds::kind(mode)?;
    let action = traits.iter().find_map(|word| word.strip_prefix("filter-"));
    if let Some(action) = action {
        seccomp::install(action)?;
    }
    ready(memory);
    let verdict = block_again_and_again(kind, memory);
    verdict?;
    seccomp::still_there(action.unwrap_or_default())
}

/// The laws of interruption. Every EINTR has a handler that found the thread on its way out of the call with that
/// answer (or about to get it), and no handler finds it so without the program seeing the EINTR: this holds whenever the signal
/// came, and for any number of them. Where the kernel restarts a call after handlers with SA_RESTART, one of them is
/// without. Where the call alone lets the signals through, each handler means an EINTR.
fn block_again_and_again(mut kind: kinds::Kind, memory: Memory) -> Result<(), String> {
    let before = signals();
    let counts = || [&RUNS, &INTERRUPTED, &FOR_GOOD].map(|count| count.load(Relaxed));
    let verdict = until_told(memory, &before, || {
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

/// Makes rounds until a byte comes, looking at everything now and then.
pub fn until_told(
    memory: Memory,
    before: &crate::checks::Signals,
    mut round: impl FnMut() -> Result<(), String>,
) -> Result<(), String> {
    loop {
        let told = is_told();
        round()?;
        handlers::complaint()?;
        if ROUNDS.fetch_add(1, Relaxed) % ROUNDS_PER_LOOK == 0 || told {
            memory.check()?;
            signals_back(before)?;
        }
        if told {
            return Ok(());
        }
    }
}

/// Announces itself and makes rounds.
pub fn rounds(memory: Memory, round: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    ready(memory);
    until_told(memory, &signals(), round)
}

/// Whether standard input has something to say.
pub fn is_told() -> bool {
    let mut polled = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&raw mut polled, 1, 0) > 0 }
}

/// Gives the segment that nobody uses a base of its own, to be looked at.
fn set_gs() {
    const ARCH_SET_GS: i32 = 0x1001;
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, 0x1234_5678_9000_u64) };
}

/// Goes on as the first process of a new pid namespace in a new user namespace. Its parent prints `child PID`.
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
