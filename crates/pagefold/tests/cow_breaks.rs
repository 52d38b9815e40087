//! Memory that a program rewrites with the same contents, beside memory that it doesn't rewrite.

use pagefold_testkit::*;
use std::time::{Duration, Instant};

/// Pages of each process, and how many of them, from the start, it rewrites again and again.
const PAGES: u64 = 256 * PAGES_PER_MIB;
const WALKED: u64 = 16 * PAGES_PER_MIB;
/// Pages rewritten per second: half a MiB.
const PER_SECOND: u64 = 128;
const CONTENT: u64 = 0x3a1c_0001;
/// The most memory that both processes may take together.
const MOST: u64 = 40 * MIB;

/// A process with a heap of zeros that were written once, and some data that all such processes share.
fn holder() -> Holder {
    let mut holder = Holder::start(PAGES);
    holder.write(0, WALKED, CONTENT);
    holder.zero(WALKED, PAGES - WALKED);
    holder
}

/// Half a minute is enough to rewrite all the data once. For a longer test, set `PAGEFOLD_SOAK_SECONDS=600`.
#[test]
fn zeros_beside_data_that_is_rewritten_stay_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let seconds = std::env::var("PAGEFOLD_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let mut holders = [holder(), holder()];
    let pids = [holders[0].pid(), holders[1].pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full", "--mechanism", "ksmd"]);
    let held = || pids.iter().map(|pid| kib(&format!("/proc/{pid}/smaps_rollup"), "Pss_Anon") << 10).sum::<u64>();
    wait_until("all of it is merged", || held() < 20 * MIB);
    let (began, mut walked, mut most) = (Instant::now(), 0, 0);
    for second in 1..=seconds {
        while began.elapsed() < Duration::from_secs(second) {
            std::thread::sleep(Duration::from_millis(100));
            let due = u64::try_from(began.elapsed().as_millis()).unwrap() * PER_SECOND / 1_000;
            let first = walked % WALKED;
            let pages = (due - walked).min(WALKED - first);
            for holder in &mut holders {
                holder.write(first, pages, CONTENT + first);
            }
            walked += pages;
        }
        most = most.max(held());
        assert!(most <= MOST, "{} MiB after {second} s", most / MIB);
    }
    println!("at most {} MiB", most / MIB);
    assert!(holders.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}
