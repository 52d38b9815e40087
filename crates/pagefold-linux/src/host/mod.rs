//! The live machine behind the core's `Host` interface: targets and their regions, samples, marks and moves.

mod huge_mappings;
pub mod identity;
pub mod live;
pub mod regions;
mod restless;
mod sampling;
pub mod targets;
pub mod unmerger;
