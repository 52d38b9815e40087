//! How much memory merging could save: a census of pages, complete or sampled.
//!
//! **Savable** are the frames in scope less the contents they hold: of `m` frames with one content we can free `m - 1`.
//! We can free all zero pages (the kernel's zero page replaces them), and all frames with a content that a merged page
//! holds already. A frame that several processes share through fork counts once, and if they're too many to merge it,
//! it counts as different from all others. If a process that we don't merge maps it, too, we don't read it at all.
//!
//! **Attribution.** Each of `m` equal frames saves `(m-1)/m`. If `h` mappings share a frame, each gets `1/h` of it. So
//! the figures of processes, kinds and cgroups add up to the total and don't depend on the order of reading. The `c`
//! copies within a process would save `c - 1` by themselves. We call that duplicate within, and the rest duplicate
//! across.
//!
//! **Cost.** KSM keeps 64 bytes for each marked page and for each shared content. If a process's memory of one kind
//! saves more than that in total, we count all of it as marked. Otherwise we count none of it as marked, and nothing as
//! saved.
//!
//! **Sampling.** We choose runs of neighbouring pages independently ([`choose`]). We count copies within a run exactly.
//! Beyond that the unit is a run that holds a content, and [`mixture`] estimates how many runs hold it in total. For
//! the error we leave out groups of runs in turn (the delete-a-group jackknife), because the pages of a run are found,
//! or missed, together. The error is at least the saving that so small a sample could miss.

pub mod choose;
mod counts;
mod mixture;
#[cfg(test)]
mod tests;

use crate::hash::Digest;
use crate::random::mix;
use crate::region::RELATIVES_MOST;
use crate::units::{PAGE_SIZE, Pages, index, whole};
use serde::{Serialize, Serializer};
use std::ops::AddAssign;

/// Pages per run in a sampled census. In shorter runs each page costs more and tells us more: in runs of 4 a page costs
/// 1.4 times as much as in runs of 16, but we need half as many pages for the same error.
pub const RUN_PAGES: u32 = 4;

/// The target error: two per cent of the memory in scope, at 95 % confidence.
pub const TARGET_ERROR: f64 = 0.02;

/// One process's memory of one kind, as we know it before we read its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cell {
    /// The process's number. Cells must be in ascending order of process.
    pub process: u32,
    /// Frames that only this process maps.
    pub private: Pages,
    /// Pages shared through fork.
    pub shared: Pages,
    /// Frames of the shared pages, each divided by the number of its mappings.
    pub shared_frames: f64,
    /// Frames of shared pages that are also mapped by processes that we don't merge, which would keep them. Each is
    /// divided by the number of its mappings, and isn't in `shared_frames`.
    pub kept_frames: f64,
    /// Pages merged already.
    pub merged: Pages,
    /// Frames of the merged pages, each divided by the number of its mappings in scope.
    pub merged_frames: f64,
    /// Pages in swap.
    pub swapped: Pages,
}

impl Cell {
    /// The frames that the cell holds, without merged ones.
    fn held(&self) -> f64 {
        self.private.0 as f64 + self.shared_frames
    }
}

/// A mapping of a frame that we've read.
#[derive(Clone, Copy, Debug)]
struct ReadPage {
    digest: u64,
    cell: u32,
    run: u32,
    /// How many mappings share the frame.
    mappings: u32,
}

/// Collects pages and estimates how much merging them would save.
#[derive(Debug)]
pub struct Census {
    cells: Vec<Cell>,
    pages: Vec<ReadPage>,
    merged: Vec<u64>,
    /// How many frames have more than [`RELATIVES_MOST`] mappings.
    crowded: u64,
}

/// Defines the figures with their sum and their JSON form.
macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident, $key:literal;)*) => {
        /// Figures of a cell, or of a sum of cells, in pages. In JSON, bytes.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
        pub struct Figures {
            $($(#[$doc])* #[serde(rename = $key, serialize_with = "as_bytes")] pub $name: f64,)*
        }

        impl AddAssign for Figures {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

figures! {
    /// Frames, each divided by the number of its mappings. Percentages refer to this.
    resident, "resident_bytes";
    /// Anonymous pages mapped; a shared frame counts once per mapping.
    anonymous, "anonymous_bytes";
    /// All-zero pages.
    zero, "zero_bytes";
    /// Savable by merging the process's own copies.
    duplicate_within, "duplicate_within_bytes";
    /// Savable beyond that, by merging with other processes' copies and with merged pages.
    duplicate_across, "duplicate_across_bytes";
    /// Pages merged already.
    merged, "merged_bytes";
    /// Pages shared through fork.
    fork_shared, "fork_shared_bytes";
    /// Pages in swap.
    swapped, "swapped_bytes";
    /// Savable, before metadata and including memory that is not worth marking.
    savable_gross, "savable_gross_bytes";
    /// Savable in memory worth marking, less the metadata.
    savable, "savable_bytes";
    /// Metadata for memory worth marking.
    metadata, "metadata_bytes";
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn as_bytes<S: Serializer>(pages: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    bytes_of(*pages).serialize(serializer)
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// The figures of each cell, in order.
    pub cells: Vec<Figures>,
    pub total: Figures,
    /// The error of the total `savable_gross`, pages (95 % confidence). Zero if we've read everything.
    pub error: f64,
}

impl Findings {
    /// The error as a share of the memory in scope.
    pub fn relative_error(&self) -> f64 {
        self.error / self.total.resident.max(1.0)
    }
}

impl Census {
    pub fn new(cells: Vec<Cell>) -> Self {
        Self { cells, pages: Vec::new(), merged: Vec::new(), crowded: 0 }
    }

    /// Adds a merged page's content.
    pub fn add_merged(&mut self, digest: Digest) {
        self.merged.push(digest.0);
    }

    /// Adds a frame that only one process maps.
    pub fn add_private(&mut self, cell: u32, run: u32, digest: Digest) {
        self.pages.push(ReadPage { digest: digest.0, cell, run, mappings: 1 });
    }

    /// Adds a frame shared through fork, with the cell of each of its mappings.
    pub fn add_shared(&mut self, cells: &[u32], run: u32, digest: Digest) {
        let mappings = u32::try_from(cells.len()).unwrap_or(u32::MAX);
        let mut digest = digest.0;
        if u64::from(mappings) > RELATIVES_MOST {
            self.crowded += 1;
            digest = mix(!self.crowded);
        }
        self.pages.extend(cells.iter().map(|&cell| ReadPage { digest, cell, run, mappings }));
    }

    /// Removes a process that has just ended.
    pub fn remove_process(&mut self, process: u32) {
        let cells: Vec<bool> = self.cells.iter().map(|cell| cell.process == process).collect();
        self.remove_cells(&cells);
    }

    /// Empties the cells for which `removed` is true.
    pub fn remove_cells(&mut self, removed: &[bool]) {
        self.pages.retain(|page| !removed[index(page.cell)]);
        for (cell, &removed) in self.cells.iter_mut().zip(removed) {
            if removed {
                *cell = Cell { process: cell.process, ..Cell::default() };
            }
        }
    }

    /// The findings, if each run was read with the probability `fraction` (1 if we've read everything).
    pub fn findings(&mut self, fraction: f64) -> Findings {
        self.merged.sort_unstable();
        self.merged.dedup();
        self.pages.sort_unstable_by_key(|page| (page.digest, page.cell, page.run));
        let counts = counts::CensusCounts::of(&self.cells, &self.pages, &self.merged, fraction);
        counts.findings(&self.cells, fraction)
    }
}

/// The bytes of this many pages, rounded. 0 if negative.
pub fn bytes_of(pages: f64) -> u64 {
    whole((pages * PAGE_SIZE as f64).round())
}
