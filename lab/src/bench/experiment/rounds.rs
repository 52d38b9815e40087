//! Policies that take turns, so that a slow change on the machine affects all of them.

use crate::bench::measures::{Spread, median};
use crate::bench::metric::MEDIAN;
use crate::bench::policy::{NO_MERGING, Policy};
use crate::bench::report::{ExperimentReport, in_round};
use std::collections::BTreeMap;

/// The figures of each round, by policy and name.
#[derive(Debug, Default)]
pub struct Rounds(BTreeMap<(String, String), BTreeMap<u64, f64>>);

impl Rounds {
    /// Adds a figure. Its name in reports is the policy's and this one.
    pub fn add(&mut self, policy: &str, round: u64, figure: impl Into<String>, value: f64) {
        self.0.entry((policy.to_owned(), figure.into())).or_default().insert(round, value);
    }

    /// A policy's figure relative to that without merging, over the rounds that measured both.
    pub fn relative_to_unmerged(&self, policy: &str, figure: &str) -> Option<Spread> {
        if policy == NO_MERGING {
            return None;
        }
        let unmerged = self.0.get(&(NO_MERGING.to_owned(), figure.to_owned()))?;
        let mut ratios = Vec::new();
        for (round, value) in self.0.get(&(policy.to_owned(), figure.to_owned()))? {
            if let Some(base) = unmerged.get(round) {
                ratios.push(value / base);
            }
        }
        Spread::of(ratios)
    }

    /// The median of each policy's figure, by policy.
    pub fn medians(&self, figure: &str) -> Vec<(String, f64)> {
        let mut medians = Vec::new();
        for ((policy, name), by_round) in &self.0 {
            if name == figure {
                medians.push((policy.clone(), median(by_round.values().copied())));
            }
        }
        medians
    }

    /// Adds the medians to the report, and puts its runs in the order of their policies within each round.
    pub fn put(&self, report: &mut ExperimentReport, policies: &[Box<dyn Policy>], rounds: u64) {
        for ((policy, name), by_round) in &self.0 {
            report.figure(format!("{policy}{name}"), median(by_round.values().copied()));
        }
        sort_runs(report, policies, rounds);
    }
}

/// The parts of a spread by name.
pub fn parts(spread: Spread) -> [(&'static str, f64); 3] {
    [(MEDIAN, spread.median), ("lowest", spread.min), ("highest", spread.max)]
}

/// Puts the runs in the order of their policies within each round.
pub fn sort_runs(report: &mut ExperimentReport, policies: &[Box<dyn Policy>], rounds: u64) {
    let mut names = Vec::new();
    for round in 1..=rounds {
        names.extend(policies.iter().map(|policy| in_round(&policy.name(), round)));
    }
    report.runs.sort_by_key(|run| names.iter().position(|name| *name == run.policy));
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut rounds = Rounds::default();
        for (round, unmerged, ours) in [(1, 10.0, 11.0), (2, 40.0, 50.0), (3, 20.0, 24.0)] {
            rounds.add(NO_MERGING, round, " seconds", unmerged);
            rounds.add("pagefold", round, " seconds", ours);
        }
        // This round has nothing to compare with.
        rounds.add("pagefold", 4, " seconds", 1000.0);
        let spread = rounds.relative_to_unmerged("pagefold", " seconds").unwrap();
        assert_eq!(spread, Spread { median: 1.2, min: 1.1, max: 1.25 });
        assert_eq!(rounds.relative_to_unmerged("pagefold", " CPU"), None);
        assert_eq!(rounds.relative_to_unmerged(NO_MERGING, " seconds"), None);
        assert_eq!(rounds.medians(" seconds"), [(NO_MERGING.to_owned(), 20.0), ("pagefold".to_owned(), 37.0)]);
    }
}
