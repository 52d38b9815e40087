//! The result of a scan as text for a terminal.

use super::report::{GroupRow, ScanReport, size};
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_text::style::{Lines, Style, bar, count, human, percent, shorten};
use pagefold_text::table::Table;

/// We show at most this many rows of a list. A last line sums up the rest.
const ROWS: usize = 20;
const BAR: usize = 12;

pub fn text(report: &ScanReport, style: Style) -> String {
    let mut text = String::new();
    text.blank();
    text.line(format!("{}.", style.bold(&report.headline())));
    text.line(style.dim(&report.basis()));

    let (one, many) = report.of;
    if report.is_host {
        groups(&mut text, style, "PROGRAM", &report.programs);
    } else {
        let rows: Vec<_> =
            report.looked_at().map(|row| (vec![row.pid.to_string(), shorten(&row.name, 24)], row.figures)).collect();
        let head = if one == "guest" { ["ID", "GUEST"] } else { ["PID", "PROGRAM"] };
        table(&mut text, style, &head, &rows, one, many);
    }
    if report.workloads.len() > 1 {
        groups(&mut text, style, "WORKLOAD", &report.workloads);
    }
    let rows: Vec<_> = report.kinds.iter().map(|row| (vec![row.kind.clone()], row.figures)).collect();
    table(&mut text, style, &["KIND OF MEMORY"], &rows, "kind", "kinds");
    text.blank();
    text.line(
        style.dim("zero, within, across: savable pages that are all zeros, that have a copy in the same process,"),
    );
    text.line(style.dim("or in another one (a saving that several processes share is divided among them)."));
    already(&mut text, report, style);
    if let Some(places) = &report.numa {
        if !places.processes.is_empty() {
            places.describe(&mut text, style);
            text.line(style.dim(&format!("  By the policy 'fair': {}.", places.sentence())));
        }
    }
    left_out(&mut text, report, style);
    next(&mut text, report, style);
    text.blank();
    text
}

fn table(text: &mut String, style: Style, names: &[&str], rows: &[(Vec<String>, Figures)], one: &str, many: &str) {
    if rows.is_empty() {
        return;
    }
    let figures = ["HOLDS", "ZERO", "WITHIN", "ACROSS", "SAVABLE", "SHARE"];
    let mut head: Vec<String> = names.iter().chain(&figures).map(|name| style.dim(name)).collect();
    // The column of bars has no heading, and holds no numbers.
    head.push(String::new());
    let is_number = |column: usize| match names.get(column) {
        Some(name) => matches!(*name, "PID" | "ID" | "PROCESSES"),
        None => column < names.len() + figures.len(),
    };
    let mut table = Table::new(head, is_number);
    let mut most: f64 = 1.0;
    for (_, figures) in rows {
        most = most.max(figures.savable);
    }
    for (labels, figures) in rows.iter().take(ROWS) {
        let Figures { resident, zero, duplicate_within, duplicate_across, savable, .. } = *figures;
        let mut cells = labels.clone();
        for pages in [resident, zero, duplicate_within, duplicate_across] {
            cells.push(size_or_dash(pages, style));
        }
        cells.push(style.bold(&size_or_dash(savable, style)));
        cells.push(percent(savable, resident));
        cells.push(style.good(&bar(savable / most, BAR)));
        table.add_row(cells);
    }
    text.blank();
    table.to_string().lines().for_each(|row| text.line(row));
    if rows.len() > ROWS {
        let rest = &rows[ROWS..];
        let savable = size(rest.iter().map(|(_, figures)| figures.savable).sum());
        let others = count(rest.len(), one, many);
        text.line(style.dim(&format!("… and {others} more with {savable} savable (all of them: --json)")));
    }
}

/// Adds a table of programs or workloads, which also shows the memory that can't be saved.
fn groups(text: &mut String, style: Style, name: &str, rows: &[GroupRow]) {
    let head = [name, "PROCESSES", "HOLDS", "SAVABLE", "SHARE", "OUT OF REACH", "LEFT OUT"];
    let mut table = Table::new(head.iter().map(|name| style.dim(name)), |column| column > 0);
    for row in rows.iter().take(ROWS) {
        let GroupRow { figures, out_of_reach_bytes, left_out_bytes, .. } = row;
        table.add_row([
            shorten(&row.name, 28),
            row.processes.to_string(),
            size_or_dash(figures.resident, style),
            style.bold(&size_or_dash(figures.savable, style)),
            percent(figures.savable, figures.resident),
            size_or_dash((out_of_reach_bytes >> 12) as f64, style),
            size_or_dash((left_out_bytes >> 12) as f64, style),
        ]);
    }
    text.blank();
    table.to_string().lines().for_each(|row| text.line(row));
    if rows.len() > ROWS {
        text.line(style.dim(&format!("… and {} more (all of them: --json)", rows.len() - ROWS)));
    }
}

fn size_or_dash(pages: f64, style: Style) -> String {
    if bytes_of(pages) == 0 { style.dim("-") } else { size(pages) }
}

fn already(text: &mut String, report: &ScanReport, style: Style) {
    let besides = report.besides();
    if !besides.is_empty() {
        text.blank();
        text.line(format!("{} {}.", style.bold("Besides:"), besides.join(", ")));
    }
    if report.totals.metadata > 0.0 {
        text.line(style.dim(&format!("{} of KSM metadata are subtracted.", size(report.totals.metadata))));
    }
}

fn left_out(text: &mut String, report: &ScanReport, style: Style) {
    let ended = report.processes.iter().filter(|row| row.left_out.as_deref() == Some("has ended")).count();
    if report.excluded.is_empty() && ended == 0 {
        return;
    }
    text.blank();
    text.line(style.bold("Left out"));
    for row in report.excluded.iter().take(ROWS) {
        let whole = report.processes.iter().filter(|process| process.left_out.as_ref() == Some(&row.reason)).count();
        let where_ = match whole {
            0 => row.mappings(),
            whole => count(whole, "process", "processes"),
        };
        let bytes = human(row.bytes);
        let where_ = style.dim(&format!("({where_})"));
        text.line(format!("{bytes:>9}  {}{}  {where_}", row.reason, report.way_in(&row.reason)));
    }
    if ended > 0 {
        let processes = count(ended, "process", "processes");
        text.line(format!("{:>9}  ended meanwhile  {}", "", style.dim(&format!("({processes})"))));
    }
}

fn next(text: &mut String, report: &ScanReport, style: Style) {
    if !report.is_worthwhile() {
        text.blank();
        text.line("There is almost nothing to save here.");
        return;
    }
    if let Some(headroom) = report.headroom() {
        text.blank();
        text.line(headroom);
    }
    if let Some(command) = &report.command {
        text.blank();
        text.line(format!("To save it:  {}", style.good(command)));
    } else if let Some(command) = &report.across_workloads {
        text.blank();
        text.line("To save most of it, if these workloads trust each other:");
        text.line(format!("  {}", style.good(command)));
    }
}
