//! Finds which of a guest's frames are populated, as ranges. These are the engine's regions.
//!
//! We ask about every 32nd frame. Where two of these differ we ask about the frames between them. So between two that
//! are alike we miss a hole, or a patch of populated frames. That does no harm: when we read pages of a hole we find
//! them absent, and nobody looks at a patch.

use crate::hypervisor::{CallError, DomainId, Gfn, Hypervisor};
use pagefold_engine::units::Pages;

/// How far the frames that we ask about are apart.
const STEP: u64 = 32;
/// How many frames we ask about at a time.
const ASKED: u64 = 1024;
/// We drop ranges shorter than this, which are pages that the guest shares with dom0.
const PAGES_MIN: u64 = 64;
/// A guest can put its memory wherever it likes. So we search only twice as many frames as it may have pages, plus the
/// frames below 4 GiB, where a guest has a hole for devices. A guest can hide memory, but it can't keep pagefold busy.
const HOLES_MOST: u64 = 1 << 20;
/// We stop after this many ranges.
const RANGES_MOST: usize = 1024;

/// Neighbouring populated frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub first: Gfn,
    pub pages: Pages,
}

/// Where to end the search for the memory of a guest that may have `most` pages.
pub fn end(hypervisor: &mut impl Hypervisor, domain: DomainId, most: Pages) -> Result<u64, CallError> {
    let looked_at = most.0.saturating_mul(2).saturating_add(HOLES_MOST);
    Ok(hypervisor.last_frame(domain)?.0.saturating_add(1).min(looked_at))
}

/// The ranges of a guest that may have `most` pages, from the lowest on.
///
/// # Errors
/// If the guest has ended.
pub fn ranges(hypervisor: &mut impl Hypervisor, domain: DomainId, most: Pages) -> Result<Vec<Range>, CallError> {
    let end = end(hypervisor, domain, most)?;
    let mut found = Found::default();
    let mut next = 0;
    let mut before: Option<(u64, bool)> = None;
    while next < end && found.ranges.len() < RANGES_MOST {
        let asked = (0..ASKED).map(|number| next + number * STEP).take_while(|&frame| frame < end);
        let asked: Vec<u64> = asked.collect();
        for (frame, is) in ask(hypervisor, domain, &asked)? {
            match before {
                Some((last, was)) if was != is => found.change(edge(hypervisor, domain, last + 1..frame, was)?, is),
                Some(_) => {}
                None => found.change(frame, is),
            }
            before = Some((frame, is));
        }
        next += ASKED * STEP;
    }
    // Some frames come after the last one that we asked about.
    match before {
        Some((last, true)) if next >= end => found.change(edge(hypervisor, domain, last + 1..end, true)?, false),
        _ => {}
    }
    Ok(found.ranges)
}

/// The first of these frames that isn't populated if the one before them is (`before`), or the other way round. If
/// there's none, the end.
fn edge(
    hypervisor: &mut impl Hypervisor,
    domain: DomainId,
    frames: std::ops::Range<u64>,
    before: bool,
) -> Result<u64, CallError> {
    let asked: Vec<u64> = frames.clone().collect();
    for (frame, is) in ask(hypervisor, domain, &asked)? {
        if is != before {
            return Ok(frame);
        }
    }
    Ok(frames.end)
}

/// Asks which of these frames are populated.
fn ask(hypervisor: &mut impl Hypervisor, domain: DomainId, frames: &[u64]) -> Result<Vec<(u64, bool)>, CallError> {
    let numbers: Vec<Gfn> = frames.iter().copied().map(Gfn).collect();
    let populated = hypervisor.populated(domain, &numbers)?;
    Ok(frames.iter().copied().zip(populated).collect())
}

/// The ranges so far, and the start of the current one.
#[derive(Debug, Default)]
struct Found {
    ranges: Vec<Range>,
    begun: Option<u64>,
}

impl Found {
    /// Records that the frames from this one on are populated, or no longer are.
    fn change(&mut self, frame: u64, is: bool) {
        if is {
            self.begun = Some(frame);
        } else if let Some(first) = self.begun.take().filter(|first| frame - first >= PAGES_MIN) {
            self.ranges.push(Range { first: Gfn(first), pages: Pages(frame - first) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Event, Model, page};

    /// The ranges that we find in a guest with these frames, as first frame and end.
    fn found(populated: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut model = Model::new(0);
        let last = populated.iter().map(|range| range.1).max().unwrap();
        model.create(1, "guest", &vec![0; usize::try_from(last).unwrap()]);
        for frame in (0..last).filter(|frame| !populated.iter().any(|range| range.0 <= *frame && *frame < range.1)) {
            model.act(Event::Release(page(1, frame)));
        }
        let ranges = ranges(&mut model, DomainId(1), Pages(last)).unwrap();
        ranges.into_iter().map(|range| (range.first.0, range.first.0 + range.pages.0)).collect()
    }

    #[test]
    fn ranges_end_where_the_guests_memory_does() {
        assert_eq!(found(&[(0, 1000)]), [(0, 1000)]);
        assert_eq!(found(&[(100, 1000), (1037, 2001)]), [(100, 1000), (1037, 2001)]);
        assert_eq!(found(&[(0, 4096), (5000, 5064)]), [(0, 4096), (5000, 5064)]);
        assert_eq!(
            found(&[(0, 1025), (32 * 1024 - 70, 32 * 1024 + 70)]),
            [(0, 1025), (32 * 1024 - 70, 32 * 1024 + 70)]
        );
    }

    #[test]
    fn patches_that_guests_share_with_dom0_are_left_out() {
        assert_eq!(found(&[(0, 1000), (2000, 2008)]), [(0, 1000)]);
    }

    #[test]
    fn a_guest_that_scatters_its_memory_keeps_nobody_busy() {
        let mut model = Model::new(0);
        model.create(1, "guest", &[0; 256]);
        model.place(page(1, 1 << 40), 0);
        let found = ranges(&mut model, DomainId(1), Pages(257)).unwrap();
        assert_eq!(found, [Range { first: Gfn(0), pages: Pages(256) }]);
        assert!(model.asked < 40_000, "{}", model.asked);
        let every_other: Vec<(u64, u64)> = (0..2000).map(|number| (number * 128, number * 128 + 64)).collect();
        assert!((RANGES_MOST..RANGES_MOST + 600).contains(&self::found(&every_other).len()));
    }

    #[test]
    fn a_guest_that_has_ended_has_none() {
        assert!(ranges(&mut Model::new(0), DomainId(1), Pages(9)).is_err());
    }
}
