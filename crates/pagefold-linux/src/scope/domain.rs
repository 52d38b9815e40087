//! Trust domains: memory is folded within one only, for whoever shares a page with a stranger can time his writes to
//! learn what the stranger's page holds.
//!
//! The first word counts: the attribute `user.pagefold.domain` of the process's cgroup or of the nearest above it that
//! has one, then the rules in their order, then the user if that is asked for. Who is named by none of them is in the
//! domain [`DEFAULT`].

use crate::proc::Roots;
use crate::scope::{Scoped, runs};
use std::path::{Component, Path, PathBuf};

/// The domain of those that nobody has named another for.
pub const DEFAULT: &str = "default";

/// Who belongs to which domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainRules {
    /// Users that no rule names have a domain each, `user:UID`.
    pub by_user: bool,
    /// The first that fits counts.
    pub rules: Vec<DomainRule>,
}

/// Puts some processes into a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainRule {
    /// The domain's name.
    pub name: String,
    /// Who belongs to it.
    pub selector: Selector,
}

/// Some processes, told by one of their traits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// Those in this cgroup and below, by its own path, with a slash at the front. It need not exist.
    Cgroup(PathBuf),
    /// Those with the rights of this user.
    User(u32),
    /// Those that run this program: absolute path, base name, or the name it was started by.
    Exe(String),
}

/// What the rules need to know of a process.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// What the attribute says: [`Scoped::domain`].
    pub attribute: Option<&'a str>,
    /// Its cgroup's own path.
    pub cgroup: Option<&'a str>,
    /// Its effective user.
    pub uid: u32,
    /// Its executable.
    pub exe: Option<&'a Path>,
    /// Its command name.
    pub name: &'a str,
}

impl<'a> From<&'a Scoped> for Facts<'a> {
    fn from(scoped: &'a Scoped) -> Self {
        Self {
            attribute: scoped.domain.as_deref(),
            cgroup: scoped.cgroup.as_deref(),
            uid: scoped.uid,
            exe: scoped.exe.as_deref(),
            name: &scoped.name,
        }
    }
}

impl DomainRules {
    /// The name of the domain that a process is in.
    pub fn domain_of<'a>(&self, process: impl Into<Facts<'a>>) -> String {
        let facts = process.into();
        if let Some(name) = facts.attribute.filter(|name| !name.is_empty()) {
            return name.to_owned();
        }
        match self.rules.iter().find(|rule| rule.selector.holds(&facts)) {
            Some(rule) => rule.name.clone(),
            None if self.by_user => format!("user:{}", facts.uid),
            None => DEFAULT.to_owned(),
        }
    }
}

impl Selector {
    /// By a cgroup's own path or its path under the cgroup mount.
    pub fn cgroup(path: &Path, roots: &Roots) -> Self {
        let own = match path.strip_prefix(&roots.cgroup) {
            Err(_) => path,
            // Only version 2 has this file, and there the mount point is the root cgroup itself.
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

    fn holds(&self, facts: &Facts<'_>) -> bool {
        match self {
            Self::Cgroup(path) => facts.cgroup.is_some_and(|cgroup| is_below(cgroup, path)),
            Self::User(uid) => facts.uid == *uid,
            Self::Exe(exe) => runs(exe, facts.exe, facts.name.as_bytes()),
        }
    }
}

/// Whether a cgroup is the one named or below it.
fn is_below(cgroup: &str, named: &Path) -> bool {
    let cgroup = Path::new(cgroup);
    // A path that leads out of our cgroup namespace is not one of those named here.
    cgroup.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && cgroup.starts_with(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: Facts<'_> =
        Facts { attribute: None, cgroup: Some("/system.slice/web.service/worker"), uid: 33, exe: None, name: "nginx" };

    fn rule(name: &str, selector: Selector) -> DomainRule {
        DomainRule { name: name.to_owned(), selector }
    }

    #[test]
    fn without_a_word_everybody_is_in_one_domain() {
        assert_eq!(DomainRules::default().domain_of(WEB), "default");
        let by_user = DomainRules { by_user: true, rules: Vec::new() };
        assert_eq!(by_user.domain_of(WEB), "user:33");
        assert_eq!(by_user.domain_of(Facts { uid: 0, ..WEB }), "user:0");
    }

    #[test]
    fn the_first_word_counts() {
        let rules = DomainRules {
            by_user: true,
            rules: vec![
                rule("a", Selector::Exe("redis-server".into())),
                rule("b", Selector::Cgroup("/system.slice/web.service".into())),
                rule("c", Selector::User(33)),
            ],
        };
        assert_eq!(rules.domain_of(WEB), "b");
        assert_eq!(rules.domain_of(Facts { name: "redis-server", ..WEB }), "a");
        assert_eq!(rules.domain_of(Facts { cgroup: None, ..WEB }), "c");
        assert_eq!(rules.domain_of(Facts { attribute: Some("d"), ..WEB }), "d");
        // Set, but to nothing.
        assert_eq!(rules.domain_of(Facts { attribute: Some(""), ..WEB }), "b");
        assert_eq!(rules.domain_of(Facts { cgroup: None, uid: 34, ..WEB }), "user:34");
    }

    #[test]
    fn cgroups_are_named_by_either_path_and_hold_what_is_below() {
        let mount = tempfile::tempdir().unwrap();
        let roots = Roots { cgroup: mount.path().to_owned(), ..Roots::default() };
        let holds = |named: &str, cgroup| {
            let named = named.replace("MOUNT", mount.path().to_str().unwrap());
            Selector::cgroup(Path::new(&named), &roots).holds(&Facts { cgroup: Some(cgroup), ..WEB })
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
        assert!(!holds("/", "/../a"), "not one of ours");
    }

    #[test]
    fn programs_are_named_by_path_or_name() {
        let holds = |wish: &str| {
            let facts = Facts { exe: Some(Path::new("/usr/sbin/nginx")), ..WEB };
            Selector::Exe(wish.into()).holds(&facts)
        };
        assert!(holds("nginx") && holds("/usr/sbin/nginx"));
        assert!(!holds("/usr/bin/nginx") && !holds("ngin"));
    }
}
