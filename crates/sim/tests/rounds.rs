//! The live engine on the simulated host, in virtual time.

mod common;

use common::{MIB, SECOND, assert_restarted_are_merged, engine, host};
use pagefold_engine::config::Config;
use pagefold_engine::decision::Reason;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::ledger::Ledger;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Behaviour, Fill, Mapping, Process, Replica, SimHost, Writes, scenario};

/// Runs the engine on a host for some virtual seconds.
fn run(host: &mut SimHost, engine: &mut Engine, seconds: u64) -> Ledger {
    common::run(host, engine, seconds);
    engine.ledger().clone()
}

/// A tenth of each instance is the same in all.
fn thin() -> Replica {
    Replica { template: 20, density: vec![Permyriad(1_000)], zeros: Permyriad(0), run: 2, shift: 0 }
}

#[test]
fn one_content_beside_random_pages_is_merged_within_seconds() {
    let mut host = host();
    scenario::static_mix(&mut host, Pages(512 * MIB));
    let savable = host.truth().savable;
    let ledger = run(&mut host, &mut engine(), 20);
    assert!(ledger.saved.unwrap().0 * 100 >= savable * 99, "{} of {savable}", ledger.saved.unwrap().0);
    assert!(ledger.marked.0 < 520 * MIB, "{:?}", ledger.marked);
    assert!(ledger.seconds_to_90_percent().unwrap() < 3.0, "{:?}", ledger.seconds_to_90_percent());
}

#[test]
fn contents_that_exist_exactly_twice_are_found() {
    let mut host = host();
    scenario::pairs(&mut host, Pages(128 * MIB), Pages(256 * MIB));
    let savable = host.truth().savable;
    let ledger = run(&mut host, &mut engine(), 20);
    assert!(ledger.saved.unwrap().0 * 100 >= savable * 99, "{} of {savable}", ledger.saved.unwrap().0);
    assert!(ledger.marked.0 <= 260 * MIB, "{:?}", ledger.marked);
}

#[test]
fn dense_replicas_are_merged() {
    let mut host = host();
    scenario::redis(&mut host, 3, Pages(128 * MIB));
    scenario::mariadb(&mut host, 3, Pages(128 * MIB));
    let savable = host.truth().savable;
    let ledger = run(&mut host, &mut engine(), 30);
    assert!(ledger.saved.unwrap().0 * 100 >= savable * 90, "{} of {savable}", ledger.saved.unwrap().0);
}

#[test]
fn without_duplicates_nothing_is_marked_and_little_cpu_is_used() {
    let mut host = host();
    scenario::idle(&mut host, Pages(2048 * MIB));
    let ledger = run(&mut host, &mut engine(), 60);
    assert_eq!(ledger.marked, Pages(0));
    assert_eq!(ledger.cost.ksmd_ns, 0);
    let share = ledger.cost.pagefold_ns as f64 / (60 * SECOND) as f64;
    assert!(share < 0.005, "{share}");
}

#[test]
fn a_later_process_is_merged_with_merged_ones() {
    let mut host = host();
    scenario::redis(&mut host, 2, Pages(64 * MIB));
    let mut engine = engine();
    run(&mut host, &mut engine, 20);
    let before = host.saved().0;
    scenario::redis(&mut host, 1, Pages(64 * MIB));
    run(&mut host, &mut engine, 20);
    let savable = host.truth().savable;
    assert!(host.saved().0 > before, "{before} before and {} after", host.saved().0);
    assert!(savable * 10 < host.saved().0, "{savable} left of {}", host.saved().0);
}

/// Each of three in turn exits and is replaced, at once or after its contents may have been forgotten.
#[test]
fn a_restarted_process_is_merged_again() {
    assert_restarted_are_merged(host(), &[1, 1, 1, 300, 300, 300]);
}

#[test]
fn pages_that_become_equal_later_are_found() {
    let mut host = host();
    // Contents of their own at first, then replaced by contents that the others get too.
    let writes = Writes::Duplicate { series: 3, size: 8 * MIB };
    let behaviour = Behaviour::Turnover { every_ns: 7_200 * SECOND, writes };
    for _ in 0..4 {
        let mapping = Mapping::new(Pages(8 * MIB), Fill::Random).of_family(1).behaving(behaviour.clone());
        host.add(Process::starting_at(0).mapping(mapping));
    }
    let mut engine = engine();
    run(&mut host, &mut engine, 6 * 3_600);
    let (saved, savable) = (host.saved().0, host.truth().savable);
    assert!(saved * 10 >= (saved + savable) * 7, "{saved} saved, {savable} left");
}

#[test]
fn sparse_duplicates_are_merged_at_once_where_they_pay_and_otherwise_once_ksmd_has_rested() {
    let course = |governor| {
        let mut host = host();
        scenario::pairs(&mut host, Pages(64 * MIB), Pages(0));
        scenario::replicas(&mut host, 3, Pages(32 * MIB), &thin());
        let savable = host.truth().savable;
        let mut engine = Engine::new(Config { governor, ..Config::default() });
        let dense = run(&mut host, &mut engine, 60).marked;
        let waits = engine
            .state()
            .regions
            .iter()
            .filter(|region| matches!(region.decision.reason, Reason::DoesNotPay { .. }))
            .count();
        let marked = [dense, run(&mut host, &mut engine, 600).marked];
        assert!(host.saved().0 * 100 >= savable * 95, "{} of {savable}", host.saved().0);
        (waits, marked, engine.scans())
    };
    let (dense, all) = (Pages(128 * MIB), Pages((128 + 96) * MIB));
    assert_eq!(course(Governor::Full), (0, [all, all], 2), "two scans for all of it");
    // A paced scan begins within one of ksmd's, whose rest comes first.
    assert_eq!(course(Governor::Medium), (3, [dense, all], 6), "three for dense and three for sparse memory");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let runs: Vec<Ledger> = (0..2)
        .map(|_| {
            let mut host = host();
            scenario::mariadb(&mut host, 3, Pages(32 * MIB));
            run(&mut host, &mut engine(), 10)
        })
        .collect();
    assert_eq!(runs[0].curve, runs[1].curve);
    assert_eq!(runs[0].cost, runs[1].cost);
    assert!(!runs[0].curve.is_empty());
}

#[test]
fn exited_processes_are_reaped_and_then_ksmd_idles() {
    let mut host = host();
    let owners: Vec<OwnerKey> = scenario::redis(&mut host, 3, Pages(32 * MIB));
    let mut engine = engine();
    run(&mut host, &mut engine, 10);
    for owner in owners {
        host.exit(owner);
    }
    assert!(host.unreaped() > 0);
    run(&mut host, &mut engine, 20);
    assert_eq!(host.unreaped(), 0);
    let before = host.cost().ksmd_ns;
    run(&mut host, &mut engine, 20);
    assert_eq!(host.cost().ksmd_ns, before);
}

#[test]
fn no_scan_is_ordered_while_another_program_controls_ksm() {
    let mut host = host();
    scenario::static_mix(&mut host, Pages(32 * MIB));
    host.set_ours(false);
    let ledger = run(&mut host, &mut engine(), 10);
    assert_eq!(ledger.cost.ksmd_ns, 0);
    assert_eq!(ledger.saved, Some(Pages(0)));
}
