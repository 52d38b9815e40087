//! What a sampled page says about its region, by how the page is held.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageSample, PageState, Samples};
use crate::index::{Location, Occurrences};
use crate::keys::RegionKey;
use crate::placement::placer::Stays;
use crate::region::{Region, Stage};
use crate::units::{Pages, Vpn};

/// What a page that holds memory counts as in its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Its content was seen nowhere else.
    Single,
    /// It is zero, merged already, or its content was seen elsewhere.
    Duplicate,
}

impl Engine {
    pub(super) fn record_samples(&mut self, samples: &Samples) {
        // The blocks of one mapping have slots of their own, so a slot is known up to its end only.
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
            self.bottom_pages += u64::from(region.level == 1);
            self.record_sample(slot, sample);
        }
    }

    fn record_sample(&mut self, slot: u32, sample: &PageSample) {
        let Some(region) = self.table.get_mut(slot) else { return };
        let examined = matches!(region.stage, Stage::Examine(_));
        if examined {
            region.stage = Stage::Examine(sample.page + 1);
        }
        let verdict = match sample.state {
            PageState::Absent => {
                // The page was given back, not broken.
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
            // One copy already.
            PageState::Shared => Verdict::Single,
            PageState::Private => self.record_private(slot, sample, examined),
        };
        let Some(region) = self.table.get_mut(slot).filter(|_| examined) else { return };
        let number = sample.page.extent();
        let extent = match region.extents.last_entry() {
            // A region is read upwards.
            Some(last) if *last.key() == number => last.into_mut(),
            _ => region.extents.entry(number).or_default(),
        };
        extent.resident += 1;
        extent.duplicate += u16::from(verdict == Verdict::Duplicate);
        extent.huge += u16::from(sample.huge);
    }

    /// A page that KSM has merged: one copy already. Its content is indexed all the same, because other pages may come to
    /// hold it too.
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

    /// A page that KSM could merge.
    fn record_private(&mut self, slot: u32, sample: &PageSample, examined: bool) -> Verdict {
        let (now_ns, zero) = (self.snapshot.now_ns, sample.digest == Digest::ZERO);
        let seen = if zero { Occurrences::None } else { self.look_up(slot, sample) };
        let mut duplicate = zero || seen != Occurrences::None;
        if self.on_request() && !self.request_merge(slot, sample, duplicate) {
            duplicate = false;
        }
        let Some(region) = self.table.get_mut(slot) else { return Verdict::Single };
        if !examined && matches!(region.stage, Stage::Judged(_)) {
            region.survey.record_renewal(duplicate);
        }
        let offset = region.offset(sample.page);
        let comparable = |print| !self.colliding_fingerprints.contains(&print);
        region.survey.probe(offset, sample.digest, region.stage == Stage::Survey, comparable);
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
                // In both directions: earlier pages cannot all be credited with their new copy.
                Occurrences::Several(before) => 2 * u64::from(before),
            };
        }
        if seen != Occurrences::None {
            self.credit_first(seen);
        }
        if duplicate { Verdict::Duplicate } else { Verdict::Single }
    }

    /// Names a page to be merged with the one that holds the same content, if it is a duplicate and both may be. False if it has
    /// been written since it was last merged: it is left alone.
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
            // Pages may have been merged with the one that can't be named now.
            self.requests.leave_behind(digest);
        }
        let keep = other.and_then(|other| {
            let page = other.page_at(kept.offset);
            let known = (other.view.owner, other.usage.active.contains(page));
            // A page that others were told to be merged with must not be taken itself: they would be left behind.
            let is_kept = other.usage.merged.contains(page) || self.requests.is_kept(kept);
            let stays = if is_kept {
                Stays::Known
            } else {
                let chosen = self.placer.choose(known, (owner, active), sample.page, &self.snapshot);
                self.headroom.stays(chosen, known.0, owner)
            };
            let keep = ((other.view.key, page), kept);
            match stays {
                Stays::Known => Some((keep, (take, location))),
                Stays::New => Some(((take, location), keep)),
                Stays::Both => None,
            }
        });
        let added = keep.is_some_and(|(keep, take)| self.requests.add(take, keep, digest));
        if let Some((limit, Pages(0))) = self.headroom.of(owner).filter(|_| !added) {
            // It's read again once there is headroom.
            if let Some(region) = self.table.get_mut(slot) {
                region.hold.set_full(Some(limit));
            }
        }
        // If the other page may not be merged now, it finds this one once it may.
        if !added || keep.is_some_and(|(keep, _)| keep.1 == location) {
            self.index.point_to(digest, location);
        }
        true
    }

    /// Whether the page that the index has for a content may be named, if its trust domain is the right one.
    fn may_be_named(&self, region: &Region, kept: Location) -> bool {
        let (now_ns, config) = (self.snapshot.now_ns, &self.config);
        let is_broken = config.filters_cow_breaks() && region.usage.broken.contains(region.page_at(kept.offset));
        region.may_be_requested(now_ns, config) && !is_broken
    }

    /// A merged page: if another page is kept for its content, one of them is to be merged with the other. It is this one that stays,
    /// unless the other is merged too. Whether a pair was named.
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
        if !other.usage.merged.contains(page) {
            self.index.point_to(digest, location);
            let may_be_named = may_be_named && !self.requests.is_kept(kept);
            return may_be_named && self.requests.add(other_page, (own, location), digest);
        }
        if self.requests.is_left_behind(digest) {
            let may_be_named = may_be_named && !self.requests.is_kept(location);
            return may_be_named && self.requests.add((own, location), other_page, digest);
        }
        if other.survey.weight(config.threshold()) > 1 {
            // This one is known to be merged now. The other may have been written since it was last read.
            self.index.point_to(digest, location);
        }
        false
    }

    /// Indexes a page that is one copy already.
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

    /// Credits the page that a content was first seen on with its first copy.
    fn credit_first(&mut self, seen: Occurrences) {
        let Occurrences::One(first) = seen else { return };
        let Some(region) = self.table.get_mut(first.slot) else { return };
        let page = region.page_at(first.offset);
        if region.is_marked(page) {
            return;
        }
        if region.is_counted(page) {
            if let Some(extent) = region.extents.get_mut(&page.extent()) {
                // Entries may be out of date: never count more than there is.
                extent.duplicate = (extent.duplicate + 1).min(extent.resident);
                region.changed = true;
            }
        } else if region.stage == Stage::Survey {
            region.survey.tally.found += 1;
            region.survey.tally.copies += 1;
        }
    }
}
