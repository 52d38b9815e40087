//! Which processes are meant: by pid, cgroup, user or executable, or all of them.
//!
//! The selectors add up. A cgroup can keep its processes out of every scope by the extended attribute
//! `user.pagefold.avoid`, and a cgroup below it can take its own back in by `user.pagefold.include`: the nearest of the
//! two decides. `user.pagefold.domain` names a domain for everything below.
//!
//! The caller is left out unless named by pid, and so are kernel threads and zombies, which have no memory. A process
//! that ends while this runs is passed over.

pub mod domain;
pub mod dumpable;
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

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeSpec {
    /// These processes.
    pub pids: Vec<i32>,
    /// Processes in these cgroups and below: a path under the cgroup mount, or a cgroup's own path.
    pub cgroups: Vec<PathBuf>,
    /// Processes with the rights of these users: names or numbers.
    pub users: Vec<String>,
    /// Processes running these executables: absolute paths, base names, or the names they were started by.
    pub exes: Vec<String>,
    /// Every process.
    pub all: bool,
}

impl ScopeSpec {
    /// Whether nothing is asked for.
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
    /// The process, held.
    pub process: Process,
    /// Its command name, safe to print.
    pub name: String,
    /// Its executable, where it may be known.
    pub exe: Option<PathBuf>,
    /// Its cgroup: the version 2 path, or where it is only in the root there, that of the version 1 memory controller.
    pub cgroup: Option<String>,
    /// The domain that its cgroups name.
    pub domain: Option<String>,
    /// Its effective user.
    pub uid: u32,
}

/// Why there is no scope.
#[derive(Debug, Error)]
pub enum ScopeError {
    /// Nothing was asked for.
    #[error("nothing is in scope: name programs by --pid, --cgroup, --user or --exe, or take --all")]
    Empty,
    /// There is no such process.
    #[error("there is no process {0}")]
    UnknownPid(i32),
    /// There is no such user.
    #[error("there is no user {0}")]
    UnknownUser(String),
    /// There is no such cgroup.
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
    /// A process was asked for that its cgroup keeps out.
    #[error("process {pid} is in cgroup {cgroup}, which is to be avoided (user.pagefold.avoid)")]
    Avoided {
        /// The process.
        pid: i32,
        /// The cgroup with the attribute.
        cgroup: String,
    },
    /// Everything asked for exists, and no process answers to it.
    #[error("no process matches {0}")]
    NoMatch(String),
    /// The process list cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The directory.
        path: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Finds the processes that are asked for, by ascending pid.
pub fn resolve(spec: &ScopeSpec, roots: &Roots) -> Result<Vec<Scoped>, ScopeError> {
    resolve_without(spec, roots, &[i32::try_from(std::process::id()).unwrap_or(0)])
}

/// The same, leaving out the given processes (the caller and its helpers) unless they are named by pid.
pub fn resolve_without(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<Scoped>, ScopeError> {
    let scoped = resolve_among(spec, roots, |pid| !left_out.contains(&pid))?;
    if scoped.is_empty() { Err(ScopeError::NoMatch(spec.to_string())) } else { Ok(scoped) }
}

/// The same, looking only at those of the processes not named by pid that `ask` wants looked at. There may be none.
pub(crate) fn resolve_among(
    spec: &ScopeSpec,
    roots: &Roots,
    mut ask: impl FnMut(i32) -> bool,
) -> Result<Vec<Scoped>, ScopeError> {
    if spec.is_empty() {
        return Err(ScopeError::Empty);
    }
    let wanted = Wanted {
        users: spec.users.iter().map(|user| user_id(user)).collect::<Result<_, _>>()?,
        cgroups: spec.cgroups.iter().map(|path| CgroupWish::of(path, roots)).collect::<Result<_, _>>()?,
        exes: &spec.exes,
        all: spec.all,
    };
    let named: BTreeSet<i32> = spec.pids.iter().copied().collect();
    let mut attributes = Attributes { root: &roots.cgroup, seen: HashMap::new() };
    let mut scoped = Vec::new();
    let selective = wanted.all || !(wanted.users.is_empty() && wanted.cgroups.is_empty() && wanted.exes.is_empty());
    let others = if selective { list(&roots.proc)? } else { Vec::new() };
    let others = others.into_iter().filter(|&pid| ask(pid));
    for pid in named.iter().copied().chain(others).collect::<BTreeSet<_>>() {
        let is_named = named.contains(&pid);
        match look(pid, roots, is_named, &wanted, &mut attributes) {
            Ok(Look::In(found)) => scoped.push(*found),
            Ok(Look::Avoided(cgroup)) if is_named => return Err(ScopeError::Avoided { pid, cgroup }),
            Err(_) if is_named => return Err(ScopeError::UnknownPid(pid)),
            // Not meant; or ended meanwhile, or hidden from us (proc mounted with hidepid).
            Ok(_) | Err(_) => {}
        }
    }
    Ok(scoped)
}

/// The selectors, resolved.
struct Wanted<'a> {
    users: Vec<u32>,
    cgroups: Vec<CgroupWish>,
    exes: &'a [String],
    all: bool,
}

enum Look {
    In(Box<Scoped>),
    Out,
    Avoided(String),
}

fn look(
    pid: i32,
    roots: &Roots,
    is_named: bool,
    wanted: &Wanted<'_>,
    attributes: &mut Attributes<'_>,
) -> Result<Look, ReadError> {
    let process = Process::open_at(&roots.proc, pid)?;
    let stat = process.stat()?;
    if !is_named && (stat.kernel_thread || matches!(stat.state, b'Z' | b'X')) {
        return Ok(Look::Out);
    }
    let status = Status::of(&process)?;
    if status.thread_group != pid {
        return Err(ReadError::Vanished { pid }); // a thread's number, not a process's
    }
    let exe = match exe_of(&process) {
        Err(ReadError::Denied { .. }) => None,
        other => other?,
    };
    let uid = status.effective_uid();
    let is_wanted = is_named
        || wanted.all
        || wanted.users.contains(&uid)
        || wanted.exes.iter().any(|exe_wish| runs(exe_wish, exe.as_deref(), &stat.comm));
    if !is_wanted && wanted.cgroups.is_empty() {
        return Ok(Look::Out);
    }
    let cgroups = match process.read_file("cgroup") {
        Ok(text) => parse_cgroups(&text),
        Err(ReadError::Absent { .. }) => Vec::new(), // a kernel without cgroups
        Err(error) => return Err(error),
    };
    if !is_wanted && !wanted.cgroups.iter().any(|wish| cgroups.iter().any(|cgroup| wish.holds(cgroup))) {
        return Ok(Look::Out);
    }
    if let Some(avoided) = attributes.avoided(&cgroups) {
        return Ok(Look::Avoided(avoided));
    }
    let domain = attributes.domain(&cgroups);
    let cgroup = cgroups
        .iter()
        .find(|cgroup| cgroup.controllers.is_empty() && cgroup.path != "/")
        .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers == "memory" && cgroup.path != "/"))
        .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers.is_empty()))
        .map(|cgroup| cgroup.path.clone());
    Ok(Look::In(Box::new(Scoped { process, name: printable(&stat.comm), exe, cgroup, domain, uid })))
}

/// Whether a process runs the program that is asked for.
pub(crate) fn runs(wish: &str, exe: Option<&Path>, comm: &[u8]) -> bool {
    if wish.starts_with('/') {
        let bytes = exe.map_or(&[][..], |exe| exe.as_os_str().as_bytes());
        return bytes.strip_suffix(b" (deleted)").unwrap_or(bytes) == wish.as_bytes();
    }
    // The executable's name or the name it was started by: Debian's redis-server is a link to redis-check-rdb. The
    // latter is cut off after 15 bytes.
    let (wish, name) = (wish.as_bytes(), program_name(exe, comm));
    let cut_off = comm.len() == 15 && wish.starts_with(comm) && (exe.is_none() || !name.starts_with(comm));
    name == wish || comm == wish || cut_off
}

fn list(proc: &Path) -> Result<Vec<i32>, ScopeError> {
    let error = |source| ScopeError::Io { path: proc.display().to_string(), source };
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc).map_err(error)? {
        pids.extend(entry.map_err(error)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}

/// The number of a user given by name or number.
pub fn user_id(user: &str) -> Result<u32, ScopeError> {
    let unknown = || ScopeError::UnknownUser(printable(user.as_bytes()));
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let name = CString::new(user).map_err(|_| unknown())?;
    let mut buffer = vec![0; 16 << 10];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: the name is NUL-terminated; record, buffer and result pointer live through the call and the buffer's
    // length is its own.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return Err(unknown());
    }
    // SAFETY: a result that is not null points to the record, which the call has filled in.
    Ok(unsafe { (*found).pw_uid })
}

/// A cgroup that was asked for.
#[derive(Debug)]
struct CgroupWish {
    /// The mount's directory, when the path said which: `memory`, `unified`, or empty for a pure version 2 system.
    mount: Option<String>,
    path: PathBuf,
}

impl CgroupWish {
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
        // Only version 2 has cgroup.controllers, and there the mount point is the root cgroup itself.
        if roots.cgroup.join("cgroup.controllers").exists() {
            return Ok(Self { mount: Some(String::new()), path: below });
        }
        let mut parts = below.components();
        let mount = parts.next().ok_or_else(no_cgroup)?.as_os_str().to_string_lossy().into_owned();
        Ok(Self { mount: Some(mount), path: parts.as_path().to_owned() })
    }

    /// Whether the cgroup is this one or below it.
    fn holds(&self, cgroup: &Cgroup) -> bool {
        let mount_fits = self.mount.as_deref().is_none_or(|mount| cgroup.mounts().contains(&mount));
        mount_fits && Path::new(&cgroup.path).strip_prefix("/").is_ok_and(|path| path.starts_with(&self.path))
    }
}

/// The extended attributes of cgroups, each read once.
struct Attributes<'a> {
    root: &'a Path,
    seen: HashMap<(PathBuf, &'static str), Option<Vec<u8>>>,
}

impl Attributes<'_> {
    /// The cgroup that keeps the process out, if one does. In each hierarchy the nearest word counts.
    fn avoided(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                // On one cgroup, avoiding comes before including.
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

    /// The trust domain that the nearest cgroup names. One that belongs to a user does not count: he could join another's.
    fn domain(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                let named = attributes.get(directory, "user.pagefold.domain")?;
                let owner = fs::metadata(directory).ok()?.uid();
                [0, own_uid()].contains(&owner).then(|| printable(&named))
            })
        })
    }

    /// Asks the cgroup's directory and then its parents', up to the hierarchy's root.
    fn nearest<T>(&mut self, cgroup: &Cgroup, mut ask: impl FnMut(&mut Self, &Path) -> Option<T>) -> Option<T> {
        let inner = Path::new(&cgroup.path).strip_prefix("/").ok()?;
        // A path that leads out of our cgroup namespace begins with "..": its directories are not those named so here.
        if inner.components().any(|part| !matches!(part, Component::Normal(_))) {
            return None;
        }
        let root = self.root;
        let mount = cgroup.mounts().into_iter().map(|mount| root.join(mount)).find(|mount| mount.is_dir())?;
        inner.ancestors().find_map(|below| ask(self, &mount.join(below)))
    }

    fn get(&mut self, directory: &Path, name: &'static str) -> Option<Vec<u8>> {
        self.seen.entry((directory.to_owned(), name)).or_insert_with(|| xattr(directory, name)).clone()
    }
}

/// An attribute that is set to nothing at all means yes too.
fn means_yes(value: &[u8]) -> bool {
    !matches!(value.trim_ascii(), b"0" | b"no" | b"false")
}

/// Reads an extended attribute. A file system without them, or a directory that has gone, has none.
fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let name = CString::new(name).ok()?;
    // The kernel's limit for any value: with a smaller buffer a longer one would look as if there were none.
    let mut value = vec![0u8; 64 << 10];
    // SAFETY: path and name are NUL-terminated; the buffer has the given length.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(length).ok()?);
    Some(value)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
