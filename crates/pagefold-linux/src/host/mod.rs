//! The live machine behind the core's interface: what is in scope as regions, samples of them, marks and moves.

pub mod live;
pub mod regions;
mod restless;
mod sampling;
pub mod targets;
