//! Reading a process's pages without disturbing how they are held.
//!
//! process_vm_readv pins what it reads, and pinning a page that others share gives the reader's target a copy of its
//! own first: it takes back KSM's merges and fork's sharing. So every page is looked up in pagemap first. Only pages
//! that are anonymous, present and mapped once are read by process_vm_readv; the others are told apart by kpageflags,
//! and their bytes, where wanted, come through `/proc/PID/mem`, which does not pin.
//!
//! Between the look and the read the target may fork, or ksmd may merge the page. The read then un-shares that page:
//! it costs the sharing of a page for a while, never data, and the state reported is that of the look. A page that is
//! unmapped in between is reported as absent; one that the program drops (MADV_DONTNEED) reads as the zeros that the
//! program itself would find there, and maps the zero page as its own read would.
//!
//! A merged page that all other holders have left counts as mapped once. Reading it un-merges it, and nothing is lost:
//! it saved nothing.

mod batch;

use self::batch::{BRIDGE_PAGES, Batch, huge_by_frames};
use crate::os::fault;
use crate::proc::pagemap::{Categories, KpageFlags, PageRange, Pagemap, PagemapEntry, ScanError};
use crate::proc::process::{Process, ReadError};
use pagefold_core::hash::PageBytes;
use pagefold_core::host::PageState;
use pagefold_core::units::{Pages, Vpn};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The contents of which pages are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    /// Private ones.
    #[default]
    Private,
    /// Merged ones too.
    Merged,
    /// Merged and fork-shared ones too.
    All,
}

impl Contents {
    /// Whether pages that others hold too are read, without pinning them.
    fn include(self, state: PageState) -> bool {
        match state {
            PageState::Merged => self != Self::Private,
            PageState::Shared => self == Self::All,
            PageState::Private | PageState::Absent | PageState::ZeroMapped => false,
        }
    }
}

/// How to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadHow {
    /// The region may have huge pages (smaps shows some, or they may have come since): find out which pages are in one.
    pub huge: bool,
    /// The contents of which pages to read.
    pub contents: Contents,
    /// Find out which private pages are active.
    pub activity: bool,
}

/// One page, as it was found.
#[derive(Clone, Copy, Debug)]
pub struct PageView<'a> {
    /// The page.
    pub page: Vpn,
    /// How it is held. Where frame numbers are hidden (no CAP_SYS_ADMIN), merged pages and zero pages count as shared.
    pub state: PageState,
    /// Mapped by a huge page.
    pub huge: bool,
    /// Private and, where asked for, active.
    pub active: bool,
    /// The frame's number: equal numbers are the same memory.
    pub frame: Option<u64>,
    /// The contents: always of private pages, of merged and shared ones where asked for, else none.
    pub bytes: Option<&'a PageBytes>,
}

/// What a range of pages consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Anonymous pages of this process alone.
    pub private: Pages,
    /// Pages that map the zero page.
    pub zero: Pages,
    /// Pages merged by KSM.
    pub merged: Pages,
    /// Pages shared through fork.
    pub shared: Pages,
    /// Pages of files, not copied yet, that are present.
    pub file: Pages,
    /// Pages in swap.
    pub swapped: Pages,
    /// Pages mapped by huge pages, which are counted above too.
    pub huge: Pages,
}

impl Census {
    /// Pages that hold anonymous memory, alone or with others.
    pub fn anonymous(&self) -> Pages {
        self.private + self.merged + self.shared
    }
}

/// Entries in one read of pagemap when walking a whole range: 64 KiB.
const WALK_ENTRIES: usize = 8192;

/// Processes whose files are kept open, three descriptors each: opening them costs as much as reading ten pages.
const HELD_PROCESSES: usize = 256;

/// Reads pages of processes. Holds the buffers, and the files of the processes read last.
#[derive(Debug)]
pub struct PageReader {
    frames: Option<KpageFlags>,
    held: Vec<Held>,
    batch: Batch,
}

/// What is open of one process.
#[derive(Debug)]
struct Held {
    pid: i32,
    start_time_ticks: u64,
    pagemap: Pagemap,
    /// A small file that the kernel refuses to read once the process is reaped.
    pulse: File,
    mem: Option<File>,
}

impl Held {
    fn open(process: &Process) -> Result<Self, ReadError> {
        Ok(Self {
            pid: process.pid(),
            start_time_ticks: process.start_time_ticks(),
            pagemap: Pagemap::open(process)?,
            pulse: process.open_file("oom_score_adj")?,
            mem: None,
        })
    }

    fn is_of(&self, process: &Process) -> bool {
        self.pid == process.pid() && self.start_time_ticks == process.start_time_ticks()
    }

    /// process_vm_readv goes by pid, which may have a new owner, or a new program after exec. Neither can have
    /// happened before or during a read if, after it, the process is not reaped and the old address space is there.
    fn check(&self) -> Result<(), ReadError> {
        let pulse = fault::io("read:oom_score_adj").and_then(|()| self.pulse.read_at(&mut [0; 8], 0));
        pulse.map_err(|error| ReadError::from_io(self.pid, "oom_score_adj", error))?;
        if self.pagemap.is_live()? { Ok(()) } else { Err(ReadError::Vanished { pid: self.pid }) }
    }
}

impl Default for PageReader {
    fn default() -> Self {
        Self::new()
    }
}

impl PageReader {
    /// A reader. Without kpageflags (not root) it works, but takes all pages that are not private for shared ones.
    pub fn new() -> Self {
        Self { frames: KpageFlags::open().ok(), held: Vec::new(), batch: Batch::default() }
    }

    /// Whether merged, shared and zero pages can be told apart.
    pub fn sees_frames(&self) -> bool {
        self.frames.is_some()
    }

    /// Reads runs of pages and shows every page of them to `visit`, in order. Runs that ascend and lie near each other
    /// are looked up together, and up to 256 pages are read by one system call whatever the runs' lengths.
    ///
    /// `Vanished` means that the process ended or called exec; pages shown before are good, no later ones are shown.
    pub fn read_runs(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        mut visit: impl FnMut(PageView<'_>),
    ) -> Result<(), ReadError> {
        self.for_each_batch(process, runs, |batch, held, frames| {
            batch.read(held, process, frames, how)?;
            batch.show(&mut visit);
            Ok(())
        })
    }

    /// Gives every merged page of a range its own copy, which is left merged in nobody's eyes but ksmd's: reading does it
    /// from outside, while the process goes on. Returns how many were. Zero pages stay as they are.
    pub fn take_apart(&mut self, process: &Process, first: Vpn, pages: Pages) -> Result<Pages, ReadError> {
        let (mut runs, mut apart) = (Vec::new(), Pages(0));
        self.resident_runs(process, first, pages, &mut runs)?;
        self.for_each_batch(process, &runs, |batch, held, frames| {
            apart += batch.take_apart(held, frames)?;
            Ok(())
        })?;
        Ok(apart)
    }

    /// Shows every page of the runs that maps a merged frame, and its frame.
    pub fn merged_frames(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        mut visit: impl FnMut(Vpn, u64),
    ) -> Result<(), ReadError> {
        let mut populated = Vec::new();
        for &(first, pages) in runs {
            self.resident_runs(process, first, Pages(pages.into()), &mut populated)?;
        }
        self.for_each_batch(process, &populated, |batch, held, frames| batch.show_merged(held, frames, &mut visit))
    }

    fn for_each_batch(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        mut work: impl FnMut(&mut Batch, &mut Held, Option<&mut KpageFlags>) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let at = self.hold(process)?;
        let mut runs = runs.iter().copied();
        let mut next = runs.next();
        while next.is_some() {
            self.batch.start();
            while let Some((first, pages)) = next {
                let taken = self.batch.take(first, pages);
                next = if taken < pages { Some((first + u64::from(taken), pages - taken)) } else { runs.next() };
                if self.batch.is_full() {
                    break;
                }
            }
            if let Err(error) = work(&mut self.batch, &mut self.held[at], self.frames.as_mut()) {
                self.held.swap_remove(at);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Shows every page table entry of a range, in order, at about 33 ns a page.
    pub fn walk(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        mut visit: impl FnMut(Vpn, PagemapEntry),
    ) -> Result<(), ReadError> {
        let at = self.hold(process)?;
        let held = &self.held[at];
        walk_entries(&held.pagemap, &mut self.batch.entries, first, pages, |start, entries| {
            entries.iter().zip(start.0..).for_each(|(&entry, page)| visit(Vpn(page), PagemapEntry(entry)));
            Ok(())
        })
    }

    /// The runs of a range in which every page is present or swapped, and not a file's own: what a whole read of a
    /// region goes through. Appends to `runs`.
    pub fn resident_runs(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        runs: &mut Vec<(Vpn, u32)>,
    ) -> Result<(), ReadError> {
        let mut open: Option<(Vpn, u32)> = None;
        self.for_each_populated(process, first, pages, |start, entries| {
            for (&entry, page) in entries.iter().zip(start.0..) {
                let entry = PagemapEntry(entry);
                let resident = entry.present() && !entry.file_or_shared();
                open = match open {
                    Some((first, length)) if resident && first.0 + u64::from(length) == page && length < u32::MAX => {
                        Some((first, length + 1))
                    }
                    closed => {
                        runs.extend(closed);
                        resident.then_some((Vpn(page), 1))
                    }
                };
            }
        })?;
        runs.extend(open);
        Ok(())
    }

    /// Counts what a range consists of without reading any contents. `huge` as in [`ReadHow`].
    pub fn census(&mut self, process: &Process, first: Vpn, pages: Pages, huge: bool) -> Result<Census, ReadError> {
        let mut census = Census::default();
        let mut frames = self.frames.take();
        let mut others: Vec<u64> = Vec::new();
        let mut failed = None;
        let walked = self.for_each_populated(process, first, pages, |_, entries| {
            others.clear();
            for entry in entries.iter().map(|&entry| PagemapEntry(entry)) {
                let count = match entry {
                    entry if entry.private() => &mut census.private,
                    entry if entry.swapped() => &mut census.swapped,
                    entry if !entry.present() => continue,
                    // The huge zero page may pass for a file's: ask about it where huge pages are about.
                    entry if entry.file_or_shared() && (entry.exclusive() || !huge) => &mut census.file,
                    entry => match entry.pfn().filter(|_| frames.is_some()) {
                        Some(frame) => {
                            others.push(frame << 1 | u64::from(entry.file_or_shared()));
                            continue;
                        }
                        None if entry.file_or_shared() => &mut census.file,
                        None => &mut census.shared,
                    },
                };
                *count += Pages(1);
            }
            if let Some(frames) = frames.as_mut() {
                let looked = frames.look_up(others.iter().map(|other| other >> 1), |position, flags| {
                    *match flags {
                        flags if flags.zero_page() => &mut census.zero,
                        _ if others[position] & 1 == 1 => &mut census.file,
                        flags if flags.ksm() => &mut census.merged,
                        _ => &mut census.shared,
                    } += Pages(1);
                });
                failed = failed.take().or(looked.err());
            }
        });
        self.frames = frames;
        walked?;
        if let Some(error) = failed {
            return Err(ReadError::from_io(process.pid(), "../kpageflags", error));
        }
        if huge {
            census.huge = self.huge_pages(process, first, pages)?;
        }
        Ok(census)
    }

    fn huge_pages(&mut self, process: &Process, first: Vpn, pages: Pages) -> Result<Pages, ReadError> {
        let at = self.hold(process)?;
        let Self { held, frames, batch, .. } = self;
        batch.ranges.clear();
        match held[at].pagemap.scan(first, pages, Categories::HUGE, &mut batch.ranges) {
            Ok(()) => Ok(batch.ranges.iter().map(|range| range.pages).sum()),
            Err(ScanError::Read(error)) => Err(error),
            Err(ScanError::Absent | ScanError::Stuck) => {
                let mut huge = Pages(0);
                walk_entries(&held[at].pagemap, &mut batch.entries, first, pages, |start, entries| {
                    let slots = entries.iter().zip(start.0..).map(|(&entry, page)| (Vpn(page), PagemapEntry(entry)));
                    huge_by_frames(slots, frames.as_mut(), |_| huge += Pages(1))
                        .map_err(|error| ReadError::from_io(held[at].pid, "../kpageflags", error))
                })?;
                Ok(huge)
            }
        }
    }

    /// Shows the page table entries of a range in large pieces, leaving out most of what holds nothing: a program may
    /// reserve a terabyte and use a page of it, and pagemap would write eight bytes for every page.
    fn for_each_populated(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        mut visit: impl FnMut(Vpn, &[u64]),
    ) -> Result<(), ReadError> {
        let at = self.hold(process)?;
        let held = &self.held[at];
        let batch = &mut self.batch;
        batch.ranges.clear();
        let populated = Categories::PRESENT.or(Categories::SWAPPED);
        let scanned = if pages.0 > 8 * WALK_ENTRIES as u64 {
            held.pagemap.scan(first, pages, populated, &mut batch.ranges)
        } else {
            Err(ScanError::Absent)
        };
        match scanned {
            Ok(()) => {}
            Err(ScanError::Absent | ScanError::Stuck) => {
                batch.ranges.clear();
                batch.ranges.push(PageRange { first, pages, categories: populated });
            }
            Err(ScanError::Read(error)) => return Err(error),
        }
        let Batch { ranges, entries, .. } = batch;
        let mut ranges = ranges.iter().copied().peekable();
        while let Some(PageRange { first, mut pages, .. }) = ranges.next() {
            while let Some(near) = ranges.next_if(|range| range.first.0 - (first.0 + pages.0) <= BRIDGE_PAGES) {
                pages = Pages(near.first.0 - first.0) + near.pages;
            }
            walk_entries(&held.pagemap, entries, first, pages, |start, entries| {
                visit(start, entries);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Finds or opens the process's files and returns their place. An address space that exec has replaced is let go.
    fn hold(&mut self, process: &Process) -> Result<usize, ReadError> {
        if let Some(at) = self.held.iter().position(|held| held.is_of(process)) {
            if self.held[at].pagemap.is_live()? {
                return Ok(at);
            }
            self.held.swap_remove(at);
        }
        if self.held.len() >= HELD_PROCESSES {
            self.held.remove(0);
        }
        let held = match Held::open(process) {
            Err(ReadError::Io { source, .. }) if source.raw_os_error() == Some(libc::EMFILE) => {
                self.held.clear();
                Held::open(process)?
            }
            other => other?,
        };
        self.held.push(held);
        Ok(self.held.len() - 1)
    }
}

fn walk_entries(
    pagemap: &Pagemap,
    entries: &mut Vec<u64>,
    first: Vpn,
    pages: Pages,
    mut visit: impl FnMut(Vpn, &[u64]) -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    let mut done = 0;
    while done < pages.0 {
        let count = usize::try_from(pages.0 - done).map_or(WALK_ENTRIES, |rest| rest.min(WALK_ENTRIES));
        if entries.len() < count {
            entries.resize(count, 0);
        }
        pagemap.read(first + done, &mut entries[..count])?;
        visit(first + done, &entries[..count])?;
        done += count as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
