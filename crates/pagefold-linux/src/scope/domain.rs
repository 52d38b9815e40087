//! Trust domains. Pages are merged within one domain only: a process that shares a page with another can time its writes
//! to learn the contents of the other's pages.
//!
//! The domain of a process is the first of: the attribute `user.pagefold.domain` of its cgroup or the nearest one above,
//! the first rule that matches, the user if that is configured, and [`DEFAULT`]. A rule by executable matches only a file
//! that root alone can change ([`super::exe`]): otherwise any user could join the domain by naming a program so.

use crate::proc::Roots;
use crate::proc::status::printable;
use crate::scope::Scoped;
use crate::scope::exe::{Exe, Matching};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Domain of processes that no attribute or rule assigns to another.
pub const DEFAULT: &str = "default";

/// Assigns processes to domains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainRules {
    /// Processes that no rule matches are in a domain of their user, `user:UID`.
    pub by_user: bool,
    /// The first rule that matches decides.
    pub rules: Vec<DomainRule>,
}

/// Assigns some processes to a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainRule {
    /// Name of the domain.
    pub name: String,
    /// Selects its processes.
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

/// The facts about a process that the rules judge.
#[derive(Clone, Copy, Debug)]
pub struct DomainFacts<'a> {
    /// Domain set by an attribute: [`Scoped::domain`].
    pub attribute: Option<&'a str>,
    /// Path of its cgroup.
    pub cgroup: Option<&'a str>,
    /// Effective user.
    pub uid: u32,
    /// Executable.
    pub exe: Option<&'a Exe>,
    /// Command name.
    pub name: &'a str,
}

/// The domain of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Its name.
    pub name: String,
    /// Rules that match the process by name only and were passed over: a sentence for each.
    pub passed_over: Vec<String>,
}

impl<'a> From<&'a Scoped> for DomainFacts<'a> {
    fn from(scoped: &'a Scoped) -> Self {
        Self {
            attribute: scoped.domain.as_deref(),
            cgroup: scoped.cgroup.as_deref(),
            uid: scoped.uid,
            exe: scoped.exe.as_ref(),
            name: &scoped.name,
        }
    }
}

impl DomainRules {
    /// Name of the domain of a process.
    pub fn domain_of<'a>(&self, process: impl Into<DomainFacts<'a>>) -> String {
        self.assign(process).name
    }

    /// The domain of a process, and why rules that seem to match do not.
    pub fn assign<'a>(&self, process: impl Into<DomainFacts<'a>>) -> Assigned {
        let facts = process.into();
        let mut passed_over = Vec::new();
        if let Some(name) = facts.attribute.filter(|name| !name.is_empty()) {
            return Assigned { name: name.to_owned(), passed_over };
        }
        for DomainRule { name, selector } in &self.rules {
            match selector.matches(&facts) {
                Matching::Yes => return Assigned { name: name.clone(), passed_over },
                Matching::No => {}
                Matching::NameOnly(why) => {
                    let exe = facts.exe.map(|exe| printable(exe.as_os_str().as_bytes())).unwrap_or_default();
                    let name = printable(name.as_bytes());
                    passed_over.push(format!("The rule for trust domain {name} does not apply: {exe} {why}."));
                }
            }
        }
        let name = if self.by_user { format!("user:{}", facts.uid) } else { DEFAULT.to_owned() };
        Assigned { name, passed_over }
    }
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

    fn matches(&self, facts: &DomainFacts<'_>) -> Matching {
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
    use crate::proc::process::Process;

    const WEB: DomainFacts<'_> = DomainFacts {
        attribute: None,
        cgroup: Some("/system.slice/web.service/worker"),
        uid: 33,
        exe: None,
        name: "nginx",
    };

    fn own_exe() -> Exe {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        Exe::of(&own).unwrap().unwrap()
    }

    fn rule(name: &str, selector: Selector) -> DomainRule {
        DomainRule { name: name.to_owned(), selector }
    }

    #[test]
    fn without_rules_all_processes_are_in_one_domain() {
        assert_eq!(DomainRules::default().domain_of(WEB), "default");
        let by_user = DomainRules { by_user: true, rules: Vec::new() };
        assert_eq!(by_user.domain_of(WEB), "user:33");
        assert_eq!(by_user.domain_of(DomainFacts { uid: 0, ..WEB }), "user:0");
    }

    #[test]
    fn attributes_precede_rules_and_the_first_rule_decides() {
        let own = own_exe();
        let rules = DomainRules {
            by_user: true,
            rules: vec![
                rule("a", Selector::Exe(own.to_str().unwrap().to_owned())),
                rule("b", Selector::Cgroup("/system.slice/web.service".into())),
                rule("c", Selector::User(33)),
            ],
        };
        assert_eq!(rules.domain_of(WEB), "b");
        assert_eq!(rules.domain_of(DomainFacts { exe: Some(&own), ..WEB }), "a");
        assert_eq!(rules.domain_of(DomainFacts { cgroup: None, ..WEB }), "c");
        assert_eq!(rules.domain_of(DomainFacts { attribute: Some("d"), ..WEB }), "d");
        // An empty value.
        assert_eq!(rules.domain_of(DomainFacts { attribute: Some(""), ..WEB }), "b");
        assert_eq!(rules.domain_of(DomainFacts { cgroup: None, uid: 34, ..WEB }), "user:34");
    }

    #[test]
    fn cgroups_are_selected_by_either_path_and_include_their_subtree() {
        let mount = tempfile::tempdir().unwrap();
        let roots = Roots { cgroup: mount.path().to_owned(), ..Roots::default() };
        let holds = |named: &str, cgroup| {
            let named = named.replace("MOUNT", mount.path().to_str().unwrap());
            Selector::cgroup(Path::new(&named), &roots).matches(&DomainFacts { cgroup: Some(cgroup), ..WEB })
                == Matching::Yes
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

    #[test]
    fn a_program_that_its_user_named_falls_to_the_next_rule() {
        // No executable: a name set by the program itself.
        let rules = DomainRules { by_user: true, rules: vec![rule("web", Selector::Exe("nginx".into()))] };
        assert_eq!(rules.domain_of(WEB), "user:33");
        let copy = tempfile::tempdir().unwrap();
        let path = copy.path().join("nginx");
        std::fs::copy("/bin/sleep", &path).unwrap();
        let is_root = std::os::unix::fs::chown(&path, Some(33), None).is_ok();
        let mut child = loop {
            match std::process::Command::new(&path).arg("60").spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                child => break child.unwrap(),
            }
        };
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        let exe = loop {
            let exe = Exe::of(&process).unwrap().unwrap();
            if exe.ends_with("nginx") {
                break exe;
            }
        };
        let assigned = rules.assign(DomainFacts { exe: Some(&exe), ..WEB });
        child.kill().unwrap();
        child.wait().unwrap();
        if is_root {
            assert_eq!(assigned.name, "user:33");
            let [why] = &assigned.passed_over[..] else { panic!("{assigned:?}") };
            assert!(why.contains("trust domain web does not apply") && why.contains("belongs to user 33"), "{why}");
        }
    }
}
