//! Merging splits huge pages: how much we save for each split, and how much a program that looks up scattered pages
//! slows down.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, before_and_during, mib};
use crate::bench::events::{EventReader, KernelEvents};
use crate::bench::measures::median;
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{Notes, Observed};
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::{Context, ensure};
use pagefold_procmem::maps::read_smaps;
use pagefold_procmem::os::fields::chosen;
use pagefold_procmem::process::Process;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
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
static KINDS: [&str; 3] = ["duplicate", "unique", "1 % duplicate"];
/// Every kind in a program of its own, or all kinds in one mapping of each program.
const LAYOUTS: [&str; 2] = ["", " in one mapping"];
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

type ByKind = BTreeMap<&'static str, f64>;

#[derive(Clone, Debug)]
struct Check {
    /// Memory in huge pages.
    huge_mib: f64,
    /// Nanoseconds per read at the fastest, by kind of memory.
    ns: ByKind,
    /// On the whole machine since boot.
    events: KernelEvents,
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
    let reading = Duration::from_millis(reading_ms);
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(KsmEverything), Box::new(Pagefold::new(seconds))];
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut rows = Vec::new();
    for layout in LAYOUTS {
        // Each layout has other programs, whose answers differ from the last layout's.
        sequence.expected = None;
        let mut split = BTreeMap::new();
        for policy in &policies {
            let mut notes = Vec::new();
            let run = sequence.run(report, &**policy, || start(setting, unit_mib, layout, reading, &mut notes))?;
            let Some(run) = run else { continue };
            run.beside(layout);
            let name = run.policy.clone();
            let lost = put_figures(report, &name, &notes).with_context(|| format!("{name}: a check is missing"))?;
            split.insert(name.clone(), lost);
            rows.push((name, lost));
        }
        if layout.is_empty() {
            report.compare(SUBJECT);
        }
        if !setting.quick {
            put_bars(report, layout, &split);
        }
    }
    let all = TENANTS as u64 * 4 * unit_mib / HUGE_MIB;
    report.picture("huge pages split", format!("of {all}, in {} MiB of programs", all * HUGE_MIB), rows);
    Ok(())
}

/// Starts the programs of a layout, and adds the notes of each.
fn start(
    setting: &ExperimentSetting<'_>,
    unit_mib: u64,
    layout: &str,
    reading: Duration,
    notes: &mut Vec<Notes<Check>>,
) -> anyhow::Result<Targets> {
    let pages = mib(unit_mib).0;
    let segments = [
        Segment::Shared { pages, seed: 1 },
        Segment::Random { pages, seed: 2 },
        Segment::Thin { pages: 2 * pages, seed: 3, percent: 1 },
    ];
    let together = if layout.is_empty() { 1 } else { KINDS.len() };
    let mut targets = Targets::new();
    for _ in 0..TENANTS {
        for (kinds, segments) in KINDS.chunks(together).zip(segments.chunks(together)) {
            let spec = TenantSpec::new(segments.iter().copied()).with_huge_pages();
            let tenant = Box::new(Tenant::start(setting.player, &spec)?);
            let (observed, checks) = Observed::start(tenant, move |tenant| look(tenant, kinds, reading));
            targets.push(observed);
            notes.push(checks);
        }
    }
    Ok(targets)
}

/// Adds a policy's effects, and returns how many of the tenants' huge pages it has split. `None` if a check is missing.
fn put_figures(report: &mut ExperimentReport, policy: &str, tenants: &[Notes<Check>]) -> Option<f64> {
    let mut before = Vec::new();
    let mut during = Vec::new();
    for notes in tenants {
        let [first, second] = before_and_during(notes)?;
        before.push(first);
        during.push(second);
    }
    let had: f64 = before.iter().map(|check| check.huge_mib).sum();
    let has: f64 = during.iter().map(|check| check.huge_mib).sum();
    report.figure(format!("{policy}: MiB in huge pages before"), had);
    report.figure(format!("{policy}: MiB in huge pages afterwards"), has);
    let events = during.first()?.events.since(before.last()?.events);
    report.figure(format!("{policy}: huge pages split on the machine"), events.split_pages? as f64);
    report.figure(format!("{policy}: their mappings split"), events.split_mappings? as f64);
    for kind in KINDS {
        report.figure(format!("{policy}: ns a read before, {kind}"), median_ns(&before, kind));
        report.figure(format!("{policy}: ns a read afterwards, {kind}"), median_ns(&during, kind));
    }
    Some((had - has) / HUGE_MIB as f64)
}

fn median_ns(checks: &[Check], kind: &str) -> f64 {
    median(checks.iter().filter_map(|check| check.ns.get(kind).copied()))
}

/// `split` has the number of huge pages split by each policy.
fn put_bars(report: &mut ExperimentReport, layout: &str, split: &BTreeMap<String, f64>) {
    let ours = format!("{SUBJECT}{layout}");
    let everything = format!("{KSM_EVERYTHING}{layout}");
    if let (Some(own), Some(peer)) = (report.run(&ours), report.run(&everything)) {
        let saved = own.saved_bytes as f64 / peer.saved_bytes as f64;
        let name = format!("savings relative to KSM scanning everything{layout}");
        report.bar(name, Limit::AtLeast(0.95), Some(saved));
    }
    if let (Some(&own), Some(&peer)) = (split.get(&ours), split.get(&everything)) {
        let name = format!("huge pages split relative to KSM scanning everything{layout}");
        report.bar(name, Limit::AtMost(0.5), if peer > 0.0 { Some(own / peer) } else { None });
    }
}

/// Notes a tenant's huge pages and its speed.
fn look(tenant: &mut Tenant, kinds: &[&'static str], reading: Duration) -> anyhow::Result<Check> {
    let kib: u64 = read_smaps(&Process::open(tenant.pid())?)?.iter().map(|detail| detail.anon_huge_kib).sum();
    Ok(Check {
        huge_mib: kib as f64 / 1024.0,
        events: EventReader::open(Path::new("/proc/vmstat"))?.read()?,
        ns: fastest(tenant, kinds, reading)?,
    })
}

/// Nanoseconds per read of each kind, in the fastest tenth of the time: other programs can only slow it down.
fn fastest(tenant: &mut Tenant, kinds: &[&'static str], reading: Duration) -> anyhow::Result<ByKind> {
    let mut fastest = BTreeMap::new();
    for _ in 0..TENTHS {
        for (&kind, ns) in kinds.iter().zip(tenant.chase(reading / TENTHS)?) {
            let least = fastest.entry(kind).or_insert(ns);
            *least = ns.min(*least);
        }
    }
    Ok(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    #[test]
    #[allow(clippy::float_cmp)] // exact results
    fn splits_are_those_of_the_tenants() {
        let check = |huge_mib, split, ns: f64| Check {
            huge_mib,
            ns: KINDS.map(|kind| (kind, ns)).into(),
            events: KernelEvents { split_pages: Some(split), split_mappings: Some(split + 1), cow_breaks: None },
        };
        let notes = |checks: &[Check]| Rc::new(RefCell::new(checks.to_vec()));
        let mut report = ExperimentReport::new("huge", "");
        let tenants = [(); 2]
            .map(|()| notes(&[check(99.0, 1, 1.0), check(100.0, 7, 5.0), check(60.0, 40, 9.0), check(60.0, 41, 9.0)]));
        assert_eq!(put_figures(&mut report, "p", &tenants), Some(40.0));
        assert_eq!(report.figures["p: MiB in huge pages afterwards"], 120.0);
        assert_eq!(report.figures["p: huge pages split on the machine"], 33.0);
        assert_eq!(report.figures["p: ns a read afterwards, unique"], 9.0);
        assert_eq!(put_figures(&mut report, "p", &[notes(&[check(1.0, 0, 1.0), check(1.0, 0, 1.0)])]), None);
    }
}
