//! Compares how much we expect marked memory to save with how much of it ksmd has merged.
//!
//! Pages that the kernel or a device has pinned (io_uring's buffers, VFIO, RDMA) have duplicates like any others, but
//! never merge: ksmd gives up on each at every scan (`write_protect_page`, mm/ksm.c). Such memory only costs scan time
//! and ksmd's records, so we unmark it, and try again after a pause that doubles.
//!
//! Memory that was swapped out isn't merged either when it comes back, but ksmd merges it again. So we expect nothing of
//! pages that ksmd hasn't visited twice since they came, and judge no region whose copies have ended.
//!
//! A pinned page that ksmd visits first keeps its copies from merging, too: ksmd compares each of them with the pinned
//! one (`unstable_tree_search_insert`). So we only unmark the first quarter of the processes, and look again after two
//! more scans.

use super::Engine;
use crate::host::{Counted, MergedSample};
use crate::keys::{OwnerKey, RegionKey};
use crate::region::Region;
use crate::sampling::ladder::matures_ns;
use crate::saving::split_zeros;
use crate::units::{Pages, Vpn};
use rustc_hash::FxHashMap;

/// We only judge once ksmd has rested for this long, nanoseconds. So the count is later than ksmd's last merges.
const RESTED_NS: u64 = 1_000_000_000;
/// We only judge a region if a count looks up at least this many of its duplicates.
const EXPECTED_MIN: u64 = 256;
/// A region counts as merging if at least one in this many of its duplicates has merged.
const MERGED_PART: u64 = 8;
/// We unmark one in this many of the processes at once.
const AT_ONCE: usize = 4;

impl Engine {
    /// Whether we may still mark more. If so, marked memory may be unmerged just because its copies aren't marked yet.
    fn has_copies_to_mark(&self) -> bool {
        if self.plan.reading.foreground || self.ksmd.marker.has_waiting() {
            return true;
        }
        for region in self.table.iter() {
            let is_busy = region.hold.retry_ns > self.snapshot.now_ns;
            let may_be_marked = region.life.is_worth_marking() || is_busy;
            if region.hold.full.is_some() || may_be_marked && !(is_busy && region.hold.lacks_mappings) {
                return true;
            }
        }
        false
    }

    /// When the oldest region appeared that we sample but don't mark yet because it's too young, nanoseconds. It may hold
    /// the copies of what we have marked since.
    fn first_newcomer_ns(&self) -> u64 {
        let mut first_ns = u64::MAX;
        for region in self.table.iter() {
            let is_new = matures_ns(region, self.pace(), &self.config) > self.snapshot.now_ns;
            if is_new && region.survey.tally.duplicates() > 0 {
                first_ns = first_ns.min(region.seen_ns);
            }
        }
        first_ns
    }

    /// Unmarks regions where a count finds almost nothing merged, although ksmd has visited all marks twice.
    pub(super) fn find_unmerged(&mut self, merged: &[MergedSample], counted: Option<&Counted>) {
        let now_ns = self.snapshot.now_ns;
        let has_rested = self.ksmd.scheduler.idle_ns(now_ns) >= RESTED_NS && self.scans() > 0;
        if !has_rested || !self.carrier().by_marks || self.has_copies_to_mark() {
            return;
        }
        let Some(counted) = counted else { return };
        let one_in = self.saving.latest().map_or(1, |saving| saving.one_in);
        let mut found: FxHashMap<(RegionKey, Vpn), Pages> = FxHashMap::default();
        let mut last = None;
        for sample in merged {
            last = self.table.near(last, sample.region, sample.page);
            if let Some(region) = last {
                *found.entry((region.view.key, region.view.first)).or_default() += Pages(one_in);
            }
        }
        for region in split_zeros(&self.table, counted) {
            *found.entry((region.view.key, region.view.first)).or_default() += Pages(one_in);
        }
        let newcomer_ns = self.first_newcomer_ns();
        let mut unmerged: Vec<OwnerKey> = Vec::new();
        for region in self.table.iter_mut() {
            if region.marks.merges || !is_judged(region, one_in, newcomer_ns) {
                continue;
            }
            let expected = region.merged_by_ksmd();
            // The kernel counts merged zeros by process, not by region.
            let zeros = counted.zeros.get(&region.view.owner).map(|&(_, pages)| pages).unwrap_or_default();
            let frames = found.get(&(region.view.key, region.view.first)).copied().unwrap_or_default();
            region.marks.merges = (zeros + frames).0 * MERGED_PART >= expected.0;
            if region.marks.merges {
                region.hold.unmerged = 0;
            } else if !unmerged.contains(&region.view.owner) {
                unmerged.push(region.view.owner);
            }
        }
        let first = &unmerged[..unmerged.len().div_ceil(AT_ONCE)];
        for region in self.table.iter_mut() {
            if region.marks.merges || !is_judged(region, one_in, newcomer_ns) {
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

/// Whether we can judge a region: a count that looks up one page in `one_in` includes enough of its duplicates, and their
/// copies are still there, none of them in a newcomer that we don't mark yet.
fn is_judged(region: &Region, one_in: u64, newcomer_ns: u64) -> bool {
    let Some(judgement) = region.life.judgement() else { return false };
    judgement.at_ns < newcomer_ns && !region.marks.lost_copies && region.merged_by_ksmd().0 / one_in >= EXPECTED_MIN
}
