//! Compares the default [`Costs`] with the CPU time of ksmd measured for whole bursts (Linux 6.18), and the workloads
//! with the programs they model. The fit is within a third; the measurements vary as much.

use pagefold_engine::host::{Actions, Host, ScanOrder, Span};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{EXTENT_PAGES, Pages, Permyriad, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost, scenario};
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;
const MIB: u64 = 256;

fn host(knobs: Knobs) -> SimHost {
    SimHost::new(3, Costs::default(), knobs)
}

fn mark_all(sim: &mut SimHost) {
    let seen = sim.observe().unwrap();
    let spans = seen.regions.iter().map(|view| Span { region: view.key, first: view.first, pages: view.pages });
    sim.apply(&Actions { mark: spans.map(Into::into).collect(), ..Actions::default() }).unwrap();
}

fn scan_ns(sim: &mut SimHost) -> u64 {
    let before_ns = sim.cost().ksmd_ns;
    sim.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() }).unwrap();
    while sim.is_scanning() {
        sim.wait(100 * MS).unwrap();
    }
    sim.cost().ksmd_ns - before_ns
}

#[track_caller]
fn assert_near(found: f64, low: f64, high: f64) {
    assert!((low / 1.34..high * 1.34).contains(&found), "{found}, measured {low} to {high}");
}

#[test]
fn merging_pairs() {
    let per_page_us = |random| {
        let mut sim = host(Knobs::default());
        scenario::pairs(&mut sim, Pages(512 * MIB), random);
        mark_all(&mut sim);
        let spent_ns = scan_ns(&mut sim) + scan_ns(&mut sim);
        assert_eq!(sim.saved(), Pages(512 * MIB));
        spent_ns as f64 / 1e3 / (512 * MIB) as f64
    };
    assert_near(per_page_us(Pages(0)), 19.0, 19.0);
    assert_near(per_page_us(Pages(1024 * MIB)), 37.0, 47.0);
}

#[test]
fn merging_one_content() {
    for (max_page_sharing, measured_s) in [(256, 1.65), (65_536, 1.43)] {
        let mut sim = host(Knobs { max_page_sharing, ..Knobs::default() });
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(2048 * MIB), Fill::Same(1))));
        mark_all(&mut sim);
        let spent_ns = scan_ns(&mut sim) + scan_ns(&mut sim);
        let frames = (2048 * MIB).div_ceil(max_page_sharing.into());
        assert_eq!(sim.saved(), Pages(2048 * MIB - frames));
        assert_near(spent_ns as f64 / 1e9, measured_s, measured_s);
    }
}

#[test]
fn random_pages_beside_a_chain() {
    for (max_page_sharing, measured_us) in [(256, 46.6), (4_096, 8.5), (65_536, 6.5)] {
        let mut sim = host(Knobs { max_page_sharing, smart_scan: false, ..Knobs::default() });
        scenario::static_mix(&mut sim, Pages(1024 * MIB));
        mark_all(&mut sim);
        for _ in 0..3 {
            scan_ns(&mut sim);
        }
        let merged_ns = sim.merged_pages().0 * Costs::default().visit_merged_ns;
        let per_page_us = (scan_ns(&mut sim) - merged_ns) as f64 / 1e3 / (1024 * MIB) as f64;
        assert_near(per_page_us, measured_us, measured_us);
    }
}

/// The share of savable pages, the share of zeros, and the share of the other duplicates in extents that are at least
/// half duplicate.
fn shape(sim: &SimHost, owners: &[OwnerKey]) -> [f64; 3] {
    let truth = sim.truth();
    let mut extents: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    let mut copies: BTreeMap<u64, u64> = BTreeMap::new();
    for span in owners.iter().flat_map(|&owner| sim.regions_of(owner)).filter_map(|region| sim.span_of(region)) {
        for page in span.first.0..span.first.0 + span.pages.0 {
            let page = Vpn(page);
            let content = sim.page(span.region, page).unwrap().0;
            extents.entry((span.region, page.extent())).or_default().push(content);
            *copies.entry(content).or_default() += 1;
        }
    }
    let doubles = |extent: &Vec<u64>| extent.iter().filter(|content| copies[content] > 1).count() as u64;
    let dense = extents.values().map(doubles).filter(|&doubles| doubles * 2 >= EXTENT_PAGES).sum::<u64>();
    let all = extents.values().map(doubles).sum::<u64>();
    let frames = truth.frames as f64;
    [truth.savable as f64 / frames, truth.zero_frames as f64 / frames, dense as f64 / all as f64]
}

#[track_caller]
fn assert_shape(found: [f64; 3], measured: [f64; 3]) {
    let near = found.iter().zip(measured).all(|(found, measured)| (found - measured).abs() < 0.03);
    assert!(near, "found {found:?}, measured {measured:?}");
}

#[test]
fn replicas_match_the_measured_programs() {
    let mut sim = host(Knobs::default());
    let owners = scenario::redis(&mut sim, 3, Pages(128 * MIB));
    assert_shape(shape(&sim, &owners), [0.59, 0.01, 1.0]);
    let mut sim = host(Knobs::default());
    let owners = scenario::mariadb(&mut sim, 3, Pages(160 * MIB));
    assert_shape(shape(&sim, &owners), [0.72, 0.36, 0.99]);
    let mut sim = host(Knobs::default());
    let owners = scenario::java(&mut sim, 3, Pages(305 * MIB));
    assert_shape(shape(&sim, &owners), [0.03, 0.01, 0.32]);
    let contents = |sim: &SimHost| {
        let span = sim.span_of(sim.regions_of(owners[0])[0]).unwrap();
        (0..span.pages.0).map(|page| sim.page(span.region, span.first + page).unwrap().0).collect::<Vec<_>>()
    };
    let before = contents(&sim);
    sim.wait(30_000 * MS).unwrap();
    let changed = contents(&sim).iter().zip(&before).filter(|(now, then)| now != then).count();
    assert_near(changed as f64 / before.len() as f64, 0.28, 0.28);
}

#[test]
fn the_papers_workloads_match_their_description() {
    let counts = |build: &dyn Fn(&mut SimHost)| {
        let mut sim = host(Knobs::default());
        build(&mut sim);
        let truth = sim.truth();
        (truth.frames, truth.savable)
    };
    let pages = Pages(1_000);
    assert_eq!(counts(&|sim| _ = scenario::static_mix(sim, pages)), (2_000, 999));
    assert_eq!(counts(&|sim| _ = scenario::pairs(sim, pages, Pages(500))), (2_500, 1_000));
    assert_eq!(counts(&|sim| _ = scenario::cow_breaker(sim, pages)), (1_000, 999));
    assert_eq!(counts(&|sim| _ = scenario::short_lived(sim, pages, 100 * MS)), (1_000, 999));
    assert_eq!(counts(&|sim| _ = scenario::idle(sim, pages)), (1_000, 0));
    let (present, savable) = counts(&|sim| _ = scenario::sparse(sim, Pages(10_000), Permyriad(1_000)));
    assert!((900..1_100).contains(&present) && savable == 0);
}
