//! `pagefold status`: what the daemon has saved, what it costs, and what it's doing.

pub mod groups;
pub mod room;
mod words;

use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::control::queue::{Facts, KeptOutRow, ToUnmark};
use crate::events::Event;
use crate::output;
use crate::output::placement::PlacementView;
use crate::output::requests::RequestsView;
use crate::output::xen::XenView;
use anyhow::Result;
use groups::{LeftOutRow, ScopeRow};
use pagefold_engine::config::Only;
use pagefold_engine::decision::Verb;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Cost, HugeSplits, Mechanism};
use pagefold_engine::keys::{DomainKey, OwnerKey};
use pagefold_engine::ledger::METADATA_BYTES_PER_PAGE;
use pagefold_engine::state::{KindTotal, LevelTotal, RegionState};
use pagefold_engine::stops::StopLengths;
use pagefold_engine::units::Pages;
use pagefold_text::exit;
use pagefold_text::style::count;
use room::ReserveView;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
pub use words::{describe, paint};

const SCHEMA: &str = "pagefold.status/1";

#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    /// Print the daemon's answer as JSON (schema pagefold.status/1)
    #[arg(long)]
    pub json: bool,
}

/// The state of a run (schema pagefold.status/1). A new column begins here. `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Status {
    schema: String,
    pub pid: u32,
    pub scope: String,
    pub dry_run: bool,
    #[serde(default)]
    pub mechanism: Mechanism,
    #[serde(default)]
    pub only: Only,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_bytes: Option<u64>,
    pub seconds: f64,
    pub governor: Governor,
    pub in_force: Governor,
    pub allowed_share: f64,
    pub used_share: f64,
    pub paused: bool,
    pub busy: bool,
    pub ksm_driven: bool,
    pub ksm_why: Option<String>,
    #[serde(default)]
    pub stood_down: bool,
    #[serde(default)]
    pub available_bytes: u64,
    pub resident_bytes: u64,
    /// `None` while we're counting it for the first time.
    pub saved_bytes: Option<u64>,
    #[serde(default)]
    pub saved_age_seconds: Option<f64>,
    #[serde(default)]
    pub may_return_bytes: u64,
    pub saved_machine_bytes: u64,
    pub exited_bytes: u64,
    pub marked_bytes: u64,
    pub metadata_bytes: u64,
    pub to_unmark_bytes: u64,
    #[serde(default)]
    pub foreign_marks: bool,
    #[serde(default)]
    pub copied_bytes: u64,
    #[serde(default)]
    pub copied_worst_day_bytes: u64,
    #[serde(default)]
    pub reserve: ReserveView,
    #[serde(default)]
    pub splits: HugeSplits,
    #[serde(default)]
    pub collapsed: u64,
    #[serde(default)]
    pub refused_spans: u64,
    #[serde(default)]
    pub injector_restarts: u32,
    #[serde(default)]
    pub audit_lost: u64,
    pub cpu_seconds: Cost,
    pub pages_read: u64,
    pub scans: u64,
    pub stops: u64,
    pub longest_stop_us: f64,
    #[serde(default)]
    pub total_stop_us: f64,
    #[serde(default)]
    pub stop_lengths: StopLengths,
    pub rounds: u64,
    pub index: Index,
    pub kinds: Vec<KindTotal>,
    pub levels: Vec<LevelTotal>,
    pub next: Vec<NextRow>,
    pub domains: Vec<DomainRow>,
    pub processes: Vec<ProcessRow>,
    #[serde(default)]
    pub scopes: Vec<ScopeRow>,
    #[serde(default)]
    pub left_out: Vec<LeftOutRow>,
    #[serde(default)]
    pub kept_out: Vec<KeptOutRow>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestsView>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xen: Option<XenView>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<PlacementView>,
    #[serde(default)]
    pub events: Vec<Event>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Index {
    pub contents: usize,
    pub bytes: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NextRow {
    pub what: String,
    pub regions: usize,
    pub resident_bytes: u64,
    pub soonest_seconds: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DomainRow {
    pub name: String,
    pub processes: usize,
    pub resident_bytes: u64,
    pub marked_bytes: u64,
    /// Whether we leave it alone, because ksmd merges another one.
    pub left_alone: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessRow {
    pub pid: i32,
    pub name: String,
    pub regions: usize,
    pub resident_bytes: u64,
    pub marked_bytes: u64,
    pub expected_bytes: u64,
    #[serde(default)]
    pub saved_bytes: Option<u64>,
    pub left_alone: Option<String>,
    pub to_unmark: Option<ToUnmark>,
}

pub fn run(args: &StatusArgs) -> Result<u8> {
    let status: Status = ask(&Request::Status)?;
    output::print(args.json, &status, |style| describe(&status, style))?;
    Ok(exit::OK)
}

impl Status {
    /// The number with the word for the things in scope.
    pub fn count(&self, number: usize) -> String {
        match self.xen {
            Some(_) => count(number, "guest", "guests"),
            None => count(number, "process", "processes"),
        }
    }

    pub fn of(facts: &Facts) -> Self {
        let Facts { state, run, .. } = facts;
        let ledger = &state.ledger;
        let why = match &run.stood_down {
            _ if run.dry_run => Some("a dry run changes nothing".to_owned()),
            why => why.clone(),
        };
        let processes = process_rows(facts);
        let to_unmark = facts.targets.iter().filter_map(|target| target.to_unmark.as_ref());
        Self {
            schema: SCHEMA.to_owned(),
            pid: std::process::id(),
            scope: run.scope.clone(),
            dry_run: run.dry_run,
            mechanism: run.config.mechanism,
            only: run.config.only,
            other_bytes: other_bytes(facts),
            seconds: (ledger.now_ns - ledger.began_ns) as f64 / 1e9,
            governor: state.governor,
            in_force: state.in_force,
            allowed_share: state.top_share.fraction(),
            used_share: state.used_share,
            paused: state.paused,
            busy: state.busy,
            ksm_driven: state.drives_ksm,
            stood_down: run.stood_down.is_some(),
            ksm_why: why.filter(|_| !state.drives_ksm),
            available_bytes: state.memory.available.bytes().0,
            resident_bytes: sum(&regions(facts, |_| true), |region| region.resident),
            saved_bytes: state.saving.as_ref().map(|saving| saving.saved.bytes().0),
            saved_age_seconds: state.saving.as_ref().map(|saving| (ledger.now_ns - saving.counted_ns) as f64 / 1e9),
            may_return_bytes: state.may_return.bytes().0,
            saved_machine_bytes: state.saved_machine.bytes().0,
            exited_bytes: state.exited.bytes().0,
            marked_bytes: state.marked.bytes().0,
            metadata_bytes: state.marked.0 * METADATA_BYTES_PER_PAGE,
            to_unmark_bytes: to_unmark.map(|to_unmark| to_unmark.bytes).sum(),
            foreign_marks: state.foreign_marks,
            copied_bytes: ledger.copies.total.bytes().0,
            copied_worst_day_bytes: ledger.copies.worst_day.bytes().0,
            reserve: ReserveView::of(facts),
            splits: ledger.splits,
            collapsed: ledger.collapsed,
            refused_spans: ledger.refused,
            injector_restarts: facts.injector_restarts,
            audit_lost: facts.run.audit_lost,
            cpu_seconds: ledger.cost,
            pages_read: ledger.pages_read,
            scans: facts.scans,
            stops: ledger.stops,
            longest_stop_us: ledger.longest_stop_ns as f64 / 1e3,
            total_stop_us: ledger.total_stop_ns as f64 / 1e3,
            stop_lengths: ledger.stop_lengths,
            rounds: state.rounds,
            index: Index { contents: state.index_entries, bytes: state.index_bytes.0 },
            kinds: state.kinds.clone(),
            levels: state.levels.clone(),
            next: next_rows(facts),
            domains: domain_rows(facts),
            scopes: groups::scope_rows(facts, &processes),
            left_out: groups::left_out_rows(facts),
            kept_out: facts.kept_out.clone(),
            processes,
            requests: RequestsView::of(run.config.mechanism, ledger),
            xen: facts.xen,
            numa: facts.places(),
            events: run.events.clone(),
        }
    }
}

/// If we merge zeros only: the other pages that we found in marked memory. ksmd visits them, too, and merges
/// equal ones.
fn other_bytes(facts: &Facts) -> Option<u64> {
    let config = &facts.run.config;
    let is_shown = config.only == Only::Zeros && config.mechanism == Mechanism::Ksmd;
    is_shown.then(|| sum(&regions(facts, |_| true), |region| region.other))
}

/// A sum over regions, bytes.
fn sum(regions: &[&RegionState], pages: fn(&RegionState) -> Pages) -> u64 {
    regions.iter().map(|region| pages(region).bytes().0).sum()
}

fn regions(facts: &Facts, fits: impl Fn(&RegionState) -> bool) -> Vec<&RegionState> {
    facts.state.regions.iter().filter(|region| fits(region)).collect()
}

fn next_rows(facts: &Facts) -> Vec<NextRow> {
    let now_ns = facts.state.ledger.now_ns;
    // In the order in which it happens.
    let verbs = [Verb::Read, Verb::Mark, Verb::Merge, Verb::Sample, Verb::Wait, Verb::Watch, Verb::Leave];
    let rows = verbs.map(|verb| {
        let regions = regions(facts, |region| region.decision.verb == verb);
        NextRow {
            what: verb.to_string(),
            regions: regions.len(),
            soonest_seconds: regions
                .iter()
                .filter_map(|region| region.decision.seconds_left(now_ns))
                .min_by(f64::total_cmp),
            resident_bytes: sum(&regions, |region| region.resident),
        }
    });
    rows.into_iter().filter(|row| row.regions > 0).collect()
}

fn domain_rows(facts: &Facts) -> Vec<DomainRow> {
    let mut processes: BTreeMap<DomainKey, usize> = BTreeMap::new();
    for target in &facts.targets {
        *processes.entry(target.domain).or_default() += 1;
    }
    let rows = processes.into_iter().filter_map(|(key, processes)| {
        let name = facts.domains.get(usize::from(key.0))?;
        let regions = regions(facts, |region| region.domain == key);
        Some(DomainRow {
            name: name.clone(),
            processes,
            resident_bytes: sum(&regions, |region| region.resident),
            marked_bytes: sum(&regions, |region| region.marked),
            left_alone: facts.merged_domain.as_ref().is_some_and(|merged| merged != name),
        })
    });
    let mut rows: Vec<DomainRow> = rows.collect();
    rows.sort_by_key(|row| (row.left_alone, Reverse(row.resident_bytes)));
    rows
}

fn process_rows(facts: &Facts) -> Vec<ProcessRow> {
    let mut by_owner: BTreeMap<OwnerKey, Vec<&RegionState>> = BTreeMap::new();
    facts.state.regions.iter().for_each(|region| by_owner.entry(region.owner).or_default().push(region));
    let rows = facts.targets.iter().map(|target| {
        let regions = by_owner.remove(&target.owner).unwrap_or_default();
        ProcessRow {
            pid: target.pid,
            name: target.name.clone(),
            regions: regions.len(),
            resident_bytes: sum(&regions, |region| region.resident),
            marked_bytes: sum(&regions, |region| region.marked),
            expected_bytes: match facts.run.config.mechanism {
                Mechanism::Ksmd => sum(&regions, |region| region.expected),
                Mechanism::Request => regions.iter().map(|region| RequestsView::expected_bytes(region)).sum(),
            },
            saved_bytes: facts.state.saving.as_ref().map(|saving| saving.of(target.owner).bytes().0),
            left_alone: target.left_alone.clone(),
            to_unmark: target.to_unmark.clone(),
        }
    });
    let mut rows: Vec<ProcessRow> = rows.collect();
    rows.sort_by_key(|row| (Reverse(row.resident_bytes), row.pid));
    rows
}
