//! Exact counts of the simulated memory.

use super::Memory;
use super::page::Backing;
use rustc_hash::FxHashSet;

/// Exact counts of the whole memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroundTruth {
    /// Frames in use: private, fork-shared (each once) and merged (each once).
    pub frames: u64,
    /// Frames that contain only zeros.
    pub zero_frames: u64,
    /// How many different contents there are, zeros not counted.
    pub contents: u64,
    /// Pages that map the zero page.
    pub zero_mapped: u64,
    /// How many frames could be saved: `frames` minus `contents`. This counts all frames of zeros, but without
    /// `use_zero_pages` one of these remains.
    pub savable: u64,
}

impl Memory {
    /// Counts the pages themselves, instead of reading counters.
    pub fn truth(&self) -> GroundTruth {
        let mut truth = GroundTruth::default();
        let mut contents = FxHashSet::default();
        let mut counted_shares = vec![false; self.shares.len()];
        let mut counted_frames = vec![false; self.frames.len()];
        for region in self.regions.iter().flatten() {
            for (page, backing) in region.backing.iter().enumerate() {
                let frame = region.frame_of(page) as usize;
                let first_user = match backing {
                    Backing::Absent => false,
                    Backing::ZeroMapped | Backing::ZeroMerged => {
                        truth.zero_mapped += 1;
                        false
                    }
                    Backing::Private => true,
                    Backing::Forked => !std::mem::replace(&mut counted_shares[frame], true),
                    Backing::Merged => !std::mem::replace(&mut counted_frames[frame], true),
                };
                if first_user {
                    truth.frames += 1;
                    truth.zero_frames += u64::from(region.content[page] == 0);
                    contents.insert(region.content[page]);
                }
            }
        }
        contents.remove(&0);
        truth.contents = contents.len() as u64;
        truth.savable = truth.frames - truth.contents;
        truth
    }
}
