//! Data integrity under load, on the real kernel: processes rewrite and move their memory and check every byte, while
//! pagefold merges and unmerges that memory.
//!
//! Each test takes some seconds. `PAGEFOLD_SOAK_SECONDS` sets the total time of the tests that have a time limit.

use pagefold_testkit::*;

#[path = "integrity/swap.rs"]
mod swap;

use pagefold_testkit::injection::Victim;
use pagefold_testkit::ksm::merged_pages;
use pagefold_testkit::limit::{Limited, Reclaim};
use pagefold_testkit::shuffler::{assert_not_killed, assert_well_for, pids};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use swap::Swap;

/// Options that mark memory early, even if it's rewritten like the shufflers' memory.
const EAGER: [&str; 6] = ["--preset", "sensitive", "--governor", "full", "--cow-threshold", "100"];

/// The duration of a test: `default` seconds, or its share, in percent, of a soak.
fn duration(default: u64, share: u64) -> Duration {
    let soak = std::env::var("PAGEFOLD_SOAK_SECONDS").ok();
    let seconds = soak.map_or(default, |all| all.parse::<u64>().expect("a number of seconds") * share / 100);
    Duration::from_secs(seconds)
}

/// Starts shufflers with these settings, each with its own seed, optionally in a cgroup.
fn start(count: u32, settings: &str, limited: Option<&Limited>) -> Vec<Shuffler> {
    (1..=count).map(|seed| Shuffler::start(&format!("seed={seed} {settings}"), limited.map(Limited::path))).collect()
}

/// A test with fewer COW breaks, or with fewer pages merged at one time in a shuffler, proves nothing.
const BROKEN_MIN: u64 = 1_000;
const MERGED_MIN: u64 = 1_000;

/// Merges and unmerges repeatedly: runs are paused and resumed, ended or killed, and memory is unmerged. A slow machine
/// gets more time, until enough pages were merged and written. Returns how much memory was unmerged, in MiB.
fn disturb(shufflers: &mut [Shuffler], time: Duration, scarce: bool) -> u64 {
    let (pids, began) = (pids(shufflers), Instant::now());
    let (mut runs, mut given_back_mib, mut no_room) = (0, 0, 0);
    let before = vmstat("cow_ksm");
    let is_slow = |shufflers: &[Shuffler]| {
        let has_less = shufflers.iter().any(|shuffler| shuffler.most_merged <= MERGED_MIN);
        (has_less || vmstat("cow_ksm") - before <= BROKEN_MIN) && began.elapsed() < 4 * time
    };
    while began.elapsed() < time || is_slow(shufflers) {
        runs += 1;
        let daemon = Daemon::on(&pids, &EAGER);
        let merged_by = Instant::now() + Duration::from_secs(6);
        while pids.iter().any(|&pid| merged_pages(pid) <= MERGED_MIN) && Instant::now() < merged_by {
            assert_well_for(shufflers, Duration::from_millis(100));
        }
        assert_well_for(shufflers, Duration::from_millis(500));
        if runs % 2 == 1 {
            assert!(pagefold(&["pause"]).status.success());
            assert_well_for(shufflers, Duration::from_millis(300));
            assert!(pagefold(&["resume"]).status.success());
            assert_well_for(shufflers, Duration::from_millis(500));
            // The daemon unmerges the process and then keeps it out.
            if let Err(why) = try_unmerge(&pids[..1]) {
                assert!(scarce && why.contains("has room for"), "{why}");
                no_room += 1;
            }
            assert_well_for(shufflers, Duration::from_millis(300));
            succeed(&with_pids(&["include"], &pids[..1], &[]));
            assert_well_for(shufflers, Duration::from_millis(500));
        }
        if runs % 3 == 2 {
            daemon.kill();
        } else {
            daemon.stop();
        }
        assert_well_for(shufflers, Duration::from_millis(200));
        // After every second run, we unmerge one process or all.
        if runs % 2 == 0 {
            let some = if runs % 4 == 0 { &pids[..] } else { &pids[..1] };
            match try_unmerge(some) {
                Ok(summary) => given_back_mib += summary["given_back_bytes"].as_u64().unwrap() / MIB,
                Err(why) => {
                    assert_well_for(shufflers, Duration::from_millis(30));
                    assert!(scarce && why.contains("has room for"), "{why}");
                    no_room += 1;
                }
            }
            assert_well_for(shufflers, Duration::from_millis(200));
        }
    }
    println!("{runs} runs; unmerging gave {given_back_mib} MiB back, and had no room {no_room} times");
    given_back_mib
}

/// Unmerges the processes' memory. The error is the program's message. If a killed run left ksmd in the middle of a
/// scan, we try again for up to 20 s.
fn try_unmerge(pids: &[i32]) -> Result<Value, String> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let output = pagefold(&with_pids(&["unmerge", "--json"], pids, &[]));
        if output.status.success() {
            return Ok(serde_json::from_slice(&output.stdout).unwrap());
        }
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        if !why.contains("ksmd is still in a scan") || Instant::now() > end {
            return Err(why);
        }
    }
}

/// Ends a test. Checks that each shuffler had merged pages, that every byte is right, and that nothing stays merged or
/// marked.
fn finish(ksm: &KsmAtRest, shufflers: Vec<Shuffler>, broken_before: u64) -> Vec<BTreeMap<String, u64>> {
    let pids = pids(&shufflers);
    // Unmerging also restores the knobs that a killed run has left changed.
    try_unmerge(&pids).unwrap();
    // A merged page that was in swap comes back merged, even if its mapping is no longer marked
    // (ksm_might_need_to_copy, mm/ksm.c).
    let swap = std::fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1;
    for &pid in &pids {
        if swap {
            wait_until("nothing is marked", || marks(pid).marked == 0);
        } else {
            wait_until_unmarked(pid, Duration::from_secs(60), "marked or merged");
        }
    }
    let broken = vmstat("cow_ksm") - broken_before;
    println!("COW breaks of merged pages: {broken}");
    assert!(broken > BROKEN_MIN, "{broken} COW breaks of merged pages: nothing was tested");
    for shuffler in &shufflers {
        assert!(shuffler.most_merged > MERGED_MIN, "{} pages merged at most: nothing was tested", shuffler.most_merged);
        assert!(shuffler.lines() >= 2, "{} lines: it has made hardly any check", shuffler.lines());
    }
    let counts = shufflers.into_iter().map(Shuffler::end).collect();
    assert_not_killed(&pids);
    // When the run ended, children out of scope may still have held merged pages, so that it couldn't restore a knob.
    // By now they've ended, and unmerging restores the knob.
    if Path::new(STATE_FILE).exists() {
        unmerge(&[Sleeper::start().pid()]);
    }
    ksm.assert_restored();
    counts
}

/// Waits up to 100 s, as processors may be busy, and checks the shufflers meanwhile.
#[track_caller]
fn wait_until_well(shufflers: &mut [Shuffler], what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(100);
    while !condition() {
        assert!(Instant::now() < end, "this did not happen: {what}");
        assert_well_for(shufflers, Duration::from_millis(500));
    }
}

#[test]
fn a_wrong_byte_is_found() {
    let mut shuffler = Shuffler::start("sabotage=1", None);
    // The shuffler may have ended before we've read its last line.
    wait_until("it has checked its memory", || {
        shuffler.has_ended() && shuffler.has_printed(|line| line.starts_with("bad"))
    });
    assert_has(&shuffler.last_lines(), &["bad: ", "page 7 of ", " words are wrong"]);
}

#[test]
fn every_byte_is_right_while_memory_is_merged_and_unmerged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let broken = vmstat("cow_ksm");
    let mut shufflers = start(3, "", None);
    assert!(disturb(&mut shufflers, duration(10, 40), false) > 0, "nothing was given back");
    for counts in finish(&ksm, shufflers, broken) {
        assert!(counts["forks"] > 5 && counts["faults"] > 5 && counts["remaps"] > 5, "{counts:?}");
    }
}

#[test]
fn every_byte_is_right_in_huge_pages() {
    let Some(ksm) = KsmAtRest::take() else { return };
    if !has_huge_pages() {
        return skip_unsupported("no huge pages");
    }
    let broken = vmstat("cow_ksm");
    let mut shufflers = start(3, "huge=1 regions=4 share=95", None);
    disturb(&mut shufflers, duration(8, 25), false);
    for counts in finish(&ksm, shufflers, broken) {
        assert!(counts["collapsed"] > 0, "{counts:?}");
    }
}

#[test]
fn huge_pages_come_back_where_merges_do_not_last() {
    let Some(ksm) = KsmAtRest::take() else { return };
    if !has_huge_pages() {
        return skip_unsupported("no huge pages");
    }
    let broken = vmstat("cow_ksm");
    // The shufflers rewrite each page about every ten seconds.
    let mut shufflers = start(2, "regions=3 share=100 huge=1 ops=rewrite pause-us=800", None);
    let pids = pids(&shufflers);
    let huge_mib =
        || pids.iter().map(|pid| kib(&format!("/proc/{pid}/smaps_rollup"), "AnonHugePages")).sum::<u64>() >> 10;
    let before = huge_mib();
    assert!(before > 48, "{before} MiB in huge pages");
    let daemon = Daemon::on(&pids, &[]);
    wait_until("most of it is merged", || pids.iter().all(|&pid| merged_pages(pid) > 8_000));
    let split = huge_mib();
    assert!(split < before / 2, "{split} MiB are still in huge pages");
    let collapsed = || status()["collapsed"].as_u64().unwrap();
    // Meanwhile merges still split other huge pages.
    let mut least = split;
    wait_until_well(&mut shufflers, "huge pages are put together again", || {
        least = least.min(huge_mib());
        collapsed() >= 12 && huge_mib() >= least + 16
    });
    println!("{before} MiB in huge pages, {split} while merged, {least} at least, now {}", huge_mib());
    assert_well_for(&mut shufflers, Duration::from_secs(1));
    daemon.stop();
    finish(&ksm, shufflers, broken);
}

#[test]
fn every_byte_is_right_under_memory_pressure_with_swap() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(swap) = Swap::on() else { return };
    let Some(limited) = Limited::make() else { return };
    let broken = vmstat("cow_ksm");
    let (ins, outs) = (vmstat("pswpin"), vmstat("pswpout"));
    // Together the shufflers hold 150 MiB, and they have children that write.
    limited.limit(200 * MIB);
    let mut shufflers = start(3, "", Some(&limited));
    let reclaim = Reclaim::start(&limited);
    disturb(&mut shufflers, duration(10, 35), true);
    drop(reclaim);
    let (ins, outs) = (vmstat("pswpin") - ins, vmstat("pswpout") - outs);
    println!("pages swapped in {ins}, out {outs}; the limit was hit {} times", limited.hits());
    assert!(ins > 1_000 && outs > 1_000, "there was no pressure");
    limited.unlimited();
    finish(&ksm, shufflers, broken);
    assert_eq!(limited.kills(), 0);
    drop(swap);
}

/// Starts shufflers that only read, and shufflers with the settings `others`, in one cgroup. Waits until the ones that
/// only read are merged.
fn merged_in(limited: &Limited, others: &[&str]) -> (Vec<Shuffler>, Vec<Shuffler>) {
    let mut shufflers = start(3, "mib=96 share=100 ops=check", Some(limited));
    let others = others.iter().map(|settings| Shuffler::start(settings, Some(limited.path()))).collect();
    let daemon = Daemon::on(&pids(&shufflers), &EAGER);
    wait_until("nearly all is merged", || pids(&shufflers).iter().all(|&pid| merged_pages(pid) > 22_000));
    daemon.stop();
    assert_well_for(&mut shufflers, Duration::from_millis(100));
    (shufflers, others)
}

/// Unmerging must always leave this much free below the limit.
const MARGIN: u64 = 32 * MIB;

/// Checks that unmerging stops in time if headroom is lacking, and says so in one line.
#[track_caller]
fn assert_no_room(pids: &[i32]) {
    let began = Instant::now();
    let output = pagefold(&with_pids(&["unmerge"], pids, &[]));
    println!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    assert_failed(&output, 1, "has room for");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn unmerging_stops_before_the_limit() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let broken = vmstat("cow_ksm");
    let (mut shufflers, _) = merged_in(&limited, &[]);
    let pids = pids(&shufflers);
    let merged = || pids.iter().map(|&pid| merged_pages(pid)).sum::<u64>() / PAGES_PER_MIB;
    let before = merged();

    // There's no headroom for a single step.
    limited.limit(limited.usage() + MARGIN);
    assert_no_room(&pids[..1]);
    assert_eq!(merged(), before);
    // There's headroom for some of this process's 96 MiB. Unmerging may use that headroom, but no more.
    let limit = limited.usage() + 3 * MARGIN;
    limited.limit(limit);
    limited.forget_peak();
    assert_no_room(&pids[..1]);
    let left = (limit - limited.peak()) / MIB;
    println!("merged {before} MiB, then {} MiB; at least {left} MiB were left below the limit", merged());
    // If a mapping is only partly unmarked, its pages count as merged until ksmd's next scan.
    assert!(merged() + 40 < before && merged() + 70 > before, "{} of {before}", merged());
    assert!(left < 64, "it stopped too soon");
    assert!(left * MIB >= MARGIN);
    assert_well_for(&mut shufflers, Duration::from_secs(2));
    assert_eq!((limited.hits(), limited.kills()), (0, 0));

    limited.unlimited();
    finish(&ksm, shufflers, broken);
}

#[test]
fn unmerging_leaves_room_for_other_processes_in_the_cgroup() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let broken = vmstat("cow_ksm");
    // This process takes 24 MiB and gives it back, again and again.
    let (mut shufflers, mut neighbours) = merged_in(&limited, &["mib=1 regions=1 ops=burst burst=24 pause-us=0"]);
    let pids = pids(&shufflers);
    let least = (0..200).map(|_| limited.usage()).min().unwrap();
    let limit = least + 4 * MARGIN;
    limited.limit(limit);
    limited.forget_peak();
    // Between two bursts there's headroom for everything, and during a burst for all but the last steps.
    for &pid in &pids {
        let gave = match try_unmerge(&[pid]) {
            Ok(summary) => format!("all, {} us at most at a time", summary["longest_stop_us"]),
            Err(why) if why.contains("has room for") => why,
            Err(why) => panic!("{why}"),
        };
        println!("{} MiB used of {} since the limit was set: {gave}", limited.peak() / MIB, limit / MIB);
    }
    shufflers.iter_mut().chain(&mut neighbours).for_each(Shuffler::assert_well);
    assert!(pids.iter().any(|&pid| merged_pages(pid) > 1_000), "there was room for all: nothing was tested");
    assert_eq!((limited.hits(), limited.kills()), (0, 0));
    assert!(limited.peak() < limit);
    for neighbour in neighbours {
        neighbour.end();
    }
    limited.unlimited();
    finish(&ksm, shufflers, broken);
}

#[test]
fn cow_broken_memory_is_not_unmarked_without_room() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(limited) = Limited::make() else { return };
    let broken = vmstat("cow_ksm");
    // The shufflers rewrite each page about every ten seconds. Even if they write all, there's headroom for that.
    let settings = "mib=24 regions=2 share=100 ops=rewrite pause-us=1600";
    let mut shufflers = start(2, settings, Some(&limited));
    let pids = pids(&shufflers);
    let marked = || pids.iter().map(|&pid| marks(pid).marked).sum::<u64>();
    let daemon = Daemon::on(&pids, &[]);
    wait_until("most of it is merged", || pids.iter().all(|&pid| merged_pages(pid) > 4_500));
    limited.limit(limited.usage() + MARGIN);
    let before = marked();
    let is_cow_broken = || row(&status()["kinds"], "kind", "cow-broken")["resident_bytes"].as_u64().unwrap() > 20 * MIB;
    wait_until_well(&mut shufflers, "it is classified as COW-broken", is_cow_broken);
    assert_well_for(&mut shufflers, Duration::from_secs(3));
    assert_eq!((limited.hits(), limited.kills()), (0, 0));
    println!("COW-broken, and {} of {} MiB stay marked", marked() / MIB, before / MIB);
    // Extents whose pages have just been written may be unmarked: they need little headroom. A busy machine has more.
    assert!(marked() > before / 4);
    // Once there's headroom, the memory is unmarked.
    limited.unlimited();
    wait_until("most is unmarked", || marked() < before / 4);
    assert_eq!((limited.hits(), limited.kills()), (0, 0));
    daemon.stop();
    finish(&ksm, shufflers, broken);
}

/// The kernel returns a list of mappings in pieces, so the list can miss a mapping that moves meanwhile.
#[test]
fn memory_that_moves_is_unmarked() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut unmarked = 0;
    for _ in 0..40 {
        let mut victim = Victim::start("moving");
        assert_eq!(victim.line(), "moving");
        let output = pagefold(&with_pids(&["unmerge"], &[victim.pid()], &[]));
        victim.finish("moving");
        if output.status.success() {
            unmarked += 1;
            assert_unmarked(&[victim.pid()]);
        }
    }
    println!("unmarked {unmarked} times");
    assert!(unmarked > 20);
    ksm.assert_restored();
}

/// Forks a child every 5 ms. Each child inherits the parent's marks. Then the parent waits.
const FORKING: &str = r#"
import mmap, os, signal, sys, time
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(os.urandom(1 << 20))
memory.madvise(mmap.MADV_MERGEABLE)
print("ready", flush=True)
sys.stdin.readline()
children = []
for number in range(60):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    children.append(pid)
    if number == 10:
        print("forking", flush=True)
    time.sleep(0.005)
sys.stdin.readline()
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print("ok", flush=True)
"#;

#[test]
fn children_that_are_forked_meanwhile_are_unmarked() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(group) = Cgroup::create("unified") else { return skip("no cgroups of version 2") };
    let mut forking = Script::start(FORKING);
    group.add(forking.pid());
    forking.say("fork");
    assert_eq!(forking.line(), "forking");
    succeed(&["unmerge", "--cgroup", group.path().to_str().unwrap()]);
    let pids = group.members();
    println!("{} processes", pids.len());
    assert!(pids.len() > 15);
    assert_unmarked(&pids);
    forking.say("end");
    assert_eq!(forking.line(), "ok");
    ksm.assert_restored();
}
