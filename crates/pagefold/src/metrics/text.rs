//! The text format of Prometheus, version 0.0.4.

use std::fmt::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at the start of the run.
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Appended to the metric's name, such as `_bucket`.
    pub suffix: &'static str,
    pub labels: Vec<(&'static str, String)>,
    pub value: f64,
}

/// Appends a metric with its values.
pub fn append(text: &mut String, name: &str, kind: Kind, help: &str, samples: &[Sample]) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {}", escaped(help, false), kind.name());
    for Sample { suffix, labels, value } in samples {
        let labels: Vec<String> =
            labels.iter().map(|(label, of)| format!("{label}=\"{}\"", escaped(of, true))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(text, "{name}{suffix}{labels} {}", number(*value));
    }
}

fn escaped(text: &str, quoted: bool) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\\\"),
            '\n' => escaped.push_str("\\n"),
            '"' if quoted => escaped.push_str("\\\""),
            c => escaped.push(c),
        }
    }
    escaped
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_help_are_escaped() {
        let sample = |suffix, labels, value| Sample { suffix, labels, value };
        let mut text = String::new();
        let label = vec![("a", "x\"y\\z\n{}=,#é".to_owned()), ("b", String::new())];
        append(
            &mut text,
            "m",
            Kind::Gauge,
            "One \"line\"\nof \\ help",
            &[sample("", label, -0.5), sample("_x", Vec::new(), 3.0)],
        );
        assert_eq!(
            text,
            "# HELP m One \"line\"\\nof \\\\ help\n# TYPE m gauge\nm{a=\"x\\\"y\\\\z\\n{}=,#é\",b=\"\"} -0.5\nm_x 3\n"
        );
    }

    #[test]
    fn numbers_are_written_out() {
        let written = [0.0, 0.000_025, 1e18, f64::INFINITY, f64::NEG_INFINITY, f64::NAN].map(number);
        assert_eq!(written, ["0", "0.000025", "1000000000000000000", "+Inf", "-Inf", "NaN"]);
    }
}
