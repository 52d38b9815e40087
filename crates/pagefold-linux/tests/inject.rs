//! Injection into real programs in every state that matters. The victims check for themselves that they noticed
//! nothing (`examples/victim`); here it is checked that the calls took effect.
//!
//! Nothing is merged: marking does nothing while ksmd does not run, and if it runs it does no harm.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)] // Raw calls set the victims' stage.

mod inject_support;

use inject_support::*;
use pagefold_linux::inject::{Call, Errno, InjectError, Injector, Limits, Report, held, inject, inject_thread};
use pagefold_linux::proc::process::Process;
use std::process::Command;
use std::time::{Duration, Instant};

// ---- blocked in a call --------------------------------------------------------------------------------------------

fn blocked(mode: &str) {
    let mut victim = Victim::start(mode);
    let line = victim.line();
    if let Some(why) = line.strip_prefix("bad: skip: ") {
        return skip(&format!("{mode}: {why}"));
    }
    let nr: i64 = line.strip_prefix("blocking ").expect(&line).parse().unwrap();
    victim.wait_blocked(nr);
    victim.mark_often(4);
    let line = victim.line();
    if mode == "inotify" {
        assert_eq!(line, "ok", "{mode}");
        return;
    }
    assert_eq!(line, "again", "{mode}");
    victim.wait_blocked(nr);
    victim.mark_often(3);
    victim.wait_blocked(nr);
    // The signal, with an injection on its heels.
    victim.kill(libc::SIGUSR1);
    victim.mark(MERGEABLE).unwrap();
    victim.expect_ok(mode);
    assert!(victim.is_marked());
}

#[test]
fn blocked_threads_notice_nothing_and_real_signals_still_interrupt_them() {
    if !permitted() {
        return;
    }
    let modes = [
        "nanosleep",
        "futex",
        "poll",
        "ppoll",
        "ppoll-mask",
        "select",
        "pselect",
        "read-pipe",
        "wait4",
        "inotify",
        "msgrcv",
        "epoll",
        "epoll-pwait",
        "sigtimedwait",
        "semtimedop",
        "io-getevents",
        "recv-timeout",
        "io-uring",
    ];
    std::thread::scope(|scope| {
        for mode in modes {
            std::thread::Builder::new().name(mode.into()).spawn_scoped(scope, move || blocked(mode)).unwrap();
        }
    });
    assert_eq!(held(), 0);
}

// ---- other states -------------------------------------------------------------------------------------------------

#[test]
fn computing_threads_notice_nothing() {
    if !permitted() {
        return;
    }
    for mode in ["busy", "threads"] {
        let mut victim = Victim::start(mode);
        victim.mark_often(15);
        victim.expect_ok(mode);
    }
}

#[test]
fn restartable_sequences_stay_atomic() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("rseq");
    let mut injected = 0;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1200) {
        match victim.mark(MERGEABLE) {
            Ok(_) => injected += 1,
            Err(InjectError::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    let line = victim.line();
    if line.starts_with("bad: skip") {
        return skip(&line);
    }
    println!("{injected} injections, {line}");
    assert!(injected > 50);
    assert!(!line.starts_with("aborted 0 "), "no sequence was ever interrupted: {line}");
    victim.expect_ok("rseq");
}

#[test]
fn a_stopped_process_stays_stopped() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("stopped");
    victim.wait_state(b'T');
    victim.mark_often(3);
    victim.wait_state(b'T');
    victim.kill(libc::SIGCONT);
    victim.expect_ok("stopped");
    // Stopped while it blocks, and continued in the middle of it.
    let mut victim = Victim::start("idle");
    for round in 0..20 {
        victim.kill(if round % 2 == 0 { libc::SIGSTOP } else { libc::SIGCONT });
        assert_eq!(victim.mark(MERGEABLE).unwrap().results, [Ok(0)]);
    }
    victim.kill(libc::SIGSTOP);
    victim.wait_state(b'T');
    victim.mark_often(1);
    pause_ms(5);
    victim.wait_state(b'T');
    victim.kill(libc::SIGCONT);
    victim.send();
    victim.expect_ok("idle");
}

#[test]
fn threads_that_would_notice_are_not_stopped() {
    if !permitted() {
        return;
    }
    let mut writer = Victim::start("big-write");
    writer.wait_blocked(libc::SYS_write);
    assert!(matches!(writer.mark(MERGEABLE), Err(InjectError::NoSafeThread { .. })));
    let mut parent = Victim::start("vfork");
    parent.wait_state(b'D');
    assert!(matches!(parent.mark(MERGEABLE), Err(InjectError::NoSafeThread { .. })));
    // Even told to, it gives up in time, and nothing stays attached.
    let begun = Instant::now();
    let limits = Limits { stop_ns: 50_000_000, ..Limits::default() };
    let forced = inject_thread(&parent.process, parent.pid(), &parent.calls(MERGEABLE), &limits);
    assert!(matches!(forced, Err(InjectError::TimedOut { .. })), "{forced:?}");
    assert!(begun.elapsed() < Duration::from_millis(500));
    wait_until("it is let go", || tracer(parent.pid()) == 0);
    writer.expect_ok("big-write");
    parent.expect_ok("vfork");

    let mut receiver = Victim::start("waitall");
    receiver.wait_blocked(libc::SYS_recvfrom);
    receiver.mark_often(5);
    receiver.expect_ok("waitall");
}

fn tracer(pid: i32) -> i32 {
    status_field(&format!("/proc/{pid}"), "TracerPid").unwrap().parse().unwrap()
}

#[test]
fn a_process_without_its_main_thread_can_be_marked() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("main-exit");
    victim.wait_state(b'Z');
    wait_until("the other thread is there", || victim.tids().len() == 2);
    victim.mark_often(3);
    victim.send();
    victim.expect_ok("main-exit");
}

#[test]
fn no_signal_is_lost_or_doubled() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("queue");
    let mut sent = 0_u32;
    let pid = victim.pid();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut sent = 0_u32;
            while begun.elapsed() < Duration::from_millis(900) {
                let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
                // EAGAIN: the queue is full.
                sent += u32::from(unsafe { libc::sigqueue(pid, libc::SIGRTMIN(), value) } == 0);
                std::thread::sleep(Duration::from_micros(20));
            }
            sent
        });
        while !sender.is_finished() {
            match victim.mark(MERGEABLE) {
                Ok(report) => assert_eq!(report.results, [Ok(0)]),
                // A signal waits nearly all the time.
                Err(error) => assert!(error.is_passing(), "{error}"),
            }
        }
        sent += sender.join().unwrap();
    });
    assert!(sent > 100);
    victim.send();
    assert_eq!(victim.line(), format!("counted {sent}"));
    victim.expect_ok("queue");
}

#[test]
fn seccomp_filters_sleep_and_wake_again() {
    if !permitted() {
        return;
    }
    for (mode, dies) in [("strict", true), ("filter-kill", true), ("filter-errno", false), ("filter-trap", false)] {
        let mut victim = Victim::start(mode);
        if mode != "strict" {
            let line = victim.line();
            if line != "filtered" {
                skip(&line);
                continue;
            }
        }
        victim.wait_blocked(libc::SYS_read);
        match victim.mark(MERGEABLE) {
            Err(error @ InjectError::Filtered { .. }) => {
                skip(&error.to_string());
                continue;
            }
            other => assert_eq!(other.unwrap().results, [Ok(0)]),
        }
        victim.mark_often(2);
        victim.send();
        victim.expect_ok(mode);
        if dies {
            // Its own madvise runs into the filter.
            use std::os::unix::process::ExitStatusExt;
            let signal = victim.child.wait().unwrap().signal();
            assert_eq!(signal, Some(if mode == "strict" { libc::SIGKILL } else { libc::SIGSYS }), "{mode}");
        }
    }
}

#[test]
fn a_traced_process_is_left_to_its_tracer() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("idle");
    assert_eq!(unsafe { libc::ptrace(0x4206, victim.pid(), 0, 0) }, 0);
    let own = i32::try_from(std::process::id()).unwrap();
    match victim.mark(MERGEABLE) {
        Err(InjectError::Traced { pid, by }) => {
            assert_eq!(pid, victim.pid());
            assert_eq!(by, own);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(unsafe { libc::ptrace(0x4207, victim.pid(), 0, 0) }, 0);
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(victim.pid(), &raw mut status, libc::__WALL) }, victim.pid());
    assert!(matches!(victim.mark(MERGEABLE), Err(InjectError::Traced { .. })));
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, victim.pid(), 0, 0) }, 0);
    victim.mark_often(1);
    victim.send();
    victim.expect_ok("idle");
}

#[test]
fn what_cannot_be_injected_is_told_apart() {
    let calls = [Call::madvise(0, 0, MERGEABLE)];
    let limits = Limits::default();
    // PID 2 is kthreadd, unless this is a pid namespace.
    match Process::open(2) {
        Ok(thread) if thread.stat().unwrap().kernel_thread => {
            assert_eq!(inject(&thread, &calls, &limits), Err(InjectError::KernelThread { pid: 2 }));
        }
        _ => skip("kernel threads are not visible here"),
    }
    let mut victim = Victim::start("idle");
    victim.kill(libc::SIGKILL);
    victim.wait_state(b'Z');
    assert_eq!(victim.mark(MERGEABLE), Err(InjectError::Zombie { pid: victim.pid() }));
    victim.child.wait().unwrap();
    assert_eq!(victim.mark(MERGEABLE), Err(InjectError::Vanished { pid: victim.pid() }));
    // Nothing to do is done without a stop.
    assert_eq!(inject(&Process::open(1).unwrap(), &[], &limits), Ok(Report::default()));
}

#[test]
fn thirty_two_bit_programs_are_refused_untouched() {
    if !permitted() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut child = match start_compat(dir.path()) {
        Ok(child) => child,
        Err(why) => return skip(&why),
    };
    let pid = i32::try_from(child.id()).unwrap();
    pause_ms(20);
    let process = Process::open(pid).unwrap();
    let refused = inject(&process, &[Call::madvise(0, 0, MERGEABLE)], &Limits::default());
    let state = process.stat().unwrap().state;
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(refused, Err(InjectError::Compat { pid }));
    assert_eq!(state, b'S');
}

// ---- frozen -------------------------------------------------------------------------------------------------------

fn frozen(version: u32) {
    if !permitted() {
        return;
    }
    let Some(freezer) = Freezer::new(version) else { return skip(&format!("no freezer of version {version}")) };
    let mut victim = Victim::start("idle");
    freezer.add(victim.pid());
    freezer.freeze(true);
    wait_until("frozen", || freezer.is_frozen());
    let begun = Instant::now();
    let limits = Limits { stop_ns: 60_000_000, call_ns: 60_000_000, calls_per_stop: 8 };
    let calls = victim.calls(MERGEABLE);
    assert_eq!(inject(&victim.process, &calls, &limits), Err(InjectError::Frozen { pid: victim.pid() }));
    // Frozen a moment after it was looked at: found out by the limits.
    let forced = inject_thread(&victim.process, victim.pid(), &calls, &limits);
    assert!(matches!(forced, Err(InjectError::Frozen { .. })), "{forced:?}");
    assert!(begun.elapsed() < Duration::from_secs(2));
    wait_until("it is let go", || tracer(victim.pid()) == 0);
    assert!(!victim.is_marked() && freezer.is_frozen());
    freezer.freeze(false);
    wait_until("thawed", || !freezer.is_frozen());
    victim.mark_often(2);
    // Freezing and thawing all the while.
    std::thread::scope(|scope| {
        let churn = scope.spawn(|| {
            for round in 0..60 {
                freezer.freeze(round % 2 == 0);
                pause_ms(3);
            }
            freezer.freeze(false);
        });
        while !churn.is_finished() {
            match inject(&victim.process, &calls, &Limits { stop_ns: 10_000_000, ..Limits::default() }) {
                Ok(_) => {}
                Err(error) if error.is_passing() => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    wait_until("nothing is held", || held() == 0 && tracer(victim.pid()) == 0);
    victim.send();
    victim.expect_ok("idle");
    drop(victim);
}

#[test]
fn frozen_by_version_1() {
    frozen(1);
}

#[test]
fn frozen_by_version_2() {
    frozen(2);
}

// ---- dying and changing ---------------------------------------------------------------------------------------------

/// Numbers that look random and are the same in each run.
fn scrambled(seed: u64) -> u64 {
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33
}

#[test]
fn death_at_any_moment_costs_one_entry() {
    if !permitted() {
        return;
    }
    let mut ran = 0;
    for round in 0..300_u64 {
        let victim = Victim::start(["sleeper", "busy", "threads"][usize::try_from(round % 3).unwrap()]);
        let pid = victim.pid();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(scrambled(round) % 4000));
            unsafe { libc::kill(pid, libc::SIGKILL) };
        });
        let begun = Instant::now();
        let calls = [victim.calls(MERGEABLE)[0], victim.calls(UNMERGEABLE)[0]].repeat(8);
        let error = loop {
            match inject(&victim.process, &calls, &Limits::default()) {
                Ok(report) => {
                    assert!(report.results.iter().all(|&result| result == Ok(0)));
                    ran += 1;
                }
                Err(error) => break error,
            }
        };
        assert!(
            matches!(
                error,
                InjectError::Vanished { .. }
                    | InjectError::Zombie { .. }
                    | InjectError::Busy { .. }
                    | InjectError::NoSafeThread { .. }
            ),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(3), "it hung after {error}");
        killer.join().unwrap();
    }
    println!("{ran} batches ran before their targets died");
    assert_eq!(held(), 0);
}

#[test]
fn threads_forks_and_execs_go_on() {
    if !permitted() {
        return;
    }
    for mode in ["churn", "execs"] {
        let mut victim = Victim::start(mode);
        let mut injected = 0;
        let until = Instant::now() + Duration::from_millis(900);
        while Instant::now() < until {
            match victim.mark(MERGEABLE) {
                // After an exec there is other memory at the address, or none.
                Ok(report) => {
                    injected += 1;
                    let result = report.results[0];
                    assert!(matches!(result, Ok(0) | Err(Errno(libc::ENOMEM | libc::EINVAL))), "{result:?}");
                }
                Err(error) => assert!(error.is_passing(), "{error}"),
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        println!("{mode}: {injected} injections");
        assert!(injected > 20);
        let last = loop {
            let line = victim.line();
            if !line.starts_with("ready") {
                break line;
            }
        };
        assert_eq!(last, "ok", "{mode}");
    }
}

// ---- batches --------------------------------------------------------------------------------------------------------

#[test]
fn a_batch_answers_call_by_call() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("idle");
    let mark = victim.calls(MERGEABLE)[0];
    let mut calls = vec![mark; 10];
    calls[4] = Call::madvise(victim.addr + 1, 4096, MERGEABLE);
    calls[6] = Call::madvise(1 << 46, 4096, MERGEABLE);
    calls[9] = Call { nr: libc::SYS_getpid, args: [0; 6] };
    let limits = Limits { calls_per_stop: 4, ..Limits::default() };
    let report = inject(&victim.process, &calls, &limits).unwrap();
    let mut expected = vec![Ok(0); 10];
    expected[4] = Err(Errno(libc::EINVAL));
    expected[6] = Err(Errno(libc::ENOMEM));
    expected[9] = Ok(u64::try_from(victim.pid()).unwrap());
    assert_eq!(report.results, expected);
    assert_eq!(report.stops, 3);
    assert!(report.total_stop_ns >= report.longest_stop_ns);
    // PR_SET_MEMORY_MERGE and PR_GET_MEMORY_MERGE, Linux 6.4.
    let merge =
        [Call::prctl(67, [1, 0, 0, 0]), Call::prctl(68, [0; 4]), Call::prctl(67, [0; 4]), Call::prctl(68, [0; 4])];
    let report = inject(&victim.process, &merge, &Limits::default()).unwrap();
    if report.results[0] == Err(Errno(libc::EINVAL)) {
        skip("no PR_SET_MEMORY_MERGE on this kernel");
    } else {
        assert_eq!(report.results, [Ok(0), Ok(1), Ok(0), Ok(0)]);
    }
    victim.send();
    victim.expect_ok("idle");
}

#[test]
fn a_call_that_does_not_end_is_broken_off() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("idle");
    let limits = Limits { call_ns: 30_000_000, ..Limits::default() };
    let begun = Instant::now();
    let endless = inject(&victim.process, &[Call { nr: libc::SYS_pause, args: [0; 6] }], &limits);
    assert!(matches!(endless, Err(InjectError::TimedOut { .. })), "{endless:?}");
    assert!(begun.elapsed() < Duration::from_millis(500));
    victim.mark_often(1);
    victim.send();
    victim.expect_ok("idle");
}

// ---- the worker -----------------------------------------------------------------------------------------------------

fn worker(mode: &str) -> Injector {
    Injector::spawn(Command::new(example()).arg(mode)).unwrap()
}

#[test]
fn a_worker_injects_and_outlives_all_but_its_owner() {
    if !permitted() {
        return;
    }
    let mut injector = worker("worker");
    let mut victim = Victim::start("nanosleep");
    victim.line();
    victim.wait_blocked(libc::SYS_nanosleep);
    let limits = Limits::default();
    let pid = i32::try_from(injector.pid()).unwrap();
    for (advice, marked) in [(MERGEABLE, true), (UNMERGEABLE, false)] {
        let report = injector.run(&victim.process, &victim.calls(advice), &limits).unwrap();
        assert_eq!((report.results, victim.is_marked()), (vec![Ok(0)], marked));
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGUSR1] {
            unsafe { libc::kill(pid, signal) };
        }
    }
    assert!(injector.cpu_ns() > 0);
    assert_eq!(unsafe { libc::getsid(pid) }, pid);
    let gone = Victim::start("idle");
    gone.kill(libc::SIGKILL);
    gone.wait_state(b'Z');
    let zombie = injector.run(&gone.process, &gone.calls(MERGEABLE), &limits);
    assert_eq!(zombie, Err(InjectError::Zombie { pid: gone.pid() }));
    // The end of the connection ends it.
    drop(injector);
    assert!(matches!(Process::open(pid), Err(pagefold_linux::proc::process::ReadError::Vanished { .. })));
    assert_eq!(victim.line(), "again");
}

#[test]
fn a_worker_killed_while_idle_harms_nobody() {
    if !permitted() {
        return;
    }
    let mut injector = worker("worker");
    let mut victim = Victim::start("idle");
    injector.run(&victim.process, &victim.calls(MERGEABLE), &Limits::default()).unwrap();
    unsafe { libc::kill(i32::try_from(injector.pid()).unwrap(), libc::SIGKILL) };
    let after = injector.run(&victim.process, &victim.calls(MERGEABLE), &Limits::default());
    assert_eq!(after, Err(InjectError::WorkerGone));
    assert!(victim.is_marked());
    victim.send();
    victim.expect_ok("idle");
}

#[test]
fn a_tracer_under_a_filter_leaves_filtered_targets_alone() {
    if !permitted() {
        return;
    }
    let mut injector = worker("worker-filtered");
    let mut free = Victim::start("idle");
    let mut filtered = Victim::start("filter-errno");
    if filtered.line() != "filtered" {
        return skip("no seccomp filters");
    }
    let limits = Limits::default();
    assert_eq!(injector.run(&free.process, &free.calls(MERGEABLE), &limits).unwrap().results, [Ok(0)]);
    let refused = injector.run(&filtered.process, &filtered.calls(MERGEABLE), &limits);
    assert_eq!(refused, Err(InjectError::Filtered { pid: filtered.pid() }));
    for victim in [&mut free, &mut filtered] {
        victim.send();
        victim.expect_ok("under a filter");
    }
}

// ---- measurement ----------------------------------------------------------------------------------------------------

/// `cargo test --release -p pagefold-linux --test inject -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn measure_stops() {
    let victim = Victim::start("sleeper");
    let mark = victim.calls(MERGEABLE)[0];
    for (calls, rounds) in [(1, 2000), (30, 500)] {
        let mut stops: Vec<u64> = Vec::new();
        let begun = Instant::now();
        for _ in 0..rounds {
            let report = inject(&victim.process, &vec![mark; calls], &Limits::default()).unwrap();
            assert_eq!(report.stops, 1);
            stops.push(report.longest_stop_ns);
        }
        let each_us = begun.elapsed().as_micros() / rounds;
        stops.sort_unstable();
        let at = |permille: usize| stops[(stops.len() - 1) * permille / 1000] / 1000;
        println!(
            "{calls} calls: stop median {} us, p90 {}, p99 {}, max {}; {each_us} us in all",
            at(500),
            at(900),
            at(990),
            at(1000)
        );
    }
}
