//! `pagefold explain PID`: how the daemon judges each region of a process, what happens to it next, and what is left alone
//! and why.

mod words;

use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::control::queue::Facts;
use crate::output::placement::PlaceRow;
use anyhow::Result;
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::scope;
use pagefold_cli::style::{self, Style};
use pagefold_core::report::{Kind, RegionReport};
use pagefold_linux::proc::Roots;
use pagefold_linux::proc::maps::{VmaDetail, kind_of, read_smaps_named};
use pagefold_linux::proc::process::{Process, ReadError};
use pagefold_linux::proc::status::{exe_of, printable, program_name};
use pagefold_linux::scope::deny_list::DenyList;
use pagefold_linux::scope::exclude::{Exclusion, process_exclusion, vma_exclusion};
use pagefold_linux::scope::{ScopeError, ScopeSpec, resolve};
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The name and version of the schema.
const SCHEMA: &str = "pagefold.explain/1";

/// Arguments of `pagefold explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// The process to explain
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: i32,
    /// Print the explanation as JSON (schema pagefold.explain/1)
    #[arg(long)]
    pub json: bool,
}

/// The state of one process (schema pagefold.explain/1).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Explanation {
    schema: String,
    pid: i32,
    name: String,
    exe: Option<String>,
    /// Whether it is in the daemon's scope. If not, there are no regions.
    in_scope: bool,
    /// The daemon's scope, as flags.
    scope: String,
    /// Why the process is left alone as a whole, if it is.
    left_alone: Option<String>,
    /// Marks still to be removed, and rules that match it by name only: a sentence for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    paused: bool,
    dry_run: bool,
    /// Levels of the ladder.
    levels: usize,
    /// Anonymous memory that is not left alone.
    resident_bytes: u64,
    /// The regions, the largest first.
    regions: Vec<Row>,
    /// Mappings left alone, the largest first.
    excluded: Vec<Excluded>,
    /// Where its merged pages are, on a machine with several memory nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numa: Option<PlaceRow>,
    /// Memory in mappings that appeared since the daemon's last refresh, about a second ago.
    unseen_bytes: u64,
}

/// A region.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    /// Its addresses, as in /proc/PID/maps.
    range: String,
    bytes: u64,
    resident_bytes: u64,
    /// Heap, stack, anonymous, guest RAM or file copy.
    mapping: String,
    /// The mapping's name in /proc/PID/maps, unless `mapping` says the same.
    file: Option<String>,
    kind: Kind,
    level: usize,
    age_seconds: f64,
    /// Estimated share of duplicates, 0 to 1, and its 95 % range.
    duplicate_ratio: f64,
    duplicate_range: (f64, f64),
    /// Whether it was read whole, so that the ratio is exact.
    exact: bool,
    /// Share of its merged pages that would be written and have the same content again within the horizon. `None` if no
    /// merged page was seen written.
    cow_ratio: Option<f64>,
    /// Resident memory in marked spans, and the duplicates expected in it.
    marked_bytes: u64,
    expected_bytes: u64,
    /// What happens next: sample, read, mark, merge, watch, wait or nothing.
    next: String,
    /// For a region that waits: how long.
    wait_seconds: Option<f64>,
    /// The same as a sentence.
    sentence: String,
}

/// A mapping that is left alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Excluded {
    range: String,
    /// Resident pages of any kind.
    bytes: u64,
    file: Option<String>,
    reason: String,
}

/// Prints the explanation, and returns the exit code.
pub fn run(args: &ExplainArgs) -> Result<u8> {
    let mut explanation: Explanation = ask(&Request::Explain { pid: args.pid })?;
    if !explanation.in_scope {
        explanation = outside(explanation)?;
    }
    let text = if args.json { style::json(&explanation)? } else { words::describe(&explanation, Style::of_stdout()) };
    style::print(&text)?;
    Ok(exit::OK)
}

/// What the daemon knows about a process.
pub fn of(facts: &Facts, pid: i32) -> Result<Explanation, String> {
    let report = &facts.report;
    let mut explanation = Explanation {
        schema: SCHEMA.to_owned(),
        pid,
        scope: facts.run.scope.clone(),
        paused: report.paused,
        dry_run: facts.run.dry_run,
        levels: report.levels.len(),
        ..Explanation::default()
    };
    let Some(target) = facts.targets.iter().find(|target| target.pid == pid) else { return Ok(explanation) };
    explanation.in_scope = true;
    explanation.name.clone_from(&target.name);
    explanation.left_alone.clone_from(&target.left_alone);
    explanation.notes.clone_from(&target.notes);
    explanation.numa = facts.places().and_then(|places| places.process(pid).cloned());
    let tell = |error: ReadError| format!("{error}; look with ps");
    let process = Process::open(pid).map_err(tell)?;
    if process.start_time_ticks() != target.start_time_ticks {
        return Err(format!("process {pid} has ended, and its pid was reused; try again"));
    }
    let exe = exe_of(&process).map_err(tell)?;
    let details = read_smaps_named(&process).map_err(tell)?;
    let regions: Vec<&RegionReport> = report.regions.iter().filter(|region| region.owner == target.owner).collect();
    explanation.see(exe, &details);
    for region in &regions {
        explanation.regions.push(row(region, facts, &details, explanation.program().as_slice()));
    }
    explanation.regions.sort_by_key(|row| std::cmp::Reverse(row.resident_bytes));
    explanation.resident_bytes = explanation.regions.iter().map(|row| row.resident_bytes).sum();
    if explanation.left_alone.is_none() {
        let is_seen = |detail: &VmaDetail| {
            let (first, end) = (detail.vma.first(), detail.vma.first() + detail.vma.pages().0);
            regions.iter().any(|region| region.first < end && first < region.first + region.pages.0)
        };
        let unseen = details.iter().filter(|detail| vma_exclusion(detail).is_none() && !is_seen(detail));
        explanation.unseen_bytes = unseen.map(|detail| detail.anonymous_kib << 10).sum();
    }
    Ok(explanation)
}

/// The explanation of a process that is out of scope: what would be left alone in any case.
fn outside(mut explanation: Explanation) -> Result<Explanation> {
    let pid = explanation.pid;
    let roots = Roots::default();
    let process = match resolve(&ScopeSpec { pids: vec![pid], ..ScopeSpec::default() }, &roots) {
        Ok(mut scoped) => {
            let scoped = scoped.remove(0);
            explanation.name = scoped.name;
            explanation.left_alone = process_exclusion(&scoped.process, &DenyList::default())
                .map_err(|error| not_readable(&error))?
                .map(|exclusion| exclusion.to_string());
            scoped.process
        }
        Err(ScopeError::Avoided { cgroup, .. }) => {
            let process = Process::open(pid).map_err(|error| not_readable(&error))?;
            explanation.name = printable(&process.stat().map_err(|error| not_readable(&error))?.comm);
            explanation.left_alone =
                Some(format!("its cgroup {} must be avoided (user.pagefold.avoid)", printable(cgroup.as_bytes())));
            process
        }
        Err(error) => return Err(scope::explain(&error).into()),
    };
    let exe = match exe_of(&process) {
        Err(ReadError::Denied { .. }) => None,
        other => other.map_err(|error| not_readable(&error))?,
    };
    let details = match read_smaps_named(&process) {
        // Kernel threads and zombies have none.
        Err(_) if explanation.left_alone.is_some() => Vec::new(),
        other => other.map_err(|error| not_readable(&error))?,
    };
    explanation.see(exe, &details);
    let judged = details.iter().filter(|detail| vma_exclusion(detail).is_none());
    explanation.unseen_bytes = judged.map(|detail| detail.anonymous_kib << 10).sum();
    Ok(explanation)
}

fn not_readable(error: &ReadError) -> Exit {
    match error {
        ReadError::Vanished { .. } => Exit::new(exit::NO_SCOPE, format!("{error}; look with ps")),
        ReadError::Denied { .. } => Exit::new(exit::NOT_PERMITTED, format!("{error}; run as root")),
        _ => Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")),
    }
}

impl Explanation {
    /// Adds the executable and the mappings that are left alone.
    fn see(&mut self, exe: Option<PathBuf>, details: &[VmaDetail]) {
        self.exe = exe.map(|exe| printable(exe.as_os_str().as_bytes()));
        for detail in details {
            let Some(exclusion) = vma_exclusion(detail) else { continue };
            // Pages of the kernel do not count as the process's memory.
            let kib = if exclusion == Exclusion::Special { 0 } else { detail.rss_kib };
            self.excluded.push(Excluded {
                range: range(detail.vma.start, detail.vma.end),
                bytes: kib << 10,
                file: name(detail),
                reason: exclusion.to_string(),
            });
        }
        self.excluded.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    }

    /// The base name of its executable.
    fn program(&self) -> Vec<u8> {
        program_name(self.exe.as_ref().map(std::path::Path::new), self.name.as_bytes())
    }
}

fn row(region: &RegionReport, facts: &Facts, details: &[VmaDetail], program: &[u8]) -> Row {
    let (start, end) = (region.first.address(), region.first.address() + region.pages.bytes().0);
    // Its first mapping: a region is one mapping, or neighbours that differ only in their marks.
    let mapping = details.iter().find(|detail| detail.vma.start < end && start < detail.vma.end);
    let wait_seconds = match region.next {
        pagefold_core::report::Next::Wait { ns } => Some(ns as f64 / 1e9),
        _ => None,
    };
    Row {
        range: range(start, end),
        bytes: region.pages.bytes().0,
        resident_bytes: region.resident.bytes().0,
        mapping: mapping.map_or("unmapped meanwhile".to_owned(), |detail| kind_of(&detail.vma, program).to_string()),
        file: mapping.and_then(name),
        kind: region.kind,
        level: region.level,
        age_seconds: region.age_seconds,
        duplicate_ratio: region.duplicate_ratio,
        duplicate_range: region.duplicate_range,
        exact: region.exact,
        cow_ratio: (region.cow_ratio.0 > 0).then(|| region.cow_ratio.fraction()),
        marked_bytes: region.marked.bytes().0,
        expected_bytes: region.expected.bytes().0,
        next: crate::commands::status::name_of(&region.next).to_owned(),
        wait_seconds,
        sentence: words::sentence(region, facts),
    }
}

fn range(start: u64, end: u64) -> String {
    format!("{start:x}-{end:x}")
}

/// A mapping's name, unless its kind says the same.
fn name(detail: &VmaDetail) -> Option<String> {
    let name = detail.vma.name.as_slice();
    (!name.is_empty() && name != b"[heap]" && name != b"[stack]").then(|| printable(name))
}
