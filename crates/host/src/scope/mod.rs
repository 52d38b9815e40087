//! The scope: which processes pagefold manages, selected by pid, cgroup, user, executable or workload, or all of them.
//!
//! A process is in scope if any selector matches it. Its owner can opt out ([`opt_out`]), and then we leave it alone. A
//! cgroup opts its processes out by the extended attribute `user.pagefold.avoid`, and a cgroup below it can include its
//! own again by `user.pagefold.include`: the nearest of the two decides. `user.pagefold.domain` sets the trust domain
//! of a subtree. The owner of a cgroup may set `avoid`; the other two count only on cgroups that root alone can change.
//! [`exe`] says how we match executables.
//!
//! We leave out kernel threads and zombies, which have no memory, and the caller unless it's selected by pid. We skip
//! processes that end during the resolution.

mod attributes;
pub mod deny_list;
pub mod domain;
pub mod dumpable;
mod dumpable_beside;
mod engine_names;
pub mod exclude;
pub mod exe;
pub mod kept_out;
pub mod new_processes;
pub mod opt_out;
pub mod opt_out_qemu;
pub mod opt_out_unit;
mod process_info;
pub mod rule;
mod selection;
mod selector;
pub mod workload;

pub use process_info::{CgroupInfo, ProcessInfo};
pub(crate) use selection::{Selection, cgroups_of};
pub use selector::{Matcher, Selector, user_id};

use crate::os::raise_descriptor_limit;
use pagefold_procmem::Roots;
use pagefold_procmem::process::{Process, ProcessKey, ReadError, is_for_lack_of_files};
use std::collections::BTreeSet;
use std::io;
use thiserror::Error;

/// The selectors of a scope, in the order we try them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeSpec(pub Vec<Selector>);

impl ScopeSpec {
    pub fn of_pids(pids: impl IntoIterator<Item = i32>) -> Self {
        Self(pids.into_iter().map(Selector::Pid).collect())
    }

    /// A scope of these processes, of the names of each kind ([`Selector::NAMED`]), or of all processes.
    pub fn of(pids: &[i32], names: &[(&str, &[String])], all: bool) -> Self {
        let mut spec = Self::of_pids(pids.iter().copied());
        for (kind, names) in names {
            for name in *names {
                spec.0.extend(Selector::named(kind, name.clone()));
            }
        }
        if all {
            spec.0.push(Selector::All);
        }
        spec
    }

    /// The selectors that later processes can match, too.
    #[must_use]
    pub fn without_pids(&self) -> Self {
        let mut others = self.clone();
        others.0.retain(|selector| !matches!(selector, Selector::Pid(_)));
        others
    }

    /// Whether new processes can enter the scope.
    pub fn is_selective(&self) -> bool {
        self.0.iter().any(|selector| !matches!(selector, Selector::Pid(_)))
    }
}

impl std::fmt::Display for ScopeSpec {
    /// Displays the scope as command-line flags.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags: Vec<String> = self.0.iter().map(Selector::to_string).collect();
        f.write_str(&flags.join(" "))
    }
}

/// Why we can't resolve a scope.
#[derive(Debug, Error)]
pub enum ScopeError {
    #[error(
        "nothing is in scope: select processes by --pid, --exe, --unit, --container, --pod, --vm, --cgroup or --user, or \
             all by --all"
    )]
    Empty,
    #[error("there is no process {0}")]
    UnknownPid(i32),
    /// A selected process exists, but we can't read the facts that decide on it; or we have too many files open to read
    /// any process.
    #[error("process {pid} cannot be read: {source}")]
    Unreadable { pid: i32, source: ReadError },
    #[error("there is no user {0}")]
    UnknownUser(String),
    #[error("there is no cgroup {0}")]
    NoCgroup(String),
    #[error("no process matches {0}")]
    NoMatch(String),
    /// Processes match by name only, and any user can choose such a name.
    #[error("no process matches {scope}: {why}")]
    NameOnly {
        scope: String,
        why: String,
        /// The options that select such processes.
        ways: &'static str,
    },
    /// We can't read the process list.
    #[error("cannot read {path}: {source}")]
    Io { path: String, source: io::Error },
}

impl ScopeError {
    /// Whether we, or all processes together, have too many files open.
    pub fn is_for_lack_of_files(&self) -> bool {
        match self {
            Self::Unreadable { source, .. } => source.is_for_lack_of_files(),
            Self::Io { source, .. } => is_for_lack_of_files(source),
            _ => false,
        }
    }
}

/// Finds the processes in scope, by ascending pid, and others that match by name only ([`ProcessInfo::distrust`]).
///
/// # Errors
/// If a selected pid, user or cgroup doesn't exist, or no process matches.
pub fn resolve(spec: &ScopeSpec, roots: &Roots) -> Result<Vec<ProcessInfo>, ScopeError> {
    resolve_without(spec, roots, &[own_pid()])
}

/// Like [`resolve`], but leaves out the given processes (the caller and its helpers) unless they're selected by pid.
pub fn resolve_without(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<ProcessInfo>, ScopeError> {
    resolved(Selection::new(&spec.0, roots)?, spec, left_out)
}

/// Like [`resolve_without`], but for undoing, which needs no trust: we match programs by name, even if other users can
/// change their files. A pid stands for the process and its descendants.
pub fn resolve_for_undoing(spec: &ScopeSpec, roots: &Roots, left_out: &[i32]) -> Result<Vec<ProcessInfo>, ScopeError> {
    resolved(Selection::new(&spec.0, roots)?.for_undoing(), spec, left_out)
}

/// Like [`resolve_for_undoing`], but the result may be empty: processes may have been kept out before they ended.
pub fn resolve_for_including(
    spec: &ScopeSpec,
    roots: &Roots,
    left_out: &[i32],
) -> Result<Vec<ProcessInfo>, ScopeError> {
    let mut living = spec.clone();
    loop {
        match resolve_for_undoing(&living, roots, left_out) {
            Err(ScopeError::UnknownPid(pid)) if living.0.len() > 1 => {
                living.0.retain(|selector| *selector != Selector::Pid(pid));
            }
            Err(ScopeError::NoMatch(_) | ScopeError::NoCgroup(_) | ScopeError::UnknownPid(_)) => return Ok(Vec::new()),
            found => return found,
        }
    }
}

/// Like [`resolve_for_undoing`], but some time later, to find processes that have started since. `found` are the
/// processes found earlier: a pid that has passed to another process selects nothing. The result may be empty.
pub fn resolve_for_undoing_again(
    spec: &ScopeSpec,
    found: &BTreeSet<ProcessKey>,
    roots: &Roots,
    left_out: &[i32],
) -> Vec<ProcessInfo> {
    let mut spec = spec.clone();
    spec.0.retain(|selector| match selector {
        Selector::Pid(pid) => Process::open_at(&roots.proc, *pid).is_ok_and(|it| found.contains(&it.key())),
        _ => true,
    });
    resolve_for_undoing(&spec, roots, left_out).unwrap_or_default()
}

pub fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

/// Like [`resolve`], for a scope on a command line: each selector must match a process. One that doesn't is most likely
/// a typo.
pub fn resolve_each(spec: &ScopeSpec, roots: &Roots) -> Result<Vec<ProcessInfo>, ScopeError> {
    let found = resolve(spec, roots)?;
    for selector in &spec.0 {
        let matcher = selector.resolve(roots)?;
        // If the kernel hides a process's cgroups, any selector may match it.
        if !found.iter().any(|info| info.cgroups.are_hidden() || matcher.matches_by_name(info)) {
            return Err(ScopeError::NoMatch(selector.to_string()));
        }
    }
    Ok(found)
}

fn resolved(mut selection: Selection, spec: &ScopeSpec, left_out: &[i32]) -> Result<Vec<ProcessInfo>, ScopeError> {
    raise_descriptor_limit();
    let found = selection.resolve(|pid| !left_out.contains(&pid))?;
    if found.iter().any(|info| info.distrust.is_none()) {
        return Ok(found);
    }
    let scope = spec.to_string();
    let Some((info, why)) = found.iter().find_map(|info| Some((info, info.distrust.clone()?))) else {
        return Err(ScopeError::NoMatch(scope));
    };
    let ways = why.ways();
    let why = why.clause(&format!("the executable of process {}, {},", info.pid(), info.exe_text()));
    Err(ScopeError::NameOnly { scope, why, ways })
}

/// Like [`resolve`], but considers only processes selected by pid and ones that `is_candidate` accepts. The result may
/// be empty: cgroups and users need not exist.
pub fn resolve_among(
    spec: &ScopeSpec,
    roots: &Roots,
    is_candidate: impl FnMut(i32) -> bool,
) -> Result<Vec<ProcessInfo>, ScopeError> {
    Selection::of_existing(&spec.0, roots).resolve(is_candidate)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
