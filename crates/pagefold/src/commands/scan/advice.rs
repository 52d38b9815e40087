//! After a scan of the whole host, we advise a command that saves memory. Here we choose its scope.

use super::report::{ProcessRow, ScanReport};
use pagefold_engine::sampling::census::bytes_of;
use pagefold_host::scope::workload::Workload;
use pagefold_host::scope::{ProcessInfo, ScopeSpec, Selector, resolve};
use pagefold_procmem::Roots;
use std::collections::BTreeSet;

/// We name at most this many processes.
const NAMES_MOST: usize = 8;
/// We look at this many programs, the ones with the most savable memory first.
const PROGRAMS_MOST: usize = 8;

/// The scope of the program with the most savable memory: its name if that selects enough of it, else its workload or
/// its processes. We try out each scope, so that the command works as printed.
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

/// Scopes to try, in this order: the program's name, the workload of its largest process, its processes in that
/// workload. We never name several workloads: their owners may differ, and would share memory.
fn scopes_of(rows: &[&ProcessRow]) -> Vec<ScopeSpec> {
    let Some(largest) = rows.iter().max_by(|a, b| a.figures.savable.total_cmp(&b.figures.savable)) else {
        return Vec::new();
    };
    let mut scopes = vec![ScopeSpec(vec![Selector::Exe(largest.name.clone())])];
    if let Some(workload) = &largest.workload {
        scopes.push(ScopeSpec(vec![Selector::Workload(Workload::parse(workload))]));
    }
    let beside = rows.iter().filter(|row| row.workload == largest.workload);
    scopes.push(ScopeSpec::of_pids(beside.take(NAMES_MOST).map(|row| row.pid)));
    scopes
}

/// Whether a scope selects at least half of the savable memory of these processes.
fn selects(spec: &ScopeSpec, rows: &[&ProcessRow]) -> bool {
    let Ok(found) = resolve(spec, &Roots::default()) else { return false };
    let trusted: BTreeSet<i32> = found.iter().filter(|info| info.distrust.is_none()).map(ProcessInfo::pid).collect();
    let mut all = 0.0;
    let mut selected = 0.0;
    for row in rows {
        all += row.figures.savable;
        if trusted.contains(&row.pid) {
            selected += row.figures.savable;
        }
    }
    selected * 2.0 >= all
}
