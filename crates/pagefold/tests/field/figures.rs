//! What we say is saved, and who else uses KSM.

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

/// Programs merged by `MemoryKSM=` or `pagefold exec` mark their own memory, and ksmd runs for them.
#[test]
fn others_that_use_ksm_are_named_with_what_they_hold() {
    const MIB_EACH: u64 = 32;
    let Some(_ksm) = KsmAtRest::take() else { return };
    let mut others = [program_with(MIB_EACH), program_with(MIB_EACH)];
    for other in &mut others {
        other.mark(0, other.pages);
    }
    write_knob("pages_to_scan", "100000");
    write_knob("run", "1");
    wait_until_merged(&pids_of(&others), MIB_EACH * MIB * 99 / 100);
    write_knob("run", "0");
    let output = pagefold(&["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let programs = row(&report["findings"], "id", "programs");
    let said = programs["what"].as_str().unwrap();
    assert!(said.contains("holder") && said.contains("MiB"), "{said}");
}
