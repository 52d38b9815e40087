//! The results of the requests, and the lengths of the stops.

use crate::tally::Tally;
use crate::victims::Victims;
use pagefold_inject::{InjectError, InjectionReport};
use pagefold_procmem::os::locked;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

#[derive(Default)]
pub struct Results {
    /// By the victim's name.
    tallies: Mutex<BTreeMap<String, Tally>>,
    failures: Mutex<Vec<String>>,
}

/// How many failures we keep. We drop further ones.
const FAILURES_KEPT: usize = 20;

impl Results {
    pub fn record(&self, name: &str, result: &Result<InjectionReport, InjectError>) {
        locked(&self.tallies).entry(name.to_owned()).or_default().record(result);
    }

    pub fn tally(&self, name: &str) -> Tally {
        locked(&self.tallies).get(name).cloned().unwrap_or_default()
    }

    /// How many requests have ended.
    pub fn recorded(&self) -> u64 {
        let tallies = locked(&self.tallies);
        tallies.values().map(|tally| tally.made + tally.failed()).sum()
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

    pub fn print(&self, wall: Duration, victims: &Victims) {
        println!("{:32} {:>7} {:>8} {:>8}  other outcomes", "victim", "made", "p50 us", "max us");
        let mut all = Tally::default();
        for (name, tally) in &*locked(&self.tallies) {
            let [p50, max] = tally.stops_us([500, 1000]);
            println!("{name:32} {:>7} {p50:>8} {max:>8}  {}", tally.made, tally.errors());
            all.add(tally);
        }
        let count: usize = victims.names().values().sum();
        println!("{} injections into {count} victims in {:.1} s; {}", all.made, wall.as_secs_f64(), all.errors());
        let [p50, p90, p99, p999, max] = all.stops_us([500, 900, 990, 999, 1000]);
        println!("stop time in us: p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p999}, max {max}");
    }
}
