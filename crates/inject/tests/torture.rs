//! Tortures the injector. Several injector processes inject all the time, in random order, into victims in every state
//! that matters, while signals, stops, freezers and deaths disturb these. No victim may notice anything.
//!
//! The victims (`victim torture` of pagefold-testkit) check themselves. The test checks everything that can be seen
//! from outside, and that no signal was lost. `PAGEFOLD_TORTURE` is the number of injections (default: 5000),
//! `PAGEFOLD_TORTURE_SEED` repeats the choices of a run (not its timing).
//!
//! We merge nothing: the memory of each victim is unique.

#[path = "torture/disturbance.rs"]
mod disturbance;
#[path = "torture/requests.rs"]
mod requests;
#[path = "torture/results.rs"]
mod results;
#[path = "torture/tally.rs"]
mod tally;
#[path = "torture/verdict.rs"]
mod verdict;
#[path = "torture/victims.rs"]
mod victims;

use pagefold_engine::random::Random;
use pagefold_testkit::injection::can_inject;
use results::Results;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use victims::Victims;

/// The number of threads with an injector process each, as the daemon has one.
const INJECTORS: u64 = 4;

/// The state that all threads share.
struct Run {
    victims: Victims,
    /// The number of injections to make.
    wanted: u64,
    made: AtomicU64,
    requests: AtomicU64,
    over: AtomicBool,
    results: Results,
}

impl Run {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether there have been enough injections, or so many failed requests that we give up. The verdict checks the
    /// number.
    fn is_enough(&self) -> bool {
        self.made.load(Ordering::Relaxed) >= self.wanted
            || self.requests.load(Ordering::Relaxed) >= self.wanted * 3 + 1000
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Reports the progress of a long run. Ends the test if an injection waits for ever for its target: by design that wait
/// has no time limit.
fn watch_progress(run: &Run) {
    const STALL_LIMIT: Duration = Duration::from_secs(150);
    let (begun, mut reported) = (Instant::now(), 0);
    let mut last = (0, begun);
    while !run.is_over() {
        let made = run.made.load(Ordering::Relaxed);
        if made >= reported + 10_000 {
            reported = made;
            println!("{made} injections after {:.0} s", begun.elapsed().as_secs_f64());
        }
        let recorded = run.results.recorded();
        if recorded != last.0 {
            last = (recorded, Instant::now());
        }
        if last.1.elapsed() > STALL_LIMIT {
            println!("no request has ended for {STALL_LIMIT:?}; failures so far: {:#?}", run.results.failures());
            // We thaw the victims, since nobody can kill a frozen process.
            run.over.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
            run.victims.freezers.iter().for_each(|(freezer, _)| freezer.freeze(false));
            std::process::exit(1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn no_victim_notices_anything() {
    if !can_inject() {
        return;
    }
    let seed = number("PAGEFOLD_TORTURE_SEED", u64::from(std::process::id()));
    println!("PAGEFOLD_TORTURE_SEED={seed}");
    let run = Run {
        victims: Victims::start(),
        wanted: number("PAGEFOLD_TORTURE", 5000),
        made: AtomicU64::new(0),
        requests: AtomicU64::new(0),
        over: AtomicBool::new(false),
        results: Results::default(),
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let run = &run;
        let mut seeds = Random::new(seed);
        let mut injecting: Vec<_> = (0..INJECTORS)
            .map(|_| {
                let random = Random::new(seeds.next());
                scope.spawn(move || requests::by_injector(run, random))
            })
            .collect();
        let random = Random::new(seeds.next());
        injecting.push(scope.spawn(move || requests::directly(run, random)));
        disturbance::start(scope, run, &mut seeds);
        scope.spawn(move || watch_progress(run));
        let ended: Vec<_> = injecting.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        // If we panicked before setting this, the disturbances would never end.
        run.over.store(true, Ordering::Relaxed);
        for thread in ended {
            thread.expect("an injecting thread");
        }
    });
    let wall = begun.elapsed();
    let failures = verdict::failures(&run);
    run.results.print(wall, &run.victims);
    assert!(failures.is_empty(), "seed {seed}:\n{}", failures.join("\n"));
}
