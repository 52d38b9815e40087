//! The result of a scan as one self-contained web page.

use super::report::{ProcessRow, ScanReport, size};
use super::sharing::Matrix;
use crate::output::page::{Origin, escape, page as framed};
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_engine::units::Pages;
use pagefold_text::style::{human, percent};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// For each reason to leave processes out, we list at most this many names.
const NAMES_MOST: usize = 8;

pub fn page(report: &ScanReport, origin: &Origin) -> String {
    let mut html = origin.tag("scan", &report.scope);
    let _ = write!(
        html,
        "<h1>{}.</h1>\n<p class=\"dim\">{}</p>\n",
        escape(&report.headline()).replace(" %", "&nbsp;%"),
        escape(&report.basis()),
    );
    whole(&mut html, report);
    if let Some(matrix) = &report.matrix {
        sharing(&mut html, matrix);
    }
    table(&mut html, "By process", "<th class=\"n\">PID</th><th>Program</th>", equal_processes(report).into_iter());
    let rows = report.kinds.iter().map(|row| (format!("<td>{}</td>", escape(&row.kind)), row.figures));
    table(&mut html, "By kind of memory", "<th>Kind</th>", rows);
    if report.workloads.len() > 1 {
        let rows = report.workloads.iter().map(|row| {
            let name = escape(&row.name);
            (
                format!("<td class=\"name\" title=\"{name}\">{name}</td><td class=\"n wide\">{}</td>", row.processes),
                row.figures,
            )
        });
        table(&mut html, "By workload", "<th>Workload</th><th class=\"n wide\">Processes</th>", rows);
    }
    left_out(&mut html, report);
    let advice = [
        ("To save it", &report.command),
        ("To save most of it, if these workloads trust each other", &report.across_workloads),
    ];
    for (head, command) in advice {
        if let (Some(command), true) = (command, report.is_worthwhile()) {
            let _ = writeln!(html, "<h2>{head}</h2>\n<pre><code>{}</code></pre>", escape(command));
        }
    }
    framed("pagefold scan", &html)
}

/// The table's rows: processes of the same program in the same workload share a row.
fn equal_processes(report: &ScanReport) -> Vec<(String, Figures)> {
    let mut groups: BTreeMap<_, Vec<&ProcessRow>> = BTreeMap::new();
    for row in report.looked_at() {
        groups.entry((&row.name, &row.exe, &row.workload)).or_default().push(row);
    }
    let mut rows = Vec::new();
    for ((name, exe, _), group) in groups {
        let mut figures = Figures::default();
        for row in &group {
            figures += row.figures;
        }
        let pids: Vec<String> = group.iter().map(|row| row.pid.to_string()).collect();
        let pid = if pids.len() == 1 { pids[0].clone() } else { format!("{} pids", pids.len()) };
        let exe = exe.as_deref().unwrap_or_default();
        let labels = format!(
            "<td class=\"n\" title=\"{}\">{pid}</td><td class=\"name\" title=\"{}\">{}</td>",
            pids.join(", "),
            escape(exe),
            escape(name)
        );
        rows.push((labels, figures));
    }
    rows.sort_by_key(|(_, figures)| Reverse(bytes_of(figures.savable)));
    rows
}

/// A table of the workloads that have copies of each other's memory.
fn sharing(html: &mut String, matrix: &Matrix) {
    if matrix.names.len() < 2 {
        return;
    }
    html.push_str(
        "<h2>Who shares with whom</h2>\n<p class=\"dim\">How much memory of a row's workload has a copy in a column's \
         workload, not counting zeros and memory that is merged already.",
    );
    if !matrix.exact {
        html.push_str(" Not every page was read: figures are lower bounds, and ? is unknown.");
    }
    html.push_str("</p>\n<table class=\"matrix\"><thead><tr><th></th>");
    for number in 1..=matrix.names.len() {
        let _ = write!(html, "<th class=\"n\">{number}</th>");
    }
    html.push_str("</tr></thead><tbody>\n");
    let most = matrix.pages.iter().flatten().flatten().max().copied().unwrap_or(0).max(1);
    for (number, (name, row)) in (1..).zip(matrix.names.iter().zip(&matrix.pages)) {
        let _ = write!(html, "<tr><th>{number} {}</th>", escape(name));
        for pages in row {
            let text = match pages {
                None => "?".to_owned(),
                Some(0) => "–".to_owned(),
                Some(pages) => human(Pages(*pages).bytes().0),
            };
            let shade = 40.0 * pages.unwrap_or(0) as f64 / most as f64;
            let _ = write!(html, "<td class=\"n\" style=\"--shade:{shade:.0}%\">{text}</td>");
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody></table>\n");
}

/// The bar that divides all memory, with a legend.
fn whole(html: &mut String, report: &ScanReport) {
    let totals = &report.totals;
    let savable = totals.zero + totals.duplicate_within + totals.duplicate_across;
    let parts = [
        ("zero", "savable: all zeros", totals.zero),
        ("within", "savable: copy in the same process", totals.duplicate_within),
        ("across", "savable: copy in another process", totals.duplicate_across),
        ("rest", "the rest", (totals.resident - savable).max(0.0)),
    ];
    let whole = totals.resident.max(1.0);
    let words: Vec<String> = parts.iter().map(|(_, what, pages)| format!("{what} {}", size(*pages))).collect();
    let _ = write!(
        html,
        "<svg class=\"whole\" viewBox=\"0 0 1000 28\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
        words.join(", ")
    );
    let mut x = 0.0;
    for (class, _, pages) in parts {
        let width = 1000.0 * pages / whole;
        let _ = write!(html, "<rect class=\"{class}\" x=\"{x:.2}\" width=\"{width:.2}\" height=\"28\"/>");
        x += width;
    }
    html.push_str("</svg>\n<ul class=\"key\">");
    for (class, what, pages) in parts {
        let size = size(pages);
        let share = percent(pages, whole);
        let _ =
            write!(html, "<li><i class=\"{class}\"></i>{what}: <b>{size}</b> <span class=\"dim\">{share}</span></li>");
    }
    html.push_str("</ul>\n");
    let mut besides = report.besides();
    if totals.metadata > 0.0 {
        besides.push(format!("{} of KSM metadata, subtracted from the savable memory", size(totals.metadata)));
    }
    if !besides.is_empty() {
        let _ = writeln!(html, "<p class=\"dim\">Besides: {}.</p>", besides.join("; "));
    }
    if let Some(headroom) = report.headroom() {
        let _ = writeln!(html, "<p>{headroom}</p>");
    }
}

fn table(html: &mut String, title: &str, head: &str, rows: impl Iterator<Item = (String, Figures)>) {
    let rows: Vec<_> = rows.collect();
    let most = rows.iter().fold(1.0, |most: f64, (_, figures)| most.max(figures.resident));
    let _ = write!(
        html,
        "<h2>{title}</h2>\n<div class=\"scroll\"><table><thead><tr>{head}<th class=\"n\">Holds</th>\
         <th class=\"n wide\">Zero</th><th class=\"n wide\">Within</th><th class=\"n wide\">Across</th>\
         <th class=\"n\">Savable</th><th class=\"n\">Share</th><th class=\"wide\"></th></tr></thead><tbody>\n"
    );
    for (labels, figures) in rows {
        let _ = write!(html, "<tr>{labels}<td class=\"n\">{}</td>", size(figures.resident));
        for pages in [figures.zero, figures.duplicate_within, figures.duplicate_across] {
            let size = if bytes_of(pages) == 0 { "–".to_owned() } else { size(pages) };
            let _ = write!(html, "<td class=\"n wide\">{size}</td>");
        }
        let savable = figures.savable;
        let _ = writeln!(
            html,
            "<td class=\"n\"><b>{}</b></td><td class=\"n\">{}</td><td class=\"bar wide\"><svg viewBox=\"0 0 100 10\" \
             preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect class=\"rest\" width=\"{:.2}\" height=\"10\"/>\
             <rect class=\"across\" width=\"{:.2}\" height=\"10\"/></svg></td></tr>",
            size(figures.savable),
            percent(savable, figures.resident),
            100.0 * figures.resident / most,
            100.0 * savable / most,
        );
    }
    html.push_str("</tbody></table></div>\n");
}

fn left_out(html: &mut String, report: &ScanReport) {
    if report.excluded.is_empty() {
        return;
    }
    html.push_str("<h2>Left out</h2>\n<table class=\"out\"><tbody>\n");
    for row in &report.excluded {
        let whole = report.processes.iter().filter(|process| process.left_out.as_ref() == Some(&row.reason));
        let names: Vec<String> = whole.map(|process| format!("{} ({})", process.name, process.pid)).collect();
        let where_ = match names.len() {
            0 => row.mappings(),
            more @ NAMES_MOST.. if more > NAMES_MOST => {
                format!("{}, and {} more", names[..NAMES_MOST].join(", "), more - NAMES_MOST)
            }
            _ => names.join(", "),
        };
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td>{}{}</td><td class=\"dim\">{}</td></tr>",
            human(row.bytes),
            escape(&row.reason),
            escape(&report.way_in(&row.reason)),
            escape(&where_),
        );
    }
    html.push_str("</tbody></table>\n");
}
