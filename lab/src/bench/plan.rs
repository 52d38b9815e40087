//! The order of repetitions, and how much longer they'll take.

use crate::bench::experiment::{Experiment, shuffled};
use crate::bench::results::Finished;
use pagefold_engine::random::mix;
use std::time::Duration;

/// A repetition of an experiment.
#[derive(Clone, Copy)]
pub struct Step {
    pub experiment: &'static Experiment,
    /// Counts from 1.
    pub repetition: u32,
}

/// Every experiment once, then every one again. With a seed, each repetition has its own order, set by the seed and its
/// number alone, so a slow change on the machine doesn't hit the same experiment each time.
pub fn plan(experiments: &[&'static Experiment], repeat: u32, seed: Option<u64>) -> Vec<Step> {
    let mut steps = Vec::new();
    for repetition in 1..=repeat {
        for &experiment in shuffled(experiments, order(seed, repetition)) {
            steps.push(Step { experiment, repetition });
        }
    }
    steps
}

/// The seed for the order in a repetition: of the experiments, and of the policies in each.
pub fn order(seed: Option<u64>, repetition: u32) -> Option<u64> {
    seed.map(|seed| mix(seed) ^ u64::from(repetition))
}

/// How long the steps will take: as long as the same experiments did, or else as an average one. `None` before any is
/// finished.
pub fn remaining(steps: &[Step], finished: &[Finished]) -> Option<Duration> {
    let mut left = Duration::ZERO;
    for step in steps {
        let same = finished.iter().filter(|one| one.report.experiment == step.experiment.name);
        left += mean(same).or(mean(finished.iter()))?;
    }
    Some(left)
}

fn mean<'a>(finished: impl Iterator<Item = &'a Finished>) -> Option<Duration> {
    let times: Vec<Duration> = finished.map(|one| one.elapsed).collect();
    times.iter().sum::<Duration>().checked_div(u32::try_from(times.len()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::experiment::EXPERIMENTS;
    use crate::bench::report::ExperimentReport;
    use crate::bench::results::BenchOptions;
    use std::collections::BTreeSet;

    fn order(repeat: u32, seed: Option<u64>) -> Vec<(&'static str, u32)> {
        let experiments: Vec<&Experiment> = EXPERIMENTS.iter().collect();
        plan(&experiments, repeat, seed).iter().map(|step| (step.experiment.name, step.repetition)).collect()
    }

    #[test]
    fn the_order_depends_on_the_seed_alone() {
        let plain = order(2, None);
        assert_eq!(plain[0], (EXPERIMENTS[0].name, 1));
        assert_eq!(plain.len(), 2 * EXPERIMENTS.len());
        let one = order(3, Some(1));
        assert_eq!(one, order(3, Some(1)));
        assert_ne!(one, order(3, Some(2)));
        // More repetitions follow the existing ones.
        assert_eq!(one[..2 * EXPERIMENTS.len()], order(2, Some(1)));
        let names = |repetition: usize| {
            let part = &one[repetition * EXPERIMENTS.len()..][..EXPERIMENTS.len()];
            part.iter().map(|&(name, _)| name).collect::<Vec<_>>()
        };
        assert_ne!(names(0), names(1));
        for repetition in 0..3 {
            assert_eq!(names(repetition).into_iter().collect::<BTreeSet<_>>().len(), EXPERIMENTS.len());
        }
    }

    #[test]
    fn the_rest_takes_as_long_as_what_is_known() {
        let experiments: Vec<&Experiment> = EXPERIMENTS[..2].iter().collect();
        let steps = plan(&experiments, 2, None);
        assert_eq!(remaining(&steps, &[]), None);
        let finished = |seconds| {
            let report = ExperimentReport::new(EXPERIMENTS[0].name, "");
            Finished::new(1, BenchOptions::default(), Duration::from_secs(seconds), report)
        };
        assert_eq!(remaining(&steps[1..], &[finished(10)]), Some(Duration::from_secs(30)));
        assert_eq!(remaining(&steps[3..], &[finished(10), finished(20)]), Some(Duration::from_secs(15)));
    }
}
