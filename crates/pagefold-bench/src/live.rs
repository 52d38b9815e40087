//! The live parts of a tenant, after UKSM's workloads: memory whose pages are written again and again (section 8.1.2),
//! and memory that comes and goes (8.1.3).
//!
//! They run on the tenant's only thread, between its answers: an answer stops their clock, so that being asked is not
//! counted as being late.

use crate::contents::{fill, mix};
use crate::tenant_main::Filled;
use anyhow::Context;
use memmap2::{Advice, MmapMut};
use pagefold_core::units::{PAGE_SIZE, Vpn};
use pagefold_linux::pagemap::{Pagemap, PagemapEntry};
use pagefold_linux::process::Process;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What a tenant does while it is not asked, once it has been told to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Live {
    /// Writes the pages of the first segment with what they hold already, one at a time, in order, over and over.
    Breaker {
        /// From one page to the next.
        every_us: u64,
    },
    /// Maps memory and fills all pages alike, leaves it so for a time, unmaps it, waits as long, and again.
    ShortLived {
        /// Pages.
        pages: u64,
        /// Which content.
        seed: u64,
        /// The time, from the end of the filling.
        life_us: u64,
        /// Marks the memory itself, before filling it, as a program made for KSM does.
        mergeable: bool,
    },
    /// Maps a little memory, writes to its first page and unmaps it, without a pause.
    Mapper {
        /// Pages.
        pages: u64,
    },
}

/// What the live parts have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// For so long, without the time it took to answer.
    pub seconds: f64,
    /// Pages written again.
    pub pages_written: u64,
    /// How far the latest write was behind its time, since the last answer, microseconds.
    pub latest_us: f64,
    /// Time spent writing.
    pub writing_seconds: f64,
    /// The lives of short-lived memory that have ended.
    pub lives: Vec<Life>,
    /// How often a mapper has mapped and unmapped, in each tenth of a second.
    #[serde(default)]
    pub maps: Vec<u64>,
}

/// One life of short-lived memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Life {
    /// Pages that were merged just before the end: mapped, and not by this entry alone.
    pub merged_pages: u64,
    /// From mapping to unmapping.
    pub seconds: f64,
}

/// A live part and where it is.
pub enum Part {
    /// See [`Live::Breaker`].
    Breaker(Clock, usize),
    /// See [`Live::ShortLived`].
    ShortLived(Clock, Cycle),
    /// See [`Live::Mapper`], with its bytes.
    Mapper(Clock, usize),
}

/// When something is due, and what has been done.
#[derive(Default)]
pub struct Clock {
    began: Option<Instant>,
    due: Option<Instant>,
    every: Duration,
    counters: Counters,
}

/// Memory that comes and goes.
pub struct Cycle {
    pages: usize,
    mergeable: bool,
    content: Vec<u8>,
    alive: Option<(MmapMut, Instant)>,
    /// Pages found to hold something else at the end of a life.
    damaged: u64,
}

/// Of the pages of a life so many are skipped for each one that is compared at its end: comparing all would make the
/// lives longer.
const COMPARE_EVERY: usize = 8;

/// Entries of pagemap read by one call.
const ENTRIES: usize = 4096;

impl Part {
    /// One that has not begun.
    pub fn new(live: Live) -> anyhow::Result<Self> {
        let clock = |every_us| Clock { every: Duration::from_micros(every_us), ..Clock::default() };
        Ok(match live {
            Live::Breaker { every_us } => Self::Breaker(clock(every_us), 0),
            Live::ShortLived { pages, seed, life_us, mergeable } => {
                let mut content = vec![0; PAGE_SIZE];
                fill(&mut content, mix(seed) ^ 6, 0);
                let pages = usize::try_from(pages)?;
                Self::ShortLived(clock(life_us), Cycle { pages, mergeable, content, alive: None, damaged: 0 })
            }
            Live::Mapper { pages } => Self::Mapper(clock(0), usize::try_from(pages)? * PAGE_SIZE),
        })
    }

    fn clock(&mut self) -> &mut Clock {
        match self {
            Self::Breaker(clock, _) | Self::ShortLived(clock, _) | Self::Mapper(clock, _) => clock,
        }
    }

    /// Begins.
    pub fn begin(&mut self, now: Instant) {
        let clock = self.clock();
        (clock.began, clock.due) = (Some(now), Some(now));
    }

    /// When there is something to do; `None` before the beginning.
    pub fn due(&self) -> Option<Instant> {
        match self {
            Self::Breaker(clock, _) | Self::ShortLived(clock, _) | Self::Mapper(clock, _) => clock.due,
        }
    }

    /// Does what is due.
    pub fn act(&mut self, memory: &mut [Filled]) -> anyhow::Result<()> {
        match self {
            Self::Breaker(clock, page) => {
                let filled = memory.first_mut().context("a breaker needs a segment")?;
                clock.write(|| *page = filled.write_again(*page));
                Ok(())
            }
            Self::ShortLived(clock, cycle) => {
                if let Some(life) = cycle.turn()? {
                    clock.counters.lives.push(life);
                }
                // Not on a schedule: both times count from the end of the work.
                clock.due = Some(Instant::now() + clock.every);
                Ok(())
            }
            Self::Mapper(clock, bytes) => clock.map(*bytes),
        }
    }

    /// An answer took this long: what is due comes so much later.
    pub fn pause(&mut self, taken: Duration) {
        let clock = self.clock();
        for at in [&mut clock.began, &mut clock.due].into_iter().flatten() {
            *at += taken;
        }
    }

    /// What has been done.
    pub fn counters(&mut self, now: Instant) -> Counters {
        let clock = self.clock();
        clock.counters.seconds = clock.began.map_or(0.0, |began| now.saturating_duration_since(began).as_secs_f64());
        let told = clock.counters.clone();
        clock.counters.latest_us = 0.0;
        clock.counters.maps.clear();
        told
    }

    /// Pages of its own that do not hold what was written, those of former lives included.
    pub fn damaged(&self) -> u64 {
        match self {
            Self::Breaker(..) | Self::Mapper(..) => 0,
            Self::ShortLived(_, cycle) => cycle.damaged + cycle.differing(1),
        }
    }
}

impl Clock {
    /// Writes a page, on a schedule that a late write does not move.
    fn write(&mut self, write: impl FnOnce()) {
        let Some(due) = self.due else { return };
        let began = Instant::now();
        write();
        self.counters.writing_seconds += began.elapsed().as_secs_f64();
        self.counters.pages_written += 1;
        let late_us = began.saturating_duration_since(due).as_secs_f64() * 1e6;
        self.counters.latest_us = self.counters.latest_us.max(late_us);
        self.due = Some(due + self.every);
    }

    /// Maps and unmaps for a tenth of a second, which a program that is kept waiting does not lengthen by much.
    fn map(&mut self, bytes: usize) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_millis(100);
        let mut maps = 0;
        while Instant::now() < end {
            for _ in 0..16 {
                let mut memory = MmapMut::map_anon(bytes).context("memory to map")?;
                memory[0] = 1;
                maps += 1;
            }
        }
        self.counters.maps.push(maps);
        self.due = Some(Instant::now());
        Ok(())
    }
}

impl Cycle {
    /// Ends the life there is, or begins one.
    fn turn(&mut self) -> anyhow::Result<Option<Life>> {
        let differing = self.differing(COMPARE_EVERY);
        if let Some((memory, born)) = self.alive.take() {
            let merged_pages = merged(&memory)?;
            self.damaged += differing;
            drop(memory);
            return Ok(Some(Life { merged_pages, seconds: born.elapsed().as_secs_f64() }));
        }
        let born = Instant::now();
        let mut memory = MmapMut::map_anon(self.pages * PAGE_SIZE).context("short-lived memory")?;
        if self.mergeable {
            memory.advise(Advice::Mergeable).context("MADV_MERGEABLE")?;
        }
        for page in memory.chunks_exact_mut(PAGE_SIZE) {
            page.copy_from_slice(&self.content);
        }
        self.alive = Some((memory, born));
        Ok(None)
    }

    /// Of one page in `every`, how many hold something else.
    fn differing(&self, every: usize) -> u64 {
        let Some((memory, _)) = &self.alive else { return 0 };
        memory.chunks_exact(PAGE_SIZE).step_by(every).filter(|page| **page != *self.content).count() as u64
    }
}

/// Pages of our own that share their frame. Memory that was never forked does so only where it is merged.
fn merged(memory: &[u8]) -> anyhow::Result<u64> {
    let pagemap = Pagemap::open(&Process::open(i32::try_from(std::process::id())?)?)?;
    let first = Vpn::of_address(memory.as_ptr().addr() as u64);
    let mut entries = vec![0; ENTRIES];
    let (mut at, mut left, mut merged) = (first, memory.len() / PAGE_SIZE, 0);
    while left > 0 {
        let now = left.min(ENTRIES);
        pagemap.read(at, &mut entries[..now])?;
        let shares = |entry: &&u64| PagemapEntry(**entry).present() && !PagemapEntry(**entry).exclusive();
        merged += entries[..now].iter().filter(shares).count() as u64;
        at = at + now as u64;
        left -= now;
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::Segment;

    #[test]
    fn a_breaker_keeps_its_schedule_and_its_contents() {
        let mut memory = [Filled::new(Segment::Same { pages: 3, seed: 1 }).unwrap()];
        let mut part = Part::new(Live::Breaker { every_us: 1000 }).unwrap();
        assert_eq!(part.due(), None);
        let began = Instant::now();
        part.begin(began);
        for _ in 0..5 {
            part.act(&mut memory).unwrap();
        }
        // Five writes at once, and still each has its own time.
        assert_eq!(part.due(), Some(began + Duration::from_millis(5)));
        part.pause(Duration::from_secs(1));
        assert_eq!(part.due(), Some(began + Duration::from_millis(1005)));
        let counters = part.counters(began + Duration::from_secs(3));
        assert_eq!((counters.pages_written, counters.seconds), (5, 2.0));
        assert_eq!(memory[0].damaged(), 0);
    }

    #[test]
    fn a_mapper_maps_and_counts() {
        let mut part = Part::new(Live::Mapper { pages: 16 }).unwrap();
        part.begin(Instant::now());
        part.act(&mut []).unwrap();
        part.act(&mut []).unwrap();
        let counters = part.counters(Instant::now());
        assert!(counters.maps.len() == 2 && counters.maps.iter().all(|&maps| maps > 100), "{counters:?}");
        assert!(part.counters(Instant::now()).maps.is_empty());
    }

    #[test]
    fn what_a_breaker_writes_is_what_was_there() {
        let mut memory = [Filled::new(Segment::Random { pages: 3, seed: 1 }).unwrap()];
        let mut part = Part::new(Live::Breaker { every_us: 1 }).unwrap();
        part.begin(Instant::now());
        memory[0].pages_mut()[PAGE_SIZE + 7] ^= 1;
        part.act(&mut memory).unwrap();
        assert_eq!(memory[0].damaged(), 1);
        part.act(&mut memory).unwrap();
        // The second page was written as a whole, with what it ought to hold.
        assert_eq!(memory[0].damaged(), 0);
    }

    #[test]
    fn lives_end_and_are_counted_and_damage_outlives_them() {
        let mut part = Part::new(Live::ShortLived { pages: 16, seed: 3, life_us: 10, mergeable: false }).unwrap();
        part.begin(Instant::now());
        for _ in 0..3 {
            part.act(&mut []).unwrap();
        }
        let counters = part.counters(Instant::now());
        assert_eq!(counters.lives.iter().map(|life| life.merged_pages).collect::<Vec<_>>(), [0]);
        assert_eq!(part.damaged(), 0);
        let Part::ShortLived(_, cycle) = &mut part else { panic!() };
        cycle.alive.as_mut().unwrap().0[8 * PAGE_SIZE] ^= 1;
        assert_eq!(part.damaged(), 1);
        part.act(&mut []).unwrap();
        assert_eq!((part.damaged(), part.counters(Instant::now()).lives.len()), (1, 2));
    }
}
