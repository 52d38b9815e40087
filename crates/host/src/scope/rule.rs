//! Rules of the configuration that select processes: by cgroup, user or executable. The first that matches decides.
//!
//! A rule by executable matches only a file that root alone can change ([`super::exe`]): otherwise any user could choose the rule
//! for a program of its own by its name.

use crate::scope::Scoped;
use crate::scope::exe::{Exe, Matching};
use pagefold_procmem::Roots;
use pagefold_text::escape::printable;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// A name for some processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The name.
    pub name: String,
    /// Selects the processes.
    pub selector: Selector,
}

/// Selects processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// Processes in this cgroup and below: its path with a leading slash. It need not exist.
    Cgroup(PathBuf),
    /// Processes with this effective user.
    User(u32),
    /// Processes that run this program: absolute path or base name, of a file that root alone can change.
    Exe(String),
}

/// The facts about a process that rules judge.
#[derive(Clone, Copy, Debug)]
pub struct RuleFacts<'a> {
    /// Path of its cgroup.
    pub cgroup: Option<&'a str>,
    /// Effective user.
    pub uid: u32,
    /// Executable.
    pub exe: Option<&'a Exe>,
    /// Command name.
    pub name: &'a str,
}

impl<'a> From<&'a Scoped> for RuleFacts<'a> {
    fn from(scoped: &'a Scoped) -> Self {
        Self { cgroup: scoped.cgroup.as_deref(), uid: scoped.uid, exe: scoped.exe.as_ref(), name: &scoped.name }
    }
}

/// The number of the first rule that matches. `notes` gets a sentence for each rule before it that matches by name only and does
/// not apply; `what` says in it what the rules give their names to.
pub fn first_match(rules: &[Rule], facts: &RuleFacts<'_>, what: &str, notes: &mut Vec<String>) -> Option<usize> {
    rules.iter().position(|Rule { name, selector }| match selector.matches(facts) {
        Matching::Yes => true,
        Matching::No => false,
        Matching::NameOnly(why) => {
            let exe = facts.exe.map(|exe| printable(exe.as_os_str().as_bytes())).unwrap_or_default();
            notes.push(format!("The rule for {what} {} does not apply: {exe} {why}.", printable(name.as_bytes())));
            false
        }
    })
}

impl Selector {
    /// Selects by the path of a cgroup or its path under the cgroup mount.
    pub fn cgroup(path: &Path, roots: &Roots) -> Self {
        let own = match path.strip_prefix(&roots.cgroup) {
            Err(_) => path,
            // Only version 2 has this file; its mount point is the root cgroup.
            Ok(below) if roots.cgroup.join("cgroup.controllers").exists() => below,
            // The first directory is the hierarchy.
            Ok(below) => {
                let mut parts = below.components();
                parts.next();
                parts.as_path()
            }
        };
        Self::Cgroup(Path::new("/").join(own))
    }

    fn matches(&self, facts: &RuleFacts<'_>) -> Matching {
        let matches = match self {
            Self::Cgroup(path) => facts.cgroup.is_some_and(|cgroup| is_below(cgroup, path)),
            Self::User(uid) => facts.uid == *uid,
            Self::Exe(selector) => {
                return facts.exe.map_or(Matching::No, |exe| exe.matches(selector, facts.name.as_bytes()));
            }
        };
        if matches { Matching::Yes } else { Matching::No }
    }
}

/// Whether a cgroup is the selected one or below it.
fn is_below(cgroup: &str, selected: &Path) -> bool {
    let cgroup = Path::new(cgroup);
    // Paths outside our cgroup namespace cannot be selected.
    cgroup.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && cgroup.starts_with(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_selected_by_either_path_and_include_their_subtree() {
        let mount = tempfile::tempdir().unwrap();
        let roots = Roots { cgroup: mount.path().to_owned(), ..Roots::default() };
        let holds = |named: &str, cgroup| {
            let named = named.replace("MOUNT", mount.path().to_str().unwrap());
            Selector::cgroup(Path::new(&named), &roots).matches(&RuleFacts {
                cgroup: Some(cgroup),
                uid: 33,
                exe: None,
                name: "nginx",
            }) == Matching::Yes
        };
        let both = |named: &str| {
            assert!(holds(named, "/a/b") && holds(named, "/a/b/c"), "{named}");
            assert!(!holds(named, "/a") && !holds(named, "/a/bc") && !holds(named, "/"), "{named}");
        };
        for named in ["/a/b", "a/b", "/a/b/", "MOUNT/memory/a/b", "MOUNT/unified/a/b"] {
            both(named);
        }
        std::fs::write(mount.path().join("cgroup.controllers"), "memory").unwrap();
        both("/a/b");
        both("MOUNT/a/b");
        assert!(!holds("MOUNT/memory/a/b", "/a/b"), "version 2 has no such hierarchies");
        assert!(holds("/", "/a") && holds("MOUNT", "/"));
        assert!(!holds("/", "/../a"), "outside our namespace");
    }
}
