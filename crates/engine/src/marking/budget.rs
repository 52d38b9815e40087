//! How much of each region we may mark within the headroom below cgroup limits.
//!
//! Processes that share pages through fork get headroom together or not at all: as long as one of them isn't merged,
//! merging the others frees nothing. We read the shared pages in one of them, the first. For each page that we mark
//! there, we also set headroom aside in its relatives, until we've read and judged them. If there isn't enough for a
//! whole mapping, we mark the same addresses in all of them, because each may have mapped memory of its own beside its
//! inherited memory.

use crate::config::Config;
use crate::headroom::Headroom;
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::marking::extents::{Candidate, part};
use crate::region::table::RegionTable;
use crate::region::{Fork, Region, covers};
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// A region that shares pages with the first of its family, in which we read them.
#[derive(Debug)]
struct Relative {
    key: RegionKey,
    owner: OwnerKey,
    pages: Range<Vpn>,
    resident: Pages,
    /// For how many of its pages we've set headroom aside.
    granted: Pages,
}

/// Regions that are merged together or not at all.
#[derive(Debug, Default)]
struct ForkFamily {
    /// The marks in the family's first region.
    spans: Vec<Candidate>,
    relatives: Vec<Relative>,
}

/// The headroom that's left while we pick what to mark.
#[derive(Debug)]
pub struct Budget {
    pub headroom: Headroom,
    fork_families: FxHashMap<u32, ForkFamily>,
}

impl Budget {
    pub fn new(table: &RegionTable, headroom: Headroom, config: &Config) -> Self {
        let mut budget = Self { headroom, fork_families: FxHashMap::default() };
        for region in table.iter() {
            let Some(number) = region.relatives else { continue };
            let is_shared = region.fork == Fork::First && region.forked_share() >= config.threshold().fraction();
            if is_shared || region.fork == Fork::Follows && !region.life.is_settled() {
                budget.fork_families.entry(number).or_default();
            }
        }
        for region in table.iter().filter(|region| region.fork == Fork::First) {
            if let Some(family) = region.relatives.and_then(|number| budget.fork_families.get_mut(&number)) {
                family.mark(&region.marks.spans);
            }
        }
        for region in table.iter() {
            if !matches!(region.fork, Fork::Relative | Fork::Follows) {
                continue;
            }
            let Some(number) = region.relatives else { continue };
            let Some(family) = budget.fork_families.get_mut(&number) else { continue };
            if region.fork == Fork::Follows && region.life.is_settled() && region.hold.full.is_none() {
                continue;
            }
            family.relatives.push(Relative {
                key: region.view.key,
                owner: region.view.owner,
                pages: region.view.first..region.end(),
                resident: region.resident(),
                granted: region.mergeable(),
            });
        }
        for family in budget.fork_families.values_mut() {
            family.grant(&mut budget.headroom);
        }
        budget
    }

    /// How many pages of a region may be marked at most, and the limit that bounds this. `None`: any number.
    pub fn most(&self, region: &Region) -> Option<(LimitKey, Pages)> {
        let mut owners = vec![region.view.owner];
        if region.fork == Fork::First {
            for relative in self.relatives(region) {
                if relative.shares(region) && relative.granted < relative.resident {
                    owners.push(relative.owner);
                }
            }
        }
        let (limit, more) = self.headroom.of_each(&owners)?;
        Some((limit, self.granted(region) + more))
    }

    /// The parts of a span that we may mark in a region if there's too little headroom for all of it.
    pub fn parts(&self, region: &Region, span: &Candidate) -> Vec<Candidate> {
        let Some(family) = self.fork_family(region) else { return vec![*span] };
        if region.fork == Fork::First {
            return vec![*span];
        }
        let mut parts = Vec::new();
        for mark in &family.spans {
            parts.extend(part(&region.extents, span, mark.first..mark.first + mark.pages.0));
        }
        parts
    }

    /// Uses up headroom for marking `spans` in a region, which then has `marked` marked pages in all.
    pub fn take(&mut self, region: &Region, spans: &[Candidate], marked: Pages) {
        let granted = self.granted(region);
        self.headroom.take(region.view.owner, marked.saturating_sub(granted));
        let Some(number) = region.relatives else { return };
        let Some(family) = self.fork_families.get_mut(&number) else { return };
        if region.fork == Fork::First {
            family.mark(spans);
            family.grant(&mut self.headroom);
        }
        for relative in &mut family.relatives {
            if relative.is(region) {
                relative.granted = granted.max(marked);
            }
        }
    }

    /// How many pages of a region are marked already, or have headroom set aside.
    fn granted(&self, region: &Region) -> Pages {
        let mut granted = region.mergeable();
        for relative in self.relatives(region) {
            if relative.is(region) {
                granted = granted.max(relative.granted);
            }
        }
        granted
    }

    fn relatives(&self, region: &Region) -> &[Relative] {
        match self.fork_family(region) {
            Some(family) => &family.relatives,
            None => &[],
        }
    }

    fn fork_family(&self, region: &Region) -> Option<&ForkFamily> {
        self.fork_families.get(&region.relatives?)
    }
}

impl Relative {
    fn is(&self, region: &Region) -> bool {
        self.key == region.view.key && self.pages.start == region.view.first
    }

    /// Whether a region overlaps this one's addresses.
    fn shares(&self, region: &Region) -> bool {
        self.pages.start < region.end() && region.view.first < self.pages.end
    }
}

impl ForkFamily {
    fn mark(&mut self, spans: &[Candidate]) {
        for span in spans {
            self.spans.retain(|mark| !covers(span, mark));
            self.spans.push(*span);
        }
    }

    /// Uses up headroom in the relatives for the pages that are marked in the family's first region.
    fn grant(&mut self, headroom: &mut Headroom) {
        for relative in &mut self.relatives {
            let mut shared = Pages(0);
            for span in &self.spans {
                let first = span.first.max(relative.pages.start);
                let end = relative.pages.end.min(span.first + span.pages.0);
                shared += Pages(end.0.saturating_sub(first.0));
            }
            let wanted = shared.min(relative.resident);
            headroom.take(relative.owner, wanted.saturating_sub(relative.granted));
            relative.granted = relative.granted.max(wanted);
        }
    }
}
