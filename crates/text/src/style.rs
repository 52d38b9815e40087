//! Text for terminals: sizes, shares, bars, counts, and colour where standard output supports it.
//!
//! Anybody can choose the names of programs, files and cgroups. So all output goes through [`print()`], [`json`] or
//! [`complain`](crate::messages::complain), which escape every character that a terminal may obey.

use crate::escape::is_unsafe;
use crate::figures::wrap;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Whether to colour standard output: it's a terminal that isn't dumb, and `NO_COLOR` isn't set
/// (<https://no-color.org>).
pub fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !unwanted && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[derive(Clone, Copy, Debug)]
pub struct Style {
    on: bool,
}

impl Style {
    /// Uses colour if standard output shows it.
    pub fn of_stdout() -> Self {
        Self { on: colours() }
    }

    pub fn plain_text() -> Self {
        Self { on: false }
    }

    /// For the main figures.
    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// For details.
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// For savings.
    pub fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// For the figures with which we compare ours.
    pub fn other(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// For unchanged memory.
    pub fn plain(self, text: &str) -> String {
        self.wrap("34", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A size with at most three digits and a binary unit: `412 MiB`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // From 999.5 on, the value would be rounded to four digits.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let number = if unit == 0 || value >= 9.95 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{} {}", number.trim_end_matches(".0"), UNITS[unit])
}

/// A share: `34 %`, `1.2 %` below 10 %, `<0.1 %` below 0.1 %.
pub fn percent(part: f64, whole: f64) -> String {
    let share = if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
    match share {
        share if share <= 0.0 => "0 %".to_owned(),
        share if share < 0.1 => "<0.1 %".to_owned(),
        share if share < 9.95 => format!("{share:.1} %"),
        share => format!("{share:.0} %"),
    }
}

/// A bar of `width` columns, filled to `share` (0 to 1) in steps of an eighth of a column.
pub fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 8 times the width")]
    let eighths = (share.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// A count with its noun: `1 process`, `3 processes`.
pub fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Cuts text to `width` columns, the last one an ellipsis if we cut anything.
pub fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut short = String::new();
    let mut columns = 0;
    for c in text.chars() {
        columns += c.width().unwrap_or(0);
        if columns >= width {
            break;
        }
        short.push(c);
    }
    short.push('…');
    short
}

/// Writes to standard output. A closed pipe (`| head`) isn't an error. Escapes characters that a terminal may obey,
/// other than line ends and, on a terminal, the codes of [`Style`]. A name must not contain line ends: see
/// [`printable`](crate::escape::printable).
pub fn print(text: &str) -> io::Result<()> {
    print_on(text).map(drop)
}

/// Like [`print()`], for output without an end. Returns whether anybody still reads it.
pub fn print_on(text: &str) -> io::Result<bool> {
    was_read(write(&visible(text, io::stdout().is_terminal())))
}

/// Like [`print()`], at the end of a daemon: waits at most `limit` for the reader.
///
/// # Errors
/// Also fails if nobody has read the text in time.
pub fn print_within(limit: Duration, text: &str) -> io::Result<()> {
    let text = text.to_owned();
    let (done, written) = channel();
    thread::Builder::new().name("summary".to_owned()).spawn(move || done.send(print(&text)))?;
    match written.recv_timeout(limit) {
        Ok(printed) => printed,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "nobody reads standard output")),
    }
}

/// Writes a text with codes that move the cursor to standard output, unescaped.
pub fn draw(text: &str) -> io::Result<()> {
    was_read(write(text)).map(drop)
}

/// A value as indented JSON with a line end. Escapes characters that a terminal may obey.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(visible_json(&serde_json::to_string_pretty(value)?) + "\n")
}

/// Like [`json`], in one line.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(visible_json(&serde_json::to_string(value)?) + "\n")
}

/// Escapes characters that a terminal may obey in a JSON text. They can only be in its strings.
pub fn visible_json(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character == '\n' || !is_unsafe(character) {
            safe.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(safe, "\\u{unit:04x}");
        }
    }
    safe
}

/// Escapes characters that a terminal may obey, except line ends and, with `coloured`, the codes of [`Style`].
fn visible(text: &str, coloured: bool) -> String {
    let mut safe = String::with_capacity(text.len());
    for (at, character) in text.char_indices() {
        let is_code = coloured && is_colour_code(&text[at..]);
        if character == '\n' || !is_unsafe(character) || is_code {
            safe.push(character);
        } else {
            safe.extend(character.escape_default());
        }
    }
    safe
}

/// Whether a text begins with a code of [`Style`].
fn is_colour_code(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("\x1b[") else { return false };
    rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m')
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// A closed pipe (`| head`) isn't an error.
fn was_read(written: io::Result<()>) -> io::Result<bool> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true),
    }
}

/// Text that we build line by line.
pub trait Lines {
    /// Appends a line, without trailing spaces.
    fn line(&mut self, line: impl AsRef<str>);

    fn blank(&mut self) {
        self.line("");
    }

    /// Appends a text, broken into lines of at most `width` characters.
    fn paragraph(&mut self, text: &str, width: usize) {
        for line in wrap(text, width) {
            self.line(line);
        }
    }
}

impl Lines for String {
    fn line(&mut self, line: impl AsRef<str>) {
        self.push_str(line.as_ref().trim_end());
        self.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1 KiB"),
            (4096, "4 KiB"),
            (1536, "1.5 KiB"),
            (412 << 20, "412 MiB"),
            (1_288_490_189, "1.2 GiB"),
            (1_073_741_823, "1 GiB"),
            (12 << 30, "12 GiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn shares_are_rounded_to_two_digits() {
        assert_eq!(percent(1.0, 3.0), "33 %");
        assert_eq!(percent(1.0, 100.0), "1.0 %");
        assert_eq!(percent(1.0, 1e6), "<0.1 %");
        assert_eq!(percent(0.0, 0.0), "0 %");
    }

    #[test]
    fn bars_fill_in_eighths() {
        assert_eq!(bar(0.0, 4), "");
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(2.0, 4), "████");
        assert_eq!(bar(1.0 / 32.0, 4), "▏");
    }

    #[test]
    fn no_name_reaches_a_terminal_as_it_is() {
        let name = "a\x1b[2J\x1b]0;b\x07\u{9b}31m\u{202e}c\rd\u{e0041}";
        let escaped = "a\\u{1b}[2J\\u{1b}]0;b\\u{7}\\u{9b}31m\\u{202e}c\\rd\\u{e0041}\n";
        for coloured in [false, true] {
            assert_eq!(visible(&format!("{name}\n"), coloured), escaped);
        }
        assert_eq!(visible("\x1b[1;32mä\x1b[0m\n", true), "\x1b[1;32mä\x1b[0m\n");
        assert_eq!(visible("\x1b[1;32mä", false), "\\u{1b}[1;32mä");
        let text = json(&[name]).unwrap();
        assert!(text.chars().all(|character| character == '\n' || !is_unsafe(character)), "{text}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name]);
        let line = json_line(&[name]).unwrap();
        assert!(line.trim_end().chars().all(|character| !is_unsafe(character)) && line.ends_with("]\n"), "{line}");
    }

    #[test]
    fn text_is_cut_by_characters() {
        assert_eq!(shorten("räksmörgås", 5), "räks…");
        assert_eq!(shorten("kort", 5), "kort");
    }
}
