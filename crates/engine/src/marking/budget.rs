//! How much of each region we may mark within the headroom below cgroup limits.
//!
//! Processes that share pages through fork get headroom for all of them or for none: as long as one of them isn't
//! merged, merging the others frees nothing. So once some pages of a region are marked, as many in its relatives have
//! headroom, too, until we've read and judged those.

use crate::config::Config;
use crate::headroom::Headroom;
use crate::keys::{LimitKey, OwnerKey, RegionKey};
use crate::region::table::RegionTable;
use crate::region::{Fork, Region};
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;

/// A region that we may still mark more of.
#[derive(Debug)]
struct Relative {
    owner: OwnerKey,
    key: RegionKey,
    first: Vpn,
    resident: Pages,
    /// How many of its pages have headroom.
    granted: Pages,
}

/// The headroom that's left while we pick what to mark.
#[derive(Debug)]
pub struct Budget {
    pub headroom: Headroom,
    /// The regions that are merged with their relatives, by family.
    families: FxHashMap<u32, Vec<Relative>>,
}

impl Budget {
    pub fn new(table: &RegionTable, headroom: Headroom, config: &Config) -> Self {
        let mut budget = Self { headroom, families: FxHashMap::default() };
        let mut most: FxHashMap<u32, Pages> = FxHashMap::default();
        for region in table.iter() {
            let shares = region.reads_forked() && region.forked_share() >= config.threshold().fraction();
            if let Some(number) = region.relatives.filter(|_| shares) {
                let largest = most.entry(number).or_default();
                *largest = region.mergeable().max(*largest);
            }
        }
        for region in table.iter() {
            let Some(number) = region.relatives.filter(|number| most.contains_key(number)) else { continue };
            let is_done = region.reads_forked() && region.life.is_judged() && !region.life.is_worth_marking();
            if region.fork == Fork::Alone || is_done && region.hold.full.is_none() {
                continue;
            }
            budget.families.entry(number).or_default().push(Relative {
                owner: region.view.owner,
                key: region.view.key,
                first: region.view.first,
                resident: region.resident(),
                granted: region.mergeable(),
            });
        }
        for (number, largest) in most {
            budget.grant(number, largest);
        }
        budget
    }

    /// How many pages of a region may be marked at most, and the limit that bounds this. `None`: any number. We'd like to
    /// mark `wanted`.
    pub fn most(&self, region: &Region, wanted: Pages) -> Option<(LimitKey, Pages)> {
        let owner = region.view.owner;
        let mut granted = region.mergeable();
        let mut owners = vec![owner];
        let relatives = region.relatives.and_then(|number| self.families.get(&number));
        for relative in relatives.into_iter().flatten() {
            if (relative.key, relative.first) == (region.view.key, region.view.first) {
                granted = granted.max(relative.granted);
            } else if relative.granted < wanted.min(relative.resident) {
                owners.push(relative.owner);
            }
        }
        let (limit, more) = self.headroom.of_each(&owners)?;
        Some((limit, granted + more))
    }

    /// Uses up headroom for so many marked pages of a region, and of its relatives.
    pub fn take(&mut self, region: &Region, marked: Pages) {
        match region.relatives {
            Some(number) if self.families.contains_key(&number) => self.grant(number, marked),
            _ => self.headroom.take(region.view.owner, marked.saturating_sub(region.mergeable())),
        }
    }

    fn grant(&mut self, number: u32, pages: Pages) {
        for relative in self.families.get_mut(&number).into_iter().flatten() {
            let pages = pages.min(relative.resident);
            self.headroom.take(relative.owner, pages.saturating_sub(relative.granted));
            relative.granted = relative.granted.max(pages);
        }
    }
}
