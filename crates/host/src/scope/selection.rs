//! Selecting processes: the selectors of a scope, applied to what a process shows.

use super::attributes::Attributes;
use super::exe::{Distrust, Exe, Matching, is_named};
use super::opt_out::{self, OptOut};
use super::selectors::{CgroupSelector, user_id};
use super::{ScopeError, ScopeSpec, Scoped};
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::{Cgroup, parse_cgroups};
use pagefold_procmem::headroom::group_dir;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::status::Status;
use pagefold_text::escape::printable;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The selectors, resolved.
pub(crate) struct Selection<'a> {
    roots: &'a Roots,
    named: BTreeSet<i32>,
    /// The descendants of named processes, each with the named one.
    descendants: BTreeMap<i32, i32>,
    users: Vec<u32>,
    cgroups: Vec<CgroupSelector>,
    exes: &'a [String],
    /// Whether something is to be undone, for which no trust is needed: an executable need only have the name, be it one that any
    /// user can choose, and a pid stands for the process and its descendants.
    for_undoing: bool,
    all: bool,
    attributes: Attributes<'a>,
    /// A process, and its executable, that an `--exe` matches by name only, and why that is not enough.
    pub(super) name_only: Option<(i32, String, Distrust)>,
}

/// The facts about a process that the selectors judge.
pub(crate) struct Candidate<'a> {
    pub(crate) pid: i32,
    pub(crate) is_named: bool,
    pub(crate) uid: u32,
    pub(crate) exe: Option<&'a Exe>,
    pub(crate) comm: &'a [u8],
}

/// What the cgroups of a process say about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CgroupFacts {
    /// Opt-outs by its cgroups.
    pub(crate) opt_outs: Vec<OptOut>,
    /// The trust domain that they set.
    pub(crate) domain: Option<String>,
    /// The path of its cgroup: [`Scoped::cgroup`].
    pub(crate) path: Option<String>,
    /// The directories of those that can limit memory, each with the mount point that it is below.
    pub(crate) limiting: Vec<(PathBuf, PathBuf)>,
    /// Whether a selected cgroup contains it.
    selected: bool,
}

impl<'a> Selection<'a> {
    pub(crate) fn new(spec: &'a ScopeSpec, roots: &'a Roots) -> Result<Self, ScopeError> {
        if spec.is_empty() {
            return Err(ScopeError::Empty);
        }
        let users = spec.users.iter().map(|user| user_id(user)).collect::<Result<_, _>>()?;
        let cgroups = spec.cgroups.iter().map(|path| CgroupSelector::of(path, roots)).collect::<Result<_, _>>()?;
        Ok(Self::with(spec, roots, users, cgroups))
    }

    /// The same without those cgroups and users that do not exist now.
    pub(crate) fn of_existing(spec: &'a ScopeSpec, roots: &'a Roots) -> Self {
        let users = spec.users.iter().filter_map(|user| user_id(user).ok()).collect();
        let cgroups = spec.cgroups.iter().filter_map(|path| CgroupSelector::of(path, roots).ok()).collect();
        Self::with(spec, roots, users, cgroups)
    }

    fn with(spec: &'a ScopeSpec, roots: &'a Roots, users: Vec<u32>, cgroups: Vec<CgroupSelector>) -> Self {
        Self {
            roots,
            named: spec.pids.iter().copied().collect(),
            descendants: BTreeMap::new(),
            users,
            cgroups,
            exes: &spec.exes,
            for_undoing: false,
            all: spec.all,
            attributes: Attributes::new(&roots.cgroup),
            name_only: None,
        }
    }

    /// The same, for undoing.
    pub(super) fn for_undoing(self) -> Self {
        Self { for_undoing: true, ..self }
    }

    pub(super) fn resolve(&mut self, is_candidate: impl FnMut(i32) -> bool) -> Result<Vec<Scoped>, ScopeError> {
        let mut scoped = Vec::new();
        let selective = self.all || !(self.users.is_empty() && self.cgroups.is_empty() && self.exes.is_empty());
        let with_descendants = self.for_undoing && !self.named.is_empty();
        let mut others = if selective || with_descendants { pids_below(&self.roots.proc)? } else { Vec::new() };
        let mut is_candidate = is_candidate;
        others.retain(|&pid| is_candidate(pid));
        if with_descendants {
            self.descendants = self.descendants_of_named(&others);
        }
        if !selective {
            others = self.descendants.keys().copied().collect();
        }
        for pid in self.named.iter().copied().chain(others).collect::<BTreeSet<_>>() {
            let is_named = self.named.contains(&pid);
            match self.examine(pid, is_named) {
                Ok(Some(found)) => scoped.push(found),
                Err(ReadError::Vanished { .. }) if is_named => return Err(ScopeError::UnknownPid(pid)),
                Err(source) if is_named => return Err(ScopeError::Unreadable { pid, source }),
                // Out of scope; or ended meanwhile, or hidden (proc mounted with hidepid).
                Ok(_) | Err(_) => {}
            }
        }
        Ok(scoped)
    }

    /// Those of these processes that descend from named ones. What a process that is not among them has started is left out, too.
    fn descendants_of_named(&self, pids: &[i32]) -> BTreeMap<i32, i32> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for &pid in pids {
            // One that has ended meanwhile is selected by nothing.
            if let Ok(stat) = Process::open_at(&self.roots.proc, pid).and_then(|process| process.stat()) {
                children.entry(stat.parent).or_default().push(pid);
            }
        }
        let mut descendants = BTreeMap::new();
        for &named in &self.named {
            let mut parents = vec![named];
            while let Some(parent) = parents.pop() {
                for &child in children.get(&parent).into_iter().flatten() {
                    if descendants.insert(child, named).is_none() {
                        parents.push(child);
                    }
                }
            }
        }
        descendants
    }

    /// The process, if it is in scope.
    fn examine(&mut self, pid: i32, is_named: bool) -> Result<Option<Scoped>, ReadError> {
        let process = Process::open_at(&self.roots.proc, pid)?;
        let stat = process.stat()?;
        if !is_named && (stat.kernel_thread || stat.has_ended()) {
            return Ok(None);
        }
        let status = Status::of(&process)?;
        if status.thread_group != pid {
            return Err(ReadError::Vanished { pid }); // a thread ID, not a pid
        }
        let exe = match Exe::of(&process) {
            Err(ReadError::Denied { .. }) => None,
            other => other?,
        };
        let uid = status.effective_uid();
        let candidate = Candidate { pid, is_named, uid, exe: exe.as_ref(), comm: &stat.comm };
        let is_selected = self.selects(&candidate);
        if !is_selected && self.cgroups.is_empty() {
            return Ok(None);
        }
        let cgroups = self.cgroup_facts(&cgroups_of(&process)?);
        if !is_selected && !cgroups.selected {
            return Ok(None);
        }
        if let Some(exe) = &exe {
            // Found out while its file is there.
            let _ = exe.trust();
        }
        let CgroupFacts { opt_outs, domain, path: cgroup, .. } = cgroups;
        let name = printable(&stat.comm);
        let by_pid = if is_named { Some(pid) } else { self.descendants.get(&pid).copied() };
        Ok(Some(Scoped { process, name, exe, cgroup, domain, opt_outs, uid, by_pid }))
    }

    /// Whether a selector other than a cgroup matches.
    fn selects(&mut self, candidate: &Candidate<'_>) -> bool {
        if candidate.is_named || self.all || self.users.contains(&candidate.uid) {
            return true;
        }
        if self.descendants.contains_key(&candidate.pid) {
            return true;
        }
        let Some(exe) = candidate.exe else {
            return self.for_undoing && self.exes.iter().any(|selector| is_named(selector, None, candidate.comm));
        };
        self.exes.iter().any(|selector| match exe.matches(selector, candidate.comm) {
            Matching::Yes => true,
            Matching::NameOnly(_) if self.for_undoing => true,
            Matching::No => false,
            Matching::NameOnly(why) => {
                self.name_only.get_or_insert_with(|| (candidate.pid, printable(exe.as_os_str().as_bytes()), why));
                false
            }
        })
    }

    /// Whether a process is still in scope.
    pub(crate) fn contains(&mut self, candidate: &Candidate<'_>, cgroups: &CgroupFacts) -> bool {
        self.selects(candidate) || cgroups.selected
    }

    /// What the cgroups in the text of `/proc/PID/cgroup` say. Attributes are read once for all processes.
    pub(crate) fn cgroup_facts(&mut self, text: &[u8]) -> CgroupFacts {
        let cgroups = parse_cgroups(text);
        let avoided = self.attributes.avoided(&cgroups).map(|cgroup| OptOut::Attribute { cgroup });
        CgroupFacts {
            opt_outs: avoided.into_iter().chain(opt_out::by_files(&cgroups, self.roots)).collect(),
            domain: self.attributes.domain(&cgroups),
            path: cgroups
                .iter()
                .find(|cgroup| cgroup.controllers.is_empty() && cgroup.path != "/")
                .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers == "memory" && cgroup.path != "/"))
                .or_else(|| cgroups.iter().find(|cgroup| cgroup.controllers.is_empty()))
                .map(|cgroup| cgroup.path.clone()),
            limiting: cgroups.iter().filter_map(|cgroup| group_dir(cgroup, &self.roots.cgroup)).collect(),
            selected: self.selects_cgroups(&cgroups),
        }
    }

    /// Whether a selected cgroup is one of these, or contains one.
    fn selects_cgroups(&self, cgroups: &[Cgroup]) -> bool {
        self.cgroups.iter().any(|selector| cgroups.iter().any(|cgroup| selector.matches(cgroup)))
    }

    /// Whether any selector matches a process with this text in `/proc/PID/cgroup`.
    pub(super) fn matches(&mut self, candidate: &Candidate<'_>, cgroups: &[u8]) -> bool {
        self.selects(candidate) || (!self.cgroups.is_empty() && self.selects_cgroups(&parse_cgroups(cgroups)))
    }
}

/// The text of `/proc/PID/cgroup`, empty on kernels without cgroups.
pub(crate) fn cgroups_of(process: &Process) -> Result<Vec<u8>, ReadError> {
    match process.read_file("cgroup") {
        Err(ReadError::Absent { .. }) => Ok(Vec::new()),
        other => other,
    }
}

fn pids_below(proc: &Path) -> Result<Vec<i32>, ScopeError> {
    let error = |source| ScopeError::Io { path: proc.display().to_string(), source };
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc).map_err(error)? {
        pids.extend(entry.map_err(error)?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}
