//! Errors in settings.

use thiserror::Error;

/// A setting that isn't permitted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// There's no setting of this kind by that name.
    #[error("there is no {noun} '{}'; choose {}", .name.escape_debug(), alternatives(.known))]
    NoName {
        noun: &'static str,
        /// The name that was given.
        name: String,
        /// The permitted names.
        known: Vec<&'static str>,
    },
    /// The text isn't an amount of memory.
    #[error("'{}' is not an amount of memory; give auto, a size such as 2G, or a share such as 10%", .0.escape_debug())]
    NoAmount(String),
}

/// Joins names as in "full, medium or low".
fn alternatives(names: &[&str]) -> String {
    match names {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        names => names.concat(),
    }
}
