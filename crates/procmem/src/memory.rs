//! Reads pages of other processes without unsharing them.
//!
//! process_vm_readv pins what it reads, and pinning a shared page first gives the target its own copy: it undoes KSM
//! merges and the sharing left by fork. So every page is looked up in pagemap first. Only pages that are anonymous,
//! present and mapped once are read with process_vm_readv. The others are classified by kpageflags, and their contents,
//! if requested, are read through `/proc/PID/mem`, which does not pin.
//!
//! Between lookup and read the target may fork, or ksmd may merge the page. The read then unshares that page. No data
//! is lost, the sharing of one page is lost for a while, and the reported state is that of the lookup. A page unmapped
//! in between is reported as absent. A page dropped in between (MADV_DONTNEED) reads as zeros and maps the zero page,
//! as the program's own read would.
//!
//! A merged page whose other mappings are all gone counts as mapped once. Reading it unmerges it, which loses nothing:
//! it saved nothing.

mod batch;

use self::batch::{BRIDGE_PAGES, Batch, huge_by_frames};
use crate::kpageflags::KpageFlags;
use crate::os::abandonable::advance;
use crate::os::fault;
use crate::pagemap::{Categories, PageRange, Pagemap, PagemapEntry, ScanError};
use crate::process::{Process, ReadError};
use pagefold_engine::hash::{Digest, PageBytes};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn, count};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Which pages have their contents read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    /// Private pages.
    #[default]
    Private,
    /// Private and merged pages.
    Merged,
    /// Private, merged and fork-shared pages.
    All,
}

impl Contents {
    /// Whether the contents of shared pages in this state are read.
    fn include(self, state: PageState) -> bool {
        match state {
            PageState::Merged => self != Self::Private,
            PageState::Shared => self == Self::All,
            PageState::Private | PageState::Absent | PageState::ZeroMapped => false,
        }
    }
}

/// Options of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadHow {
    /// Determine which pages are mapped by huge pages. For regions that may have some.
    pub huge: bool,
    /// Which pages to read the contents of.
    pub contents: Contents,
    /// Determine which private pages are active.
    pub activity: bool,
    /// Nothing is marked, so that a page that looks merged is shared. Counts where kpageflags calls every anonymous page merged
    /// (Linux 6.12, see [`shows_merged`](super::kpageflags::shows_merged)).
    pub unmarked: bool,
}

/// One page as it was found.
#[derive(Clone, Copy, Debug)]
pub struct PageView<'a> {
    /// Page number.
    pub page: Vpn,
    /// State. Without CAP_SYS_ADMIN frame numbers are hidden, and merged pages and zero pages count as shared.
    pub state: PageState,
    /// Mapped by a huge page.
    pub huge: bool,
    /// Private and active; false unless [`ReadHow::activity`] is set.
    pub active: bool,
    /// Frame number: pages with equal numbers are the same memory.
    pub frame: Option<u64>,
    /// Contents of private pages, and of merged and shared pages as [`ReadHow::contents`] requests.
    pub bytes: Option<&'a PageBytes>,
}

/// The composition of a range of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Anonymous pages mapped by this process only.
    pub private: Pages,
    /// Pages that map the zero page.
    pub zero: Pages,
    /// Pages merged by KSM.
    pub merged: Pages,
    /// Pages shared by fork.
    pub shared: Pages,
    /// Present pages of files, not copied yet.
    pub file: Pages,
    /// Pages in swap.
    pub swapped: Pages,
    /// Pages mapped by huge pages, which are also counted above.
    pub huge: Pages,
}

impl Census {
    /// Pages of anonymous memory, shared or not.
    pub fn anonymous(&self) -> Pages {
        self.private + self.merged + self.shared
    }
}

/// Entries per read of pagemap when walking a whole range: 64 KiB.
const WALK_ENTRIES: usize = 8192;

/// Processes whose files are kept open, three descriptors each: opening them costs as much as reading ten pages.
const HELD_PROCESSES: usize = 256;

/// Reads pages of processes. Keeps its buffers, and the files of the processes read most recently.
#[derive(Debug)]
pub struct PageReader {
    frames: Option<KpageFlags>,
    held: Vec<Held>,
    batch: Batch,
}

/// The open files of one process.
#[derive(Debug)]
struct Held {
    pid: i32,
    start_time_ticks: u64,
    pagemap: Pagemap,
    /// A small file whose reads fail once the process is reaped.
    liveness: File,
    mem: Option<File>,
}

impl Held {
    fn open(process: &Process) -> Result<Self, ReadError> {
        Ok(Self {
            pid: process.pid(),
            start_time_ticks: process.start_time_ticks(),
            pagemap: Pagemap::open(process)?,
            liveness: process.open_file("oom_score_adj")?,
            mem: None,
        })
    }

    fn is_of(&self, process: &Process) -> bool {
        self.pid == process.pid() && self.start_time_ticks == process.start_time_ticks()
    }

    /// Checks that a process_vm_readv before this call read the right process: it takes a pid, which may have been
    /// reused, or run a new program after exec. Neither has happened if the process is not reaped now and its old
    /// address space still exists.
    fn check(&self) -> Result<(), ReadError> {
        let read = fault::io("read:oom_score_adj").and_then(|()| self.liveness.read_at(&mut [0; 8], 0));
        read.map_err(|error| ReadError::from_io(self.pid, "oom_score_adj", error))?;
        if self.pagemap.is_live()? { Ok(()) } else { Err(ReadError::Vanished { pid: self.pid }) }
    }
}

impl Default for PageReader {
    fn default() -> Self {
        Self::new()
    }
}

impl PageReader {
    /// A reader. Without access to kpageflags (not root) it reports all pages that are not private as shared.
    pub fn new() -> Self {
        Self { frames: KpageFlags::open().ok(), held: Vec::new(), batch: Batch::default() }
    }

    /// Whether merged, shared and zero pages can be distinguished.
    pub fn sees_frames(&self) -> bool {
        self.frames.is_some()
    }

    /// Reads runs of pages and calls `visit` for every page in order. Runs that ascend and are close together are looked
    /// up together, and up to 256 pages are read with one system call.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process ended or called exec. Pages visited before that are valid.
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

    /// The same without reading the pages: `digest` has the digests of neighbouring pages made. Those without one are absent.
    ///
    /// # Errors
    /// The same, and what `digest` fails with.
    pub fn digest_runs(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        mut digest: impl FnMut(Vpn, &mut [Option<Digest>]) -> io::Result<()>,
        mut visit: impl FnMut(PageView<'_>, Option<Digest>),
    ) -> Result<(), ReadError> {
        let mut digests = Vec::new();
        self.for_each_batch(process, runs, |batch, held, frames| {
            batch.digest(held, frames, how, &mut digests, &mut digest)?;
            let mut digests = digests.iter();
            batch.show(&mut |view| visit(view, digests.next().copied().flatten()));
            Ok(())
        })
    }

    /// Unmerges every merged page of a range by reading it, which gives the process its own copy while it keeps running.
    /// Returns the number of pages unmerged. Zero pages stay merged.
    pub fn unmerge(&mut self, process: &Process, first: Vpn, pages: Pages) -> Result<Pages, ReadError> {
        let (mut runs, mut unmerged) = (Vec::new(), Pages(0));
        self.resident_runs(process, first, pages, &mut runs)?;
        self.for_each_batch(process, &runs, |batch, held, frames| {
            unmerged += batch.unmerge(held, frames)?;
            Ok(())
        })?;
        Ok(unmerged)
    }

    /// Calls `visit` for every merged page of the runs, with its frame. Only if `lone`, for those that nobody else maps any more, too.
    pub fn merged_frames(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        lone: bool,
        mut visit: impl FnMut(Vpn, u64),
    ) -> Result<(), ReadError> {
        let mut populated = Vec::new();
        for &(first, pages) in runs {
            self.resident_runs(process, first, Pages(pages.into()), &mut populated)?;
        }
        self.for_each_batch(process, &populated, |batch, held, frames| {
            batch.show_merged(held, frames, lone, &mut visit)
        })
    }

    /// Whether frames can be looked up at all. Needs root.
    pub fn shows_frames(&self) -> bool {
        self.frames.is_some()
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
            advance();
        }
        Ok(())
    }

    /// Calls `visit` for every page table entry of a range in order. Takes about 33 ns per page.
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

    /// Appends to `runs` the runs of a range in which every page is present and not a page of a file.
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

    /// Counts the pages of a range by state without reading contents. `huge` as in [`ReadHow`].
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
                    // Some kernels show the huge zero page as a page of a file: check if there are huge pages.
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
                let result = frames.look_up(others.iter().map(|other| other >> 1), |position, flags| {
                    *match flags {
                        flags if flags.zero_page() => &mut census.zero,
                        _ if others[position] & 1 == 1 => &mut census.file,
                        flags if flags.ksm() => &mut census.merged,
                        _ => &mut census.shared,
                    } += Pages(1);
                });
                failed = failed.take().or(result.err());
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

    /// Calls `visit` with the page table entries of a range in large pieces, skipping most empty parts: a program may
    /// reserve a terabyte and use one page of it, and pagemap returns eight bytes for every page.
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
        let scanned = if pages.0 > 8 * count(WALK_ENTRIES) {
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
            while let Some(next) = ranges.next_if(|range| range.first.0 - (first.0 + pages.0) <= BRIDGE_PAGES) {
                pages = Pages(next.first.0 - first.0) + next.pages;
            }
            walk_entries(&held.pagemap, entries, first, pages, |start, entries| {
                visit(start, entries);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Finds or opens the files of a process and returns their index. Files of an address space replaced by exec are
    /// closed.
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
        let length = usize::try_from(pages.0 - done).map_or(WALK_ENTRIES, |rest| rest.min(WALK_ENTRIES));
        if entries.len() < length {
            entries.resize(length, 0);
        }
        pagemap.read(first + done, &mut entries[..length])?;
        visit(first + done, &entries[..length])?;
        done += count(length);
    }
    Ok(())
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
