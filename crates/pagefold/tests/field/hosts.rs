//! Memory limits, and swap.

use crate::swap::Swap;
use crate::*;
use pagefold_testkit::limit::{Limited, Reclaim};

/// Each program holds this much memory, with the same contents.
const MIB_EACH: u64 = 60;
/// A program's limit, MiB. It leaves headroom for 24 MiB that others use, so three programs can keep one copy of all.
const LIMIT: u64 = MIB_EACH * 140 / 100;
/// The least that we must save, in percent of what we could save without anybody being killed. ksmd keeps the copy of
/// whoever was marked last, so the first one's headroom is never used, and at most two thirds can be saved.
const LEAST_PERCENT: u64 = 60;
/// How long saving that much may take. The last part is merged extent by extent, each after two scans.
const SECONDS: u64 = 60;

/// Containers that stay below their limits without pagefold.
#[test]
fn containers_that_rewrite_their_memory_in_turn_live() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut programs = Vec::new();
    let mut limits = Vec::new();
    for _ in 0..3 {
        let Some(limit) = Limited::make() else { return };
        limit.limit(LIMIT * MIB);
        let mut program = Holder::start(MIB_EACH * PAGES_PER_MIB);
        limit.add(program.pid());
        program.write(0, program.pages, COMMON);
        programs.push(program);
        limits.push(limit);
    }
    let pids = pids_of(&programs);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    let most = 2 * MIB_EACH;
    let least = most * LEAST_PERCENT / 100;
    let start = Instant::now();
    let mut saved = 0;
    while saved < least && start.elapsed() < Duration::from_secs(SECONDS) {
        std::thread::sleep(Duration::from_secs(1));
        saved = saved_mib(unmerged, &pids);
    }
    println!("{saved} MiB of {most} saved after {} s", start.elapsed().as_secs());
    // The daemon must merge and unmerge nothing while they write.
    daemon.signal(libc::SIGSTOP);
    let mut order = [0, 1, 2];
    order.sort_by_key(|&at: &usize| std::cmp::Reverse(limits[at].usage()));
    for at in order {
        let program = &mut programs[at];
        program.write(0, program.pages, COMMON << 1);
        let kills: Vec<u64> = limits.iter().map(Limited::kills).collect();
        assert_eq!(kills, [0, 0, 0], "{} MiB in use", limits[at].usage() / MIB);
    }
    daemon.signal(libc::SIGCONT);
    for limit in &limits {
        limit.unlimited();
    }
    assert!(programs.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
    assert!(saved >= least, "{saved} MiB of {most}, which can be saved without a kill");
}

/// Guests on a host with zram, as Proxmox VE has them: a page that is swapped in is a copy again.
#[test]
#[ignore = "long; make field runs it"]
fn guests_that_were_swapped_out_are_merged_again() {
    const GUESTS: u64 = 3;
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(_swap) = Swap::on() else { return };
    let Some(limited) = Limited::make() else { return };
    let mut guests = Vec::new();
    for _ in 0..GUESTS {
        let mut guest = Holder::start(MIB_EACH * PAGES_PER_MIB);
        limited.add(guest.pid());
        guest.write(0, guest.pages, COMMON);
        guests.push(guest);
    }
    let pids = pids_of(&guests);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    let least_mib = (GUESTS - 1) * MIB_EACH * 98 / 100;
    assert_saves(unmerged, &pids, least_mib, 20);
    let (before, reclaim) = (vmstat("pswpout"), Reclaim::start(&limited));
    wait_until("half of them is swapped out", || vmstat("pswpout") - before > MIB_EACH * PAGES_PER_MIB / 2);
    drop(reclaim);
    // This reads all of it, and so swaps it in.
    assert!(guests.iter_mut().all(Holder::is_intact));
    println!("{} MiB saved when all is swapped in", saved_mib(unmerged, &pids));
    assert_saves(unmerged, &pids, least_mib, 120);
    assert!(guests.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}
