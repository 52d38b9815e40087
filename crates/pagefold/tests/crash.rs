//! The daemon is killed, reads and writes fail, the disk is full, or a target is stuck. Even so no target may be
//! harmed, KSM's knobs must be restored, and nothing may stay half done. `PAGEFOLD_FAULT` (pagefold-procmem's
//! `fault.rs`) injects a fault at every point and every read in the lists of pagefold-testkit's `faults.rs`. The test
//! fails if one of them is never reached.

use pagefold_testkit::*;

#[path = "crash/aftermath.rs"]
mod aftermath;
#[path = "crash/disk.rs"]
mod disk;
#[path = "crash/reads.rs"]
mod reads;
#[path = "crash/stuck.rs"]
mod stuck;

use aftermath::{assert_injectors_ended, assert_recoverable, assert_unharmed, knobs};
use pagefold_ksm::lock::{LOCK_PATH, holder};
use pagefold_procmem::os::fault;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Memory that each holder has in common with all others.
const COMMON_MIB: u64 = 8;

/// The duration of a quick run, and of another try if the first was too short because the processors are busy.
const TIMES: [&str; 2] = ["1500ms", "15s"];

/// Options of a run that marks, wakes ksmd, rests, and restores KSM.
const QUICK: [&str; 5] = quick(TIMES[0]);

const fn quick(time: &str) -> [&str; 5] {
    ["--preset", "sensitive", "--json", "--for", time]
}

/// We also test these points when the run passes them for the third time: by then a knob is already changed.
const LATER: [&str; 4] = ["state-begun@3", "state-written@3", "state-saved@3", "turned:sleep_millisecs@3"];

/// Starts the program with a fault.
fn faulty(args: &[impl AsRef<OsStr>], fault: &str) -> Daemon {
    Daemon::of(Command::new(program()).args(args).env(fault::VARIABLE, fault))
}

/// `pagefold run` on these processes, with a fault.
fn faulty_run(pids: &[i32], options: &[&str], fault: &str) -> Daemon {
    faulty(&with_pids(&["run"], pids, options), fault)
}

/// Whether the program is killed at this point.
fn is_killed_at(point: &str, start: impl FnOnce(&str) -> Daemon) -> bool {
    let ended = start(&format!("{point}=kill")).end();
    println!("{point}: {ended:?}");
    // A thread of the killed program may still wait for ksmd's scan to end. Until then it holds the lock.
    wait_until("the lock is free", || holder(LOCK_PATH.as_ref()).unwrap().is_none());
    ended.signal == Some(libc::SIGKILL)
}

/// Checks that the program is killed at this point, since a point that is never reached isn't tested.
#[track_caller]
fn assert_killed_at(point: &str, start: impl FnOnce(&str) -> Daemon) {
    assert!(is_killed_at(point, start), "{point} was never reached");
}

/// Kills the program at a point, and checks that the next start can put everything right.
fn assert_survivable(ksm: &KsmAtRest, holders: &mut [Holder], point: &str, doctor: bool) {
    let pids = pids(holders);
    let before = knobs();
    if point.starts_with("unmark") {
        let are_marked = TIMES.into_iter().any(|time| {
            let done = faulty_run(&pids, &quick(time), "").end();
            assert_eq!(done.code, Some(0), "{point}: {}", done.errors);
            pids.iter().all(|&pid| marks(pid).marked > 0)
        });
        assert!(are_marked, "{point}: nothing to unmark");
        assert_killed_at(point, |fault| faulty(&with_pids(&["unmerge"], &pids, &[]), fault));
    } else {
        let is_reached = TIMES.into_iter().any(|time| {
            let mut options = quick(time).to_vec();
            if point == "order:pace" {
                options.extend(["--governor", "low"]);
            }
            is_killed_at(point, |fault| faulty_run(&pids, &options, fault))
        });
        assert!(is_reached, "{point} was never reached");
    }
    assert_unharmed(holders);
    assert_injectors_ended();
    assert_recoverable(&before);
    if doctor {
        succeed(&["doctor", "--fix"]);
    } else {
        let next = faulty_run(&pids, &["--json", "--for", "200ms"], "").end();
        assert_eq!(next.code, Some(0), "{point}: {}", next.errors);
    }
    ksm.assert_knobs_restored();
    assert!(!Path::new("/run/pagefold/ksm-state.json.new").exists(), "{point}");
    ksm.give_back(&pids);
    assert_unmarked(&pids);
    assert_intact(holders);
}

/// Tests every fourth point, so that four tests can share the work. They take turns with KSM.
fn every_fourth(from: usize) {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = pair(COMMON_MIB, 0, 60);
    let points: Vec<&str> = faults::POINTS.iter().copied().chain(LATER).collect();
    for (at, point) in points.into_iter().enumerate().skip(from).step_by(4) {
        assert_survivable(&ksm, &mut holders, point, at / 4 % 3 > 0);
    }
}

#[test]
fn it_can_be_killed_at_any_point_1() {
    every_fourth(0);
}

#[test]
fn it_can_be_killed_at_any_point_2() {
    every_fourth(1);
}

#[test]
fn it_can_be_killed_at_any_point_3() {
    every_fourth(2);
}

#[test]
fn it_can_be_killed_at_any_point_4() {
    every_fourth(3);
}

#[test]
fn doctor_can_be_killed_at_any_point() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = pair(COMMON_MIB, 0, 61);
    let pids = pids(&holders);
    for point in ["put-back:run", "was-put-back:run", "was-put-back:pages_to_scan", "state-closing", "state-closed"] {
        let before = knobs();
        assert_killed_at("turned:run", |fault| faulty_run(&pids, &QUICK, fault));
        // While ksmd is in a scan, doctor leaves the settings for later.
        let is_reached = (0..3).any(|_| is_killed_at(point, |fault| faulty(&["doctor", "--fix"], fault)));
        assert!(is_reached, "{point} was never reached");
        assert_recoverable(&before);
        succeed(&["doctor", "--fix"]);
        ksm.assert_knobs_restored();
        ksm.give_back(&pids);
    }
    assert_unharmed(&mut holders);
}
