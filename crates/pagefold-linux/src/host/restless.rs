//! Detects processes that map and unmap memory all the time.

use crate::proc::process::ReadError;

/// Reads of the size of a process to detect that it maps and unmaps all the time: some 400 us together.
const SIZE_READS: u32 = 256;
/// It does if its size has decreased this often meanwhile: some 5,000 times a second. Growing is no sign of it.
const SHRINKS: u32 = 2;
/// Shortest time between such checks, nanoseconds, and how long a process is left alone after a positive one.
const RESTLESS_CHECK_NS: u64 = 1_000_000_000;
pub(crate) const RESTLESS_NS: u64 = 10_000_000_000;

/// Detects processes that map and unmap all the time. They, reads of them and ksmd compete for their mmap lock: a program
/// that maps 200,000 times a second fell to an eighth of its speed while a gigabyte of it was being merged, and ksmd to
/// a tenth (6.18).
#[derive(Debug, Default)]
pub(super) struct Restless {
    /// Address space at the last call, pages.
    mapped: Option<u64>,
    next_check_ns: u64,
    until_ns: u64,
}

impl Restless {
    /// Whether the process maps and unmaps all the time, or has done so recently. `mapped` is the size of its address space,
    /// which `read_mapped` reads again.
    pub(super) fn check(
        &mut self,
        now_ns: u64,
        mapped: u64,
        mut read_mapped: impl FnMut() -> Result<u64, ReadError>,
    ) -> Result<bool, ReadError> {
        let differs = self.mapped.replace(mapped) != Some(mapped);
        if differs && now_ns >= self.next_check_ns {
            self.next_check_ns = now_ns + RESTLESS_CHECK_NS;
            let (mut before, mut shrinks) = (mapped, 0);
            for _ in 0..SIZE_READS {
                let mapped = read_mapped()?;
                shrinks += u32::from(mapped < before);
                before = mapped;
            }
            if shrinks >= SHRINKS {
                self.until_ns = now_ns + RESTLESS_NS;
            }
        }
        Ok(now_ns < self.until_ns)
    }
}
