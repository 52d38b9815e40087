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
    /// Stable identifier.
    pub id: &'static str,
    pub severity: Severity,
    /// The state found.
    pub what: String,
    /// Why it matters. Empty for [`Severity::Ok`].
    pub why: String,
    /// What to do. Empty for [`Severity::Ok`].
    pub todo: String,
}

/// Reads the facts about the machine and judges them.
pub fn examine(roots: &MachinePaths) -> Vec<Finding> {
    judge(&MachineFacts::gather(roots))
}

/// Makes all findings.
pub fn judge(facts: &MachineFacts) -> Vec<Finding> {
    let checks: [fn(&MachineFacts) -> Finding; 21] = [
        ksm::kernel,
        ksm::ksm,
        ksm::request,
        ksm::run,
        ksm::advisor,
        ksm::programs,
        ksm::lock,
        ksm::state,
        access::capabilities,
        access::page_monitor,
        access::ksm_stat,
        access::ptrace,
        access::seccomp,
        system::huge_pages,
        system::khugepaged,
        system::map_count,
        system::nodes,
        system::swap,
        system::pressure,
        system::cgroups,
        system::page_size,
    ];
    checks.iter().map(|check| check(facts)).collect()
}

fn finding(severity: Severity, id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Finding {
    Finding { id, severity, what: what.into(), why: why.to_owned(), todo: todo.to_owned() }
}

/// Says that something is as it should be.
pub fn ok(id: &'static str, what: impl Into<String>) -> Finding {
    finding(Severity::Ok, id, what, "", "")
}

/// Something to know.
pub fn note(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Note, id, what, why, todo)
}

fn warning(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Warning, id, what, why, todo)
}

/// pagefold doesn't work without this.
pub fn blocker(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Finding {
    finding(Severity::Blocker, id, what, why, todo)
}

#[cfg(test)]
#[path = "diagnose_tests.rs"]
mod tests;
