//! Reads and writes that fail, with EIO and ENOMEM, from the start and in the middle.

use super::*;
use serde_json::Value;

/// If one of these reads fails, a run may go on silently: it lists processes each time (loadavg), keeps the last value
/// (schedstat, vmstat), or doesn't read pages that may be merged (kpageflags).
const WITH_FALLBACK: [&str; 4] = ["read:loadavg", "read:schedstat", "read:vmstat", "read:kpageflags"];

/// Reads that `pagefold unmerge` makes.
const OF_UNMERGE: [&str; 2] = ["read:ksm_stat", "read:limits"];

/// The read should fail from this repetition on, which comes in the middle of a quick run. `None` if a run makes the
/// read only once.
fn middle(read: &str) -> Option<u32> {
    Some(match read {
        "read:cgroup"
        | "read:state"
        | "read:lock"
        | "read:proc"
        | "read:boot_id"
        | "read:loadavg"
        | "read:pressure/memory"
        | "read:meminfo"
        | "read:vmstat"
        | "read:kpageflags"
        | "read:mem"
        | "read:ksm:advisor_mode" => return None,
        "read:stat" | "read:statm" => 40,
        "read:pagemap" | "read:schedstat" => 10,
        name if name.starts_with("read:ksm:") => 20,
        _ => 3,
    })
}

/// Checks that the program ended without a panic, and that it didn't report success if something failed.
fn is_honest(fault: &str, left: &Ended, quiet: bool) {
    assert!(left.signal.is_none() && matches!(left.code, Some(0 | 1 | 3..=7)), "{fault}: {left:?}");
    assert!(!left.errors.contains("panicked"), "{fault}: {left:?}");
    assert!(left.errors.lines().all(|line| line.starts_with("pagefold: ")), "{fault}: {left:?}");
    if left.code == Some(0) {
        let is_reported = serde_json::from_str::<Value>(&left.output).is_ok_and(|summary| {
            summary["left_alone"].as_array().is_some_and(|left_alone| !left_alone.is_empty())
                || summary["stood_down"].is_string()
                || summary["processes"].as_array().is_some_and(|all| all.iter().any(|one| one["failed"].is_string()))
        });
        assert!(quiet || is_reported || !left.errors.is_empty(), "{fault}: no message: {left:?}");
    } else {
        assert!(!left.errors.is_empty(), "{fault}: {left:?}");
    }
}

fn fails(ksm: &KsmAtRest, holders: &mut [Holder], fault: &str) {
    let pids = pids(holders);
    let before = knobs();
    let name = fault.split(['@', '=']).next().unwrap();
    let injected = tempfile::NamedTempFile::new().unwrap();
    let run = |time: &str| {
        let mut args = with_pids(&["run"], &pids, &quick(time));
        if OF_UNMERGE.contains(&name) {
            assert_eq!(Daemon::start(&args).end().code, Some(0));
            args = with_pids(&["unmerge", "--json"], &pids, &[]);
        }
        let mut command = Command::new(program());
        command.args(args).env(fault::VARIABLE, fault).env(fault::SEEN_VARIABLE, injected.path());
        let left = Daemon::of(&mut command).end();
        println!("{fault}: {:?} {}", left.code, left.errors.trim());
        left
    };
    // The fault may happen in the daemon, and again in its injector.
    let is_injected = || std::fs::read_to_string(&injected).unwrap().lines().next() == Some(name);
    // The daemon reads vmstat once a second, while something is merged.
    let mut left = run(if name == "read:vmstat" { "4s" } else { TIMES[0] });
    if !is_injected() {
        left = run(TIMES[1]);
    }
    assert!(is_injected(), "{fault}: no fault was injected: {left:?}");
    is_honest(fault, &left, WITH_FALLBACK.contains(&name));
    assert_unharmed(holders);
    assert_injectors_ended();
    assert_recoverable(&before);
    // If the fault kept knobs from being restored, the run must have said so, and a run without the fault restores
    // them.
    if before.iter().any(|(knob, value)| number(knob) != *value && !ksm::deferred_knobs().contains(knob)) {
        assert_eq!(left.code, Some(1), "{fault}: {left:?}");
        succeed(&["doctor", "--fix"]);
    }
    ksm.assert_knobs_restored();
    ksm.give_back(&pids);
    assert_unmarked(&pids);
}

/// Tests every third read, with EIO from the start and ENOMEM in the middle, or the reverse. With `PAGEFOLD_CRASH_ALL`
/// it tests both ways.
fn every_third(from: usize) {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = pair(COMMON_MIB, 0, 65);
    let all = std::env::var_os("PAGEFOLD_CRASH_ALL").is_some();
    for (at, read) in faults::READS.iter().enumerate().skip(from).step_by(3) {
        for (start, later) in [("EIO", "ENOMEM"), ("ENOMEM", "EIO")]
            .into_iter()
            .skip(if all { 0 } else { at % 2 })
            .take(if all { 2 } else { 1 })
        {
            fails(&ksm, &mut holders, &format!("{read}={start}"));
            if let Some(middle) = middle(read) {
                fails(&ksm, &mut holders, &format!("{read}@{middle}={later}"));
            }
        }
    }
}

#[test]
fn any_read_can_fail_1() {
    every_third(0);
}

#[test]
fn any_read_can_fail_2() {
    every_third(1);
}

#[test]
fn any_read_can_fail_3() {
    every_third(2);
}

#[test]
fn any_write_can_fail() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = pair(COMMON_MIB, 0, 66);
    for fault in ["state=ENOSPC", "state@3=ENOSPC", "state@5=EIO", "knob=EIO", "knob@4=EIO", "knob@7=EIO"] {
        fails(&ksm, &mut holders, &format!("write:{fault}"));
    }
}

/// If `doctor` can't find out whether a state file is valid, it mustn't report an invalid one.
#[test]
fn doctor_does_not_report_success_if_a_read_fails() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = pair(COMMON_MIB, 0, 67);
    let pids = pids(&holders);
    assert_killed_at("turned:run", |fault| faulty_run(&pids, &QUICK, fault));
    for fault in ["read:boot_id=EIO", "read:state=EIO", "read:stat=ENOMEM"] {
        let left = faulty(&["doctor"], fault).end();
        println!("{fault}: {:?}", left.code);
        assert!(!left.output.contains("earlier boot") && !left.output.contains("no knob to restore"), "{left:?}");
        let left = faulty(&["doctor", "--fix"], fault).end();
        assert_ne!(left.code, Some(0), "{fault}: {left:?}");
        assert_eq!(number("run"), 1, "{fault}");
    }
    succeed(&["doctor", "--fix"]);
    ksm.give_back(&pids);
    assert_unharmed(&mut holders);
}
