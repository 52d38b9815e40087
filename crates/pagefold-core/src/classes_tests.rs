use super::*;
use crate::host::{PageState, RegionKey};
use crate::permutation::mix;
use proptest::prelude::*;
use std::collections::BTreeMap as Map;

fn sample(page: u64, parts: Parts) -> PageSample {
    let digest = Digest(parts.iter().fold(1, |digest, part| mix(digest ^ u64::from(*part))));
    PageSample {
        region: RegionKey(1),
        page: Vpn(page),
        state: PageState::Private,
        huge: false,
        digest,
        parts,
        active: false,
        node: None,
    }
}

/// A page's quarters after so many writes to each.
fn quarters(page: u64, writes: [u64; 4]) -> Parts {
    [0, 1, 2, 3].map(|at| u32::try_from(mix(page << 8 | at as u64 | writes[at] << 56) >> 32).unwrap())
}

fn visit(pages: &mut PageClasses, classes: &mut Classes, sample: &PageSample, seen: Seen) -> (u8, bool) {
    let visit = pages.visit(classes, sample);
    let told = (visit.class, visit.looks_up);
    classes.count(visit, told.1, seen);
    told
}

#[test]
fn the_class_is_the_map_of_what_has_changed_and_stays_until_more_does() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    let mut writes = [0; 4];
    assert_eq!(visit(&mut pages, &mut classes, &sample(7, quarters(7, writes)), Seen::New), (0, true));
    assert_eq!(visit(&mut pages, &mut classes, &sample(7, quarters(7, writes)), Seen::New), (0, false));
    let written: [(&[usize], u8); 3] = [(&[1], 0b0010), (&[0, 3], 0b1001), (&[0, 1, 2, 3], 0b1111)];
    for (quarters_written, class) in written {
        for &at in quarters_written {
            writes[at] += 1;
        }
        let now = sample(7, quarters(7, writes));
        assert_eq!(visit(&mut pages, &mut classes, &now, Seen::New), (class, true));
        assert_eq!(visit(&mut pages, &mut classes, &now, Seen::New), (class, false));
        assert_eq!(pages.by_class(), [(class, Pages(1))]);
    }
}

#[test]
fn pages_written_alike_are_in_one_class() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    for page in 0..4_000 {
        visit(&mut pages, &mut classes, &sample(page, quarters(page, [0; 4])), Seen::New);
    }
    let mut missed = 0;
    for page in 0..4_000 {
        let mut writes = [0; 4];
        writes[usize::try_from(page % 4).unwrap()] = 1;
        let (class, looks_up) = visit(&mut pages, &mut classes, &sample(page, quarters(page, writes)), Seen::New);
        missed += u64::from(!looks_up);
        assert!(class == 1 << (page % 4) || class == LAST || !looks_up, "{class}");
    }
    // One in 2^8 is expected to pass for unmodified.
    assert!(missed < 4_000 / 256 * 3, "{missed}");
    let one = |class| pages.by_class().iter().find(|&&(found, _)| found == class).unwrap().1;
    assert!([1, 2, 4, 8].iter().all(|&class| one(class).0 > 950), "{:?}", pages.by_class());
}

#[test]
fn the_count_is_of_visits_that_saw_a_change() {
    let (mut classes, mut pages) = (Classes::new(Classifier::WriteCount), PageClasses::default());
    for change in 0..40 {
        let now = sample(3, quarters(3, [change; 4]));
        let class = u8::try_from(change.min(15)).unwrap();
        assert_eq!(visit(&mut pages, &mut classes, &now, Seen::New), (class, true));
        assert_eq!(visit(&mut pages, &mut classes, &now, Seen::New), (class, false));
    }
}

#[test]
fn ranges_are_counted_from_the_base_in_turn() {
    let mut classes = Classes::new(Classifier::Address);
    let mut pages = PageClasses { base: Vpn(1_000), ..PageClasses::default() };
    for page in (1_000..1_000 + 16 * EXTENT_PAGES).chain(900..1_000) {
        let before = sample(page, quarters(page, [0; 4]));
        let (class, _) = visit(&mut pages, &mut classes, &before, Seen::New);
        assert_eq!(u64::from(class), (page + 8 * EXTENT_PAGES - 1_000) / EXTENT_PAGES % 8);
        assert_eq!(pages.class_of(&classes, Vpn(page)), class);
        assert_eq!(visit(&mut pages, &mut classes, &before, Seen::New), (class, false));
        let changed = sample(page, quarters(page, [1; 4]));
        assert_eq!(visit(&mut pages, &mut classes, &changed, Seen::New), (class, true));
    }
    let even = |class| (class, Pages(2 * EXTENT_PAGES + 100 * u64::from(class == 7)));
    assert_eq!(pages.by_class(), (0..8).map(even).collect::<Vec<_>>());
}

#[test]
fn whoever_met_a_partner_is_looked_up_again() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    let page = sample(9, quarters(9, [0; 4]));
    let partner = Seen::Twin(crate::index::Place { slot: 1, offset: 1 });
    assert_eq!(visit(&mut pages, &mut classes, &page, partner), (0, true));
    assert_eq!(visit(&mut pages, &mut classes, &page, Seen::New), (0, true), "it had one");
    assert_eq!(visit(&mut pages, &mut classes, &page, Seen::New), (0, false));
    pages.met(Vpn(9));
    assert_eq!(visit(&mut pages, &mut classes, &page, Seen::New), (0, true), "it has got one");
    let total = classes.totals[0];
    assert_eq!((total.lookups, total.spared, total.found), (3, 1, 1));
}

#[test]
fn an_entry_is_kept_for_a_page_that_is_not_looked_up() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    let page = sample(9, quarters(9, [0; 4]));
    visit(&mut pages, &mut classes, &page, Seen::New);
    assert!(!pages.keeps(Vpn(9)), "not visited again");
    assert_eq!(visit(&mut pages, &mut classes, &page, Seen::New), (0, true), "so it is looked up, and noted, again");
    assert_eq!(visit(&mut pages, &mut classes, &page, Seen::New), (0, false));
    assert!(pages.keeps(Vpn(9)));
    visit(&mut pages, &mut classes, &sample(9, quarters(9, [1; 4])), Seen::New);
    assert!(!pages.keeps(Vpn(9)) && !pages.keeps(Vpn(10)));
}

#[test]
fn four_bytes_a_page_and_little_more() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    for page in 0..100 * EXTENT_PAGES {
        visit(&mut pages, &mut classes, &sample(page, quarters(page, [0; 4])), Seen::New);
    }
    let each = pages.bytes() as f64 / (100 * EXTENT_PAGES) as f64;
    assert!(each < 4.25, "{each} bytes a page of those all visited");
    let mut pages = PageClasses::default();
    for run in 0..100 * EXTENT_PAGES / 64 {
        for page in 0..4 {
            visit(&mut pages, &mut classes, &sample(run * 64 + page, quarters(page, [0; 4])), Seen::New);
        }
    }
    let each = pages.bytes() as f64 / (100 * EXTENT_PAGES / 16) as f64;
    assert!(each < 8.0, "{each} bytes a page of those sampled, one in sixteen");
}

#[test]
fn pages_beyond_the_bounds_are_forgotten() {
    let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
    for page in 1_000..3_000 {
        visit(&mut pages, &mut classes, &sample(page, quarters(page, [0; 4])), Seen::New);
    }
    pages.keep_within(Vpn(1_024), Pages(512));
    assert_eq!(pages.by_class(), [(0, Pages(512))]);
}

#[test]
fn names_are_read_as_they_are_written() {
    for classifier in [Classifier::None, Classifier::Address, Classifier::WriteCount, Classifier::SubPages] {
        assert_eq!(classifier.to_string().parse(), Ok(classifier));
    }
    let error = "subpages\n".parse::<Classifier>().unwrap_err().to_string();
    assert_eq!(error, "there is no classifier 'subpages\\n'; choose none, address, write-count or sub-pages");
}

proptest! {
    /// Against a plain map: the class is the map of the last change, and unchanged pages that were alone are not looked up.
    #[test]
    fn agrees_with_a_plain_map(visits in proptest::collection::vec((0u64..700, 0u8..16, any::<bool>()), 0..2_000)) {
        let (mut classes, mut pages) = (Classes::new(Classifier::SubPages), PageClasses::default());
        let mut model: Map<u64, ([u32; 4], u8, bool)> = Map::new();
        for (page, changed, alone) in visits {
            // Prints that differ in their lowest bits when they are to differ.
            let before = model.get(&page).copied();
            let mut parts = before.map_or([0; 4], |(parts, ..)| parts);
            for (at, part) in parts.iter_mut().enumerate() {
                *part = (*part + u32::from(changed >> at & 1)) % 64;
            }
            let (class, looks_up) = match before {
                None => (0, true),
                Some((_, class, alone)) if changed == 0 => (class, !alone),
                Some(_) => (changed, true),
            };
            let seen = if alone { Seen::New } else { Seen::Known(2) };
            prop_assert_eq!(visit(&mut pages, &mut classes, &sample(page, parts), seen), (class, looks_up));
            let alone = if looks_up { alone } else { true };
            model.insert(page, (parts, class, alone));
        }
        let mut by_class = Map::<u8, u64>::new();
        for &(_, class, _) in model.values() {
            *by_class.entry(class).or_default() += 1;
        }
        let told: Map<u8, u64> = pages.by_class().into_iter().map(|(class, pages)| (class, pages.0)).collect();
        prop_assert_eq!(told, by_class);
    }
}

/// What classes cost and spare, for each page: hashing with and without quarters, looking up in an index, and remembering.
///
/// Run by hand: `cargo test -p pagefold-core classes::tests::what_ -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn what_classes_cost_and_spare() {
    use crate::hash::Digester;
    use crate::index::{Index, Place};
    use crate::permutation::Permutation;
    use crate::units::PAGE_SIZE;
    use std::hint::black_box;
    use std::time::Instant;

    const ROUNDS: usize = 101;
    const HASHES: usize = 1_000;
    let digester = Digester::new(7);
    let page: [u8; PAGE_SIZE] = std::array::from_fn(|at| u8::try_from(mix(at as u64) >> 56).unwrap());
    let mut times = vec![Vec::new(); 2];
    for _ in 0..ROUNDS {
        let each = |work: &dyn Fn()| {
            let start = Instant::now();
            (0..HASHES).for_each(|_| work());
            start.elapsed().as_nanos() as f64 / HASHES as f64
        };
        times[0].push(each(&|| _ = black_box(digester.digest(black_box(&page)))));
        times[1].push(each(&|| _ = black_box(digester.digest_parts(black_box(&page)))));
    }
    // Others run on the machine too: the least is what it takes.
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let [plain, parts] = [0, 1].map(|at: usize| least(&times[at]));
    println!("hashing a page in cache: {plain:.0} ns, with its quarters {parts:.0} ns (x {:.2})", parts / plain);

    for bits in [16, 20, 22] {
        let all = 1_u64 << bits;
        let order = Permutation::new(all / 4, 5);
        let places: Vec<u64> = (0..all / 4).flat_map(|at| (0..4).map(move |run| order.at(at) * 4 + run)).collect();
        let samples: Vec<PageSample> = places.iter().map(|&page| sample(page, quarters(page, [0; 4]))).collect();
        let (mut index, mut pages) = (Index::new(), PageClasses::default());
        let mut classes = Classes::new(Classifier::SubPages);
        let note = |index: &mut Index, sample: &PageSample| {
            let place = Place { slot: 1, offset: u32::try_from(sample.page.0).unwrap() };
            index.note(sample.digest, place, false)
        };
        let mut times = vec![Vec::new(); 3];
        for round in 0..6 {
            let start = Instant::now();
            for sample in &samples {
                black_box(note(&mut index, sample));
            }
            times[0].push(start.elapsed().as_nanos() as f64 / all as f64);
            let start = Instant::now();
            for sample in &samples {
                let visit = pages.visit(&classes, sample);
                let looks_up = visit.looks_up;
                classes.count(visit, looks_up, Seen::New);
            }
            times[if round == 0 { 1 } else { 2 }].push(start.elapsed().as_nanos() as f64 / all as f64);
        }
        times[0].remove(0);
        let [looked_up, first, again] = [0, 1, 2].map(|at: usize| least(&times[at]));
        println!(
            "{all} pages in runs of 4: a look-up {looked_up:.0} ns, remembering {first:.0} ns at first and {again:.0} ns \
             later (x {:.2}); {:.2} bytes a page, beside {:.2} of the index",
            again / looked_up,
            pages.bytes() as f64 / all as f64,
            index.bytes() as f64 / all as f64
        );
    }
}
