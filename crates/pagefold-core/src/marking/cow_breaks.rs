//! COW-broken pages, without a hook in the page fault: merged pages seen at one visit that are no longer merged at
//! a later one.
//!
//! UKSM counts the faults of a round against the merges of that round (section 5.2). What that catches is memory whose
//! merges do not last because it is written with what it held already: merged again it would be broken again. So only
//! such pages count here, told by what they held while they were merged. A page that was written with something else has
//! ceased to be a duplicate, or has become one of something else, as memory does that is freed and used anew.
//!
//! Rates are small: one page in five thousand a second undoes half of a region's merges within the hour. They are
//! measured on single pages, spread over the region, visited again and again.

use crate::hash::Digest;
use crate::units::Permyriad;
use std::collections::BTreeMap;

/// Pages under observation in one region at most.
pub const PROBES_MAX: usize = 2_048;
/// Breaks below which a rate says nothing.
const BREAKS_MIN: u64 = 4;
/// Breaks after which older ones count half.
const BREAKS_MAX: u64 = 64;

/// The observation of a region's merged pages.
#[derive(Clone, Debug, Default)]
pub struct CowBreaks {
    /// By offset in the region.
    probes: BTreeMap<u32, Probe>,
    /// Where the next visits go on.
    next: u32,
    /// Time for which pages have been known to stay merged, page seconds.
    exposure: f64,
    /// Merged pages that were written.
    broken: u64,
    /// Those of them that hold the same again, and could be merged again.
    again: u64,
}

/// A page under observation.
#[derive(Clone, Copy, Debug)]
struct Probe {
    /// When it was last seen merged, nanoseconds.
    seen_ns: u64,
    /// What it held then.
    print: u32,
}

/// 32 bits of a digest are enough to see a change.
#[expect(clippy::cast_possible_truncation, reason = "32 bits are wanted")]
fn print(digest: Digest) -> u32 {
    (digest.0 >> 16) as u32
}

impl CowBreaks {
    /// A page was found merged, and what it holds.
    pub fn record_merged(&mut self, offset: u32, now_ns: u64, digest: Digest) {
        let probe = Probe { seen_ns: now_ns, print: print(digest) };
        if let Some(known) = self.probes.get_mut(&offset) {
            self.exposure += (now_ns - known.seen_ns) as f64 / 1e9;
            *known = probe;
        } else if self.has_room() {
            self.probes.insert(offset, probe);
        }
    }

    /// A page was found not merged; what it holds, if it could be merged with another.
    pub fn record_single(&mut self, offset: u32, now_ns: u64, duplicate: Option<Digest>) {
        let Some(probe) = self.probes.remove(&offset) else { return };
        self.exposure += (now_ns - probe.seen_ns) as f64 / 2e9;
        self.broken += 1;
        self.again += u64::from(duplicate.is_some_and(|digest| print(digest) == probe.print));
        if self.broken > BREAKS_MAX {
            self.broken /= 2;
            self.again /= 2;
            self.exposure /= 2.0;
        }
    }

    /// Whether more pages may be put under observation.
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

    /// The COW-broken ratio: the share of merged pages that are written with what they hold within `horizon_ns`.
    pub fn ratio(&self, horizon_ns: u64) -> Permyriad {
        if self.again < BREAKS_MIN || self.exposure <= 0.0 {
            return Permyriad(0);
        }
        let share = self.again as f64 / self.exposure * horizon_ns as f64 / 1e9;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share from 0 to 1")]
        let share = (share.min(1.0) * 10_000.0) as u32;
        Permyriad(share)
    }

    /// Adds what another region's pages have shown: blocks of one mapping are also judged together.
    pub fn add(&mut self, other: &Self) {
        self.exposure += other.exposure;
        self.broken += other.broken;
        self.again += other.again;
    }

    /// Forgets the pages, but not what they have shown: they are not merged any more.
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

    /// A thousand pages visited every ten seconds for two minutes, of which `broken(round, page)` are found written.
    fn observe(broken: impl Fn(u64, u32) -> Option<Option<Digest>>) -> CowBreaks {
        let mut churn = CowBreaks::default();
        for round in 0..12 {
            for page in 0..1_000 {
                match broken(round, page) {
                    Some(duplicate) => churn.record_single(page, round * 10 * S, duplicate),
                    None => churn.record_merged(page, round * 10 * S, SAME),
                }
            }
        }
        churn
    }

    #[test]
    fn the_ratio_is_what_would_break_within_the_horizon() {
        // One page a round: a ten-thousandth of the pages a second, 36 % an hour.
        let churn = observe(|round, page| (round > 0 && u64::from(page) == round * 50).then_some(Some(SAME)));
        let ratio = churn.ratio(3_600 * S);
        assert!((2_900..4_400).contains(&ratio.0), "{ratio}");
        assert_eq!(churn.ratio(36_000 * S), Permyriad(10_000));
    }

    #[test]
    fn what_changes_its_content_is_not_cow_broken() {
        for now in [None, Some(OTHER)] {
            let churn = observe(|round, page| (round > 0 && u64::from(page) % 12 == round).then_some(now));
            assert_eq!(churn.ratio(36_000 * S), Permyriad(0));
        }
    }

    #[test]
    fn visits_go_round() {
        let mut churn = CowBreaks::default();
        assert_eq!(churn.next_visit(), None);
        for page in [5, 1, 9] {
            churn.record_merged(page, 0, SAME);
        }
        let visits: Vec<_> = (0..7).filter_map(|_| churn.next_visit()).collect();
        assert_eq!(visits, [1, 5, 9, 1, 5, 9, 1]);
    }
}
