//! Charts as SVG: what is saved over time, and what a CPU second saves.

mod hash;

use crate::chart::{FIRST_SECONDS, last_seconds, most_saved, place};
use crate::policy::SUBJECT;
use crate::record::{Picture, Report, Run};
use crate::table::number;
use pagefold_core::units::Bytes;
use std::fmt::Write;

const WIDTH: f64 = 880.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 848.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 400.0;
const LEGEND_LINE: f64 = 24.0;
const BAR_LINE: f64 = 44.0;

/// Peers' colours, told apart also by those who see few colours (after Okabe and Ito).
const PEERS: [&str; 5] = ["#0072b2", "#009e73", "#7a7a7a", "#cc79a7", "#56b4e9"];
const OURS: &str = "#d55e00";
/// pagefold with other options, in one experiment.
const OURS_TOO: [&str; 4] = [OURS, "#e69f00", "#8c3a00", "#b8860b"];

/// File names and contents. An experiment that saved nothing has only the charts it asked for.
pub fn charts(report: &Report) -> Vec<(String, String)> {
    let name = report.experiment;
    let pictures = report.pictures.iter().filter(|picture| !picture.rows.is_empty());
    let mut charts: Vec<_> =
        pictures.map(|picture| (format!("{name}-{}.svg", picture.name), beside(name, picture))).collect();
    if name == "hash" {
        charts.extend(hash::charts(report));
    }
    if report.saved_anything() {
        charts.push((format!("{name}-saved.svg"), saved_over_time(report)));
        charts.push((format!("{name}-cpu.svg"), saved_per_cpu_second(report)));
    }
    charts
}

/// Whether pagefold's, with whatever options.
fn is_ours(name: &str) -> bool {
    name.strip_prefix(SUBJECT).is_some_and(|rest| !rest.starts_with(|first: char| first.is_alphanumeric()))
}

fn colours<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let (mut ours, mut peers) = (OURS_TOO.iter().cycle(), PEERS.iter().cycle());
    names.map(|name| if is_ours(name) { ours.next() } else { peers.next() }.map_or(OURS, |colour| colour)).collect()
}

fn names(runs: &[Run]) -> impl Iterator<Item = &str> {
    runs.iter().map(|run| run.policy.as_str())
}

fn saved_over_time(report: &Report) -> String {
    let runs = &report.runs;
    let (last, most) = (last_seconds(runs), Bytes(whole(most_saved(runs))).mib());
    let step = step_for(most);
    let top = (most / step).ceil() * step;
    let x = |seconds: f64| LEFT + (RIGHT - LEFT) * place(seconds, last);
    let y = |mib: f64| BOTTOM - (BOTTOM - TOP) * mib / top;
    let height = BOTTOM + 64.0 + LEGEND_LINE * runs.len() as f64;
    let mut svg = Svg::new(height, &format!("{}: memory saved over time", report.experiment), "MiB saved");

    let mut mib = 0.0;
    while mib <= top + step / 2.0 {
        svg.line((LEFT, y(mib)), (RIGHT, y(mib)), "grid");
        svg.text((LEFT - 8.0, y(mib) + 4.0), "end", "tick", &format!("{mib:.0}"));
        mib += step;
    }
    let mut decade = FIRST_SECONDS;
    while decade <= last {
        for mark in [1.0, 2.0, 5.0].map(|part| part * decade).into_iter().filter(|mark| *mark <= last) {
            svg.line((x(mark), TOP), (x(mark), BOTTOM), "grid");
            svg.text((x(mark), BOTTOM + 18.0), "middle", "tick", &format!("{}", (mark * 10.0).round() / 10.0));
        }
        decade *= 10.0;
    }
    svg.text((f64::midpoint(LEFT, RIGHT), BOTTOM + 38.0), "middle", "tick", "seconds (logarithmic)");

    // Ours is drawn last, over the others.
    let mut order: Vec<(&Run, &str)> = runs.iter().zip(colours(names(runs))).collect();
    order.sort_by_key(|(run, _)| is_ours(&run.policy));
    for (run, colour) in &order {
        let points: Vec<(f64, f64)> = run.curve.iter().map(|(at, saved)| (x(*at), y(Bytes(*saved).mib()))).collect();
        svg.curve(&points, colour, if is_ours(&run.policy) { 3.0 } else { 2.0 });
        if let Some(&(end_x, end_y)) = points.last() {
            svg.dot((end_x, end_y), colour);
            // What is merged stays so while ksmd rests.
            svg.dashes((end_x, end_y), (RIGHT, end_y), colour);
        }
    }
    for (line, (run, colour)) in (0_u32..).zip(runs.iter().zip(colours(names(runs)))) {
        let at = BOTTOM + 66.0 + LEGEND_LINE * f64::from(line);
        svg.curve(&[(LEFT, at - 4.0), (LEFT + 28.0, at - 4.0)], colour, 3.0);
        let label = format!(
            "{}: {} MiB for {} CPU seconds, 90 % of it after {} s",
            run.policy,
            number(Bytes(run.saved_bytes).mib()),
            number(run.cpu_seconds),
            run.seconds_to_90_percent.map_or_else(|| "–".to_owned(), number),
        );
        svg.text((LEFT + 38.0, at), "start", "label", &label);
    }
    svg.finish()
}

fn saved_per_cpu_second(report: &Report) -> String {
    let of = |run: &Run| (run.policy.clone(), run.mib_per_cpu_second().unwrap_or(0.0));
    let picture = Picture {
        name: "cpu",
        title: "what a CPU second saves".to_owned(),
        subtitle: "MiB saved for each CPU second of ksmd and pagefold together".to_owned(),
        rows: report.runs.iter().map(of).collect(),
    };
    beside(report.experiment, &picture)
}

/// Figures beside each other, as bars.
fn beside(experiment: &str, picture: &Picture) -> String {
    let rows = &picture.rows;
    let most = rows.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + BAR_LINE * rows.len() as f64 + 24.0;
    let mut svg = Svg::new(height, &format!("{experiment}: {}", picture.title), &picture.subtitle);
    let longest = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    // Letters of 14 pixels are some 7.5 wide on average.
    let room = (longest as f64 * 7.5 + 24.0).clamp(136.0, 420.0);
    let colours = colours(rows.iter().map(|(name, _)| name.as_str()));
    for (line, ((name, value), colour)) in (0_u32..).zip(rows.iter().zip(colours)) {
        let at = TOP + BAR_LINE * f64::from(line);
        let length = (RIGHT - 80.0 - LEFT - room) * value / most;
        svg.text((LEFT + room - 12.0, at + 19.0), "end", "label", name);
        svg.bar((LEFT + room, at), (length.max(1.0), 28.0), colour);
        svg.text((LEFT + room + length + 8.0, at + 19.0), "start", "label", &number(*value));
    }
    svg.finish()
}

/// A round step that divides an axis up to `most` in four to ten.
fn step_for(most: f64) -> f64 {
    let mut decade = 1e-3;
    loop {
        for step in [1.0, 2.0, 5.0].map(|part| part * decade) {
            if most / step <= 8.0 {
                return step;
            }
        }
        decade *= 10.0;
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size that came from an integer")]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

/// The text of a picture.
struct Svg(String);

impl Svg {
    fn new(height: f64, title: &str, subtitle: &str) -> Self {
        let style = "text{font-family:system-ui,sans-serif;fill:#222}.title{font-size:20px;font-weight:600}\
                     .label{font-size:14px}.tick{font-size:12px;fill:#666}.grid{stroke:#e4e4e4;stroke-width:1}";
        let mut svg = Self(String::new());
        svg.push(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\"><title>{}</title><style>{style}</style>\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>",
            escaped(title)
        ));
        svg.text((LEFT, 36.0), "start", "title", title);
        svg.text((LEFT, 60.0), "start", "tick", subtitle);
        svg
    }

    fn push(&mut self, part: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.0.write_fmt(part);
        self.0.push('\n');
    }

    fn text(&mut self, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
        let text = escaped(text);
        self.push(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>"
        ));
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        self.push(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
        ));
    }

    fn dashes(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
             stroke-width=\"1.5\" stroke-dasharray=\"3 5\"/>"
        ));
    }

    fn dot(&mut self, (x, y): (f64, f64), colour: &str) {
        self.push(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"));
    }

    fn bar(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"3\" fill=\"{colour}\"/>"
        ));
    }

    fn cell(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>"
        ));
    }

    fn curve(&mut self, points: &[(f64, f64)], colour: &str, width: f64) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.push(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" \
             stroke-linejoin=\"round\" stroke-linecap=\"round\"/>",
            points.join(" ")
        ));
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("a-mix", "a claim");
        for (policy, seconds) in [(SUBJECT, 60.0), ("ksm <x> & y", 120.0)] {
            report.runs.push(Run {
                policy: policy.into(),
                saved_bytes: 2000 << 20,
                saved_bytes_max: 2040 << 20,
                cpu_seconds: 3.5,
                seconds,
                curve: vec![(0.0, 0), (1.0, 1 << 30), (seconds, 2000 << 20)],
                ..Run::default()
            });
        }
        report
    }

    /// The opening and closing tags of a text, which must match like brackets.
    fn is_balanced(xml: &str) -> bool {
        let mut open = Vec::new();
        for tag in xml.split('<').skip(1) {
            let Some((tag, _)) = tag.split_once('>') else { return false };
            let name = tag.split([' ', '/']).find(|name| !name.is_empty()).unwrap_or_default();
            if tag.starts_with('/') {
                if open.pop() != Some(name) {
                    return false;
                }
            } else if !tag.ends_with('/') {
                open.push(name);
            }
        }
        open.is_empty()
    }

    #[test]
    fn charts_are_well_formed_and_within_their_frame() {
        let charts = charts(&report());
        assert_eq!(
            charts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["a-mix-saved.svg", "a-mix-cpu.svg"]
        );
        for (name, svg) in &charts {
            assert!(is_balanced(svg), "{name}\n{svg}");
            assert!(
                svg.contains("ksm &lt;x&gt; &amp; y") && !svg.contains("NaN") && !svg.contains("inf"),
                "{name}\n{svg}"
            );
        }
        let curves = charts[0].1.lines().filter_map(|line| line.strip_prefix("<polyline points=\"")?.split('"').next());
        let points: Vec<(f64, f64)> = curves
            .flat_map(|points| points.split(' '))
            .map(|point| {
                let (x, y) = point.split_once(',').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            })
            .collect();
        assert_eq!(points.len(), 2 * 3 + 2 * 2);
        assert!(
            points.iter().all(|(x, y)| (LEFT..=RIGHT).contains(x) && (TOP..=BOTTOM + 200.0).contains(y)),
            "{points:?}"
        );
    }

    #[test]
    fn a_policy_that_saved_nothing_has_its_line_and_an_experiment_that_did_not_has_no_charts() {
        let mut report = report();
        report.runs[1] = Run { policy: "p".into(), ..Run::default() };
        assert!(charts(&report).iter().all(|(_, svg)| is_balanced(svg) && !svg.contains("NaN") && svg.contains(">p")));
        report.runs.remove(0);
        assert!(charts(&report).is_empty());
        report.runs.clear();
        assert!(charts(&report).is_empty());
    }

    #[test]
    fn figures_that_an_experiment_chose_are_drawn_whatever_was_saved() {
        let mut report = Report::new("a-mix", "a claim");
        let rows = vec![("pagefold --quick".to_owned(), 2.0), ("pagefolder".to_owned(), 0.0)];
        report.pictures.push(Picture { name: "share", title: "t <1>".into(), subtitle: "s".into(), rows });
        report.pictures.push(Picture::default());
        let charts = charts(&report);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].0, "a-mix-share.svg");
        assert!(is_balanced(&charts[0].1) && charts[0].1.contains(OURS) && charts[0].1.contains(PEERS[0]));
    }

    #[test]
    fn steps_are_round() {
        assert_eq!([7.0, 9.0, 2040.0, 0.0].map(step_for), [1.0, 2.0, 500.0, 0.001]);
    }
}
