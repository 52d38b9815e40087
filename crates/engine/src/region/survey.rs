//! The samples of a region: which pages come next, how many were duplicates, and how many change.

use crate::config::Config;
use crate::hash::Digest;
use crate::host::RegionView;
use crate::permutation::Permutation;
use crate::random::mix;
use crate::region::kin::KinSamples;
use crate::sampling::estimate::{Estimate, Tally};
use crate::units::{Pages, Permyriad, Vpn};

/// How many neighbouring pages we read at one sample point. Four in a run cost little more than one and a half single
/// pages (they share the page-table walk and the system call), and tell us as much as two scattered pages.
pub const RUN_PAGES: u64 = 4;
/// We remember at most this many pages from the survey, to see which of them change.
const PROBES_MAX: usize = 1024;
/// We need this many visits to remembered pages before we judge a region by how many of its pages change.
const PROBES_MIN: u64 = 16;

/// We only call a region unique after this many samples.
const UNIQUE_MIN: u64 = 16;
/// We count new duplicates over this many samples, and use the count once there are `RENEWAL_MIN`.
const RENEWAL_MOST: u64 = 512;
const RENEWAL_MIN: u64 = 16;
/// Where new duplicates appear, we sample up to this many times as densely as elsewhere.
const DENSER: u64 = 16;

/// The samples of one region.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Results since we last examined the region.
    pub tally: Tally,
    order: Permutation,
    next: u64,
    /// Sampled pages that we didn't read because they're shared through fork.
    forked: u64,
    /// Pages we visited since we last examined the region, resident or not.
    visited: u64,
    /// Whether any visited page was present.
    pub has_present: bool,
    planned: Planned,
    /// In how many cycles in a row the host hasn't got to the region.
    unread: u8,
    probes: Vec<Probe>,
    /// The probe after the last one that we found. It's mostly the next to be found, because we read regions upwards.
    next_probe: usize,
    revisited: u64,
    changed: u64,
    /// How well the samples agree with an older clone.
    pub kin: KinSamples,
    /// Recent samples since we read the region whole, and how many of them were new duplicates.
    resampled: u64,
    renewed: u64,
}

/// How much we plan to sample in one cycle.
#[derive(Clone, Copy, Debug, Default)]
struct Planned {
    runs: u64,
    pages: u64,
}

/// A remembered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Probe {
    /// The page's offset in its region, as the index has it.
    offset: u32,
    /// 32 bits of the digest, if we know it.
    digest: Option<u32>,
}

impl Survey {
    pub fn new(view: &RegionView, seed: u64) -> Self {
        Self {
            tally: Tally::default(),
            order: order(view, seed),
            next: 0,
            forked: 0,
            visited: 0,
            has_present: false,
            planned: Planned::default(),
            unread: 0,
            probes: Vec::new(),
            next_probe: 0,
            revisited: 0,
            changed: 0,
            kin: KinSamples::default(),
            resampled: 0,
            renewed: 0,
        }
    }

    /// Starts a new sampling order, because the region's bounds have moved.
    pub fn restart_order(&mut self, view: &RegionView, seed: u64) {
        self.order = order(view, seed);
        self.next = 0;
    }

    /// The first page and the length of the next run to sample. We visit every page once before we visit any twice.
    pub fn next_run(&mut self, view: &RegionView) -> (Vpn, u64) {
        if self.next >= self.order.len() {
            self.next = 0;
        }
        let first = self.order.at(self.next) * RUN_PAGES;
        self.next += 1;
        let pages = RUN_PAGES.min(view.pages.0 - first);
        self.visited += pages;
        self.planned.runs += 1;
        self.planned.pages += pages;
        (view.first + first, pages)
    }

    /// Records whether the runs planned in this cycle were read. If not, they come next.
    pub fn record_planned(&mut self, are_read: bool) {
        let Planned { runs, pages } = std::mem::take(&mut self.planned);
        if !are_read {
            self.next = self.next.saturating_sub(runs);
            self.visited = self.visited.saturating_sub(pages);
        }
        self.unread = if are_read { 0 } else { self.unread.saturating_add(1) };
    }

    /// Whether the host didn't get to the region in the last cycle.
    pub fn is_unread(&self) -> bool {
        self.unread > 0
    }

    /// Whether the host can't read the region now, as far as we can tell: twice in a row, it didn't get to the region.
    pub fn is_out_of_reach(&self) -> bool {
        self.unread > 1
    }

    /// Runs not sampled yet in this pass over the region.
    pub fn runs_left(&self) -> u64 {
        self.order.len().saturating_sub(self.next)
    }

    pub fn adopt(&mut self, tally: Tally, visited: u64) {
        self.tally = tally;
        self.visited = visited;
        // The tally doesn't count merged pages, so we can't tell from it whether any page was present.
        self.has_present = visited > 0;
    }

    /// Pages we visited since we last examined the region, resident or not.
    pub fn visited(&self) -> u64 {
        self.visited
    }

    /// Remembers a sampled page while `recording`; otherwise compares it with the remembered digest. We skip the
    /// comparison if the remembered digest isn't `comparable` any more.
    pub fn probe(&mut self, offset: u32, digest: Digest, recording: bool, comparable: impl Fn(u32) -> bool) {
        let print = digest.fingerprint();
        if recording {
            if self.probes.len() < PROBES_MAX {
                self.probes.push(Probe { offset, digest: Some(print) });
            }
        } else if let Some(at) = self.find_probe(offset) {
            let before = self.probes[at].digest.replace(print);
            if let Some(before) = before.filter(|&before| before == print || comparable(before)) {
                self.revisited += 1;
                self.changed += u64::from(before != print);
            }
        }
    }

    /// Counts a remembered page that we know to be unchanged without reading it.
    pub fn record_unchanged(&mut self, offset: u32) {
        self.revisited += u64::from(self.find_probe(offset).is_some());
    }

    /// Records a sample of a region that we've read whole. `is_new`: it's an unmerged duplicate that has appeared
    /// since.
    pub fn record_renewal(&mut self, is_new: bool) {
        self.resampled += 1;
        self.renewed += u64::from(is_new);
        if self.resampled > RENEWAL_MOST {
            self.resampled /= 2;
            self.renewed /= 2;
        }
    }

    /// How many times as densely as other regions to sample this one: in proportion to its share of new duplicates, up
    /// to the ratio at which we promote a region.
    pub fn weight(&self, threshold: Permyriad) -> u64 {
        if self.resampled < RENEWAL_MIN {
            return 1;
        }
        let enough = self.resampled * u64::from(threshold.0);
        (self.renewed * 10_000 * DENSER / enough.max(1)).clamp(1, DENSER)
    }

    fn find_probe(&mut self, offset: u32) -> Option<usize> {
        let (passed, ahead) = self.probes.split_at_checked(self.next_probe)?;
        let is_passed = passed.last().is_none_or(|probe| probe.offset < offset);
        if !is_passed || ahead.first().is_some_and(|probe| probe.offset < offset) {
            self.next_probe = self.probes.partition_point(|probe| probe.offset < offset);
        }
        let at = self.next_probe;
        self.probes.get(at).filter(|probe| probe.offset == offset)?;
        self.next_probe += 1;
        Some(at)
    }

    /// Forgets all digests and what we learned from them: the survey starts from scratch.
    pub fn forget_digests(&mut self) {
        self.end_examination();
        self.probes.clear();
        self.next = 0;
        self.restart_probes();
    }

    /// We're about to read the region whole.
    pub fn start_examination(&mut self) {
        self.probes.sort_unstable();
        self.probes.dedup_by_key(|probe| probe.offset);
        self.restart_probes();
    }

    fn restart_probes(&mut self) {
        self.next_probe = 0;
        self.revisited = 0;
        self.changed = 0;
    }

    /// Records a sampled page that we don't read because it's shared through fork.
    pub fn record_forked(&mut self) {
        self.forked += 1;
    }

    /// Whether most of the sampled pages are shared through fork and weren't read.
    pub fn is_mostly_forked(&self) -> bool {
        self.forked > self.tally.sampled
    }

    /// Whether we've read samples, and most of them had no copy.
    pub fn is_mostly_unique(&self) -> bool {
        let sampled = self.tally.sampled;
        sampled >= UNIQUE_MIN && 2 * self.tally.duplicates() < sampled && !self.is_mostly_forked()
    }

    /// Halves what we know, so that new samples weigh more than old ones.
    pub fn age(&mut self) {
        self.tally.age();
        self.forked /= 2;
    }

    /// We've read the region whole: samples count from zero.
    pub fn end_examination(&mut self) {
        self.tally = Tally::default();
        self.forked = 0;
        self.visited = 0;
        self.kin = KinSamples::default();
    }

    /// Estimates the duplicate ratio of a region with `resident` pages from its samples, after we sampled
    /// `scope_fraction` of the whole scope. We assume that we've sampled the copies of its pages as densely as the
    /// region itself, or as the whole scope if that's less.
    pub fn estimate(&self, resident: Pages, scope_fraction: f64) -> Estimate {
        let own = self.tally.sampled as f64 / resident.0.max(1) as f64;
        self.tally.estimate(own.min(scope_fraction).max(1e-6))
    }

    /// Whether merges wouldn't last here, because too many of the remembered pages change from one visit to the next.
    pub fn is_volatile(&self, config: &Config) -> bool {
        config.filters_cow_breaks()
            && self.revisited >= PROBES_MIN
            && Permyriad::of(self.changed, self.revisited) >= config.cow_threshold
    }
}

/// Regions of a family are likely copies of each other. They share their order, so that we sample the same places in
/// all of them.
fn order(view: &RegionView, seed: u64) -> Permutation {
    Permutation::new(view.pages.0.div_ceil(RUN_PAGES).max(1), mix(seed ^ view.family.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::test_view;

    #[test]
    fn every_page_is_sampled_once_in_a_cycle() {
        let view = test_view(1, 1000, 1003);
        let mut survey = Survey::new(&view, 7);
        let mut seen = vec![0; 1003];
        for _ in 0..1003_u64.div_ceil(RUN_PAGES) {
            let (first, pages) = survey.next_run(&view);
            for page in first.0..first.0 + pages {
                seen[usize::try_from(page - 1000).unwrap()] += 1;
            }
        }
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn a_region_is_sampled_densely_while_new_duplicates_appear() {
        let mut survey = Survey::new(&test_view(1, 0, 1000), 7);
        let mut record = |is_new, samples| {
            (0..samples).for_each(|_| survey.record_renewal(is_new));
            survey.weight(Permyriad(100))
        };
        assert_eq!([record(true, RENEWAL_MIN - 1), record(true, 1)], [1, DENSER]);
        assert_eq!(record(false, 50 * RENEWAL_MIN), DENSER, "still more than a hundredth");
        assert_eq!(record(false, 10_000), 1);
    }

    #[test]
    fn pages_whose_digests_were_forgotten_have_not_changed() {
        let mut survey = Survey::new(&test_view(1, 0, 1000), 7);
        let visit = |survey: &mut Survey, digest: u64, recording| {
            (0..100).for_each(|page| survey.probe(page, Digest(digest << 16), recording, |print| print < 4));
        };
        visit(&mut survey, 1, true);
        survey.forget_digests();
        visit(&mut survey, 2, true);
        survey.start_examination();
        visit(&mut survey, 2, false);
        assert!(!survey.is_volatile(&Config::default()));
        visit(&mut survey, 3, false);
        visit(&mut survey, 4, false);
        assert!(survey.is_volatile(&Config::default()));
        // A changed digest that we can't compare with the remembered one doesn't count.
        let before = (survey.revisited, survey.changed);
        visit(&mut survey, 5, false);
        assert_eq!((survey.revisited, survey.changed), before);
        survey.forget_digests();
        assert_eq!((survey.visited(), survey.probes.len(), survey.runs_left()), (0, 0, 250));
    }

    #[test]
    fn a_region_that_rewrites_its_pages_is_volatile() {
        let mut survey = Survey::new(&test_view(1, 0, 1000), 7);
        let digest = |page: u32, changed: bool| Digest(u64::from(page + u32::from(changed)) << 16);
        for page in 0..100 {
            survey.probe(page, digest(page, false), true, |_| true);
        }
        survey.start_examination();
        for page in 0..100 {
            survey.probe(page, digest(page, page % 2 == 0), false, |_| true);
        }
        assert!(survey.is_volatile(&Config::default()));
        survey.start_examination();
        for page in 0..100 {
            survey.probe(page, digest(page, page % 2 == 0), false, |_| true);
        }
        assert!(!survey.is_volatile(&Config::default()));
    }
}
