//! `/dev/ksm`: merging of pages that the caller names, and hashing of pages in place.
//!
//! The interface is that of `kernel/include/linux/ksm.h`. A kernel with the series in `kernel/patches` has it, and a stock
//! kernel with the module in `kernel/dkms`. The kernel compares what it merges, under its locks: a wrong request costs time.

use pagefold_engine::host::Merging;
use pagefold_engine::units::{PAGE_BYTES, count};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

pub const DEVICE: &str = "/dev/ksm";

const ABI_VERSION: u32 = 1;
/// `_IOWR(0xB9, 0, struct ksm_merge)`
const IOC_MERGE: libc::Ioctl = 0xc018_b900_u32 as libc::Ioctl;
/// `_IOWR(0xB9, 1, struct ksm_hash)`
const IOC_HASH: libc::Ioctl = 0xc040_b901_u32 as libc::Ioctl;
const KEEP_ONE: u32 = 1 << 0;
const KEEP_ZERO: u32 = 1 << 1;
/// Ranges and pages of one call: some milliseconds, after which the caller is asked whether to go on. The kernel allows more.
const CALL_RANGES: usize = 1024;
const CALL_PAGES: u32 = 4096;
/// Calls in a row that do nothing, because a signal ends them, before the rest is left untried.
const IN_VAIN_MOST: u32 = 1000;
/// If a call of so many pages finds only pages that differ, the rest is left untried: the digests by which they were named say nothing.
const DIFFERING_MOST: usize = 1024;

/// `struct ksm_merge_range`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawRange {
    keep_addr: u64,
    take_addr: u64,
    nr_pages: u64,
    page_status: u64,
    nr_done: u64,
    nr_merged: u64,
    keep_pidfd: i32,
    take_pidfd: i32,
    flags: u32,
    status: i32,
    reserved: u64,
}

/// `struct ksm_merge`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawMerge {
    version: u32,
    range_size: u32,
    ranges: u64,
    nr_ranges: u32,
    reserved: u32,
}

/// `struct ksm_hash`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawHash {
    version: u32,
    flags: u32,
    pidfd: i32,
    from: u16,
    to: u16,
    reserved: u64,
    addr: u64,
    nr_pages: u64,
    key: u64,
    hashes: u64,
    nr_done: u64,
}

const RANGE_SIZE: u32 = 72;
const _: () = assert!(size_of::<RawRange>() == RANGE_SIZE as usize && size_of::<RawMerge>() == 24);
const _: () = assert!(size_of::<RawHash>() == 64);

/// Why merging on request cannot be used.
#[derive(Debug, Error)]
pub enum RequestError {
    /// The file does not exist.
    #[error("{} does not exist: this kernel cannot merge on request", path.display())]
    Absent { path: PathBuf },
    /// Access is denied.
    #[error("not permitted to open {}", path.display())]
    Denied { path: PathBuf },
    /// The file is not the device.
    #[error("{} is not KSM's device", path.display())]
    Other { path: PathBuf },
    /// The device has another interface.
    #[error("{} has another version of the interface than {ABI_VERSION}", path.display())]
    Version { path: PathBuf },
    /// Any other failure.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// What provides the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The kernel itself, built with the series.
    Series,
    /// The module `ksm_request`.
    Module,
}

impl Carrier {
    /// What provides a device that is there. `sys` is `/sys`.
    pub fn of(sys: &Path) -> Self {
        if sys.join("module/ksm_request").exists() { Self::Module } else { Self::Series }
    }
}

/// What replaces the pages of a range.
#[derive(Clone, Copy, Debug)]
pub enum Kept<'a> {
    /// As many pages, from this address of this process on.
    Run(BorrowedFd<'a>, u64),
    /// The one page at this address of this process.
    Page(BorrowedFd<'a>, u64),
    /// The kernel's zero page.
    Zero,
}

/// Consecutive pages to merge with others.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// A pidfd of the process whose pages are replaced.
    pub process: BorrowedFd<'a>,
    /// The address of the first one.
    pub address: u64,
    /// Their number.
    pub pages: u32,
    /// What replaces them.
    pub kept: Kept<'a>,
}

/// What came of merging ranges.
#[derive(Debug, Default)]
pub struct Merged {
    /// For each page of the ranges, in their order.
    pub pages: Vec<Merging>,
    /// The first error of the kernel, if there was one.
    pub error: Option<io::Error>,
}

/// Consecutive pages to hash in place.
#[derive(Clone, Copy, Debug)]
pub struct Hashed<'a> {
    /// A pidfd of their process.
    pub process: BorrowedFd<'a>,
    /// The address of the first one.
    pub address: u64,
    /// The key of the hash, which determines the order of the lines, too.
    pub key: u64,
    /// The number of cache lines in the hashes there are already; 0 if there are none.
    pub from: u32,
    /// The number of cache lines that they shall have.
    pub to: u32,
}

/// The device, open.
#[derive(Debug)]
pub struct RequestDevice {
    file: File,
    hashes: bool,
}

impl RequestDevice {
    /// Opens the device and checks that it has the interface of this program.
    pub fn open(path: &Path) -> Result<Self, RequestError> {
        let at = || path.to_owned();
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => RequestError::Absent { path: at() },
            io::ErrorKind::PermissionDenied => RequestError::Denied { path: at() },
            // No driver has that number, or a directory.
            _ if matches!(source.raw_os_error(), Some(libc::ENXIO | libc::ENODEV | libc::EISDIR)) => {
                RequestError::Other { path: at() }
            }
            _ => RequestError::Io { path: at(), source },
        })?;
        let metadata = file.metadata().map_err(|source| RequestError::Io { path: at(), source })?;
        if !metadata.file_type().is_char_device() {
            return Err(RequestError::Other { path: at() });
        }
        let mut device = Self { file, hashes: false };
        match device.call(&mut [], &mut []) {
            Ok(_) => {
                // That there is no page is the error of a kernel that knows the call.
                let refused =
                    device.call_hash(&mut RawHash { version: ABI_VERSION, pidfd: -1, ..RawHash::default() }, &mut []);
                device.hashes = refused.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
                Ok(device)
            }
            // The number of a call has the size of its argument.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
                Err(RequestError::Version { path: at() })
            }
            Err(source) => Err(RequestError::Io { path: at(), source }),
        }
    }

    /// Merges ranges. Can block on the processes, for example on the locks of their memory maps. Before each call to the
    /// kernel, which takes some milliseconds, `go_on` is asked whether to make it.
    pub fn merge(&self, ranges: &[Range<'_>], go_on: impl FnMut() -> bool) -> Merged {
        merge_by(|raw, statuses| self.call(raw, statuses), ranges, go_on)
    }

    /// Whether it hashes pages in place. A kernel that has only the patches for merging does not.
    pub fn hashes(&self) -> bool {
        self.hashes
    }

    /// Hashes as many pages as there are `hashes`, without reading, unsharing or faulting them in. A hash of 0 is none: no
    /// anonymous page is there, or one that can never be merged; with `from` not 0, such pages are passed over. Can block on
    /// the lock of the process's memory map. Each call to the kernel takes some milliseconds.
    ///
    /// # Errors
    /// The kernel's: ESRCH if the process has ended, EACCES or EPERM if it must not be read.
    pub fn hash(&self, pages: &Hashed<'_>, hashes: &mut [u64]) -> io::Result<()> {
        hash_by(|raw, hashes| self.call_hash(raw, hashes), pages, hashes)
    }

    fn call_hash(&self, raw: &mut RawHash, hashes: &mut [u64]) -> io::Result<()> {
        raw.hashes = address_of(hashes.as_mut_ptr());
        raw.nr_pages = count(hashes.len());
        // SAFETY: the call reads and writes `raw`, and reads and writes `nr_pages` hashes, which is the length of `hashes`. Both
        // are borrowed for the time of the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_HASH, std::ptr::from_mut(raw)) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// One call. `statuses` receives the outcomes of the pages of all ranges, in their order. Returns the number of ranges done.
    fn call(&self, ranges: &mut [RawRange], statuses: &mut [u8]) -> io::Result<usize> {
        let mut rest = statuses;
        for range in &mut *ranges {
            let pages = usize::try_from(range.nr_pages).ok().filter(|&pages| pages <= rest.len());
            let (own, others) = rest.split_at_mut(pages.ok_or(io::ErrorKind::InvalidInput)?);
            range.page_status = address_of(own.as_mut_ptr());
            rest = others;
        }
        let mut argument = RawMerge {
            version: ABI_VERSION,
            range_size: RANGE_SIZE,
            ranges: address_of(ranges.as_mut_ptr()),
            nr_ranges: u32::try_from(ranges.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            reserved: 0,
        };
        // SAFETY: the call reads `argument`, reads and writes the ranges, of which it has the number, and writes `nr_pages`
        // bytes for each, which are parts of `statuses`. All of it is borrowed for the time of the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_MERGE, &raw mut argument) };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

fn address_of<T>(at: *mut T) -> u64 {
    at.expose_provenance() as u64
}

/// [`RequestDevice::merge`] by a function that does what the kernel does.
fn merge_by(
    mut call: impl FnMut(&mut [RawRange], &mut [u8]) -> io::Result<usize>,
    ranges: &[Range<'_>],
    mut go_on: impl FnMut() -> bool,
) -> Merged {
    let all: usize = ranges.iter().map(|range| range.pages as usize).sum();
    let mut merged = Merged { pages: Vec::with_capacity(all), error: None };
    let mut raw = Vec::with_capacity(ranges.len().min(CALL_RANGES));
    let mut statuses = vec![0; all.min(CALL_PAGES as usize)];
    // The first range that is not done, and how many of its pages are. Calls in a row that did nothing.
    let (mut at, mut skip, mut in_vain) = (0, 0, 0);
    while at < ranges.len() && in_vain < IN_VAIN_MOST && go_on() {
        raw.clear();
        statuses.fill(0);
        let mut room = CALL_PAGES;
        for (number, range) in ranges[at..].iter().enumerate().take(CALL_RANGES) {
            let skip = if number == 0 { skip } else { 0 };
            let pages = (range.pages - skip).min(room);
            room -= pages;
            raw.push(range.raw(skip, pages));
            if room == 0 {
                break;
            }
        }
        let done = match call(&mut raw, &mut statuses) {
            Ok(done) => done.min(raw.len()),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => 0,
            Err(error) => {
                merged.error.get_or_insert(error);
                break;
            }
        };
        let (before, begun) = ((at, skip), merged.pages.len());
        let mut own = statuses.as_slice();
        for raw in &raw[..done] {
            let tried = u32::try_from(raw.nr_done.min(raw.nr_pages)).unwrap_or(0);
            let (statuses, others) = own.split_at(usize::try_from(raw.nr_pages).unwrap_or(0).min(own.len()));
            merged.pages.extend(statuses[..tried as usize].iter().map(|&status| outcome(status)));
            own = others;
            skip += tried;
            if raw.status != 0 {
                let error = io::Error::from_raw_os_error(raw.status.saturating_neg());
                let rest = (ranges[at].pages - skip) as usize;
                merged.pages.extend(std::iter::repeat_n(refusal(&error), rest));
                merged.error.get_or_insert(error);
                skip = ranges[at].pages;
            }
            if skip < ranges[at].pages {
                // The call ended early, or had no room for all of it.
                break;
            }
            (at, skip) = (at + 1, 0);
        }
        in_vain = if (at, skip) == before { in_vain + 1 } else { 0 };
        let pages = &merged.pages[begun..];
        if pages.len() >= DIFFERING_MOST && pages.iter().all(|merging| *merging == Merging::Differs) {
            break;
        }
    }
    merged.pages.resize(all, Merging::Untried);
    merged
}

/// [`RequestDevice::hash`] by a function that does what the kernel does.
fn hash_by(
    mut call: impl FnMut(&mut RawHash, &mut [u64]) -> io::Result<()>,
    pages: &Hashed<'_>,
    hashes: &mut [u64],
) -> io::Result<()> {
    let lines = |lines: u32| u16::try_from(lines).map_err(|_| io::ErrorKind::InvalidInput);
    let (from, to) = (lines(pages.from)?, lines(pages.to)?);
    let (mut at, mut in_vain) = (0, 0);
    while at < hashes.len() {
        let end = hashes.len().min(at + CALL_PAGES as usize);
        let mut raw = RawHash {
            version: ABI_VERSION,
            pidfd: pages.process.as_raw_fd(),
            from,
            to,
            addr: pages.address.wrapping_add(count(at) * PAGE_BYTES),
            key: pages.key,
            ..RawHash::default()
        };
        let done = match call(&mut raw, &mut hashes[at..end]) {
            Ok(()) => usize::try_from(raw.nr_done).unwrap_or(0).min(end - at),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => 0,
            Err(error) => return Err(error),
        };
        at += done;
        in_vain = if done == 0 { in_vain + 1 } else { 0 };
        if in_vain >= IN_VAIN_MOST {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}

impl Range<'_> {
    /// A part of it.
    fn raw(&self, skip: u32, pages: u32) -> RawRange {
        let behind = |address: u64| address.wrapping_add(u64::from(skip) * PAGE_BYTES);
        let (keep_pidfd, keep_addr, flags) = match self.kept {
            Kept::Run(process, address) => (process.as_raw_fd(), behind(address), 0),
            Kept::Page(process, address) => (process.as_raw_fd(), address, KEEP_ONE),
            Kept::Zero => (-1, 0, KEEP_ZERO),
        };
        RawRange {
            keep_addr,
            take_addr: behind(self.address),
            nr_pages: pages.into(),
            keep_pidfd,
            take_pidfd: self.process.as_raw_fd(),
            flags,
            ..RawRange::default()
        }
    }
}

/// `enum ksm_page_status`. What a later version may add is taken for a page that was not tried.
fn outcome(status: u8) -> Merging {
    match status {
        1 => Merging::Merged,
        2 => Merging::Shared,
        3 => Merging::Differs,
        4 | 8 => Merging::Absent,
        5 => Merging::Busy,
        6 => Merging::Ineligible,
        7 => Merging::Full,
        _ => Merging::Untried,
    }
}

/// The outcome of pages that an error of their range has kept from being tried.
fn refusal(error: &io::Error) -> Merging {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => Merging::Busy,
        _ => Merging::Untried,
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
