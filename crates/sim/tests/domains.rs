//! What the engine does where the host merges the memory of one trust domain only, as ksmd requires.

mod common;

use common::{MIB, Watched, engine, host, run};
use pagefold_engine::engine::Engine;
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
    let (mut host, mut engine) = (host(), engine());
    host.set_foreign_marks(true);
    pair(&mut host, 32, &Fill::Series(1));
    run(&mut host, &mut engine, 30);
    assert_eq!((engine.ledger().marked, engine.scans(), host.saved()), (Pages(0), 0, Pages(0)));
    host.set_foreign_marks(false);
    run(&mut host, &mut engine, 30);
    assert!(host.saved().0 >= 31 * MIB);
    // Also if marks are found later, which may be before the second scan of others.
    host.set_foreign_marks(true);
    run(&mut host, &mut engine, 2);
    let before = (engine.ledger().marked, engine.scans(), host.saved());
    pair(&mut host, 32, &Fill::Series(2));
    run(&mut host, &mut engine, 30);
    assert_eq!((engine.ledger().marked, engine.scans(), host.saved()), before);
    host.set_foreign_marks(false);
    run(&mut host, &mut engine, 30);
    assert!(host.saved().0 >= 62 * MIB);
}

#[test]
fn a_process_that_is_left_alone_keeps_its_marks() {
    let mut host = host();
    let alone = pair(&mut host, 32, &Fill::Series(1));
    let (mut watched, mut engine) = (Watched::new(host), engine());
    watched.run(&mut engine, 20);
    let is_marked = |engine: &Engine, owner| {
        engine.regions().any(|region| region.view.owner == owner && region.marked_resident() > Pages(0))
    };
    assert!(alone.iter().all(|&owner| is_marked(&engine, owner)));
    let saved = watched.host.saved();
    for owner in alone {
        watched.host.leave_alone(owner, true);
    }
    watched.run(&mut engine, 1);
    let (since_ns, changes) = (watched.host.now_ns(), watched.marks);
    watched.run(&mut engine, 3_600);
    assert_eq!((watched.host.saved(), watched.marks), (saved, changes));
    assert!(alone.iter().all(|&owner| is_marked(&engine, owner)), "they are accounted for");
    let was_read = |watched: &Watched, owner| watched.pages.iter().any(|&(at, of, _)| at > since_ns && of == owner);
    assert!(!alone.iter().any(|&owner| was_read(&watched, owner)));
    for owner in alone {
        watched.host.leave_alone(owner, false);
    }
    watched.run(&mut engine, 60);
    assert!(alone.iter().all(|&owner| was_read(&watched, owner) && is_marked(&engine, owner)));
    assert_eq!((watched.host.saved(), watched.marks), (saved, changes));
}
