//! Workloads and experiments: pagefold beside KSM left to itself and beside an oracle, on programs started for the
//! purpose, on the machine at hand. Ratios of one run count; absolute times belong to the machine.
#![forbid(unsafe_code)]

mod args;
mod chart;
mod daemon;
pub mod experiment;
mod oracle;
mod page_tables;
pub mod plot;
mod policy;
pub mod programs;
pub mod record;
mod sampler;
mod table;

pub use args::{BenchArgs, main};
