//! Selects processes: applies the selectors of a scope to the facts about a process.

use super::attributes::Attributes;
use super::exe::{Distrust, Exe, Matching, is_named};
use super::opt_out::{self, OptOut};
use super::selector::{Candidate, Matcher, Selector};
use super::{ScopeError, Scoped};
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
    /// In the order we try them. `None`: the user or cgroup doesn't exist.
    matchers: Vec<Option<Matcher>>,
    named: BTreeSet<i32>,
    /// The descendants of named processes, each with the named one.
    descendants: BTreeMap<i32, i32>,
    /// Whether we undo something, which needs no trust: an executable need only have the name, even one that any user
    /// can choose, and a pid stands for the process and its descendants.
    for_undoing: bool,
    attributes: Attributes<'a>,
    /// A process, and its executable, that an `--exe` matches by name only, and why that isn't enough.
    pub(super) name_only: Option<(i32, String, Distrust)>,
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
    /// The cgroups' directories that can limit memory, each with its mount point.
    pub(crate) limiting: Vec<(PathBuf, PathBuf)>,
    /// The selector of a cgroup that contains it.
    selected_by: Option<usize>,
}

impl<'a> Selection<'a> {
    pub(crate) fn new(selectors: &[Selector], roots: &'a Roots) -> Result<Self, ScopeError> {
        if selectors.is_empty() {
            return Err(ScopeError::Empty);
        }
        let mut matchers = Vec::new();
        for selector in selectors {
            matchers.push(Some(selector.resolve_existing(roots)?));
        }
        Ok(Self::with(matchers, roots))
    }

    /// The same without cgroups and users that don't exist now.
    pub(crate) fn of_existing(selectors: &[Selector], roots: &'a Roots) -> Self {
        let matchers = selectors.iter().map(|selector| selector.resolve_existing(roots).ok());
        Self::with(matchers.collect(), roots)
    }

    fn with(matchers: Vec<Option<Matcher>>, roots: &'a Roots) -> Self {
        let mut named = BTreeSet::new();
        for matcher in &matchers {
            if let Some(Matcher::Pid(pid)) = matcher {
                named.insert(*pid);
            }
        }
        Self {
            roots,
            matchers,
            named,
            descendants: BTreeMap::new(),
            for_undoing: false,
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
        let selective = self.matchers.iter().flatten().any(|matcher| !matches!(matcher, Matcher::Pid(_)));
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
            match self.examine(pid) {
                Ok(Some(found)) => scoped.push(found),
                Err(ReadError::Vanished { .. }) if is_named => return Err(ScopeError::UnknownPid(pid)),
                Err(source) if is_named => return Err(ScopeError::Unreadable { pid, source }),
                // Out of scope; or ended meanwhile, or hidden (proc mounted with hidepid).
                Ok(_) | Err(_) => {}
            }
        }
        Ok(scoped)
    }

    /// The descendants of named processes among these. If a process isn't among them we leave out its children, too.
    fn descendants_of_named(&self, pids: &[i32]) -> BTreeMap<i32, i32> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for &pid in pids {
            // If a process has ended meanwhile, nothing selects it.
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

    /// Whether the cgroups of a process can matter, so that they're worth reading.
    fn has_cgroups(&self) -> bool {
        self.matchers.iter().any(|matcher| matches!(matcher, Some(Matcher::Cgroup(_))))
    }

    /// The process, if it's in scope.
    fn examine(&mut self, pid: i32) -> Result<Option<Scoped>, ReadError> {
        let is_named = self.named.contains(&pid);
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
        let by_pid = if is_named { Some(pid) } else { self.descendants.get(&pid).copied() };
        let candidate = Candidate { pid, by_pid, uid, exe: exe.as_ref(), comm: &stat.comm };
        let by_process = self.by_process(&candidate);
        if by_process.is_none() && !self.has_cgroups() {
            return Ok(None);
        }
        let cgroups = self.cgroup_facts(&cgroups_of(&process)?);
        let selected_by = first_of(by_process, cgroups.selected_by);
        if selected_by.is_none() {
            return Ok(None);
        }
        if let Some(exe) = &exe {
            // We find this out while its file is there.
            let _ = exe.trust();
        }
        let CgroupFacts { opt_outs, domain, path: cgroup, .. } = cgroups;
        let name = printable(&stat.comm);
        Ok(Some(Scoped { process, name, exe, cgroup, domain, opt_outs, uid, selected_by, by_pid }))
    }

    /// The first selector other than a cgroup that matches.
    fn by_process(&mut self, candidate: &Candidate<'_>) -> Option<usize> {
        for (at, matcher) in self.matchers.iter().enumerate() {
            let Some(matcher) = matcher else { continue };
            let selects = match (matcher.matches(candidate, |_| false), matcher) {
                (Matching::Yes, _) => true,
                (Matching::NameOnly(why), _) => {
                    let exe = candidate.exe.map(|exe| printable(exe.as_os_str().as_bytes())).unwrap_or_default();
                    self.name_only.get_or_insert((candidate.pid, exe, why));
                    self.for_undoing
                }
                // We can't read its executable.
                (Matching::No, Matcher::Exe(name)) if candidate.exe.is_none() => {
                    self.for_undoing && is_named(name, None, candidate.comm)
                }
                (Matching::No, _) => false,
            };
            if selects {
                return Some(at);
            }
        }
        None
    }

    /// The first selector that matches a process, if it's still in scope: a position among the selectors.
    pub(crate) fn selected_by(&mut self, candidate: &Candidate<'_>, cgroups: &CgroupFacts) -> Option<usize> {
        first_of(self.by_process(candidate), cgroups.selected_by)
    }

    /// What the cgroups in the text of `/proc/PID/cgroup` say. We read attributes once for all processes.
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
            selected_by: self.by_cgroups(&cgroups),
        }
    }

    /// The first selector of a cgroup that is one of these, or contains one.
    fn by_cgroups(&self, cgroups: &[Cgroup]) -> Option<usize> {
        self.matchers.iter().position(|matcher| match matcher {
            Some(Matcher::Cgroup(selected)) => cgroups.iter().any(|cgroup| selected.matches(cgroup)),
            _ => false,
        })
    }

    /// Whether any selector matches a process with this text in `/proc/PID/cgroup`.
    pub(super) fn matches(&mut self, candidate: &Candidate<'_>, cgroups: &[u8]) -> bool {
        self.by_process(candidate).is_some()
            || (self.has_cgroups() && self.by_cgroups(&parse_cgroups(cgroups)).is_some())
    }
}

/// Which of two selectors comes first.
fn first_of(one: Option<usize>, other: Option<usize>) -> Option<usize> {
    [one, other].into_iter().flatten().min()
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
