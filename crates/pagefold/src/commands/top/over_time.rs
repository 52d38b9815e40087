//! Draws the history on the screen: the savings, and the CPU time spent on them.

use super::draw::{BLUE, Look, say};
use super::state::Top;
use crate::history::{Moment, Point, points};
use crate::output::page::Unit;
use pagefold_text::figures::time;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType};

pub fn draw(frame: &mut Frame, area: Rect, top: &Top, look: Look) {
    let now = top.now;
    let mut moments = match &top.history {
        Err(problem) => return say(frame, area, &format!("There is no history: {problem}"), look.warn()),
        Ok(moments) => moments.clone(),
    };
    if let (Some(status), None) = (&top.status, &top.problem) {
        moments.extend(Moment::of(status, now));
    }
    let Some(last) = moments.last() else {
        return say(frame, area, "The history has no entries from this time.", Style::new());
    };
    let name = if last.dry_run { "found" } else { "saved" };
    let points = points(&moments, now);
    let since = top.since.as_secs().max(60) as f64;
    let [above, below] = Layout::vertical([Constraint::Fill(3), Constraint::Fill(2)]).areas(area);
    let saved = runs(&points, now, |point| Some(point.moment.result_bytes() as f64));
    draw_runs(frame, above, name, look.good(), Unit::BYTES, &saved, since);
    let cpu = runs(&points, now, |point| point.cpu.map(|share| 100.0 * share));
    draw_runs(frame, below, "CPU time", look.of(BLUE), Unit::PERCENT, &cpu, since);
}

/// Points of a curve: the time in seconds (now is 0, the past is negative), and the value.
type Curve = Vec<(f64, f64)>;

/// Splits points into a curve for each run.
fn runs(points: &[Point], now: u64, value: impl Fn(&Point) -> Option<f64>) -> Vec<Curve> {
    let mut runs: Vec<Curve> = Vec::new();
    for point in points {
        if !point.goes_on || runs.is_empty() {
            runs.push(Curve::new());
        }
        let seconds = point.moment.time as f64 - now as f64;
        if let (Some(run), Some(value)) = (runs.last_mut(), value(point)) {
            run.push((seconds, value));
        }
    }
    runs
}

/// Draws the runs of the last `since` seconds.
fn draw_runs(frame: &mut Frame, area: Rect, name: &str, style: Style, unit: Unit, runs: &[Curve], since: f64) {
    let most = unit.axis_end(runs.iter().flatten().map(|point| point.1));
    let across = Axis::default()
        .bounds([-since, 0.0])
        .labels([format!("-{}", time(since)), format!("-{}", time(since * 0.5)), format!("{name}, until now")])
        .style(Look::dim());
    let up = Axis::default().bounds([0.0, most]).labels([(unit.write)(0.0), (unit.write)(most)]).style(Look::dim());
    let mut lines = Vec::new();
    for run in runs {
        lines.push(Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).style(style).data(run));
    }
    frame.render_widget(Chart::new(lines).x_axis(across).y_axis(up), area);
}
