//! Plans pairs: which pages to merge with which, on kernels that merge pages on request.

use super::Planner;
use crate::engine::Engine;
use crate::hash::Digest;
use crate::host::{Actions, PageSample, PageState};
use crate::index::Location;
use crate::keys::DomainKey;
use crate::placement::inventory::PageCopy;
use crate::placement::placer::Stays;
use crate::region::Region;
use crate::requests::IndexedPage;
use crate::units::Pages;
use rustc_hash::FxHashMap;

#[derive(Debug)]
pub(super) struct Pairs;

impl Planner for Pairs {
    fn record_page(&self, engine: &mut Engine, slot: u32, sample: &PageSample, duplicate: bool) -> bool {
        if let Some(region) = engine.table.get_mut(slot) {
            let hides_lone = !engine.snapshot.shows_lone && engine.room.headroom.is_limited(region.view.owner);
            if hides_lone != region.usage.contents.is_some() {
                region.usage.contents = hides_lone.then(FxHashMap::default);
            }
        }
        match sample.state {
            PageState::Merged => engine.pair_merged(slot, sample),
            _ => engine.pair_private(slot, sample, duplicate),
        }
    }

    fn actions(&self, engine: &mut Engine) -> Actions {
        if !engine.snapshot.ksm.ours {
            engine.requests.clear();
        }
        let unmark = engine.unmark();
        engine.name_relatives();
        engine.name_kin();
        let merge = engine.requests.ranges();
        let moves = engine.moves();
        Actions { unmark, merge, moves, ..Actions::default() }
    }

    /// All resident pages if more may be merged than we know, else those we've merged and, in marked mappings, those
    /// that outsiders map: Linux 6.12 shows fork-shared pages there as merged, so an earlier run may have merged them.
    fn mergeable(&self, region: &Region) -> Pages {
        if region.usage.readings_due > 0 {
            return region.resident();
        }
        let outside = if region.is_named() { region.usage.outside.len() } else { Pages(0) };
        region.usage.merged.len() + outside
    }

    /// All duplicates that we found in the region.
    fn may_return(&self, region: &Region) -> Pages {
        if region.life.is_judged() { region.counts().duplicate } else { Pages(0) }
    }

    /// We read the region again, because we only find pairs by reading.
    fn judge_again(&self, region: &mut Region, now_ns: u64, top: usize) {
        if region.hold.may_examine(now_ns) {
            region.hold.full = None;
            region.hold.put_off(now_ns);
            region.examine(top);
        }
    }
}

impl Engine {
    /// If a page is a duplicate, asks to merge it with the page that holds the same content, provided that both may be
    /// merged. If we leave a page alone for now ([`Region::may_be_named`]), it doesn't count as a duplicate.
    fn pair_private(&mut self, slot: u32, sample: &PageSample, duplicate: bool) -> bool {
        let now_ns = self.snapshot.now_ns;
        let Some(region) = self.table.get_mut(slot) else { return duplicate };
        let content = region.usage.contents.as_ref().and_then(|contents| contents.get(&sample.page));
        if sample.lone || content == Some(&sample.digest.fingerprint()) {
            // The frame may be charged to another cgroup. Then the program's own cgroup needs room for its copy, so the
            // page still counts as merged.
            region.usage.merged.insert(sample.page);
        } else {
            region.usage.record_unmerged(sample.page);
        }
        if !region.may_be_named(sample.page, now_ns) {
            return false;
        }
        if duplicate && region.may_be_requested(now_ns, &self.config) {
            let new = IndexedPage::new(region, slot, sample.page);
            if sample.digest == Digest::ZERO {
                self.requests.add_zero(new);
            } else {
                let domain = region.view.domain;
                self.pair(new, sample.digest.in_domain(domain), domain);
            }
        }
        duplicate
    }

    /// Asks to merge a page with the page that the index has for its content.
    fn pair(&mut self, new: IndexedPage, digest: Digest, domain: DomainKey) {
        let Some(kept) = self.contents.index.page_of(digest) else { return };
        if kept == new.location {
            return;
        }
        let mut stays = Stays::Both;
        let mut named = false;
        if let Some(known) = self.page_to_name(kept, domain) {
            stays = self.choose(known, new);
            named = match stays {
                Stays::Known => self.ask(new, known, digest, self.needs_merged(known)),
                Stays::New => self.ask(known, new, digest, false),
                Stays::Both => false,
            };
        } else {
            // We can't merge with the known page now, but other pages may have been merged with it before.
            self.requests.leave_behind(digest);
        }
        if !named {
            self.note_headroom(new.location.slot);
        }
        // If we can't merge the known page now, we'll find this page through the index when we read the known page
        // again.
        if !named || stays == Stays::New {
            self.contents.index.point_to(digest, new.location);
        }
    }

    /// Asks to merge a page with the one to keep, unless a limit keeps its process out. Returns whether we've asked.
    fn ask(&mut self, take: IndexedPage, keep: IndexedPage, digest: Digest, needs_merged: bool) -> bool {
        let owner_of = |page: IndexedPage| self.table.get(page.location.slot).map(|region| region.view.owner);
        let (Some(owner), Some(of)) = (owner_of(take), owner_of(keep)) else { return false };
        !self.room.headroom.keeps_apart(owner, of) && self.requests.add(take, keep, digest, needs_merged)
    }

    /// Which of two equal pages the kernel should keep.
    fn choose(&mut self, known: IndexedPage, new: IndexedPage) -> Stays {
        let Some(other) = self.table.get(known.location.slot) else { return Stays::Both };
        let Some(region) = self.table.get(new.location.slot) else { return Stays::Both };
        // Other pages are merged with the known page, or will be in this cycle. So we must keep it: if we replaced it,
        // they'd go on sharing its old frame.
        if other.usage.merged.contains(known.page) || self.requests.is_kept(known.location) {
            return Stays::Known;
        }
        let known = PageCopy { owner: other.view.owner, active: other.usage.active.contains(known.page) };
        let copy = PageCopy { owner: region.view.owner, active: region.usage.active.contains(new.page) };
        let chosen = self.placer.choose(known, copy, new.page, &self.snapshot);
        self.room.headroom.stays(chosen, known.owner, copy.owner)
    }

    /// Whether we may keep this page only if it's still merged, as it was when we last saw it. Otherwise its cgroup
    /// would keep one more page for others, without headroom for that page.
    fn needs_merged(&self, kept: IndexedPage) -> bool {
        let Some(region) = self.table.get(kept.location.slot) else { return false };
        region.usage.merged.contains(kept.page) && self.room.headroom.is_limited(region.view.owner)
    }

    /// Whether a region may have merged pages that nobody else maps any more but that are still charged to another
    /// cgroup.
    pub(in crate::engine) fn may_be_charged_elsewhere(&self, region: &Region) -> bool {
        let on_request = !self.by_marks();
        let has_merged = region.usage.readings_due > 0 || !region.usage.merged.is_empty();
        on_request && has_merged && self.room.headroom.is_limited(region.view.owner)
    }

    /// If a region's process has no headroom left, notes the limit. We read the region again once there's headroom.
    pub(in crate::engine) fn note_headroom(&mut self, slot: u32) {
        let Some(region) = self.table.get_mut(slot) else { return };
        if let Some(limit) = self.room.headroom.full(region.view.owner) {
            region.hold.full = Some(limit);
        }
    }

    /// The page that the index has for a content, if it's in this trust domain and may be merged now.
    fn page_to_name(&self, kept: Location, domain: DomainKey) -> Option<IndexedPage> {
        let region = self.table.get(kept.slot)?;
        let page = region.page_at(kept.offset);
        let now_ns = self.snapshot.now_ns;
        let may_be_requested = region.view.domain == domain && region.may_be_requested(now_ns, &self.config);
        if !may_be_requested || !region.may_be_named(page, now_ns) {
            return None;
        }
        Some(IndexedPage { region: region.view.key, page, location: kept })
    }

    /// Records a merged page. If the index points to another page for its content, we ask to merge the two: the kernel
    /// keeps this page, or the other one if that's merged as well. Returns whether we've asked.
    fn pair_merged(&mut self, slot: u32, sample: &PageSample) -> bool {
        let Some(region) = self.table.get_mut(slot) else { return false };
        region.usage.note_merged(sample.page, sample.digest);
        let domain = region.view.domain;
        let own = IndexedPage::new(region, slot, sample.page);
        let may_be_requested = region.may_be_requested(self.snapshot.now_ns, &self.config);
        let digest = sample.digest.in_domain(domain);
        let Some(kept) = self.contents.index.page_of(digest) else { return false };
        if kept == own.location {
            return false;
        }
        let Some(other) = self.table.get(kept.slot) else {
            self.contents.index.point_to(digest, own.location);
            return false;
        };
        let is_merged = other.usage.merged.contains(other.page_at(kept.offset));
        if is_merged && !self.requests.is_left_behind(digest) {
            if other.survey.weight(self.config.threshold()) > 1 {
                // We know that this page is merged now. The other page may have been written since we last read it.
                self.contents.index.point_to(digest, own.location);
            }
            return false;
        }
        if !is_merged {
            self.contents.index.point_to(digest, own.location);
        }
        if !may_be_requested {
            return false;
        }
        let Some(known) = self.page_to_name(kept, domain) else { return false };
        if is_merged {
            let needs_merged = self.needs_merged(known);
            return !self.requests.is_kept(own.location) && self.ask(own, known, digest, needs_merged);
        }
        // This page's program may write it before the merge, hence `needs_merged`.
        !self.requests.is_kept(kept) && self.ask(known, own, digest, self.needs_merged(own))
    }
}
