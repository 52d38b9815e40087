//! Places merged pages on a machine with several memory nodes.

pub mod inventory;
pub mod placer;
pub mod policy;
