//! Compares how much we expect marked memory to save with how much of it ksmd has merged.
//!
//! Pages that the kernel or a device has pinned (io_uring's buffers, VFIO, RDMA) have duplicates like any others, but
//! never merge: ksmd gives up on each at every scan (`write_protect_page`, mm/ksm.c). Such memory only costs scan time
//! and ksmd's records, so we unmark it, and try again after a pause that doubles.
//!
//! Pages that come back from swap aren't merged either, but ksmd merges them again. So we expect nothing of pages that
//! ksmd hasn't visited twice since they appeared. Also, a page's copies may be gone, rewritten or unmarked (too young,
//! too few in their region, or without headroom). So we only judge a region once samples have found unmerged pages in
//! it with unmerged copies in other marked memory. Programs may have written both since ksmd's last scan, so we have
//! ksmd visit all marks twice more before we judge.
//!
//! A pinned page that ksmd visits first keeps its copies from merging, too: ksmd compares each of them with the pinned
//! one (`unstable_tree_search_insert`). So we only unmark the first quarter of the processes, in ksmd's order, and
//! check the others after two more scans.

use super::Engine;
use crate::hash::Digest;
use crate::host::{Counted, MergedSample, PageSample, PageState};
use crate::keys::{OwnerKey, RegionKey};
use crate::region::{LeaveAlone, Region};
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// We only judge once ksmd has been idle for this long, nanoseconds, so that merged pages are counted after ksmd's last
/// merges.
const RESTED_NS: u64 = 1_000_000_000;
/// We only judge a region if a count of merged pages looks up at least this many of its duplicates.
const EXPECTED_MIN: u64 = 256;
/// We only judge a region once samples have found this many of its pages unmerged although ksmd could merge them.
const MERGEABLE_MIN: u64 = 16;
/// A region counts as merging if at least one in this many of its duplicates has merged.
const MERGED_PART: u64 = 8;
/// We unmark one in this many of the processes at once.
const AT_ONCE: usize = 4;

impl Engine {
    /// Notes a duplicate in marked memory if ksmd should have merged it but hasn't: its copy lies in marked memory,
    /// too, and most duplicates there aren't merged either. So both pages are likely unchanged.
    pub(super) fn note_unmerged(&mut self, slot: u32, sample: &PageSample) {
        if sample.digest == Digest::ZERO {
            if let Some(region) = self.table.get_mut(slot) {
                region.marks.samples.mergeable += 1;
            }
            return;
        }
        let Some(region) = self.table.get(slot) else { return };
        let digest = sample.digest.in_domain(region.view.domain);
        let Some(copy) = self.contents.index.page_of(digest).filter(|copy| copy.slot != slot) else { return };
        let Some(other) = self.table.get(copy.slot) else { return };
        let page = other.page_at(copy.offset);
        let is_marked = other.is_marked(page) && other.are_duplicates_unmerged();
        let is_unmerged = is_marked || other.hold.reason() == Some(LeaveAlone::Unmerged);
        if !is_unmerged || region.is_same_frame(sample.page, other, page) {
            return;
        }
        for slot in [slot, copy.slot] {
            if let Some(region) = self.table.get_mut(slot) {
                region.marks.samples.mergeable += 1;
            }
        }
    }

    /// Unmarks regions where a count finds almost nothing merged, although ksmd has visited all marks twice.
    pub(super) fn find_unmerged(&mut self, merged: &[MergedSample], counted: Option<&Counted>) {
        let now_ns = self.snapshot.now_ns;
        let has_rested = self.ksmd.scheduler.idle_ns(now_ns) >= RESTED_NS && self.scans() > 0;
        if !has_rested || !self.by_marks() {
            return;
        }
        let Some(counted) = counted else { return };
        let one_in = self.saving.latest().map_or(1, |saving| saving.one_in);
        let mut found: FxHashMap<(RegionKey, Vpn), Pages> = FxHashMap::default();
        let mut last = None;
        let zeros = counted.others.iter().filter(|sample| sample.state == PageState::ZeroMapped);
        let zeros = zeros.map(|sample| (sample.region, sample.page));
        for (region, page) in merged.iter().map(|sample| (sample.region, sample.page)).chain(zeros) {
            last = self.table.near(last, region, page);
            if let Some(region) = last {
                *found.entry((region.view.key, region.view.first)).or_default() += Pages(one_in);
            }
        }
        // ksmd visits processes in the order in which they were first marked.
        let mut order: FxHashMap<OwnerKey, u64> = FxHashMap::default();
        for region in self.table.iter().filter(|region| !region.marks.spans.is_empty()) {
            let number = order.entry(region.view.owner).or_insert(u64::MAX);
            *number = region.marks.number.min(*number);
        }
        let mut unmerged: BTreeSet<(Option<u64>, OwnerKey)> = BTreeSet::new();
        for region in self.table.iter_mut() {
            if region.marks.merges || !is_counted(region, one_in) {
                continue;
            }
            let expected = region.merged_by_ksmd();
            let frames = found.get(&(region.view.key, region.view.first)).copied().unwrap_or_default();
            region.marks.merges = frames.0 * MERGED_PART >= expected.0;
            if region.marks.merges {
                region.hold.unmerged = 0;
            } else if is_mergeable(region) {
                if std::mem::replace(&mut region.marks.visited_again, true) {
                    let owner = region.view.owner;
                    unmerged.insert((order.get(&owner).copied(), owner));
                } else {
                    self.ksmd.scheduler.request_thorough(region.marked_resident());
                }
            }
        }
        if self.ksmd.scheduler.is_busy() {
            return;
        }
        let first: BTreeSet<OwnerKey> =
            unmerged.iter().take(unmerged.len().div_ceil(AT_ONCE)).map(|&(_, owner)| owner).collect();
        for region in self.table.iter_mut() {
            if region.marks.merges || !is_counted(region, one_in) || !is_mergeable(region) {
                continue;
            }
            if first.contains(&region.view.owner) {
                self.ksmd.marker.give_back_unmerged(region, now_ns);
                // ksmd frees its records during its next scan.
                self.ksmd.scheduler.request_reaping(Pages(0), now_ns);
            } else {
                self.ksmd.scheduler.request_thorough(region.marked_resident());
            }
        }
    }
}

/// Whether a count of merged pages that looks up one page in `one_in` includes enough of a region's duplicates.
fn is_counted(region: &Region, one_in: u64) -> bool {
    region.merged_by_ksmd().0 / one_in >= EXPECTED_MIN
}

/// Whether samples since ksmd's last scan show that it could have merged a region's pages.
fn is_mergeable(region: &Region) -> bool {
    region.marks.samples.mergeable >= MERGEABLE_MIN
}
