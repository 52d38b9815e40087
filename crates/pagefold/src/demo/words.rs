//! What the demonstration says and shows.

use super::picture::{BAR, Curve, columns, time_axis};
use super::watch::{Point, Seen, View};
use crate::commands::scan::report::ScanReport;
use pagefold_cli::style::{Style, human, line, percent};
use std::time::Duration;

/// Rows of a curve that stands alone, and of one of two.
const ROWS: usize = 4;
const ROWS_OF_TWO: usize = 3;

/// Whoever has saved no more for so long is at rest.
const REST_SECONDS: f64 = 3.0;

/// What folding did.
#[derive(Clone, Debug)]
pub struct Folded {
    /// What was seen meanwhile.
    pub seen: Seen,
    /// CPU time of pagefold and of the process that marks, without that of the pictures.
    pub own_cpu: Duration,
    /// Address space marked.
    pub marked: u64,
}

impl Folded {
    fn cpu(&self) -> Duration {
        self.own_cpu + self.seen.last().ksmd_cpu
    }
}

fn heading(text: &mut String, number: u32, what: &str, style: Style) {
    line(text, "");
    line(text, &format!("{}  {}", style.plain(&number.to_string()), style.bold(what)));
    line(text, "");
}

/// The first lines.
pub fn opening(style: Style) -> String {
    let mut text = String::new();
    line(&mut text, &style.bold("pagefold: memory that programs hold twice, folded into one copy"));
    line(&mut text, &style.dim("About a minute. Ctrl-C ends it at any time and puts everything back."));
    text
}

/// What was started.
pub fn started(workers: usize, bytes: u64, reduced: bool, took: Duration, style: Style) -> String {
    let mut text = String::new();
    let number = ["No", "One", "Two", "Three", "Four", "Five", "Six"].get(workers).copied().unwrap_or("Many");
    heading(&mut text, 1, &format!("{number} workers of one program are started"), style);
    line(
        &mut text,
        &format!(
            "   {} together, filled and checked byte by byte in {:.1} s.",
            style.bold(&human(bytes)),
            took.as_secs_f64()
        ),
    );
    if reduced {
        line(&mut text, &style.dim("   Smaller than usual: there is little memory free."));
    }
    text
}

/// What is duplicate.
pub fn found(report: &ScanReport, pids: &[i32], style: Style) -> String {
    let mut text = String::new();
    heading(&mut text, 2, "What they hold", style);
    let widest = report.processes.iter().map(|row| row.amounts.resident_bytes).max().unwrap_or(1);
    for (number, pid) in (1..).zip(pids) {
        let Some(amounts) = report.processes.iter().find(|row| row.pid == *pid).map(|row| row.amounts) else {
            continue;
        };
        let all = columns(amounts.resident_bytes, widest, BAR);
        let zero = columns(amounts.zero_bytes, widest, BAR);
        let kept = columns(amounts.resident_bytes.saturating_sub(amounts.savable_gross_bytes), widest, BAR);
        let bar = [
            style.plain(&"█".repeat(kept)),
            style.good(&"▒".repeat(all.saturating_sub(kept + zero))),
            style.other(&"░".repeat(zero)),
        ]
        .concat();
        let pad = " ".repeat(BAR.saturating_sub(all.max(kept + zero)));
        let goes = human(amounts.savable_gross_bytes);
        line(&mut text, &format!("   worker {number}  {bar}{pad}  {goes:>8} can go"));
    }
    let totals = &report.totals;
    line(&mut text, "");
    line(
        &mut text,
        &format!(
            "   {} needed   {} duplicate {}   {} zeros {}",
            style.plain("█"),
            style.good("▒"),
            human(totals.duplicate_within_bytes + totals.duplicate_across_bytes),
            style.other("░"),
            human(totals.zero_bytes)
        ),
    );
    line(
        &mut text,
        &format!(
            "   {} of {} can go ({}).",
            style.bold(&human(totals.savable_gross_bytes)),
            human(totals.resident_bytes),
            percent(totals.savable_gross_bytes as f64, totals.resident_bytes as f64)
        ),
    );
    let cost = &report.cost;
    line(
        &mut text,
        &style.dim(&format!("   Found by reading every page: {:.1} s of CPU. Nothing was changed.", cost.cpu_seconds)),
    );
    text
}

/// The heading of the folding.
pub fn folding(style: Style) -> String {
    let mut text = String::new();
    heading(&mut text, 3, "Folding: pagefold finds and marks it, the kernel merges", style);
    text
}

/// The folding, as it goes on.
pub fn fold_picture(view: &View<'_>, first: &[u64], savable: u64, span: f64, style: Style) -> Vec<String> {
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
    for (number, (&bytes, &before)) in (1..).zip(view.workers.iter().zip(first)) {
        let (filled, all) = (columns(bytes, widest, BAR), columns(before, widest, BAR));
        let gone = all.saturating_sub(filled);
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

/// After the folding.
pub fn verified(bytes: u64, folded: &Folded, style: Style) -> String {
    let mut text = String::new();
    let last = folded.seen.last();
    let memory = folded.seen.workers.iter().sum();
    let note = format!(
        "   Memory is the workers' Pss, saved is what KSM counts. CPU: pagefold {:.2} s,\n   ksmd {:.2} s; without these pictures. Marked: {}.",
        folded.own_cpu.as_secs_f64(),
        last.ksmd_cpu.as_secs_f64(),
        human(folded.marked)
    );
    line(&mut text, &note.lines().map(|row| style.dim(row)).collect::<Vec<_>>().join("\n"));
    heading(&mut text, 4, "Is the data still right?", style);
    let what = format!("Every byte of {} is what was written,", human(bytes));
    line(&mut text, &format!("   {} held in {}.", style.good(&what), human(memory)));
    text
}

/// After giving it back.
pub fn given_back(bytes: u64, took: Duration, style: Style) -> String {
    let mut text = String::new();
    heading(&mut text, 5, "And back, then the same with KSM by itself", style);
    line(
        &mut text,
        &format!("   Given back: {} have copies of their own again, in {:.1} s.", human(bytes), took.as_secs_f64()),
    );
    text
}

/// What KSM is told.
pub fn ksm_alone(pages: u64, sleep_ms: u64) -> String {
    let mut text = String::new();
    let said = format!("   Now everything is marked, and ksmd scans {pages} pages every {sleep_ms} ms.");
    line(&mut text, &said);
    line(&mut text, "");
    text
}

/// KSM by itself, as it goes on.
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
    let area = |points| Curve { points, span, top, rows: ROWS_OF_TWO };
    let mut lines = vec![format!("   {:>9}   {}", "", style.good("pagefold, as above"))];
    lines.extend(area(before).with_axis(|row| style.good(row), style));
    lines.push(format!("   {:>9}   {}", "", style.other("KSM by itself")));
    lines.extend(area(&points).with_axis(|row| style.other(row), style));
    lines.extend(time_axis(span, style));
    lines.push(String::new());
    lines.push(format!("   saved {}   CPU {:.2} s", style.other(&human(now.saved)), now.ksmd_cpu.as_secs_f64()));
    lines
}

/// The two side by side.
pub fn compared(bytes: u64, folded: &Folded, alone: &Seen, style: Style) -> String {
    let mut text = String::new();
    line(&mut text, &style.dim(&format!("   Checked again: every byte of {} is right.", human(bytes))));
    line(&mut text, "");
    let (ours, last) = (folded.seen.last(), alone.last());
    let then = alone.at(ours.seconds);
    let goal = ours.saved / 10 * 9;
    let head = ["", "saved", "nine tenths after", "CPU by then", "in all", "at rest"].map(str::to_owned);
    line(&mut text, &style.dim(&row(&head)));
    // The process that marks is not among what was seen; it had done its part before anything was saved.
    let unseen = folded.own_cpu.saturating_sub(ours.own_cpu);
    let reached = |point: Point, cpu: Duration| (point.seconds, cpu);
    let pagefold = Side {
        at: ours,
        reached: folded.seen.reached(goal).map(|point| reached(point, point.cpu() + unseen)),
        cpu: folded.cpu(),
        at_rest: at_rest(&folded.seen, Point::cpu),
    };
    let ksm = Side {
        at: last,
        reached: alone.reached(goal).map(|point| reached(point, point.ksmd_cpu)),
        cpu: last.ksmd_cpu,
        at_rest: at_rest(alone, |point| point.ksmd_cpu),
    };
    line(&mut text, &style.good(&row(&pagefold.cells("pagefold"))));
    if last.seconds > ours.seconds + 1.0 {
        let by_then = ksm.reached.filter(|&(seconds, _)| seconds <= then.seconds);
        let ksm = Side { at: then, reached: by_then, cpu: then.ksmd_cpu, at_rest: None };
        line(&mut text, &style.other(&row(&ksm.cells("KSM"))));
    }
    line(&mut text, &style.other(&row(&ksm.cells("KSM"))));
    line(&mut text, "");
    for sentence in verdict(&pagefold, &ksm) {
        line(&mut text, &format!("   {sentence}"));
    }
    text
}

/// A line of the table.
fn row([name, saved, reached, by_then, all, rest]: &[String; 6]) -> String {
    format!("   {name:<15}{saved:>9}{reached:>19}{by_then:>13}{all:>9}{rest:>9}")
}

/// What is compared.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    at: Point,
    /// Seconds until nine tenths of what pagefold saved, and CPU time until then.
    reached: Option<(f64, Duration)>,
    cpu: Duration,
    /// CPU at rest, as a share of a core.
    at_rest: Option<f64>,
}

impl Side {
    fn cells(&self, who: &str) -> [String; 6] {
        let none = || "-".to_owned();
        [
            format!("{who}, {:.0} s", self.at.seconds),
            human(self.at.saved),
            self.reached.map_or_else(none, |(seconds, _)| format!("{seconds:.1} s")),
            self.reached.map_or_else(none, |(_, cpu)| format!("{:.2} s", cpu.as_secs_f64())),
            format!("{:.2} s", self.cpu.as_secs_f64()),
            self.at_rest.map_or_else(none, |share| percent(share, 1.0)),
        ]
    }
}

/// CPU of the last seconds as a share of a core, if hardly anything more was saved in them.
fn at_rest(seen: &Seen, cpu: impl Fn(&Point) -> Duration) -> Option<f64> {
    let last = seen.last();
    let before = seen.at(last.seconds - REST_SECONDS);
    if before.seconds <= 0.0 || last.saved > before.saved + before.saved / 100 {
        return None;
    }
    let spent = cpu(&last).saturating_sub(cpu(&before)).as_secs_f64();
    Some(spent / (last.seconds - before.seconds))
}

/// The comparison in words, whichever way it went.
fn verdict(ours: &Side, ksm: &Side) -> Vec<String> {
    let (saved, by_ksm) = (ours.at.saved, ksm.at.saved);
    let amount = if by_ksm > saved + saved / 100 {
        format!("KSM saved {} more", human(by_ksm - saved))
    } else if by_ksm + saved / 100 >= saved {
        "KSM saved the same".to_owned()
    } else {
        format!("KSM had got {} of that when it was stopped", percent(by_ksm as f64, saved as f64))
    };
    let times = |ksm: f64, ours: f64, unit: &str| match ksm / ours.max(1e-3) {
        times if times >= 1.05 => format!("{times:.1} times the {unit}"),
        times if times > 0.95 => format!("the same {unit}"),
        times => format!("{} of the {unit}", percent(times, 1.0)),
    };
    let pace = ksm.reached.zip(ours.reached).map(|((ksm, ksm_cpu), (ours, ours_cpu))| {
        let cpu = times(ksm_cpu.as_secs_f64(), ours_cpu.as_secs_f64(), "CPU");
        format!("Nine tenths of it took KSM {} and {cpu}.", times(ksm, ours, "time"))
    });
    let rest = ksm.at_rest.zip(ours.at_rest).map(|(ksm, ours)| {
        format!("With nothing left to do it takes {} of a core, pagefold {}.", percent(ksm, 1.0), percent(ours, 1.0))
    });
    [Some(format!("{amount}.")), pace, rest].into_iter().flatten().collect()
}

/// The last lines.
pub fn end(style: Style) -> String {
    let mut text = String::new();
    heading(&mut text, 6, "Everything is as it was", style);
    line(&mut text, "   The workers have ended, nothing is merged, every knob of KSM is as it was.");
    line(&mut text, "");
    line(&mut text, &format!("   Now your own programs:  {}", style.good("sudo pagefold scan --exe NAME")));
    text
}

/// Seconds and savings.
pub fn curve(points: &[Point]) -> Vec<(f64, u64)> {
    points.iter().map(|point| (point.seconds, point.saved)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_is_just_to_both() {
        let side = |saved, reached: Option<(f64, u64)>, at_rest| Side {
            at: Point { saved, ..Point::default() },
            reached: reached.map(|(seconds, cpu)| (seconds, Duration::from_secs(cpu))),
            at_rest,
            ..Side::default()
        };
        let ours = side(1024, Some((1.0, 2)), Some(0.01));
        for (ksm, words) in [
            (
                side(1024, Some((9.0, 3)), None),
                &["KSM saved the same.", "Nine tenths of it took KSM 9.0 times the time and 1.5 times the CPU."][..],
            ),
            (side(512, None, None), &["KSM had got 50 % of that when it was stopped."]),
            (
                side(2048, Some((0.5, 2)), Some(0.001)),
                &[
                    "KSM saved 1 KiB more.",
                    "Nine tenths of it took KSM 50 % of the time and the same CPU.",
                    "With nothing left to do it takes 0.1 % of a core, pagefold 1.0 %.",
                ],
            ),
        ] {
            assert_eq!(verdict(&ours, &ksm), words);
        }
    }
}
