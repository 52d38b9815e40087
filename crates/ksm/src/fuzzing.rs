//! Exposes private parsers to `pagefold-fuzz`, which states their properties.

use crate::{ksmd, plain};
use pagefold_procmem::os::fields;
use std::str::FromStr;

/// Parses the number in a counter or knob of sysfs.
pub fn ksm_number<T: FromStr>(text: &[u8]) -> Option<T> {
    plain(text)?.parse().ok()
}

/// Parses the selected word of a file in sysfs that lists alternatives.
pub fn ksm_choice(text: &[u8]) -> Option<&str> {
    fields::chosen(plain(text)?)
}

pub fn cow_ksm(vmstat: &str) -> u64 {
    crate::cow_ksm(vmstat)
}

pub fn schedstat(text: &[u8]) -> Option<u64> {
    ksmd::parse_schedstat(text)
}
