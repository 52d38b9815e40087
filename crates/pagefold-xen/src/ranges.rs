//! Which of a guest's frames are populated, as ranges: what the judgement sees as regions.
//!
//! Every 32nd frame is asked for, and the frames between two that differ. A hole or a patch that lies between two that are alike is not found:
//! pages of a hole are absent when they are read, and a patch is not looked at.

use crate::hypervisor::{CallError, DomainId, Gfn, Hypervisor};
use pagefold_core::units::Pages;

/// The distance of the frames that are asked for.
const STEP: u64 = 32;
/// Shorter ranges are pages that the guest shares with dom0.
const PAGES_MIN: u64 = 64;

/// Neighbouring frames that are populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub first: Gfn,
    /// How many.
    pub pages: Pages,
}

/// The ranges of a guest.
///
/// # Errors
/// If the guest has ended.
pub fn ranges(hypervisor: &mut impl Hypervisor, domain: DomainId) -> Result<Vec<Range>, CallError> {
    let end = hypervisor.last_frame(domain)?.0 + 1;
    let asked: Vec<Gfn> = (0..end).step_by(usize::try_from(STEP).unwrap_or(1)).chain([end - 1]).map(Gfn).collect();
    let found = hypervisor.populated(domain, &asked)?;
    // The frames between two that differ, and what they are.
    let mut edges = Vec::new();
    for (pair, is) in asked.windows(2).zip(found.windows(2)) {
        if is[0] != is[1] {
            edges.extend((pair[0].0 + 1..pair[1].0).map(Gfn));
        }
    }
    let between = hypervisor.populated(domain, &edges)?;
    let mut known: Vec<(Gfn, bool)> = asked.into_iter().zip(found).chain(edges.into_iter().zip(between)).collect();
    known.sort_unstable();
    known.dedup();
    let mut ranges: Vec<Range> = Vec::new();
    let mut open: Option<u64> = None;
    for (frame, is) in known {
        match (is, open) {
            (true, None) => open = Some(frame.0),
            (false, Some(first)) => {
                ranges.push(Range { first: Gfn(first), pages: Pages(frame.0 - first) });
                open = None;
            }
            _ => {}
        }
    }
    if let Some(first) = open {
        ranges.push(Range { first: Gfn(first), pages: Pages(end - first) });
    }
    ranges.retain(|range| range.pages.0 >= PAGES_MIN);
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Event, Model, page};

    /// The ranges found of a guest with these: first frame and end.
    fn found(populated: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut model = Model::new(0);
        let last = populated.iter().map(|range| range.1).max().unwrap();
        model.create(1, "guest", &vec![0; usize::try_from(last).unwrap()]);
        for frame in (0..last).filter(|frame| !populated.iter().any(|range| range.0 <= *frame && *frame < range.1)) {
            model.act(Event::Release(page(1, frame)));
        }
        let ranges = ranges(&mut model, DomainId(1)).unwrap();
        ranges.into_iter().map(|range| (range.first.0, range.first.0 + range.pages.0)).collect()
    }

    #[test]
    fn ranges_end_where_the_guests_memory_does() {
        assert_eq!(found(&[(0, 1000)]), [(0, 1000)]);
        assert_eq!(found(&[(100, 1000), (1037, 2001)]), [(100, 1000), (1037, 2001)]);
        assert_eq!(found(&[(0, 4096), (5000, 5064)]), [(0, 4096), (5000, 5064)]);
    }

    #[test]
    fn patches_that_guests_share_with_dom0_are_left_out() {
        assert_eq!(found(&[(0, 1000), (2000, 2008)]), [(0, 1000)]);
    }

    #[test]
    fn a_guest_that_has_ended_has_none() {
        assert!(ranges(&mut Model::new(0), DomainId(1)).is_err());
    }
}
