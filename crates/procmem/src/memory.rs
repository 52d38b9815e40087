//! Reads pages of other processes without unsharing them.
//!
//! process_vm_readv pins pages, and pinning a shared page first gives the target its own copy: that undoes KSM merges
//! and COW sharing after fork. So we look up every page in pagemap first, and use process_vm_readv only for pages that
//! are anonymous, present and mapped once. We classify the others by kpageflags and, if their contents are wanted, read
//! them through `/proc/PID/mem`, which doesn't pin.
//!
//! Between lookup and read the target may fork, or ksmd may merge the page. Our read then unshares that page: no data
//! is lost, one page isn't shared for a while, and we report the state from the lookup. We report a page that is
//! unmapped in between as absent. A page dropped in between (MADV_DONTNEED) reads as zeros and maps the zero page, just
//! as if the program had read it.
//!
//! A merged page whose other mappings are all gone counts as mapped once. Reading it unmerges it, and we lose nothing
//! by that: it no longer saved any memory.

mod batch;

use self::batch::{BRIDGE_PAGES, Batch};
use crate::image::image_of;
use crate::kpageflags::{FrameFlags, KpageFlags, shows_merged};
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    #[default]
    Private,
    /// Private and merged pages.
    Merged,
    /// Private, merged and fork-shared pages.
    All,
    /// Every present page, also of files, shared memory and hugetlb. We read all of them through `/proc/PID/mem`:
    /// pinning could wait for the program that fills a mapping by userfaultfd, but this way such a read fails. Here
    /// file pages count as shared.
    Present,
}

impl Contents {
    /// Whether we read the contents of pages in this state through `/proc/PID/mem`.
    fn include(self, state: PageState) -> bool {
        match state {
            PageState::Merged => self != Self::Private,
            PageState::Shared => matches!(self, Self::All | Self::Present),
            PageState::Private => self == Self::Present,
            PageState::Absent | PageState::ZeroMapped => false,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadHow {
    /// Find out which pages are mapped by huge pages. Set this for regions that may have huge pages.
    pub huge: bool,
    pub contents: Contents,
    /// Find out which private pages are active.
    pub activity: bool,
    /// No memory of the process is marked, so pages that look merged are fork-shared. Matters on kernels whose
    /// kpageflags calls every anonymous page merged (Linux 6.12, see
    /// [`shows_merged`](super::kpageflags::shows_merged)).
    pub unmarked: bool,
    /// The program whose pages we may read ([`image_of`]). `None`: any.
    pub image: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub struct PageView<'a> {
    pub page: Vpn,
    /// Without CAP_SYS_ADMIN frame numbers are hidden, and merged pages and zero pages count as shared.
    pub state: PageState,
    pub huge: bool,
    /// Whether the frame is part of a huge page of any size. Only known of pages that aren't private.
    pub compound: bool,
    /// Whether the page is private, and on the kernel's active list; false unless [`ReadHow::activity`] is set.
    pub active: bool,
    /// Whether this is a merged page that only this process still maps (its state is private); false unless
    /// [`ReadHow::activity`] is set.
    pub lone: bool,
    /// Frame number: pages with equal numbers are the same memory.
    pub frame: Option<u64>,
    /// The contents, for the pages that [`ReadHow::contents`] asks for.
    pub bytes: Option<&'a PageBytes>,
}

/// Entries per read of pagemap when walking a whole range: 64 KiB.
const WALK_ENTRIES: usize = 8192;

/// We keep the files of this many processes open, three descriptors each: opening them costs as much as reading ten
/// pages.
const HELD_PROCESSES: usize = 256;

/// Reads pages of processes. Keeps its buffers, and the files of the processes it has read most recently.
#[derive(Debug)]
pub struct PageReader {
    frames: Option<KpageFlags>,
    files: Vec<Files>,
    batch: Batch,
}

#[derive(Debug)]
struct Files {
    pid: i32,
    /// The thread whose ID we pass to process_vm_readv.
    tid: i32,
    start_time_ticks: u64,
    image: u64,
    pagemap: Pagemap,
    /// A small file that can't be read any more once this thread is reaped.
    liveness: File,
    mem: Option<File>,
}

impl Files {
    fn open(process: &Process) -> Result<Self, ReadError> {
        let tid = process.tid();
        Ok(Self {
            pid: process.pid(),
            tid,
            start_time_ticks: process.start_time_ticks(),
            image: image_of(process)?,
            pagemap: Pagemap::open(process)?,
            liveness: process.open_file(&format!("task/{tid}/oom_score_adj"))?,
            mem: None,
        })
    }

    fn is_of(&self, process: &Process) -> bool {
        self.tid == process.tid() && (self.pid, self.start_time_ticks) == process.key()
    }

    /// Checks that an earlier process_vm_readv has read the right process and program. The call takes a thread's ID,
    /// which may have been reused, or belong to another program after an exec. So the thread mustn't be reaped yet, its
    /// address space must still exist, and the process must run the same program. The address space alone proves
    /// nothing: others may share it (CLONE_VM) and keep it after the exec.
    fn check(&self, process: &Process, how: ReadHow) -> Result<(), ReadError> {
        let read = fault::io("read:oom_score_adj").and_then(|()| self.liveness.read_at(&mut [0; 8], 0));
        read.map_err(|error| ReadError::from_io(self.pid, "oom_score_adj", error))?;
        let is_same = self.pagemap.is_live()? && image_of(process)? == self.image;
        let is_judged = how.image.is_none_or(|image| image == self.image);
        if is_same && is_judged { Ok(()) } else { Err(ReadError::Vanished { pid: self.pid }) }
    }
}

impl Default for PageReader {
    fn default() -> Self {
        Self::new()
    }
}

impl PageReader {
    /// Without access to kpageflags (not root) a reader reports all pages that aren't private as shared.
    pub fn new() -> Self {
        Self { frames: KpageFlags::open().ok(), files: Vec::new(), batch: Batch::default() }
    }

    /// Whether we can tell merged, shared and zero pages apart.
    pub fn sees_frames(&self) -> bool {
        self.frames.is_some()
    }

    /// Reads runs of pages and calls `visit` for every page in order. We look up runs together if they ascend and are
    /// close to each other, and read up to 256 pages with one system call.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process ended, called exec, or runs another program than [`ReadHow::image`]. Pages
    /// visited before that are valid.
    pub fn read_runs(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        mut visit: impl FnMut(PageView<'_>),
    ) -> Result<(), ReadError> {
        self.for_each_batch(process, runs, |batch, files, frames| {
            batch.read(files, process, frames, how)?;
            batch.show(&mut visit);
            Ok(())
        })
    }

    /// Like [`Self::read_runs`], but we don't read the pages: `digest` gets runs of adjacent pages, and fills in their
    /// digests. A page that's left without a digest counts as absent.
    ///
    /// # Errors
    /// The errors of [`Self::read_runs`] and of `digest`.
    pub fn digest_runs(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        mut digest: impl FnMut(Vpn, &mut [Option<Digest>]) -> io::Result<()>,
        mut visit: impl FnMut(PageView<'_>, Option<Digest>),
    ) -> Result<(), ReadError> {
        let mut digests = Vec::new();
        self.for_each_batch(process, runs, |batch, files, frames| {
            batch.digest(files, process, frames, how, &mut digests, &mut digest)?;
            let mut digests = digests.iter();
            batch.show(&mut |view| visit(view, digests.next().copied().flatten()));
            Ok(())
        })
    }

    /// Unmerges every merged page of a range by reading it: the process gets its own copy and keeps running. Returns
    /// the number of pages unmerged. Zero pages stay merged.
    pub fn unmerge(&mut self, process: &Process, first: Vpn, pages: Pages) -> Result<Pages, ReadError> {
        let mut runs = Vec::new();
        let mut unmerged = Pages(0);
        self.resident_runs(process, first, pages, &mut runs)?;
        self.for_each_batch(process, &runs, |batch, files, frames| {
            unmerged += batch.unmerge(files, process, frames)?;
            Ok(())
        })?;
        Ok(unmerged)
    }

    /// Calls `visit` for every merged page of the runs, with its frame. If `lone` is set, this includes merged pages
    /// that nobody else maps any more.
    pub fn merged_frames(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        lone: bool,
        mut visit: impl FnMut(Vpn, u64),
    ) -> Result<(), ReadError> {
        self.shared_frames(process, runs, lone, |page, state, frame| {
            if state == PageState::Merged {
                visit(page, frame);
            }
        })
    }

    /// Calls `visit` for the pages of the runs that are present, anonymous and mapped by nobody else.
    pub fn private_pages(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        mut visit: impl FnMut(Vpn),
    ) -> Result<(), ReadError> {
        for &(first, pages) in runs {
            self.walk(process, first, Pages(pages.into()), |page, entry| {
                if entry.private() {
                    visit(page);
                }
            })?;
        }
        Ok(())
    }

    /// Like [`Self::merged_frames`], but also visits pages that are shared through fork or map the zero page.
    pub fn shared_frames(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        lone: bool,
        mut visit: impl FnMut(Vpn, PageState, u64),
    ) -> Result<(), ReadError> {
        let mut frames = self.frames.take();
        let mut found = Vec::new();
        let mut flush = |found: &mut Vec<FoundFrame>| {
            let shown = show_frames(found, frames.as_mut(), &mut visit);
            found.clear();
            shown.map_err(|error| ReadError::from_io(process.pid(), "../kpageflags", error))
        };
        let mut looked = Ok(());
        for &(first, pages) in runs {
            looked = looked.and_then(|()| {
                self.for_each_populated(process, first, Pages(pages.into()), |start, entries| {
                    let pages = entries.iter().zip(start.0..);
                    found.extend(pages.filter_map(|(&entry, page)| FoundFrame::of(page, PagemapEntry(entry), lone)));
                    advance();
                    if found.len() >= WALK_ENTRIES { flush(&mut found) } else { Ok(()) }
                })
            });
        }
        looked = looked.and_then(|()| flush(&mut found));
        self.frames = frames;
        looked
    }

    fn for_each_batch(
        &mut self,
        process: &Process,
        runs: &[(Vpn, u32)],
        mut work: impl FnMut(&mut Batch, &mut Files, Option<&mut KpageFlags>) -> Result<(), ReadError>,
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
            if let Err(error) = work(&mut self.batch, &mut self.files[at], self.frames.as_mut()) {
                self.files.swap_remove(at);
                return Err(error);
            }
            advance();
        }
        Ok(())
    }

    /// Whether a frame belongs to shared memory or a tmpfs, rather than to a file on disk.
    pub fn is_swap_backed(&mut self, frame: u64) -> io::Result<bool> {
        let mut is = false;
        if let Some(frames) = &mut self.frames {
            frames.look_up([frame], |_, flags| is = flags.swap_backed())?;
        }
        Ok(is)
    }

    /// Calls `visit` for the page table entries of a range in order, and skips most empty ones. Costs about 33 ns a
    /// page.
    pub fn walk(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        mut visit: impl FnMut(Vpn, PagemapEntry),
    ) -> Result<(), ReadError> {
        self.for_each_populated(process, first, pages, |start, entries| {
            for (&entry, page) in entries.iter().zip(start.0..) {
                visit(Vpn(page), PagemapEntry(entry));
            }
            Ok(())
        })
    }

    /// Appends to `runs` the runs of a range where every page is present and none belongs to a file.
    pub fn resident_runs(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        runs: &mut Vec<(Vpn, u32)>,
    ) -> Result<(), ReadError> {
        let before = runs.len();
        self.for_each_populated(process, first, pages, |start, entries| {
            for (&entry, page) in entries.iter().zip(start.0..) {
                let entry = PagemapEntry(entry);
                if !entry.present() || entry.file_or_shared() {
                    continue;
                }
                match runs[before..].last_mut() {
                    Some((first, length)) if first.0 + u64::from(*length) == page && *length < u32::MAX => *length += 1,
                    _ => runs.push((Vpn(page), 1)),
                }
            }
            Ok(())
        })
    }

    /// Calls `visit` with the page table entries of a range in large pieces. We skip most empty parts: a program may
    /// reserve a terabyte and use one page of it, and pagemap returns eight bytes for every page.
    fn for_each_populated(
        &mut self,
        process: &Process,
        first: Vpn,
        pages: Pages,
        mut visit: impl FnMut(Vpn, &[u64]) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let at = self.hold(process)?;
        let files = &self.files[at];
        let batch = &mut self.batch;
        batch.ranges.clear();
        let populated = Categories::PRESENT.or(Categories::SWAPPED);
        let scanned = if pages.0 > 8 * count(WALK_ENTRIES) {
            files.pagemap.scan(first, pages, populated, &mut batch.ranges)
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
            walk_entries(&files.pagemap, entries, first, pages, &mut visit)?;
        }
        Ok(())
    }

    /// Returns the index of a process's files, and opens them if needed. Files from before an exec are closed.
    fn hold(&mut self, process: &Process) -> Result<usize, ReadError> {
        if let Some(at) = self.files.iter().position(|files| files.is_of(process)) {
            if self.files[at].pagemap.is_live()? {
                return Ok(at);
            }
            self.files.swap_remove(at);
        }
        if self.files.len() >= HELD_PROCESSES {
            self.files.remove(0);
        }
        let files = match Files::open(process) {
            Err(ReadError::Io { source, .. }) if source.raw_os_error() == Some(libc::EMFILE) => {
                self.files.clear();
                Files::open(process)?
            }
            other => other?,
        };
        self.files.push(files);
        Ok(self.files.len() - 1)
    }
}

/// A page of anonymous memory whose frame we look up.
struct FoundFrame {
    page: Vpn,
    frame: u64,
    /// Whether nobody else maps the frame.
    exclusive: bool,
}

impl FoundFrame {
    /// `None` if the page table entry rules out that the page is merged, shared through fork or the zero page. With
    /// `lone` we include pages that nobody else maps, because they may be merged.
    fn of(page: u64, entry: PagemapEntry, lone: bool) -> Option<Self> {
        let exclusive = entry.exclusive();
        if !entry.present() || entry.file_or_shared() || exclusive && !lone {
            return None;
        }
        Some(Self { page: Vpn(page), frame: entry.pfn()?, exclusive })
    }
}

/// Calls `visit` with the pages that are merged, shared through fork or map the zero page, in order.
fn show_frames(
    found: &[FoundFrame],
    frames: Option<&mut KpageFlags>,
    visit: &mut impl FnMut(Vpn, PageState, u64),
) -> io::Result<()> {
    let mut flags = vec![FrameFlags::default(); found.len()];
    if let Some(frames) = frames {
        frames.look_up(found.iter().map(|page| page.frame), |at, of_frame| flags[at] = of_frame)?;
    }
    for (&FoundFrame { page, frame, exclusive }, flags) in found.iter().zip(flags) {
        if exclusive {
            if flags.ksm() && shows_merged() {
                visit(page, PageState::Merged, frame);
            }
        } else if flags.zero_page() {
            visit(page, PageState::ZeroMapped, frame);
        } else if flags.ksm() {
            visit(page, PageState::Merged, frame);
        } else {
            visit(page, PageState::Shared, frame);
        }
    }
    Ok(())
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
        let length = usize::try_from(pages.0 - done).unwrap_or(WALK_ENTRIES).min(WALK_ENTRIES);
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
