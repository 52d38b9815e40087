//! The settings of the simulated machine: KSM's own, and how forthcoming its processes are.

use pagefold_core::units::Permyriad;

/// How ksmd's trees are divided: into which a page goes. Pages in different trees never meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Forest {
    /// A stable and an unstable tree; with `merge_across_nodes` off, of each memory node.
    #[default]
    Kernel,
    /// By the page's checksum modulo the number of trees (nuKSM, section 4.3).
    Checksum {
        /// How many.
        trees: u16,
    },
    /// By class (CMD, section 3).
    Classes(Classes),
}

/// What classes are made by (CMD, section 3.3; the settings are those of section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Classes {
    /// Eight equal ranges of addresses.
    Address,
    /// Writes to the page, in sixteen steps.
    PageCount,
    /// Which of its four quarters were written.
    SubPages,
}

impl Forest {
    /// How many trees of each kind there are at least.
    pub(crate) fn trees(self) -> usize {
        match self {
            Self::Kernel => 1,
            Self::Checksum { trees } => usize::from(trees.max(1)),
            Self::Classes(Classes::Address) => 8,
            Self::Classes(Classes::PageCount | Classes::SubPages) => 16,
        }
    }
}

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
    /// How ksmd's trees are divided.
    pub forest: Forest,
    /// All that is mapped is marked at once, as by `prctl(PR_SET_MEMORY_MERGE)`.
    pub merge_any: bool,
    /// The share of processes that cannot be stopped at the moment, each time anew.
    pub busy: Permyriad,
    /// How long a count of resident pages is kept.
    pub resident_age_ns: u64,
    /// Pages that one simulated page stands for: neighbours with the same fate. A power of two. What is given to the
    /// simulator (mappings, nodes, scripts) and what pagefold sees is in simulated pages; what is done to all of a granularity
    /// costs as many times, and what is counted is counted in pages. Only rates of scanning are given in pages.
    pub granularity: u32,
}

impl Knobs {
    /// As pagefold sets them on a live machine.
    pub fn driven() -> Self {
        Self { use_zero_pages: true, max_page_sharing: 4_096, ..Self::default() }
    }
}

impl Default for Knobs {
    /// The kernel's defaults; nobody ever busy.
    fn default() -> Self {
        Self {
            use_zero_pages: false,
            smart_scan: true,
            max_page_sharing: 256,
            merge_across_nodes: true,
            forest: Forest::Kernel,
            merge_any: false,
            busy: Permyriad(0),
            resident_age_ns: 5_000_000_000,
            granularity: 1,
        }
    }
}
