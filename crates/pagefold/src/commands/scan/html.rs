//! The result of a scan as one web page that needs nothing else.

use super::report::{ScanReport, size};
use pagefold_cli::style::{count, human, percent};
use pagefold_core::sampling::census::{Figures, bytes_of};
use std::fmt::Write as _;

const STYLE: &str = include_str!("scan.css");

pub fn page(report: &ScanReport) -> String {
    let mut html = String::new();
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>pagefold scan</title>\
         <style>\n{STYLE}</style></head><body><main>\n\
         <p class=\"tag\">pagefold scan <code>{}</code></p>\n<h1>{}.</h1>\n<p class=\"dim\">{}</p>\n",
        escape(&report.scope),
        escape(&report.headline()),
        escape(&report.basis()),
    );
    whole(&mut html, report);
    let rows = report.looked_at().map(|row| {
        let exe = row.exe.as_deref().unwrap_or_default();
        (
            format!("<td class=\"n\">{}</td><td title=\"{}\">{}</td>", row.pid, escape(exe), escape(&row.name)),
            row.figures,
        )
    });
    table(&mut html, "By process", "<th class=\"n\">PID</th><th>Program</th>", rows);
    let rows = report.kinds.iter().map(|row| (format!("<td>{}</td>", escape(&row.kind)), row.figures));
    table(&mut html, "By kind of memory", "<th>Kind</th>", rows);
    if report.cgroups.len() > 1 {
        let rows = report.cgroups.iter().map(|row| {
            (format!("<td>{}</td><td class=\"n\">{}</td>", escape(&row.cgroup), row.processes), row.figures)
        });
        table(&mut html, "By cgroup", "<th>Cgroup</th><th class=\"n\">Processes</th>", rows);
    }
    left_out(&mut html, report);
    if let Some(command) = report.next_step() {
        let _ = writeln!(html, "<h2>To save it</h2>\n<pre><code>{}</code></pre>", escape(&command));
    }
    html.push_str("</main></body></html>\n");
    html
}

/// The bar of all memory, with its key.
fn whole(html: &mut String, report: &ScanReport) {
    let totals = &report.totals;
    let savable = totals.zero + totals.duplicate_within + totals.duplicate_across;
    let parts = [
        ("zero", "all zeros", totals.zero),
        ("within", "duplicate within a process", totals.duplicate_within),
        ("across", "duplicate across processes", totals.duplicate_across),
        ("rest", "unique", (totals.resident - savable).max(0.0)),
    ];
    let whole = totals.resident.max(1.0);
    html.push_str("<svg class=\"whole\" viewBox=\"0 0 1000 28\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Shares of the memory\">");
    let mut x = 0.0;
    for (class, _, pages) in parts {
        let width = 1000.0 * pages / whole;
        let _ = write!(html, "<rect class=\"{class}\" x=\"{x:.2}\" width=\"{width:.2}\" height=\"28\"/>");
        x += width;
    }
    html.push_str("</svg>\n<ul class=\"key\">");
    for (class, what, pages) in parts {
        let (size, share) = (size(pages), percent(pages, whole));
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
}

fn table(html: &mut String, title: &str, head: &str, rows: impl Iterator<Item = (String, Figures)>) {
    let rows: Vec<_> = rows.collect();
    let most = rows.iter().fold(1.0, |most: f64, (_, figures)| most.max(figures.resident));
    let _ = write!(
        html,
        "<h2>{title}</h2>\n<div class=\"scroll\"><table><thead><tr>{head}<th class=\"n\">Holds</th><th class=\"n\">Zero</th>\
         <th class=\"n\">Within</th><th class=\"n\">Across</th><th class=\"n\">Savable</th><th class=\"n\">Share</th><th></th></tr></thead><tbody>\n"
    );
    for (labels, figures) in rows {
        let _ = write!(html, "<tr>{labels}");
        for pages in [figures.resident, figures.zero, figures.duplicate_within, figures.duplicate_across] {
            let size = if bytes_of(pages) == 0 { "–".to_owned() } else { size(pages) };
            let _ = write!(html, "<td class=\"n\">{size}</td>");
        }
        let savable = figures.savable;
        let _ = writeln!(
            html,
            "<td class=\"n\"><b>{}</b></td><td class=\"n\">{}</td><td class=\"bar\"><svg viewBox=\"0 0 100 10\" \
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
        let mappings = count(row.regions as usize, "mapping", "mappings");
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"dim\">{mappings}</td></tr>",
            human(row.bytes),
            escape(&row.reason),
        );
    }
    html.push_str("</tbody></table>\n");
}

/// Escapes a name: programs and cgroups can have any.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text() {
        assert_eq!(escape("<b a=\"&\">"), "&lt;b a=&quot;&amp;&quot;&gt;");
    }
}
