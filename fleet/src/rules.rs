//! The operator's rules, from a TOML file: which workloads are pinned, which stay together, which stay apart.

use serde::Deserialize;
use thiserror::Error;

/// The longest file, bytes.
pub const MOST_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// Kinds of workloads that may be moved.
    pub movable: Option<Vec<String>>,
    /// Workloads that are not moved.
    #[serde(default)]
    pub pinned: Vec<Pattern>,
    /// Workloads that move together, if they're on one host.
    #[serde(default)]
    pub together: Vec<Group>,
    /// Workloads that must be on different hosts.
    #[serde(default)]
    pub apart: Vec<Group>,
}

/// Workloads, by name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub name: String,
    pub workloads: Vec<Pattern>,
    /// The hosts whose workloads belong to the group. `None`: all hosts.
    pub hosts: Option<Vec<Pattern>>,
}

/// A name, or the beginning of names and an asterisk.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(String);

/// An error in the file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}; see fleet/README.md")]
pub struct RulesError {
    pub line: usize,
    pub what: String,
}

/// The kinds that we move unless the file says otherwise: those that an orchestrator can move. Units and processes
/// belong to their host.
pub const MOVABLE: [&str; 3] = ["vm", "pod", "container"];

impl Rules {
    /// Parses the file's text.
    ///
    /// # Errors
    /// The first error, with its line.
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        toml::from_str(text).map_err(|error| {
            let from = error.span().map_or(0, |span| span.start);
            let line = 1 + text.bytes().take(from).filter(|&byte| byte == b'\n').count();
            RulesError { line, what: error.message().replace('\n', " ") }
        })
    }

    pub fn is_movable(&self, kind: &str, workload: &str) -> bool {
        let is_movable = match &self.movable {
            Some(kinds) => kinds.iter().any(|movable| movable == kind),
            None => MOVABLE.contains(&kind),
        };
        is_movable && !matches(&self.pinned, workload)
    }
}

impl Group {
    pub fn contains(&self, host: &str, workload: &str) -> bool {
        matches(&self.workloads, workload) && self.hosts.as_ref().is_none_or(|hosts| matches(hosts, host))
    }
}

fn matches(patterns: &[Pattern], workload: &str) -> bool {
    patterns.iter().any(|Pattern(pattern)| match pattern.strip_suffix('*') {
        Some(beginning) => workload.starts_with(beginning),
        None => workload == pattern,
    })
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.find('*') {
            _ if text.is_empty() => Err("a name is empty; leave it out".to_owned()),
            Some(at) if at + 1 < text.len() => {
                Err(format!("'{}' has an asterisk before its end; write one at the end only", text.escape_debug()))
            }
            _ => Ok(Self(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_beginnings_of_names() {
        let rules = Rules::parse(
            "pinned = [\"licence\", \"db-*\"]\n[[together]]\nname = \"shop\"\nworkloads = [\"shop-*\"]\n\
             [[apart]]\nname = \"quorum\"\nworkloads = [\"etcd-1\", \"etcd-2\"]\nhosts = [\"a*\"]\n",
        )
        .unwrap();
        let movable = |name| rules.is_movable("pod", name);
        assert_eq!(["licence", "licence-2", "db-1", "web"].map(movable), [false, true, false, true]);
        assert!(!rules.is_movable("unit", "web") && !rules.is_movable("process", "web"));
        assert!(rules.together[0].contains("h", "shop-1") && !rules.together[0].contains("h", "sho"));
        assert!(rules.apart[0].contains("a1", "etcd-2") && !rules.apart[0].contains("a1", "etcd-3"));
        assert!(!rules.apart[0].contains("b", "etcd-2"));
        assert!(Rules::parse("movable = [\"unit\"]").unwrap().is_movable("unit", "web"));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, line, what) in [
            ("\npinned = [\"a*b\"]", 2, "asterisk"),
            ("pinned = [\"\"]", 1, "empty"),
            ("pin = []", 1, "unknown field"),
            ("\n\n[[apart]]\nname = \"x\"\n", 3, "workloads"),
            ("pinned = 1", 1, "invalid type"),
            ("[[", 1, ""),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert!(error.line == line && error.what.contains(what), "{text}: {error}");
            assert!(!error.to_string().contains('\n'));
        }
    }
}
