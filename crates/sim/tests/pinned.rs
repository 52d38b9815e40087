//! Pinned memory never merges. The engine notices this after the scans, unmarks it, and doesn't soon try again.

mod common;

use common::{MIB, Machine, SECOND, config, host};
use pagefold_engine::config::Config;
use pagefold_engine::decision::Reason;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost, content_of_series};
use std::ops::Range;

const EACH: Pages = Pages(32 * MIB);

/// Processes with equal memory, pinned or not.
fn machine(pinned: &[bool]) -> Machine {
    let mut sim = Machine::with(host(), Config { governor: Governor::Full, ..config() });
    for &is_pinned in pinned {
        let mapping = Mapping::new(EACH, Fill::Series(1));
        sim.add(Process::starting_at(0).mapping(if is_pinned { mapping.pinned() } else { mapping }));
    }
    sim
}

/// How much of a process's memory is marked, and whether the engine leaves it alone because nothing was merged.
fn state(sim: &Machine, owner: u32) -> (Pages, bool) {
    let region = sim.engine.regions().find(|region| region.view.owner == OwnerKey(owner)).unwrap();
    (region.view.marked, region.decision.reason == Reason::Unmerged)
}

#[test]
fn pinned_memory_is_unmarked_with_its_reason_and_seldom_tried_again() {
    let mut sim = machine(&[true; 3]);
    sim.run(50);
    for owner in 0..3 {
        assert_eq!(state(&sim, owner), (Pages(0), true));
    }
    let expected: u64 = sim.engine.state().owners.values().map(|owner| owner.memory.expected_bytes).sum();
    assert_eq!((sim.saved(), expected), (Pages(0), 0));
    let marks = sim.log.marks;
    sim.run(200);
    assert_eq!(sim.log.marks, marks, "five minutes");
    sim.run(3_400);
    let tries = (sim.log.marks - marks) / 6;
    assert!((1..=4).contains(&tries), "{tries} tries within an hour");
    assert_eq!(state(&sim, 0), (Pages(0), true));
}

#[test]
fn copies_of_pinned_memory_merge_with_each_other() {
    let mut sim = machine(&[true, false, true, false]);
    sim.run(50);
    assert!(sim.saved().0 >= EACH.0 * 98 / 100, "{:?}", sim.saved());
    for (owner, is_pinned) in [(0, true), (1, false), (2, true), (3, false)] {
        assert_eq!(state(&sim, owner), (if is_pinned { Pages(0) } else { EACH }, is_pinned), "{owner}");
    }
}

/// We mark processes with little headroom first. So whoever limits its own memory can make ksmd visit its pinned copy
/// before its neighbours' memory, even if we've known the neighbours for longer.
#[test]
fn the_neighbours_of_pinned_memory_that_is_marked_first_are_not_blamed() {
    let mut sim = machine(&[false, false, false, true]);
    sim.limit(LimitKey(1), Pages(EACH.0 * 3), &[OwnerKey(3)]);
    for second in 0..60 {
        sim.run(1);
        assert!((0..3).all(|owner| !state(&sim, owner).1), "after {second} s");
    }
    assert_eq!(state(&sim, 3), (Pages(0), true));
    assert!(sim.saved().0 >= 2 * EACH.0 * 98 / 100, "{:?}", sim.saved());
}

#[test]
fn the_only_copy_of_pinned_memory_is_unmarked_too() {
    let mut sim = machine(&[true, false]);
    sim.run(50);
    assert_eq!((state(&sim, 0), state(&sim, 1)), ((Pages(0), true), (Pages(0), true)));
}

/// Runs until the first count of merged pages is near.
fn run_until_marked(sim: &mut Machine) {
    sim.cycle();
    while state(sim, 0) == (Pages(0), false) {
        sim.cycle();
    }
    assert_eq!(state(sim, 0), (EACH, false));
}

/// The other process ends before, while or after ksmd merges the pages of both.
#[test]
fn memory_whose_copy_has_ended_is_not_taken_for_pinned() {
    for cycles in 0..12 {
        let mut sim = machine(&[false; 2]);
        run_until_marked(&mut sim);
        for _ in 0..cycles {
            let wait_ns = sim.cycle();
            let Ok(()) = sim.wait(wait_ns);
        }
        sim.exit(OwnerKey(1));
        sim.run(60);
        assert!(!state(&sim, 0).1, "ended {cycles} cycles later");
    }
}

/// Before a newcomer is old enough to be marked, its samples show that the older process has duplicates.
#[test]
fn memory_whose_copy_is_new_is_not_taken_for_pinned() {
    for tenths in 0..100 {
        let mut sim = machine(&[false]);
        let started_ns = 5_000_000_000 + tenths * 100_000_000;
        sim.add(Process::starting_at(started_ns).mapping(Mapping::new(EACH, Fill::Series(1))));
        for _ in 0..60 {
            sim.run(1);
            assert!(!state(&sim, 0).1, "started after {started_ns} ns");
        }
        assert!(sim.saved().0 >= EACH.0 * 98 / 100, "{:?}", sim.saved());
    }
}

/// Asserts that no process is taken for pinned within these seconds.
#[track_caller]
fn assert_none_pinned(sim: &mut Machine, seconds: u64) {
    for second in 0..seconds {
        sim.run(1);
        for region in sim.engine.regions() {
            assert_ne!(region.decision.reason, Reason::Unmerged, "{:?} after {second} s", region.view.owner);
        }
    }
}

fn process(mib: u64) -> Process {
    Process::starting_at(0).mapping(Mapping::new(Pages(mib * MIB), Fill::Series(1)))
}

/// The index still knows the contents when the server starts again.
#[test]
fn a_server_that_was_restarted_is_not_taken_for_pinned() {
    for gap in [0, 3, 25] {
        let mut sim = Machine::new(host());
        let server = sim.add(process(8));
        sim.run(35);
        sim.exit(server);
        sim.run(gap);
        sim.add(process(8));
        assert_none_pinned(&mut sim, 60);
    }
}

/// ksmd has visited the server's pages in vain, and skips them for some scans (`smart_scan`). The zeros that merge
/// beside these pages say nothing about them.
#[test]
fn a_server_with_zeros_is_merged_with_its_restarted_copy() {
    let mut sim = Machine::new(host());
    let add = |sim: &mut Machine| {
        let zeros = Mapping::new(Pages(16 * MIB), Fill::Zeros);
        let start = Process::starting_at(sim.now_ns());
        sim.add(start.mapping(Mapping::new(Pages(16 * MIB), Fill::Series(1))).mapping(zeros))
    };
    add(&mut sim);
    let copy = add(&mut sim);
    while sim.log.marks == 0 {
        sim.run_until(sim.now_ns() + SECOND / 100, |_| {});
    }
    sim.exit(copy);
    sim.run(10);
    // Other programs have ksmd scan again.
    for series in 2..5 {
        for _ in 0..2 {
            sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(16 * MIB), Fill::Series(series))));
        }
        sim.run(10);
    }
    add(&mut sim);
    sim.run(300);
    let frames = sim.truth().frames;
    assert!(frames <= 4 * 16 * MIB + MIB, "{frames} frames");
}

/// The only copy lies in a large mapping, where it's too little for us to mark that mapping.
#[test]
fn memory_whose_copy_is_not_worth_marking_is_not_taken_for_pinned() {
    let mut sim = Machine::new(host());
    sim.add(process(2));
    sim.add(process(64));
    assert_none_pinned(&mut sim, 60);
}

/// A quarter of the newcomer is a copy. Merging it pays a little later, and the newcomer forks before that.
#[test]
fn memory_whose_copy_pays_later_is_not_taken_for_pinned() {
    let mut sim = Machine::new(host());
    sim.add(process(2));
    sim.run(24);
    let newcomer = sim.add(process(8));
    sim.run(4);
    sim.fork(newcomer);
    assert_none_pinned(&mut sim, 60);
    assert!(sim.saved().0 >= 2 * 2 * MIB * 98 / 100, "{:?}", sim.saved());
}

/// We don't mark rewritten memory at once: first we see if it goes on changing.
#[test]
fn the_model_of_memory_that_was_just_rewritten_is_not_taken_for_pinned() {
    let mut sim = Machine::new(host());
    let rewritten = sim.add(process(2));
    sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(2 * MIB), Fill::Series(2))));
    sim.run(60);
    sim.change_pages(rewritten, 0..2 * MIB, |host, region, page| {
        let number = page.0 - host.span_of(region).unwrap().first.0;
        host.write(region, page, content_of_series(2, number));
    });
    assert_none_pinned(&mut sim, 120);
    assert!(sim.saved().0 >= 2 * MIB * 98 / 100, "{:?}", sim.saved());
}

/// Takes these pages of both processes out of memory.
fn discard(sim: &mut Machine, pages: Range<u64>) {
    for owner in 0..2 {
        sim.change_pages(OwnerKey(owner), pages.clone(), SimHost::discard);
    }
}

#[test]
fn pinned_memory_is_unmarked_even_if_some_of_it_was_given_back() {
    let mut sim = machine(&[true; 2]);
    run_until_marked(&mut sim);
    discard(&mut sim, 0..EACH.0 / 5);
    sim.run(300);
    assert_eq!((state(&sim, 0), state(&sim, 1)), ((Pages(0), true), (Pages(0), true)));
}

#[test]
fn memory_that_is_slowly_swapped_out_is_not_taken_for_pinned() {
    let mut sim = machine(&[false; 2]);
    run_until_marked(&mut sim);
    for step in 0..20 {
        discard(&mut sim, EACH.0 / 20 * step..EACH.0 / 20 * (step + 1));
        sim.run(2);
    }
    sim.run(60);
    assert!((0..2).all(|owner| !state(&sim, owner).1));
}

#[test]
fn zeros_and_what_merged_once_stay_marked() {
    let mut sim = Machine::with(host(), Config { governor: Governor::Full, ..config() });
    sim.add(Process::starting_at(0).mapping(Mapping::new(EACH, Fill::Zeros)));
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(EACH, Fill::Series(1))));
    }
    sim.run(50);
    let saved = sim.saved();
    assert!(saved.0 >= 2 * EACH.0 * 98 / 100, "{saved:?}");
    sim.change_pages(OwnerKey(1), 0..EACH.0, |host, region, page| {
        host.write(region, page, 1 << 40 | page.0);
    });
    sim.run(300);
    assert_eq!((0..3).map(|owner| state(&sim, owner)).collect::<Vec<_>>(), [(EACH, false); 3]);
}
