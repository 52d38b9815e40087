//! Input that `pagefold run`, `unmerge` and `exec` must refuse with one line and an exit code, without changing
//! anything.

use pagefold_testkit::*;

/// `run` and `unmerge` refuse this scope, and leave KSM alone.
#[track_caller]
fn both_refuse(ksm: &KsmAtRest, scope: &[&str], code: i32, says: &str) {
    assert_fails(&[&["run", "--for", "2s"], scope].concat(), code, says);
    assert_fails(&[&["unmerge"], scope].concat(), code, says);
    ksm.assert_restored();
}

#[track_caller]
fn run_refuses(ksm: &KsmAtRest, pid: i32, says: &str) {
    let pid = pid.to_string();
    assert_fails(&["run", "--for", "2s", "--pid", &pid], 6, says);
    assert_fails(&["run", "--for", "2s", "--dry-run", "--json", "--pid", &pid], 6, says);
    ksm.assert_restored();
}

/// `unmerge` refuses this process, and still prints a summary.
#[track_caller]
fn unmerge_refuses(ksm: &KsmAtRest, pid: i32, says: &str) {
    let output = pagefold(&["unmerge", "--json", "--pid", &pid.to_string()]);
    assert_failed(&output, 6, says);
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["given_back_bytes"], &summary["unmarked_bytes"]), (&0.into(), &0.into()));
    assert!(summary["processes"][0]["failed"].as_str().unwrap().contains(says), "{summary}");
    ksm.assert_restored();
}

/// A process that a signal has stopped.
fn stopped() -> Sleeper {
    let idle = Sleeper::start();
    send(idle.pid(), libc::SIGSTOP);
    wait_until("it stops", || state(idle.pid()) == b'T');
    idle
}

/// Traces a process without stopping it. Returns false, and reports a skip, if that's not permitted.
fn seize(idle: &Sleeper) -> bool {
    // SAFETY: seizing a child of this thread passes no memory.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, idle.pid(), 0, 0) } == 0;
    if !seized {
        skip_unsupported("tracing is not permitted here");
    }
    seized
}

#[test]
fn a_machine_without_the_device_is_told_so_before_anything_happens() {
    if std::path::Path::new("/dev/ksm").exists() {
        return;
    }
    assert_fails(&["run", "--mechanism", "request", "--pid", "1"], 4, "/dev/ksm does not exist");
    assert_fails(&["run", "--mechanism", "uksm", "--pid", "1"], 2, "choose auto, ksmd or request");
}

#[test]
fn an_empty_scope_is_refused() {
    let Some(ksm) = KsmAtRest::take() else { return };
    both_refuse(&ksm, &[], 5, "nothing is in scope");
    both_refuse(&ksm, &["--pid", "2147483646"], 5, "no process 2147483646");
    both_refuse(&ksm, &["--exe", "no-such-program-here"], 5, "no process matches");
    both_refuse(&ksm, &["--user", "nobody-such"], 5, "no user nobody-such");
    both_refuse(&ksm, &["--cgroup", "/no/such/cgroup"], 5, "no cgroup");
    // Naming a process that doesn't exist is a mistake, even together with processes that exist.
    let idle = Sleeper::start();
    both_refuse(&ksm, &["--pid", &format!("{},2147483646", idle.pid())], 5, "no process 2147483646");
    assert_unmarked(&[idle.pid()]);
}

#[test]
fn targets_that_must_not_be_touched_are_refused() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut ended = zombie();
    let pid = i32::try_from(ended.id()).unwrap();
    run_refuses(&ksm, pid, "has ended");
    unmerge_refuses(&ksm, pid, "zombie");
    ended.wait().unwrap();
    if has_kernel_threads() {
        run_refuses(&ksm, 2, "kernel thread");
        unmerge_refuses(&ksm, 2, "kernel thread");
    }

    let idle = Sleeper::start();
    if seize(&idle) {
        run_refuses(&ksm, idle.pid(), "traced by process");
    }
    drop(idle);

    let idle = stopped();
    run_refuses(&ksm, idle.pid(), "stopped by a signal");
    assert_eq!(state(idle.pid()), b'T', "still stopped");
    send(idle.pid(), libc::SIGCONT);
    wait_until("it goes on", || state(idle.pid()) == b'S');

    let undumpable = Script::undumpable();
    run_refuses(&ksm, undumpable.pid(), "not dumpable");

    // A program on the deny list.
    let agent = ProgramCopy::of(&victim_binary("holder"), "ssh-agent");
    let agent = Holder::start_as(&agent, PAGES_PER_MIB);
    run_refuses(&ksm, agent.pid(), "deny list");
    assert_unmarked(&[idle.pid(), agent.pid()]);
}

#[test]
fn frozen_targets_are_refused() {
    let Some(ksm) = KsmAtRest::take() else { return };
    for version in [1, 2] {
        // We start the process before the freezer, so that the freezer is dropped first: a frozen process can't be
        // killed.
        let idle = Sleeper::start();
        let Some(freezer) = Freezer::create(version) else {
            skip_unsupported(format!("no freezer of version {version} is mounted"));
            continue;
        };
        freezer.freeze_process(idle.pid());
        run_refuses(&ksm, idle.pid(), "frozen");
        assert!(freezer.is_frozen(), "still frozen");
        assert_unmarked(&[idle.pid()]);
    }
}

#[test]
fn of_several_targets_bad_ones_are_left_alone_and_the_rest_is_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(32, 4, 14);
    let mut ended = zombie();
    let dead = i32::try_from(ended.id()).unwrap();
    let (stopped, traced) = (stopped(), Sleeper::start());
    let mut bad = vec![(dead, "has ended"), (stopped.pid(), "stopped by a signal")];
    if seize(&traced) {
        bad.push((traced.pid(), "traced"));
    }
    if has_kernel_threads() {
        bad.push((2, "kernel thread"));
    }
    let scope = [pids(&pair), bad.iter().map(|&(pid, _)| pid).collect()].concat();
    let daemon = Daemon::on(&scope, &["--for", "300s"]);
    wait_until("the pair is merged", || saved_bytes() >= 31 * MIB);
    let ended_daemon = daemon.terminate();
    let summary = ended_daemon.summary();
    let left = summary["left_alone"].as_array().unwrap();
    for (pid, why) in &bad {
        let rows: Vec<_> = left.iter().filter(|row| row["pid"] == *pid).collect();
        assert!(!rows.is_empty(), "{pid} is missing: {left:?}");
        assert!(rows.iter().any(|row| row["reason"].as_str().unwrap().contains(why)), "{rows:?}");
        let lines = ended_daemon.errors.lines().filter(|line| line.contains(&format!("process {pid} ("))).count();
        assert_eq!((rows.len(), lines), (1, 1), "reported once: {}", ended_daemon.errors);
    }
    assert_eq!(left.len(), bad.len(), "{left:?}");
    assert_eq!(state(stopped.pid()), b'T', "still stopped");
    ended.wait().unwrap();
    ksm.give_back(&pids(&pair));
    assert_intact(&mut pair);
}

#[test]
fn other_users_than_root_are_refused() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let copy = ProgramCopy::of(program(), "pagefold");
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    for args in [
        &["run", "--for", "2s", "--pid", &pid][..],
        &["run", "--dry-run", "--pid", &pid],
        &["unmerge", "--pid", &pid],
        &["demo"],
    ] {
        assert_refused(&as_other_user(copy.name()).args(args).output().unwrap(), 3, "root");
    }
    ksm.assert_restored();
    assert_unmarked(&[idle.pid()]);
}
