//! `--only zeros` on the real kernel.

use pagefold_procmem::os::fields;
use pagefold_testkit::*;
use std::fs;

const PAGES: u64 = 16 * PAGES_PER_MIB;

/// A process with some pages of zeros, followed by contents that all these processes have in common.
fn holder(zeros: u64) -> Holder {
    let mut holder = Holder::start(PAGES);
    holder.zero(0, zeros);
    holder.write(zeros, PAGES - zeros, 0x2e60_0001);
    holder
}

/// How many pages of a process are merged with the zero page, and how many with other pages.
fn merged(pid: i32) -> (u64, u64) {
    let text = fs::read(format!("/proc/{pid}/ksm_stat")).unwrap();
    let [zeros, others] = ["ksm_zero_pages", "ksm_merging_pages"].map(|name| fields::number(&text, name).unwrap_or(0));
    (zeros, others)
}

#[test]
fn zeros_are_merged_and_memory_without_many_of_them_is_not_marked() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut zeros = [holder(PAGES), holder(PAGES)];
    let mut mostly = [holder(PAGES / 4 * 3), holder(PAGES / 4 * 3)];
    let mut copies = [holder(0), holder(0)];
    if !fs::read_to_string("/proc/self/ksm_stat").is_ok_and(|text| text.contains("ksm_zero_pages")) {
        return skip_unsupported("this kernel does not count zero pages");
    }
    let pids_of = |holders: &[Holder]| holders.iter().map(Holder::pid).collect::<Vec<_>>();
    let pids = [pids_of(&zeros), pids_of(&mostly), pids_of(&copies)].concat();
    let daemon = Daemon::on(&pids, &["--only", "zeros", "--governor", "full", "--mechanism", "ksmd"]);
    wait_until("zeros are merged", || {
        let of = |pid: i32, pages: u64| merged(pid).0 >= pages / 100 * 95;
        pids[..2].iter().all(|&pid| of(pid, PAGES)) && pids[2..4].iter().all(|&pid| of(pid, PAGES / 4 * 3))
    });
    // Any later scans and marks would happen in this time.
    std::thread::sleep(std::time::Duration::from_secs(20));
    for pid in &pids[4..] {
        assert_eq!(marks(*pid), Marks::default(), "no part of it is zero");
    }
    for pid in &pids[..2] {
        assert!(merged(*pid).1 < PAGES / 50, "{:?}", merged(*pid));
    }
    // ksmd merges all equal pages in marked memory, and `status` says so.
    let status = status();
    assert_eq!(status["only"], "zeros");
    let other = status["other_bytes"].as_u64().unwrap();
    assert!((2 * 4 * MIB * 95 / 100..2 * 5 * MIB).contains(&other), "{other}");
    assert!(pids[2..4].iter().all(|&pid| merged(pid).1 >= PAGES / 4 / 100 * 95), "the kernel's rule");
    assert_has(&succeed(&["status"]), &["of the marked memory holds other data"]);
    assert!(zeros.iter_mut().chain(&mut mostly).chain(&mut copies).all(Holder::is_intact));
    ksm.end(daemon, &pids);
}
