//! Aligned columns.

use crate::escape::printable;
use crate::style::shorten;
use std::fmt;
use unicode_width::UnicodeWidthChar;

/// How many columns a cell has at most: about as many as long names of pods and units need.
const CELL_WIDTH: usize = 64;

/// A table whose columns are as wide as their widest cell, two spaces apart. Cells may contain colour codes.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with a header. `right` says whether a column, by its index, is aligned to the right.
    pub fn new<Cell: Into<String>>(header: impl IntoIterator<Item = Cell>, right: impl Fn(usize) -> bool) -> Self {
        let header: Vec<String> = header.into_iter().map(Into::into).collect();
        let right = (0..header.len()).map(right).collect();
        Self { rows: vec![header], right }
    }

    /// Appends a row. Cuts cells at [`CELL_WIDTH`] and joins spaces: a name mustn't look like columns of its own.
    pub fn add_row<Cell: Into<String>>(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().map(|text| cell(&text.into())).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths = vec![0; self.right.len()];
        for row in &self.rows {
            for (wide, cell) in widths.iter_mut().zip(row) {
                *wide = width(cell).max(*wide);
            }
        }
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate().take(widths.len()) {
                let padding = " ".repeat(widths[column] - width(cell));
                let (before, after) = if self.right[column] { (&*padding, "") } else { ("", &*padding) };
                line = line + before + cell + after + "  ";
            }
            let end = if number == 0 { "" } else { "\n" };
            write!(f, "{end}{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Makes a text fit for a cell: short, and without anything that looks like the space between columns.
pub fn cell(text: &str) -> String {
    let has_colour = text.contains('\x1b');
    let text = spaced(&if has_colour { text.to_owned() } else { printable(text.as_bytes()) });
    if has_colour { text } else { shorten(&text, CELL_WIDTH) }
}

/// Joins adjacent spaces into one space.
pub fn spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How many columns of a terminal a text takes, not counting the colour codes `ESC [ ... m`.
fn width(text: &str) -> usize {
    let mut shown = 0;
    let mut code = false;
    for character in text.chars() {
        match character {
            '\x1b' => code = true,
            'm' if code => code = false,
            _ if code => {}
            _ => shown += character.width().unwrap_or(0),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use unicode_width::UnicodeWidthStr;

    #[test]
    fn a_name_does_not_look_like_a_row() {
        let mut table = Table::new(["NAME", "SIZE"], |column| column == 1);
        table.add_row(["  web   7 GiB \u{a0}\u{2800}\u{2003}x ", "1"]);
        table.add_row(["n".repeat(1000), "2".to_owned()]);
        table.add_row(["\u{754c}".repeat(40), "3".to_owned()]);
        table.add_row([format!("e{}\u{202e}", "\u{301}".repeat(400)), "4".to_owned()]);
        let text = table.to_string();
        // All lines are equally wide on a terminal.
        assert!(text.lines().skip(1).all(|line| line.width() == 64 + 2 + 4), "{text}");
        let lines: Vec<&str> = text.lines().map(|line| line.split("  ").next().unwrap()).collect();
        assert_eq!(lines[1], "web 7 GiB \\u{2800} x");
        assert_eq!(lines[2], format!("{}…", "n".repeat(63)));
    }

    #[test]
    fn columns_are_aligned_with_and_without_colour() {
        let mut table = Table::new(["NAME", "SIZE", ""], |column| column == 1);
        table.add_row(["a long name", "\x1b[1m7\x1b[0m", "x"]);
        table.add_row(["räka", "123456", ""]);
        let text = table.to_string().replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert_eq!(text, "NAME           SIZE\na long name       7  x\nräka         123456");
    }
}
