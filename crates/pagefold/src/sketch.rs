//! Sketches of what this host's workloads hold, for the fleet: [`Keeper`] reads, [`Writer`] writes the file.
//!
//! We read a whole workload, in portions, before we begin the next. So we keep one table of contents at a time, and
//! only a row for each other workload. Contents leave the reading thread as digests under the fleet's key.

mod keeper;
mod reading;
mod settings;
mod workloads;
mod writer;

pub use keeper::{Keeper, Now};
pub use settings::FleetSettings;
pub use writer::{Writer, put};
