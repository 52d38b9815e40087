//! Kernel scanners other than ksmd, for simulations that compare algorithms.

use crate::comparisons::SearchCounts;
use crate::memory::Memory;
use std::fmt::Debug;

/// A scanner that merges pages instead of ksmd.
pub trait Scanner: Debug + Send {
    /// Runs until `until_ns`. A page that was begun before then is completed.
    fn run_until(&mut self, memory: &mut Memory, until_ns: u64);

    /// Forgets an unmapped region.
    fn region_gone(&mut self, key: u32);

    /// CPU time spent so far.
    fn cpu_ns(&self) -> u64;

    /// Pages scanned so far.
    fn scanned(&self) -> u64;

    /// Comparisons so far.
    fn counts(&self) -> SearchCounts;
}
