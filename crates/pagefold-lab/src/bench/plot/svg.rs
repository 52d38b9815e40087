//! The text of a picture.

use std::fmt::Write;

/// The width of every picture, pixels.
pub const WIDTH: f64 = 880.0;

/// A picture being drawn: each call adds to it. Positions and sizes are in pixels, from the upper left corner.
#[derive(Debug)]
pub struct Svg(String);

impl Svg {
    /// An empty picture with two lines of text at its top, from `left` on: they need 64 pixels.
    pub fn new(height: f64, left: f64, title: &str, subtitle: &str) -> Self {
        let style = "text{font-family:system-ui,sans-serif;fill:#222}.title{font-size:20px;font-weight:600}\
                     .label{font-size:14px}.tick{font-size:12px;fill:#666}.grid{stroke:#e4e4e4;stroke-width:1}";
        let mut svg = Self(String::new());
        svg.push(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\"><title>{}</title><style>{style}</style>\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>",
            escaped(title)
        ));
        svg.text((left, 36.0), "start", "title", title);
        svg.text((left, 60.0), "start", "tick", subtitle);
        svg
    }

    fn push(&mut self, part: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.0.write_fmt(part);
        self.0.push('\n');
    }

    /// Text in one line. `anchor` is `start`, `middle` or `end`; `class` is `title`, `label` or `tick`.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
        let text = escaped(text);
        self.push(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>"
        ));
    }

    /// A straight line of the class `grid`.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        self.push(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
        ));
    }

    /// A straight line of small dashes.
    pub fn dashes(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
             stroke-width=\"1.5\" stroke-dasharray=\"3 5\"/>"
        ));
    }

    /// A filled circle.
    pub fn dot(&mut self, (x, y): (f64, f64), colour: &str) {
        self.push(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"));
    }

    /// A filled rectangle with round corners.
    pub fn bar(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"3\" fill=\"{colour}\"/>"
        ));
    }

    /// A filled rectangle that may touch others.
    pub fn cell(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
        self.push(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>"
        ));
    }

    /// A line through points. `dash` is lengths of dashes and gaps, as in `8 4`; empty for a line without gaps.
    pub fn curve(&mut self, points: &[(f64, f64)], colour: &str, width: f64, dash: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dash = if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
        self.push(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" \
             stroke-linejoin=\"round\" stroke-linecap=\"round\"{dash}/>",
            points.join(" ")
        ));
    }

    /// The whole picture.
    pub fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Whether a picture is well-formed.
#[cfg(test)]
pub(crate) fn is_well_formed(svg: &str) -> bool {
    roxmltree::Document::parse(svg).is_ok()
}
