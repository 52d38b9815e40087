//! The settings of a run: command line, configuration files, defaults.

pub mod args;
pub mod ownership;
pub mod settings;
