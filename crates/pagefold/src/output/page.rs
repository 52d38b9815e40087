//! The parts that all web pages share: the frame, tables of memory, charts over time, and writing the file.

use super::host_name;
use crate::config::ownership;
use crate::history::{now, utc};
use anyhow::Result;
use pagefold_engine::units::whole;
use pagefold_text::exit::{self, Exit};
use pagefold_text::html;
pub use pagefold_text::html::escape;
use pagefold_text::style::{self, human, percent};
use std::fmt::Write as _;
use std::path::Path;

/// The path that means standard output.
pub const STDOUT: &str = "-";
const STYLE: &str = include_str!("page.css");

pub fn page(title: &str, body: &str) -> String {
    html::page(title, STYLE, body)
}

/// Where and when a page was made.
#[derive(Clone, Debug)]
pub struct Origin {
    pub host: String,
    /// Seconds since 1970.
    pub time: u64,
}

impl Origin {
    pub fn here() -> Self {
        Self { host: host_name(), time: now() }
    }

    /// The line above a page's headline.
    pub fn tag(&self, command: &str, scope: &str) -> String {
        let scope = escape(scope);
        let host = escape(&self.host);
        format!("<p class=\"tag\">pagefold {command} <code>{scope}</code> on <b>{host}</b>, {}</p>\n", clock(self.time))
    }
}

/// A time in seconds since 1970, for people.
pub fn clock(seconds: u64) -> String {
    utc(seconds).replace('T', " ").replace('Z', " UTC")
}

/// Writes a page to a file, which may exist already, or to standard output for `-`.
///
/// # Errors
/// We can't write the file, or it's a link, which another user may have put there.
pub fn write(path: &Path, page: &str) -> Result<()> {
    if path == Path::new(STDOUT) {
        return Ok(style::print(page)?);
    }
    html::write(path, page).map_err(|error| {
        let path = ownership::shown(path);
        Exit::new(exit::FAILURE, format!("cannot write {path}: {error}; give --html a file that can be created")).into()
    })
}

/// A curve of a chart: its colour (a class of the style sheet), its name, and its points as time and value. There's a
/// gap where we don't know the value.
#[derive(Clone, Debug)]
pub struct Curve {
    pub class: &'static str,
    pub name: String,
    pub points: Vec<(f64, Option<f64>)>,
}

#[derive(Clone, Debug)]
pub struct Chart {
    pub title: String,
    /// The times at which the chart begins and ends.
    pub times: (f64, f64),
    /// The labels below the horizontal axis, from left to right.
    pub labels: Vec<String>,
    pub unit: Unit,
    pub curves: Vec<Curve>,
}

/// Possible maxima of an axis. We draw grid lines at its quarters, so a quarter of each maximum is a short number, too.
const STEPS: [f64; 9] = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0];
const GRID: u32 = 4;

impl Chart {
    pub fn draw(&self, html: &mut String) {
        let _ = write!(
            html,
            "<figure class=\"chart\"><figcaption><b>{}</b></figcaption><ul class=\"key\">",
            escape(&self.title)
        );
        for curve in &self.curves {
            let _ = write!(html, "<li><i class=\"{}\"></i>{}</li>", curve.class, escape(&curve.name));
        }
        let _ = write!(
            html,
            "</ul>\n<div class=\"plot\"><svg viewBox=\"0 0 1000 100\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
            escape(&self.in_words())
        );
        for line in 0..=GRID {
            let y = 100 * line / GRID;
            let _ = write!(html, "<path class=\"grid\" d=\"M0 {y}H1000\"/>");
        }
        let mut values = Vec::new();
        for curve in &self.curves {
            for (_, value) in &curve.points {
                values.extend(value);
            }
        }
        let most = self.unit.axis_end(values);
        for curve in &self.curves {
            let _ = write!(html, "<path class=\"curve {}\" d=\"{}\"/>", curve.class, self.path(&curve.points, most));
        }
        html.push_str("</svg>");
        for line in 0..=GRID {
            let value = (self.unit.write)(most * f64::from(GRID - line) / f64::from(GRID));
            let _ = write!(html, "<span class=\"up\" style=\"top:{}%\">{}</span>", 100 * line / GRID, escape(&value));
        }
        html.push_str("</div>\n<div class=\"times\">");
        for label in &self.labels {
            let _ = write!(html, "<span>{}</span>", escape(label));
        }
        html.push_str("</div></figure>\n");
    }

    /// The chart's figures, for people who don't see it.
    fn in_words(&self) -> String {
        let mut text = self.title.clone();
        for curve in &self.curves {
            let values: Vec<f64> = curve.points.iter().filter_map(|point| point.1).collect();
            let Some(&now) = values.last() else { continue };
            let lowest = values.iter().copied().fold(now, f64::min);
            let highest = values.iter().copied().fold(now, f64::max);
            let [lowest, highest, now] = [lowest, highest, now].map(self.unit.write);
            let _ = write!(text, "; {}: {lowest} to {highest}, now {now}", curve.name);
        }
        text
    }

    fn path(&self, points: &[(f64, Option<f64>)], most: f64) -> String {
        let (first, last) = self.times;
        let mut path = String::new();
        let mut is_drawn = false;
        for &(time, value) in points {
            let Some(value) = value else {
                is_drawn = false;
                continue;
            };
            let x = 1000.0 * ((time - first) / (last - first).max(1e-9)).clamp(0.0, 1.0);
            let y = 100.0 - 100.0 * (value / most).clamp(0.0, 1.0);
            // We draw an isolated point as a dot.
            let _ = if is_drawn { write!(path, "L{x:.1} {y:.2}") } else { write!(path, "M{x:.1} {y:.2}h0") };
            is_drawn = true;
        }
        path
    }
}

/// The unit of a vertical axis.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Units such as KiB and MiB are powers of this number.
    base: f64,
    /// The axis never ends below this value.
    least: f64,
    pub write: fn(f64) -> String,
}

impl Unit {
    pub const BYTES: Self = Self { base: 1024.0, least: 4_194_304.0, write: |value| human(whole(value)) };
    pub const PERCENT: Self = Self { base: 10.0, least: 4.0, write: |value| percent(value, 100.0) };

    /// Where an axis for these values ends: at one of [`STEPS`], times a power of ten, in the largest unit that fits.
    pub fn axis_end(&self, values: impl IntoIterator<Item = f64>) -> f64 {
        let most = values.into_iter().fold(self.least, f64::max);
        let mut unit = 1.0;
        let mut power = 1.0;
        while unit * self.base <= most {
            unit *= self.base;
        }
        loop {
            if let Some(step) = STEPS.into_iter().find(|step| unit * power * step >= most) {
                return unit * power * step;
            }
            power *= 10.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        write(&file, "something long").unwrap();
        write(&file, "short").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "short");
        symlink(&file, &link).unwrap();
        for path in [&link, Path::new("/dev/null"), dir.path(), &dir.path().join("none/file")] {
            let error = write(path, "other").unwrap_err().to_string();
            assert!(error.contains("cannot write") && !error.contains('\n'), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "short");
    }

    #[test]
    fn curves_have_gaps_and_stay_in_the_chart() {
        let chart = Chart {
            title: "<t>".to_owned(),
            times: (100.0, 200.0),
            labels: vec!["then".to_owned(), "now".to_owned()],
            unit: Unit { base: 10.0, least: 1.0, write: |value| format!("{value} <u>") },
            curves: vec![Curve {
                class: "across",
                name: "a & b".to_owned(),
                points: vec![(100.0, Some(0.0)), (150.0, Some(4.0)), (160.0, None), (250.0, Some(1.0))],
            }],
        };
        let mut html = String::new();
        chart.draw(&mut html);
        assert!(html.contains("d=\"M0.0 100.00h0L500.0 0.00M1000.0 75.00h0\""), "{html}");
        for text in [
            "&lt;t&gt;",
            "a &amp; b",
            "top:25%\">3 &lt;u&gt;",
            "<span>now</span>",
            "a &amp; b: 0 &lt;u&gt; to 4 &lt;u&gt;, now 1 &lt;u&gt;\"",
        ] {
            assert!(html.contains(text), "{text} in {html}");
        }
    }

    /// The relative luminance (WCAG 2) of the style sheet's colour `name` in a theme.
    fn luminance(theme: &str, name: &str) -> f64 {
        let (_, rest) = theme.split_once(&format!("--{name}: #")).unwrap();
        let digits: String = rest.chars().take_while(char::is_ascii_hexdigit).collect();
        let digits = if digits.len() == 3 { digits.chars().flat_map(|digit| [digit, digit]).collect() } else { digits };
        let mut sum = 0.0;
        for (at, weight) in [(0, 0.2126), (2, 0.7152), (4, 0.0722)] {
            let part = f64::from(u8::from_str_radix(&digits[at..at + 2], 16).unwrap()) / 255.0;
            sum += weight * if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) };
        }
        sum
    }

    #[test]
    fn colours_differ_enough_in_both_themes() {
        let themes: Vec<&str> = STYLE.lines().filter(|line| line.contains(":root")).collect();
        assert_eq!(themes.len(), 2);
        // Neighbouring colours of similar brightness aren't listed: lines of the card's colour separate them.
        let mut pairs = vec![("zero", "rest", 3.0), ("within", "across", 3.0), ("within", "zero", 3.0)];
        for layer in ["zero", "across", "fork"] {
            pairs.extend([("merged", layer, 3.0), (layer, "rest", 3.0), (layer, "card", 3.0)]);
        }
        pairs.extend([("merged", "card", 3.0), ("within", "card", 3.0), ("warn", "card", 3.0)]);
        for ground in ["card", "paper", "rest"] {
            pairs.extend([("ink", ground, 4.5), ("dim", ground, 4.5)]);
        }
        for theme in themes {
            for (one, other, least) in &pairs {
                let (one_is, other_is) = (luminance(theme, one), luminance(theme, other));
                let contrast = (one_is.max(other_is) + 0.05) / (one_is.min(other_is) + 0.05);
                assert!(contrast >= *least, "{one} on {other}: {contrast:.2} in {theme}");
            }
        }
    }

    #[test]
    fn axes_end_at_round_values() {
        for (unit, most, end, text) in [
            (Unit::PERCENT, 0.0, 4.0, "4.0 %"),
            (Unit::PERCENT, 35.0, 40.0, "40 %"),
            (Unit::BYTES, 0.0, 4_194_304.0, "4 MiB"),
            (Unit::BYTES, 11.0 * 1_073_741_824.0, 12.0 * 1_073_741_824.0, "12 GiB"),
        ] {
            let found = unit.axis_end([most, 0.0]);
            assert!((found - end).abs() < 1e-6, "{found} for {most}");
            assert_eq!((unit.write)(found), text);
        }
    }
}
