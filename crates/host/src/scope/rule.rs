//! Rules of the configuration that select processes: by cgroup, user, executable or workload. The first that matches
//! decides.
//!
//! A rule by executable matches only a file that root alone can change ([`super::exe`]): otherwise any user could make
//! the rule apply by giving the same name to another program.

use super::exe::Matching;
use super::{Matcher, ProcessInfo};
use pagefold_text::escape::printable;

/// A name that the configuration gives to the processes of a matcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: String,
    pub matcher: Matcher,
}

/// The number of the first rule that matches. `notes` gets a sentence for each rule before it that matches by name only
/// and doesn't apply. In these sentences `named` is the kind of rules, such as `trust domain`.
pub fn first_match(rules: &[Rule], info: &ProcessInfo, named: &str, notes: &mut Vec<String>) -> Option<usize> {
    for (at, rule) in rules.iter().enumerate() {
        match rule.matcher.matches(info) {
            Matching::Yes => return Some(at),
            Matching::No => {}
            Matching::NameOnly(why) => {
                let name = printable(rule.name.as_bytes());
                let why = why.clause(&info.exe_text());
                notes.push(format!("The rule for {named} {name} does not apply: {why}."));
            }
        }
    }
    None
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
            let info = ProcessInfo::fixture("nginx", 33, Some(cgroup));
            first_match(&rules, &info, "trust domain", &mut Vec::new()).is_some()
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
