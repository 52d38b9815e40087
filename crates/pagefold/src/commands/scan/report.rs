//! The result of a scan (schema `pagefold.scan/1`), which `--json`, the tables and the web page show.

use super::map::Map;
use super::survey::{LeftOut, Survey, by_size};
use crate::output::placement::PlacementView;
use pagefold_engine::sampling::census::{Figures, Findings, bytes_of};
use pagefold_host::scope::exclude::Exclusion;
use pagefold_text::escape::printable;
use pagefold_text::style::{count, human, percent};
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;

pub const SCHEMA: &str = "pagefold.scan/1";

/// The result of a scan (schema pagefold.scan/1). `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize)]
pub struct ScanReport {
    pub schema: &'static str,
    pub exact: bool,
    pub sampled_fraction: f64,
    pub error_bytes: u64,
    pub scope: String,
    pub totals: Figures,
    pub processes: Vec<ProcessRow>,
    pub kinds: Vec<KindRow>,
    pub cgroups: Vec<CgroupRow>,
    pub excluded: Vec<LeftOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacementView>,
    pub cost: Cost,
    /// The words for one process (or guest) in scope, and for several.
    #[serde(skip)]
    pub of: (&'static str, &'static str),
    /// The maps of the processes by pid, for the web page only.
    #[serde(skip)]
    pub maps: BTreeMap<i32, Map>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ProcessRow {
    pub pid: i32,
    pub name: String,
    pub exe: Option<String>,
    pub cgroup: Option<String>,
    #[serde(flatten)]
    pub figures: Figures,
    pub kinds: Vec<KindRow>,
    pub excluded: Vec<LeftOut>,
    pub left_out: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct KindRow {
    pub kind: String,
    #[serde(flatten)]
    pub figures: Figures,
}

#[derive(Clone, Debug, Serialize)]
pub struct CgroupRow {
    pub cgroup: String,
    pub processes: usize,
    #[serde(flatten)]
    pub figures: Figures,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cost {
    pub pages_read: u64,
    pub cpu_seconds: f64,
    pub ns_per_page: f64,
    pub reading_ns_per_page: f64,
}

impl Cost {
    pub fn new(pages_read: u64, cpu_ns: u64, reading_ns: u64) -> Self {
        let per_page = |ns: u64| ns as f64 / pages_read.max(1) as f64;
        let (ns_per_page, reading_ns_per_page) = (per_page(cpu_ns), per_page(reading_ns));
        Self { pages_read, cpu_seconds: cpu_ns as f64 / 1e9, ns_per_page, reading_ns_per_page }
    }
}

pub fn size(pages: f64) -> String {
    human(bytes_of(pages))
}

impl ScanReport {
    /// Sums up the census's findings by process, kind and cgroup.
    pub fn of(survey: &Survey, findings: &Findings, fraction: f64, scope: String, cost: Cost) -> Self {
        let owned = survey.cells.iter().zip(&survey.kinds).zip(&findings.cells);
        let mut processes: Vec<(Figures, Vec<KindRow>)> = survey.processes.iter().map(|_| Default::default()).collect();
        let mut kinds: BTreeMap<_, Figures> = BTreeMap::new();
        for ((cell, kind), figures) in owned {
            let (sum, rows) = &mut processes[cell.process as usize];
            *sum += *figures;
            rows.push(KindRow { kind: kind.to_string(), figures: *figures });
            *kinds.entry(*kind).or_default() += *figures;
        }
        let mut cgroups: BTreeMap<&str, (usize, Figures)> = BTreeMap::new();
        let mut excluded = BTreeMap::new();
        let mut rows = Vec::new();
        for (surveyed, (sum, mut kinds)) in survey.processes.iter().zip(processes) {
            let scoped = &surveyed.scoped;
            if surveyed.refused.is_none() && !surveyed.gone {
                let entry = cgroups.entry(scoped.cgroup.as_deref().unwrap_or("/")).or_default();
                *entry = (entry.0 + 1, entry.1);
                entry.1 += sum;
            }
            for left_out in &surveyed.excluded {
                let entry: &mut (u64, u32) = excluded.entry(left_out.reason.clone()).or_default();
                *entry = (entry.0 + left_out.bytes, entry.1 + left_out.regions);
            }
            kinds.sort_by_key(|row| std::cmp::Reverse(bytes_of(row.figures.savable)));
            rows.push(ProcessRow {
                pid: scoped.process.pid(),
                name: scoped.name.clone(),
                exe: scoped.exe.as_ref().map(|exe| printable(exe.as_os_str().as_bytes())),
                cgroup: scoped.cgroup.as_ref().map(|cgroup| printable(cgroup.as_bytes())),
                figures: sum,
                kinds,
                excluded: surveyed.excluded.clone(),
                left_out: surveyed
                    .refused
                    .as_ref()
                    .map(ToString::to_string)
                    .or_else(|| surveyed.gone.then(|| "has ended".to_owned())),
            });
        }
        rows.sort_by_key(|row| (std::cmp::Reverse(bytes_of(row.figures.savable)), row.pid));
        let mut kinds: Vec<KindRow> =
            kinds.into_iter().map(|(kind, figures)| KindRow { kind: kind.to_string(), figures }).collect();
        kinds.sort_by_key(|row| std::cmp::Reverse(bytes_of(row.figures.savable)));
        let mut cgroups: Vec<CgroupRow> = cgroups
            .into_iter()
            .map(|(cgroup, (processes, figures))| CgroupRow {
                cgroup: printable(cgroup.as_bytes()),
                processes,
                figures,
            })
            .collect();
        cgroups.sort_by_key(|row| std::cmp::Reverse(bytes_of(row.figures.savable)));
        Self {
            schema: SCHEMA,
            exact: fraction >= 1.0,
            sampled_fraction: fraction.min(1.0),
            error_bytes: bytes_of(findings.error),
            scope,
            totals: findings.total,
            processes: rows,
            kinds,
            cgroups,
            excluded: by_size(excluded),
            numa: None,
            cost,
            of: ("process", "processes"),
            maps: BTreeMap::new(),
        }
    }

    /// The processes that we didn't leave out.
    pub fn looked_at(&self) -> impl Iterator<Item = &ProcessRow> {
        self.processes.iter().filter(|process| process.left_out.is_none())
    }

    pub fn headline(&self) -> String {
        let looked_at = self.looked_at().count();
        let Figures { savable, resident, .. } = self.totals;
        let margin = if self.exact { String::new() } else { format!(" ± {:.1}", self.margin_percent()) };
        format!(
            "{} {} {}; {} ({}{margin} %) could be saved",
            count(looked_at, self.of.0, self.of.1),
            if looked_at == 1 { "holds" } else { "hold" },
            size(resident),
            size(savable),
            percent(savable, resident).trim_end_matches(" %"),
        )
    }

    /// The margin of error, per cent of the resident memory.
    pub fn margin_percent(&self) -> f64 {
        100.0 * self.error_bytes as f64 / bytes_of(self.totals.resident).max(1) as f64
    }

    /// Memory that's saved already, or that we didn't read: sizes with words.
    pub fn besides(&self) -> Vec<String> {
        let Figures { merged, fork_shared, swapped, .. } = self.totals;
        let parts =
            [(merged, "merged already"), (fork_shared, "shared through fork"), (swapped, "swapped out (not read)")];
        parts.into_iter().filter(|part| part.0 > 0.0).map(|(pages, what)| format!("{} {what}", size(pages))).collect()
    }

    pub fn basis(&self) -> String {
        let read = human(self.cost.pages_read << 12);
        let cpu = format!("{:.2} s of CPU", self.cost.cpu_seconds);
        if self.exact {
            return format!("Exact: every page was read ({read}, {cpu}).");
        }
        let share = percent(self.sampled_fraction, 1.0);
        let error = human(self.error_bytes);
        format!("Estimated from {read} ({share}, {cpu}); margin of error {error} (95 %).")
    }

    pub fn next_step(&self) -> Option<String> {
        // Below 1 % merging is hardly worth its cost.
        (self.totals.savable > self.totals.resident / 100.0).then(|| format!("pagefold run {}", self.scope))
    }
}
/// The option that lets in processes left out for this reason, if there is one, to print after the reason.
pub fn way_in(reason: &str) -> &'static str {
    if reason == Exclusion::NotDumpable.to_string() { " (--allow NAME lets it in)" } else { "" }
}
