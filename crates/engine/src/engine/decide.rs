//! Decides what happens to each region next. All that we tell people about a region comes from here.
//!
//! The checks follow the order of the cycle: regions we must not touch, regions on hold for a time, regions we're
//! reading, regions we've read whole, and regions we sample.

use super::Engine;
use crate::decision::{Decision, DecisionChange, Evidence, Kind, Reason, Verb};
use crate::host::RegionView;
use crate::region::{LeaveAlone, Region};
use crate::sampling::estimate::Estimate;
use crate::sampling::ladder::{is_out_of_sight, matures_ns, samples_wanted, wants_more};
use crate::units::{Pages, Permyriad};

/// With more regions than this, we only decide once a round.
const DECIDED_EACH_CYCLE: usize = 1 << 13;

impl Engine {
    /// Decides on every region at the end of a cycle, and logs all changes. With very many regions we only do so once a
    /// round, since it takes 0.2 us for each.
    pub(super) fn decide_all(&mut self) {
        if self.table.iter().count() > DECIDED_EACH_CYCLE && !self.plan.reading.new_round {
            return;
        }
        self.note_outsiders();
        let now_ns = self.snapshot.now_ns;
        let mut table = std::mem::take(&mut self.table);
        let sampled = table.sampled();
        for region in table.iter_mut() {
            let from = region.decision;
            let mut to = self.decide(region, sampled);
            let is_new = !to.is_like(&from);
            to.since_ns = if is_new { now_ns } else { from.since_ns };
            if is_new && region.seen_ns < now_ns {
                let RegionView { owner, key, first, pages, .. } = region.view;
                self.decisions.push(DecisionChange { owner, region: key, first, pages, from, to });
            }
            region.decision = to;
        }
        self.table = table;
    }

    /// Our evidence for duplicates in a region. We have sampled the share `sampled` of all pages in scope.
    pub(super) fn evidence(&self, region: &Region, sampled: f64) -> Evidence {
        let exact = region.life.is_judged();
        let estimate = if exact {
            let ratio = region.counts().ratio();
            Estimate { ratio, floor: ratio, ceiling: ratio }
        } else {
            region.survey.estimate(region.view.resident, sampled)
        };
        let range = (estimate.floor, estimate.ceiling);
        Evidence { kind: self.kind(region, &estimate), ratio: estimate.ratio, range, exact }
    }

    fn kind(&self, region: &Region, estimate: &Estimate) -> Kind {
        let threshold = self.config.threshold().fraction();
        let is_cow_broken = region.hold.reason() == Some(LeaveAlone::CowBroken);
        if is_cow_broken || self.is_resting(region) || region.survey.is_volatile(&self.config) {
            return Kind::CowBroken;
        }
        if region.age.is_young() {
            return Kind::ShortLived;
        }
        if estimate.ratio >= threshold || region.marked_resident() > Pages(0) || self.is_merged(region) {
            let is_mature = self.snapshot.now_ns >= matures_ns(region, self.pace(), &self.config);
            return if is_mature { Kind::StaticallyDuplicated } else { Kind::ShortLived };
        }
        let is_known = !wants_more(region, &self.config) && !is_out_of_sight(region, &self.config);
        if estimate.ceiling < 2.0 * threshold || is_known { Kind::Sparse } else { Kind::Unknown }
    }

    /// Whether we've merged much of a region on request. We may have read its pages only in a relative that shares them
    /// through fork.
    fn is_merged(&self, region: &Region) -> bool {
        let merged = region.usage.merged.len();
        merged > Pages(0) && Permyriad::of(merged.0, region.resident().0) >= self.config.threshold()
    }

    /// Whether we leave most of a region's pages alone for a time because merges there don't pay.
    fn is_resting(&self, region: &Region) -> bool {
        self.config.filters_cow_breaks() && region.resting() >= self.config.cow_threshold
    }

    /// What happens to a region next. We only compute the evidence where it matters, because that takes longest.
    fn decide(&self, region: &Region, sampled: f64) -> Decision {
        let now_ns = self.snapshot.now_ns;
        if region.hold.is_refused() {
            return Decision::new(Verb::Leave, Reason::Refused);
        }
        if region.hold.left_alone {
            return Decision::new(Verb::Leave, Reason::ProcessLeftAlone);
        }
        let hold_ns = region.hold.ends_ns();
        match held_for(region) {
            Some(reason) if hold_ns > now_ns => return Decision::new(Verb::Wait, reason).until(hold_ns),
            _ => {}
        }
        if let Some(cursor) = region.life.cursor() {
            let read = Pages(cursor.0.saturating_sub(region.view.first.0));
            return Decision::new(Verb::Read, Reason::BeingRead(read));
        }
        if self.is_resting(region) {
            let until_ns = region.usage.cow_breaks.resting().map(|(_, until_ns)| until_ns).max();
            return Decision::new(Verb::Wait, Reason::CowBroken(region.resting())).until(until_ns.unwrap_or(now_ns));
        }
        let matures_ns = matures_ns(region, self.pace(), &self.config);
        if matures_ns > now_ns && self.evidence(region, sampled).kind == Kind::ShortLived {
            return Decision::new(Verb::Wait, Reason::TooYoung).until(matures_ns);
        }
        if region.life.is_judged() {
            return self.decide_judged(region, sampled);
        }
        if wants_more(region, &self.config) {
            return Decision::new(Verb::Sample, self.too_few_samples(region));
        }
        self.watch(region, sampled)
    }

    /// What happens next to a region that we've read whole.
    fn decide_judged(&self, region: &Region, sampled: f64) -> Decision {
        let now_ns = self.snapshot.now_ns;
        if let Some(limit) = region.hold.full {
            return Decision::new(Verb::Wait, Reason::NoHeadroom(limit));
        }
        if region.life.is_worth_marking() && region.hold.short {
            return Decision::new(Verb::Wait, Reason::MemoryShort);
        }
        if region.life.is_worth_marking() && region.hold.retry_ns > now_ns {
            let reason = if region.hold.lacks_mappings { Reason::NoMappings } else { Reason::Busy };
            return Decision::new(Verb::Wait, reason).until(region.hold.retry_ns);
        }
        if let Some(wave) = self.ksmd.marker.waits(region, &self.config).filter(|_| !region.hold.short) {
            let price_ns = self.pace().price_ns;
            let rested_ns = self.ksmd.scheduler.idle_ns(now_ns);
            let left_ns = wave.rest_ns(price_ns).saturating_sub(rested_ns);
            return Decision::new(Verb::Wait, Reason::DoesNotPay { wave, price_ns }).until(now_ns + left_ns);
        }
        if region.life.is_worth_marking() {
            return Decision::new(Verb::Mark, Reason::Duplicate);
        }
        if region.life.level() > 1 && !region.marks.spans.is_empty() && self.is_merging() {
            return Decision::new(Verb::Merge, Reason::Duplicate);
        }
        if self.by_marks() {
            let marker = &self.ksmd.marker;
            if let Some(until_ns) = marker.awaits_newcomers_until_ns(region, now_ns, self.pace(), &self.config) {
                return Decision::new(Verb::Wait, Reason::AwaitsNewcomers).until(until_ns);
            }
        }
        self.watch(region, sampled)
    }

    /// Whether a region has too few duplicates for a mark.
    fn is_too_small(&self, region: &Region) -> bool {
        let most = if region.life.is_judged() { region.counts().duplicate } else { region.resident() };
        self.by_marks() && most < self.config.span_pages_min
    }

    fn too_few_samples(&self, region: &Region) -> Reason {
        let sampled = Pages(region.survey.tally.sampled);
        Reason::TooFewSamples { sampled, needed: Pages(samples_wanted(region, &self.config)) }
    }

    /// Why we only watch a region, or wait for headroom.
    fn watch(&self, region: &Region, sampled: f64) -> Decision {
        if let Some(limit) = region.hold.full {
            return Decision::new(Verb::Wait, Reason::NoHeadroom(limit));
        }
        let evidence = self.evidence(region, sampled);
        let reason = match evidence.kind {
            Kind::CowBroken => Reason::Volatile,
            Kind::StaticallyDuplicated if region.marked_resident() > Pages(0) => Reason::Done,
            Kind::StaticallyDuplicated if evidence.exact && !self.by_marks() => Reason::Done,
            Kind::StaticallyDuplicated if self.is_merged(region) => Reason::Done,
            Kind::StaticallyDuplicated if self.is_too_small(region) => Reason::TooSmall,
            Kind::StaticallyDuplicated if evidence.exact => Reason::Scattered,
            Kind::StaticallyDuplicated => Reason::Promising,
            Kind::Unknown => self.too_few_samples(region),
            _ => match self.crowd(region) {
                Some(processes) => Reason::SharedByMany(processes),
                None if self.has_outsiders(region) => Reason::SharedWithOutsiders,
                None => Reason::Sparse,
            },
        };
        Decision::new(Verb::Watch, reason)
    }
}

/// Why we leave a region alone for a time, if we do.
fn held_for(region: &Region) -> Option<Reason> {
    match region.hold.reason()? {
        LeaveAlone::CowBroken => Some(Reason::Volatile),
        LeaveAlone::TakenBack => Some(Reason::TakenBack),
        LeaveAlone::Relieved => Some(Reason::Relieved),
        LeaveAlone::Unmerged => Some(Reason::Unmerged),
        LeaveAlone::Refused => Some(Reason::Refused),
    }
}
