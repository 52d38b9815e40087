//! Selects processes: applies the selectors of a scope to the facts about a process.

use super::ScopeError;
use super::attributes::Attributes;
use super::exe::Matching;
use super::opt_out::{self, OptOut};
use super::process_info::{CgroupInfo, ProcessInfo};
use super::selector::{Matcher, Selector};
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::{Cgroup, parse_cgroups};
use pagefold_procmem::headroom::group_dir;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// We read nothing of a cgroup deeper than this. The kernel walks each level again for each file and attribute, and any
/// user with a delegated cgroup can make thousands.
const LEVELS_MOST: usize = 64;
const TOO_DEEP: &str = "a cgroup with more than 64 levels";

/// The selectors, resolved.
pub(crate) struct Selection {
    roots: Roots,
    /// In the order we try them. `None`: the user or cgroup doesn't exist.
    matchers: Vec<Option<Matcher>>,
    named: BTreeSet<i32>,
    /// The descendants of named processes, each with the named one.
    descendants: BTreeMap<i32, i32>,
    /// Whether we undo something, which needs no trust: an executable need only have the name, even one that any user
    /// can choose, and a pid stands for the process and its descendants.
    for_undoing: bool,
    attributes: Attributes,
}

impl Selection {
    pub(crate) fn new(selectors: &[Selector], roots: &Roots) -> Result<Self, ScopeError> {
        if selectors.is_empty() {
            return Err(ScopeError::Empty);
        }
        let mut matchers = Vec::new();
        for selector in selectors {
            matchers.push(Some(selector.resolve_existing(roots)?));
        }
        Ok(Self::with(matchers, roots))
    }

    /// Like [`Self::new`], but without cgroups and users that don't exist now.
    pub(crate) fn of_existing(selectors: &[Selector], roots: &Roots) -> Self {
        Self::with(selectors.iter().map(|selector| selector.resolve_existing(roots).ok()).collect(), roots)
    }

    fn with(matchers: Vec<Option<Matcher>>, roots: &Roots) -> Self {
        let mut named = BTreeSet::new();
        for matcher in &matchers {
            if let Some(Matcher::Pid(pid)) = matcher {
                named.insert(*pid);
            }
        }
        Self {
            roots: roots.clone(),
            matchers,
            named,
            descendants: BTreeMap::new(),
            for_undoing: false,
            attributes: Attributes::new(&roots.cgroup),
        }
    }

    /// Makes this a selection for undoing.
    pub(super) fn for_undoing(self) -> Self {
        Self { for_undoing: true, ..self }
    }

    /// The processes in scope, by ascending pid: the named ones, and others that `is_candidate` accepts.
    pub(super) fn resolve(&mut self, is_candidate: impl FnMut(i32) -> bool) -> Result<Vec<ProcessInfo>, ScopeError> {
        let mut found = Vec::new();
        for pid in self.candidates(is_candidate)? {
            found.extend(self.find(pid)?);
        }
        Ok(found)
    }

    /// The processes that may be in scope: the named ones, and others that `is_candidate` accepts.
    pub(super) fn candidates(
        &mut self,
        mut is_candidate: impl FnMut(i32) -> bool,
    ) -> Result<BTreeSet<i32>, ScopeError> {
        let is_selective = self.matchers.iter().flatten().any(|matcher| !matches!(matcher, Matcher::Pid(_)));
        let has_descendants = self.for_undoing && !self.named.is_empty();
        let mut others = if is_selective || has_descendants { pids_below(&self.roots.proc)? } else { Vec::new() };
        others.retain(|&pid| is_candidate(pid));
        if has_descendants {
            self.descendants = self.descendants_of_named(&others);
        }
        let mut pids = self.named.clone();
        if is_selective {
            pids.extend(others);
        } else {
            pids.extend(self.descendants.keys());
        }
        Ok(pids)
    }

    /// The process, if it's in scope.
    pub(super) fn find(&mut self, pid: i32) -> Result<Option<ProcessInfo>, ScopeError> {
        match self.examine(pid) {
            Ok(found) => Ok(found),
            Err(ReadError::Vanished { .. }) if self.is_named(pid) => Err(ScopeError::UnknownPid(pid)),
            Err(source) if self.is_named(pid) || source.is_for_lack_of_files() => {
                Err(ScopeError::Unreadable { pid, source })
            }
            // The process has just ended, or is hidden (proc mounted with hidepid).
            Err(_) => Ok(None),
        }
    }

    pub(super) fn is_named(&self, pid: i32) -> bool {
        self.named.contains(&pid)
    }

    /// The descendants of named processes, among `pids` only, each with the named process. We leave out descendants
    /// whose parents aren't among `pids`.
    fn descendants_of_named(&self, pids: &[i32]) -> BTreeMap<i32, i32> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for &pid in pids {
            // If a process has just ended, nothing selects it.
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

    /// Whether a selector needs the cgroups of processes, so that we must read them.
    fn has_cgroups(&self) -> bool {
        self.matchers.iter().flatten().any(Matcher::needs_cgroups)
    }

    /// The process, if it's in scope, or would be if only root could change its executable.
    fn examine(&mut self, pid: i32) -> Result<Option<ProcessInfo>, ReadError> {
        let is_named = self.is_named(pid);
        let process = Arc::new(Process::open_at(&self.roots.proc, pid)?);
        let stat = process.stat()?;
        if !is_named && (stat.kernel_thread || stat.is_zombie()) {
            return Ok(None);
        }
        let mut info = ProcessInfo::with_stat(&process, stat)?;
        if info.status.thread_group != pid {
            return Err(ReadError::Vanished { pid }); // a thread ID, not a pid
        }
        info.by_pid = if is_named { Some(pid) } else { self.descendants.get(&pid).copied() };
        self.select(&mut info);
        if info.selected_by.is_none() && !self.has_cgroups() {
            return Ok(None);
        }
        info.cgroups = Arc::new(self.cgroup_info(cgroups_of(&process)?.as_deref()));
        self.select(&mut info);
        if info.selected_by.is_none() {
            return Ok(None);
        }
        if let Some(exe) = &info.exe {
            // We find out whether the file is trusted while it's still there.
            let _ = exe.trust();
        }
        Ok(Some(info))
    }

    /// Finds the first selector that matches a process. If all matches are by name only, we take the first of these.
    pub(crate) fn select(&self, info: &mut ProcessInfo) {
        info.selected_by = None;
        info.distrust = None;
        // If the kernel hides a process's cgroups, a selector may match any of them. We'll leave such a process alone,
        // but must keep it in view, because it may have marks.
        let may_match = info.cgroups.are_hidden() && !self.for_undoing;
        for (at, matcher) in self.matchers.iter().enumerate() {
            let matching = match matcher {
                Some(matcher) if may_match && matcher.needs_cgroups() => Matching::Yes,
                Some(Matcher::Cgroup(_)) if info.cgroups.selected_by == Some(at) => Matching::Yes,
                None | Some(Matcher::Cgroup(_)) => Matching::No,
                Some(matcher) if self.for_undoing && matcher.matches_by_name(info) => Matching::Yes,
                Some(_) if self.for_undoing => Matching::No,
                Some(matcher) => matcher.matches(info),
            };
            match matching {
                Matching::Yes => {
                    info.selected_by = Some(at);
                    info.distrust = None;
                    return;
                }
                Matching::NameOnly(why) if info.distrust.is_none() => {
                    info.selected_by = Some(at);
                    info.distrust = Some(why);
                }
                Matching::NameOnly(_) | Matching::No => {}
            }
        }
    }

    /// The first selector whose cgroup is one of these, or contains one of them.
    fn by_cgroups(&self, cgroups: &[Cgroup]) -> Option<usize> {
        self.matchers.iter().position(|matcher| match matcher {
            Some(Matcher::Cgroup(selected)) => cgroups.iter().any(|cgroup| selected.matches(cgroup)),
            _ => false,
        })
    }

    /// Collects everything that the cgroups in the text of `/proc/PID/cgroup` say. We read attributes once for all
    /// processes.
    pub(crate) fn cgroup_info(&mut self, text: Option<&[u8]>) -> CgroupInfo {
        let Some(text) = text else {
            return CgroupInfo::unreadable("a cgroup with a path of over 4096 bytes");
        };
        let mut all = parse_cgroups(text);
        let mut is_deep = false;
        for cgroup in &mut all {
            if let Some((end, _)) = cgroup.path.match_indices('/').nth(LEVELS_MOST) {
                cgroup.path.truncate(end);
                is_deep = true;
            }
        }
        if is_deep {
            let path = shown_path(&all);
            return CgroupInfo { path, selected_by: self.by_cgroups(&all), all, ..CgroupInfo::unreadable(TOO_DEEP) };
        }
        let mut opt_outs = Vec::new();
        if let Some(cgroup) = self.attributes.avoided(&all) {
            opt_outs.push(OptOut::Attribute { cgroup });
        }
        opt_outs.extend(opt_out::by_files(&all, &self.roots));
        let mut limiting = Vec::new();
        for cgroup in &all {
            limiting.extend(group_dir(cgroup, &self.roots.cgroup));
        }
        CgroupInfo {
            path: shown_path(&all),
            domain: self.attributes.domain(&all),
            opt_outs,
            limiting,
            selected_by: self.by_cgroups(&all),
            unreadable: self.attributes.unreadable(&all),
            all,
        }
    }
}

/// The path that we show: in version 2 or, if that is the root, in the version 1 memory hierarchy.
fn shown_path(cgroups: &[Cgroup]) -> Option<String> {
    let mut shown = None;
    for cgroup in cgroups {
        let is_root = cgroup.path == "/";
        let rank = match cgroup.controllers.as_str() {
            "" if !is_root => 0,
            "memory" if !is_root => 1,
            "" => 2,
            _ => continue,
        };
        if shown.is_none_or(|(best, _)| rank < best) {
            shown = Some((rank, &cgroup.path));
        }
    }
    Some(shown?.1.clone())
}

/// The text of `/proc/PID/cgroup`, empty on kernels without cgroups, `None` if it's hidden.
pub(crate) fn cgroups_of(process: &Process) -> Result<Option<Vec<u8>>, ReadError> {
    match process.read_file("cgroup") {
        Err(ReadError::Absent { .. }) => Ok(Some(Vec::new())),
        Err(ReadError::Io { source, .. }) if source.raw_os_error() == Some(libc::ENAMETOOLONG) => Ok(None),
        other => other.map(Some),
    }
}

fn pids_below(proc: &Path) -> Result<Vec<i32>, ScopeError> {
    list_pids(proc).map_err(|source| ScopeError::Io { path: proc.display().to_string(), source })
}

pub(super) fn list_pids(proc: &Path) -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc)? {
        if let Some(name) = entry?.file_name().to_str() {
            pids.extend(name.parse::<i32>());
        }
    }
    Ok(pids)
}
