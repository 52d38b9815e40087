//! After a scan we advise a command that saves the memory. If the scan was of the whole host, we also choose the
//! command's scope.

use super::report::{ProcessRow, ScanReport};
use crate::commands::status::Status;
use crate::config::args::RunArgs;
use crate::config::flags::DenyFlags;
use crate::config::scope::ScopeArgs;
use crate::config::settings::{DEFAULT_FILE, Settings};
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::preflight;
use pagefold_engine::sampling::census::bytes_of;
use pagefold_host::scope::workload::Workload;
use pagefold_host::scope::{ProcessInfo, ScopeSpec, Selector, resolve};
use pagefold_procmem::Roots;
use std::collections::BTreeSet;
use std::path::Path;

/// A command lists at most this many processes or workloads.
const NAMES_MOST: usize = 8;

/// The command that saves the memory found by a scan with these flags. Only one pagefold can run at a time, so if one
/// is running, this is `enable`, or `None` if `enable` wouldn't help.
pub fn command(report: &ScanReport, scope: &ScopeArgs, deny: &DenyFlags) -> Option<String> {
    let spec = if report.is_host { self::scope(report)? } else { scope.spec() };
    // Without root we can't read the lock, and so assume that no pagefold is running.
    if !preflight::is_running() {
        return Some(format!("pagefold run {spec}{deny}"));
    }
    let status = ask::<Status>(&Request::Status).ok()?;
    let pids = if report.is_host {
        resolve(&spec, &Roots::default()).ok()?.iter().map(ProcessInfo::pid).collect()
    } else {
        report.looked_at().map(|row| row.pid).collect()
    };
    // `enable` adds to the default file, so it only works if the daemon takes its scope from there.
    let file = Settings::from(&RunArgs::default(), Some(Path::new(DEFAULT_FILE)));
    let can_enable = *deny == DenyFlags::default() && file.is_ok_and(|file| file.scope.to_string() == status.run.scope);
    beside(&status, &spec, &pids, can_enable)
}

/// The command that makes a running daemon merge these processes, which `spec` selects. `None` if it merges them
/// already, or if no command can.
fn beside(status: &Status, spec: &ScopeSpec, pids: &BTreeSet<i32>, can_enable: bool) -> Option<String> {
    let in_scope: BTreeSet<i32> = status.programs.processes.iter().map(|row| row.pid).collect();
    let has_names = spec.0.iter().all(|selector| !matches!(selector, Selector::Pid(_) | Selector::All));
    if !can_enable || !has_names || pids.is_subset(&in_scope) {
        return None;
    }
    Some(format!("pagefold enable {spec}"))
}

/// The scope of the program with the most savable memory: its name if that selects enough of the memory, else its
/// workload or its processes. We try out each scope, so that the command works as printed.
pub fn scope(report: &ScanReport) -> Option<ScopeSpec> {
    let rows = largest_program(report);
    scopes_of(&rows).into_iter().find(|spec| selects(spec, &rows))
}

/// After a scan of the whole host: the command that merges a program across several workloads. Their owners may differ,
/// and would share memory, so we print the command for the case that they trust each other.
pub fn across_workloads(report: &ScanReport) -> Option<String> {
    let rows = largest_program(report);
    let mut spec = ScopeSpec::default();
    for row in &rows {
        let selector = Selector::Workload(Workload::parse(row.workload.as_ref()?));
        if spec.0.len() < NAMES_MOST && !spec.0.contains(&selector) {
            spec.0.push(selector);
        }
    }
    if spec.0.len() < 2 || !selects(&spec, &rows) {
        return None;
    }
    Some(format!("pagefold run {spec}"))
}

/// The processes that run the program with the most savable memory, none if there's no such memory.
fn largest_program(report: &ScanReport) -> Vec<&ProcessRow> {
    match report.programs.first() {
        Some(program) if bytes_of(program.figures.savable) > 0 => {
            report.looked_at().filter(|row| row.name == program.name).collect()
        }
        _ => Vec::new(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::Run;

    #[test]
    fn beside_a_daemon_the_command_is_one_that_works() {
        let mut run = Run::by_ksmd();
        run.seconds(10);
        let status = run.status();
        let mut pids: BTreeSet<i32> = status.programs.processes.iter().take(2).map(|row| row.pid).collect();
        let named = ScopeSpec(vec![Selector::Exe("redis-server".to_owned())]);
        assert_eq!(beside(&status, &named, &pids, true), None, "it's merged already");
        pids.insert(1);
        assert_eq!(beside(&status, &named, &pids, true).as_deref(), Some("pagefold enable --exe redis-server"));
        assert_eq!(beside(&status, &named, &pids, false), None, "the daemon has another scope");
        assert_eq!(beside(&status, &ScopeSpec::of_pids([1]), &pids, true), None, "enable takes names");
    }
}
