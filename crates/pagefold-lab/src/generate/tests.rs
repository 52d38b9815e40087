//! The same again from the same seed, and the structure that the generators' openings describe.

use super::*;
use crate::record::{Deltas, Event, PARTS, Page, State};
use rustc_hash::{FxHashMap, FxHashSet};
use std::hash::Hash;

/// Enough for shares to come out.
const GUEST: Pages = Pages(24 * PAGES_PER_MIB);
const SMALL: Pages = Pages(2 * PAGES_PER_MIB);

type Parts = [bool; PARTS];

fn options(name: &str, size: Pages, seconds: u64) -> (&'static Generator, Options) {
    let generator = Generator::named(name).unwrap();
    (generator, Options { size, length_ns: seconds * NS_PER_S, ..generator.usual })
}

fn looks(name: &str, size: Pages, seconds: u64) -> Vec<MemorySnapshot> {
    let (generator, options) = options(name, size, seconds);
    all(generator.start(&options).unwrap())
}

fn all(mut source: Generated) -> Vec<MemorySnapshot> {
    std::iter::from_fn(|| source.look().unwrap()).collect()
}

/// Every page by its process and number.
fn pages(look: &MemorySnapshot) -> FxHashMap<(u32, Vpn), Page> {
    look.regions.iter().flat_map(|(row, pages)| pages.iter().map(|&(page, held)| ((row.process, page), held))).collect()
}

/// The share of the guests' memory that is saved if, of equal pages with equal marks, one is left.
fn savable<M: Hash + Eq>(look: &MemorySnapshot, mark: impl Fn(&Page) -> M) -> f64 {
    let all: u64 = look.regions.iter().map(|(row, _)| row.pages.0).sum();
    let pages = pages(look);
    let kept: FxHashSet<_> = pages.values().map(|page| (page.digest, mark(page))).collect();
    (pages.len() - kept.len()) as f64 / all as f64
}

/// The same in the last look, and what eight classes of equal address ranges leave of it.
fn by_address(look: &MemorySnapshot) -> (f64, f64) {
    let end = 1 + pages(look).values().filter_map(|page| page.frame).max().unwrap();
    let all = savable(look, |_| ());
    (all, savable(look, |page| page.frame.unwrap() * 8 / end) / all)
}

/// In which parts pages that were there before have changed from look to look, and how many.
fn changes(looks: &[MemorySnapshot]) -> FxHashMap<Parts, u64> {
    let mut found = FxHashMap::default();
    for pair in looks.windows(2) {
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
fn the_same_seed_makes_the_same_and_another_another() {
    for generator in GENERATORS {
        let options = Options { size: SMALL, length_ns: 3 * NS_PER_S, ..generator.usual };
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
fn every_look_is_well_formed() {
    for generator in GENERATORS {
        let options = Options { size: SMALL, length_ns: 10 * NS_PER_S, every_ns: NS_PER_S / 2, ..generator.usual };
        let (mut deltas, mut state) = (Deltas::new(), State::default());
        for (number, look) in (0..).zip(all(generator.start(&options).unwrap())) {
            assert_eq!(look.time_ns, number * options.every_ns);
            assert!(look.regions.is_sorted_by_key(|(row, _)| (row.process, row.first)));
            let mut frames = FxHashSet::default();
            for (row, pages) in &look.regions {
                assert!(look.processes.iter().any(|process| process.process == row.process));
                assert!(pages.is_sorted_by_key(|(page, _)| *page));
                for (page, held) in pages {
                    assert!((row.first..row.first + row.pages.0).contains(page));
                    assert!(frames.insert(held.frame.unwrap()), "no page is in two places");
                    assert_eq!(held.digest == 0, held.parts == [0; PARTS], "zeros and nothing else");
                }
            }
            // What a record of it says is what there was.
            state.apply(&deltas.next(look.clone()));
            for (row, pages) in look.regions {
                let held = &state.regions[&row.region];
                assert_eq!((&held.row, held.pages.iter().collect::<Vec<_>>()), (&row, pages));
            }
        }
    }
}

#[test]
fn senseless_options_are_refused() {
    let (generator, good) = options("database", SMALL, 10);
    let refused = |options| generator.start(&options).err();
    assert_eq!(refused(good), None);
    assert_eq!(refused(Options { size: Pages(255), ..good }), Some(OptionsError::Size(255)));
    assert_eq!(refused(Options { size: Pages(u64::MAX), ..good }), Some(OptionsError::Size(u64::MAX)));
    for processes in [0, 65] {
        assert_eq!(refused(Options { processes, ..good }), Some(OptionsError::Processes(processes)));
    }
    for every_ns in [0, SHORTEST - 1, good.length_ns + 1] {
        let length_ns = good.length_ns;
        assert_eq!(refused(Options { every_ns, ..good }), Some(OptionsError::Every { every_ns, length_ns }));
    }
    assert!(Generator::named("no-such-workload").is_none());
}

/// CMD, section 5: of 4 x 2 GiB 1.02e6, 7.45e5 and 3.87e5 pages can be shared, and by address 71, 39 and 92 % of that.
#[test]
fn guests_have_as_much_in_common_as_those_of_the_paper() {
    for (name, shared, address) in [("kernel-build", 0.49, 0.71), ("web-server", 0.36, 0.39), ("database", 0.18, 0.92)]
    {
        let looks = looks(name, GUEST, 60);
        let best = looks.iter().skip(20).map(|look| by_address(look).0).sum::<f64>() / 41.0;
        assert!((best - shared).abs() < 0.05, "{name}: {best:.3} shared, {shared} in the paper");
        let (_, found) = by_address(&looks[60]);
        assert!((found - address).abs() < 0.10, "{name}: {found:.3} by address, {address} in the paper");
        let zeros = pages(&looks[60]).values().filter(|page| page.digest == 0).count();
        let all = pages(&looks[60]).len();
        assert!(zeros > all / 200 && zeros < all / 20, "{name}: {zeros} of zeros, of {all}");
    }
}

/// The share of pages that hold something of which there is only one, now and at the first look, at the same place.
#[test]
fn guests_have_memory_of_their_own_that_stays() {
    for name in ["kernel-build", "web-server", "database"] {
        let looks = looks(name, GUEST, 30);
        let mut copies: FxHashMap<u128, u32> = FxHashMap::default();
        let (first, last) = (pages(&looks[0]), pages(&looks[30]));
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
fn a_build_writes_whole_pages_and_its_equal_files_turn_up_at_other_times() {
    let looks = looks("kernel-build", GUEST, 60);
    let changes = changes(&looks);
    let (whole, all) = (count(&changes, [1, 1, 1, 1]), changes.values().sum::<u64>());
    assert!(whole > all / 2, "compilers and files: {whole} of {all}");
    let kinds = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]];
    let objects: u64 = kinds.map(|parts| count(&changes, parts)).iter().sum();
    assert!(objects > all / 6, "kernel objects: {objects} of {all}");
    assert!(whole + objects > all * 98 / 100, "and hardly anything else");
    // When each guest had a content first, of those that came after the beginning and are in several.
    let mut came: FxHashMap<u128, FxHashMap<u32, u64>> = FxHashMap::default();
    for look in &looks {
        for ((guest, _), page) in pages(look) {
            came.entry(page.digest).or_default().entry(guest).or_insert(look.time_ns / NS_PER_S);
        }
    }
    let spreads: Vec<u64> = came
        .values()
        .filter(|times| times.len() > 1 && times.values().all(|&time| time > 0))
        .map(|times| times.values().max().unwrap() - times.values().min().unwrap())
        .collect();
    let late = spreads.iter().filter(|&&spread| spread > 0).count();
    assert!(spreads.len() > 2_000 && late > spreads.len() * 3 / 4, "{late} of {} late", spreads.len());
    assert!(spreads.iter().sum::<u64>() / spreads.len() as u64 <= 15, "but not for long");
}

#[test]
fn a_web_server_writes_the_front_of_its_buffers_and_leaves_its_files() {
    let looks = looks("web-server", GUEST, 30);
    let changes = changes(&looks);
    assert!(count(&changes, [1, 1, 1, 0]) > 4_000, "buffers");
    let (first, last) = (pages(&looks[0]), pages(&looks[30]));
    let twins: FxHashSet<u128> = {
        let mut seen = FxHashSet::default();
        last.values().filter(|page| !seen.insert(page.digest)).map(|page| page.digest).collect()
    };
    let shared: Vec<_> = last.iter().filter(|(_, page)| twins.contains(&page.digest)).collect();
    let stayed = shared.iter().filter(|(place, page)| first.get(place).is_some_and(|was| was.digest == page.digest));
    assert!(stayed.count() > shared.len() / 2);
}

#[test]
fn a_database_writes_rows_with_header_and_trailer_and_its_tables_drift_apart() {
    let looks = looks("database", GUEST, 60);
    let changes = changes(&looks);
    let (header, trailer) = (count(&changes, [1, 0, 0, 0]), count(&changes, [0, 0, 0, 1]));
    let row = count(&changes, [0, 0, 1, 0]);
    assert!(header > 3_000 && trailer > 3_000 && row > 300, "{header} {trailer} {row}");
    let shares: Vec<f64> = looks.iter().map(|look| savable(look, |_| ())).collect();
    assert!(shares[60] < shares[0] * 0.75, "{shares:?}");
    // Contents that two guests hold at a time, and for at most ten seconds.
    let mut lives: FxHashMap<u128, (u64, u64)> = FxHashMap::default();
    for look in &looks {
        let mut seen: FxHashMap<u128, u32> = FxHashMap::default();
        for ((guest, _), page) in pages(look) {
            if *seen.entry(page.digest).or_insert(guest) != guest {
                let now = look.time_ns / NS_PER_S;
                lives.entry(page.digest).or_insert((now, now)).1 = now;
            }
        }
    }
    let short = lives.values().filter(|(from, to)| *from > 0 && *to < 60 && to - from <= 10).count();
    assert!(short > 1_500, "{short} of {} are short-lived", lives.len());
}

#[test]
fn ksmpages_differ_in_their_last_part_only_and_the_copies_come_later() {
    let looks = looks("ksmpages-worst", SMALL, 60);
    let programs: Vec<usize> = looks.iter().map(|look| look.processes.len()).collect();
    assert_eq!((programs[0], programs[19], programs[20], programs[39], programs[40]), (2, 2, 3, 3, 4));
    let mut last = FxHashSet::default();
    for (row, pages) in &looks[60].regions {
        assert_eq!(pages.len() as u64, row.pages.0);
        assert_eq!(pages[0].1.digest, 0, "number 0 makes zeros");
        for (at, (_, page)) in pages.iter().enumerate() {
            assert_eq!(page.parts[..PARTS - 1], [0; PARTS - 1]);
            assert_eq!(page.digest, looks[60].regions[0].1[at].1.digest, "as in all other copies");
            last.insert(page.parts[PARTS - 1]);
        }
    }
    assert_eq!(last.len() as u64, SMALL.0, "and unique within one");
    for look in looks_of_best() {
        assert_eq!(pages(&look).values().map(|page| page.digest).collect::<FxHashSet<_>>().len(), 1);
    }
}

fn looks_of_best() -> Vec<MemorySnapshot> {
    looks("ksmpages-best", SMALL, 10)
}

#[test]
fn static_mix_is_half_equal_and_half_unique_and_never_changes() {
    let looks = looks("static-mix", SMALL, 10);
    let all = pages(&looks[0]);
    let contents: FxHashSet<u128> = all.values().map(|page| page.digest).collect();
    assert_eq!((all.len() as u64, contents.len() as u64), (2 * SMALL.0, SMALL.0 + 1));
    assert!(looks.iter().all(|look| look.regions == looks[0].regions));
}

#[test]
fn the_breaker_writes_a_page_every_10_ms_in_order_and_comes_round() {
    let (mut deltas, mut at) = (Deltas::new(), 0);
    for (number, look) in (0..).zip(looks("cow-breaker", SMALL, 12)) {
        let first = look.regions[0].0.first.0;
        let contents: FxHashSet<u128> = pages(&look).values().map(|page| page.digest).collect();
        assert_eq!(contents.len(), if number == 0 { 1 } else { 2 }, "of this pass and of the one before");
        let events = deltas.next(look).events;
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
    let changes = changes(&looks("cow-breaker", SMALL, 12));
    assert_eq!(changes.into_iter().collect::<Vec<_>>(), [([false, false, false, true], 1_200)]);
}

#[test]
fn short_lives_are_regions_of_their_own() {
    let looks = looks("short-lived", SMALL, 11);
    let regions: Vec<Option<u32>> = looks.iter().map(|look| look.regions.first().map(|(row, _)| row.region)).collect();
    let lives = [Some(0), Some(0), None, None, Some(1), Some(1), None, None, Some(2), Some(2), None, None];
    assert_eq!(regions, lives);
    assert!(looks.iter().all(|look| look.processes.len() == 1));
    let contents: FxHashSet<u128> =
        looks.iter().flat_map(|look| pages(look).into_values()).map(|page| page.digest).collect();
    assert_eq!(contents.len(), 1);
}
