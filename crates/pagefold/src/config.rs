//! The settings of a run: command line, configuration files, defaults.

pub mod file;
pub mod judgement_args;
pub mod ownership;
pub mod scope_args;
pub mod settings;
