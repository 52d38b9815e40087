//! Placement of merged pages on machines with several memory nodes, in virtual time. We run the real engine on
//! simulated nodes, and compare its reports with the simulator's state.

mod common;

use common::{MIB, Machine, SECOND, config, host};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{NodeKey, OwnerKey};
use pagefold_engine::limits::Limits;
use pagefold_engine::placement::inventory::NodePages;
use pagefold_engine::placement::policy::{Latencies, Placement};
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};

/// The memory that all programs have in common.
const COMMON: Pages = Pages(32 * MIB);

/// A machine with `nodes` nodes of 512 MiB.
fn machine(nodes: usize) -> Machine {
    Machine::new(host().with_nodes(&vec![Pages(512 * MIB); nodes]))
}

/// The half of a program's memory that is the same in all programs.
fn mapping() -> Mapping {
    Mapping::new(COMMON, Fill::Series(1)).of_family(1)
}

fn add(host: &mut SimHost, process: Process, mapping: Mapping) -> OwnerKey {
    let own = Mapping::new(COMMON, Fill::Random).of_family(2);
    host.add(process.mapping(mapping).mapping(own))
}

/// Starts one program on each of these nodes, with one policy.
fn programs(host: &mut SimHost, homes: &[u16], placement: Placement) -> Vec<OwnerKey> {
    let process = |&home: &u16| on(home).placed(placement);
    homes.iter().map(|home| add(host, process(home), mapping())).collect()
}

/// Each node's share of the merged frames, once all are merged.
fn shares(host: &SimHost) -> Vec<f64> {
    let frames = host.frames_by_node();
    let all: u64 = frames.iter().map(|frames| frames.0).sum();
    assert!(all * 100 >= COMMON.0 * 99, "{all} merged frames of {}", COMMON.0);
    frames.iter().map(|frames| frames.0 as f64 / all as f64).collect()
}

fn assert_shares(host: &SimHost, wanted: &[f64], what: &str) {
    let shares = shares(host);
    assert_eq!(shares.len(), wanted.len());
    let near = shares.iter().zip(wanted).all(|(share, wanted)| (share - wanted).abs() <= 0.02);
    assert!(near, "{what}: {shares:.3?}, wanted {wanted:?}");
}

fn on(home: u16) -> Process {
    Process::starting_at(0).at_home_on(home)
}

/// A machine with two nodes on which these programs have run. The flag says whether a program uses its common memory.
fn ran(programs: impl IntoIterator<Item = (Process, bool)>) -> Machine {
    let mut sim = machine(2);
    for (process, active) in programs {
        add(&mut sim, process, if active { mapping().active() } else { mapping() });
    }
    sim.run(40);
    sim
}

/// A machine on which one program has run on each of these nodes.
fn placed(nodes: usize, homes: &[u16], placement: Placement) -> (Machine, Vec<OwnerKey>) {
    let mut sim = machine(nodes);
    let owners = programs(&mut sim, homes, placement);
    sim.run(40);
    (sim, owners)
}

/// A machine on which one program has run on each node, for some seconds. The engine moves frames so slowly that the
/// test can change something meanwhile.
fn placing(nodes: u16, limit: u64, seconds: u64) -> Machine {
    let mut sim = slowly(machine(nodes.into()), limit);
    programs(&mut sim, &(0..nodes).collect::<Vec<_>>(), Placement::Fair);
    sim.run(seconds);
    sim
}

#[test]
fn plain_ksm_is_one_sided() {
    let (sim, _) = placed(2, &[0, 1], Placement::Kernel);
    let shares = shares(&sim);
    // ksmd keeps the frames of the program that it scans later.
    assert!(shares[1] > 0.98, "{shares:?}");
    assert_eq!(sim.moved(), 0);
    // The report shows this even though nothing is misplaced.
    let report = sim.engine.state();
    let places = report.placement.unwrap();
    assert_eq!(places.misplaced, Pages(0));
    assert!(places.owners.iter().any(|owner| owner.remote > owner.local && owner.tax > 0.5), "{places:?}");
}

#[test]
fn priority_gives_the_shares_of_the_nuksm_thesis() {
    // Table 5.3: nice values, and the share of the first program.
    for (nice, share) in
        [([-20, -11], 0.91), ([-20, -16], 0.83), ([-20, -20], 0.5), ([-16, -20], 0.17), ([-11, -20], 0.09)]
    {
        // Whether a program uses its memory has no effect.
        let program = |home: u16| (on(home).nice(nice[usize::from(home)]).placed(Placement::Priority), home == 0);
        assert_shares(&ran([0, 1].map(program)), &[share, 1.0 - share], &format!("{nice:?}"));
    }
}

#[test]
fn three_and_four_programs_on_two_nodes_and_four_on_four() {
    for homes in [&[0, 1, 1][..], &[1, 0, 0], &[0, 0, 1, 1], &[0, 1, 0, 0]] {
        let (sim, _) = placed(2, homes, Placement::Fair);
        assert_shares(&sim, &[0.5, 0.5], &format!("{homes:?}"));
    }
    let (sim, _) = placed(4, &[0, 1, 2, 3], Placement::Fair);
    assert_shares(&sim, &[0.25; 4], "four nodes");
    // With the priority policy, each program has a share, and each node gets the sum of its programs' shares.
    let (sim, _) = placed(2, &[0, 1, 1], Placement::Priority);
    assert_shares(&sim, &[1.0 / 3.0, 2.0 / 3.0], "three of equal priority");
}

#[test]
fn fair_counts_nodes_not_programs() {
    for (placement, second) in [(Placement::Fair, 0.5), (Placement::Priority, 2.0 / 66.0)] {
        let mut sim = machine(2);
        for number in 0..66 {
            let process = on(u16::from(number >= 64)).placed(placement);
            sim.add(process.mapping(Mapping::new(Pages(4 * MIB), Fill::Series(1)).of_family(1)));
        }
        sim.run(100);
        let frames = sim.frames_by_node();
        let share = frames[1].0 as f64 / (4 * MIB) as f64;
        assert!((share - second).abs() < 0.02, "{placement}: {frames:?}");
    }
}

#[test]
fn a_program_that_maps_a_frame_twice_counts_once() {
    let mut sim = machine(2);
    for (home, times) in [(0, 3), (1, 1)] {
        let process = on(home).placed(Placement::Priority);
        sim.add((0..times).fold(process, |process, _| process.mapping(mapping())));
    }
    sim.run(60);
    assert_shares(&sim, &[0.5, 0.5], "three programs and one");
}

#[test]
fn frames_are_divided_among_their_sharers_only() {
    let mut sim = machine(4);
    // Programs 0 and 1 have one half in common, 1 and 2 the other. Program 3 only shares with one on its own node.
    let half = |series| Mapping::new(COMMON, Fill::Series(series)).of_family(series);
    sim.add(on(0).mapping(half(1)));
    sim.add(on(1).mapping(half(1)).mapping(half(2)));
    sim.add(on(2).mapping(half(2)));
    sim.add(on(3).mapping(half(3)));
    sim.add(on(3).mapping(half(3)));
    sim.run(60);
    assert_shares(&sim, &[1.0 / 6.0, 1.0 / 3.0, 1.0 / 6.0, 1.0 / 3.0], "by sharers");
}

#[test]
fn placement_saves_as_much_and_costs_at_most_a_quarter_more() {
    let spent = |sim: &Machine| sim.cost().pagefold_ns + sim.cost().ksmd_ns;
    for (homes, active) in [(&[0, 1][..], false), (&[0, 1], true), (&[0, 1, 0, 1], false)] {
        let run = |nodes, placement| {
            let mut sim = machine(nodes);
            for (at, &home) in homes.iter().enumerate() {
                let mapping = if active && at == 0 { mapping().active() } else { mapping() };
                let process = on(if nodes == 1 { 0 } else { home });
                add(&mut sim, process.placed(placement), mapping);
            }
            sim.run(120);
            sim
        };
        let (none, kernel, fair) = (run(1, Placement::Kernel), run(2, Placement::Kernel), run(2, Placement::Fair));
        for other in [&none, &kernel] {
            let (with, without) = (fair.saved().0 as f64, other.saved().0 as f64);
            assert!((with / without - 1.0).abs() < 0.01, "{with} saved instead of {without}");
        }
        assert!(spent(&fair) * 4 <= spent(&kernel) * 5, "{} ns instead of {}", spent(&fair), spent(&kernel));
        assert!(spent(&fair) * 4 <= spent(&none) * 5, "{} ns instead of {} on one node", spent(&fair), spent(&none));
    }
}

#[test]
fn no_frame_is_moved_twice_and_none_in_a_steady_state() {
    for homes in [&[0, 1][..], &[0, 1, 1], &[0, 1, 2, 3]] {
        let (kernel, _) = placed(4, homes, Placement::Kernel);
        for placement in [Placement::Fair, Placement::Priority] {
            let (mut sim, _) = placed(4, homes, placement);
            let (was, is) = (kernel.frames_by_node(), sim.frames_by_node());
            let least: u64 = was.iter().zip(&is).map(|(was, is)| was.saturating_sub(*is).0).sum();
            let moved = sim.moved();
            assert!(moved * 100 <= least * 101, "{moved} moves where {least} do: {was:?} became {is:?}");
            sim.run(600);
            assert_eq!(sim.moved(), moved, "{homes:?} {placement}");
            assert!(!sim.engine.is_busy());
        }
    }
}

#[test]
fn a_program_bound_to_another_node_takes_its_share_along() {
    let (mut sim, owners) = placed(3, &[0, 1], Placement::Fair);
    sim.set_home(owners[1], 2);
    sim.run(60);
    assert_shares(&sim, &[0.5, 0.0, 0.5], "bound to node 2");
    // With the priority policy, a nice value changes.
    let (mut sim, owners) = placed(2, &[0, 1], Placement::Priority);
    sim.set_nice(owners[0], 19);
    sim.run(60);
    assert_shares(&sim, &[21.0 / 61.0, 40.0 / 61.0], "nice 19");
}

#[test]
fn an_unbound_program_has_its_home_where_its_memory_is() {
    assert_shares(&ran([0, 1].map(|home| (on(home).unbound(), false))), &[0.5, 0.5], "not bound");
}

#[test]
fn no_frame_moves_to_a_node_forbidden_to_a_sharer() {
    let mut sim = machine(3);
    let confined = add(&mut sim, on(0).confined_to(&[0, 2]), mapping());
    add(&mut sim, on(1), mapping());
    sim.run(40);
    assert_shares(&sim, &[1.0, 0.0, 0.0], "confined to 0 and 2");
    assert!(!sim.merged_of(confined).contains_key(&NodeKey(1)));
    // If all sharers have no node in common, everything stays where the kernel put it.
    assert_eq!(ran([0, 1].map(|home| (on(home).confined_to(&[home]), false))).moved(), 0);
}

/// Makes the engine move frames so slowly that the test can change something meanwhile.
fn slowly(mut sim: Machine, moves: u64) -> Machine {
    sim.engine = Engine::new(Config { limits: Limits { moves, ..Limits::default() }, ..config() });
    sim
}

#[test]
fn a_full_node_gets_no_frames_until_it_has_room() {
    let total = COMMON.0 * 4;
    let mut sim = slowly(Machine::new(host().with_nodes(&[Pages(total), Pages(512 * MIB)])), 100);
    // ksmd keeps the frames of the program that it scans last, so all are on node 1.
    programs(&mut sim, &[0, 1], Placement::Fair);
    sim.run(15);
    let moved = sim.moved();
    assert!((100..COMMON.0 / 4).contains(&moved), "{moved} by now");
    // Another process fills node 0.
    let free = |sim: &mut Machine| {
        sim.wait(2 * SECOND).unwrap();
        sim.observe().unwrap().nodes[0].free
    };
    let room = free(&mut sim);
    let hog = Process::starting_at(0).mapping(Mapping::new(Pages(room.0 - 300), Fill::Random).of_family(9));
    let hog = sim.add(hog);
    sim.run(300);
    assert!(sim.moved() - moved <= 300, "{}", sim.moved() - moved);
    assert!(!sim.engine.is_busy());
    // The moves that failed aren't tried over and over.
    let asked = |sim: &Machine| sim.log.moves.iter().map(|(_, moves)| moves).sum::<u64>();
    let before = asked(&sim);
    sim.run(1_200);
    assert_eq!(asked(&sim), before);
    sim.exit(hog);
    sim.run(600);
    assert_shares(&sim, &[0.5, 0.5], "room again");
}

#[test]
fn a_reserve_of_each_node_is_left_free() {
    let total = COMMON.0 * 4;
    let mut sim = Machine::new(host().with_nodes(&[Pages(total), Pages(512 * MIB)]));
    programs(&mut sim, &[0, 1], Placement::Fair);
    // Another process takes the memory that merging frees on node 0, except a little more than the reserved 1/32.
    let reserve = total / 32;
    let hog =
        |pages, start_ns| Process::starting_at(start_ns).mapping(Mapping::new(Pages(pages), Fill::Random).of_family(9));
    sim.add(hog(total - 2 * COMMON.0, 0));
    sim.add(hog(COMMON.0 - reserve - 128, 2 * SECOND));
    sim.run(120);
    assert_eq!((sim.moved(), sim.observe().unwrap().nodes[0].free), (128, Pages(reserve)));
}

#[test]
fn a_node_can_go_offline_and_come_back() {
    for (nodes, after) in [2, 3].into_iter().flat_map(|nodes| [1, 2, 3, 5, 10, 20, 40].map(|after| (nodes, after))) {
        let mut sim = placing(nodes, 300, after);
        let (last, others) = (usize::from(nodes - 1), f64::from(nodes - 1));
        assert!(sim.remove_node(nodes - 1));
        sim.run(200);
        // A program bound to processors without memory now has its home where most of its pages went.
        let left = shares(&sim);
        assert!(left[last] == 0.0 && (left[0] - 1.0 / others).abs() <= 0.02, "{left:?} of {nodes}, after {after} s");
        assert!(!sim.engine.is_busy());
        let moved = sim.moved();
        sim.run(100);
        assert_eq!(sim.moved(), moved);
        sim.restore_node(nodes - 1);
        sim.run(200);
        assert_shares(&sim, &vec![1.0 / f64::from(nodes); nodes.into()], "back again");
    }
}

#[test]
fn moves_per_second_stay_within_the_limit() {
    for limit in [50, 1_000] {
        let mut sim = slowly(machine(2), limit);
        programs(&mut sim, &[0, 1], Placement::Fair);
        sim.run(120);
        let within = |&(from_ns, _): &(u64, u64)| {
            let second = sim.log.moves.iter().filter(|(at_ns, _)| (from_ns..from_ns + SECOND).contains(at_ns));
            second.map(|(_, moves)| moves).sum::<u64>()
        };
        let most = sim.log.moves.iter().map(within).max().unwrap();
        assert!(most <= limit && most * 10 >= limit * 9, "{most} in a second, {limit} permitted");
    }
}

#[test]
fn local_only_shares_no_frame_across_nodes() {
    let knobs = Knobs { merge_across_nodes: false, ..Knobs::driven() };
    let mut sim = Machine::new(SimHost::new(7, Costs::default(), knobs).with_nodes(&[Pages(512 * MIB); 2]));
    let owners = programs(&mut sim, &[0, 1, 0, 1], Placement::LocalOnly);
    sim.run(60);
    for (owner, home) in owners.iter().zip([0, 1, 0, 1]) {
        let merged = sim.merged_of(*owner);
        assert_eq!(merged.keys().copied().collect::<Vec<_>>(), [NodeKey(home)]);
        assert!(merged[&NodeKey(home)].0 * 100 >= COMMON.0 * 99, "{merged:?}");
    }
    assert_eq!(sim.frames_by_node()[0], sim.frames_by_node()[1]);
    assert_eq!(sim.moved(), 0);
}

#[test]
fn placement_costs_nothing_on_one_node() {
    let bill = |mut sim: Machine| {
        programs(&mut sim, &[0, 0, 0], Placement::Fair);
        sim.run(60);
        assert_eq!((sim.log.looks, sim.log.activity, sim.log.placed), (0, 0, 0));
        assert!(sim.log.moves.is_empty() && sim.engine.state().placement.is_none());
        (sim.cost(), sim.engine.ledger().curve.clone())
    };
    let none = bill(Machine::new(host()));
    assert_eq!(bill(machine(1)), none);
}

#[test]
fn reports_match_the_memory() {
    // A square of nodes: the opposite corner is further away.
    let distances: [&[u32]; 4] = [&[10, 20, 30, 20], &[20, 10, 20, 30], &[30, 20, 10, 20], &[20, 30, 20, 10]];
    let mut sim = Machine::new(host().with_nodes(&[Pages(512 * MIB); 4]).with_distances(&distances));
    let owners = programs(&mut sim, &[0, 2, 1], Placement::Fair);
    sim.run(100);
    let report = sim.engine.state();
    let places = report.placement.unwrap();
    let ledger = sim.engine.ledger();
    assert_eq!((places.misplaced, ledger.not_moved, ledger.moved.0), (Pages(0), Pages(0), sim.moved()));
    for (node, frames) in places.nodes.iter().zip(sim.frames_by_node()) {
        assert_eq!((node.frames, node.total), (frames, Pages(512 * MIB)));
    }
    for owner in owners {
        let reported = places.owners.iter().find(|reported| reported.owner == owner).unwrap();
        assert_eq!(
            reported.by_node,
            sim.merged_of(owner).into_iter().map(|(node, pages)| NodePages(node, pages)).collect::<Vec<_>>()
        );
    }
    // A third of each program's pages is on its own node. The program in the middle has none at the opposite corner.
    let tax: Vec<f64> = places.owners.iter().map(|owner| owner.tax).collect();
    let one = Latencies::default().tax(20, 20);
    for (tax, wanted) in tax.iter().zip([one, one, one * 2.0 / 3.0]) {
        assert!((tax - wanted).abs() < 0.02, "{tax} for {wanted}");
    }
}

#[test]
fn an_hour_of_sampling_makes_no_page_active() {
    for (first, second, wanted) in
        [(false, false, [0.5, 0.5]), (true, false, [1.0, 0.0]), (false, true, [0.0, 1.0]), (true, true, [0.5, 0.5])]
    {
        let mut sim = machine(2);
        let mapping = |active| if active { mapping().active() } else { mapping() };
        add(&mut sim, on(0), mapping(first));
        sim.run(3_600);
        add(&mut sim, on(1), mapping(second));
        sim.run(120);
        assert_shares(&sim, &wanted, &format!("active {first}, and an hour later {second}"));
    }
}

/// Adds a program, on one of two nodes, with three quarters of a common stock of pages, drawn at random. With a dozen
/// of these, nearly every page has a different set of sharers.
fn draw(host: &mut SimHost, number: u64, stock: u64) -> OwnerKey {
    let home = u16::try_from(number % 2).unwrap();
    let owner = host.add(on(home).mapping(Mapping::new(Pages(stock), Fill::Random)));
    let region = host.regions_of(owner)[0];
    let first = host.span_of(region).unwrap().first;
    for page in 0..stock {
        let lot = (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).wrapping_mul(number * 2 + 0x1234_5679);
        if lot >> 62 != 0 {
            host.write(region, first + page, page + 1_000);
        }
    }
    owner
}

#[test]
fn a_start_or_exit_moves_few_frames() {
    let mut sim = machine(2);
    let stock = 8 * MIB;
    let half = |sim: &Machine| {
        let frames = sim.frames_by_node();
        let all = frames[0].0 + frames[1].0;
        assert!(frames[0].0.abs_diff(frames[1].0) * 50 <= all && all * 10 > stock * 9, "{frames:?}");
        all
    };
    let owners: Vec<_> = (0..12).map(|number| draw(&mut sim, number, stock)).collect();
    sim.run(120);
    half(&sim);
    // New processes share some of the pages. Only these may be moved.
    let before = sim.moved();
    for number in 12..20 {
        draw(&mut sim, number, stock / 8);
        sim.run(60);
        half(&sim);
    }
    assert!(sim.moved() - before <= 8 * stock / 8, "{} moves", sim.moved() - before);
    // When a program exits, most of its pages have other sharers, so few have to move.
    for owner in owners.into_iter().take(6) {
        let before = sim.moved();
        sim.exit(owner);
        sim.run(600);
        let all = half(&sim);
        assert!((sim.moved() - before) * 5 <= all, "{} moves of {all} frames", sim.moved() - before);
    }
}

#[test]
fn without_control_of_ksm_nothing_is_moved() {
    let mut sim = placing(2, 100, 10);
    let moved = sim.moved();
    assert!((100..COMMON.0 / 4).contains(&moved) && sim.engine.is_busy(), "{moved} by now");
    sim.set_ours(false);
    sim.run(300);
    assert_eq!(sim.moved(), moved);
    assert!(!sim.engine.is_busy());
}
