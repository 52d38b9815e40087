//! A cgroup that limits memory, of either version.

use crate::cgroup::Cgroup;
use crate::skip::skip_unsupported;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub struct Limited {
    cgroup: Cgroup,
    /// Whether the cgroup is of version 1.
    one: bool,
}

impl Limited {
    /// Makes a group, at first without a limit. Where we can't limit memory, reports why and returns `None`.
    pub fn make() -> Option<Self> {
        let one = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
            || Path::new("/sys/fs/cgroup/memory/memory.usage_in_bytes").exists();
        let Some(cgroup) = Cgroup::create(if one { "memory" } else { "unified" }) else {
            skip_unsupported("no control groups are mounted");
            return None;
        };
        if !one && !cgroup.path.join("memory.max").exists() {
            skip_unsupported("control groups do not limit memory: no 'memory' in cgroup.subtree_control");
            return None;
        }
        Some(Self { cgroup, one })
    }

    /// Makes a group below this one, at first without a limit of its own. This one has to outlive it.
    #[must_use]
    pub fn below(&self, name: &str) -> Self {
        if !self.one {
            self.cgroup.set("cgroup.subtree_control", "+memory");
        }
        Self { cgroup: self.cgroup.below(name), one: self.one }
    }

    pub fn add(&self, pid: i32) {
        self.cgroup.add(pid);
    }

    pub fn path(&self) -> &Path {
        &self.cgroup.path
    }

    pub fn limit(&self, bytes: u64) {
        self.set_limit(&bytes.to_string());
    }

    pub fn unlimited(&self) {
        self.set_limit(if self.one { "-1" } else { "max" });
    }

    fn set_limit(&self, limit: &str) {
        self.cgroup.set(if self.one { "memory.limit_in_bytes" } else { "memory.max" }, limit);
    }

    pub fn usage(&self) -> u64 {
        self.number(if self.one { "memory.usage_in_bytes" } else { "memory.current" })
    }

    /// How often a member reached the limit, which made the kernel reclaim memory.
    pub fn hits(&self) -> u64 {
        if self.one { self.number("memory.failcnt") } else { self.field("memory.events", "max") }
    }

    /// Resets [`Self::peak`]. Has no effect on version 2 before Linux 6.12.
    pub fn forget_peak(&self) {
        let _ = fs::write(self.path().join(self.peak_file()), "0");
    }

    pub fn peak(&self) -> u64 {
        self.number(self.peak_file())
    }

    fn peak_file(&self) -> &'static str {
        if self.one { "memory.max_usage_in_bytes" } else { "memory.peak" }
    }

    /// How many members the OOM killer has killed.
    pub fn kills(&self) -> u64 {
        self.field(if self.one { "memory.oom_control" } else { "memory.events" }, "oom_kill")
    }

    fn number(&self, file: &str) -> u64 {
        fs::read_to_string(self.path().join(file)).unwrap().trim().parse().unwrap()
    }

    fn field(&self, file: &str, name: &str) -> u64 {
        let text = fs::read_to_string(self.path().join(file)).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {file}")).trim().parse().unwrap()
    }
}

/// Makes the kernel reclaim the group's memory again and again until dropped.
///
/// A limit that's too tight would do the same. But then the kernel sometimes kills a member although there's swap, even
/// without pagefold (6.18, version 1: one of three shufflers within 20 s).
pub struct Reclaim {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reclaim {
    pub fn start(limited: &Limited) -> Self {
        let (file, what) = if limited.one { ("memory.force_empty", "0") } else { ("memory.reclaim", "64M") };
        let (path, stop) = (limited.path().join(file), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // This fails if the kernel reclaims less than we ask for.
                let _ = fs::write(&path, what);
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Reclaim {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
