//! Processes for the injection tests. Each checks that it doesn't notice the injection.
//!
//! `victim MODE`, for pagefold-inject's `tests/inject.rs`, prints `ready ADDR LEN`, runs its mode, and prints `ok` or
//! `bad: REASON`.
//!
//! | command | for |
//! | --- | --- |
//! | `victim stalling KIND` | `tests/stalling.rs`: stalls its readers, see `stalling` |
//! | `victim hostile KIND` | `tests/attack.rs`: tries to be harmed, see `hostile` |
//! | `victim torture MODE TRAIT...` | `tests/torture.rs`: repeats its mode until a byte is sent, see `torture` |
//! | `victim registers KIND` | `tests/tracer_death.rs`: compares all registers, see `registers` |
//! | `victim worker`, `victim worker-filtered` | the process that injects, without and with a seccomp filter |
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::unnecessary_wraps,
    clippy::cast_ptr_alignment,
    reason = "raw system calls are what this program is for; their arguments live in leaked or static memory"
)]

mod blocking;
mod checks;
mod handlers;
mod hold;
mod hostile;
mod kinds;
mod registers;
mod rounds;
mod rseq;
mod seccomp;
mod stalling;
mod states;
mod system;
mod torture;

use checks::{Memory, count, handle, report, signals, signals_back};
use pagefold_testkit::injection::inject_as_asked;
use std::io::Read;

fn main() {
    let mode = std::env::args().nth(1).expect("a mode");
    let kind = std::env::args().nth(2).unwrap_or_default();
    match mode.as_str() {
        "worker" => pagefold_inject::serve(|_| true, inject_as_asked),
        "worker-filtered" => {
            seccomp::filter(libc::SYS_madvise, libc::SECCOMP_RET_ALLOW);
            pagefold_inject::serve(|_| true, inject_as_asked)
        }
        "hostile" => return hostile::main(&kind),
        "stalling" => return stalling::main(&kind),
        "torture" => torture::main(),
        "registers" => return registers::main(&kind),
        _ => {}
    }
    let memory = Memory::new();
    handle(libc::SIGUSR1, count as *const () as usize, 0);
    handle(libc::SIGTRAP, count as *const () as usize, 0);
    let before = signals();
    memory.announce();
    report(run(&mode).and_then(|()| memory.check()).and_then(|()| signals_back(&before)));
    // The test inspects this process until it sends a byte.
    let _ = std::io::stdin().read(&mut [0]);
}

fn run(mode: &str) -> Result<(), String> {
    match mode {
        "idle" => states::command().map(drop),
        "stopped" => states::stopped(),
        "vfork" => states::vfork(800_000),
        "big-write" => states::big_write(),
        "strict" => seccomp::strict(),
        "forks" => states::forks(),
        "never-sleeping" => states::never_sleeping(),
        "moving" => states::moving(),
        _ => Err(format!("no such mode: {mode}")),
    }
}
