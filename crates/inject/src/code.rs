//! Reads a target's code without causing page faults.
//!
//! Reading a file's page that isn't mapped yet makes the kernel ask the file system, and reading a page registered with
//! userfaultfd makes it ask a program. Either may never answer, and then the read blocks with the target's mmap lock
//! held (`get_user_page_vma_remote`, mm/gup.c). So we only read pages that pagemap shows as mapped. The target can
//! still unmap a page just before we read it, so we give up an attempt that gets stuck ([`pagefold_procmem::stalls`]).

use pagefold_engine::units::{PAGE_BYTES, PAGE_SIZE, Vpn, count};
use pagefold_procmem::pagemap::{Pagemap, PagemapEntry};
use pagefold_procmem::process::{Process, ReadError};
use std::fs::File;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;

/// How many pages we look up in pagemap, and read, at once.
const CHUNK_PAGES: usize = 32;
const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_SIZE;
/// Consecutive pieces overlap by this many bytes, so a search finds code of up to this length across their boundary.
const OVERLAP: usize = 16;

#[derive(Debug)]
pub struct Code {
    memory: File,
    pagemap: Pagemap,
}

impl Code {
    /// Opens the process's memory through the /proc files of its thread `tid`: the process's own files are empty once
    /// its main thread has ended.
    pub fn open(process: &Process, tid: i32) -> Result<Self, ReadError> {
        let memory = process.open_file(&format!("task/{tid}/mem"))?;
        Ok(Self { memory, pagemap: Pagemap::open_file(process, &format!("task/{tid}/pagemap"))? })
    }

    /// Fills `bytes` (at most a page) with the code at `at`. Returns false if part of that isn't mapped or readable.
    pub fn read(&self, bytes: &mut [u8], at: u64) -> bool {
        let Some(last_byte) = at.checked_add(count(bytes.len()).saturating_sub(1)) else { return false };
        let mut entries = [0; 2];
        let first = Vpn::of_address(at);
        let last = Vpn::of_address(last_byte);
        let pages = if first == last { 1 } else { 2 };
        self.pagemap.read(first, &mut entries[..pages]).is_ok()
            && entries[..pages].iter().all(|&entry| PagemapEntry(entry).present())
            && self.memory.read_exact_at(bytes, at).is_ok()
    }

    /// Calls `each` with every mapped piece of the range and its address, until `each` breaks. Consecutive pieces
    /// overlap. `provided`: the kernel itself provides the range (the vDSO), so reading it never blocks, mapped or not.
    ///
    /// # Errors
    /// If the memory is gone.
    pub fn search(
        &self,
        range: Range<u64>,
        provided: bool,
        mut each: impl FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let mut buffer = vec![0; OVERLAP + CHUNK_BYTES];
        let mut entries = [0; CHUNK_PAGES];
        let mut at = range.start;
        // How many bytes of the previous piece we've kept, in front of the next one.
        let mut head = 0;
        while at < range.end {
            let left = range.end - at;
            let pages = usize::try_from(left.div_ceil(PAGE_BYTES)).unwrap_or(CHUNK_PAGES).min(CHUNK_PAGES);
            self.pagemap.read(Vpn::of_address(at), &mut entries[..pages])?;
            for run in entries[..pages].chunk_by(|&a, &b| provided || is_mapped(a) == is_mapped(b)) {
                let bytes = (run.len() * PAGE_SIZE).min(usize::try_from(range.end - at).unwrap_or(CHUNK_BYTES));
                let wanted = OVERLAP..OVERLAP + bytes;
                let is_read = provided || is_mapped(run[0]);
                let read = if is_read { self.memory.read_at(&mut buffer[wanted], at) } else { Ok(0) };
                let read = match read {
                    Ok(read) => read,
                    // The page is beyond the end of its file, or belongs to a device.
                    Err(error) if error.raw_os_error() == Some(libc::EIO) => 0,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                    Err(error) => return Err(self.pagemap.error("mem", error)),
                };
                let from = OVERLAP - head;
                if read > 0 && each(at - count(head), &buffer[from..OVERLAP + read]).is_break() {
                    return Ok(());
                }
                head = if read == bytes && read >= OVERLAP { OVERLAP } else { 0 };
                buffer.copy_within(read..read + head, 0);
                at += count(bytes);
            }
        }
        Ok(())
    }
}

fn is_mapped(entry: u64) -> bool {
    PagemapEntry(entry).present()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    fn own() -> Code {
        let pid = i32::try_from(std::process::id()).unwrap();
        Code::open(&Process::open(pid).unwrap(), pid).unwrap()
    }

    /// Maps this many pages of a file privately. None of them is populated yet.
    pub fn unmapped(pages: usize) -> u64 {
        let file = File::open("/proc/self/exe").unwrap();
        // SAFETY: a new mapping, not yet used by anything.
        let memory = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let memory = libc::mmap(std::ptr::null_mut(), pages * PAGE_SIZE, access, libc::MAP_PRIVATE, fd, 0);
            libc::madvise(memory, pages * PAGE_SIZE, libc::MADV_RANDOM);
            memory
        };
        count(memory.expose_provenance())
    }

    fn write(at: u64, bytes: &[u8]) {
        // SAFETY: within the mapping that the test has made.
        unsafe {
            let to = std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    #[test]
    fn only_mapped_pages_are_read() {
        let (code, pages) = (own(), 100_u64);
        let start = unmapped(100);
        for page in [0, 1, 31, 32, 50, 99] {
            write(start + page * PAGE_BYTES, b"x");
        }
        write(start + 2 * PAGE_BYTES - 3, b"across");
        let mut seen = Vec::new();
        let end = start + pages * PAGE_BYTES;
        code.search(start..end, false, |at, bytes| {
            seen.push(((at - start) / PAGE_BYTES, bytes.len().div_ceil(PAGE_SIZE)));
            ControlFlow::Continue(())
        })
        .unwrap();
        // Writing "across" mapped page 2. The piece that starts with page 32 begins with the last bytes of page 31.
        assert_eq!(seen, [(0, 3), (31, 1), (31, 2), (50, 1), (99, 1)]);
        let mut byte = [0; 8];
        assert!(code.read(&mut byte, start) && byte[0] == b'x');
        assert!(!code.read(&mut byte, start + 10 * PAGE_BYTES), "not mapped");
        assert!(!code.read(&mut byte, start + 3 * PAGE_BYTES - 4), "the second half is not mapped");
        let mut entries = [0; 100];
        code.pagemap.read(Vpn::of_address(start), &mut entries).unwrap();
        assert_eq!(entries.iter().filter(|&&entry| PagemapEntry(entry).present()).count(), 7, "reading maps nothing");
    }
}
