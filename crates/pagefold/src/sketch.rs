//! Sketches of the memory of this host's workloads, for the fleet: [`Keeper`] reads memory, [`Writer`] writes the file.
//!
//! We read a whole workload, in portions, before we begin the next one. So we only need one table of page digests at a
//! time, and a finished row for each other workload. Page contents leave the reading thread only as digests under the
//! fleet's key.

mod keeper;
mod reading;
mod settings;
mod workloads;
mod writer;

pub use keeper::{Keeper, Now};
pub use settings::FleetSettings;
pub use writer::{Writer, put};
