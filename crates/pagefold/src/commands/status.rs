//! `pagefold status`: what the daemon has saved, what it costs, and what it's doing.

pub mod groups;
pub mod room;
pub mod rows;
mod words;

use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::control::queue::{Facts, KeptOutRow, TargetFacts, ToUnmark};
use crate::events::Event;
use crate::output;
use crate::output::placement::PlacementView;
use crate::output::xen::XenView;
use anyhow::Result;
use groups::{LeftOutRow, ScopeRow};
use pagefold_engine::config::Only;
use pagefold_engine::decision::{Reason, Verb};
use pagefold_engine::host::Mechanism;
use pagefold_engine::keys::DomainKey;
use pagefold_engine::ledger::RequestCounts;
use pagefold_engine::state::{
    Activity, CopyTotals, Incidents, MemoryState, MemoryTotal, RegionState, RegionTotals, State, Work,
};
use pagefold_host::check::users::{KsmUser, ksm_users};
use pagefold_text::exit;
use pagefold_text::figures::time;
use pagefold_text::style::{self, Style, count};
use room::ReserveView;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
pub use words::{describe, paint, process_table, saved_size, size};

const SCHEMA: &str = "pagefold.status/1";
/// We look for other users of KSM for at most this long. That's enough for some ten thousand processes.
const OTHERS_LIMIT: Duration = Duration::from_millis(100);
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// Clears a terminal, and begins at its top.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    /// Print the daemon's answer as JSON (schema pagefold.status/1)
    #[arg(long)]
    pub json: bool,
    /// Print the status every 5 s until interrupted; with --json, one line each time
    #[arg(long)]
    pub watch: bool,
}

/// The state of a run (schema pagefold.status/1): the parts of the engine's [`State`], with the host's names, reasons
/// and events. All views are made from this, so add a new column here first. `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    schema: String,
    pub pid: u32,
    #[serde(flatten)]
    pub run: Run,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_bytes: Option<u64>,
    #[serde(flatten)]
    pub activity: Activity,
    /// Why we don't control KSM. `stood_down` says whether that's because we gave it up.
    pub ksm_why: Option<String>,
    pub stood_down: bool,
    #[serde(flatten)]
    pub memory: MemoryState,
    pub to_unmark_bytes: u64,
    pub foreign_marks: bool,
    #[serde(flatten)]
    pub copies: CopyTotals,
    pub reserve: ReserveView,
    #[serde(flatten)]
    pub incidents: Incidents,
    pub injector_restarts: u32,
    pub audit_lost: u64,
    #[serde(flatten)]
    pub work: Work,
    #[serde(flatten)]
    pub totals: RegionTotals,
    #[serde(flatten)]
    pub programs: Programs,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xen: Option<XenView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacementView>,
    /// Other processes with merged memory. The command finds them, not the daemon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<KsmUser>,
    pub events: Vec<Event>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub scope: String,
    pub dry_run: bool,
    pub mechanism: Mechanism,
    pub only: Only,
    /// The file to which the run writes its history.
    #[serde(default)]
    pub history: Option<PathBuf>,
}

impl Run {
    /// How the run merges, in words.
    pub fn merging(&self) -> &'static str {
        match self.mechanism {
            _ if self.dry_run => "dry run",
            Mechanism::Ksmd => "merging by ksmd",
            Mechanism::Request => "merging on request",
        }
    }
}

/// The processes in scope, one by one and summed up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Programs {
    pub domains: Vec<DomainRow>,
    pub processes: Vec<ProcessRow>,
    pub scopes: Vec<ScopeRow>,
    pub left_out: Vec<LeftOutRow>,
    pub kept_out: Vec<KeptOutRow>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DomainRow {
    pub name: String,
    pub processes: usize,
    pub resident_bytes: u64,
    pub marked_bytes: u64,
    /// Whether we leave this trust domain alone because ksmd merges another domain.
    pub left_alone: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessRow {
    pub pid: i32,
    pub name: String,
    pub workload: Option<String>,
    pub regions: usize,
    #[serde(flatten)]
    pub memory: MemoryTotal,
    pub saved_bytes: Option<u64>,
    pub left_alone: Option<String>,
    pub to_unmark: Option<ToUnmark>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Doing {
    Paused,
    Reading,
    Marking,
    Merging,
    /// The run takes samples, but doesn't read whole regions, mark or merge.
    Sampling,
    Watching,
}

impl Doing {
    pub const ALL: [Self; 6] =
        [Self::Paused, Self::Reading, Self::Marking, Self::Merging, Self::Sampling, Self::Watching];
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

pub fn run(args: &StatusArgs) -> Result<u8> {
    let mut has_answered = false;
    loop {
        let mut status: Status = match ask(&Request::Status) {
            Ok(status) => status,
            Err(error) if has_answered => {
                // The daemon may be restarting, so try again.
                complain!("{error:#}");
                thread::sleep(WATCH_INTERVAL);
                continue;
            }
            Err(error) => return Err(error),
        };
        has_answered = true;
        status.find_others();
        if !args.watch {
            output::print(args.json, &status, |style| describe(&status, style))?;
            return Ok(exit::OK);
        }
        let text = if args.json { style::json_line(&status)? } else { describe(&status, Style::of_stdout()) };
        if io::stdout().is_terminal() && !args.json {
            style::draw(CLEAR)?;
        }
        if !style::print_on(&text)? {
            return Ok(exit::OK);
        }
        thread::sleep(WATCH_INTERVAL);
    }
}

impl Status {
    pub fn of(facts: &Facts) -> Self {
        let Facts { state, run, .. } = facts;
        let ksm_why = if state.activity.ksm_driven {
            None
        } else if run.dry_run {
            Some("a dry run changes nothing".to_owned())
        } else {
            run.stood_down.clone()
        };
        Self {
            schema: SCHEMA.to_owned(),
            pid: std::process::id(),
            run: Run {
                scope: run.scope.clone(),
                dry_run: run.dry_run,
                mechanism: run.config.mechanism,
                only: run.config.only,
                history: run.history.clone(),
            },
            other_bytes: state.other_bytes,
            activity: state.activity.clone(),
            ksm_why,
            stood_down: run.stood_down.is_some(),
            memory: state.memory,
            to_unmark_bytes: facts.to_unmark_bytes(),
            foreign_marks: state.foreign_marks,
            copies: state.copies,
            reserve: ReserveView::of(facts),
            incidents: state.incidents,
            injector_restarts: facts.injector_restarts,
            audit_lost: run.audit_lost,
            work: state.work,
            totals: state.totals.clone(),
            programs: Programs::of(facts),
            requests: state.requests,
            xen: facts.xen,
            numa: facts.places(),
            others: Vec::new(),
            events: run.events.clone(),
        }
    }

    /// Finds processes with merged memory that aren't the run's. Without the rights to see them we find none.
    fn find_others(&mut self) {
        if self.xen.is_none() {
            self.set_others(ksm_users(Path::new("/proc"), OTHERS_LIMIT).unwrap_or_default());
        }
    }

    /// Sets `others` to the users of KSM that aren't processes of this run.
    pub fn set_others(&mut self, mut users: Vec<KsmUser>) {
        let mut ours = BTreeSet::new();
        for row in &self.programs.processes {
            if row.left_alone.is_none() || row.to_unmark.is_some() {
                ours.insert(row.pid);
            }
        }
        users.retain(|user| user.merged_bytes > 0 && !ours.contains(&user.pid));
        self.others = users;
    }

    /// The number in words: "3 processes", or with Xen "3 guests".
    pub fn count(&self, number: usize) -> String {
        count_targets(number, self.xen.is_some())
    }

    /// How much memory we expect to be merged in all.
    pub fn expected_bytes(&self) -> u64 {
        self.programs.processes.iter().map(|row| row.memory.expected_bytes).sum()
    }

    /// How much the run saves, or a dry run would save. `None` while we don't know yet.
    pub fn result_bytes(&self) -> Option<u64> {
        if self.run.dry_run { Some(self.expected_bytes()) } else { self.memory.saved_bytes }
    }

    /// How long the work at hand will roughly take, in words. `None` if that's less than a second, or unknown.
    pub fn done_in(&self) -> Option<String> {
        let seconds = self.activity.done_in_seconds.filter(|seconds| *seconds >= 1.0)?;
        Some(format!("about {}", time(seconds)))
    }

    /// When the work at hand will be done, in words. Until something is saved, we call this the time of the first
    /// saving, which comes by then if at all.
    pub fn forecast(&self) -> Option<String> {
        let is_first = self.memory.saved_bytes == Some(0) && !self.run.dry_run;
        let event = if is_first { "first saving within" } else { "done in" };
        Some(format!("{event} {}", self.done_in()?))
    }

    /// The run's activities right now. There may be several.
    pub fn doing(&self) -> Vec<Doing> {
        if self.activity.paused {
            return vec![Doing::Paused];
        }
        if !self.activity.busy {
            return vec![Doing::Watching];
        }
        let mut doing = Vec::new();
        for total in &self.totals.next {
            match total.verb {
                Verb::Read => doing.push(Doing::Reading),
                Verb::Mark => doing.push(Doing::Marking),
                Verb::Merge => doing.push(Doing::Merging),
                Verb::Sample | Verb::Watch | Verb::Wait | Verb::Leave => {}
            }
        }
        if doing.is_empty() {
            doing.push(Doing::Sampling);
        }
        doing
    }
}

fn count_targets(number: usize, are_guests: bool) -> String {
    if are_guests { count(number, "guest", "guests") } else { count(number, "process", "processes") }
}

impl Programs {
    fn of(facts: &Facts) -> Self {
        let mut processes = Vec::new();
        for target in &facts.targets {
            processes.push(ProcessRow::of(target, &facts.state));
        }
        processes.sort_by_key(|row| (Reverse(row.saved_bytes), Reverse(row.memory.resident_bytes), row.pid));
        Self {
            domains: domain_rows(facts),
            processes,
            scopes: groups::scope_rows(facts),
            left_out: groups::left_out_rows(facts),
            kept_out: facts.kept_out.entries().iter().map(KeptOutRow::from).collect(),
        }
    }

    /// How many processes we leave alone for this reason.
    pub fn left_alone_for(&self, reason: &str) -> usize {
        self.left_out.iter().find(|row| row.reason == reason).map_or(0, |row| row.processes)
    }

    /// How many processes we look at. One that we leave alone now counts if we have regions of it.
    pub fn looked_at(&self) -> usize {
        self.processes.iter().filter(|row| row.regions > 0 || row.left_alone.is_none()).count()
    }

    pub fn not_left_alone(&self) -> usize {
        self.processes.iter().filter(|row| row.left_alone.is_none()).count()
    }
}

impl ProcessRow {
    pub fn of(target: &TargetFacts, state: &State) -> Self {
        let total = state.owner(target.owner);
        let is_refused =
            |region: &RegionState| region.owner == target.owner && region.decision.reason == Reason::Refused;
        let left_alone = match (&target.left_alone, &target.problem) {
            (None, Some(problem)) if state.regions.iter().any(is_refused) => {
                Some(format!("could not be marked: {problem}"))
            }
            (left_alone, _) => left_alone.clone(),
        };
        let is_counted = state.memory.saved_bytes.is_some();
        Self {
            pid: target.pid,
            name: target.name.clone(),
            workload: target.workload.clone(),
            regions: total.regions,
            memory: total.memory,
            saved_bytes: is_counted.then_some(total.saved_bytes),
            left_alone,
            to_unmark: target.to_unmark.clone(),
        }
    }
}

fn domain_rows(facts: &Facts) -> Vec<DomainRow> {
    let mut processes: BTreeMap<DomainKey, usize> = BTreeMap::new();
    for target in &facts.targets {
        *processes.entry(target.domain).or_default() += 1;
    }
    let mut rows = Vec::new();
    for (key, processes) in processes {
        let Some(name) = facts.domains.get(usize::from(key.0)) else { continue };
        let memory = facts.state.domains.get(&key).copied().unwrap_or_default();
        rows.push(DomainRow {
            name: name.clone(),
            processes,
            resident_bytes: memory.resident_bytes,
            marked_bytes: memory.marked_bytes,
            left_alone: facts.merged_domain.as_ref().is_some_and(|merged| merged != name),
        });
    }
    rows.sort_by_key(|row| (row.left_alone, Reverse(row.resident_bytes)));
    rows
}
