//! Placement of merged pages on machines with several memory nodes, in virtual time: the live engine on simulated
//! nodes, and its reports compared with the simulator's state.

mod common;

use common::{MIB, SECOND, Watched, config, engine, host, run};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{NodeKey, OwnerKey};
use pagefold_engine::limits::Limits;
use pagefold_engine::placement::inventory::NodePages;
use pagefold_engine::placement::policy::{Latencies, Placement};
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};

/// Pages that all programs have in common.
const COMMON: Pages = Pages(32 * MIB);

/// A machine with `nodes` nodes of 512 MiB.
fn machine(nodes: usize) -> SimHost {
    host().with_nodes(&vec![Pages(512 * MIB); nodes])
}

/// A program's memory: half of it is the same in all programs.
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

/// A machine with two nodes after these programs have run, each with its common memory in use or not.
fn ran(programs: impl IntoIterator<Item = (Process, bool)>) -> SimHost {
    let (mut host, mut engine) = (machine(2), engine());
    for (process, active) in programs {
        add(&mut host, process, if active { mapping().active() } else { mapping() });
    }
    run(&mut host, &mut engine, 40);
    host
}

/// A machine after a run with one program on each of these nodes.
fn placed(nodes: usize, homes: &[u16], placement: Placement) -> (SimHost, Engine, Vec<OwnerKey>) {
    let (mut host, mut engine) = (machine(nodes), engine());
    let owners = programs(&mut host, homes, placement);
    run(&mut host, &mut engine, 40);
    (host, engine, owners)
}

/// A machine after a run of some seconds with one program on each of its nodes, and an engine slow enough to change
/// something meanwhile.
fn placing(nodes: u16, limit: u64, seconds: u64) -> (SimHost, Engine) {
    let (mut host, mut engine) = (machine(nodes.into()), slowly(limit));
    programs(&mut host, &(0..nodes).collect::<Vec<_>>(), Placement::Fair);
    run(&mut host, &mut engine, seconds);
    (host, engine)
}

#[test]
fn plain_ksm_is_one_sided() {
    let (host, engine, _) = placed(2, &[0, 1], Placement::Kernel);
    let shares = shares(&host);
    // The frames of the program that is scanned later are kept.
    assert!(shares[1] > 0.98, "{shares:?}");
    assert_eq!(host.moved(), 0);
    // It is reported anyway.
    let report = engine.state();
    let places = report.placement.unwrap();
    assert_eq!(places.misplaced, Pages(0));
    assert!(places.owners.iter().any(|owner| owner.remote > owner.local && owner.tax > 0.5), "{places:?}");
}

#[test]
fn fair_divides_frames_equally_between_two_idle_or_two_active_nodes() {
    for active in [false, true] {
        let host = ran([(on(0), active), (on(1), active)]);
        assert_shares(&host, &[0.5, 0.5], if active { "active" } else { "idle" });
    }
}

#[test]
fn fair_gives_all_frames_to_the_active_node() {
    for (active, wanted) in [(0, [1.0, 0.0]), (1, [0.0, 1.0])] {
        assert_shares(&ran([0, 1].map(|home| (on(home), home == active))), &wanted, "the active side");
    }
}

#[test]
fn priority_gives_the_shares_of_the_nuksm_thesis() {
    // Table 5.3: nice values, and the share of the first program.
    for (nice, share) in
        [([-20, -11], 0.91), ([-20, -16], 0.83), ([-20, -20], 0.5), ([-16, -20], 0.17), ([-11, -20], 0.09)]
    {
        // Activity has no effect.
        let program = |home: u16| (on(home).nice(nice[usize::from(home)]).placed(Placement::Priority), home == 0);
        assert_shares(&ran([0, 1].map(program)), &[share, 1.0 - share], &format!("{nice:?}"));
    }
}

#[test]
fn three_and_four_programs_on_two_nodes_and_four_on_four() {
    for homes in [&[0, 1, 1][..], &[1, 0, 0], &[0, 0, 1, 1], &[0, 1, 0, 0]] {
        let (host, ..) = placed(2, homes, Placement::Fair);
        assert_shares(&host, &[0.5, 0.5], &format!("{homes:?}"));
    }
    let (host, ..) = placed(4, &[0, 1, 2, 3], Placement::Fair);
    assert_shares(&host, &[0.25; 4], "four nodes");
    // By priority, each program has a share, and a node has those of its programs.
    let (host, ..) = placed(2, &[0, 1, 1], Placement::Priority);
    assert_shares(&host, &[1.0 / 3.0, 2.0 / 3.0], "three of equal priority");
}

#[test]
fn fair_counts_nodes_not_programs() {
    for (placement, second) in [(Placement::Fair, 0.5), (Placement::Priority, 2.0 / 66.0)] {
        let (mut host, mut engine) = (machine(2), engine());
        for number in 0..66 {
            let process = on(u16::from(number >= 64)).placed(placement);
            host.add(process.mapping(Mapping::new(Pages(4 * MIB), Fill::Series(1)).of_family(1)));
        }
        run(&mut host, &mut engine, 100);
        let frames = host.frames_by_node();
        let share = frames[1].0 as f64 / (4 * MIB) as f64;
        assert!((share - second).abs() < 0.02, "{placement}: {frames:?}");
    }
}

#[test]
fn a_program_that_maps_a_frame_twice_counts_once() {
    let (mut host, mut engine) = (machine(2), engine());
    for (home, times) in [(0, 3), (1, 1)] {
        let process = on(home).placed(Placement::Priority);
        host.add((0..times).fold(process, |process, _| process.mapping(mapping())));
    }
    run(&mut host, &mut engine, 60);
    assert_shares(&host, &[0.5, 0.5], "three programs and one");
}

#[test]
fn frames_are_divided_among_their_sharers_only() {
    let (mut host, mut engine) = (machine(4), engine());
    // 0 and 1 have one half in common, 1 and 2 the other; 3 shares only with a program on its own node.
    let half = |series| Mapping::new(COMMON, Fill::Series(series)).of_family(series);
    host.add(on(0).mapping(half(1)));
    host.add(on(1).mapping(half(1)).mapping(half(2)));
    host.add(on(2).mapping(half(2)));
    host.add(on(3).mapping(half(3)));
    host.add(on(3).mapping(half(3)));
    run(&mut host, &mut engine, 60);
    assert_shares(&host, &[1.0 / 6.0, 1.0 / 3.0, 1.0 / 6.0, 1.0 / 3.0], "by sharers");
}

#[test]
fn placement_saves_as_much_and_costs_at_most_a_quarter_more() {
    let spent = |host: &SimHost| host.cost().pagefold_ns + host.cost().ksmd_ns;
    for (homes, active) in [(&[0, 1][..], false), (&[0, 1], true), (&[0, 1, 0, 1], false)] {
        let run = |nodes, placement| {
            let (mut host, mut engine) = (machine(nodes), engine());
            for (at, &home) in homes.iter().enumerate() {
                let mapping = if active && at == 0 { mapping().active() } else { mapping() };
                let process = on(if nodes == 1 { 0 } else { home });
                add(&mut host, process.placed(placement), mapping);
            }
            run(&mut host, &mut engine, 120);
            host
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
        let (kernel, ..) = placed(4, homes, Placement::Kernel);
        for placement in [Placement::Fair, Placement::Priority] {
            let (mut host, mut engine, _) = placed(4, homes, placement);
            let (was, is) = (kernel.frames_by_node(), host.frames_by_node());
            let least: u64 = was.iter().zip(&is).map(|(was, is)| was.saturating_sub(*is).0).sum();
            let moved = host.moved();
            assert!(moved * 100 <= least * 101, "{moved} moves where {least} do: {was:?} became {is:?}");
            run(&mut host, &mut engine, 600);
            assert_eq!(host.moved(), moved, "{homes:?} {placement}");
            assert!(!engine.is_busy());
        }
    }
}

#[test]
fn a_program_bound_to_another_node_takes_its_share_along() {
    let (mut host, mut engine, owners) = placed(3, &[0, 1], Placement::Fair);
    host.set_home(owners[1], 2);
    run(&mut host, &mut engine, 60);
    assert_shares(&host, &[0.5, 0.0, 0.5], "bound to node 2");
    // By priority, after a change of a nice value.
    let (mut host, mut engine, owners) = placed(2, &[0, 1], Placement::Priority);
    host.set_nice(owners[0], 19);
    run(&mut host, &mut engine, 60);
    assert_shares(&host, &[21.0 / 61.0, 40.0 / 61.0], "nice 19");
}

#[test]
fn an_unbound_program_has_its_home_where_its_memory_is() {
    assert_shares(&ran([0, 1].map(|home| (on(home).unbound(), false))), &[0.5, 0.5], "not bound");
}

#[test]
fn no_frame_moves_to_a_node_forbidden_to_a_sharer() {
    let (mut host, mut engine) = (machine(3), engine());
    let confined = add(&mut host, on(0).confined_to(&[0, 2]), mapping());
    add(&mut host, on(1), mapping());
    run(&mut host, &mut engine, 40);
    assert_shares(&host, &[1.0, 0.0, 0.0], "confined to 0 and 2");
    assert!(!host.merged_of(confined).contains_key(&NodeKey(1)));
    // If all sharers have no node in common, everything stays where the kernel put it.
    assert_eq!(ran([0, 1].map(|home| (on(home).confined_to(&[home]), false))).moved(), 0);
}

/// Slow enough to change something meanwhile.
fn slowly(moves: u64) -> Engine {
    Engine::new(Config { limits: Limits { moves, ..Limits::default() }, ..config() })
}

#[test]
fn a_full_node_gets_no_frames_until_it_has_room() {
    let total = COMMON.0 * 4;
    let host = host().with_nodes(&[Pages(total), Pages(512 * MIB)]);
    let (mut watched, mut engine) = (Watched::new(host), slowly(100));
    // The frames of the program scanned last are kept: all on node 1.
    programs(&mut watched.host, &[0, 1], Placement::Fair);
    watched.run(&mut engine, 15);
    let moved = watched.host.moved();
    assert!((100..COMMON.0 / 4).contains(&moved), "{moved} by now");
    // Another process fills node 0.
    let free = |host: &mut SimHost| {
        host.wait(2 * SECOND).unwrap();
        host.observe().unwrap().nodes[0].free
    };
    let room = free(&mut watched.host);
    let hog = Process::starting_at(0).mapping(Mapping::new(Pages(room.0 - 300), Fill::Random).of_family(9));
    let hog = watched.host.add(hog);
    watched.run(&mut engine, 300);
    assert!(watched.host.moved() - moved <= 300, "{}", watched.host.moved() - moved);
    assert!(!engine.is_busy());
    // It is not retried over and over.
    let asked = |watched: &Watched| watched.moves.iter().map(|(_, moves)| moves).sum::<u64>();
    let before = asked(&watched);
    watched.run(&mut engine, 1_200);
    assert_eq!(asked(&watched), before);
    watched.host.exit(hog);
    watched.run(&mut engine, 600);
    assert_shares(&watched.host, &[0.5, 0.5], "room again");
}

#[test]
fn a_reserve_of_each_node_is_left_free() {
    let total = COMMON.0 * 4;
    let host = host().with_nodes(&[Pages(total), Pages(512 * MIB)]);
    let (mut host, mut engine) = (host, engine());
    programs(&mut host, &[0, 1], Placement::Fair);
    // Another process takes what merging frees on node 0, except a little more than the reserved 1/32.
    let reserve = total / 32;
    let hog =
        |pages, start_ns| Process::starting_at(start_ns).mapping(Mapping::new(Pages(pages), Fill::Random).of_family(9));
    host.add(hog(total - 2 * COMMON.0, 0));
    host.add(hog(COMMON.0 - reserve - 128, 2 * SECOND));
    run(&mut host, &mut engine, 120);
    assert_eq!((host.moved(), host.observe().unwrap().nodes[0].free), (128, Pages(reserve)));
}

#[test]
fn a_node_can_go_offline_and_come_back() {
    for after in [1, 10, 20, 40] {
        let (mut host, mut engine) = placing(3, 300, after);
        assert!(host.remove_node(2));
        run(&mut host, &mut engine, 200);
        // A program bound to processors without memory has its home where most of its pages went.
        let left = shares(&host);
        assert!(left[2] == 0.0 && (left[0] - 0.5).abs() <= 0.02, "{left:?} without node 2, gone after {after} s");
        assert!(!engine.is_busy());
        host.restore_node(2);
        run(&mut host, &mut engine, 200);
        assert_shares(&host, &[1.0 / 3.0; 3], "back again");
    }
}

#[test]
fn with_one_node_online_placement_is_idle() {
    for after in [1, 2, 3, 5, 10, 20, 40] {
        let (mut host, mut engine) = placing(2, 300, after);
        assert!(host.remove_node(1));
        run(&mut host, &mut engine, 100);
        assert!(!engine.is_busy(), "gone after {after} s");
        let moved = host.moved();
        run(&mut host, &mut engine, 100);
        assert_eq!(host.moved(), moved);
        host.restore_node(1);
        run(&mut host, &mut engine, 200);
        assert_shares(&host, &[0.5, 0.5], "back again");
    }
}

#[test]
fn moves_per_second_stay_within_the_limit() {
    for limit in [50, 1_000] {
        let (mut watched, mut engine) = (Watched::new(machine(2)), slowly(limit));
        programs(&mut watched.host, &[0, 1], Placement::Fair);
        watched.run(&mut engine, 120);
        let within = |&(from_ns, _): &(u64, u64)| {
            let second = watched.moves.iter().filter(|(at_ns, _)| (from_ns..from_ns + SECOND).contains(at_ns));
            second.map(|(_, moves)| moves).sum::<u64>()
        };
        let most = watched.moves.iter().map(within).max().unwrap();
        assert!(most <= limit && most * 10 >= limit * 9, "{most} in a second, {limit} permitted");
    }
}

#[test]
fn local_only_shares_no_frame_across_nodes() {
    let knobs = Knobs { merge_across_nodes: false, ..Knobs::driven() };
    let mut host = SimHost::new(7, Costs::default(), knobs).with_nodes(&[Pages(512 * MIB); 2]);
    let mut engine = engine();
    let owners = programs(&mut host, &[0, 1, 0, 1], Placement::LocalOnly);
    run(&mut host, &mut engine, 60);
    for (owner, home) in owners.iter().zip([0, 1, 0, 1]) {
        let merged = host.merged_of(*owner);
        assert_eq!(merged.keys().copied().collect::<Vec<_>>(), [NodeKey(home)]);
        assert!(merged[&NodeKey(home)].0 * 100 >= COMMON.0 * 99, "{merged:?}");
    }
    assert_eq!(host.frames_by_node()[0], host.frames_by_node()[1]);
    assert_eq!(host.moved(), 0);
}

#[test]
fn placement_costs_nothing_on_one_node() {
    let bill = |host: SimHost| {
        let (mut watched, mut engine) = (Watched::new(host), engine());
        programs(&mut watched.host, &[0, 0, 0], Placement::Fair);
        watched.run(&mut engine, 60);
        assert_eq!((watched.looks, watched.activity, watched.placed), (0, 0, 0));
        assert!(watched.moves.is_empty() && engine.state().placement.is_none());
        (watched.host.cost(), engine.ledger().curve.clone())
    };
    let none = bill(host());
    assert_eq!(bill(machine(1)), none);
}

#[test]
fn reports_match_the_memory() {
    // A square of nodes: the opposite corner is further away.
    let distances: [&[u32]; 4] = [&[10, 20, 30, 20], &[20, 10, 20, 30], &[30, 20, 10, 20], &[20, 30, 20, 10]];
    let (mut host, mut engine) = (machine(4).with_distances(&distances), engine());
    let owners = programs(&mut host, &[0, 2, 1], Placement::Fair);
    run(&mut host, &mut engine, 100);
    let report = engine.state();
    let places = report.placement.unwrap();
    let ledger = engine.ledger();
    assert_eq!((places.misplaced, ledger.not_moved, ledger.moved.0), (Pages(0), Pages(0), host.moved()));
    for (node, frames) in places.nodes.iter().zip(host.frames_by_node()) {
        assert_eq!((node.frames, node.total), (frames, Pages(512 * MIB)));
    }
    for owner in owners {
        let reported = places.owners.iter().find(|reported| reported.owner == owner).unwrap();
        assert_eq!(
            reported.by_node,
            host.merged_of(owner).into_iter().map(|(node, pages)| NodePages(node, pages)).collect::<Vec<_>>()
        );
    }
    // A third on its own node, and for the one in the middle nothing at the opposite corner.
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
        let (mut host, mut engine) = (machine(2), engine());
        let mapping = |active| if active { mapping().active() } else { mapping() };
        add(&mut host, on(0), mapping(first));
        run(&mut host, &mut engine, 3_600);
        add(&mut host, on(1), mapping(second));
        run(&mut host, &mut engine, 120);
        assert_shares(&host, &wanted, &format!("active {first}, and an hour later {second}"));
    }
}

/// A program on one of two nodes with three quarters of a common stock of pages, drawn at random: with a dozen of
/// them, nearly every page has a different set of sharers.
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
    let (mut host, mut engine) = (machine(2), engine());
    let stock = 8 * MIB;
    let half = |host: &SimHost| {
        let frames = host.frames_by_node();
        let all = frames[0].0 + frames[1].0;
        assert!(frames[0].0.abs_diff(frames[1].0) * 50 <= all && all * 10 > stock * 9, "{frames:?}");
        all
    };
    let owners: Vec<_> = (0..12).map(|number| draw(&mut host, number, stock)).collect();
    run(&mut host, &mut engine, 120);
    half(&host);
    // New processes share some of the pages: at most those are redistributed.
    let before = host.moved();
    for number in 12..20 {
        draw(&mut host, number, stock / 8);
        run(&mut host, &mut engine, 60);
        half(&host);
    }
    assert!(host.moved() - before <= 8 * stock / 8, "{} moves", host.moved() - before);
    // When one exits, three quarters of its pages have other sharers: few have to move.
    for owner in owners.into_iter().take(6) {
        let before = host.moved();
        host.exit(owner);
        run(&mut host, &mut engine, 600);
        let all = half(&host);
        assert!((host.moved() - before) * 5 <= all, "{} moves of {all} frames", host.moved() - before);
    }
}

#[test]
fn without_control_of_ksm_nothing_is_moved() {
    let (mut host, mut engine) = placing(2, 100, 10);
    let moved = host.moved();
    assert!((100..COMMON.0 / 4).contains(&moved) && engine.is_busy(), "{moved} by now");
    host.set_ours(false);
    run(&mut host, &mut engine, 300);
    assert_eq!(host.moved(), moved);
    assert!(!engine.is_busy());
}
