//! Exact counts of the simulated memory.

use super::Memory;
use super::page::Backing;
use rustc_hash::FxHashSet;

/// One count of the whole memory, exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroundTruth {
    /// Frames in use: private, fork-shared (each once) and merged (each once).
    pub frames: u64,
    /// Those of them that hold nothing but zeros.
    pub zero_frames: u64,
    /// Different contents in them, zeros not counted.
    pub contents: u64,
    /// Pages that map the zero page.
    pub zero_mapped: u64,
    /// Frames that could be saved now: `frames` minus `contents`. All of zeros counts as savable, which
    /// takes `use_zero_pages`; without, one frame of zeros remains.
    pub savable: u64,
}

impl Memory {
    /// Counts everything anew, from the pages themselves.
    pub(crate) fn truth(&self) -> GroundTruth {
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
