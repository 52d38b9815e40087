//! The engine reports the right saving. Of two machines that live through the same, only one has the engine; the saving
//! is the difference of their frames.

mod common;

use common::{MIB, Machine, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::engine::{Engine, count_saving};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Host;
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost, scenario};

/// Two machines with the same processes. The engine runs on only one.
struct Twins {
    merged: Machine,
    plain: SimHost,
}

impl Twins {
    fn new(merged: SimHost, plain: SimHost) -> Self {
        Self { merged: Machine::with(merged, config()), plain }
    }

    fn change<T>(&mut self, mut change: impl FnMut(&mut SimHost) -> T) -> T {
        change(&mut self.plain);
        change(&mut self.merged)
    }

    fn add(&mut self, mib: u64, fill: &Fill) -> OwnerKey {
        self.change(|host| {
            let now = Process::starting_at(host.now_ns());
            host.add(now.mapping(Mapping::new(Pages(mib * MIB), fill.clone())))
        })
    }

    fn run(&mut self, seconds: u64) {
        self.merged.run(seconds);
        let Ok(()) = self.plain.wait(self.merged.now_ns() - self.plain.now_ns());
    }

    /// A new run of pagefold takes over.
    fn restart(&mut self, with_learned: bool) {
        let learned = self.merged.engine.learned();
        self.merged.engine = Engine::new(config());
        if with_learned {
            self.merged.engine.adopt(learned);
        }
    }

    #[track_caller]
    fn check(&mut self, when: &str) -> u64 {
        let Ok(()) = count_saving(&mut self.merged.engine, &mut self.merged.host);
        let truth = self.plain.truth().frames - self.merged.truth().frames;
        let said = self.merged.engine.saving().expect("it was counted").saved.0;
        assert!(said.abs_diff(truth) * 50 <= truth, "{when}: {said} of {truth} pages saved");
        truth
    }
}

/// Checks the memory that the processes would hold if nothing were merged.
#[track_caller]
fn check_unmerged(twins: &Twins) {
    let truth = twins.plain.truth().frames;
    let said = twins.merged.engine.state().memory.unmerged_bytes / 4096;
    assert!(said.abs_diff(truth) * 50 <= truth, "{said} of {truth} pages if nothing were merged");
}

fn config() -> Config {
    Config { governor: Governor::Full, ..common::config() }
}

fn twins() -> [Twins; 2] {
    [Twins::new(host(), host()), Twins::new(requested(), requested())]
}

#[test]
fn what_is_said_is_true_after_restarts_exits_writes_and_a_second_try() {
    for mut twins in twins() {
        let first = twins.add(32, &Fill::Series(1));
        let second = twins.add(32, &Fill::Series(1));
        twins.add(16, &Fill::Zeros);
        twins.run(30);
        assert!(twins.check("merged") >= 46 * MIB);
        check_unmerged(&twins);
        twins.restart(false);
        twins.run(1);
        twins.check("restarted without what was learned");
        twins.restart(true);
        twins.run(1);
        twins.check("restarted with what was learned");
        // Half of the memory is written. KSM's counters don't show that before ksmd comes by, which it never does on
        // request.
        let written = twins.merged.regions_of(second)[0];
        twins.change(|host| {
            let span = host.span_of(written).expect("it is there");
            for page in 0..span.pages.0 / 2 {
                host.write(written, span.first + page, 1 << 40 | page);
            }
        });
        assert!(twins.check("half of it written") < 35 * MIB);
        twins.change(|host| host.exit(first));
        twins.check("ended");
        twins.add(32, &Fill::Series(2));
        twins.add(32, &Fill::Series(2));
        twins.run(30);
        assert!(twins.check("a second pair") >= 46 * MIB);
    }
}

/// With three sharers, each one's part of what's saved depends on all three.
#[test]
fn once_sharers_have_left_what_is_said_is_true_or_not_known() {
    for mut twins in twins() {
        let sharers = [1, 1, 1].map(|series| twins.add(32, &Fill::Series(series)));
        twins.run(30);
        check_unmerged(&twins);
        for sharer in &sharers[..2] {
            twins.change(|host| host.exit(*sharer));
            let mut known = 0;
            for _ in 0..40 {
                twins.merged.run_until(twins.merged.now_ns() + 250_000_000, |_| ());
                let truth = twins.plain.truth().frames - twins.merged.truth().frames;
                let said = twins.merged.engine.state().memory.saved_bytes;
                assert!(
                    said.is_none_or(|said| (said / 4096).abs_diff(truth) * 50 <= truth),
                    "{said:?} of {truth} pages"
                );
                known += u32::from(said.is_some());
            }
            assert!(known >= 32, "known {known} of 40 times");
            check_unmerged(&twins);
        }
    }
}

#[test]
fn children_of_a_fork_count_once_whether_they_were_forked_before_or_after() {
    for mut twins in twins() {
        let masters = [twins.add(16, &Fill::Series(1)), twins.add(16, &Fill::Series(1))];
        twins.run(20);
        for master in masters {
            for _ in 0..4 {
                twins.change(|host| host.fork(master));
            }
        }
        twins.run(5);
        let saved = twins.check("forked after merging");
        assert!((15 * MIB..=16 * MIB).contains(&saved), "{saved}");
    }
}

/// Linux 6.12 doesn't show which pages are merged. To a run that begins later, pages merged with another family look
/// as if processes out of scope shared them.
#[test]
fn families_that_an_earlier_run_has_merged_count_where_merged_pages_are_hidden() {
    let hidden = || SimHost::new(7, Costs::default(), Knobs { shows_lone: false, ..Knobs::requested() });
    let mut twins = Twins::new(hidden(), hidden());
    for _ in 0..2 {
        let master = twins.add(16, &Fill::Series(1));
        twins.run(20);
        for _ in 0..2 {
            twins.change(|host| host.fork(master));
        }
    }
    twins.run(20);
    let saved = twins.check("merged");
    assert!((15 * MIB..=16 * MIB).contains(&saved), "{saved}");
    twins.restart(false);
    for _ in 0..4 {
        twins.run(10);
        twins.check("restarted");
    }
}

/// Writes to a process's pages, in each region from page `from` on.
fn write(twins: &mut Twins, owner: OwnerKey, from: u64, content: impl Fn(u64) -> u64) {
    twins.change(|host| {
        for region in host.regions_of(owner) {
            let span = host.span_of(region).expect("it is there");
            for page in from..span.pages.0 {
                host.write(region, span.first + page, content(page));
            }
        }
    });
}

/// Garbage collectors of the workers rewrite what these inherited, in part with other contents. What the workers still
/// have in common is only saved once ksmd has visited all of them.
#[test]
fn what_workers_wrote_alike_counts_for_each_of_them() {
    for mut twins in twins() {
        let workers = prefork(&mut twins, 2, 4);
        for &worker in &workers {
            write(&mut twins, worker, 8 * MIB, |page| page + u64::from(page >= 12 * MIB));
        }
        twins.run(60);
        let saved = twins.check("rewritten before merging");
        assert!(saved >= 8 * 8 * MIB * 95 / 100, "{saved}");
        // New workers share their master's memory.
        let masters = [OwnerKey(workers[0].0 - 1), OwnerKey(workers[4].0 - 1)];
        for master in masters {
            twins.change(|host| host.fork(master));
        }
        twins.run(20);
        twins.check("forked once more");
        twins.change(|host| host.exit(masters[0]));
        twins.change(|host| host.exit(workers[1]));
        twins.run(20);
        twins.check("a master and a worker ended");
    }
}

/// A parent forks a second child after its first one has rewritten half of its memory.
#[test]
fn a_child_shares_what_its_parent_had_before_the_fork() {
    for mut twins in twins() {
        let parent = twins.add(16, &Fill::Series(1));
        twins.change(|host| host.fork(parent));
        let child = OwnerKey(parent.0 + 1);
        write(&mut twins, child, 8 * MIB, |page| 7 << 32 | page);
        twins.run(40);
        twins.change(|host| host.fork(parent));
        twins.add(16, &Fill::Series(1));
        twins.run(60);
        let saved = twins.check("another program has the same");
        assert!(saved >= 15 * MIB, "{saved}");
    }
}

/// If a merge splits a huge page, the kernel frees the zeros in it, and KSM counts none of them.
#[test]
fn zeros_of_huge_pages_that_were_split_count_as_saved() {
    for mut twins in twins() {
        for fill in [Fill::Series(1), Fill::Series(1), Fill::Zeros] {
            twins.change(|host| {
                let mapping = Mapping::new(Pages(16 * MIB), fill.clone()).huge();
                let now = Process::starting_at(host.now_ns());
                host.add(now.mapping(mapping))
            });
        }
        twins.run(5);
        for owner in [0, 1] {
            // Three of four pages are zeros, at different places in each program.
            write(&mut twins, OwnerKey(owner), 0, |page| if page % 4 == u64::from(owner) { 1 + page / 4 } else { 0 });
        }
        twins.run(60);
        let saved = twins.check("split");
        assert!(saved >= (2 * 12 + 4 + 16) * MIB * 95 / 100, "{saved}");
        // Memory that was never written isn't saved.
        twins.add(64, &Fill::Untouched);
        twins.run(20);
        twins.check("beside memory that was only read");
    }
}

/// Adds masters with equal memory, and for each some children that only read it.
fn prefork(twins: &mut Twins, masters: u64, children: u64) -> Vec<OwnerKey> {
    let mut workers = Vec::new();
    for _ in 0..masters {
        let master = twins.add(16, &Fill::Series(1));
        for _ in 0..children {
            workers.push(twins.change(|host| host.fork(master)));
        }
    }
    workers
}

#[test]
fn families_of_forks_are_merged_with_each_other() {
    for (masters, children) in [(2, 1), (2, 4), (3, 16)] {
        for twins in twins() {
            assert_families_are_merged(twins, masters, children);
        }
    }
}

fn assert_families_are_merged(mut twins: Twins, masters: u64, children: u64) {
    let workers = prefork(&mut twins, masters, children);
    twins.run(25);
    let saved = twins.check(&format!("{masters} masters with {children} forked before merging"));
    assert!(saved >= (masters - 1) * 16 * MIB * 95 / 100, "{masters} of {children}: {saved}");
    check_unmerged(&twins);
    // One worker's pages change, and another's change back.
    for (worker, number) in [(0, 7_u64), (1, 1)] {
        write(&mut twins, workers[worker], 0, |page| number << 32 | page);
    }
    twins.run(60);
    twins.check("diverged");
}

/// The host only looks once at what the processes hold, before anything is merged.
#[test]
fn what_families_would_hold_is_known_while_they_are_merged() {
    for knobs in [Knobs::driven(), Knobs::requested()] {
        let host = |knobs: Knobs| SimHost::new(7, Costs::default(), knobs);
        let never = Knobs { resident_age_ns: 1 << 60, ..knobs };
        let mut twins = Twins::new(host(never), host(knobs));
        prefork(&mut twins, 2, 4);
        for _ in 0..50 {
            twins.merged.run_until(twins.merged.now_ns() + 500_000_000, |_| ());
            check_unmerged(&twins);
        }
        assert!(twins.check("merged") >= 15 * MIB);
    }
}

/// Each process maps so many MiB of its own right below its memory.
fn map_below(twins: &mut Twins, owners: &[OwnerKey], mib: impl Fn(usize) -> u64) {
    for (number, &owner) in owners.iter().enumerate() {
        let own = |page: u64| 9 << 32 | u64::from(owner.0) << 20 | page;
        let content: Vec<u64> = (0..mib(number) * MIB).map(own).collect();
        twins.change(|host| host.map_below(host.regions_of(owner)[0], &content));
    }
}

/// New mappings are placed right below older ones, and we take both for one region. So a worker's region doesn't begin
/// where its master's does.
#[test]
fn families_whose_workers_allocate_memory_are_merged_with_each_other() {
    let sizes: [fn(usize) -> u64; 2] = [|number| 1 + number as u64, |_| 3];
    for mib in sizes {
        for mut twins in twins() {
            let workers = prefork(&mut twins, 2, 4);
            map_below(&mut twins, &workers, mib);
            twins.run(40);
            let saved = twins.check("workers have allocated");
            assert!(saved >= 16 * MIB * 95 / 100, "{saved}");
        }
    }
}

/// The workers of one master are like each other, and unlike the master. Merging them saves nothing.
#[test]
fn one_family_whose_workers_allocate_memory_is_left_alone() {
    for mut twins in twins() {
        let workers = prefork(&mut twins, 1, 4);
        map_below(&mut twins, &workers, |_| 3);
        twins.run(40);
        assert_eq!(twins.check("one family"), 0);
        check_unmerged(&twins);
        assert_eq!(twins.merged.engine.regions().map(|region| region.marks.spans.len()).sum::<usize>(), 0);
    }
}

/// Garbage collectors of the workers rewrite a half alike, after each has allocated.
#[test]
fn what_workers_wrote_alike_counts_wherever_their_memory_begins() {
    for mut twins in twins() {
        let workers = prefork(&mut twins, 1, 4);
        map_below(&mut twins, &workers, |number| 1 + number as u64);
        for (number, &worker) in workers.iter().enumerate() {
            let first = (1 + number as u64 + 8) * MIB;
            write(&mut twins, worker, first, |page| 5 << 32 | (page - first));
        }
        twins.run(60);
        let saved = twins.check("rewritten alike");
        assert!(saved >= 3 * 8 * MIB * 95 / 100, "{saved}");
    }
}

#[test]
fn one_family_of_forks_by_itself_is_left_alone() {
    for mut twins in twins() {
        let workers = prefork(&mut twins, 1, 4);
        twins.run(25);
        assert_eq!(twins.check("one family"), 0);
        // First the process ends whose pages the engine reads, and then the next one.
        let master = OwnerKey(workers[0].0 - 1);
        for ended in [master, workers[0]] {
            twins.change(|host| host.exit(ended));
            twins.run(60);
            assert_eq!(twins.check("one of them ended"), 0);
        }
        assert_eq!(twins.merged.engine.regions().map(|region| region.marks.spans.len()).sum::<usize>(), 0);
    }
}

#[test]
fn of_much_memory_a_part_is_looked_up_and_the_figure_still_holds() {
    for mut twins in twins() {
        twins.change(|host| scenario::redis(host, 3, Pages(256 * MIB)));
        twins.add(256, &Fill::Random);
        twins.run(60);
        assert!(twins.check("much memory") >= 100 * MIB);
        assert!(twins.merged.engine.saving().unwrap().one_in > 1);
    }
}

#[test]
fn counting_takes_little_time() {
    let mut sim = Machine::with(host(), config());
    scenario::redis(&mut sim, 3, Pages(256 * MIB));
    sim.run(600);
    let before = sim.engine.saving().unwrap().counted_ns;
    sim.run(60);
    let counted_ns = sim.engine.saving().unwrap().counted_ns;
    assert!(counted_ns > before, "at least once a minute");
    assert!(sim.now_ns() - counted_ns <= 61_000_000_000);
}

#[test]
fn the_saving_is_unknown_while_processes_may_be_missing() {
    let mut sim = Machine::new(host());
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Series(1))));
    }
    sim.run(30);
    assert!(sim.engine.saving().is_some_and(|saving| saving.saved > Pages(7 * MIB)));
    // The next run finds merged memory, but not all of its processes yet.
    sim.engine = Engine::new(config());
    sim.set_starting(true);
    sim.run(3);
    assert_eq!(sim.engine.saving(), None);
    sim.set_starting(false);
    sim.run(3);
    assert!(sim.engine.saving().is_some_and(|saving| saving.saved > Pages(7 * MIB)));
}
