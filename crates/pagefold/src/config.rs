//! The settings of a run: command line, configuration files, defaults.

pub mod file;
pub mod judgement_args;
pub mod ownership;
pub mod settings;

pub use pagefold_cli::scope as scope_args;
