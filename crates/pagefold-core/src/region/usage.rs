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
    /// Pages that were active when they were first read: one bit per page, by groups of 64.
    active: BTreeMap<u64, u64>,
}

impl Usage {
    /// Records an active page.
    pub fn set_active(&mut self, page: Vpn) {
        *self.active.entry(page.0 / 64).or_default() |= 1 << (page.0 % 64);
    }

    /// Whether a page was active when it was first read.
    pub fn was_active(&self, page: Vpn) -> bool {
        self.active.get(&(page.0 / 64)).is_some_and(|bits| bits >> (page.0 % 64) & 1 == 1)
    }
}
