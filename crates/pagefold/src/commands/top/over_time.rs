//! The history on the screen: the savings, and the CPU time spent on them.

use super::draw::{Look, say};
use super::state::Top;
use crate::history::{Moment, Point, points};
use crate::output::page::Unit;
use pagefold_text::figures::time;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType};

pub fn draw(frame: &mut Frame, area: Rect, top: &Top, look: Look) {
    let now = top.now;
    let present = top.status.iter().filter(|_| top.problem.is_none()).filter_map(|status| Moment::of(status, now));
    let moments = match &top.history {
        Err(problem) => return say(frame, area, &format!("There is no history: {problem}"), look.warn()),
        Ok(moments) => moments.iter().copied().chain(present).collect::<Vec<_>>(),
    };
    if moments.is_empty() {
        return say(frame, area, "The history has nothing of this time.", Style::new());
    }
    let since = top.since.as_secs().max(60);
    let points = points(&moments, now);
    let [above, below] = Layout::vertical([Constraint::Fill(3), Constraint::Fill(2)]).areas(area);
    let saved = |point: &Point| {
        let moment = point.moment;
        Some((if moment.dry_run { moment.expected_bytes } else { moment.saved_bytes }) as f64)
    };
    let name = if moments.last().is_some_and(|moment| moment.dry_run) { "found" } else { "saved" };
    let curve = Curve { points: &points, now, since };
    curve.draw(frame, above, (name, look.good()), Unit::BYTES, saved);
    let cpu = |point: &Point| point.cpu.map(|share| 100.0 * share);
    curve.draw(frame, below, ("CPU time", look.of(Color::Cyan)), Unit::PERCENT, cpu);
}

struct Curve<'a> {
    points: &'a [Point],
    now: u64,
    since: u64,
}

impl Curve<'_> {
    fn draw(
        &self,
        frame: &mut Frame,
        area: Rect,
        (name, style): (&str, Style),
        unit: Unit,
        value: impl Fn(&Point) -> Option<f64>,
    ) {
        // A line for each run.
        let mut runs: Vec<Vec<(f64, f64)>> = Vec::new();
        for point in self.points {
            if !point.goes_on || runs.is_empty() {
                runs.push(Vec::new());
            }
            let seconds = point.moment.time as f64 - self.now as f64;
            if let (Some(run), Some(value)) = (runs.last_mut(), value(point)) {
                run.push((seconds, value));
            }
        }
        let most = unit.axis_end(runs.iter().flatten().map(|point| point.1));
        let of = |run| Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).style(style).data(run);
        let ago = |part: f64| format!("-{}", time(self.since as f64 * part));
        let across = Axis::default()
            .bounds([-(self.since as f64), 0.0])
            .labels([ago(1.0), ago(0.5), format!("{name}, until now")])
            .style(Look::dim());
        let up = Axis::default().bounds([0.0, most]).labels([(unit.write)(0.0), (unit.write)(most)]).style(Look::dim());
        let chart = Chart::new(runs.iter().map(|run| of(run.as_slice())).collect()).x_axis(across).y_axis(up);
        frame.render_widget(chart, area);
    }
}
