//! Counts of comparisons, by which we compare merging algorithms.

/// Comparisons made while searching for duplicates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SearchCounts {
    /// Pages for which we searched for a duplicate.
    pub searches: u64,
    pub found: u64,
    pub stable: u64,
    pub unstable: u64,
    /// Page comparisons in searches that found no duplicate (CMD, equation 1).
    pub futile: u64,
    /// Hash comparisons, in trees ordered by hash.
    pub hashes: u64,
    /// The longest path down one tree, in steps.
    pub deepest: u64,
}

impl SearchCounts {
    pub const fn comparisons(&self) -> u64 {
        self.stable + self.unstable
    }

    /// The share of comparisons that were futile, 0 to 1 (CMD, equation 1: `Futile_Rate`).
    pub fn futile_rate(&self) -> f64 {
        self.futile as f64 / self.comparisons().max(1) as f64
    }

    /// Mean page comparisons per search: the depth of the stable and unstable tree together.
    pub fn depth(&self) -> f64 {
        self.comparisons() as f64 / self.searches.max(1) as f64
    }

    /// Counts a search that was made `times` times.
    pub fn search(&mut self, times: u64, stable: u64, unstable: u64, found: bool) {
        self.searches += times;
        self.found += if found { times } else { 0 };
        self.stable += times * stable;
        self.unstable += times * unstable;
        self.futile += if found { 0 } else { times * (stable + unstable) };
        self.deepest = self.deepest.max(stable).max(unstable);
    }
}
