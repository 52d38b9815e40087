//! Targets that try to be harmed or to escape, while calls are injected into them.
//!
//! `PAGEFOLD_ATTACKS` sets the number of injections into each kind of target.

use pagefold_linux::inject::{InjectError, Limits, inject};
use pagefold_testkit::injection::*;

/// Injections into each kind of target: by default what a minute allows.
fn injections() -> u32 {
    std::env::var("PAGEFOLD_ATTACKS").map_or(4_000, |text| text.parse().expect("PAGEFOLD_ATTACKS is a number"))
}

/// Injects into a hostile target, which must find nothing wrong. Returns how many injections made their call.
fn attack(kind: &str, limits: &Limits) -> u32 {
    let mut victim = match Victim::try_start(&["hostile", kind]) {
        Ok(victim) => victim,
        Err(reason) => panic!("{kind}: {reason}"),
    };
    let mut made = 0;
    for number in 0..injections() {
        let advice = if number % 2 == 0 { MERGEABLE } else { UNMERGEABLE };
        match inject(&victim.process, &victim.calls(advice, 1), limits) {
            Ok(report) => made += u32::from(report.results == [Ok(0)]),
            Err(InjectError::Vanished { .. } | InjectError::Zombie { .. }) => break,
            Err(_) => {}
        }
    }
    victim.send();
    victim.expect_ok(kind);
    made
}

#[test]
fn a_sibling_that_swaps_code_gains_no_call() {
    if can_inject() {
        attack("code-swap", &Limits::default());
    }
}

#[test]
fn denied_calls_always_raise_their_signal() {
    if can_inject() {
        attack("trapped-calls", &Limits::default());
    }
}

#[test]
fn breakpoints_always_raise_their_signal() {
    if can_inject() {
        attack("breakpoints", &Limits::default());
    }
}

#[test]
fn live_memory_below_a_stack_is_not_written() {
    if can_inject() {
        attack("local-stack", &Limits::default());
    }
}

#[test]
fn a_stop_that_takes_too_long_is_no_eintr() {
    if can_inject() {
        attack("epoll", &Limits { stop_ns: 1, ..Limits::default() });
    }
}
