//! Counts of injections, for the tests of torture and attacks.

use pagefold_inject::{InjectError, InjectionReport};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub made: u64,
    /// How many requests failed, by the error's name.
    errors: BTreeMap<String, u64>,
    /// The longest stop of each injection, in nanoseconds.
    stops_ns: Vec<u64>,
}

impl Tally {
    pub fn record(&mut self, result: &Result<InjectionReport, InjectError>) {
        match result {
            Ok(report) => {
                self.made += 1;
                self.stops_ns.push(report.longest_stop_ns);
            }
            Err(error) => *self.errors.entry(name_of(error)).or_default() += 1,
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.made += other.made;
        self.stops_ns.extend(&other.stops_ns);
        for (error, count) in &other.errors {
            *self.errors.entry(error.clone()).or_default() += count;
        }
    }

    /// How many requests failed with the error of this name.
    pub fn count(&self, error: &str) -> u64 {
        self.errors.get(error).copied().unwrap_or(0)
    }

    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    pub fn errors(&self) -> String {
        let words: Vec<_> = self.errors.iter().map(|(error, count)| format!("{error} {count}")).collect();
        words.join(", ")
    }

    /// These permilles of the stops, in microseconds.
    pub fn stops_us<const N: usize>(&self, permilles: [usize; N]) -> [u64; N] {
        let mut sorted = self.stops_ns.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        permilles.map(|permille| sorted.get(last * permille / 1000).copied().unwrap_or(0) / 1000)
    }
}

/// The name of the error's variant.
fn name_of(error: &InjectError) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}
