//! Cgroup limits on a simulated host that charges each merged page to the cgroup whose copy was kept. Whoever writes
//! first, no program may take its cgroup over the limit by writing to merged pages.

mod common;

use common::{MIB, Machine, SECOND, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::region::Region;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};
use proptest::prelude::*;

/// How many pages each program has.
const EACH: u64 = 40 * MIB;

fn machines() -> [Machine; 2] {
    let config = Config { governor: Governor::Full, ..common::config() };
    [host(), requested()].map(|host| Machine::with(host, config.clone()))
}

/// A program. Those with the same number have equal memory.
fn program(number: u64) -> Process {
    Process::starting_at(0).mapping(Mapping::new(Pages(EACH), Fill::Series(number)))
}

/// Programs with equal memory, each in a cgroup of its own with this limit. The keys of the limits count from 1.
fn contained(host: &mut SimHost, programs: u32, limit: Pages) -> Vec<OwnerKey> {
    let owners: Vec<OwnerKey> = (0..programs).map(|_| host.add(program(1))).collect();
    for (number, &owner) in (1..).zip(&owners) {
        host.limit(LimitKey(number), limit, &[owner]);
    }
    owners
}

/// Runs the engine. After each cycle, checks that no cgroup could exceed its limit if the engine stopped now.
fn run_within(sim: &mut Machine, seconds: u64, limits: &[(u32, Pages)]) {
    sim.run_and(seconds, |host| {
        for &(key, limit) in limits {
            let worst = host.charged_at_worst(LimitKey(key));
            assert!(worst <= limit, "limit {key}: {} of {} pages at {} s", worst.0, limit.0, host.now_ns() / SECOND);
        }
    });
}

/// Lets a process write to all of its pages. Each number stands for contents of its own.
fn rewrite(host: &mut SimHost, owner: OwnerKey, number: u64) {
    for region in host.regions_of(owner) {
        let span = host.span_of(region).unwrap();
        for page in 0..span.pages.0 {
            host.write(region, span.first + page, number << 32 | page);
        }
    }
}

#[test]
fn a_container_is_not_killed_for_the_copies_it_keeps_for_others() {
    for (mut sim, share) in machines().into_iter().zip([30, 95]) {
        let limit = Pages(EACH * 14 / 10);
        let owners = contained(&mut sim, 3, limit);
        let limits = [(1, limit), (2, limit), (3, limit)];
        run_within(&mut sim, 120, &limits);
        let saved = sim.saved().0 * 100 / (2 * EACH);
        assert!(saved >= share, "{saved} % of what could be saved");
        // From here on the engine doesn't run.
        for owner in owners {
            rewrite(&mut sim, owner, owner.0.into());
            for (key, limit) in limits {
                assert!(sim.charged(LimitKey(key)) <= limit);
            }
        }
        assert_eq!(sim.saved(), Pages(0));
    }
}

/// As long as a limit applies to all programs, they're merged without headroom. Then another program starts.
#[test]
fn a_program_that_comes_from_outside_maps_no_more_than_a_limit_allows() {
    for (mut sim, is_stuck) in machines().into_iter().chain(machines()).zip([false, false, true, true]) {
        let limit = Pages(EACH * 25 / 10);
        let owners = [(); 2].map(|()| sim.add(program(1)));
        sim.limit(LimitKey(1), limit, &owners);
        sim.run(60);
        // A program that has nothing to merge changes nothing.
        sim.add(program(9));
        sim.run(60);
        assert!(sim.saved().0 >= EACH * 98 / 100, "{:?}", sim.saved());
        if is_stuck {
            sim.leave_alone(owners[0], true);
        }
        sim.add(program(1));
        run_within(&mut sim, 120, &[(1, limit)]);
        assert!(is_stuck || sim.saved().0 >= EACH * 15 / 100, "{:?}", sim.saved());
        for owner in owners {
            rewrite(&mut sim, owner, owner.0.into());
            assert!(sim.charged(LimitKey(1)) <= limit);
        }
    }
}

/// An earlier run merged programs below a limit that applied to all. The new engine doesn't know yet what was merged.
#[test]
fn a_program_from_outside_is_kept_out_after_a_restart() {
    let mut sim = Machine::with(host(), common::config());
    let limit = Pages(EACH * 25 / 10);
    let owners = [(); 2].map(|()| sim.add(program(1)));
    sim.limit(LimitKey(1), limit, &owners);
    sim.run(60);
    sim.add(program(9));
    sim.engine = Engine::new(common::config());
    sim.run(10);
    sim.add(program(1));
    run_within(&mut sim, 120, &[(1, limit)]);
    assert!(sim.saved().0 >= EACH * 15 / 100, "{:?}", sim.saved());
}

/// Above this limit the kernel only throttles.
#[test]
fn a_limit_that_kills_nobody_keeps_nobody_out() {
    let mut sim = Machine::with(host(), common::config());
    let limit = Pages(EACH * 25 / 10);
    let owners = [(); 2].map(|()| sim.add(program(1)));
    sim.throttle(LimitKey(1), limit, &owners);
    sim.run(60);
    for _ in 0..2 {
        sim.add(program(1));
    }
    sim.run(60);
    assert!(sim.saved().0 >= 3 * EACH * 98 / 100, "{:?}", sim.saved());
}

#[test]
fn merged_pages_that_were_given_back_need_no_headroom() {
    let mut sim = Machine::new(requested());
    let owners = contained(&mut sim, 2, Pages(EACH * 3));
    sim.run(60);
    sim.change_pages(owners[0], 0..EACH / 2, SimHost::discard);
    sim.run(300);
    let of_first = |region: &&Region| region.view.owner == owners[0];
    let merged: Pages = sim.engine.regions().filter(of_first).map(|region| region.usage.merged.len()).sum();
    assert!(merged.0.abs_diff(EACH / 2) <= EACH / 50, "{merged:?} of {EACH}");
}

/// Merging zeros makes room that their programs may need again.
#[test]
fn room_that_merged_zeros_have_left_is_not_used_up() {
    for mut sim in [host(), requested()].map(Machine::new) {
        let limit = Pages(EACH * 22 / 10);
        for key in [1, 2] {
            let zeros = Mapping::new(Pages(EACH), Fill::Zeros);
            let process = Process::starting_at(0).mapping(zeros).mapping(Mapping::new(Pages(EACH), Fill::Series(1)));
            let owner = sim.add(process);
            sim.limit(LimitKey(key), limit, &[owner]);
        }
        run_within(&mut sim, 120, &[(1, limit), (2, limit)]);
    }
}

#[test]
fn where_a_limit_has_room_for_all_of_it_twice_all_is_merged() {
    for mut sim in machines() {
        let limit = Pages(EACH * 22 / 10);
        contained(&mut sim, 3, limit);
        run_within(&mut sim, 60, &[(1, limit), (2, limit), (3, limit)]);
        assert!(sim.saved().0 >= 2 * EACH * 98 / 100, "{:?}", sim.saved());
    }
}

/// Every second call to merge takes so long that we don't hear its result, and the kernel hides which merged pages only
/// one process maps. We must go on merging below the limits all the same.
#[test]
fn calls_without_a_result_and_hidden_flags_end_no_merging() {
    let knobs = Knobs { late: Permyriad(5_000), shows_lone: false, ..Knobs::requested() };
    let config = Config { governor: Governor::Full, ..common::config() };
    let mut sim = Machine::with(SimHost::new(7, Costs::default(), knobs), config);
    let limit = Pages(EACH * 22 / 10);
    let owners = contained(&mut sim, 3, limit);
    let limits = [(1, limit), (2, limit), (3, limit)];
    run_within(&mut sim, 60, &limits);
    assert!(sim.saved().0 >= 2 * EACH * 98 / 100, "{:?}", sim.saved());
    for &owner in &owners {
        rewrite(&mut sim, owner, 2);
        run_within(&mut sim, 120, &limits);
    }
    assert!(sim.saved().0 >= 2 * EACH * 90 / 100, "{:?}", sim.saved());
}

#[test]
fn a_limit_on_all_in_scope_is_no_bound() {
    for mut sim in machines() {
        let owners = contained(&mut sim, 3, Pages(EACH * 40));
        sim.limit(LimitKey(9), Pages(3 * EACH), &owners);
        run_within(&mut sim, 60, &[(9, Pages(3 * EACH))]);
        assert!(sim.saved().0 >= 2 * EACH * 98 / 100, "{:?}", sim.saved());
    }
}

#[test]
fn a_limit_above_others_counts_as_well() {
    for mut sim in machines() {
        let owners = contained(&mut sim, 4, Pages(EACH * 3));
        // A limit for two of the four programs together, with headroom for a quarter of another one.
        let pod = Pages(EACH * 9 / 4);
        sim.limit(LimitKey(9), pod, &owners[..2]);
        run_within(&mut sim, 120, &[(9, pod)]);
        // At least the other two must be merged.
        assert!(sim.saved().0 >= EACH, "{:?}", sim.saved());
    }
}

#[test]
fn what_had_no_headroom_is_merged_once_there_is_some() {
    for mut sim in machines() {
        contained(&mut sim, 2, Pages(EACH));
        sim.run(60);
        assert_eq!(sim.saved(), Pages(0));
        assert!(sim.engine.regions().all(|region| region.hold.full.is_some()));
        for key in [1, 2] {
            sim.limit(LimitKey(key), Pages(EACH * 22 / 10), &[OwnerKey(key - 1)]);
        }
        sim.run(60);
        assert!(sim.saved().0 >= EACH * 98 / 100, "{:?}", sim.saved());
        assert!(sim.engine.regions().all(|region| region.hold.full.is_none()));
    }
}

/// Runs the engine until all is merged below generous limits.
fn merged(sim: &mut Machine, programs: u32) -> Vec<OwnerKey> {
    let owners = contained(sim, programs, Pages(EACH * 30 / 10));
    sim.run(60);
    assert!(sim.saved().0 >= u64::from(programs - 1) * EACH * 98 / 100, "{:?}", sim.saved());
    owners
}

/// Which of three cgroups is charged for most pages.
fn payer(host: &SimHost) -> LimitKey {
    (1..=3).map(LimitKey).max_by_key(|&key| host.charged(key)).unwrap()
}

#[test]
fn others_take_copies_of_their_own_when_a_limit_is_lowered() {
    for mut sim in machines() {
        let owners = merged(&mut sim, 3);
        let limit = Pages(EACH * 14 / 10);
        for (key, &owner) in (1..).zip(&owners) {
            sim.limit(LimitKey(key), limit, &[owner]);
        }
        let payer = payer(&sim);
        assert!(sim.charged_at_worst(payer) > limit);
        // Meanwhile, neither the cgroup that paid nor any other may exceed its limit.
        sim.run_and(60, |host| {
            for key in (1..=3).map(LimitKey) {
                assert!(host.charged(key) <= limit, "{:?} of {limit:?}", host.charged(key));
            }
        });
        for key in (1..=3).map(LimitKey) {
            assert!(sim.charged_at_worst(key) <= limit, "{:?} of {limit:?}", sim.charged_at_worst(key));
        }
        run_within(&mut sim, 600, &[(1, limit), (2, limit), (3, limit)]);
    }
}

#[test]
fn others_take_copies_of_their_own_when_a_cgroup_grows() {
    for mut sim in machines() {
        let owners = merged(&mut sim, 3);
        let limit = Pages(EACH * 30 / 10);
        let payer = payer(&sim);
        // Another program in this cgroup takes so much that the pages kept for others no longer fit into the headroom.
        let growth = Mapping::new(Pages(EACH * 7 / 4), Fill::Random);
        let growing = sim.add(Process::starting_at(0).mapping(growth));
        sim.limit(payer, limit, &[owners[payer.0 as usize - 1], growing]);
        assert!(sim.charged_at_worst(payer) > limit);
        sim.run(60);
        assert!(sim.charged_at_worst(payer) <= limit, "{:?} of {limit:?}", sim.charged_at_worst(payer));
    }
}

/// A cgroup grows to its limit. Its first program has rewritten all its pages, but the cgroup still keeps the old ones
/// for others, and now needs their room.
#[test]
fn a_cgroup_that_has_rewritten_its_pages_may_grow_to_its_limit() {
    for mut sim in machines() {
        let owners = merged(&mut sim, 2);
        let payer = (1..=2).map(LimitKey).max_by_key(|&key| sim.charged(key)).unwrap();
        let program = owners[payer.0 as usize - 1];
        let now_ns = sim.now_ns();
        let growing = sim.add(Process::starting_at(now_ns).mapping(Mapping::new(Pages(EACH * 2), Fill::Random)));
        sim.change_pages(growing, 0..EACH * 2, SimHost::discard);
        let limit = Pages(EACH * 3);
        sim.limit(payer, limit, &[program, growing]);
        for number in 0..16 {
            sim.change_pages(program, number * EACH / 16..(number + 1) * EACH / 16, |host, region, page| {
                host.write(region, page, 9 << 32 | page.0);
            });
            sim.run(5);
        }
        sim.run(60);
        assert!(sim.charged(payer) > Pages(EACH * 13 / 10), "{:?} are kept for others", sim.charged(payer));
        let step = EACH / 200;
        for number in 0..2 * 196 {
            sim.change_pages(growing, number * step..(number + 1) * step, |host, region, page| {
                host.write(region, page, 8 << 32 | page.0);
            });
            assert!(sim.charged(payer) <= limit, "{:?} of {limit:?} after {number} steps", sim.charged(payer));
            sim.run(1);
        }
    }
}

#[test]
fn a_process_that_cannot_be_stopped_keeps_no_limit_from_relief() {
    for mut sim in machines() {
        let with = |content| Mapping::new(Pages(EACH), Fill::Series(content));
        let pays = sim.add(Process::starting_at(0).mapping(with(1)).mapping(with(2)));
        let stuck = sim.add(Process::starting_at(0).mapping(with(1)));
        let other = sim.add(Process::starting_at(0).mapping(with(2)));
        for (key, owner, eighths) in [(1, pays, 60), (2, stuck, 12), (3, other, 12)] {
            sim.limit(LimitKey(key), Pages(EACH * eighths / 8), &[owner]);
        }
        sim.run(60);
        assert_eq!(sim.charged_at_worst(LimitKey(1)), Pages(4 * EACH), "it keeps all pages for the others");
        sim.leave_alone(stuck, true);
        let limit = Pages(EACH * 32 / 10);
        sim.limit(LimitKey(1), limit, &[pays]);
        sim.run(30);
        assert!(sim.charged_at_worst(LimitKey(1)) <= limit, "{:?}", sim.charged_at_worst(LimitKey(1)));
        assert_eq!(sim.saved(), Pages(EACH), "of the process that can't be stopped");
    }
}

#[test]
fn where_the_kernel_only_throttles_nothing_is_taken_from_others() {
    for mut sim in machines() {
        let owners = merged(&mut sim, 3);
        let saved = sim.saved();
        let payer = payer(&sim);
        sim.throttle(payer, Pages(EACH * 14 / 10), &[owners[payer.0 as usize - 1]]);
        assert!(sim.charged_at_worst(payer) > Pages(EACH * 14 / 10));
        sim.run(60);
        assert!(sim.saved().0 >= saved.0 * 98 / 100, "{:?} of {saved:?}", sim.saved());
    }
}

#[test]
fn one_that_would_exceed_its_limit_without_merging_takes_nothing_from_others() {
    for mut sim in machines() {
        let owners = merged(&mut sim, 3);
        let saved = sim.saved();
        let other = (1..=3).map(LimitKey).min_by_key(|&key| sim.charged(key)).unwrap();
        sim.limit(other, Pages(EACH / 2), &[owners[other.0 as usize - 1]]);
        sim.run(120);
        assert!(sim.saved().0 >= saved.0 * 98 / 100, "{:?} of {saved:?}", sim.saved());
    }
}

/// Runs programs that each rewrite all of their memory from time to time, in a cgroup each, and checks that none could
/// exceed its limit. `programs` are the size in MiB, the contents, and the limit in percent of the size; `writes` are
/// the seconds before each, the program and the contents.
fn rewrite_in_turn(host: SimHost, governor: Governor, programs: &[(u64, u64, u64)], writes: &[(u64, usize, u64)]) {
    let mut sim = Machine::with(host, Config { governor, ..common::config() });
    let mut owners = Vec::new();
    let mut limits = Vec::new();
    for (number, &(mib, content, percent)) in (1..).zip(programs) {
        let owner = sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(mib * MIB), Fill::Series(content))));
        let limit = Pages(mib * MIB * percent / 100);
        sim.limit(LimitKey(number), limit, &[owner]);
        limits.push((number, limit));
        owners.push(owner);
    }
    for &(seconds, program, content) in writes {
        run_within(&mut sim, seconds, &limits);
        rewrite(&mut sim, owners[program], content);
    }
    run_within(&mut sim, 60, &limits);
}

#[test]
fn a_rewritten_page_is_not_kept_for_others_again_without_headroom() {
    let programs = [(9, 1, 163), (2, 1, 100), (2, 1, 106)];
    let writes = [(17, 0, 1), (19, 2, 3), (6, 1, 1), (13, 0, 3), (14, 2, 3), (12, 1, 2)];
    rewrite_in_turn(requested(), Governor::Low, &programs, &writes);
}

/// The engine knows that the page is merged and names it for one program. Then it reads that the page was written, and
/// names it for another.
#[test]
fn a_page_found_rewritten_after_it_was_named_is_not_kept_without_headroom() {
    let programs = [(3, 1, 100), (2, 1, 123), (2, 2, 112)];
    let writes = [(6, 1, 1), (6, 1, 1), (6, 0, 2), (25, 2, 1), (14, 0, 1), (16, 1, 1), (1, 0, 1)];
    rewrite_in_turn(requested(), Governor::Low, &programs, &writes);
}

/// Spans whose program can't be stopped wait for unmarking. Their pages are merged until then.
#[test]
fn what_waits_for_unmarking_needs_headroom() {
    let programs = [(8, 2, 132), (9, 1, 155), (8, 2, 142)];
    let writes = [(15, 1, 2), (10, 2, 1), (1, 0, 2), (19, 0, 1), (1, 0, 1), (2, 0, 1)];
    let host = SimHost::new(7, Costs::default(), Knobs { busy: Permyriad(4_205), ..Knobs::driven() });
    rewrite_in_turn(host, Governor::Full, &programs, &writes);
}

/// The child maps what its parent keeps for others, too, so both may need copies beside the pages that are kept.
#[test]
fn a_child_needs_headroom_beside_its_parents() {
    const EACH: u64 = 20 * MIB;
    let mut sim = Machine::with(requested(), Config { governor: Governor::Full, ..common::config() });
    let with = |content| Mapping::new(Pages(EACH), Fill::Series(content));
    let parent = sim.add(Process::starting_at(0).mapping(with(1)).mapping(with(2)));
    let limit = Pages(EACH * 11 / 2);
    sim.limit(LimitKey(1), limit, &[parent]);
    sim.add(Process::starting_at(0).mapping(with(1)));
    run_within(&mut sim, 20, &[(1, limit)]);
    assert_eq!(sim.saved(), Pages(EACH));
    let child = sim.fork(parent);
    sim.limit(LimitKey(1), limit, &[parent, child]);
    run_within(&mut sim, 10, &[(1, limit)]);
    // The new program's cgroup has no headroom.
    let now_ns = sim.now_ns();
    let other = sim.add(Process::starting_at(now_ns).mapping(with(2)));
    sim.limit(LimitKey(2), Pages(EACH), &[other]);
    run_within(&mut sim, 60, &[(1, limit), (2, Pages(EACH))]);
}

/// Two merged programs. The limit has room for a program and a child that both write all of their memory, but not also
/// for all pages that are kept for the other program.
fn snapshots(mut sim: Machine) -> (Machine, Vec<OwnerKey>, Pages) {
    let limit = Pages(EACH * 23 / 10);
    let owners = contained(&mut sim, 2, limit);
    run_within(&mut sim, 120, &[(1, limit), (2, limit)]);
    assert!(sim.saved().0 >= EACH * 98 / 100, "{:?}", sim.saved());
    (sim, owners, limit)
}

/// Forks a program below the limit with this key.
fn fork(sim: &mut Machine, key: u32, parent: OwnerKey, limit: Pages) -> OwnerKey {
    let child = sim.fork(parent);
    sim.limit(LimitKey(key), limit, &[parent, child]);
    child
}

/// Every minute each program forks a child, which writes the program's memory to a disk and ends, as Redis does.
#[test]
fn children_that_soon_end_cost_others_no_merged_pages() {
    for sim in machines() {
        let (mut sim, owners, limit) = snapshots(sim);
        let mut saved = 0;
        let mut looks = 0;
        for minute in 0..10 {
            let mut children = Vec::new();
            for (key, &owner) in (1..).zip(&owners) {
                children.push(fork(&mut sim, key, owner, limit));
                // Each parent writes meanwhile.
                sim.change_pages(owner, 0..EACH / 50, |host, region, page| {
                    host.write(region, page, 9 << 40 | u64::from(owner.0) << 32 | minute << 20 | page.0);
                });
            }
            sim.run(10);
            for (key, &owner) in (1..).zip(&owners) {
                sim.exit(children[usize::try_from(key).unwrap() - 1]);
                sim.limit(LimitKey(key), limit, &[owner]);
            }
            for _ in 0..5 {
                sim.run(10);
                saved += sim.saved().0;
                looks += 1;
            }
        }
        assert!(saved / looks >= EACH * 90 / 100, "{} of {EACH}", saved / looks);
        run_within(&mut sim, 60, &[(1, limit), (2, limit)]);
    }
}

/// A child that stays gets its headroom before long, whoever is charged for the merged pages.
#[test]
fn a_child_that_stays_gets_headroom() {
    for key in [1, 2] {
        for sim in machines() {
            let (mut sim, owners, limit) = snapshots(sim);
            fork(&mut sim, key, owners[key as usize - 1], limit);
            sim.run(120);
            run_within(&mut sim, 600, &[(1, limit), (2, limit)]);
        }
    }
}

/// A parent writes all of its memory while a child maps it, at any time, and the child begins to write a little later.
#[test]
fn a_parent_and_its_child_may_write_all_of_their_memory() {
    for pause in [0, 1, 3, 10, 30] {
        for sim in machines() {
            let (mut sim, owners, limit) = snapshots(sim);
            let child = fork(&mut sim, 1, owners[0], limit);
            let check = |sim: &Machine| assert!(sim.charged(LimitKey(1)) <= limit, "{:?}", sim.charged(LimitKey(1)));
            sim.run(pause);
            // Each writes a 60th of its memory per second.
            for second in 0..60 {
                let pages = second * EACH / 60..(second + 1) * EACH / 60;
                for owner in [owners[0], child] {
                    sim.change_pages(owner, pages.clone(), |host, region, page| {
                        host.write(region, page, 9 << 40 | u64::from(owner.0) << 32 | page.0);
                    });
                }
                check(&sim);
                sim.run(1);
                check(&sim);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// A program may write all of its memory at any time while its child maps it.
    #[test]
    fn a_parent_may_write_at_any_time_after_a_fork(
        limit_percent in 220_u64..300,
        forks in proptest::collection::vec((0_usize..3, 0_u64..90, 0_u64..30), 1..6),
        writes_after in 0_u64..90,
        on_request in any::<bool>(),
    ) {
        let host = if on_request { requested() } else { host() };
        let mut sim = Machine::with(host, Config { governor: Governor::Full, ..common::config() });
        let limit = Pages(EACH * limit_percent / 100);
        let owners = contained(&mut sim, 3, limit);
        sim.run(60);
        let check = |sim: &SimHost| {
            for key in (1..=3).map(LimitKey) {
                assert!(sim.charged(key) <= limit, "{key:?}: {:?} of {limit:?}", sim.charged(key));
            }
        };
        let (last, _, _) = forks[forks.len() - 1];
        for (program, lives, pause) in forks {
            let key = u32::try_from(program).unwrap() + 1;
            let child = fork(&mut sim, key, owners[program], limit);
            sim.run_and(lives, check);
            sim.exit(child);
            sim.limit(LimitKey(key), limit, &[owners[program]]);
            sim.run_and(pause, check);
        }
        fork(&mut sim, u32::try_from(last).unwrap() + 1, owners[last], limit);
        sim.run_and(writes_after, check);
        rewrite(&mut sim, owners[last], 7);
        check(&sim);
        sim.run_and(60, check);
    }
}

/// The first program pays for pages that only the second still maps. When the second writes them, it pays for its
/// copies.
#[test]
fn who_maps_a_page_alone_that_another_pays_for_has_headroom_for_its_own() {
    let programs = [(10, 1, 114), (5, 1, 120), (2, 2, 100), (2, 1, 100)];
    let writes = [(9, 0, 1), (2, 2, 1), (2, 1, 2), (10, 0, 1), (12, 1, 1), (1, 0, 1)];
    rewrite_in_turn(requested(), Governor::Full, &programs, &writes);
}

/// A program that rewrites all of its memory from time to time, with a cgroup's limit.
#[derive(Clone, Debug)]
struct Rewriter {
    mib: u64,
    content: u64,
    limit_percent: u64,
    pod: bool,
}

fn rewriter() -> impl Strategy<Value = Rewriter> {
    // Programs of the same size are of one family.
    (prop_oneof![2_u64..12, Just(6)], 1_u64..3, 100_u64..260, any::<bool>())
        .prop_map(|(mib, content, limit_percent, pod)| Rewriter { mib, content, limit_percent, pod })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// No order of writes takes a cgroup over a limit that it would have stayed below without merging.
    #[test]
    fn no_cgroup_exceeds_a_limit_that_it_would_have_stayed_below(
        programs in proptest::collection::vec(rewriter(), 2..6),
        pod_percent in 100_u64..200,
        writes in proptest::collection::vec((0_usize..6, 1_u64..4, 1_u64..30), 0..12),
        on_request in any::<bool>(),
        is_slow in any::<bool>(),
        busy in prop_oneof![Just(0), 0_u32..5_000],
        late in prop_oneof![Just(0), 0_u32..5_000],
        shows_lone in any::<bool>(),
    ) {
        let governor = if is_slow { Governor::Low } else { Governor::Full };
        let knobs = if on_request { Knobs::requested() } else { Knobs::driven() };
        let host = SimHost::new(7, Costs::default(), Knobs { busy: Permyriad(busy), late: Permyriad(late), shows_lone, ..knobs });
        let mut sim = Machine::with(host, Config { governor, ..common::config() });
        let mut limits = Vec::new();
        let (mut owners, mut pod, mut in_pod) = (Vec::new(), Vec::new(), 0);
        for (key, program) in (1..).map(LimitKey).zip(&programs) {
            let mapping = Mapping::new(Pages(program.mib * MIB), Fill::Series(program.content));
            let owner = sim.add(Process::starting_at(0).mapping(mapping));
            let limit = Pages(program.mib * MIB * program.limit_percent / 100);
            sim.limit(key, limit, &[owner]);
            limits.push((key, limit));
            owners.push(owner);
            if program.pod {
                pod.push(owner);
                in_pod += program.mib;
            }
        }
        if !pod.is_empty() {
            let limit = Pages(in_pod * MIB * pod_percent / 100);
            sim.limit(LimitKey(99), limit, &pod);
            limits.push((LimitKey(99), limit));
        }
        for (program, content, seconds) in writes {
            sim.run_and(seconds, |sim| {
                for &(key, limit) in &limits {
                    let (charged, worst) = (sim.charged(key), sim.charged_at_worst(key));
                    assert!(charged <= limit && worst <= limit, "{key:?}: {charged:?}, {worst:?} of {limit:?}");
                }
            });
            rewrite(&mut sim, owners[program % owners.len()], content);
            for &(key, limit) in &limits {
                assert!(sim.charged(key) <= limit, "{key:?}: {:?} of {limit:?}", sim.charged(key));
            }
        }
        sim.run(30);
    }
}

/// Two masters with four workers each, one family below a limit. Each process needs headroom for a copy of its own, and
/// where a relative isn't merged, merging the others frees nothing.
fn merge_family_in_part(mut sim: Machine, percent: u64, allocates: bool) {
    const MAPS: u64 = 4;
    const PROCESSES: u64 = 5;
    let mut families = Vec::new();
    for _ in 0..2 {
        let mut master = Process::starting_at(0);
        for content in 1..=MAPS {
            master = master.mapping(Mapping::new(Pages(EACH / MAPS), Fill::Series(content)));
        }
        let mut family = vec![sim.add(master)];
        for _ in 1..PROCESSES {
            family.push(sim.fork(family[0]));
        }
        families.push(family);
    }
    let mut used = EACH;
    if allocates {
        // Each worker maps memory of its own right below what it inherited.
        for (number, &worker) in (1..).zip(&families[0][1..]) {
            for region in sim.regions_of(worker) {
                let own: Vec<u64> =
                    (0..number * 2 * MIB).map(|page| 9 << 32 | u64::from(region.0) << 20 | page).collect();
                sim.map_below(region, &own);
                used += number * 2 * MIB;
            }
        }
    }
    // A tenth is the reserve.
    let limit = Pages((used + EACH * PROCESSES * percent / 100) * 10 / 9);
    sim.limit(LimitKey(1), limit, &families[0]);
    let before = sim.truth().frames;
    run_within(&mut sim, 120, &[(1, limit)]);
    let saved = (before - sim.truth().frames) * 100 / EACH;
    assert!(saved >= percent * 9 / 10, "{saved} of {percent} %");
}

#[test]
fn a_family_without_headroom_for_all_is_merged_in_part() {
    for percent in [25, 50, 75] {
        for sim in machines() {
            merge_family_in_part(sim, percent, false);
        }
    }
}

#[test]
fn a_family_with_memory_of_its_own_is_merged_in_part() {
    for percent in [25, 50, 75] {
        for sim in machines() {
            merge_family_in_part(sim, percent, true);
        }
    }
}
