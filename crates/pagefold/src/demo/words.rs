//! The text and pictures of the demonstration.

use super::picture::{BAR, Curve, columns, time_axis};
use super::watch::{Observed, Point, View};
use crate::commands::scan::report::{ScanReport, size};
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_text::style::{Lines, Style, human, percent};
use std::time::Duration;

/// Height of a single curve, and of each of two curves.
const ROWS: usize = 4;
const ROWS_OF_TWO: usize = 3;

/// We consider pagefold or ksmd at rest once its saving hasn't grown for this long.
const REST_SECONDS: f64 = 3.0;

#[derive(Clone, Debug)]
pub struct Merged {
    pub observed: Observed,
    /// CPU time of pagefold and its injector, without the thread that draws.
    pub own_cpu: Duration,
    pub marked: u64,
}

impl Merged {
    fn cpu(&self) -> Duration {
        self.own_cpu + self.observed.last().ksmd_cpu
    }
}

fn heading(number: u32, what: &str, style: Style) -> String {
    format!("\n{}  {}\n\n", style.plain(&number.to_string()), style.bold(what))
}

pub fn opening(style: Style) -> String {
    let mut text = String::new();
    text.line(style.bold("pagefold: one copy of memory that programs hold twice"));
    text.line(style.dim("Takes about a minute, and merges only memory of programs that it starts itself."));
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
    let mut text = heading(5, "Compare: unmerge everything, then let KSM do it alone", style);
    let seconds = took.as_secs_f64();
    text.line(format!("   {} unmerged in {seconds:.1} s: every worker has its own copies again.", human(bytes)));
    text
}

/// The settings of KSM alone.
pub fn ksm_alone(pages: u32, sleep_ms: u32) -> String {
    let mut text = String::new();
    text.line(format!("   KSM alone: everything is marked, and ksmd scans {pages} pages every {sleep_ms} ms"));
    text.line("   (the kernel's default: 100 pages every 20 ms).");
    text.blank();
    text
}

pub fn ksm_picture(view: &View<'_>, before: &[(f64, u64)], savable: u64, span: f64, style: Style) -> Vec<String> {
    let now = view.points.last().copied().unwrap_or_default();
    if view.line {
        return vec![format!(
            "   {:>4.0} s   saved {:>8}   CPU {:.1} s",
            now.seconds,
            human(now.saved),
            now.ksmd_cpu.as_secs_f64()
        )];
    }
    let points = curve(view.points);
    let span = span.max(now.seconds);
    let top = savable.max(now.saved);
    let ours = Curve { points: before, span, top, rows: ROWS_OF_TWO };
    let alone = Curve { points: &points, ..ours };
    let mut lines = vec![format!("   {:>9}   {}", "", style.good("pagefold, as above"))];
    lines.extend(ours.with_axis(|row| style.good(row), style));
    lines.push(format!("   {:>9}   {}", "", style.other("KSM alone")));
    lines.extend(alone.with_axis(|row| style.other(row), style));
    lines.extend(time_axis(span, style));
    lines.push(String::new());
    lines.push(format!("   saved {}   CPU {:.2} s", style.other(&human(now.saved)), now.ksmd_cpu.as_secs_f64()));
    lines
}

/// The comparison of both, after another check of the data.
pub fn compared(bytes: u64, merged: &Merged, alone: &Observed, style: Style) -> String {
    let mut text = String::new();
    text.line(style.dim(&format!("   Checked again: every byte of {} is intact.", human(bytes))));
    text.blank();
    let ours = merged.observed.last();
    let last = alone.last();
    let then = alone.at(ours.seconds);
    let goal = ours.saved / 10 * 9;
    let head = ["", "saved", "90 % after", "CPU until then", "CPU in all", "at rest"].map(str::to_owned);
    text.line(style.dim(&row(&head)));
    // The readings lack the injector's CPU time. It was all spent before anything was saved.
    let injector = merged.own_cpu.saturating_sub(ours.own_cpu);
    let pagefold = Side {
        at: ours,
        reached: merged.observed.reached(goal).map(|point| Point { own_cpu: point.own_cpu + injector, ..point }),
        cpu: merged.cpu(),
        at_rest: at_rest(&merged.observed, Point::cpu),
    };
    let ksm = Side {
        at: last,
        reached: alone.reached(goal).map(|point| Point { own_cpu: Duration::ZERO, ..point }),
        cpu: last.ksmd_cpu,
        at_rest: at_rest(alone, |point| point.ksmd_cpu),
    };
    text.line(style.good(&row(&pagefold.cells("pagefold"))));
    if last.seconds > ours.seconds + 1.0 {
        let by_then = ksm.reached.filter(|point| point.seconds <= then.seconds);
        let ksm = Side { at: then, reached: by_then, cpu: then.ksmd_cpu, at_rest: None };
        text.line(style.other(&row(&ksm.cells("KSM"))));
    }
    text.line(style.other(&row(&ksm.cells("KSM"))));
    text.blank();
    for sentence in verdict(&pagefold, &ksm) {
        text.line(format!("   {sentence}"));
    }
    text
}

fn row([name, saved, reached, until_then, all, rest]: &[String; 6]) -> String {
    format!("   {name:<15}{saved:>9}{reached:>13}{until_then:>17}{all:>13}{rest:>10}")
}

/// One side of the comparison: pagefold, or KSM alone.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    at: Point,
    /// When this side had saved 90 % of pagefold's final savings, with this side's CPU time until then.
    reached: Option<Point>,
    cpu: Duration,
    /// CPU time at rest, as a share of a core.
    at_rest: Option<f64>,
}

impl Side {
    fn cells(&self, name: &str) -> [String; 6] {
        let mut cells = [const { String::new() }; 6];
        cells[0] = format!("{name}, {:.0} s", self.at.seconds);
        cells[1] = human(self.at.saved);
        cells[4] = format!("{:.2} s", self.cpu.as_secs_f64());
        if let Some(point) = self.reached {
            cells[2] = format!("{:.1} s", point.seconds);
            cells[3] = format!("{:.2} s", point.cpu().as_secs_f64());
        }
        if let Some(share) = self.at_rest {
            cells[5] = percent(share, 1.0);
        }
        cells.map(|cell| if cell.is_empty() { "-".to_owned() } else { cell })
    }
}

/// CPU time of the last [`REST_SECONDS`] as a share of a core. `None` if savings still grew by more than 1 % then.
fn at_rest(observed: &Observed, cpu: impl Fn(&Point) -> Duration) -> Option<f64> {
    let last = observed.last();
    let before = observed.at(last.seconds - REST_SECONDS);
    if before.seconds <= 0.0 || last.saved > before.saved + before.saved / 100 {
        return None;
    }
    let spent = cpu(&last).saturating_sub(cpu(&before)).as_secs_f64();
    Some(spent / (last.seconds - before.seconds))
}

/// The comparison in words. It also says so if KSM alone did better.
fn verdict(ours: &Side, ksm: &Side) -> Vec<String> {
    let saved = ours.at.saved;
    let by_ksm = ksm.at.saved;
    let mut sentences = Vec::new();
    sentences.push(if by_ksm > saved + saved / 100 {
        format!("KSM saved {} more.", human(by_ksm - saved))
    } else if by_ksm + saved / 100 >= saved {
        "KSM saved as much.".to_owned()
    } else {
        format!("KSM had saved {} as much when it was stopped.", percent(by_ksm as f64, saved as f64))
    });
    if let (Some(ksm), Some(ours)) = (ksm.reached, ours.reached) {
        let time = times(ksm.seconds, ours.seconds, "time");
        let cpu = times(ksm.cpu().as_secs_f64(), ours.cpu().as_secs_f64(), "CPU");
        sentences.push(format!("KSM took {time} and {cpu} to save 90 % as much."));
    }
    if let (Some(ksm), Some(ours)) = (ksm.at_rest, ours.at_rest) {
        let ksm = percent(ksm, 1.0);
        let ours = percent(ours, 1.0);
        sentences.push(format!("With nothing left to merge, KSM uses {ksm} of a core, pagefold {ours}."));
    }
    sentences
}

/// How much more of a resource KSM took than pagefold, in words.
fn times(ksm: f64, ours: f64, unit: &str) -> String {
    match ksm / ours.max(1e-3) {
        times if times >= 1.05 => format!("{times:.1} times the {unit}"),
        times if times > 0.95 => format!("the same {unit}"),
        times => format!("{} of the {unit}", percent(times, 1.0)),
    }
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
pub fn curve(points: &[Point]) -> Vec<(f64, u64)> {
    points.iter().map(|point| (point.seconds, point.saved)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_covers_every_outcome() {
        let side = |saved, reached: Option<(f64, u64)>, at_rest| Side {
            at: Point { saved, ..Point::default() },
            reached: reached.map(|(seconds, cpu)| Point {
                seconds,
                own_cpu: Duration::from_secs(cpu),
                ..Point::default()
            }),
            at_rest,
            ..Side::default()
        };
        let ours = side(1024, Some((1.0, 2)), Some(0.01));
        for (ksm, words) in [
            (
                side(1024, Some((9.0, 3)), None),
                &["KSM saved as much.", "KSM took 9.0 times the time and 1.5 times the CPU to save 90 % as much."][..],
            ),
            (side(512, None, None), &["KSM had saved 50 % as much when it was stopped."]),
            (
                side(2048, Some((0.5, 2)), Some(0.001)),
                &[
                    "KSM saved 1 KiB more.",
                    "KSM took 50 % of the time and the same CPU to save 90 % as much.",
                    "With nothing left to merge, KSM uses 0.1 % of a core, pagefold 1.0 %.",
                ],
            ),
        ] {
            assert_eq!(verdict(&ours, &ksm), words);
        }
    }
}
