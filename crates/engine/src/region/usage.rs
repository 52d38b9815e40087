//! How a region's process uses its pages, as far as we can tell from outside.

use crate::hash::Digest;
use crate::keys::RegionKey;
use crate::marking::cow_breaks::CowBreaks;
use crate::units::{EXTENT_PAGES, Pages, Vpn};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// After a page was in use, we don't ask to merge it for this long, nanoseconds: the first time, and at most.
const BUSY_NS: u64 = 10_000_000_000;
const BUSY_MOST_NS: u64 = 600_000_000_000;

#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// How long the region's merged pages last.
    pub cow_breaks: CowBreaks,
    /// Whether we know which pages are active. Later reads show nothing, because our reading makes a page active.
    pub activity_known: bool,
    /// Pages that were active when we first read them.
    pub active: PageSet,
    /// Pages that we saw in a frame of their own before they were merged, if they held zeros or the region has
    /// relatives.
    pub own: PageSet,
    /// Pages we merged on request, as far as we know, including zeros: if programs write to them, they need room again.
    pub merged: PageSet,
    /// How many pages were merged when we last began to read the region whole.
    pub merged_before: Pages,
    /// Pages that processes outside the region's family map, as we last saw: fork-shared pages, or on Linux 6.12 pages
    /// that an earlier run has merged.
    pub outside: PageSet,
    /// The contents that pages had when they were merged, as 32 bits of their digests. Only kept where a limit is in
    /// force and the kernel hides whether a merged page is mapped by one process only: a page that still has its
    /// content may still be merged, and a page with another content has been written.
    pub contents: Option<FxHashMap<Vpn, u32>>,
    /// Whether we've asked the kernel to merge one of the region's pages, so that it has marked the mapping.
    pub named: bool,
    /// How many more times we have to read the region whole until we know all pages in it that were merged on request.
    /// Some may have been merged by an earlier run, before the mapping became this region, or by a call that we gave up
    /// waiting for.
    pub readings_due: u8,
    /// A region that has pages in common with this one, as far as we know.
    pub partner: Option<RegionKey>,
    /// Pages that were written after we merged them on request.
    pub written: PageSet,
    /// Pages that couldn't be merged because they were in use. Few regions have any.
    in_use: Option<Box<PagesInUse>>,
}

#[derive(Clone, Debug, Default)]
struct PagesInUse {
    /// Pages that were in use the last time.
    busy: BusyPages,
    /// Pages that were in use several times in a row.
    pinned: BusyPages,
}

/// Pages that couldn't be merged because they were in use, and how long we leave them alone.
#[derive(Clone, Debug, Default)]
struct BusyPages {
    pages: PageSet,
    /// The pages of the pause before.
    before: PageSet,
    until_ns: u64,
    pause_ns: u64,
}

impl BusyPages {
    /// Adds a page. The first page after a pause begins another pause: twice as long, but at most `most_ns`.
    fn insert(&mut self, page: Vpn, now_ns: u64, most_ns: u64) {
        if now_ns >= self.until_ns {
            let is_long_ago = now_ns >= self.until_ns + BUSY_MOST_NS;
            self.pause_ns = if is_long_ago { BUSY_NS } else { (self.pause_ns * 2).clamp(BUSY_NS, most_ns) };
            self.until_ns = now_ns + self.pause_ns;
            self.before = std::mem::take(&mut self.pages);
        }
        self.pages.insert(page);
    }

    fn contains(&self, page: Vpn) -> bool {
        self.pages.contains(page) || self.before.contains(page)
    }

    fn is_waiting(&self, page: Vpn, now_ns: u64) -> bool {
        now_ns < self.until_ns && self.pages.contains(page)
    }
}

impl Usage {
    /// Records that a page isn't merged. If it was before, its process has written it since.
    pub fn record_unmerged(&mut self, page: Vpn) {
        if !self.merged.is_empty() && self.forget_merged(page) {
            self.written.insert(page);
        }
    }

    /// Records that a page is merged, and its content. Returns whether we knew that.
    pub fn note_merged(&mut self, page: Vpn, digest: Digest) -> bool {
        if let Some(contents) = &mut self.contents {
            contents.insert(page, digest.fingerprint());
        }
        !self.merged.insert(page)
    }

    /// Forgets that a page is merged. Returns whether we took it for merged.
    pub fn forget_merged(&mut self, page: Vpn) -> bool {
        if let Some(contents) = &mut self.contents {
            contents.remove(&page);
        }
        self.merged.remove(page)
    }

    /// Forgets pages that are no longer in the region.
    pub fn keep_only(&mut self, range: Range<Vpn>) {
        self.merged.keep_only(&range);
        self.outside.keep_only(&range);
        if let Some(contents) = &mut self.contents {
            contents.retain(|page, _| range.contains(page));
        }
        self.cow_breaks.keep_only(range);
    }

    /// Records that a page was merged on request. Returns whether it was merged before.
    pub fn record_merged(&mut self, page: Vpn, now_ns: u64, digest: Digest) -> bool {
        if self.written.contains(page) {
            self.cow_breaks.record_merged(page, now_ns, now_ns, digest);
        }
        self.note_merged(page, digest)
    }

    /// Records that a page couldn't be merged because it was in use. Pinned pages stay in use, so we wait twice as long
    /// each time. In a large region some page is always in use, so only pages that were in use before wait longer.
    pub fn record_busy(&mut self, page: Vpn, now_ns: u64) {
        if self.is_busy(page, now_ns) {
            return;
        }
        let PagesInUse { busy, pinned } = &mut **self.in_use.get_or_insert_default();
        if busy.contains(page) || pinned.contains(page) {
            pinned.insert(page, now_ns, BUSY_MOST_NS);
        } else {
            busy.insert(page, now_ns, BUSY_NS);
        }
    }

    /// Whether we leave a page alone for now because it was in use.
    pub fn is_busy(&self, page: Vpn, now_ns: u64) -> bool {
        let Some(in_use) = &self.in_use else { return false };
        in_use.busy.is_waiting(page, now_ns) || in_use.pinned.is_waiting(page, now_ns)
    }
}

/// A set of pages: one bit each, by groups of 64. A process may have thousands of regions with a page each, so an empty
/// or small set has to be small.
#[derive(Clone, Debug, Default)]
pub struct PageSet {
    /// The groups that aren't empty, by number.
    groups: Vec<Group>,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    number: u64,
    pages: u64,
}

impl PageSet {
    /// Adds a page and returns whether it's new.
    pub fn insert(&mut self, page: Vpn) -> bool {
        let at = match self.find(page) {
            Ok(at) => at,
            Err(at) => {
                self.groups.insert(at, Group { number: page.0 / 64, pages: 0 });
                at
            }
        };
        let before = self.groups[at].pages;
        self.groups[at].pages |= 1 << (page.0 % 64);
        self.groups[at].pages != before
    }

    /// Removes a page and returns whether it was there.
    pub fn remove(&mut self, page: Vpn) -> bool {
        let Ok(at) = self.find(page) else { return false };
        let before = self.groups[at].pages;
        let after = before & !(1 << (page.0 % 64));
        self.groups[at].pages = after;
        if after == 0 {
            self.groups.remove(at);
        }
        after != before
    }

    pub fn contains(&self, page: Vpn) -> bool {
        self.find(page).is_ok_and(|at| self.groups[at].pages >> (page.0 % 64) & 1 == 1)
    }

    /// Where the page's group is, or where it belongs.
    fn find(&self, page: Vpn) -> Result<usize, usize> {
        self.groups.binary_search_by_key(&(page.0 / 64), |group| group.number)
    }

    /// The numbers of the extents with pages of the set, ascending. The same number may come several times.
    pub fn extents(&self) -> impl Iterator<Item = u64> {
        self.groups.iter().map(|group| group.number * 64 / EXTENT_PAGES)
    }

    /// How many pages of an extent are in the set.
    pub fn in_extent(&self, number: u64) -> u64 {
        let first = self.groups.partition_point(|group| group.number * 64 < number * EXTENT_PAGES);
        let groups = self.groups[first..].iter().take_while(|group| group.number * 64 / EXTENT_PAGES == number);
        groups.map(|group| u64::from(group.pages.count_ones())).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub fn len(&self) -> Pages {
        Pages(self.groups.iter().map(|group| u64::from(group.pages.count_ones())).sum())
    }

    pub fn keep_only(&mut self, range: &Range<Vpn>) {
        for group in &mut self.groups {
            for bit in 0..64 {
                if !range.contains(&Vpn(group.number * 64 + bit)) {
                    group.pages &= !(1 << bit);
                }
            }
        }
        self.groups.retain(|group| group.pages != 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_written_after_a_merge_are_remembered() {
        let mut usage = Usage::default();
        usage.record_unmerged(Vpn(70));
        assert!(!usage.written.contains(Vpn(70)), "it was never merged");
        assert!(!usage.record_merged(Vpn(70), 0, Digest(7)) && usage.cow_breaks.observed() == 0);
        usage.record_unmerged(Vpn(70));
        assert!(usage.written.contains(Vpn(70)));
        assert!(!usage.record_merged(Vpn(70), 0, Digest(7)) && usage.cow_breaks.observed() == 1);
    }

    #[test]
    fn merged_pages_are_forgotten_with_their_part_of_the_region() {
        let mut usage = Usage::default();
        for page in [60, 63, 64, 69, 70, 300] {
            usage.record_merged(Vpn(page), 0, Digest(7));
        }
        usage.keep_only(Vpn(63)..Vpn(70));
        let left: Vec<u64> = (0..400).filter(|&page| usage.merged.contains(Vpn(page))).collect();
        assert_eq!((left, usage.merged.len()), (vec![63, 64, 69], Pages(3)));
    }

    #[test]
    fn pages_in_use_are_left_alone_for_longer_each_time() {
        let mut usage = Usage::default();
        let mut now_ns = 0;
        let mut asked = 0;
        while now_ns < 3_600_000_000_000 {
            if !usage.is_busy(Vpn(7), now_ns) {
                usage.record_busy(Vpn(7), now_ns);
                asked += 1;
            }
            assert!(!usage.is_busy(Vpn(8), now_ns));
            now_ns += 1_000_000_000;
        }
        assert!((8..=12).contains(&asked), "{asked} times in an hour");
        usage.record_busy(Vpn(7), 2 * now_ns);
        assert!(!usage.is_busy(Vpn(7), 2 * now_ns + BUSY_NS), "an hour later it begins anew");
    }

    #[test]
    fn pages_in_use_for_once_do_not_wait_for_pinned_ones() {
        let mut usage = Usage::default();
        for minute in 0..60 {
            let now_ns = minute * 60_000_000_000;
            let pinned = Vpn(7);
            let other = Vpn(100 + minute);
            usage.record_busy(pinned, now_ns);
            usage.record_busy(other, now_ns);
            assert!(usage.is_busy(other, now_ns));
            assert!(!usage.is_busy(other, now_ns + BUSY_NS), "after {minute} minutes");
        }
    }
}
