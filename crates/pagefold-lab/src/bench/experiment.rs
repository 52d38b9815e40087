//! The experiments: each measures one claim on programs it starts itself.

mod cow_breaker;
mod governors;
mod hash;
mod idle;
mod mapper;
pub(crate) mod numa;
mod pairs;
mod real_programs;
mod recall;
mod scan;
mod short_lived;
mod static_mix;

use crate::bench::policy::{self, Policy};
use crate::bench::report::{ExperimentReport, Failure, answers};
use crate::programs::Target;
use pagefold_core::units::{PAGE_SIZE, Pages};
use pagefold_linux::ksm::experiment::KsmForExperiment;
use pagefold_linux::os::interrupt::Interrupt;
use std::path::Path;

/// What all experiments are given.
#[derive(Clone, Copy, Debug)]
pub struct ExperimentSetting<'a> {
    /// The program to measure.
    pub program: &'a Path,
    /// The program that plays the tenants: this one.
    pub player: &'a Path,
    /// Small and short: to see that everything works, not how well. Speed is not judged then.
    pub quick: bool,
    /// Also the peers that take long.
    pub all_peers: bool,
    /// The machine is one that the experiment itself emulates: only what must be done there is done.
    pub emulated: bool,
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
    pub run: fn(&ExperimentSetting<'_>, &mut ExperimentReport) -> anyhow::Result<()>,
}

/// All of them.
pub const EXPERIMENTS: [Experiment; 13] = [
    static_mix::EXPERIMENT,
    pairs::EXPERIMENT,
    cow_breaker::EXPERIMENT,
    short_lived::EXPERIMENT,
    idle::EXPERIMENT,
    governors::EXPERIMENT,
    mapper::EXPERIMENT,
    real_programs::EXPERIMENT,
    real_programs::MIXED_HOST,
    recall::EXPERIMENT,
    scan::EXPERIMENT,
    hash::EXPERIMENT,
    numa::EXPERIMENT,
];

impl Experiment {
    /// Finds an experiment by name.
    pub fn named(name: &str) -> Option<&'static Self> {
        EXPERIMENTS.iter().find(|experiment| experiment.name == name)
    }
}

impl ExperimentSetting<'_> {
    /// Whether a policy is to be measured: by its name, or by the name's first word.
    fn wants(&self, policy: &str) -> bool {
        let first = policy.split(' ').next();
        self.policies.is_empty() || self.policies.iter().any(|name| name == policy || Some(name.as_str()) == first)
    }
}

/// Pages in so many mebibytes.
const fn mib(mebibytes: u64) -> Pages {
    Pages(mebibytes * (1 << 20) / PAGE_SIZE as u64)
}

/// Runs each policy on targets started afresh, since marks cannot be taken back from outside, and compares pagefold
/// with the others.
fn side_by_side(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    policies: &[Policy],
    start: impl Fn() -> anyhow::Result<Vec<Box<dyn Target>>>,
) -> anyhow::Result<()> {
    let mut sequence = PolicySequence::take(setting)?;
    for policy in policies {
        sequence.run(report, policy, &start)?;
    }
    drop(sequence);
    report.compare(policy::SUBJECT);
    report.bar_on_answers();
    Ok(())
}

/// KSM, taken for policies that have their turn one after the other.
struct PolicySequence<'a> {
    setting: &'a ExperimentSetting<'a>,
    steering: KsmForExperiment,
    /// What the targets answered first.
    expected: Option<Vec<Option<String>>>,
    /// Whether the targets' page tables are read meanwhile.
    exact: bool,
}

impl<'a> PolicySequence<'a> {
    /// Takes KSM.
    fn take(setting: &'a ExperimentSetting<'a>) -> anyhow::Result<Self> {
        Ok(Self { setting, steering: KsmForExperiment::take(setting.interrupt)?, expected: None, exact: false })
    }

    /// Runs a policy, unless others were asked for, on targets that answer as those of the first one did. What it
    /// cannot do is noted.
    fn run(
        &mut self,
        report: &mut ExperimentReport,
        policy: &Policy,
        start: impl FnOnce() -> anyhow::Result<Vec<Box<dyn Target>>>,
    ) -> anyhow::Result<()> {
        let (setting, name) = (self.setting, policy.to_string());
        if !setting.wants(&name) {
            return Ok(());
        }
        eprintln!("{}: {name}", report.experiment);
        let mut targets = start()?;
        let expected = self.expected.get_or_insert_with(|| answers(&mut targets));
        let ran = policy::run(
            policy,
            &mut targets,
            expected,
            self.exact,
            &mut self.steering,
            setting.program,
            setting.interrupt,
        );
        match ran {
            Ok(run) => report.runs.push(run),
            Err(error) => self.failed(report, name, &error)?,
        }
        Ok(())
    }

    /// Notes what could not be done, unless it is that we were interrupted.
    fn failed(&self, report: &mut ExperimentReport, policy: String, error: &anyhow::Error) -> anyhow::Result<()> {
        self.setting.interrupt.check()?;
        eprintln!("{}: {policy}: {error:#}", report.experiment);
        report.failures.push(Failure { policy, error: format!("{error:#}") });
        Ok(())
    }
}
