//! The settings of the simulated machine, KSM's among them.

use pagefold_engine::host::Mechanism;
use pagefold_engine::units::Permyriad;

/// How ksmd's trees are divided. ksmd never compares pages in different trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Forest {
    /// One stable and one unstable tree, or one pair per memory node if `merge_across_nodes` is off.
    #[default]
    Kernel,
    /// A pair of trees for each value of the page's checksum modulo the number of trees (nuKSM, section 4.3).
    Checksum { trees: u16 },
    /// A pair of trees for each class of pages (CMD, section 3).
    Classes(Classes),
}

/// How pages are classified (CMD, section 3.3, with the settings of section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Classes {
    /// The class is one of eight equal ranges of physical addresses.
    Address,
    /// The class is the number of writes to the page, in sixteen steps.
    PageCount,
    /// The class is the set of the page's four quarters that were written.
    SubPages,
}

impl Forest {
    /// The smallest number of tree pairs.
    pub(crate) fn trees(self) -> usize {
        match self {
            Self::Kernel => 1,
            Self::Checksum { trees } => usize::from(trees.max(1)),
            Self::Classes(Classes::Address) => 8,
            Self::Classes(Classes::PageCount | Classes::SubPages) => 16,
        }
    }
}

/// How many contents have the same hash unless we hash many cache lines. By default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alike {
    /// The share of such contents.
    pub share: Permyriad,
    /// How many groups they're in. Contents of a group have the same hash.
    pub groups: u64,
    /// If we hash at least this many lines, their hashes differ.
    pub distinct_from: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knobs {
    pub use_zero_pages: bool,
    pub smart_scan: bool,
    pub max_page_sharing: u32,
    pub merge_across_nodes: bool,
    pub forest: Forest,
    /// Marks every new mapping at once, as `prctl(PR_SET_MEMORY_MERGE)` does.
    pub merge_any: bool,
    /// How pagefold merges pages. With [`Mechanism::Request`] the kernel has `/dev/ksm`, and ksmd may run as well.
    pub mechanism: Mechanism,
    /// Contents that have the same hash although they differ.
    pub alike: Alike,
    /// The probability that we can't stop a process, at each attempt. On request, the probability that a page is in
    /// use.
    pub busy: Permyriad,
    /// The probability that reading a mapping takes so long that we skip the rest of the plan. On request, also that
    /// merging a range takes so long that pagefold gives up waiting for the result.
    pub late: Permyriad,
    /// Whether the kernel shows that a page which only one process still maps was merged.
    pub shows_lone: bool,
    /// How long a count of resident pages remains valid.
    pub resident_age_ns: u64,
    /// How many real pages one simulated page stands for: a power of two.
    ///
    /// What we give to the simulator (mappings, nodes, scripts) and what pagefold sees is in simulated pages. Costs,
    /// counters and scan rates are in real pages.
    pub granularity: u32,
}

impl Knobs {
    /// The settings that pagefold uses on a live machine.
    pub fn driven() -> Self {
        Self { use_zero_pages: true, max_page_sharing: 4_096, ..Self::default() }
    }

    /// The kernel's defaults, on a kernel that merges on request and hashes pages in place. There pagefold changes no
    /// settings.
    pub fn requested() -> Self {
        Self { mechanism: Mechanism::Request, ..Self::default() }
    }
}

impl Default for Knobs {
    /// The kernel's defaults. No process is ever busy.
    fn default() -> Self {
        Self {
            use_zero_pages: false,
            smart_scan: true,
            max_page_sharing: 256,
            merge_across_nodes: true,
            forest: Forest::Kernel,
            merge_any: false,
            mechanism: Mechanism::Ksmd,
            alike: Alike::default(),
            busy: Permyriad(0),
            late: Permyriad(0),
            shows_lone: true,
            resident_age_ns: 5_000_000_000,
            granularity: 1,
        }
    }
}
