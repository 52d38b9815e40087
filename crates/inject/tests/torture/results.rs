//! The results of the requests, and the lengths of the stops.

use crate::victims::Victims;
use pagefold_inject::{InjectError, InjectionReport};
use pagefold_procmem::os::locked;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Mutex;
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

/// How many failures we keep. We drop further ones.
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
        let mut lines = locked(&self.lines);
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
        locked(&self.lines).get(name).cloned().unwrap_or_default()
    }

    /// How many requests have ended.
    pub fn recorded(&self) -> u64 {
        let lines = locked(&self.lines);
        lines.values().map(|line| line.made + line.failed()).sum()
    }

    pub fn fail(&self, what: String) {
        let mut failures = locked(&self.failures);
        if failures.len() < FAILURES_KEPT {
            failures.push(what);
        }
    }

    pub fn failures(&self) -> Vec<String> {
        locked(&self.failures).clone()
    }

    /// Prints the results, and writes them to the file named by `PAGEFOLD_TORTURE_REPORT`.
    pub fn report(&self, seed: u64, wall: Duration, victims: &Victims) {
        let lines = locked(&self.lines);
        println!("{:32} {:>7} {:>8} {:>8}  other outcomes", "victim", "made", "p50 us", "max us");
        let mut all = Line::default();
        let mut kinds = serde_json::Map::new();
        for (name, line) in &*lines {
            let stops = percentiles(line);
            let [p50, .., max] = stops.map(|(_, ns)| us(ns));
            println!("{name:32} {:>7} {p50:>8} {max:>8}  {}", line.made, outcomes(line));
            kinds.insert(name.clone(), json(line, &stops));
            all.made += line.made;
            all.stops_ns.extend(&line.stops_ns);
            line.errors.iter().for_each(|(&error, count)| *all.errors.entry(error).or_default() += count);
        }
        let stops = percentiles(&all);
        let count: usize = victims.names().values().sum();
        println!("{} injections into {count} victims in {:.1} s; {}", all.made, wall.as_secs_f64(), outcomes(&all));
        let words = stops.map(|(name, ns)| format!("{name} {}", us(ns)));
        println!("stop time in us: {}", words.join(", "));
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

/// Percentiles of the stop times, in nanoseconds, by name.
const PERCENTILES: [(&str, usize); 5] = [("p50", 500), ("p90", 900), ("p99", 990), ("p99.9", 999), ("max", 1000)];

fn percentiles(line: &Line) -> [(&'static str, u64); 5] {
    let mut sorted = line.stops_ns.clone();
    sorted.sort_unstable();
    let last = sorted.len().saturating_sub(1);
    PERCENTILES.map(|(name, permille)| (name, sorted.get(last * permille / 1000).copied().unwrap_or(0)))
}

fn us(ns: u64) -> u64 {
    ns / 1000
}

fn outcomes(line: &Line) -> String {
    let words: Vec<_> = line.errors.iter().map(|(error, count)| format!("{error} {count}")).collect();
    words.join(", ")
}

fn json(line: &Line, stops: &[(&str, u64)]) -> Value {
    let stops: BTreeMap<_, _> = stops.iter().copied().collect();
    json!({ "made": line.made, "errors": line.errors, "stop_ns": stops })
}
