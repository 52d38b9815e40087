//! The result of a scan for a terminal.

use super::report::{Amounts, ScanReport};
use pagefold_cli::style::{Style, bar, count, human, line, percent, shorten};
use pagefold_cli::table::Table;

/// Rows shown of a list; the rest is summed up in a line.
const ROWS: usize = 20;
const BAR: usize = 12;

/// The whole text.
pub fn text(report: &ScanReport, style: Style) -> String {
    let mut text = String::new();
    line(&mut text, "");
    line(&mut text, &format!("{}.", style.bold(&report.headline())));
    line(&mut text, &style.dim(&report.basis()));

    let rows: Vec<_> =
        report.looked_at().map(|row| (vec![row.pid.to_string(), shorten(&row.name, 24)], row.amounts)).collect();
    table(&mut text, style, &["PID", "PROGRAM"], &rows, "process", "processes");
    let rows: Vec<_> = report.kinds.iter().map(|row| (vec![row.kind.clone()], row.amounts)).collect();
    table(&mut text, style, &["KIND OF MEMORY"], &rows, "kind", "kinds");
    if report.cgroups.len() > 1 {
        let rows: Vec<_> = report
            .cgroups
            .iter()
            .map(|row| (vec![shorten(&row.cgroup, 40), row.processes.to_string()], row.amounts))
            .collect();
        table(&mut text, style, &["CGROUP", "PROCESSES"], &rows, "cgroup", "cgroups");
    }
    line(&mut text, "");
    line(
        &mut text,
        &style.dim("zero, within, across: savable pages that are all zeros, that have a copy in the same process,"),
    );
    line(&mut text, &style.dim("or in another one (a saving that several processes share is divided among them)."));
    already(&mut text, &report.totals, style);
    if let Some(places) = report.numa.as_ref().filter(|places| !places.processes.is_empty()) {
        places.describe(&mut text, style);
        line(&mut text, &style.dim(&format!("  By the policy 'fair': {}.", places.sentence())));
    }
    left_out(&mut text, report, style);
    next(&mut text, report, style);
    line(&mut text, "");
    text
}

fn table(text: &mut String, style: Style, names: &[&str], rows: &[(Vec<String>, Amounts)], one: &str, many: &str) {
    if rows.is_empty() {
        return;
    }
    let figures = ["HOLDS", "ZERO", "WITHIN", "ACROSS", "SAVABLE", "SHARE"];
    let head = names.iter().chain(&figures).map(|name| style.dim(name)).chain([String::new()]);
    let mut table = Table::new(head, |column| {
        names.get(column).map_or(column < names.len() + figures.len(), |name| matches!(*name, "PID" | "PROCESSES"))
    });
    let most = rows.iter().map(|(_, amounts)| amounts.savable_bytes).max().unwrap_or(0).max(1);
    for (labels, amounts) in rows.iter().take(ROWS) {
        let size = |bytes: u64| if bytes == 0 { style.dim("-") } else { human(bytes) };
        let figures = [
            size(amounts.resident_bytes),
            size(amounts.zero_bytes),
            size(amounts.duplicate_within_bytes),
            size(amounts.duplicate_across_bytes),
            style.bold(&size(amounts.savable_bytes)),
            percent(amounts.savable_bytes as f64, amounts.resident_bytes as f64),
            style.good(&bar(amounts.savable_bytes as f64 / most as f64, BAR)),
        ];
        table.add_row(labels.iter().cloned().chain(figures));
    }
    line(text, "");
    table.to_string().lines().for_each(|row| line(text, row));
    if rows.len() > ROWS {
        let rest = &rows[ROWS..];
        let savable = rest.iter().map(|(_, amounts)| amounts.savable_bytes).sum();
        let others = count(rest.len(), one, many);
        line(text, &style.dim(&format!("… and {others} more with {} savable (all of them: --json)", human(savable))));
    }
}

fn already(text: &mut String, totals: &Amounts, style: Style) {
    let parts = [
        (totals.merged_bytes, "merged already"),
        (totals.fork_shared_bytes, "shared through fork"),
        (totals.swapped_bytes, "swapped out (not read)"),
    ];
    let said: Vec<String> =
        parts.iter().filter(|part| part.0 > 0).map(|(bytes, what)| format!("{} {what}", human(*bytes))).collect();
    if !said.is_empty() {
        line(text, "");
        line(text, &format!("{} {}.", style.bold("Besides:"), said.join(", ")));
    }
    if totals.metadata_bytes > 0 {
        line(text, &style.dim(&format!("{} of KSM metadata are subtracted.", human(totals.metadata_bytes))));
    }
}

fn left_out(text: &mut String, report: &ScanReport, style: Style) {
    let ended = report.processes.iter().filter(|row| row.left_out.as_deref() == Some("has ended")).count();
    if report.excluded.is_empty() && ended == 0 {
        return;
    }
    line(text, "");
    line(text, &style.bold("Left out"));
    for row in report.excluded.iter().take(ROWS) {
        let whole = report.processes.iter().filter(|process| process.left_out.as_ref() == Some(&row.reason)).count();
        let where_ = match whole {
            0 => count(row.regions as usize, "mapping", "mappings"),
            whole => count(whole, "process", "processes"),
        };
        line(text, &format!("{:>9}  {}  {}", human(row.bytes), row.reason, style.dim(&format!("({where_})"))));
    }
    if ended > 0 {
        line(
            text,
            &format!(
                "{:>9}  ended meanwhile  {}",
                "",
                style.dim(&format!("({})", count(ended, "process", "processes")))
            ),
        );
    }
}

fn next(text: &mut String, report: &ScanReport, style: Style) {
    line(text, "");
    line(
        text,
        &match report.next_step() {
            Some(command) => format!("To save it:  {}", style.good(&command)),
            None => "There is almost nothing to save here.".to_owned(),
        },
    );
}
