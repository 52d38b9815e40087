//! The daemon dies, reads and writes fail, the disk is full, a target is stuck: no program may suffer from it, KSM's
//! knobs come back, and nothing stays half done. Things are made to go wrong by `PAGEFOLD_FAULT` (pagefold-linux's
//! `fault.rs`), whose lists of points and reads are walked here: one that is never reached fails the test.

use pagefold_testkit::*;

#[path = "crash/daemon.rs"]
mod daemon;
#[path = "crash/disk.rs"]
mod disk;
#[path = "crash/reads.rs"]
mod reads;
#[path = "crash/stuck.rs"]
mod stuck;

use daemon::{Faulty, injectors_are_gone, knobs, left_turned, untouched};
use pagefold_linux::os::fault;
use pagefold_workload::Tenant;
use std::path::Path;

/// Memory of each tenant, all of it alike.
const COMMON_MIB: u64 = 8;

/// Everything once: marks, kicks, rests, and gives back.
const QUICK: [&str; 5] = ["--preset", "sensitive", "--json", "--for", "1500ms"];

/// What a later passage finds that the first does not: something is turned already.
const LATER: [&str; 4] = ["state-begun@3", "state-written@3", "state-saved@3", "turned:sleep_millisecs@3"];

/// Kills the program at a point, and sees what is left.
fn dies_at(ksm: &KsmAtRest, tenants: &mut [Tenant], point: &str, doctor: bool) {
    let pids = pids(tenants);
    let before = knobs();
    if point.starts_with("unmark") {
        let done = Faulty::run(&pids, &QUICK, "").end();
        assert_eq!(done.code, Some(0), "{point}: {}", done.errors);
        assert!(pids.iter().all(|&pid| marks(pid).marked > 0), "{point}: nothing to unmark");
        Faulty::start(&with_pids(&["unmerge"], &pids, &[]), &format!("{point}=kill")).dies(point);
    } else {
        let mut options = QUICK.to_vec();
        if point == "order:pace" {
            options.extend(["--governor", "low"]);
        }
        Faulty::run(&pids, &options, &format!("{point}=kill")).dies(point);
    }
    untouched(tenants);
    injectors_are_gone();
    left_turned(&before);
    if doctor {
        let fixed = pagefold(&["doctor", "--fix"]);
        assert_eq!(fixed.status.code(), Some(0), "{point}: {}", String::from_utf8_lossy(&fixed.stderr));
    } else {
        let next = Faulty::run(&pids, &["--json", "--for", "200ms"], "").end();
        assert_eq!(next.code, Some(0), "{point}: {}", next.errors);
    }
    ksm.assert_knobs_restored_except(if number("pages_shared") > 0 { &["max_page_sharing"] } else { &[] });
    assert!(!Path::new("/run/pagefold/ksm-state.json.new").exists(), "{point}");
    unmerge(&pids);
    assert_unmarked(&pids);
    assert_intact(tenants);
    ksm.assert_restored();
}

/// Every fourth point, so that nobody waits long for KSM.
fn every_fourth(from: usize) {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut tenants = pair(COMMON_MIB, 0, 60);
    let points: Vec<&str> = fault::POINTS.iter().copied().chain(LATER).collect();
    for (at, point) in points.into_iter().enumerate().skip(from).step_by(4) {
        dies_at(&ksm, &mut tenants, point, at / 4 % 3 > 0);
    }
}

#[test]
fn it_may_be_killed_at_any_point_1() {
    every_fourth(0);
}

#[test]
fn it_may_be_killed_at_any_point_2() {
    every_fourth(1);
}

#[test]
fn it_may_be_killed_at_any_point_3() {
    every_fourth(2);
}

#[test]
fn it_may_be_killed_at_any_point_4() {
    every_fourth(3);
}

#[test]
fn even_the_mending_may_be_killed() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut tenants = pair(COMMON_MIB, 0, 61);
    let pids = pids(&tenants);
    for point in ["put-back:run", "was-put-back:run", "was-put-back:pages_to_scan", "state-closing", "state-closed"] {
        let before = knobs();
        Faulty::run(&pids, &QUICK, "turned:run=kill").dies("turned:run");
        Faulty::start(&["doctor", "--fix"], &format!("{point}=kill")).dies(point);
        left_turned(&before);
        let fixed = pagefold(&["doctor", "--fix"]);
        assert_eq!(fixed.status.code(), Some(0), "{point}: {}", String::from_utf8_lossy(&fixed.stderr));
        // ksmd may have merged something before it was stopped, and then this one cannot be put back yet.
        let but: &[&str] = if number("pages_shared") > 0 { &["max_page_sharing"] } else { &[] };
        ksm.assert_knobs_restored_except(but);
        unmerge(&pids);
        ksm.assert_restored();
    }
    untouched(&mut tenants);
}
