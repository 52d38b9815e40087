//! What is wrong with a setting.

use thiserror::Error;

/// A setting outside its range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// No governor has that name.
    #[error("there is no governor '{}'; choose full, medium, low, quiet or auto", .0.escape_debug())]
    NoGovernor(String),
    /// No preset has that name.
    #[error("there is no preset '{}'; choose default or sensitive", .0.escape_debug())]
    NoPreset(String),
    /// No placement policy has that name.
    #[error("there is no placement '{}'; choose fair, priority, local-only or kernel", .0.escape_debug())]
    NoPlacement(String),
    /// A number outside its range.
    #[error("{name} is {value}; it must be from {low} to {high}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// What was asked, with its unit.
        value: String,
        /// The least permitted.
        low: String,
        /// The most permitted.
        high: String,
    },
}
