//! The scope: which processes pagefold manages, selected by pid, cgroup, user or executable, or all of them.
//!
//! A process is in scope if any selector matches it. Its owner can opt out ([`opt_out`]), and then it is left alone. A cgroup
//! does so for its processes by the extended attribute `user.pagefold.avoid`, and a cgroup below it can include its own again
//! by `user.pagefold.include`: the nearest of the two decides. `user.pagefold.domain` sets the trust domain of a subtree. The
//! owner of a cgroup may set `avoid`; the other two count only on cgroups that root alone can change. Executables are matched as
//! [`exe`] says.
//!
//! The caller is left out unless selected by pid, and so are kernel threads and zombies, which have no memory. Processes
//! that end during the resolution are skipped.

mod attributes;
pub mod deny_list;
pub mod domain;
pub mod dumpable;
pub mod eligible;
pub mod exclude;
pub mod exe;
pub mod kept_out;
pub mod new_processes;
pub mod opt_out;
pub(crate) mod opt_out_qemu;
pub(crate) mod opt_out_unit;
pub mod rule;
mod selection;
mod selectors;
pub mod workload;

pub(crate) use selection::{Candidate, CgroupFacts, Selection, cgroups_of};
pub use selectors::user_id;

use self::exe::{Distrust, Exe};
use self::opt_out::OptOut;
use pagefold_procmem::Roots;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_text::escape::printable;
use std::collections::BTreeSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
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

    /// The names of all selectors, in the order of [`Self::split`].
    pub fn names(&self) -> Vec<SelectorName> {
        let of = |kind, name: &[u8]| SelectorName { kind, name: printable(name) };
        let pids = self.pids.iter().map(|pid| of("pid", pid.to_string().as_bytes()));
        let cgroups = self.cgroups.iter().map(|path| of("cgroup", path.as_os_str().as_bytes()));
        let users = self.users.iter().map(|user| of("user", user.as_bytes()));
        let exes = self.exes.iter().map(|exe| of("exe", exe.as_bytes()));
        let all = self.all.then(|| of("all", b""));
        pids.chain(cgroups).chain(users).chain(exes).chain(all).collect()
    }

    /// Each selector as a scope of its own, in the order in which they're tried: [`Scoped::selected_by`] is a position in it.
    pub fn split(&self) -> Vec<Self> {
        let mut single = Vec::new();
        for &pid in &self.pids {
            single.push(Self { pids: vec![pid], ..Self::default() });
        }
        for cgroup in &self.cgroups {
            single.push(Self { cgroups: vec![cgroup.clone()], ..Self::default() });
        }
        for user in &self.users {
            single.push(Self { users: vec![user.clone()], ..Self::default() });
        }
        for exe in &self.exes {
            single.push(Self { exes: vec![exe.clone()], ..Self::default() });
        }
        if self.all {
            single.push(Self { all: true, ..Self::default() });
        }
        single
    }
}

impl std::fmt::Display for ScopeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut flags = Vec::new();
        for SelectorName { kind, name } in self.names() {
            flags.push(if kind == "all" { "--all".to_owned() } else { format!("--{kind} {name}") });
        }
        f.write_str(&flags.join(" "))
    }
}

/// What a selector is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorName {
    /// `pid`, `cgroup`, `user`, `exe` or `all`.
    pub kind: &'static str,
    /// As the administrator wrote it, safe to print. Empty for `all`.
    pub name: String,
}

/// A process in scope.
#[derive(Debug)]
pub struct Scoped {
    /// The process.
    pub process: Process,
    /// Command name, safe to print.
    pub name: String,
    /// Executable, if readable.
    pub exe: Option<Exe>,
    /// Cgroup: the version 2 path or, if that is the root, the path in the version 1 memory hierarchy.
    pub cgroup: Option<String>,
    /// Trust domain set by an attribute of its cgroups.
    pub domain: Option<String>,
    /// Opt-outs by its cgroups.
    pub opt_outs: Vec<OptOut>,
    /// Effective user.
    pub uid: u32,
    /// The selector that has brought it in: a position in [`ScopeSpec::split`].
    pub selected_by: Option<usize>,
    /// The selected pid: its own or, where something is to be undone, that of a process from which it descends.
    pub by_pid: Option<i32>,
}

impl Scoped {
    /// Whether it is selected by its own pid.
    pub fn is_named(&self) -> bool {
        self.by_pid == Some(self.process.pid())
    }
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
    /// A selected process exists, but what decides on it cannot be read.
    #[error("process {pid} cannot be read: {source}")]
    Unreadable { pid: i32, source: ReadError },
    /// A selected user does not exist.
    #[error("there is no user {0}")]
    UnknownUser(String),
    /// A selected cgroup does not exist.
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
    /// No process matches the selectors.
    #[error("no process matches {0}")]
    NoMatch(String),
    /// Processes match by name only.
    #[error("no process matches {scope}: the executable of process {pid}, {exe}, {why}")]
    NameOnly { scope: String, pid: i32, exe: String, why: Distrust },
    /// The process list cannot be read.
    #[error("cannot read {path}: {source}")]
    Io { path: String, source: io::Error },
}

/// Finds the processes in scope, by ascending pid.
///
/// # Errors
/// If a selected pid, user or cgroup does not exist, or no process matches.
pub fn resolve(spec: &ScopeSpec, roots: &Roots) -> Result<Vec<Scoped>, ScopeError> {
    resolve_without(spec, roots, &[own_pid()])
}

/// The same, leaving out the given processes (the caller and its helpers) unless they are selected by pid.
pub fn resolve_without(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<Scoped>, ScopeError> {
    resolved(Selection::new(spec, roots)?, spec, left_out)
}

/// The same for undoing, which needs no trust: programs are matched by name, even if other users can change their files. A pid
/// stands for the process and its descendants.
pub fn resolve_for_undoing(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<Scoped>, ScopeError> {
    resolved(Selection::new(spec, roots)?.for_undoing(), spec, left_out)
}

/// The same some time later, to find processes that have started meanwhile. `found` are those found before: a pid that has passed to
/// another process selects nothing. The result may be empty.
pub fn resolve_for_undoing_again(
    spec: &ScopeSpec,
    found: &BTreeSet<(i32, u64)>,
    roots: &Roots,
    left_out: &[i32],
) -> Vec<Scoped> {
    let mut spec = spec.clone();
    spec.pids.retain(|&pid| Process::open_at(&roots.proc, pid).is_ok_and(|process| found.contains(&process.key())));
    resolve_for_undoing(&spec, roots, left_out).unwrap_or_default()
}

/// The pid of this process.
pub fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

fn resolved(mut selection: Selection<'_>, spec: &ScopeSpec, left_out: &[i32]) -> Result<Vec<Scoped>, ScopeError> {
    let scoped = selection.resolve(|pid| !left_out.contains(&pid))?;
    match selection.name_only.take() {
        _ if !scoped.is_empty() => Ok(scoped),
        Some((pid, exe, why)) => Err(ScopeError::NameOnly { scope: spec.to_string(), pid, exe, why }),
        None => Err(ScopeError::NoMatch(spec.to_string())),
    }
}

/// The same, considering only processes selected by pid and those that `is_candidate` accepts. The result may be empty: cgroups and
/// users need not exist.
pub(crate) fn resolve_among(
    spec: &ScopeSpec,
    roots: &Roots,
    is_candidate: impl FnMut(i32) -> bool,
) -> Result<Vec<Scoped>, ScopeError> {
    Selection::of_existing(spec, roots).resolve(is_candidate)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
