//! Merges regions with their kin by position, on kernels that merge pages on request.
//!
//! Most duplicates on real hosts are relatives: clones of one image, guests of one template. Their equal pages lie at
//! equal offsets. So we read one member of such a family whole, mostly the one that's been there longest: the index
//! points to its pages. Another member whose samples agree with it is named to the kernel in long runs, page for page.
//! We only read what's left, which includes all zeros: the member that we've read maps the zero page there, so the
//! kernel finds nothing to merge with.
//!
//! A page that differs costs a comparison. At most a quarter of a family's named pages differ, or 256 more. Otherwise
//! we read its members as ever for some rounds.

use super::Engine;
use crate::config::Only;
use crate::host::{MergeResult, Merging, PageSample};
use crate::keys::{FamilyKey, RegionKey};
use crate::region::Region;
use crate::region::kin::DIFFERING_MOST;
use crate::requests::IndexedPage;
use crate::sampling::ladder::CYCLE_PAGES;
use crate::units::{Permyriad, Vpn};
use rustc_hash::FxHashMap;

/// We name this many pages before we know how many differ.
const FIRST_PAGES: u64 = 256;
/// We halve a family's counts at this many named pages.
const NAMED_MOST: u64 = 1 << 18;
/// How many rounds a family rests at first and at most.
const REST_ROUNDS: u64 = 8;
const REST_ROUNDS_MOST: u64 = 1_024;
/// We remember at most this many families.
const FAMILIES_MOST: usize = 4_096;

/// How it went for each family.
#[derive(Debug, Default)]
pub(super) struct KinRecords(FxHashMap<FamilyKey, KinRecord>);

#[derive(Clone, Copy, Debug, Default)]
struct KinRecord {
    named: u64,
    /// Named pages that differed, or whose kin had no room for another sharer.
    in_vain: u64,
    /// We try nothing before this round, because too much was in vain.
    rests_until: u64,
    rests_for: u64,
}

impl KinRecord {
    /// How many more pages we may name before we hear how many were in vain: as many as may all be.
    fn room(&self) -> u64 {
        let most = (self.named - self.in_vain) / 3;
        most.saturating_sub(self.in_vain).max(FIRST_PAGES)
    }

    fn record(&mut self, named: u64, in_vain: u64) {
        self.named += named;
        self.in_vain += in_vain;
        if self.named > NAMED_MOST {
            self.named /= 2;
            self.in_vain /= 2;
        }
    }

    /// Lets the family rest if too much was in vain.
    fn judge(&mut self, round: u64) {
        if self.named >= FIRST_PAGES && Permyriad::of(self.in_vain, self.named) > DIFFERING_MOST {
            let rests_for = (self.rests_for * 2).clamp(REST_ROUNDS, REST_ROUNDS_MOST);
            *self = Self { rests_for, rests_until: round + rests_for, ..Self::default() };
        }
    }
}

/// The next step with a region that has kin.
enum Step {
    /// We name this many pages, beginning with this one of kin's region in this slot.
    Name { kept: u32, first: Vpn, pages: u64 },
    /// We haven't read kin yet.
    Wait,
}

impl Engine {
    /// The mapping of the same family that has the content of a page at the same offset, if the index points there.
    pub(super) fn kin_at(&self, region: &Region, sample: &PageSample) -> Option<RegionKey> {
        let known = self.contents.index.page_of(sample.digest.in_domain(region.view.domain))?;
        let other = self.table.get(known.slot)?;
        let (first, pages) = self.table.mapping(region.view.key)?;
        let (other_first, other_pages) = self.table.mapping(other.view.key)?;
        let offset = sample.page.0.wrapping_sub(first.0);
        let is_at_same_offset = other.page_at(known.offset).0.wrapping_sub(other_first.0) == offset;
        let is_kin = region.is_kin(other) && pages == other_pages && is_at_same_offset;
        is_kin.then_some(other.view.key)
    }

    /// Names the next pages of regions that have kin, within what the cycle may cost.
    pub(super) fn name_kin(&mut self) {
        let room = (self.spending.room_ns(self.pace()) / self.ladder.sample_ns()).min(CYCLE_PAGES);
        // As with samples, this shouldn't wait until we've read gigabytes.
        let mut left = room.saturating_sub(self.plan.read).max(room / 4);
        let mut rooms: FxHashMap<FamilyKey, u64> = FxHashMap::default();
        let waiting = self.table.numbered_mut().filter(|(_, region)| region.waits_for_kin());
        let waiting: Vec<_> = waiting.map(|(slot, region)| (slot, region.view.family)).collect();
        for (slot, family) in waiting {
            let record = self.experience.kin.0.get(&family).copied().unwrap_or_default();
            if !self.may_name_kin() || self.ladder.rounds() < record.rests_until {
                self.end_kin(slot);
                continue;
            }
            let room = rooms.entry(family).or_insert_with(|| record.room());
            let named = self.name_kin_of(slot, left.min(*room));
            left -= named;
            *room -= named;
            self.plan.named += named;
            self.plan.pages += named;
        }
    }

    /// Names at most this many pages of a region by position. Returns how many.
    fn name_kin_of(&mut self, slot: u32, most: u64) -> u64 {
        let mut named = 0;
        while named < most {
            match self.next_step(slot) {
                Some(Step::Name { kept, first, pages }) => {
                    named += self.name_by_position(slot, kept, first, pages.min(most - named));
                }
                Some(Step::Wait) => break,
                None => {
                    self.end_kin(slot);
                    break;
                }
            }
        }
        named
    }

    /// Whether we know all that we need to say which page stays. With several memory nodes we'd have to read the page's
    /// node.
    fn may_name_kin(&self) -> bool {
        self.snapshot.ksm.ours && self.config.only == Only::All && self.snapshot.nodes.len() <= 1
    }

    fn end_kin(&mut self, slot: u32) {
        if let Some(pass) = self.table.get_mut(slot).and_then(|region| region.kin.as_mut()) {
            pass.next = None;
        }
    }

    /// The next step with a region. `None`: there's nothing more to name.
    fn next_step(&self, slot: u32) -> Option<Step> {
        let region = self.table.get(slot)?;
        let pass = region.kin?;
        let next = pass.next.filter(|&next| next < region.end())?;
        let (first, pages) = self.table.mapping(region.view.key)?;
        let (kin_first, kin_pages) = self.table.mapping(pass.kin)?;
        let from = kin_first + next.0.saturating_sub(first.0);
        let kept = self.table.find(pass.kin, from)?;
        let other = self.table.get(kept)?;
        let most = (region.end().0 - next.0).min(other.end().0.saturating_sub(from.0));
        if pages != kin_pages || most == 0 || !self.may_be_merged(region, other) {
            return None;
        }
        match other.life.judgement() {
            // What we read in this cycle is named in this cycle, its zeros among it.
            Some(judgement) if judgement.at_ns >= self.snapshot.now_ns => Some(Step::Wait),
            Some(_) => match self.spending.allowance.pages_left(region.view.owner) {
                0 => Some(Step::Wait),
                left => Some(Step::Name { kept, first: from, pages: most.min(left) }),
            },
            None => {
                let is_coming = other.life.is_reading() && other.kin.is_none() && !other.survey.is_out_of_reach();
                is_coming.then_some(Step::Wait)
            }
        }
    }

    /// Whether a region may be merged with its kin unread. Relatives by fork share frames already, and where something
    /// was merged before, we don't know with whom. Below a cgroup's limit we need to know which page stays.
    fn may_be_merged(&self, region: &Region, kin: &Region) -> bool {
        let now_ns = self.snapshot.now_ns;
        let mut may_be = region.is_kin(kin) && region.view.lineage != kin.view.lineage;
        for side in [region, kin] {
            may_be &= side.may_be_requested(now_ns, &self.config) && side.relatives.is_none();
            may_be &= side.usage.readings_due == 0 && side.usage.contents.is_none();
            may_be &= !self.room.headroom.is_limited(side.view.owner);
        }
        may_be
    }

    /// Names pages of a region, beginning with the next. Returns how many pages that took.
    fn name_by_position(&mut self, slot: u32, kept: u32, first: Vpn, pages: u64) -> u64 {
        let (Some(region), Some(other)) = (self.table.get(slot), self.table.get(kept)) else { return 0 };
        let Some(next) = region.kin.and_then(|pass| pass.next) else { return 0 };
        let now_ns = self.snapshot.now_ns;
        for number in 0..pages {
            let take = IndexedPage::new(region, slot, next + number);
            let keep = IndexedPage::new(other, kept, first + number);
            let are_fit = region.is_fit_for_kin(take.page, now_ns) && other.is_fit_for_kin(keep.page, now_ns);
            let is_merged = region.usage.merged.contains(take.page) || self.requests.is_kept(take.location);
            if are_fit && !is_merged {
                self.requests.add_by_position(take, keep);
            }
        }
        self.spending.allowance.use_pages(region.view.owner, pages);
        if let Some(pass) = self.table.get_mut(slot).and_then(|region| region.kin.as_mut()) {
            pass.next = Some(next + pages);
        }
        pages
    }

    /// Records what became of the pages that we named by position.
    pub(super) fn record_kin(&mut self, merges: &[MergeResult]) {
        let round = self.ladder.rounds();
        let records = &mut self.experience.kin.0;
        for result in merges.iter().filter(|result| self.requests.is_by_position(result)) {
            let run = result.range.take;
            let Some(region) = self.table.at_mut(run.region, run.first) else { continue };
            let pages = u64::from(run.pages);
            let in_vain = match result.merging {
                Merging::Differs | Merging::Full => pages,
                Merging::Untried | Merging::Unknown => {
                    region.kin.iter_mut().for_each(|pass| pass.next = None);
                    continue;
                }
                Merging::Merged | Merging::Shared => {
                    (0..pages).for_each(|number| region.count_merged(run.first + number));
                    0
                }
                Merging::Absent | Merging::Busy | Merging::Ineligible => 0,
            };
            if records.len() >= FAMILIES_MOST {
                records.clear();
            }
            records.entry(region.view.family).or_default().record(pages, in_vain);
        }
        for record in records.values_mut() {
            record.judge(round);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However many of the pages that we may name differ, the bound holds until the family rests.
        #[test]
        fn at_most_a_quarter_is_in_vain(shares in proptest::collection::vec(0_u64..=100, 1..60)) {
            let mut record = KinRecord::default();
            for share in shares {
                let pages = record.room();
                record.record(pages, pages * share / 100);
                prop_assert!(record.in_vain <= record.named / 4 + FIRST_PAGES, "{record:?}");
                record.judge(7);
                if record.rests_until > 7 {
                    prop_assert_eq!((record.named, record.in_vain), (0, 0));
                    return Ok(());
                }
            }
        }
    }
}
