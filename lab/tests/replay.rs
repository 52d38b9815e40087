//! Every algorithm on memories that are small enough to know the expected result.

use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_lab::record::{Deltas, MemorySnapshot, Origin, PARTS, Page, ProcessRow, Record, RegionRow};
use pagefold_lab::replay::{Algorithm, Outcome, Settings, replay, savable};
use pagefold_lab::script::{Scripted, script};

const S: u64 = 1_000_000_000;

/// A page with these digests of quarters.
fn page(quarters: [u32; PARTS]) -> Page {
    let mix =
        |sum: u128, quarter: &u32| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835) + u128::from(*quarter);
    let digest = quarters.iter().fold(1, mix).wrapping_mul(0x2545_f491_4f6c_dd1d_2545_f491_4f6c_dd1d);
    let zero = quarters == [0; PARTS];
    Page { state: PageState::Private, huge: false, digest: if zero { 0 } else { digest }, parts: quarters, frame: None }
}

/// A record of processes with one region each; `content` gives a page by second, process and index.
fn record(processes: u32, pages: u64, seconds: u64, content: impl Fn(u64, u32, u64) -> Option<Page>) -> Scripted {
    let mut deltas = Deltas::new();
    let memory = |second: u64| {
        let process = |process| ProcessRow { process, pid: None, name: Some("twin".to_owned()) };
        let region = |process: u32| {
            let row =
                RegionRow { region: process, process, kind: "heap".into(), first: Vpn(1 << 20), pages: Pages(pages) };
            let there = |at| Some((Vpn((1 << 20) + at), content(second, process, at)?));
            (row, (0..pages).filter_map(there).collect())
        };
        MemorySnapshot {
            time_ns: second * S,
            processes: (0..processes).map(process).collect(),
            regions: (0..processes).map(region).collect(),
        }
    };
    let snapshots = (0..seconds).map(|second| deltas.next(memory(second))).collect();
    script(&Record { origin: Origin { source: "test".into(), every_ns: S, anonymous: false }, snapshots })
}

fn number(at: u64) -> u32 {
    u32::try_from(at).unwrap()
}

fn run(algorithm: Algorithm, scripted: &Scripted) -> Outcome {
    let outcome = replay(algorithm, scripted, &Settings::for_record(scripted));
    assert!(outcome.futile_comparisons <= outcome.comparisons());
    assert!(outcome.curve.windows(2).all(|pair| pair[0].comparisons <= pair[1].comparisons));
    outcome
}

#[test]
fn every_algorithm_finds_unchanging_duplicates() {
    // Three programs: a quarter common, a quarter zeros, the rest unique.
    let scripted = record(3, 4_096, 30, |_, process, at| {
        Some(page(match at % 4 {
            0 => [1, 2, 3, number(at) + 1],
            1 => [0; PARTS],
            _ => [process + 1, 2, 3, number(at) + 1],
        }))
    });
    let most = savable(&scripted, &Settings::for_record(&scripted)).last().unwrap().1;
    assert_eq!(most, 2 * 1_024 + 3 * 1_024);
    for (_, algorithm) in Algorithm::NAMES {
        let outcome = run(algorithm, &scripted);
        if algorithm == Algorithm::CmdAddress {
            assert!(outcome.saved < most / 2 + most / 4, "copies are in different eighths: {}", outcome.saved);
            continue;
        }
        // Zeros take one frame, several with 256 pages each, or none.
        assert!(outcome.saved + 16 >= most && outcome.saved <= most, "{algorithm}: {} of {most}", outcome.saved);
    }
}

#[test]
fn the_same_record_gives_the_same_results() {
    let scripted = record(2, 2_000, 10, |second, process, at| {
        let now = if at % 7 == 0 { number(second) } else { 0 };
        Some(page([number(at / 2), if at % 3 == 0 { process } else { 9 }, now, 1]))
    });
    for (_, algorithm) in Algorithm::NAMES {
        let json = |outcome: Outcome| serde_json::to_string(&outcome).unwrap();
        assert_eq!(json(run(algorithm, &scripted)), json(run(algorithm, &scripted)), "{algorithm}");
    }
}

#[test]
fn ksm_compares_repeatedly_and_classes_compare_once() {
    // No common contents, no writes.
    let scripted = record(2, 8_000, 20, |_, process, at| Some(page([process + 1, number(at), 3, 4])));
    let ksm = run(Algorithm::Ksm, &scripted);
    let classed = run(Algorithm::CmdSubPage, &scripted);
    assert_eq!((ksm.saved, ksm.futile_rate), (0, 1.0));
    assert_eq!(classed.searches, 16_000, "each page is searched for once");
    assert!(classed.spared > 16_000);
    // The depth of a red-black tree that grows from nothing to n is about log2(n) - 1.4 on average.
    let depth = ksm.depth;
    assert!((11.0..14.5).contains(&depth), "{depth}");
}

#[test]
fn a_forest_is_shallower_and_finds_the_same() {
    let scripted = record(2, 16_000, 20, |_, _, at| Some(page([1, 2, number(at), 4])));
    let plain = run(Algorithm::Ksm, &scripted);
    let mut settings = Settings::for_record(&scripted);
    settings.trees = Some(64);
    let forest = replay(Algorithm::NuKsm, &scripted, &settings);
    assert_eq!((plain.saved, forest.saved), (16_000, 16_000));
    let saved = plain.depth - forest.depth;
    // Searches go down a stable tree and an unstable one; log2(64) is 6.
    assert!((9.0..13.0).contains(&saved), "{} and {}", plain.depth, forest.depth);
}

#[test]
fn classes_depend_on_the_quarters_written() {
    // Pages are written in their first or last quarter for ten seconds and then no more.
    let scripted = record(2, 4_000, 40, |second, _, at| {
        let time = number(second.min(10)) + 1;
        let (first, last) = if at % 2 == 0 { (time, 1) } else { (1, time) };
        Some(page([first, 2, number(at) + 1, last]))
    });
    let outcome = run(Algorithm::CmdSubPage, &scripted);
    assert_eq!(outcome.saved, 4_000);
    assert!(outcome.trees[0b0001] > 1_500 && outcome.trees[0b1000] > 1_500, "{:?}", outcome.trees);
}

#[test]
fn pages_shared_by_fork_are_counted_once() {
    let scripted = record(2, 100, 3, |_, _, at| {
        Some(Page { state: PageState::Shared, frame: Some(500 + at), ..page([1, 2, number(at) + 1, 4]) })
    });
    assert_eq!(scripted.forked, 100);
    assert_eq!(run(Algorithm::Ksm, &scripted).saved, 0);
}

#[test]
fn regions_can_end_start_and_grow() {
    let scripted = record(3, 600, 20, |second, process, at| {
        let there = at < 100 + second * 20 && (process > 0 || second % 6 < 3);
        there.then(|| page([7, 2, number(at) + 1, 4]))
    });
    for (_, algorithm) in Algorithm::NAMES {
        let outcome = run(algorithm, &scripted);
        assert!(outcome.saved <= 2 * 600, "{algorithm}");
    }
    assert!(run(Algorithm::Ksm, &scripted).saved > 300);
}
