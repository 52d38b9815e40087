//! What the algorithms are measured by, counted alike for all of them.

/// Comparisons made in looking for equal pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SearchCounts {
    /// Pages for which a partner was looked for.
    pub searches: u64,
    /// Those that found one.
    pub found: u64,
    /// Pages compared with pages of stable trees.
    pub stable: u64,
    /// Pages compared with pages of unstable trees.
    pub unstable: u64,
    /// Comparisons of pages in searches that found no partner (CMD, equation 1).
    pub futile: u64,
    /// Comparisons of hashes, in trees that are ordered by them.
    pub hashes: u64,
    /// Steps down one tree, at most.
    pub deepest: u64,
}

impl SearchCounts {
    /// Pages compared with pages.
    pub const fn comparisons(&self) -> u64 {
        self.stable + self.unstable
    }

    /// The share of comparisons that were futile, 0 to 1 (CMD, equation 1: `Futile_Rate`).
    pub fn futile_rate(&self) -> f64 {
        self.futile as f64 / self.comparisons().max(1) as f64
    }

    /// Comparisons of pages in one search, on average: the depth of the trees, stable and unstable together.
    pub fn depth(&self) -> f64 {
        self.comparisons() as f64 / self.searches.max(1) as f64
    }

    /// Accounts for a search, made so many times over.
    pub(crate) fn search(&mut self, times: u64, stable: u64, unstable: u64, found: bool) {
        self.searches += times;
        self.found += if found { times } else { 0 };
        self.stable += times * stable;
        self.unstable += times * unstable;
        self.futile += if found { 0 } else { times * (stable + unstable) };
        self.deepest = self.deepest.max(stable).max(unstable);
    }
}
