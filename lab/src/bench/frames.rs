//! Programs' anonymous memory, counted in frames.

use anyhow::bail;
use pagefold_engine::units::Pages;
use pagefold_procmem::os::fields::{kib, number};
use pagefold_procmem::process::{Process, ReadError};

/// Anonymous memory of some processes, MiB.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// The sum over the processes.
    pub by_processes: f64,
    /// The sum with each page shared by fork or by merging divided among its sharers: `Pss_Anon`. Leaves out zero
    /// pages.
    pub in_frames: f64,
}

impl Held {
    /// What processes share, by fork or by merging, MiB.
    pub fn shared(self) -> f64 {
        self.by_processes - self.in_frames
    }

    pub fn by<'a>(processes: impl IntoIterator<Item = &'a Process>) -> anyhow::Result<Self> {
        let mut held = Self::default();
        for process in processes {
            let text = process.read_file("smaps_rollup")?;
            for (sum, key) in [(&mut held.by_processes, "Anonymous"), (&mut held.in_frames, "Pss_Anon")] {
                match kib(&text, key) {
                    Ok(kib) => *sum += kib as f64 / 1024.0,
                    Err(why) => bail!("process {}: {key}: {why}", process.pid()),
                }
            }
        }
        Ok(held)
    }

    /// The mean over time.
    pub fn mean(samples: &[Self]) -> Self {
        let mut mean = Self::default();
        for held in samples {
            mean.by_processes += held.by_processes / samples.len() as f64;
            mean.in_frames += held.in_frames / samples.len() as f64;
        }
        mean
    }
}

/// Counts the pages of a process that KSM replaced by the kernel's zero page, from its `ksm_stat`. smaps doesn't.
pub fn zero_pages(ksm_stat: &[u8]) -> anyhow::Result<Pages> {
    match number(ksm_stat, "ksm_zero_pages") {
        Ok(pages) => Ok(Pages(pages)),
        Err(why) => bail!("ksm_stat: ksm_zero_pages: {why}"),
    }
}

/// Opens these processes.
pub fn open_all(pids: impl IntoIterator<Item = i32>) -> Result<Vec<Process>, ReadError> {
    pids.into_iter().map(Process::open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_pages_as_the_kernel_prints_them() {
        assert_eq!(zero_pages(b"ksm_rmap_items 5\nksm_zero_pages 7\nksm_merging_pages 1\n").unwrap(), Pages(7));
        assert!(zero_pages(b"ksm_rmap_items 5\n").is_err());
    }
}
