//! Findings of `pagefold doctor`: how the facts about the machine affect pagefold, and what to do.
//!
//! Each check judges some of [`MachineFacts`] and makes one finding. To add one, write a function and list it in
//! [`judge`].

mod access;
mod ksm;
mod system;

use crate::check::facts::{MachineFacts, MachinePaths};
use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing to do.
    Ok,
    /// Worth knowing, without consequences for pagefold.
    Note,
    /// pagefold runs, with a feature missing or at a higher cost.
    Warning,
    /// `pagefold run` can't work.
    Blocker,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable identifier; empty until [`Finding::called`] sets it.
    pub id: &'static str,
    pub severity: Severity,
    /// The state that we found.
    pub what: String,
    /// Why this state matters. Empty for [`Severity::Ok`].
    pub why: String,
    /// What to do. Empty for [`Severity::Ok`].
    pub todo: String,
}

/// Reads the facts about the machine and judges them.
pub fn examine(roots: &MachinePaths) -> Vec<Finding> {
    judge(&MachineFacts::gather(roots))
}

type Check = fn(&MachineFacts) -> Finding;

pub fn judge(facts: &MachineFacts) -> Vec<Finding> {
    let checks: [(&'static str, Check); 21] = [
        ("kernel", ksm::kernel),
        ("ksm", ksm::ksm),
        ("request", ksm::request),
        ("run", ksm::run),
        ("advisor", ksm::advisor),
        ("programs", ksm::programs),
        ("lock", ksm::lock),
        ("state", ksm::state),
        ("capabilities", access::capabilities),
        ("page-monitor", access::page_monitor),
        ("ksm-stat", access::ksm_stat),
        ("ptrace", access::ptrace),
        ("seccomp", access::seccomp),
        ("huge-pages", system::huge_pages),
        ("khugepaged", system::khugepaged),
        ("map-count", system::map_count),
        ("nodes", system::nodes),
        ("swap", system::swap),
        ("pressure", system::pressure),
        ("cgroups", system::cgroups),
        ("page-size", system::page_size),
    ];
    checks.iter().map(|(id, check)| check(facts).called(id)).collect()
}

impl Finding {
    #[must_use]
    pub fn called(self, id: &'static str) -> Self {
        Self { id, ..self }
    }
}

fn finding(severity: Severity, what: impl Into<String>, why: &str, todo: &str) -> Finding {
    Finding { id: "", severity, what: what.into(), why: why.to_owned(), todo: todo.to_owned() }
}

/// Says that something is as it should be.
pub fn ok(what: impl Into<String>) -> Finding {
    finding(Severity::Ok, what, "", "")
}

/// Something worth knowing that doesn't affect pagefold much.
pub fn note(what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Note, what, why, todo)
}

fn warning(what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Warning, what, why, todo)
}

/// pagefold doesn't work without this.
pub fn blocker(what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Blocker, what, why, todo)
}

#[cfg(test)]
#[path = "diagnose_tests.rs"]
mod tests;
