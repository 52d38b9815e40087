//! The interface between guests and their work.

use super::guest::Guest;
use super::host_memory::HostMemory;
use pagefold_engine::random::Random;
use pagefold_engine::units::Permyriad;

/// The composition of a guest's memory, in shares of it, and the course of its boot.
pub struct Layout {
    pub system: Permyriad,
    /// Pages with content specific to this guest.
    pub own: Permyriad,
    pub slab: Permyriad,
    /// Cleared pages not in use yet.
    pub zeros: Permyriad,
    /// Steps of the work during the boot.
    pub steps: u64,
    /// Maximum shift of steps: 0 for the same order in all guests, 10,000 for the length of the boot.
    pub disorder: Permyriad,
    /// Duration of the work before the record begins, in nanoseconds.
    pub before_ns: u64,
}

pub trait Work {
    fn layout(&self) -> Layout;

    fn boot(&mut self, guest: &mut Guest, machine: &mut HostMemory, step: u64);

    /// Does the work of the `ns` nanoseconds up to `now_ns`.
    fn advance(&mut self, guest: &mut Guest, machine: &mut HostMemory, now_ns: u64, ns: u64);
}

/// A guest's pace: a random number from 900 to 1100, in thousandths of the mean.
pub fn pace(random: &mut Random) -> u64 {
    900 + random.below(201)
}
