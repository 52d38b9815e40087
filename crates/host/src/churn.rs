//! Detects processes that map and unmap memory all the time.

use pagefold_procmem::process::ReadError;

/// We read a process's size this many times in a row, which takes some 400 us, to see whether it maps and unmaps all
/// the time.
const SIZE_READS: u32 = 256;
/// A process maps and unmaps all the time if its size shrinks this many times during these reads: some 5,000 times a
/// second. Growing proves nothing.
const SHRINKS: u32 = 2;
/// One positive check isn't enough: a program that starts, or frees a few buffers, shrinks as often for a moment. A second
/// one must follow within this time, nanoseconds; until then we check whenever the size has changed.
const SUSPECT_NS: u64 = 60_000_000_000;
/// We make the first checks, this many, whenever the size has changed. Later checks are further apart. One check isn't
/// enough, because a program that waits for a processor meanwhile maps nothing.
const FIRST_CHECKS: u32 = 16;
/// The shortest time between later checks, nanoseconds, and how long we leave a process alone after a positive check.
const CHECK_NS: u64 = 1_000_000_000;
pub(crate) const LEFT_ALONE_NS: u64 = 10_000_000_000;

/// Detects processes that map and unmap all the time. Such a process, our reads of it and ksmd compete for its mmap
/// lock. While we merged a gigabyte of a program that maps 200,000 times a second, the program fell to an eighth of its
/// speed, and ksmd to a tenth (Linux 6.18).
#[derive(Debug, Default)]
pub(super) struct ChurnDetector {
    /// Address space at the last call, pages.
    mapped: Option<u64>,
    checks: u32,
    next_check_ns: u64,
    /// Until then, another positive check proves that the process maps and unmaps all the time.
    suspect_until_ns: u64,
    until_ns: u64,
}

impl ChurnDetector {
    /// Whether the process maps and unmaps all the time, or has done so recently. `mapped` is the size of its address
    /// space; `read_mapped` reads the size again.
    pub(super) fn check(
        &mut self,
        now_ns: u64,
        mapped: u64,
        mut read_mapped: impl FnMut() -> Result<u64, ReadError>,
    ) -> Result<bool, ReadError> {
        let differs = self.mapped.replace(mapped) != Some(mapped);
        let is_suspect = now_ns < self.suspect_until_ns;
        if differs && (is_suspect || self.checks < FIRST_CHECKS || now_ns >= self.next_check_ns) {
            self.checks += 1;
            self.next_check_ns = now_ns + CHECK_NS;
            let mut before = mapped;
            let mut shrinks = 0;
            for _ in 0..SIZE_READS {
                let mapped = read_mapped()?;
                shrinks += u32::from(mapped < before);
                before = mapped;
            }
            if shrinks >= SHRINKS {
                if is_suspect {
                    self.until_ns = now_ns + LEFT_ALONE_NS;
                }
                self.suspect_until_ns = now_ns + SUSPECT_NS;
            }
        }
        Ok(self.is_restless(now_ns))
    }

    /// Whether the last checks found that the process maps and unmaps all the time.
    pub(super) fn is_restless(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_at_the_start_proves_nothing() {
        let mut churn = ChurnDetector::default();
        for at_ns in [0, SUSPECT_NS, 2 * SUSPECT_NS] {
            let mut sizes = [3_000, 2_000, 1_000].into_iter();
            assert!(!churn.check(at_ns, at_ns, || Ok(sizes.next().unwrap_or(1_000))).unwrap());
        }
    }

    #[test]
    fn a_process_that_was_waiting_for_a_processor_is_checked_again_at_once() {
        let mut churn = ChurnDetector::default();
        let mut sizes = (0..).map(|at| 1_000 + at % 2);
        assert!(!churn.check(0, 2, || Ok(sizes.next().unwrap())).unwrap(), "once proves nothing");
        for number in 1..u64::from(FIRST_CHECKS) {
            let waits = number + 1 < u64::from(FIRST_CHECKS);
            let reads = || Ok(if waits { 1_000 } else { sizes.next().unwrap() });
            assert_eq!(churn.check(number * 1_000_000, number % 2, reads).unwrap(), !waits);
        }
        let mut quiet = ChurnDetector::default();
        let mut reads = 0;
        for number in 0..u64::from(FIRST_CHECKS) * 2 {
            let read = || {
                reads += 1;
                Ok(1_000)
            };
            assert!(!quiet.check(number * 1_000_000, number % 2, read).unwrap());
        }
        assert_eq!(reads, FIRST_CHECKS * SIZE_READS, "later checks wait for a second");
    }
}
