//! The ladder: regions climb from level to level, and we sample each level more densely than the one below (UKSM
//! section 5).
//!
//! ```text
//! for (;;) { global round {
//!     promote / demote regions
//!     for l in 1..=N { sample level l: its regions are one linear space, a sample point every L·s / (t_l·p_l) pages }
//! } }
//! ```
//!
//! `L` is the length of the level's space in pages, `t_l` the round time `t` shared evenly among the levels, `p_l` the
//! share of a core that level `l` may use (the governor's at the top, halved from level to level downwards, a fixed
//! small share at the bottom) and `s` the measured cost of one sample. A region starts on the bottom level. Its
//! duplicate ratio promotes it. It returns to the bottom when its duplicates are merged, or when it turns out to be
//! sparse, COW-broken or short-lived.
//!
//! We differ from the paper in three points:
//!
//! - We correct a sampled ratio for coverage ([`crate::sampling::estimate`]), so we find contents that exist only
//!   twice.
//! - A region with clear samples goes to the top at once, and we sample a new region at once, until we'd have noticed
//!   if it were duplicated.
//! - On the top level we read a region whole, in order, once, which shows exactly which extents are worth marking.

use crate::config::Config;
use crate::governor::{Pace, share_ns};
use crate::host::PageRun;
use crate::limits::Allowance;
use crate::marking::cow_breaks::PROBES_MAX;
use crate::random::mix;
use crate::region::kin::EARLY_SAMPLES;
use crate::region::table::RegionTable;
use crate::region::{Age, Event, RUN_PAGES, Region};
use crate::sampling::estimate::samples_for_evidence;
use crate::units::{Pages, Permyriad, Vpn, count, whole};
use std::collections::BTreeSet;

/// We read at most this many pages in one cycle: about 40 ms, so that signals and new processes don't have to wait.
pub const CYCLE_PAGES: u64 = 65_536;
/// How many copies we expect bottom-level samples to show in a region at the threshold.
const EVIDENCE: f64 = 3.0;
/// Each level asks for this many times the evidence of the one below, so twice the samples.
const EVIDENCE_STEP: f64 = 4.0;
/// We must see this many duplicates before we promote a region.
const FOUND_MIN: u64 = 4;
/// We assume that reading a page costs this much until we've measured it, nanoseconds.
const READ_NS: u64 = 900;
/// To find a page that holds memory, we visit at most this many. In a nearly empty region, we visit up to twice as many
/// as we expect to need, but at most `VISITS_MOST`. Absent pages cost little.
const VISITS_PER_SAMPLE: u64 = 16;
const VISITS_MOST: u64 = 4_096;
/// We need at least this many pages to measure the cost of one.
const SAMPLES_MIN: u64 = 200;
/// We plan at least this many pages for the bottom level in a round, even if the round's other costs take up the
/// level's share.
const BOTTOM_MIN: u64 = 64;
/// The age of a new region if regions of its family live long.
pub const LONG_LIVED: Age = Age::Grown { worth_from_ns: 0 };
/// The cost of checking whether a single page is still merged, in pages read.
const VISIT_PAGES: u64 = 2;

/// The ladder's clock and figures. Each region knows its own level.
#[derive(Clone, Debug)]
pub struct Ladder {
    /// Number of levels (UKSM `N`).
    levels: usize,
    /// When the current global round began, nanoseconds.
    began_ns: Option<u64>,
    /// Global rounds completed.
    rounds: u64,
    /// The measured cost of one sample (UKSM `s`), nanoseconds.
    sample_ns: u64,
    /// The cost of a sample if we only sample the bottom level: few pages, far apart, share all the costs of a round.
    bottom_ns: Option<u64>,
    /// Where the bottom level's sample points start in this round.
    phase: u64,
    /// Sample points left in this round, by level.
    left: Vec<u64>,
}

/// What to read in one cycle.
#[derive(Debug, Default)]
pub struct ReadPlan {
    pub runs: Vec<PageRun>,
    /// The regions that we're reading whole: slot, and the page up to which we read in this cycle.
    pub whole: Vec<(u32, Vpn)>,
    /// Whether we're sampling or reading regions that may be worth marking, so that marks should wait for them.
    pub foreground: bool,
    /// Whether a global round has just begun.
    pub new_round: bool,
}

impl Ladder {
    pub fn new(levels: usize) -> Self {
        Self {
            levels: levels.max(1),
            began_ns: None,
            rounds: 0,
            sample_ns: READ_NS,
            bottom_ns: None,
            phase: 0,
            left: Vec::new(),
        }
    }

    pub fn levels(&self) -> usize {
        self.levels
    }

    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// The measured cost of reading one page, nanoseconds.
    pub fn sample_ns(&self) -> u64 {
        self.sample_ns
    }

    /// Roughly the cost of a page if we read many in a row, nanoseconds. Scattered samples cost more.
    pub fn run_page_ns(&self) -> u64 {
        self.sample_ns.min(2 * READ_NS)
    }

    /// Records the CPU time of a cycle that read this many pages.
    pub fn record_cost(&mut self, pages: u64, cpu_ns: u64) {
        if pages >= SAMPLES_MIN {
            self.sample_ns = ((self.sample_ns * 3 + cpu_ns / pages) / 4).clamp(50, 100_000);
        }
    }

    /// Records the CPU time of a round in which we sampled this many pages, all on the bottom level.
    pub fn record_bottom_cost(&mut self, pages: u64, cpu_ns: u64) {
        if let Some(page_ns) = cpu_ns.checked_div(pages) {
            self.bottom_ns = Some((self.bottom_ns.unwrap_or(self.sample_ns) * 3 + page_ns) / 4);
        }
    }

    /// Pages to sample on the bottom level in one round. The level's share covers the whole round and isn't divided
    /// among the levels, because the levels above are usually empty.
    fn bottom_points(&self, pace: Pace, config: &Config) -> u64 {
        // Absent pages cost less, but the next pages may be present, so we assume at least half of the usual cost.
        let page_ns = self.bottom_ns.unwrap_or(self.sample_ns).max(self.sample_ns / 2);
        (share_ns(pace.round_ns, self.share(1, pace, config)) / page_ns).max(BOTTOM_MIN)
    }

    /// Starts the next global round if it's time. Returns whether it did.
    pub fn start_round(&mut self, now_ns: u64, pace: Pace) -> bool {
        match self.began_ns {
            Some(began_ns) if now_ns < began_ns + pace.round_ns => false,
            began_ns => {
                self.rounds += u64::from(began_ns.is_some());
                self.began_ns = Some(now_ns);
                self.phase = mix(now_ns);
                true
            }
        }
    }

    /// When the current round ends, nanoseconds.
    pub fn ends_ns(&self, pace: Pace) -> u64 {
        self.began_ns.unwrap_or(0) + pace.round_ns
    }

    /// The share of a core that a level may use (UKSM's `p_l`).
    pub fn share(&self, level: usize, pace: Pace, config: &Config) -> Permyriad {
        if level <= 1 && self.levels > 1 {
            return config.bottom_share.min(pace.top);
        }
        let halvings = u32::try_from(self.levels.saturating_sub(level)).unwrap_or(31).min(31);
        Permyriad((pace.top.0 >> halvings).max(1))
    }

    /// Pages to sample on a level in one round: `t_l · p_l / s`.
    fn points(&self, level: usize, pace: Pace, config: &Config) -> u64 {
        let time_ns = pace.round_ns / count(self.levels);
        share_ns(time_ns, self.share(level, pace, config)) / self.sample_ns
    }

    /// Plans one cycle of at most `room` pages. We start with the top level, where most is to be gained.
    pub fn plan(
        &mut self,
        table: &mut RegionTable,
        room: u64,
        new_round: bool,
        pace: Pace,
        allowance: &mut Allowance,
        config: &Config,
    ) -> ReadPlan {
        if new_round {
            self.left = (0..=self.levels).map(|level| self.points(level, pace, config)).collect();
        }
        let mut reading = ReadPlan { new_round, ..ReadPlan::default() };
        let mut left = room.min(CYCLE_PAGES);
        read_whole(table, &mut left, allowance, &mut reading);
        // Sampling shouldn't wait until we've read gigabytes whole.
        let mut left = left.max(room.min(CYCLE_PAGES) / 4);
        for level in (1..self.levels.max(2)).rev() {
            // We sample new regions at once, and promoted regions within their level's share.
            let points = if level == 1 { left } else { left.min(self.left.get(level).copied().unwrap_or(0)) };
            let taken = sample(table, level, points, allowance, config, &mut reading.runs);
            left = left.saturating_sub(taken);
            if let Some(points) = self.left.get_mut(level) {
                *points = points.saturating_sub(taken);
            }
        }
        reading.foreground |= !reading.runs.is_empty();
        if new_round {
            let points = self.bottom_points(pace, config);
            self.sample_bottom(table, points.min(room), allowance, config, &mut reading.runs);
        }
        reading
    }

    /// Samples about `pages` pages of the bottom level, spread over its regions as one linear space. Regions where
    /// duplicates keep appearing get more room in that space.
    fn sample_bottom(
        &self,
        table: &mut RegionTable,
        pages: u64,
        allowance: &mut Allowance,
        config: &Config,
        runs: &mut Vec<PageRun>,
    ) {
        let mut length = 0;
        for region in table.iter().filter(|region| is_watched(region, config)) {
            length += room_taken(region, config);
        }
        let interval = (length / (pages / RUN_PAGES).max(1)).max(RUN_PAGES);
        let mut point = self.phase % interval;
        for region in table.iter_mut().filter(|region| is_watched(region, config)) {
            let owner = region.view.owner;
            let length = room_taken(region, config);
            while point < length {
                if allowance.pages_left(owner) >= RUN_PAGES {
                    let (first, pages) = region.next_run();
                    allowance.use_pages(owner, pages);
                    runs.push(region.run(first, Pages(pages)));
                }
                point += interval;
            }
            point -= length;
        }
    }

    /// Checks whether pages are still merged: some single pages of each marked span. Where we merge on request, these
    /// are pages that were written after an earlier merge. Costs as much as reading about `pages` pages.
    pub fn visit_merged(
        &self,
        table: &mut RegionTable,
        pages: u64,
        round_ns: u64,
        allowance: &mut Allowance,
        runs: &mut Vec<PageRun>,
    ) {
        let visitable = |region: &Region| {
            let on_request = region.usage.written.len().max(Pages(count(region.usage.cow_breaks.observed())));
            region.marked_resident().max(on_request).0
        };
        let marked: u64 = table.iter().map(visitable).sum();
        let visits = pages / VISIT_PAGES;
        for region in table.iter_mut().filter(|region| !region.hold.left_alone) {
            let resident = visitable(region);
            let share = u128::from(visits) * u128::from(resident) / u128::from(marked.max(1));
            // Every marked region gets some checks, even the smallest.
            let share = if resident == 0 { 0 } else { u64::try_from(share).unwrap_or(0).clamp(8, count(PROBES_MAX)) };
            let random = self.phase ^ u64::from(region.view.key.0) << 32;
            let share = share.min(allowance.pages_left(region.view.owner));
            allowance.use_pages(region.view.owner, share);
            if share > 0 {
                region.usage.cow_breaks.set_visits(share, round_ns);
            }
            for number in 0..share {
                // Half of the checks go to pages that we don't observe yet, while there's room for more.
                let mut page = None;
                if number % 2 == 0 && region.usage.cow_breaks.has_room() {
                    page = region.marked_page(mix(random + number));
                }
                if page.is_none() {
                    page = region.usage.cow_breaks.next_visit();
                }
                if let Some(page) = page {
                    runs.push(region.run(page, Pages(1)));
                }
            }
        }
    }

    /// Promotes and demotes regions by their samples. A region with clear samples goes to the top at once. Others rise
    /// by one level once they have the evidence that their present level asks for. Returns whether we have something
    /// left to read soon.
    pub fn promote(&self, table: &mut RegionTable, now_ns: u64, pace: Pace, config: &Config) -> bool {
        let sampled = table.sampled();
        let threshold = config.threshold().fraction();
        let mut families = BTreeSet::new();
        for region in table.iter_mut() {
            if now_ns >= matures_ns(region, pace, config) {
                region.age.grow();
            }
            if region.life.is_reading() || !may_be_promoted(region, now_ns, pace, config) {
                continue;
            }
            if region.survey.tally.duplicates() < FOUND_MIN {
                demote(region, config);
                continue;
            }
            // Duplicates that we found earlier, but that weren't worth marking, don't count again.
            let beyond = if region.life.is_surveyed() { 0.0 } else { region.left_over(config.mechanism) };
            let estimate = region.survey.estimate(region.view.resident, sampled);
            if estimate.ratio < threshold + beyond {
                demote(region, config);
                continue;
            }
            if estimate.floor >= threshold + beyond || region.life.level() + 1 >= self.levels {
                families.insert(region.view.family);
                if !region.life.is_surveyed() && region.hold.reason().is_none() {
                    // We only read a region again soon if reading it brought something the last time.
                    if region.has_gained(config.threshold()) {
                        region.hold.pause_ns = 0;
                    }
                    region.hold.put_off(now_ns);
                }
                region.examine(self.levels);
            } else if has_evidence(region, config) {
                region.life.advance(Event::Climb);
            }
        }
        // Regions of the same family are worth reading, too, unless their own samples speak against it.
        for region in table.iter_mut() {
            let is_open = wants_samples(region, EVIDENCE, config) || region.survey.tally.duplicates() > 0;
            if region.life.is_surveyed()
                && is_open
                && families.contains(&region.view.family)
                && may_be_promoted(region, now_ns, pace, config)
            {
                region.examine(self.levels);
            }
        }
        table.iter().any(|region| is_foreground(region, config))
    }
}

/// Whether we have something left to read soon in a region, so that marks should wait for it.
pub fn is_foreground(region: &Region, config: &Config) -> bool {
    region.life.is_reading() && !region.hold.left_alone || wants_more(region, config)
}

/// How many copies we expect samples on a level to show in a region at the threshold.
fn evidence(level: usize) -> f64 {
    EVIDENCE * EVIDENCE_STEP.powi(i32::try_from(level).unwrap_or(8) - 1)
}

/// Moves a region down one level if its samples speak against it.
fn demote(region: &mut Region, config: &Config) {
    if has_evidence(region, config) {
        region.life.advance(Event::Descend);
    }
}

/// Whether a region that we've never read whole has enough evidence for its level.
fn has_evidence(region: &Region, config: &Config) -> bool {
    region.life.is_surveyed() && !wants_more(region, config)
}

/// Goes on reading the regions that have reached the top level of the ladder, in order.
fn read_whole(table: &mut RegionTable, left: &mut u64, allowance: &mut Allowance, reading: &mut ReadPlan) {
    let mut slots: Vec<(bool, u32)> = Vec::new();
    for (slot, region) in table.numbered_mut() {
        if region.life.is_reading() && !region.hold.left_alone {
            slots.push((region.survey.is_unread(), slot));
        }
    }
    // Regions that the host didn't read last time come last. If it can't read them now either, they'd fill the whole
    // plan again and again.
    slots.sort_unstable();
    for (_, slot) in slots {
        let Some(region) = table.get_mut(slot) else { continue };
        let Some(cursor) = region.life.cursor() else { continue };
        let end = region.end();
        let mut at = Vpn(cursor.0.max(region.view.first.0));
        let may = allowance.pages_left(region.view.owner).min(*left);
        let mut read = 0;
        let waits = region.next_for_kin().is_some();
        reading.foreground |= waits;
        while at < end && read < may && !waits {
            let (first, pages) = region.next_to_read(at);
            let pages = pages.min(may - read);
            if pages > 0 {
                reading.runs.push(region.run(first, Pages(pages)));
            }
            at = first + pages;
            read += pages;
        }
        allowance.use_pages(region.view.owner, read);
        *left -= read;
        reading.whole.push((slot, at));
    }
}

/// Samples a level's regions that lack evidence, about `points` pages in all. Returns the number of pages.
fn sample(
    table: &mut RegionTable,
    level: usize,
    points: u64,
    allowance: &mut Allowance,
    config: &Config,
    runs: &mut Vec<PageRun>,
) -> u64 {
    let evidence = evidence(level);
    let mut taken = 0;
    for region in table.iter_mut().filter(|region| region.life.level() == level) {
        if taken >= points {
            break;
        }
        if !wants_samples(region, evidence, config) {
            continue;
        }
        let is_early = matches!(region.age, Age::New | LONG_LIVED) && region.survey.visited() == 0;
        let most = if is_early && !config.mechanism.by_marks() { EARLY_SAMPLES } else { u64::MAX };
        let target = wanted(region, evidence, config).min(most);
        // If little of a region is resident, most pages we visit are absent, and cost little. So we visit more.
        let filled = region.view.resident.0 as f64 / region.view.pages.0 as f64;
        let missing = target.saturating_sub(region.survey.tally.sampled);
        let wanted = whole(missing as f64 / filled.clamp(2.0 / VISITS_MOST as f64, 1.0));
        let mut wanted = wanted.clamp(RUN_PAGES, (points - taken).max(RUN_PAGES));
        let owner = region.view.owner;
        while wanted > 0 && region.survey.runs_left() > 0 && allowance.pages_left(owner) >= RUN_PAGES {
            let (first, pages) = region.next_run();
            allowance.use_pages(owner, pages);
            runs.push(region.run(first, Pages(pages)));
            wanted = wanted.saturating_sub(pages);
            taken += pages;
        }
    }
    taken
}

/// How many samples a region's level asks for.
pub fn samples_wanted(region: &Region, config: &Config) -> u64 {
    wanted(region, evidence(region.life.level()), config)
}

/// Whether a region lacks samples for its level.
pub fn wants_more(region: &Region, config: &Config) -> bool {
    wants_samples(region, evidence(region.life.level()), config)
}

fn wanted(region: &Region, evidence: f64, config: &Config) -> u64 {
    samples_for_evidence(region.view.resident.0, config.threshold().fraction(), evidence)
}

/// Whether a region lacks samples for this much evidence.
fn wants_samples(region: &Region, evidence: f64, config: &Config) -> bool {
    let wanted = wanted(region, evidence, config);
    region.life.is_surveyed()
        && !region.age.is_young()
        && region.hold.may_sample()
        && region.survey.runs_left() > 0
        && region.survey.tally.sampled < wanted
        // Some pages never count as samples, such as pages shared through fork. So we bound visits, too.
        && region.survey.visited() < wanted * visits_per_sample(region)
}

fn visits_per_sample(region: &Region) -> u64 {
    let needed = region.view.pages.0 / region.view.resident.0.max(1);
    (2 * needed).clamp(VISITS_PER_SAMPLE, VISITS_MOST)
}

/// Whether we've visited many pages of a region that's nearly empty, and found so few present that we don't know what
/// it holds.
pub fn is_out_of_sight(region: &Region, config: &Config) -> bool {
    let wanted = samples_wanted(region, config);
    visits_per_sample(region) > VISITS_PER_SAMPLE
        && region.life.is_surveyed()
        && region.survey.runs_left() > 0
        && 2 * region.survey.tally.sampled < wanted
        && !region.survey.is_mostly_forked()
        && region.survey.visited() >= wanted * visits_per_sample(region)
}

/// Whether we may promote a region: it's old enough, and we don't leave it alone.
pub fn may_be_promoted(region: &Region, now_ns: u64, pace: Pace, config: &Config) -> bool {
    region.hold.may_examine(now_ns) && now_ns >= matures_ns(region, pace, config)
}

/// When a region is old enough to be promoted, nanoseconds.
pub fn matures_ns(region: &Region, pace: Pace, config: &Config) -> u64 {
    let age_ns = match region.age {
        Age::Old => 0,
        LONG_LIVED if region.survey.kin.found().is_some() => 0,
        _ if config.probation_rounds == 0 => config.lifetime_ns,
        Age::New => config.probation_ns(pace),
        Age::Young { worth_from_ns } | Age::Grown { worth_from_ns } => {
            config.lifetime_ns.max(pace.round_ns / 8).max(worth_from_ns)
        }
    };
    region.seen_ns + age_ns
}

fn is_watched(region: &Region, config: &Config) -> bool {
    let known = !region.life.is_reading() && !wants_samples(region, EVIDENCE, config);
    region.hold.may_sample() && !region.age.is_young() && region.life.level() == 1 && known
}

/// The room that a region takes up in the bottom level's linear space, pages: its length, or more on request if
/// duplicates keep appearing. With ksmd that's not needed, because ksmd finds new duplicates in marked memory by
/// itself.
fn room_taken(region: &Region, config: &Config) -> u64 {
    let weight = if config.mechanism.by_marks() { 1 } else { region.survey.weight(config.threshold()) };
    region.view.pages.0 * weight
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::governor::Governor;
    use crate::host::{Mechanism, RegionView};
    use crate::keys::RegionKey;
    use crate::limits::Limits;
    use crate::region::test_view;
    use crate::sampling::estimate::Tally;
    use proptest::prelude::*;

    fn unlimited() -> Allowance {
        Allowance::new(Limits { pages_per_process: u64::MAX, pages: u64::MAX, ..Limits::default() }, &[])
    }

    fn table(sizes: &[u64]) -> RegionTable {
        let view = |(key, &pages): (u32, &u64)| test_view(key, u64::from(key) << 32, pages);
        let views: Vec<_> = (1..).zip(sizes).map(view).collect();
        let mut table = RegionTable::default();
        table.update(&views, 5, |view| Region::new(view, 0, false, 5));
        table
    }

    fn planned(reading: &ReadPlan, key: u32) -> u64 {
        let of = reading.runs.iter().filter(|run| run.region == RegionKey(key));
        of.map(|run| u64::from(run.pages)).sum()
    }

    /// Promotes regions at a duplicate ratio of 10 %.
    fn tenth() -> Config {
        Config { duplicate_threshold: Permyriad(1_000), ..Config::default() }
    }

    fn plan(ladder: &mut Ladder, table: &mut RegionTable, new_round: bool) -> ReadPlan {
        ladder.plan(table, u64::MAX, new_round, Governor::Full.pace(), &mut unlimited(), &tenth())
    }

    fn promote(ladder: &Ladder, table: &mut RegionTable) {
        let (pace, config) = (Governor::Full.pace(), tenth());
        ladder.promote(table, 1, pace, &config);
    }

    #[test]
    fn a_new_region_is_sampled_until_ten_per_cent_of_duplicates_would_show() {
        let (mut ladder, mut table) = (Ladder::new(4), table(&[100_000, 40]));
        let reading = plan(&mut ladder, &mut table, false);
        let enough = samples_for_evidence(100_000, 0.1, EVIDENCE);
        assert!((enough..enough + RUN_PAGES).contains(&planned(&reading, 1)), "{}", planned(&reading, 1));
        assert_eq!(planned(&reading, 2), 36, "a small one is read nearly whole");
        assert!(reading.foreground);
    }

    #[test]
    fn a_nearly_empty_region_gets_its_samples_or_is_out_of_sight() {
        // One page in 2,048 is present, or one in 65,536.
        for (resident, is_sampled) in [(1 << 13, true), (1 << 8, false)] {
            let view = RegionView { resident: Pages(resident), ..test_view(1, 0, 1 << 24) };
            let (mut ladder, mut table) = (Ladder::new(4), RegionTable::default());
            table.update(&[view], 5, |view| Region::new(view, 0, false, 5));
            for _ in 0..1_000 {
                let reading = plan(&mut ladder, &mut table, false);
                let region = table.iter_mut().next().unwrap();
                for run in reading.runs {
                    let pages = run.first.0..run.first.0 + u64::from(run.pages);
                    let gap = view.pages.0 / resident;
                    region.survey.tally.sampled += count(pages.filter(|page| page % gap == 0).count());
                }
            }
            let region = table.iter().next().unwrap();
            let wanted = samples_for_evidence(resident, 0.1, EVIDENCE);
            let sampled = region.survey.tally.sampled;
            assert!(!wants_more(region, &tenth()));
            assert_eq!(sampled >= wanted, is_sampled, "{sampled} of {wanted}");
            assert_eq!(is_out_of_sight(region, &tenth()), !is_sampled);
        }
    }

    #[test]
    fn the_top_level_is_read_whole_once_in_order() {
        let (mut ladder, mut table) = (Ladder::new(4), table(&[100_000, 700]));
        table.iter_mut().for_each(|region| region.examine(4));
        let mut next = [0_u64, 0];
        for _ in 0..3 {
            let reading = plan(&mut ladder, &mut table, false);
            assert!(reading.runs.iter().map(|run| u64::from(run.pages)).sum::<u64>() <= CYCLE_PAGES);
            for run in &reading.runs {
                let at = &mut next[run.region.0 as usize - 1];
                assert_eq!(run.first.0 & 0xffff_ffff, *at);
                *at += u64::from(run.pages);
            }
            for (slot, end) in reading.whole {
                table.get_mut(slot).unwrap().life.advance(Event::ReadTo(end));
            }
        }
        assert_eq!(next, [100_000, 700]);
    }

    #[test]
    fn regions_without_doubt_go_to_the_top_and_others_level_by_level() {
        let (ladder, mut table) = (Ladder::new(4), table(&[100_000; 3]));
        for (region, found) in table.iter_mut().zip([60, 6, 0]) {
            region.survey.tally = Tally { sampled: 2_000, zero: 0, found, copies: found };
        }
        let levels = |table: &RegionTable| table.iter().map(|region| region.life.level()).collect::<Vec<_>>();
        promote(&ladder, &mut table);
        assert_eq!(levels(&table), [4, 2, 1]);
        assert!(table.iter().next().unwrap().life.is_reading());
        promote(&ladder, &mut table);
        assert_eq!(levels(&table), [4, 2, 1], "it lacks evidence for its level");
        // The second level asks for four times the evidence. Six duplicates among so many samples are too few.
        let sampled = samples_for_evidence(100_000, 0.1, evidence(2));
        table.iter_mut().nth(1).unwrap().survey.tally = Tally { sampled, zero: 0, found: 6, copies: 6 };
        promote(&ladder, &mut table);
        assert_eq!(levels(&table), [4, 1, 1]);
    }

    #[test]
    fn regions_left_alone_are_not_promoted() {
        let (ladder, mut table) = (Ladder::new(4), table(&[100_000; 2]));
        for (region, refused) in table.iter_mut().zip([false, true]) {
            region.survey.tally = Tally { sampled: 2_000, zero: 0, found: 500, copies: 500 };
            if refused {
                region.hold.refuse();
            } else {
                region.hold.leave_until(1_000, crate::region::LeaveAlone::CowBroken);
            }
        }
        promote(&ladder, &mut table);
        assert!(table.iter().all(|region| region.life.level() == 1));
    }

    #[test]
    fn the_bottom_level_is_where_new_duplicates_appear() {
        for (mechanism, denser) in [(Mechanism::Request, true), (Mechanism::Ksmd, false)] {
            let (mut ladder, mut table) = (Ladder::new(4), table(&[1 << 20; 2]));
            for region in table.iter_mut() {
                region.examine(1);
                region.judged(0, false);
                (0..100).for_each(|_| region.survey.record_renewal(region.view.key == RegionKey(2)));
            }
            let config = Config { mechanism, ..tenth() };
            let pace = Governor::Full.pace();
            let reading = ladder.plan(&mut table, u64::MAX, true, pace, &mut unlimited(), &config);
            let [others, news] = [1, 2].map(|key| planned(&reading, key));
            assert!(if denser { news > 10 * others } else { news <= 2 * others }, "{news} and {others}");
            assert!(others > 0);
        }
    }

    #[test]
    fn shares_are_halved_downwards_and_the_bottom_level_has_its_own() {
        let (ladder, pace, config) = (Ladder::new(4), Governor::Full.pace(), Config::default());
        let shares = [1, 2, 3, 4].map(|level| ladder.share(level, pace, &config).0);
        assert_eq!(shares, [15, 2_375, 4_750, 9_500]);
        assert_eq!(Ladder::new(1).share(1, pace, &config), pace.top);
    }

    #[test]
    fn rounds_follow_one_another() {
        let (mut ladder, pace) = (Ladder::new(4), Governor::Full.pace());
        let turns: Vec<bool> = (0..9).map(|half| ladder.start_round(half * 500_000_000, pace)).collect();
        assert_eq!(turns, [true, false, false, false, true, false, false, false, true]);
        assert_eq!(ladder.rounds(), 2);
    }

    #[test]
    fn the_bottom_level_bears_what_its_rounds_cost_but_never_ends() {
        let (mut ladder, pace, config) = (Ladder::new(4), Governor::Full.pace(), Config::default());
        let allowed_ns = share_ns(pace.round_ns, config.bottom_share);
        for (round_ns, page_ns, expected) in
            [(0, 900, 3_333), (2_000_000, 10_000, 100), (4_000_000, 10_000, BOTTOM_MIN)]
        {
            for _ in 0..100 {
                let pages = ladder.bottom_points(pace, &config);
                ladder.record_bottom_cost(pages, round_ns + pages * page_ns);
            }
            let pages = ladder.bottom_points(pace, &config);
            assert!(pages.abs_diff(expected) <= expected / 20, "{pages} instead of {expected}");
            assert!(round_ns > allowed_ns || round_ns + pages * page_ns <= allowed_ns * 11 / 10);
        }
    }

    proptest! {
        /// The bottom level stays within its share, spread over all regions by size.
        #[test]
        fn the_bottom_level_stays_within_its_share(sizes in proptest::collection::vec(1u64..50_000, 1..20), at: u32) {
            let (mut ladder, mut table) = (Ladder::new(4), table(&sizes));
            table.iter_mut().for_each(|region| { region.examine(1); region.judged(0, false); });
            let pace = Governor::Full.pace();
            ladder.start_round(at.into(), pace);
            let reading = plan(&mut ladder, &mut table, true);
            prop_assert!(!reading.foreground);
            let read: u64 = reading.runs.iter().map(|run| u64::from(run.pages)).sum();
            let allowed = share_ns(pace.round_ns, Config::default().bottom_share) / ladder.sample_ns();
            prop_assert!(read <= 2 * allowed + RUN_PAGES, "{read} for {allowed}");
        }

        /// A plan never exceeds the room there is.
        #[test]
        fn a_plan_never_exceeds_its_room(sizes in proptest::collection::vec(1u64..500_000, 1..6), room in 0u64..100_000) {
            let (mut ladder, mut table) = (Ladder::new(4), table(&sizes));
            table.iter_mut().step_by(2).for_each(|region| region.examine(4));
            let reading = ladder.plan(&mut table, room, true, Governor::Full.pace(), &mut unlimited(), &Config::default());
            let read: u64 = reading.runs.iter().map(|run| u64::from(run.pages)).sum();
            // A quarter more, for sampling that goes on while we read regions whole, and the ends of runs.
            prop_assert!(read <= room.min(CYCLE_PAGES) * 5 / 4 + room.min(2_200) + 2 * RUN_PAGES * count(sizes.len()), "{read} for {room}");
        }
    }
}
