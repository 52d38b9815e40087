//! Programs for the injection tests to work on. Each checks for itself that it noticed nothing.
//!
//! `victim MODE`, for `tests/inject.rs`, prints `ready ADDR LEN`, does what its mode says, and prints `ok` or
//! `bad: REASON`. Modes that block do so twice: the first time the call must end as if nothing had been (its timeout,
//! its event); before the second the victim prints `again`, and a real SIGUSR1 must end the call with a real EINTR and
//! one run of the handler.
//!
//! `victim torture MODE TRAIT...`, for `tests/torture.rs`, does the like again and again until it is told to end
//! (see `torture`). `victim worker` is the process that injects.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, clippy::unnecessary_wraps, clippy::cast_ptr_alignment)] // A test program: raw calls are what it is for.

mod blocking;
mod checks;
mod handlers;
mod hold;
mod kinds;
mod lease;
mod registers;
mod rounds;
mod rseq;
mod seccomp;
mod states;
mod torture;

use checks::{Memory, PAGES, count, handle, signals, signals_back};
use std::io::Read;

fn main() {
    let mode = std::env::args().nth(1).expect("a mode");
    match mode.as_str() {
        "worker" => pagefold_linux::inject::serve(),
        "worker-filtered" => {
            seccomp::filter(libc::SECCOMP_RET_ALLOW);
            pagefold_linux::inject::serve()
        }
        "lease" => return lease::main(std::path::Path::new(&std::env::args().nth(2).expect("a directory"))),
        "torture" => torture::main(),
        "registers" => return registers::main(&std::env::args().nth(2).expect("a kind")),
        _ => {}
    }
    let memory = Memory::new();
    handle(libc::SIGUSR1, count as *const () as usize, 0);
    handle(libc::SIGTRAP, count as *const () as usize, 0);
    handle(libc::SIGRTMIN(), count as *const () as usize, libc::SA_RESTART);
    let before = signals();
    println!("ready {:x} {}", memory.addr as u64, PAGES * 4096);
    let verdict = run(&mode).and_then(|()| memory.check()).and_then(|()| signals_back(&before));
    match verdict {
        Ok(()) => println!("ok"),
        Err(reason) => println!("bad: {reason}"),
    }
    // The test looks at this process until it says so.
    let _ = std::io::stdin().read(&mut [0]);
}

fn run(mode: &str) -> Result<(), String> {
    match mode {
        "busy" => states::busy(),
        "idle" => states::command().map(drop),
        "sleeper" => states::sleeper(),
        "stopped" => states::stopped(),
        "vfork" => states::vfork(),
        "big-write" => states::big_write(),
        "waitall" => states::waitall(),
        "threads" => states::threads(),
        "main-exit" => states::main_exit(),
        "queue" => states::queue(),
        "strict" => seccomp::strict(),
        "filter-kill" => seccomp::filtered(libc::SECCOMP_RET_KILL_PROCESS),
        "filter-errno" => seccomp::filtered(libc::SECCOMP_RET_ERRNO | 1),
        "filter-trap" => seccomp::filtered(libc::SECCOMP_RET_TRAP),
        "rseq" => rseq::rseq(),
        "churn" => states::churn(),
        "execs" => states::execs(),
        _ => blocking::blocking(mode),
    }
}
