//! `pagefold explain` of several processes: a program, a unit, a guest, a container, a pod or a cgroup. We sum up the
//! processes, and their regions by what happens to them next and why.

use super::words::known_duplicate;
use crate::commands::status::{ProcessRow, process_table};
use crate::config::scope;
use crate::control::queue::Facts;
use pagefold_engine::decision::{Decision, Reason};
use pagefold_engine::state::MemoryTotal;
use pagefold_host::scope::{ScopeSpec, resolve};
use pagefold_procmem::Roots;
use pagefold_text::exit::{self, Exit};
use pagefold_text::figures::wrap;
use pagefold_text::style::{Lines, Style, count, human};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

const SCHEMA: &str = "pagefold.explain-workload/1";
const WIDTH: usize = 78;

/// Several processes together (schema pagefold.explain-workload/1). `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Explanation {
    schema: String,
    /// The processes asked for, as command line flags.
    pub selectors: String,
    pub scope: String,
    pub paused: bool,
    pub dry_run: bool,
    #[serde(flatten)]
    pub memory: MemoryTotal,
    pub saved_bytes: Option<u64>,
    pub processes: Vec<ProcessRow>,
    /// How many more processes match but aren't in the run's scope.
    pub processes_outside: usize,
    pub reasons: Vec<ReasonRow>,
}

/// The regions with the same next step for the same reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReasonRow {
    pub next: String,
    pub reason: String,
    pub regions: usize,
    pub resident_bytes: u64,
}

/// Explains the processes that match now.
///
/// # Errors
/// No process matches, or none that matches is in scope.
pub fn of(facts: &Facts, spec: &ScopeSpec) -> Result<Explanation, Exit> {
    let found = resolve(spec, &Roots::default()).map_err(|error| scope::explain(&error))?;
    let mut matching = BTreeSet::new();
    for info in found.iter().filter(|info| info.distrust.is_none()) {
        matching.insert(info.process.key());
    }
    let explanation = of_processes(facts, spec, &matching);
    if explanation.processes.is_empty() {
        let number = count(explanation.processes_outside, "process matches", "processes match");
        let line = format!(
            "{number} {spec}, but none is in the scope of the running daemon ({}); try pagefold scan {spec}",
            facts.run.scope
        );
        return Err(Exit::new(exit::NO_SCOPE, line));
    }
    Ok(explanation)
}

/// Explains the processes of these pids and start times.
pub fn of_processes(facts: &Facts, spec: &ScopeSpec, matching: &BTreeSet<(i32, u64)>) -> Explanation {
    let mut explanation = Explanation {
        schema: SCHEMA.to_owned(),
        selectors: spec.to_string(),
        scope: facts.run.scope.clone(),
        paused: facts.state.activity.paused,
        dry_run: facts.run.dry_run,
        memory: MemoryTotal::default(),
        saved_bytes: facts.state.memory.saved_bytes.map(|_| 0),
        processes: Vec::new(),
        processes_outside: 0,
        reasons: Vec::new(),
    };
    let mut owners = BTreeSet::new();
    for target in &facts.targets {
        // A Xen guest's domain ID isn't a pid.
        let is_guest = facts.xen.is_some();
        if is_guest || !matching.contains(&(target.pid, target.start_time_ticks)) {
            continue;
        }
        let row = ProcessRow::of(target, &facts.state);
        explanation.memory += row.memory;
        if let (Some(sum), Some(bytes)) = (&mut explanation.saved_bytes, row.saved_bytes) {
            *sum += bytes;
        }
        owners.insert(target.owner);
        explanation.processes.push(row);
    }
    explanation.processes_outside = matching.len() - owners.len();
    explanation.processes.sort_by_key(|row| (Reverse(row.saved_bytes), Reverse(row.memory.resident_bytes), row.pid));
    let mut reasons: BTreeMap<(String, String), ReasonRow> = BTreeMap::new();
    for region in facts.state.regions.iter().filter(|region| owners.contains(&region.owner)) {
        let next = region.decision.verb.to_string();
        let reason = without_figures(&region.decision);
        let empty = ReasonRow { next: next.clone(), reason: reason.clone(), regions: 0, resident_bytes: 0 };
        let row = reasons.entry((next, reason)).or_insert(empty);
        row.regions += 1;
        row.resident_bytes += region.resident.bytes().0;
    }
    explanation.reasons.extend(reasons.into_values());
    explanation.reasons.sort_by_key(|row| Reverse(row.resident_bytes));
    explanation
}

fn without_figures(decision: &Decision) -> String {
    match decision.reason {
        Reason::CowBroken(_) => "COW-broken".to_owned(),
        reason => reason.to_string(),
    }
}

pub fn describe(explanation: &Explanation, style: Style) -> String {
    let mut text = String::new();
    text.blank();
    for part in wrap(&headline(explanation), WIDTH) {
        text.line(style.bold(&part));
    }
    if explanation.processes_outside > 0 {
        let more = count(explanation.processes_outside, "more process isn't", "more processes aren't");
        text.paragraph(&format!("{more} in the scope of the running daemon ({}).", explanation.scope), WIDTH);
    }
    process_table(&mut text, &explanation.processes, false, style);
    text.blank();
    text.line(style.dim("    MEMORY  REGIONS  NEXT      WHY"));
    for row in &explanation.reasons {
        let memory = human(row.resident_bytes);
        text.line(format!("  {memory:>8}  {:>7}  {:<8}  {}", row.regions, row.next, row.reason));
    }
    text.blank();
    let first = explanation.processes.first().map_or(0, |row| row.pid);
    text.line(format!("Region by region:  {}", style.good(&format!("pagefold explain {first}"))));
    text.blank();
    text
}

fn headline(explanation: &Explanation) -> String {
    let paused = if explanation.paused { " The daemon is paused." } else { "" };
    let marked = human(explanation.memory.marked_bytes);
    let result = if explanation.dry_run {
        format!("{marked} would be marked (dry run)")
    } else {
        let saved = explanation.saved_bytes.map_or("an unknown amount".to_owned(), human);
        format!("{saved} saved, {marked} marked")
    };
    format!(
        "{}: {} with {}, {result}, {}.{paused}",
        explanation.selectors,
        count(explanation.processes.len(), "process", "processes"),
        human(explanation.memory.unmerged_bytes),
        known_duplicate(explanation.memory, ""),
    )
}
