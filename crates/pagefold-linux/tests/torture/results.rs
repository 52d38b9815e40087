//! The results of the requests, and the lengths of the stops.

use crate::victims::Victims;
use pagefold_linux::inject::{InjectError, InjectionReport};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The results for one kind of victim.
#[derive(Clone, Debug, Default)]
pub struct Line {
    pub made: u64,
    pub errors: BTreeMap<&'static str, u64>,
    /// The longest stop of each injection, in nanoseconds.
    pub stops_ns: Vec<u64>,
}

impl Line {
    pub fn count(&self, error: &str) -> u64 {
        self.errors.get(error).copied().unwrap_or(0)
    }

    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }
}

#[derive(Default)]
pub struct Results {
    lines: Mutex<BTreeMap<String, Line>>,
    failures: Mutex<Vec<String>>,
}

/// Further failures are dropped.
const FAILURES_KEPT: usize = 20;

fn name_of(error: &InjectError) -> &'static str {
    match error {
        InjectError::Vanished { .. } => "vanished",
        InjectError::Traced { .. } => "traced",
        InjectError::Frozen { .. } => "frozen",
        InjectError::Zombie { .. } => "zombie",
        InjectError::NoSafeThread { .. } => "no-safe-thread",
        InjectError::Busy { .. } => "busy",
        InjectError::TimedOut { .. } => "timed-out",
        InjectError::Held { .. } => "held",
        InjectError::Compat { .. } => "compat",
        InjectError::Fault { .. } => "fault",
        InjectError::WorkerGone | InjectError::WorkerSilent => "worker",
        _ => "other",
    }
}

impl Results {
    pub fn record(&self, name: &str, result: &Result<InjectionReport, InjectError>) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.entry(name.to_owned()).or_default();
        match result {
            Ok(report) => {
                line.made += 1;
                line.stops_ns.push(report.longest_stop_ns);
            }
            Err(error) => *line.errors.entry(name_of(error)).or_default() += 1,
        }
    }

    pub fn line(&self, name: &str) -> Line {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned().unwrap_or_default()
    }

    /// The number of requests that have ended.
    pub fn recorded(&self) -> u64 {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.values().map(|line| line.made + line.failed()).sum()
    }

    pub fn fail(&self, what: String) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() < FAILURES_KEPT {
            failures.push(what);
        }
    }

    pub fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Prints the results, and writes them to the file named by `PAGEFOLD_TORTURE_REPORT`.
    pub fn report(&self, seed: u64, wall: Duration, victims: &Victims) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        println!("{:32} {:>7} {:>8} {:>8}  other outcomes", "victim", "made", "p50 us", "max us");
        let mut all = Line::default();
        let mut kinds = serde_json::Map::new();
        for (name, line) in &*lines {
            let stops = Stops::of(line);
            println!("{name:32} {:>7} {:>8} {:>8}  {}", line.made, us(stops.p50), us(stops.max), outcomes(line));
            kinds.insert(name.clone(), json(line, &stops));
            all.made += line.made;
            all.stops_ns.extend(&line.stops_ns);
            line.errors.iter().for_each(|(&error, count)| *all.errors.entry(error).or_default() += count);
        }
        let stops = Stops::of(&all);
        let count: usize = victims.names().values().sum();
        println!("{} injections into {count} victims in {:.1} s; {}", all.made, wall.as_secs_f64(), outcomes(&all));
        println!(
            "stop time in us: p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
            us(stops.p50),
            us(stops.p90),
            us(stops.p99),
            us(stops.p999),
            us(stops.max)
        );
        if let Some(file) = std::env::var_os("PAGEFOLD_TORTURE_REPORT") {
            let report = json!({
                "seed": seed,
                "wall_s": wall.as_secs_f64(),
                "victims": count,
                "all": json(&all, &stops),
                "kinds": kinds,
            });
            std::fs::write(&file, format!("{report:#}\n")).expect("the report's file");
        }
    }
}

/// Percentiles of the stop times, in nanoseconds.
struct Stops {
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

impl Stops {
    fn of(line: &Line) -> Self {
        let mut sorted = line.stops_ns.clone();
        sorted.sort_unstable();
        let at = |permille: usize| match sorted.len() {
            0 => 0,
            length => sorted[(length - 1) * permille / 1000],
        };
        Self { p50: at(500), p90: at(900), p99: at(990), p999: at(999), max: at(1000) }
    }
}

fn us(ns: u64) -> u64 {
    ns / 1000
}

fn outcomes(line: &Line) -> String {
    let words: Vec<_> = line.errors.iter().map(|(error, count)| format!("{error} {count}")).collect();
    words.join(", ")
}

fn json(line: &Line, stops: &Stops) -> Value {
    json!({
        "made": line.made,
        "errors": line.errors,
        "stop_ns": {
            "p50": stops.p50, "p90": stops.p90, "p99": stops.p99, "p99.9": stops.p999, "max": stops.max,
        },
    })
}
