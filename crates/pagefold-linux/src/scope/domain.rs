//! Trust domains. Pages are merged within one domain only: a process that shares a page with another can time its writes
//! to learn the contents of the other's pages.
//!
//! The domain of a process is the first of: the attribute `user.pagefold.domain` of its cgroup or the nearest one above,
//! the first rule that matches, the user if that is configured, and [`DEFAULT`].

use crate::scope::rule::{Rule, RuleFacts, first_match};

/// Domain of processes that no attribute or rule assigns to another.
pub const DEFAULT: &str = "default";

/// Assigns processes to domains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainRules {
    /// Processes that no rule matches are in a domain of their user, `user:UID`.
    pub by_user: bool,
    /// The first rule that matches decides.
    pub rules: Vec<Rule>,
}

impl DomainRules {
    /// Name of the domain of a process. `attribute` is the one that was set for its cgroup; `notes` gets a sentence for each rule
    /// that seems to match and does not.
    pub fn domain_of(&self, attribute: Option<&str>, facts: &RuleFacts<'_>, notes: &mut Vec<String>) -> String {
        if let Some(name) = attribute.filter(|name| !name.is_empty()) {
            return name.to_owned();
        }
        match first_match(&self.rules, facts, "trust domain", notes) {
            Some(at) => self.rules[at].name.clone(),
            None if self.by_user => format!("user:{}", facts.uid),
            None => DEFAULT.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::process::Process;
    use crate::scope::exe::Exe;
    use crate::scope::rule::Selector;

    const WEB: RuleFacts<'_> =
        RuleFacts { cgroup: Some("/system.slice/web.service/worker"), uid: 33, exe: None, name: "nginx" };

    fn own_exe() -> Exe {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        Exe::of(&own).unwrap().unwrap()
    }

    fn rule(name: &str, selector: Selector) -> Rule {
        Rule { name: name.to_owned(), selector }
    }

    fn domain(rules: &DomainRules, facts: RuleFacts<'_>) -> String {
        rules.domain_of(None, &facts, &mut Vec::new())
    }

    #[test]
    fn without_rules_all_processes_are_in_one_domain() {
        assert_eq!(domain(&DomainRules::default(), WEB), "default");
        let by_user = DomainRules { by_user: true, rules: Vec::new() };
        assert_eq!(domain(&by_user, WEB), "user:33");
        assert_eq!(domain(&by_user, RuleFacts { uid: 0, ..WEB }), "user:0");
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
        assert_eq!(domain(&rules, WEB), "b");
        assert_eq!(domain(&rules, RuleFacts { exe: Some(&own), ..WEB }), "a");
        assert_eq!(domain(&rules, RuleFacts { cgroup: None, ..WEB }), "c");
        assert_eq!(rules.domain_of(Some("d"), &WEB, &mut Vec::new()), "d");
        // An empty value.
        assert_eq!(rules.domain_of(Some(""), &WEB, &mut Vec::new()), "b");
        assert_eq!(domain(&rules, RuleFacts { cgroup: None, uid: 34, ..WEB }), "user:34");
    }

    #[test]
    fn a_program_that_its_user_named_falls_to_the_next_rule() {
        // No executable: a name set by the program itself.
        let rules = DomainRules { by_user: true, rules: vec![rule("web", Selector::Exe("nginx".into()))] };
        assert_eq!(domain(&rules, WEB), "user:33");
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
        let name = rules.domain_of(None, &RuleFacts { exe: Some(&exe), ..WEB }, &mut notes);
        child.kill().unwrap();
        child.wait().unwrap();
        if is_root {
            assert_eq!(name, "user:33");
            let [why] = &notes[..] else { panic!("{notes:?}") };
            assert!(why.contains("trust domain web does not apply") && why.contains("belongs to user 33"), "{why}");
        }
    }
}
