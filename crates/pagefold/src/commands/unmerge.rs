//! `pagefold unmerge`: gives processes their own copies of merged pages, and removes their marks.

use crate::audit::{Audit, Before, Entry};
use crate::output;
use crate::preflight;
use anyhow::{Context, Result};
use pagefold_cli::exit;
use pagefold_cli::flags::AuditFlags;
use pagefold_cli::messages;
use pagefold_cli::scope::ScopeArgs;
use pagefold_cli::style::{self, Lines, Style};
use pagefold_linux::inject::Injector;
use pagefold_linux::inject::unmerge::{UnmergeError, unmerge};
use pagefold_linux::ksm::controller::scan_and_restore;
use pagefold_linux::ksm::lease::{InitialKnobs, KsmLease, KsmPaths, TakeError};
use pagefold_linux::ksm::request;
use pagefold_linux::proc::Roots;
use pagefold_linux::proc::process::ReadError;
use pagefold_linux::scope::Scoped;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// How often processes are looked for: those that start meanwhile are unmerged, too.
const PASSES: u32 = 5;
/// How long a scan of ksmd may take.
const PASS_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, clap::Args)]
pub struct UnmergeArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    #[command(flatten)]
    pub audit: AuditFlags,
    /// Print the result as JSON (schema pagefold.unmerge/1)
    #[arg(long)]
    pub json: bool,
}

/// The result (schema pagefold.unmerge/1). `reference.rs` explains the fields.
#[derive(Debug, Default, Serialize)]
pub struct Summary {
    schema: &'static str,
    pub given_back_bytes: u64,
    unmarked_bytes: u64,
    longest_stop_us: f64,
    pub processes: Vec<Process>,
    pub still_saved_bytes: u64,
    knobs_deferred: BTreeMap<String, u64>,
    audit_lost: u64,
}

#[derive(Debug, Default, Serialize)]
pub struct Process {
    pub pid: i32,
    pub name: String,
    pub given_back_bytes: u64,
    pub unmarked_bytes: u64,
    pub failed: Option<String>,
}

impl Summary {
    pub fn new() -> Self {
        Self { schema: "pagefold.unmerge/1", ..Self::default() }
    }
}

pub fn run(args: &UnmergeArgs) -> Result<u8> {
    // From here on nobody who doesn't read them leaves KSM's settings changed.
    messages::never_wait("pagefold");
    preflight::need_rights("unmerging")?;
    let ksm = preflight::ksm()?;
    let mut audit = args.audit.path().map(Audit::open).transpose()?;
    let mut injector = preflight::injector()?;
    preflight::give_up_rights(&[])?;
    messages::start().context("cannot start the thread for messages")?;
    let mut scoped = args.scope.resolve_by_name()?;
    let paths = KsmPaths::default();
    // No other pagefold may mark what is being unmarked. Another program that runs ksmd does no harm.
    let lease = match KsmLease::take(ksm.clone(), &paths, &InitialKnobs::NONE) {
        Ok(lease) => Some(lease),
        Err(TakeError::InUse(_)) => None,
        Err(error) => return Err(preflight::explain_take(&error).into()),
    };
    let mut summary = Summary::new();
    let mut code = exit::OK;
    if let Some(audit) = &mut audit {
        audit.write(&Entry::begin("unmerge", args.scope.spec().to_string()));
    }
    let mut seen = BTreeSet::new();
    for _ in 0..PASSES {
        scoped.retain(|one| seen.insert(one.process.key()));
        if scoped.is_empty() {
            break;
        }
        for scoped in std::mem::take(&mut scoped) {
            let before = audit.is_some().then(|| Before::of(&scoped));
            let Some((process, failure)) = unmerge_one(&scoped, &mut injector, &mut summary) else { continue };
            code = failure.unwrap_or(code);
            if let (Some(audit), Some(before)) = (&mut audit, before) {
                for entry in before.after(&scoped, process.failed.is_some()) {
                    audit.write(&entry);
                }
            }
            summary.given_back_bytes += process.given_back_bytes;
            summary.unmarked_bytes += process.unmarked_bytes;
            summary.processes.push(process);
        }
        // A child has the marks that its parent had when it was forked.
        scoped = args.scope.resolve_later();
    }
    drop(injector);
    let restored = lease.map(settle).transpose();
    if let Some(audit) = &mut audit {
        audit.write(&Entry::end("unmerge", audit.lost()));
        audit.finish();
        for complaint in audit.complaints() {
            complain!("{complaint}");
        }
        summary.audit_lost = audit.lost();
    }
    summary.knobs_deferred = restored?.unwrap_or_default();
    summary.still_saved_bytes = ksm.counters()?.view(false, false).saved().bytes().0;
    output::print(args.json, &summary, |style| describe(&summary, ("KSM", ("process", "processes")), style))?;
    Ok(code)
}

/// Unmerges a process. Returns what was done, and the exit code if it failed; nothing of a process that has ended and was not selected
/// by its number.
fn unmerge_one(scoped: &Scoped, injector: &mut Injector, summary: &mut Summary) -> Option<(Process, Option<u8>)> {
    let mut process = Process { pid: scoped.process.pid(), name: scoped.name.clone(), ..Process::default() };
    let error = match unmerge(&scoped.process, injector, &Roots::default()) {
        Ok(done) => {
            process.given_back_bytes = done.given_back.0;
            process.unmarked_bytes = done.unmarked.0;
            summary.longest_stop_us = summary.longest_stop_us.max(done.longest_stop_ns as f64 / 1e3);
            return Some((process, None));
        }
        Err(error) if error.has_ended() && !scoped.named => return None,
        Err(error) => error,
    };
    complain!("{error}");
    process.failed = Some(error.to_string());
    let code = match &error {
        UnmergeError::Inject(error) => preflight::inject_code(error),
        UnmergeError::Left { .. } | UnmergeError::NoRoom { .. } | UnmergeError::Read(ReadError::Moving { .. }) => {
            exit::FAILURE
        }
        UnmergeError::Read(_) => exit::NO_SCOPE,
    };
    Some((process, Some(code)))
}

/// Ends the lease after scans that let ksmd release what was unmarked. Returns the knobs that cannot be restored yet.
///
/// Where pages are merged on request, there is no scan: the mappings of all named pages are marked, and ksmd would merge across
/// trust domains what pagefold has not. What was unmarked is then counted as merged until its process ends.
pub fn settle(lease: KsmLease) -> Result<BTreeMap<String, u64>> {
    let on_request = Path::new(request::DEVICE).exists();
    let outcome = if on_request { lease.restore(PASS_LIMIT) } else { scan_and_restore(lease, PASS_LIMIT)? };
    for (knob, why) in &outcome.failed {
        complain!("could not restore {}: {why}", knob.file_name());
    }
    Ok(outcome.deferred.iter().map(|&(knob, value)| (knob.file_name().to_owned(), value)).collect())
}

/// It in words: `who` still saves memory in other `targets`, in singular and plural.
pub fn describe(summary: &Summary, (who, (target, targets)): (&str, (&str, &str)), style: Style) -> String {
    let mut text = String::new();
    let done = summary.processes.iter().filter(|process| process.failed.is_none()).count();
    let (memory, unmerged) = (style::human(summary.given_back_bytes), style::count(done, target, targets));
    text.line(style.bold(&format!("Unmerged {memory} in {unmerged}.")));
    // Guests have no marks.
    let has_changed = |process: &&Process| process.unmarked_bytes.max(process.given_back_bytes) > 0;
    for process in summary.processes.iter().filter(has_changed) {
        let line = format!("  {:>8}  {:<16}{}", process.pid, process.name, style::human(process.given_back_bytes));
        text.line(line);
    }
    if summary.still_saved_bytes > 0 {
        let line = format!("{who} still saves {} in other {targets}.", style::human(summary.still_saved_bytes));
        text.line(style.dim(&line));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn what_was_unmerged_is_shown() {
        let of = |pid, name: &str, bytes, failed: Option<&str>| Process {
            pid,
            name: name.to_owned(),
            given_back_bytes: bytes,
            unmarked_bytes: 2 * bytes,
            failed: failed.map(str::to_owned),
        };
        let summary = Summary {
            given_back_bytes: 35 << 20,
            unmarked_bytes: 70 << 20,
            longest_stop_us: 212.5,
            processes: vec![
                of(4_001, "redis-server", 35 << 20, None),
                of(4_002, "idle", 0, None),
                of(4_003, "agent", 0, Some("process 4003 is a zombie")),
            ],
            still_saved_bytes: 3 << 20,
            knobs_deferred: BTreeMap::from([("max_page_sharing".to_owned(), 256)]),
            ..Summary::new()
        };
        golden::check("unmerge.txt", &describe(&summary, ("KSM", ("process", "processes")), Style::plain_text()));
        golden::check("unmerge.json", &style::json(&summary).unwrap());
    }
}
