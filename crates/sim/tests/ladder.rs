//! The ladder on the simulated host: the four kinds of memory, the governors, and their cost, in virtual time.

mod common;

use common::{MIB, Machine, SECOND, assert_spent_at_most, config, host};
use pagefold_engine::config::{Config, Preset};
use pagefold_engine::decision::Kind;
use pagefold_engine::governor::{Governor, WINDOW_NS, share_ns};
use pagefold_engine::host::MemoryView;
use pagefold_engine::keys::FamilyKey;
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost, Step, scenario};

fn kind_of_most(sim: &Machine) -> Kind {
    sim.engine.state().totals.kinds.iter().max_by_key(|total| total.resident).unwrap().kind
}

/// The writer comes back to each page after 20 s, so merging doesn't pay.
#[test]
fn the_cow_breaker_is_not_merged() {
    let mut sim = Machine::new(host());
    scenario::cow_breaker(&mut sim, Pages(8 * MIB));
    sim.run(120);
    assert_eq!((sim.merged_pages(), kind_of_most(&sim)), (Pages(0), Kind::CowBroken));
    let before = sim.cost();
    sim.run(60);
    assert_eq!(sim.merged_pages(), Pages(0), "later no more is merged");
    assert!(sim.cost().ksmd_ns - before.ksmd_ns < SECOND / 10, "later scans cost almost nothing");
}

/// The writer comes back to each page after 87 minutes. Until then the merged page has paid.
#[test]
fn a_slow_cow_breaker_is_merged() {
    let mut sim = Machine::new(host());
    scenario::cow_breaker(&mut sim, Pages(2048 * MIB));
    sim.run(120);
    assert!(sim.saved().0 * 100 >= 2048 * MIB * 97, "{} saved", sim.saved().0);
}

#[test]
fn without_the_filter_the_cow_breaker_is_merged() {
    let mut sim = Machine::with(host(), Config { cow_threshold: Permyriad(10_000), ..config() });
    scenario::cow_breaker(&mut sim, Pages(256 * MIB));
    sim.run(60);
    assert!(sim.saved().0 > 256 * MIB * 8 / 10, "{} saved", sim.saved().0);
}

#[test]
fn short_lived_memory_is_not_merged_unless_configured() {
    for life_ms in [500, 1_000, 2_000] {
        let mut sim = Machine::new(host());
        sim.run(1);
        scenario::short_lived(&mut sim, Pages(128 * MIB), life_ms * 1_000_000);
        assert!(sim.course(30).iter().all(|moment| moment.saved == 0));
        assert_eq!(sim.engine.ledger().marked, Pages(0), "lives of {life_ms} ms");
    }
    let mut sim = Machine::with(host(), Config { seed: 11, ..Config::of_preset(Preset::Sensitive) });
    sim.run(1);
    scenario::short_lived(&mut sim, Pages(128 * MIB), 2 * SECOND);
    let most = sim.course(20).iter().map(|moment| moment.saved).max().unwrap();
    assert!(most >= 128 * MIB * 9 / 10, "{most}");
}

#[test]
fn lives_of_six_seconds_are_learned_to_be_too_short() {
    let mut sim = Machine::new(host());
    sim.run(1);
    scenario::short_lived(&mut sim, Pages(64 * MIB), 6 * SECOND);
    sim.run(60);
    let marked = sim.engine.ledger().marked;
    assert!(marked > Pages(0), "the first regions look long-lived");
    sim.run(120);
    assert_eq!(sim.engine.ledger().marked, marked);
}

#[test]
fn lives_of_sixteen_seconds_are_merged_again_and_again() {
    let mut sim = Machine::new(host());
    sim.run(1);
    scenario::short_lived(&mut sim, Pages(64 * MIB), 16 * SECOND);
    sim.run(64);
    let course = sim.course(160);
    // The region only exists for half of the time.
    let held: u64 = course.windows(2).map(|pair| (pair[1].now_ns - pair[0].now_ns) * pair[0].saved).sum();
    let average = held / (course[course.len() - 1].now_ns - course[0].now_ns);
    assert!(average * 100 >= 64 * MIB * 40, "{average} pages held on average");
}

#[test]
fn governors_keep_to_their_share_and_find_the_same() {
    let mut last = None;
    for governor in [Governor::Full, Governor::Medium, Governor::Low, Governor::Quiet] {
        let mut sim = Machine::with(host(), Config { governor, ..config() });
        let pages = Pages(if governor == Governor::Quiet { 32 * MIB } else { 512 * MIB });
        scenario::static_mix(&mut sim, pages);
        let course = sim.course(if governor == Governor::Quiet { 400 } else { 60 });
        let saved = sim.saved().0;
        assert!(saved * 100 >= pages.0 * 99, "{governor}: {saved} of {}", pages.0);
        assert_spent_at_most(share_ns(WINDOW_NS, governor.pace().top) * 105 / 100 + 20_000_000, &course);
        if governor == Governor::Full {
            let ledger = sim.engine.ledger();
            assert!(ledger.seconds_to_90_percent().unwrap() < 3.0, "{:?}", ledger.seconds_to_90_percent());
            assert!(ledger.marked.0 < 520 * MIB && ledger.saved.unwrap().0 * 100 >= saved * 99, "{ledger:?}");
        }
        let reached = course.iter().find(|moment| moment.saved * 10 >= pages.0 * 9).unwrap().now_ns;
        if governor != Governor::Quiet {
            assert!(last.is_none_or(|last| reached > last), "{governor}: {reached} ns");
            last = Some(reached);
        }
    }
}

#[test]
fn auto_merges_within_a_minute_at_a_fifth_of_a_core_and_then_rests() {
    let memory = |available| MemoryView { total: Pages(100), available: Pages(available), ..MemoryView::default() };
    let mut sim = Machine::with(host(), Config { governor: Governor::Auto, ..config() });
    scenario::static_mix(&mut sim, Pages(512 * MIB));
    sim.set_memory(memory(90));
    let course = sim.course(60);
    let saved = sim.saved().0;
    assert!(saved * 10 >= 512 * MIB * 9, "{saved} saved");
    assert_spent_at_most(share_ns(WINDOW_NS, Governor::Low.pace().top) * 105 / 100 + 20_000_000, &course);
    let before = sim.course(60).last().unwrap().spent_ns;
    let spent = sim.course(60).last().unwrap().spent_ns - before;
    assert!(spent < 60 * SECOND * 2 / 1_000, "{spent} ns in a minute at rest");
    assert_eq!(sim.engine.state().activity.in_force, Governor::Low);
    // The governor rises once memory gets scarce.
    sim.set_memory(memory(10));
    sim.run(5);
    assert_eq!(sim.engine.state().activity.in_force, Governor::Full);
}

#[test]
fn a_slow_host_with_many_processes_is_read_all_the_same() {
    let costs = Costs { observe_ns: 10_000_000, ..Costs::default() };
    let mut sim =
        Machine::with(SimHost::new(1, costs, Knobs::default()), Config { governor: Governor::Quiet, ..config() });
    scenario::pairs(&mut sim, Pages(16 * MIB), Pages(16 * MIB));
    let savable = sim.truth().savable;
    let spent_ns = sim.course(600).last().unwrap().spent_ns;
    assert!(sim.saved().0 * 100 >= savable * 99, "{} of {savable}", sim.saved().0);
    assert!(spent_ns < share_ns(660 * SECOND, Governor::Quiet.pace().top), "{spent_ns}");
}

#[test]
fn a_large_mapping_is_judged_in_blocks() {
    use pagefold_sim::{Fill, Mapping, Process};
    let mut sim = Machine::new(host());
    // Two guests of 3 GiB. Their first GiB is the same.
    for _ in 0..2 {
        let replica = pagefold_sim::Replica {
            template: 5,
            density: (0..1536).map(|extent| Permyriad(if extent < 512 { 9_000 } else { 0 })).collect(),
            zeros: Permyriad(0),
            run: 7,
            shift: 0,
        };
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(3072 * MIB), Fill::Replica(replica))));
    }
    let savable = sim.truth().savable;
    sim.run(40);
    assert!(sim.saved().0 * 100 >= savable * 97, "{} of {savable}", sim.saved().0);
    assert!(sim.engine.ledger().pages_read < 5 * 1024 * MIB, "{} read", sim.engine.ledger().pages_read);
}

/// Adds two processes with `pages` pages each, which start at `at_ns`.
fn pairs(steps: &mut Vec<(u64, Step)>, at_ns: u64, process: u32, pages: u64) {
    for process in [process, process + 1] {
        let map =
            Step::Map { process, region: process, family: FamilyKey(pages), first: Vpn(512), pages: Pages(pages) };
        steps.extend([(at_ns, Step::Start { process }), (at_ns, map)]);
    }
}

/// Writes the same content to some pages of both processes.
fn fill(steps: &mut Vec<(u64, Step)>, at_ns: u64, process: u32, pages: std::ops::Range<u64>) {
    for (region, page) in
        [process, process + 1].into_iter().flat_map(|region| pages.clone().map(move |page| (region, page)))
    {
        let content = u64::from(process) << 32 | (page + 1);
        steps.push((at_ns, Step::Write { region, page: Vpn(512 + page), content, parts: 0b1111, eighth: 0 }));
    }
}

#[test]
fn growth_in_marked_memory_is_merged_while_small_spans_wait() {
    let mut steps = Vec::new();
    pairs(&mut steps, 0, 1, 160_000);
    fill(&mut steps, 0, 1, 0..80_000);
    // These pages are too few to justify a scan for a long time.
    pairs(&mut steps, 5 * SECOND, 3, 200);
    fill(&mut steps, 5 * SECOND, 3, 0..200);
    fill(&mut steps, 18 * SECOND, 1, 80_000..128_000);
    let mut sim = Machine::new(host());
    sim.play(steps.into());
    sim.run(17);
    assert_eq!(sim.saved(), Pages(80_000));
    sim.run(20);
    assert_eq!(sim.saved(), Pages(128_200), "the scan for grown memory merges the small ones too");
}

#[test]
fn a_program_of_many_small_mappings_is_merged_whole() {
    const MAPPINGS: u32 = 300;
    const PAGES: u64 = 16;
    let mut steps = Vec::new();
    for process in [1, 2] {
        steps.push((0, Step::Start { process }));
        for number in 0..MAPPINGS {
            // Half of the mappings come later, when the others are already marked.
            let at_ns = u64::from(number % 2) * 10 * SECOND;
            let (region, first) = (process * 1_000 + number, Vpn(512 + u64::from(number) * 1_024));
            steps.push((at_ns, Step::Map { process, region, family: FamilyKey(1), first, pages: Pages(PAGES) }));
            for page in 0..PAGES {
                let content = u64::from(number + 1) << 32 | page;
                let page = first + page;
                steps.push((at_ns, Step::Write { region, page, content, parts: 0b1111, eighth: 0 }));
            }
        }
    }
    steps.sort_by_key(|step| step.0);
    let mut sim = Machine::new(host());
    sim.play(steps.into());
    sim.run(60);
    assert_eq!(sim.saved(), Pages(u64::from(MAPPINGS) * PAGES));
}

#[test]
fn memory_that_no_longer_changes_is_merged_even_if_it_changed_when_it_was_first_read() {
    const PAGES: u64 = 20_000;
    let mut steps = Vec::new();
    pairs(&mut steps, 0, 1, PAGES);
    // These act like guests that boot: always equal to each other, with other contents each second.
    for second in 0..10 {
        for (region, page) in [1, 2].into_iter().flat_map(|region| (0..PAGES).map(move |page| (region, page))) {
            let content = second << 32 | (page + 1);
            let write = Step::Write { region, page: Vpn(512 + page), content, parts: 0b1111, eighth: 0 };
            steps.push((second * SECOND, write));
        }
    }
    let mut sim = Machine::new(host());
    sim.play(steps.into());
    sim.run(9);
    assert_eq!((sim.saved(), kind_of_most(&sim)), (Pages(0), Kind::CowBroken));
    sim.run(41);
    assert_eq!(sim.saved(), Pages(PAGES));
}

/// On a slow or busy machine, the host may stop reading before it has come to all of its mappings.
#[test]
fn what_the_host_left_unread_is_read_later() {
    for knobs in [Knobs::driven(), Knobs::requested()] {
        let mut sim = Machine::new(SimHost::new(7, Costs::default(), Knobs { late: Permyriad(9_000), ..knobs }));
        for _ in 0..8 {
            sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(16 * MIB), Fill::Series(1))));
        }
        sim.run(60);
        let most = 7 * 16 * MIB;
        assert!(sim.saved().0 * 100 >= most * 97, "{} of {most} pages", sim.saved().0);
    }
}

/// Adds two equal processes that reserve `pages` pages each, at different addresses, and write every `gap`th.
fn sparse_pair(steps: &mut Vec<(u64, Step)>, number: u32, pages: u64, gap: u64) {
    for process in [number, number + 1] {
        let first = Vpn(u64::from(process) * 123_456);
        let map = Step::Map { process, region: process, family: FamilyKey(pages), first, pages: Pages(pages) };
        steps.extend([(0, Step::Start { process }), (0, map)]);
        for page in (0..pages).step_by(usize::try_from(gap).unwrap()) {
            let content = u64::from(number) << 32 | (page + 1);
            steps.push((0, Step::Write { region: process, page: first + page, content, parts: 0b1111, eighth: 0 }));
        }
    }
}

#[test]
fn reserved_memory_with_few_pages_here_and_there_is_merged() {
    const PAGES: u64 = 8 << 18;
    for host in [host(), common::requested()] {
        let mut steps = Vec::new();
        sparse_pair(&mut steps, 1, PAGES, 2_048);
        let mut sim = Machine::new(host);
        sim.play(steps.into());
        sim.run(30);
        assert_eq!(sim.saved(), Pages(PAGES / 2_048));
    }
}

/// Reading holes costs little, and thousands of small mappings are mostly holes, too.
#[test]
fn holes_do_not_use_up_the_time_to_read_pages() {
    const PAGES: u64 = 1 << 18;
    let mut steps = Vec::new();
    for process in [1, 2] {
        steps.push((0, Step::Start { process }));
        for number in 0..4_000 {
            let (region, first) = (process * 10_000 + number, Vpn(512 + u64::from(number) * 64));
            steps.push((0, Step::Map { process, region, family: FamilyKey(1), first, pages: Pages(32) }));
            for page in [30, 31] {
                let content = u64::from(number + 1) << 32 | page;
                steps.push((0, Step::Write { region, page: first + page, content, parts: 0b1111, eighth: 0 }));
            }
        }
    }
    sparse_pair(&mut steps, 3, PAGES, 20);
    sparse_pair(&mut steps, 5, 4 * PAGES, 80);
    let mut sim = Machine::with(host(), Config { governor: Governor::Low, ..config() });
    sim.play(steps.into());
    sim.run(40);
    assert_eq!(sim.saved(), Pages(2 * PAGES.div_ceil(20)));
}
