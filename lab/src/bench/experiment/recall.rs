//! The share of KSM's savings that pagefold finds on fifteen real programs of five kinds, some with many duplicates,
//! some with few or none.

use super::{Experiment, ExperimentSetting, PolicySequence, Targets, need_memory};
use crate::bench::frames::zero_pages;
use crate::bench::metric::{CPU_VS, Metric, SAVED_VS};
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Oracle, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Limit};
use crate::programs::{
    GuestImage, GuestTools, JavaProgram, JavaTools, MariaDbData, Notes, Observed, PythonData, PythonTools, QEMU,
    RedisData, Target, scratch,
};
use anyhow::Context;
use pagefold_engine::units::{Bytes, PAGE_SIZE, Pages};
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::process::Process;
use std::collections::BTreeMap;
use std::ops::{AddAssign, Range};
use std::path::Path;

pub const EXPERIMENT: Experiment = Experiment {
    name: "recall",
    claim: "ours: on redis, mariadb, python, java and QEMU guests pagefold saves at least 97 % of what KSM saves by scanning \
            everything, within 60 s and in at most a third of its CPU time; three quarters of the memory it marks merge, and \
            java's heap is left alone",
    run,
};

/// We must save most within this time.
const SECONDS: u64 = 60;
/// The programs take less than half. The rest is for others and for unmerging everything at once.
const NEEDED_MIB: u64 = 12 << 10;

/// Each `{}` in turn: a policy and a kind of program.
const MERGED: Metric = Metric::new("{}_{}_merged_of_marked", "");
const HEAP_MARKED: Metric = Metric::new("{}_{}_heap_marked", "");
const JAVA: &str = "java";

sizes! {
    /// Programs of each kind.
    instances: usize = 3, quick 2;
    keys: u64 = 100_000, quick 10_000, as "redis_keys";
    rows: u64 = 80_000, quick 4_000, as "mariadb_rows";
    table_rows: u64 = 200_000, quick 20_000, as "python_rows";
    own_mib: u64 = 32, quick 4;
    heap_mib: u64 = 400, quick 64, as "java_heap_mib";
    guest_mib: u64 = 512, quick 192, as "guest_mib";
    guest_data_mib: u64 = 160, quick 16;
    seconds: u64 = SECONDS, quick 6, as "seconds";
}

/// A kind of program.
struct Kind<'a> {
    name: &'static str,
    /// Starts an instance by number.
    start: Box<dyn Fn(usize) -> anyhow::Result<Box<dyn Target>> + 'a>,
}

fn kind<'a, T: Target + 'static>(name: &'static str, start: impl Fn(usize) -> anyhow::Result<T> + 'a) -> Kind<'a> {
    Kind { name, start: Box::new(move |instance| Ok(Box::new(start(instance)?))) }
}

/// The page counts of each program, with its kind: before we mark its memory, while it's merged, and afterwards.
type Snapshots = Vec<(&'static str, Notes<DuplicateCount>)>;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    if !setting.quick {
        need_memory(NEEDED_MIB)?;
    }
    let scratch = scratch()?;
    eprintln!("{}: making the data", report.experiment);
    let kinds = kinds(&sizes, scratch.path())?;
    let mut instances = Vec::new();
    for kind in &kinds {
        for instance in 0..sizes.instances {
            instances.push((kind, instance));
        }
    }
    report.parameters([("programs", instances.len() as u64)]);

    // The guests start with `mem-merge=off`, or QEMU would mark them itself, and that counts as an opt-out.
    let ours = Pagefold::new(sizes.seconds).with(&["--override-opt-out", QEMU]);
    let name = ours.name();
    let mut policies: Vec<Box<dyn Policy>> = vec![Box::new(KsmEverything), Box::new(ours)];
    if !setting.quick {
        policies.insert(1, Box::new(Oracle));
    }
    setting.add_further_peers(&mut policies, sizes.seconds);
    let mut sequence = PolicySequence::take(setting)?;
    for policy in &policies {
        let mut snapshots = Snapshots::new();
        sequence.run(report, &**policy, || {
            let mut targets = Targets::new();
            for (kind, instance) in &instances {
                setting.interrupt.check()?;
                let target = (kind.start)(*instance).with_context(|| format!("{} {instance}", kind.name))?;
                let (observed, counts) = Observed::start(target, |target| {
                    DuplicateCount::at(&Process::open(target.pid())?, target.heap().as_ref())
                });
                snapshots.push((kind.name, counts));
                targets.push(observed);
            }
            Ok(targets)
        })?;
        put_figures(report, &policy.name(), &snapshots);
    }
    report.compare(&name);
    if !setting.quick {
        put_bars(report, &name);
    }
    Ok(())
}

/// Prepares the kinds that we can start here. If a kind's tools aren't installed, we skip it with a message.
fn kinds<'a>(sizes: &Sizes, scratch: &'a Path) -> anyhow::Result<Vec<Kind<'a>>> {
    fn found<T>(name: &str, tools: anyhow::Result<T>) -> Option<T> {
        tools.inspect_err(|error| eprintln!("SKIP {name}: {error:#}")).ok()
    }
    let keys = sizes.keys;
    let redis = RedisData::make(scratch, keys)?;
    let redis = kind("redis", move |instance| {
        let mut redis = redis.start(scratch, instance)?;
        redis.change(keys, instance as u64)?;
        Ok(redis)
    });
    let mariadb = MariaDbData::make(scratch, sizes.rows)?;
    let mariadb = kind("mariadb", move |instance| {
        let mut mariadb = mariadb.start(scratch, instance)?;
        mariadb.change(instance as u64)?;
        Ok(mariadb)
    });
    let mut kinds = vec![redis, mariadb];
    if let Some(tools) = found("python", PythonTools::find()) {
        let python = PythonData::make(tools, scratch, sizes.table_rows, sizes.own_mib)?;
        kinds.push(kind("python", move |instance| python.start(instance)));
    }
    if let Some(tools) = found(JAVA, JavaTools::find()) {
        let java = JavaProgram::make(tools, scratch, sizes.heap_mib)?;
        kinds.push(kind(JAVA, move |instance| java.start(instance)));
    }
    if let Some(tools) = found("qemu", GuestTools::find()) {
        let image = GuestImage::make(tools, scratch, sizes.guest_mib, sizes.guest_data_mib)?;
        kinds.push(kind("qemu", move |instance| image.start(instance)));
    }
    Ok(kinds)
}

fn put_figures(report: &mut ExperimentReport, policy: &str, snapshots: &Snapshots) {
    let mut sums: BTreeMap<&str, DuplicateCount> = BTreeMap::new();
    for (kind, counts) in snapshots {
        // The check with the most pages merged, then marked.
        let counts = counts.borrow();
        let Some(&most) = counts.iter().max_by_key(|count| (count.merged, count.marked)) else { continue };
        *sums.entry(kind).or_default() += most;
        // This sum is over kinds, so its heap means nothing.
        *sums.entry("all").or_default() += DuplicateCount { heap: Pages(0), ..most };
    }
    for (kind, sum) in &sums {
        for (name, pages) in [
            ("anonymous", sum.anonymous),
            ("marked", sum.marked),
            ("marked_present", sum.marked_present),
            ("merged", sum.merged),
        ] {
            report.figure(format!("{policy}_{kind}_{name}_mib"), pages.bytes().mib());
        }
        // There's no share if we marked nothing.
        if let Some(share) = sum.merged_share() {
            report.figure(MERGED.of([policy, kind]), share);
        }
        if sum.heap.0 > 0 {
            report.figure(HEAP_MARKED.of([policy, kind]), sum.heap_marked.0 as f64 / sum.heap.0 as f64);
        }
    }
}

fn put_bars(report: &mut ExperimentReport, ours: &str) {
    if let (Some(own), Some(everything)) = (report.run(ours), report.run(KSM_EVERYTHING)) {
        let in_time = own.saved_mib_within(SECONDS as f64) / Bytes(everything.saved_bytes).mib();
        report.bar("savings within 60 s relative to KSM scanning everything", Limit::AtLeast(0.97), Some(in_time));
    }
    let saved = report.ratio(SAVED_VS, KSM_EVERYTHING);
    report.bar("savings at the end relative to KSM scanning everything", Limit::AtLeast(0.97), saved);
    let cpu = report.ratio(CPU_VS, KSM_EVERYTHING);
    report.bar("CPU time relative to KSM scanning everything", Limit::AtMost(1.0 / 3.0), cpu);
    let merged = report.figure_of(MERGED, [ours, "all"]);
    report.bar("share merged of the marked pages that are present", Limit::AtLeast(0.75), merged);
    let heap = report.figure_of(HEAP_MARKED, [ours, JAVA]);
    report.bar("share marked of java's heap", Limit::AtMost(0.1), heap);
}

/// Page counts of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DuplicateCount {
    anonymous: Pages,
    /// Marked address space, present or not.
    marked: Pages,
    /// Marked anonymous pages, including KSM's zero pages. Unwritten file pages don't count, since KSM skips them.
    marked_present: Pages,
    /// The merged pages among these, including the kept copies.
    merged: Pages,
    /// The heap that we should leave alone, if any.
    heap: Pages,
    /// The marked part of the heap.
    heap_marked: Pages,
}

impl DuplicateCount {
    fn at(process: &Process, heap: Option<&Range<u64>>) -> anyhow::Result<Self> {
        let zeros = zero_pages(&process.read_file("ksm_stat")?)?;
        Ok(Self::from_details(&read_smaps(process)?, zeros, heap))
    }

    /// `zeros` are [`zero_pages`].
    fn from_details(details: &[VmaDetail], zeros: Pages, heap: Option<&Range<u64>>) -> Self {
        let mut snapshot = Self { anonymous: zeros, marked_present: zeros, merged: zeros, ..Self::default() };
        snapshot.heap = heap.map_or(Pages(0), |heap| pages_of(heap.start, heap.end));
        for detail in details {
            let anonymous = pages_of(0, detail.anonymous_kib << 10);
            snapshot.anonymous += anonymous;
            // Unmarking unmerges at once, so other mappings have no merged pages.
            if !detail.flags.has(*b"mg") {
                continue;
            }
            let vma = &detail.vma;
            snapshot.marked += vma.pages();
            snapshot.marked_present += anonymous;
            snapshot.merged += pages_of(0, detail.ksm_kib.unwrap_or(0) << 10);
            if let Some(heap) = heap {
                snapshot.heap_marked += pages_of(vma.start.max(heap.start), vma.end.min(heap.end));
            }
        }
        snapshot
    }

    fn merged_share(self) -> Option<f64> {
        if self.marked_present.0 > 0 { Some(self.merged.0 as f64 / self.marked_present.0 as f64) } else { None }
    }
}

impl AddAssign for DuplicateCount {
    fn add_assign(&mut self, other: Self) {
        self.anonymous += other.anonymous;
        self.marked += other.marked;
        self.marked_present += other.marked_present;
        self.merged += other.merged;
        self.heap += other.heap;
        self.heap_marked += other.heap_marked;
    }
}

/// Pages between two addresses; zero unless `end` is above `start`.
fn pages_of(start: u64, end: u64) -> Pages {
    Pages(end.saturating_sub(start) / PAGE_SIZE as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_procmem::maps::parse_smaps;

    const SMAPS: &[u8] =
        b"e7000000-e8000000 rw-p 00000000 00:00 0 \nAnonymous: 1000 kB\nKSM: 300 kB\nVmFlags: rd wr mg\n\
        e8000000-e9000000 rw-p 00000000 00:00 0 \nAnonymous: 500 kB\nKSM: 0 kB\nVmFlags: rd wr\n";

    #[test]
    fn a_snapshot_counts_marked_mappings() {
        let details = parse_smaps(SMAPS).unwrap();
        let snapshot = DuplicateCount::from_details(&details, Pages(2), Some(&(0xe780_0000..0xe880_0000)));
        assert_eq!(snapshot.anonymous, Pages(377));
        assert_eq!((snapshot.marked, snapshot.marked_present), (Pages(4096), Pages(252)));
        assert_eq!((snapshot.merged, snapshot.heap, snapshot.heap_marked), (Pages(77), Pages(4096), Pages(2048)));
        assert!((snapshot.merged_share().unwrap() - 77.0 / 252.0).abs() < 1e-9);
        assert_eq!(DuplicateCount::default().merged_share(), None);
    }
}
