//! The result of a scan as one self-contained web page.

use super::map::{Map, Shares};
use super::report::{ProcessRow, ScanReport, size, way_in};
use super::sharing::Matrix;
use crate::output::page::{Origin, escape, page as framed};
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_engine::units::Pages;
use pagefold_text::style::{count, human, percent};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// We show at most this many maps, of the processes with the most savable memory.
const MAPS_MOST: usize = 24;
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
    maps(&mut html, report);
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
    if let Some(command) = report.next_step() {
        let _ = writeln!(html, "<h2>To save it</h2>\n<pre><code>{}</code></pre>", escape(&command));
    }
    framed("pagefold scan", &html)
}

/// The table's rows: one for each process, except that those of one program in one workload share a row.
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
        let pid = if pids.len() == 1 { pids[0].clone() } else { format!("{} equal", pids.len()) };
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
        "<h2>Who shares with whom</h2>\n<p class=\"dim\">Memory of the workload of a row that has a copy in the workload of a \
         column; without zeros, and without what is merged already.",
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
}

/// The maps of the processes.
fn maps(html: &mut String, report: &ScanReport) {
    let mut rows: Vec<&ProcessRow> = report.looked_at().collect();
    rows.retain(|row| report.maps.get(&row.pid).is_some_and(|map| !map.parts.is_empty()));
    if rows.is_empty() {
        return;
    }
    html.push_str(
        "<h2>Where it is</h2>\n<p class=\"dim\">The resident memory of each process, lowest address at the left. The height is the \
         share of the pages there. Of duplicates one copy stays, so less than what is shown as duplicate can be saved.",
    );
    if !report.exact {
        html.push_str(" Estimated from the sample.");
    }
    html.push_str("</p>\n<ul class=\"key\">");
    for (class, what, _) in LAYERS {
        let _ = write!(html, "<li><i class=\"{class}\"></i>{what}</li>");
    }
    html.push_str("<li><i class=\"rest\"></i>unique</li></ul>\n<div class=\"maps\">\n");
    for row in rows.iter().take(MAPS_MOST) {
        let _ = write!(
            html,
            "<figure><figcaption><b>{}</b> <span class=\"dim\">{}, {}, {} savable</span></figcaption>",
            escape(&row.name),
            row.pid,
            size(row.figures.resident),
            size(row.figures.savable),
        );
        map(html, &row.name, &report.maps[&row.pid]);
        html.push_str("</figure>\n");
    }
    html.push_str("</div>\n");
    if rows.len() > MAPS_MOST {
        let more = count(rows.len() - MAPS_MOST, "process is", "processes are");
        let _ = writeln!(html, "<p class=\"dim\">{more} not shown here, with less to save.</p>");
    }
}

type Layer = (&'static str, &'static str, fn(&Shares) -> f64);

/// The layers of a map, from the bottom up.
const LAYERS: [Layer; 4] = [
    ("merged", "merged already", |shares| shares.merged),
    ("zero", "zero", |shares| shares.zero),
    ("across", "duplicate", |shares| shares.duplicate),
    ("fork", "shared through fork", |shares| shares.fork_shared),
];

/// Each layer's share of the whole map, as text for screen readers.
fn shares_in_words(map: &Map) -> String {
    let mut text = String::new();
    for (_, what, of) in LAYERS {
        let sum: f64 = map.parts.iter().map(of).sum();
        let _ = write!(text, ", {} {what}", percent(sum, map.parts.len() as f64));
    }
    text
}

fn map(html: &mut String, name: &str, map: &Map) {
    let _ = write!(
        html,
        "<svg class=\"map\" viewBox=\"0 0 {} 100\" preserveAspectRatio=\"none\" shape-rendering=\"crispEdges\" role=\"img\" \
         aria-label=\"Map of {}{}\">",
        map.parts.len(),
        escape(name),
        shares_in_words(map)
    );
    // We draw the top layer first, and the layers below it paint over it.
    for layers in (1..=LAYERS.len()).rev() {
        let (class, _, of) = LAYERS[layers - 1];
        if map.parts.iter().all(|shares| of(shares) <= 0.0) {
            continue;
        }
        let _ = write!(html, "<path class=\"{class}\" d=\"M0 100");
        for (at, shares) in map.parts.iter().enumerate() {
            let height: f64 = LAYERS[..layers].iter().map(|(_, _, of)| of(shares)).sum();
            let _ = write!(html, "V{:.1}H{}", 100.0 - 100.0 * height.clamp(0.0, 1.0), at + 1);
        }
        html.push_str("V100Z\"/>");
    }
    html.push_str("</svg><div class=\"kinds\">");
    for stretch in &map.stretches {
        // A short stretch is too narrow for its name.
        let label = if stretch.parts * 8 >= map.parts.len() { stretch.kind.to_string() } else { "&nbsp;".to_owned() };
        let _ = write!(
            html,
            "<span style=\"flex-grow:{}\" title=\"{}, from {:x}\">{label}</span>",
            stretch.parts,
            stretch.kind,
            stretch.first.address(),
        );
    }
    html.push_str("</div>");
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
            way_in(&row.reason, Some("NAME".to_owned())),
            escape(&where_),
        );
    }
    html.push_str("</tbody></table>\n");
}
