use super::*;
use crate::model::{Content, Event, Model, page};
use pagefold_engine::config::Config;
use pagefold_engine::engine::{Engine, cycle};
use pagefold_engine::governor::Governor;
use pagefold_engine::reserve::{Keep as ReserveKeep, ReserveSettings};
use std::cell::Cell;

/// A virtual clock. Each reading of the CPU clock takes some CPU time.
#[derive(Debug, Default)]
struct VirtualClock {
    now_ns: u64,
    cpu_ns: Cell<u64>,
}

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.now_ns + self.cpu_ns.get()
    }
    fn cpu_ns(&self) -> u64 {
        self.cpu_ns.set(self.cpu_ns.get() + 100_000);
        self.cpu_ns.get()
    }
    fn wait(&mut self, ns: u64) {
        self.now_ns += ns;
    }
    fn is_stopped(&self) -> bool {
        false
    }
}

type TestHost = XenHost<Model, VirtualClock>;

fn host(model: Model, scope: &[&str]) -> TestHost {
    let scope = scope.iter().map(|text| text.parse().unwrap()).collect();
    XenHost::new(model, VirtualClock::default(), scope, true).unwrap()
}

fn engine() -> Engine {
    Engine::new(Config { governor: Governor::Full, seed: 7, ..Config::default() })
}

/// Runs cycles for this many seconds of virtual time.
fn run(engine: &mut Engine, host: &mut TestHost, seconds: u64) {
    let end_ns = host.now_ns() + seconds * 1_000_000_000;
    while host.now_ns() < end_ns {
        let cycle = cycle(engine, host).unwrap();
        host.wait(cycle.wait_ns).unwrap();
        host.hypervisor.check();
    }
}

/// The contents of a guest's pages. Half of them all guests hold, in sets of different sizes; an eighth are zeros; the
/// rest no other guest has.
fn contents(guest: u16, pages: u16) -> Vec<Content> {
    (0..pages)
        .map(|page| match page % 8 {
            0 => 0,
            1..=4 => 1 + u8::try_from(page % 100).unwrap(),
            _ => 101 + u8::try_from((u32::from(page) * 7 + u32::from(guest) * 31) % 150).unwrap(),
        })
        .collect()
}

#[test]
fn all_that_is_equal_in_two_guests_is_shared_and_no_data_changed() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(guest, 4000));
    }
    let frames = model.memory().unwrap().total.0 - model.free;
    let mut host = host(model, &["web", "2"]);
    let mut engine = engine();
    run(&mut engine, &mut host, 60);
    // There are at most 251 contents, and for each we keep one frame in 256.
    let saved = host.hypervisor.saved();
    assert!(saved * 100 >= (frames - 251) * 99, "{saved} of {frames} pages saved");
    assert_eq!(engine.ledger().saved, Some(Pages(saved)));
    assert_eq!(host.figures().shared_pages, saved);
}

#[test]
fn guests_in_different_trust_domains_have_no_frame_in_common() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(0, 2000));
    }
    let mut host = host(model, &["web@a", "db@b"]);
    run(&mut engine(), &mut host, 60);
    assert!(host.hypervisor.saved() > 3000, "within each guest");
    for frame in 0..2000 {
        let [own, other] = [page(1, frame), page(2, frame)].map(|page| host.hypervisor.nominate(page).unwrap());
        assert_ne!(own, other);
    }
    assert_eq!(host.trusts(), ["a", "b"]);
}

#[test]
fn guests_that_come_and_go_are_followed() {
    let mut model = Model::new(10_000);
    model.create(1, "web", &contents(1, 2000));
    model.create(2, "db", &contents(1, 2000));
    let mut host = host(model, &["web", "db"]);
    let mut engine = engine();
    run(&mut engine, &mut host, 30);
    assert!(host.hypervisor.saved() > 3000);
    host.hypervisor.act(Event::Destroy(DomainId(1)));
    run(&mut engine, &mut host, 10);
    assert_eq!(host.guests().count(), 1);
    host.hypervisor.create(3, "web", &contents(1, 2000));
    run(&mut engine, &mut host, 60);
    assert!(host.hypervisor.saved() > 3600, "{}", host.hypervisor.saved());
}

#[test]
fn pages_that_are_written_are_shared_again_with_what_they_hold_now() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(1, 2000));
    }
    let mut host = host(model, &["web", "db"]);
    let mut engine = engine();
    run(&mut engine, &mut host, 30);
    let before = host.hypervisor.saved();
    for frame in 0..500 {
        host.hypervisor.act(Event::Write(page(1, frame), 250));
    }
    assert!(host.hypervisor.saved() < before - 400);
    run(&mut engine, &mut host, 120);
    assert!(host.hypervisor.saved() > before - 50, "{} of {before}", host.hypervisor.saved());
    assert!(host.view().broken >= 400);
}

#[test]
fn below_the_reserve_nothing_is_shared() {
    let mut model = Model::new(100);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(1, 2000));
    }
    let reserve = ReserveSettings { keep: ReserveKeep::Fixed(Pages(101)), take_back: false };
    let mut engine = Engine::new(Config { governor: Governor::Full, seed: 7, reserve, ..Config::default() });
    let mut host = host(model, &["web", "db"]);
    run(&mut engine, &mut host, 30);
    assert_eq!(host.hypervisor.saved(), 0);
    host.hypervisor.free = 1000;
    run(&mut engine, &mut host, 60);
    assert!(host.hypervisor.saved() > 3000);
}

#[test]
fn a_restart_adds_to_what_is_shared() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(1, 2000));
    }
    let mut first = host(model, &["web", "db"]);
    run(&mut engine(), &mut first, 30);
    let mut model = first.hypervisor;
    let before = model.saved();
    model.create(3, "new", &contents(1, 2000));
    let mut second = host(model, &["web", "db", "new"]);
    run(&mut engine(), &mut second, 60);
    // We never replace frames that were shared before this run, so some contents have more frames than they need.
    let saved = second.hypervisor.saved();
    assert!(saved > before + 1900, "{saved} after {before}");
}

#[test]
fn a_dry_run_changes_nothing() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(1, 2000));
    }
    let scope = vec!["web".parse().unwrap(), "db".parse().unwrap()];
    let mut host = XenHost::new(model, VirtualClock::default(), scope, false).unwrap();
    let mut engine = engine();
    run(&mut engine, &mut host, 30);
    assert_eq!((host.hypervisor.nominations, host.hypervisor.saved()), (0, 0));
}

#[test]
fn a_guest_whose_memory_is_not_there_yet_is_left_alone_until_it_is() {
    let mut model = Model::new(10_000);
    for (guest, name) in [(1, "web"), (2, "db")] {
        model.create(guest, name, &contents(1, 2000));
    }
    model.lacking.insert(DomainId(2));
    let mut host = host(model, &["web", "db"]);
    let mut engine = engine();
    run(&mut engine, &mut host, 30);
    let left = host.take_left_alone();
    assert_eq!((left.len(), left[0].name.as_str()), (1, "db"));
    let within = host.hypervisor.saved();
    host.hypervisor.lacking.clear();
    run(&mut engine, &mut host, 60);
    assert!(host.guests().all(|guest| guest.left_alone.is_none()));
    assert!(host.hypervisor.saved() > within + 1900, "{} after {within}", host.hypervisor.saved());
}

#[test]
fn a_guest_that_is_refused_is_left_alone_and_one_that_is_not_there_is_an_error() {
    let mut model = Model::new(100);
    model.create(1, "web", &contents(1, 200));
    model.refuse(1);
    let mut host = host(model.clone(), &["web"]);
    run(&mut engine(), &mut host, 5);
    let left = host.take_left_alone();
    assert_eq!((left[0].name.as_str(), left[0].reason.as_str()), ("web", "a device is passed through to it"));
    assert_eq!((host.hypervisor.mappings, host.hypervisor.nominations), (0, 0));
    let scope = vec!["db".parse().unwrap()];
    let error = XenHost::new(model, VirtualClock::default(), scope, true).unwrap_err();
    assert_eq!(error.to_string(), "there is no guest \"db\"");
}
