//! Tests who pays for merged pages, on a simulated host. Below random limits, and whoever writes first, no cgroup may
//! exceed a limit that it would have stayed below without merging. And we save most of what an oracle could save within
//! them.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

mod common;

use common::oracle::{Limit, Program, most_saved};
use common::{MIB, Machine, SECOND, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::random::Random;
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost};

/// How many random cases we run, both with ksmd and on request. The variable sets another number, as in the live
/// rounds.
const SEEDS: u64 = 12;
const SEEDS_VARIABLE: &str = "PAGEFOLD_CHARGE_ROUNDS";
/// We must save at least this share of what the oracle could.
const SHARE_PERCENT: u64 = 60;
/// How many virtual seconds we give the engine to merge everything.
const SECONDS: u64 = 120;

/// How many pages were saved, and how many the oracle could save.
#[derive(Clone, Copy, Debug)]
struct Saved {
    pages: u64,
    most: u64,
}

impl Saved {
    fn percent(self) -> u64 {
        self.pages * 100 / self.most.max(1)
    }
}

/// Containers with one program each, and the limits on them.
#[derive(Debug)]
struct Case {
    programs: Vec<Program>,
    limits: Vec<Limit>,
    /// The limit that we lower later, and its new size.
    lowered: Option<(usize, u64)>,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut random = Random::for_purpose(seed, 0x00c4_a6e0);
        let count = 2 + random.below(7);
        let is_equal = random.below(2) == 0;
        let series = 1 + random.below(3).min(count / 3);
        let (mib, percent) = (10 + random.below(11), 115 + random.below(60));
        let mut programs = Vec::new();
        let mut limits = Vec::new();
        for number in 0..count {
            let own = if is_equal { (mib, percent) } else { (10 + random.below(11), 110 + random.below(110)) };
            let pages = own.0 * MIB;
            programs.push(Program { series: number % series, pages });
            limits.push(Limit { pages: pages * own.1 / 100, members: [number as usize].into() });
        }
        if count > 3 && random.below(2) == 0 {
            let members = 0..2 + random.below(count - 3) as usize;
            let used: u64 = programs[members.clone()].iter().map(|program| program.pages).sum();
            limits.push(Limit { pages: used * (105 + random.below(60)) / 100, members: members.collect() });
        }
        let mut lowered = None;
        if random.below(2) == 0 {
            let number = random.below(count) as usize;
            let pages = programs[number].pages;
            lowered = Some((number, limits[number].pages.min(pages * (108 + random.below(30)) / 100)));
        }
        Self { programs, limits, lowered }
    }
}

/// A machine with a case's programs on it.
fn machine(case: &Case, mut host: SimHost) -> Machine {
    for program in &case.programs {
        let mapping = Mapping::new(Pages(program.pages), Fill::Series(program.series + 1));
        host.add(Process::starting_at(0).mapping(mapping));
    }
    set_limits(&mut host, &case.limits);
    Machine::with(host, Config { governor: Governor::Full, ..common::config() })
}

fn set_limits(host: &mut SimHost, limits: &[Limit]) {
    for (key, limit) in (1..).zip(limits) {
        let members: Vec<OwnerKey> = limit.members.iter().map(|&at| OwnerKey(at as u32)).collect();
        host.limit(LimitKey(key), Pages(limit.pages), &members);
    }
}

/// Asserts that no cgroup is over its limit. With `at_worst`: not even if its programs wrote to all of their memory.
#[track_caller]
fn assert_within(host: &SimHost, limits: &[Limit], at_worst: bool) {
    for (key, limit) in (1..).map(LimitKey).zip(limits) {
        let pages = if at_worst { host.charged_at_worst(key) } else { host.charged(key) };
        assert!(pages.0 <= limit.pages, "{key:?}: {} of {} pages", pages.0, limit.pages);
    }
}

/// Lets the engine merge. Asserts all the time that the limits hold.
fn merge(sim: &mut Machine, case: &Case) -> Saved {
    let mut next_ns = 0;
    sim.run_and(SECONDS, |host| {
        if host.now_ns() >= next_ns {
            next_ns = host.now_ns() + SECOND;
            assert_within(host, &case.limits, true);
        }
    });
    Saved { pages: sim.saved().0, most: most_saved(&case.programs, &case.limits) }
}

/// Lets every program write to all of its memory, in random order, while the engine doesn't run.
fn rewrite_all(sim: &mut Machine, case: &Case, random: &mut Random) {
    let mut order: Vec<u32> = (0..).take(case.programs.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    for program in order {
        for region in sim.regions_of(OwnerKey(program)) {
            let span = sim.span_of(region).unwrap();
            for page in 0..span.pages.0 {
                sim.write(region, span.first + page, u64::from(program + 1) << 32 | page);
            }
        }
        assert_within(sim, &case.limits, false);
    }
}

/// Runs a case. Returns what was saved, and if the case lowers a limit, also what was saved after that. At the end all
/// programs write to all of their memory.
fn run(seed: u64, host: SimHost) -> Vec<Saved> {
    let mut case = Case::random(seed);
    let mut sim = machine(&case, host);
    let mut saved = vec![merge(&mut sim, &case)];
    if let Some((at, pages)) = case.lowered {
        case.limits[at].pages = pages;
        set_limits(&mut sim, &case.limits);
        // We give the engine time to unmerge what the lowered limit has no room for.
        sim.run(20);
        saved.push(merge(&mut sim, &case));
    }
    rewrite_all(&mut sim, &case, &mut Random::for_purpose(seed, 1));
    println!("{seed}: {saved:?}, {case:?}");
    saved
}

fn seeds() -> u64 {
    std::env::var(SEEDS_VARIABLE).map_or(SEEDS, |seeds| seeds.parse().unwrap())
}

#[test]
fn on_request_most_of_what_is_safe_is_saved_each_time() {
    for seed in 0..seeds() {
        for saved in run(seed, requested()) {
            assert!(saved.percent() >= SHARE_PERCENT, "{seed}: {} %", saved.percent());
        }
    }
}

/// ksmd keeps the copy of the process that was marked later, so the first one never pays. Of `n` processes with equal
/// limits, only `n - 1` give headroom.
#[test]
fn ksmd_saves_most_of_what_is_safe() {
    let (mut pages, mut most) = (0, 0);
    for seed in 0..seeds() {
        for saved in run(seed, host()) {
            assert!(saved.pages > 0, "{seed}: nothing of {}", saved.most);
            pages += saved.pages;
            most += saved.most;
        }
    }
    assert!(pages * 100 >= most * SHARE_PERCENT, "{pages} of {most}");
}

#[test]
fn the_oracle_spreads_kept_copies_by_headroom() {
    let programs = [Program { series: 0, pages: 100 }; 3];
    let limit = |pages, members: &[usize]| Limit { pages, members: members.iter().copied().collect() };
    let each = |pages| [limit(pages, &[0]), limit(pages, &[1]), limit(pages, &[2])];
    assert_eq!(most_saved(&programs, &each(140)), 200, "three times 40 are enough for 100");
    assert_eq!(most_saved(&programs, &each(120)), 120, "60 contents, two copies of each");
    assert_eq!(most_saved(&programs, &each(100)), 0);
    assert_eq!(most_saved(&programs, &[]), 200);
    let covers_all = [limit(300, &[0, 1, 2])];
    assert_eq!(most_saved(&programs, &covers_all), 200);
    // Two programs share 100 pages among themselves, whoever pays. The third could join only 10 of these.
    let pod = [limit(210, &[0, 1]), limit(100, &[2])];
    assert_eq!(most_saved(&programs, &pod), 110);
    let sizes = [Program { series: 0, pages: 100 }, Program { series: 0, pages: 50 }, Program { series: 1, pages: 90 }];
    assert_eq!(most_saved(&sizes, &[limit(130, &[0]), limit(60, &[1])]), 40);
}
