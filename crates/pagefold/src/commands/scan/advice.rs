//! The command that saves what a scan of the whole host has found.

use super::report::{ProcessRow, ScanReport};
use pagefold_engine::sampling::census::bytes_of;
use pagefold_host::scope::workload::Workload;
use pagefold_host::scope::{ScopeSpec, Selector, resolve};
use pagefold_procmem::Roots;

/// We name at most this many workloads or processes.
const NAMES_MOST: usize = 8;
/// Programs that we look at, those with the most savable memory first.
const PROGRAMS_MOST: usize = 8;

/// The scope of the program with the most savable memory that can be selected: by its name if that is enough, or else
/// by its workloads or processes. We try each scope, so that the command works as it stands.
pub fn scope(report: &ScanReport) -> Option<ScopeSpec> {
    for program in report.programs.iter().take(PROGRAMS_MOST) {
        let rows: Vec<&ProcessRow> = report.looked_at().filter(|row| row.name == program.name).collect();
        if bytes_of(program.figures.savable) == 0 {
            return None;
        }
        for spec in scopes_of(&rows) {
            if selects(&spec, &rows) {
                return Some(spec);
            }
        }
    }
    None
}

fn scopes_of(rows: &[&ProcessRow]) -> Vec<ScopeSpec> {
    let mut by_program = ScopeSpec::default();
    let mut by_workload = ScopeSpec::default();
    for row in rows {
        by_program.0 = vec![Selector::Exe(row.name.clone())];
        let Some(workload) = &row.workload else { continue };
        let workload = Selector::Workload(Workload::parse(workload));
        if !by_workload.0.contains(&workload) {
            by_workload.0.push(workload);
        }
    }
    by_workload.0.truncate(NAMES_MOST);
    let by_pid = ScopeSpec::of_pids(rows.iter().take(NAMES_MOST).map(|row| row.pid));
    vec![by_program, by_workload, by_pid]
}

/// Whether a scope selects at least half of the savable memory of these processes.
fn selects(spec: &ScopeSpec, rows: &[&ProcessRow]) -> bool {
    let Ok(found) = resolve(spec, &Roots::default()) else { return false };
    let mut all = 0.0;
    let mut selected = 0.0;
    for row in rows {
        all += row.figures.savable;
        if found.iter().any(|info| info.pid() == row.pid && info.distrust.is_none()) {
            selected += row.figures.savable;
        }
    }
    selected * 2.0 >= all
}
