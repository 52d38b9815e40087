//! In a simulated week a million processes come and go. Nothing that the engine keeps may grow.

mod common;

use common::{Log, MIB, Machine, SECOND, config, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::governor::Governor;
use pagefold_engine::random::Random;
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process, SimHost};

/// How many processes start on one simulated day.
const STARTS_PER_DAY: u64 = 1_000_000 / 7;
const DAY_SECONDS: u64 = 86_400;
/// How many seconds pass until the next processes start.
const STEP_SECONDS: u64 = 10;
const HOUR_STEPS: u64 = 3_600 / STEP_SECONDS;

/// Processes of a page to a MiB start, live for up to a minute, and exit. One in ten runs a program that we've never
/// seen before. Returns the most that the engine held at the end of an hour.
fn pass_a_day(sim: &mut Machine, random: &mut Random, started: &mut u64) -> usize {
    let mut most = 0;
    for step in 1..=DAY_SECONDS / STEP_SECONDS {
        let due = STARTS_PER_DAY * step / (DAY_SECONDS / STEP_SECONDS)
            - STARTS_PER_DAY * (step - 1) / (DAY_SECONDS / STEP_SECONDS);
        for _ in 0..due {
            *started += 1;
            let family = if *started % 10 == 0 { 1_000 + *started } else { *started % 7 };
            let pages = Pages(1 + random.below(MIB));
            let fill = if *started % 2 == 0 { Fill::Series(family) } else { Fill::Random };
            let now_ns = sim.now_ns();
            let exit_ns = now_ns + (1 + random.below(60)) * SECOND;
            sim.add(
                Process::starting_at(now_ns).exiting_at(exit_ns).mapping(Mapping::new(pages, fill).of_family(family)),
            );
        }
        sim.run(STEP_SECONDS);
        sim.log = Log::default();
        if step % HOUR_STEPS == 0 {
            // We measure all that the engine holds by the length of its debug text.
            most = most.max(format!("{:?}", sim.engine).len());
        }
    }
    most
}

fn assert_nothing_grows(host: SimHost) {
    let mut sim = Machine::with(host, Config { governor: Governor::Full, ..config() });
    for _ in 0..3 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(16 * MIB), Fill::Series(1))));
    }
    let (mut random, mut started) = (Random::new(5), 0);
    let mut pass = |sim: &mut Machine| pass_a_day(sim, &mut random, &mut started);
    let early = (0..3).map(|_| pass(&mut sim)).max().unwrap();
    let saved = sim.saved();
    let late = (3..7).map(|_| pass(&mut sim)).max().unwrap();
    println!("{started} processes; at most {early} bytes of text in three days, {late} in the other four");
    assert!(started >= 999_000, "{started} processes");
    assert!(late <= early + early / 10, "from {early} to {late} bytes");
    assert!(saved >= Pages(31 * MIB) && sim.saved() >= Pages(31 * MIB), "{saved:?}, {:?}", sim.saved());
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_week_of_processes_leaves_nothing_behind_where_ksmd_merges() {
    assert_nothing_grows(host());
}

#[test]
#[ignore = "takes minutes: make soak"]
fn a_week_of_processes_leaves_nothing_behind_on_request() {
    assert_nothing_grows(requested());
}
