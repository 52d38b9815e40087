//! Compares finding and merging together across the ways to merge: KSM's own scanning, pagefold with ksmd, pagefold on
//! request. Needs a kernel with `/dev/ksm`, which `--in-guest` brings; there, CPU seconds are counted instructions. On
//! a kernel with UKSM, we run its governors.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, are_intact, mib};
use crate::activity::Activity;
use crate::bench::page_tables::{self, mean_saved_bytes};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{Enough, GovernedUksm, Kernel, KsmEverything, KsmPaced, Marks, Pagefold, Policy, Stage};
use crate::bench::report::{ExperimentReport, Limit};
use crate::tenant::{Segment, Tenant, TenantSpec};
use pagefold_engine::units::{Bytes, Pages, whole};
use pagefold_procmem::process::Process;
use std::time::Duration;

pub const EXPERIMENT: Experiment = Experiment {
    name: "on-request",
    claim: "ours: pagefold merges on request with a fraction of the CPU time that it takes with ksmd, finding included: 950 MiB a \
            CPU second of one content, 250 of contents that exist twice, 150 and 60 where 8 and 3 % of the memory are duplicate",
    run,
};

/// The policy that we judge.
pub(super) const JUDGED: [&str; 4] = ["--governor", "full", "--mechanism", "request"];
pub(super) const ON_KSMD: [&str; 4] = ["--governor", "full", "--mechanism", "ksmd"];

/// pagefold runs for this long before the first of several programs starts.
const HEAD_START: Duration = Duration::from_secs(2);

/// Memory to merge.
struct Work {
    name: &'static str,
    /// The memory of the tenants, one segment for each tenant.
    segments: Vec<Segment>,
    /// Pages that merging all duplicates frees.
    savable: u64,
    /// The target for merging on request, up to 90 % of the savable memory: MiB per CPU second, and seconds.
    at_least: f64,
    within: Option<f64>,
}

/// In the work of this name, a further tenant rewrites memory with the same content.
const REWRITTEN: &str = "rewritten";

/// The works, with `mebi` pages to a mebibyte.
fn works(mebi: u64) -> [Work; 5] {
    let random = Segment::Random { pages: 256 * mebi, seed: 2 };
    let alone = Segment::Random { pages: 192 * mebi, seed: 12 };
    [
        Work {
            name: "one content",
            segments: vec![Segment::Same { pages: 256 * mebi, seed: 1 }, random],
            savable: 256 * mebi,
            at_least: 950.0,
            within: Some(1.5),
        },
        Work {
            name: "pairs",
            segments: vec![
                Segment::Shared { pages: 192 * mebi, seed: 11 },
                Segment::Permuted { pages: 192 * mebi, seed: 11 },
                alone,
                alone,
            ],
            savable: 192 * mebi,
            at_least: 250.0,
            within: Some(1.5),
        },
        Work {
            name: REWRITTEN,
            segments: vec![Segment::Same { pages: 128 * mebi, seed: 1 }, random],
            savable: 128 * mebi,
            at_least: 950.0,
            within: None,
        },
        Work {
            name: "thin, 8 %",
            segments: vec![Segment::Thin { pages: 384 * mebi, seed: 14, percent: 8 }],
            savable: 384 * mebi * 8 / 100,
            at_least: 150.0,
            within: Some(10.0),
        },
        Work {
            name: "thin, 3 %",
            segments: vec![Segment::Thin { pages: 384 * mebi, seed: 14, percent: 3 }],
            savable: 384 * mebi * 3 / 100,
            at_least: 60.0,
            within: None,
        },
    ]
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (scale, ksm_seconds, seconds) = if setting.quick { (16, 5, 20) } else { (1, 25, 60) };
    report.parameters([("scale", scale), ("seconds_ksm", ksm_seconds), ("seconds", seconds)]);
    let mut sequence = PolicySequence::on(setting, Kernel::take(setting.interrupt)?);
    let mebi = mib(1).0 / scale;
    for work in works(mebi) {
        let enough = Enough { saved_bytes: Pages(work.savable).bytes().0 / 10 * 9, seconds: 0 };
        let ours = Pagefold::new(seconds).until(enough);
        let judged = ours.clone().with(&JUDGED);
        let judged_name = judged.name();
        let mut policies = GovernedUksm::all(seconds);
        policies.push(Box::new(KsmPaced { pages: KSM_PAGES, seconds: ksm_seconds }));
        policies.push(Box::new(KsmEverything));
        policies.push(Box::new(ours.with(&ON_KSMD)));
        policies.push(Box::new(judged));
        eprintln!("{}: {}", report.experiment, work.name);
        // The number of answers depends on the tenants.
        sequence.expected = None;
        for policy in &policies {
            let Some(run) = sequence.run(report, &**policy, || start(setting, &work, mebi))? else { continue };
            run.policy = format!("{}: {policy}", work.name);
            let name = run.policy.clone();
            let saved = Bytes(run.saved_bytes).mib();
            let reached = run.reaching(0.9, Pages(work.savable).bytes().0);
            report.figure(format!("{name}: MiB saved"), saved);
            let mut took = seconds as f64;
            let mut speed = 0.0;
            if let Some(point) = reached {
                took = point.seconds;
                speed = Bytes(point.saved_bytes).mib() / point.cpu_seconds();
                report.figure(format!("{name}: seconds to 90 %"), took);
                report.figure(format!("{name}: MiB a CPU second to 90 %"), speed);
                report.figure(format!("{name}: CPU seconds to 90 %, of pagefold"), point.daemon_seconds);
            }
            if policy.name() == judged_name && !setting.quick {
                report.bar(format!("{name}: MiB a CPU second to 90 %"), Limit::AtLeast(work.at_least), Some(speed));
                if let Some(within) = work.within {
                    report.bar(format!("{name}: seconds to 90 %"), Limit::AtMost(within), Some(took));
                }
            }
        }
    }
    if setting.emulated {
        successors(setting, &mut sequence, report)?;
    }
    Ok(())
}

fn start(setting: &ExperimentSetting<'_>, work: &Work, mebi: u64) -> anyhow::Result<Targets> {
    let mut targets = setting.tenants(&work.segments)?;
    if work.name == REWRITTEN {
        let segment = Segment::Same { pages: 8 * mebi, seed: 1 };
        let spec = Activity::Breaker { every_us: 10_000 }.of_tenant([segment]);
        targets.push(setting.active_tenant(&spec)?);
    }
    Ok(targets)
}

/// Starts programs one after another, each with memory of one content for some seconds. pagefold finds them by their
/// executable, this program's, so we only do this in an emulated machine.
fn successors(
    setting: &ExperimentSetting<'_>,
    sequence: &mut PolicySequence<'_>,
    report: &mut ExperimentReport,
) -> anyhow::Result<()> {
    let judged = Pagefold::new(0).with(&JUDGED);
    let policies: [&dyn Policy; 3] =
        [&KsmPaced { pages: KSM_PAGES, seconds: 0 }, &Pagefold::new(0).with(&ON_KSMD), &judged];
    for by in policies {
        let name = format!("successors: {by}");
        let held = sequence.conduct(report, &by.name(), &name, |stage| succession(stage, by))?;
        let (Some(held), Some(run)) = (held, report.runs.last()) else { continue };
        let cpu_seconds = run.cpu_seconds;
        report.figure(format!("{name}: MiB held on average"), held);
        report.figure(format!("{name}: CPU seconds"), cpu_seconds);
        if by.name() == judged.name() && !setting.quick {
            report.bar(format!("{name}: MiB held on average"), Limit::AtLeast(55.0), Some(held));
            report.bar(format!("{name}: CPU seconds"), Limit::AtMost(0.7), Some(cpu_seconds));
        }
    }
    Ok(())
}

/// Runs the programs under pagefold with these options, or under KSM. Returns the memory saved, MiB: the average over
/// the programs' lives by their page tables, since KSM's counters include ended programs until the next ksmd scan.
fn succession(stage: &mut Stage<'_>, by: &dyn Policy) -> anyhow::Result<f64> {
    let setting = stage.setting;
    let interrupt = setting.interrupt;
    let (mebibytes, life, count) = if setting.quick { (8, 3, 2) } else { (64, 16, 4) };
    stage.merge(by, &["--exe", &setting.player.to_string_lossy()])?;
    if by.marks() == Marks::None {
        interrupt.sleep(HEAD_START)?;
    }
    let mut held = 0.0;
    let mut intact = true;
    let spec = TenantSpec::new([Segment::Same { pages: mib(mebibytes).0, seed: 1 }]);
    for _ in 0..count {
        let mut tenant = Tenant::start(setting.player, &spec)?;
        by.mark_new(tenant.pid())?;
        let watch = page_tables::watch(&[Process::open(tenant.pid())?])?;
        interrupt.sleep(Duration::from_secs(life))?;
        held += mean_saved_bytes(&watch.finish()?);
        intact &= are_intact([&mut tenant])?;
    }
    stage.end()?;
    stage.run.forget_curve();
    stage.run.saved_bytes = whole(held / f64::from(count));
    stage.answered(intact);
    Ok(Bytes(stage.run.saved_bytes).mib())
}
