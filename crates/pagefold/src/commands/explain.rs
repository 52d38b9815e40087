//! `pagefold explain`: how the daemon judges each region of a process, what it does with the region next, and which
//! memory it leaves alone and why. For a workload, it shows sums over the processes.

pub mod words;
pub mod workload;

use crate::bounds::Bounds;
use crate::config::flags::DenyFlags;
use crate::config::ownership::shown;
use crate::config::scope::{self, ScopeArgs};
use crate::config::settings::deny_list_with;
use crate::control::client::ask;
use crate::control::protocol::{Request, Selectors};
use crate::control::queue::{Facts, TargetFacts};
use crate::output;
use crate::output::placement::PlacementRow;
use anyhow::Result;
use pagefold_engine::state::RegionState;
use pagefold_host::scope::exclude::{Exclusion, process_exclusion, vma_exclusion};
use pagefold_host::scope::{ScopeSpec, Selector, resolve};
use pagefold_procmem::Roots;
use pagefold_procmem::maps::{VmaDetail, kind_of, pinned_kib, read_smaps_named};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::status::{Status, exe_of, program_name};
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::human;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::path::Path;

const SCHEMA: &str = "pagefold.explain/1";
/// How many of the last decisions we show.
const DECISIONS: usize = 8;

#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Print the explanation as JSON (schema pagefold.explain/1, or pagefold.explain-workload/1)
    #[arg(long)]
    pub json: bool,
}

/// The state of one process (schema pagefold.explain/1). `reference.rs` explains the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Explanation {
    schema: String,
    pub pid: i32,
    pub name: String,
    pub exe: Option<String>,
    pub in_scope: bool,
    pub scope: String,
    pub left_alone: Option<String>,
    #[serde(skip)]
    pub way_in: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    pub paused: bool,
    pub dry_run: bool,
    pub levels: usize,
    pub resident_bytes: u64,
    pub regions: Vec<Row>,
    decisions: Vec<DecisionRow>,
    excluded: Vec<Excluded>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacementRow>,
    pub unseen_bytes: u64,
    /// Whether the target is a Xen guest. If so, `pid` is the guest's domain ID.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub range: String,
    pub mapping: String,
    pub file: Option<String>,
    #[serde(flatten)]
    pub figures: RegionState,
    pub next: String,
    pub since_seconds: f64,
    pub wait_seconds: Option<f64>,
    pub sentence: String,
}

/// A change in what we do with a region.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct DecisionRow {
    seconds_ago: f64,
    range: String,
    bytes: u64,
    from: String,
    to: String,
    reason: String,
}

/// A mapping that we leave alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Excluded {
    range: String,
    bytes: u64,
    file: Option<String>,
    reason: String,
}

pub fn run(args: &ExplainArgs) -> Result<u8> {
    let spec = args.scope.spec();
    let pid = match spec.0[..] {
        [] => {
            let line = "name a PID, a program or a workload to explain; try pagefold explain 4711";
            return Err(Exit::new(exit::USAGE, line).into());
        }
        [Selector::Pid(pid)] => pid,
        _ => {
            let selectors = Selectors::of(&spec).map_err(|error| scope::explain(&error))?;
            // Each selector must match a process. The daemon only refuses if none does.
            args.scope.resolve()?;
            let explanation: workload::Explanation = ask(&Request::Workload(selectors))?;
            output::print(args.json, &explanation, |style| workload::describe(&explanation, style))?;
            return Ok(exit::OK);
        }
    };
    let explanation: Explanation = ask(&Request::Explain { pid })?;
    let mut explanation = if explanation.in_scope { explanation } else { outside(explanation)? };
    explanation.way_in = way_in(&explanation).unwrap_or_default();
    print(args.json, &explanation)
}

/// Tells how to have a process merged that we leave alone as a whole. The words come after the reason.
fn way_in(explanation: &Explanation) -> Result<String> {
    let Some(why) = &explanation.left_alone else { return Ok(String::new()) };
    let found = resolve(&ScopeSpec::of_pids([explanation.pid]), &Roots::default())?;
    Ok(Bounds::with(&DenyFlags::default())?.way_in(&found[0], why))
}

/// Explains a Xen guest, given its name or domain ID. Only the daemon of pagefold-xen knows guests.
pub fn run_of_guest(guest: &str, json: bool) -> Result<u8> {
    let explanation: Explanation = ask(&Request::Guest { guest: guest.to_owned() })?;
    if !explanation.in_scope {
        let guest = printable(guest.as_bytes());
        let scope = explanation.scope;
        let line = format!("guest {guest} is not in the scope of the running daemon ({scope}); add it to that scope");
        return Err(Exit::new(exit::NO_SCOPE, line).into());
    }
    print(json, &explanation)
}

fn print(json: bool, explanation: &Explanation) -> Result<u8> {
    output::print(json, explanation, |style| words::describe(explanation, style))?;
    Ok(exit::OK)
}

/// Explains a Xen guest from the daemon's facts.
pub fn of_guest(facts: &Facts, guest: &str) -> Explanation {
    if facts.xen.is_none() {
        return begun(facts, 0);
    }
    let number = guest.parse();
    let target = facts.targets.iter().find(|target| target.name == guest || number == Ok(target.pid));
    let Some(target) = target else { return begun(facts, 0) };
    let mut explanation = begun(facts, target.pid);
    explanation.see_target(target, facts);
    for region in regions_of(facts, target) {
        explanation.regions.push(row_of(region, facts, "guest memory".to_owned(), None));
    }
    explanation.decisions = decisions_of(facts, target);
    explanation.regions.sort_by_key(|row| Reverse(row.figures.resident));
    explanation.guest = true;
    explanation
}

fn regions_of<'a>(facts: &'a Facts, target: &'a TargetFacts) -> impl Iterator<Item = &'a RegionState> + Clone {
    facts.state.regions.iter().filter(|region| region.owner == target.owner)
}

/// The latest changes in what we do with a process's regions, the newest first.
fn decisions_of(facts: &Facts, target: &TargetFacts) -> Vec<DecisionRow> {
    let mut rows = Vec::new();
    for change in facts.state.decisions.iter().rev().filter(|change| change.owner == target.owner).take(DECISIONS) {
        let start = change.first.address();
        rows.push(DecisionRow {
            seconds_ago: change.to.seconds_stood(facts.state.now_ns),
            range: range(start, start + change.pages.bytes().0),
            bytes: change.pages.bytes().0,
            from: change.from.verb.to_string(),
            to: change.to.verb.to_string(),
            reason: change.to.reason.to_string(),
        });
    }
    rows
}

/// An explanation with only the facts about the daemon. Callers add the process.
fn begun(facts: &Facts, pid: i32) -> Explanation {
    Explanation {
        schema: SCHEMA.to_owned(),
        pid,
        scope: facts.run.scope.clone(),
        paused: facts.state.activity.paused,
        dry_run: facts.run.dry_run,
        levels: facts.state.totals.levels.len(),
        ..Explanation::default()
    }
}

/// Explains a process from the daemon's facts.
pub fn of(facts: &Facts, pid: i32) -> Result<Explanation, String> {
    // If the targets are Xen guests, `target.pid` is a guest's domain ID and not a pid.
    let target = facts.targets.iter().find(|target| target.pid == pid && facts.xen.is_none());
    let Some(target) = target else { return Ok(begun(facts, pid)) };
    let process = Process::open(pid).map_err(|error| look_with_ps(&error))?;
    if process.start_time_ticks() != target.start_time_ticks {
        return Err(format!("process {pid} has ended, and its pid was reused; try again"));
    }
    let exe = exe_of(&process).map_err(|error| look_with_ps(&error))?;
    let details = match read_smaps_named(&process) {
        Err(ReadError::TooMany { .. }) => Vec::new(),
        other => other.map_err(|error| look_with_ps(&error))?,
    };
    let mut explanation = of_target(facts, target, exe.as_deref(), &details);
    explanation.see_pinned(&details, &Status::of(&process).map_err(|error| look_with_ps(&error))?);
    Ok(explanation)
}

fn look_with_ps(error: &ReadError) -> String {
    format!("{error}; list the processes with ps")
}

/// Explains a target, given its executable and its mappings.
pub fn of_target(facts: &Facts, target: &TargetFacts, exe: Option<&Path>, details: &[VmaDetail]) -> Explanation {
    let mut explanation = begun(facts, target.pid);
    explanation.see_target(target, facts);
    explanation.decisions = decisions_of(facts, target);
    explanation.notes = target.to_unmark.iter().map(words::to_unmark).chain(target.notes.iter().cloned()).collect();
    explanation.numa = facts.places().and_then(|places| places.process(target.pid).cloned());
    explanation.see(exe, details);
    let program = explanation.program();
    let regions = regions_of(facts, target);
    for region in regions.clone() {
        explanation.regions.push(row(region, facts, details, &program));
    }
    explanation.regions.sort_by_key(|row| Reverse(row.figures.resident));
    if explanation.left_alone.is_some() {
        return explanation;
    }
    for detail in details.iter().filter(|detail| vma_exclusion(detail).is_none()) {
        let first = detail.vma.first();
        let end = first + detail.vma.pages().0;
        if !regions.clone().any(|region| region.first < end && first < region.first + region.pages.0) {
            explanation.unseen_bytes += detail.anonymous_kib << 10;
        }
    }
    explanation
}

/// Explains a process that is out of scope: we can only say which memory we'd leave alone.
fn outside(mut explanation: Explanation) -> Result<Explanation> {
    let pid = explanation.pid;
    let roots = Roots::default();
    let spec = ScopeSpec::of_pids([pid]);
    let scoped = resolve(&spec, &roots).map_err(|error| scope::explain(&error))?.remove(0);
    explanation.left_alone = process_exclusion(&scoped, &deny_list_with(&DenyFlags::default())?, None)
        .map_err(|error| not_readable(&error))?
        .map(|exclusion| exclusion.to_string());
    explanation.name = scoped.name;
    let scoped_status = scoped.status;
    let process = scoped.process;
    let exe = match exe_of(&process) {
        Err(ReadError::Denied { .. }) => None,
        other => other.map_err(|error| not_readable(&error))?,
    };
    let details = match read_smaps_named(&process) {
        // Kernel threads and zombies have no mappings.
        Err(_) if explanation.left_alone.is_some() => Vec::new(),
        Err(error @ ReadError::TooMany { .. }) => {
            explanation.left_alone = Some(Exclusion::of_unreadable(error)?.to_string());
            Vec::new()
        }
        other => other.map_err(|error| not_readable(&error))?,
    };
    explanation.see(exe.as_deref(), &details);
    explanation.see_pinned(&details, &scoped_status);
    let judged = details.iter().filter(|detail| vma_exclusion(detail).is_none());
    explanation.unseen_bytes = judged.map(|detail| detail.anonymous_kib << 10).sum();
    Ok(explanation)
}

fn not_readable(error: &ReadError) -> Exit {
    match error {
        ReadError::Vanished { .. } => Exit::new(exit::NO_SCOPE, format!("{error}; list the processes with ps")),
        ReadError::Denied { .. } => Exit::new(exit::NOT_PERMITTED, format!("{error}; run as root")),
        _ => Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")),
    }
}

impl Explanation {
    fn see_target(&mut self, target: &TargetFacts, facts: &Facts) {
        self.in_scope = true;
        self.resident_bytes = facts.state.owner(target.owner).memory.resident_bytes;
        self.name.clone_from(&target.name);
        self.left_alone.clone_from(&target.left_alone);
    }

    /// Fills in the executable and the mappings that we leave alone.
    fn see(&mut self, exe: Option<&Path>, details: &[VmaDetail]) {
        self.exe = exe.map(shown);
        for detail in details {
            let Some(exclusion) = vma_exclusion(detail) else { continue };
            // Pages that the kernel provides (vDSO) don't count as the process's memory.
            let kib = if exclusion == Exclusion::Special { 0 } else { detail.rss_kib };
            self.excluded.push(Excluded {
                range: range(detail.vma.start, detail.vma.end),
                bytes: kib << 10,
                file: name(detail),
                reason: exclusion.to_string(),
            });
        }
        self.excluded.sort_by_key(|row| Reverse(row.bytes));
    }

    /// Adds a note on pinned memory, except for mappings that we leave alone because they're pinned.
    fn see_pinned(&mut self, details: &[VmaDetail], status: &Status) {
        let mut kib = pinned_kib(details, status);
        for detail in details {
            if vma_exclusion(detail) == Some(Exclusion::Pinned) {
                kib = kib.saturating_sub(detail.rss_kib);
            }
        }
        if kib > 0 {
            self.notes.push(format!("Of its memory, {} are {}.", human(kib << 10), Exclusion::Pinned));
        }
    }

    /// The base name of the process's executable.
    fn program(&self) -> Vec<u8> {
        program_name(self.exe.as_ref().map(std::path::Path::new), self.name.as_bytes())
    }
}

fn row(region: &RegionState, facts: &Facts, details: &[VmaDetail], program: &[u8]) -> Row {
    let start = region.first.address();
    let end = start + region.pages.bytes().0;
    // We take the region's first mapping: a region's mappings differ only in whether they're marked (VM_MERGEABLE).
    let mapping = details.iter().find(|detail| detail.vma.start < end && start < detail.vma.end);
    let kind = mapping.map_or("no longer mapped".to_owned(), |detail| kind_of(&detail.vma, program).to_string());
    row_of(region, facts, kind, mapping.and_then(name))
}

fn row_of(region: &RegionState, facts: &Facts, mapping: String, file: Option<String>) -> Row {
    let start = region.first.address();
    Row {
        range: range(start, start + region.pages.bytes().0),
        mapping,
        file,
        figures: region.clone(),
        next: region.decision.verb.to_string(),
        since_seconds: region.decision.seconds_stood(facts.state.now_ns),
        wait_seconds: region.decision.seconds_left(facts.state.now_ns),
        sentence: words::sentence(region, facts),
    }
}

fn range(start: u64, end: u64) -> String {
    format!("{start:x}-{end:x}")
}

/// A mapping's name, unless the mapping's kind says the same.
fn name(detail: &VmaDetail) -> Option<String> {
    let name = detail.vma.name.as_slice();
    (!name.is_empty() && name != b"[heap]" && name != b"[stack]").then(|| printable(name))
}
