//! UKSM's own scanner, as it would sit in the kernel in ksmd's place: regions on levels, sampled, and merged page by page as
//! they are found equal. After sections 5 to 7 of the paper; in virtual time.
//!
//! Where the paper leaves something open it is decided so:
//! - A level without regions takes no time ("until the sample point reaches the boundary of the linear space"). So a round
//!   with nothing but the bottom level lasts `t / N`, and idling costs the bottom's share.
//! - What was there at the first round is old enough. What comes later is sampled once it has lived across a whole
//!   sleep-scan cycle, `T_s + t` (section 5.2).
//! - A region whose last page has had its turn has nothing more to show: it goes back to the bottom (section 4), where it
//!   begins again in the next round.
//!
//! Left out: the time to judge regions, of which the paper says nothing, and that a page may be locked or pinned.

mod region;
mod search;
mod settings;
#[cfg(test)]
mod tests;

use crate::comparisons::SearchCounts;
use crate::costs::Costs;
use crate::granularity::Granularity;
use crate::memory::Memory;
use pagefold_core::random::Random;
use pagefold_core::units::Permyriad;
use region::{LevelChange, SampledRegion};
use rustc_hash::FxHashMap;
use search::{SampleOutcome, Search};
use settings::pause_ns;
pub use settings::{HashStrength, Renewal, UksmSettings};

/// Sample points are reckoned in so many parts of a page, as a power of two.
const POINT_BITS: u32 = 10;
/// Fewer pages do not show what a page costs.
const SAMPLES_MIN: u64 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asleep {
        until_ns: u64,
    },
    /// In the active part of a sleep-scan cycle.
    Scanning {
        /// Pages that it goes on for.
        left: u64,
        /// Pages sampled in it, and when it began.
        sampled: u64,
        began_ns: u64,
    },
}

/// One round of a level (section 5.3): its regions as one linear space.
#[derive(Debug)]
struct LevelRound {
    level: usize,
    /// The regions, and how long each is.
    regions: Vec<(u32, u64)>,
    /// The region that the next sample point may lie in, and where it begins in the linear space, pages.
    place: usize,
    start: u64,
    /// The next sample point and the interval, in parts of a page.
    point: u64,
    interval: u64,
    /// Samples that each one stands for.
    weight: u64,
}

impl LevelRound {
    /// The region of the next sample point.
    fn next(&mut self) -> Option<u32> {
        let page = self.point >> POINT_BITS;
        while let Some(&(key, pages)) = self.regions.get(self.place) {
            if page < self.start + pages {
                self.point += self.interval;
                return Some(key);
            }
            self.start += pages;
            self.place += 1;
        }
        None
    }
}

/// The scanner.
#[derive(Debug)]
pub(crate) struct Uksmd {
    pub(crate) cpu_ns: u64,
    /// Pages looked at: those that were absent are not counted.
    pub(crate) scanned: u64,
    /// Global rounds done.
    pub(crate) rounds: u64,
    costs: Costs,
    granularity: Granularity,
    settings: UksmSettings,
    search: Search,
    regions: FxHashMap<u32, SampledRegion>,
    /// The regions on each level, in the order in which they came; the bottom first.
    levels: Vec<Vec<u32>>,
    state: State,
    /// The level under way, and those below it in this round are done.
    level: usize,
    level_round: Option<LevelRound>,
    /// Its own time.
    clock_ns: u64,
    /// Sleep that it owes for time spent.
    owed_ns: u64,
    /// The estimated cost of sampling one page (`s`).
    page_ns: u64,
    /// Pages sampled since the unmerged tree was renewed.
    covered: u64,
    stream: Random,
}

impl Uksmd {
    /// A scanner that starts at time 0, with the sleep of its first cycle.
    pub(crate) fn new(costs: Costs, settings: UksmSettings) -> Self {
        let search = Search::new(costs, settings.strength, settings.zero_pages);
        Self {
            cpu_ns: 0,
            scanned: 0,
            rounds: 0,
            costs,
            granularity: Granularity::new(1),
            settings,
            regions: FxHashMap::default(),
            levels: vec![Vec::new(); settings.levels.max(1)],
            state: State::Asleep { until_ns: settings.sleep_ns },
            level: 0,
            level_round: None,
            clock_ns: 0,
            owed_ns: 0,
            page_ns: search.first_guess_ns(),
            covered: 0,
            stream: Random::for_purpose(settings.seed, 0x0075_6b73_6d64),
            search,
        }
    }

    /// The same, of simulated pages that stand for several.
    pub(crate) fn with_granularity(mut self, granularity: Granularity) -> Self {
        self.granularity = granularity;
        self.search.set_granularity(granularity);
        self
    }

    /// Comparisons made so far.
    pub(crate) fn counts(&self) -> SearchCounts {
        self.search.counts
    }

    /// A region is gone, as UKSM's hooks in memory management tell it (section 7).
    pub(crate) fn region_gone(&mut self, key: u32) {
        self.regions.remove(&key);
    }

    /// Lets the scanner work until `until_ns`. A page begun before is finished.
    pub(crate) fn run_until(&mut self, memory: &mut Memory, until_ns: u64) {
        loop {
            match self.state {
                State::Asleep { until_ns: wake_ns } if wake_ns < until_ns => {
                    self.clock_ns = wake_ns;
                    self.wake(memory);
                }
                State::Scanning { left, sampled, began_ns } if self.clock_ns < until_ns => {
                    self.scan(memory, until_ns, (left, sampled, began_ns));
                }
                _ => return,
            }
        }
    }

    /// Spends CPU time, and owes the sleep that keeps it within a share.
    fn spend(&mut self, ns: u64, share: Permyriad) {
        self.clock_ns += ns;
        self.cpu_ns += ns;
        self.owed_ns += pause_ns(ns, share);
    }

    fn sleep(&mut self, least_ns: u64) {
        let slept_ns = std::mem::take(&mut self.owed_ns).max(least_ns).max(1);
        self.state = State::Asleep { until_ns: self.clock_ns + slept_ns };
    }

    /// Begins the active part of a cycle, in a level that is under way, the next one, or the next round (figure 4).
    fn wake(&mut self, memory: &mut Memory) {
        if self.level_round.is_none() {
            if self.level == 0 {
                self.begin_round(memory);
            }
            self.level_round = self.next_level_round();
        }
        let Some(level_round) = &self.level_round else {
            self.level = 0;
            self.rounds += 1;
            return self.sleep(self.settings.sleep_ns);
        };
        let level = level_round.level;
        let left = (self.settings.active_ns(level) / self.page_ns).max(1);
        self.state = State::Scanning { left, sampled: 0, began_ns: self.clock_ns };
        self.spend(self.costs.wake_ns, self.settings.share(level));
    }

    /// Goes on with the active part of a cycle, up to its end or to `until_ns`.
    fn scan(&mut self, memory: &mut Memory, until_ns: u64, (mut left, mut sampled, began_ns): (u64, u64, u64)) {
        let Some(mut level_round) = self.level_round.take() else { return self.sleep(0) };
        let (share, weight) = (self.settings.share(level_round.level), level_round.weight);
        let mut over = false;
        let spent_before_ns = self.cpu_ns;
        while !over && left > 0 && self.clock_ns < until_ns {
            match level_round.next() {
                Some(key) => {
                    if let Some(cost_ns) = self.sample(memory, key, weight) {
                        self.clock_ns += cost_ns;
                        self.cpu_ns += cost_ns;
                        left = left.saturating_sub(weight);
                        sampled += weight;
                    }
                }
                None => over = true,
            }
        }
        self.owed_ns += pause_ns(self.cpu_ns - spent_before_ns, share);
        if !over {
            self.level_round = Some(level_round);
        }
        if !over && left > 0 {
            self.state = State::Scanning { left, sampled, began_ns };
            return;
        }
        if sampled >= SAMPLES_MIN {
            self.page_ns = ((self.page_ns * 3 + (self.clock_ns - began_ns) / sampled) / 4).max(1);
        }
        // The last level's end is the round's.
        let ends_round = over && self.level_above().is_none();
        if ends_round {
            self.level = 0;
            self.rounds += 1;
        }
        self.sleep(if ends_round { self.settings.sleep_ns } else { 0 });
    }

    /// Samples a page of a region, and merges it if it can. None if the region has no page left in this round.
    fn sample(&mut self, memory: &mut Memory, key: u32, weight: u64) -> Option<u64> {
        let slot = self.regions.get_mut(&key)?;
        let page = slot.next_page()?;
        let (fate, cost_ns) = self.search.visit(memory, (key, page), weight);
        self.covered += weight;
        self.scanned += if fate == SampleOutcome::Absent { 0 } else { weight };
        if let SampleOutcome::Joined | SampleOutcome::Paired(_) = fate {
            slot.found += 1;
        }
        if let SampleOutcome::Paired((other, _)) = fate {
            if let Some(slot) = self.regions.get_mut(&other) {
                slot.found += 1;
            }
        }
        Some(cost_ns)
    }

    /// The next level with a region on it.
    fn level_above(&self) -> Option<usize> {
        (self.level + 1..=self.levels.len()).find(|&level| !self.levels[level - 1].is_empty())
    }

    /// Begins the round of the next level: from a sample point by chance, at intervals of `L · s / (t_l · p_l)`, but never
    /// below one page.
    fn next_level_round(&mut self) -> Option<LevelRound> {
        let level = self.level_above()?;
        self.level = level;
        let pages = |key: &u32| Some((*key, self.regions.get(key)?.pages()));
        let regions: Vec<(u32, u64)> = self.levels[level - 1].iter().filter_map(pages).collect();
        let length: u64 = regions.iter().map(|(_, pages)| pages).sum();
        let points = (self.settings.level_ns(level) / self.page_ns).max(1);
        let interval = ((self.granularity.all(length) << POINT_BITS) / points).max(1 << POINT_BITS);
        let weight = self.granularity.samples(interval >> POINT_BITS);
        let interval = interval * weight / self.granularity.get();
        let point = self.stream.below(interval);
        Some(LevelRound { level, regions, place: 0, start: 0, point, interval, weight })
    }

    /// Takes in new regions, promotes and demotes the others, and renews the unmerged tree if it is time.
    fn begin_round(&mut self, memory: &mut Memory) {
        self.judge(memory);
        let (first, mut pages, mut regions) = (self.rounds == 0, 0, 0);
        for (key, region) in memory.live_regions() {
            pages += u64::from(region.len());
            regions += 1;
            let (clock_ns, stream) = (self.clock_ns, &mut self.stream);
            let new = || SampledRegion::new(region.len(), clock_ns, stream.next(), region.broken);
            let slot = self.regions.entry(key).or_insert_with(new);
            if slot.level == 0 && (first || clock_ns >= slot.seen_ns + self.settings.admission_ns()) {
                slot.level = 1;
                self.levels[0].push(key);
            }
        }
        if self.regions.len() > regions {
            self.regions.retain(|&key, _| memory.region(key).is_some());
        }
        let due = match self.settings.renewal {
            Renewal::Round => true,
            Renewal::Coverage(share) => self.covered * 10_000 >= self.granularity.all(pages) * u64::from(share.0),
        };
        if due {
            self.covered = 0;
            let rehash_ns = self.search.renew();
            self.spend(rehash_ns, self.settings.share(self.levels.len()));
        }
        self.search.prune(memory);
    }

    /// Ends the round for the regions that are on a level.
    fn judge(&mut self, memory: &Memory) {
        let top = self.levels.len();
        let mut levels = vec![Vec::new(); top];
        for key in self.levels.drain(..).flatten() {
            let (Some(region), Some(slot)) = (memory.region(key), self.regions.get_mut(&key)) else { continue };
            slot.fit(region.len());
            slot.level = match slot.end_round(region.broken, &self.settings) {
                LevelChange::Stay => slot.level,
                LevelChange::Up => (slot.level + 1).min(top),
                LevelChange::Down => (slot.level - 1).max(1),
                LevelChange::Bottom => 1,
            };
            levels[slot.level - 1].push(key);
        }
        self.levels = levels;
    }
}
