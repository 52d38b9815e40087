//! Finds COW-broken pages without a hook in the page fault handler: pages that we saw merged, and that aren't merged
//! any more when we visit them again.
//!
//! UKSM compares a round's copy-on-write faults with its merges (section 5.2). It looks for memory where merges don't
//! last because programs keep writing the same content: if we merge such a page again, it breaks again. So we only
//! count these pages. A page that gets another content isn't a duplicate any more, or becomes a duplicate of something
//! else, as when a program frees and reuses memory.
//!
//! Rates are small: if one page in five thousand breaks per second, half of a region's merges are undone within the
//! hour. We observe single pages all over the region, and visit them repeatedly.
//!
//! A break tells us about its own page and about pages like it, not about the rest of the region: a program that keeps
//! rewriting its data doesn't touch the zeros of the heap around it. So we judge pages in groups. Pages with the same
//! content form one group wherever they are, because a program that fills memory with one content mostly rewrites all
//! of it. All other pages of an extent form another group.

use crate::hash::Digest;
use crate::units::{Permyriad, Vpn, whole};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// We observe at most this many pages in one region.
pub const PROBES_MAX: usize = 2_048;
/// We extrapolate once we've seen this many breaks.
const BREAKS_MIN: u64 = 16;
/// We keep this many ended observations, so new breaks replace old ones. If a program writes all over a block at
/// random, we must see its writes in half of the block's extents.
const ENDS_MAX: usize = 1_024;

/// Observed breaks of a region's merged pages.
#[derive(Clone, Debug, Default)]
pub struct CowBreaks {
    /// Pages under observation.
    probes: BTreeMap<Vpn, Probe>,
    /// We look up the next page to visit from here.
    next: Vpn,
    /// The last observations that ended, because the page isn't merged any more.
    ends: VecDeque<End>,
    /// We count breaks only from this time on, nanoseconds. If `ends` is full, we drop the oldest, and this becomes its
    /// time.
    since_ns: u64,
    /// The COW-broken ratio when we last computed it.
    pub ratio: Permyriad,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    /// When we first found it merged with this content, and when last, nanoseconds.
    first_ns: u64,
    last_ns: u64,
    /// 32 bits of its content's digest, enough to notice a change.
    fingerprint: u32,
}

/// An observation that has ended.
#[derive(Clone, Copy, Debug)]
struct End {
    page: Vpn,
    fingerprint: u32,
    at_ns: u64,
    /// How long the page had stayed merged, nanoseconds.
    merged_ns: u64,
    /// Whether the page has the same content as before, so that we could merge it again.
    rewritten: bool,
}

impl CowBreaks {
    /// Records a merged page.
    pub fn record_merged(&mut self, page: Vpn, now_ns: u64, digest: Digest) {
        let found = Probe { first_ns: now_ns, last_ns: now_ns, fingerprint: digest.fingerprint() };
        if let Some(probe) = self.probes.get_mut(&page) {
            if probe.fingerprint == found.fingerprint {
                probe.last_ns = now_ns;
            } else {
                *probe = found;
            }
        } else if self.has_room() {
            self.probes.insert(page, found);
        }
    }

    /// Records an unmerged page, with its digest if it's a duplicate.
    pub fn record_unmerged(&mut self, page: Vpn, now_ns: u64, duplicate: Option<Digest>) {
        let Some(probe) = self.probes.remove(&page) else { return };
        // The program wrote the page at some time since our last visit. We take the middle.
        let written_ns = probe.last_ns.midpoint(now_ns);
        if self.ends.len() >= ENDS_MAX {
            self.since_ns = self.ends.pop_front().map_or(0, |oldest| oldest.at_ns);
        }
        self.ends.push_back(End {
            page,
            fingerprint: probe.fingerprint,
            at_ns: now_ns,
            merged_ns: written_ns.saturating_sub(probe.first_ns.max(self.since_ns)),
            rewritten: duplicate.is_some_and(|digest| digest.fingerprint() == probe.fingerprint),
        });
    }

    /// Whether we can observe more pages.
    pub fn has_room(&self) -> bool {
        self.probes.len() < PROBES_MAX
    }

    /// The next observed page to visit. We visit each page once before we visit any twice.
    pub fn next_visit(&mut self) -> Option<Vpn> {
        let after = self.probes.range(self.next..).next().or_else(|| self.probes.iter().next());
        let page = *after?.0;
        self.next = page + 1;
        Some(page)
    }

    /// Whether a program wrote any page with its old content.
    pub fn any(&self) -> bool {
        self.ends.iter().any(|end| end.rewritten)
    }

    /// How long pages stayed merged and how often programs rewrote them, by group.
    pub fn tally(&self) -> BreakTally {
        // For each content, the only page that has it, or none if several have it.
        let mut only_page: FxHashMap<u32, Option<Vpn>> = FxHashMap::default();
        let probed = self.probes.iter().map(|(&page, probe)| (page, probe.fingerprint));
        for (page, fingerprint) in probed.chain(self.ends.iter().map(|end| (end.page, end.fingerprint))) {
            let only = only_page.entry(fingerprint).or_insert(Some(page));
            *only = only.filter(|&known| known == page);
        }
        let mut tally = BreakTally::default();
        for (&page, probe) in &self.probes {
            let merged_ns = probe.last_ns.saturating_sub(probe.first_ns.max(self.since_ns));
            let group = Group::of(page, probe.fingerprint, &only_page);
            tally.groups.entry(group).or_default().merged_s += seconds(merged_ns);
        }
        for end in &self.ends {
            let group = Group::of(end.page, end.fingerprint, &only_page);
            let group = tally.groups.entry(group).or_default();
            group.merged_s += seconds(end.merged_ns);
            group.rewritten += u64::from(end.rewritten);
        }
        tally
    }

    /// Stops observing all pages, because they're no longer merged. Their breaks still count.
    pub fn forget_pages(&mut self) {
        self.probes.clear();
    }
}

/// Pages that are likely to be rewritten together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Group {
    /// Pages with the same content, by its fingerprint.
    Content(u32),
    /// Pages of an extent with contents that we observe on no other page.
    Extent(u64),
}

impl Group {
    /// The group of a page with this content, if we know for each content the only page that has it.
    fn of(page: Vpn, fingerprint: u32, only_page: &FxHashMap<u32, Option<Vpn>>) -> Self {
        match only_page[&fingerprint] {
            Some(_) => Self::Extent(page.extent()),
            None => Self::Content(fingerprint),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct GroupTally {
    /// The time that pages stayed merged, page seconds.
    merged_s: f64,
    /// How many pages were written with their old content.
    rewritten: u64,
}

/// Breaks and the time that pages stayed merged, by group.
#[derive(Clone, Debug, Default)]
pub struct BreakTally {
    groups: FxHashMap<Group, GroupTally>,
}

impl BreakTally {
    /// Adds another region's breaks: we judge the blocks of one mapping together as well.
    pub fn add(&mut self, other: &Self) {
        for (&group, tally) in &other.groups {
            let sum = self.groups.entry(group).or_default();
            sum.merged_s += tally.merged_s;
            sum.rewritten += tally.rewritten;
        }
    }

    /// The COW-broken ratio: the share of merged pages that programs would write with their old content within
    /// `horizon_ns`. Each break stands for one page of its group that doesn't stay merged that long.
    pub fn ratio(&self, horizon_ns: u64) -> Permyriad {
        let mut rewritten = 0;
        let mut merged_s = 0.0;
        let mut broken_s = 0.0;
        for group in self.groups.values() {
            rewritten += group.rewritten;
            merged_s += group.merged_s;
            broken_s += group.merged_s.min(group.rewritten as f64 * seconds(horizon_ns));
        }
        if rewritten < BREAKS_MIN {
            return Permyriad(0);
        }
        let share = if merged_s > 0.0 { broken_s / merged_s } else { 0.0 };
        Permyriad(u32::try_from(whole(share * 10_000.0)).unwrap_or(10_000))
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::EXTENT_PAGES;

    const S: u64 = 1_000_000_000;

    const SAME: Digest = Digest(7 << 16);
    const OTHER: Digest = Digest(8 << 16);

    /// A content that no other page has.
    fn own(page: Vpn) -> Digest {
        Digest((100 + page.0) << 16)
    }

    /// How we find a page.
    #[derive(Clone, Copy)]
    enum Found {
        Merged(Digest),
        Unmerged(Option<Digest>),
    }

    /// Visits a thousand pages, spread over 125 extents, every ten seconds. `found` gets the round and the page's
    /// number.
    fn observe(rounds: u64, found: impl Fn(u64, u64, Vpn) -> Found) -> CowBreaks {
        let mut breaks = CowBreaks::default();
        for round in 0..rounds {
            for number in 0..1_000 {
                let page = Vpn(number * EXTENT_PAGES / 8);
                match found(round, number, page) {
                    Found::Unmerged(duplicate) => breaks.record_unmerged(page, round * 10 * S, duplicate),
                    Found::Merged(digest) => breaks.record_merged(page, round * 10 * S, digest),
                }
            }
        }
        breaks
    }

    fn ratio(breaks: &CowBreaks, hours: u64) -> Permyriad {
        breaks.tally().ratio(hours * 3_600 * S)
    }

    #[test]
    fn the_ratio_extrapolates_breaks_to_the_horizon() {
        // One page per round is rewritten: a ten-thousandth of the pages per second, 36 % per hour.
        let breaks = observe(25, |round, number, _| match round {
            1.. if number == round * 30 => Found::Unmerged(Some(SAME)),
            _ => Found::Merged(SAME),
        });
        let share = ratio(&breaks, 1);
        assert!((2_900..4_400).contains(&share.0), "{share}");
        assert_eq!(ratio(&breaks, 10), Permyriad(10_000));
    }

    #[test]
    fn fewer_than_sixteen_breaks_are_not_extrapolated() {
        for (breaks, share) in [(15, Permyriad(0)), (16, Permyriad(10_000))] {
            let breaks = observe(3, |round, number, _| match round {
                1 if number < breaks => Found::Unmerged(Some(SAME)),
                _ => Found::Merged(SAME),
            });
            assert_eq!(ratio(&breaks, 1_000), share);
        }
    }

    #[test]
    fn breaks_say_nothing_about_pages_of_another_content_elsewhere() {
        // The first 200 pages, in 25 extents, are rewritten all the time. The others are zeros.
        let beside_zeros = observe(50, |round, number, page| match round % 2 {
            1 if number < 200 => Found::Unmerged(Some(own(page))),
            _ if number < 200 => Found::Merged(own(page)),
            _ => Found::Merged(Digest::ZERO),
        });
        let share = ratio(&beside_zeros, 1_000);
        assert!((500..2_000).contains(&share.0), "{share}");
        // The rewritten pages say nothing about other data either.
        let beside_data = observe(50, |round, number, page| match round % 2 {
            1 if number < 200 => Found::Unmerged(Some(own(page))),
            _ => Found::Merged(own(page)),
        });
        let share = ratio(&beside_data, 1_000);
        assert!((500..2_000).contains(&share.0), "{share}");
    }

    #[test]
    fn pages_of_one_content_are_judged_together() {
        // The writer has only got through the first eighth of one content.
        let breaks = observe(20, |round, number, page| match round {
            1.. if number / 6 == round => Found::Unmerged(Some(SAME)),
            _ if number < 900 => Found::Merged(SAME),
            _ => Found::Merged(own(page)),
        });
        let share = ratio(&breaks, 100);
        assert!((8_900..9_200).contains(&share.0), "{share}");
    }

    #[test]
    fn a_writer_at_random_is_seen_in_extent_after_extent() {
        // Four pages a round, each in another extent.
        let written = |rounds| {
            observe(rounds, |round, number, page| match round {
                1.. if number % 250 == (round * 7) % 250 => Found::Unmerged(Some(own(page))),
                _ => Found::Merged(own(page)),
            })
        };
        let share = ratio(&written(6), 100);
        assert!((500..2_500).contains(&share.0), "{share}");
        let share = ratio(&written(40), 100);
        assert!(share > Permyriad(7_000), "{share}");
    }

    #[test]
    fn old_breaks_are_forgotten() {
        let mut breaks = observe(40, |round, _, page| match round % 2 {
            1 => Found::Unmerged(Some(own(page))),
            _ => Found::Merged(own(page)),
        });
        assert_eq!(ratio(&breaks, 1_000), Permyriad(10_000));
        for at_s in (1_000..20_000).step_by(100) {
            for number in 0..1_000 {
                breaks.record_merged(Vpn(number * EXTENT_PAGES / 8), at_s * S, OTHER);
            }
        }
        assert!(ratio(&breaks, 1) < Permyriad(2_000));
        assert!(breaks.ends.len() <= ENDS_MAX);
    }

    #[test]
    fn pages_whose_content_changes_are_not_cow_broken() {
        for now in [None, Some(OTHER)] {
            let breaks = observe(25, |round, number, _| match round {
                1.. if number % 12 == round % 12 => Found::Unmerged(now),
                _ => Found::Merged(SAME),
            });
            assert_eq!((ratio(&breaks, 10), breaks.any()), (Permyriad(0), false));
        }
    }

    #[test]
    fn the_blocks_of_a_mapping_are_judged_together() {
        let quiet = observe(20, |_, _, _| Found::Merged(SAME));
        let broken = observe(20, |round, number, _| match round {
            1.. if number / 6 == round => Found::Unmerged(Some(SAME)),
            _ => Found::Merged(SAME),
        });
        assert_eq!(ratio(&quiet, 100), Permyriad(0));
        let mut both = quiet.tally();
        both.add(&broken.tally());
        assert_eq!(both.ratio(100 * 3_600 * S), Permyriad(10_000));
    }

    #[test]
    fn visits_cycle_through_all_pages() {
        let mut breaks = CowBreaks::default();
        assert_eq!(breaks.next_visit(), None);
        for page in [5, 1, 9] {
            breaks.record_merged(Vpn(page), 0, SAME);
        }
        let visits: Vec<_> = (0..7).filter_map(|_| breaks.next_visit()).map(|page| page.0).collect();
        assert_eq!(visits, [1, 5, 9, 1, 5, 9, 1]);
    }
}
