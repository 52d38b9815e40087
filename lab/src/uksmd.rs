//! UKSM's own scanner, running in the kernel instead of ksmd: regions on levels, sampled, and merged page by page.
//! Follows sections 5 to 7 of the paper; in virtual time.
//!
//! Where the paper is silent:
//! - A level without regions takes no time ("until the sample point reaches the boundary of the linear space"). So a
//!   round with only the bottom level lasts `t / N`, and idling costs the bottom level's share.
//! - Regions present at the first round are old enough. We sample later ones once they've lived across a whole
//!   sleep-scan cycle, `T_s + t` (section 5.2).
//! - Once the last page of a region has been sampled, the region has nothing more to show: it returns to the bottom
//!   level (section 4), where it starts again in the next round.
//!
//! We don't simulate the time to judge regions, which the paper doesn't mention, or locked and pinned pages.

mod region;
mod search;
mod settings;
#[cfg(test)]
mod tests;

use pagefold_engine::random::Random;
use pagefold_engine::units::Permyriad;
use pagefold_sim::memory::Memory;
use pagefold_sim::{Costs, Granularity, Scanner, SearchCounts};
use region::{LevelChange, SampledRegion};
use rustc_hash::FxHashMap;
use search::{SampleOutcome, Search};
pub use settings::UksmSettings;
use settings::pause_ns;

/// A sample point is a fixed-point number of pages, with this many fraction bits.
const POINT_BITS: u32 = 10;
/// We only estimate the cost of a page from at least this many samples.
const SAMPLES_MIN: u64 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asleep {
        until_ns: u64,
    },
    /// The scanner is in the active part of a sleep-scan cycle.
    Scanning {
        /// Pages to sample before it ends.
        left: u64,
        /// Pages sampled since it began, and its start.
        sampled: u64,
        began_ns: u64,
    },
}

/// One round of one level (section 5.3): its regions as one linear space.
#[derive(Debug)]
struct LevelRound {
    level: usize,
    regions: Vec<(u32, u64)>,
    /// The region that may contain the next sample point, and the start of that region in the linear space, in pages.
    current: usize,
    start: u64,
    /// The next sample point, and the interval, in fractions of a page.
    point: u64,
    interval: u64,
    /// The number of real samples that each one stands for.
    weight: u64,
}

impl LevelRound {
    /// The region of the next sample point.
    fn next(&mut self) -> Option<u32> {
        let page = self.point >> POINT_BITS;
        while let Some(&(key, pages)) = self.regions.get(self.current) {
            if page < self.start + pages {
                self.point += self.interval;
                return Some(key);
            }
            self.start += pages;
            self.current += 1;
        }
        None
    }
}

#[derive(Debug)]
pub struct Uksmd {
    cpu_ns: u64,
    /// Pages sampled, without absent ones.
    scanned: u64,
    /// Completed global rounds.
    rounds: u64,
    costs: Costs,
    granularity: Granularity,
    settings: UksmSettings,
    search: Search,
    regions: FxHashMap<u32, SampledRegion>,
    /// The regions on each level in order of arrival, the bottom level first.
    levels: Vec<Vec<u32>>,
    state: State,
    /// The current level. The levels below it are done in this round.
    level: usize,
    level_round: Option<LevelRound>,
    /// The scanner's own time.
    clock_ns: u64,
    /// Sleep that the scanner owes for time spent.
    owed_ns: u64,
    /// The estimated cost of sampling one page (`s`).
    page_ns: u64,
    /// Pages sampled since we last emptied the unmerged tree.
    covered: u64,
    stream: Random,
}

impl Scanner for Uksmd {
    fn run_until(&mut self, memory: &mut Memory, until_ns: u64) {
        loop {
            match self.state {
                State::Asleep { until_ns: wake_ns } if wake_ns < until_ns => {
                    self.clock_ns = wake_ns;
                    self.wake(memory);
                }
                State::Scanning { left, sampled, began_ns } if self.clock_ns < until_ns => {
                    self.scan(memory, until_ns, left, sampled, began_ns);
                }
                _ => return,
            }
        }
    }

    /// Forgets a region that is gone, as UKSM's hooks in memory management do (section 7).
    fn region_gone(&mut self, key: u32) {
        self.regions.remove(&key);
    }

    fn cpu_ns(&self) -> u64 {
        self.cpu_ns
    }

    fn scanned(&self) -> u64 {
        self.scanned
    }

    fn counts(&self) -> SearchCounts {
        self.search.counts
    }
}

impl Uksmd {
    /// A scanner that starts at time 0 with the sleep of its first cycle.
    pub fn new(costs: &Costs, granularity: Granularity, settings: UksmSettings) -> Self {
        let search = Search::new(costs, granularity, settings.strength, settings.zero_pages);
        Self {
            cpu_ns: 0,
            scanned: 0,
            rounds: 0,
            costs: *costs,
            granularity,
            settings,
            regions: FxHashMap::default(),
            levels: vec![Vec::new(); settings.levels.max(1)],
            state: State::Asleep { until_ns: settings.sleep_ns },
            level: 0,
            level_round: None,
            clock_ns: 0,
            owed_ns: 0,
            page_ns: costs.sample_ns + search.hash_ns,
            covered: 0,
            stream: Random::for_purpose(settings.seed, 0x0075_6b73_6d64),
            search,
        }
    }

    /// Spends CPU time, and adds the sleep that keeps it within a share.
    fn spend(&mut self, ns: u64, share: Permyriad) {
        self.clock_ns += ns;
        self.cpu_ns += ns;
        self.owed_ns += pause_ns(ns, share);
    }

    fn sleep(&mut self, least_ns: u64) {
        let slept_ns = std::mem::take(&mut self.owed_ns).max(least_ns).max(1);
        self.state = State::Asleep { until_ns: self.clock_ns + slept_ns };
    }

    /// Begins the active part of a cycle: in the current level, the next one, or the next round (figure 4).
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

    /// Continues the active part of a cycle, up to its end or until `until_ns`.
    fn scan(&mut self, memory: &mut Memory, until_ns: u64, mut left: u64, mut sampled: u64, began_ns: u64) {
        let Some(mut level_round) = self.level_round.take() else { return self.sleep(0) };
        let share = self.settings.share(level_round.level);
        let weight = level_round.weight;
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
        // The end of the last level ends the round.
        let ends_round = over && self.level_above().is_none();
        if ends_round {
            self.level = 0;
            self.rounds += 1;
        }
        self.sleep(if ends_round { self.settings.sleep_ns } else { 0 });
    }

    /// Samples a page of a region, and merges it if possible. Returns the cost, or `None` if the region has no page
    /// left in this round.
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

    /// The next level that has regions.
    fn level_above(&self) -> Option<usize> {
        (self.level + 1..=self.levels.len()).find(|&level| !self.levels[level - 1].is_empty())
    }

    /// Begins the round of the next level: at a random sample point, with intervals of `L · s / (t_l · p_l)`, but at
    /// least one page.
    fn next_level_round(&mut self) -> Option<LevelRound> {
        let level = self.level_above()?;
        self.level = level;
        let mut regions = Vec::new();
        let mut length = 0;
        for key in &self.levels[level - 1] {
            if let Some(region) = self.regions.get(key) {
                regions.push((*key, region.pages()));
                length += region.pages();
            }
        }
        let points = (self.settings.level_ns(level) / self.page_ns).max(1);
        let interval = ((self.granularity.scale(length) << POINT_BITS) / points).max(1 << POINT_BITS);
        let weight = self.granularity.samples(interval >> POINT_BITS);
        let interval = interval * weight / self.granularity.get();
        let point = self.stream.below(interval);
        Some(LevelRound { level, regions, current: 0, start: 0, point, interval, weight })
    }

    /// Admits new regions, promotes and demotes the others, and empties the unmerged tree when that's due.
    fn begin_round(&mut self, memory: &mut Memory) {
        self.judge(memory);
        let mut pages = 0;
        let mut regions = 0;
        for (key, region) in memory.live_regions() {
            pages += u64::from(region.len());
            regions += 1;
            let slot = self
                .regions
                .entry(key)
                .or_insert_with(|| SampledRegion::new(region.len(), self.clock_ns, self.stream.next(), region.broken));
            let admitted_ns = slot.seen_ns + self.settings.admission_ns();
            if slot.level == 0 && (self.rounds == 0 || self.clock_ns >= admitted_ns) {
                slot.level = 1;
                self.levels[0].push(key);
            }
        }
        if self.regions.len() > regions {
            self.regions.retain(|&key, _| memory.region(key).is_some());
        }
        if self.covered * 10_000 >= self.granularity.scale(pages) * u64::from(self.settings.renewal.0) {
            self.covered = 0;
            self.search.empty_unmerged();
        }
        self.search.prune(memory);
    }

    /// Ends the round for all regions on levels.
    fn judge(&mut self, memory: &Memory) {
        let top = self.levels.len();
        let mut levels = vec![Vec::new(); top];
        for key in self.levels.drain(..).flatten() {
            let (Some(region), Some(slot)) = (memory.region(key), self.regions.get_mut(&key)) else { continue };
            slot.resize(region.len());
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
