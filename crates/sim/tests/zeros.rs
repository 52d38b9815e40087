//! The real engine on a simulated host, told to merge only pages of zeros.

mod common;

use common::{MIB, Machine, SECOND, config, host, process_of, requested};
use pagefold_engine::config::{Config, Only};
use pagefold_engine::host::Keep;
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Fill, Mapping, Process, Replica, SimHost};
use proptest::prelude::*;

fn machine(host: SimHost) -> Machine {
    Machine::with(host, Config { only: Only::Zeros, ..config() })
}

fn add(host: &mut SimHost, mib: u64, fill: Fill) -> OwnerKey {
    let process = Process::starting_at(host.now_ns());
    host.add(process.mapping(Mapping::new(Pages(mib * MIB), fill)))
}

/// Memory with this share of zeros. The other pages have a copy in each such region.
fn with_zeros(zeros: u32) -> Fill {
    let density = vec![Permyriad(10_000 - zeros)];
    Fill::Replica(Replica { template: 3, density, zeros: Permyriad(zeros), run: 4, shift: 0 })
}

/// The engine finds pages of zeros in dense and in thin memory, and names nothing else.
#[test]
fn on_request_only_zeros_are_named() {
    let mut sim = machine(requested());
    for zeros in [9_000, 2_000, 500] {
        (0..2).for_each(|_| _ = add(&mut sim, 32, with_zeros(zeros)));
    }
    add(&mut sim, 16, Fill::Zeros);
    (0..2).for_each(|_| _ = add(&mut sim, 32, Fill::Series(1)));
    sim.run(60);
    assert!(sim.log.merges.iter().all(|(_, result)| result.range.keep == Keep::Zero));
    let ksm = sim.ksm();
    assert_eq!((ksm.shared, ksm.sharing), (Pages(0), Pages(0)), "no program shares a page with another one");
    let expected = (2 * 32 * (9_000 + 2_000 + 500) / 10_000 + 16) * MIB;
    assert!(ksm.zero.0 * 100 >= expected * 95, "{} of {expected}", ksm.zero.0);
    assert_eq!((sim.log.marks, sim.log.orders), (0, 0));
    assert_eq!(sim.engine.state().work.index.contents, 0, "other contents are not remembered");
}

/// ksmd merges whatever is marked, so we only mark memory that is mostly zeros.
#[test]
fn with_ksmd_only_memory_dense_with_zeros_is_marked() {
    let mut sim = machine(host());
    let dense: Vec<OwnerKey> = (0..2).map(|_| add(&mut sim, 32, with_zeros(9_000))).collect();
    let thin: Vec<OwnerKey> = (0..2).map(|_| add(&mut sim, 32, with_zeros(3_000))).collect();
    let copies: Vec<OwnerKey> = (0..2).map(|_| add(&mut sim, 32, Fill::Series(1))).collect();
    sim.run(120);
    let marked = |owner: &OwnerKey| {
        sim.engine.regions().any(|region| region.view.owner == *owner && region.view.marked > Pages(0))
    };
    assert!(dense.iter().all(marked));
    assert!(!thin.iter().chain(&copies).any(marked), "also when ksmd has been idle for long");
    assert!(sim.ksm().zero.0 * 100 >= 2 * 32 * MIB * 88, "{:?}", sim.ksm());
    // The mark covers other pages, too. The engine counts these, and ksmd has merged them.
    let other: u64 = sim.engine.state().regions.iter().map(|region| region.other.0).sum();
    assert!((2 * 3 * MIB..2 * 4 * MIB).contains(&other), "{other}");
    assert!(sim.ksm().sharing > Pages(0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever runs, in any trust domains, no program ever shares a page on request.
    #[test]
    fn on_request_nothing_is_shared(tenants in common::tenants(), seed in any::<u64>()) {
        let mut sim = Machine::with(requested(), Config { seed, only: Only::Zeros, ..Config::default() });
        let zeros: u64 = tenants.iter().filter(|(_, fill, ..)| *fill > 2).map(|(_, _, mib, _)| mib * MIB).sum();
        for tenant in tenants {
            sim.add(process_of(tenant));
        }
        let end_ns = sim.now_ns() + 60 * SECOND;
        while sim.now_ns() < end_ns {
            sim.run(5);
            prop_assert_eq!(sim.ksm().shared, Pages(0));
        }
        prop_assert!(sim.ksm().zero.0 * 100 >= zeros * 95);
    }
}
