//! Injection into real processes in every state that matters.
//!
//! The victims (`victim` of pagefold-testkit) check that they notice nothing; the tests check that the calls took
//! effect. We merge nothing: the memory of each victim is unique.

use pagefold_engine::units::Vpn;
use pagefold_inject::unmerge::{UnmergeError, Unmerged, unmark_in_steps, unmerge};
use pagefold_inject::{
    Batch, Call, Errno, InjectError, InjectionReport, Limits, ProgramId, held, inject, inject_into, inject_thread,
};
use pagefold_procmem::Roots;
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::maps::read_marked;
use pagefold_procmem::memory::{PageReader, PageView, ReadHow};
use pagefold_procmem::process::Process;
use pagefold_testkit::injection::*;
use pagefold_testkit::{Freezer, Holder, send, skip, skip_unsupported, victim_binary, wait_until};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

// ---- other states -------------------------------------------------------------------------------------------------

#[test]
fn a_stopped_process_stays_stopped() {
    let Some(mut victim) = Victim::if_possible("stopped") else { return };
    victim.wait_state(b'T');
    victim.mark_repeatedly(3);
    victim.wait_state(b'T');
    victim.kill(libc::SIGCONT);
    victim.expect_ok("stopped");
    // We stop and continue the victim while it blocks in its call.
    let mut victim = Victim::start("idle");
    for round in 0..20 {
        victim.kill(if round % 2 == 0 { libc::SIGSTOP } else { libc::SIGCONT });
        assert_eq!(victim.mark(MARK).unwrap().results, [Ok(0)]);
    }
    victim.kill(libc::SIGSTOP);
    victim.wait_state(b'T');
    victim.mark_repeatedly(1);
    pause_ms(5);
    victim.wait_state(b'T');
    victim.kill(libc::SIGCONT);
    victim.finish("idle");
}

#[test]
fn a_thread_that_would_notice_a_stop_is_not_stopped() {
    if !can_inject() {
        return;
    }
    let mut writer = Victim::start("big-write");
    writer.wait_blocked(libc::SYS_write);
    assert!(matches!(writer.mark(MARK), Err(InjectError::NoSafeThread { .. })));
    let mut parent = Victim::start("vfork");
    parent.wait_state(b'D');
    assert!(matches!(parent.mark(MARK), Err(InjectError::NoSafeThread { .. })));
    // If we name this thread, the injection gives up within the limit, and detaches.
    let begun = Instant::now();
    let limits = Limits { stop_ns: 50_000_000, ..Limits::default() };
    let forced = inject_thread(&parent.process, parent.pid(), &parent.calls(MARK, 1), &limits);
    assert!(matches!(forced, Err(InjectError::TimedOut { .. })), "{forced:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "the limit is 50 ms");
    wait_until("the victim is detached", || !parent.is_traced());
    writer.expect_ok("big-write");
    parent.expect_ok("vfork");

    let mut receiver = Victim::try_start(&["torture", "waitall"]).unwrap();
    receiver.wait_blocked(libc::SYS_recvfrom);
    receiver.mark_repeatedly(5);
    receiver.finish("waitall");
}

#[test]
fn calls_that_never_sleep_do_not_fail() {
    let Some(mut victim) = Victim::if_possible("never-sleeping") else { return };
    for _ in 0..200 {
        victim.mark_repeatedly(1);
        pause_ms(1);
    }
    victim.send();
    println!("getrandom: {}", victim.line());
    victim.expect_ok("never-sleeping");
}

/// tests/torture.rs does the same with filters.
#[test]
fn strict_mode_is_suspended_and_restored() {
    if !can_inject() {
        return;
    }
    let mut victim = Victim::start("strict");
    victim.wait_blocked(libc::SYS_read);
    match victim.mark(MARK) {
        Err(error @ InjectError::Filtered { .. }) => return skip(error),
        other => assert_eq!(other.unwrap().results, [Ok(0)]),
    }
    victim.mark_repeatedly(2);
    victim.finish("strict");
    // At its end the victim calls madvise itself, and strict mode kills it.
    assert_eq!(victim.program.child.0.wait().unwrap().signal(), Some(libc::SIGKILL));
}

#[test]
fn a_traced_process_is_refused() {
    let Some(mut victim) = Victim::if_possible("idle") else { return };
    // SAFETY: we pass no memory, and the target is a child of this thread.
    assert_eq!(unsafe { libc::ptrace(0x4206, victim.pid(), 0, 0) }, 0);
    let own = i32::try_from(std::process::id()).unwrap();
    match victim.mark(MARK) {
        Err(InjectError::Traced { pid, by }) => {
            assert_eq!(pid, victim.pid());
            assert_eq!(by, own);
        }
        other => panic!("{other:?}"),
    }
    // SAFETY: we pass no memory, and the target is a child of this thread.
    assert_eq!(unsafe { libc::ptrace(0x4207, victim.pid(), 0, 0) }, 0);
    let mut status = 0;
    // SAFETY: the kernel writes the status.
    assert_eq!(unsafe { libc::waitpid(victim.pid(), &raw mut status, libc::__WALL) }, victim.pid());
    assert!(matches!(victim.mark(MARK), Err(InjectError::Traced { .. })));
    // SAFETY: we pass no memory, and the target is a child of this thread.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, victim.pid(), 0, 0) }, 0);
    victim.mark_repeatedly(1);
    victim.finish("idle");
}

#[test]
fn each_process_that_cannot_be_injected_has_its_own_error() {
    let calls = [Call::madvise(0, 0, MARK)];
    let limits = Limits::default();
    // PID 2 is kthreadd, unless this is a pid namespace.
    match Process::open(2) {
        Ok(thread) if thread.stat().unwrap().kernel_thread => {
            assert_eq!(inject(&thread, &calls, &limits), Err(InjectError::KernelThread { pid: 2 }));
        }
        _ => skip_unsupported("PID 2 is no kernel thread: this is a PID namespace"),
    }
    let mut victim = Victim::start("idle");
    victim.kill(libc::SIGKILL);
    victim.wait_state(b'Z');
    assert_eq!(victim.mark(MARK), Err(InjectError::Zombie { pid: victim.pid() }));
    victim.program.child.0.wait().unwrap();
    assert_eq!(victim.mark(MARK), Err(InjectError::Vanished { pid: victim.pid() }));
    // An empty batch doesn't stop its target.
    assert_eq!(inject(&Process::open(1).unwrap(), &[], &limits), Ok(InjectionReport::default()));
}

/// `/proc/PID` shows a zombie after the main thread's end, but the memory is still there.
#[test]
fn a_program_without_its_main_thread_is_read_and_unmerged() {
    if !can_inject() {
        return;
    }
    let mut victim = Victim::try_start(&["torture", "main-exit"]).unwrap();
    victim.wait_state(b'Z');
    assert_eq!(victim.mark(MARK).unwrap().results, [Ok(0)]);
    let first = Vpn::of_address(victim.addr);
    let mut read = 0;
    let visit = |view: PageView<'_>| read += usize::from(view.bytes.is_some());
    PageReader::new().read_runs(&victim.process, &[(first, 8)], ReadHow::default(), visit).unwrap();
    assert_eq!(read, 8);
    let injector = injector("worker");
    unmerge(&victim.process, &injector.handle(), &Roots::default(), &mut Unmerged::default()).unwrap();
    victim.finish("main-exit");
}

/// A process that has used up its memory limits is unmarked nevertheless, as long as nothing in it is merged.
#[test]
fn a_process_without_merged_memory_needs_no_room() {
    let Some(mut victim) = Victim::if_possible("idle") else { return };
    if !shows_merged() {
        return skip_unsupported("merged pages are not shown");
    }
    let call = Call::madvise(victim.addr, victim.len, libc::MADV_MERGEABLE);
    inject(&victim.process, &[call], &PATIENT).unwrap();
    assert_eq!(read_marked(&victim.process).unwrap().len(), 1);
    let full = tempfile::tempdir().unwrap();
    std::fs::write(full.path().join("meminfo"), "MemAvailable: 0 kB\n").unwrap();
    let roots = Roots { proc: full.path().to_owned(), ..Roots::default() };
    let injector = injector("worker");
    unmerge(&victim.process, &injector.handle(), &roots, &mut Unmerged::default()).unwrap();
    assert!(read_marked(&victim.process).unwrap().is_empty());
    victim.finish("idle");
}

#[test]
fn a_32_bit_program_is_refused_untouched() {
    if !can_inject() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let child = match start_compat(dir.path(), 0) {
        Ok(child) => child,
        Err(why) => return skip_unsupported(why),
    };
    let pid = child.pid();
    let process = Process::open(pid).unwrap();
    wait_until("it is blocked in pause(2)", || process.stat().is_ok_and(|stat| stat.state == b'S'));
    let calls = [Call::madvise(0, 0, MARK)];
    let refused = inject(&process, &calls, &Limits::default());
    let state = process.stat().unwrap().state;
    assert_eq!(refused, Err(InjectError::Compat { pid }));
    let program = ProgramId::of(&process).unwrap();
    let injector = injector("worker");
    let mut report = InjectionReport::default();
    let unmarked = unmark_in_steps(&process, &program, &injector.handle(), &Roots::default(), &calls, &mut report);
    assert!(matches!(unmarked, Err(UnmergeError::Bits32 { .. })), "{unmarked:?}");
    assert_eq!(state, b'S');
}

// ---- frozen -------------------------------------------------------------------------------------------------------

fn a_frozen_process_is_refused(version: u32) {
    if !can_inject() {
        return;
    }
    // We declare the victim before the freezer, so it's dropped after it: nobody can kill a frozen process.
    let mut victim = Victim::start("idle");
    let Some(freezer) = Freezer::create(version) else {
        return skip_unsupported(format!("no freezer of version {version} is mounted"));
    };
    freezer.add(victim.pid());
    freezer.freeze(true);
    wait_until("frozen", || freezer.is_frozen());
    let begun = Instant::now();
    let limits = Limits { stop_ns: 60_000_000, call_ns: 60_000_000, calls_per_stop: 8 };
    let calls = victim.calls(MARK, 1);
    assert_eq!(inject(&victim.process, &calls, &limits), Err(InjectError::Frozen { pid: victim.pid() }));
    // As if the process had been frozen right after we checked that it isn't: a time limit ends the attempt.
    let forced = inject_thread(&victim.process, victim.pid(), &calls, &limits);
    assert!(matches!(forced, Err(InjectError::Frozen { .. })), "{forced:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "the limits are 60 ms");
    assert!(!victim.is_marked() && freezer.is_frozen());
    freezer.freeze(false);
    wait_until("thawed", || !freezer.is_frozen());
    // The injector is still attached: if it had let the frozen thread go, the thread's call would have been cut short.
    wait_until("the victim is detached", || !victim.is_traced());
    victim.mark_repeatedly(2);
    wait_until("the victim is released", || held() == 0 && !victim.is_traced());
    victim.finish("idle");
}

#[test]
fn a_frozen_process_is_refused_v1() {
    a_frozen_process_is_refused(1);
}

#[test]
fn a_frozen_process_is_refused_v2() {
    a_frozen_process_is_refused(2);
}

// ---- batches --------------------------------------------------------------------------------------------------------

#[test]
fn a_batch_has_a_result_for_each_call() {
    let Some(mut victim) = Victim::if_possible("idle") else { return };
    let mark = victim.calls(MARK, 1)[0];
    let mut calls = vec![mark; 10];
    calls[4] = Call::madvise(victim.addr + 1, 4096, MARK);
    calls[6] = Call::madvise(1 << 46, 4096, MARK);
    calls[9] = Call { nr: libc::SYS_getpid, args: [0; 6] };
    let limits = Limits { calls_per_stop: 4, ..PATIENT };
    let report = inject(&victim.process, &calls, &limits).unwrap();
    let mut expected = vec![Ok(0); 10];
    expected[4] = Err(Errno(libc::EINVAL));
    expected[6] = Err(Errno(libc::ENOMEM));
    expected[9] = Ok(u64::try_from(victim.pid()).unwrap());
    assert_eq!(report.results, expected);
    // A stop counts even if the thread turns out to be busy and no call is made.
    assert!((3..=6).contains(&report.stops), "{}", report.stops);
    assert!(report.total_stop_ns >= report.longest_stop_ns);
    let (set, get) = (libc::PR_SET_THP_DISABLE, libc::PR_GET_THP_DISABLE);
    let huge_pages =
        [Call::prctl(set, [1, 0, 0, 0]), Call::prctl(get, [0; 4]), Call::prctl(set, [0; 4]), Call::prctl(get, [0; 4])];
    let report = inject(&victim.process, &huge_pages, &PATIENT).unwrap();
    assert_eq!(report.results, [Ok(0), Ok(1), Ok(0), Ok(0)]);
    victim.finish("idle");
}

#[test]
fn a_call_that_does_not_end_is_aborted() {
    let Some(mut victim) = Victim::if_possible("idle") else { return };
    let limits = Limits { call_ns: 30_000_000, ..Limits::default() };
    let begun = Instant::now();
    let endless = inject(&victim.process, &[Call { nr: libc::SYS_pause, args: [0; 6] }], &limits);
    assert!(matches!(endless, Err(InjectError::TimedOut { .. })), "{endless:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "the limit is 30 ms");
    victim.mark_repeatedly(1);
    victim.finish("idle");
}

/// A fork of 512 MiB holds the mmap lock for milliseconds, and our work in a stop waits for it.
#[test]
fn stops_are_short_beside_a_sibling_that_forks() {
    if !can_inject() {
        return;
    }
    let mut victim = Victim::start("forks");
    assert_eq!(victim.line(), "forking");
    let (mut stops, mut refused) = (Vec::new(), 0);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) && stops.len() < 400 {
        match victim.mark(MARK) {
            Ok(report) => stops.push(report.longest_stop_ns),
            Err(error) => {
                assert!(error.is_passing(), "{error}");
                refused += 1;
            }
        }
        pause_ms(5);
    }
    stops.sort_unstable();
    let at = |permille: usize| stops[(stops.len() - 1) * permille / 1000] as f64 / 1e6;
    let [half, tenth, hundredth, most] = [500, 900, 990, 1000].map(at);
    let count = stops.len();
    println!("{count} stops, {refused} refused; ms: p50 {half:.3}, p90 {tenth:.3}, p99 {hundredth:.3}, max {most:.3}");
    assert!(count > 20 && half < 20.0 && most < 1000.0);
    victim.send();
    victim.expect_ok("forks");
}

/// An exec keeps pid and start time, but each program that the victim runs has its memory at another address. So a call
/// that we make in the wrong program fails.
#[test]
fn nothing_is_tried_on_a_program_that_replaced_the_judged_one() {
    if !can_inject() {
        return;
    }
    let mut without = 0;
    for checks in [false, true] {
        let mut victim = Victim::try_start(&["torture", "execs"]).unwrap();
        let (mut made, mut refused) = (0, 0);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) || made == 0 && begun.elapsed() < Duration::from_secs(60) {
            let Ok(judged) = ProgramId::of(&victim.process) else { continue };
            let Ok(maps) = victim.process.read_file("maps") else { continue };
            let maps = String::from_utf8(maps).unwrap();
            let Some(heap) = maps.lines().find(|line| line.ends_with("[heap]")) else { continue };
            let start = u64::from_str_radix(heap.split_once('-').unwrap().0, 16).unwrap();
            if !ProgramId::of(&victim.process).is_ok_and(|now| now == judged) {
                continue;
            }
            // We give the process a moment in which to call exec again.
            pause_ms(1);
            let calls = [Call::madvise(start, 4096, MARK)];
            let injected = if checks {
                let limits = &Limits::default();
                inject_into(Batch { process: &victim.process, program: &judged, calls: &calls, limits })
            } else {
                inject(&victim.process, &calls, &Limits::default())
            };
            match injected {
                Ok(report) if report.results == [Ok(0)] => made += 1,
                Ok(report) if checks => panic!("a call was made in another program: {report:?}"),
                Ok(_) => without += 1,
                Err(InjectError::OtherProgram { .. }) => refused += 1,
                Err(_) => {}
            }
        }
        victim.finish("execs");
        println!("checked {checks}: {made} calls made, {refused} refused, {without} in another program");
        assert!(made > 0 && (!checks || refused > 0));
    }
    assert!(without > 0, "the test cannot fail");
}

#[test]
fn a_change_of_the_program_or_user_is_noticed_by_the_injector() {
    if !can_inject() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (program, copy) = (victim_binary("holder"), dir.path().join("copy"));
    std::fs::copy(&program, &copy).unwrap();
    let mut injector = injector("worker");
    let mut holder = Holder::start(16);
    let process = Process::open(holder.pid()).unwrap();
    for change in ["none", "exec of the same file", "exec of another file", "user"] {
        let judged = ProgramId::of(&process).unwrap();
        match change {
            "none" => {}
            "user" => assert_eq!(holder.ask("user 4321"), 0),
            "exec of the same file" => holder.exec(&program, 16),
            _ => holder.exec(&copy, 16),
        }
        let calls = [Call::madvise(holder.first * 4096, 16 * 4096, MARK)];
        let limits = &Limits::default();
        let result = injector.run(Batch { process: &process, program: &judged, calls: &calls, limits });
        match change {
            "none" => assert_eq!(result.unwrap().results, [Ok(0)]),
            _ => assert_eq!(result, Err(InjectError::OtherProgram { pid: holder.pid() }), "{change}"),
        }
    }
}

// ---- the injector process -------------------------------------------------------------------------------------------

#[test]
fn an_injector_survives_signals_and_ends_with_its_owner() {
    if !can_inject() {
        return;
    }
    let mut injector = injector("worker");
    let mut victim = Victim::start("idle");
    victim.wait_blocked(libc::SYS_read);
    let limits = Limits::default();
    let pid = i32::try_from(injector.pid()).unwrap();
    for (advice, marked) in [(MARK, true), (UNMARK, false)] {
        let report = run_unchecked(&mut injector, &victim.process, &victim.calls(advice, 1), &limits).unwrap();
        assert_eq!((report.results, victim.is_marked()), (vec![Ok(0)], marked));
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGUSR1] {
            send(pid, signal);
        }
    }
    assert!(injector.cpu_ns() > 0);
    // SAFETY: we pass no memory, and the target is a child of this thread.
    assert_eq!(unsafe { libc::getsid(pid) }, pid);
    let gone = Victim::start("idle");
    gone.kill(libc::SIGKILL);
    gone.wait_state(b'Z');
    let zombie = run_unchecked(&mut injector, &gone.process, &gone.calls(MARK, 1), &limits);
    assert_eq!(zombie, Err(InjectError::Zombie { pid: gone.pid() }));
    // The end of the connection ends the injector.
    drop(injector);
    assert!(matches!(Process::open(pid), Err(pagefold_procmem::process::ReadError::Vanished { .. })));
    victim.finish("idle");
}

#[test]
fn an_injector_under_a_seccomp_filter_refuses_filtered_targets() {
    if !can_inject() {
        return;
    }
    let mut injector = injector("worker-filtered");
    let mut free = Victim::start("idle");
    let mut filtered = match Victim::try_start(&["torture", "nanosleep", "filter-errno"]) {
        Err(why) if why.starts_with("skip: ") => return skip(&why[6..]),
        other => other.unwrap(),
    };
    let limits = Limits::default();
    assert_eq!(run_unchecked(&mut injector, &free.process, &free.calls(MARK, 1), &limits).unwrap().results, [Ok(0)]);
    let refused = run_unchecked(&mut injector, &filtered.process, &filtered.calls(MARK, 1), &limits);
    assert_eq!(refused, Err(InjectError::Filtered { pid: filtered.pid() }));
    for victim in [&mut free, &mut filtered] {
        victim.finish("under a filter");
    }
}
