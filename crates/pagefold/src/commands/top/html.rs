//! `top` as one self-contained web page: the run's state, its savings over time, and its latest events.

use super::activity;
use crate::commands::status::Status;
use crate::commands::status::rows::{NO_WORKLOAD, Row, by_workload, process_rows};
use crate::history::{Moment, Point, points};
use crate::output::page::{Chart, Curve, Origin, Unit, clock, escape, page as framed};
use pagefold_engine::units::Pages;
use pagefold_text::figures::time;
use pagefold_text::style::{count, human, percent};
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;

/// A table has at most this many rows. We only count the others.
const ROWS_MOST: usize = 200;

/// The page's data: the history, the status of a running daemon, or both.
pub struct Sources<'a> {
    pub status: Option<&'a Status>,
    pub moments: &'a [Moment],
    /// Why there is no history.
    pub problem: Option<&'a str>,
    pub since: Duration,
    pub origin: Origin,
}

pub fn page(sources: &Sources) -> String {
    let mut html = String::new();
    match (sources.status, sources.moments.last()) {
        (Some(status), _) => now(&mut html, status, sources),
        (None, last) => {
            let when = last.map_or_else(String::new, |last| format!(" The last one was seen at {}.", clock(last.time)));
            let _ = writeln!(
                html,
                "{}<h1>No pagefold is running.</h1>\n<p class=\"dim\">{when}</p>",
                sources.origin.tag("top", "")
            );
        }
    }
    over_time(&mut html, sources);
    if let Some(status) = sources.status {
        programs(&mut html, status);
        memory(&mut html, status);
        left_alone(&mut html, status);
        events(&mut html, status);
    }
    framed("pagefold top", &html)
}

fn now(html: &mut String, status: &Status, sources: &Sources) {
    let verb = if status.run.dry_run { "found to be duplicate" } else { "saved" };
    let mechanism = status.run.merging();
    let (_, sentence) = activity::describe(status, &[]);
    let _ = write!(
        html,
        "{}<h1>{} {verb} in {}.</h1>\n<p class=\"dim\">Up {}, governor {}, {mechanism}. {}</p>\n<ul class=\"big\">",
        sources.origin.tag("top", &status.run.scope),
        status.result_bytes().map_or("An unknown amount".to_owned(), human),
        count(status.programs.processes.len(), "process", "processes"),
        time(status.activity.seconds),
        status.activity.governor,
        escape(&sentence),
    );
    let all = status.memory.unmerged_bytes;
    let share = status.result_bytes().map_or("?".to_owned(), |result| percent(result as f64, all as f64));
    figure(html, &share, &format!("of {} {verb}", human(all)));
    figure(html, &human(status.memory.marked_bytes), "marked for merging");
    let allowed = percent(status.activity.allowed_share.fraction(), 1.0);
    figure(html, &percent(status.activity.used_share, 1.0), &format!("of a core, at most {allowed}"));
    let cpu = time(status.work.cpu_seconds.total_ns() as f64 / 1e9);
    figure(html, &cpu, &format!("of CPU time in {}", time(status.activity.seconds)));
    figure(html, &human(status.memory.available_bytes), "of memory available");
    html.push_str("</ul>\n");
}

fn figure(html: &mut String, value: &str, what: &str) {
    let _ = write!(html, "<li><b>{value}</b>{}</li>", what.replace(" %", "&nbsp;%"));
}

fn over_time(html: &mut String, sources: &Sources) {
    html.push_str("<h2>Over time</h2>\n");
    if let Some(problem) = sources.problem {
        let _ = writeln!(html, "<p class=\"dim\">No history: {}.</p>", escape(problem));
        return;
    }
    let mut moments = sources.moments.to_vec();
    moments.extend(sources.status.and_then(|status| Moment::of(status, sources.origin.time)));
    let points = points(&moments, sources.origin.time);
    let Some(first) = points.first() else {
        html.push_str("<p class=\"dim\">The history has no entries from this time.</p>\n");
        return;
    };
    let since = sources.since.as_secs().min(sources.origin.time.saturating_sub(first.moment.time)).max(60);
    let period = Period { now: sources.origin.time, since };
    let marked = curve("fork", "marked", &points, |point| Some(point.moment.marked_bytes as f64));
    let expected = "expected to be merged, including the copies that stay";
    let expected = curve("merged", expected, &points, |point| Some(point.moment.expected_bytes as f64));
    let saved = curve("across", "saved", &points, |point| Some(point.moment.result_bytes() as f64));
    period.draw(html, "Memory", Unit::BYTES, vec![marked, expected, saved]);
    let cpu = curve("warn", "pagefold and ksmd", &points, |point| point.cpu.map(|share| 100.0 * share));
    period.draw(html, "CPU time, share of a core", Unit::PERCENT, vec![cpu]);
    let available = curve("merged", "available", &points, |point| Some(point.moment.available_bytes as f64));
    period.draw(html, "Memory available on the machine", Unit::BYTES, vec![available]);
}

/// The curve of a value over time, with a gap between two runs.
fn curve(class: &'static str, name: &str, points: &[Point], value: impl Fn(&Point) -> Option<f64>) -> Curve {
    let mut values = Vec::new();
    for point in points {
        let time = point.moment.time as f64;
        if !point.goes_on {
            values.push((time, None));
        }
        values.push((time, value(point)));
    }
    Curve { class, name: name.to_owned(), points: values }
}

/// The period that all charts show.
struct Period {
    now: u64,
    /// The length of the period, seconds.
    since: u64,
}

impl Period {
    fn draw(&self, html: &mut String, title: &str, unit: Unit, curves: Vec<Curve>) {
        let seconds = self.since as f64;
        let chart = Chart {
            title: title.to_owned(),
            times: ((self.now - self.since) as f64, self.now as f64),
            labels: vec![format!("−{}", time(seconds)), format!("−{}", time((self.since / 2) as f64)), clock(self.now)],
            unit,
            curves,
        };
        chart.draw(html);
    }
}

const MEMORY_HEAD: &str = "<th class=\"n\">Memory</th><th class=\"n\">Saved</th><th class=\"n wide\">Share</th><th class=\"n wide\">Marked</th><th class=\"n wide\">Duplicate</th>";

fn memory_cells(row: &Row) -> String {
    let mut cells = String::new();
    let sizes = [
        ("n", size(row.memory.unmerged_bytes)),
        ("n", row.saved_bytes.map_or("counting".to_owned(), size)),
        ("n wide", row.saved_share()),
        ("n wide", size(row.memory.marked_bytes)),
        ("n wide", size(row.memory.expected_bytes)),
    ];
    for (class, size) in sizes {
        let _ = write!(cells, "<td class=\"{class}\">{size}</td>");
    }
    cells
}

fn programs(html: &mut String, status: &Status) {
    let mut sums = by_workload(process_rows(&status.programs.processes));
    if sums.iter().all(|sum| sum.workload == NO_WORKLOAD) {
        sums.clear();
    }
    if !sums.is_empty() {
        let head = format!("<th>Workload</th><th class=\"n wide\">Processes</th>{MEMORY_HEAD}");
        table(html, "By workload", &head, &sums, |sum| {
            let name = if sum.workload == NO_WORKLOAD { "none" } else { &sum.workload };
            format!(
                "<td class=\"name\">{}</td><td class=\"n wide\">{}</td>{}",
                escape(name),
                sum.processes,
                memory_cells(sum)
            )
        });
    }
    let head = format!("<th class=\"n\">PID</th><th>Program</th>{MEMORY_HEAD}<th>Belongs to</th>");
    table(html, "By process", &head, &equal_processes(status), |row| {
        let pid = match row.pid {
            Some(pid) if row.processes == 1 => pid.to_string(),
            _ => format!("{} pids", row.processes),
        };
        format!(
            "<td class=\"n\">{pid}</td><td class=\"name\">{}</td>{}<td class=\"name dim\">{}</td>",
            escape(&row.name),
            memory_cells(row),
            escape(&row.workload)
        )
    });
}

/// The table's rows: processes of the same program in the same workload share a row.
fn equal_processes(status: &Status) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for mut process in process_rows(&status.programs.processes) {
        if let Some(why) = process.left_alone.take() {
            process.workload = format!("left alone: {why}");
        } else if process.workload == NO_WORKLOAD {
            process.workload.clear();
        }
        match rows.iter_mut().find(|row| row.name == process.name && row.workload == process.workload) {
            Some(row) => {
                row.processes += 1;
                row.memory += process.memory;
                row.saved_bytes = row.saved_bytes.zip(process.saved_bytes).map(|(sum, more)| sum + more);
            }
            None => rows.push(process),
        }
    }
    rows.sort_by_key(|row| Reverse((row.saved_bytes, row.memory.unmerged_bytes)));
    rows
}

fn size(bytes: u64) -> String {
    if bytes == 0 { "–".to_owned() } else { human(bytes) }
}

fn table<R>(html: &mut String, title: &str, head: &str, rows: &[R], cells: impl Fn(&R) -> String) {
    let _ = write!(html, "<h2>{title}</h2>\n<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>\n");
    for row in rows.iter().take(ROWS_MOST) {
        let _ = writeln!(html, "<tr>{}</tr>", cells(row));
    }
    html.push_str("</tbody></table></div>\n");
    if rows.len() > ROWS_MOST {
        let more = count(rows.len() - ROWS_MOST, "row is", "rows are");
        let _ = writeln!(html, "<p class=\"dim\">{more} not shown here; pagefold status --json has all.</p>");
    }
}

fn memory(html: &mut String, status: &Status) {
    let all = status.memory.resident_bytes;
    html.push_str("<div class=\"pair\"><section>");
    table(html, "Kinds of memory", &total_head("Kind"), &status.totals.kinds, |kind| {
        total_cells(&kind.kind.to_string(), kind.resident, kind.regions, all)
    });
    html.push_str("</section><section>");
    table(html, "What happens next", &total_head("What"), &status.totals.next, |next| {
        let when = next.soonest_seconds.map_or(String::new(), |seconds| format!(", first in {}", time(seconds)));
        total_cells(&format!("{}{when}", next.verb), next.resident, next.regions, all)
    });
    html.push_str("</section></div>\n");
}

fn total_head(name: &str) -> String {
    format!("<th>{name}</th><th class=\"n\">Memory</th><th class=\"n\">Regions</th><th class=\"wide\"></th>")
}

/// The table cells for one part of the memory, with a bar for its share of all.
fn total_cells(name: &str, resident: Pages, regions: usize, all_bytes: u64) -> String {
    let bytes = resident.bytes().0;
    let width = 100.0 * bytes as f64 / all_bytes.max(1) as f64;
    format!(
        "<td>{}</td><td class=\"n\">{}</td><td class=\"n\">{regions}</td><td class=\"bar wide\"><svg viewBox=\"0 0 100 10\" \
         preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect class=\"rest\" width=\"100\" height=\"10\"/><rect \
         class=\"across\" width=\"{width:.2}\" height=\"10\"/></svg></td>",
        escape(name),
        size(bytes)
    )
}

fn left_alone(html: &mut String, status: &Status) {
    let rows: Vec<_> = status.programs.left_out.iter().filter(|row| row.processes > 0).collect();
    if rows.is_empty() {
        return;
    }
    table(html, "Left alone", "<th>Why</th><th class=\"n\">Processes</th>", &rows, |row| {
        format!("<td>{}</td><td class=\"n\">{}</td>", escape(&row.reason), row.processes)
    });
}

fn events(html: &mut String, status: &Status) {
    html.push_str("<h2>Events</h2>\n");
    if status.events.is_empty() {
        html.push_str("<p class=\"dim\">Nothing has happened yet.</p>\n");
        return;
    }
    html.push_str("<div class=\"scroll\"><table class=\"out\"><tbody>\n");
    for event in &status.events {
        let when = clock(event.time);
        let what = escape(&event.sentence(status.run.dry_run));
        let _ = writeln!(html, "<tr><td class=\"dim when\">{when}</td><td>{what}</td></tr>");
    }
    html.push_str("</tbody></table></div>\n");
}
