//! Experiments that compare pagefold with plain KSM and with an oracle, on programs started for the purpose. Compare the
//! ratios within one run; absolute times depend on the machine.

mod chart;
pub mod claims;
pub mod clients;
pub(crate) mod daemon;
pub mod density;
mod document;
pub mod events;
pub mod experiment;
pub mod frames;
pub mod guest;
pub mod latencies;
pub mod load;
mod measures;
mod oracle;
mod page_tables;
pub mod plan;
pub mod plot;
mod policy;
pub mod report;
pub mod results;
pub mod sampler;
mod sampling;
pub mod summary;
mod sysfs;
pub mod table;
