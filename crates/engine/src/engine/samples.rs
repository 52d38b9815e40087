//! Records sampled pages, and what they tell us about their regions.

use super::Engine;
use crate::hash::Digest;
use crate::host::{PageSample, PageState, Samples};
use crate::index::{Location, Occurrences};
use crate::region::Event;
use crate::units::Vpn;

impl Engine {
    pub(super) fn record_samples(&mut self, samples: &Samples) {
        let mut last: Option<u32> = None;
        self.plan.read = 0;
        for mut sample in samples.pages.iter().copied() {
            // The next sample is mostly from the same region, or the same block of a mapping.
            let region = last.and_then(|slot| self.table.get(slot));
            if !region.is_some_and(|region| region.holds(sample.region, sample.page)) {
                last = self.table.find(sample.region, sample.page);
            }
            let Some(slot) = last else { continue };
            let Some(region) = self.table.get_mut(slot) else { continue };
            if sample.active && region.shows_activity() {
                region.usage.active.insert(sample.page);
            }
            if sample.lone {
                // This process hasn't written the page: the other sharers have written theirs.
                region.usage.cow_breaks.forget_page(sample.page);
            }
            if sample.node.is_some() {
                self.placer.record_node(region.view.owner, &sample);
            }
            self.contents.bottom_pages += u64::from(region.life.level() == 1);
            self.plan.read += u64::from(sample.state.is_read(region.reads_forked()));
            if !self.snapshot.shows_lone && region.may_be_shared(&sample) {
                sample.state = PageState::Shared;
            }
            self.record_frame(slot, &sample);
            self.record_sample(slot, &sample);
        }
    }

    fn record_sample(&mut self, slot: u32, sample: &PageSample) {
        let by_marks = self.by_marks();
        let Some(region) = self.table.get_mut(slot) else { return };
        let examined = region.life.is_reading();
        region.life.advance(Event::ReadTo(sample.page + 1));
        region.survey.has_present |= sample.state != PageState::Absent;
        if sample.outsiders && sample.state == PageState::Shared {
            region.usage.outside.insert(sample.page);
        } else if !by_marks || sample.state != PageState::Merged {
            // Pages that ksmd has merged remain in the set: outsiders may still map the frames that these pages had
            // before.
            region.usage.outside.remove(sample.page);
        }
        if sample.state == PageState::Shared {
            // We can't tell whether the process wrote the page before it forked.
            region.usage.cow_breaks.forget_page(sample.page);
        }
        let duplicates = match sample.state {
            PageState::Absent => {
                region.usage.cow_breaks.forget_page(sample.page);
                region.usage.forget_merged(sample.page);
                return;
            }
            PageState::ZeroMapped => {
                // KSM merges pages of zeros with the zero page. Pages that were never written map the zero page, too.
                if !region.usage.own.contains(sample.page) {
                    region.usage.cow_breaks.forget_page(sample.page);
                    return;
                }
                self.observe_merged(slot, sample.page, Digest::ZERO);
                1
            }
            PageState::Merged => u64::from(self.record_merged(slot, sample, examined)),
            PageState::Shared if !region.reads_forked() || sample.outsiders => {
                region.survey.record_forked();
                0
            }
            PageState::Shared | PageState::Private => self.record_private(slot, sample, examined),
        };
        if examined {
            self.count_in_extent(slot, sample, duplicates);
        }
    }

    /// Observes how long a merged page lasts. ksmd has merged nothing since it became idle, so the page has been merged
    /// at least since then. We only observe pages in our marks, or on request pages that were written after a merge.
    fn observe_merged(&mut self, slot: u32, page: Vpn, digest: Digest) {
        if !self.plan.visiting {
            return;
        }
        let now_ns = self.snapshot.now_ns;
        let by_marks = self.by_marks();
        let idle_ns = if by_marks { self.ksmd.scheduler.idle_ns(now_ns) } else { 0 };
        let Some(region) = self.table.get_mut(slot) else { return };
        let matters = if by_marks { region.marks.contains(page) } else { region.usage.written.contains(page) };
        if matters {
            let colliding = &self.contents.colliding_fingerprints;
            region.usage.cow_breaks.forget_colliding(page, |print| colliding.contains(&print));
            region.usage.cow_breaks.record_merged(page, now_ns.saturating_sub(idle_ns), now_ns, digest);
        }
    }

    fn count_in_extent(&mut self, slot: u32, sample: &PageSample, duplicates: u64) {
        let Some(region) = self.table.get_mut(slot) else { return };
        let number = sample.page.extent();
        let extent = match region.extents.last_entry() {
            // We read regions in ascending order, so it's mostly the last extent.
            Some(last) if *last.key() == number => last.into_mut(),
            _ => region.extents.entry(number).or_default(),
        };
        extent.resident += 1;
        extent.add_duplicates(duplicates);
        extent.huge += u16::from(sample.huge);
        extent.shared += u16::from(sample.state == PageState::Shared);
    }

    /// Records a page that KSM has merged. Only one copy exists, but we index its content anyway, because other pages
    /// may come to hold it, too. Returns whether it counts as a duplicate.
    fn record_merged(&mut self, slot: u32, sample: &PageSample, examined: bool) -> bool {
        self.observe_merged(slot, sample.page, sample.digest);
        let Some(region) = self.table.get_mut(slot) else { return false };
        region.marks.samples.sampled += u64::from(!examined);
        if sample.digest != Digest::ZERO {
            let seen = self.look_up(slot, sample);
            self.credit_first(seen);
        }
        let is_news = self.planner().record_page(self, slot, sample, false);
        if !examined {
            if let Some(region) = self.table.get_mut(slot) {
                region.survey.record_renewal(is_news);
            }
        }
        self.config.counts(sample.digest)
    }

    /// Records a page that KSM could merge. Returns 0 if it's no duplicate, else how many it stands for: more than one
    /// if the index doesn't keep all contents.
    fn record_private(&mut self, slot: u32, sample: &PageSample, examined: bool) -> u64 {
        let now_ns = self.snapshot.now_ns;
        let zero = sample.digest == Digest::ZERO;
        let seen = if zero { Occurrences::None } else { self.look_up(slot, sample) };
        let duplicate = self.planner().record_page(self, slot, sample, zero || seen != Occurrences::None);
        let by_marks = self.by_marks();
        let Some(region) = self.table.get(slot) else { return 0 };
        let is_kept = self.contents.index.keeps(sample.digest.in_domain(region.view.domain));
        let shows_kin = !by_marks && !zero && is_kept && region.life.is_surveyed();
        let kin = shows_kin.then(|| self.kin_at(region, sample));
        let stands_for = if zero { 1 } else { self.contents.index.stands_for() };
        let duplicates = if duplicate { stands_for } else { 0 };
        let Some(region) = self.table.get_mut(slot) else { return 0 };
        if let Some(kin) = kin {
            region.survey.kin.record(kin);
        }
        region.usage.cow_breaks.record_written(sample.page, now_ns);
        if !examined && region.life.is_judged() && (zero || is_kept) {
            region.survey.record_renewal(duplicate);
        }
        let offset = region.offset(sample.page);
        let colliding = &self.contents.colliding_fingerprints;
        region.survey.probe(offset, sample.digest, region.life.is_surveyed(), |print| !colliding.contains(&print));
        if !examined && region.is_marked(sample.page) {
            region.marks.samples.sampled += 1;
            region.marks.samples.unmerged += duplicates;
            if duplicate && by_marks {
                self.note_unmerged(slot, sample);
            }
        } else {
            let tally = &mut region.survey.tally;
            tally.sampled += 1;
            tally.zero += u64::from(zero);
            tally.found += if zero { 0 } else { duplicates };
            tally.copies += match seen {
                Occurrences::None => 0,
                Occurrences::One(_) => stands_for,
                // Each of the earlier pages has gained a copy, too. The index doesn't point to all these pages, so we
                // count their new copies here.
                Occurrences::Several(before) => 2 * u64::from(before) * stands_for,
            };
        }
        self.credit_first(seen);
        duplicates
    }

    /// Looks a content up in the index and records this page there, unless we don't merge such contents
    /// ([`Only`](crate::config::Only)).
    fn look_up(&mut self, slot: u32, sample: &PageSample) -> Occurrences {
        if !self.config.counts(sample.digest) {
            return Occurrences::None;
        }
        let Some(region) = self.table.get(slot) else { return Occurrences::None };
        let location = Location { slot, offset: region.offset(sample.page) };
        let digest = sample.digest.in_domain(region.view.domain);
        let only = match sample.state {
            PageState::Shared => self.contents.index.only_page_of(digest),
            _ => None,
        };
        if let Some(only) = only {
            match self.table.get(only.slot) {
                // The page in the index is gone. Most likely it was the same page in a relative that has ended.
                None => {
                    self.contents.index.point_to(digest, location);
                    return Occurrences::None;
                }
                Some(other) if region.is_same_frame(sample.page, other, other.page_at(only.offset)) => {
                    return Occurrences::None;
                }
                Some(_) => {}
            }
        }
        self.contents.index.record(digest, location)
    }

    /// When we see a content for the second time, the page where we first saw it turns out to be a duplicate, too.
    /// Counts that page.
    fn credit_first(&mut self, seen: Occurrences) {
        let Occurrences::One(first) = seen else { return };
        let by_marks = self.by_marks();
        let stands_for = self.contents.index.stands_for();
        let Some(region) = self.table.get_mut(first.slot) else { return };
        let page = region.page_at(first.offset);
        if region.is_marked(page) {
            return;
        }
        if region.is_counted(page) {
            if let Some(extent) = region.extents.get_mut(&page.extent()) {
                extent.add_duplicates(stands_for);
                if by_marks {
                    region.life.advance(Event::Reopen);
                }
            }
        } else if region.life.is_surveyed() {
            region.survey.tally.found += stands_for;
            region.survey.tally.copies += stands_for;
        }
    }
}
