//! `pagefold unmerge` and `exclude`: give processes their own copies of merged pages, and unmark their memory
//! (MADV_UNMERGEABLE).
//!
//! If a daemon is running, it does this for us, and neither its run nor later runs merge the processes again. Without a
//! daemon, this command does the work, and only `exclude` makes later runs leave the processes alone.

use crate::audit::{Audit, Demand, Entry, Owner};
use crate::config::flags::AuditFlags;
use crate::config::scope::{ScopeArgs, explain, with_descendants};
use crate::control::client::ask;
use crate::control::protocol::{Request, Selectors};
use crate::kept_out;
use crate::output;
use crate::preflight;
use anyhow::{Context, Result};
use pagefold_host::scope::{ProcessInfo, ScopeError, ScopeSpec};
use pagefold_host::unmerger::{UnmergedProcess, Unmerger};
use pagefold_inject::unmerge::UnmergeError;
use pagefold_ksm::controller::scan_and_restore;
use pagefold_ksm::lease::{KsmLease, KsmPaths, TakeError};
use pagefold_ksm::lock::{Lock, LockError};
use pagefold_ksm::{RestoreOutcome, request};
use pagefold_procmem::Roots;
use pagefold_procmem::os::peer::own_uid;
use pagefold_procmem::process::ReadError;
use pagefold_procmem::statm::Sizes;
use pagefold_text::exit::{self, Exit};
use pagefold_text::messages;
use pagefold_text::style::{self, Lines, Style};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// How many times we look for processes in scope. Later passes find processes that have started since.
const PASSES: u32 = 5;
/// How long we wait for ksmd's scans.
const PASS_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, clap::Args)]
#[command(mut_arg("pid", with_descendants))]
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
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    schema: String,
    pub given_back_bytes: u64,
    unmarked_bytes: u64,
    longest_stop_us: f64,
    pub processes: Vec<Process>,
    pub still_saved_bytes: u64,
    /// The selectors (`--pid 12`) of the processes that pagefold leaves alone from now on.
    kept_out: Option<String>,
    /// Why we couldn't save the list of these processes. If we couldn't, only the running daemon leaves them alone.
    pub not_kept: Option<String>,
    /// Whether a daemon did the work, and not this command.
    by_daemon: bool,
    knobs_deferred: BTreeMap<String, u64>,
    audit_lost: u64,
    exit_code: u8,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    pub name: String,
    pub given_back_bytes: u64,
    pub unmarked_bytes: u64,
    pub failed: Option<String>,
}

impl Summary {
    pub fn new() -> Self {
        Self { schema: "pagefold.unmerge/1".to_owned(), ..Self::default() }
    }

    /// A daemon's summary. `kept_out`: the processes that it won't merge again, as command line flags.
    pub fn of_daemon(kept_out: String, still_saved_bytes: u64) -> Self {
        Self { kept_out: Some(kept_out), by_daemon: true, still_saved_bytes, ..Self::new() }
    }

    /// Adds one process's result. We skip a process that has ended, unless the user named its pid.
    pub fn add(&mut self, process: &UnmergedProcess) {
        if process.is_gone() {
            return;
        }
        let UnmergedProcess { pid, name, done, failure, .. } = process;
        let failed = failure.as_ref().map(|error| {
            self.exit_code = code_of(error);
            match (&**error, self.by_daemon) {
                (UnmergeError::Locked { .. } | UnmergeError::UnderWay { .. }, true) => {
                    format!("{error}; pagefold keeps trying")
                }
                (UnmergeError::Locked { .. }, false) => {
                    format!("{error}; run this again when the process has released it, or end the process")
                }
                _ => error.to_string(),
            }
        });
        let given_back_bytes = done.given_back.0;
        let unmarked_bytes = done.unmarked.0;
        self.given_back_bytes += given_back_bytes;
        self.unmarked_bytes += unmarked_bytes;
        self.longest_stop_us = self.longest_stop_us.max(done.longest_stop_ns as f64 / 1e3);
        self.processes.push(Process { pid: *pid, name: name.clone(), given_back_bytes, unmarked_bytes, failed });
    }
}

/// Unmerges the processes. If `keep_out`, keeps them out of later runs even if no daemon is running.
pub fn run(args: &UnmergeArgs, keep_out: bool) -> Result<u8> {
    preflight::need_root("unmerging")?;
    if args.scope == ScopeArgs::default() {
        return Err(explain(&ScopeError::Empty).into());
    }
    let paths = KsmPaths::default();
    // No other pagefold may mark memory while we unmark it.
    let summary = match Lock::try_take(&paths.lock) {
        Ok(lock) => unmerge(args, keep_out, lock, &paths)?,
        Err(held @ LockError::Held { .. }) => ask_daemon(args, held)?,
        Err(error) => return Err(preflight::explain_take(&error.into()).into()),
    };
    for failed in summary.processes.iter().filter_map(|process| process.failed.as_ref()) {
        complain!("{failed}");
    }
    output::print(args.json, &summary, |style| describe(&summary, "KSM", "process", "processes", style))?;
    Ok(summary.exit_code)
}

/// Asks the daemon to unmerge the processes. If no daemon answers, another program holds the lock, and we return the
/// error `held`.
fn ask_daemon(args: &UnmergeArgs, held: LockError) -> Result<Summary> {
    if args.audit.0.audit.as_deref().is_some() {
        let line = "the running pagefold writes this to its own audit log; omit --audit";
        return Err(Exit::new(exit::USAGE, line).into());
    }
    let selectors = Selectors::of(&args.scope.spec()).map_err(|error| explain(&error))?;
    ask(&Request::Unmerge(selectors)).map_err(|error| {
        let is_absent = pagefold_text::program::code_of(&error) == exit::NO_DAEMON;
        if is_absent { preflight::explain_take(&held.into()).into() } else { error }
    })
}

fn unmerge(args: &UnmergeArgs, keep_out: bool, lock: Lock, paths: &KsmPaths) -> Result<Summary> {
    // From here on we never wait for a reader of our messages: a slow one could keep us from restoring KSM's settings.
    messages::never_wait("pagefold");
    preflight::need_rights("unmerging")?;
    let ksm = preflight::ksm()?;
    let mut audit = args.audit.0.audit.as_deref().map(Audit::open).transpose()?;
    let mut injector = preflight::injector()?;
    preflight::give_up_rights(&[])?;
    messages::start().context("cannot start the thread for messages")?;
    let mut scoped = args.scope.resolve_for_undoing()?;
    if keep_out {
        exclude(&args.scope.spec(), &scoped)?;
    }
    // If another program controls ksmd, we go on without the lease, which we'd need only to have ksmd scan.
    let lease = match KsmLease::take_locked(ksm.clone(), lock, paths, &[]) {
        Ok(lease) => Some(lease),
        Err(TakeError::InUse(_)) => None,
        Err(error) => return Err(preflight::explain_take(&error).into()),
    };
    let kept_out = keep_out.then(|| args.scope.to_string());
    let mut summary = Summary { kept_out, ..Summary::new() };
    if let Some(audit) = &mut audit {
        audit.write(&Entry::begin("unmerge", args.scope.to_string()));
        if keep_out {
            audit.write(&Entry::Exclude(Demand { scope: args.scope.to_string(), uid: own_uid() }));
        }
    }
    let mut unmerger = Unmerger::new(&mut injector, Roots::default());
    let mut owners = BTreeMap::new();
    let mut found = BTreeSet::new();
    let mut over = Vec::new();
    for _ in 0..PASSES {
        scoped.retain(|one| found.insert(one.process.key()));
        if scoped.is_empty() {
            break;
        }
        // Large address spaces come last. A hostile program may have marked terabytes, which take long.
        scoped.sort_by_cached_key(address_space);
        for scoped in std::mem::take(&mut scoped) {
            owners.insert(scoped.process.pid(), Owner::of(&scoped, scoped.cgroups.domain.as_ref()));
            let done = unmerger.unmerge(scoped);
            record(&mut audit, &owners, &done);
            over.extend(done);
        }
        // Look for children forked meanwhile: they've inherited their parents' marks.
        scoped = args.scope.resolve_for_undoing_again(&found);
    }
    let done = unmerger.finish();
    record(&mut audit, &owners, &done);
    over.extend(done);
    drop(injector);
    over.sort_by_key(|process| process.pid);
    for process in &over {
        summary.add(process);
    }
    // If a process still holds its mmap lock, ksmd would wait for the lock, so we don't have ksmd scan.
    let is_locked = over.iter().any(|process| process.failure.as_ref().is_some_and(|error| error.is_late()));
    let restored = lease.map(|lease| if is_locked { Ok(restore(lease)) } else { settle(lease) }).transpose();
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
    Ok(summary)
}

/// The size of a process's address space, pages. Once its main thread has ended, the kernel says 0, and we assume the
/// worst.
fn address_space(info: &ProcessInfo) -> u64 {
    let statm = info.process.read_file("statm").unwrap_or_default();
    match Sizes::parse(&statm) {
        Ok(sizes) if sizes.mapped > 0 => sizes.mapped,
        _ => u64::MAX,
    }
}

/// Adds the processes to the list of those that later runs exclude. Our caller has the lock, so no daemon writes it.
fn exclude(spec: &ScopeSpec, found: &[ProcessInfo]) -> Result<(), Exit> {
    let spec = Selectors::of(spec).map_err(|error| explain(&error))?.spec();
    let mut list = kept_out::read()?;
    list.keep_out(&spec, found, own_uid(), &Roots::default()).map_err(|error| kept_out::explain(&error))?;
    kept_out::write(&list).map_err(|why| Exit::new(exit::FAILURE, format!("nothing was excluded: {why}")))
}

/// Writes these results to the audit log, if there is one.
fn record(audit: &mut Option<Audit>, owners: &BTreeMap<i32, Owner>, processes: &[UnmergedProcess]) {
    let Some(audit) = audit else { return };
    for process in processes {
        for mapping in &process.done.mappings {
            if let Some(owner) = owners.get(&process.pid) {
                audit.write(&Entry::asked(owner.clone(), mapping, process.failure.is_some()));
            }
        }
    }
}

/// The exit code if we couldn't unmerge a process.
fn code_of(error: &UnmergeError) -> u8 {
    match error {
        UnmergeError::Inject(error) => preflight::inject_code(error),
        UnmergeError::Bits32 { .. } => exit::REFUSED,
        error if error.is_late() => exit::REFUSED,
        UnmergeError::Left { .. }
        | UnmergeError::NoRoom { .. }
        | UnmergeError::Locked { .. }
        | UnmergeError::UnderWay { .. }
        | UnmergeError::Read(ReadError::Moving { .. }) => exit::FAILURE,
        UnmergeError::Read(_) => exit::NO_SCOPE,
    }
}

/// Has ksmd scan so that it releases unmarked memory, and then ends the lease. Returns the knobs that we can't restore
/// yet.
///
/// If pages are merged on request, we don't scan: all mappings with such pages are marked, and ksmd would merge them
/// across trust domains. Without a scan, unmarked memory counts as merged until its process ends.
fn settle(lease: KsmLease) -> Result<BTreeMap<String, u64>> {
    if Path::new(request::DEVICE).exists() {
        return Ok(restore(lease));
    }
    Ok(report_restored(&scan_and_restore(lease, PASS_LIMIT)?))
}

/// Restores KSM's knobs and ends the lease. Returns the knobs that we can't restore yet.
fn restore(lease: KsmLease) -> BTreeMap<String, u64> {
    report_restored(&lease.restore(PASS_LIMIT))
}

fn report_restored(outcome: &RestoreOutcome) -> BTreeMap<String, u64> {
    for (knob, why) in &outcome.failed {
        complain!("could not restore {}: {why}", knob.file_name());
    }
    outcome.deferred.iter().map(|&(knob, value)| (knob.file_name().to_owned(), value)).collect()
}

/// The summary in words. `who` is KSM or Xen; `target` and `targets` are the words for one and several processes or
/// guests.
pub fn describe(summary: &Summary, who: &str, target: &str, targets: &str, style: Style) -> String {
    let mut text = String::new();
    let failed = summary.processes.iter().filter(|process| process.failed.is_some()).count();
    let done = summary.processes.len() - failed;
    let memory = style::human(summary.given_back_bytes);
    let unmerged = style::count(done, target, targets);
    text.line(style.bold(&format!("Unmerged {memory} in {unmerged}.")));
    if summary.given_back_bytes > 0 {
        text.line(style.dim("If a page has no sharers any more, the copy that was kept counts, too."));
    }
    for process in &summary.processes {
        // Xen guests have no marks, so look at both figures.
        if process.unmarked_bytes.max(process.given_back_bytes) == 0 {
            continue;
        }
        let line = format!("  {:>8}  {:<16}{}", process.pid, process.name, style::human(process.given_back_bytes));
        text.line(line);
    }
    if let Some(kept_out) = &summary.kept_out {
        if failed > 0 && summary.by_daemon {
            let failed = style::count(failed, target, targets);
            text.line(format!("Not done yet in {failed}: pagefold keeps trying (see pagefold status)."));
        }
        match &summary.not_kept {
            None => text.line(format!("Not merged again, until you run: pagefold include {kept_out}")),
            Some(why) => {
                text.line(format!(
                    "Not merged again until the daemon restarts ({why}), or until you run: pagefold include {kept_out}"
                ));
            }
        }
    }
    if summary.by_daemon {
        return text;
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
            exit_code: exit::REFUSED,
            knobs_deferred: BTreeMap::from([("max_page_sharing".to_owned(), 256)]),
            ..Summary::new()
        };
        golden::check("unmerge.txt", &describe(&summary, "KSM", "process", "processes", Style::plain_text()));
        golden::check("unmerge.json", &style::json(&summary).unwrap());
        let by_daemon =
            Summary { kept_out: Some("--exe redis-server --user 33".to_owned()), by_daemon: true, ..summary };
        golden::check("unmerge-daemon.txt", &describe(&by_daemon, "KSM", "process", "processes", Style::plain_text()));
    }
}
