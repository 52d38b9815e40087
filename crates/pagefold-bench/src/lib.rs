//! Workloads and experiments: pagefold beside KSM left to itself and beside an oracle, on programs started for the
//! purpose, on the machine at hand. Ratios of one run count; absolute times belong to the machine.
#![forbid(unsafe_code)]

mod args;
mod chart;
mod contents;
mod daemon;
pub mod experiment;
mod interrupt;
mod live;
pub mod marking;
mod oracle;
mod page_tables;
pub mod plot;
mod policy;
pub mod programs;
pub mod record;
mod sampler;
mod steering;
mod table;
mod tenant;
mod tenant_main;

pub use args::{BenchArgs, main};
pub use interrupt::Interrupt;
pub use live::{Counters, Life, Live};
pub use steering::Steering;
pub use tenant::{Segment, Tenant, TenantSpec, Verdict};
pub use tenant_main::tenant_main;
