//! Memory that waits for unmarking. Until we've unmarked it, it stays merged, or may still be merged.

use crate::host::Span;
use crate::keys::RegionKey;
use crate::region::Region;
use crate::units::Vpn;
use std::collections::BTreeMap;

/// Spans that wait for unmarking, by their mapping and first page.
#[derive(Clone, Debug, Default)]
pub struct Waiting(BTreeMap<(RegionKey, Vpn), Wait>);

#[derive(Clone, Copy, Debug)]
pub struct Wait {
    pub span: Span,
    /// Whether it was urgent, and we couldn't unmark it.
    pub is_stuck: bool,
}

impl Waiting {
    pub fn add(&mut self, span: Span, is_stuck: bool) {
        self.0.insert((span.region, span.first), Wait { span, is_stuck });
    }

    pub fn iter(&self) -> impl Iterator<Item = &Wait> {
        self.0.values()
    }

    /// The span that a page lies in.
    pub fn at(&self, region: RegionKey, page: Vpn) -> Option<Wait> {
        let (_, &wait) = self.0.range((region, Vpn(0))..=(region, page)).next_back()?;
        (page < wait.span.end()).then_some(wait)
    }

    /// Whether a part of a region waits.
    pub fn has_part_of(&self, region: &Region) -> bool {
        let key = region.view.key;
        let last = self.0.range((key, Vpn(0))..(key, region.end())).next_back();
        last.is_some_and(|(_, wait)| wait.span.end() > region.view.first)
    }
}
