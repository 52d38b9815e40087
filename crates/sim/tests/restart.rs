//! An engine takes the place of another on the same machine, with what that one has learned.

mod common;

use common::{MIB, Watched, engine, host};
use pagefold_engine::engine::{Cycle, Engine, cycle};
use pagefold_engine::host::Host;
use pagefold_engine::keys::LastingKey;
use pagefold_engine::learned::Learned;
use pagefold_engine::region::LeaveAlone;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Fill, Mapping, Process, scenario};

/// A machine with merged, sparse and small memory, after one run.
fn after_a_run() -> (Watched, Learned) {
    let mut host = host();
    scenario::redis(&mut host, 3, Pages(64 * MIB));
    scenario::idle(&mut host, Pages(256 * MIB));
    let (mut watched, mut first) = (Watched::new(host), engine());
    watched.run(&mut first, 120);
    (watched, first.learned())
}

/// What an engine with this knowledge does: pages read until all is judged, marks made or removed, and scans.
fn then(watched: &mut Watched, learned: Learned) -> (Engine, u64, u64, u64) {
    let mut next = engine();
    next.adopt(learned);
    (watched.pages, watched.marks, watched.orders) = (Vec::new(), 0, 0);
    let before = watched.host.saved();
    watched.run(&mut next, 1);
    while next.is_busy() {
        watched.run(&mut next, 1);
    }
    let read = watched.pages.iter().map(|(_, _, pages)| pages).sum();
    watched.run(&mut next, 110);
    assert!(watched.host.saved() >= before, "{before:?} before, {:?} after", watched.host.saved());
    let marks = watched.marks;
    let scans = next.scans();
    (next, read, marks, scans)
}

#[test]
fn the_next_run_searches_and_merges_nothing_anew() {
    let (mut watched, learned) = after_a_run();
    let (_, fresh, ..) = then(&mut watched, Learned::default());
    let (mut watched, _) = after_a_run();
    let (next, read, marks, scans) = then(&mut watched, learned.clone());
    assert!(read * 5 <= fresh, "{read} pages instead of {fresh}");
    assert_eq!((marks, scans), (0, 0));
    // A third run knows as much as the second.
    let marked = |learned: &Learned| learned.regions.iter().filter(|region| !region.marks.is_empty()).count();
    assert_eq!(marked(&next.learned()), marked(&learned));
    assert!(marked(&learned) >= 3);
}

#[test]
fn a_newcomer_is_merged_with_what_an_earlier_run_has_merged() {
    let (mut watched, learned) = after_a_run();
    let mut next = engine();
    next.adopt(learned);
    watched.run(&mut next, 30);
    let before = watched.host.saved().0;
    scenario::redis(&mut watched.host, 1, Pages(64 * MIB));
    watched.run(&mut next, 30);
    let (saved, savable) = (watched.host.saved().0, watched.host.truth().savable);
    assert!(saved > before && savable * 10 < saved, "{before}, then {saved}, and {savable} left");
}

#[test]
fn a_run_that_ends_before_its_scans_leaves_them_to_the_next() {
    let mut sim = host();
    scenario::redis(&mut sim, 3, Pages(64 * MIB));
    let (mut watched, mut first) = (Watched::new(sim), engine());
    while watched.marks == 0 {
        let Ok(Cycle { wait_ns, .. }) = cycle(&mut first, &mut watched);
        let Ok(()) = watched.wait(wait_ns);
    }
    assert_eq!(watched.host.saved(), Pages(0));
    let learned = first.learned();
    let (_, _, _, scans) = then(&mut watched, learned);
    let (saved, savable) = (watched.host.saved().0, watched.host.truth().savable);
    assert!(scans > 0 && savable * 10 < saved, "{saved} and {savable} left");
}

/// A file that claims anything at all.
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
        let mut sim = host();
        for _ in 0..3 {
            sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Series(1))));
        }
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Random)));
        Watched::new(sim)
    };
    let (mut watched, mut first) = (build(), engine());
    watched.run(&mut first, 60);
    let truth = watched.host.saved();
    let learned = first.learned();
    for lie in lies(&learned) {
        let mut watched = build();
        let mut engine = engine();
        engine.adopt(lie);
        watched.run(&mut engine, 60);
        assert!(watched.host.saved() <= truth, "{:?} instead of {truth:?}", watched.host.saved());
    }
}

#[test]
fn a_run_with_another_task_adopts_nothing() {
    let (_, learned) = after_a_run();
    let zeros = pagefold_engine::config::Config { only: pagefold_engine::config::Only::Zeros, ..common::config() };
    let mut next = Engine::new(zeros);
    next.adopt(learned);
    assert!(next.learned().regions.is_empty() && next.learned().families.is_empty());
}
