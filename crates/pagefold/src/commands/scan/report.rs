//! The result of a scan (schema `pagefold.scan/1`), which `--json`, the tables and the web page show.

use super::sharing::Matrix;
use super::survey::{LeftOut, LeftOutByReason};
use crate::output::placement::PlacementView;
use pagefold_engine::sampling::census::{Cell, Figures, Findings, bytes_of};
use pagefold_engine::units::index;
use pagefold_host::scope::exclude::Exclusion;
use pagefold_text::style::{count, human, percent};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

pub const SCHEMA: &str = "pagefold.scan/1";

/// The result of a scan (schema pagefold.scan/1). `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize)]
pub struct ScanReport {
    pub schema: &'static str,
    pub exact: bool,
    pub sampled_fraction: f64,
    pub error_bytes: u64,
    pub without_headroom_bytes: u64,
    pub scope: String,
    pub totals: Figures,
    pub processes: Vec<ProcessRow>,
    pub kinds: Vec<KindRow>,
    pub programs: Vec<GroupRow>,
    pub workloads: Vec<GroupRow>,
    pub cgroups: Vec<CgroupRow>,
    pub excluded: Vec<LeftOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacementView>,
    pub cost: Cost,
    /// The words for one target and for several: process or guest.
    #[serde(skip)]
    pub of: (&'static str, &'static str),
    /// Whether this is the whole host, because no scope was given.
    #[serde(skip)]
    pub is_host: bool,
    /// The command that saves the memory, if there's one.
    #[serde(skip)]
    pub command: Option<String>,
    /// If `command` is `None`: the command that would let several workloads share memory.
    #[serde(skip)]
    pub across_workloads: Option<String>,
    /// How much memory workloads have in common, for the web page only.
    #[serde(skip)]
    pub matrix: Option<Matrix>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct ProcessRow {
    pub pid: i32,
    pub name: String,
    pub exe: Option<String>,
    pub cgroup: Option<String>,
    pub workload: Option<String>,
    #[serde(flatten)]
    pub figures: Figures,
    pub kinds: Vec<KindRow>,
    pub excluded: Vec<LeftOut>,
    pub left_out: Option<String>,
    /// The option or command that would bring the process in, to print after the reason.
    #[serde(skip)]
    pub way_in: String,
    /// The part of the process's mergeable memory that is pinned. KSM can't merge pinned pages, so we subtract this
    /// part from the savable memory.
    #[serde(skip)]
    pub pinned_part: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct KindRow {
    pub kind: String,
    #[serde(flatten)]
    pub figures: Figures,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct CgroupRow {
    pub cgroup: String,
    pub processes: usize,
    #[serde(flatten)]
    pub figures: Figures,
}

/// The processes that run one program, or belong to one workload.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GroupRow {
    pub name: String,
    pub processes: usize,
    #[serde(flatten)]
    pub figures: Figures,
    /// Memory that KSM can't merge, and memory that we leave alone.
    pub out_of_reach_bytes: u64,
    pub left_out_bytes: u64,
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
        let pages = pages_read.max(1) as f64;
        Self {
            pages_read,
            cpu_seconds: cpu_ns as f64 / 1e9,
            ns_per_page: cpu_ns as f64 / pages,
            reading_ns_per_page: reading_ns as f64 / pages,
        }
    }
}

/// A key that sorts rows by savable memory, the largest first.
fn largest_first(figures: &Figures) -> Reverse<u64> {
    Reverse(bytes_of(figures.savable))
}

pub fn size(pages: f64) -> String {
    human(bytes_of(pages))
}

fn add_to_group(groups: &mut BTreeMap<String, GroupRow>, name: &str, row: &ProcessRow) {
    let group = groups.entry(name.to_owned()).or_default();
    name.clone_into(&mut group.name);
    group.processes += 1;
    group.figures += row.figures;
    for left_out in &row.excluded {
        if left_out.is_out_of_reach {
            group.out_of_reach_bytes += left_out.bytes;
        } else {
            group.left_out_bytes += left_out.bytes;
        }
    }
}

fn groups_by_size(groups: BTreeMap<String, GroupRow>) -> Vec<GroupRow> {
    let mut rows: Vec<GroupRow> = groups.into_values().collect();
    rows.sort_by_key(|row| (largest_first(&row.figures), Reverse(row.left_out_bytes + row.out_of_reach_bytes)));
    rows
}

/// We print at most this many options that bring in processes left out for the same reason.
const WAYS_MOST: usize = 4;

impl ScanReport {
    /// The options or command that would bring in the processes left out for this reason, to print after the reason.
    pub fn way_in(&self, reason: &str) -> String {
        let mut ways = BTreeSet::new();
        for row in &self.processes {
            if row.left_out.as_deref() == Some(reason) && !row.way_in.is_empty() {
                ways.insert(row.way_in.as_str());
            }
        }
        if ways.len() < 2 {
            return ways.first().copied().unwrap_or_default().to_owned();
        }
        if reason != Exclusion::NotDumpable.to_string() {
            return " (pagefold include lets them in)".to_owned();
        }
        let mut flags = String::new();
        for way in ways.iter().take(WAYS_MOST) {
            flags += way.trim_start_matches(" (").trim_end_matches("lets it in)");
        }
        let more = if ways.len() > WAYS_MOST { "... " } else { "" };
        format!(" ({flags}{more}let them in)")
    }

    /// Sums up the census's findings by process, kind, program, workload and cgroup. `rows` are the processes without
    /// figures. `cells` and `kinds` describe the cells of the census.
    pub fn of<K: Copy + Ord + Display>(
        rows: Vec<ProcessRow>,
        cells: &[Cell],
        kinds: &[K],
        findings: &Findings,
        fraction: f64,
        scope: String,
        cost: Cost,
    ) -> Self {
        let mut rows = rows;
        let mut by_kind: BTreeMap<K, Figures> = BTreeMap::new();
        let mut totals = findings.total;
        for (number, &found) in findings.cells.iter().enumerate() {
            let row = &mut rows[index(cells[number].process)];
            let mut figures = found;
            figures.savable *= 1.0 - row.pinned_part;
            figures.savable_gross *= 1.0 - row.pinned_part;
            totals.savable -= found.savable - figures.savable;
            totals.savable_gross -= found.savable_gross - figures.savable_gross;
            row.figures += figures;
            row.kinds.push(KindRow { kind: kinds[number].to_string(), figures });
            *by_kind.entry(kinds[number]).or_default() += figures;
        }
        let mut by_cgroup: BTreeMap<String, CgroupRow> = BTreeMap::new();
        let mut by_program = BTreeMap::new();
        let mut by_workload = BTreeMap::new();
        let mut excluded = LeftOutByReason::default();
        for row in &mut rows {
            row.kinds.sort_by_key(|row| largest_first(&row.figures));
            add_to_group(&mut by_program, &row.name, row);
            add_to_group(&mut by_workload, row.workload.as_deref().unwrap_or("none"), row);
            for left_out in &row.excluded {
                excluded.add(left_out.clone());
            }
            if row.left_out.is_none() {
                let cgroup = row.cgroup.clone().unwrap_or_else(|| "/".to_owned());
                let sum = by_cgroup.entry(cgroup.clone()).or_insert(CgroupRow { cgroup, ..CgroupRow::default() });
                sum.processes += 1;
                sum.figures += row.figures;
            }
        }
        rows.sort_by_key(|row| (largest_first(&row.figures), row.pid));
        let command = Some(format!("pagefold run {scope}"));
        let mut kinds = Vec::new();
        for (kind, figures) in by_kind {
            kinds.push(KindRow { kind: kind.to_string(), figures });
        }
        kinds.sort_by_key(|row| largest_first(&row.figures));
        let mut cgroups: Vec<CgroupRow> = by_cgroup.into_values().collect();
        cgroups.sort_by_key(|row| largest_first(&row.figures));
        Self {
            schema: SCHEMA,
            exact: fraction >= 1.0,
            sampled_fraction: fraction.min(1.0),
            error_bytes: bytes_of(findings.error),
            without_headroom_bytes: 0,
            scope,
            totals,
            processes: rows,
            kinds,
            programs: groups_by_size(by_program),
            workloads: groups_by_size(by_workload),
            cgroups,
            excluded: excluded.by_size(),
            numa: None,
            cost,
            of: ("process", "processes"),
            is_host: false,
            command,
            across_workloads: None,
            matrix: None,
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

    /// Memory that is saved already or that we didn't read, as sizes with words.
    pub fn besides(&self) -> Vec<String> {
        let Figures { merged, fork_shared, swapped, .. } = self.totals;
        let mut besides = Vec::new();
        for (pages, words) in
            [(merged, "merged already"), (fork_shared, "shared through fork"), (swapped, "swapped out (not read)")]
        {
            if pages > 0.0 {
                besides.push(format!("{} {words}", size(pages)));
            }
        }
        besides
    }

    /// A sentence on savable memory that a run leaves alone because of memory limits.
    pub fn headroom(&self) -> Option<String> {
        if self.without_headroom_bytes == 0 {
            return None;
        }
        let size = human(self.without_headroom_bytes);
        Some(format!("At least {size} of the savable memory won't be merged: memory limits leave too little headroom."))
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

    /// Whether there's something to save. Below 1 % merging is hardly worth its cost.
    pub fn is_worthwhile(&self) -> bool {
        self.totals.savable > self.totals.resident / 100.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_procmem::maps::RegionKind;

    #[test]
    fn what_may_be_pinned_is_not_promised() {
        let savable = |savable| Figures { savable, resident: 100.0, ..Figures::default() };
        let mut total = Figures::default();
        let cells = [savable(80.0), savable(60.0), savable(50.0)].to_vec();
        for figures in &cells {
            total += *figures;
        }
        let findings = Findings { cells, total, error: 0.0 };
        let cells = [0, 0, 1].map(|process| Cell { process, ..Cell::default() });
        let kinds = [RegionKind::Heap, RegionKind::Anonymous, RegionKind::Heap];
        let rows = || vec![ProcessRow { pid: 1, pinned_part: 0.5, ..ProcessRow::default() }, ProcessRow::default()];
        let report = ScanReport::of(rows(), &cells, &kinds, &findings, 1.0, String::new(), Cost::default());
        assert_eq!(bytes_of(report.totals.savable), 120 << 12);
        let by_row: Vec<_> = report.processes.iter().map(|row| (row.pid, row.figures.savable)).collect();
        assert_eq!(by_row, [(1, 70.0), (0, 50.0)]);
        let by_kind: f64 = report.kinds.iter().map(|row| row.figures.savable).sum();
        assert_eq!(bytes_of(by_kind), 120 << 12);
    }
    #[test]
    fn several_ways_in_are_given_as_options() {
        let reason = Exclusion::NotDumpable.to_string();
        let row = |name: &str| {
            let way_in = format!(" (--allow {name} lets it in)");
            ProcessRow { left_out: Some(reason.clone()), way_in, ..ProcessRow::default() }
        };
        let way_in = |names: &[&str]| {
            let rows = names.iter().map(|name| row(name)).collect();
            let none = Findings { cells: Vec::new(), total: Figures::default(), error: 0.0 };
            ScanReport::of::<RegionKind>(rows, &[], &[], &none, 1.0, String::new(), Cost::default()).way_in(&reason)
        };
        assert_eq!(way_in(&["nginx"]), " (--allow nginx lets it in)");
        assert_eq!(way_in(&["nginx", "'pod a/b'", "nginx"]), " (--allow 'pod a/b' --allow nginx let them in)");
        assert!(way_in(&["a", "b", "c", "d", "e"]).ends_with("--allow d ... let them in)"));
    }
}
