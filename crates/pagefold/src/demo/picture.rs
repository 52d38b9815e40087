//! Bars and curves made of characters. They differ in glyphs as well as colours, so they're readable without colour.

use pagefold_text::style::{Style, human};
use std::io::IsTerminal;

pub const BAR: usize = 44;
pub const CURVE: usize = 56;

const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The number of columns, out of `width`, that represent `part` of `whole`.
pub fn columns(part: u64, whole: u64, width: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the width")]
    let columns = (part as f64 / whole.max(1) as f64 * width as f64).round().clamp(0.0, width as f64) as usize;
    columns
}

/// A curve, filled down to zero.
#[derive(Clone, Copy, Debug)]
pub struct Curve<'a> {
    /// Seconds and bytes, in time order. We draw nothing after the last point.
    pub points: &'a [(f64, u64)],
    /// The length of the horizontal axis, in seconds.
    pub span: f64,
    /// The top of the vertical axis, in bytes.
    pub top: u64,
    pub rows: usize,
}

impl Curve<'_> {
    /// The rows from top to bottom, without colour.
    pub fn draw(&self) -> Vec<String> {
        let mut rows = vec![String::new(); self.rows];
        for column in 0..CURVE {
            let eighths = self.eighths(column);
            for (below, row) in rows.iter_mut().rev().enumerate() {
                row.push(LEVELS[eighths.saturating_sub(below * 8).min(8)]);
            }
        }
        rows
    }

    /// The rows in colour, with a labelled axis on the left.
    pub fn with_axis(&self, paint: impl Fn(&str) -> String, style: Style) -> Vec<String> {
        let mut rows = self.draw();
        for (at, row) in rows.iter_mut().enumerate() {
            let label = if at == 0 { human(self.top) } else { String::new() };
            *row = format!("   {} {}{}", style.dim(&format!("{label:>9}")), style.dim("│"), paint(row.trim_end()));
        }
        rows
    }

    fn eighths(&self, column: usize) -> usize {
        let end = (column + 1) as f64 / CURVE as f64 * self.span;
        let begin = column as f64 / CURVE as f64 * self.span;
        let Some(&(last, _)) = self.points.last() else { return 0 };
        if begin > last {
            return 0;
        }
        let mut value = 0;
        for point in self.points {
            if point.0 > end {
                break;
            }
            value = point.1;
        }
        // Draw at least an eighth of a row for any value above zero.
        columns(value, self.top, self.rows * 8).max(usize::from(value > 0))
    }
}

pub fn time_axis(span: f64, style: Style) -> Vec<String> {
    let line = format!("   {:>9} └{}", "0", "─".repeat(CURVE));
    let end = format!("{span:.0} s");
    let times = format!("   {:>9}  0 s{end:>width$}", "", width = CURVE - 3);
    vec![style.dim(&line), style.dim(&times)]
}

/// A block of lines that we redraw in place if standard output is a terminal.
#[derive(Debug)]
pub struct Canvas {
    live: bool,
    drawn: usize,
}

impl Canvas {
    /// A new block below the existing output.
    pub fn new() -> Self {
        let live = std::io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        if live {
            // Hide the cursor, and turn off line wrapping: we wouldn't redraw the second row of a wrapped line.
            put("\x1b[?25l\x1b[?7l");
        }
        Self { live, drawn: 0 }
    }

    /// Whether we can redraw the block.
    pub fn is_live(&self) -> bool {
        self.live
    }

    pub fn draw(&mut self, lines: &[String]) {
        let mut text = String::new();
        if self.drawn > 0 {
            text = format!("\x1b[{}A", self.drawn);
        }
        for line in lines {
            text.push_str(if self.live { "\r\x1b[2K" } else { "" });
            text.push_str(line.trim_end());
            text.push('\n');
        }
        put(&text);
        self.drawn = if self.live { lines.len() } else { 0 };
    }
}

impl Drop for Canvas {
    fn drop(&mut self) {
        if self.live {
            put("\x1b[?7h\x1b[?25h");
        }
    }
}

/// Prints, ignoring errors: the demonstration must go on to restore everything.
fn put(text: &str) {
    let _ = pagefold_text::style::draw(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_ends_with_its_last_point() {
        let points = [(0.0, 0), (5.0, 80), (7.5, 80)];
        let curve = Curve { points: &points, span: 10.0, top: 80, rows: 2 };
        let rows = curve.draw();
        assert_eq!(rows.len(), 2);
        for row in rows {
            let row: Vec<char> = row.chars().collect();
            assert_eq!(row.len(), CURVE);
            assert!(row[..CURVE / 2 - 1].iter().all(|&c| c == ' '));
            assert!(row[CURVE / 2..CURVE * 3 / 4].iter().all(|&c| c == '█'));
            assert!(row[CURVE * 3 / 4 + 1..].iter().all(|&c| c == ' '));
        }
    }

    #[test]
    fn small_values_are_drawn_and_zero_is_not() {
        let draw = |value| Curve { points: &[(1.0, value)], span: 1.0, top: 1 << 30, rows: 3 }.draw();
        assert!(draw(4096)[2].contains('▁'));
        assert!(draw(0).concat().chars().all(|c| c == ' '));
        assert!(Curve { points: &[], span: 1.0, top: 1, rows: 1 }.draw()[0].chars().all(|c| c == ' '));
    }

    #[test]
    fn columns_are_limited_to_the_width() {
        assert_eq!((columns(1, 2, 44), columns(9, 2, 44), columns(1, 0, 44)), (22, 44, 44));
    }
}
