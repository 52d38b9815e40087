//! Selectors of processes, for scopes and for rules: as somebody wrote them ([`Selector`]) and ready to compare
//! processes with ([`Matcher`]).

use super::attributes::directory_of;
use super::exe::{Distrust, Matching, is_named, is_roots_alone};
use super::workload::{Workload, WorkloadKind, labels_of};
use super::{ProcessInfo, ScopeError};
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::Cgroup;
use pagefold_text::escape::{printable, shell_word};
use std::ffi::CString;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// A selector, as somebody wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Pid(i32),
    /// Processes in this cgroup and below: a path under the cgroup mount, or the path of a cgroup.
    Cgroup(PathBuf),
    /// Processes with this effective user: a name or a number.
    User(String),
    /// Processes that run this executable: an absolute path, a base name or a command name.
    Exe(String),
    /// Processes of this systemd unit, virtual machine, container or pod.
    Workload(Workload),
    All,
}

impl Selector {
    /// The kinds of selectors that have a name.
    pub const NAMED: [&'static str; 7] = ["cgroup", "user", "exe", "unit", "vm", "container", "pod"];

    /// A selector of one of the kinds in [`Self::NAMED`].
    pub fn named(kind: &str, name: String) -> Option<Self> {
        Some(match kind {
            "cgroup" => Self::Cgroup(name.into()),
            "user" => Self::User(name),
            "exe" => Self::Exe(name),
            other => Self::Workload(Workload { kind: WorkloadKind::of_name(other)?, name }),
        })
    }

    /// Parses a kind of [`Self::NAMED`] and a name, such as `unit nginx.service`.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, name) = text.split_once(' ')?;
        Self::named(kind, name.trim().to_owned()).filter(|_| !name.trim().is_empty())
    }

    /// If this would never match, says why.
    pub fn unfit(&self) -> Option<&'static str> {
        match self {
            Self::Workload(workload) => workload.unfit(),
            Self::Cgroup(path) if path.components().any(|part| part == Component::ParentDir) => {
                Some("leads out of the cgroup; give a path without ..")
            }
            _ => None,
        }
    }

    /// Whether both select the same processes. A service goes by its name with and without `.service`.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Workload(one), Self::Workload(two)) => one.kind == two.kind && one.base_name() == two.base_name(),
            _ => self == other,
        }
    }

    /// Whether one of these selects the same processes.
    pub fn is_among(&self, others: &[Self]) -> bool {
        others.iter().any(|other| other.is_same(self))
    }

    /// `pid`, `all`, or one of [`Self::NAMED`].
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Pid(_) => "pid",
            Self::Cgroup(_) => "cgroup",
            Self::User(_) => "user",
            Self::Exe(_) => "exe",
            Self::Workload(workload) => workload.kind.name(),
            Self::All => "all",
        }
    }

    /// The selected pid, path or name, safe to print. Empty for all.
    pub fn value(&self) -> String {
        match self {
            Self::Pid(pid) => pid.to_string(),
            Self::Cgroup(path) => printable(path.as_os_str().as_bytes()),
            Self::User(name) | Self::Exe(name) | Self::Workload(Workload { name, .. }) => printable(name.as_bytes()),
            Self::All => String::new(),
        }
    }

    /// Looks up the user of a selector, and parses the path of a cgroup, which need not exist.
    ///
    /// # Errors
    /// If there is no such user, or the path leads out of the cgroup mount.
    pub fn resolve(&self, roots: &Roots) -> Result<Matcher, ScopeError> {
        Ok(match self {
            Self::Pid(pid) => Matcher::Pid(*pid),
            Self::Cgroup(path) => Matcher::Cgroup(CgroupMatcher::of(path, roots)?),
            Self::User(user) => Matcher::User(user_id(user)?),
            Self::Exe(name) => Matcher::Exe(name.clone()),
            Self::Workload(asked) => {
                Matcher::Workload(WorkloadMatcher { asked: asked.clone(), mount: roots.cgroup.clone() })
            }
            Self::All => Matcher::All,
        })
    }

    /// Like [`Self::resolve`], but the cgroup must exist, too.
    pub(super) fn resolve_existing(&self, roots: &Roots) -> Result<Matcher, ScopeError> {
        let matcher = self.resolve(roots)?;
        match (self, &matcher) {
            (Self::Cgroup(path), Matcher::Cgroup(cgroup)) if !cgroup.exists(roots) => Err(no_cgroup(path)),
            _ => Ok(matcher),
        }
    }
}

impl fmt::Display for Selector {
    /// Displays the selector as a command-line flag.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::All {
            return f.write_str("--all");
        }
        let value = shell_word(&self.value());
        let joint = if value.starts_with('-') { '=' } else { ' ' };
        write!(f, "--{}{joint}{value}", self.kind())
    }
}

/// A selector that processes can be compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matcher {
    Pid(i32),
    Cgroup(CgroupMatcher),
    User(u32),
    Exe(String),
    Workload(WorkloadMatcher),
    All,
}

impl Matcher {
    pub(super) fn matches(&self, info: &ProcessInfo) -> Matching {
        let matches = match self {
            Self::Pid(pid) => info.by_pid == Some(*pid),
            Self::Cgroup(cgroup) => info.cgroups.path.as_deref().is_some_and(|path| cgroup.contains(path)),
            Self::User(uid) => info.uid() == *uid,
            Self::Exe(name) => match &info.exe {
                Some(exe) => return exe.matches(name, &info.stat.comm),
                None => false,
            },
            Self::Workload(workload) => return workload.matches(info),
            Self::All => true,
        };
        if matches { Matching::Yes } else { Matching::No }
    }

    /// Whether we need a process's cgroups to match it.
    pub(super) fn needs_cgroups(&self) -> bool {
        matches!(self, Self::Cgroup(_) | Self::Workload(_))
    }

    /// Whether the selector matches a process for a purpose that grants nothing: an executable or workload need only
    /// have the name, even one that any user can choose.
    pub(super) fn matches_by_name(&self, info: &ProcessInfo) -> bool {
        match self {
            // We go by the command name if we can't read the executable.
            Self::Exe(name) if info.exe.is_none() => is_named(name, None, &info.stat.comm),
            Self::Cgroup(selected) => info.cgroups.all.iter().any(|cgroup| selected.matches(cgroup)),
            Self::Workload(workload) => workload.asked.names(info),
            _ => self.matches(info) != Matching::No,
        }
    }
}

/// A selected workload.
///
/// Users can name cgroups, too, below those that are delegated to them. So a name grants something only if root alone
/// can create cgroups where the named one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadMatcher {
    asked: Workload,
    mount: PathBuf,
}

impl WorkloadMatcher {
    fn matches(&self, info: &ProcessInfo) -> Matching {
        let mut found = Matching::No;
        for cgroup in &info.cgroups.all {
            for label in labels_of(&cgroup.path) {
                if !label.is_called(&self.asked) {
                    continue;
                }
                let is_roots = directory_of(&self.mount, cgroup, label.parent)
                    .and_then(|directory| fs::metadata(directory).ok())
                    .is_some_and(|found| is_roots_alone(found.uid(), found.mode()));
                if is_roots && label.is_systems() {
                    return Matching::Yes;
                }
                found = Matching::NameOnly(Distrust::Cgroup(cgroup.path.clone()));
            }
        }
        found
    }
}

/// The user ID of a user given by name or number.
pub fn user_id(user: &str) -> Result<u32, ScopeError> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let unknown = ScopeError::UnknownUser(printable(user.as_bytes()));
    let Ok(name) = CString::new(user) else { return Err(unknown) };
    let mut buffer = vec![0; 16 << 10];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: the name is NUL-terminated; record, buffer and result pointer outlive the call, which gets the buffer's
    // length.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return Err(unknown);
    }
    // SAFETY: a non-null result points to the record, which the call has initialized.
    Ok(unsafe { (*found).pw_uid })
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMatcher {
    /// Directory of the hierarchy, if the path has one: `memory`, `unified`, or empty on a pure version 2 system.
    mount: Option<String>,
    /// Relative to the root of the hierarchy.
    path: PathBuf,
}

fn no_cgroup(asked: &Path) -> ScopeError {
    ScopeError::NoCgroup(printable(asked.as_os_str().as_bytes()))
}

impl CgroupMatcher {
    fn of(asked: &Path, roots: &Roots) -> Result<Self, ScopeError> {
        let below_mount = asked.strip_prefix(&roots.cgroup).or_else(|_| asked.strip_prefix("/sys/fs/cgroup")).ok();
        let mut path = PathBuf::new();
        for part in below_mount.unwrap_or(asked).components() {
            match part {
                Component::Normal(part) => path.push(part),
                Component::CurDir | Component::RootDir => {}
                _ => return Err(no_cgroup(asked)),
            }
        }
        if below_mount.is_none() {
            return Ok(Self { mount: None, path });
        }
        // Only version 2 has cgroup.controllers; its mount point is the root cgroup.
        if roots.cgroup.join("cgroup.controllers").exists() {
            return Ok(Self { mount: Some(String::new()), path });
        }
        let mut parts = path.components();
        let mount = parts.next().ok_or_else(|| no_cgroup(asked))?.as_os_str().to_string_lossy().into_owned();
        Ok(Self { mount: Some(mount), path: parts.as_path().to_owned() })
    }

    fn exists(&self, roots: &Roots) -> bool {
        if let Some(mount) = &self.mount {
            return roots.cgroup.join(mount).join(&self.path).is_dir();
        }
        self.path.as_os_str().is_empty()
            || roots.cgroup.join(&self.path).is_dir()
            || fs::read_dir(&roots.cgroup)
                .is_ok_and(|mounts| mounts.flatten().any(|mount| mount.path().join(&self.path).is_dir()))
    }

    /// Whether a cgroup is the selected one or below it.
    pub(super) fn matches(&self, cgroup: &Cgroup) -> bool {
        let mount_fits = self.mount.as_deref().is_none_or(|mount| cgroup.mounts().contains(&mount));
        mount_fits && self.contains(&cgroup.path)
    }

    /// Like [`Self::matches`], by the path of the cgroup alone.
    pub(super) fn contains(&self, cgroup: &str) -> bool {
        let Ok(path) = Path::new(cgroup).strip_prefix("/") else { return false };
        // Paths outside our cgroup namespace begin with "..": they can't be selected.
        path.components().all(|part| matches!(part, Component::Normal(_))) && path.starts_with(&self.path)
    }
}
