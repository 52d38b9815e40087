//! A report as headings, texts, tables and pictures: written as a web page or as Markdown.

use pagefold_text::html::{self, escape};
use std::fmt::Write;

/// More rows than Markdown shows of a folded table.
const LONG: usize = 30;

const STYLE: &str = include_str!("report.css");

#[derive(Clone, Debug)]
pub enum Block {
    /// A heading below the title.
    Heading(String),
    Text(String),
    Table(Grid),
    /// A table that a web page folds, and that Markdown leaves out if it is long.
    Folded(&'static str, Grid),
    /// An SVG image, which Markdown leaves out.
    Picture(String),
}

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
        self.rows.iter_mut().zip(cells).for_each(|(row, cell)| row.push(cell));
    }

    pub fn block<const N: usize>(texts: usize, heads: [&'static str; N], rows: Vec<[String; N]>) -> Block {
        Block::Table(Self::new(texts, heads, rows))
    }
}

#[derive(Clone, Debug)]
pub struct Document {
    pub title: String,
    pub blocks: Vec<Block>,
}

/// Writing to a string cannot fail.
impl Document {
    pub fn html(&self) -> String {
        let mut body = format!("<h1>{}</h1>\n", escape(&self.title));
        for block in &self.blocks {
            let _ = match block {
                Block::Heading(text) => writeln!(body, "<h2>{}</h2>", escape(text)),
                Block::Text(text) => writeln!(body, "<p>{}</p>", escape(text)),
                Block::Table(grid) => writeln!(body, "{}", grid.html()),
                Block::Folded(name, grid) => {
                    let count = grid.rows.len();
                    writeln!(body, "<details><summary>{name} ({count})</summary>{}</details>", grid.html())
                }
                // Its texts were escaped when it was drawn.
                Block::Picture(svg) => writeln!(body, "<figure class=\"scroll\">{svg}</figure>"),
            };
        }
        html::page(&self.title, STYLE, &body)
    }

    pub fn markdown(&self) -> String {
        let mut text = format!("# {}\n", plain(&self.title));
        for block in &self.blocks {
            let _ = match block {
                Block::Heading(heading) => writeln!(text, "\n## {}", plain(heading)),
                Block::Text(words) => writeln!(text, "\n{}", plain(words)),
                Block::Folded(name, grid) if grid.rows.len() > LONG => {
                    writeln!(text, "\n{name}: {}, which the JSON has.", grid.rows.len())
                }
                Block::Table(grid) | Block::Folded(_, grid) => writeln!(text, "\n{}", grid.markdown()),
                Block::Picture(_) => Ok(()),
            };
        }
        text
    }
}

impl Grid {
    fn html(&self) -> String {
        let mut html = "<div class=\"scroll\"><table><thead><tr>".to_owned();
        let class = |column: usize| if column < self.texts { "" } else { " class=\"n\"" };
        for (column, head) in self.heads.iter().enumerate() {
            let _ = write!(html, "<th{}>{}</th>", class(column), escape(head));
        }
        html.push_str("</tr></thead><tbody>\n");
        for row in &self.rows {
            html.push_str("<tr>");
            for (column, cell) in row.iter().enumerate() {
                let class = match cell.as_str() {
                    "met" => " class=\"met\"",
                    "missed" => " class=\"missed\"",
                    "not measured" => " class=\"open\"",
                    _ => class(column),
                };
                let _ = write!(html, "<td{class}>{}</td>", escape(cell));
            }
            html.push_str("</tr>\n");
        }
        html + "</tbody></table></div>"
    }

    fn markdown(&self) -> String {
        let line = |cells: &mut dyn Iterator<Item = String>| format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
        let mut text = line(&mut self.heads.iter().map(|head| plain(head)));
        text += &line(&mut (0..self.heads.len()).map(|at| if at < self.texts { "---" } else { "---:" }.to_owned()));
        for row in &self.rows {
            text += &line(&mut row.iter().map(|cell| plain(cell)));
        }
        text.truncate(text.trim_end().len());
        text
    }
}

/// Text without meaning as Markdown: names can be anything.
fn plain(text: &str) -> String {
    let text = pagefold_text::escape::printable(text.as_bytes());
    let mut plain = String::with_capacity(text.len());
    for letter in text.chars() {
        if "\\`*_[]<>|#".contains(letter) {
            plain.push('\\');
        }
        plain.push(letter);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let rows = vec![["<b>|".to_owned(), "missed".to_owned()], ["x".to_owned(), "1".to_owned()]];
        Document {
            title: "a & b".to_owned(),
            blocks: vec![
                Block::Heading("<h>".to_owned()),
                Block::Text("one\ntwo".to_owned()),
                Grid::block(1, ["name", "value"], rows),
                Block::Picture("<svg></svg>".to_owned()),
            ],
        }
    }

    #[test]
    fn long_tables_are_folded() {
        let grid = |count: usize| Grid::new(1, ["name", "value"], vec![["x", "1"].map(str::to_owned); count]);
        let document = |count| Document { title: String::new(), blocks: vec![Block::Folded("figures", grid(count))] };
        assert!(document(2).html().contains("<details><summary>figures (2)</summary>"));
        assert_eq!(document(LONG).markdown().matches("| x | 1 |").count(), LONG);
        let text = document(LONG + 1).markdown();
        assert!(text.contains("figures: 31, which the JSON has.") && !text.contains("| x |"), "{text}");
    }

    #[test]
    fn texts_stay_texts() {
        let html = document().html();
        for part in [
            "<h1>a &amp; b</h1>",
            "<h2>&lt;h&gt;</h2>",
            "<td>&lt;b&gt;|</td><td class=\"missed\">missed</td>",
            "<td class=\"n\">1</td>",
            "<svg></svg>",
            "default-src 'none'",
        ] {
            assert!(html.contains(part), "{part} in {html}");
        }
        let text = document().markdown();
        assert_eq!(
            text,
            "# a & b\n\n## \\<h\\>\n\none\\ntwo\n\n| name | value |\n| --- | ---: |\n| \\<b\\>\\| | missed |\n| x | 1 |\n"
                .replace("one\\ntwo", "one\\\\ntwo")
        );
    }
}
