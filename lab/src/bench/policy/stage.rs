//! The frame of every run: KSM at the kernel's defaults, samples, a policy, its end, and then nothing merged.

use super::ksm::mark_eligible;
use super::uksm::Uksm;
use super::{Marks, Policy};
use crate::bench::daemon::{self, Running};
use crate::bench::experiment::ExperimentSetting;
use crate::bench::frames::open_all;
use crate::bench::marks::mark;
use crate::bench::report::{Answers, PolicyRun, agree};
use crate::bench::sampler::{Sampler, SamplerPoint};
use crate::bench::{oracle, page_tables};
use crate::interrupt::Interrupt;
use crate::ksm_control::KsmForExperiment;
use crate::programs::{Target, answers};
use anyhow::{Context, bail};
use pagefold_procmem::process::Process;
use pagefold_report::activity::ActivityCounters;
use std::any::Any;
use std::time::{Duration, Instant};

/// The kernel's way to merge.
#[derive(Debug)]
pub enum Kernel {
    Ksm(Box<KsmForExperiment>),
    /// UKSM instead of KSM. It can't unmerge, so answers after a run come from merged memory, too.
    Uksm(Uksm),
}

impl Kernel {
    /// Takes control of KSM.
    pub fn take_ksm(interrupt: &Interrupt) -> anyhow::Result<Self> {
        Ok(Self::Ksm(Box::new(KsmForExperiment::take(interrupt)?)))
    }

    /// Takes control of UKSM if the kernel has it, otherwise of KSM.
    pub fn take(interrupt: &Interrupt) -> anyhow::Result<Self> {
        Uksm::of_kernel().map_or_else(|| Self::take_ksm(interrupt), |uksm| Ok(Self::Uksm(uksm)))
    }

    /// Unmerges everything. We restore the knobs once the programs have ended, before the next run.
    pub fn unmerge(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Ksm(ksm) => Ok(ksm.unmerge_pages()?),
            Self::Uksm(_) => Ok(()),
        }
    }
}

/// A run under way.
pub struct Stage<'a> {
    pub setting: &'a ExperimentSetting<'a>,
    kernel: &'a mut Kernel,
    /// The programs that pagefold merges and that were there before it. The peers mark these.
    processes: Vec<Process>,
    /// Options that select the programs that pagefold merges.
    scope: Vec<String>,
    daemon: Option<Running>,
    sampler: Option<Sampler>,
    points: Vec<SamplerPoint>,
    /// Programs that drive KSM, and changed settings. Dropping these ends and undoes them.
    driving: Vec<Box<dyn Any>>,
    pub run: PolicyRun,
}

impl<'a> Stage<'a> {
    /// Sets KSM to the kernel's defaults. We don't sample or merge yet.
    pub fn set(setting: &'a ExperimentSetting<'a>, kernel: &'a mut Kernel, name: &str) -> anyhow::Result<Self> {
        if let Kernel::Ksm(ksm) = kernel {
            ksm.kernel_defaults()?;
        }
        Ok(Self {
            setting,
            kernel,
            processes: Vec::new(),
            scope: Vec::new(),
            daemon: None,
            sampler: None,
            points: Vec::new(),
            driving: Vec::new(),
            run: PolicyRun { policy: name.to_owned(), ..PolicyRun::default() },
        })
    }

    pub fn ksm(&mut self) -> anyhow::Result<&mut KsmForExperiment> {
        match self.kernel {
            Kernel::Ksm(ksm) => Ok(ksm),
            Kernel::Uksm(_) => bail!("this kernel has UKSM in place of KSM"),
        }
    }

    pub fn uksm(&self) -> anyhow::Result<&Uksm> {
        match &*self.kernel {
            Kernel::Uksm(uksm) => Ok(uksm),
            Kernel::Ksm(_) => bail!("this kernel lacks UKSM"),
        }
    }

    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// Keeps something until the run ends.
    pub fn undo_at_end(&mut self, driving: impl Any) {
        self.driving.push(Box::new(driving));
    }

    /// Starts sampling and merging, beside an experiment's own part. pagefold finds the programs by `scope`, and
    /// doesn't start while that selects nothing.
    pub fn merge(&mut self, by: &dyn Policy, scope: &[&str]) -> anyhow::Result<()> {
        self.scope = scope.iter().map(|&option| option.to_owned()).collect();
        self.begin_sampling()?;
        by.drive(self)
    }

    pub fn sleep(&self, seconds: u64) -> anyhow::Result<()> {
        Ok(self.setting.interrupt.sleep(Duration::from_secs(seconds))?)
    }

    fn begin_sampling(&mut self) -> anyhow::Result<()> {
        self.sampler = Some(match self.kernel {
            Kernel::Ksm(_) => Sampler::start()?,
            Kernel::Uksm(uksm) => Sampler::start_uksm(uksm.clone())?,
        });
        Ok(())
    }

    /// Starts pagefold on the programs in its scope.
    pub fn start_pagefold(&mut self, options: &[String]) -> anyhow::Result<()> {
        let pids: Vec<i32> = self.processes.iter().map(Process::pid).collect();
        let daemon = daemon::run(self.setting.program, &pids, &[options, &self.scope].concat())?;
        self.sampler.as_ref().context("nothing is sampled")?.watch(daemon.meter()?);
        self.daemon = Some(daemon);
        Ok(())
    }

    /// The last sample, and whether pagefold ended on its own.
    pub fn pagefold_so_far(&mut self) -> anyhow::Result<(SamplerPoint, bool)> {
        let last = self.sampler.as_ref().context("nothing is sampled")?.last();
        Ok((last, self.daemon.as_mut().context("pagefold does not run")?.has_ended()?))
    }

    /// Stops sampling before we end pagefold, so the samples don't include the cost of its end.
    pub fn stop_sampling(&mut self) -> anyhow::Result<()> {
        if let Some(sampler) = self.sampler.take() {
            self.points = sampler.finish()?;
        }
        Ok(())
    }

    /// Ends the policy and the samples, and unmerges everything.
    pub fn end(&mut self) -> anyhow::Result<()> {
        self.end_policy()?;
        self.run.set_own_samples(&self.points);
        self.kernel.unmerge()
    }

    /// Ends the policy and the samples. No other child may have ended meanwhile, so that we know all of pagefold's CPU
    /// time. Memory stays merged.
    pub fn end_alone(&mut self) -> anyhow::Result<()> {
        self.run.cpu_pagefold_seconds = self.end_policy()?;
        self.run.set_samples(&self.points);
        Ok(())
    }

    pub fn unmerge(&mut self) -> anyhow::Result<()> {
        self.kernel.unmerge()
    }

    /// Notes whether the targets gave the right answers, in an experiment that asks them once.
    pub fn answered(&mut self, right: bool) {
        self.run.answers_correct = Answers { before: true, during: right, after: right };
    }

    /// Returns the CPU time of pagefold and of other children that ended since it began.
    fn end_policy(&mut self) -> anyhow::Result<f64> {
        self.driving.clear();
        let mut cpu_seconds = 0.0;
        if let Some(daemon) = self.daemon.take() {
            let completed = daemon.end(self.setting.interrupt)?;
            cpu_seconds = completed.cpu_seconds;
            self.run.summary = Some(completed.summary);
        }
        self.stop_sampling()?;
        Ok(cpu_seconds)
    }

    /// Runs a policy on unmarked targets and unmerges everything afterwards. The marks stay until the targets end.
    /// `expected` are the targets' correct answers; with `exact` we sample their page tables.
    pub fn run_on(
        &mut self,
        policy: &dyn Policy,
        targets: &mut [Box<dyn Target>],
        expected: &[Option<String>],
        exact: bool,
    ) -> anyhow::Result<()> {
        let before = agree(expected, &answers(targets));
        self.processes = open_all(targets.iter().map(|target| target.pid()))?;
        let counters_before = counters(targets)?;
        let in_page_tables = if exact { Some(page_tables::watch(&self.processes)?) } else { None };
        self.mark(policy.marks())?;
        self.begin_sampling()?;
        self.run.began = Some(Instant::now());
        policy.drive(self)?;
        self.end_alone()?;
        self.run.counters = counters_before.into_iter().zip(counters(targets)?).collect();
        if let Some(in_page_tables) = in_page_tables {
            self.run.set_page_table_samples(in_page_tables.finish()?);
        }
        let during = agree(expected, &answers(targets));
        self.unmerge()?;
        self.run.answers_correct = Answers { before, during, after: agree(expected, &answers(targets)) };
        Ok(())
    }

    fn mark(&mut self, marks: Marks) -> anyhow::Result<()> {
        let mut marked = 0;
        match marks {
            Marks::None => return Ok(()),
            Marks::Everything => {
                for process in &self.processes {
                    marked += mark_eligible(process)?;
                }
            }
            Marks::Duplicates => {
                let knowledge = oracle::survey(&self.processes)?;
                self.run.savable_bytes = Some(knowledge.savable.0);
                for (process, spans) in self.processes.iter().zip(&knowledge.spans) {
                    marked += mark(process, spans)?;
                }
            }
        }
        self.run.marked_bytes = Some(marked);
        Ok(())
    }
}

fn counters(targets: &mut [Box<dyn Target>]) -> anyhow::Result<Vec<ActivityCounters>> {
    targets.iter_mut().filter_map(|target| target.counters().transpose()).collect()
}
