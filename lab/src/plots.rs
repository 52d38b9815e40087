//! SVG charts of replays and scaling results.

use crate::charts::{Bar, Curve, Lines, Scale, bars, number};
use crate::replay::{Algorithm, Outcome, ReplayPoint};
use crate::scale;
use crate::table::Comparison;
use anyhow::anyhow;
use pagefold_engine::units::Bytes;
use std::fs;
use std::path::Path;

/// Maximum number of points of a curve: about two per pixel.
const POINTS: usize = 1_600;

/// The style of an algorithm's curve in all charts. Colours suit colour-blind readers (after Okabe and Ito), and dashes
/// distinguish curves that often coincide: dashed ones are drawn over solid ones.
pub fn curve_of(algorithm: Algorithm) -> Curve {
    let (colour, width, dash) = match algorithm {
        Algorithm::Ksm => ("#0072b2", 2, None),
        Algorithm::KsmSmart => ("#56b4e9", 3, Some((14, 6))),
        Algorithm::Uksm => ("#009e73", 2, None),
        Algorithm::CmdAddress => ("#cc79a7", 3, Some((2, 6))),
        Algorithm::CmdPageCount => ("#7a7a7a", 3, Some((12, 6))),
        Algorithm::CmdSubPage => ("#e69f00", 3, Some((6, 6))),
        Algorithm::NuKsm => ("#332288", 3, Some((2, 10))),
        Algorithm::Pagefold => ("#d55e00", 4, None),
        Algorithm::PagefoldRequest => ("#882255", 3, None),
    };
    Curve { label: algorithm.to_string(), colour, width, dash, ..Curve::default() }
}

/// File names and charts of a comparison: savings, comparisons and CPU time, over time and in total.
pub fn charts(comparison: &Comparison) -> Vec<(String, String)> {
    let name = &comparison.record;
    let chart = |what: &str, svg: String| (format!("{name}-{what}.svg"), svg);
    let compared = |outcome: &Outcome| match outcome.hash_comparisons {
        0 => format!("{} million", number(millions(outcome.comparisons()))),
        hashes => format!(
            "{} million, and {} million of hashes",
            number(millions(outcome.comparisons())),
            number(millions(hashes))
        ),
    };
    let spent = |outcome: &Outcome| format!("{} s", number(outcome.cpu_seconds));
    let comparisons = ("comparisons of pages over time", "millions of comparisons");
    let cpu = ("CPU time over time", "CPU seconds, modelled");
    let mut charts = vec![
        chart("saved", saved(comparison)),
        chart("comparisons", over_time(comparison, comparisons, |point| millions(point.comparisons), compared)),
        chart("cpu", over_time(comparison, cpu, |point| point.cpu_seconds, spent)),
    ];
    charts.extend(SUMS.iter().map(|sum| chart(sum.name, sum.draw(comparison))));
    charts
}

/// Writes charts into a directory, which is created if necessary.
pub fn write(dir: &Path, charts: &[(String, String)]) -> anyhow::Result<()> {
    let written =
        fs::create_dir_all(dir).and_then(|()| charts.iter().try_for_each(|(name, svg)| fs::write(dir.join(name), svg)));
    written.map_err(|error| anyhow!("cannot write charts to {}: {error}; choose another directory", dir.display()))
}

fn mib(pages: f64) -> f64 {
    Bytes(4096).mib() * pages
}

fn millions(count: u64) -> f64 {
    count as f64 / 1e6
}

/// At most [`POINTS`] evenly spaced points, and the last.
fn thinned<T: Copy>(points: &[T]) -> impl Iterator<Item = T> {
    let step = points.len().div_ceil(POINTS).max(1);
    let last = points.last().filter(|_| (points.len().max(1) - 1) % step != 0);
    points.iter().step_by(step).chain(last).copied()
}

fn saved(comparison: &Comparison) -> String {
    let savable: Vec<(f64, f64)> =
        thinned(&comparison.savable).map(|(seconds, pages)| (seconds, mib(pages as f64))).collect();
    let mean = comparison.savable.iter().map(|&(_, pages)| pages as f64).sum::<f64>();
    let mut curves = vec![Curve {
        label: format!("could be saved: {} MiB on average", number(mib(mean / comparison.savable.len().max(1) as f64))),
        colour: "#222222",
        width: 1,
        dash: Some((4, 4)),
        points: savable,
        ..Curve::default()
    }];
    curves.extend(comparison.outcomes.iter().map(|outcome| {
        let (mean, end) = (number(mib(outcome.saved_mean)), number(mib(outcome.saved as f64)));
        Curve {
            label: format!("{}: {mean} MiB on average, {end} at the end", outcome.algorithm),
            points: points(outcome, |point| mib(point.saved as f64)),
            ..curve_of(outcome.algorithm)
        }
    }));
    lines(comparison, "memory saved over time", "MiB saved", curves)
}

fn over_time(
    comparison: &Comparison,
    (what, unit): (&str, &str),
    of: fn(&ReplayPoint) -> f64,
    sum: impl Fn(&Outcome) -> String,
) -> String {
    let curves = comparison.outcomes.iter().map(|outcome| Curve {
        label: format!("{}: {}", outcome.algorithm, sum(outcome)),
        points: points(outcome, of),
        ..curve_of(outcome.algorithm)
    });
    lines(comparison, what, unit, curves.collect())
}

fn points(outcome: &Outcome, of: impl Fn(&ReplayPoint) -> f64) -> Vec<(f64, f64)> {
    thinned(&outcome.curve).map(|point| (point.seconds, of(&point))).collect()
}

fn lines(comparison: &Comparison, what: &str, unit: &str, curves: Vec<Curve>) -> String {
    let all = |of: fn(&(f64, f64)) -> f64| curves.iter().flat_map(|curve| &curve.points).map(of);
    let (up, right) = (Scale::linear(all(|point| point.1)), Scale::upto(all(|point| point.0)));
    let lines = Lines {
        title: format!("{}: {what}", comparison.record),
        up: (unit.to_owned(), up),
        right: ("seconds".to_owned(), right),
        curves,
    };
    lines.draw()
}

/// Colours of curves that do not belong to an algorithm.
const OTHERS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"];
/// Horizontal axes of time. Curves over other axes consist of separate measurements, drawn with dots.
const TIMES: [&str; 2] = ["hours", "seconds"];

/// File names and charts of how algorithms scale: one for each pair of axes.
pub fn scale_charts(curves: &[scale::ScaleCurve]) -> Vec<(String, String)> {
    let mut keys = Vec::new();
    for key in curves.iter().filter(|curve| !curve.points.is_empty()).map(axes_of) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let chart = |key| {
        let of_key =
            curves.iter().filter(|curve| !curve.points.is_empty() && axes_of(curve) == key).collect::<Vec<_>>();
        (file_name(key), scale_chart(key, &of_key))
    };
    keys.into_iter().map(chart).collect()
}

/// Both axes and the machine: the curves of an algorithm on several machines are in separate charts.
fn axes_of(curve: &scale::ScaleCurve) -> (&str, &str, &str) {
    (curve.x, curve.y, curve.name.split_once(", ").map_or("", |(_, of)| of))
}

fn file_name((_, y, of): (&str, &str, &str)) -> String {
    let what = y.split(',').next().unwrap_or(y);
    let words =
        what.split(|letter: char| !letter.is_alphanumeric()).chain(of.split(' ')).filter(|word| !word.is_empty());
    format!("scale-{}.svg", words.map(str::to_lowercase).collect::<Vec<_>>().join("-"))
}

fn scale_chart((x, y, of): (&str, &str, &str), curves: &[&scale::ScaleCurve]) -> String {
    let all = |of: fn(&(f64, f64)) -> f64| curves.iter().flat_map(move |curve| curve.points.iter().map(of));
    let measured = !TIMES.contains(&x);
    let axis = |of, span: f64, linear: fn(Vec<f64>) -> Scale| {
        let (first, last) = all(of).fold((f64::MAX, 0.0), |(first, last), value| (value.min(first), value.max(last)));
        let wide = measured && first > 0.0 && last / first >= span;
        if wide { (" (logarithmic)", Scale::logarithmic(all(of))) } else { ("", linear(all(of).collect())) }
    };
    let (right_note, right) = axis(|point| point.0, 8.0, Scale::upto);
    let (up_note, up) = axis(|point| point.1, 50.0, Scale::linear);
    let compares = curves.iter().any(|curve| algorithm_of(curve).is_some());
    let (mut seen, mut others) = (Vec::new(), OTHERS.iter().cycle());
    let curves = curves.iter().map(|curve| {
        let style = match algorithm_of(curve) {
            Some(algorithm) => curve_of(algorithm),
            None if compares => Curve { colour: "#222222", width: 1, dash: Some((4, 4)), ..Curve::default() },
            None => Curve { colour: others.next().unwrap_or(&"#222222"), width: 2, ..Curve::default() },
        };
        // The same algorithm with other settings.
        let dash = if !style.label.is_empty() && seen.contains(&style.label) { Some((4, 7)) } else { style.dash };
        seen.push(style.label.clone());
        let label = curve.name.split(", ").next().unwrap_or(&curve.name).to_owned();
        Curve { label, dash, dots: measured, points: thinned(&curve.points).collect(), ..style }
    });
    let what = y.split(',').next().unwrap_or(y);
    let by = if measured { x.split(',').next().unwrap_or(x) } else { "time" };
    let title =
        format!("{of}{}{what} {} {by}", if of.is_empty() { "" } else { ": " }, if measured { "by" } else { "over" });
    let curves = curves.collect();
    Lines { title, up: (format!("{y}{up_note}"), up), right: (format!("{x}{right_note}"), right), curves }.draw()
}

fn algorithm_of(curve: &scale::ScaleCurve) -> Option<Algorithm> {
    curve.name.split([' ', ',']).next()?.parse().ok()
}

/// A chart with one bar for each algorithm.
struct Sum {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    /// Also shown as a share of `ksm`'s value.
    of_ksm: bool,
    of: fn(&Outcome) -> f64,
}

const SUMS: [Sum; 4] = [
    Sum {
        name: "sharing-of-ksm",
        title: "sharing",
        unit: "MiB saved on average",
        of_ksm: true,
        of: |outcome| mib(outcome.saved_mean),
    },
    Sum {
        name: "comparisons-of-ksm",
        title: "comparisons of pages",
        unit: "millions of comparisons",
        of_ksm: true,
        of: |outcome| millions(outcome.comparisons()),
    },
    Sum {
        name: "cpu-of-ksm",
        title: "CPU time",
        unit: "CPU seconds, modelled",
        of_ksm: true,
        of: |outcome| outcome.cpu_seconds,
    },
    Sum {
        name: "futile",
        title: "futile comparisons",
        unit: "% of comparisons in searches that found no duplicate (CMD, equation 1)",
        of_ksm: false,
        of: |outcome| 100.0 * outcome.futile_rate,
    },
];

impl Sum {
    fn draw(&self, comparison: &Comparison) -> String {
        let of_ksm = comparison.ksm().map(self.of).filter(|&ksm| self.of_ksm && ksm > 0.0);
        let rows: Vec<Bar> = comparison
            .outcomes
            .iter()
            .map(|outcome| {
                let value = (self.of)(outcome);
                let share = of_ksm.map(|ksm| format!(" ({:.1} % of ksm's)", 100.0 * value / ksm)).unwrap_or_default();
                let Curve { label: name, colour, .. } = curve_of(outcome.algorithm);
                Bar { name, value, text: number(value) + &share, colour }
            })
            .collect();
        bars(&format!("{}: {}", comparison.record, self.title), self.unit, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg_text::{elements, texts};

    fn outcome(algorithm: Algorithm, saved: u64) -> Outcome {
        let point = |second: u32| ReplayPoint {
            seconds: second.into(),
            saved: saved * u64::from(second),
            cpu_seconds: 0.1 * f64::from(second),
            comparisons: 1_000 * u64::from(second),
        };
        Outcome {
            algorithm,
            scanned: 9,
            read: 0,
            searches: 9,
            found: 3,
            stable_comparisons: 6_000,
            unstable_comparisons: 4_000,
            futile_comparisons: 5_000,
            futile_rate: 0.5,
            hash_comparisons: 0,
            depth: 2.0,
            deepest: 4,
            spared: 0,
            trees: vec![1],
            cow_breaks: 0,
            saved: 10 * saved,
            saved_mean: 5.5 * saved as f64,
            cpu_seconds: 1.0,
            metadata_bytes: 64,
            curve: (1..=10).map(point).collect(),
        }
    }

    fn comparison(algorithms: &[Algorithm]) -> Comparison {
        Comparison {
            schema: "pagefold.lab.replay/1",
            record: "a <record> & more".to_owned(),
            source: "live".to_owned(),
            seconds: 10.0,
            pages: 1_000,
            forked: 0,
            savable: (1..=10).map(|second| (f64::from(second), 900)).collect(),
            outcomes: algorithms.iter().zip(10..).map(|(&algorithm, saved)| outcome(algorithm, saved)).collect(),
        }
    }

    fn all() -> Vec<Algorithm> {
        Algorithm::NAMES.iter().map(|&(_, algorithm)| algorithm).collect()
    }

    #[test]
    fn charts_are_well_formed_and_show_every_algorithm() {
        let charts = charts(&comparison(&all()));
        let names: Vec<&str> =
            charts.iter().map(|(name, _)| name.strip_prefix("a <record> & more-").unwrap()).collect();
        let expected = ["saved", "comparisons", "cpu", "sharing-of-ksm", "comparisons-of-ksm", "cpu-of-ksm", "futile"];
        assert_eq!(names, expected.map(|name| format!("{name}.svg")));
        for (number, (name, svg)) in charts.iter().enumerate() {
            let texts = texts(svg);
            assert!(texts[0].starts_with("a <record> & more: "), "{name}: {texts:?}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}\n{svg}");
            for (_, algorithm) in Algorithm::NAMES {
                let curve = curve_of(algorithm);
                assert!(texts.iter().any(|text| text.starts_with(&curve.label)), "{name} lacks {algorithm}: {texts:?}");
                // Curves, each with a sample in the legend, and bars.
                let lines = ["polyline", "line"].map(|kind| elements(svg, kind, curve.colour)).iter().sum::<usize>();
                let bars = elements(svg, "rect", curve.colour);
                assert!(if number < 3 { lines >= 2 } else { bars == 1 }, "{name}: {lines} lines, {bars} bars");
            }
            assert_eq!(texts.iter().any(|text| text.starts_with("could be saved")), number == 0);
        }
    }

    #[test]
    fn without_ksm_no_shares_are_shown() {
        for (name, svg) in charts(&comparison(&[Algorithm::Uksm])) {
            assert!(!svg.contains("% of ksm"), "{name}\n{svg}");
        }
        let (_, sharing) = &charts(&comparison(&all()))[3];
        assert!(texts(sharing).contains(&"0.2148 (100.0 % of ksm's)".to_owned()), "{sharing}");
        // Nothing replayed, nothing recorded.
        let none = Comparison { savable: Vec::new(), ..comparison(&[]) };
        assert!(charts(&none).iter().all(|(_, svg)| !texts(svg).is_empty() && !svg.contains("NaN")));
    }

    #[test]
    fn curves_of_the_same_axes_share_a_chart() {
        let curve = |name: &str, x, y, points: Vec<(f64, f64)>| scale::ScaleCurve { name: name.into(), x, y, points };
        let grow = |by: f64| (0..5).map(|power| (4_f64.powi(power), by.powi(power))).collect();
        let charts = scale_charts(&[
            curve("ksm", "memory, GiB", "time to 90 %, s", grow(10.0)),
            curve("ksm-smart at 100", "memory, GiB", "time to 90 %, s", grow(8.0)),
            curve("ksm-smart", "memory, GiB", "time to 90 %, s", grow(7.0)),
            curve("uksm", "memory, GiB", "time to 90 %, s", Vec::new()),
            curve("1024 nodes", "trees", "comparisons", grow(1.0)),
            curve("ksm, 4 GiB", "hours", "share saved", (0..100).map(|at| (f64::from(at), 0.5)).collect()),
            curve("ksm, 16 GiB", "hours", "share saved", (0..100).map(|at| (f64::from(at), 0.5)).collect()),
        ]);
        let names: Vec<&str> = charts.iter().map(|(name, _)| name.as_str()).collect();
        let shares = ["scale-share-saved-4-gib.svg", "scale-share-saved-16-gib.svg"];
        assert_eq!(names, [&["scale-time-to-90.svg", "scale-comparisons.svg"][..], &shares].concat());
        // Three curves and one, with a dot at each point; curves over time have none.
        let dots: Vec<usize> = charts.iter().map(|(_, svg)| svg.matches("<circle").count()).collect();
        assert_eq!(dots, [15, 5, 0, 0]);
        let logarithmic = |svg| texts(svg).iter().filter(|text| text.contains("logarithmic")).count();
        assert_eq!((logarithmic(&charts[0].1), logarithmic(&charts[2].1)), (2, 0));
        assert_eq!(texts(&charts[2].1)[0], "4 GiB: share saved over time");
    }

    #[test]
    fn algorithms_look_different() {
        let colours: std::collections::BTreeSet<_> = all().into_iter().map(|one| curve_of(one).colour).collect();
        assert_eq!(colours.len(), Algorithm::NAMES.len());
    }

    #[test]
    fn long_curves_keep_their_shape_and_their_end() {
        for length in [0, 1, 2, POINTS, POINTS + 1, 10 * POINTS - 1] {
            let points: Vec<usize> = (0..length).collect();
            let thin: Vec<usize> = thinned(&points).collect();
            assert!(thin.len() <= POINTS + 1 && thin.is_sorted() && thin.last() == points.last(), "{length}");
            assert!(thin.windows(2).all(|two| two[0] < two[1]));
        }
    }

    #[test]
    fn charts_are_written_to_a_new_directory() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("not/there/yet");
        write(&below, &[("a.svg".to_owned(), "b".to_owned())]).unwrap();
        assert_eq!(fs::read_to_string(below.join("a.svg")).unwrap(), "b");
    }
}
