//! Clones of one template have equal pages at equal offsets. On a host that merges on request, the real engine reads one
//! of them whole, and merges the others with it by position.

mod common;

use common::{MIB, Machine, SECOND, config, requested};
use pagefold_engine::config::Config;
use pagefold_engine::host::{Host, Merging, PageState};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, Replica, SimHost, scenario};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// How many pages each clone has.
const EACH: u64 = 64 * MIB;

/// Starts a clone now.
fn clone(sim: &mut SimHost) -> OwnerKey {
    let mapping = Mapping::new(Pages(EACH), Fill::Series(1)).of_family(1);
    sim.add(Process::starting_at(sim.now_ns()).mapping(mapping))
}

/// Makes cycles until this much is saved. Returns how many that took.
fn cycles_until(sim: &mut Machine, saved: u64) -> u64 {
    for cycles in 1..10_000 {
        let wait_ns = sim.cycle();
        let Ok(()) = sim.host.wait(wait_ns.max(1_000_000));
        if sim.saved().0 >= saved {
            return cycles;
        }
    }
    panic!("{:?} of {saved} saved", sim.saved());
}

/// How many pages the engine has read of a process.
fn read(sim: &Machine, owner: OwnerKey) -> u64 {
    sim.log.pages.iter().filter(|(_, of, _)| *of == owner).map(|(_, _, pages)| pages).sum()
}

#[test]
fn one_clone_is_read_whole_and_the_others_are_merged_with_it() {
    let mut sim = Machine::new(requested());
    let owners = [1, 2, 3, 4].map(|_| clone(&mut sim));
    cycles_until(&mut sim, 3 * EACH * 99 / 100);
    let pages = owners.map(|owner| read(&sim, owner));
    assert!(pages[0] >= EACH, "{pages:?}");
    assert!(pages[1..].iter().all(|&pages| pages <= EACH * 15 / 100), "{pages:?}");
    assert_eq!(sim.log.pages_that(Merging::Differs), 0);
}

/// Clones that are as young as the run don't tell us yet how long their family lives.
#[test]
fn a_newcomer_is_merged_in_a_few_cycles() {
    for pause in [0, 20] {
        let mut sim = Machine::new(requested());
        clone(&mut sim);
        clone(&mut sim);
        cycles_until(&mut sim, EACH * 9 / 10);
        for others in 2..5 {
            sim.run(pause);
            let newcomer = clone(&mut sim);
            let began_ns = sim.now_ns();
            let cycles = cycles_until(&mut sim, (others - 1) * EACH + EACH * 9 / 10);
            assert!(cycles <= 4, "{cycles} cycles for clone {others}");
            assert!(sim.now_ns() - began_ns < SECOND / 5, "{} ms", (sim.now_ns() - began_ns) / 1_000_000);
            assert!(read(&sim, newcomer) <= EACH / 50, "{} pages read", read(&sim, newcomer));
        }
    }
}

/// At first we expect newcomers to live long. When they end, we learn that they don't.
#[test]
fn clones_that_soon_end_are_merged_by_position_once() {
    let mut sim = Machine::new(requested());
    clone(&mut sim);
    clone(&mut sim);
    cycles_until(&mut sim, EACH * 9 / 10);
    let mut named = Vec::new();
    for _ in 0..4 {
        let before = sim.log.asked_since(0).count();
        let newcomer = clone(&mut sim);
        sim.run(1);
        sim.exit(newcomer);
        sim.run(1);
        named.push(sim.log.asked_since(0).count() - before);
    }
    assert!(named[0] > 0 && named[1..].iter().all(|&ranges| ranges == 0), "{named:?}");
}

/// A clone doesn't have its memory at once: its program reads or computes it, here in a second. An eighth of it differs.
#[test]
fn a_newcomer_that_fills_its_memory_is_merged_soon_after() {
    const PIECE: u64 = EACH / 64;
    let knobs = Knobs { resident_age_ns: SECOND / 4, ..Knobs::requested() };
    let mut sim = Machine::new(SimHost::new(7, Costs::default(), knobs));
    let template = clone(&mut sim);
    clone(&mut sim);
    sim.run(20);
    let template = sim.regions_of(template)[0];
    let first = sim.span_of(template).unwrap().first;
    for others in 2..5 {
        let mapping = Mapping::new(Pages(EACH), Fill::Series(1)).of_family(1).resident(Permyriad(0));
        let began_ns = sim.now_ns();
        let newcomer = sim.add(Process::starting_at(began_ns).mapping(mapping));
        let mut filled = 0;
        while filled < EACH {
            let end = EACH.min((sim.now_ns() - began_ns) * EACH / SECOND + PIECE);
            sim.change_pages(newcomer, filled..end, |host, region, page| {
                let at = page.0 - host.span_of(region).unwrap().first.0;
                let (content, _) = host.page(template, first + at).unwrap();
                host.write(region, page, if at % 8 == 0 { others << 40 | at } else { content });
            });
            filled = end;
            let wait_ns = sim.cycle();
            let Ok(()) = sim.host.wait(wait_ns.clamp(1_000_000, SECOND / 64));
        }
        let filled_ns = sim.now_ns();
        cycles_until(&mut sim, EACH + (others - 1) * EACH * 7 / 8 - EACH / 100);
        assert!(sim.now_ns() - filled_ns < SECOND / 2, "{} ms", (sim.now_ns() - filled_ns) / 1_000_000);
        // Most of the pages that we looked at weren't there.
        assert!(read(&sim, newcomer) <= EACH * 3 / 4, "{} pages read", read(&sim, newcomer));
        sim.run(20);
        let differing = sim.log.pages_that(Merging::Differs);
        assert!(differing <= (others - 1) * EACH / 8, "{differing} pages differed, some more than once");
    }
}

#[test]
fn guests_larger_than_a_block_are_merged_by_position() {
    const GUEST: u64 = 1_300 * MIB;
    let mut sim = Machine::new(requested());
    let guest = || Mapping::new(Pages(GUEST), Fill::Series(1)).of_family(1);
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(guest()));
    }
    sim.run(20);
    // This one's blocks begin elsewhere.
    let other = Mapping::new(Pages(100 * MIB), Fill::Random).of_family(2);
    let now_ns = sim.now_ns();
    let newcomer = sim.add(Process::starting_at(now_ns).mapping(other).mapping(guest()));
    let cycles = cycles_until(&mut sim, GUEST + GUEST * 9 / 10);
    assert!(cycles <= 20, "{cycles} cycles");
    assert!(read(&sim, newcomer) <= 100 * MIB, "{} pages read", read(&sim, newcomer));
    for region in sim.engine.regions() {
        assert!(region.counts().resident <= region.view.pages, "pages are counted in their block");
    }
}

#[test]
fn zeros_are_merged_with_the_zero_page_and_own_pages_are_read() {
    for zeros in [100, 3_600] {
        let mut sim = Machine::new(requested());
        let density = vec![Permyriad(9_000)];
        let replica = Replica { template: 9, density, zeros: Permyriad(zeros), run: 7, shift: 0 };
        scenario::replicas(&mut sim, 3, Pages(EACH), &replica);
        let truth = sim.truth();
        sim.run(30);
        assert!(sim.saved().0 >= truth.savable * 99 / 100, "{:?} of {}", sim.saved(), truth.savable);
        assert!(sim.ksm().zero.0 >= truth.zero_frames * 99 / 100, "{:?} of {}", sim.ksm().zero, truth.zero_frames);
        assert_eq!(sim.log.pages_that(Merging::Full), 0);
    }
}

#[test]
fn more_clones_than_a_page_may_have_sharers_are_all_merged() {
    const PAGES: u64 = 2 * MIB;
    let knobs = Knobs { max_page_sharing: 8, ..Knobs::requested() };
    let mut sim = Machine::new(SimHost::new(7, Costs::default(), knobs));
    for _ in 0..20 {
        let now_ns = sim.now_ns();
        sim.add(Process::starting_at(now_ns).mapping(Mapping::new(Pages(PAGES), Fill::Series(1)).of_family(1)));
        sim.run(10);
    }
    sim.run(60);
    // The clones need three frames for each content.
    assert!(sim.saved().0 >= (20 - 3) * PAGES * 9 / 10, "{:?}", sim.saved());
}

/// Forks a process that pagefold doesn't see. Then the parent writes all its pages except every eighth 256 KiB, and
/// shares only these with the child from then on. Returns the child.
fn fork_excluded(sim: &mut Machine, parent: OwnerKey) -> OwnerKey {
    let excluded = sim.fork(parent);
    sim.set_out_of_scope(excluded, true);
    sim.change_pages(parent, 0..EACH, |host, region, page| {
        let (content, _) = host.page(region, page).unwrap();
        if page.0 / 64 % 8 > 0 {
            host.write(region, page, content);
        }
    });
    excluded
}

/// Whether each page of a process shares its frame through fork.
fn shared(sim: &Machine, owner: OwnerKey) -> Vec<bool> {
    let region = sim.regions_of(owner)[0];
    let first = sim.span_of(region).unwrap().first;
    (0..EACH).map(|page| sim.page(region, first + page).unwrap().1 == PageState::Shared).collect()
}

#[test]
fn pages_that_an_excluded_process_shares_are_not_merged() {
    for of_newcomers in [false, true] {
        let mut sim = Machine::new(requested());
        let template = clone(&mut sim);
        let mut excluded = Vec::new();
        if !of_newcomers {
            excluded.push(fork_excluded(&mut sim, template));
        }
        for _ in 0..3 {
            let newcomer = clone(&mut sim);
            if of_newcomers {
                excluded.push(fork_excluded(&mut sim, newcomer));
            }
            sim.run(10);
        }
        for &owner in &excluded {
            let still = shared(&sim, owner).iter().filter(|&&is_shared| is_shared).count() as u64;
            assert_eq!(still, EACH / 8, "of newcomers: {of_newcomers}");
        }
        let others = if of_newcomers { 0 } else { 2 * EACH / 8 };
        let right = 3 * EACH * 7 / 8 + others;
        assert!((right * 99 / 100..=right).contains(&sim.saved().0), "{:?} of {right}", sim.saved());
    }
}

/// When we read the template's pages, nobody else shared them.
#[test]
fn pages_that_an_excluded_process_has_shared_since_are_not_named_by_position() {
    let mut sim = Machine::new(requested());
    let template = clone(&mut sim);
    sim.run(20);
    fork_excluded(&mut sim, template);
    let shared = shared(&sim, template);
    let region = sim.regions_of(template)[0];
    let first = sim.span_of(region).unwrap().first;
    clone(&mut sim);
    sim.run(10);
    let mut left_out = 0;
    for (_, result) in sim.log.merges.iter().filter(|(_, result)| result.range.needs_own) {
        let Some((kept, page)) = result.range.keep.first() else { continue };
        assert_eq!(kept, region);
        let at = usize::try_from(page.0 - first.0).unwrap();
        let pages = &shared[at..at + result.range.take.pages as usize];
        // The kernel keeps no frame that more processes map than we know of.
        assert!(matches!(result.merging, Merging::Absent | Merging::Full) || !pages.contains(&true), "{result:?}");
        left_out += pages.iter().filter(|&&is_shared| is_shared).count() as u64;
    }
    assert_eq!(left_out, EACH / 8);
}

/// How many pages we read of five newcomers, whose family we know well. Each newcomer is this many pages longer than
/// the one before. Regions of different lengths are never merged by position.
fn read_of_newcomers(longer: u64, content: impl Fn(u64, u64) -> u64) -> u64 {
    let mut sim = Machine::new(requested());
    clone(&mut sim);
    clone(&mut sim);
    sim.run(20);
    let mut pages = 0;
    for number in 1..6 {
        let mapping = Mapping::new(Pages(EACH + longer * number), Fill::Random).of_family(1);
        let now_ns = sim.now_ns();
        let newcomer = sim.add(Process::starting_at(now_ns).mapping(mapping));
        sim.change_pages(newcomer, 0..EACH, |host, region, page| {
            let first = host.span_of(region).unwrap().first;
            host.write(region, page, content(number, page.0 - first.0));
        });
        sim.run(10);
        pages += read(&sim, newcomer);
    }
    pages
}

#[test]
fn families_that_do_not_agree_are_read_as_ever() {
    let unlike = |number, page| number << 40 | page;
    let at_other_offsets = |number, page| (1 << 40) + (page + 1_009 * number) % EACH;
    let contents: [fn(u64, u64) -> u64; 2] = [unlike, at_other_offsets];
    for content in contents {
        let [with, without] = [0, 1].map(|longer| read_of_newcomers(longer, content));
        assert!(with * 100 <= without * 103, "{with} pages, {without} without");
    }
}

/// Newcomers have their template's pages when we sample them, and rewrite all just afterwards.
#[test]
fn a_family_that_diverges_is_no_longer_merged_by_position() {
    let mut sim = Machine::new(requested());
    clone(&mut sim);
    clone(&mut sim);
    sim.run(20);
    let mut differing = Vec::new();
    for newcomer in 1..6 {
        let before = sim.log.pages_that(Merging::Differs);
        let owner = clone(&mut sim);
        cycles_until(&mut sim, 0);
        sim.change_pages(owner, 0..EACH, |host, region, page| _ = host.write(region, page, newcomer << 40 | page.0));
        sim.run(3);
        differing.push(sim.log.pages_that(Merging::Differs) - before);
    }
    let named: u64 = sim.log.merges.iter().map(|(_, result)| u64::from(result.range.take.pages)).sum();
    assert!(differing.iter().sum::<u64>() <= named / 4 + 256, "{differing:?} of {named}");
    assert!(differing[1..].iter().all(|&pages| pages <= 256), "{differing:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    /// Whenever clones of two templates start, we merge only equal pages of one domain, and in the end nearly all.
    #[test]
    fn clones_are_merged_within_their_domains(
        clones in proptest::collection::vec((1_u16..3, 1_u64..3, 1_u64..3, 0_u64..20), 2..9),
        busy in prop_oneof![Just(0), 0_u32..2_000], late in prop_oneof![Just(0), 0_u32..2_000], seed in any::<u64>(),
    ) {
        let knobs = Knobs { busy: Permyriad(busy), late: Permyriad(late), ..Knobs::requested() };
        let mut sim = Machine::with(SimHost::new(seed, Costs::default(), knobs), Config { seed, ..config() });
        let mut domains = BTreeMap::new();
        let mut copies: BTreeMap<_, Vec<u64>> = BTreeMap::new();
        for (domain, series, mib, second) in clones {
            let mapping = Mapping::new(Pages(mib * MIB), Fill::Series(series)).of_family(mib);
            let owner = sim.add(Process::starting_at(second * SECOND).in_domain(domain).mapping(mapping));
            domains.insert(owner, domain);
            copies.entry((domain, series)).or_default().push(mib * MIB);
        }
        sim.run(400);
        for (take, keep, _) in sim.log.asked_since(0) {
            prop_assert!(keep.is_none_or(|keep| domains[&keep] == domains[&take]));
        }
        let savable: u64 = copies.values().map(|pages| pages.iter().sum::<u64>() - pages.iter().max().unwrap()).sum();
        prop_assert!(sim.saved().0 * 100 >= savable * 95, "{:?} of {savable}", sim.saved());
    }
}
