//! The web page: headings, texts, tables and pictures.

use pagefold_text::html::{self, escape};
use std::fmt::Write;

const STYLE: &str = include_str!("report.css");

#[derive(Clone, Debug)]
pub struct Grid {
    pub heads: Vec<&'static str>,
    /// How many of the first columns are text; the others are numbers.
    pub texts: usize,
    pub rows: Vec<Vec<String>>,
}

impl Grid {
    pub fn new<const N: usize>(texts: usize, heads: [&'static str; N], rows: Vec<[String; N]>) -> Self {
        Self { heads: heads.to_vec(), texts, rows: rows.into_iter().map(Vec::from).collect() }
    }

    /// Adds a column with a cell for each row.
    pub fn add_column(&mut self, head: &'static str, cells: impl Iterator<Item = String>) {
        self.heads.push(head);
        for (row, cell) in self.rows.iter_mut().zip(cells) {
            row.push(cell);
        }
    }

    fn html(&self) -> String {
        let mut html = "<div class=\"scroll\"><table><thead><tr>".to_owned();
        for (column, head) in self.heads.iter().enumerate() {
            let class = if column < self.texts { "" } else { " class=\"n\"" };
            let _ = write!(html, "<th{class}>{}</th>", escape(head));
        }
        html.push_str("</tr></thead><tbody>\n");
        for row in &self.rows {
            html.push_str("<tr>");
            for (column, cell) in row.iter().enumerate() {
                let class = match cell.as_str() {
                    "met" => " class=\"met\"",
                    "missed" => " class=\"missed\"",
                    "not measured" => " class=\"open\"",
                    _ if column < self.texts => "",
                    _ => " class=\"n\"",
                };
                let _ = write!(html, "<td{class}>{}</td>", escape(cell));
            }
            html.push_str("</tr>\n");
        }
        html + "</tbody></table></div>"
    }
}

/// A page that we're writing. Writing to a string can't fail.
#[derive(Clone, Debug)]
pub struct Document {
    title: String,
    body: String,
}

impl Document {
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), body: format!("<h1>{}</h1>\n", escape(title)) }
    }

    /// A heading below the title.
    pub fn heading(&mut self, text: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(text));
    }

    pub fn text(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escape(text));
    }

    pub fn table(&mut self, grid: &Grid) {
        let _ = writeln!(self.body, "{}", grid.html());
    }

    /// A table that readers unfold.
    pub fn folded(&mut self, name: &str, grid: &Grid) {
        let count = grid.rows.len();
        let _ = writeln!(self.body, "<details><summary>{name} ({count})</summary>{}</details>", grid.html());
    }

    /// An SVG image. We escaped its texts when we drew it.
    pub fn picture(&mut self, svg: &str) {
        let _ = writeln!(self.body, "<figure class=\"scroll\">{svg}</figure>");
    }

    pub fn html(&self) -> String {
        html::page(&self.title, STYLE, &self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_stay_texts() {
        let rows = vec![["<b>|".to_owned(), "missed".to_owned()], ["x".to_owned(), "1".to_owned()]];
        let grid = Grid::new(1, ["name", "value"], rows);
        let mut document = Document::new("a & b");
        document.heading("<h>");
        document.text("one\ntwo");
        document.table(&grid);
        document.folded("figures", &grid);
        document.picture("<svg></svg>");
        let html = document.html();
        for part in [
            "<h1>a &amp; b</h1>",
            "<h2>&lt;h&gt;</h2>",
            "<td>&lt;b&gt;|</td><td class=\"missed\">missed</td>",
            "<td class=\"n\">1</td>",
            "<details><summary>figures (2)</summary>",
            "<svg></svg>",
            "default-src 'none'",
        ] {
            assert!(html.contains(part), "{part} in {html}");
        }
    }
}
