//! What to mark, when, and what to unmark again.
//!
//! A scan by ksmd walks everything that is marked, so marks wait for each other and one scan serves them all. Spans
//! whose merges do not last are unmarked and left alone.

use crate::churn::Churn;
use crate::config::Config;
use crate::host::{Marking, Outcome, Span};
use crate::merge::Merger;
use crate::region::{Alone, Region, Stage, covers};
use crate::slots::Slots;
use crate::units::{Pages, Permyriad};
use std::collections::BTreeMap;

/// Marks wait for other regions that are being read, but no longer than this, nanoseconds.
const HOLD_NS: u64 = 2_000_000_000;
/// First pause before ksmd is woken again for what has changed, nanoseconds; it doubles while that is fruitless.
const PAUSE_NS: u64 = 10_000_000_000;
/// Longest such pause, nanoseconds.
const PAUSE_MAX_NS: u64 = 600_000_000_000;
/// A region whose merges did not last is left alone for this long, nanoseconds.
const SOUR_NS: u64 = 3_600_000_000_000;
/// A target that could not be stopped is tried again after this, nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;
/// Pages in marked spans that must have become worth merging before ksmd is woken for them.
const REFRESH_MIN: u64 = 1_024;

/// Decides on marks.
#[derive(Clone, Debug)]
pub struct Marker {
    held_since_ns: Option<u64>,
    next_refresh_ns: u64,
    refresh_pause_ns: u64,
    refresh_expected: Pages,
}

impl Default for Marker {
    fn default() -> Self {
        Self { held_since_ns: None, next_refresh_ns: 0, refresh_pause_ns: PAUSE_NS, refresh_expected: Pages(0) }
    }
}

impl Marker {
    /// Whether marks are ready and wait for others.
    pub fn is_holding(&self) -> bool {
        self.held_since_ns.is_some()
    }

    /// The spans to mark now. `more` if regions are being read that may soon be marked as well.
    pub fn marks(
        &mut self,
        slots: &mut Slots,
        now_ns: u64,
        more: bool,
        merger: &mut Merger,
        config: &Config,
    ) -> Vec<Span> {
        let mut per_owner: BTreeMap<_, usize> = BTreeMap::new();
        for region in slots.iter() {
            *per_owner.entry(region.view.owner).or_default() += region.marks.len();
        }
        let mut ready = Vec::new();
        for (slot, region) in slots.numbered_mut() {
            let left_alone = match region.alone {
                Alone::No => false,
                Alone::Soured => now_ns < region.not_before_ns,
                Alone::Refused => true,
            };
            if !region.dirty || left_alone || !matches!(region.stage, Stage::Judged(_)) || now_ns < region.retry_ns {
                continue;
            }
            if region.is_volatile(config) {
                region.sour(now_ns + PAUSE_NS);
                continue;
            }
            if region.view.marked >= region.view.pages {
                // Marked by somebody else (`pagefold exec`): nothing to mark, but worth a scan.
                region.dirty = false;
                merger.owe(region.view.resident);
                continue;
            }
            let room = config.spans_per_process.saturating_sub(per_owner[&region.view.owner]);
            let spans = if room == 0 { Vec::new() } else { region.unmarked_candidates(config, region.thin, room) };
            if spans.is_empty() {
                region.dirty = false;
            } else {
                ready.push((slot, spans));
            }
        }
        if ready.is_empty() {
            self.held_since_ns = None;
            return Vec::new();
        }
        let since = *self.held_since_ns.get_or_insert(now_ns);
        if more && now_ns - since < HOLD_NS {
            return Vec::new();
        }
        self.held_since_ns = None;
        let mut marks = Vec::new();
        for (slot, spans) in ready {
            let Some(region) = slots.get_mut(slot) else { continue };
            region.dirty = false;
            if std::mem::replace(&mut region.alone, Alone::No) == Alone::Soured {
                region.churn = Churn::default();
            }
            for span in spans {
                marks.push(Span { region: region.view.key, first: span.first, pages: span.pages });
                region.mark(span);
            }
        }
        marks
    }

    /// Once the dense extents are merged: thinner ones, the densest first, as long as enough of all that is marked is
    /// duplicate. They are worth their metadata, 64 bytes for each page marked against a page for each merged; the
    /// yield bounds what ksmd walks for nothing.
    pub fn thin_out(&mut self, slots: &mut Slots, merger: &Merger, config: &Config) {
        if merger.is_busy() || self.is_holding() || merger.scans() == 0 {
            return;
        }
        let (mut resident, mut duplicate) = (0_u64, 0_u64);
        let mut thinner = Vec::new();
        for (slot, region) in slots.numbered_mut() {
            let marks = region
                .marks
                .iter()
                .fold((0, 0), |(resident, duplicate), mark| (resident + mark.resident.0, duplicate + mark.duplicate.0));
            (resident, duplicate) = (resident + marks.0, duplicate + marks.1);
            if region.thin
                || region.alone != Alone::No
                || !matches!(region.stage, Stage::Judged(_))
                || region.is_volatile(config)
            {
                continue;
            }
            let all = region.unmarked_candidates(config, true, config.spans_per_process);
            let (mut more, mut gain) = (0, 0);
            for span in &all {
                let inside = region.marks.iter().filter(|mark| covers(span, mark));
                let known = inside.fold((0, 0), |(resident, duplicate), mark| {
                    (resident + mark.resident.0, duplicate + mark.duplicate.0)
                });
                more += span.resident.0.saturating_sub(known.0);
                gain += span.duplicate.0.saturating_sub(known.1);
            }
            if gain >= config.span_pages_min.0 {
                thinner.push((Permyriad::of(gain, more), slot, more, gain));
            }
        }
        thinner.sort_unstable_by(|a, b| b.cmp(a));
        for (_, slot, more, gain) in thinner {
            if Permyriad::of(duplicate + gain, resident + more) < config.yield_min {
                break;
            }
            (resident, duplicate) = (resident + more, duplicate + gain);
            if let Some(region) = slots.get_mut(slot) {
                (region.thin, region.dirty) = (true, true);
            }
        }
    }

    /// The spans to unmark: their pages are written and hold the same again, so that merging them does not last.
    pub fn unmarks(&mut self, slots: &mut Slots, now_ns: u64, config: &Config) -> Vec<Span> {
        if config.cow_threshold >= Permyriad(10_000) {
            return Vec::new();
        }
        let sour = |churn: &Churn| churn.ratio(config.cow_horizon_ns) >= config.cow_threshold;
        // A writer that goes through a mapping is in one block of it at a time.
        let mut mappings: BTreeMap<_, Churn> = BTreeMap::new();
        for region in slots.iter() {
            mappings.entry(region.view.key).or_default().add(&region.churn);
        }
        let mut spans = Vec::new();
        for region in slots.iter_mut().filter(|region| !region.marks.is_empty()) {
            if !sour(&region.churn) && !sour(&mappings[&region.view.key]) {
                continue;
            }
            let span = |mark: &crate::extent::Candidate| Span {
                region: region.view.key,
                first: mark.first,
                pages: mark.pages,
            };
            spans.extend(region.marks.iter().map(span));
            region.sour(now_ns + SOUR_NS);
        }
        spans
    }

    /// Wakes ksmd for what has become worth merging in spans marked earlier.
    pub fn refresh(&mut self, slots: &mut Slots, now_ns: u64, merger: &mut Merger) {
        if merger.is_busy() {
            // What is about to merge is no reason to wake ksmd once more.
            slots.iter_mut().for_each(|region| region.in_marks = (0, 0));
            return;
        }
        if now_ns < self.next_refresh_ns {
            return;
        }
        let (mut worth, mut marked) = (0.0, 0);
        for region in slots.iter().filter(|region| region.in_marks.0 >= 8) {
            let resident = region.marked_resident().0;
            marked += resident;
            worth += resident as f64 * region.in_marks.1 as f64 / region.in_marks.0 as f64;
        }
        if worth < REFRESH_MIN.max(marked / 50) as f64 {
            return;
        }
        // What the last one brought, against what it was expected to bring.
        let fruitful = merger.last_growth().0 * 4 >= self.refresh_expected.0;
        self.refresh_pause_ns = if fruitful { PAUSE_NS } else { (self.refresh_pause_ns * 2).min(PAUSE_MAX_NS) };
        self.next_refresh_ns = now_ns + self.refresh_pause_ns;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a page count")]
        let worth = Pages(worth as u64);
        self.refresh_expected = worth;
        merger.owe(worth);
        slots.iter_mut().for_each(|region| region.in_marks = (0, 0));
    }

    /// Takes note of what came of the marks.
    pub fn done(&mut self, slots: &mut Slots, now_ns: u64, marks: &[Span], outcome: &Outcome, merger: &mut Merger) {
        for (span, marking) in marks.iter().zip(&outcome.marked) {
            let Some(region) = slots.find(span.region, span.first).and_then(|slot| slots.get_mut(slot)) else {
                continue;
            };
            let of_span = |mark: &crate::extent::Candidate| mark.first == span.first && mark.pages == span.pages;
            let Some(at) = region.marks.iter().position(of_span) else { continue };
            match marking {
                Marking::Done(_) => {
                    region.pause_ns = 0;
                    merger.owe(region.marks[at].resident);
                }
                Marking::Busy => {
                    region.marks.remove(at);
                    region.dirty = true;
                    region.retry_ns = now_ns + RETRY_NS;
                }
                Marking::Refused => {
                    region.marks.remove(at);
                    region.alone = Alone::Refused;
                }
            }
        }
    }
}

/// Resident pages in all spans marked by this run.
pub fn marked_resident(slots: &Slots) -> Pages {
    slots.iter().map(Region::marked_resident).sum()
}
