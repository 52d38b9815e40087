//! Processes that an administrator keeps out of merging, and the ones let in again.
//!
//! Each selector given to `exclude`, `unmerge` or `include` makes an entry, and the last entry that matches a process
//! decides. So a selector of cgroups, users or programs also decides on processes that start later. A pid stands for
//! one process and its descendants, including later ones. We match executables by name: nobody gains anything by being
//! kept out.
//!
//! Callers save the list for the next run. A process's start time tells it from a later process with the same pid.

use super::exe::{Distrust, Matching};
use super::{ProcessInfo, ScopeSpec, Selector};
use pagefold_procmem::Roots;
use pagefold_procmem::process::{Process, ProcessKey, ReadError, Stat};
use std::collections::BTreeSet;
use thiserror::Error;

/// We keep at most this many entries, not counting entries for processes that have ended.
pub const ENTRIES_MOST: usize = 1024;

/// Why we refuse a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KeptOutError {
    #[error("{ENTRIES_MOST} selectors are kept out or included already")]
    TooMany,
    #[error("process 1 stands for all programs")]
    Init,
    /// The `include` selects nothing that is kept out.
    #[error("nothing that matches {0} is kept out")]
    NotKeptOut(String),
}

/// What an entry does with a process that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// We keep the process out of merging, because this user asked us to.
    Out { by: u32 },
    /// We may merge the process, although an earlier entry keeps it out.
    In,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub verdict: Verdict,
    pub selector: Selector,
    /// If the selector is a pid: the process that had it, and its descendants.
    pub processes: BTreeSet<ProcessKey>,
}

/// The entries, the oldest first.
#[derive(Clone, Debug, Default)]
pub struct KeptOut {
    entries: Vec<Entry>,
    /// How many descendants have joined entries.
    adopted: u64,
}

impl KeptOut {
    /// The entries of an earlier run, the oldest first.
    pub fn of(entries: Vec<Entry>) -> Self {
        let mut kept_out = Self { entries, adopted: 0 };
        kept_out.tidy();
        kept_out
    }

    /// How many descendants have joined entries during this run. Callers save the list again when this number grows.
    pub fn adopted(&self) -> u64 {
        self.adopted
    }

    /// All entries, the oldest first.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Keeps out the processes that a scope selects. `found` are the ones running now.
    pub fn keep_out(
        &mut self,
        spec: &ScopeSpec,
        found: &[ProcessInfo],
        by: u32,
        roots: &Roots,
    ) -> Result<(), KeptOutError> {
        // All processes descend from it.
        if Selector::Pid(1).is_among(&spec.0) {
            return Err(KeptOutError::Init);
        }
        self.forget_ended(roots);
        let new = entries_of(spec, found, Verdict::Out { by });
        if !self.has_room(&new) {
            return Err(KeptOutError::TooMany);
        }
        self.add(new);
        Ok(())
    }

    /// Lets in again the processes that a scope selects. `found` are the ones running now. Returns the processes that
    /// were kept out and are no longer.
    pub fn include<'a>(
        &mut self,
        spec: &ScopeSpec,
        found: &'a [ProcessInfo],
        roots: &Roots,
    ) -> Result<Vec<&'a ProcessInfo>, KeptOutError> {
        self.forget_ended(roots);
        let mut were_out = Vec::new();
        for info in found {
            if self.verdict(info, true, roots).is_some() {
                were_out.push(info);
            }
        }
        let new = entries_of(spec, found, Verdict::In);
        // An entry may be for programs that aren't running now, or for a process that has ended and left children.
        let mut out = self.entries.iter().filter(|entry| !entry.is_in());
        let is_undone = out.any(|entry| entry.selector.is_among(&spec.0) || Selector::All.is_among(&spec.0));
        if were_out.is_empty() && !is_undone {
            return Err(KeptOutError::NotKeptOut(spec.to_string()));
        }
        if !self.has_room(&new) {
            return Err(KeptOutError::TooMany);
        }
        self.add(new);
        were_out.retain(|info| self.verdict(info, true, roots).is_none());
        Ok(were_out)
    }

    fn has_room(&self, new: &[Entry]) -> bool {
        let is_left = |entry: &&Entry| !new.iter().any(|new| entry.is_superseded_by(new));
        self.entries.iter().filter(is_left).count() + new.len() <= ENTRIES_MOST
    }

    fn add(&mut self, new: Vec<Entry>) {
        for new in new {
            for entry in &mut self.entries {
                entry.processes.retain(|key| !new.processes.contains(key));
            }
            self.entries.retain(|entry| !entry.is_superseded_by(&new));
            // If only pids are kept out, we let a process in by removing it from their entries, and need no entry for
            // it.
            let decides = !new.is_in() || !new.is_of_pid() || self.entries.iter().any(|entry| !entry.is_of_pid());
            if decides && !new.is_empty() {
                self.entries.push(new);
            }
        }
        self.tidy();
    }

    /// Forgets processes that have ended.
    pub fn forget_ended(&mut self, roots: &Roots) {
        for entry in &mut self.entries {
            entry.processes.retain(|key| !has_ended(*key, roots));
        }
        self.tidy();
    }

    /// Removes entries that decide nothing.
    fn tidy(&mut self) {
        self.entries.retain(|entry| !entry.is_empty());
        let first_out = self.entries.iter().position(|entry| !entry.is_in());
        self.entries.drain(..first_out.unwrap_or(self.entries.len()));
    }

    /// If an entry decides that we keep a process out, returns the user who asked for it, and the selector. If we
    /// haven't judged the process before (`is_new`), an entry of one of its ancestors may decide.
    pub fn verdict(&mut self, info: &ProcessInfo, is_new: bool, roots: &Roots) -> Option<(u32, &Selector)> {
        if self.entries.is_empty() {
            return None;
        }
        if is_new && self.entries.iter().any(|entry| !entry.processes.is_empty()) {
            self.adopt(&info.process, roots);
        }
        let decides = self.entries.iter().rev().find(|entry| entry.matches(info, roots))?;
        match decides.verdict {
            Verdict::Out { by } => Some((by, &decides.selector)),
            Verdict::In => None,
        }
    }

    /// Adds a process to the entries that its ancestors are in.
    fn adopt(&mut self, process: &Process, roots: &Roots) {
        let ancestors = ancestors(process, roots);
        for entry in &mut self.entries {
            if ancestors.iter().any(|ancestor| entry.processes.contains(ancestor)) {
                self.adopted += u64::from(entry.processes.insert(process.key()));
            }
        }
    }
}

impl Entry {
    /// Whether the entry lets matching processes in.
    pub fn is_in(&self) -> bool {
        self.verdict == Verdict::In
    }

    fn is_of_pid(&self) -> bool {
        matches!(self.selector, Selector::Pid(_))
    }

    /// Whether this is an entry for a pid, and no process is left in it.
    fn is_empty(&self) -> bool {
        self.is_of_pid() && self.processes.is_empty()
    }

    fn is_superseded_by(&self, new: &Self) -> bool {
        // Another process may have the pid by now, while the children of its previous owner stay out.
        let is_same = self.selector.is_same(&new.selector) && (new.is_in() || !self.is_of_pid());
        is_same || new.selector == Selector::All
    }

    fn matches(&self, info: &ProcessInfo, roots: &Roots) -> bool {
        if self.is_of_pid() {
            return self.processes.contains(&info.process.key());
        }
        let Ok(matcher) = self.selector.resolve_existing(roots) else { return false };
        // The path of a link also keeps out the versions of a program that it once led to, but lets in only the one
        // that it leads to now.
        let is_other = self.is_in() && matcher.matches(info) == Matching::NameOnly(Distrust::OtherVersion);
        !is_other && matcher.matches_by_name(info)
    }
}

fn has_ended((pid, started): ProcessKey, roots: &Roots) -> bool {
    match Process::open_at(&roots.proc, pid) {
        Ok(process) => process.start_time_ticks() != started || process.stat().is_ok_and(|stat| stat.is_zombie()),
        Err(error) => matches!(error, ReadError::Vanished { .. }),
    }
}

/// An entry for each selector of a scope.
fn entries_of(spec: &ScopeSpec, found: &[ProcessInfo], verdict: Verdict) -> Vec<Entry> {
    let mut entries = Vec::new();
    for selector in &spec.0 {
        let mut processes = BTreeSet::new();
        for info in found {
            if info.by_pid.is_some_and(|pid| *selector == Selector::Pid(pid)) {
                processes.insert(info.process.key());
            }
        }
        entries.push(Entry { verdict, selector: selector.clone(), processes });
    }
    entries
}

/// The ancestors of a process, the nearest first.
fn ancestors(process: &Process, roots: &Roots) -> Vec<ProcessKey> {
    let mut found = Vec::new();
    let mut stat = process.stat();
    // If a parent has just ended, the search ends. Because pids are reused, the search could go in circles, so it ends
    // at 1000 processes.
    while let Ok(Stat { parent: parent @ 1.., .. }) = stat {
        let Ok(process) = Process::open_at(&roots.proc, parent) else { break };
        found.push(process.key());
        if found.len() >= 1000 {
            break;
        }
        stat = process.stat();
    }
    found
}

#[cfg(test)]
#[path = "kept_out_tests.rs"]
mod tests;
