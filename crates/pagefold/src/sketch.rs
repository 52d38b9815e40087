//! Sketches of what the workloads of this host hold, for the fleet: [`Keeper`] reads, [`Writer`] writes the file.
//!
//! A workload is read whole, in portions, before the next one is: so there is one table of contents at a time, and of each other
//! workload only its row. Contents leave the reading thread as digests under the fleet's key.

mod keeper;
mod reading;
mod settings;
mod workloads;
mod writer;

pub use keeper::{Keeper, Now};
pub use settings::FleetSettings;
pub use writer::{Writer, put};
