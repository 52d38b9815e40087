//! Prefork servers: masters that load the same data, and workers that only read it.

use crate::*;

const MIB_EACH: u64 = 100;
const WORKERS: usize = 4;

/// A master, and its workers' pids.
fn prefork() -> (Holder, Vec<i32>) {
    let mut master = program_with(MIB_EACH);
    let workers = (0..WORKERS).map(|_| master.fork()).collect();
    (master, workers)
}

fn members(masters: &[(Holder, Vec<i32>)]) -> Vec<i32> {
    masters.iter().flat_map(|(master, workers)| [&[master.pid()], &workers[..]].concat()).collect()
}

#[test]
fn masters_with_workers_save_as_much_as_masters_alone() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let masters = [prefork(), prefork()];
    let pids = members(&masters);
    let unmerged = held(&pids);
    let promised = savable_mib(&scan(&pids));
    assert!((MIB_EACH - 5..MIB_EACH + 5).contains(&promised), "scan promises {promised} MiB");
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, MIB_EACH * 95 / 100, 25);
    ksm.end(daemon, &pids);
}

/// The kernel places new mappings right below older ones. So what a worker inherits and what it allocates look like one
/// mapping, which begins at another address in each process.
#[test]
fn workers_that_allocate_memory_save_as_much_as_others() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut masters = [program_with(MIB_EACH), program_with(MIB_EACH)];
    let mut pids = pids_of(&masters);
    let mut own = 0;
    for (number, master) in (1..).zip(&mut masters) {
        for worker in 1..=WORKERS as u64 {
            let pages = worker * PAGES_PER_MIB / 4;
            pids.push(master.fork_and_map(pages, (number << 8 | worker) << 32));
            own += pages * 4096;
        }
    }
    wait_until("all have allocated", || held(&pids) >= 2 * MIB_EACH * MIB + own);
    let unmerged = held(&pids);
    let promised = savable_mib(&scan(&pids));
    assert!((MIB_EACH - 5..MIB_EACH + 5).contains(&promised), "scan promises {promised} MiB");
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, MIB_EACH * 95 / 100, 25);
    wait_until("status says so", || {
        let said = status()["saved_bytes"].as_u64().unwrap_or(0) / MIB;
        (MIB_EACH * 95 / 100..=MIB_EACH).contains(&said)
    });
    ksm.end(daemon, &pids);
}

/// Backends of a database, or workers whose garbage collector rewrites what they inherited: each writes the same
/// contents at the same addresses, but after the fork.
#[test]
fn equal_memory_that_workers_wrote_themselves_counts_as_saved() {
    const WRITTEN: u64 = 8 * PAGES_PER_MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut master = Holder::start(2 * WRITTEN);
    master.write(0, WRITTEN, COMMON);
    let workers: Vec<i32> = (0..WORKERS).map(|_| master.fork_and_write(WRITTEN, WRITTEN, COMMON << 1)).collect();
    let pids = [&[master.pid()], &workers[..]].concat();
    let all = (WRITTEN * (WORKERS as u64 + 1)) * 4096;
    wait_until("all have written", || held(&pids) >= all);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    let least_mib = (WORKERS as u64 - 1) * WRITTEN / PAGES_PER_MIB * 95 / 100;
    assert_saves(unmerged, &pids, least_mib, 20);
    let began = Instant::now();
    loop {
        let said = status()["saved_bytes"].as_u64().unwrap_or(0) / MIB;
        if said >= least_mib {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "status says {said} MiB, {least_mib} are saved");
        std::thread::sleep(Duration::from_millis(100));
    }
    ksm.end(daemon, &pids);
}

/// Masters run as root and workers as another user, or only one of them is in scope for another reason. The processes
/// out of scope keep the frames that all share.
#[test]
fn families_with_members_out_of_scope_are_promised_nothing_and_left_alone() {
    const SECONDS: Duration = Duration::from_secs(8);
    let Some(ksm) = KsmAtRest::take() else { return };
    let masters = [prefork(), prefork()];
    let all = members(&masters);
    let unmerged = held(&all);
    let of_masters: Vec<i32> = masters.iter().map(|(master, _)| master.pid()).collect();
    let of_workers: Vec<i32> = masters.iter().flat_map(|(_, workers)| workers.clone()).collect();
    for pids in [of_masters, of_workers] {
        let report = scan(&pids);
        assert!(savable_mib(&report) < 5, "scan promises {} MiB", savable_mib(&report));
        let reason = "shared through fork with processes out of scope or left alone";
        let left_out = row(&report["excluded"], "reason", reason)["bytes"].as_u64().unwrap();
        assert!(left_out.abs_diff(held(&pids)) < 5 * MIB, "{} MiB left out", left_out / MIB);
        let daemon = run(&pids);
        let began = Instant::now();
        while began.elapsed() < SECONDS {
            std::thread::sleep(Duration::from_millis(100));
            let state = status();
            assert!(state["saved_bytes"].as_u64().is_none_or(|saved| saved < MIB), "{state}");
        }
        assert!(saved_mib(unmerged, &all) < 5 && number("pages_shared") < PAGES_PER_MIB);
        let reason = "shared through fork with processes that are out of scope";
        assert_has(&succeed(&["explain", &pids[0].to_string()]), &[reason]);
        ksm.end(daemon, &pids);
    }
}
