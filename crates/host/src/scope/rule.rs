//! Rules of the configuration that select processes: by cgroup, user or executable. The first that matches decides.
//!
//! A rule by executable matches only a file that root alone can change ([`super::exe`]): otherwise any user could get
//! the rule for a program of its own by naming it so.

use super::selector::{Candidate, CgroupMatcher, Matcher};
use crate::scope::Scoped;
use crate::scope::exe::{Exe, Matching};
use pagefold_text::escape::printable;
use std::os::unix::ffi::OsStrExt;

/// A name for some processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: String,
    /// Selects the processes: by cgroup, user or executable.
    pub matcher: Matcher,
}

/// The facts about a process that we match rules against.
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

/// The number of the first rule that matches. `notes` gets a sentence for each rule before it that matches by name only
/// and doesn't apply; `what` names in it the thing that the rules give names to.
pub fn first_match(rules: &[Rule], facts: &RuleFacts<'_>, what: &str, notes: &mut Vec<String>) -> Option<usize> {
    let RuleFacts { cgroup, uid, exe, name } = *facts;
    let candidate = Candidate { pid: 0, by_pid: None, uid, exe, comm: name.as_bytes() };
    let is_in = |matcher: &CgroupMatcher| cgroup.is_some_and(|cgroup| matcher.contains(cgroup));
    rules.iter().position(|Rule { name, matcher }| match matcher.matches(&candidate, is_in) {
        Matching::Yes => true,
        Matching::No => false,
        Matching::NameOnly(why) => {
            let exe = exe.map(|exe| printable(exe.as_os_str().as_bytes())).unwrap_or_default();
            notes.push(format!("The rule for {what} {} does not apply: {exe} {why}.", printable(name.as_bytes())));
            false
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scope::Selector;
    use pagefold_procmem::Roots;

    #[test]
    fn cgroups_are_selected_by_either_path_and_include_their_subtree() {
        let mount = tempfile::tempdir().unwrap();
        let roots = Roots { cgroup: mount.path().to_owned(), ..Roots::default() };
        let holds = |named: &str, cgroup| {
            let named = named.replace("MOUNT", mount.path().to_str().unwrap());
            let matcher = Selector::Cgroup(named.into()).resolve(&roots).unwrap();
            let rules = [Rule { name: "web".to_owned(), matcher }];
            let facts = RuleFacts { cgroup: Some(cgroup), uid: 33, exe: None, name: "nginx" };
            first_match(&rules, &facts, "trust domain", &mut Vec::new()).is_some()
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
