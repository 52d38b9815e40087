//! The summary of a run, printed when it ends.

use super::progress::{LeftAlone, Progress};
use super::reload::ActiveSettings;
use crate::backend::Ending;
use crate::control::queue::RunFacts;
use crate::output::requests;
use crate::output::xen::XenView;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Cost, Mechanism};
use pagefold_engine::ledger::RequestCounts;
use pagefold_ksm::RestoreOutcome;
use pagefold_text::figures::time;
use pagefold_text::style::{self, Lines, Style};
use serde::Serialize;
use std::collections::BTreeMap;

/// The summary of a run (schema pagefold.run/1). `reference.rs` explains the fields.
#[derive(Debug, Serialize)]
pub struct Summary {
    schema: &'static str,
    scope: String,
    dry_run: bool,
    mechanism: Mechanism,
    governor: Governor,
    seconds: f64,
    processes: usize,
    saved_bytes: Option<u64>,
    metadata_bytes: u64,
    expected_bytes: u64,
    unknown_bytes: u64,
    marked_bytes: u64,
    marked_spans: u64,
    unmarked_bytes: u64,
    merged_pages: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<RequestCounts>,
    /// Xen's own figures, if Xen guests were in scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    xen: Option<XenView>,
    cpu_seconds: Cost,
    seconds_to_90_percent: Option<f64>,
    pages_read: u64,
    scans: u64,
    stops: u64,
    longest_stop_us: f64,
    total_stop_us: f64,
    moved_pages: u64,
    move_seconds: f64,
    pub knobs_restored: bool,
    knobs_deferred: BTreeMap<String, u64>,
    stood_down: Option<String>,
    audit_lost: u64,
    left_alone: Vec<LeftAlone>,
    /// How many more processes we left alone than `left_alone` lists.
    #[serde(skip_serializing_if = "is_zero")]
    left_alone_more: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Summary {
    /// The summary of a run that has ended and no longer controls KSM.
    pub fn new(
        active: &ActiveSettings<'_>,
        run: &RunFacts,
        engine: &Engine,
        ending: &Ending,
        progress: Progress,
    ) -> Self {
        let ledger = engine.ledger();
        let mechanism = run.config.mechanism;
        let state = engine.state();
        let memory = state.all_memory();
        let restored = ending.ended.restored.as_ref();
        let deferred = restored.iter().flat_map(|restored| &restored.deferred);
        Self {
            schema: "pagefold.run/1",
            scope: run.scope.clone(),
            dry_run: run.dry_run,
            mechanism,
            governor: active.settings.config.governor,
            seconds: state.activity.seconds,
            processes: ending.judged,
            saved_bytes: state.memory.saved_bytes,
            metadata_bytes: state.memory.metadata_bytes,
            expected_bytes: if run.dry_run { memory.expected_bytes } else { 0 },
            unknown_bytes: if run.dry_run { memory.unknown_bytes } else { 0 },
            marked_bytes: ledger.marked.bytes().0,
            marked_spans: ledger.spans,
            unmarked_bytes: ledger.unmarked.bytes().0,
            merged_pages: engine.saving().map(|saving| saving.merged.0),
            requests: state.requests,
            xen: ending.xen,
            cpu_seconds: state.work.cpu_seconds,
            seconds_to_90_percent: ledger.seconds_to_90_percent(),
            pages_read: state.work.pages_read,
            scans: state.work.scans,
            stops: state.work.stops,
            longest_stop_us: state.work.longest_stop_us,
            total_stop_us: state.work.total_stop_us,
            moved_pages: state.moves.moved_pages,
            move_seconds: state.moves.move_seconds,
            knobs_restored: restored.is_none_or(|restored| restored.failed.is_empty() && restored.pending.is_empty()),
            knobs_deferred: deferred.map(|&(knob, value)| (knob.file_name().to_owned(), value)).collect(),
            stood_down: run.stood_down.clone(),
            audit_lost: active.lost(),
            left_alone: progress.left_alone,
            left_alone_more: progress.left_alone_more,
        }
    }
}

/// The knobs that we couldn't restore, one line each.
pub fn unrestored(restored: Option<&RestoreOutcome>) -> Vec<String> {
    let mut lines = Vec::new();
    let Some(restored) = restored else { return lines };
    for (knob, why) in &restored.failed {
        lines.push(format!("cannot restore {}: {why}; run pagefold doctor --fix", knob.file_name()));
    }
    for (knob, value) in &restored.pending {
        lines.push(format!(
            "{} cannot be restored to {value} during ksmd's scan; run pagefold doctor --fix when the scan has ended",
            knob.file_name()
        ));
    }
    lines
}

pub fn describe(summary: &Summary, style: Style) -> String {
    let mut text = String::new();
    text.line(style.bold(&headline(summary)));
    text.blank();
    if !summary.dry_run {
        let reached = summary.seconds_to_90_percent.map_or(String::new(), |s| format!(", 90 % of them after {s:.1} s"));
        let merged = summary.merged_pages.map_or("an unknown number of".to_owned(), |pages| pages.to_string());
        row(&mut text, "merged", &format!("{merged} pages{reached}"));
    }
    if let Some(counts) = &summary.requests {
        row(&mut text, "requests", &requests::sentence(counts));
    }
    let read = summary.pages_read;
    let cpu_seconds = summary.cpu_seconds.pagefold_ns as f64 / 1e9;
    if let Some(xen) = &summary.xen {
        row(&mut text, "Xen", &xen.sentence());
        row(&mut text, "CPU", &format!("{cpu_seconds:.2} s ({read} pages read)"));
        still_merged(&mut text, summary, "pagefold-xen", style);
        return text;
    }
    let marked = style::human(summary.marked_bytes);
    let metadata = style::human(summary.metadata_bytes);
    let spans = style::count(usize::try_from(summary.marked_spans).unwrap_or(usize::MAX), "span", "spans");
    row(&mut text, "marked", &format!("{marked} in {spans}, kernel metadata {metadata}"));
    let ksmd = summary.cpu_seconds.ksmd_ns as f64 / 1e9;
    let kicks = summary.scans;
    let cpu = format!("{cpu_seconds:.2} s by pagefold ({read} pages read), {ksmd:.2} s by ksmd ({kicks} scans)");
    row(&mut text, "CPU", &cpu);
    let longest = time(summary.longest_stop_us / 1e6);
    row(&mut text, "stops", &format!("{}, the longest {longest}", summary.stops));
    if summary.moved_pages > 0 {
        let moved = format!("{} pages to other memory nodes, {:.2} s", summary.moved_pages, summary.move_seconds);
        row(&mut text, "moved", &moved);
    }
    if let Some(why) = &summary.stood_down {
        row(&mut text, "KSM given up", why);
    }
    row(&mut text, "KSM", &ksm_settings(summary));
    still_merged(&mut text, summary, "pagefold", style);
    text
}

fn headline(summary: &Summary) -> String {
    let expected = style::human(summary.expected_bytes);
    let unread = match summary.unknown_bytes {
        0 => String::new(),
        unknown => format!(" It was too short to sample {}.", style::human(unknown)),
    };
    if summary.dry_run && summary.mechanism == Mechanism::Request {
        return format!(
            "Dry run: {expected} would be merged with other pages or as zeros.{unread} Nothing was changed."
        );
    }
    if summary.dry_run {
        let marked = style::human(summary.marked_bytes);
        return format!("Dry run: would mark {marked}, {expected} of it duplicate.{unread} Nothing was changed.");
    }
    let saves = summary.saved_bytes.map_or("an unknown amount".to_owned(), style::human);
    format!("Saves {saves} after {:.1} s.", summary.seconds)
}

fn row(text: &mut String, name: &str, value: &str) {
    text.line(format!("  {name:<14}{value}"));
}

/// Whether KSM's settings are as they were.
fn ksm_settings(summary: &Summary) -> String {
    let deferred: Vec<String> =
        summary.knobs_deferred.iter().map(|(knob, value)| format!("{knob} can go back to {value}")).collect();
    match summary.mechanism {
        _ if summary.dry_run => "not touched".to_owned(),
        _ if !deferred.is_empty() => {
            format!("restored, except that {} only while no page is merged", deferred.join(" and "))
        }
        Mechanism::Request => "merged on request, settings not touched".to_owned(),
        Mechanism::Ksmd => "restored".to_owned(),
    }
}

fn still_merged(text: &mut String, summary: &Summary, program: &str, style: Style) {
    if !summary.dry_run && summary.saved_bytes != Some(0) {
        text.blank();
        text.line(style.dim(&format!("The pages stay merged. To unmerge them: {program} unmerge {}", summary.scope)));
    }
}
