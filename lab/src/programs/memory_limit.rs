//! A cgroup (v1 or v2) that limits the memory of the programs in it.

use super::remove_cgroup;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// For each cgroup version: the directory of its memory controller, and its files for the limit, the usage, and the
/// number of members that the kernel has killed.
const VERSIONS: [(&str, &str, &str, &str); 2] = [
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    ("/sys/fs/cgroup", "memory.max", "memory.current", "memory.events"),
];
/// No limit, in bytes: the kernel rounds it down.
const NONE: u64 = i64::MAX as u64;

/// The cgroup. Dropping it removes it; its members must have ended by then.
#[derive(Debug)]
pub struct MemoryLimit {
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
    kills: &'static str,
}

impl MemoryLimit {
    pub fn make(bytes: u64) -> anyhow::Result<Self> {
        let found = VERSIONS.iter().find(|(root, limit, ..)| has_limit(Path::new(root), limit));
        let &(root, limit, usage, kills) = found.context("control groups do not limit memory here")?;
        let path = Path::new(root).join(format!("pagefold-lab-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let made = Self { path, limit, usage, kills };
        made.set(bytes)?;
        Ok(made)
    }

    /// A command that executes another one in the cgroup.
    pub fn enter(&self) -> [String; 3] {
        let script = format!("echo 0 >'{}' && exec \"$0\" \"$@\"", self.path.join("cgroup.procs").display());
        ["sh".to_owned(), "-c".to_owned(), script]
    }

    /// Moves a process into the cgroup. The memory that it already holds stays charged to its old cgroup.
    pub fn add(&self, pid: i32) -> anyhow::Result<()> {
        let file = self.path.join("cgroup.procs");
        fs::write(&file, pid.to_string()).with_context(|| file.display().to_string())
    }

    /// Lets the members use all memory there is.
    pub fn lift(&self) -> anyhow::Result<()> {
        self.set(NONE)
    }

    fn set(&self, bytes: u64) -> anyhow::Result<()> {
        let file = self.path.join(self.limit);
        fs::write(&file, bytes.to_string()).with_context(|| file.display().to_string())
    }

    /// The members' memory use, bytes.
    pub fn usage(&self) -> anyhow::Result<u64> {
        let text = fs::read_to_string(self.path.join(self.usage))?;
        text.trim().parse().context(self.usage)
    }

    /// How many members the kernel killed because of the limit.
    pub fn kills(&self) -> anyhow::Result<u64> {
        let text = fs::read_to_string(self.path.join(self.kills))?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.context(self.kills)?.trim().parse().context(self.kills)
    }
}

/// Whether we can limit cgroups below a root: version 2 has the file in each cgroup but the root.
fn has_limit(root: &Path, limit: &str) -> bool {
    let controllers = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
    root.join(limit).exists() || controllers.split_whitespace().any(|controller| controller == "memory")
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        remove_cgroup(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_is_found_by_its_controllers() {
        let root = tempfile::tempdir().unwrap();
        assert!(!has_limit(root.path(), "memory.max"));
        fs::write(root.path().join("cgroup.subtree_control"), "cpu io\n").unwrap();
        assert!(!has_limit(root.path(), "memory.max"));
        fs::write(root.path().join("cgroup.subtree_control"), "cpu memory\n").unwrap();
        assert!(has_limit(root.path(), "memory.max"));
        fs::write(root.path().join("memory.limit_in_bytes"), "1").unwrap();
        assert!(has_limit(root.path(), "memory.limit_in_bytes"));
    }
}
