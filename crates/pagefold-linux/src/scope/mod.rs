//! The scope: which processes pagefold manages, selected by pid, cgroup, user or executable, or all of them.
//!
//! A process is in scope if any selector matches it. A cgroup can exclude its processes from every scope by the
//! extended attribute `user.pagefold.avoid`, and a cgroup below it can include its own again by `user.pagefold.include`:
//! the nearest of the two decides. `user.pagefold.domain` sets the trust domain of a subtree.
//!
//! The caller is left out unless selected by pid, and so are kernel threads and zombies, which have no memory. Processes
//! that end during the resolution are skipped.

pub mod domain;
pub mod dumpable;
pub mod eligible;
pub mod exclude;
pub mod new_processes;

use crate::os::peer::own_uid;
use crate::proc::Roots;
use crate::proc::cgroup::{Cgroup, parse_cgroups};
use crate::proc::process::{Process, ReadError};
use crate::proc::status::{Status, exe_of, printable, program_name};
use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use thiserror::Error;

/// The selectors of a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeSpec {
    /// These processes.
    pub pids: Vec<i32>,
    /// Processes in these cgroups and below: a path under the cgroup mount, or the path of a cgroup.
    pub cgroups: Vec<PathBuf>,
    /// Processes with these effective users: names or numbers.
    pub users: Vec<String>,
    /// Processes running these executables: absolute paths, base names or command names.
    pub exes: Vec<String>,
    /// Every process.
    pub all: bool,
}

impl ScopeSpec {
    /// Whether there is no selector.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for ScopeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pids = self.pids.iter().map(|pid| format!("--pid {pid}"));
        let cgroups = self.cgroups.iter().map(|path| format!("--cgroup {}", printable(path.as_os_str().as_bytes())));
        let users = self.users.iter().map(|user| format!("--user {}", printable(user.as_bytes())));
        let exes = self.exes.iter().map(|exe| format!("--exe {}", printable(exe.as_bytes())));
        let all = self.all.then(|| "--all".to_owned());
        f.write_str(&pids.chain(cgroups).chain(users).chain(exes).chain(all).collect::<Vec<_>>().join(" "))
    }
}

/// A process in scope.
#[derive(Debug)]
pub struct Scoped {
    /// The process.
    pub process: Process,
    /// Command name, safe to print.
    pub name: String,
    /// Executable, if readable.
    pub exe: Option<PathBuf>,
    /// Cgroup: the version 2 path or, if that is the root, the path in the version 1 memory hierarchy.
    pub cgroup: Option<String>,
    /// Trust domain set by an attribute of its cgroups.
    pub domain: Option<String>,
    /// Effective user.
    pub uid: u32,
}

/// Why a scope cannot be resolved.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ScopeError {
    /// There are no selectors.
    #[error("nothing is in scope: select processes by --pid, --cgroup, --user or --exe, or all by --all")]
    Empty,
    /// A selected process does not exist.
    #[error("there is no process {0}")]
    UnknownPid(i32),
    /// A selected user does not exist.
    #[error("there is no user {0}")]
    UnknownUser(String),
    /// A selected cgroup does not exist.
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
    /// A process selected by pid is in a cgroup with the attribute `user.pagefold.avoid`.
    #[error("process {pid} is in cgroup {cgroup}, which is excluded by its attribute user.pagefold.avoid")]
    Avoided { pid: i32, cgroup: String },
    /// No process matches the selectors.
    #[error("no process matches {0}")]
    NoMatch(String),
    /// The process list cannot be read.
    #[error("cannot read {path}: {source}")]
    Io { path: String, source: io::Error },
}

/// Finds the processes in scope, by ascending pid.
///
/// # Errors
/// If a selected pid, user or cgroup does not exist, or no process matches.
pub fn resolve(spec: &ScopeSpec, roots: &Roots) -> Result<Vec<Scoped>, ScopeError> {
    resolve_without(spec, roots, &[i32::try_from(std::process::id()).unwrap_or(0)])
}

/// The same, leaving out the given processes (the caller and its helpers) unless they are selected by pid.
pub fn resolve_without(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<Scoped>, ScopeError> {
    let scoped = resolve_among(spec, roots, |pid| !left_out.contains(&pid))?;
    if scoped.is_empty() { Err(ScopeError::NoMatch(spec.to_string())) } else { Ok(scoped) }
}

/// The same, considering only processes selected by pid and those that `is_candidate` accepts. The result may be empty.
pub(crate) fn resolve_among(
    spec: &ScopeSpec,
    roots: &Roots,
    mut is_candidate: impl FnMut(i32) -> bool,
) -> Result<Vec<Scoped>, ScopeError> {
    if spec.is_empty() {
        return Err(ScopeError::Empty);
    }
    let wanted = Wanted {
        users: spec.users.iter().map(|user| user_id(user)).collect::<Result<_, _>>()?,
        cgroups: spec.cgroups.iter().map(|path| CgroupSelector::of(path, roots)).collect::<Result<_, _>>()?,
        exes: &spec.exes,
        all: spec.all,
    };
    let named: BTreeSet<i32> = spec.pids.iter().copied().collect();
    let mut attributes = Attributes { root: &roots.cgroup, seen: HashMap::new() };
    let mut scoped = Vec::new();
    let selective = wanted.all || !(wanted.users.is_empty() && wanted.cgroups.is_empty() && wanted.exes.is_empty());
    let others = if selective { list(&roots.proc)? } else { Vec::new() };
    let others = others.into_iter().filter(|&pid| is_candidate(pid));
    for pid in named.iter().copied().chain(others).collect::<BTreeSet<_>>() {
        let is_named = named.contains(&pid);
        match examine(pid, roots, is_named, &wanted, &mut attributes) {
            Ok(Verdict::In(found)) => scoped.push(*found),
            Ok(Verdict::Avoided(cgroup)) if is_named => return Err(ScopeError::Avoided { pid, cgroup }),
            Err(_) if is_named => return Err(ScopeError::UnknownPid(pid)),
            // Out of scope; or ended meanwhile, or hidden (proc mounted with hidepid).
            Ok(_) | Err(_) => {}
        }
    }
    Ok(scoped)
}

/// The selectors, resolved.
struct Wanted<'a> {
    users: Vec<u32>,
    cgroups: Vec<CgroupSelector>,
    exes: &'a [String],
    all: bool,
}

enum Verdict {
    In(Box<Scoped>),
    Out,
    Avoided(String),
}

fn examine(
    pid: i32,
    roots: &Roots,
    is_named: bool,
    wanted: &Wanted<'_>,
    attributes: &mut Attributes<'_>,
) -> Result<Verdict, ReadError> {
    let process = Process::open_at(&roots.proc, pid)?;
    let stat = process.stat()?;
    if !is_named && (stat.kernel_thread || stat.has_ended()) {
        return Ok(Verdict::Out);
    }
    let status = Status::of(&process)?;
    if status.thread_group != pid {
        return Err(ReadError::Vanished { pid }); // a thread ID, not a pid
    }
    let exe = match exe_of(&process) {
        Err(ReadError::Denied { .. }) => None,
        other => other?,
    };
    let uid = status.effective_uid();
    let is_wanted = is_named
        || wanted.all
        || wanted.users.contains(&uid)
        || wanted.exes.iter().any(|selector| runs(selector, exe.as_deref(), &stat.comm));
    if !is_wanted && wanted.cgroups.is_empty() {
        return Ok(Verdict::Out);
    }
    let cgroups = match process.read_file("cgroup") {
        Ok(text) => parse_cgroups(&text),
        Err(ReadError::Absent { .. }) => Vec::new(), // a kernel without cgroups
        Err(error) => return Err(error),
    };
    if !is_wanted && !wanted.cgroups.iter().any(|selector| cgroups.iter().any(|cgroup| selector.matches(cgroup))) {
        return Ok(Verdict::Out);
    }
    if let Some(avoided) = attributes.avoided(&cgroups) {
        return Ok(Verdict::Avoided(avoided));
    }
    let domain = attributes.domain(&cgroups);
    let cgroup = cgroups
        .iter()
        .find(|cgroup| cgroup.controllers.is_empty() && cgroup.path != "/")
        .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers == "memory" && cgroup.path != "/"))
        .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers.is_empty()))
        .map(|cgroup| cgroup.path.clone());
    Ok(Verdict::In(Box::new(Scoped { process, name: printable(&stat.comm), exe, cgroup, domain, uid })))
}

/// Whether a process runs the selected program: an absolute path, a base name or a command name.
pub(crate) fn runs(selector: &str, exe: Option<&Path>, comm: &[u8]) -> bool {
    if selector.starts_with('/') {
        let bytes = exe.map_or(&[][..], |exe| exe.as_os_str().as_bytes());
        return bytes.strip_suffix(b" (deleted)").unwrap_or(bytes) == selector.as_bytes();
    }
    // The names differ for programs started through a link: Debian's redis-server is a link to redis-check-rdb. The
    // command name is truncated to 15 bytes.
    let (selector, name) = (selector.as_bytes(), program_name(exe, comm));
    let truncated = comm.len() == 15 && selector.starts_with(comm) && (exe.is_none() || !name.starts_with(comm));
    name == selector || comm == selector || truncated
}

fn list(proc: &Path) -> Result<Vec<i32>, ScopeError> {
    let error = |source| ScopeError::Io { path: proc.display().to_string(), source };
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc).map_err(error)? {
        pids.extend(entry.map_err(error)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}

/// The user ID of a user given by name or number.
pub fn user_id(user: &str) -> Result<u32, ScopeError> {
    let unknown = || ScopeError::UnknownUser(printable(user.as_bytes()));
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let name = CString::new(user).map_err(|_| unknown())?;
    let mut buffer = vec![0; 16 << 10];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: the name is NUL-terminated; record, buffer and result pointer outlive the call, which gets the buffer's
    // length.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return Err(unknown());
    }
    // SAFETY: a non-null result points to the record, which the call has initialized.
    Ok(unsafe { (*found).pw_uid })
}

/// A selected cgroup.
#[derive(Debug)]
struct CgroupSelector {
    /// Directory of the hierarchy, if the path has one: `memory`, `unified`, or empty on a pure version 2 system.
    mount: Option<String>,
    path: PathBuf,
}

impl CgroupSelector {
    fn of(asked: &Path, roots: &Roots) -> Result<Self, ScopeError> {
        let no_cgroup = || ScopeError::NoCgroup(printable(asked.as_os_str().as_bytes()));
        let clean = |path: &Path| -> Result<PathBuf, ScopeError> {
            path.components()
                .filter(|part| !matches!(part, Component::CurDir | Component::RootDir))
                .map(|part| if matches!(part, Component::Normal(_)) { Ok(part) } else { Err(no_cgroup()) })
                .collect()
        };
        let below = asked.strip_prefix(&roots.cgroup).or_else(|_| asked.strip_prefix("/sys/fs/cgroup"));
        let Ok(below) = below else {
            let path = clean(asked)?;
            let exists = path.as_os_str().is_empty()
                || roots.cgroup.join(&path).is_dir()
                || fs::read_dir(&roots.cgroup)
                    .is_ok_and(|mounts| mounts.flatten().any(|mount| mount.path().join(&path).is_dir()));
            return if exists { Ok(Self { mount: None, path }) } else { Err(no_cgroup()) };
        };
        let below = clean(below)?;
        if !roots.cgroup.join(&below).is_dir() {
            return Err(no_cgroup());
        }
        // Only version 2 has cgroup.controllers; its mount point is the root cgroup.
        if roots.cgroup.join("cgroup.controllers").exists() {
            return Ok(Self { mount: Some(String::new()), path: below });
        }
        let mut parts = below.components();
        let mount = parts.next().ok_or_else(no_cgroup)?.as_os_str().to_string_lossy().into_owned();
        Ok(Self { mount: Some(mount), path: parts.as_path().to_owned() })
    }

    /// Whether a cgroup is the selected one or below it.
    fn matches(&self, cgroup: &Cgroup) -> bool {
        let mount_fits = self.mount.as_deref().is_none_or(|mount| cgroup.mounts().contains(&mount));
        mount_fits && Path::new(&cgroup.path).strip_prefix("/").is_ok_and(|path| path.starts_with(&self.path))
    }
}

/// Extended attributes of cgroups, each read once.
struct Attributes<'a> {
    root: &'a Path,
    seen: HashMap<(PathBuf, &'static str), Option<Vec<u8>>>,
}

impl Attributes<'_> {
    /// The cgroup that excludes the process, if any. In each hierarchy the nearest attribute decides.
    fn avoided(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                // If one cgroup has both attributes, avoid takes precedence.
                if attributes.get(directory, "user.pagefold.avoid").is_some_and(|value| means_yes(&value)) {
                    Some(Some(directory.display().to_string()))
                } else {
                    let include = attributes.get(directory, "user.pagefold.include");
                    include.filter(|value| means_yes(value)).map(|_| None)
                }
            })
            .flatten()
        })
    }

    /// The trust domain set by the nearest cgroup. Attributes of cgroups owned by another user are ignored: that user
    /// could join a domain of others.
    fn domain(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                let named = attributes.get(directory, "user.pagefold.domain")?;
                let owner = fs::metadata(directory).ok()?.uid();
                [0, own_uid()].contains(&owner).then(|| printable(&named))
            })
        })
    }

    /// Calls `find` with the directory of the cgroup and then with its parents up to the root of the hierarchy.
    fn nearest<T>(&mut self, cgroup: &Cgroup, mut find: impl FnMut(&mut Self, &Path) -> Option<T>) -> Option<T> {
        let inner = Path::new(&cgroup.path).strip_prefix("/").ok()?;
        // Paths outside our cgroup namespace begin with "..": directories of the same name here are different ones.
        if inner.components().any(|part| !matches!(part, Component::Normal(_))) {
            return None;
        }
        let root = self.root;
        let mount = cgroup.mounts().into_iter().map(|mount| root.join(mount)).find(|mount| mount.is_dir())?;
        inner.ancestors().find_map(|below| find(self, &mount.join(below)))
    }

    fn get(&mut self, directory: &Path, name: &'static str) -> Option<Vec<u8>> {
        self.seen.entry((directory.to_owned(), name)).or_insert_with(|| xattr(directory, name)).clone()
    }
}

/// Whether the value of an attribute means yes. An empty value does.
fn means_yes(value: &[u8]) -> bool {
    !matches!(value.trim_ascii(), b"0" | b"no" | b"false")
}

/// Reads an extended attribute. `None` if it is not set, not supported or the directory is gone.
fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let name = CString::new(name).ok()?;
    // The kernel's limit for values: with a smaller buffer, longer values would fail.
    let mut value = vec![0u8; 64 << 10];
    // SAFETY: path and name are NUL-terminated; the buffer has the given length.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(length).ok()?);
    Some(value)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
