//! The experiments: each measures one claim on programs it starts itself.

mod idle;
mod real_programs;
mod scan;
mod static_mix;

use crate::interrupt::Interrupt;
use crate::policy::{self, Policy};
use crate::programs::Target;
use crate::record::{Failure, Report, answers};
use crate::steering::Steering;
use anyhow::Context;
use pagefold_core::units::{PAGE_SIZE, Pages};
use std::path::Path;

/// What all experiments are given.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The program to measure.
    pub program: &'a Path,
    /// The program that plays the tenants: this one.
    pub player: &'a Path,
    /// Small and short: to see that everything works, not how well. Speed is not judged then.
    pub quick: bool,
    /// Also the peers that take long.
    pub all_peers: bool,
    /// Only these policies, if any are named.
    pub policies: &'a [String],
    /// Signals.
    pub interrupt: &'a Interrupt,
}

/// An experiment.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: &'static str,
    /// The claim it measures.
    pub claim: &'static str,
    /// Does it. Fills in the report.
    pub run: fn(&Setting<'_>, &mut Report) -> anyhow::Result<()>,
}

/// All of them.
pub const EXPERIMENTS: [Experiment; 5] =
    [static_mix::EXPERIMENT, real_programs::EXPERIMENT, real_programs::MIXED_HOST, scan::EXPERIMENT, idle::EXPERIMENT];

impl Experiment {
    /// The one of that name.
    pub fn named(name: &str) -> anyhow::Result<&'static Self> {
        let names = || EXPERIMENTS.map(|experiment| experiment.name).join(", ");
        EXPERIMENTS
            .iter()
            .find(|experiment| experiment.name == name)
            .with_context(|| format!("there is no experiment {name}; there are {}", names()))
    }
}

/// Pages in so many mebibytes.
const fn mib(mebibytes: u64) -> Pages {
    Pages(mebibytes * (1 << 20) / PAGE_SIZE as u64)
}

/// Runs each policy on targets started afresh, since marks cannot be taken back from outside. What one policy cannot
/// do is noted, and the next has its turn.
fn side_by_side(
    setting: &Setting<'_>,
    report: &mut Report,
    policies: &[Policy],
    start: impl Fn() -> anyhow::Result<Vec<Box<dyn Target>>>,
) -> anyhow::Result<()> {
    let mut steering = Steering::take(setting.interrupt)?;
    let mut expected = None;
    for policy in policies {
        let name = policy.to_string();
        if !setting.policies.is_empty() && !setting.policies.contains(&name) {
            continue;
        }
        eprintln!("{}: {name}", report.experiment);
        let mut targets = start()?;
        let expected = expected.get_or_insert_with(|| answers(&mut targets));
        match policy::run(policy, &mut targets, expected, &mut steering, setting.program, setting.interrupt) {
            Ok(run) => report.runs.push(run),
            Err(error) => {
                setting.interrupt.check()?;
                eprintln!("{}: {name}: {error:#}", report.experiment);
                report.failures.push(Failure { policy: name, error: format!("{error:#}") });
            }
        }
    }
    drop(steering);
    report.compare(policy::SUBJECT);
    report.bar_on_answers();
    Ok(())
}
