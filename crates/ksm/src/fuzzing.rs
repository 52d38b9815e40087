//! Private parsers, exposed for the crate `pagefold-fuzz` only, which states their properties.

use crate::{ksmd, plain};
use pagefold_procmem::os::fields;
use std::str::FromStr;

/// The number in a counter or knob in sysfs.
pub fn ksm_number<T: FromStr>(text: &[u8]) -> Option<T> {
    plain(text)?.parse().ok()
}

/// The selected word in a file in sysfs that lists alternatives.
pub fn ksm_choice(text: &[u8]) -> Option<&str> {
    fields::chosen(plain(text)?)
}

pub fn cow_ksm(vmstat: &str) -> u64 {
    crate::cow_ksm(vmstat)
}

pub fn schedstat(text: &[u8]) -> Option<u64> {
    ksmd::parse_schedstat(text)
}
