//! Charts of experiments: memory saved over time and per CPU second.

use crate::chart::{FIRST_SECONDS, last_seconds, most_saved};
use crate::charts::{Bar, Curve, Lines, Scale, bars, number};
use crate::report::{ExperimentReport, Picture, PolicyRun};
use pagefold_engine::units::Bytes;

/// The policy that all others are compared with.
pub const SUBJECT: &str = "pagefold";

/// Colours of the peers, safe for colour blindness (after Okabe and Ito).
pub const PEERS: [&str; 5] = ["#0072b2", "#009e73", "#7a7a7a", "#cc79a7", "#56b4e9"];
const OURS: &str = "#d55e00";
/// Colours of pagefold with several options in one experiment.
const OURS_TOO: [&str; 4] = [OURS, "#e69f00", "#8c3a00", "#b8860b"];

/// Draws an experiment's charts and returns their file names and contents. Savings are drawn only if there are any.
pub fn charts(report: &ExperimentReport) -> Vec<(String, String)> {
    let name = &report.experiment;
    let pictures = report.pictures.iter().filter(|picture| !picture.rows.is_empty());
    let mut charts: Vec<_> =
        pictures.map(|picture| (format!("{name}-{}.svg", picture.name), bar_chart(name, picture))).collect();
    if report.saved_anything() {
        charts.push((format!("{name}-saved.svg"), saved_over_time(report)));
        charts.push((format!("{name}-cpu.svg"), saved_per_cpu_second(report)));
    }
    charts
}

/// Returns whether a policy is pagefold, with any options.
pub fn is_ours(name: &str) -> bool {
    name.strip_prefix(SUBJECT).is_some_and(|rest| !rest.starts_with(|first: char| first.is_alphanumeric()))
}

pub fn colours<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let (mut ours, mut peers) = (OURS_TOO.iter().cycle(), PEERS.iter().cycle());
    names.map(|name| if is_ours(name) { ours.next() } else { peers.next() }.map_or(OURS, |colour| colour)).collect()
}

fn names(runs: &[PolicyRun]) -> impl Iterator<Item = &str> {
    runs.iter().map(|run| run.policy.as_str())
}

fn saved_over_time(report: &ExperimentReport) -> String {
    let runs = &report.runs;
    let curves = runs.iter().zip(colours(names(runs))).map(|(run, colour)| Curve {
        label: format!(
            "{}: {} MiB for {} CPU seconds, 90 % of it after {} s",
            run.policy,
            number(Bytes(run.saved_bytes).mib()),
            number(run.cpu_seconds),
            run.seconds_to_90_percent.map_or_else(|| "–".to_owned(), number),
        ),
        colour,
        width: if is_ours(&run.policy) { 3 } else { 2 },
        dash: None,
        // Merged pages stay merged after the run.
        stays: true,
        dots: false,
        points: run.curve.iter().map(|&(at, saved)| (at, Bytes(saved).mib())).collect(),
    });
    let lines = Lines {
        title: format!("{}: memory saved over time", report.experiment),
        up: ("MiB saved".to_owned(), Scale::Linear { most: most_saved(runs) / f64::from(1 << 20) }),
        right: (
            "seconds (logarithmic)".to_owned(),
            Scale::Logarithmic { first: FIRST_SECONDS, last: last_seconds(runs) },
        ),
        curves: curves.collect(),
    };
    lines.draw()
}

fn saved_per_cpu_second(report: &ExperimentReport) -> String {
    let row = |run: &PolicyRun| (run.policy.clone(), run.mib_per_cpu_second().unwrap_or(0.0));
    let picture = Picture {
        name: "cpu",
        title: "memory saved per CPU second",
        subtitle: "MiB per CPU second of ksmd and pagefold together".to_owned(),
        rows: report.runs.iter().map(row).collect(),
    };
    bar_chart(&report.experiment, &picture)
}

/// Draws a figure of each policy as bars.
fn bar_chart(experiment: &str, picture: &Picture) -> String {
    let colours = colours(picture.rows.iter().map(|(name, _)| name.as_str()));
    let rows: Vec<Bar> =
        picture.rows.iter().zip(colours).map(|((name, value), colour)| Bar::new(name, *value, colour)).collect();
    bars(&format!("{experiment}: {}", picture.title), &picture.subtitle, &rows)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;
    use crate::charts::{elements, texts};

    fn report() -> ExperimentReport {
        let mut report = ExperimentReport::new("a-mix", "a claim");
        for (policy, seconds) in [(SUBJECT, 60.0), ("ksm <x> & y", 120.0)] {
            report.runs.push(PolicyRun {
                policy: policy.into(),
                saved_bytes: 2000 << 20,
                saved_bytes_max: 2040 << 20,
                cpu_seconds: 3.5,
                seconds,
                curve: vec![(0.0, 0), (1.0, 1 << 30), (seconds, 2000 << 20)],
                ..PolicyRun::default()
            });
        }
        report
    }

    #[test]
    fn charts_are_well_formed_and_curves_stay_inside() {
        let charts = charts(&report());
        assert_eq!(
            charts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["a-mix-saved.svg", "a-mix-cpu.svg"]
        );
        for (name, svg) in &charts {
            assert!(texts(svg).iter().any(|text| text.starts_with("ksm <x> & y")), "{name}\n{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}\n{svg}");
        }
        let document = roxmltree::Document::parse(&charts[0].1).unwrap();
        let curve = |node: &roxmltree::Node<'_, '_>| {
            node.has_tag_name("polyline")
                && [OURS, PEERS[0]].iter().any(|&colour| node.attribute("stroke") == Some(&colour.to_uppercase()))
        };
        let points: Vec<(f64, f64)> = document
            .descendants()
            .filter(curve)
            .flat_map(|node| {
                node.attribute("points").unwrap().split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>()
            })
            .map(|point| {
                let (x, y) = point.split_once(',').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            })
            .collect();
        assert!(points.len() >= 2 * 3, "{points:?}");
        assert!(points.iter().all(|(x, y)| (0.0..=880.0).contains(x) && (0.0..=520.0).contains(y)), "{points:?}");
    }

    #[test]
    fn a_policy_without_savings_is_drawn_but_not_an_experiment_without_savings() {
        let mut report = report();
        report.runs[1] = PolicyRun { policy: "p".into(), ..PolicyRun::default() };
        for (_, svg) in charts(&report) {
            assert!(texts(&svg).iter().any(|text| text.starts_with('p')) && !svg.contains("NaN"), "{svg}");
        }
        report.runs.remove(0);
        assert!(charts(&report).is_empty());
        report.runs.clear();
        assert!(charts(&report).is_empty());
    }

    #[test]
    fn an_experiments_own_bar_charts_are_always_drawn() {
        let mut report = ExperimentReport::new("a-mix", "a claim");
        let rows = vec![("pagefold --quick".to_owned(), 2.0), ("pagefolder".to_owned(), 0.0)];
        report.pictures.push(Picture { name: "share", title: "t <1>", subtitle: "s".into(), rows });
        report.pictures.push(Picture::default());
        let charts = charts(&report);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].0, "a-mix-share.svg");
        assert_eq!([OURS, PEERS[0]].map(|colour| elements(&charts[0].1, "rect", colour)), [1, 1]);
    }
}
