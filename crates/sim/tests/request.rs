//! The real engine on a simulated host that merges on request.

mod common;

use common::{MIB, Machine, SECOND, assert_spent_at_most, config, pages_that, process_of, requested};
use pagefold_engine::config::Config;
use pagefold_engine::governor::{Governor, WINDOW_NS, share_ns};
use pagefold_engine::hash::LINES;
use pagefold_engine::host::{Keep, MergeResult, Merging};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use pagefold_sim::{Alike, Costs, Fill, Knobs, Mapping, Process, Replica, SimHost, scenario};
use proptest::prelude::*;

/// Starts a process with one region, now.
fn add(host: &mut SimHost, domain: u16, mapping: Mapping) -> OwnerKey {
    let process = Process::starting_at(host.now_ns()).in_domain(domain);
    host.add(process.mapping(mapping))
}

/// Memory of this many pages, with the same contents in all processes that have it.
fn copies(pages: u64) -> Mapping {
    Mapping::new(Pages(pages), Fill::Series(1)).of_family(1)
}

#[track_caller]
fn nearly(found: Pages, expected: u64, percent: u64) {
    assert!(found.0 * 100 >= expected * percent && found.0 <= expected, "{} of {expected}", found.0);
}

#[test]
fn pairs_are_merged_without_marks_or_scans() {
    let mut sim = Machine::new(requested());
    scenario::pairs(&mut sim, Pages(128 * MIB), Pages(256 * MIB));
    let savable = sim.truth().savable;
    sim.run(20);
    nearly(sim.saved(), savable, 99);
    assert_eq!((sim.log.marks, sim.log.orders, sim.engine.scans()), (0, 0, 0));
    let (cost, ksm) = (sim.cost(), sim.ksm());
    assert_eq!((cost.ksmd_ns, ksm.scanned, ksm.full_scans), (0, 0, 0));
    assert_eq!(sim.engine.ledger().saved, Some(sim.saved()));
    assert_eq!(sim.log.pages_that(Merging::Differs), 0, "nothing was written");
    assert!(sim.log.pages_that(Merging::Merged) >= savable * 99 / 100);
    assert!(sim.engine.ledger().seconds_to_90_percent().unwrap() < 2.0);
    // The same work with ksmd takes several times as long.
    let mut by_ksmd = Machine::new(common::host());
    scenario::pairs(&mut by_ksmd, Pages(128 * MIB), Pages(256 * MIB));
    by_ksmd.run(20);
    nearly(by_ksmd.engine.ledger().saved.unwrap(), savable, 99);
    assert!(by_ksmd.engine.ledger().marked.0 <= 260 * MIB, "{:?}", by_ksmd.engine.ledger().marked);
    let ksmd = by_ksmd.cost();
    assert!((cost.pagefold_ns) * 4 < ksmd.pagefold_ns + ksmd.ksmd_ns, "{cost:?} and {ksmd:?}");
}

#[test]
fn identical_pages_are_merged_into_as_many_frames_as_their_sharers_need() {
    let mut sim = Machine::new(requested());
    add(&mut sim, 0, Mapping::new(Pages(10_000), Fill::Same(1)));
    sim.run(20);
    nearly(sim.saved(), 10_000 - 10_000_u64.div_ceil(256), 99);
    let full = sim.log.pages_that(Merging::Full);
    assert!(full < 100, "{full} pages were named for a page that could not have more sharers");
}

#[test]
fn dense_and_thin_replicas_are_merged_alike() {
    for (density, percent) in [(8_800, 98), (800, 95), (300, 80)] {
        let replica =
            Replica { template: 20, density: vec![Permyriad(density)], zeros: Permyriad(0), run: 2, shift: 0 };
        let mut sim = Machine::new(requested());
        scenario::replicas(&mut sim, 3, Pages(64 * MIB), &replica);
        let savable = sim.truth().savable;
        sim.run(60);
        nearly(sim.saved(), savable, percent);
    }
}

/// The pages that others were merged with are written. Then copies of their old contents appear, and all copies of a
/// content must become one page.
#[test]
fn pages_left_behind_are_merged_with_those_that_came_later() {
    let mut sim = Machine::new(requested());
    let series = |pages| copies(pages);
    let owners = [1, 2, 3].map(|_| add(&mut sim, 0, series(8 * MIB)));
    sim.run(30);
    nearly(sim.saved(), 2 * 8 * MIB, 99);
    let region = sim.regions_of(owners[0])[0];
    let first = sim.span_of(region).unwrap().first;
    for page in (0..8 * MIB).map(|page| first + page) {
        let (content, _) = sim.page(region, page).unwrap();
        sim.write(region, page, content ^ 1 << 60);
    }
    for _ in 0..2 {
        add(&mut sim, 0, series(8 * MIB));
    }
    sim.run(600);
    nearly(sim.saved(), 3 * 8 * MIB, 97);
}

/// The index knows some contents only from the pages of a process that exits. When another process with these contents
/// starts, the siblings are read again at once, though there's much else to read.
#[test]
fn a_newcomer_finds_the_siblings_of_one_that_exited() {
    let mut sim = Machine::new(requested());
    let siblings = [1, 2, 3].map(|_| add(&mut sim, 0, copies(16 * MIB)));
    add(&mut sim, 0, Mapping::new(Pages(4_096 * MIB), Fill::Random).of_family(2));
    sim.run(120);
    nearly(sim.saved(), 2 * 16 * MIB, 98);
    sim.exit(siblings[0]);
    sim.run(20);
    add(&mut sim, 0, copies(16 * MIB));
    sim.run(40);
    nearly(sim.saved(), 2 * 16 * MIB, 95);
}

/// A program gets many new duplicates every two minutes, in memory that's slow to sample. Reading it whole brings
/// something each time, so we don't wait longer and longer before we do so again.
#[test]
fn regions_are_read_again_soon_while_that_brings_something() {
    let mut sim = Machine::new(SimHost::new(7, Costs::default().slower(10_000), Knobs::requested()));
    let owners = [1, 2].map(|_| add(&mut sim, 0, Mapping::new(Pages(128 * MIB), Fill::Random)));
    let [from, to] = owners.map(|owner| sim.regions_of(owner)[0]);
    let [first_from, first_to] = [from, to].map(|region| sim.span_of(region).unwrap().first);
    let pages = 8 * MIB;
    sim.run(60);
    for turn in 0..12 {
        for page in turn * pages..(turn + 1) * pages {
            let (content, _) = sim.page(from, first_from + page).unwrap();
            sim.write(to, first_to + page, content);
        }
        sim.run(120);
        nearly(sim.saved(), (turn + 1) * pages, 97);
    }
}

/// Somebody keeps writing a few pages with their own contents. We leave these alone, and the others stay merged.
#[test]
fn broken_pages_are_left_alone_one_by_one() {
    let mut sim = Machine::new(requested());
    let owners = [1, 2].map(|_| add(&mut sim, 0, copies(32 * MIB)));
    let region = sim.regions_of(owners[0])[0];
    let first = sim.span_of(region).unwrap().first;
    let broken: Vec<Vpn> = (0..256).map(|number| first + number * 17).collect();
    let mut asked = 0;
    for second in 0..1_200 {
        if second == 600 {
            asked = sim.log.merges.len();
        }
        for &page in &broken {
            let (content, _) = sim.page(region, page).unwrap();
            sim.write(region, page, content);
        }
        sim.run(1);
    }
    let again = pages_that(sim.log.merges[asked..].iter().map(|(_, result)| result), Merging::Merged);
    assert!(again <= 2 * 256, "{again} merges of 256 pages in ten minutes");
    nearly(sim.saved(), 32 * MIB, 96);
}

#[test]
fn what_was_merged_is_not_asked_for_again() {
    let mut sim = Machine::new(requested());
    scenario::redis(&mut sim, 3, Pages(32 * MIB));
    sim.run(60);
    let from_ns = sim.now_ns();
    sim.run(600);
    let asked: u64 = sim.log.asked_since(from_ns).map(|(_, _, result)| u64::from(result.range.take.pages)).sum();
    assert!(asked < 32 * MIB, "{asked} pages were asked for again");
}

#[test]
fn processes_that_refuse_do_not_keep_others_from_being_merged() {
    let mut sim = Machine::new(requested());
    for _ in 0..2 {
        sim.add(Process::starting_at(0).untouchable().mapping(copies(16 * MIB)));
    }
    for _ in 0..2 {
        add(&mut sim, 0, Mapping::new(Pages(16 * MIB), Fill::Series(2)).of_family(2));
    }
    sim.run(300);
    nearly(sim.saved(), 16 * MIB, 99);
    let untried = sim.log.pages_that(Merging::Untried);
    assert!(untried > 0 && untried <= sim.engine.ledger().pages_read, "{untried} pages were not tried");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_request_names_pages_of_two_domains(
        tenants in common::tenants(), seed in any::<u64>(),
    ) {
        let host = SimHost::new(seed, Costs::default(), Knobs::requested());
        let mut sim = Machine::with(host, Config { seed, ..Config::default() });
        let mut domains = Vec::new();
        for tenant in tenants {
            domains.push((sim.add(process_of(tenant)), tenant.0));
        }
        sim.run(60);
        let domain_of = |owner: OwnerKey| domains.iter().find(|(other, _)| *other == owner).unwrap().1;
        for (take, keep, _) in sim.log.asked_since(0) {
            prop_assert!(keep.is_none_or(|keep| domain_of(keep) == domain_of(take)));
        }
    }
}

/// Reading and merging stay within the governor's share over any ten seconds.
#[test]
fn the_governors_share_holds() {
    for governor in [Governor::Low, Governor::Medium] {
        let mut sim = Machine::with(requested(), Config { governor, ..config() });
        scenario::redis(&mut sim, 4, Pages(256 * MIB));
        assert_spent_at_most(share_ns(WINDOW_NS, governor.pace().top) * 11 / 10, &sim.course(60));
        assert!(sim.saved().0 > 0);
    }
}

/// The engine names a busy page again later, and finally it's merged.
#[test]
fn pages_in_use_are_merged_later() {
    let knobs = Knobs { busy: Permyriad(2_000), ..Knobs::requested() };
    let mut sim = Machine::new(SimHost::new(7, Costs::default(), knobs));
    scenario::pairs(&mut sim, Pages(32 * MIB), Pages(0));
    sim.run(1_800);
    nearly(sim.saved(), 32 * MIB, 95);
}

fn pin(sim: &mut SimHost, owner: OwnerKey, pinned: bool) {
    for region in sim.regions_of(owner) {
        let span = sim.span_of(region).expect("it is there");
        sim.pin(span, pinned);
    }
}

/// The pinned copy may be the first, the second or the last of three.
#[test]
fn a_pinned_copy_keeps_no_others_apart() {
    for pinned in 0..3 {
        let mut sim = Machine::new(requested());
        let owners = [1, 2, 3].map(|_| add(&mut sim, 0, copies(32 * MIB)));
        pin(&mut sim, owners[pinned], true);
        sim.run(60);
        nearly(sim.saved(), 32 * MIB, 98);
    }
}

#[test]
fn pinned_pages_are_asked_for_ever_more_rarely() {
    let mut sim = Machine::new(requested());
    let owners = [1, 2, 3].map(|_| add(&mut sim, 0, copies(32 * MIB)));
    for owner in owners {
        pin(&mut sim, owner, true);
    }
    sim.run(600);
    let from_ns = sim.now_ns();
    let before = sim.cost().pagefold_ns;
    sim.run(3_600);
    let asked = pages_that(sim.log.asked_since(from_ns).map(|(_, _, result)| result), Merging::Busy);
    assert!(asked <= 6 * 3 * 32 * MIB, "{asked} pages in an hour: more than once in ten minutes");
    let spent_ns = sim.cost().pagefold_ns - before;
    assert!(spent_ns <= 3_600 * SECOND / 400, "{spent_ns} ns");
    assert_eq!(sim.saved(), Pages(0));
    for owner in owners {
        pin(&mut sim, owner, false);
    }
    sim.run(1_800);
    nearly(sim.saved(), 2 * 32 * MIB, 95);
}

#[test]
fn short_lived_memory_is_not_merged() {
    let mut sim = Machine::new(requested());
    scenario::short_lived(&mut sim, Pages(16 * MIB), 300_000_000);
    add(&mut sim, 0, Mapping::new(Pages(16 * MIB), Fill::Random));
    sim.run(60);
    let merged = sim.log.pages_that(Merging::Merged);
    assert!(merged <= 2 * 16 * MIB, "{merged} short-lived pages were merged");
}

#[test]
fn the_cow_breaker_is_left_alone() {
    let mut sim = Machine::new(requested());
    scenario::cow_breaker(&mut sim, Pages(4 * MIB));
    sim.run(1_200);
    let from_ns = sim.now_ns() - 600 * SECOND;
    let merged = pages_that(sim.log.asked_since(from_ns).map(|(_, _, result)| result), Merging::Merged);
    // 100 pages a second are written.
    assert!(merged < 600 * 100 / 4, "{merged} merges in ten minutes");
}

#[test]
fn nothing_is_asked_for_while_another_program_controls_ksm() {
    let mut sim = Machine::new(requested());
    scenario::static_mix(&mut sim, Pages(32 * MIB));
    sim.set_ours(false);
    sim.run(10);
    assert_eq!((sim.log.merges.len(), sim.ignored_orders()), (0, 0));
    assert!(sim.engine.ledger().pages_read > 0);
    assert_eq!(sim.log.lines, [None], "pages are read whole");
}

/// Merging leaves out only pages that were written meanwhile.
#[test]
fn memory_that_is_written_all_the_time_is_merged_around() {
    let mut sim = Machine::new(requested());
    scenario::java(&mut sim, 3, Pages(64 * MIB));
    scenario::redis(&mut sim, 3, Pages(32 * MIB));
    sim.run(60);
    let (saved, savable) = (sim.saved().0, sim.truth().savable);
    assert!(saved * 10 >= (saved + savable) * 9, "{saved} saved, {savable} left");
}

#[test]
fn the_surviving_copy_is_chosen_beforehand() {
    let mut sim =
        Machine::new(SimHost::new(7, Costs::default(), Knobs::requested()).with_nodes(&[Pages(512 * MIB); 2]));
    for node in [0, 1] {
        let mapping = copies(32 * MIB);
        sim.add(Process::starting_at(0).at_home_on(node).placed(Placement::Fair).mapping(mapping));
    }
    sim.run(60);
    nearly(sim.saved(), 32 * MIB, 99);
    let frames = sim.frames_by_node();
    let merged = frames[0] + frames[1];
    assert!(frames[0].0 * 100 >= merged.0 * 48 && frames[0].0 * 100 <= merged.0 * 52, "{frames:?}");
    assert!(sim.log.moves.is_empty(), "{:?}", sim.log.moves);
}

/// Asserts that pages with equal hashes are merged only with true copies, and in the end with all of these.
fn assert_only_copies_are_merged(alike: Alike, seed: u64, seconds: u64) -> Machine {
    let host = SimHost::new(seed, Costs::default(), Knobs { alike, ..Knobs::requested() });
    let mut sim = Machine::with(host, Config { seed, ..config() });
    for family in [1, 1, 2] {
        add(&mut sim, 0, Mapping::new(Pages(16 * MIB), Fill::Series(family)).of_family(family));
    }
    add(&mut sim, 0, Mapping::new(Pages(16 * MIB), Fill::Random));
    add(&mut sim, 0, Mapping::new(Pages(MIB), Fill::Zeros));
    let savable = sim.truth().savable;
    sim.run(seconds);
    let content = |(region, page)| sim.page(region, page).unwrap().0;
    for (_, MergeResult { range, merging }) in &sim.log.merges {
        for number in (0..range.take.pages).filter(|_| matches!(merging, Merging::Merged | Merging::Differs)) {
            let part = range.part(number, 1);
            let kept = match part.keep {
                Keep::Run(region, page) | Keep::Page(region, page) => content((region, page)),
                Keep::Zero => 0,
            };
            let are_equal = content((part.take.region, part.take.first)) == kept;
            assert_eq!(are_equal, *merging == Merging::Merged);
        }
    }
    assert_eq!(sim.truth().contents, 3 * 16 * MIB);
    nearly(sim.saved(), savable, 99);
    let merged = sim.log.pages_that(Merging::Merged);
    assert_eq!(sim.engine.ledger().requests.merged, Pages(merged));
    sim
}

#[test]
fn pages_that_differ_everywhere_are_hashed_in_small_part() {
    let sim = assert_only_copies_are_merged(Alike::default(), 7, 20);
    assert_eq!(sim.log.lines, [Some(2)]);
}

#[test]
fn pages_alike_but_for_one_word_are_read_whole_after_a_short_time() {
    let alike = Alike { share: Permyriad(10_000), groups: 1, distinct_from: LINES };
    let sim = assert_only_copies_are_merged(alike, 7, 20);
    assert_eq!(sim.log.lines, [Some(2), None]);
    let in_vain = sim.log.pages_that(Merging::Differs);
    assert!(in_vain <= 4 * 16 * MIB, "{in_vain} wasted comparisons");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn results_do_not_depend_on_collisions(
        share in prop_oneof![0_u32..500, 0_u32..10_000], groups in prop_oneof![1_u64..4, 1_u64..10_000],
        power in 1_u32..7, seed in any::<u64>(),
    ) {
        let alike = Alike { share: Permyriad(share), groups, distinct_from: 1 << power };
        let sim = assert_only_copies_are_merged(alike, seed, 300);
        prop_assert!(sim.log.lines.len() <= 6, "{:?}", sim.log.lines);
    }
}

#[test]
fn successors_of_a_program_that_lived_long_are_merged_soon() {
    let mut sim = Machine::with(requested(), Config { governor: Governor::Full, ..config() });
    sim.run(1);
    let mut merged_after = Vec::new();
    for _ in 0..3 {
        let owner = add(&mut sim, 0, Mapping::new(Pages(16 * MIB), Fill::Same(1)));
        let began_ns = sim.now_ns();
        while sim.saved() < Pages(15 * MIB) {
            sim.run(1);
        }
        merged_after.push(sim.now_ns() - began_ns);
        sim.run(16);
        sim.exit(owner);
        sim.run(1);
    }
    assert!(merged_after[0] > 3 * SECOND, "nothing is known of its kind: {merged_after:?}");
    assert!(merged_after[1..].iter().all(|&after| after <= SECOND), "{merged_after:?}");
}
