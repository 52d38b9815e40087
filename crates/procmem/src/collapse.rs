//! Rebuilds huge pages where a process had them.
//!
//! Merging one page of a huge page splits the huge page, and unmerging leaves small pages.
//! `process_madvise(MADV_COLLAPSE)` (Linux 6.1) copies the small pages into a huge page while the process keeps
//! running. The call ignores khugepaged's limits: it would also fill holes and copy fork-shared pages
//! (`madvise_collapse`, mm/khugepaged.c), which takes memory. So we only collapse extents whose pages are all present
//! and mapped once. If the process changes some of them between our check and the call, the huge page takes up to 2 MiB
//! more, as it could with khugepaged.

use crate::Roots;
use crate::headroom::headroom;
use crate::os::fields::chosen;
use crate::pagemap::{Pagemap, PagemapEntry};
use crate::process::{Process, ReadError};
use pagefold_engine::units::{Bytes, EXTENT_PAGES, PAGE_SIZE, Vpn};
use std::os::fd::AsRawFd;

/// Linux 6.1, include/uapi/asm-generic/mman-common.h.
const MADV_COLLAPSE: i32 = 25;
const PAGES: usize = 512;
const _: () = assert!(PAGES as u64 == EXTENT_PAGES);
const BYTES: usize = PAGES * PAGE_SIZE;
/// We only collapse an extent if the process's memory limits leave this much: the new huge page exists beside the old
/// pages for a while, and other programs need a margin.
const ROOM: Bytes = Bytes(36 << 20);

/// Whether huge pages are enabled at all. MADV_COLLAPSE itself ignores this setting.
pub fn is_wanted() -> bool {
    let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    matches!(chosen(&mode), Some(mode) if mode != "never")
}

/// The first page of each 2 MiB extent that lies within a range of addresses, in order.
pub fn extents(start: u64, end: u64) -> impl Iterator<Item = Vpn> {
    let bytes = BYTES as u64;
    let first = start.checked_next_multiple_of(bytes).unwrap_or(u64::MAX);
    let whole = end.saturating_sub(first) / bytes;
    (0..whole).map(move |number| Vpn::of_address(first + number * bytes))
}

/// Collapses extents of a process if its memory limits leave enough. Returns how many it collapsed. Needs CAP_SYS_NICE
/// for processes other than ours.
///
/// # Errors
/// If we can't read the process. Extents that the kernel refuses to collapse stay as they are.
pub fn collapse(process: &Process, extents: &[Vpn], roots: &Roots) -> Result<u64, ReadError> {
    let pagemap = Pagemap::open(process)?;
    let mut done = 0;
    for &first in extents {
        let mut entries = [0; PAGES];
        pagemap.read(first, &mut entries)?;
        if !entries.iter().all(|&entry| PagemapEntry(entry).private())
            || headroom(process, &roots.proc, &roots.cgroup)?.left < ROOM
        {
            continue;
        }
        let range = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(usize::try_from(first.address()).unwrap_or(0)),
            iov_len: BYTES,
        };
        let pidfd = process.pidfd()?.as_raw_fd();
        // SAFETY: the kernel reads one iovec, which outlives the call. The iovec's address is in the other process,
        // where no byte changes.
        let advised =
            unsafe { libc::syscall(libc::SYS_process_madvise, pidfd, &raw const range, 1_usize, MADV_COLLAPSE, 0_u32) };
        done += u64::from(usize::try_from(advised) == Ok(range.iov_len));
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Aligned extents of this process's memory. We don't advise huge pages, so khugepaged leaves the extents alone if
    /// it's set to `madvise`.
    struct Memory {
        at: *mut u8,
        extents: usize,
    }

    impl Memory {
        fn new(extents: usize) -> Self {
            let bytes = (extents + 1) * BYTES;
            // SAFETY: a new private mapping, which is never unmapped.
            let at = unsafe {
                let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                let at = libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0);
                assert_ne!(at, libc::MAP_FAILED);
                at.cast::<u8>()
            };
            Self { at: at.wrapping_add(at.align_offset(BYTES)), extents }
        }

        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: the whole range is mapped, and nothing else refers to it.
            unsafe { std::slice::from_raw_parts_mut(self.at, self.extents * BYTES) }
        }

        fn advise(&mut self, extent: usize, pages: usize, advice: i32) {
            let at = self.bytes()[extent * BYTES..].as_mut_ptr();
            // SAFETY: the range is part of our own mapping, and we don't mind if its contents become zeros.
            assert_eq!(unsafe { libc::madvise(at.cast(), pages * PAGE_SIZE, advice) }, 0);
        }
    }

    #[test]
    fn extents_are_aligned_and_whole() {
        let mib = 1 << 20;
        let found = |start, end| extents(start, end).map(|first| first.address() / mib).collect::<Vec<_>>();
        assert_eq!(found(mib, 7 * mib), [2, 4]);
        assert_eq!(found(2 * mib, 6 * mib), [2, 4]);
        assert!(
            found(3 * mib, 5 * mib).is_empty() && found(mib, mib).is_empty() && found(u64::MAX, u64::MAX).is_empty()
        );
    }

    #[test]
    fn only_extents_whose_pages_are_all_its_own_are_collapsed() {
        if !is_wanted() {
            return pagefold_testkit::skip("the kernel makes no huge pages");
        }
        let mut memory = Memory::new(3);
        // Other tests may fork at the same time, and a fork would share these pages.
        memory.advise(0, 3 * PAGES, libc::MADV_DONTFORK);
        memory.advise(2, PAGES, libc::MADV_NOHUGEPAGE);
        memory.bytes().iter_mut().step_by(PAGE_SIZE).enumerate().for_each(|(page, byte)| *byte = page.to_le_bytes()[0]);
        let before = memory.bytes().to_vec();
        // A hole.
        memory.advise(1, 1, libc::MADV_DONTNEED);
        let start = memory.at.expose_provenance() as u64;
        let wanted: Vec<Vpn> = extents(start, start + 3 * (2 << 20)).collect();
        assert_eq!(wanted.len(), 3);
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(collapse(&own, &wanted, &Roots::default()).unwrap(), 1);
        let mut entries = [0; PAGES];
        Pagemap::open(&own).unwrap().read(wanted[1], &mut entries).unwrap();
        assert!(!PagemapEntry(entries[0]).present(), "the hole was filled");
        let unchanged = |extent: usize| {
            let range = extent * BYTES..(extent + 1) * BYTES;
            (range.clone(), before[range].to_vec())
        };
        for (range, expected) in [unchanged(0), unchanged(2)] {
            assert!(memory.bytes()[range] == expected);
        }
    }
}
