//! Headroom for writes to merged pages, on the real kernel: programs below a limit write to all their merged pages at
//! once.

use pagefold_testkit::limit::Limited;
use pagefold_testkit::*;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// Programs below the limit, and the memory that each of them holds, MiB.
const PROGRAMS: u64 = 3;
const EACH: u64 = 32;
/// A warning must come at least this long before the pages are written.
const EARLY: Duration = Duration::from_secs(30);

/// A program in the cgroup that holds memory with these contents.
fn holder(limited: &Limited, mib: u64, content: u64) -> Holder {
    let mut holder = Holder::start(mib * PAGES_PER_MIB);
    limited.add(holder.pid());
    holder.write(0, mib * PAGES_PER_MIB, content);
    holder
}

/// Programs with equal memory below a limit of this many MiB, merged by a daemon with these options.
fn merged(limited: &Limited, mib: u64, options: &[&str]) -> (Vec<Holder>, Daemon) {
    limited.limit(256 * MIB);
    let before = saved_bytes();
    let holders: Vec<Holder> = (0..PROGRAMS).map(|_| holder(limited, EACH, 0x5e5e_0001)).collect();
    let pids: Vec<i32> = holders.iter().map(Holder::pid).collect();
    let options = [&["--governor", "full", "--mechanism", "ksmd"], options].concat();
    let daemon = Daemon::on(&pids, &options).answering();
    let all = (PROGRAMS - 1) * EACH * MIB;
    wait_until("the memory is merged", || saved_bytes() - before >= all / 100 * 98 && status()["busy"] == false);
    assert!(limited.usage() < (EACH + 24) * MIB, "{} bytes", limited.usage());
    limited.limit(mib * MIB);
    (holders, daemon)
}

/// The limit's row in the status, if there's too little headroom below it.
fn tight(limited: &Limited) -> Option<Value> {
    let status = status();
    let rows = status["reserve"]["limits"].as_array().unwrap();
    rows.iter().find(|row| Path::new(row["cgroup"].as_str().unwrap()) == limited.path()).cloned()
}

/// Whether a process still runs. An ended one is a zombie, as nobody has waited for it.
fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']))
}

/// All programs write different contents to all their pages at once. Returns which programs answer afterwards.
fn diverge(holders: &mut [Holder]) -> Vec<bool> {
    let began = Instant::now();
    let answered = std::thread::scope(|scope| {
        let write = |(holder, number): (&mut Holder, u64)| {
            holder.write(0, EACH * PAGES_PER_MIB, (0x5e5e_0002 + number) << 32);
        };
        let writers: Vec<_> = holders.iter_mut().zip(0..).map(|holder| scope.spawn(move || write(holder))).collect();
        writers.into_iter().map(|writer| writer.join().is_ok()).collect()
    });
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    answered
}

fn finish(ksm: &KsmAtRest, limited: &Limited, holders: &[Holder], daemon: Daemon) -> String {
    limited.unlimited();
    let ended = daemon.terminate();
    assert_eq!(ended.code, Some(0), "{}", ended.errors);
    ksm.give_back(&holders.iter().map(Holder::pid).collect::<Vec<_>>());
    ended.errors
}

#[test]
fn with_room_for_all_nobody_is_killed_and_no_warning_is_given() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let (mut holders, daemon) = merged(&limited, 160, &[]);
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(tight(&limited), None);
    assert_eq!(diverge(&mut holders), [true; 3]);
    assert_eq!(limited.kills(), 0);
    assert!(holders.iter_mut().all(Holder::is_intact));
    let errors = finish(&ksm, &limited, &holders, daemon);
    assert!(!errors.contains("below the limit"), "{errors}");
}

#[test]
fn without_room_for_all_the_warning_comes_long_before_the_pages_do() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let (mut holders, daemon) = merged(&limited, 80, &[]);
    wait_until("the limit is overcommitted", || {
        tight(&limited).is_some_and(|row| row["state"] == "overcommitted" && row["total_bytes"] == 80 * MIB)
    });
    let warned = Instant::now();
    let row = tight(&limited).unwrap();
    let (left, worst) = (row["left_bytes"].as_u64().unwrap(), row["worst_bytes"].as_u64().unwrap());
    let all = PROGRAMS * EACH * MIB;
    assert!(left < worst && ((PROGRAMS - 1) * EACH * MIB / 100 * 95..=all).contains(&worst), "{row}");
    assert_has(&succeed(&["status"]), &["overcommitted", limited.path().file_name().unwrap().to_str().unwrap()]);
    std::thread::sleep(EARLY);
    assert!(warned.elapsed() >= EARLY);
    // Together the programs need more than the limit, so the kernel would have to kill one even without pagefold.
    let answered = diverge(&mut holders);
    // A program may be killed after its answer, while another one is still writing.
    let dead = |holders: &[Holder]| holders.iter().filter(|holder| !is_alive(holder.pid())).count() as u64;
    wait_until("those that were killed have ended", || dead(&holders) == limited.kills());
    println!("{answered:?} answered, {} killed", limited.kills());
    assert!(dead(&holders) >= answered.iter().filter(|done| !**done).count() as u64);
    holders.retain(|holder| is_alive(holder.pid()));
    let errors = finish(&ksm, &limited, &holders, daemon);
    let warnings = errors.lines().filter(|line| line.contains("memory is overcommitted below the limit of ")).count();
    assert_eq!(warnings, 1, "{errors}");
}

#[test]
fn memory_is_taken_apart_as_far_as_half_of_the_reserve_is_left() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let (mut holders, daemon) = merged(&limited, 200, &["--reserve", "50%", "--take-back"]);
    let saved = saved_bytes();
    // Another program below the limit takes memory, until about 95 MiB are free, which is less than the reserve of 100.
    let taken = limited.usage() / MIB;
    let mut other = holder(&limited, 104 - taken, 0x5e5e_9999_0001);
    wait_until("memory is unmerged", || status()["reserve"]["taken_back_bytes"].as_u64() >= Some(EACH * MIB));
    let row = tight(&limited).unwrap();
    assert_eq!(row["state"], "short", "{row}");
    // KSM counts the unmerged pages until its next scan.
    wait_until("the pages are given back", || saved.saturating_sub(saved_bytes()) >= EACH * MIB / 100 * 95);
    // No more is unmerged, since the next step would leave less than half of the reserve.
    std::thread::sleep(Duration::from_secs(6));
    let left = 200 * MIB - limited.usage();
    assert!((50 * MIB..80 * MIB).contains(&left), "{left} bytes left");
    let given_back = saved - saved_bytes();
    assert!((EACH * MIB / 100 * 95..=EACH * MIB / 100 * 105).contains(&given_back), "{given_back}");
    assert_eq!(limited.kills(), 0);
    assert!(holders.iter_mut().all(Holder::is_intact) && other.is_intact());
    let errors = finish(&ksm, &limited, &holders, daemon);
    assert_has(&errors, &["memory is short below the limit of ", "memory is unmerged in steps"]);
}
