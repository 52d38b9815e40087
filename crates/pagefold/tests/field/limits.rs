//! Containers that stay below their memory limits without pagefold.

use crate::*;
use pagefold_testkit::limit::Limited;

/// Each program holds so much, all the same.
const MIB_EACH: u64 = 60;
/// Its limit, MiB: it could keep 24 MiB for others, so three of them can keep all of it once.
const LIMIT: u64 = MIB_EACH * 140 / 100;
/// Of what could be saved without anybody being killed. ksmd keeps the copy of whoever was marked last, so the headroom of
/// the first is never used: two thirds are the most there.
const LEAST_PERCENT: u64 = 60;
/// The last part comes extent by extent, each after two scans.
const SECONDS: u64 = 60;

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
    // Nothing is merged and nothing given back while they write.
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
