//! The real engine on the simulated host, in virtual time.

mod common;

use common::{MIB, Machine, SECOND, assert_restarted_are_merged, config, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::decision::Reason;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Behaviour, Fill, Mapping, Process, Replica, SimHost, Writes, scenario};

/// A tenth of each instance is the same in all.
fn thin() -> Replica {
    Replica { template: 20, density: vec![Permyriad(1_000)], zeros: Permyriad(0), run: 2, shift: 0 }
}

/// We say how long reading and merging will take.
#[test]
fn the_time_until_all_is_merged_is_foreseen() {
    for governor in [Governor::Low, Governor::Medium] {
        let mut sim = Machine::with(host(), Config { governor, ..config() });
        scenario::redis(&mut sim, 4, Pages(256 * MIB));
        let mut foreseen: Vec<(f64, f64)> = Vec::new();
        let mut done_at = 0.0;
        for second in 0..120 {
            sim.run(1);
            if let Some(left) = sim.engine.state().activity.done_in_seconds {
                foreseen.push((f64::from(second), left));
                done_at = f64::from(second + 1);
            }
        }
        assert!(foreseen.len() >= 3, "{foreseen:?}");
        for (at, left) in foreseen.into_iter().filter(|(at, _)| *at < done_at / 2.0) {
            let real = done_at - at;
            assert!(left > real / 2.0 && left < real * 2.0, "{left} s foreseen at {at} s, but {real} s");
        }
    }
}

#[test]
fn dense_replicas_are_merged() {
    let mut sim = Machine::new(host());
    scenario::redis(&mut sim, 3, Pages(128 * MIB));
    scenario::mariadb(&mut sim, 3, Pages(128 * MIB));
    let savable = sim.truth().savable;
    sim.run(30);
    let ledger = sim.engine.ledger();
    assert!(ledger.saved.unwrap().0 * 100 >= savable * 90, "{} of {savable}", ledger.saved.unwrap().0);
}

#[test]
fn without_duplicates_nothing_is_marked_and_little_cpu_is_used() {
    let mut sim = Machine::new(host());
    scenario::idle(&mut sim, Pages(2048 * MIB));
    sim.run(60);
    let ledger = sim.engine.ledger();
    assert_eq!(ledger.marked, Pages(0));
    assert_eq!(ledger.cost.ksmd_ns, 0);
    let share = ledger.cost.pagefold_ns as f64 / (60 * SECOND) as f64;
    assert!(share < 0.005, "{share}");
}

/// Three processes exit in turn, and another one takes the place of each, at once or when its contents may be
/// forgotten.
#[test]
fn a_restarted_process_is_merged_again() {
    for host in [host(), requested()] {
        assert_restarted_are_merged(host, &[1, 1, 1, 300, 300, 300]);
    }
}

#[test]
fn pages_that_become_equal_later_are_found() {
    let mut sim = Machine::new(host());
    // At first all contents differ. Then each process gets contents that the others get, too.
    let writes = Writes::Duplicate { series: 3, size: 8 * MIB };
    let behaviour = Behaviour::Turnover { every_ns: 7_200 * SECOND, writes };
    for _ in 0..4 {
        let mapping = Mapping::new(Pages(8 * MIB), Fill::Random).of_family(1).behaving(behaviour.clone());
        sim.add(Process::starting_at(0).mapping(mapping));
    }
    sim.run(6 * 3_600);
    let (saved, savable) = (sim.saved().0, sim.truth().savable);
    assert!(saved * 10 >= (saved + savable) * 7, "{saved} saved, {savable} left");
}

#[test]
fn sparse_duplicates_are_merged_at_once_where_they_pay_and_otherwise_once_ksmd_has_rested() {
    let course = |governor| {
        let mut sim = Machine::with(host(), Config { governor, ..Config::default() });
        scenario::pairs(&mut sim, Pages(64 * MIB), Pages(0));
        scenario::replicas(&mut sim, 3, Pages(32 * MIB), &thin());
        let savable = sim.truth().savable;
        sim.run(60);
        let dense = sim.engine.ledger().marked;
        let waits = sim
            .engine
            .state()
            .regions
            .iter()
            .filter(|region| matches!(region.decision.reason, Reason::DoesNotPay { .. }))
            .count();
        sim.run(600);
        let marked = [dense, sim.engine.ledger().marked];
        assert!(sim.saved().0 * 100 >= savable * 95, "{} of {savable}", sim.saved().0);
        (waits, marked, sim.engine.scans())
    };
    let (dense, all) = (Pages(128 * MIB), Pages((128 + 96) * MIB));
    assert_eq!(course(Governor::Full), (0, [all, all], 2), "two scans for all of it");
    // Paced scanning begins in the middle of a scan, which ksmd finishes first.
    assert_eq!(course(Governor::Medium), (3, [dense, all], 6), "three for dense and three for sparse memory");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for build in [host, requested] {
        let runs = [(); 2].map(|()| {
            let mut sim = Machine::new(build());
            scenario::mariadb(&mut sim, 3, Pages(32 * MIB));
            sim.run(10);
            let ledger = sim.engine.ledger();
            assert!(!ledger.curve.is_empty());
            (ledger.curve.clone(), ledger.cost, sim.cost())
        });
        assert_eq!(runs[0], runs[1]);
    }
}

#[test]
fn exited_processes_are_reaped_and_then_ksmd_idles() {
    let mut sim = Machine::new(host());
    let owners: Vec<OwnerKey> = scenario::redis(&mut sim, 3, Pages(32 * MIB));
    sim.run(10);
    for owner in owners {
        sim.exit(owner);
    }
    assert!(sim.unreaped() > 0);
    sim.run(20);
    assert_eq!(sim.unreaped(), 0);
    let before = sim.cost().ksmd_ns;
    sim.run(20);
    assert_eq!(sim.cost().ksmd_ns, before);
}

#[test]
fn no_scan_is_ordered_while_another_program_controls_ksm() {
    let mut sim = Machine::new(host());
    scenario::static_mix(&mut sim, Pages(32 * MIB));
    sim.set_ours(false);
    sim.run(10);
    let ledger = sim.engine.ledger();
    assert_eq!(ledger.cost.ksmd_ns, 0);
    assert_eq!(ledger.saved, Some(Pages(0)));
    sim.set_ours(true);
    sim.run(10);
    assert!(sim.saved().0 * 100 >= 32 * MIB * 99, "{} saved", sim.saved().0);
}

#[test]
fn a_heap_that_gives_pages_back_and_takes_new_ones_is_not_scanned_for_ever() {
    let mut sim = Machine::with(host(), Config { governor: Governor::Full, ..config() });
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(64 * MIB), Fill::Series(1))));
    }
    sim.run(30);
    let quarter = 0..16 * MIB;
    let mut content = 1 << 40;
    let mut scans = Vec::new();
    for _ in 0..60 {
        scans.push(sim.engine.scans());
        for owner in [OwnerKey(0), OwnerKey(1)] {
            sim.change_pages(owner, quarter.clone(), SimHost::discard);
        }
        sim.run(15);
        for owner in [OwnerKey(0), OwnerKey(1)] {
            sim.change_pages(owner, quarter.clone(), |host, region, page| {
                content += 1;
                host.write(region, page, content);
            });
        }
        sim.run(15);
    }
    let last = sim.engine.scans() - scans[30];
    assert!(last <= 12, "{last} scans in the second quarter of an hour: {scans:?}");
}
