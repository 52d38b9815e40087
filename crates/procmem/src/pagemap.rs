//! `/proc/PID/pagemap` and its PAGEMAP_SCAN ioctl.
//!
//! Bits are as in the kernel's Documentation/admin-guide/mm/pagemap.rst. Frame numbers, and so everything in
//! [`super::kpageflags`], need CAP_SYS_ADMIN; without it the kernel shows frame 0.

use crate::os::fault;
use crate::process::{Process, ReadError};
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn, count};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// One page table entry in pagemap's format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagemapEntry(pub u64);

impl PagemapEntry {
    pub const fn present(self) -> bool {
        self.0 & (1 << 63) != 0
    }
    /// Whether the frame is a page of a file or shared memory. Some kernels set this bit for the huge zero page too.
    pub const fn file_or_shared(self) -> bool {
        self.0 & (1 << 61) != 0
    }
    /// Whether the frame is mapped exactly once.
    pub const fn exclusive(self) -> bool {
        self.0 & (1 << 56) != 0
    }
    /// Frame number, if a frame is mapped and its number is visible.
    pub const fn pfn(self) -> Option<u64> {
        let pfn = self.0 & ((1 << 55) - 1);
        if self.present() && pfn != 0 { Some(pfn) } else { None }
    }
    /// Whether the page is present, anonymous and mapped once, so that we may use process_vm_readv.
    pub const fn private(self) -> bool {
        self.present() && !self.file_or_shared() && self.exclusive()
    }
}

/// An open pagemap. It shows the address space that the process had when we opened it. After an exec our reads return
/// nothing, which is how we notice the exec.
#[derive(Debug)]
pub struct Pagemap {
    pid: i32,
    file: File,
}

impl Pagemap {
    pub fn open(process: &Process) -> Result<Self, ReadError> {
        Self::open_file(process, "pagemap")
    }

    /// Opens the pagemap of a thread of the process; `file` is its path below `/proc/PID`.
    pub fn open_file(process: &Process, file: &str) -> Result<Self, ReadError> {
        Ok(Self { pid: process.pid(), file: process.open_file(file)? })
    }

    /// Converts an error that reading another file of the process returned.
    pub fn error(&self, file: &str, error: io::Error) -> ReadError {
        ReadError::from_io(self.pid, file, error)
    }

    /// Reads the entries of adjacent pages, starting at `first`. Measured: 0.9 us for one page, 33 ns for each more.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the address space is gone.
    pub fn read(&self, first: Vpn, entries: &mut [u64]) -> Result<(), ReadError> {
        let offset = first.0.checked_mul(8).ok_or(ReadError::Vanished { pid: self.pid })?;
        match fault::io("read:pagemap").and_then(|()| pread_words(&self.file, entries, offset)) {
            Ok(read) if read == entries.len() => Ok(()),
            Ok(0) if !entries.is_empty() => Err(ReadError::Vanished { pid: self.pid }),
            // We've read up to the end of the address space. Beyond it there are no pages.
            Ok(read) => {
                entries[read..].fill(0);
                Ok(())
            }
            Err(error) => Err(ReadError::from_io(self.pid, "pagemap", error)),
        }
    }

    /// Whether the address space still exists. Costs one short system call.
    pub fn is_live(&self) -> Result<bool, ReadError> {
        match self.read(Vpn(0), &mut [0]) {
            Ok(()) => Ok(true),
            Err(ReadError::Vanished { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Appends to `found` the ranges within `pages` pages from `first` that have any of the wanted categories.
    /// Adjacent ranges of different categories are separate.
    pub fn scan(
        &self,
        first: Vpn,
        pages: Pages,
        wanted: Categories,
        found: &mut Vec<PageRange>,
    ) -> Result<(), ScanError> {
        let mut start = first.address();
        let end = (first + pages.0).address();
        while start < end {
            let mut vec = [RawRegion::default(); 128];
            let mut arg = RawScan {
                size: count(size_of::<RawScan>()),
                start,
                end,
                vec: count(vec.as_mut_ptr().expose_provenance()),
                vec_len: count(vec.len()),
                category_anyof_mask: wanted.0,
                return_mask: wanted.0,
                ..RawScan::default()
            };
            // SAFETY: `arg` is the kernel's struct pm_scan_arg; `vec` outlives the call and has `vec_len` elements.
            let ranges = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let Ok(ranges) = usize::try_from(ranges) else {
                let error = io::Error::last_os_error();
                return Err(match error.raw_os_error() {
                    Some(libc::EINTR) => continue,
                    Some(libc::ENOTTY | libc::EINVAL) => ScanError::Absent,
                    _ => ReadError::from_io(self.pid, "pagemap", error).into(),
                });
            };
            for region in vec.iter().take(ranges) {
                found.push(PageRange::between(region.start, region.end, region.categories));
            }
            if arg.walk_end <= start {
                return Err(ScanError::Stuck);
            }
            start = arg.walk_end;
        }
        Ok(())
    }
}

#[derive(Debug, Error)]
pub enum ScanError {
    /// The kernel is older than 6.7, or older than one of the categories.
    #[error("this kernel has no PAGEMAP_SCAN (Linux 6.7)")]
    Absent,
    /// The kernel reports success without progress.
    #[error("PAGEMAP_SCAN makes no progress")]
    Stuck,
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// A set of PAGEMAP_SCAN page categories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Categories(pub u64);

impl Categories {
    pub const FILE: Self = Self(1 << 2);
    pub const PRESENT: Self = Self(1 << 3);
    pub const SWAPPED: Self = Self(1 << 4);
    pub const ZERO: Self = Self(1 << 5);
    pub const HUGE: Self = Self(1 << 6);

    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    /// Whether this set contains all of `other`.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Adjacent pages of the same categories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    pub first: Vpn,
    pub pages: Pages,
    /// The requested categories that apply.
    pub categories: Categories,
}

impl PageRange {
    /// The pages between two addresses as PAGEMAP_SCAN returns them.
    pub fn between(start: u64, end: u64, categories: u64) -> Self {
        let pages = Pages(end.saturating_sub(start) / PAGE_BYTES);
        Self { first: Vpn::of_address(start), pages, categories: Categories(categories) }
    }
}

/// `_IOWR('f', 16, struct pm_scan_arg)` of linux/fs.h.
const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610_u32 as libc::Ioctl;

#[repr(C)]
#[derive(Default)]
struct RawScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Reads whole words at an offset and returns how many it could read.
pub(super) fn pread_words(file: &File, words: &mut [u64], offset: u64) -> io::Result<usize> {
    let length = size_of_val(words);
    // SAFETY: the bytes are the memory of `words`, which we borrow exclusively; any bytes make valid words.
    let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), length) };
    let mut done = 0;
    while done < length {
        match file.read_at(&mut bytes[done..], offset + count(done)) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done / 8)
}

#[cfg(test)]
#[path = "pagemap_tests.rs"]
mod tests;
