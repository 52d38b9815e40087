//! COW-broken pages, detected without a hook in the page fault: merged pages that are no longer merged at a later
//! visit.
//!
//! UKSM compares the copy-on-write faults of a round with its merges (section 5.2), to find memory with merges that do
//! not last because pages are written with the content they had: merged again, they would be broken again. So only such
//! pages count here. A page that was written with another content is no longer a duplicate, or is one of another
//! content, as when memory is freed and reused.
//!
//! Rates are small: one page in five thousand per second undoes half of a region's merges within the hour. They are
//! measured on single pages, spread over the region, which are visited repeatedly.

use crate::hash::Digest;
use crate::units::{Permyriad, whole};
use std::collections::BTreeMap;

/// The most pages under observation in one region.
pub const PROBES_MAX: usize = 2_048;
/// The number of breaks from which a rate counts.
const BREAKS_MIN: u64 = 4;
/// The number of breaks from which all counts are halved, so that new ones weigh more.
const BREAKS_MAX: u64 = 64;

/// Observed breaks of a region's merged pages.
#[derive(Clone, Debug, Default)]
pub struct CowBreaks {
    /// Pages under observation, by offset in the region.
    probes: BTreeMap<u32, Probe>,
    /// The offset from which the next page to visit is looked up.
    next: u32,
    /// The time that pages under observation have stayed merged, page seconds.
    exposure: f64,
    /// The number of merged pages that are no longer merged.
    broken: u64,
    /// Of these, the pages that hold the same content as before and could be merged again.
    rewritten: u64,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    /// When it was last found merged, nanoseconds.
    seen_ns: u64,
    /// 32 bits of the digest of its content at that time, which are enough to detect a change.
    fingerprint: u32,
}

impl CowBreaks {
    /// Records a page that is merged.
    pub fn record_merged(&mut self, offset: u32, now_ns: u64, digest: Digest) {
        let probe = Probe { seen_ns: now_ns, fingerprint: digest.fingerprint() };
        if let Some(known) = self.probes.get_mut(&offset) {
            self.exposure += (now_ns - known.seen_ns) as f64 / 1e9;
            *known = probe;
        } else if self.has_room() {
            self.probes.insert(offset, probe);
        }
    }

    /// Records a page that is not merged, with its digest if it is a duplicate.
    pub fn record_unmerged(&mut self, offset: u32, now_ns: u64, duplicate: Option<Digest>) {
        let Some(probe) = self.probes.remove(&offset) else { return };
        self.exposure += (now_ns - probe.seen_ns) as f64 / 2e9;
        self.broken += 1;
        self.rewritten += u64::from(duplicate.is_some_and(|digest| digest.fingerprint() == probe.fingerprint));
        if self.broken > BREAKS_MAX {
            self.broken /= 2;
            self.rewritten /= 2;
            self.exposure /= 2.0;
        }
    }

    /// Whether more pages can be put under observation.
    pub fn has_room(&self) -> bool {
        self.probes.len() < PROBES_MAX
    }

    /// The next page under observation to visit. Each is visited once before any is visited twice.
    pub fn next_visit(&mut self) -> Option<u32> {
        let after = self.probes.range(self.next..).next().or_else(|| self.probes.iter().next());
        let offset = *after?.0;
        self.next = offset.wrapping_add(1);
        Some(offset)
    }

    /// The COW-broken ratio: the share of merged pages that would be written with their own content within
    /// `horizon_ns`.
    pub fn ratio(&self, horizon_ns: u64) -> Permyriad {
        if self.rewritten < BREAKS_MIN || self.exposure <= 0.0 {
            return Permyriad(0);
        }
        let share = self.rewritten as f64 / self.exposure * horizon_ns as f64 / 1e9;
        Permyriad(u32::try_from(whole(share.min(1.0) * 10_000.0)).unwrap_or(10_000))
    }

    /// Adds the breaks of another region: the blocks of one mapping are judged together, too.
    pub fn add(&mut self, other: &Self) {
        self.exposure += other.exposure;
        self.broken += other.broken;
        self.rewritten += other.rewritten;
    }

    /// Ends the observation of all pages, which are no longer merged. The breaks still count.
    pub fn forget_pages(&mut self) {
        self.probes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    const SAME: Digest = Digest(7 << 16);
    const OTHER: Digest = Digest(8 << 16);

    /// Visits a thousand pages every ten seconds for two minutes. `broken(round, page)` are found no longer merged.
    fn observe(broken: impl Fn(u64, u32) -> Option<Option<Digest>>) -> CowBreaks {
        let mut breaks = CowBreaks::default();
        for round in 0..12 {
            for page in 0..1_000 {
                match broken(round, page) {
                    Some(duplicate) => breaks.record_unmerged(page, round * 10 * S, duplicate),
                    None => breaks.record_merged(page, round * 10 * S, SAME),
                }
            }
        }
        breaks
    }

    #[test]
    fn the_ratio_extrapolates_breaks_to_the_horizon() {
        // One page per round: a ten-thousandth of the pages per second, 36 % per hour.
        let breaks = observe(|round, page| (round > 0 && u64::from(page) == round * 50).then_some(Some(SAME)));
        let ratio = breaks.ratio(3_600 * S);
        assert!((2_900..4_400).contains(&ratio.0), "{ratio}");
        assert_eq!(breaks.ratio(36_000 * S), Permyriad(10_000));
    }

    #[test]
    fn pages_whose_content_changes_are_not_cow_broken() {
        for now in [None, Some(OTHER)] {
            let breaks = observe(|round, page| (round > 0 && u64::from(page) % 12 == round).then_some(now));
            assert_eq!(breaks.ratio(36_000 * S), Permyriad(0));
        }
    }

    #[test]
    fn visits_cycle_through_all_pages() {
        let mut breaks = CowBreaks::default();
        assert_eq!(breaks.next_visit(), None);
        for page in [5, 1, 9] {
            breaks.record_merged(page, 0, SAME);
        }
        let visits: Vec<_> = (0..7).filter_map(|_| breaks.next_visit()).collect();
        assert_eq!(visits, [1, 5, 9, 1, 5, 9, 1]);
    }
}
