//! Swap. Memory limits are in `tests/charge.rs`.

use crate::swap::Swap;
use crate::*;
use pagefold_testkit::limit::{Limited, Reclaim};

/// Each program holds this much memory, with the same contents.
const MIB_EACH: u64 = 60;

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
    // This reads all memory, and so swaps it in.
    assert!(guests.iter_mut().all(Holder::is_intact));
    println!("{} MiB saved when all is swapped in", saved_mib(unmerged, &pids));
    assert_saves(unmerged, &pids, least_mib, 120);
    assert!(guests.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}
