//! Experiments that compare pagefold with plain KSM and with an oracle, on programs that we start. Compare the ratios
//! within one run; absolute times depend on the machine.

pub mod clients;
pub(crate) mod daemon;
pub mod experiment;
pub mod frames;
pub mod guest;
pub mod load;
mod marks;
mod oracle;
mod page_tables;
pub mod plan;
mod policy;
pub mod sampler;
mod sampling;
mod sysfs;
pub mod table;

pub use pagefold_report::{events, latencies, measures, metric, report, results};
