//! The share of KSM's savings that pagefold finds on fifteen real programs of five kinds, some with many duplicates,
//! some with few or none.

use super::{Experiment, ExperimentSetting, PolicySequence, need_memory};
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
use pagefold_procmem::os::fields::number;
use pagefold_procmem::process::Process;
use std::cell::RefCell;
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

/// Of a policy and a kind of program.
const MERGED: Metric = Metric::new("{}_{}_merged_of_marked", "");
const HEAP_MARKED: Metric = Metric::new("{}_{}_heap_marked", "");
const JAVA: &str = "java";

struct RecallSizes {
    /// Programs of each kind.
    instances: usize,
    keys: u64,
    rows: u64,
    table_rows: u64,
    own_mib: u64,
    heap_mib: u64,
    guest_mib: u64,
    guest_data_mib: u64,
    seconds: u64,
}

const FULL: RecallSizes = RecallSizes {
    instances: 3,
    keys: 100_000,
    rows: 80_000,
    table_rows: 200_000,
    own_mib: 32,
    heap_mib: 400,
    guest_mib: 512,
    guest_data_mib: 160,
    seconds: SECONDS,
};

const QUICK: RecallSizes = RecallSizes {
    instances: 2,
    keys: 10_000,
    rows: 4_000,
    table_rows: 20_000,
    own_mib: 4,
    heap_mib: 64,
    guest_mib: 192,
    guest_data_mib: 16,
    seconds: 6,
};

/// A kind of program: its name, and a function that starts an instance by number.
type Kind<'a> = (&'static str, Box<dyn Fn(usize) -> anyhow::Result<Box<dyn Target>> + 'a>);

fn kind<'a, T: Target + 'static>(name: &'static str, start: impl Fn(usize) -> anyhow::Result<T> + 'a) -> Kind<'a> {
    (name, Box::new(move |instance| Ok(Box::new(start(instance)?))))
}

/// The counts of each program, with its kind: before we mark its memory, while it's merged, and afterwards.
type Snapshots = Vec<(&'static str, Notes<DuplicateCount>)>;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = if setting.quick { QUICK } else { FULL };
    if !setting.quick {
        need_memory(NEEDED_MIB)?;
    }
    let scratch = scratch()?;
    eprintln!("{}: making the data", report.experiment);
    let kinds = kinds(&sizes, scratch.path())?;
    report.parameters([
        ("redis_keys", sizes.keys),
        ("mariadb_rows", sizes.rows),
        ("python_rows", sizes.table_rows),
        ("java_heap_mib", sizes.heap_mib),
        ("guest_mib", sizes.guest_mib),
        ("programs", (kinds.len() * sizes.instances) as u64),
        ("seconds", sizes.seconds),
    ]);

    // One entry per start of the programs.
    let seen: RefCell<Vec<Snapshots>> = RefCell::default();
    let start = || {
        let mut snapshots = Snapshots::new();
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for (name, start) in &kinds {
            for instance in 0..sizes.instances {
                setting.interrupt.check()?;
                let target = start(instance).with_context(|| format!("{name} {instance}"))?;
                let (observed, counts) = Observed::start(target, |target| {
                    DuplicateCount::at(&Process::open(target.pid())?, target.heap().as_ref())
                });
                snapshots.push((*name, counts));
                targets.push(observed);
            }
        }
        seen.borrow_mut().push(snapshots);
        Ok(targets)
    };
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
        sequence.run(report, &**policy, start)?;
    }
    report.compare(&name);

    let names = policies.iter().map(|policy| policy.name()).filter(|name| setting.wants(name));
    for (policy, snapshots) in names.zip(seen.take()) {
        put_figures(report, &policy, &snapshots);
    }
    if !setting.quick {
        put_bars(report, &name);
    }
    Ok(())
}

/// Prepares the kinds that we can start here. If a kind's tools aren't installed, we skip it with a message.
fn kinds<'a>(sizes: &RecallSizes, scratch: &'a Path) -> anyhow::Result<Vec<Kind<'a>>> {
    fn found<T>(name: &str, tools: anyhow::Result<T>) -> Option<T> {
        tools.inspect_err(|error| eprintln!("SKIP {name}: {error:#}")).ok()
    }
    let (redis, keys) = (RedisData::make(scratch, sizes.keys)?, sizes.keys);
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
        // None if we marked nothing.
        if let Some(share) = sum.merged_share() {
            report.figure(MERGED.of([policy, kind]), share);
        }
        if sum.heap.0 > 0 {
            report.figure(HEAP_MARKED.of([policy, kind]), sum.heap_marked.0 as f64 / sum.heap.0 as f64);
        }
    }
}

fn put_bars(report: &mut ExperimentReport, ours: &str) {
    let whole = report.run(KSM_EVERYTHING).map(|run| Bytes(run.saved_bytes).mib());
    let in_time = report.run(ours).map(|run| run.saved_mib_within(SECONDS as f64));
    let in_time = whole.zip(in_time).map(|(whole, in_time)| in_time / whole);
    report.bar("savings within 60 s relative to KSM scanning everything", Limit::AtLeast(0.97), in_time);
    let (saved, cpu) = (report.ratio(SAVED_VS, KSM_EVERYTHING), report.ratio(CPU_VS, KSM_EVERYTHING));
    report.bar("savings at the end relative to KSM scanning everything", Limit::AtLeast(0.97), saved);
    report.bar("CPU time relative to KSM scanning everything", Limit::AtMost(1.0 / 3.0), cpu);
    let (merged, heap) = (report.figure_of(MERGED, [ours, "all"]), report.figure_of(HEAP_MARKED, [ours, JAVA]));
    report.bar("share merged of the marked pages that are present", Limit::AtLeast(0.75), merged);
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
        let zeros = zero_pages(&process.read_file("ksm_stat")?).context("ksm_stat has no ksm_zero_pages")?;
        Ok(Self::from_details(&read_smaps(process)?, zeros, heap))
    }

    /// `zeros` are the pages that KSM replaced by the kernel's zero page. smaps doesn't count them.
    fn from_details(details: &[VmaDetail], zeros: Pages, heap: Option<&Range<u64>>) -> Self {
        let kib = |kib: u64| Pages(kib * 1024 / PAGE_SIZE as u64);
        let mut snapshot = Self { anonymous: zeros, marked_present: zeros, merged: zeros, ..Self::default() };
        snapshot.heap = heap.map_or(Pages(0), |heap| pages_of(heap.start, heap.end));
        for detail in details {
            snapshot.anonymous += kib(detail.anonymous_kib);
            // Unmarking unmerges at once, so other mappings have no merged pages.
            if !detail.flags.has(*b"mg") {
                continue;
            }
            let vma = &detail.vma;
            snapshot.marked += vma.pages();
            snapshot.marked_present += kib(detail.anonymous_kib);
            snapshot.merged += kib(detail.ksm_kib.unwrap_or(0));
            if let Some(heap) = heap {
                snapshot.heap_marked += pages_of(vma.start.max(heap.start), vma.end.min(heap.end));
            }
        }
        snapshot
    }

    fn merged_share(self) -> Option<f64> {
        (self.marked_present.0 > 0).then(|| self.merged.0 as f64 / self.marked_present.0 as f64)
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

fn zero_pages(ksm_stat: &[u8]) -> Option<Pages> {
    number(ksm_stat, "ksm_zero_pages").ok().map(Pages)
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

    #[test]
    fn zero_pages_as_the_kernel_prints_them() {
        assert_eq!(zero_pages(b"ksm_rmap_items 5\nksm_zero_pages 7\nksm_merging_pages 1\n"), Some(Pages(7)));
        assert_eq!(zero_pages(b"ksm_rmap_items 5\n"), None);
    }
}
