//! The engine with ksmd, which can merge the memory of only one trust domain.

mod common;

use common::{MIB, Machine, host};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost};

fn pair(host: &mut SimHost, mib: u64, fill: &Fill) -> [OwnerKey; 2] {
    [(); 2].map(|()| {
        let mapping = Mapping::new(Pages(mib * MIB), fill.clone());
        host.add(Process::starting_at(host.now_ns()).mapping(mapping))
    })
}

#[test]
fn nothing_is_marked_or_scanned_while_another_domain_is_still_marked() {
    let mut sim = Machine::new(host());
    sim.set_foreign_marks(true);
    pair(&mut sim, 32, &Fill::Series(1));
    sim.run(30);
    assert_eq!((sim.engine.ledger().marked, sim.engine.scans(), sim.saved()), (Pages(0), 0, Pages(0)));
    sim.set_foreign_marks(false);
    sim.run(30);
    assert!(sim.saved().0 >= 31 * MIB);
    // If foreign marks turn up later, perhaps before the second scan of earlier marks, we mark no more regions.
    sim.set_foreign_marks(true);
    sim.run(2);
    let before = (sim.engine.ledger().marked, sim.engine.scans(), sim.saved());
    pair(&mut sim, 32, &Fill::Series(2));
    sim.run(30);
    assert_eq!((sim.engine.ledger().marked, sim.engine.scans(), sim.saved()), before);
    sim.set_foreign_marks(false);
    sim.run(30);
    assert!(sim.saved().0 >= 62 * MIB);
}

fn is_marked(sim: &Machine, owner: OwnerKey) -> bool {
    sim.engine.regions().any(|region| region.view.owner == owner && region.marked_resident() > Pages(0))
}

#[test]
fn a_process_that_is_left_alone_keeps_its_marks() {
    let mut sim = Machine::new(host());
    let alone = pair(&mut sim, 32, &Fill::Series(1));
    sim.run(20);
    assert!(alone.iter().all(|&owner| is_marked(&sim, owner)));
    let saved = sim.saved();
    for owner in alone {
        sim.leave_alone(owner, true);
    }
    sim.run(1);
    let (since_ns, changes) = (sim.now_ns(), sim.log.marks);
    sim.run(3_600);
    assert_eq!((sim.saved(), sim.log.marks), (saved, changes));
    assert!(alone.iter().all(|&owner| is_marked(&sim, owner)), "they are accounted for");
    let was_read = |sim: &Machine, owner| sim.log.pages.iter().any(|&(at, of, _)| at > since_ns && of == owner);
    assert!(!alone.iter().any(|&owner| was_read(&sim, owner)));
    for owner in alone {
        sim.leave_alone(owner, false);
    }
    sim.run(60);
    assert!(alone.iter().all(|&owner| was_read(&sim, owner) && is_marked(&sim, owner)));
    assert_eq!((sim.saved(), sim.log.marks), (saved, changes));
}
