//! The subcommands: one module each, with its arguments and a function that returns the exit code.

pub mod complete;
pub mod config;
pub mod control;
pub mod doctor;
pub mod enable;
pub mod examples;
pub mod exec;
pub mod explain;
pub mod history;
pub mod include;
pub mod run;
pub mod scan;
pub mod sketch;
pub mod status;
pub mod top;
pub mod unmerge;
