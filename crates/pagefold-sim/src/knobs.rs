//! The settings of the simulated machine: KSM's own, and how forthcoming its processes are.

use pagefold_core::units::Permyriad;

/// How the machine is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "switches that have nothing to do with each other")]
pub struct Knobs {
    /// KSM's `use_zero_pages`.
    pub use_zero_pages: bool,
    /// KSM's `smart_scan`.
    pub smart_scan: bool,
    /// KSM's `max_page_sharing`.
    pub max_page_sharing: u32,
    /// KSM's `merge_across_nodes`.
    pub merge_across_nodes: bool,
    /// Whether merged and fork-shared pages are read too (at the price of a private one).
    pub read_merged: bool,
    /// The share of processes that cannot be stopped at the moment, each time anew.
    pub busy: Permyriad,
    /// How long a count of resident pages is kept.
    pub resident_age_ns: u64,
}

impl Default for Knobs {
    /// The kernel's defaults; nobody ever busy.
    fn default() -> Self {
        Self {
            use_zero_pages: false,
            smart_scan: true,
            max_page_sharing: 256,
            merge_across_nodes: true,
            read_merged: true,
            busy: Permyriad(0),
            resident_age_ns: 5_000_000_000,
        }
    }
}
