//! Reads all pages of a process in portions, for others than the engine.
//!
//! The same rules hold as for samples: we read only regions of processes that we don't leave alone, read merged and
//! shared pages without unsharing them, and read on a thread that we may abandon.

use super::LiveHost;
use crate::regions::Tracked;
use crate::targets::Target;
use pagefold_engine::hash::PageBytes;
use pagefold_engine::host::{Mechanism, PageState};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{Pages, Vpn, count};
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::process::{Process, ReadError};
use std::sync::Arc;

/// We search this many pages of the page tables at a time: from about 65,536 on, the search skips empty parts.
const WINDOW_PAGES: u64 = 1 << 18;
/// For one portion we search this many windows at most: a program may reserve terabytes.
const WINDOWS_MOST: u32 = 256;

/// Makes a digest of a page that isn't all zeros.
pub type Digest = Arc<dyn Fn(&PageBytes) -> u64 + Send + Sync>;

/// How far a process has been read.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Runs that we've found and not read yet, the last first.
    runs: Vec<(Vpn, u32)>,
    /// Whether they're in a region without marks.
    unmarked: bool,
    /// The search goes on here.
    next: Vpn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Only zeros.
    Zeros,
    /// Anything else, as a digest.
    Digest(u64),
}

/// A page that was read.
#[derive(Clone, Copy, Debug)]
pub struct PageContent {
    /// Private, merged or shared.
    pub state: PageState,
    /// Pages with equal numbers are the same memory.
    pub frame: Option<u64>,
    pub content: Content,
}

/// The result of reading a portion.
#[derive(Debug)]
pub enum Progress {
    /// These pages were read, and more are left.
    More(Vec<PageContent>),
    /// These were the last ones.
    Done(Vec<PageContent>),
    /// The process has ended, or executed another program, or we can't read it at present.
    Ended,
    /// We leave it alone now, and shouldn't have read this much of it.
    LeftAlone,
}

impl LiveHost {
    /// Reads about `most` pages of a process from a place on, and moves the place. Also returns the CPU time spent,
    /// nanoseconds.
    pub fn read_contents(&mut self, owner: OwnerKey, place: &mut Place, most: u64, digest: &Digest) -> (Progress, u64) {
        let before_ns = own_cpu_ns();
        let progress = self.read_portion(owner, place, most, digest);
        (progress, own_cpu_ns().saturating_sub(before_ns))
    }

    fn read_portion(&mut self, owner: OwnerKey, place: &mut Place, most: u64, digest: &Digest) -> Progress {
        let Some(target) = self.targets.values().find(|target| target.owner == owner) else { return Progress::Ended };
        match &target.exclusion {
            Some(exclusion) if exclusion.withdraws_marks() => return Progress::LeftAlone,
            Some(_) => return Progress::Ended,
            None if !target.may_be_read() => return Progress::Ended,
            None => {}
        }
        let by_marks = self.mechanism() == Mechanism::Ksmd;
        let regions = target
            .regions
            .iter()
            .map(|Tracked { stretch, .. }| (stretch.first, stretch.pages, by_marks && stretch.marked == Pages(0)));
        let mut portion = Portion {
            process: target.process.clone(),
            regions: regions.filter(|(first, pages, _)| first.0 + pages.0 > place.next.0).collect(),
            place: std::mem::take(place),
            most,
            digest: digest.clone(),
            pages: Vec::new(),
        };
        let mut reader = self.reader.take().unwrap_or_default();
        let pid = portion.process.pid();
        let work = move || {
            let read = portion.read(&mut reader);
            (reader, portion, read)
        };
        match run_abandonable(work) {
            Ok((reader, portion, read)) => {
                self.reader = Some(reader);
                *place = portion.place;
                match read {
                    Ok(true) => Progress::More(portion.pages),
                    Ok(false) => Progress::Done(portion.pages),
                    Err(_) => Progress::Ended,
                }
            }
            Err(pending) => {
                if let Some(target) = self.targets.get_mut(&pid) {
                    target.set_late(pending);
                    self.next_refresh_ns = 0;
                }
                Progress::Ended
            }
        }
    }

    /// Pages of the machine that KSM has merged into others, and the pages that they share.
    pub fn merged_pages(&self) -> (Pages, Pages) {
        let view = self.ksm.counters().map(|counters| counters.view(false, false)).unwrap_or_default();
        (view.sharing, view.shared)
    }

    /// Merged zero pages of a target. 0 if it has ended or we can't read it at present.
    pub fn merged_zeros(&mut self, process: &Process) -> Pages {
        let is_it = |target: &&mut Target| target.process.key() == process.key();
        let target = self.targets.get_mut(&process.pid()).filter(is_it);
        Pages(target.and_then(|target| target.read(KsmStat::of).ok()).map_or(0, |stat| stat.zero_kib / 4))
    }
}

/// What the reading thread works on.
struct Portion {
    process: Arc<Process>,
    /// Regions that aren't behind the place, ascending, and whether nothing is marked in them.
    regions: Vec<(Vpn, Pages, bool)>,
    place: Place,
    most: u64,
    digest: Digest,
    pages: Vec<PageContent>,
}

impl Portion {
    /// Returns whether anything is left to read.
    fn read(&mut self, reader: &mut PageReader) -> Result<bool, ReadError> {
        let mut windows = 0;
        while count(self.pages.len()) < self.most && windows < WINDOWS_MOST {
            if self.place.runs.is_empty() {
                let Some((first, pages, unmarked)) = self.next_window() else { return Ok(false) };
                windows += 1;
                reader.resident_runs(&self.process, first, pages, &mut self.place.runs)?;
                self.place.runs.reverse();
                (self.place.next, self.place.unmarked) = (first + pages.0, unmarked);
                continue;
            }
            let runs = self.next_runs();
            let (digest, pages) = (&self.digest, &mut self.pages);
            let how = ReadHow { contents: Contents::All, unmarked: self.place.unmarked, ..ReadHow::default() };
            reader.read_runs(&self.process, &runs, how, |view| {
                let Some(bytes) = view.bytes else { return };
                let content =
                    if pagefold_engine::hash::is_zero(bytes) { Content::Zeros } else { Content::Digest(digest(bytes)) };
                pages.push(PageContent { state: view.state, frame: view.frame, content });
            })?;
        }
        Ok(true)
    }

    /// The next part of a region to search.
    fn next_window(&self) -> Option<(Vpn, Pages, bool)> {
        let next = self.place.next;
        let &(first, pages, unmarked) = self.regions.iter().find(|(first, pages, _)| first.0 + pages.0 > next.0)?;
        let from = first.max(next);
        Some((from, Pages((first.0 + pages.0 - from.0).min(WINDOW_PAGES)), unmarked))
    }

    /// Takes about as many pages as we may still read.
    fn next_runs(&mut self) -> Vec<(Vpn, u32)> {
        let mut left = u32::try_from(self.most.saturating_sub(count(self.pages.len()))).unwrap_or(u32::MAX);
        let mut runs = Vec::new();
        while left > 0 {
            let Some((first, pages)) = self.place.runs.pop() else { break };
            let taken = pages.min(left);
            runs.push((first, taken));
            left -= taken;
            if taken < pages {
                self.place.runs.push((first + u64::from(taken), pages - taken));
            }
        }
        runs
    }
}
