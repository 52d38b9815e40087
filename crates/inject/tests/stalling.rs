//! Targets that try to stall us by making reads of their pages never return.

use pagefold_inject::{Call, InjectError, InjectionReport, Limits, inject, inject_thread};
use pagefold_procmem::process::Process;
use pagefold_testkit::injection::*;
use pagefold_testkit::{skip, status_field, wait_until};
use std::fs;
use std::time::{Duration, Instant};

/// Starts a victim that stalls. `None` where it can't; then we report why.
fn stalling(kind: &str) -> Option<Victim> {
    Victim::try_start(&["stalling", kind]).map_err(skip).ok()
}

/// How many threads of this process are attempts.
fn attempts() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter(|task| fs::read(task.as_ref().unwrap().path().join("comm")).is_ok_and(|comm| comm == b"inject\n"))
        .count()
}

/// The victim has executable memory of a file whose server never answers. We don't read its pages, as they aren't
/// mapped.
#[test]
fn code_that_cannot_be_read_delays_no_call() {
    if !can_inject() {
        return;
    }
    let Some(mut victim) = stalling("code") else { return };
    let began = Instant::now();
    for number in 0..20 {
        let advice = if number % 2 == 0 { MARK } else { UNMARK };
        let report = inject(&victim.process, &victim.calls(advice, 1), &Limits::default());
        assert_eq!(report.map(|report| report.results), Ok(vec![Ok(0)]));
    }
    // An attempt that we give up takes half a second.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    wait_until("no attempt is left", || attempts() == 0);
    victim.send();
    victim.expect_ok("code");
}

/// Attaching blocks while the target is in exec. We give up the attempt, its thread ends, and we don't soon try again.
#[test]
fn an_exec_that_does_not_end_keeps_no_thread() {
    if !can_inject() {
        return;
    }
    let Some(mut victim) = stalling("exec") else { return };
    let attempt = || inject(&victim.process, &victim.calls(MARK, 1), &Limits::default());
    // The exec begins a moment after the victim is ready.
    let mut given_up = Ok(InjectionReport::default());
    wait_until("an attempt is given up", || {
        given_up = attempt();
        given_up.is_err()
    });
    assert_eq!(given_up, Err(InjectError::TimedOut { pid: victim.pid(), what: "accept a tracer".into() }));
    wait_until("no attempt is left", || attempts() == 0);
    let began = Instant::now();
    assert_eq!(attempt(), given_up);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // Injecting into another process still works.
    let mut plain = Victim::start("idle");
    inject(&plain.process, &plain.calls(MARK, 1), &PATIENT).unwrap();
    plain.send();
    victim.send();
    victim.expect_ok("exec");
}

/// The main thread of the victim ends after we've asked it to stop, and others go on. The kernel doesn't tell us, but we
/// notice, and make the next call in another thread.
#[test]
fn a_main_thread_that_ends_instead_of_stopping_keeps_no_attempt() {
    if !can_inject() {
        return;
    }
    let Some(mut victim) = stalling("ending") else { return };
    victim.wait_blocked(libc::SYS_exit);
    let limits = Limits { stop_ns: 50_000_000, ..Limits::default() };
    let forced = inject_thread(&victim.process, victim.pid(), &victim.calls(MARK, 1), &limits);
    assert!(matches!(forced, Err(InjectError::TimedOut { .. })), "{forced:?}");
    assert!(attempts() > 0, "we wait for the thread to stop");
    victim.send();
    victim.wait_state(b'Z');
    wait_until("no attempt is left", || attempts() == 0);
    wait_until("the call is made", || victim.mark(MARK).is_ok_and(|report| report.results == [Ok(0)]));
    victim.send();
    victim.expect_ok("ending");
}

/// Once the call is over, a sibling of the stopped thread keeps the injector from reading the return frame. The
/// injector serves other targets, doesn't end, and releases the thread as soon as it can.
#[test]
fn a_frame_that_cannot_be_read_holds_its_own_thread_only() {
    if !can_inject() {
        return;
    }
    let Some(mut victim) = stalling("frame") else { return };
    let mut injector = injector("worker");
    let limits = Limits { stop_ns: 1_000_000_000, call_ns: 2_000_000_000, calls_per_stop: 1 };
    let wait = Call { nr: libc::SYS_poll, args: [0, 0, 1_000, 0, 0, 0] };
    let held = run_unchecked(&mut injector, &victim.process, &[wait], &limits);
    assert_eq!(held, Err(InjectError::Held { pid: victim.pid() }));
    let mut plain = Victim::start("idle");
    run_unchecked(&mut injector, &plain.process, &plain.calls(MARK, 1), &PATIENT).unwrap();
    plain.send();
    let worker = Process::open(i32::try_from(injector.pid()).unwrap()).unwrap();
    drop(injector);
    assert!(worker.is_alive() && victim.is_traced());
    victim.send();
    wait_until("the thread is released", || !worker.is_alive());
    victim.finish("frame");
}

/// The victim has as many mappings as the kernel allows, with long names. We list them in a buffer of fixed size.
#[test]
fn very_many_mappings_take_the_injector_little_memory() {
    if !can_inject() {
        return;
    }
    let Some(mut victim) = stalling("mappings") else { return };
    let mut injector = injector("worker");
    let peak = |injector: &pagefold_inject::Injector| peak_kib(injector.pid().into());
    let mut plain = Victim::start("idle");
    run_unchecked(&mut injector, &plain.process, &plain.calls(MARK, 1), &PATIENT).unwrap();
    plain.send();
    let before = peak(&injector);
    for number in 0..6 {
        let advice = if number % 2 == 0 { MARK } else { UNMARK };
        // The kernel prints 130 MB of names for us, but only once. That takes a second of CPU time.
        wait_until("the call is made", || {
            let report = run_unchecked(&mut injector, &victim.process, &victim.calls(advice, 1), &Limits::default());
            report.is_ok_and(|report| report.results == [Ok(0)])
        });
    }
    let more = peak(&injector) - before;
    println!("the injector: {before} KiB, and {more} KiB more beside 65,400 mappings");
    assert!(more <= 32 << 10, "{more} KiB");
    victim.send();
    victim.expect_ok("mappings");
}

/// The most memory that a process has had, KiB.
fn peak_kib(pid: i64) -> u64 {
    let value = status_field(&format!("/proc/{pid}"), "VmHWM").unwrap();
    value.trim_end_matches(" kB").parse().unwrap()
}
