//! Experiments: pagefold beside KSM left to itself and beside an oracle, on programs started for the purpose, on the
//! machine at hand. The ratios within one run count; absolute times belong to the machine.

mod chart;
mod daemon;
pub mod experiment;
mod oracle;
mod page_tables;
pub mod plot;
mod policy;
pub mod report;
mod sampler;
pub mod table;
