//! `top` as one web page that needs nothing else: the run now, its savings over time, and its latest events.

use super::activity;
use super::state::result_of;
use crate::commands::status::Status;
use crate::history::{Moment, Point, points};
use crate::output::page::{Chart, Curve, Unit, escape, page as framed};
use pagefold_engine::host::Mechanism;
use pagefold_text::figures::time;
use pagefold_text::style::{count, human, percent};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

/// Rows of a table. We count the rest.
const ROWS_MOST: usize = 200;

/// The page's data: the history, the status of a running daemon, or both.
pub struct Sources<'a> {
    pub status: Option<&'a Status>,
    pub workloads: &'a BTreeMap<i32, String>,
    pub moments: &'a [Moment],
    /// Why there is no history.
    pub problem: Option<&'a str>,
    pub since: Duration,
    /// Seconds since 1970.
    pub now: u64,
}

pub fn page(sources: &Sources) -> String {
    let mut html = String::new();
    match (sources.status, sources.moments.last()) {
        (Some(status), _) => now(&mut html, status, sources),
        (None, last) => {
            let when = last.map_or_else(String::new, |last| format!(" The last one was seen at {}.", clock(last.time)));
            let _ = writeln!(
                html,
                "<p class=\"tag\">pagefold top</p>\n<h1>No pagefold is running.</h1>\n<p class=\"dim\">{when}</p>"
            );
        }
    }
    over_time(&mut html, sources);
    if let Some(status) = sources.status {
        programs(&mut html, status, sources.workloads);
        memory(&mut html, status);
        left_alone(&mut html, status);
        events(&mut html, status);
    }
    framed("pagefold top", &html)
}

fn clock(seconds: u64) -> String {
    let text = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

fn now(html: &mut String, status: &Status, sources: &Sources) {
    let (verb, mechanism) = match (status.dry_run, status.mechanism) {
        (true, _) => ("found to be duplicate", "dry run"),
        (false, Mechanism::Ksmd) => ("saved", "merging by ksmd"),
        (false, Mechanism::Request) => ("saved", "merging on request"),
    };
    let (_, sentence) = activity::describe(status, &[]);
    let _ = write!(
        html,
        "<p class=\"tag\">pagefold top <code>{}</code></p>\n<h1>{} {verb} in {}.</h1>\n\
         <p class=\"dim\">{}, up {}, governor {}, {mechanism}. {}</p>\n<ul class=\"big\">",
        escape(&status.scope),
        result_of(status).map_or("An unknown amount".to_owned(), human),
        count(status.processes.len(), "process", "processes"),
        clock(sources.now),
        time(status.seconds),
        status.governor,
        escape(&sentence),
    );
    let cpu = (status.cpu_seconds.pagefold_ns + status.cpu_seconds.ksmd_ns) as f64 / 1e9;
    let share = result_of(status).map(|result| percent(result as f64, status.resident_bytes as f64));
    for (value, what) in [
        (share.unwrap_or("?".to_owned()), format!("of {} {verb}", human(status.resident_bytes))),
        (human(status.marked_bytes), "marked, or named to the kernel".to_owned()),
        (percent(status.used_share, 1.0), format!("of a core, of at most {}", percent(status.allowed_share, 1.0))),
        (time(cpu), format!("of CPU time in {}", time(status.seconds))),
        (human(status.available_bytes), "of memory available".to_owned()),
    ] {
        let _ = write!(html, "<li><b>{value}</b>{}</li>", what.replace(" %", "&nbsp;%"));
    }
    html.push_str("</ul>\n");
}

fn over_time(html: &mut String, sources: &Sources) {
    html.push_str("<h2>Over time</h2>\n");
    if let Some(problem) = sources.problem {
        let _ = writeln!(html, "<p class=\"dim\">No history: {}.</p>", escape(problem));
        return;
    }
    let present = sources.status.and_then(|status| Moment::of(status, sources.now));
    let moments: Vec<Moment> = sources.moments.iter().copied().chain(present).collect();
    let points = points(&moments, sources.now);
    let Some(first) = points.first() else {
        html.push_str("<p class=\"dim\">The history has nothing of this time.</p>\n");
        return;
    };
    let since = sources.since.as_secs().min(sources.now.saturating_sub(first.moment.time)).max(60);
    let frame = Frame { points: &points, now: sources.now, since };
    let result = |moment: &Moment| (if moment.dry_run { moment.expected_bytes } else { moment.saved_bytes }) as f64;
    let marked = |moment: &Moment| moment.marked_bytes as f64;
    let found = |moment: &Moment| moment.expected_bytes as f64;
    let free = |moment: &Moment| moment.available_bytes as f64;
    let every = |value: &dyn Fn(&Moment) -> f64| frame.curve(|point| Some(value(&point.moment)));
    frame.draw(
        html,
        "Memory",
        Unit::BYTES,
        vec![
            ("fork", "marked", every(&marked)),
            ("merged", "expected to be merged, the copies that stay included", every(&found)),
            ("across", "saved", every(&result)),
        ],
    );
    let cpu = frame.curve(|point| point.cpu.map(|share| 100.0 * share));
    frame.draw(html, "CPU time, share of a core", Unit::PERCENT, vec![("warn", "pagefold and ksmd", cpu)]);
    frame.draw(html, "Memory available on the machine", Unit::BYTES, vec![("merged", "available", every(&free))]);
}

/// Times and values.
type Values = Vec<(f64, Option<f64>)>;

/// The time that the charts share.
struct Frame<'a> {
    points: &'a [Point],
    now: u64,
    since: u64,
}

impl Frame<'_> {
    /// A value over time, with a gap where a run has ended.
    fn curve(&self, value: impl Fn(&Point) -> Option<f64>) -> Values {
        let point = |point: &Point| {
            let time = point.moment.time as f64;
            let gap = (!point.goes_on).then_some((time, None));
            gap.into_iter().chain([(time, value(point))])
        };
        self.points.iter().flat_map(point).collect()
    }

    fn draw(&self, html: &mut String, title: &str, unit: Unit, curves: Vec<(&'static str, &str, Values)>) {
        let ago = |quarters: u64| match quarters {
            0 => clock(self.now),
            _ => format!("−{}", time((self.since * quarters / 4) as f64)),
        };
        let curves = curves.into_iter().map(|(class, name, points)| Curve { class, name: name.to_owned(), points });
        Chart {
            title: title.to_owned(),
            times: ((self.now - self.since) as f64, self.now as f64),
            labels: [4, 2, 0].map(ago).to_vec(),
            unit,
            curves: curves.collect(),
        }
        .draw(html);
    }
}

fn programs(html: &mut String, status: &Status, workloads: &BTreeMap<i32, String>) {
    let head = "<th class=\"n\">Memory</th><th class=\"n\">Marked</th><th class=\"n\">Duplicate</th>";
    let figures = |[resident, marked, expected]: [u64; 3]| {
        [resident, marked, expected].map(|bytes| format!("<td class=\"n\">{}</td>", size(bytes))).concat()
    };
    let mut sums: BTreeMap<&str, (usize, [u64; 3])> = BTreeMap::new();
    for row in &status.processes {
        let Some(workload) = workloads.get(&row.pid) else { continue };
        let (processes, sum) = sums.entry(workload).or_default();
        *processes += 1;
        for (sum, bytes) in sum.iter_mut().zip([row.resident_bytes, row.marked_bytes, row.expected_bytes]) {
            *sum += bytes;
        }
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, figures))| std::cmp::Reverse(figures[0]));
    if !sums.is_empty() {
        let head = format!("<th>Workload</th><th class=\"n\">Processes</th>{head}");
        table(html, "By workload", &head, &sums, |(name, (processes, sum))| {
            format!("<td class=\"name\">{}</td><td class=\"n\">{processes}</td>{}", escape(name), figures(*sum))
        });
    }
    let head = format!("<th class=\"n\">PID</th><th>Program</th>{head}<th>Belongs to</th>");
    table(html, "By process", &head, &status.processes, |row| {
        let belongs = match &row.left_alone {
            Some(why) => format!("left alone: {why}"),
            None => workloads.get(&row.pid).cloned().unwrap_or_default(),
        };
        format!(
            "<td class=\"n\">{}</td><td class=\"name\">{}</td>{}<td class=\"name dim\">{}</td>",
            row.pid,
            escape(&row.name),
            figures([row.resident_bytes, row.marked_bytes, row.expected_bytes]),
            escape(&belongs)
        )
    });
}

fn size(bytes: u64) -> String {
    if bytes == 0 { "–".to_owned() } else { human(bytes) }
}

fn table<Row>(html: &mut String, title: &str, head: &str, rows: &[Row], cells: impl Fn(&Row) -> String) {
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
    let whole = status.resident_bytes.max(1) as f64;
    let row = |name: &str, bytes: u64, regions: usize| {
        let width = 100.0 * bytes as f64 / whole;
        format!(
            "<td>{}</td><td class=\"n\">{}</td><td class=\"n\">{regions}</td><td class=\"bar\"><svg viewBox=\"0 0 100 10\" \
             preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect class=\"rest\" width=\"100\" height=\"10\"/><rect \
             class=\"across\" width=\"{width:.2}\" height=\"10\"/></svg></td>",
            escape(name),
            size(bytes)
        )
    };
    let head = |name: &str| format!("<th>{name}</th><th class=\"n\">Memory</th><th class=\"n\">Regions</th><th></th>");
    html.push_str("<div class=\"pair\"><section>");
    table(html, "Kinds of memory", &head("Kind"), &status.kinds, |kind| {
        row(&kind.kind.to_string(), kind.resident.bytes().0, kind.regions)
    });
    html.push_str("</section><section>");
    table(html, "The ladder", &head("Level"), &status.levels, |level| {
        let name = format!("{}, up to {} CPU", level.level, percent(level.share.fraction(), 1.0));
        row(&name, level.resident.bytes().0, level.regions)
    });
    html.push_str("</section><section>");
    table(html, "What happens next", &head("What"), &status.next, |next| {
        let when = next.soonest_seconds.map(|seconds| format!(", first in {}", time(seconds))).unwrap_or_default();
        row(&format!("{}{when}", next.what), next.resident_bytes, next.regions)
    });
    html.push_str("</section></div>\n");
}

fn left_alone(html: &mut String, status: &Status) {
    let rows: Vec<_> = status.left_out.iter().filter(|row| row.processes > 0).collect();
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
        let (when, what) = (clock(event.time), escape(&event.sentence(status.dry_run)));
        let _ = writeln!(html, "<tr><td class=\"dim when\">{when}</td><td>{what}</td></tr>");
    }
    html.push_str("</tbody></table></div>\n");
}
