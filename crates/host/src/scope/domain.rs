//! Trust domains. We merge pages within one domain only: a process that shares a page with another can time its writes
//! to learn the contents of the other's pages.
//!
//! The first of these that applies gives the domain of a process: the attribute `user.pagefold.domain` of its cgroup or
//! the nearest one above, the first rule that matches, the user if that is configured, or else [`DEFAULT`].
//!
//! ksmd has one tree of pages for the whole machine. So where ksmd merges, we mark memory of one domain only, and don't
//! even read the others. If we chose page by page what to mark in several domains, a process could guess contents of
//! another domain and learn from our choice whether the guess was right.

use super::exclude::Exclusion;
use super::rule::{Rule, first_match};
use super::{Matcher, ProcessInfo};
use pagefold_engine::keys::DomainKey;
use std::collections::HashMap;

/// Domain of processes that no attribute or rule assigns to another.
pub const DEFAULT: &str = "default";
/// The key of processes in no domain.
pub const NO_DOMAIN: DomainKey = DomainKey(u16::MAX);
const DOMAINS_MOST: usize = NO_DOMAIN.0 as usize;

/// Assigns processes to domains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainRules {
    /// Whether processes that no rule matches are in a domain of their user, `user:UID`.
    pub by_user: bool,
    /// The first rule that matches decides.
    pub rules: Vec<Rule>,
    /// The domain to merge with ksmd, if the configuration names one.
    pub merge: Option<String>,
}

impl DomainRules {
    /// Name of the domain of a process. `notes` gets a sentence for each rule that seems to match and doesn't.
    pub fn domain_of(&self, info: &ProcessInfo, notes: &mut Vec<String>) -> String {
        match &info.cgroups.domain {
            // We leave an untrusted process alone, so it doesn't take up a domain.
            _ if info.distrust.is_some() => DEFAULT.to_owned(),
            Some(attribute) if !attribute.is_empty() => attribute.clone(),
            _ => self.name_by(first_match(&self.rules, info, "trust domain", notes), info.uid()),
        }
    }

    /// Name of the domain to merge with ksmd: the configured one, or else root's. Rules by cgroup or program don't
    /// count for root's domain, because a process may choose its cgroup or program.
    pub fn merged(&self) -> String {
        if let Some(name) = &self.merge {
            return name.clone();
        }
        let of_root = self.rules.iter().position(|rule| matches!(rule.matcher, Matcher::User(0) | Matcher::All));
        self.name_by(of_root, 0)
    }

    fn name_by(&self, rule: Option<usize>, uid: u32) -> String {
        match rule {
            Some(at) => self.rules[at].name.clone(),
            None if self.by_user => format!("user:{uid}"),
            None => DEFAULT.to_owned(),
        }
    }

    /// If ksmd merges a domain other than the process's, says why we leave the process alone.
    pub fn excludes(&self, info: &ProcessInfo) -> Option<Exclusion> {
        let mut domains = Domains::default();
        let own = domains.assign(&self.domain_of(info, &mut Vec::new()));
        let merged = domains.assign(&self.merged());
        domains.excludes(own, Some(merged))
    }
}

/// The domains that processes are in, and their keys.
#[derive(Debug)]
pub struct Domains {
    /// The domains' names, by key. Some aren't in use any more.
    names: Vec<String>,
    keys: HashMap<String, DomainKey>,
    free: Vec<DomainKey>,
}

impl Default for Domains {
    fn default() -> Self {
        let mut domains = Self { names: Vec::new(), keys: HashMap::new(), free: Vec::new() };
        domains.key_of(DEFAULT);
        domains
    }
}

impl Domains {
    /// The key of a domain. `None` if there are too many.
    pub fn key_of(&mut self, name: &str) -> Option<DomainKey> {
        if let Some(&key) = self.keys.get(name) {
            return Some(key);
        }
        let key = match self.free.pop() {
            Some(key) => {
                name.clone_into(&mut self.names[usize::from(key.0)]);
                key
            }
            None if self.names.len() < DOMAINS_MOST => {
                self.names.push(name.to_owned());
                DomainKey(u16::try_from(self.names.len() - 1).ok()?)
            }
            None => return None,
        };
        self.keys.insert(name.to_owned(), key);
        Some(key)
    }

    /// The key of a domain, [`NO_DOMAIN`] if there are too many.
    pub fn assign(&mut self, name: &str) -> DomainKey {
        self.key_of(name).unwrap_or(NO_DOMAIN)
    }

    /// Why we must leave a process in the domain `own` alone, if only the domain `merged` is merged.
    pub(crate) fn excludes(&self, own: DomainKey, merged: Option<DomainKey>) -> Option<Exclusion> {
        if own == NO_DOMAIN {
            return Some(Exclusion::NoDomain);
        }
        let merged = merged?;
        if merged == own {
            return None;
        }
        let [own, merged] = [own, merged].map(|key| self.name(key).cloned().unwrap_or_default());
        Some(Exclusion::OtherDomain { own, merged })
    }

    /// The names of all domains, by key.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub fn name(&self, key: DomainKey) -> Option<&String> {
        self.names.get(usize::from(key.0))
    }

    /// Whether we have as many domains as there can be, so that domains without processes must go.
    pub fn are_full(&self) -> bool {
        self.free.is_empty() && self.names.len() >= DOMAINS_MOST
    }

    /// Frees the keys of all domains but the default one and the ones still needed.
    pub fn keep(&mut self, is_needed: impl Fn(DomainKey) -> bool) {
        let free = &mut self.free;
        self.keys.retain(|name, key| {
            let stays = name == DEFAULT || is_needed(*key);
            if !stays {
                free.push(*key);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scope::Selector;
    use crate::scope::exe::Exe;
    use pagefold_procmem::Roots;
    use pagefold_procmem::process::Process;
    use std::sync::Arc;

    fn web() -> ProcessInfo {
        ProcessInfo::fixture("nginx", 33, Some("/system.slice/web.service/worker"))
    }

    fn in_domain(domain: &str) -> ProcessInfo {
        let mut info = web();
        Arc::make_mut(&mut info.cgroups).domain = Some(domain.to_owned());
        info
    }

    fn own_exe() -> Exe {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        Exe::of(&own).unwrap().unwrap()
    }

    fn rule(name: &str, selector: &Selector) -> Rule {
        Rule { name: name.to_owned(), matcher: selector.resolve(&Roots::default()).unwrap() }
    }

    fn domain(rules: &DomainRules, info: &ProcessInfo) -> String {
        rules.domain_of(info, &mut Vec::new())
    }

    #[test]
    fn without_rules_all_processes_are_in_one_domain() {
        assert_eq!(domain(&DomainRules::default(), &web()), "default");
        let by_user = DomainRules { by_user: true, ..DomainRules::default() };
        assert_eq!(domain(&by_user, &web()), "user:33");
        assert_eq!(domain(&by_user, &ProcessInfo::fixture("nginx", 0, None)), "user:0");
    }

    #[test]
    fn attributes_precede_rules_and_the_first_rule_decides() {
        let own = own_exe();
        let rules = DomainRules {
            by_user: true,
            rules: vec![
                rule("a", &Selector::Exe(own.to_str().unwrap().to_owned())),
                rule("b", &Selector::Cgroup("/system.slice/web.service".into())),
                rule("c", &Selector::User("33".into())),
            ],
            merge: None,
        };
        assert_eq!(domain(&rules, &web()), "b");
        assert_eq!(domain(&rules, &ProcessInfo { exe: Some(own), ..web() }), "a");
        assert_eq!(domain(&rules, &ProcessInfo::fixture("nginx", 33, None)), "c");
        assert_eq!(domain(&rules, &in_domain("d")), "d");
        // An empty value sets no domain.
        assert_eq!(domain(&rules, &in_domain("")), "b");
        assert_eq!(domain(&rules, &ProcessInfo::fixture("nginx", 34, None)), "user:34");
    }

    #[test]
    fn root_s_domain_is_merged_unless_another_is_named() {
        let merged = |by_user, rules, merge: Option<&str>| {
            DomainRules { by_user, rules, merge: merge.map(str::to_owned) }.merged()
        };
        let root = || vec![rule("web", &Selector::User("33".into())), rule("system", &Selector::User("0".into()))];
        assert_eq!(merged(false, Vec::new(), None), DEFAULT);
        assert_eq!(merged(true, Vec::new(), None), "user:0");
        assert_eq!(merged(true, root(), None), "system");
        assert_eq!(merged(true, root(), Some("web")), "web");
        // Root's domain doesn't depend on rules by cgroup or program.
        let services = vec![rule("a", &Selector::Cgroup("/".into())), rule("b", &Selector::Exe("sh".into()))];
        assert_eq!(merged(false, services, None), DEFAULT);
    }

    #[test]
    fn keys_of_domains_without_processes_are_used_again() {
        let mut domains = Domains::default();
        assert_eq!(domains.key_of(DEFAULT), Some(DomainKey(0)));
        let keys: Vec<_> = (1..DOMAINS_MOST).map(|user| domains.key_of(&format!("user:{user}")).unwrap()).collect();
        assert!(domains.are_full() && !keys.contains(&NO_DOMAIN));
        assert_eq!(domains.key_of("another"), None);
        assert_eq!(domains.key_of("user:7"), Some(keys[6]), "those that are known stay so");
        domains.keep(|key| key == keys[6]);
        assert!(!domains.are_full());
        assert_eq!((domains.key_of("user:7"), domains.key_of(DEFAULT)), (Some(keys[6]), Some(DomainKey(0))));
        let another = domains.key_of("another").unwrap();
        assert!(another != keys[6] && another != DomainKey(0));
        assert_eq!(domains.name(another).unwrap(), "another");
        assert_eq!(domains.names().len(), DOMAINS_MOST);
    }

    #[test]
    fn a_program_that_its_user_named_falls_to_the_next_rule() {
        // Without an executable the name is the one that the program has set itself.
        let rules = vec![rule("web", &Selector::Exe("nginx".into()))];
        let rules = DomainRules { by_user: true, rules, merge: None };
        assert_eq!(domain(&rules, &web()), "user:33");
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
        let mut notes = Vec::new();
        let name = rules.domain_of(&ProcessInfo { exe: Some(exe), ..web() }, &mut notes);
        child.kill().unwrap();
        child.wait().unwrap();
        if is_root {
            assert_eq!(name, "user:33");
            let [why] = &notes[..] else { panic!("{notes:?}") };
            assert!(why.contains("trust domain web does not apply") && why.contains("belongs to user 33"), "{why}");
        }
    }
}
