//! Equal seeds give equal records, which have the structure that the generators' documentation describes.

use super::*;
use crate::record::{Deltas, Event, PARTS, Page, State};
use rustc_hash::{FxHashMap, FxHashSet};
use std::hash::Hash;

/// Enough memory for precise shares.
const GUEST: Pages = Pages(24 * PAGES_PER_MIB);
const SMALL: Pages = Pages(2 * PAGES_PER_MIB);

type Parts = [bool; PARTS];

fn options(name: &str, size: Pages, seconds: u64) -> (&'static Generator, Options) {
    let generator = Generator::named(name).unwrap();
    (generator, Options { size, length_ns: seconds * NS_PER_S, ..generator.defaults })
}

fn snapshots(name: &str, size: Pages, seconds: u64) -> Vec<MemorySnapshot> {
    let (generator, options) = options(name, size, seconds);
    all(generator.start(&options).unwrap())
}

fn all(mut source: Generated) -> Vec<MemorySnapshot> {
    std::iter::from_fn(|| source.next_snapshot().unwrap()).collect()
}

/// Every page by its process and number.
fn pages(snapshot: &MemorySnapshot) -> FxHashMap<(u32, Vpn), Page> {
    snapshot
        .regions
        .iter()
        .flat_map(|(row, pages)| pages.iter().map(|&(page, held)| ((row.process, page), held)))
        .collect()
}

/// The share of the guests' memory that we save by keeping one of the equal pages with equal marks.
fn savable<M: Hash + Eq>(snapshot: &MemorySnapshot, mark: impl Fn(&Page) -> M) -> f64 {
    let all: u64 = snapshot.regions.iter().map(|(row, _)| row.pages.0).sum();
    let pages = pages(snapshot);
    let kept: FxHashSet<_> = pages.values().map(|page| (page.digest, mark(page))).collect();
    (pages.len() - kept.len()) as f64 / all as f64
}

/// The savable share, and the part of it that's left with eight classes of equal address ranges.
fn by_address(snapshot: &MemorySnapshot) -> (f64, f64) {
    let end = 1 + pages(snapshot).values().filter_map(|page| page.frame).max().unwrap();
    let all = savable(snapshot, |_| ());
    (all, savable(snapshot, |page| page.frame.unwrap() * 8 / end) / all)
}

/// Counts changes of present pages between consecutive snapshots by the parts that changed.
fn changes(snapshots: &[MemorySnapshot]) -> FxHashMap<Parts, u64> {
    let mut found = FxHashMap::default();
    for pair in snapshots.windows(2) {
        let before = pages(&pair[0]);
        for (place, page) in pages(&pair[1]) {
            let Some(was) = before.get(&place) else { continue };
            let changed: Parts = std::array::from_fn(|part| was.parts[part] != page.parts[part]);
            assert_eq!(was.digest != page.digest, changed.contains(&true), "the whole changes with its parts");
            if was.digest != page.digest {
                *found.entry(changed).or_default() += 1;
            }
        }
    }
    found
}

fn count(changes: &FxHashMap<Parts, u64>, parts: [u8; PARTS]) -> u64 {
    changes.get(&parts.map(|part| part == 1)).copied().unwrap_or(0)
}

#[test]
fn equal_seeds_give_equal_records_and_others_differ() {
    for generator in GENERATORS {
        let options = Options { size: SMALL, length_ns: 3 * NS_PER_S, ..generator.defaults };
        let one = all(generator.start(&options).unwrap());
        let same = all(generator.start(&options).unwrap());
        let other = all(generator.start(&Options { seed: 2, ..options }).unwrap());
        assert_eq!(one.len(), 4, "{}", generator.name);
        let mut digests = FxHashSet::default();
        for ((one, same), other) in one.iter().zip(&same).zip(&other) {
            assert_eq!((one.time_ns, &one.processes, &one.regions), (same.time_ns, &same.processes, &same.regions));
            digests.extend(pages(one).values().filter(|page| page.digest != 0).map(|page| page.digest));
            assert!(pages(other).values().all(|page| !digests.contains(&page.digest)), "{}", generator.name);
        }
    }
}

#[test]
fn every_snapshot_is_well_formed() {
    for generator in GENERATORS {
        let options = Options { size: SMALL, length_ns: 10 * NS_PER_S, every_ns: NS_PER_S / 2, ..generator.defaults };
        let (mut deltas, mut state) = (Deltas::new(), State::default());
        for (number, snapshot) in (0..).zip(all(generator.start(&options).unwrap())) {
            assert_eq!(snapshot.time_ns, number * options.every_ns);
            assert!(snapshot.regions.is_sorted_by_key(|(row, _)| (row.process, row.first)));
            let mut frames = FxHashSet::default();
            for (row, pages) in &snapshot.regions {
                assert!(snapshot.processes.iter().any(|process| process.process == row.process));
                assert!(pages.is_sorted_by_key(|(page, _)| *page));
                for (page, held) in pages {
                    assert!((row.first..row.first + row.pages.0).contains(page));
                    assert!(frames.insert(held.frame.unwrap()), "no two pages share a frame");
                    assert_eq!(held.digest == 0, held.parts == [0; PARTS], "only zeros have digest 0");
                }
            }
            // The record restores the snapshot.
            state.apply(&deltas.next(snapshot.clone()));
            for (row, pages) in snapshot.regions {
                let held = &state.regions[&row.region];
                assert_eq!((&held.row, held.pages.iter().collect::<Vec<_>>()), (&row, pages));
            }
        }
    }
}

#[test]
fn invalid_options_are_refused() {
    let (generator, good) = options("database", SMALL, 10);
    let refused = |options| generator.start(&options).err();
    assert_eq!(refused(good), None);
    assert_eq!(refused(Options { size: Pages(255), ..good }), Some(OptionsError::Size(255)));
    assert_eq!(refused(Options { size: Pages(u64::MAX), ..good }), Some(OptionsError::Size(u64::MAX)));
    for processes in [0, 65] {
        assert_eq!(refused(Options { processes, ..good }), Some(OptionsError::Processes(processes)));
    }
    for every_ns in [0, MIN_INTERVAL_NS - 1, good.length_ns + 1] {
        let length_ns = good.length_ns;
        assert_eq!(refused(Options { every_ns, ..good }), Some(OptionsError::Every { every_ns, length_ns }));
    }
    assert!(Generator::named("no-such-workload").is_none());
}

/// CMD, section 5: in 4 x 2 GiB, 1.02e6, 7.45e5 and 3.87e5 pages can be shared, and by address 71, 39 and 92 % of them.
#[test]
fn guests_share_as_much_as_in_the_paper() {
    for (name, shared, address) in [("kernel-build", 0.49, 0.71), ("web-server", 0.36, 0.39), ("database", 0.18, 0.92)]
    {
        let snapshots = snapshots(name, GUEST, 60);
        let best = snapshots.iter().skip(20).map(|snapshot| by_address(snapshot).0).sum::<f64>() / 41.0;
        assert!((best - shared).abs() < 0.05, "{name}: {best:.3} shared, {shared} in the paper");
        let (_, found) = by_address(&snapshots[60]);
        assert!((found - address).abs() < 0.10, "{name}: {found:.3} by address, {address} in the paper");
        let zeros = pages(&snapshots[60]).values().filter(|page| page.digest == 0).count();
        let all = pages(&snapshots[60]).len();
        assert!(zeros > all / 200 && zeros < all / 20, "{name}: {zeros} pages of zeros of {all}");
    }
}

/// Checks the share of unique pages that haven't changed since the first snapshot.
#[test]
fn guests_have_unique_memory_that_stays() {
    for name in ["kernel-build", "web-server", "database"] {
        let snapshots = snapshots(name, GUEST, 30);
        let mut copies: FxHashMap<u128, u32> = FxHashMap::default();
        let (first, last) = (pages(&snapshots[0]), pages(&snapshots[30]));
        for page in last.values() {
            *copies.entry(page.digest).or_default() += 1;
        }
        let own =
            last.iter().filter(|(place, page)| copies[&page.digest] == 1 && first.get(place) == Some(page)).count();
        let share = own as f64 / last.len() as f64;
        assert!((0.15..0.6).contains(&share), "{name}: {share}");
    }
}

#[test]
fn a_build_writes_whole_pages_and_equal_files_at_different_times() {
    let snapshots = snapshots("kernel-build", GUEST, 60);
    let changes = changes(&snapshots);
    let (whole, all) = (count(&changes, [1, 1, 1, 1]), changes.values().sum::<u64>());
    assert!(whole > all / 2, "compilers and files: {whole} of {all}");
    let kinds = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]];
    let objects: u64 = kinds.map(|parts| count(&changes, parts)).iter().sum();
    assert!(objects > all / 6, "kernel objects: {objects} of {all}");
    assert!(whole + objects > all * 98 / 100, "and hardly anything else changes");
    // For each content, the time when each guest first had it.
    let mut first_seen: FxHashMap<u128, FxHashMap<u32, u64>> = FxHashMap::default();
    for snapshot in &snapshots {
        for ((guest, _), page) in pages(snapshot) {
            first_seen.entry(page.digest).or_default().entry(guest).or_insert(snapshot.time_ns / NS_PER_S);
        }
    }
    let spreads: Vec<u64> = first_seen
        .values()
        .filter(|times| times.len() > 1 && times.values().all(|&time| time > 0))
        .map(|times| times.values().max().unwrap() - times.values().min().unwrap())
        .collect();
    let late = spreads.iter().filter(|&&spread| spread > 0).count();
    assert!(spreads.len() > 2_000 && late > spreads.len() * 3 / 4, "{late} of {} late", spreads.len());
    assert!(spreads.iter().sum::<u64>() / spreads.len() as u64 <= 15, "but not for long");
}

#[test]
fn a_web_server_writes_its_buffers_and_keeps_its_files() {
    let snapshots = snapshots("web-server", GUEST, 30);
    let changes = changes(&snapshots);
    assert!(count(&changes, [1, 1, 1, 0]) > 4_000, "buffers");
    let (first, last) = (pages(&snapshots[0]), pages(&snapshots[30]));
    let duplicates: FxHashSet<u128> = {
        let mut seen = FxHashSet::default();
        last.values().filter(|page| !seen.insert(page.digest)).map(|page| page.digest).collect()
    };
    let shared: Vec<_> = last.iter().filter(|(_, page)| duplicates.contains(&page.digest)).collect();
    let stayed = shared.iter().filter(|(place, page)| first.get(place).is_some_and(|was| was.digest == page.digest));
    assert!(stayed.count() > shared.len() / 2);
}

#[test]
fn a_database_writes_headers_rows_and_trailers_and_its_copies_diverge() {
    let snapshots = snapshots("database", GUEST, 60);
    let changes = changes(&snapshots);
    let (header, trailer) = (count(&changes, [1, 0, 0, 0]), count(&changes, [0, 0, 0, 1]));
    let row = count(&changes, [0, 0, 1, 0]);
    assert!(header > 3_000 && trailer > 3_000 && row > 300, "{header} {trailer} {row}");
    let shares: Vec<f64> = snapshots.iter().map(|snapshot| savable(snapshot, |_| ())).collect();
    assert!(shares[60] < shares[0] * 0.75, "{shares:?}");
    // Contents that two guests hold at the same time for at most ten seconds.
    let mut lives: FxHashMap<u128, (u64, u64)> = FxHashMap::default();
    for snapshot in &snapshots {
        let mut seen: FxHashMap<u128, u32> = FxHashMap::default();
        for ((guest, _), page) in pages(snapshot) {
            if *seen.entry(page.digest).or_insert(guest) != guest {
                let now = snapshot.time_ns / NS_PER_S;
                lives.entry(page.digest).or_insert((now, now)).1 = now;
            }
        }
    }
    let short = lives.values().filter(|(from, to)| *from > 0 && *to < 60 && to - from <= 10).count();
    assert!(short > 1_500, "{short} of {} are short-lived", lives.len());
}

#[test]
fn ksmpages_differ_in_their_last_part_only_and_more_copies_start_later() {
    let snapshots = snapshots("ksmpages-worst", SMALL, 60);
    let programs: Vec<usize> = snapshots.iter().map(|snapshot| snapshot.processes.len()).collect();
    assert_eq!((programs[0], programs[19], programs[20], programs[39], programs[40]), (2, 2, 3, 3, 4));
    let mut last = FxHashSet::default();
    for (row, pages) in &snapshots[60].regions {
        assert_eq!(pages.len() as u64, row.pages.0);
        assert_eq!(pages[0].1.digest, 0, "page 0 is zeros");
        for (at, (_, page)) in pages.iter().enumerate() {
            assert_eq!(page.parts[..PARTS - 1], [0; PARTS - 1]);
            assert_eq!(page.digest, snapshots[60].regions[0].1[at].1.digest, "equal in all programs");
            last.insert(page.parts[PARTS - 1]);
        }
    }
    assert_eq!(last.len() as u64, SMALL.0, "unique within a program");
    for snapshot in self::snapshots("ksmpages-best", SMALL, 10) {
        assert_eq!(pages(&snapshot).values().map(|page| page.digest).collect::<FxHashSet<_>>().len(), 1);
    }
}

#[test]
fn static_mix_is_half_equal_and_half_unique_and_never_changes() {
    let snapshots = snapshots("static-mix", SMALL, 10);
    let all = pages(&snapshots[0]);
    let contents: FxHashSet<u128> = all.values().map(|page| page.digest).collect();
    assert_eq!((all.len() as u64, contents.len() as u64), (2 * SMALL.0, SMALL.0 + 1));
    assert!(snapshots.iter().all(|snapshot| snapshot.regions == snapshots[0].regions));
}

#[test]
fn the_cow_breaker_writes_a_page_every_10_ms_in_order_and_wraps_around() {
    let (mut deltas, mut at) = (Deltas::new(), 0);
    for (number, snapshot) in (0..).zip(snapshots("cow-breaker", SMALL, 12)) {
        let first = snapshot.regions[0].0.first.0;
        let contents: FxHashSet<u128> = pages(&snapshot).values().map(|page| page.digest).collect();
        assert_eq!(contents.len(), if number == 0 { 1 } else { 2 }, "of this pass and the previous one");
        let events = deltas.next(snapshot).events;
        let mut written: Vec<u64> = Vec::new();
        for event in events {
            if let (Event::Page { page, .. }, 1..) = (event, number) {
                written.push(page.0 - first);
            }
        }
        let mut due: Vec<u64> = (at..number * 100).map(|page| page % SMALL.0).collect();
        due.sort_unstable();
        assert_eq!(written, due);
        at = number * 100;
    }
    let changes = changes(&snapshots("cow-breaker", SMALL, 12));
    assert_eq!(changes.into_iter().collect::<Vec<_>>(), [([false, false, false, true], 1_200)]);
}

#[test]
fn each_short_lived_mapping_is_a_new_region() {
    let snapshots = snapshots("short-lived", SMALL, 11);
    let regions: Vec<Option<u32>> =
        snapshots.iter().map(|snapshot| snapshot.regions.first().map(|(row, _)| row.region)).collect();
    let lives = [Some(0), Some(0), None, None, Some(1), Some(1), None, None, Some(2), Some(2), None, None];
    assert_eq!(regions, lives);
    assert!(snapshots.iter().all(|snapshot| snapshot.processes.len() == 1));
    let contents: FxHashSet<u128> =
        snapshots.iter().flat_map(|snapshot| pages(snapshot).into_values()).map(|page| page.digest).collect();
    assert_eq!(contents.len(), 1);
}
