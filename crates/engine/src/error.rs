//! Errors in settings.

use thiserror::Error;

/// A setting that is not permitted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// No setting of its kind has that name.
    #[error("there is no {noun} '{}'; choose {}", .name.escape_debug(), alternatives(.known))]
    NoName {
        /// The kind.
        noun: &'static str,
        /// The name that was given.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// No amount of memory is written so.
    #[error("'{}' is not an amount of memory; give auto, a size such as 2G, or a share such as 10%", .0.escape_debug())]
    NoAmount(String),
    /// A number outside its range.
    #[error("{name} is {value}; it must be from {low} to {high}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// The value, with its unit.
        value: String,
        /// The lowest permitted value.
        low: String,
        /// The highest permitted value.
        high: String,
    },
}

/// Names as in "full, medium or low".
fn alternatives(names: &[&str]) -> String {
    match names {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        names => names.concat(),
    }
}
