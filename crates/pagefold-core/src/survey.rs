//! What to read next: which pages of which regions, and how many.
//!
//! Every region belongs to one of three kinds of reading: it is *surveyed* until its samples can tell, *examined* (read
//! whole) when they say that it is worth it, and else *watched*, that is, sampled thinly for what changes.

use crate::estimate::samples_for_evidence;
use crate::host::Run;
use crate::region::{RUN_PAGES, Region, Stage};
use crate::units::{EXTENT_PAGES, Vpn};

/// Pages read in one round: some 40 ms, so that signals and new processes are attended to.
const ROUND_PAGES: u64 = 65_536;
/// Twins that the samples of a region must be able to show if a tenth of it were duplicate.
const EVIDENCE: f64 = 3.0;

/// The regions under judgement, by slot.
pub type Slots = [Option<Region>];

/// Reads on in the regions that are examined. Returns, for each, its slot and the page up to which this goes.
pub fn examinations(slots: &mut Slots, runs: &mut Vec<Run>) -> Vec<(u32, Vpn)> {
    let mut examining = Vec::new();
    let mut budget = ROUND_PAGES;
    for (slot, region) in (0..).zip(slots) {
        let Some(region) = region else { continue };
        let Stage::Examine(cursor) = region.stage else { continue };
        let end = region.view.first + region.view.pages.0;
        let mut at = Vpn(cursor.0.max(region.view.first.0));
        while at < end && budget > 0 {
            let pages = (end.0 - at.0).min(EXTENT_PAGES).min(budget);
            runs.push(run(region, at, pages));
            at = at + pages;
            budget -= pages;
        }
        examining.push((slot, at));
    }
    examining
}

/// Samples every new region to the point where a duplicate tenth would have shown.
pub fn surveys(slots: &mut Slots, runs: &mut Vec<Run>) {
    let mut budget = ROUND_PAGES / 4;
    for region in slots.iter_mut().flatten() {
        if budget == 0 {
            break;
        }
        if !wants_survey(region) {
            continue;
        }
        let target = samples_for_evidence(region.view.resident.0, EVIDENCE);
        // Where little is resident, most places looked at are empty; they cost little.
        let filled = region.view.resident.0 as f64 / region.view.pages.0 as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a page count")]
        let wanted = (target.saturating_sub(region.tally.sampled) as f64 / filled.clamp(0.02, 1.0)) as u64;
        let mut wanted = wanted.clamp(RUN_PAGES, budget.max(RUN_PAGES));
        while wanted > 0 && region.places_left() > 0 {
            let (first, pages) = region.next_run();
            runs.push(run(region, first, pages));
            wanted = wanted.saturating_sub(pages);
            budget = budget.saturating_sub(pages);
        }
    }
}

/// Samples all other regions alike, about `pages` pages in all: one linear space of them, a sample point at every
/// interval (UKSM section 5.3).
pub fn watch(slots: &mut Slots, now_ns: u64, pages: u64, runs: &mut Vec<Run>) {
    let watched: u64 =
        slots.iter().flatten().filter(|region| is_watched(region)).map(|region| region.view.pages.0).sum();
    let interval = (watched / (pages / RUN_PAGES).max(1)).max(RUN_PAGES);
    let mut point = now_ns % interval;
    for region in slots.iter_mut().flatten().filter(|region| is_watched(region)) {
        while point < region.view.pages.0 {
            let (first, pages) = region.next_run();
            runs.push(run(region, first, pages));
            point += interval;
        }
        point -= region.view.pages.0;
    }
}

/// Whether a region has not been sampled enough yet to tell.
pub fn wants_survey(region: &Region) -> bool {
    region.stage == Stage::Survey
        && !region.barred
        && region.places_left() > 0
        && region.tally.sampled < samples_for_evidence(region.view.resident.0, EVIDENCE)
}

fn is_watched(region: &Region) -> bool {
    !region.barred && !matches!(region.stage, Stage::Examine(_)) && !wants_survey(region)
}

fn run(region: &Region, first: Vpn, pages: u64) -> Run {
    Run { region: region.view.key, first, pages: u32::try_from(pages).unwrap_or(u32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{FamilyKey, OwnerKey, RegionKey, RegionView};
    use crate::units::Pages;
    use proptest::prelude::*;

    fn region(key: u32, pages: u64) -> Region {
        let view = RegionView {
            key: RegionKey(key),
            owner: OwnerKey(1),
            family: FamilyKey(key.into()),
            first: Vpn(u64::from(key) << 32),
            pages: Pages(pages),
            resident: Pages(pages),
            marked: Pages(0),
        };
        Region::new(view, 0, 5)
    }

    fn settled(key: u32, pages: u64) -> Region {
        let mut region = region(key, pages);
        region.judged(0);
        region
    }

    #[test]
    fn a_survey_ends_when_a_duplicate_tenth_would_have_shown() {
        let mut slots = [Some(region(1, 100_000)), None, Some(region(2, 40))];
        let mut runs = Vec::new();
        surveys(&mut slots, &mut runs);
        let of =
            |key| runs.iter().filter(|run| run.region == RegionKey(key)).map(|run| u64::from(run.pages)).sum::<u64>();
        assert!(of(1) >= samples_for_evidence(100_000, EVIDENCE) && of(1) < 2_000, "{}", of(1));
        assert_eq!(of(2), 36, "a small one is read nearly whole");
    }

    #[test]
    fn an_examination_reads_every_page_once_in_order() {
        let mut slots = [Some(region(1, 100_000)), Some(region(2, 700))];
        slots.iter_mut().flatten().for_each(Region::examine);
        let mut next = [0_u64, 0];
        for _ in 0..3 {
            let mut runs = Vec::new();
            for (slot, end) in examinations(&mut slots, &mut runs) {
                if let Some(region) = &mut slots[slot as usize] {
                    region.stage = Stage::Examine(end);
                }
            }
            assert!(runs.iter().map(|run| u64::from(run.pages)).sum::<u64>() <= ROUND_PAGES);
            for run in runs {
                let at = &mut next[run.region.0 as usize - 1];
                assert_eq!(run.first.0 & 0xffff_ffff, *at);
                *at += u64::from(run.pages);
            }
        }
        assert_eq!(next, [100_000, 700]);
    }

    proptest! {
        /// Watching costs what it may, spread over all regions by their size.
        #[test]
        fn watching_keeps_to_its_budget(sizes in proptest::collection::vec(1u64..50_000, 1..20), pages in 4u64..5_000, now: u32) {
            let mut slots: Vec<_> = (1..).zip(&sizes).map(|(key, &pages)| Some(settled(key, pages))).collect();
            let mut runs = Vec::new();
            watch(&mut slots, now.into(), pages, &mut runs);
            let read: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
            prop_assert!(read <= 2 * pages + RUN_PAGES, "{read} for {pages}");
        }
    }
}
