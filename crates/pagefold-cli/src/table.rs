//! Aligned columns.

use std::fmt;

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

    /// Appends a row.
    pub fn add_row<Cell: Into<String>>(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = |column: usize| self.rows.iter().filter_map(move |row| row.get(column));
        let widths: Vec<usize> =
            (0..self.right.len()).map(|column| cells(column).map(|cell| width(cell)).max().unwrap_or(0)).collect();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for ((cell, &right), &wide) in row.iter().zip(&self.right).zip(&widths) {
                let padding = " ".repeat(wide - width(cell));
                let (before, after) = if right { (&*padding, "") } else { ("", &*padding) };
                line = line + before + cell + after + "  ";
            }
            let end = if number == 0 { "" } else { "\n" };
            write!(f, "{end}{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Characters shown, without the colour codes `ESC [ ... m`.
fn width(text: &str) -> usize {
    let mut shown = 0;
    let mut code = false;
    for character in text.chars() {
        match character {
            '\x1b' => code = true,
            'm' if code => code = false,
            _ => shown += usize::from(!code),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_with_and_without_colour() {
        let mut table = Table::new(["NAME", "SIZE", ""], |column| column == 1);
        table.add_row(["a long name", "\x1b[1m7\x1b[0m", "x"]);
        table.add_row(["räka", "123456", ""]);
        let text = table.to_string().replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert_eq!(text, "NAME           SIZE\na long name       7  x\nräka         123456");
    }
}
