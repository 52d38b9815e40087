//! Reads all pages of a process in portions, for others than the engine.
//!
//! The same rules hold as for samples: we read only regions of processes that we don't leave alone, read merged and
//! shared pages without unsharing them, and read on a thread that we may abandon.

use super::LiveHost;
use crate::regions::Tracked;
use pagefold_engine::hash::{PageBytes, is_zero};
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
        let by_marks = self.mechanism() == Mechanism::Ksmd;
        let Some(target) = self.targets.values_mut().find(|target| target.owner == owner) else {
            return Progress::Ended;
        };
        match &target.exclusion {
            Some(exclusion) if exclusion.withdraws_marks() => return Progress::LeftAlone,
            Some(_) => return Progress::Ended,
            None if !target.may_be_read() => return Progress::Ended,
            None => {}
        }
        let mut regions = Vec::new();
        for Tracked { stretch, .. } in &target.regions {
            if stretch.first.0 + stretch.pages.0 > place.next.0 {
                let unmarked = by_marks && stretch.marked == Pages(0);
                regions.push(Window { first: stretch.first, pages: stretch.pages, unmarked });
            }
        }
        let mut portion = Portion {
            process: target.info.process.clone(),
            regions,
            place: std::mem::take(place),
            most,
            digest: digest.clone(),
            pages: Vec::new(),
        };
        let mut reader = self.reader.take().unwrap_or_default();
        let read = run_abandonable(move || {
            let read = portion.read(&mut reader);
            (reader, portion, read)
        });
        match read {
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
                target.set_timed_out(pending);
                self.schedule.next_ns = 0;
                Progress::Ended
            }
        }
    }

    /// Pages of the machine that KSM has merged into others, and the pages that they share.
    pub fn merged_pages(&self) -> (Pages, Pages) {
        let view = self.machine.ksm_view().unwrap_or_default();
        (view.sharing, view.shared)
    }

    /// Merged zero pages of a target. 0 if it has ended or we can't read it at present.
    pub fn merged_zeros(&mut self, process: &Process) -> Pages {
        match self.targets.get_mut(&process.pid()) {
            Some(target) if target.info.process.key() == process.key() => {
                let stat = target.read(|process| KsmStat::of(process));
                Pages(stat.map_or(0, |stat| stat.zero_kib / 4))
            }
            _ => Pages(0),
        }
    }
}

/// What the reading thread works on.
struct Portion {
    process: Arc<Process>,
    /// Regions that aren't behind the place, ascending.
    regions: Vec<Window>,
    place: Place,
    most: u64,
    digest: Digest,
    pages: Vec<PageContent>,
}

/// A region, or a part of one that we search.
#[derive(Clone, Copy)]
struct Window {
    first: Vpn,
    pages: Pages,
    /// Whether nothing is marked in it.
    unmarked: bool,
}

impl Portion {
    /// Returns whether anything is left to read.
    fn read(&mut self, reader: &mut PageReader) -> Result<bool, ReadError> {
        let mut windows = 0;
        while count(self.pages.len()) < self.most && windows < WINDOWS_MOST {
            if self.place.runs.is_empty() {
                let Some(window) = self.next_window() else { return Ok(false) };
                windows += 1;
                reader.resident_runs(&self.process, window.first, window.pages, &mut self.place.runs)?;
                self.place.runs.reverse();
                self.place.next = window.first + window.pages.0;
                self.place.unmarked = window.unmarked;
                continue;
            }
            let runs = self.next_runs();
            let how = ReadHow { contents: Contents::All, unmarked: self.place.unmarked, ..ReadHow::default() };
            reader.read_runs(&self.process, &runs, how, |view| {
                let Some(bytes) = view.bytes else { return };
                let content = if is_zero(bytes) { Content::Zeros } else { Content::Digest((self.digest)(bytes)) };
                self.pages.push(PageContent { state: view.state, frame: view.frame, content });
            })?;
        }
        Ok(true)
    }

    /// The next part of a region to search.
    fn next_window(&self) -> Option<Window> {
        let next = self.place.next;
        for region in &self.regions {
            let end = region.first.0 + region.pages.0;
            if end > next.0 {
                let first = region.first.max(next);
                return Some(Window { first, pages: Pages((end - first.0).min(WINDOW_PAGES)), ..*region });
            }
        }
        None
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
