//! Merges regions with their kin (older clones) by position: we merge unread pages with the older clone's pages at the
//! same offsets. Only on kernels that merge pages on request.
//!
//! On real hosts, most duplicates are in clones of one image or guests of one template, at equal offsets. So we read
//! the oldest region of such a family whole. If the samples of a younger one agree with it, we have the kernel compare
//! and merge the two page by page, in long runs. After that we only read the pages that didn't merge, such as zeros:
//! there the older region maps the zero page, so the kernel finds nothing to merge with.
//!
//! A process that we don't see may share some of these unread pages through fork. So the host checks the pages to
//! replace just before the merge ([`MergeRange::needs_own`](crate::host::MergeRange::needs_own)), and the kernel checks
//! the pages to keep ([`MergeRange::keep_mappers`](crate::host::MergeRange::keep_mappers)).
//!
//! A program fills its memory in its first moments. So if many pages of the new region were absent, we try these again
//! a little later, for as long as more of them appear, and read the rest after that.
//!
//! A page that differs costs a comparison, so each family has a credit of pages: three pages that merge earn one, and a
//! page that differs costs one. So besides the first credit, at most a quarter of all comparisons are in vain. Once the
//! credit is used up, we merge no unread pages of the family for some rounds.

use super::Engine;
use crate::config::Only;
use crate::host::{MergeResult, Merging, PageSample};
use crate::keys::{FamilyKey, RegionKey};
use crate::region::{Age, Region};
use crate::requests::IndexedPage;
use crate::sampling::ladder::{CYCLE_PAGES, LONG_LIVED};
use crate::units::Vpn;
use rustc_hash::FxHashMap;

/// A family's credit in pages: at first, at most, and the least with which we go on.
const FIRST_CREDIT: u64 = 256;
const CREDIT_MOST: u64 = 65_536;
const CREDIT_MIN: u64 = 64;
/// With less credit, we merge no unread pages of the family for this many rounds.
const REST_ROUNDS: u64 = 64;
/// We try absent pages again after this time, nanoseconds, if more than one in `MISSING_PART` of the older clone's
/// pages is still absent, and since the last try, more than one page has appeared for each `APPEARED_PART` absent ones.
const AGAIN_NS: u64 = 250_000_000;
const MISSING_PART: u64 = 64;
const APPEARED_PART: u64 = 16;
/// We remember at most this many families.
const FAMILIES_MOST: usize = 4_096;

/// How well merging unread pages has worked for each family.
#[derive(Debug, Default)]
pub(super) struct KinRecords(FxHashMap<FamilyKey, KinRecord>);

#[derive(Clone, Copy, Debug)]
struct KinRecord {
    /// How many pages we may have the kernel compare.
    credit: u64,
    /// We merge no unread pages of the family before this round.
    rests_until: u64,
}

impl Default for KinRecord {
    fn default() -> Self {
        Self { credit: FIRST_CREDIT, rests_until: 0 }
    }
}

impl KinRecord {
    /// Settles pages that we took from the credit: merged ones earn a third more than they cost, pages that the kernel
    /// didn't compare are refunded, and pages that differ are lost.
    fn record(&mut self, merging: Merging, pages: u64) {
        let back = match merging {
            Merging::Merged | Merging::Shared => pages + pages / 3,
            Merging::Differs | Merging::Full | Merging::Busy => 0,
            Merging::Absent | Merging::Ineligible | Merging::Untried | Merging::Unknown => pages,
        };
        self.credit = (self.credit + back).min(CREDIT_MOST);
    }

    /// Stops merging unread pages of the family for some rounds if its credit is used up.
    fn judge(&mut self, round: u64) {
        if self.credit < CREDIT_MIN {
            *self = Self { rests_until: round + REST_ROUNDS, ..Self::default() };
        }
    }
}

/// The next unread pages to merge with an older clone's.
struct KinRun {
    take: Vpn,
    /// The slot of the older clone's region, and the first of its pages, which we keep.
    slot: u32,
    keep: Vpn,
    /// How many pages. 0 while we have to wait until the older clone is read.
    pages: u64,
}

impl Engine {
    /// If the index points to an equal page at the same offset of an older mapping of the family: that mapping.
    pub(super) fn kin_at(&self, region: &Region, sample: &PageSample) -> Option<RegionKey> {
        let known = self.contents.index.page_of(sample.digest.in_domain(region.view.domain))?;
        let other = self.table.get(known.slot)?;
        let (first, pages) = self.table.mapping(region.view.key)?;
        let (other_first, other_pages) = self.table.mapping(other.view.key)?;
        let offset = sample.page.0.wrapping_sub(first.0);
        let is_at_same_offset = other.page_at(known.offset).0.wrapping_sub(other_first.0) == offset;
        let is_kin = region.is_younger_kin(other) && pages == other_pages && is_at_same_offset;
        if is_kin { Some(other.view.key) } else { None }
    }

    /// If a new region's samples agree with an older region, we take it for a clone and expect it to live long: the run
    /// may be too young to know how long regions of the family live. If clones end young, we learn from that.
    pub(super) fn welcome_clones(&mut self) {
        let mut clones = Vec::new();
        for (slot, region) in self.table.numbered() {
            if region.age != Age::New || !region.life.is_surveyed() {
                continue;
            }
            let Some(kin) = region.survey.kin.found() else { continue };
            let Some((kin_slot, _)) = self.page_of_kin(region, kin, region.view.first) else { continue };
            let Some(kin) = self.table.get(kin_slot) else { continue };
            if !kin.life.is_surveyed() {
                clones.push(slot);
            }
        }
        for slot in clones {
            if let Some(region) = self.table.get_mut(slot) {
                region.age = LONG_LIVED;
            }
        }
    }

    /// Merges the next pages of regions that have an older clone, as many as the cycle's CPU time allows.
    pub(super) fn name_kin(&mut self) {
        let room = (self.spending.room_ns(self.pace()) / self.ladder.sample_ns()).min(CYCLE_PAGES);
        // Like sampling, this gets a quarter of the cycle at least: it shouldn't wait until we've read gigabytes.
        let mut left = room.saturating_sub(self.plan.read).max(room / 4);
        let waiting = self.table.numbered().filter(|(_, region)| region.next_for_kin().is_some());
        let waiting: Vec<_> = waiting.map(|(slot, region)| (slot, region.view.family)).collect();
        for (slot, family) in waiting {
            let mut record = self.experience.kin.0.get(&family).copied().unwrap_or_default();
            if !self.may_name_kin() || self.ladder.rounds() < record.rests_until {
                self.table.get_mut(slot).into_iter().for_each(Region::end_kin);
                continue;
            }
            // By now we know what became of the previous pages.
            self.end_pass(slot);
            loop {
                let passed = self.name_next(slot, left, &mut record);
                if passed == 0 {
                    break;
                }
                left -= passed;
                self.plan.named += passed;
                self.plan.pages += passed;
            }
            self.experience.kin.0.insert(family, record);
        }
    }

    /// Whether we may merge unread pages. With several NUMA nodes we may not: to choose which of two pages to keep,
    /// we'd have to look up their nodes.
    fn may_name_kin(&self) -> bool {
        self.snapshot.ksm.ours && self.config.only == Only::All && self.snapshot.nodes.len() <= 1
    }

    /// The next unread pages of a region to merge, within one block of the older clone's mapping. `None` if we can't go
    /// on.
    fn next_run(&self, region: &Region) -> Option<KinRun> {
        let take = region.next_for_kin()?;
        let (slot, keep) = self.page_of_kin(region, region.kin.as_ref()?.kin, take)?;
        let other = self.table.get(slot)?;
        let most = (region.end().0 - take.0).min(other.end().0.saturating_sub(keep.0));
        if most == 0 || !self.may_be_merged(region, other) {
            return None;
        }
        let must_wait = match other.life.judgement() {
            // Pages of the older clone that we've read in this cycle may get merged in this cycle themselves, zeros
            // among them.
            Some(judgement) => judgement.at_ns >= self.snapshot.now_ns,
            None if !other.life.is_reading() || other.survey.is_out_of_reach() => return None,
            None => true,
        };
        Some(KinRun { take, slot, keep, pages: if must_wait { 0 } else { most } })
    }

    /// The page at the same offset of the mapping `kin`, and the slot of its region.
    fn page_of_kin(&self, region: &Region, kin: RegionKey, page: Vpn) -> Option<(u32, Vpn)> {
        let (first, pages) = self.table.mapping(region.view.key)?;
        let (kin_first, kin_pages) = self.table.mapping(kin)?;
        let at = kin_first + page.0.saturating_sub(first.0);
        let slot = self.table.find(kin, at)?;
        (pages == kin_pages).then_some((slot, at))
    }

    /// If we've been through all pages of a region, decides whether and when to try the missing ones again.
    fn end_pass(&mut self, slot: u32) {
        let now_ns = self.snapshot.now_ns;
        let Some(region) = self.table.get(slot) else { return };
        if region.next_for_kin() != Some(region.end()) {
            return;
        }
        let first = region.view.first;
        let missing = self.missing(region);
        let Some(region) = self.table.get_mut(slot) else { return };
        let Some(pass) = &mut region.kin else { return };
        match (pass.again_ns, missing) {
            (Some(again_ns), _) if now_ns < again_ns => {}
            (Some(_), _) => (pass.next, pass.again_ns) = (Some(first), None),
            (None, Some(missing)) => (pass.again_ns, pass.missing) = (Some(now_ns + AGAIN_NS), missing),
            (None, None) => region.end_kin(),
        }
    }

    /// How many of the older clone's pages are still missing from a region. `None` if we don't expect many more to
    /// appear.
    fn missing(&self, region: &Region) -> Option<u64> {
        let pass = region.kin.as_ref()?;
        let (slot, _) = self.page_of_kin(region, pass.kin, region.view.first)?;
        let kin = self.table.get(slot)?;
        // The older clone's zeros are merged with the zero page.
        let present = kin.view.resident.0.saturating_sub(kin.usage.own.len().0);
        let missing = present.saturating_sub(region.usage.merged.len().0 + pass.left_out.len().0);
        let appeared = pass.missing.saturating_sub(missing);
        let are_many = missing > present / MISSING_PART && appeared > missing / APPEARED_PART;
        if are_many { Some(missing) } else { None }
    }

    /// Whether a region may be merged unread with its older clone `kin`. Relatives by fork share frames already. If
    /// pages were merged before, we don't know with which. Below a cgroup's limit we must know which page is kept.
    fn may_be_merged(&self, region: &Region, kin: &Region) -> bool {
        let now_ns = self.snapshot.now_ns;
        let mut may_be = region.is_younger_kin(kin) && region.view.lineage != kin.view.lineage;
        for side in [region, kin] {
            may_be &= side.may_be_requested(now_ns, &self.config) && side.relatives.is_none();
            may_be &= side.usage.readings_due == 0 && side.usage.contents.is_none();
            may_be &= !self.room.headroom.is_limited(side.view.owner);
        }
        may_be
    }

    /// Goes through the next pages of a region, at most `most`, and asks the kernel to merge those that are fit.
    /// Returns how many pages we went through.
    fn name_next(&mut self, slot: u32, most: u64, record: &mut KinRecord) -> u64 {
        let Some(region) = self.table.get(slot) else { return 0 };
        if region.next_for_kin() == Some(region.end()) {
            return 0;
        }
        let Some(run) = self.next_run(region) else {
            self.table.get_mut(slot).into_iter().for_each(Region::end_kin);
            return 0;
        };
        let Some(other) = self.table.get(run.slot) else { return 0 };
        let owner = region.view.owner;
        let now_ns = self.snapshot.now_ns;
        let pages = run.pages.min(most).min(record.credit).min(self.spending.allowance.pages_left(owner));
        let is_left_out = |page| region.kin.as_ref().is_some_and(|pass| pass.left_out.contains(page));
        for number in 0..pages {
            let take = IndexedPage::new(region, slot, run.take + number);
            let keep = IndexedPage::new(other, run.slot, run.keep + number);
            let are_fit = region.is_fit_for_kin(take.page, now_ns) && other.is_fit_for_kin(keep.page, now_ns);
            let is_merged = region.usage.merged.contains(take.page) || self.requests.is_kept(take.location);
            if are_fit && !is_merged && !is_left_out(take.page) {
                self.requests.add_by_position(take, keep);
                record.credit -= 1;
            }
        }
        self.spending.allowance.use_pages(owner, pages);
        if let Some(pass) = self.table.get_mut(slot).and_then(|region| region.kin.as_mut()) {
            pass.next = Some(run.take + pages);
        }
        pages
    }

    /// Records what became of unread pages that we asked the kernel to merge.
    pub(super) fn record_kin(&mut self, merges: &[MergeResult]) {
        let records = &mut self.experience.kin.0;
        for result in merges.iter().filter(|result| result.range.needs_own) {
            let run = result.range.take;
            let Some(region) = self.table.at_mut(run.region, run.first) else { continue };
            records.entry(region.view.family).or_default().record(result.merging, run.pages.into());
            let pages = run.first.0..run.first.0 + u64::from(run.pages);
            match result.merging {
                Merging::Merged | Merging::Shared => {
                    for page in pages {
                        region.count_merged(Vpn(page));
                    }
                }
                Merging::Untried | Merging::Unknown => region.end_kin(),
                Merging::Absent => {}
                Merging::Differs | Merging::Full | Merging::Busy | Merging::Ineligible => {
                    let Some(pass) = &mut region.kin else { continue };
                    for page in pages {
                        pass.left_out.insert(Vpn(page));
                    }
                }
            }
        }
        for record in records.values_mut() {
            record.judge(self.ladder.rounds());
        }
        if records.len() > FAMILIES_MOST {
            records.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The bound holds until the family rests, however many of the pages that we may name differ.
        #[test]
        fn at_most_a_quarter_is_in_vain(shares in proptest::collection::vec(0_u64..=100, 1..60)) {
            let mut record = KinRecord::default();
            let mut named = 0;
            let mut in_vain = 0;
            for share in shares {
                let pages = std::mem::take(&mut record.credit);
                let differing = pages * share / 100;
                record.record(Merging::Differs, differing);
                record.record(Merging::Merged, pages - differing);
                named += pages;
                in_vain += differing;
                prop_assert!(in_vain <= named / 4 + FIRST_CREDIT, "{in_vain} of {named}");
                record.judge(7);
                if record.rests_until > 7 {
                    return Ok(());
                }
            }
        }
    }
}
