//! Headroom for copies of merged memory, on a simulated host. The test sets how much memory is left, whatever the
//! processes use.

mod common;

use common::{MIB, Machine, config, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::host::{KillLimit, LimitView, MemoryView};
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::reserve::{Keep, ReserveSettings, RoomState};
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost};

const TOTAL: u64 = 1_000 * MIB;

fn memory(available: u64) -> MemoryView {
    MemoryView { total: Pages(TOTAL), available: Pages(available * MIB), ..MemoryView::default() }
}

fn machine(host: SimHost, keep: Keep, take_back: bool) -> Machine {
    Machine::with(host, Config { reserve: ReserveSettings { keep, take_back }, ..config() })
}

/// Starts pairs of processes of 32 MiB, each with contents of its own.
fn add_pairs(host: &mut SimHost, contents: std::ops::Range<u64>) -> Vec<OwnerKey> {
    let pairs = contents.flat_map(|content| [content; 2]);
    let process = |content| Process::starting_at(0).mapping(Mapping::new(Pages(32 * MIB), Fill::Series(content)));
    pairs.map(|content| host.add(process(content))).collect()
}

fn state(sim: &Machine) -> RoomState {
    sim.engine.reserve().machine().state
}

#[test]
fn nothing_is_merged_while_memory_is_short_and_it_goes_on_afterwards() {
    for host in [host(), requested()] {
        let mut sim = machine(host, Keep::Fixed(Pages(100 * MIB)), false);
        add_pairs(&mut sim, 1..3);
        sim.set_memory(memory(99));
        sim.run(60);
        assert_eq!((state(&sim), sim.saved()), (RoomState::Short, Pages(0)));
        sim.set_memory(memory(200));
        sim.run(60);
        assert!(sim.saved().0 >= 63 * MIB, "{:?}", sim.saved());
        assert_eq!(state(&sim), RoomState::Enough);
        // Merged memory stays merged, but new processes aren't merged.
        sim.set_memory(memory(50));
        sim.run(5);
        let processes = add_pairs(&mut sim, 3..4);
        sim.run(90);
        assert!((63 * MIB..=64 * MIB).contains(&sim.saved().0), "{:?}", sim.saved());
        assert_eq!(state(&sim), RoomState::Short);
        let marked = |region: &&pagefold_engine::region::Region| processes.contains(&region.view.owner);
        assert!(sim.engine.regions().filter(marked).all(|region| region.marks.spans.is_empty()));
    }
}

#[test]
fn by_default_a_small_machine_merges_even_if_little_is_left() {
    let mut sim = machine(host(), Keep::Auto, false);
    add_pairs(&mut sim, 1..3);
    // Less than 5 % of memory is left, but nothing is saved yet that could come back.
    sim.set_memory(memory(40));
    sim.run(60);
    assert!(sim.saved().0 >= 31 * MIB, "{:?}", sim.saved());
    // Now more is saved than is left.
    sim.set_memory(memory(60));
    sim.run(60);
    assert!(sim.saved().0 >= 63 * MIB, "{:?}", sim.saved());
    assert_eq!(state(&sim), RoomState::Overcommitted);
}

#[test]
fn a_limit_stops_the_merging_of_its_processes_only() {
    for host in [host(), requested()] {
        let mut sim = machine(host, Keep::Share(pagefold_engine::units::Permyriad(1_000)), false);
        let limited = add_pairs(&mut sim, 1..2);
        add_pairs(&mut sim, 2..3);
        sim.set_memory(memory(500));
        let (limit, left) = (Pages(100 * MIB), Pages(9 * MIB));
        let owners = limited.clone();
        let kills = Some(KillLimit { limit, left });
        sim.set_limits(vec![LimitView { key: LimitKey(7), limit, left, kills, owners, read_ns: 0 }]);
        sim.run(60);
        assert!((31 * MIB..=32 * MIB).contains(&sim.saved().0), "{:?}", sim.saved());
        assert_eq!(sim.engine.reserve().limits()[&LimitKey(7)].state, RoomState::Short);
        sim.set_limits(Vec::new());
        sim.run(60);
        assert!(sim.saved().0 >= 63 * MIB, "{:?}", sim.saved());
    }
}

#[test]
fn merged_memory_is_taken_apart_in_steps_and_only_as_far_as_there_is_room() {
    let mut sim = machine(host(), Keep::Fixed(Pages(200 * MIB)), true);
    add_pairs(&mut sim, 1..5);
    sim.set_memory(memory(500));
    sim.run(60);
    let merged = sim.saved();
    assert!(merged.0 >= 126 * MIB, "{merged:?}");
    // Unmerging a region needs 32 MiB for copies, and half of the reserve must stay.
    sim.set_memory(memory(131));
    sim.run(30);
    assert_eq!(sim.saved(), merged, "there is no room for the copies of a region");
    sim.set_memory(memory(133));
    let (mut before, mut steps) = (merged, 0);
    for _ in 0..5 {
        sim.run(2);
        let taken = before.saturating_sub(sim.saved());
        assert!(taken <= Pages(33 * MIB), "{taken:?} in two seconds");
        steps += u32::from(taken > Pages(0));
        before = sim.saved();
    }
    assert!(steps >= 3, "{steps}");
    assert!(sim.engine.ledger().taken_back >= Pages(3 * 32 * MIB));
    // Even when there's room again, the engine doesn't merge the memory again at once.
    sim.set_memory(memory(900));
    let kept = sim.saved();
    sim.run(60);
    assert_eq!(sim.saved(), kept);
}
