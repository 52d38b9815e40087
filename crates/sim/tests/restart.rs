//! An engine takes another's place on the same machine, and adopts what that one has learned.

mod common;

use common::{Log, MIB, Machine, config, host};
use pagefold_engine::config::{Config, Only};
use pagefold_engine::engine::Engine;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{LastingKey, OwnerKey};
use pagefold_engine::learned::Learned;
use pagefold_engine::region::LeaveAlone;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Fill, Mapping, Process, scenario};

/// A machine with merged, sparse and small memory, after one run.
fn after_a_run() -> Machine {
    let mut sim = Machine::new(host());
    scenario::redis(&mut sim, 3, Pages(64 * MIB));
    scenario::idle(&mut sim, Pages(256 * MIB));
    sim.run(120);
    sim
}

/// Replaces the running engine by a new one that adopts this knowledge.
fn restart(sim: &mut Machine, learned: Learned) {
    sim.engine = Engine::new(config());
    sim.engine.adopt(learned);
    sim.log = Log::default();
}

/// Restarts the engine. Returns how many pages the new one reads until it has judged everything.
fn read_after_restart(sim: &mut Machine, learned: Learned) -> u64 {
    restart(sim, learned);
    let before = sim.saved();
    sim.run(1);
    while sim.engine.is_busy() {
        sim.run(1);
    }
    let read = sim.log.pages.iter().map(|(_, _, pages)| pages).sum();
    sim.run(110);
    assert!(sim.saved() >= before, "{before:?} before, {:?} after", sim.saved());
    read
}

#[test]
fn the_next_run_searches_and_merges_nothing_anew() {
    let fresh = read_after_restart(&mut after_a_run(), Learned::default());
    let mut sim = after_a_run();
    let learned = sim.engine.learned();
    let read = read_after_restart(&mut sim, learned.clone());
    assert!(read * 5 <= fresh, "{read} pages instead of {fresh}");
    assert_eq!((sim.log.marks, sim.engine.scans()), (0, 0));
    // A third run would know as much as the second.
    let marked = |learned: &Learned| learned.regions.iter().filter(|region| !region.marks.is_empty()).count();
    assert_eq!(marked(&sim.engine.learned()), marked(&learned));
    assert!(marked(&learned) >= 3);
}

#[test]
fn a_newcomer_is_merged_with_what_an_earlier_run_has_merged() {
    let mut sim = after_a_run();
    let learned = sim.engine.learned();
    restart(&mut sim, learned);
    sim.run(30);
    let before = sim.saved().0;
    scenario::redis(&mut sim, 1, Pages(64 * MIB));
    sim.run(30);
    let (saved, savable) = (sim.saved().0, sim.truth().savable);
    assert!(saved > before && savable * 10 < saved, "{before}, then {saved}, and {savable} left");
}

#[test]
fn memory_whose_copies_end_between_two_runs_is_not_taken_for_pinned() {
    let mut sim = Machine::new(host());
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(32 * MIB), Fill::Series(1))));
    }
    sim.run(60);
    let learned = sim.engine.learned();
    sim.exit(OwnerKey(1));
    restart(&mut sim, learned);
    sim.run(60);
    assert!(sim.engine.regions().all(|region| region.hold.reason() != Some(LeaveAlone::Unmerged)));
}

#[test]
fn a_run_that_ends_before_its_scans_leaves_them_to_the_next() {
    let mut sim = Machine::new(host());
    scenario::redis(&mut sim, 3, Pages(64 * MIB));
    while sim.log.marks == 0 {
        let wait_ns = sim.cycle();
        let Ok(()) = sim.wait(wait_ns);
    }
    assert_eq!(sim.saved(), Pages(0));
    let learned = sim.engine.learned();
    read_after_restart(&mut sim, learned);
    let (saved, savable) = (sim.saved().0, sim.truth().savable);
    assert!(sim.engine.scans() > 0 && savable * 10 < saved, "{saved} and {savable} left");
}

/// What an engine has learned, falsified in all kinds of ways.
fn lies(learned: &Learned) -> Vec<Learned> {
    let with = |change: &dyn Fn(&mut pagefold_engine::learned::LearnedRegion)| {
        let mut lie = learned.clone();
        lie.regions.iter_mut().for_each(change);
        lie
    };
    vec![
        with(&|region| region.process = LastingKey(region.process.0 ^ 1)),
        with(&|region| region.marks = vec![(region.first, region.pages, region.resident, region.resident)]),
        with(&|region| region.marks.clear()),
        with(&|region| region.left_over = Permyriad(u32::MAX)),
        with(&|region| (region.hold, region.hold_ns) = (Some(LeaveAlone::Refused), u64::MAX)),
        with(&|region| (region.tally.found, region.tally.copies) = (1 << 39, 1 << 39)),
        with(&|region| region.pages = Pages(u64::MAX)),
    ]
}

#[test]
fn a_lie_changes_nothing_about_what_may_be_merged() {
    let build = || {
        let mut sim = Machine::new(host());
        for _ in 0..3 {
            sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Series(1))));
        }
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Random)));
        sim
    };
    let mut sim = build();
    sim.run(60);
    let truth = sim.saved();
    for lie in lies(&sim.engine.learned()) {
        let mut sim = build();
        sim.engine.adopt(lie);
        sim.run(60);
        assert!(sim.saved() <= truth, "{:?} instead of {truth:?}", sim.saved());
    }
}

#[test]
fn a_run_with_another_task_adopts_nothing() {
    let mut next = Engine::new(Config { only: Only::Zeros, ..config() });
    next.adopt(after_a_run().engine.learned());
    assert!(next.learned().regions.is_empty() && next.learned().families.is_empty());
}
