//! The result of `scan --why` as text for a terminal of 80 columns.

use super::WhyReport;
use super::pair::PairReport;
use pagefold_text::figures::thousands;
use pagefold_text::style::{Lines, Style, count, human, percent, shorten};
use pagefold_text::table::Table;

/// We show at most this many rows and reasons.
const ROWS: usize = 20;
const WIDTH: usize = 78;

pub fn text(report: &WhyReport, style: Style) -> String {
    let mut text = String::new();
    let totals = &report.totals;
    text.blank();
    let processes = count(totals.processes, "process maps", "processes map");
    text.line(style.bold(&format!("{processes} {}:", human(totals.mapped_bytes))));
    parts(&mut text, report, style);
    causes(&mut text, report, style);
    if !totals.unknown.is_empty() {
        text.blank();
        text.line(style.bold("Unknown"));
        for unknown in totals.unknown.iter().take(ROWS) {
            text.line(format!("{:>9}  {}", human(unknown.bytes), shorten(&unknown.reason, WIDTH - 11)));
        }
    }
    rows(&mut text, report, style);
    text.blank();
    text.paragraph(&in_common(report), WIDTH);
    if let Some(pair) = &report.pair {
        compared(&mut text, pair, style);
    }
    text.blank();
    text.line(style.dim(&basis(report)));
    text.blank();
    text
}

fn parts(text: &mut String, report: &WhyReport, style: Style) {
    let totals = &report.totals;
    let unique_out_of_reach: u64 = totals.out_of_reach.iter().map(|part| part.unique_bytes).sum();
    let unknown: u64 = totals.unknown.iter().map(|unknown| unknown.bytes).sum();
    for (bytes, words) in [
        (totals.merged_bytes, "merged"),
        (totals.mergeable_duplicate_bytes, "duplicate and mergeable: pagefold run merges it"),
        (totals.duplicates_out_of_reach(), "duplicate, but out of reach"),
        (totals.mergeable_unique_bytes, "mergeable, but unique"),
        (unique_out_of_reach, "the rest of memory out of reach"),
        (totals.shared_by_fork_bytes, "saved already: frames shared by fork"),
        (totals.shared_by_file_bytes, "saved already: frames shared by mapping the same file"),
        (unknown, "unknown"),
    ] {
        if bytes > 0 {
            let share = percent(bytes as f64, totals.mapped_bytes as f64);
            text.line(format!("{:>9}  {}  {words}", human(bytes), style.dim(&format!("{share:>6}"))));
        }
    }
}

fn causes(text: &mut String, report: &WhyReport, style: Style) {
    let duplicates = report.totals.out_of_reach.iter().filter(|part| part.duplicate_bytes > 0);
    for (number, part) in duplicates.enumerate() {
        if number == 0 {
            text.blank();
            text.line(style.bold("Duplicate, but out of reach"));
        }
        text.line(format!("{:>9}  {}", human(part.duplicate_bytes), part.cause.name()));
        for (who, what) in part.cause.remedies() {
            text.line(style.dim(&format!("{:>11}{who}: {what}", "")));
        }
    }
}

fn rows(text: &mut String, report: &WhyReport, style: Style) {
    let head = ["WHOSE", "MAPPED", "MERGED", "MERGEABLE", "OUT OF REACH", "SHARED"];
    let mut table = Table::new(head.iter().map(|name| style.dim(name)), |column| column > 0);
    for row in report.rows.iter().take(ROWS) {
        let shared = row.shared_by_fork_bytes + row.shared_by_file_bytes;
        let mut cells = vec![shorten(&row.name, 24)];
        for bytes in
            [row.mapped_bytes, row.merged_bytes, row.mergeable_duplicate_bytes, row.duplicates_out_of_reach(), shared]
        {
            cells.push(if bytes == 0 { style.dim("-") } else { human(bytes) });
        }
        table.add_row(cells);
    }
    text.blank();
    table.to_string().lines().for_each(|row| text.line(row));
    if report.rows.len() > ROWS {
        text.line(style.dim(&format!("… and {} more (all of them: --json)", report.rows.len() - ROWS)));
    }
}

/// Sentences on the frames that several rows, or several trust domains, map.
fn in_common(report: &WhyReport) -> String {
    let rows = report.rows.len();
    let frames = report.totals.frames_in_common;
    let is_whole = report.unexamined_processes == 0 && report.unexamined_bytes == 0;
    let mut sentences = Vec::new();
    match (rows, frames.all()) {
        (0 | 1, _) => {
            sentences.push("Name several workloads or processes to see which frames they have in common.".to_owned());
        }
        (_, 0) if is_whole => sentences.push(format!("Isolation: no frame is mapped by two of these {rows}.")),
        (_, 0) => {
            sentences.push(format!("Isolation isn't proven: we found no frame that two of these {rows} map."));
        }
        (_, all) => sentences.push(format!(
            "Isolation: {} mapped by several of these {rows}: {} merged by KSM, {} shared since a fork, {} by mapping the same file.",
            frames_are(all),
            thousands(frames.merged),
            thousands(frames.by_fork),
            thousands(frames.by_file),
        )),
    }
    if let Some(frames) = report.frames_between_domains {
        let merged = thousands(frames.merged);
        let are = frames_are(frames.all());
        sentences.push(format!("{are} mapped by several trust domains, {merged} of these merged by KSM."));
    }
    if !is_whole {
        let processes = count(report.unexamined_processes, "process", "processes");
        let bytes = human(report.unexamined_bytes);
        sentences.push(format!("We couldn't look at {processes} and at {bytes} of memory."));
    }
    sentences.push("The kernel's own pages (zero page, vDSO) don't count.".to_owned());
    sentences.join(" ")
}

fn frames_are(number: u64) -> String {
    if number == 1 { "1 frame is".to_owned() } else { format!("{} frames are", thousands(number)) }
}

fn compared(text: &mut String, pair: &PairReport, style: Style) {
    text.blank();
    let pages = thousands(pair.pages);
    text.line(style.bold(&format!("{} against {}: {pages} pages of like mappings", pair.pids[0], pair.pids[1])));
    for class in &pair.classes {
        let share = percent(class.pages as f64, pair.pages as f64);
        text.line(format!("{share:>9}  {}", class.likeness.name()));
        if let Some(remedy) = class.likeness.remedy() {
            text.line(style.dim(&format!("{:>11}{remedy}", "")));
        }
    }
    if pair.differing_words > 0 {
        let pointers = percent(pair.pointer_words as f64, pair.differing_words as f64);
        let words = thousands(pair.differing_words);
        text.line(format!("Pages that nearly match differ in {words} words; {pointers} of these are pointers."));
    }
    if pair.huge_pages > 0 {
        let share = percent(pair.huge_pages as f64, pair.pages as f64);
        text.line(format!("{share} is in huge pages: merging splits them."));
    }
}

fn basis(report: &WhyReport) -> String {
    let read = human(report.cost.pages_read << 12);
    let cpu = format!("{:.2} s of CPU", report.cost.cpu_seconds);
    if report.exact {
        return format!("Exact: every readable page was read ({read}, {cpu}).");
    }
    let share = percent(report.sampled_fraction, 1.0);
    let error = human(report.error_bytes);
    format!("From {read} ({share}, {cpu}); margin of error of all duplicates {error} (95 %).")
}
