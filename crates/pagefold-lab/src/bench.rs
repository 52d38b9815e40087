//! Experiments that compare pagefold with plain KSM and with an oracle, on programs started for the purpose. Compare the
//! ratios within one run; absolute times depend on the machine.

mod chart;
mod daemon;
pub mod experiment;
pub mod guest;
pub mod load;
mod oracle;
mod page_tables;
pub mod plot;
mod policy;
pub mod report;
mod sampler;
mod sampling;
pub mod table;
