//! A batch of pages that are looked up and read together.

use super::{Contents, Held, PageView, ReadHow};
use crate::kpageflags::{FrameFlags, KpageFlags, shows_merged};
use crate::os::fault;
use crate::pagemap::{Categories, PageRange, PagemapEntry, ScanError};
use crate::process::{Process, ReadError};
use pagefold_engine::hash::{Digest, PageBytes};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{EXTENT_PAGES, PAGE_SIZE, Pages, Vpn, count};
use std::io;
use std::os::unix::fs::FileExt;

/// Pages read by one system call. Measured on runs of 16, relative to a bare loop: 64 pages cost 1.16, 128 1.14, 256
/// 1.12, 512 1.10. The buffer of 1 MiB stays in the second-level cache until the pages are digested.
const BATCH_PAGES: usize = 256;

/// Longest gap between two runs that pagemap is read across: at 33 ns per page it costs less than another call.
pub(super) const BRIDGE_PAGES: u64 = 20;

/// Finds huge pages without PAGEMAP_SCAN: a page counts as mapped by a huge page if its frame is part of one and both
/// have the same offset in their 2 MiB. Calls `visit` with the positions.
pub(super) fn huge_by_frames(
    pages: impl Iterator<Item = (Vpn, PagemapEntry)>,
    frames: Option<&mut KpageFlags>,
    mut visit: impl FnMut(usize),
) -> io::Result<()> {
    let Some(frames) = frames else { return Ok(()) };
    let mut positions = Vec::new();
    let mut candidates = Vec::new();
    for (position, (page, entry)) in pages.enumerate() {
        if let Some(frame) = entry.pfn().filter(|frame| frame % EXTENT_PAGES == page.0 % EXTENT_PAGES) {
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

/// The state of one page of a batch.
#[derive(Clone, Copy, Debug)]
struct Slot {
    page: Vpn,
    entry: PagemapEntry,
    state: PageState,
    huge: bool,
    active: bool,
    /// A merged page that nobody else maps any more. Known if private pages were looked up in kpageflags.
    lone: bool,
    has_bytes: bool,
}

/// `struct iovec`, without a pointer type so that a reader can move between threads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct IoRange {
    pub(super) address: u64,
    pub(super) length: usize,
}

/// Pages that are handled together. Page `i` of the batch has `slots[i]` and `buffer[i]`.
#[derive(Debug, Default)]
pub(super) struct Batch {
    slots: Vec<Slot>,
    buffer: Vec<PageBytes>,
    /// Page table entries; also the buffer for walks of a range.
    pub(super) entries: Vec<u64>,
    pub(super) ranges: Vec<PageRange>,
    /// Positions of slots to look up in kpageflags, then of slots to read.
    wanted: Vec<u16>,
    local: Vec<IoRange>,
    remote: Vec<IoRange>,
    /// This kernel has no PAGEMAP_SCAN.
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

    /// Adds as many pages of a run as fit and returns their number.
    pub(super) fn take(&mut self, first: Vpn, pages: u32) -> u32 {
        let room = u32::try_from(BATCH_PAGES - self.slots.len()).unwrap_or(0);
        let taken = pages.min(room);
        self.slots.extend((0..taken).map(|offset| Slot {
            page: first + u64::from(offset),
            entry: PagemapEntry(0),
            state: PageState::Absent,
            huge: false,
            active: false,
            lone: false,
            has_bytes: false,
        }));
        taken
    }

    pub(super) fn read(
        &mut self,
        held: &mut Held,
        process: &Process,
        frames: Option<&mut KpageFlags>,
        how: ReadHow,
    ) -> Result<(), ReadError> {
        self.look_up(held, how)?;
        self.classify(frames, how).map_err(|error| ReadError::from_io(held.pid, "../kpageflags", error))?;
        self.read_private(held.pid)?;
        self.read_shared(held, process, how.contents)?;
        held.check()
    }

    /// Has the pages digested that [`Self::read`] reads, adjacent ones together. `digests` gets one for each page of the batch.
    pub(super) fn digest(
        &mut self,
        held: &Held,
        frames: Option<&mut KpageFlags>,
        how: ReadHow,
        digests: &mut Vec<Option<Digest>>,
        digest: &mut impl FnMut(Vpn, &mut [Option<Digest>]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        self.look_up(held, how)?;
        self.classify(frames, how).map_err(|error| ReadError::from_io(held.pid, "../kpageflags", error))?;
        digests.clear();
        digests.resize(self.slots.len(), None);
        let is_digested = |slot: &Slot| slot.state == PageState::Private || how.contents.include(slot.state);
        let continues = |a: &Slot, b: &Slot| is_digested(a) && is_digested(b) && a.page + 1 == b.page;
        let mut rest = digests.as_mut_slice();
        for run in self.slots.chunk_by_mut(continues) {
            let (own, others) = rest.split_at_mut(run.len());
            rest = others;
            if run.first().is_some_and(is_digested) {
                digest(run[0].page, own).map_err(|error| ReadError::from_io(held.pid, "(hash)", error))?;
                let gone = run.iter_mut().zip(own).filter(|(_, digest)| digest.is_none());
                gone.for_each(|(slot, _)| slot.state = PageState::Absent);
            }
        }
        held.check()
    }

    /// Reads the merged pages and no others, so that each gets its own copy. Returns their number.
    pub(super) fn unmerge(&mut self, held: &Held, frames: Option<&mut KpageFlags>) -> Result<Pages, ReadError> {
        // A page that nobody else maps any more is copied as well: its frame may be charged to another cgroup.
        let how = ReadHow { activity: true, ..ReadHow::default() };
        self.look_up(held, how)?;
        self.classify(frames, how).map_err(|error| ReadError::from_io(held.pid, "../kpageflags", error))?;
        for slot in &mut self.slots {
            let merged = slot.state == PageState::Merged || slot.lone;
            slot.state = if merged { PageState::Private } else { PageState::Absent };
        }
        self.read_private(held.pid)?;
        held.check()?;
        Ok(Pages(count(self.slots.iter().filter(|slot| slot.has_bytes).count())))
    }

    /// Calls `visit` with the merged pages and their frames; if `lone`, also those that nobody else maps any more.
    pub(super) fn show_merged(
        &mut self,
        held: &Held,
        frames: Option<&mut KpageFlags>,
        lone: bool,
        visit: &mut impl FnMut(Vpn, u64),
    ) -> Result<(), ReadError> {
        let how = ReadHow { activity: lone, ..ReadHow::default() };
        self.look_up(held, how)?;
        self.classify(frames, how).map_err(|error| ReadError::from_io(held.pid, "../kpageflags", error))?;
        for slot in self.slots.iter().filter(|slot| slot.state == PageState::Merged || slot.lone) {
            slot.entry.pfn().into_iter().for_each(|frame| visit(slot.page, frame));
        }
        Ok(())
    }

    /// Looks up the page table entries and, if requested, which pages are huge.
    pub(super) fn look_up(&mut self, held: &Held, how: ReadHow) -> Result<(), ReadError> {
        let mut at = 0;
        while at < self.slots.len() {
            let first = self.slots[at].page;
            let mut last = first;
            let joined = self.slots[at..]
                .iter()
                .take_while(|slot| {
                    let joins = slot.page >= last && slot.page.0 - last.0 <= BRIDGE_PAGES;
                    if joins {
                        last = slot.page;
                    }
                    joins
                })
                .count();
            let length = usize::try_from(last.0 - first.0 + 1).unwrap_or(1);
            if self.entries.len() < length {
                self.entries.resize(length, 0);
            }
            held.pagemap.read(first, &mut self.entries[..length])?;
            let slots = &mut self.slots[at..at + joined];
            for slot in slots.iter_mut() {
                slot.entry = PagemapEntry(self.entries[usize::try_from(slot.page.0 - first.0).unwrap_or(0)]);
            }
            if how.huge && !self.scan_absent && slots.iter().any(|slot| slot.entry.present()) {
                self.ranges.clear();
                match held.pagemap.scan(first, Pages(count(length)), Categories::HUGE, &mut self.ranges) {
                    Ok(()) => {
                        for range in &self.ranges {
                            let end = range.first + range.pages.0;
                            let inside = slots.iter_mut().filter(|slot| (range.first..end).contains(&slot.page));
                            inside.for_each(|slot| slot.huge = true);
                        }
                    }
                    Err(ScanError::Absent | ScanError::Stuck) => self.scan_absent = true,
                    Err(ScanError::Read(error)) => return Err(error),
                }
            }
            at += joined;
        }
        Ok(())
    }

    /// Determines the state of every page from its entry and, if that is not enough, from its frame's flags.
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
                // Some kernels show the huge zero page as a page of a file.
                let file = entry.file_or_shared();
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
        if let Some(frames) = frames.filter(|_| !wanted.is_empty()) {
            let asked = wanted.iter().filter_map(|&position| slots[usize::from(position)].entry.pfn());
            // The entries are no longer needed: reuse their buffer for the flags.
            self.entries.clear();
            self.entries.resize(wanted.len(), 0);
            frames.look_up(asked, |at, flags| self.entries[at] = flags.0)?;
            for (&position, &flags) in wanted.iter().zip(&self.entries) {
                let (slot, flags) = (&mut slots[usize::from(position)], FrameFlags(flags));
                if slot.state == PageState::Private {
                    slot.active = flags.active();
                    slot.lone = flags.ksm() && shows_merged();
                } else if flags.zero_page() {
                    slot.state = PageState::ZeroMapped;
                } else if flags.ksm() && may_be_merged && slot.state == PageState::Shared {
                    slot.state = PageState::Merged;
                }
            }
        }
        Ok(())
    }

    /// Reads the private pages, with one system call unless some are gone.
    pub(super) fn read_private(&mut self, pid: i32) -> Result<(), ReadError> {
        let Self { slots, buffer, wanted, local, remote, .. } = self;
        wanted.clear();
        wanted.extend(slots.iter().zip(0u16..).filter(|(slot, _)| slot.state == PageState::Private).map(|(_, at)| at));
        let mut rest = wanted.as_slice();
        while !rest.is_empty() {
            local.clear();
            remote.clear();
            for &position in rest {
                let position = usize::from(position);
                extend(local, count(buffer[position].as_mut_ptr().expose_provenance()));
                extend(remote, slots[position].page.address());
            }
            let read = process_vm_readv(pid, local, remote)?;
            // The kernel reads page by page and stops at the first that it cannot read: the pages before are complete.
            let whole = (read / PAGE_SIZE).min(rest.len());
            let (good, failed) = rest.split_at(whole);
            for &position in good {
                slots[usize::from(position)].has_bytes = true;
            }
            rest = match failed {
                [gone, after @ ..] => {
                    slots[usize::from(*gone)].state = PageState::Absent;
                    after
                }
                [] => failed,
            };
        }
        Ok(())
    }

    /// Reads the merged and shared pages that are requested, adjacent ones together, without pinning them.
    pub(super) fn read_shared(
        &mut self,
        held: &mut Held,
        process: &Process,
        contents: Contents,
    ) -> Result<(), ReadError> {
        let shared = |slot: &Slot| contents.include(slot.state);
        let mut at = 0;
        while at < self.slots.len() {
            let first = self.slots[at].page;
            let run =
                self.slots[at..].iter().zip(first.0..).take_while(|(slot, page)| shared(slot) && slot.page.0 == *page);
            let length = run.count();
            if length == 0 {
                at += 1;
                continue;
            }
            if held.mem.is_none() {
                held.mem = Some(process.open_file("mem")?);
            }
            let Some(mem) = held.mem.as_ref() else { continue };
            let bytes = self.buffer[at..at + length].as_flattened_mut();
            let whole = match fault::io("read:mem").and_then(|()| mem.read_at(bytes, first.address())) {
                // The address space is gone.
                Ok(0) => return Err(ReadError::Vanished { pid: held.pid }),
                Ok(read) => read / PAGE_SIZE,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EFAULT)) => 0,
                Err(error) => return Err(ReadError::from_io(held.pid, "mem", error)),
            };
            let slots = &mut self.slots[at..at + length];
            slots.iter_mut().take(whole).for_each(|slot| slot.has_bytes = true);
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
                active: slot.active,
                frame: slot.entry.pfn(),
                bytes: slot.has_bytes.then_some(bytes),
            });
        }
    }
}

/// Adds the page at `address`, extending the last piece if it is adjacent.
fn extend(pieces: &mut Vec<IoRange>, address: u64) {
    match pieces.last_mut() {
        Some(piece) if piece.address + count(piece.length) == address => piece.length += PAGE_SIZE,
        _ => pieces.push(IoRange { address, length: PAGE_SIZE }),
    }
}

/// Reads the remote pieces into the local ones. Returns the number of bytes read, 0 if the first page is not readable.
pub(super) fn process_vm_readv(pid: i32, local: &[IoRange], remote: &[IoRange]) -> Result<usize, ReadError> {
    fault::io("read:process_vm_readv").map_err(|error| ReadError::from_io(pid, "(process_vm_readv)", error))?;
    // SAFETY: `IoRange` has the layout of struct iovec. The local pieces lie within the batch's buffer, which is borrowed
    // exclusively and not moved, one page per slot; there are at most BATCH_PAGES (below IOV_MAX) on either side. The
    // kernel checks the remote addresses.
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
    usize::try_from(read).or_else(|_| {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EFAULT) => Ok(0),
            _ => Err(ReadError::from_io(pid, "(process_vm_readv)", error)),
        }
    })
}
