//! Compares finding and merging together across the ways to merge: KSM's own scanning, pagefold with ksmd, pagefold on
//! request. Needs a kernel with `/dev/ksm`, which `--in-guest` brings; there, CPU seconds are counted instructions. On
//! a kernel with UKSM, we run its governors.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::page_tables::{self, most_and_mean};
use crate::bench::policy::ksm::{KSM_PAGES, mark_eligible};
use crate::bench::policy::{Enough, GovernedUksm, Kernel, KsmEverything, KsmPaced, Marks, Pagefold, Policy, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit, PolicyRun};
use crate::programs::Target;
use pagefold_engine::units::{Bytes, Pages, whole};
use pagefold_procmem::process::Process;
use pagefold_workload::{Activity, Segment, Tenant, TenantSpec, Verdict};
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
    /// One tenant holds each.
    segments: Vec<Segment>,
    /// Pages that merging all duplicates frees.
    savable: u64,
    /// Whether a further tenant rewrites memory of the same content.
    rewriting: bool,
    /// The target for merging on request: MiB a CPU second and seconds, to 90 %.
    at_least: f64,
    within: Option<f64>,
}

fn works(scale: u64) -> Vec<Work> {
    let pages = |mebibytes: u64| mib(mebibytes).0 / scale;
    let random = Segment::Random { pages: pages(256), seed: 2 };
    let same = |mebibytes| Segment::Same { pages: pages(mebibytes), seed: 1 };
    let (pair, alone) = (pages(192), Segment::Random { pages: pages(192), seed: 12 });
    let thin = |name, percent, at_least, within| Work {
        name,
        segments: vec![Segment::Thin { pages: pages(384), seed: 14, percent }],
        savable: pages(384) * percent / 100,
        rewriting: false,
        at_least,
        within,
    };
    vec![
        Work {
            name: "one content",
            segments: vec![same(256), random],
            savable: pages(256),
            rewriting: false,
            at_least: 950.0,
            within: Some(1.5),
        },
        Work {
            name: "pairs",
            segments: vec![
                Segment::Shared { pages: pair, seed: 11 },
                Segment::Permuted { pages: pair, seed: 11 },
                alone,
                alone,
            ],
            savable: pair,
            rewriting: false,
            at_least: 250.0,
            within: Some(1.5),
        },
        Work {
            name: "rewritten",
            segments: vec![same(128), random],
            savable: pages(128),
            rewriting: true,
            at_least: 950.0,
            within: None,
        },
        thin("thin, 8 %", 8, 150.0, Some(10.0)),
        thin("thin, 3 %", 3, 60.0, None),
    ]
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (scale, ksm_seconds, seconds) = if setting.quick { (16, 5, 20) } else { (1, 25, 60) };
    report.parameters([("scale", scale), ("seconds_ksm", ksm_seconds), ("seconds", seconds)]);
    let mut sequence = PolicySequence::on(setting, Kernel::take(setting.interrupt)?);
    for work in works(scale) {
        let enough = Enough { saved_bytes: Pages(work.savable).bytes().0 / 10 * 9, seconds: 0 };
        let ours = |options| Pagefold::new(seconds).with(options).until(enough);
        let judged = ours(&JUDGED).name();
        let mut policies = GovernedUksm::all(seconds);
        policies.push(Box::new(KsmPaced { pages: KSM_PAGES, seconds: ksm_seconds }));
        policies.push(Box::new(KsmEverything));
        policies.push(Box::new(ours(&ON_KSMD)));
        policies.push(Box::new(ours(&JUDGED)));
        eprintln!("{}: {}", report.experiment, work.name);
        // The number of answers depends on the tenants.
        sequence.expected = None;
        for policy in &policies {
            let Some(run) = sequence.run(report, &**policy, || start(setting, &work, scale))? else { continue };
            run.policy = format!("{}: {policy}", work.name);
            let run = run.clone();
            let reached = put_figures(report, &run, &work);
            if policy.name() == judged && !setting.quick {
                let name = &run.policy;
                let speed = reached.map_or(0.0, |reached| reached.mib_per_cpu_second);
                report.bar(format!("{name}: MiB a CPU second to 90 %"), Limit::AtLeast(work.at_least), Some(speed));
                if let Some(within) = work.within {
                    let took = reached.map_or(seconds as f64, |reached| reached.seconds);
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

/// The time and efficiency at which we had saved 90 % of the savable memory.
#[derive(Clone, Copy, Debug)]
struct Reached {
    seconds: f64,
    mib_per_cpu_second: f64,
}

/// Adds the figures of a run.
fn put_figures(report: &mut ExperimentReport, run: &PolicyRun, work: &Work) -> Option<Reached> {
    let name = &run.policy;
    let saved = Bytes(run.saved_bytes).mib();
    let point = run.reaching(0.9, Pages(work.savable).bytes().0);
    report.figure(format!("{name}: MiB saved"), saved);
    let point = point?;
    let mib_per_cpu_second = Bytes(point.saved_bytes).mib() / point.cpu_seconds();
    report.figure(format!("{name}: seconds to 90 %"), point.seconds);
    report.figure(format!("{name}: MiB a CPU second to 90 %"), mib_per_cpu_second);
    report.figure(format!("{name}: CPU seconds to 90 %, of pagefold"), point.daemon_seconds);
    Some(Reached { seconds: point.seconds, mib_per_cpu_second })
}

fn start(setting: &ExperimentSetting<'_>, work: &Work, scale: u64) -> anyhow::Result<Vec<Box<dyn Target>>> {
    let mut targets =
        work.segments.iter().map(|&segment| setting.tenant(segment)).collect::<anyhow::Result<Vec<_>>>()?;
    if work.rewriting {
        let spec = TenantSpec::new([Segment::Same { pages: mib(8).0 / scale, seed: 1 }])
            .with_activity(Activity::Breaker { every_us: 10_000 });
        let mut tenant = Tenant::start(setting.player, &spec)?;
        tenant.begin()?;
        targets.push(Box::new(tenant));
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
        let measured = sequence.conduct(report, &by.name(), &name, |stage| succession(stage, by))?;
        let Some((held, cpu_seconds)) = measured else { continue };
        report.figure(format!("{name}: MiB held on average"), held);
        report.figure(format!("{name}: CPU seconds"), cpu_seconds);
        if by.name() == judged.name() && !setting.quick {
            report.bar(format!("{name}: MiB held on average"), Limit::AtLeast(55.0), Some(held));
            report.bar(format!("{name}: CPU seconds"), Limit::AtMost(0.7), Some(cpu_seconds));
        }
    }
    Ok(())
}

/// Runs the programs under pagefold with these options, or under KSM. Returns the memory saved, MiB, and the CPU time.
/// The saving is the average over the programs' lives by their page tables: KSM's counters include ended programs until
/// the next ksmd scan.
fn succession(stage: &mut Stage<'_>, by: &dyn Policy) -> anyhow::Result<(f64, f64)> {
    let (setting, interrupt) = (stage.setting, stage.setting.interrupt);
    let (mebibytes, life, count) = if setting.quick { (8, 3, 2) } else { (64, 16, 4) };
    stage.merge(by, &["--exe", &setting.player.to_string_lossy()])?;
    let by_ksm = by.marks() == Marks::Everything;
    if !by_ksm {
        interrupt.sleep(HEAD_START)?;
    }
    let (mut held, mut intact) = (0.0, true);
    let spec = TenantSpec::new([Segment::Same { pages: mib(mebibytes).0, seed: 1 }]);
    for _ in 0..count {
        let mut tenant = Tenant::start(setting.player, &spec)?;
        let process = Process::open(tenant.pid())?;
        if by_ksm {
            mark_eligible(&process)?;
        }
        let watch = page_tables::watch(&[process])?;
        interrupt.sleep(Duration::from_secs(life))?;
        held += most_and_mean(&watch.finish()?).1;
        intact &= tenant.verify()? == Verdict::Intact;
    }
    stage.end()?;
    let run = &mut stage.run;
    run.forget_curve();
    run.saved_bytes = whole(held / f64::from(count));
    run.answers_correct = Answers { before: true, during: intact, after: intact };
    Ok((Bytes(run.saved_bytes).mib(), run.cpu_seconds))
}
