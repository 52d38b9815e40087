//! Web pages: builds the whole page around a body, escapes text, and writes the file.
//!
//! A page is one file. Its Content-Security-Policy keeps the browser from loading anything and from running scripts,
//! whatever the names in the page contain.

use crate::escape::printable;
use crate::regular;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// The whole page, from its title, style sheet and body.
pub fn page(title: &str, style: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         base-uri 'none'; form-action 'none'\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{}</title>\
         <style>\n{style}</style></head><body><main>\n{body}</main></body></html>\n",
        escape(title)
    )
}

/// Escapes a text for HTML, since the names of programs, files and cgroups can contain anything.
pub fn escape(text: &str) -> String {
    let text = printable(text.as_bytes());
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// Writes a page to a new or existing file.
///
/// # Errors
/// If we can't write the file, or it's a link, which another user may have put there.
pub fn write(path: &Path, page: &str) -> io::Result<()> {
    let mut file = regular::open(path, OpenOptions::new().write(true).create(true).truncate(false))?;
    file.set_len(0)?;
    file.write_all(page.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text() {
        assert_eq!(escape("<b a=\"&\" c='d'>"), "&lt;b a=&quot;&amp;&quot; c=&#39;d&#39;&gt;");
        assert_eq!(escape("a\u{202e}b\u{1b}[2J\n"), "a\\u{202e}b\\u{1b}[2J\\n");
    }
}
