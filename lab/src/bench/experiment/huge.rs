//! Merging splits huge pages: how much we save for each split, and how much a program that looks up scattered pages
//! slows down.

use super::{Experiment, ExperimentSetting, PolicySequence, mib};
use crate::bench::measures::median;
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{Notes, Observed};
use anyhow::{Context, ensure};
use pagefold_procmem::maps::read_smaps;
use pagefold_procmem::os::fields::{chosen, number};
use pagefold_procmem::process::Process;
use pagefold_workload::{Segment, Tenant, TenantSpec};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

pub const EXPERIMENT: Experiment = Experiment {
    name: "huge",
    claim: "ours: on memory in huge pages pagefold saves at least 95 % of what KSM saves by scanning everything, for at most half as \
            many huge pages split",
    run,
};

/// Programs with each kind of memory.
const TENANTS: usize = 2;
const HUGE_MIB: u64 = 2;
const TENTHS: u32 = 10;
/// Memory with the same contents in both tenants, memory found nowhere else, and memory with one content in 5 of a huge
/// page's 512 pages.
const KINDS: [&str; 3] = ["duplicate", "unique", "1 % duplicate"];
/// Every kind in a program of its own, or all kinds in one mapping of each program.
const LAYOUTS: [&str; 2] = ["", " in one mapping"];
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

#[derive(Clone, Debug)]
struct Check {
    /// Memory in huge pages.
    huge_mib: f64,
    /// Nanoseconds per read at the fastest, by kind of memory.
    ns: Vec<(&'static str, f64)>,
    /// Huge pages split on the whole machine since boot: into base pages, and in page tables.
    split_pages: f64,
    split_mappings: f64,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (unit_mib, seconds, reading_ms) = if setting.quick { (16, 4, 100) } else { (128, 60, 2000) };
    report.parameters([
        ("duplicate_mib", unit_mib),
        ("unique_mib", unit_mib),
        ("thin_mib", 2 * unit_mib),
        ("seconds", seconds),
        ("reading_ms", reading_ms),
    ]);
    let enabled = fs::read_to_string(ENABLED).context(ENABLED)?;
    ensure!(chosen(&enabled) != Some("never"), "{ENABLED} is never: this experiment needs madvise or always");
    let pages = mib(unit_mib).0;
    let segments = [
        Segment::Shared { pages, seed: 1 },
        Segment::Random { pages, seed: 2 },
        Segment::Thin { pages: 2 * pages, seed: 3, percent: 1 },
    ];
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(KsmEverything), Box::new(Pagefold::new(seconds))];
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    for layout in LAYOUTS {
        let programs: Vec<Vec<(&'static str, Segment)>> = if layout.is_empty() {
            KINDS.into_iter().zip(segments).map(|kind| vec![kind]).collect()
        } else {
            vec![KINDS.into_iter().zip(segments).collect()]
        };
        // One entry for each tenant of each policy.
        let seen: RefCell<Vec<Notes<Check>>> = RefCell::default();
        let start = || {
            let programs = programs.iter().cycle().take(programs.len() * TENANTS);
            programs
                .map(|held| {
                    let (kinds, segments): (Vec<_>, Vec<_>) = held.iter().copied().unzip();
                    let tenant = Tenant::start(setting.player, &TenantSpec::new(segments).with_huge_pages())?;
                    let reading = Duration::from_millis(reading_ms);
                    let (observed, checks) =
                        Observed::start(Box::new(tenant), move |tenant: &mut Tenant| look(tenant, &kinds, reading));
                    seen.borrow_mut().push(checks);
                    Ok(observed)
                })
                .collect()
        };
        let mut split = BTreeMap::new();
        for policy in &policies {
            let run = sequence.run(report, &**policy, start)?;
            let checks: Vec<Vec<Check>> = seen.take().iter().map(|checks| checks.borrow().clone()).collect();
            let Some(run) = run else { continue };
            run.beside(layout);
            let name = run.policy.clone();
            let lost = put_figures(report, &name, &checks).with_context(|| format!("{name}: a check is missing"))?;
            split.insert(name.clone(), lost);
            rows.push((name, lost));
        }
        // The next programs are different ones.
        sequence.expected = None;
        let [ours, everything] = [SUBJECT, KSM_EVERYTHING].map(|policy| format!("{policy}{layout}"));
        if layout.is_empty() {
            report.compare(SUBJECT);
        }
        if !setting.quick {
            let theirs = split.get(&everything).copied().filter(|split| *split > 0.0);
            let relative = split.get(&ours).copied().zip(theirs).map(|(ours, theirs)| ours / theirs);
            let saved = |policy: &str| report.run(policy).map(|run| run.saved_bytes as f64);
            let saved = saved(&ours).zip(saved(&everything)).map(|(ours, theirs)| ours / theirs);
            report.bar(format!("savings relative to KSM scanning everything{layout}"), Limit::AtLeast(0.95), saved);
            report.bar(
                format!("huge pages split relative to KSM scanning everything{layout}"),
                Limit::AtMost(0.5),
                relative,
            );
        }
    }
    let all = TENANTS as u64 * 4 * unit_mib / HUGE_MIB;
    report.picture("huge pages split", format!("of {all}, in {} MiB of programs", all * HUGE_MIB), rows);
    Ok(())
}

/// Adds a policy's effects, and returns how many of the tenants' huge pages it has split. `None` if a check is missing.
fn put_figures(report: &mut ExperimentReport, policy: &str, tenants: &[Vec<Check>]) -> Option<f64> {
    let (mut before, mut during) = (Vec::new(), Vec::new());
    for checks in tenants {
        let [.., first, second, _] = &checks[..] else { return None };
        before.push(first);
        during.push(second);
    }
    let huge = |checks: &[&Check]| checks.iter().map(|check| check.huge_mib).sum::<f64>();
    let (had, has) = (huge(&before), huge(&during));
    report.figure(format!("{policy}: MiB in huge pages before"), had);
    report.figure(format!("{policy}: MiB in huge pages afterwards"), has);
    let (from, to) = (before.last()?, during.first()?);
    report.figure(format!("{policy}: huge pages split on the machine"), to.split_pages - from.split_pages);
    report.figure(format!("{policy}: their mappings split"), to.split_mappings - from.split_mappings);
    for kind in KINDS {
        let ns = |checks: &[&Check]| {
            let all = checks.iter().flat_map(|check| &check.ns).filter(|(of, _)| *of == kind);
            median(all.map(|(_, ns)| *ns))
        };
        report.figure(format!("{policy}: ns a read before, {kind}"), ns(&before));
        report.figure(format!("{policy}: ns a read afterwards, {kind}"), ns(&during));
    }
    Some((had - has) / HUGE_MIB as f64)
}

/// Notes a tenant's huge pages and its speed.
fn look(tenant: &mut Tenant, kinds: &[&'static str], reading: Duration) -> anyhow::Result<Check> {
    let vmstat = fs::read("/proc/vmstat")?;
    let events = |key| number::<u64>(&vmstat, key).map_err(|why| anyhow::anyhow!("/proc/vmstat: {key}: {why}"));
    let kib: u64 = read_smaps(&Process::open(tenant.pid())?)?.iter().map(|detail| detail.anon_huge_kib).sum();
    Ok(Check {
        huge_mib: kib as f64 / 1024.0,
        split_pages: events("thp_split_page")? as f64,
        split_mappings: events("thp_split_pmd")? as f64,
        ns: fastest(tenant, kinds, reading)?,
    })
}

/// Nanoseconds per read in each segment, in the fastest tenth of the time: other programs can only slow it down.
fn fastest(tenant: &mut Tenant, kinds: &[&'static str], reading: Duration) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let mut least: Vec<_> = kinds.iter().map(|&kind| (kind, f64::MAX)).collect();
    for _ in 0..TENTHS {
        let now = tenant.chase(reading / TENTHS)?;
        least.iter_mut().zip(now).for_each(|((_, least), now)| *least = least.min(now));
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::float_cmp)] // exact results
    fn splits_are_those_of_the_tenants() {
        let check = |huge_mib, split, ns: f64| Check {
            huge_mib,
            ns: KINDS.map(|kind| (kind, ns)).to_vec(),
            split_pages: split,
            split_mappings: split + 1.0,
        };
        let mut report = ExperimentReport::new("huge", "");
        let tenants = [(); 2].map(|()| {
            vec![check(99.0, 1.0, 1.0), check(100.0, 7.0, 5.0), check(60.0, 40.0, 9.0), check(60.0, 41.0, 9.0)]
        });
        assert_eq!(put_figures(&mut report, "p", &tenants), Some(40.0));
        assert_eq!(report.figures["p: MiB in huge pages afterwards"], 120.0);
        assert_eq!(report.figures["p: huge pages split on the machine"], 33.0);
        assert_eq!(report.figures["p: ns a read afterwards, unique"], 9.0);
        assert_eq!(put_figures(&mut report, "p", &[vec![check(1.0, 0.0, 1.0), check(1.0, 0.0, 1.0)]]), None);
    }
}
