//! What merging could save: a census of pages, whole or sampled.
//!
//! **What is savable.** The frames looked at less the contents they hold: of `m` frames with one content
//! `m - 1` can go. All zero pages can go (the kernel's zero page stands in for them), and all frames whose
//! content a merged page holds already. A frame that several processes share through fork is one frame.
//!
//! **To whom a saving is booked.** Of `m` equal frames each saves `(m-1)/m`, whoever holds it; a frame that
//! `h` mappings share is booked to each by `1/h`. So the bookings of processes, kinds and cgroups add up to the
//! total, and none depends on the order of looking. Within a process, its own `c` copies would save `c - 1`
//! without the others: that is duplicate within; the rest is duplicate across.
//!
//! **What it costs.** KSM keeps 64 bytes for each marked page and for each shared content. The memory of one
//! kind in one process counts as marked, as a whole, where its saving exceeds that; elsewhere nothing is
//! marked and nothing saved.
//!
//! **Sampling.** Runs of neighbouring pages are chosen independently ([`choose`]). Copies inside one run
//! are counted as they are; for the rest the unit is a run holding a content, and [`mixture`] estimates how many
//! runs hold it in all. The error comes from leaving out groups of runs in turn (the delete-a-group jackknife),
//! which takes the neighbourhood of duplicates into account: pages of a run are found, or missed, together. It is
//! never smaller than what could hide unseen where no coincidence at all is to be expected.

pub mod choose;
mod mixture;
mod tally;
#[cfg(test)]
mod tests;

use crate::hash::Digest;
use crate::units::{PAGE_SIZE, Pages};
use std::ops::AddAssign;

/// Pages in a run of a sampled census. Short runs cost more a page to read and tell more: at 4 pages a
/// run costs 1.4 times a page of a run of 16, and the same error takes half as many pages.
pub const RUN_PAGES: u32 = 4;

/// The error to aim at: two per cent of the memory looked at, at 95 % confidence.
pub const TARGET_ERROR: f64 = 0.02;

/// KSM's metadata for each page it scans, and again for each content it shares.
pub const METADATA_BYTES: f64 = 64.0;

/// The memory of one kind in one process: what is known of it before its pages are read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cell {
    /// The process. Cells of one process must be neighbours, by ascending process.
    pub process: u32,
    /// Frames of this process alone.
    pub private: Pages,
    /// Pages shared through fork.
    pub shared: Pages,
    /// The frames these are, each divided by its holders.
    pub shared_frames: f64,
    /// Pages merged already.
    pub merged: Pages,
    /// The frames these are, each divided by its holders in scope.
    pub merged_frames: f64,
    /// Pages in swap.
    pub swapped: Pages,
}

/// A page that was read.
#[derive(Clone, Copy, Debug)]
struct Seen {
    digest: u64,
    cell: u32,
    run: u32,
    /// The mappings among which the frame is divided.
    holders: u32,
}

/// Collects pages and sums them up.
#[derive(Debug)]
pub struct Census {
    cells: Vec<Cell>,
    seen: Vec<Seen>,
    sorted: usize,
    merged: Vec<u64>,
}

/// Figures of a cell, or of any sum of cells. In pages, but for the metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Frames held: shared ones divided by their holders. What percentages refer to.
    pub resident: f64,
    /// Anonymous pages mapped, shared ones counted by each holder.
    pub anonymous: f64,
    /// All-zero pages.
    pub zero: f64,
    /// Savable with the process's own copies alone.
    pub duplicate_within: f64,
    /// Savable beyond that, with the copies of others and with what is merged already.
    pub duplicate_across: f64,
    /// Merged already.
    pub merged: f64,
    /// Shared through fork.
    pub fork_shared: f64,
    /// In swap.
    pub swapped: f64,
    /// Savable, gross.
    pub savable_gross: f64,
    /// Savable in what is worth marking, less the metadata.
    pub savable: f64,
    /// Bytes of metadata for what is worth marking.
    pub metadata_bytes: f64,
}

impl AddAssign for Figures {
    fn add_assign(&mut self, other: Self) {
        self.resident += other.resident;
        self.anonymous += other.anonymous;
        self.zero += other.zero;
        self.duplicate_within += other.duplicate_within;
        self.duplicate_across += other.duplicate_across;
        self.merged += other.merged;
        self.fork_shared += other.fork_shared;
        self.swapped += other.swapped;
        self.savable_gross += other.savable_gross;
        self.savable += other.savable;
        self.metadata_bytes += other.metadata_bytes;
    }
}

/// What a census found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// For each cell, in order.
    pub cells: Vec<Figures>,
    /// All together.
    pub total: Figures,
    /// Pages by which the savable total may be off (95 %); zero when everything was read.
    pub error: f64,
}

impl Findings {
    /// The error as a share of the memory looked at.
    pub fn relative_error(&self) -> f64 {
        self.error / self.total.resident.max(1.0)
    }
}

impl Census {
    /// Begins a census of these cells.
    pub fn new(cells: Vec<Cell>) -> Self {
        Self { cells, seen: Vec::new(), sorted: 0, merged: Vec::new() }
    }

    /// Takes in the content of a merged page.
    pub fn see_merged(&mut self, digest: Digest) {
        self.merged.push(digest.0);
    }

    /// Takes in a frame of one process alone.
    pub fn see(&mut self, cell: u32, run: u32, digest: Digest) {
        self.seen.push(Seen { digest: digest.0, cell, run, holders: 1 });
    }

    /// Takes in a frame shared through fork, with the cells that hold it (one entry for each mapping).
    pub fn see_shared(&mut self, cells: &[u32], run: u32, digest: Digest) {
        let holders = u32::try_from(cells.len()).unwrap_or(u32::MAX);
        self.seen.extend(cells.iter().map(|&cell| Seen { digest: digest.0, cell, run, holders }));
    }

    /// Takes a process out again that has ended meanwhile.
    pub fn leave_out(&mut self, process: u32) {
        let cells = &mut self.cells;
        self.seen.retain(|seen| cells[seen.cell as usize].process != process);
        // What is left keeps its order; how much of it was in order is no longer known.
        self.sorted = 0;
        for cell in cells.iter_mut().filter(|cell| cell.process == process) {
            *cell = Cell { process, ..Cell::default() };
        }
    }

    /// Sums up what was read with the chance `fraction` for each run; everything, when that is 1.
    pub fn findings(&mut self, fraction: f64) -> Findings {
        self.merged.sort_unstable();
        self.merged.dedup();
        if self.sorted < self.seen.len() {
            self.seen.sort_unstable_by_key(|seen| (seen.digest, seen.cell, seen.run));
            self.sorted = self.seen.len();
        }
        let tally = tally::Tally::of(&self.cells, &self.seen, &self.merged, fraction);
        tally.findings(&self.cells, fraction)
    }
}

/// Pages as whole bytes.
pub fn bytes_of(pages: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts are not negative")]
    let bytes = (pages * PAGE_SIZE as f64).round().max(0.0) as u64;
    bytes
}
