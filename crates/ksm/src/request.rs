//! `/dev/ksm`, by which we ask the kernel to merge pairs of pages, and to hash pages without our reading them.
//!
//! `kernel/include/linux/ksm.h` defines the interface. Kernels with the series in `kernel/patches` provide it, and
//! stock kernels with the module in `kernel/dkms`. The kernel compares pages under its locks before it merges them, so
//! a wrong request only costs time.

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
/// How many ranges and pages we pass in one call, at most. Such a call takes some milliseconds, and then we ask our
/// caller whether to go on. The kernel would allow more.
const CALL_RANGES: usize = 1024;
const CALL_PAGES: u32 = 4096;
/// If a signal ends this many calls in a row before they do anything, we leave the rest untried.
const IN_VAIN_MOST: u32 = 1000;
/// If a call of at least this many pages finds that all differ, we leave the rest untried: the digests by which we
/// chose them are worthless.
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
    keep_mappers: u32,
    reserved: u32,
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

/// Why we can't merge on request.
#[derive(Debug, Error)]
pub enum RequestError {
    #[error("{} does not exist: this kernel cannot merge on request", path.display())]
    Absent { path: PathBuf },
    #[error("not permitted to open {}", path.display())]
    Denied { path: PathBuf },
    #[error("{} is not KSM's device", path.display())]
    Other { path: PathBuf },
    #[error("{} does not have version {ABI_VERSION} of the interface", path.display())]
    Version { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl RequestError {
    fn from_io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Absent { path },
            io::ErrorKind::PermissionDenied => Self::Denied { path },
            // There's no driver for that device number, or it's a directory.
            _ if matches!(source.raw_os_error(), Some(libc::ENXIO | libc::ENODEV | libc::EISDIR)) => {
                Self::Other { path }
            }
            _ => Self::Io { path, source },
        }
    }
}

/// Who provides `/dev/ksm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The kernel itself, built with our patch series.
    Series,
    Module,
}

impl Carrier {
    /// Who provides the device, if it exists. `sys` is `/sys`.
    pub fn of(sys: &Path) -> Self {
        if sys.join("module/ksm_request").exists() { Self::Module } else { Self::Series }
    }
}

/// What replaces the pages of a range.
#[derive(Clone, Copy, Debug)]
pub enum Kept<'a> {
    /// The pages of this process from this address on, one for each page of the range.
    Run(BorrowedFd<'a>, u64),
    /// The page at this address of this process, for all pages of the range.
    Page(BorrowedFd<'a>, u64),
    /// The kernel's zero page.
    Zero,
}

/// Consecutive pages to replace, and their replacement.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// A pidfd of the process whose pages are replaced.
    pub process: BorrowedFd<'a>,
    pub address: u64,
    pub pages: u32,
    pub kept: Kept<'a>,
    /// If the kept page isn't merged yet, the kernel merges with it only if at most this many processes map it. 0: any
    /// number, or the zero page is kept.
    pub keep_mappers: u32,
}

/// The outcome of merging ranges.
#[derive(Debug, Default)]
pub struct Merged {
    /// The outcome for each page of the ranges, in order.
    pub pages: Vec<Merging>,
    /// The kernel's first error, if there was one.
    pub error: Option<io::Error>,
}

/// Consecutive pages to hash in place.
#[derive(Clone, Copy, Debug)]
pub struct Hashed<'a> {
    pub process: BorrowedFd<'a>,
    pub address: u64,
    /// The key of the hash. It also determines in which order the kernel hashes a page's cache lines.
    pub key: u64,
    /// How many cache lines of each page the present hashes cover; 0 if there are none yet.
    pub from: u32,
    /// How many cache lines of each page the new hashes are to cover.
    pub to: u32,
}

#[derive(Debug)]
pub struct RequestDevice {
    file: File,
    hashes: bool,
}

impl RequestDevice {
    /// Opens the device and checks that it has our version of the interface.
    pub fn open(path: &Path) -> Result<Self, RequestError> {
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = opened.map_err(|source| RequestError::from_io(path, source))?;
        let path = path.to_owned();
        match file.metadata() {
            Ok(metadata) if metadata.file_type().is_char_device() => {}
            Ok(_) => return Err(RequestError::Other { path }),
            Err(source) => return Err(RequestError::Io { path, source }),
        }
        let mut device = Self { file, hashes: false };
        let nobody = RawRange { nr_pages: 1, keep_pidfd: -1, take_pidfd: -1, keep_mappers: 1, ..RawRange::default() };
        let mut ranges = [nobody];
        match device.call(&mut ranges, &mut [0]) {
            // The kernel doesn't know `keep_mappers`. If it did, it would report the invalid pidfds instead.
            Ok(_) if ranges[0].status == -libc::EINVAL => return Err(RequestError::Version { path }),
            Ok(_) => {}
            // The number of an ioctl contains the size of its argument, so if another version changed the structure's
            // size, it has another number.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
                return Err(RequestError::Version { path });
            }
            Err(source) => return Err(RequestError::Io { path, source }),
        }
        // If the kernel knows the call, it fails with EINVAL, because we pass no page.
        let refused = device.call_hash(&mut RawHash { version: ABI_VERSION, pidfd: -1, ..RawHash::default() }, &mut []);
        device.hashes = refused.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
        Ok(device)
    }

    /// Merges ranges. Can block on the processes, for example on their mmap locks. Each call to the kernel takes some
    /// milliseconds; before each, `go_on` decides whether to make it.
    pub fn merge(&self, ranges: &[Range<'_>], go_on: impl FnMut() -> bool) -> Merged {
        merge_by(|raw, statuses| self.call(raw, statuses), ranges, go_on)
    }

    /// Whether the device hashes pages in place. A kernel with only the patches for merging doesn't.
    pub fn hashes(&self) -> bool {
        self.hashes
    }

    /// Hashes as many pages as there are `hashes`, without reading, unsharing or faulting them in. A hash of 0 means
    /// that the page has none, since it isn't anonymous or can never be merged. If `from` is above 0, the kernel skips
    /// pages with a hash of 0. Can block on the process's mmap lock. Each call to the kernel takes some milliseconds.
    ///
    /// # Errors
    /// The kernel's: ESRCH if the process has ended, EACCES or EPERM if we may not read it.
    pub fn hash(&self, pages: &Hashed<'_>, hashes: &mut [u64]) -> io::Result<()> {
        hash_by(|raw, hashes| self.call_hash(raw, hashes), pages, hashes)
    }

    fn call_hash(&self, raw: &mut RawHash, hashes: &mut [u64]) -> io::Result<()> {
        raw.hashes = address_of(hashes.as_mut_ptr());
        raw.nr_pages = count(hashes.len());
        // SAFETY: the call reads and writes `raw`, and reads and writes `nr_pages` hashes, which is the length of
        // `hashes`. We borrow both for the time of the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_HASH, std::ptr::from_mut(raw)) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes one call to the kernel. `statuses` receives the outcomes for the pages of all ranges, in order. Returns
    /// how many ranges are done.
    fn call(&self, ranges: &mut [RawRange], statuses: &mut [u8]) -> io::Result<usize> {
        let mut rest = statuses;
        for range in &mut *ranges {
            let pages = usize::try_from(range.nr_pages).unwrap_or(usize::MAX);
            let (own, others) = rest.split_at_mut_checked(pages).ok_or(io::ErrorKind::InvalidInput)?;
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
        // SAFETY: the call reads `argument`, reads and writes as many ranges as it says, and writes `nr_pages` bytes
        // for each, which are parts of `statuses`. We borrow all of it for the time of the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_MERGE, &raw mut argument) };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

fn address_of<T>(at: *mut T) -> u64 {
    at.expose_provenance() as u64
}

/// How far we've got: how many ranges are done, and how many pages of the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    ranges: usize,
    pages: u32,
}

/// [`RequestDevice::merge`], with a function in place of the kernel.
fn merge_by(
    mut call: impl FnMut(&mut [RawRange], &mut [u8]) -> io::Result<usize>,
    ranges: &[Range<'_>],
    mut go_on: impl FnMut() -> bool,
) -> Merged {
    let all: usize = ranges.iter().map(|range| range.pages as usize).sum();
    let mut merged = Merged { pages: Vec::with_capacity(all), error: None };
    let mut raw = Vec::with_capacity(ranges.len().min(CALL_RANGES));
    let mut statuses = vec![0; all.min(CALL_PAGES as usize)];
    let mut position = Position::default();
    let mut in_vain = 0;
    while position.ranges < ranges.len() && in_vain < IN_VAIN_MOST && go_on() {
        fill(&mut raw, ranges, position);
        statuses.fill(0);
        let done = match call(&mut raw, &mut statuses) {
            Ok(done) => done.min(raw.len()),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => 0,
            Err(error) => {
                merged.error.get_or_insert(error);
                break;
            }
        };
        let before = position;
        let begun = merged.pages.len();
        merged.add(&raw[..done], &statuses, ranges, &mut position);
        in_vain = if position == before { in_vain + 1 } else { 0 };
        let pages = &merged.pages[begun..];
        if pages.len() >= DIFFERING_MOST && pages.iter().all(|merging| *merging == Merging::Differs) {
            break;
        }
    }
    merged.pages.resize(all, Merging::Untried);
    merged
}

/// Puts the ranges of the next call into `raw`.
fn fill(raw: &mut Vec<RawRange>, ranges: &[Range<'_>], position: Position) {
    raw.clear();
    let mut skip = position.pages;
    let mut room = CALL_PAGES;
    for range in ranges[position.ranges..].iter().take(CALL_RANGES) {
        let pages = (range.pages - skip).min(room);
        room -= pages;
        raw.push(range.raw(skip, pages));
        skip = 0;
        if room == 0 {
            break;
        }
    }
}

impl Merged {
    /// Adds the results of the ranges that a call has done. The first one begins at `position`.
    fn add(&mut self, done: &[RawRange], mut statuses: &[u8], ranges: &[Range<'_>], position: &mut Position) {
        for raw in done {
            let all = ranges[position.ranges].pages;
            let tried = u32::try_from(raw.nr_done.min(raw.nr_pages)).unwrap_or(0);
            let own;
            (own, statuses) = statuses.split_at(usize::try_from(raw.nr_pages).unwrap_or(0).min(statuses.len()));
            self.pages.extend(own[..tried as usize].iter().map(|&status| outcome(status)));
            position.pages += tried;
            if raw.status != 0 {
                let error = io::Error::from_raw_os_error(raw.status.saturating_neg());
                self.pages.extend(std::iter::repeat_n(refusal(&error), (all - position.pages) as usize));
                self.error.get_or_insert(error);
                position.pages = all;
            }
            if position.pages < all {
                // The call ended early, or had no room for the whole range.
                break;
            }
            *position = Position { ranges: position.ranges + 1, pages: 0 };
        }
    }
}

/// [`RequestDevice::hash`], with a function in place of the kernel.
fn hash_by(
    mut call: impl FnMut(&mut RawHash, &mut [u64]) -> io::Result<()>,
    pages: &Hashed<'_>,
    hashes: &mut [u64],
) -> io::Result<()> {
    let from = u16::try_from(pages.from).map_err(|_| io::ErrorKind::InvalidInput)?;
    let to = u16::try_from(pages.to).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut at = 0;
    let mut in_vain = 0;
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
    fn raw(&self, skip: u32, pages: u32) -> RawRange {
        let offset = u64::from(skip) * PAGE_BYTES;
        let (keep_pidfd, keep_addr, flags) = match self.kept {
            Kept::Run(process, address) => (process.as_raw_fd(), address.wrapping_add(offset), 0),
            Kept::Page(process, address) => (process.as_raw_fd(), address, KEEP_ONE),
            Kept::Zero => (-1, 0, KEEP_ZERO),
        };
        RawRange {
            keep_addr,
            take_addr: self.address.wrapping_add(offset),
            nr_pages: pages.into(),
            keep_pidfd,
            take_pidfd: self.process.as_raw_fd(),
            flags,
            keep_mappers: self.keep_mappers,
            ..RawRange::default()
        }
    }
}

/// Decodes `enum ksm_page_status`. If a later version adds a status, we take the page as untried.
fn outcome(status: u8) -> Merging {
    match status {
        1 => Merging::Merged,
        2 => Merging::Shared,
        3 => Merging::Differs,
        4 | 8 => Merging::Absent,
        5 => Merging::Busy,
        6 => Merging::Ineligible,
        7 | 9 => Merging::Full,
        _ => Merging::Untried,
    }
}

/// The outcome for pages that the kernel didn't try because their range failed.
fn refusal(error: &io::Error) -> Merging {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => Merging::Busy,
        _ => Merging::Untried,
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
