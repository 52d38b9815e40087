//! A test's own control groups.

use crate::process::wait_until;
use crate::skip::skip_unsupported;
use std::ffi::CString;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Makes a program run in a group from the start, so that all its pages are charged there.
pub fn start_in(command: &mut Command, group: &Path) {
    let mut members = fs::OpenOptions::new().write(true).open(group.join("cgroup.procs")).unwrap();
    // SAFETY: one write, to an open file.
    unsafe { command.pre_exec(move || members.write_all(b"0")) };
}

/// A control group. When we drop it, we thaw it, move its members to the root group and remove it.
pub struct Cgroup {
    pub path: PathBuf,
    root: PathBuf,
}

impl Cgroup {
    /// Creates a group in the version 1 hierarchy with this controller, or in version 2 for `unified`. `None` if that
    /// hierarchy isn't mounted.
    pub fn create(hierarchy: &str) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Self::named(hierarchy, &format!("pagefold-test-{}-{number}", std::process::id()))
    }

    /// As [`Self::create`], with this name.
    pub fn named(hierarchy: &str, name: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let root = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (point, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let wanted = match hierarchy {
                "unified" => kind == "cgroup2",
                controller => kind == "cgroup" && options.split(',').any(|option| option == controller),
            };
            wanted.then(|| PathBuf::from(point))
        })?;
        let path = root.join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Some(Self { path, root })
    }

    /// As [`Self::create`], in whichever hierarchy is mounted. If none is, reports that and returns `None`.
    pub fn of_any_version() -> Option<Self> {
        let group = Self::create("pids").or_else(|| Self::create("unified"));
        if group.is_none() {
            skip_unsupported("no control groups are mounted");
        }
        group
    }

    /// As [`Self::of_any_version`], with this name.
    ///
    /// # Panics
    /// If no hierarchy is mounted.
    pub fn of_any_version_named(name: &str) -> Self {
        Self::named("pids", name).or_else(|| Self::named("unified", name)).expect("control groups are mounted")
    }

    /// Creates a group below this one, which has to outlive it.
    #[must_use]
    pub fn below(&self, name: &str) -> Self {
        let path = self.path.join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, root: self.root.clone() }
    }

    pub fn add(&self, pid: i32) {
        self.set("cgroup.procs", &pid.to_string());
    }

    pub fn set(&self, file: &str, value: &str) {
        fs::write(self.path.join(file), value).unwrap_or_else(|error| panic!("{value} to {file}: {error}"));
    }

    pub fn contains(&self, file: &str, text: &str) -> bool {
        fs::read_to_string(self.path.join(file)).unwrap().contains(text)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn members(&self) -> Vec<i32> {
        let members = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        members.lines().map(|pid| pid.parse().unwrap()).collect()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join("freezer.state"), "THAWED");
        let _ = fs::write(self.path.join("cgroup.freeze"), "0");
        for pid in self.members() {
            let _ = fs::write(self.root.join("cgroup.procs"), pid.to_string());
        }
        // A member that is ending keeps the group alive for a moment.
        let end = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.path).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The control group of a container, as Docker names it under systemd, and the container's identifier.
pub fn container() -> (Cgroup, String) {
    let id = format!("{:08x}{:056x}", std::process::id(), 0x00c0_ffee);
    (Cgroup::of_any_version_named(&format!("docker-{id}.scope")), id)
}

/// Sets an extended attribute of a group or a file.
#[track_caller]
pub fn set_attribute(path: &Path, name: &str, value: &str) {
    let terminated = |text: &[u8]| CString::new(text).unwrap();
    let (path_text, name_text) = (terminated(path.as_os_str().as_bytes()), terminated(name.as_bytes()));
    // SAFETY: both strings end with zero, and the value is as long as we say.
    let done = unsafe { libc::setxattr(path_text.as_ptr(), name_text.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    assert_eq!(done, 0, "{name} of {}: {}", path.display(), std::io::Error::last_os_error());
}

/// A control group that freezes its members.
pub struct Freezer {
    group: Cgroup,
    version: u32,
}

impl Freezer {
    /// Uses version 1 or 2 of control groups. `None` if that version isn't mounted.
    pub fn create(version: u32) -> Option<Self> {
        let group = Cgroup::create(if version == 1 { "freezer" } else { "unified" })?;
        Some(Self { group, version })
    }

    /// Uses either version. If neither is mounted, reports that and returns `None`.
    pub fn of_any_version() -> Option<Self> {
        let freezer = Self::create(1).or_else(|| Self::create(2));
        if freezer.is_none() {
            skip_unsupported("no freezer is mounted");
        }
        freezer
    }

    pub fn add(&self, pid: i32) {
        self.group.add(pid);
    }

    /// Puts a process into the group, and waits until it's frozen.
    #[track_caller]
    pub fn freeze_process(&self, pid: i32) {
        self.add(pid);
        self.freeze(true);
        wait_until("it is frozen", || self.is_frozen());
    }

    pub fn freeze(&self, on: bool) {
        match (self.version, on) {
            (1, true) => self.group.set("freezer.state", "FROZEN"),
            (1, false) => self.group.set("freezer.state", "THAWED"),
            (_, on) => self.group.set("cgroup.freeze", if on { "1" } else { "0" }),
        }
    }

    pub fn is_frozen(&self) -> bool {
        match self.version {
            1 => self.group.contains("freezer.state", "FROZEN"),
            _ => self.group.contains("cgroup.events", "frozen 1"),
        }
    }
}
