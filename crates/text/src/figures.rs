//! Prints large counts and times, and wraps text.

/// A count with thousands separators: `1,204`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A time, rounded to about two digits: `2.3 s`, `52 min`, `3 h 10 min`.
pub fn time(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; saturates")]
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        _ if seconds > 0.0 && seconds < 0.95e-3 => format!("{:.0} us", seconds * 1e6),
        _ if seconds < 0.95 => format!("{:.0} ms", seconds.max(0.0) * 1e3),
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..=119 => format!("{whole} s"),
        120..=7_199 => format!("{} min", (whole + 30) / 60),
        7_200..=172_799 => pair(whole / 3_600, "h", whole % 3_600 / 60, "min"),
        _ => pair(whole / 86_400, "d", whole % 86_400 / 3_600, "h"),
    }
}

/// A time in two units, or in one if the smaller part is 0.
fn pair(large: u64, unit: &str, small: u64, part: &str) -> String {
    if small == 0 { format!("{large} {unit}") } else { format!("{large} {unit} {small} {part}") }
}

/// The units that we print after a number.
const UNITS: [&str; 12] = ["B", "KiB", "MiB", "GiB", "TiB", "%", "us", "ms", "s", "min", "h", "d"];

/// Splits a text into words, but keeps a number and its unit together (`4 MiB`).
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let unit = word.trim_end_matches([',', ';', ':', '.', ')']);
        match words.last_mut() {
            Some(last) if last.ends_with(|c: char| c.is_ascii_digit()) && UNITS.contains(&unit) => {
                last.push(' ');
                last.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

/// Text broken into lines of at most `width` characters, between words, but not between a number and its unit.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut length = 0;
    for word in words(text) {
        let more = word.chars().count();
        match lines.last_mut() {
            Some(line) if length + 1 + more <= width => {
                line.push(' ');
                line.push_str(&word);
                length += 1 + more;
            }
            _ => {
                lines.push(word);
                length = more;
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1_204, "1,204"), (12_345_678, "12,345,678")] {
            assert_eq!(thousands(number), text);
        }
    }

    #[test]
    fn times_are_rounded() {
        for (seconds, text) in [
            (0.0, "0 ms"),
            (0.000_371, "371 us"),
            (0.036_716, "37 ms"),
            (2.34, "2.3 s"),
            (59.6, "60 s"),
            (119.0, "119 s"),
            (3_120.0, "52 min"),
            (7_199.0, "120 min"),
            (7_200.0, "2 h"),
            (11_400.0, "3 h 10 min"),
            (180_000.0, "2 d 2 h"),
            (f64::INFINITY, "213503982334601 d 7 h"),
        ] {
            assert_eq!(time(seconds), text, "{seconds}");
        }
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("immeasurable", 3), ["immeasurable"]);
        assert_eq!(wrap("up 118 s, at 20 %: 3 sheep", 9), ["up 118 s,", "at 20 %:", "3 sheep"]);
        assert!(wrap(" ", 5).is_empty());
    }
}
