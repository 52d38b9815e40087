//! Setups that people who merge memory have reported in public, rebuilt at a small scale. For each, we check our
//! figures against the true value.
//!
//! The truth is frames: the sum of Pss_Anon of the case's own processes. KSM's counters count children of a fork
//! several times, and keep what has been unmapped.
//!
//! | module | holds |
//! | --- | --- |
//! | `families` | prefork servers: masters with workers |
//! | `runtimes` | programs whose runtime manages their memory: Java, Python, Go and JavaScript |
//! | `servers` | databases, search servers and job runners |
//! | `hosts` | swap |
//! | `selection` | programs that are hard to find, to ask or to merge |
//!
//! If a test names issues, its setup was reported in them.
//!
//! 32-bit programs, upgraded programs beside a stranger's, programs with 40,000 mappings, other users of KSM, and
//! processes left alone are in `tests/selection.rs`. Memory limits of containers are in `tests/charge.rs`.

#[path = "field/families.rs"]
mod families;
#[path = "field/hosts.rs"]
mod hosts;
#[path = "field/runtimes.rs"]
mod runtimes;
#[path = "field/selection.rs"]
mod selection;
#[path = "field/servers.rs"]
mod servers;
#[path = "integrity/swap.rs"]
mod swap;

use pagefold_testkit::*;
use serde_json::Value;
use std::time::{Duration, Instant};

/// The number from which we make the contents that all programs of a case have in common.
const COMMON: u64 = 0xf1e1_d000 << 24;
/// How many seconds we check that something stays as it is, and the variable that sets another time.
const SHORT: u64 = 40;
const SECONDS_VARIABLE: &str = "PAGEFOLD_FIELD_SECONDS";

/// A run that may use as much of a core as it needs.
fn run(pids: &[i32]) -> Daemon {
    Daemon::on(pids, &["--governor", "full", "--mechanism", mechanism()]).answering()
}

/// A program that holds this many MiB, with the same contents as any other one made here.
fn program_with(mib: u64) -> Holder {
    Holder::with(mib * PAGES_PER_MIB, COMMON)
}

/// The directory of the programs that these tests start.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/field");

/// Asks a program to check its data, and asserts that every byte is as written.
#[track_caller]
fn assert_answers(program: &mut Script) {
    program.say("check");
    assert_eq!(program.line(), "intact");
}

/// All descendants of a process. Some may end while we look.
fn descendants(pid: i32) -> Vec<i32> {
    let mut found = Vec::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return found };
    for task in tasks.flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let child = child.parse().unwrap();
            found.push(child);
            found.extend(descendants(child));
        }
    }
    found
}

fn pids_of(programs: &[Holder]) -> Vec<i32> {
    programs.iter().map(Holder::pid).collect()
}

fn scan(pids: &[i32]) -> Value {
    json_of(&with_pids(&["scan"], pids, &["--exact"]))
}

/// How much a scan says could be saved, MiB.
fn savable_mib(scan: &Value) -> u64 {
    scan["totals"]["savable_gross_bytes"].as_u64().unwrap() / MIB
}

fn saved_mib(unmerged: u64, pids: &[i32]) -> u64 {
    unmerged.saturating_sub(held(pids)) / MIB
}

/// Waits up to `seconds` until at least `least_mib` are saved.
#[track_caller]
fn assert_saves(unmerged: u64, pids: &[i32], least_mib: u64, seconds: u64) {
    let began = Instant::now();
    loop {
        let saved = saved_mib(unmerged, pids);
        if saved >= least_mib {
            println!("{saved} MiB of {} saved after {:.1} s", unmerged / MIB, began.elapsed().as_secs_f64());
            return;
        }
        assert!(
            began.elapsed() < Duration::from_secs(seconds),
            "{saved} MiB of {} saved after {seconds} s, not {least_mib}",
            unmerged / MIB
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until `status` is within 2 % of the truth. Its figure may be some seconds old.
#[track_caller]
fn assert_says(when: &str, saved: u64) {
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

fn duration() -> Duration {
    Duration::from_secs(std::env::var(SECONDS_VARIABLE).map_or(SHORT, |seconds| seconds.parse().unwrap()))
}

/// Services whose heaps were touched in advance: most of it zeros that are never written, and some data that is
/// rewritten with the same contents again and again.
#[test]
fn zeros_stay_merged_beside_data_that_is_rewritten() {
    const PAGES: u64 = 256 * PAGES_PER_MIB;
    const WALKED: u64 = 16 * PAGES_PER_MIB;
    /// Half a MiB.
    const PER_SECOND: u64 = 128;
    const MOST: u64 = 40 * MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut heaps = [Holder::start(PAGES), Holder::start(PAGES)];
    for heap in &mut heaps {
        heap.write(0, WALKED, COMMON);
        heap.zero(WALKED, PAGES - WALKED);
    }
    let pids = pids_of(&heaps);
    let daemon = run(&pids);
    wait_until("all of it is merged", || held(&pids) < 20 * MIB);
    let (began, mut walked, mut most) = (Instant::now(), 0, 0);
    while began.elapsed() < duration() {
        std::thread::sleep(Duration::from_millis(100));
        let due = u64::try_from(began.elapsed().as_millis()).unwrap() * PER_SECOND / 1_000;
        let first = walked % WALKED;
        let pages = (due - walked).min(WALKED - first);
        for heap in &mut heaps {
            heap.write(first, pages, COMMON + first);
        }
        walked += pages;
        most = most.max(held(&pids));
        assert!(most <= MOST, "{} MiB after {:?}", most / MIB, began.elapsed());
    }
    println!("at most {} MiB", most / MIB);
    assert!(heaps.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}

/// Clones of a snapshot. Each maps the same file privately, and dirties half of it with the same contents.
#[test]
fn dirtied_copies_of_a_file_merge_and_the_file_stays() {
    const PAGES: u64 = 64 * PAGES_PER_MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("snapshot");
    let content: Vec<u8> = (0..PAGES * 512).flat_map(u64::to_ne_bytes).collect();
    std::fs::write(&snapshot, &content).unwrap();
    let mut clones = [Holder::start(PAGES), Holder::start(PAGES), Holder::start(PAGES)];
    for clone in &mut clones {
        clone.ask(&format!("map {}", snapshot.display()));
        clone.write(0, PAGES / 2, COMMON);
    }
    let pids = pids_of(&clones);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, 2 * 31, 20);
    assert!(clones.iter_mut().all(Holder::is_intact));
    assert!(std::fs::read(&snapshot).unwrap() == content, "the file has changed");
    ksm.end(daemon, &pids);
}
