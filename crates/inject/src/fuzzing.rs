//! Makes private parsers public for `pagefold-fuzz`, which checks their properties.

pub use crate::thread::{Activity, fitness};
pub use crate::worker::{Reply, Request, reply_limit};

/// The address ranges of executable mappings, the vDSO first.
pub fn executable(maps: &[u8]) -> Vec<(u64, u64)> {
    crate::gadget::executable(maps).iter().map(|code| (code.start, code.end)).collect()
}
