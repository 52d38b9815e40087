//! The scope: which processes pagefold manages, selected by pid, cgroup, user or executable, or all of them.
//!
//! A process is in scope if any selector matches it. A cgroup can exclude its processes from every scope by the
//! extended attribute `user.pagefold.avoid`, and a cgroup below it can include its own again by `user.pagefold.include`:
//! the nearest of the two decides. `user.pagefold.domain` sets the trust domain of a subtree.
//!
//! The caller is left out unless selected by pid, and so are kernel threads and zombies, which have no memory. Processes
//! that end during the resolution are skipped.

mod attributes;
pub mod deny_list;
pub mod domain;
pub mod dumpable;
pub mod eligible;
pub mod exclude;
pub mod new_processes;
mod selectors;

pub(crate) use selectors::runs;
pub use selectors::user_id;

use self::attributes::Attributes;
use self::selectors::CgroupSelector;
use crate::proc::Roots;
use crate::proc::cgroup::parse_cgroups;
use crate::proc::process::{Process, ReadError};
use crate::proc::status::{Status, exe_of, printable};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
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
    let mut attributes = Attributes::new(&roots.cgroup);
    let mut scoped = Vec::new();
    let selective = wanted.all || !(wanted.users.is_empty() && wanted.cgroups.is_empty() && wanted.exes.is_empty());
    let others = if selective { pids_below(&roots.proc)? } else { Vec::new() };
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

fn pids_below(proc: &Path) -> Result<Vec<i32>, ScopeError> {
    let error = |source| ScopeError::Io { path: proc.display().to_string(), source };
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc).map_err(error)? {
        pids.extend(entry.map_err(error)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
