//! The things that a tenant does by itself.
//!
//! Activities run on the tenant's only thread, between its answers. An answer stops their clock: it doesn't count as a
//! delay.

use crate::contents::fill;
use crate::tenant::memory::FilledSegment;
use crate::tenant::{Segment, Tenant, TenantSpec, serve};
use anyhow::Context;
use memmap2::{Advice, MmapMut};
use pagefold_engine::random::finalize;
use pagefold_engine::units::{PAGE_SIZE, Vpn};
use pagefold_procmem::pagemap::{Pagemap, PagemapEntry};
use pagefold_procmem::process::Process;
use pagefold_report::activity::{ActivityCounters, Lifetime};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Something that a tenant does by itself, after UKSM's workloads: memory whose pages it writes again and again
/// (section 8.1.2), and memory that it maps and unmaps (8.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Activity {
    /// Rewrites the pages of the first segment with their present content, one at a time, in order, over and over.
    Breaker {
        /// Time from one page to the next.
        every_us: u64,
    },
    /// Maps memory, fills all pages alike, keeps it for a time, unmaps it, waits as long, and repeats.
    ShortLived {
        pages: u64,
        seed: u64,
        /// How long the memory is kept, counted from the end of filling it.
        life_us: u64,
        /// Whether the tenant marks the memory itself before filling it, as a program written for KSM does.
        mergeable: bool,
    },
    /// Maps a little memory, writes to its first page and unmaps it, without a pause.
    Mapper { pages: u64 },
}

impl Activity {
    /// A tenant that holds these segments and does this.
    pub fn of_tenant(self, segments: impl IntoIterator<Item = Segment>) -> TenantSpec {
        TenantSpec { activity: serde_json::to_value(self).ok(), ..TenantSpec::new(segments) }
    }
}

/// Runs as a tenant that may have an activity.
pub fn serve(spec: &str) -> ! {
    serve::serve(spec, |activity: Value| {
        let activity = serde_json::from_value(activity).context("cannot parse the tenant's activity")?;
        Ok(Box::new(ActivityState::new(activity)?))
    })
}

/// The counters of a tenant's activity; zeros if it has none.
pub fn counters(tenant: &mut Tenant) -> anyhow::Result<ActivityCounters> {
    Ok(tenant.counters()?.unwrap_or_default())
}

struct ActivityState {
    clock: Clock,
    kind: Kind,
}

enum Kind {
    /// [`Activity::Breaker`], with the page that is next.
    Breaker(usize),
    ShortLived(Cycle),
    /// [`Activity::Mapper`], with the length of a mapping in bytes.
    Mapper(usize),
}

/// When the next step is due, and counters of the steps so far.
#[derive(Default)]
struct Clock {
    began: Option<Instant>,
    due: Option<Instant>,
    every: Duration,
    counters: ActivityCounters,
}

struct Cycle {
    pages: usize,
    mergeable: bool,
    content: Vec<u8>,
    alive: Option<(MmapMut, Instant)>,
    /// Pages found damaged at the end of former lives.
    damaged: u64,
}

/// At the end of a life we compare one page in this many: comparing all would make the lives longer.
const COMPARE_EVERY: usize = 8;

/// Entries of pagemap read per call.
const ENTRIES: usize = 4096;

impl ActivityState {
    /// An activity that hasn't begun.
    fn new(activity: Activity) -> anyhow::Result<Self> {
        let (every_us, kind) = match activity {
            Activity::Breaker { every_us } => (every_us, Kind::Breaker(0)),
            Activity::ShortLived { pages, seed, life_us, mergeable } => {
                let mut content = vec![0; PAGE_SIZE];
                fill(&mut content, finalize(seed) ^ 6, 0);
                let pages = usize::try_from(pages)?;
                (life_us, Kind::ShortLived(Cycle { pages, mergeable, content, alive: None, damaged: 0 }))
            }
            Activity::Mapper { pages } => (0, Kind::Mapper(usize::try_from(pages)? * PAGE_SIZE)),
        };
        Ok(Self { clock: Clock { every: Duration::from_micros(every_us), ..Clock::default() }, kind })
    }

    /// The counters of the steps so far. Resets those that count from the last answer.
    fn take_counters(&mut self, now: Instant) -> ActivityCounters {
        let clock = &mut self.clock;
        clock.counters.seconds = clock.began.map_or(0.0, |began| now.saturating_duration_since(began).as_secs_f64());
        let counters = clock.counters.clone();
        clock.counters.latest_us = 0.0;
        clock.counters.maps.clear();
        counters
    }
}

impl serve::Activity for ActivityState {
    fn begin(&mut self, now: Instant) {
        self.clock.began = Some(now);
        self.clock.due = Some(now);
    }

    fn due(&self) -> Option<Instant> {
        self.clock.due
    }

    fn act(&mut self, memory: &mut [FilledSegment]) -> anyhow::Result<()> {
        let clock = &mut self.clock;
        match &mut self.kind {
            Kind::Breaker(page) => {
                let filled = memory.first_mut().context("a breaker needs a segment")?;
                clock.write(|| *page = filled.rewrite_page(*page));
                Ok(())
            }
            Kind::ShortLived(cycle) => {
                if let Some(life) = cycle.turn()? {
                    clock.counters.lives.push(life);
                }
                // No fixed schedule: both times count from the end of the work.
                clock.due = Some(Instant::now() + clock.every);
                Ok(())
            }
            Kind::Mapper(bytes) => clock.map(*bytes),
        }
    }

    fn pause(&mut self, taken: Duration) {
        let clock = &mut self.clock;
        for at in clock.began.iter_mut().chain(&mut clock.due) {
            *at += taken;
        }
    }

    fn counters(&mut self, now: Instant) -> serde_json::Result<String> {
        serde_json::to_string(&self.take_counters(now))
    }

    /// Damaged pages of its own memory, including those of former lives.
    fn damaged(&self) -> u64 {
        match &self.kind {
            Kind::Breaker(_) | Kind::Mapper(_) => 0,
            Kind::ShortLived(cycle) => cycle.damaged + cycle.differing(1),
        }
    }
}

impl Clock {
    /// Writes a page, on a schedule that a late write doesn't delay.
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

    /// Maps and unmaps for a tenth of a second. Waits in single calls hardly make that longer.
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
    /// Ends the current life or begins one.
    fn turn(&mut self) -> anyhow::Result<Option<Lifetime>> {
        let differing = self.differing(COMPARE_EVERY);
        if let Some((memory, born)) = self.alive.take() {
            let merged_pages = merged(&memory)?;
            self.damaged += differing;
            drop(memory);
            return Ok(Some(Lifetime { merged_pages, seconds: born.elapsed().as_secs_f64() }));
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

    /// The number of damaged pages, checking one page in `every`.
    fn differing(&self, every: usize) -> u64 {
        let Some((memory, _)) = &self.alive else { return 0 };
        let mut differing = 0;
        for page in memory.chunks_exact(PAGE_SIZE).step_by(every) {
            differing += u64::from(*page != *self.content);
        }
        differing
    }
}

/// The number of our own pages that share a frame. Memory that was never forked shares frames only where it's merged.
fn merged(memory: &[u8]) -> anyhow::Result<u64> {
    let pagemap = Pagemap::open(&Process::open(i32::try_from(std::process::id())?)?)?;
    let mut entries = vec![0; ENTRIES];
    let mut page = Vpn::of_address(memory.as_ptr().addr() as u64);
    let mut left = memory.len() / PAGE_SIZE;
    let mut merged = 0;
    while left > 0 {
        let now = left.min(ENTRIES);
        pagemap.read(page, &mut entries[..now])?;
        for &entry in &entries[..now] {
            merged += u64::from(PagemapEntry(entry).present() && !PagemapEntry(entry).exclusive());
        }
        page = page + now as u64;
        left -= now;
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::serve::Activity as _;

    #[test]
    fn an_activity_goes_through_the_json_of_a_spec() {
        for activity in
            [Activity::Breaker { every_us: 1 }, Activity::ShortLived { pages: 2, seed: 3, life_us: 4, mergeable: true }]
        {
            let json = serde_json::to_string(&activity.of_tenant([])).unwrap();
            let spec: TenantSpec = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_json::from_value::<Activity>(spec.activity.unwrap()).unwrap(), activity);
        }
        assert!(serde_json::from_str::<Activity>(r#"{"breaker":{}}"#).is_err());
    }

    #[test]
    fn a_breaker_keeps_its_schedule_and_its_contents() {
        let mut memory = [FilledSegment::new(Segment::Same { pages: 3, seed: 1 }, false).unwrap()];
        let mut running = ActivityState::new(Activity::Breaker { every_us: 1000 }).unwrap();
        assert_eq!(running.due(), None);
        let began = Instant::now();
        running.begin(began);
        for _ in 0..5 {
            running.act(&mut memory).unwrap();
        }
        // Five writes at once; each was still due at its own time.
        assert_eq!(running.due(), Some(began + Duration::from_millis(5)));
        running.pause(Duration::from_secs(1));
        assert_eq!(running.due(), Some(began + Duration::from_millis(1005)));
        let counters = running.take_counters(began + Duration::from_secs(3));
        assert_eq!((counters.pages_written, counters.seconds), (5, 2.0));
        assert_eq!(memory[0].damaged(), 0);
    }

    #[test]
    fn a_mapper_maps_and_counts() {
        let mut running = ActivityState::new(Activity::Mapper { pages: 16 }).unwrap();
        running.begin(Instant::now());
        running.act(&mut []).unwrap();
        running.act(&mut []).unwrap();
        let counters = running.take_counters(Instant::now());
        assert!(counters.maps.len() == 2 && counters.maps.iter().all(|&maps| maps > 100), "{counters:?}");
        assert!(running.take_counters(Instant::now()).maps.is_empty());
    }

    #[test]
    fn a_breaker_writes_the_content_the_page_should_have() {
        let mut memory = [FilledSegment::new(Segment::Random { pages: 3, seed: 1 }, false).unwrap()];
        let mut running = ActivityState::new(Activity::Breaker { every_us: 1 }).unwrap();
        running.begin(Instant::now());
        memory[0].pages_mut()[PAGE_SIZE + 7] ^= 1;
        running.act(&mut memory).unwrap();
        assert_eq!(memory[0].damaged(), 1);
        running.act(&mut memory).unwrap();
        // The second page was written as a whole, with its proper content.
        assert_eq!(memory[0].damaged(), 0);
    }

    #[test]
    fn lives_are_counted_and_their_damage_is_remembered() {
        let mut running =
            ActivityState::new(Activity::ShortLived { pages: 16, seed: 3, life_us: 10, mergeable: false }).unwrap();
        running.begin(Instant::now());
        for _ in 0..3 {
            running.act(&mut []).unwrap();
        }
        let counters = running.take_counters(Instant::now());
        assert_eq!(counters.lives.iter().map(|life| life.merged_pages).collect::<Vec<_>>(), [0]);
        assert_eq!(running.damaged(), 0);
        let Kind::ShortLived(cycle) = &mut running.kind else { panic!() };
        cycle.alive.as_mut().unwrap().0[8 * PAGE_SIZE] ^= 1;
        assert_eq!(running.damaged(), 1);
        running.act(&mut []).unwrap();
        assert_eq!((running.damaged(), running.take_counters(Instant::now()).lives.len()), (1, 2));
    }
}
