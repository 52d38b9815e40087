//! Anybody can choose the names of programs, files and cgroups. We make them safe to print, so that a terminal doesn't
//! obey them.

/// Makes untrusted text safe to print: escapes control characters and characters that reorder a line.
pub fn printable(text: &[u8]) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in String::from_utf8_lossy(text).chars() {
        if is_unsafe(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Quotes a printable text as one word of a shell's command line.
pub fn shell_word(text: &str) -> String {
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte)) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Whether a terminal may obey a character, or show its line differently because of it: control characters (C0, DEL and
/// C1), and characters that are invisible (Unicode's Default_Ignorable_Code_Point, and an empty Braille cell) or change
/// the direction of text.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{2800}'
                | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_special_characters_are_quoted_for_the_shell() {
        assert_eq!(shell_word("/opt/a-b_1.2"), "/opt/a-b_1.2");
        assert_eq!(["a b", "mine*", "it's"].map(shell_word), ["'a b'", "'mine*'", "'it'\\''s'"]);
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        assert_eq!(printable(b"a\x1b[2Jb\xff\nc"), "a\\u{1b}[2Jb\u{fffd}\\nc");
        assert_eq!(printable("x\u{202e}y é".as_bytes()), "x\\u{202e}y é");
        for invisible in ['\u{34f}', '\u{115f}', '\u{2800}', '\u{3164}', '\u{fe0f}', '\u{e0101}'] {
            assert_ne!(printable(format!("sshd{invisible}").as_bytes()), format!("sshd{invisible}"));
        }
    }
}
