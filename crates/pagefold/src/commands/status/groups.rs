//! Processes summed up: by the selector that brought them into scope, and by the reason why we leave them alone.
//!
//! The sums become metrics with labels, so we keep them few. Only pagefold and the administrator choose a label's text.

use crate::control::queue::Facts;
use pagefold_engine::state::MemoryTotal;
use pagefold_host::scope::exclude::Exclusion;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// We list at most this many selectors, and sum up the others.
const SCOPES_MOST: usize = 20;
/// The label for the remaining selectors, and for reasons that concern mappings rather than processes.
pub const OTHER: &str = "other";
/// The label for processes that a user has unmerged or excluded.
pub const UNMERGED: &str = "unmerged";

/// The processes that one selector has brought into scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeRow {
    /// `pid`, `cgroup`, `user`, `exe`, a kind of workload such as `unit` or `vm`, `all`, or `other`.
    pub kind: String,
    /// The selector's value as the administrator wrote it.
    pub name: String,
    pub processes: usize,
    #[serde(flatten)]
    pub memory: MemoryTotal,
    /// What these processes save; `None` until we've counted.
    pub saved_bytes: Option<u64>,
}

/// The processes that we leave alone for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOutRow {
    pub reason: String,
    pub processes: usize,
}

/// The sums by selector, the largest first. Together they cover all processes.
pub fn scope_rows(facts: &Facts) -> Vec<ScopeRow> {
    let is_counted = facts.state.memory.saved_bytes.is_some();
    let mut rows = Vec::new();
    for selector in facts.run.selectors.iter() {
        rows.push(ScopeRow { kind: selector.kind().to_owned(), name: selector.value(), ..ScopeRow::default() });
    }
    let mut other = ScopeRow { kind: OTHER.to_owned(), ..ScopeRow::default() };
    for target in &facts.targets {
        let row = target.selected_by.and_then(|at| rows.get_mut(at)).unwrap_or(&mut other);
        row.processes += 1;
        let total = facts.state.owner(target.owner);
        row.memory += total.memory;
        row.saved_bytes = is_counted.then_some(row.saved_bytes.unwrap_or(0) + total.saved_bytes);
    }
    if rows.len() > SCOPES_MOST {
        rows.sort_by_key(|row| Reverse((row.saved_bytes, row.memory.expected_bytes, row.memory.resident_bytes)));
        for row in rows.drain(SCOPES_MOST..) {
            other.processes += row.processes;
            other.memory += row.memory;
            other.saved_bytes = is_counted.then_some(other.saved_bytes.unwrap_or(0) + row.saved_bytes.unwrap_or(0));
        }
    }
    if other.processes > 0 {
        rows.push(other);
    }
    rows
}

/// The label for processes that we don't track, because one user or cgroup has too many.
pub const TOO_MANY: &str = "too-many-processes";

/// The labels for all reasons to leave a process alone.
pub const REASONS: [&str; 21] = [
    "kernel-thread",
    "ended",
    "not-dumpable",
    "dumpable-unknown",
    "traced",
    "deny-list",
    "opted-out",
    UNMERGED,
    "untrusted",
    "out-of-scope",
    "moves-domain",
    "other-domain",
    "no-domain",
    "other-program",
    "not-readable",
    "locked",
    "32-bit",
    "too-many-mappings",
    "restless",
    TOO_MANY,
    OTHER,
];

/// The label for an exclusion.
pub fn reason_of(exclusion: &Exclusion) -> &'static str {
    match exclusion {
        Exclusion::KernelThread => "kernel-thread",
        Exclusion::Zombie => "ended",
        Exclusion::NotDumpable => "not-dumpable",
        Exclusion::DumpableUnknown => "dumpable-unknown",
        Exclusion::Traced { .. } => "traced",
        Exclusion::DenyListed { .. } => "deny-list",
        Exclusion::OptedOut(_) => "opted-out",
        Exclusion::KeptOut { .. } => UNMERGED,
        Exclusion::Untrusted(_) => "untrusted",
        Exclusion::OutOfScope => "out-of-scope",
        Exclusion::MovedDomain { .. } => "moves-domain",
        Exclusion::OtherDomain { .. } => "other-domain",
        Exclusion::NoDomain => "no-domain",
        Exclusion::OtherProgram => "other-program",
        Exclusion::NotReadable => "not-readable",
        Exclusion::Stuck => "locked",
        Exclusion::Bits32 => "32-bit",
        Exclusion::TooManyMappings { .. } | Exclusion::TooManyInAll => "too-many-mappings",
        Exclusion::Restless => "restless",
        // Only scans leave processes out for this reason.
        Exclusion::SameMemory { .. }
        // These concern a mapping, not a process.
        | Exclusion::Shared
        | Exclusion::Unmergeable(_)
        | Exclusion::ShadowStack
        | Exclusion::Special
        | Exclusion::DontDump
        | Exclusion::WipeOnFork
        | Exclusion::Locked
        | Exclusion::Pinned
        | Exclusion::UserFault
        | Exclusion::NothingAnonymous => OTHER,
    }
}

/// The number of processes that we leave alone for each reason, zeros included.
pub fn left_out_rows(facts: &Facts) -> Vec<LeftOutRow> {
    let mut rows = Vec::new();
    for reason in REASONS {
        let processes = match reason {
            TOO_MANY => facts.turned_away,
            _ => facts.targets.iter().filter(|target| target.reason == Some(reason)).count(),
        };
        rows.push(LeftOutRow { reason: reason.to_owned(), processes });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_listed_once() {
        let mut reasons = REASONS.to_vec();
        reasons.sort_unstable();
        reasons.dedup();
        assert_eq!(reasons.len(), REASONS.len());
        for exclusion in [Exclusion::Stuck, Exclusion::Traced { by: 1 }, Exclusion::Locked, Exclusion::Restless] {
            assert!(REASONS.contains(&reason_of(&exclusion)), "{exclusion}");
        }
        assert_eq!(reason_of(&Exclusion::Locked), OTHER);
    }
}
