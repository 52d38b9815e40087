//! Room for what can come back, on a simulated host. What is left there is as the test says, whatever the processes take.

mod common;

use common::{MIB, config, host, requested, run};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::host::{LimitView, MemoryView};
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::reserve::{Keep, ReserveSettings, RoomState};
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost};

const TOTAL: u64 = 1_000 * MIB;

fn memory(available: u64) -> MemoryView {
    MemoryView { total: Pages(TOTAL), available: Pages(available * MIB), ..MemoryView::default() }
}

fn engine(keep: Keep, take_back: bool) -> Engine {
    Engine::new(Config { reserve: ReserveSettings { keep, take_back }, ..config() })
}

/// Starts pairs of processes of 32 MiB, each with contents of its own.
fn add_pairs(host: &mut SimHost, contents: std::ops::Range<u64>) -> Vec<OwnerKey> {
    let pairs = contents.flat_map(|content| [content; 2]);
    let process = |content| Process::starting_at(0).mapping(Mapping::new(Pages(32 * MIB), Fill::Series(content)));
    pairs.map(|content| host.add(process(content))).collect()
}

fn state(engine: &Engine) -> RoomState {
    engine.reserve().machine().state
}

#[test]
fn nothing_is_merged_while_memory_is_short_and_it_goes_on_afterwards() {
    for mut host in [host(), requested()] {
        add_pairs(&mut host, 1..3);
        host.set_memory(memory(99));
        let mut engine = engine(Keep::Fixed(Pages(100 * MIB)), false);
        run(&mut host, &mut engine, 60);
        assert_eq!((state(&engine), host.saved()), (RoomState::Short, Pages(0)));
        host.set_memory(memory(200));
        run(&mut host, &mut engine, 60);
        assert!(host.saved().0 >= 63 * MIB, "{:?}", host.saved());
        assert_eq!(state(&engine), RoomState::Enough);
        // What is merged stays so. What comes now is not merged.
        host.set_memory(memory(50));
        run(&mut host, &mut engine, 5);
        let processes = add_pairs(&mut host, 3..4);
        run(&mut host, &mut engine, 90);
        assert!((63 * MIB..=64 * MIB).contains(&host.saved().0), "{:?}", host.saved());
        let marked = |region: &&pagefold_engine::region::Region| processes.contains(&region.view.owner);
        assert!(engine.regions().filter(marked).all(|region| region.marks.spans.is_empty()));
    }
}

#[test]
fn by_default_a_small_machine_merges_even_if_little_is_left() {
    let mut host = host();
    add_pairs(&mut host, 1..3);
    // Less than 5 % of memory, and nothing is saved yet.
    host.set_memory(memory(40));
    let mut engine = engine(Keep::Auto, false);
    run(&mut host, &mut engine, 60);
    assert!(host.saved().0 >= 31 * MIB, "{:?}", host.saved());
    // More is saved than is left.
    host.set_memory(memory(60));
    run(&mut host, &mut engine, 60);
    assert!(host.saved().0 >= 63 * MIB, "{:?}", host.saved());
    assert_eq!(state(&engine), RoomState::Overcommitted);
}

#[test]
fn a_limit_stops_the_merging_of_its_processes_only() {
    for mut host in [host(), requested()] {
        let limited = add_pairs(&mut host, 1..2);
        add_pairs(&mut host, 2..3);
        host.set_memory(memory(500));
        let (limit, left) = (Pages(100 * MIB), Pages(9 * MIB));
        host.set_limits(vec![LimitView { key: LimitKey(7), limit, left, owners: limited.clone(), read_ns: 0 }]);
        let mut engine = engine(Keep::Share(pagefold_engine::units::Permyriad(1_000)), false);
        run(&mut host, &mut engine, 60);
        assert!((31 * MIB..=32 * MIB).contains(&host.saved().0), "{:?}", host.saved());
        assert_eq!(engine.reserve().limits()[&LimitKey(7)].state, RoomState::Short);
        host.set_limits(Vec::new());
        run(&mut host, &mut engine, 60);
        assert!(host.saved().0 >= 63 * MIB, "{:?}", host.saved());
    }
}

#[test]
fn merged_memory_is_taken_apart_in_steps_and_only_as_far_as_there_is_room() {
    let mut host = host();
    add_pairs(&mut host, 1..5);
    host.set_memory(memory(500));
    let mut engine = engine(Keep::Fixed(Pages(200 * MIB)), true);
    run(&mut host, &mut engine, 60);
    let merged = host.saved();
    assert!(merged.0 >= 126 * MIB, "{merged:?}");
    // A region needs 32 MiB of copies, and half of the reserve stays.
    host.set_memory(memory(131));
    run(&mut host, &mut engine, 30);
    assert_eq!(host.saved(), merged, "there is no room for the copies of a region");
    host.set_memory(memory(133));
    let (mut before, mut steps) = (merged, 0);
    for _ in 0..5 {
        run(&mut host, &mut engine, 2);
        let taken = before.saturating_sub(host.saved());
        assert!(taken <= Pages(33 * MIB), "{taken:?} in two seconds");
        steps += u32::from(taken > Pages(0));
        before = host.saved();
    }
    assert!(steps >= 3, "{steps}");
    assert!(engine.ledger().taken_back >= Pages(3 * 32 * MIB));
    // Once there is room, it is not merged again at once.
    host.set_memory(memory(900));
    let kept = host.saved();
    run(&mut host, &mut engine, 60);
    assert_eq!(host.saved(), kept);
}

#[test]
fn without_being_asked_nothing_is_taken_apart() {
    let mut host = host();
    add_pairs(&mut host, 1..3);
    host.set_memory(memory(500));
    let mut engine = engine(Keep::Fixed(Pages(200 * MIB)), false);
    run(&mut host, &mut engine, 60);
    let merged = host.saved();
    host.set_memory(memory(150));
    run(&mut host, &mut engine, 60);
    assert_eq!((host.saved(), state(&engine)), (merged, RoomState::Short));
    assert!(merged.0 >= 63 * MIB);
}
