//! The programs of the demonstration: a pool of workers. Each holds data that all others also hold, data of its own,
//! and zero pages.

use super::worker::{Worker, WorkerMemory};
use anyhow::{Context, Result, anyhow};
use pagefold_engine::units::{PAGE_SIZE, Pages};
use pagefold_procmem::Roots;
use pagefold_procmem::headroom::headroom;
use pagefold_procmem::os::fields::kib;
use pagefold_procmem::process::Process;
use pagefold_text::exit::{self, Exit};

/// Data that every worker holds, MiB.
const COMMON_MIB: u64 = 76;
/// Each worker's own data and zero pages, MiB. With the common data, 768 MiB in all.
const OWN_AND_ZERO_MIB: [(u64, u64); 6] = [(28, 16), (36, 8), (44, 12), (32, 20), (52, 8), (40, 16)];

/// This much memory must stay free while the workers run, MiB.
const MARGIN_MIB: u64 = 256;

/// The number of workers, and the divisor of their full size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    workers: usize,
    divisor: u64,
}

impl Size {
    const FULL: Self = Self { workers: 6, divisor: 1 };
    const QUICK: Self = Self { workers: 3, divisor: 8 };

    /// The largest size that fits into the free memory.
    pub fn that_fits(quick: bool) -> Result<Self> {
        let own = Process::open(i32::try_from(std::process::id()).unwrap_or(0))?;
        let roots = Roots::default();
        let free = headroom(&own, &roots.proc, &roots.cgroup)?.left.0;
        Self::largest_in(quick, free).with_context(|| {
            let mib = free >> 20;
            let line = format!("not enough memory for the demo: {mib} MiB are free; stop other programs and try again");
            Exit::new(exit::FAILURE, line)
        })
    }

    fn largest_in(quick: bool, free: u64) -> Option<Self> {
        let most = if quick { Self::QUICK } else { Self::FULL };
        let mut sizes = [1, 2, 4].map(|by| Self { divisor: most.divisor * by, ..most }).into_iter();
        sizes.find(|size| size.bytes() + (MARGIN_MIB << 20) <= free)
    }

    /// Whether we reduced the size to fit into the free memory.
    pub fn is_reduced(self, quick: bool) -> bool {
        self != if quick { Self::QUICK } else { Self::FULL }
    }

    pub fn bytes(self) -> u64 {
        self.memories().iter().map(|memory| memory.pages().bytes().0).sum()
    }

    fn memories(self) -> Vec<WorkerMemory> {
        let mut memories = Vec::new();
        for (own, zero) in &OWN_AND_ZERO_MIB[..self.workers] {
            memories.push(WorkerMemory {
                common: self.pages(COMMON_MIB),
                zero: self.pages(*zero),
                own: self.pages(*own),
            });
        }
        memories
    }

    fn pages(self, mib: u64) -> u64 {
        mib * ((1 << 20) / PAGE_SIZE as u64) / self.divisor
    }
}

/// The running workers. Dropping this ends them.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Worker>,
    pages: Pages,
}

impl Workers {
    /// Starts the workers in parallel, and waits until they've written their data.
    pub fn start(size: Size) -> Result<Self> {
        let memories = size.memories();
        let pages = memories.iter().map(|memory| memory.pages()).sum();
        let workers = memories.into_iter().map(Worker::start).collect::<Result<Vec<_>>>()?;
        for worker in &workers {
            worker.answer()?;
        }
        Ok(Self { workers, pages })
    }

    pub fn count(&self) -> usize {
        self.workers.len()
    }

    pub fn pids(&self) -> Vec<String> {
        self.workers.iter().map(|worker| worker.pid().to_string()).collect()
    }

    /// The workers' anonymous memory, with swap: the kernel divides shared pages, including merged ones, among their
    /// sharers (Pss).
    pub fn memory(&self) -> Result<u64> {
        let mut all = 0;
        for worker in &self.workers {
            let rollup = Process::open(worker.pid())?.read_file("smaps_rollup")?;
            for field in ["Pss_Anon", "SwapPss"] {
                all += kib(&rollup, field).map_err(|why| anyhow!("smaps_rollup: {why}"))?;
            }
        }
        Ok(all << 10)
    }

    /// Makes each worker compare every byte with the one it wrote. Returns the number of bytes compared.
    ///
    /// # Errors
    /// A byte differs, or a worker has died.
    pub fn verify(&mut self) -> Result<u64> {
        for worker in &mut self.workers {
            worker.compare()?;
        }
        for (number, worker) in (1..).zip(&self.workers) {
            let damaged = worker.answer()?;
            if damaged != "0" {
                let line = format!("worker {number}: {damaged} pages are damaged; please report this bug");
                return Err(Exit::new(exit::FAILURE, line).into());
            }
        }
        Ok(self.pages.bytes().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_reduced_to_fit_into_free_memory() {
        let (full, mib) = (Size::FULL.bytes(), 1 << 20);
        assert_eq!(full, 768 * mib);
        assert_eq!(Size::largest_in(false, 4096 * mib), Some(Size::FULL));
        let half = Size::largest_in(false, full).unwrap();
        assert_eq!((half.bytes(), half.is_reduced(false)), (full / 2, true));
        assert_eq!(Size::largest_in(false, 300 * mib), None);
        assert!(Size::QUICK.bytes() < 64 * mib);
    }
}
