//! How much we say is saved.

use crate::*;

/// Waits until `status` is within 2 % of the truth. Its figure may be some seconds old.
#[track_caller]
pub fn assert_says(when: &str, saved: u64) {
    let began = Instant::now();
    loop {
        let said = status()["saved_bytes"].as_u64();
        if said.is_some_and(|said| said.abs_diff(saved) * 50 <= saved) {
            return println!("{when}: {} MiB, known after {:.1} s", saved / MIB, began.elapsed().as_secs_f64());
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{when}: {saved} saved, said {said:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A pair is merged and ends, another one comes, and the run is started again.
#[test]
fn saved_is_right_for_pairs_that_come_and_go() {
    const FIRST: u64 = 24;
    const SECOND: u64 = 32;
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = ProgramCopy::of(&victim_binary("holder"), "holder-in-pairs");
    let pair = |mib: u64, content: u64| {
        let one = || Holder::with_as(&program, mib * PAGES_PER_MIB, content);
        [one(), one()]
    };
    let start = || {
        let scope = ["run", "--json", "--governor", "full", "--mechanism", "ksmd", "--exe", program.name()];
        Daemon::start(&scope).answering()
    };
    let first = pair(FIRST, COMMON);
    let daemon = start();
    wait_until("the first pair is merged", || are_merged(&pids_of(&first), FIRST * MIB * 99 / 100));
    assert_says("one pair", FIRST * MIB);
    let second = pair(SECOND, COMMON << 1);
    let second_pids = pids_of(&second);
    wait_until("the second pair is merged", || are_merged(&second_pids, SECOND * MIB * 99 / 100));
    assert_says("two pairs", (FIRST + SECOND) * MIB);
    drop(first);
    assert_says("the first pair has ended", SECOND * MIB);
    let summary = daemon.stop();
    assert!(summary["saved_bytes"].as_u64().unwrap().abs_diff(SECOND * MIB) <= MIB, "{summary}");
    let daemon = start();
    assert_says("started again", SECOND * MIB);
    ksm.end(daemon, &second_pids);
}
