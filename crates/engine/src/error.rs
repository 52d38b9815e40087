//! Errors in settings.

use thiserror::Error;

/// A setting that is not permitted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// No governor has that name.
    #[error("there is no governor '{}'; choose full, medium, low, quiet or auto", .0.escape_debug())]
    NoGovernor(String),
    /// No preset has that name.
    #[error("there is no preset '{}'; choose default or sensitive", .0.escape_debug())]
    NoPreset(String),
    /// No contents have that name.
    #[error("there is no choice '{}' of contents; choose all or zeros", .0.escape_debug())]
    NoContents(String),
    /// No amount of memory is written so.
    #[error("'{}' is not an amount of memory; give auto, a size such as 2G, or a share such as 10%", .0.escape_debug())]
    NoAmount(String),
    /// No placement policy has that name.
    #[error("there is no placement '{}'; choose fair, priority, local-only or kernel", .0.escape_debug())]
    NoPlacement(String),
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
