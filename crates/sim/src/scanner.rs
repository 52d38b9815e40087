//! Kernel scanners other than ksmd, for simulations that compare algorithms.

use crate::comparisons::SearchCounts;
use crate::memory::Memory;
use std::fmt::Debug;

/// A scanner that merges pages instead of ksmd.
pub trait Scanner: Debug + Send {
    /// Runs until `until_ns`. A page that was begun before then is completed.
    fn run_until(&mut self, memory: &mut Memory, until_ns: u64);

    fn region_gone(&mut self, key: u32);

    fn cpu_ns(&self) -> u64;

    fn scanned(&self) -> u64;

    fn counts(&self) -> SearchCounts;
}
