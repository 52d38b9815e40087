//! A target that does not release its mmap lock.

use super::*;
use pagefold_testkit::injection::Victim;
use std::time::{Duration, Instant};

/// Whether one of the victim's threads waits for the lock.
fn is_stuck(victim: &Victim) -> bool {
    tids(victim.pid()).iter().any(|&tid| state(tid) == b'D')
}

/// The daemon answers the request while the target is stuck, and unmerges it once it releases its lock.
#[test]
fn a_stuck_target_is_unmerged_when_it_lets_go() {
    let Some(ksm) = KsmAtRest::take() else { return };
    // The twin has the same memory.
    let [mut stuck, twin] = match [(); 2].map(|()| Victim::try_start(&["stalling", "locking"])) {
        [Ok(stuck), Ok(twin)] => [stuck, twin],
        [Err(why), _] | [_, Err(why)] => return skip(why),
    };
    let pids = [stuck.pid(), twin.pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, 7 * MIB);
    wait_until("ksmd rests", || status()["busy"] == false);
    stuck.send();
    wait_until("it holds its lock", || is_stuck(&stuck));
    let began = Instant::now();
    let output = pagefold(&with_pids(&["unmerge", "--json"], &pids, &[]));
    println!("answered after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_failed(
        &output,
        6,
        &format!("process {} (victim) keeps its memory map locked; pagefold keeps trying", pids[0]),
    );
    assert_unmarked(&pids[1..]);
    assert!(is_stuck(&stuck), "it is stuck still");
    let freed = Instant::now();
    stuck.send();
    wait_until_unmarked(stuck.pid(), Duration::from_secs(30), "marked after it let go");
    println!("unmarked {:?} after it let go", freed.elapsed());
    let reason = || row(&status()["processes"], "pid", stuck.pid())["left_alone"].clone();
    wait_until("the reason is shown", || reason() == "unmerged by request of uid 0");
    assert_eq!(daemon.stop()["knobs_restored"], true);
    ksm.assert_knobs_restored();
    stuck.finish("stuck");
    drop(twin);
    ksm.give_back(&[Sleeper::start().pid()]);
}
