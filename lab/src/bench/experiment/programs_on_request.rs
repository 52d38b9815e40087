//! Real programs under each way to merge, as [`on_request`](super::on_request) does with made-up memory, and the worst
//! memory for a comparison. Needs a kernel with `/dev/ksm`, which `--in-guest` brings; there, CPU seconds are counted
//! instructions.

use super::on_request::{JUDGED, ON_KSMD};
use super::{Experiment, ExperimentSetting, PolicySequence, Targets, mib, quotient};
use crate::bench::guest::GuestMachine;
use crate::bench::policy::{Enough, KsmEverything, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun};
use crate::programs::{HeldFile, PYTHON, RedisData, Target, python_files, scratch};
use crate::tenant::Segment;
use pagefold_engine::units::Bytes;

pub const EXPERIMENT: Experiment = Experiment {
    name: "programs-on-request",
    claim: "ours: merging on request saves 120 MiB of three Python programs with the same data for 0.35 CPU seconds, and 99 % of \
            what KSM saves of three redis servers for 0.3 of its CPU time; pages that differ only in the last 8 bytes cost no more \
            than random ones",
    run,
};

/// Programs of each kind.
const INSTANCES: usize = 3;

/// The emulated machine.
pub fn machine(quick: bool) -> anyhow::Result<GuestMachine> {
    let (python, files) = python_files()?;
    let programs = vec![(python, "usr/bin/python3"), (RedisData::installed()?, "usr/bin/redis-server")];
    Ok(GuestMachine { programs, files, ..GuestMachine::small(quick) })
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (shared_mib, keys, seconds) = if setting.quick { (4, 1000, 5) } else { (60, 30_000, 20) };
    report.parameters([("python_shared_mib", shared_mib), ("redis_keys", keys), ("seconds", seconds)]);
    let scratch = scratch()?;
    let mut sequence = PolicySequence::take(setting)?;

    let python = HeldFile::make(scratch.path(), shared_mib)?;
    let enough = Enough { saved_bytes: mib(2 * shared_mib).bytes().0, seconds: 0 };
    let ours = Pagefold::new(seconds).until(enough);
    let runs =
        compare(&mut sequence, report, "three Python", ours, |number| Ok(Box::new(python.start(&PYTHON, number)?)))?;
    if let (false, Some(ours)) = (setting.quick, &runs[2]) {
        report.bar("three Python: MiB saved on request", Limit::AtLeast(120.0), Some(Bytes(ours.saved_bytes).mib()));
        report.bar("three Python: CPU seconds on request", Limit::AtMost(0.35), Some(ours.cpu_seconds));
    }

    let redis = RedisData::make(scratch.path(), keys)?;
    let ours = Pagefold::new(seconds);
    let runs = compare(&mut sequence, report, "three redis", ours, |number| {
        Ok(Box::new(redis.start(scratch.path(), number)?))
    })?;
    if let (false, [Some(ksm), _, Some(ours)]) = (setting.quick, &runs) {
        let saved = ours.saved_bytes as f64 / ksm.saved_bytes as f64;
        report.bar("three redis: memory saved relative to KSM", Limit::AtLeast(0.99), Some(saved));
        let reached = ours.reaching(0.99, ksm.saved_bytes);
        let cpu = quotient(reached.map(|point| point.cpu_seconds()), Some(ksm.cpu_seconds));
        report.bar("three redis: CPU time to 99 % of that, relative to KSM", Limit::AtMost(0.3), cpu);
    }

    let pages = mib(if setting.quick { 16 } else { 256 }).0;
    let worst = Pagefold::new(seconds).with(&JUDGED);
    let mut cpu = Vec::new();
    for (name, segment) in
        [("random", Segment::Random { pages, seed: 21 }), ("alike but for 8 bytes", Segment::Tails { pages, seed: 22 })]
    {
        let run = one(&mut sequence, report, name, &worst, || setting.tenants(&[segment]))?;
        cpu.extend(run.map(|run| run.cpu_seconds));
    }
    if let (false, [random, alike]) = (setting.quick, &cpu[..]) {
        let name = "alike but for 8 bytes: CPU time relative to random pages";
        report.bar(name, Limit::AtMost(1.0), Some(alike / random));
    }
    Ok(())
}

/// Runs KSM, and pagefold with ksmd and on request, on freshly started programs.
fn compare(
    sequence: &mut PolicySequence<'_>,
    report: &mut ExperimentReport,
    name: &str,
    ours: Pagefold,
    start: impl Fn(usize) -> anyhow::Result<Box<dyn Target>>,
) -> anyhow::Result<[Option<PolicyRun>; 3]> {
    let mut runs = [const { None }; 3];
    let policies: [&dyn Policy; 3] = [&KsmEverything, &ours.clone().with(&ON_KSMD), &ours.with(&JUDGED)];
    for (run, policy) in runs.iter_mut().zip(policies) {
        *run = one(sequence, report, name, policy, || (0..INSTANCES).map(&start).collect())?;
    }
    Ok(runs)
}

/// Runs a policy on some programs, and reports it under the programs' name.
fn one(
    sequence: &mut PolicySequence<'_>,
    report: &mut ExperimentReport,
    name: &str,
    policy: &dyn Policy,
    start: impl FnOnce() -> anyhow::Result<Targets>,
) -> anyhow::Result<Option<PolicyRun>> {
    sequence.expected = None;
    let Some(run) = sequence.run(report, policy, start)? else { return Ok(None) };
    run.policy = format!("{name}: {policy}");
    Ok(Some(run.clone()))
}
