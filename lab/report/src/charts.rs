//! Line charts and bar charts as SVG.

use crate::measures::Spread;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// The width of every chart, in pixels.
const WIDTH: u32 = 880;
/// Where titles, legends and bars begin.
const LEFT: i32 = 24;
/// Where bars end.
const RIGHT: i32 = 856;
/// The height of title and subtitle.
const TOP: i32 = 76;
const PLOT_HEIGHT: i32 = 400;
const LEGEND_LINE: i32 = 24;
const BAR_LINE: i32 = 40;
/// The mean width of a letter at the labels' size.
const LETTER: f64 = 7.2;
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GREY: RGBColor = RGBColor(0x66, 0x66, 0x66);
const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);

/// A point in pixels, from the left and from the top.
type Point = (i32, i32);
/// A drawing under way.
type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// The result of a drawing step. Drawing into memory doesn't fail.
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// From zero to just above the largest value.
    Linear { most: f64 },
    /// Logarithmic, between two numbers above zero. We draw values outside at its ends.
    Logarithmic { first: f64, last: f64 },
}

impl Scale {
    /// A linear scale for all of the values.
    pub fn linear(values: impl IntoIterator<Item = f64>) -> Self {
        let mut most = 0.0_f64;
        for value in values {
            if value.is_finite() {
                most = most.max(value);
            }
        }
        Self::Linear { most }
    }

    /// A logarithmic scale for the values above zero.
    pub fn logarithmic(values: impl IntoIterator<Item = f64>) -> Self {
        let mut fitting: Vec<f64> = values.into_iter().filter(|value| value.is_finite() && *value > 0.0).collect();
        fitting.sort_by(f64::total_cmp);
        match fitting[..] {
            [first, .., last] if first < last => Self::Logarithmic { first, last },
            _ => Self::Logarithmic { first: 1.0, last: 10.0 },
        }
    }

    fn range(self) -> Range<f64> {
        match self {
            Self::Linear { most } => 0.0..if most > 0.0 { most * 1.05 } else { 1.0 },
            Self::Logarithmic { first, last } => first..last,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// The curve's name in the legend, which leaves out curves without one.
    pub label: String,
    pub colour: &'static str,
    /// The width in pixels. We draw wider lines over narrower ones.
    pub width: u32,
    /// Whether the value stays the same after the last point. If so, we draw a dot, and dots up to the end of the axis.
    pub stays: bool,
    /// The points, in the units of the axes.
    pub points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    pub title: String,
    /// The vertical axis: quantity and unit, and its range.
    pub up: (String, Scale),
    /// The horizontal axis.
    pub right: (String, Scale),
    /// The lines, in the order of the legend.
    pub curves: Vec<Curve>,
}

impl Lines {
    pub fn draw(&self) -> String {
        let named: Vec<&Curve> = self.curves.iter().filter(|curve| !curve.label.is_empty()).collect();
        let legend = LEGEND_LINE * i32::try_from(named.len()).unwrap_or(0);
        svg(PLOT_HEIGHT + 68 + legend, &self.title, "", |canvas| {
            let (plot, legend) = canvas.split_vertically(PLOT_HEIGHT + 52);
            let right = self.right.1.range();
            let up = self.up.1.range();
            match (self.right.1, self.up.1) {
                (Scale::Logarithmic { .. }, Scale::Logarithmic { .. }) => {
                    self.plot(&plot, right.log_scale(), up.log_scale())?;
                }
                (Scale::Logarithmic { .. }, _) => self.plot(&plot, right.log_scale(), up)?,
                (_, Scale::Logarithmic { .. }) => self.plot(&plot, right, up.log_scale())?,
                _ => self.plot(&plot, right, up)?,
            }
            let mut y = 12;
            for curve in named {
                let sample = vec![(LEFT, y), (LEFT + 32, y)];
                legend.draw(&PathElement::new(sample, rgb(curve.colour).stroke_width(3)))?;
                legend.draw(&label(&curve.label, (LEFT + 44, y), HPos::Left))?;
                y += LEGEND_LINE;
            }
            Ok(())
        })
    }

    fn plot<'a, X, Y>(&self, canvas: &Canvas<'a>, x: X, y: Y) -> Drawn<'a>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let right = self.right.1.range();
        let up = self.up.1.range();
        let mut chart = ChartBuilder::on(canvas)
            .margin_top(52)
            .margin_right(32)
            .margin_left(12)
            .x_label_area_size(46)
            .y_label_area_size(80)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(&self.right.0)
            .y_desc(&self.up.0)
            .axis_desc_style(("sans-serif", 14).into_font().color(&INK))
            .label_style(("sans-serif", 12).into_font().color(&GREY))
            .x_labels(8)
            .y_labels(8)
            .x_label_formatter(&|value| tick(*value))
            .y_label_formatter(&|value| tick(*value))
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(GREY)
            .draw()?;
        let mut order: Vec<&Curve> = self.curves.iter().collect();
        order.sort_by_key(|curve| curve.width);
        for curve in order {
            let colour = rgb(curve.colour);
            let style = colour.stroke_width(curve.width);
            let mut points = curve.points.clone();
            for (x, y) in &mut points {
                *x = x.clamp(right.start, right.end);
                *y = y.clamp(up.start, up.end);
            }
            let end = points.last().copied();
            chart.draw_series(LineSeries::new(points, style))?;
            if let (true, Some(end)) = (curve.stays, end) {
                chart.draw_series([Circle::new(end, 4, colour.filled())])?;
                chart.draw_series(DashedLineSeries::new([end, (right.end, end.1)], 3, 5, colour.into()))?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    pub name: String,
    /// The value, drawn as its length.
    pub value: f64,
    pub text: String,
    pub colour: &'static str,
}

impl Bar {
    /// A bar as long as the median of some values.
    pub fn of_spread(name: &str, spread: Spread, colour: &'static str) -> Self {
        Self { name: name.to_owned(), value: spread.median, text: spread.to_string(), colour }
    }
}

/// Draws horizontal bars. The subtitle names the quantity and its unit.
pub fn bars(title: &str, subtitle: &str, rows: &[Bar]) -> String {
    let count = i32::try_from(rows.len()).unwrap_or(0);
    let mut most = f64::MIN_POSITIVE;
    let mut longest_name = 0;
    let mut longest_text = 0;
    for row in rows {
        most = most.max(row.value);
        longest_name = longest_name.max(row.name.chars().count());
        longest_text = longest_text.max(row.text.chars().count());
    }
    let from = LEFT + pixels((longest_name as f64 * LETTER + 16.0).clamp(80.0, 420.0));
    let room = RIGHT - from - pixels((longest_text as f64 * LETTER + 16.0).clamp(60.0, 300.0));
    svg(TOP + BAR_LINE * count + 24, title, subtitle, |canvas| {
        let mut y = TOP + 16;
        for row in rows {
            let to = from + pixels(f64::from(room) * row.value / most).max(1);
            canvas.draw(&Rectangle::new([(from, y - 13), (to, y + 13)], rgb(row.colour).filled()))?;
            canvas.draw(&label(&row.name, (from - 12, y), HPos::Right))?;
            canvas.draw(&label(&row.text, (to + 8, y), HPos::Left))?;
            y += BAR_LINE;
        }
        Ok(())
    })
}

/// Draws into an SVG image of the usual width, below a title and a subtitle.
fn svg(height: i32, title: &str, subtitle: &str, draw: impl for<'a, 'b> FnOnce(&'b Canvas<'a>) -> Drawn<'a>) -> String {
    let mut image = String::new();
    {
        let canvas =
            SVGBackend::with_string(&mut image, (WIDTH, u32::try_from(height).unwrap_or(0))).into_drawing_area();
        // Drawing into memory doesn't fail.
        let _ = draw_page(&canvas, title, subtitle, draw);
    }
    image
}

fn draw_page<'a>(
    canvas: &Canvas<'a>,
    title: &str,
    subtitle: &str,
    draw: impl FnOnce(&Canvas<'a>) -> Drawn<'a>,
) -> Drawn<'a> {
    canvas.fill(&WHITE)?;
    canvas.draw(&Text::new(title, (LEFT, 18), ("sans-serif", 20).into_font().color(&INK)))?;
    canvas.draw(&Text::new(subtitle, (LEFT, 48), ("sans-serif", 13).into_font().color(&GREY)))?;
    draw(canvas)?;
    canvas.present()
}

/// Text at the labels' size, vertically centred at a point.
fn label(text: &str, at: Point, side: HPos) -> Text<'static, Point, String> {
    let style = ("sans-serif", 14).into_font().color(&INK).pos(Pos::new(side, VPos::Center));
    Text::new(text.to_owned(), at, style)
}

/// A number with three or more significant digits, and no more than that.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// The label of a value on an axis: `0.2`, `2500`, `150 k`.
fn tick(value: f64) -> String {
    for (from, unit, name) in [(1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")] {
        if value >= from * 0.999_999 {
            return format!("{}{name}", (value / unit * 1e6).round() / 1e6);
        }
    }
    ((value * 1e6).round() / 1e6).to_string()
}

#[expect(clippy::cast_possible_truncation, reason = "positions within a chart are small")]
fn pixels(position: f64) -> i32 {
    position.round() as i32
}

/// Parses `#rrggbb`.
fn rgb(colour: &str) -> RGBColor {
    let digits = u32::from_str_radix(colour.trim_start_matches('#'), 16).unwrap_or(0);
    let [_, red, green, blue] = digits.to_be_bytes();
    RGBColor(red, green, blue)
}

#[cfg(test)]
pub(crate) use crate::svg_text::{elements, texts};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_short() {
        let labels = [0.0, 0.1 + 0.2, 2500.0, 9000.0, 1e4, 1.5e5, 2e6, 3e10].map(tick);
        assert_eq!(labels, ["0", "0.3", "2500", "9000", "10 k", "150 k", "2 M", "30 G"]);
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(
            ["1234", "12.3", "1.23", "0.1234", "0"],
            [1234.4, 12.34, 1.234, 0.1234, 0.0].map(number).each_ref().map(String::as_str)
        );
    }

    #[test]
    fn every_curve_is_drawn_and_in_the_legend() {
        let curve = |label: &str, colour, stays| Curve {
            label: label.to_owned(),
            colour,
            width: 2,
            stays,
            points: vec![(0.0, 1.0), (2.0, 3.0)],
        };
        let mut curves =
            vec![curve("stays", "#123456", true), curve("plain", "#234567", false), curve("empty", "#456789", true)];
        curves[2].points.clear();
        for (up, right) in [
            (Scale::linear([3.0]), Scale::linear([2.0])),
            (Scale::logarithmic([0.5, 3.0]), Scale::linear([2.0])),
            (Scale::linear([3.0]), Scale::logarithmic([0.1, 2.0])),
            (Scale::logarithmic([0.5, 3.0]), Scale::logarithmic([0.1, 2.0])),
        ] {
            let (up, right) = (("up, MiB".to_owned(), up), ("right <1>".to_owned(), right));
            let svg = Lines { title: "a & b".to_owned(), up, right, curves: curves.clone() }.draw();
            let texts = texts(&svg);
            for text in ["a & b", "up, MiB", "right <1>", "stays", "plain", "empty"] {
                assert!(texts.iter().any(|found| found == text), "{text} is not in {texts:?}");
            }
            // The curve, and its sample in the legend.
            assert_eq!(elements(&svg, "polyline", "#234567") + elements(&svg, "line", "#234567"), 2, "{svg}");
            assert_eq!((elements(&svg, "circle", "#123456"), elements(&svg, "circle", "#456789")), (1, 0));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn charts_without_values_can_be_drawn() {
        for scale in [Scale::linear([]), Scale::linear([f64::INFINITY, 0.0]), Scale::logarithmic([3.0])] {
            let axis = || ("axis".to_owned(), scale);
            let svg = Lines { title: String::new(), up: axis(), right: axis(), curves: Vec::new() }.draw();
            assert!(texts(&svg).len() > 3 && !svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let spread = |value| Spread { median: value, min: value, max: value };
        let bar = |name: &str, value| Bar::of_spread(name, spread(value), "#abcdef");
        let svg = bars("t", "s", &[bar("one", 2.0), bar("half", 1.0), bar("none", 0.0)]);
        assert_eq!(texts(&svg), ["t", "s", "one", "2.00", "half", "1.00", "none", "0"]);
        let document = roxmltree::Document::parse(&svg).unwrap();
        let widths = document.descendants().filter(|node| node.attribute("fill") == Some("#ABCDEF"));
        let widths: Vec<f64> = widths.map(|node| node.attribute("width").unwrap().parse().unwrap()).collect();
        assert!((widths[0] - 2.0 * widths[1]).abs() <= 1.0 && widths[2] <= 1.0, "{widths:?}");
        assert_eq!(texts(&bars("t", "s", &[])), ["t", "s"]);
    }
}
