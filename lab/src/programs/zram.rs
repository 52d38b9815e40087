//! Swap space in compressed memory (zram), for as long as we hold it.

use anyhow::{Context, anyhow};
use pagefold_engine::units::Pages;
use pagefold_procmem::os::fields::number;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const CONTROL: &str = "/sys/class/zram-control";

/// The swap space. Dropping it gives it back, which first reads in all pages that are still swapped out.
#[derive(Debug)]
pub struct ZramSwap {
    number: u32,
    is_on: bool,
}

impl ZramSwap {
    pub fn is_possible() -> bool {
        Path::new(CONTROL).join("hot_add").exists()
    }

    pub fn make(bytes: u64) -> anyhow::Result<Self> {
        let control = Path::new(CONTROL).join("hot_add");
        // Reading this file makes a new device.
        let text = fs::read_to_string(&control).with_context(|| control.display().to_string())?;
        let mut swap =
            Self { number: text.trim().parse().with_context(|| format!("zram's device {text:?}"))?, is_on: false };
        let size = Path::new("/sys/block").join(format!("zram{}", swap.number)).join("disksize");
        fs::write(&size, bytes.to_string()).with_context(|| size.display().to_string())?;
        swap.on_device("mkswap")?;
        swap.on_device("swapon")?;
        swap.is_on = true;
        Ok(swap)
    }

    fn device(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    fn on_device(&self, program: &str) -> anyhow::Result<()> {
        let path = super::need(&format!("/usr/sbin/{program}"), "util-linux")?;
        super::output_of(Command::new(path).arg(self.device()))?;
        Ok(())
    }

    fn give_back(&self) -> anyhow::Result<()> {
        if self.is_on {
            self.on_device("swapoff")?;
        }
        Ok(fs::write(Path::new(CONTROL).join("hot_remove"), self.number.to_string())?)
    }
}

impl Drop for ZramSwap {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            eprintln!("cannot give back the swap space on {}: {error:#}", self.device().display());
        }
    }
}

/// Pages that the kernel has swapped out on the whole machine so far.
pub fn swapped_out() -> anyhow::Result<Pages> {
    let text = fs::read("/proc/vmstat").context("/proc/vmstat")?;
    let count = number(&text, "pswpout").map_err(|why| anyhow!("/proc/vmstat: pswpout: {why}"))?;
    Ok(Pages(count))
}
