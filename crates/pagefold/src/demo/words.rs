//! The text and pictures of the demonstration.

use super::picture::{BAR, Curve, columns, time_axis};
use super::watch::{Observed, Point, View};
use crate::commands::scan::report::{ScanReport, size};
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_text::style::{Lines, Style, human, percent};
use std::time::Duration;

/// Height of the curve.
const ROWS: usize = 4;

#[derive(Clone, Debug)]
pub struct Merged {
    pub observed: Observed,
    /// CPU time of pagefold and its injector, without the thread that draws.
    pub own_cpu: Duration,
    pub marked: u64,
}

fn heading(number: u32, what: &str, style: Style) -> String {
    format!("\n{}  {}\n\n", style.plain(&number.to_string()), style.bold(what))
}

pub fn opening(style: Style) -> String {
    let mut text = String::new();
    text.line(style.bold("pagefold: one copy of memory that programs hold twice"));
    text.line(style.dim("Takes half a minute, and merges only memory of programs that it starts itself."));
    text.line(style.dim("Ctrl-C stops it at any time and restores everything."));
    text
}

/// Part 1: the workers.
pub fn started(workers: usize, bytes: u64, reduced: bool, took: Duration, style: Style) -> String {
    let number = ["No", "One", "Two", "Three", "Four", "Five", "Six"].get(workers).copied().unwrap_or("Many");
    let mut text = heading(1, &format!("Start: {} workers of one program", number.to_lowercase()), style);
    let bytes = style.bold(&human(bytes));
    text.line(format!("   {bytes} together, written and checked byte by byte in {:.1} s.", took.as_secs_f64()));
    text.line("   Each holds data that all others also hold, data of its own, and zeros.");
    if reduced {
        text.line(style.dim("   Smaller than normal, because little memory is free."));
    }
    text
}

/// Part 2: the duplicates.
pub fn found(report: &ScanReport, pids: &[i32], style: Style) -> String {
    let mut text = heading(2, "Scan: how much of that is duplicate?", style);
    let widest = report.processes.iter().map(|row| bytes_of(row.figures.resident)).max().unwrap_or(1);
    for (number, pid) in (1..).zip(pids) {
        let Some(row) = report.processes.iter().find(|row| row.pid == *pid) else { continue };
        let Figures { resident, zero, savable_gross, .. } = row.figures;
        let all = columns(bytes_of(resident), widest, BAR);
        let zero = columns(bytes_of(zero), widest, BAR);
        let kept = columns(bytes_of(resident - savable_gross), widest, BAR);
        text.line(format!(
            "   worker {number}  {}{}{}{}  {:>8} savable",
            style.plain(&"█".repeat(kept)),
            style.good(&"▒".repeat(all.saturating_sub(kept + zero))),
            style.other(&"░".repeat(zero)),
            " ".repeat(BAR.saturating_sub(all.max(kept + zero))),
            size(savable_gross)
        ));
    }
    let Figures { resident, zero, duplicate_within, duplicate_across, savable_gross, .. } = report.totals;
    text.blank();
    text.line(format!(
        "   {} to keep   {} duplicates {}   {} zeros {}",
        style.plain("█"),
        style.good("▒"),
        size(duplicate_within + duplicate_across),
        style.other("░"),
        size(zero)
    ));
    let share = percent(savable_gross, resident);
    text.line(format!("   {} of {} can be saved ({share}).", style.bold(&size(savable_gross)), size(resident)));
    let seconds = report.cost.cpu_seconds;
    let cost = format!("   Found by reading every page, in {seconds:.1} s of CPU time. Nothing was changed.");
    text.line(style.dim(&cost));
    text
}

/// Part 3: the heading of the part that merges.
pub fn merging(style: Style) -> String {
    heading(3, "Merge: pagefold finds and marks the duplicates, the kernel merges them", style)
}

pub fn merge_picture(view: &View<'_>, first: &[u64], savable: u64, span: f64, style: Style) -> Vec<String> {
    let now = view.points.last().copied().unwrap_or_default();
    let memory: u64 = view.workers.iter().sum();
    if view.line {
        return vec![format!(
            "   {:>4.0} s   in memory {:>8}   saved {:>8}   CPU {:.1} s",
            now.seconds,
            human(memory),
            human(now.saved),
            now.cpu().as_secs_f64()
        )];
    }
    let widest = first.iter().copied().max().unwrap_or(1);
    let mut lines = Vec::new();
    for (at, &bytes) in view.workers.iter().enumerate() {
        let before = first.get(at).copied().unwrap_or(bytes);
        let number = at + 1;
        let filled = columns(bytes, widest, BAR);
        let gone = columns(before, widest, BAR).saturating_sub(filled);
        lines.push(format!(
            "   worker {number}  {}{}{}  {:>8}",
            style.plain(&"█".repeat(filled)),
            style.dim(&"·".repeat(gone)),
            " ".repeat(BAR.saturating_sub(filled + gone)),
            human(bytes)
        ));
    }
    lines.push(String::new());
    let points = curve(view.points);
    let span = span.max(now.seconds);
    let area = Curve { points: &points, span, top: savable.max(now.saved), rows: ROWS };
    lines.extend(area.with_axis(|row| style.good(row), style));
    lines.extend(time_axis(span, style));
    lines.push(String::new());
    lines.push(format!(
        "   in memory {}, was {}   saved {}   CPU {:.2} s",
        style.bold(&human(memory)),
        human(first.iter().sum()),
        style.good(&human(now.saved)),
        now.cpu().as_secs_f64()
    ));
    lines
}

/// The cost of merging, and part 4: the check of the data.
pub fn verified(bytes: u64, merged: &Merged, style: Style) -> String {
    let mut text = String::new();
    let last = merged.observed.last();
    let memory = merged.observed.workers.iter().sum();
    let note = format!(
        "   \"In memory\" is the workers' Pss, \"saved\" KSM's count. CPU time, display\n   excluded: pagefold {:.2} s, ksmd {:.2} s. Marked: {}.",
        merged.own_cpu.as_secs_f64(),
        last.ksmd_cpu.as_secs_f64(),
        human(merged.marked)
    );
    text.line(note.lines().map(|row| style.dim(row)).collect::<Vec<_>>().join("\n"));
    text.push_str(&heading(4, "Check: is the data intact?", style));
    let data = format!("{} of data in {} of memory.", human(bytes), human(memory));
    text.line(format!("   {} {data}", style.good("Every byte is intact:")));
    text
}

/// Part 5: after unmerging.
pub fn unmerged(bytes: u64, took: Duration, style: Style) -> String {
    let mut text = heading(5, "Stop: unmerge everything", style);
    let seconds = took.as_secs_f64();
    text.line(format!("   {} unmerged in {seconds:.1} s: every worker has its own copies again.", human(bytes)));
    text
}

pub fn verified_again(bytes: u64, style: Style) -> String {
    style.dim(&format!("   Checked again: every byte of {} is intact.", human(bytes))) + "\n"
}

/// Part 6: the end.
pub fn end(style: Style) -> String {
    let mut text = heading(6, "Done: everything is restored", style);
    text.line("   The workers have ended, nothing is merged, and every KSM setting is restored.");
    text.blank();
    text.line(format!("   Next, scan your own programs:  {}", style.good("sudo pagefold scan --exe NAME")));
    text
}

/// The points of a curve: seconds and bytes saved.
fn curve(points: &[Point]) -> Vec<(f64, u64)> {
    points.iter().map(|point| (point.seconds, point.saved)).collect()
}
