//! A batch of pages that we look up and read together.

use super::{Contents, Files, PageView, ReadHow};
use crate::kpageflags::{FrameFlags, KpageFlags, shows_merged};
use crate::os::fault;
use crate::pagemap::{Categories, PageRange, PagemapEntry, ScanError};
use crate::process::{Process, ReadError};
use pagefold_engine::hash::{Digest, PageBytes};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{EXTENT_PAGES, PAGE_SIZE, Pages, Vpn, count};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Pages read by one system call. The cost relative to a bare loop, measured on runs of 16 pages, is 1.16 with 64
/// pages, 1.14 with 128, 1.12 with 256 and 1.10 with 512. The buffer of 1 MiB stays in the L2 cache until we've
/// digested the pages.
const BATCH_PAGES: usize = 256;

/// We read pagemap across gaps up to this length between two runs: at 33 ns a page that's cheaper than another call.
pub(super) const BRIDGE_PAGES: u64 = 20;

/// Finds huge pages without PAGEMAP_SCAN. A page counts as mapped by a huge page if its frame is part of a huge page
/// and both have the same offset within 2 MiB. Calls `visit` with the positions of these pages.
fn huge_by_frames(
    pages: impl Iterator<Item = (Vpn, PagemapEntry)>,
    frames: Option<&mut KpageFlags>,
    mut visit: impl FnMut(usize),
) -> io::Result<()> {
    let Some(frames) = frames else { return Ok(()) };
    let mut positions = Vec::new();
    let mut candidates = Vec::new();
    for (position, (page, entry)) in pages.enumerate() {
        let Some(frame) = entry.pfn() else { continue };
        if frame % EXTENT_PAGES == page.0 % EXTENT_PAGES {
            positions.push(position);
            candidates.push(frame);
        }
    }
    frames.look_up(candidates, |at, flags| {
        if flags.thp() {
            visit(positions[at]);
        }
    })
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    page: Vpn,
    entry: PagemapEntry,
    state: PageState,
    huge: bool,
    compound: bool,
    active: bool,
    /// A merged page that nobody else maps any more. Only known if private pages were looked up in kpageflags.
    lone: bool,
    has_bytes: bool,
}

/// `struct iovec`, with a number instead of the pointer, so that a reader can move between threads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct IoRange {
    pub(super) address: u64,
    pub(super) length: usize,
}

/// Page `i` of a batch has `slots[i]` and `buffer[i]`.
#[derive(Debug, Default)]
pub(super) struct Batch {
    slots: Vec<Slot>,
    buffer: Vec<PageBytes>,
    /// Page table entries; also the buffer for walks of a range.
    pub(super) entries: Vec<u64>,
    pub(super) ranges: Vec<PageRange>,
    /// Positions of slots: first the ones to look up in kpageflags, later the ones to read.
    wanted: Vec<u16>,
    local: Vec<IoRange>,
    remote: Vec<IoRange>,
    pub(super) scan_absent: bool,
}

impl Batch {
    pub(super) fn start(&mut self) {
        self.slots.clear();
        if self.buffer.is_empty() {
            self.buffer.resize(BATCH_PAGES, [0; PAGE_SIZE]);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.slots.len() == BATCH_PAGES
    }

    /// Adds as many pages of a run as fit, and returns their number.
    pub(super) fn take(&mut self, first: Vpn, pages: u32) -> u32 {
        let room = u32::try_from(BATCH_PAGES - self.slots.len()).unwrap_or(0);
        let taken = pages.min(room);
        for offset in 0..taken {
            self.slots.push(Slot {
                page: first + u64::from(offset),
                entry: PagemapEntry(0),
                state: PageState::Absent,
                huge: false,
                compound: false,
                active: false,
                lone: false,
                has_bytes: false,
            });
        }
        taken
    }

    pub(super) fn read(
        &mut self,
        files: &mut Files,
        process: &Process,
        frames: Option<&mut KpageFlags>,
        how: ReadHow,
    ) -> Result<(), ReadError> {
        self.find(files, frames, how)?;
        if how.contents != Contents::Present {
            self.read_private(files.tid)?;
        }
        self.read_shared(files, process, how.contents)?;
        files.check(process, how)
    }

    /// Calls `digest` for the pages that [`Self::read`] would read, once per run of adjacent pages. `digests` gets one
    /// entry per slot.
    pub(super) fn digest(
        &mut self,
        files: &Files,
        process: &Process,
        frames: Option<&mut KpageFlags>,
        how: ReadHow,
        digests: &mut Vec<Option<Digest>>,
        digest: &mut impl FnMut(Vpn, &mut [Option<Digest>]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        self.find(files, frames, how)?;
        digests.clear();
        digests.resize(self.slots.len(), None);
        let mut at = 0;
        while at < self.slots.len() {
            let length =
                adjacent(&self.slots[at..], |state| state == PageState::Private || how.contents.include(state));
            let own = &mut digests[at..at + length];
            if !own.is_empty() {
                digest(self.slots[at].page, own).map_err(|error| ReadError::from_io(files.pid, "(hash)", error))?;
            }
            for (slot, digest) in self.slots[at..].iter_mut().zip(own) {
                if digest.is_none() {
                    slot.state = PageState::Absent;
                }
            }
            at += length.max(1);
        }
        files.check(process, how)
    }

    /// Reads the merged pages and no others, so that the process gets its own copy of each. Returns how many there
    /// were.
    pub(super) fn unmerge(
        &mut self,
        files: &Files,
        process: &Process,
        frames: Option<&mut KpageFlags>,
    ) -> Result<Pages, ReadError> {
        // We also copy pages that nobody else maps any more, because their frames may be charged to another cgroup.
        let how = ReadHow { activity: true, ..ReadHow::default() };
        self.find(files, frames, how)?;
        for slot in &mut self.slots {
            let merged = slot.state == PageState::Merged || slot.lone;
            slot.state = if merged { PageState::Private } else { PageState::Absent };
        }
        self.read_private(files.tid)?;
        files.check(process, how)?;
        Ok(Pages(count(self.slots.iter().filter(|slot| slot.has_bytes).count())))
    }

    fn find(&mut self, files: &Files, frames: Option<&mut KpageFlags>, how: ReadHow) -> Result<(), ReadError> {
        self.look_up(files, how)?;
        self.classify(frames, how).map_err(|error| ReadError::from_io(files.pid, "../kpageflags", error))
    }

    /// Looks up the page table entries and, if wanted, which pages are huge.
    pub(super) fn look_up(&mut self, files: &Files, how: ReadHow) -> Result<(), ReadError> {
        let mut at = 0;
        while at < self.slots.len() {
            let first = self.slots[at].page;
            let mut last = first;
            let mut end = at;
            while end < self.slots.len() {
                let page = self.slots[end].page;
                if page < last || page.0 - last.0 > BRIDGE_PAGES {
                    break;
                }
                last = page;
                end += 1;
            }
            let length = usize::try_from(last.0 - first.0 + 1).unwrap_or(1);
            if self.entries.len() < length {
                self.entries.resize(length, 0);
            }
            files.pagemap.read(first, &mut self.entries[..length])?;
            let slots = &mut self.slots[at..end];
            for slot in slots.iter_mut() {
                slot.entry = PagemapEntry(self.entries[usize::try_from(slot.page.0 - first.0).unwrap_or(0)]);
            }
            if how.huge && !self.scan_absent && slots.iter().any(|slot| slot.entry.present()) {
                self.find_huge(files, at..end, Pages(count(length)))?;
            }
            at = end;
        }
        Ok(())
    }

    /// Asks PAGEMAP_SCAN, if the kernel has it, which of these slots are mapped by huge pages. The slots span `pages`
    /// pages.
    fn find_huge(&mut self, files: &Files, slots: Range<usize>, pages: Pages) -> Result<(), ReadError> {
        let slots = &mut self.slots[slots];
        self.ranges.clear();
        match files.pagemap.scan(slots[0].page, pages, Categories::HUGE, &mut self.ranges) {
            Ok(()) => {
                for slot in slots {
                    slot.huge =
                        self.ranges.iter().any(|range| (range.first..range.first + range.pages.0).contains(&slot.page));
                }
            }
            Err(ScanError::Absent | ScanError::Stuck) => self.scan_absent = true,
            Err(ScanError::Read(error)) => return Err(error),
        }
        Ok(())
    }

    /// Determines the state of every page from its entry and, where the entry isn't enough, from its frame's flags.
    pub(super) fn classify(&mut self, mut frames: Option<&mut KpageFlags>, how: ReadHow) -> io::Result<()> {
        if how.huge && self.scan_absent {
            let slots = &self.slots;
            let mut found = Vec::new();
            let pages = slots.iter().map(|slot| (slot.page, slot.entry));
            huge_by_frames(pages, frames.as_deref_mut(), |position| found.push(position))?;
            for position in found {
                self.slots[position].huge = true;
            }
        }
        let Self { slots, wanted, .. } = self;
        wanted.clear();
        for (slot, position) in slots.iter_mut().zip(0u16..) {
            let entry = slot.entry;
            if entry.private() {
                slot.state = PageState::Private;
                if how.activity && entry.pfn().is_some() {
                    wanted.push(position);
                }
            } else if entry.present() {
                // Some kernels show the huge zero page as a page of a file, so with `huge` we look up the flags of such
                // pages.
                let file = entry.file_or_shared();
                if file && how.contents == Contents::Present {
                    slot.state = PageState::Shared;
                    continue;
                }
                if file && (entry.exclusive() || !how.huge) {
                    continue;
                }
                if !file {
                    slot.state = PageState::Shared;
                }
                if entry.pfn().is_some() {
                    wanted.push(position);
                }
            }
        }
        let may_be_merged = !how.unmarked || shows_merged();
        let Some(frames) = frames else { return Ok(()) };
        let asked = wanted.iter().filter_map(|&position| slots[usize::from(position)].entry.pfn());
        // We don't need the entries any more, so their buffer can hold the flags.
        self.entries.clear();
        self.entries.resize(wanted.len(), 0);
        frames.look_up(asked, |at, flags| self.entries[at] = flags.0)?;
        for (&position, &flags) in wanted.iter().zip(&self.entries) {
            let slot = &mut slots[usize::from(position)];
            let flags = FrameFlags(flags);
            slot.compound = flags.thp();
            if slot.state == PageState::Private {
                slot.active = flags.active();
                slot.lone = flags.ksm() && shows_merged();
            } else if flags.zero_page() {
                slot.state = PageState::ZeroMapped;
            } else if flags.ksm() && may_be_merged && slot.state == PageState::Shared {
                slot.state = PageState::Merged;
            }
        }
        Ok(())
    }

    /// Reads the private pages, with one system call unless some have gone.
    pub(super) fn read_private(&mut self, tid: i32) -> Result<(), ReadError> {
        let Self { slots, buffer, wanted, local, remote, .. } = self;
        wanted.clear();
        for (slot, position) in slots.iter().zip(0..) {
            if slot.state == PageState::Private {
                wanted.push(position);
            }
        }
        let mut rest = wanted.as_slice();
        while !rest.is_empty() {
            local.clear();
            remote.clear();
            for &position in rest {
                let position = usize::from(position);
                extend(local, count(buffer[position].as_mut_ptr().expose_provenance()));
                extend(remote, slots[position].page.address());
            }
            let read = process_vm_readv(tid, local, remote)?;
            // The kernel reads page by page and stops at the first that it can't read: the pages before are complete.
            let whole = (read / PAGE_SIZE).min(rest.len());
            let (good, failed) = rest.split_at(whole);
            for &position in good {
                slots[usize::from(position)].has_bytes = true;
            }
            let Some((&gone, after)) = failed.split_first() else { break };
            slots[usize::from(gone)].state = PageState::Absent;
            rest = after;
        }
        Ok(())
    }

    /// Reads the pages that `contents` includes, adjacent ones together, through `/proc/PID/mem`, which doesn't pin
    /// them.
    pub(super) fn read_shared(
        &mut self,
        files: &mut Files,
        process: &Process,
        contents: Contents,
    ) -> Result<(), ReadError> {
        let mut at = 0;
        while at < self.slots.len() {
            let length = adjacent(&self.slots[at..], |state| contents.include(state));
            if length == 0 {
                at += 1;
                continue;
            }
            if files.mem.is_none() {
                files.mem = Some(process.open_file("mem")?);
            }
            let Some(mem) = &files.mem else { continue };
            let first = self.slots[at].page;
            let bytes = self.buffer[at..at + length].as_flattened_mut();
            let whole = match fault::io("read:mem").and_then(|()| mem.read_at(bytes, first.address())) {
                // The address space is gone.
                Ok(0) => return Err(ReadError::Vanished { pid: files.pid }),
                Ok(read) => read / PAGE_SIZE,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EFAULT)) => 0,
                Err(error) => return Err(ReadError::from_io(files.pid, "mem", error)),
            };
            let slots = &mut self.slots[at..at + length];
            for slot in slots.iter_mut().take(whole) {
                slot.has_bytes = true;
            }
            if let Some(gone) = slots.get_mut(whole) {
                gone.state = PageState::Absent;
            }
            at += length.min(whole + 1);
        }
        Ok(())
    }

    pub(super) fn show(&self, visit: &mut impl FnMut(PageView<'_>)) {
        for (slot, bytes) in self.slots.iter().zip(&self.buffer) {
            visit(PageView {
                page: slot.page,
                state: slot.state,
                huge: slot.huge,
                compound: slot.compound,
                active: slot.active,
                lone: slot.lone,
                frame: slot.entry.pfn(),
                bytes: slot.has_bytes.then_some(bytes),
            });
        }
    }
}

/// How many slots from the first on have adjacent pages in a wanted state.
fn adjacent(slots: &[Slot], is_wanted: impl Fn(PageState) -> bool) -> usize {
    let mut length = 0;
    while length < slots.len() && slots[length].page == slots[0].page + count(length) && is_wanted(slots[length].state)
    {
        length += 1;
    }
    length
}

/// Adds the page at `address`: extends the last piece if it ends there, or begins another one.
fn extend(pieces: &mut Vec<IoRange>, address: u64) {
    match pieces.last_mut() {
        Some(piece) if piece.address + count(piece.length) == address => piece.length += PAGE_SIZE,
        _ => pieces.push(IoRange { address, length: PAGE_SIZE }),
    }
}

/// Reads the remote pieces into the local ones. Returns the number of bytes read, 0 if the first page can't be read.
pub(super) fn process_vm_readv(pid: i32, local: &[IoRange], remote: &[IoRange]) -> Result<usize, ReadError> {
    fault::io("read:process_vm_readv").map_err(|error| ReadError::from_io(pid, "(process_vm_readv)", error))?;
    // SAFETY: `IoRange` has the layout of struct iovec. The local pieces lie within the batch's buffer, which is
    // borrowed exclusively and not moved, one page per slot; there are at most BATCH_PAGES (below IOV_MAX) on either
    // side. The kernel checks the remote addresses.
    let read = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr().cast(),
            count(local.len()),
            remote.as_ptr().cast(),
            count(remote.len()),
            0,
        )
    };
    if let Ok(read) = usize::try_from(read) {
        return Ok(read);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EFAULT) => Ok(0),
        _ => Err(ReadError::from_io(pid, "(process_vm_readv)", error)),
    }
}
