//! The experiments. Each measures one claim on programs that it starts.

#[macro_use]
mod sizes;

mod build;
mod clones;
mod containers;
mod cow_breaker;
mod governors;
mod hash;
mod huge;
mod idle;
mod mapper;
mod mix;
mod neighbours;
pub(crate) mod numa;
mod on_request;
mod overcommit;
mod pairs;
mod programs_on_request;
mod real_programs;
mod recall;
mod rounds;
mod scan;
mod short_lived;
mod simulated;
mod static_mix;
mod tails;
mod vms;
mod workers;

use crate::bench::guest::{self, GuestKernel, GuestMachine};
use crate::bench::metric::CPU_VS;
use crate::bench::policy::uksm::Uksm;
use crate::bench::policy::{
    GovernedUksm, KSM_EVERYTHING, Kernel, KsmAdvisor, KsmPaced, Ksmtuned, Policy, SUBJECT, Stage, UksmdRules,
};
use crate::bench::report::{ExperimentReport, Failure, Limit, MachineDescription, PolicyRun};
use crate::interrupt::Interrupt;
use crate::programs::{Notes, Target, answers};
use crate::tenant::{Segment, Tenant, TenantSpec, Verdict};
use anyhow::ensure;
use pagefold_engine::permutation::Permutation;
use pagefold_engine::units::{PAGE_SIZE, Pages};
use pagefold_ksm::request::DEVICE;
use rounds::sort_runs;
use std::path::Path;

/// The programs whose memory an experiment merges.
type Targets = Vec<Box<dyn Target>>;

/// The options that all experiments share.
#[derive(Clone, Copy, Debug)]
pub struct ExperimentSetting<'a> {
    pub program: &'a Path,
    /// The program that plays the tenants: `pagefold-lab`.
    pub player: &'a Path,
    /// Run small and short, to check that everything works. We don't judge speed then.
    pub quick: bool,
    pub all_peers: bool,
    /// Run the experiment in an emulated machine with this kernel. Without one, it runs here.
    pub guest: Option<&'a GuestKernel>,
    /// The experiment emulates this machine: do only the part that must run there.
    pub emulated: bool,
    /// Run only these policies; empty: all.
    pub policies: &'a [String],
    /// The seed for the order of policies. Without it they run as listed.
    pub order: Option<u64>,
    /// Stops the experiment on a signal.
    pub interrupt: &'a Interrupt,
}

#[derive(Clone, Copy)]
pub struct Experiment {
    pub name: &'static str,
    pub claim: &'static str,
    pub run: fn(&ExperimentSetting<'_>, &mut ExperimentReport) -> anyhow::Result<()>,
}

pub const EXPERIMENTS: [Experiment; 28] = [
    static_mix::EXPERIMENT,
    tails::EXPERIMENT,
    pairs::EXPERIMENT,
    cow_breaker::EXPERIMENT,
    short_lived::EXPERIMENT,
    clones::EXPERIMENT,
    idle::EXPERIMENT,
    governors::EXPERIMENT,
    mapper::EXPERIMENT,
    real_programs::EXPERIMENT,
    real_programs::MIXED_HOST,
    recall::EXPERIMENT,
    mix::EXPERIMENT,
    workers::EXPERIMENT,
    neighbours::EXPERIMENT,
    vms::EXPERIMENT,
    vms::OVERCOMMITTED,
    containers::EXPERIMENT,
    build::EXPERIMENT,
    huge::EXPERIMENT,
    overcommit::EXPERIMENT,
    scan::EXPERIMENT,
    hash::EXPERIMENT,
    simulated::CLASSES,
    simulated::FORESTS,
    numa::EXPERIMENT,
    on_request::EXPERIMENT,
    programs_on_request::EXPERIMENT,
];

impl Experiment {
    pub fn named(name: &str) -> Option<&'static Self> {
        EXPERIMENTS.iter().find(|experiment| experiment.name == name)
    }

    /// A feature that the experiment needs and this machine lacks, if there is one. An emulated machine may have it.
    pub fn lacks(&self) -> Option<&'static str> {
        let is_on_request = [on_request::EXPERIMENT.name, programs_on_request::EXPERIMENT.name].contains(&self.name);
        (is_on_request && !Path::new(DEVICE).exists())
            .then_some("this kernel does not merge on request; --in-guest runs it on one that does")
    }

    /// Runs the experiment, in an emulated machine if one was asked for, and fills in the report.
    pub fn conduct(&self, setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
        match setting.guest {
            // This experiment brings its own machine.
            Some(kernel) if self.name != numa::EXPERIMENT.name => {
                eprintln!("{}: in an emulated machine", self.name);
                *report = guest::run(setting, kernel, &self.machine(setting.quick)?, report)?;
            }
            _ => {
                (self.run)(setting, report)?;
                report.bar_on_answers();
            }
        }
        Ok(())
    }

    /// The emulated machine that the experiment needs.
    fn machine(&self, quick: bool) -> anyhow::Result<GuestMachine> {
        match self.name {
            name if name == idle::EXPERIMENT.name => Ok(idle::machine(quick)),
            name if name == programs_on_request::EXPERIMENT.name => programs_on_request::machine(quick),
            _ => Ok(GuestMachine::small(quick)),
        }
    }
}

impl ExperimentSetting<'_> {
    /// Starts a tenant that holds one segment.
    fn tenant(&self, segment: Segment) -> anyhow::Result<Box<dyn Target>> {
        Ok(Box::new(Tenant::start(self.player, &TenantSpec::new([segment]))?))
    }

    /// Starts a tenant and its activity.
    fn active_tenant(&self, spec: &TenantSpec) -> anyhow::Result<Box<dyn Target>> {
        let mut tenant = Tenant::start(self.player, spec)?;
        tenant.begin()?;
        Ok(Box::new(tenant))
    }

    /// Starts a tenant for each segment.
    fn tenants(&self, segments: &[Segment]) -> anyhow::Result<Targets> {
        segments.iter().map(|&segment| self.tenant(segment)).collect()
    }

    /// Adds further peers to an experiment's policies, if the user asked for them: everything marked, at the kernel's
    /// default rate, as systemd's `MemoryKSM=` leaves KSM; other fixed rates; the kernel's advisor, also at its cap;
    /// ksmtuned; and uksmd's rules. We skip names that the experiment has already. On a kernel with UKSM, we always add
    /// its governors: nothing else can run there.
    fn add_further_peers(&self, policies: &mut Vec<Box<dyn Policy>>, seconds: u64) {
        let peers: Vec<Box<dyn Policy>> = if Uksm::of_kernel().is_some() {
            GovernedUksm::all(seconds)
        } else if !self.all_peers || (self.quick && self.policies.is_empty()) {
            // A quick run only takes peers asked for by name.
            Vec::new()
        } else {
            vec![
                Box::new(KsmPaced { pages: 100, seconds }),
                Box::new(KsmPaced { pages: 1000, seconds }),
                Box::new(KsmPaced { pages: 2000, seconds }),
                Box::new(KsmAdvisor { at_cap: false, seconds }),
                Box::new(KsmAdvisor { at_cap: true, seconds }),
                Box::new(Ksmtuned { always: false, seconds }),
                Box::new(Ksmtuned { always: true, seconds }),
                Box::new(UksmdRules { seconds }),
            ]
        };
        for peer in peers {
            if policies.iter().all(|policy| policy.name() != peer.name()) {
                policies.push(peer);
            }
        }
    }

    /// Whether the user asked for a policy, by its name or the name's first word.
    fn wants(&self, policy: &str) -> bool {
        let first = policy.split(' ').next();
        self.policies.is_empty() || self.policies.iter().any(|name| name == policy || Some(name.as_str()) == first)
    }
}

/// Fails if less memory is available than an experiment needs.
fn need_memory(mebibytes: u64) -> anyhow::Result<()> {
    let free = MachineDescription::available_mib();
    ensure!(free >= mebibytes, "needs {mebibytes} MiB of memory, but only {free} MiB are available");
    Ok(())
}

/// The number of pages in some mebibytes.
const fn mib(mebibytes: u64) -> Pages {
    Pages(mebibytes * (1 << 20) / PAGE_SIZE as u64)
}

/// The items in an order set by the key, so that a slow change on the machine doesn't hit the same items in each round.
/// Without a key, they keep their order.
pub(crate) fn shuffled<T>(items: &[T], key: Option<u64>) -> Vec<&T> {
    let Some(key) = key else { return items.iter().collect() };
    let order = Permutation::new(items.len() as u64, key);
    let mut found = Vec::new();
    for at in 0..items.len() as u64 {
        found.extend(items.get(usize::try_from(order.at(at)).unwrap_or(usize::MAX)));
    }
    found
}

/// One value divided by another, if we have both.
fn quotient(own: Option<f64>, peers: Option<f64>) -> Option<f64> {
    Some(own? / peers?)
}

/// A program's notes from before a policy and while it merged. The last note is from afterwards.
fn before_and_during<T: Clone>(notes: &Notes<T>) -> Option<[T; 2]> {
    match &notes.borrow()[..] {
        [.., before, during, _] => Some([before.clone(), during.clone()]),
        _ => None,
    }
}

/// Whether every byte of these tenants is as written.
fn are_intact<'a>(tenants: impl IntoIterator<Item = &'a mut Tenant>) -> anyhow::Result<bool> {
    let mut intact = true;
    for tenant in tenants {
        intact &= tenant.verify()? == Verdict::Intact;
    }
    Ok(intact)
}

/// Adds the bars on pagefold's savings and CPU time relative to KSM's when it scans everything.
fn bar_on_everything(report: &mut ExperimentReport, saved: Option<f64>, saved_at_least: f64, cpu_at_most: f64) {
    report.bar("savings relative to KSM scanning everything", Limit::AtLeast(saved_at_least), saved);
    let cpu = report.ratio(CPU_VS, KSM_EVERYTHING);
    report.bar("CPU time relative to KSM scanning everything", Limit::AtMost(cpu_at_most), cpu);
}

/// Runs each policy on freshly started targets, since nobody can remove marks from outside, and compares pagefold with
/// the others.
fn side_by_side(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    policies: &[Box<dyn Policy>],
    start: impl Fn() -> anyhow::Result<Targets>,
) -> anyhow::Result<()> {
    let mut sequence = PolicySequence::on(setting, Kernel::take(setting.interrupt)?);
    for policy in shuffled(policies, setting.order) {
        sequence.run(report, &**policy, &start)?;
    }
    sort_runs(report, policies, 1);
    report.compare(SUBJECT);
    Ok(())
}

/// Policies that use KSM one after the other.
struct PolicySequence<'a> {
    setting: &'a ExperimentSetting<'a>,
    kernel: Kernel,
    /// The targets' answers at the first check.
    expected: Option<Vec<Option<String>>>,
    /// Whether to sample the targets' page tables.
    exact: bool,
}

impl<'a> PolicySequence<'a> {
    /// Takes control of KSM.
    fn take(setting: &'a ExperimentSetting<'a>) -> anyhow::Result<Self> {
        Ok(Self::on(setting, Kernel::take_ksm(setting.interrupt)?))
    }

    fn on(setting: &'a ExperimentSetting<'a>, kernel: Kernel) -> Self {
        Self { setting, kernel, expected: None, exact: false }
    }

    /// Runs a policy if the user asked for it and this kernel supports it, and adds the run to the report. The targets
    /// must give the same answers as they did under the first policy.
    fn run<'r>(
        &mut self,
        report: &'r mut ExperimentReport,
        policy: &dyn Policy,
        start: impl FnOnce() -> anyhow::Result<Targets>,
    ) -> anyhow::Result<Option<&'r mut PolicyRun>> {
        let name = policy.name();
        if !policy.runs_on(&self.kernel) || !self.begins(report, &name, &name) {
            return Ok(None);
        }
        let mut targets = start()?;
        let expected = self.expected.get_or_insert_with(|| answers(&mut targets)).clone();
        let exact = self.exact;
        let done = self.perform(report, &name, |stage| stage.run_on(policy, &mut targets, &expected, exact))?;
        Ok(if done.is_some() { report.runs.last_mut() } else { None })
    }

    /// Runs an experiment's own part beside a policy, if the user asked for the policy, and adds the run to the report
    /// under `name`. Returns the part's other results.
    fn conduct<T>(
        &mut self,
        report: &mut ExperimentReport,
        policy: &str,
        name: &str,
        act: impl FnOnce(&mut Stage<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        if self.begins(report, policy, name) { self.perform(report, name, act) } else { Ok(None) }
    }

    /// Announces the policy, if the user asked for it.
    fn begins(&self, report: &ExperimentReport, policy: &str, name: &str) -> bool {
        let is_wanted = self.setting.wants(policy);
        if is_wanted {
            eprintln!("{}: {name}", report.experiment);
        }
        is_wanted
    }

    /// Adds a run to the report, or its failure; after a failure, nothing is merged. Returns the other results.
    fn perform<T>(
        &mut self,
        report: &mut ExperimentReport,
        name: &str,
        act: impl FnOnce(&mut Stage<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        let acted = Stage::set(self.setting, &mut self.kernel, name).and_then(|mut stage| {
            let measured = act(&mut stage)?;
            Ok((stage.run, measured))
        });
        match acted {
            Ok((run, measured)) => {
                report.runs.push(run);
                Ok(Some(measured))
            }
            Err(error) => {
                self.kernel.unmerge()?;
                self.setting.interrupt.check()?;
                eprintln!("{}: {name}: {error:#}", report.experiment);
                report.failures.push(Failure { policy: name.to_owned(), error: format!("{error:#}") });
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_report_knows_every_experiment() {
        assert_eq!(super::EXPERIMENTS.map(|experiment| experiment.name), crate::bench::results::NAMES);
    }

    #[test]
    fn an_order_follows_from_its_key_and_has_everything_once() {
        let items: Vec<u32> = (0..7).collect();
        let order = |key| super::shuffled(&items, key).into_iter().copied().collect::<Vec<u32>>();
        assert_eq!(order(None), items);
        assert_eq!(order(Some(3)), order(Some(3)));
        let orders: std::collections::BTreeSet<Vec<u32>> = (0..20).map(|key| order(Some(key))).collect();
        assert!(orders.len() > 15, "{orders:?}");
        for mut order in orders {
            order.sort_unstable();
            assert_eq!(order, items);
        }
    }
}
