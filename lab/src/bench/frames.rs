//! Programs' anonymous memory, counted in frames.

use anyhow::anyhow;
use pagefold_procmem::os::fields::kib;
use pagefold_procmem::process::Process;

/// Anonymous memory of some processes, MiB.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// The sum over the processes.
    pub by_processes: f64,
    /// The same, but we divide each page shared by fork or by merging among its sharers: `Pss_Anon`. Leaves out zero
    /// pages.
    pub in_frames: f64,
}

impl Held {
    pub fn by<'a>(processes: impl IntoIterator<Item = &'a Process>) -> anyhow::Result<Self> {
        let mut held = Self::default();
        for process in processes {
            let text = process.read_file("smaps_rollup")?;
            let mib = |key| match kib(&text, key) {
                Ok(kib) => Ok(kib as f64 / 1024.0),
                Err(why) => Err(anyhow!("process {}: {key}: {why}", process.pid())),
            };
            held.by_processes += mib("Anonymous")?;
            held.in_frames += mib("Pss_Anon")?;
        }
        Ok(held)
    }
}
