//! A region as UKSM sees it: the order to sample its pages in, and the results (sections 5.2 and 5.3).

use super::settings::UksmSettings;
use pagefold_engine::permutation::Permutation;
use pagefold_engine::random::mix;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LevelChange {
    Stay,
    Up,
    Down,
    /// All pages of the region have been sampled, and the duplicates among them merged.
    Bottom,
}

#[derive(Debug)]
pub(super) struct SampledRegion {
    /// The region's level, from 1; 0 while it's too young.
    pub(super) level: usize,
    pub(super) seen_ns: u64,
    order: Permutation,
    key: u64,
    /// Pages of the permutation that have been sampled.
    visited: u64,
    /// Whether this round sampled the last of them.
    complete: bool,
    /// Pages sampled in this round, and duplicates merged.
    sampled: u64,
    pub(super) found: u64,
    /// Writes to merged pages before this round.
    broken: u64,
}

impl SampledRegion {
    pub(super) fn new(pages: u32, seen_ns: u64, key: u64, broken: u64) -> Self {
        Self {
            level: 0,
            seen_ns,
            order: Permutation::new(u64::from(pages), key),
            key,
            visited: 0,
            complete: false,
            sampled: 0,
            found: 0,
            broken,
        }
    }

    pub(super) fn pages(&self) -> u64 {
        self.order.len()
    }

    /// Adapts to a new length: permutes the pages anew, and drops all results.
    pub(super) fn resize(&mut self, pages: u32) {
        if u64::from(pages) != self.pages() {
            let Self { level, seen_ns, key, broken, .. } = *self;
            *self = Self { level, ..Self::new(pages, seen_ns, mix(key), broken) };
        }
    }

    /// The next page to sample. Every page comes once before any comes again ("a region specific offset permutation
    /// scheme"). `None` once this round has sampled the last page.
    pub(super) fn next_page(&mut self) -> Option<u32> {
        if self.complete || self.visited >= self.pages() {
            return None;
        }
        let page = self.order.at(self.visited);
        self.visited += 1;
        self.sampled += 1;
        self.complete = self.visited == self.pages();
        u32::try_from(page).ok()
    }

    /// Ends a round: judges the region by its duplicate and COW-broken ratios (section 5.2), and begins the next.
    /// `broken` is the number of writes to its merged pages so far, which UKSM counts in the fault handler (section 7).
    ///
    /// We don't count pages as duplicates if they were already merged: sampling them gained nothing. The COW-broken
    /// ratio is pages broken to pages merged in the round, as in the authors' patch (`cal_dedup_ratio`); the paper
    /// doesn't say.
    pub(super) fn end_round(&mut self, broken: u64, settings: &UksmSettings) -> LevelChange {
        let sampled = std::mem::take(&mut self.sampled);
        let found = std::mem::take(&mut self.found);
        let broken = broken - std::mem::replace(&mut self.broken, broken);
        if std::mem::take(&mut self.complete) {
            self.visited = 0;
            self.key = mix(self.key);
            self.order = Permutation::new(self.pages(), self.key);
            return LevelChange::Bottom;
        }
        if sampled == 0 {
            return LevelChange::Stay;
        }
        let rich = found * 10_000 >= u64::from(settings.duplicate.0) * sampled;
        let calm = settings.cow.is_none_or(|cow| broken * 10_000 < u64::from(cow.0) * found.max(1));
        if rich && calm { LevelChange::Up } else { LevelChange::Down }
    }
}
