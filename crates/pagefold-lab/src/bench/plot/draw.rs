//! Lines over an axis, and bars beside each other.

use super::svg::Svg;
use crate::bench::table::number;

pub(super) const LEFT: f64 = 72.0;
pub(super) const RIGHT: f64 = 848.0;
pub(super) const TOP: f64 = 84.0;
pub(super) const BOTTOM: f64 = 400.0;
pub(super) const LEGEND_LINE: f64 = 24.0;
const BAR_LINE: f64 = 44.0;
/// Letters of 14 pixels are so wide on average.
const LETTER: f64 = 7.5;

/// What an axis shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// From zero to the next round number.
    Linear {
        /// The largest value.
        most: f64,
    },
    /// From zero to just here.
    Upto {
        /// The last value.
        last: f64,
    },
    /// Between two numbers above zero. Smaller values are shown as the first, larger ones as the last.
    Logarithmic {
        /// The smallest.
        first: f64,
        /// The largest.
        last: f64,
    },
}

impl Scale {
    /// A linear one for all of the values.
    pub fn linear(values: impl IntoIterator<Item = f64>) -> Self {
        Self::Linear { most: values.into_iter().filter(|value| value.is_finite()).fold(f64::MIN_POSITIVE, f64::max) }
    }

    /// From zero to the largest of the values.
    pub fn upto(values: impl IntoIterator<Item = f64>) -> Self {
        match Self::linear(values) {
            Self::Linear { most } => Self::Upto { last: most },
            other => other,
        }
    }

    /// A logarithmic one for those of the values that are above zero.
    pub fn logarithmic(values: impl IntoIterator<Item = f64>) -> Self {
        let fitting = values.into_iter().filter(|value| value.is_finite() && *value > 0.0);
        let (first, last) =
            fitting.fold((f64::MAX, 0.0_f64), |(first, last), value| (first.min(value), last.max(value)));
        if first < last { Self::Logarithmic { first, last } } else { Self::Logarithmic { first: 1.0, last: 10.0 } }
    }

    /// Where a value is, from 0 to 1.
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear { most } => value / top(most),
            Self::Upto { last } => value / last,
            Self::Logarithmic { first, last } => ((value / first).ln() / (last / first).ln()).clamp(0.0, 1.0),
        }
    }

    /// The round values on it.
    fn marks(self) -> Vec<f64> {
        match self {
            Self::Linear { most } => multiples(step_for(most), top(most) + step_for(most) / 2.0),
            Self::Upto { last } => multiples(step_for(last), last),
            Self::Logarithmic { first, last } => {
                // More than some fifteen marks get into each other's way.
                let parts: &[f64] = if last / first <= 1e5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let (mut decade, mut marks) = (10_f64.powf(first.log10().floor()), Vec::new());
                while decade <= last {
                    // The first and the last are there though they come out a little beside.
                    let all = parts.iter().map(|part| part * decade);
                    marks.extend(all.filter(|mark| (first * (1.0 - 1e-9)..=last * (1.0 + 1e-9)).contains(mark)));
                    decade *= 10.0;
                }
                marks
            }
        }
    }

    fn label(self, mark: f64) -> String {
        let (step, most) = match self {
            Self::Linear { most } => (step_for(most), top(most)),
            Self::Upto { last } => (step_for(last), last),
            Self::Logarithmic { .. } => (mark, mark),
        };
        // Of five digits there is no room for more.
        let units = [(1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")];
        let fits = |&(unit, _): &(f64, &str)| most > 1e5 * (1.0 - 1e-9) && most > unit * (1.0 - 1e-9);
        let (unit, name) = units.into_iter().find(fits).filter(|_| mark > 0.0).unwrap_or((1.0, ""));
        let step = step / unit;
        let decimals = (0..6_u8).find(|&decimals| step * 10_f64.powi(decimals.into()) > 0.999).unwrap_or(6);
        let decimals = if mark > 0.0 || most <= 1e5 { decimals } else { 0 };
        format!("{:.*}{name}", usize::from(decimals), mark / unit)
    }
}

/// A line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// What the legend says of it.
    pub label: String,
    /// Its colour.
    pub colour: &'static str,
    /// Its width, pixels. Wider ones are drawn over narrower ones.
    pub width: f64,
    /// Its dashes and gaps; empty for none.
    pub dash: &'static str,
    /// Has a dot at its end, and stays there to the end of the axis.
    pub stays: bool,
    /// Has a dot at each point.
    pub dots: bool,
    /// Its points, in the units of the axes.
    pub points: Vec<(f64, f64)>,
}

/// Lines in one chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// The title.
    pub title: String,
    /// What goes up, and in which unit.
    pub up: (String, Scale),
    /// What goes to the right, and in which unit.
    pub right: (String, Scale),
    /// The lines, in the order of the legend.
    pub curves: Vec<Curve>,
}

impl Lines {
    /// Draws them.
    pub fn draw(&self) -> String {
        let ((up_label, up), (right_label, right)) = (&self.up, &self.right);
        let x = |value: f64| LEFT + (RIGHT - LEFT) * right.place(value);
        let y = |value: f64| BOTTOM - (BOTTOM - TOP) * up.place(value);
        let height = BOTTOM + 64.0 + LEGEND_LINE * self.curves.len() as f64;
        let mut svg = Svg::new(height, LEFT, &self.title, up_label);
        for mark in up.marks() {
            svg.line((LEFT, y(mark)), (RIGHT, y(mark)), "grid");
            svg.text((LEFT - 8.0, y(mark) + 4.0), "end", "tick", &up.label(mark));
        }
        for mark in right.marks() {
            svg.line((x(mark), TOP), (x(mark), BOTTOM), "grid");
            svg.text((x(mark), BOTTOM + 18.0), "middle", "tick", &right.label(mark));
        }
        svg.text((f64::midpoint(LEFT, RIGHT), BOTTOM + 38.0), "middle", "tick", right_label);

        let mut order: Vec<&Curve> = self.curves.iter().collect();
        order.sort_by(|a, b| a.width.total_cmp(&b.width));
        for curve in order {
            let points: Vec<(f64, f64)> = curve.points.iter().map(|&(at, value)| (x(at), y(value))).collect();
            svg.curve(&points, curve.colour, curve.width, curve.dash);
            if curve.dots {
                for &point in &points {
                    svg.dot(point, curve.colour);
                }
            }
            if let Some(&(end_x, end_y)) = points.last().filter(|_| curve.stays) {
                svg.dot((end_x, end_y), curve.colour);
                svg.dashes((end_x, end_y), (RIGHT, end_y), curve.colour);
            }
        }
        for (line, curve) in (0_u32..).zip(&self.curves) {
            let at = BOTTOM + 66.0 + LEGEND_LINE * f64::from(line);
            svg.curve(&[(LEFT, at - 4.0), (LEFT + 28.0, at - 4.0)], curve.colour, 3.0, curve.dash);
            svg.text((LEFT + 38.0, at), "start", "label", &curve.label);
        }
        svg.finish()
    }
}

/// A bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// Whose it is.
    pub name: String,
    /// How long.
    pub value: f64,
    /// What stands at its end.
    pub text: String,
    /// Its colour.
    pub colour: &'static str,
}

impl Bar {
    /// One with its value at its end.
    pub fn new(name: &str, value: f64, colour: &'static str) -> Self {
        Self { name: name.to_owned(), value, text: number(value), colour }
    }
}

/// Bars below each other, the longest as wide as there is room.
pub fn bars(title: &str, subtitle: &str, rows: &[Bar]) -> String {
    let most = rows.iter().map(|row| row.value).fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + BAR_LINE * rows.len() as f64 + 24.0;
    let mut svg = Svg::new(height, LEFT, title, subtitle);
    let longest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let room = (longest as f64 * LETTER + 24.0).clamp(136.0, 420.0);
    let text = rows.iter().map(|row| row.text.chars().count()).max().unwrap_or(0);
    let beside = (text as f64 * LETTER + 20.0).clamp(80.0, 300.0);
    for (line, row) in (0_u32..).zip(rows) {
        let at = TOP + BAR_LINE * f64::from(line);
        let length = (RIGHT - beside - LEFT - room) * row.value / most;
        svg.text((LEFT + room - 12.0, at + 19.0), "end", "label", &row.name);
        svg.bar((LEFT + room, at), (length.max(1.0), 28.0), row.colour);
        svg.text((LEFT + room + length + 8.0, at + 19.0), "start", "label", &row.text);
    }
    svg.finish()
}

fn multiples(step: f64, last: f64) -> Vec<f64> {
    (0_u32..100).map(|count| f64::from(count) * step).take_while(|mark| *mark <= last).collect()
}

fn top(most: f64) -> f64 {
    let step = step_for(most);
    (most / step).ceil() * step
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

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::super::svg::is_well_formed;
    use super::*;

    #[test]
    fn steps_are_round() {
        assert_eq!([7.0, 9.0, 2040.0, 0.0].map(step_for), [1.0, 2.0, 500.0, 0.001]);
    }

    #[test]
    fn marks_are_round_and_few() {
        let labels = |scale: Scale| scale.marks().into_iter().map(|mark| scale.label(mark)).collect::<Vec<_>>();
        assert_eq!(labels(Scale::linear([1.0, 0.7])), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(Scale::upto([61.0, 3.0])), ["0", "10", "20", "30", "40", "50", "60"]);
        assert_eq!(labels(Scale::linear([2040.0])), ["0", "500", "1000", "1500", "2000", "2500"]);
        assert_eq!(labels(Scale::logarithmic([0.1, 3.0, f64::NAN, 0.0])), ["0.1", "0.2", "0.5", "1", "2"]);
        assert_eq!(labels(Scale::Logarithmic { first: 0.01, last: 10_000.0 }).len(), 7);
        assert_eq!(labels(Scale::linear([2.1e6])), ["0", "0.5 M", "1.0 M", "1.5 M", "2.0 M", "2.5 M"]);
        assert_eq!(labels(Scale::Logarithmic { first: 1e4, last: 1e10 })[..3], ["10000", "100 k", "1 M"]);
        for scale in
            [Scale::linear([]), Scale::linear([f64::INFINITY, 0.0]), Scale::upto([]), Scale::logarithmic([3.0, 3.0])]
        {
            assert!((1..12).contains(&labels(scale).len()), "{scale:?}");
        }
    }

    #[test]
    fn values_are_where_they_belong() {
        let linear = Scale::linear([9.0]);
        assert_eq!([0.0, 5.0, 10.0].map(|value| linear.place(value)), [0.0, 0.5, 1.0]);
        assert_eq!([0.0, 4.5, 9.0].map(|value| Scale::upto([9.0]).place(value)), [0.0, 0.5, 1.0]);
        let logarithmic = Scale::logarithmic([1.0, 100.0]);
        assert_eq!([0.0, 1.0, 10.0, 100.0, 1e9].map(|value| logarithmic.place(value)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn every_curve_is_there_and_in_the_legend_wide_ones_above() {
        let curve = |label: &str, width, stays| Curve {
            label: label.to_owned(),
            colour: "#123456",
            width,
            stays,
            points: vec![(0.0, 1.0), (2.0, 3.0)],
            ..Curve::default()
        };
        let lines = Lines {
            title: "a & b".to_owned(),
            up: ("up".to_owned(), Scale::linear([3.0])),
            right: ("right <1>".to_owned(), Scale::linear([2.0])),
            curves: vec![curve("wide", 3.0, true), curve("thin", 2.0, false), curve("none", 1.0, true)],
        };
        let mut lines = lines;
        lines.curves[2].points.clear();
        let svg = lines.draw();
        assert!(is_well_formed(&svg) && svg.contains("a &amp; b") && svg.contains("right &lt;1&gt;"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 2 * 3);
        assert_eq!(svg.matches("<circle").count(), 1, "a curve without points ends nowhere");
        let at = |part: &str| svg.find(part).unwrap();
        assert!(at("stroke-width=\"2\"") < at("stroke-width=\"3\"") && at(">wide<") < at(">thin<"));
    }

    #[test]
    fn bars_have_room_for_what_they_say() {
        let bar = |name: &str, value| Bar::new(name, value, "#abcdef");
        let svg = bars("t", "s", &[bar("one", 2.0), bar("none", 0.0)]);
        assert!(is_well_formed(&svg) && !svg.contains("NaN") && svg.matches("rx=").count() == 2, "{svg}");
        assert!(is_well_formed(&bars("t", "s", &[])));
    }
}
