//! The kernel's own UKSM, with the authors' patch: it finds all memory by itself and has four governors.

use super::{Kernel, Marks, Policy, Stage};
use crate::bench::sysfs::Changed;
use anyhow::Context;
use pagefold_engine::units::{Bytes, Pages};
use std::fs;
use std::path::{Path, PathBuf};

pub const ROOT: &str = "/sys/kernel/mm/uksm";

const GOVERNORS: [&str; 4] = ["full", "medium", "low", "quiet"];

/// UKSM's sysfs directory.
#[derive(Clone, Debug)]
pub struct Uksm {
    root: PathBuf,
}

impl Uksm {
    /// The running kernel's. `None` on a kernel without the patch.
    pub fn of_kernel() -> Option<Self> {
        Self::at(Path::new(ROOT))
    }

    fn at(root: &Path) -> Option<Self> {
        if root.is_dir() { Some(Self { root: root.to_owned() }) } else { None }
    }

    /// Runs UKSM with a governor. Dropping the result restores both files. Merged memory stays merged: UKSM has no
    /// command to unmerge.
    pub fn drive(&self, governor: &str) -> anyhow::Result<[Changed; 2]> {
        // The order of dropping: UKSM stops first.
        let governor = Changed::to(self.root.join("cpu_governor"), governor)?;
        let run = Changed::to(self.root.join("run"), "1")?;
        Ok([run, governor])
    }

    /// Memory saved: pages that share another's frame, without zeros.
    pub fn saved(&self) -> anyhow::Result<Bytes> {
        let path = self.root.join("pages_sharing");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let pages = text.trim().parse().with_context(|| format!("{} is not a number", path.display()))?;
        Ok(Pages(pages).bytes())
    }
}

/// UKSM under one of its governors. It needs no marks.
#[derive(Clone, Copy, Debug)]
pub struct GovernedUksm {
    pub governor: &'static str,
    pub seconds: u64,
}

impl GovernedUksm {
    pub fn all(seconds: u64) -> Vec<Box<dyn Policy>> {
        GOVERNORS.iter().map(|&governor| Box::new(Self { governor, seconds }) as Box<dyn Policy>).collect()
    }
}

impl Policy for GovernedUksm {
    fn name(&self) -> String {
        format!("uksm {}", self.governor)
    }

    fn marks(&self) -> Marks {
        Marks::None
    }

    fn runs_on(&self, kernel: &Kernel) -> bool {
        matches!(kernel, Kernel::Uksm(_))
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        let driven = stage.uksm()?.drive(self.governor)?;
        stage.undo_at_end(driven);
        stage.sleep(self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_governor_is_set_and_all_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Uksm::at(&dir.path().join("none")).is_none());
        let text = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        for (name, value) in [
            ("run", "0\n"),
            ("cpu_governor", "full [medium] low quiet \n"),
            ("pages_sharing", "512\n"),
            ("pages_shared", "1\n"),
        ] {
            fs::write(dir.path().join(name), value).unwrap();
        }
        let uksm = Uksm::at(dir.path()).unwrap();
        assert_eq!(uksm.saved().unwrap(), Bytes(2 << 20));
        for governor in GOVERNORS {
            let driven = uksm.drive(governor).unwrap();
            assert_eq!((text("run").as_str(), text("cpu_governor").as_str()), ("1", governor));
            drop(driven);
            assert_eq!((text("run").as_str(), text("cpu_governor").as_str()), ("0", "medium"));
        }
        fs::write(dir.path().join("pages_sharing"), "many\n").unwrap();
        assert!(uksm.saved().is_err());
    }
}
