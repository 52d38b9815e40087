//! The result of a scan (schema `pagefold.scan/1`), which `--json`, the tables and the web page show.

use super::survey::{LeftOut, Survey};
use crate::output::placement::PlacesView;
use pagefold_core::sampling::census::{Figures, Findings, bytes_of};
use pagefold_linux::proc::status::printable;
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;

/// The name and version of the schema.
pub const SCHEMA: &str = "pagefold.scan/1";

/// The result of a scan.
#[derive(Clone, Debug, Serialize)]
pub struct ScanReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Whether every page was read.
    pub exact: bool,
    /// The share of pages that was read, chosen at random.
    pub sampled_fraction: f64,
    /// The 95 % margin of error of the savable total.
    pub error_bytes: u64,
    /// The scope, as flags.
    pub scope: String,
    /// The sum over all processes.
    pub totals: Amounts,
    /// By process, the most savable first.
    pub processes: Vec<ProcessRow>,
    /// By kind of memory.
    pub kinds: Vec<KindRow>,
    /// By cgroup.
    pub cgroups: Vec<CgroupRow>,
    /// What was left out, by reason.
    pub excluded: Vec<Excluded>,
    /// Where merged pages are, on a machine with several memory nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacesView>,
    /// What the scan cost.
    pub cost: Cost,
}

/// Figures of a process, a kind, a cgroup or all.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(clippy::struct_field_names)] // the schema's names carry the unit
pub struct Amounts {
    /// Anonymous memory held; what is shared is divided among its holders.
    pub resident_bytes: u64,
    /// Anonymous memory mapped; what is shared counts for each holder.
    pub anonymous_bytes: u64,
    /// All-zero pages.
    pub zero_bytes: u64,
    /// Savable by merging pages of the same process.
    pub duplicate_within_bytes: u64,
    /// Savable beyond that by merging with other processes.
    pub duplicate_across_bytes: u64,
    /// Merged already.
    pub merged_bytes: u64,
    /// Shared through fork.
    pub fork_shared_bytes: u64,
    /// Swapped out; not read.
    pub swapped_bytes: u64,
    /// Savable, without subtracting KSM's metadata.
    pub savable_gross_bytes: u64,
    /// Savable, with KSM's metadata subtracted.
    pub savable_bytes: u64,
    /// KSM's metadata for it.
    pub metadata_bytes: u64,
}

impl From<Figures> for Amounts {
    fn from(figures: Figures) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
        let metadata_bytes = figures.metadata_bytes.round() as u64;
        Self {
            resident_bytes: bytes_of(figures.resident),
            anonymous_bytes: bytes_of(figures.anonymous),
            zero_bytes: bytes_of(figures.zero),
            duplicate_within_bytes: bytes_of(figures.duplicate_within),
            duplicate_across_bytes: bytes_of(figures.duplicate_across),
            merged_bytes: bytes_of(figures.merged),
            fork_shared_bytes: bytes_of(figures.fork_shared),
            swapped_bytes: bytes_of(figures.swapped),
            savable_gross_bytes: bytes_of(figures.savable_gross),
            savable_bytes: bytes_of(figures.savable),
            metadata_bytes,
        }
    }
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessRow {
    /// Its pid.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// Its executable, if known.
    pub exe: Option<String>,
    /// Its cgroup.
    pub cgroup: Option<String>,
    /// Its figures.
    #[serde(flatten)]
    pub amounts: Amounts,
    /// The same by kind.
    pub kinds: Vec<KindRow>,
    /// What was left out of it.
    pub excluded: Vec<Excluded>,
    /// Why it was left out as a whole, or that it ended.
    pub left_out: Option<String>,
}

/// Memory of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct KindRow {
    /// The kind.
    pub kind: String,
    /// Its figures.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// One cgroup.
#[derive(Clone, Debug, Serialize)]
pub struct CgroupRow {
    /// Its path.
    pub cgroup: String,
    /// Processes of it in scope.
    pub processes: usize,
    /// Their figures.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// Memory left out for one reason.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Excluded {
    /// Why.
    pub reason: String,
    /// How much.
    pub bytes: u64,
    /// In how many mappings.
    pub regions: u32,
}

impl From<&LeftOut> for Excluded {
    fn from(left_out: &LeftOut) -> Self {
        Self { reason: left_out.reason.clone(), bytes: left_out.bytes, regions: left_out.regions }
    }
}

/// What the scan took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cost {
    /// Pages whose contents were read.
    pub pages_read: u64,
    /// CPU time.
    pub cpu_seconds: f64,
    /// CPU time by page read. It includes reading page tables and mappings for every page.
    pub ns_per_page: f64,
    /// CPU time of reading, digesting and counting alone, by page read.
    pub reading_ns_per_page: f64,
}

impl Cost {
    /// From counts.
    pub fn new(pages_read: u64, cpu_ns: u64, reading_ns: u64) -> Self {
        let per_page = |ns: u64| ns as f64 / pages_read.max(1) as f64;
        let (ns_per_page, reading_ns_per_page) = (per_page(cpu_ns), per_page(reading_ns));
        Self { pages_read, cpu_seconds: cpu_ns as f64 / 1e9, ns_per_page, reading_ns_per_page }
    }
}

impl ScanReport {
    /// Sums up what the census found by process, kind and cgroup.
    pub fn of(survey: &Survey, findings: &Findings, fraction: f64, scope: String, cost: Cost) -> Self {
        let owned = survey.cells.iter().zip(&survey.kinds).zip(&findings.cells);
        let mut processes: Vec<(Figures, Vec<KindRow>)> = survey.processes.iter().map(|_| Default::default()).collect();
        let mut kinds: BTreeMap<_, Figures> = BTreeMap::new();
        for ((cell, kind), figures) in owned {
            let (sum, rows) = &mut processes[cell.process as usize];
            *sum += *figures;
            rows.push(KindRow { kind: kind.to_string(), amounts: (*figures).into() });
            *kinds.entry(*kind).or_default() += *figures;
        }
        let mut cgroups: BTreeMap<&str, (usize, Figures)> = BTreeMap::new();
        let mut excluded: BTreeMap<&str, (u64, u32)> = BTreeMap::new();
        let mut rows = Vec::new();
        for (surveyed, (sum, mut kinds)) in survey.processes.iter().zip(processes) {
            let scoped = &surveyed.scoped;
            if surveyed.refused.is_none() && !surveyed.gone {
                let entry = cgroups.entry(scoped.cgroup.as_deref().unwrap_or("/")).or_default();
                *entry = (entry.0 + 1, entry.1);
                entry.1 += sum;
            }
            for left_out in &surveyed.excluded {
                let entry = excluded.entry(&left_out.reason).or_default();
                *entry = (entry.0 + left_out.bytes, entry.1 + left_out.regions);
            }
            kinds.sort_by_key(|row| std::cmp::Reverse(row.amounts.savable_bytes));
            rows.push(ProcessRow {
                pid: scoped.process.pid(),
                name: scoped.name.clone(),
                exe: scoped.exe.as_ref().map(|exe| printable(exe.as_os_str().as_bytes())),
                cgroup: scoped.cgroup.as_ref().map(|cgroup| printable(cgroup.as_bytes())),
                amounts: sum.into(),
                kinds,
                excluded: surveyed.excluded.iter().map(Excluded::from).collect(),
                left_out: surveyed
                    .refused
                    .as_ref()
                    .map(ToString::to_string)
                    .or_else(|| surveyed.gone.then(|| "has ended".to_owned())),
            });
        }
        rows.sort_by_key(|row| (std::cmp::Reverse(row.amounts.savable_bytes), row.pid));
        let mut kinds: Vec<KindRow> = kinds
            .into_iter()
            .map(|(kind, figures)| KindRow { kind: kind.to_string(), amounts: figures.into() })
            .collect();
        kinds.sort_by_key(|row| std::cmp::Reverse(row.amounts.savable_bytes));
        let mut cgroups: Vec<CgroupRow> = cgroups
            .into_iter()
            .map(|(cgroup, (processes, figures))| CgroupRow {
                cgroup: printable(cgroup.as_bytes()),
                processes,
                amounts: figures.into(),
            })
            .collect();
        cgroups.sort_by_key(|row| std::cmp::Reverse(row.amounts.savable_bytes));
        let mut excluded: Vec<Excluded> = excluded
            .into_iter()
            .map(|(reason, (bytes, regions))| Excluded { reason: reason.to_owned(), bytes, regions })
            .collect();
        excluded.sort_by_key(|row| std::cmp::Reverse(row.bytes));
        Self {
            schema: SCHEMA,
            exact: fraction >= 1.0,
            sampled_fraction: fraction.min(1.0),
            error_bytes: bytes_of(findings.error),
            scope,
            totals: findings.total.into(),
            processes: rows,
            kinds,
            cgroups,
            excluded,
            numa: None,
            cost,
        }
    }

    /// The processes that were not left out.
    pub fn looked_at(&self) -> impl Iterator<Item = &ProcessRow> {
        self.processes.iter().filter(|process| process.left_out.is_none())
    }

    /// The result as a sentence.
    pub fn headline(&self) -> String {
        use pagefold_cli::style::{count, human, percent};
        let looked_at = self.looked_at().count();
        let totals = &self.totals;
        let (savable, resident) = (totals.savable_bytes as f64, totals.resident_bytes as f64);
        let margin = if self.exact { String::new() } else { format!(" ± {:.1}", self.margin_percent()) };
        format!(
            "{} {} {}; {} ({}{}) could be saved",
            count(looked_at, "process", "processes"),
            if looked_at == 1 { "holds" } else { "hold" },
            human(totals.resident_bytes),
            human(totals.savable_bytes),
            percent(savable, resident).trim_end_matches(" %"),
            margin + " %",
        )
    }

    /// The margin of error, per cent of the resident memory.
    pub fn margin_percent(&self) -> f64 {
        100.0 * self.error_bytes as f64 / (self.totals.resident_bytes.max(1)) as f64
    }

    /// How reliable the figures are.
    pub fn basis(&self) -> String {
        use pagefold_cli::style::{human, percent};
        let read = human(self.cost.pages_read << 12);
        let cpu = format!("{:.2} s of CPU", self.cost.cpu_seconds);
        if self.exact {
            return format!("Exact: every page was read ({read}, {cpu}).");
        }
        let share = percent(self.sampled_fraction, 1.0);
        let error = human(self.error_bytes);
        format!("Estimated from {read} ({share}, {cpu}); margin of error {error} (95 %).")
    }

    /// The command to run next.
    pub fn next_step(&self) -> Option<String> {
        // Below 1 % merging is hardly worth its cost.
        (self.totals.savable_bytes > self.totals.resident_bytes / 100).then(|| format!("pagefold run {}", self.scope))
    }
}
