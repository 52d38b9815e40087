//! The summary of a run, printed when it ends.

use super::progress::{LeftAlone, Progress};
use super::reload::ActiveSettings;
use crate::config::args::RunArgs;
use crate::output::requests::RequestsView;
use crate::output::xen::XenView;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Cost, Mechanism};
use pagefold_engine::ledger::METADATA_BYTES_PER_PAGE;
use pagefold_ksm::Knob;
use pagefold_ksm::RestoreOutcome;
use pagefold_text::style::{self, Lines, Style};
use serde::Serialize;
use std::collections::BTreeMap;

/// The summary of a run (schema pagefold.run/1). `reference.rs` explains the fields.
#[derive(Debug, Serialize)]
pub struct Summary {
    schema: &'static str,
    pub scope: String,
    dry_run: bool,
    mechanism: Mechanism,
    governor: Governor,
    seconds: f64,
    processes: usize,
    saved_bytes: Option<u64>,
    metadata_bytes: u64,
    expected_bytes: u64,
    marked_bytes: u64,
    marked_spans: u64,
    unmarked_bytes: u64,
    merged_pages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<RequestsView>,
    /// Xen's own figures, if guests of it were in scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xen: Option<XenView>,
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
    /// Processes that we left alone and don't list.
    #[serde(skip_serializing_if = "is_zero")]
    left_alone_more: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Summary {
    /// The summary of a run that has given KSM back.
    pub fn new(
        args: &RunArgs,
        active: &ActiveSettings<'_>,
        (engine, mechanism): (&Engine, Mechanism),
        processes: usize,
        restored: Option<&RestoreOutcome>,
        progress: Progress,
    ) -> Self {
        let ledger = engine.ledger();
        let marks = || engine.regions().flat_map(|region| &region.marks.spans);
        let deferred = restored.iter().flat_map(|restored| &restored.deferred);
        Self {
            schema: "pagefold.run/1",
            scope: active.settings.scope.to_string(),
            dry_run: args.dry_run,
            mechanism,
            governor: active.settings.config.governor,
            seconds: (ledger.now_ns - ledger.began_ns) as f64 / 1e9,
            processes,
            saved_bytes: ledger.saved.map(|saved| saved.bytes().0),
            metadata_bytes: marks().map(|mark| mark.resident.0).sum::<u64>() * METADATA_BYTES_PER_PAGE,
            expected_bytes: match mechanism {
                _ if !args.dry_run => 0,
                Mechanism::Ksmd => marks().map(|mark| mark.duplicate.bytes().0).sum(),
                Mechanism::Request => engine.state().regions.iter().map(RequestsView::expected_bytes).sum(),
            },
            marked_bytes: ledger.marked.bytes().0,
            marked_spans: ledger.spans,
            unmarked_bytes: ledger.unmarked.bytes().0,
            merged_pages: engine.saving().map_or(0, |saving| saving.merged.0),
            requests: RequestsView::of(mechanism, ledger),
            xen: None,
            cpu_seconds: ledger.cost,
            seconds_to_90_percent: ledger.seconds_to_90_percent(),
            pages_read: ledger.pages_read,
            scans: engine.scans(),
            stops: ledger.stops,
            longest_stop_us: ledger.longest_stop_ns as f64 / 1e3,
            total_stop_us: ledger.total_stop_ns as f64 / 1e3,
            moved_pages: ledger.moved.0,
            move_seconds: ledger.move_ns as f64 / 1e9,
            knobs_restored: restored.is_none_or(|restored| restored.failed.is_empty() && restored.pending.is_empty()),
            knobs_deferred: deferred.map(|&(knob, value)| (knob.file_name().to_owned(), value)).collect(),
            stood_down: progress.stood_down,
            audit_lost: active.lost(),
            left_alone: progress.left_alone,
            left_alone_more: progress.left_alone_more,
        }
    }
}

/// The knobs that we couldn't restore, one line each.
pub fn unrestored(restored: Option<&RestoreOutcome>) -> Vec<String> {
    let Some(restored) = restored else { return Vec::new() };
    let name = |knob: &Knob| knob.file_name();
    let failed = restored.failed.iter();
    let failed = failed.map(|(knob, why)| format!("cannot restore {}: {why}; run pagefold doctor --fix", name(knob)));
    let pending = restored.pending.iter().map(|(knob, value)| {
        format!(
            "{} cannot be set back to {value} while ksmd is in a scan; run pagefold doctor --fix when the scan has ended",
            name(knob)
        )
    });
    failed.chain(pending).collect()
}

pub fn describe(summary: &Summary, style: Style) -> String {
    let mut text = String::new();
    let headline = if summary.dry_run && summary.mechanism == Mechanism::Request {
        let expected = style::human(summary.expected_bytes);
        format!("Dry run: {expected} would be merged with other pages or as zeros. Nothing was changed.")
    } else if summary.dry_run {
        format!(
            "Dry run: would mark {}, of which {} is duplicate. Nothing was changed.",
            style::human(summary.marked_bytes),
            style::human(summary.expected_bytes)
        )
    } else {
        let saves = summary.saved_bytes.map_or("an unknown amount".to_owned(), style::human);
        format!("Saves {saves} after {:.1} s.", summary.seconds)
    };
    text.line(style.bold(&headline));
    text.blank();
    let mut row = |name: &str, value: String| text.line(format!("  {name:<14}{value}"));
    let reached = summary.seconds_to_90_percent.map_or(String::new(), |s| format!(", 90 % of them after {s:.1} s"));
    if !summary.dry_run {
        row("merged", format!("{} pages{reached}", summary.merged_pages));
    }
    if let Some(requests) = &summary.requests {
        row("requests", requests.sentence());
    }
    if let Some(xen) = &summary.xen {
        row("Xen", xen.sentence());
        row(
            "CPU",
            format!("{:.2} s ({} pages read)", summary.cpu_seconds.pagefold_ns as f64 / 1e9, summary.pages_read),
        );
        still_merged(&mut text, summary, "pagefold-xen", style);
        return text;
    }
    let (marked, metadata) = (style::human(summary.marked_bytes), style::human(summary.metadata_bytes));
    let spans = style::count(usize::try_from(summary.marked_spans).unwrap_or(usize::MAX), "span", "spans");
    row("marked", format!("{marked} in {spans}, kernel metadata {metadata}"));
    let Cost { pagefold_ns, ksmd_ns, .. } = summary.cpu_seconds;
    let (pagefold, ksmd) = (pagefold_ns as f64 / 1e9, ksmd_ns as f64 / 1e9);
    let (read, kicks) = (summary.pages_read, summary.scans);
    row("CPU", format!("{pagefold:.2} s by pagefold ({read} pages read), {ksmd:.2} s by ksmd ({kicks} scans)"));
    row("stops", format!("{}, the longest {:.0} us", summary.stops, summary.longest_stop_us));
    if summary.moved_pages > 0 {
        row("moved", format!("{} pages to other memory nodes, {:.2} s", summary.moved_pages, summary.move_seconds));
    }
    if let Some(why) = &summary.stood_down {
        row("KSM given up", why.clone());
    }
    let deferred: Vec<String> =
        summary.knobs_deferred.iter().map(|(knob, value)| format!("{knob} ({value})")).collect();
    row(
        "KSM",
        match (summary.dry_run, summary.mechanism, deferred.is_empty()) {
            (true, ..) => "not touched".to_owned(),
            (false, Mechanism::Request, true) => "merged on request, settings not touched".to_owned(),
            (false, _, true) => "restored".to_owned(),
            (false, _, false) => {
                format!("restored except {}, which the kernel accepts only when no page is merged", deferred.join(", "))
            }
        },
    );
    still_merged(&mut text, summary, "pagefold", style);
    text
}

fn still_merged(text: &mut String, summary: &Summary, program: &str, style: Style) {
    if !summary.dry_run && summary.saved_bytes != Some(0) {
        text.blank();
        text.line(style.dim(&format!("The pages stay merged. To unmerge them: {program} unmerge {}", summary.scope)));
    }
}
