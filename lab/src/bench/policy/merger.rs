//! What merges memory while an experiment starts programs and does more with them than waiting.

use super::{Policy, SUBJECT, scan_paced};
use crate::bench::daemon::{self, Running};
use crate::bench::experiment::ExperimentSetting;
use crate::bench::report::PolicyRun;
use crate::bench::sampler::{Sampler, SamplerPoint};
use anyhow::Context;
use pagefold_ksm::experiment::KsmForExperiment;
use pagefold_procmem::os::interrupt::Interrupt;
use std::fmt;

/// What merges. The programs that KSM merges must be marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merger {
    Nothing,
    /// KSM, so many pages each 20 ms.
    Ksm(u64),
    /// pagefold with these options.
    Pagefold(&'static [&'static str]),
}

impl fmt::Display for Merger {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Nothing => Policy::NoMerging { seconds: 0 }.fmt(to),
            Self::Ksm(pages) => Policy::KsmPaced { pages, seconds: 0 }.fmt(to),
            Self::Pagefold(options) => to.write_str(&[&[SUBJECT], options].concat().join(" ")),
        }
    }
}

/// A run that is sampled from its start on.
#[derive(Debug)]
pub struct Merging {
    sampler: Option<Sampler>,
    points: Vec<SamplerPoint>,
    daemon: Option<Running>,
}

impl Merging {
    /// Begins to sample. Nothing merges yet.
    pub fn begin() -> anyhow::Result<Self> {
        Ok(Self { sampler: Some(Sampler::start()?), points: Vec::new(), daemon: None })
    }

    /// Begins to merge. pagefold finds the programs by `scope`, and does not start with nothing in it.
    pub fn merge(
        &mut self,
        by: Merger,
        scope: &[&str],
        setting: &ExperimentSetting<'_>,
        control: &KsmForExperiment,
    ) -> anyhow::Result<()> {
        match by {
            Merger::Nothing => {}
            Merger::Ksm(pages) => scan_paced(control, pages)?,
            Merger::Pagefold(options) => {
                let daemon = daemon::run(setting.program, &[], &[options, scope].concat())?;
                self.sampler.as_ref().context("sampling has already ended")?.watch(daemon.meter()?);
                self.daemon = Some(daemon);
            }
        }
        Ok(())
    }

    /// Ends the samples before pagefold, whose end then costs nothing.
    pub fn stop_sampling(&mut self) -> anyhow::Result<()> {
        if let Some(sampler) = self.sampler.take() {
            self.points = sampler.finish()?;
        }
        Ok(())
    }

    /// Ends pagefold and the samples. Memory stays merged.
    pub fn end(self, name: &str, interrupt: &Interrupt) -> anyhow::Result<PolicyRun> {
        let (mut run, points, _) = self.ended(name, interrupt)?;
        run.set_own_samples(&points);
        Ok(run)
    }

    /// The same where no other child has ended meanwhile, so that all of pagefold's CPU time is known.
    pub fn end_alone(self, name: &str, interrupt: &Interrupt) -> anyhow::Result<PolicyRun> {
        let (mut run, points, cpu_seconds) = self.ended(name, interrupt)?;
        run.cpu_pagefold_seconds = cpu_seconds;
        run.set_samples(&points);
        Ok(run)
    }

    fn ended(mut self, name: &str, interrupt: &Interrupt) -> anyhow::Result<(PolicyRun, Vec<SamplerPoint>, f64)> {
        let ran = self.daemon.take().map(|daemon| daemon.end(interrupt)).transpose()?;
        self.stop_sampling()?;
        let cpu_seconds = ran.as_ref().map_or(0.0, |ran| ran.cpu_seconds);
        let summary = ran.map(|ran| ran.summary);
        let run = PolicyRun { policy: name.to_owned(), summary, ..PolicyRun::default() };
        Ok((run, self.points, cpu_seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_policies() {
        let names = [Merger::Nothing, Merger::Pagefold(&[]), Merger::Pagefold(&["--preset", "sensitive"])];
        assert_eq!(names.map(|by| by.to_string()), ["no merging", "pagefold", "pagefold --preset sensitive"]);
        assert_eq!(Merger::Ksm(2000).to_string(), "ksm-2000/20ms");
    }
}
