//! Web pages: the frame, escaping, and how they are written.
//!
//! A page is one file. Its policy lets the browser load nothing and run no script, whatever a name contains.

use crate::escape::printable;
use crate::regular;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// The whole page: its title, its style sheet, and what is in it.
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

/// Escapes a text: programs, files and cgroups can have any name.
pub fn escape(text: &str) -> String {
    let text = printable(text.as_bytes());
    let entity = |letter| match letter {
        '&' => "&amp;",
        '<' => "&lt;",
        '>' => "&gt;",
        '"' => "&quot;",
        '\'' => "&#39;",
        _ => "",
    };
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match entity(letter) {
            "" => safe.push(letter),
            entity => safe.push_str(entity),
        }
    }
    safe
}

/// Writes a page to a file, which may be there already.
///
/// # Errors
/// It cannot be written, or is a link, which another user may have put there.
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
