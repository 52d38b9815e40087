//! The torture of the injector: a crew of victims in every state that matters, storms that disturb them, and workers
//! that inject again and again, in a random order. Nobody may notice anything.
//!
//! The victims judge for themselves (`examples/victim/torture.rs` has their laws); here is checked what can be seen
//! from outside, and that no signal got lost. `PAGEFOLD_TORTURE` is how many injections are to be made (5000),
//! `PAGEFOLD_TORTURE_SEED` repeats a run's choices (not its timing), `PAGEFOLD_TORTURE_REPORT` names a file
//! for the figures as JSON.
//!
//! Nothing is merged: each victim's memory has contents of its own.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)] // Raw calls disturb the victims.

#[path = "torture/crew.rs"]
mod crew;
mod inject_support;
#[path = "torture/injecting.rs"]
mod injecting;
#[path = "torture/judging.rs"]
mod judging;
#[path = "torture/storm.rs"]
mod storm;
#[path = "torture/tally.rs"]
mod tally;

use crew::Crew;
use inject_support::permitted;
use pagefold_core::random::Random;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tally::Tally;

/// Threads that have a worker process inject, as the daemon does.
const WORKERS: u64 = 4;

/// What all threads share.
pub struct Run {
    pub crew: Crew,
    /// Injections to be made.
    pub wanted: u64,
    pub made: AtomicU64,
    pub requests: AtomicU64,
    pub over: AtomicBool,
    pub tally: Tally,
}

impl Run {
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether the injecting is to end. Requests that come to nothing end it too, but the count is looked at.
    pub fn is_enough(&self) -> bool {
        self.made.load(Ordering::Relaxed) >= self.wanted
            || self.requests.load(Ordering::Relaxed) >= self.wanted * 3 + 1000
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Says how far a long run is, and ends the test if a target is never let go: whoever injects into it waits for that, by
/// design without a limit.
fn watch(run: &Run) {
    const PATIENCE: Duration = Duration::from_secs(150);
    let (begun, mut told) = (Instant::now(), 0);
    let mut last = (0, begun);
    while !run.is_over() {
        let made = run.made.load(Ordering::Relaxed);
        if made >= told + 10_000 {
            told = made;
            println!("{made} injections after {:.0} s", begun.elapsed().as_secs_f64());
        }
        let entered = run.tally.entered();
        if entered != last.0 {
            last = (entered, Instant::now());
        }
        if last.1.elapsed() > PATIENCE {
            println!("no request has come to an end for {PATIENCE:?}; failures so far: {:#?}", run.tally.failures());
            // What is frozen could not even be killed.
            run.over.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
            run.crew.freezers.iter().for_each(|(freezer, _)| freezer.freeze(false));
            std::process::exit(1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn nobody_notices_anything() {
    if !permitted() {
        return;
    }
    let seed = number("PAGEFOLD_TORTURE_SEED", u64::from(std::process::id()));
    println!("PAGEFOLD_TORTURE_SEED={seed}");
    let run = Run {
        crew: Crew::muster(),
        wanted: number("PAGEFOLD_TORTURE", 5000),
        made: AtomicU64::new(0),
        requests: AtomicU64::new(0),
        over: AtomicBool::new(false),
        tally: Tally::default(),
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let run = &run;
        let mut seeds = Random::new(seed);
        let mut injecting: Vec<_> = (0..WORKERS)
            .map(|_| {
                let random = Random::new(seeds.next());
                scope.spawn(move || injecting::by_worker(run, random))
            })
            .collect();
        let random = Random::new(seeds.next());
        injecting.push(scope.spawn(move || injecting::directly(run, random)));
        storm::raise(scope, run, &mut seeds);
        scope.spawn(move || watch(run));
        let ended: Vec<_> = injecting.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        // Before anything panics, or the storms would never end.
        run.over.store(true, Ordering::Relaxed);
        for thread in ended {
            thread.expect("an injecting thread");
        }
    });
    let wall = begun.elapsed();
    let failures = judging::judge(&run);
    run.tally.report(seed, wall, &run.crew);
    assert!(failures.is_empty(), "seed {seed}:\n{}", failures.join("\n"));
}
