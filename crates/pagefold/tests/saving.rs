//! The savings that `status` shows are the real ones: the sum of Pss_Anon of all processes in scope before anything is
//! merged, minus the sum afterwards. This needs none of KSM's own counters.

use pagefold_testkit::holder::{Change, Holder};
use pagefold_testkit::*;
use std::time::{Duration, Instant};

/// A program whose pages hold the contents `content`, `content` + 1 and so on.
fn holder(mib: u64, content: u64) -> Holder {
    let pages = mib * PAGES_PER_MIB;
    let mut holder = Holder::start(pages);
    let step = u64::from(content > 0);
    holder.change(Change::Write { first: 0, pages, content, step });
    holder
}

fn is_true(said: u64, saved: u64) -> bool {
    said.abs_diff(saved) * 50 <= saved.max(MIB)
}

/// Waits up to 30 s until `status` knows what's saved after a restart. The first figure that it shows must be right.
#[track_caller]
fn assert_known_soon(when: &str, unmerged: u64, pids: &[i32]) {
    let began = Instant::now();
    let said = loop {
        if let Some(said) = status()["saved_bytes"].as_u64() {
            break said;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{when}: unknown");
        std::thread::sleep(Duration::from_millis(100));
    };
    let saved = unmerged.saturating_sub(held(pids));
    println!("{when}: {} MiB saved, known after {:.1} s", saved / MIB, began.elapsed().as_secs_f64());
    assert!(is_true(said, saved), "{when}: {saved} saved, said {said}");
}

/// Waits until `status`, whose figure may be some seconds old, is within 2 % of the truth.
#[track_caller]
fn assert_true(when: &str, unmerged: u64, pids: &[i32]) {
    let began = Instant::now();
    loop {
        let saved = unmerged.saturating_sub(held(pids));
        let status = status();
        let said = status["saved_bytes"].as_u64();
        if said.is_some_and(|said| is_true(said, saved)) {
            println!("{when}: {} MiB saved, known after {:.1} s", saved / MIB, began.elapsed().as_secs_f64());
            return;
        }
        let age = &status["saved_age_seconds"];
        assert!(began.elapsed() < Duration::from_secs(60), "{when}: {saved} saved, said {said:?}, {age} s old");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn daemon(pids: &[i32], options: &[&str]) -> Daemon {
    Daemon::on(pids, &[&["--for", "300s"], options].concat()).answering()
}

#[test]
fn what_is_said_is_true_after_restarts_writes_and_exits_beside_other_programs() {
    let Some(_ksm) = KsmAtRest::take() else { return };
    // Memory of another program, which isn't in scope, also merges.
    let _others = Holder::duplicated(16 * PAGES_PER_MIB);
    let [first, mut second, zeros] = [holder(16, 1), holder(16, 1), holder(8, 0)];
    let pids = [first.pid(), second.pid(), zeros.pid()];
    let unmerged = held(&pids);
    let learned = tempfile::tempdir().unwrap();
    let learned = learned.path().join("learned.json");
    let learned = ["--learned", learned.to_str().unwrap()];
    let run = daemon(&pids, &learned);
    wait_until("all of it is merged", || unmerged.saturating_sub(held(&pids)) >= 23 * MIB && status()["busy"] == false);
    assert_true("merged", unmerged, &pids);
    drop(run);
    let run = daemon(&pids, &learned);
    assert_known_soon("restarted with what was learned", unmerged, &pids);
    drop(run);
    let run = daemon(&pids, &[]);
    assert_known_soon("restarted without", unmerged, &pids);
    assert!(unmerged.saturating_sub(held(&pids)) >= 23 * MIB);
    second.change(Change::Write { first: 0, pages: 8 * PAGES_PER_MIB, content: 1 << 40, step: 1 });
    assert_true("half of it written", unmerged, &pids);
    second.change(Change::Drop { first: 8 * PAGES_PER_MIB, pages: 4 * PAGES_PER_MIB });
    // Without merging, the frames of the unmapped memory would be free as well.
    assert_true("a quarter of it unmapped", unmerged - 4 * MIB, &pids);
    drop(first);
    assert_true("the other one ended", held(&pids[1..]) + 8 * MIB, &pids[1..]);
    drop(run);
}

#[test]
fn children_of_a_fork_are_counted_once() {
    let Some(_ksm) = KsmAtRest::take() else { return };
    let mut masters = [holder(16, 1), holder(16, 1)];
    let mut pids = vec![masters[0].pid(), masters[1].pid()];
    let unmerged = held(&pids);
    let run = daemon(&pids, &[]);
    wait_until("they are merged", || unmerged.saturating_sub(held(&pids)) >= 15 * MIB && status()["busy"] == false);
    drop(run);
    for master in &mut masters {
        pids.extend([master.fork(), master.fork()]);
    }
    let run = daemon(&pids, &[]);
    assert_known_soon("forked after merging", unmerged, &pids);
    // ksmd visits the children, and counts each of their pages as another saved page.
    std::thread::sleep(Duration::from_secs(3));
    assert_true("and visited by ksmd", unmerged, &pids);
    drop(run);
}
