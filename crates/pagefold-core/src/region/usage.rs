//! What a region's process does with its pages, as far as it shows from outside.

use crate::marking::cow_breaks::CowBreaks;
use crate::units::Vpn;
use std::collections::BTreeMap;

/// The use of one region.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// What became of its merged pages.
    pub cow_breaks: CowBreaks,
    /// Whether it is known which pages are active. Later reads show nothing: being read makes a page active.
    pub activity_known: bool,
    /// Pages that were active when they were first read.
    pub active: PageSet,
    /// Pages that were merged on request, as far as is known.
    pub merged: PageSet,
    /// Pages that were written after they had been merged on request. They are not named again before the region is next read
    /// whole.
    pub broken: PageSet,
}

impl Usage {
    /// Records how a page is found that is not merged. Whether it was before, and so has been written since.
    pub fn record_unmerged(&mut self, page: Vpn) -> bool {
        let broken = self.merged.remove(page);
        if broken {
            self.broken.insert(page);
        }
        broken
    }
}

/// A set of pages: one bit each, by groups of 64.
#[derive(Clone, Debug, Default)]
pub struct PageSet(BTreeMap<u64, u64>);

impl PageSet {
    /// Adds a page.
    pub fn insert(&mut self, page: Vpn) {
        *self.0.entry(page.0 / 64).or_default() |= 1 << (page.0 % 64);
    }

    /// Removes a page. Whether it was there.
    pub fn remove(&mut self, page: Vpn) -> bool {
        let Some(bits) = self.0.get_mut(&(page.0 / 64)) else { return false };
        let bit = 1 << (page.0 % 64);
        let was_there = *bits & bit != 0;
        *bits &= !bit;
        if *bits == 0 {
            self.0.remove(&(page.0 / 64));
        }
        was_there
    }

    /// Whether a page is in it.
    pub fn contains(&self, page: Vpn) -> bool {
        self.0.get(&(page.0 / 64)).is_some_and(|bits| bits >> (page.0 % 64) & 1 == 1)
    }

    /// The number of pages in it.
    pub fn len(&self) -> u64 {
        self.0.values().map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// Whether no page is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
