//! The settings of a run: command line, configuration files, defaults.

pub mod args;
pub mod config_file;
pub mod enabled;
pub mod flags;
pub mod options;
pub mod ownership;
#[cfg(test)]
mod reference;
pub mod scope;
pub mod settings;
pub mod values;
