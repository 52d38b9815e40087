//! What a sampled page tells us about its region.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageSample, PageState, Samples};
use crate::index::{Location, Occurrences};
use crate::keys::RegionKey;
use crate::placement::placer::Stays;
use crate::region::{Event, Region};
use crate::units::{Pages, Vpn};

/// How a resident page counts in its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// We've seen its content nowhere else.
    Single,
    /// The page is zero or merged already, or we've seen its content elsewhere.
    Duplicate,
}

impl Engine {
    pub(super) fn record_samples(&mut self, samples: &Samples) {
        // Each block of a mapping has its own slot, so the slot we've found is only good up to the block's end.
        let mut last: Option<(RegionKey, Vpn, u32)> = None;
        for sample in &samples.pages {
            let slot = match last {
                Some((key, end, slot)) if key == sample.region && sample.page < end => slot,
                _ => match self.table.find(sample.region, sample.page) {
                    Some(slot) => slot,
                    None => continue,
                },
            };
            let Some(region) = self.table.get_mut(slot) else { continue };
            last = Some((sample.region, region.end(), slot));
            if sample.active && region.shows_activity() {
                region.usage.active.insert(sample.page);
            }
            if sample.node.is_some() {
                self.placer.record_node(region.view.owner, sample);
            }
            self.bottom_pages += u64::from(region.life.level() == 1);
            self.record_sample(slot, sample);
        }
    }

    fn record_sample(&mut self, slot: u32, sample: &PageSample) {
        let Some(region) = self.table.get_mut(slot) else { return };
        let examined = region.life.is_reading();
        region.life.advance(Event::ReadTo(sample.page + 1));
        let verdict = match sample.state {
            PageState::Absent => {
                // The program gave this page back, so it isn't broken.
                region.usage.cow_breaks.record_unmerged(sample.page, self.snapshot.now_ns, None);
                return;
            }
            PageState::ZeroMapped => {
                // KSM merges zeros with the zero page.
                if self.visiting {
                    region.usage.cow_breaks.record_merged(sample.page, self.snapshot.now_ns, Digest::ZERO);
                }
                return;
            }
            PageState::Merged => self.record_merged(slot, sample, examined),
            // Only one copy exists.
            PageState::Shared => Verdict::Single,
            PageState::Private => self.record_private(slot, sample, examined),
        };
        let Some(region) = self.table.get_mut(slot).filter(|_| examined) else { return };
        let number = sample.page.extent();
        let extent = match region.extents.last_entry() {
            // We read a region upwards.
            Some(last) if *last.key() == number => last.into_mut(),
            _ => region.extents.entry(number).or_default(),
        };
        extent.resident += 1;
        extent.duplicate += u16::from(verdict == Verdict::Duplicate);
        extent.huge += u16::from(sample.huge);
    }

    /// Records a page that KSM has merged. Only one copy exists, but we index its content anyway, because other pages
    /// may come to hold it, too.
    fn record_merged(&mut self, slot: u32, sample: &PageSample, examined: bool) -> Verdict {
        let (now_ns, visiting) = (self.snapshot.now_ns, self.visiting);
        let Some(region) = self.table.get_mut(slot) else { return Verdict::Single };
        if visiting {
            region.usage.cow_breaks.record_merged(sample.page, now_ns, sample.digest);
        }
        region.marks.samples.sampled += u64::from(!examined);
        self.note_copy(slot, sample);
        let is_news = self.on_request() && self.keep_merged(slot, sample);
        if let Some(region) = self.table.get_mut(slot).filter(|_| !examined) {
            region.survey.record_renewal(is_news);
        }
        if self.config.counts(sample.digest) { Verdict::Duplicate } else { Verdict::Single }
    }

    /// Records a page that KSM could merge.
    fn record_private(&mut self, slot: u32, sample: &PageSample, examined: bool) -> Verdict {
        let (now_ns, zero) = (self.snapshot.now_ns, sample.digest == Digest::ZERO);
        let seen = if zero { Occurrences::None } else { self.look_up(slot, sample) };
        let mut duplicate = zero || seen != Occurrences::None;
        if self.on_request() && !self.request_merge(slot, sample, duplicate) {
            duplicate = false;
        }
        let Some(region) = self.table.get_mut(slot) else { return Verdict::Single };
        if !examined && region.life.is_judged() {
            region.survey.record_renewal(duplicate);
        }
        let offset = region.offset(sample.page);
        let comparable = |print| !self.colliding_fingerprints.contains(&print);
        region.survey.probe(offset, sample.digest, region.life.is_surveyed(), comparable);
        if !examined && region.is_marked(sample.page) {
            region.marks.samples.sampled += 1;
            region.marks.samples.unmerged += u64::from(duplicate);
            region.usage.cow_breaks.record_unmerged(sample.page, now_ns, duplicate.then_some(sample.digest));
        } else {
            let tally = &mut region.survey.tally;
            tally.sampled += 1;
            tally.zero += u64::from(zero);
            tally.found += u64::from(!zero && duplicate);
            tally.copies += match seen {
                Occurrences::None => 0,
                Occurrences::One(_) => 1,
                // Twice, for both directions: we can't credit every earlier page with its new copy.
                Occurrences::Several(before) => 2 * u64::from(before),
            };
        }
        if seen != Occurrences::None {
            self.credit_first(seen);
        }
        if duplicate { Verdict::Duplicate } else { Verdict::Single }
    }

    /// If a page is a duplicate, asks to merge it with the page that holds the same content, provided that both may be
    /// merged. Returns false if the program keeps writing to the page after merges: then we leave it alone.
    fn request_merge(&mut self, slot: u32, sample: &PageSample, duplicate: bool) -> bool {
        let (now_ns, config) = (self.snapshot.now_ns, &self.config);
        let Some(region) = self.table.get_mut(slot) else { return true };
        region.usage.record_unmerged(sample.page, now_ns);
        if config.filters_cow_breaks() && region.usage.broken.contains(sample.page) {
            return false;
        }
        if !duplicate || !region.may_be_requested(now_ns, config) {
            return true;
        }
        let location = Location { slot, offset: region.offset(sample.page) };
        let (take, domain) = ((sample.region, sample.page), region.view.domain);
        if sample.digest == Digest::ZERO {
            self.requests.add_zero(take, location);
            return true;
        }
        let digest = sample.digest.in_domain(domain);
        let Some(kept) = self.index.page_of(digest).filter(|&kept| kept != location) else { return true };
        let (owner, active) = (region.view.owner, region.usage.active.contains(sample.page));
        let may_be_named = |other: &&Region| other.view.domain == domain && self.may_be_named(other, kept);
        let other = self.table.get(kept.slot).filter(may_be_named);
        if other.is_none() {
            // We can't name that page now, but may have merged others with it before.
            self.requests.leave_behind(digest);
        }
        let keep = other.and_then(|other| {
            let page = other.page_at(kept.offset);
            let known = (other.view.owner, other.usage.active.contains(page));
            // We told other pages to merge with this one, so it must stay: if we took it, we'd leave them behind.
            let is_merged = other.usage.merged.contains(page);
            let stays = if is_merged || self.requests.is_kept(kept) {
                Stays::Known
            } else {
                let chosen = self.placer.choose(known, (owner, active), sample.page, &self.snapshot);
                self.headroom.stays(chosen, known.0, owner)
            };
            let keep = ((other.view.key, page), kept);
            let needs_merged = is_merged && self.headroom.is_limited(other.view.owner);
            match stays {
                Stays::Known => Some((keep, (take, location), needs_merged)),
                Stays::New => Some(((take, location), keep, false)),
                Stays::Both => None,
            }
        });
        let added = keep.is_some_and(|(keep, take, needs_merged)| self.requests.add(take, keep, digest, needs_merged));
        if let Some((limit, Pages(0))) = self.headroom.of(owner).filter(|_| !added) {
            // We read it again once there's headroom.
            if let Some(region) = self.table.get_mut(slot) {
                region.hold.full = Some(limit);
            }
        }
        // If the other page may not be merged now, this way it'll find us once it may.
        if !added || keep.is_some_and(|(keep, ..)| keep.1 == location) {
            self.index.point_to(digest, location);
        }
        true
    }

    /// Whether we may name the page that the index has for a content, given that its trust domain is the right one.
    fn may_be_named(&self, region: &Region, kept: Location) -> bool {
        let (now_ns, config) = (self.snapshot.now_ns, &self.config);
        let is_broken = config.filters_cow_breaks() && region.usage.broken.contains(region.page_at(kept.offset));
        region.may_be_requested(now_ns, config) && !is_broken
    }

    /// Records a merged page. If the index points to another page for its content, we ask to merge the two. This page
    /// stays, unless the other one is merged as well. Returns whether we've named a pair.
    fn keep_merged(&mut self, slot: u32, sample: &PageSample) -> bool {
        let (now_ns, config) = (self.snapshot.now_ns, &self.config);
        let Some(region) = self.table.get_mut(slot) else { return false };
        region.usage.merged.insert(sample.page);
        let (own, domain) = ((sample.region, sample.page), region.view.domain);
        let (location, may_be_requested) =
            (Location { slot, offset: region.offset(sample.page) }, region.may_be_requested(now_ns, config));
        let digest = sample.digest.in_domain(domain);
        let Some(kept) = self.index.page_of(digest).filter(|&kept| kept != location) else { return false };
        let Some(other) = self.table.get(kept.slot) else {
            self.index.point_to(digest, location);
            return false;
        };
        let page = other.page_at(kept.offset);
        let may_be_named = may_be_requested && other.view.domain == domain && self.may_be_named(other, kept);
        let other_page = ((other.view.key, page), kept);
        let needs_merged = self.headroom.is_limited(other.view.owner);
        if !other.usage.merged.contains(page) {
            self.index.point_to(digest, location);
            let may_be_named = may_be_named && !self.requests.is_kept(kept);
            return may_be_named && self.requests.add(other_page, (own, location), digest, false);
        }
        if self.requests.is_left_behind(digest) {
            let may_be_named = may_be_named && !self.requests.is_kept(location);
            return may_be_named && self.requests.add((own, location), other_page, digest, needs_merged);
        }
        if other.survey.weight(config.threshold()) > 1 {
            // We know this page is merged now. The program may have written the other since we last read it.
            self.index.point_to(digest, location);
        }
        false
    }

    /// Indexes a page that exists in one copy only.
    fn note_copy(&mut self, slot: u32, sample: &PageSample) {
        if sample.digest != Digest::ZERO {
            let seen = self.look_up(slot, sample);
            self.credit_first(seen);
        }
    }

    /// Looks a content up in the index and records this page there, unless the content doesn't count.
    fn look_up(&mut self, slot: u32, sample: &PageSample) -> Occurrences {
        let Some(region) = self.table.get(slot).filter(|_| self.config.counts(sample.digest)) else {
            return Occurrences::None;
        };
        let location = Location { slot, offset: region.offset(sample.page) };
        self.index.record(sample.digest.in_domain(region.view.domain), location)
    }

    /// Credits the page where we first saw a content with its first copy.
    fn credit_first(&mut self, seen: Occurrences) {
        let Occurrences::One(first) = seen else { return };
        let Some(region) = self.table.get_mut(first.slot) else { return };
        let page = region.page_at(first.offset);
        if region.is_marked(page) {
            return;
        }
        if region.is_counted(page) {
            if let Some(extent) = region.extents.get_mut(&page.extent()) {
                // Entries may be out of date, so we never count more than there is.
                extent.duplicate = (extent.duplicate + 1).min(extent.resident);
                region.life.advance(Event::Reopen);
            }
        } else if region.life.is_surveyed() {
            region.survey.tally.found += 1;
            region.survey.tally.copies += 1;
        }
    }
}
