//! Programs in cgroups of their own, as a service manager starts them.

use super::{Target, remove_cgroup};
use anyhow::Context;
use pagefold_report::activity::ActivityCounters;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where cgroups of version 2 are: alone, or beside those of version 1.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// A program in a cgroup of its own, where the kernel reports how long its tasks wait for a CPU.
pub struct Service {
    program: Box<dyn Target>,
    /// Removed last.
    _cgroup: Cgroup,
}

impl Service {
    /// Moves a program with all its threads into a new cgroup.
    pub fn of(program: impl Target + 'static) -> anyhow::Result<Box<dyn Target>> {
        let root = ROOTS.iter().map(Path::new).find(|root| root.join("cgroup.controllers").exists());
        let root = root.context("this experiment needs cgroups of version 2")?;
        let path = root.join(format!("pagefold-lab-{}-{}", program.name(), program.pid()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let cgroup = Cgroup(path);
        let pressure = cgroup.0.join("cpu.pressure");
        fs::read(&pressure).with_context(|| format!("this experiment needs {}", pressure.display()))?;
        let members = cgroup.0.join("cgroup.procs");
        fs::write(&members, program.pid().to_string()).with_context(|| members.display().to_string())?;
        Ok(Box::new(Self { program: Box::new(program), _cgroup: cgroup }))
    }
}

impl Target for Service {
    fn name(&self) -> &str {
        self.program.name()
    }

    fn pid(&self) -> i32 {
        self.program.pid()
    }

    fn check(&mut self) -> anyhow::Result<String> {
        self.program.check()
    }

    fn counters(&mut self) -> anyhow::Result<Option<ActivityCounters>> {
        self.program.counters()
    }

    fn heap(&self) -> Option<Range<u64>> {
        self.program.heap()
    }
}

/// A cgroup. Dropping it removes it; its members must have ended by then.
struct Cgroup(PathBuf);

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove_cgroup(&self.0);
    }
}
