//! Processes summed up: by what brought them into scope, and by why they are left alone.
//!
//! Metrics have these sums as labels, so there are few, and all of their words are pagefold's or the administrator's.

use super::ProcessRow;
use crate::control::queue::{Facts, TargetFacts};
use pagefold_host::scope::exclude::Exclusion;
use pagefold_host::scope::{ScopeSpec, user_id};
use pagefold_text::escape::printable;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Selectors listed. The rest is summed up.
const SCOPES_MOST: usize = 20;
/// What sums up the rest, and reasons that concern mappings rather than processes.
pub const OTHER: &str = "other";
/// The reason of processes that are kept out by request.
pub const UNMERGED: &str = "unmerged";

/// The processes that a selector of the scope has brought in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeRow {
    /// `pid`, `cgroup`, `user`, `exe`, `all` or `other`.
    pub kind: String,
    /// As the administrator wrote it.
    pub name: String,
    pub processes: usize,
    pub resident_bytes: u64,
    pub marked_bytes: u64,
    pub expected_bytes: u64,
}

/// The processes left alone for a reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOutRow {
    pub reason: String,
    pub processes: usize,
}

/// One selector of the scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    kind: &'static str,
    name: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Pid(i32),
    Cgroup(PathBuf),
    User(Option<u32>),
    Exe(String),
    All,
}

impl Selector {
    /// All of a scope. A process counts for the first that fits it.
    pub fn all_of(spec: &ScopeSpec) -> Arc<[Self]> {
        let of = |kind, name: &[u8], test| Self { kind, name: printable(name), test };
        let pids = spec.pids.iter().map(|&pid| of("pid", pid.to_string().as_bytes(), Test::Pid(pid)));
        let cgroups = spec.cgroups.iter().map(|path| {
            let below = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path);
            let below = below.strip_prefix("/").unwrap_or(below);
            of("cgroup", path.as_os_str().as_bytes(), Test::Cgroup(below.to_owned()))
        });
        let users = spec.users.iter().map(|user| of("user", user.as_bytes(), Test::User(user_id(user).ok())));
        let exes = spec.exes.iter().map(|exe| of("exe", exe.as_bytes(), Test::Exe(exe.clone())));
        let all = spec.all.then(|| of("all", b"", Test::All));
        pids.chain(cgroups).chain(users).chain(exes).chain(all).collect()
    }

    /// Whether it fits a process. By names only, since the process is in scope already; what it is called decides nothing.
    fn fits(&self, target: &TargetFacts) -> bool {
        match &self.test {
            Test::Pid(pid) => target.pid == *pid,
            Test::Cgroup(path) => target.cgroup.as_deref().is_some_and(|cgroup| is_below(Path::new(cgroup), path)),
            Test::User(uid) => *uid == Some(target.uid),
            Test::Exe(exe) => {
                let path = target.exe.as_deref();
                let named = path.and_then(Path::file_name).is_some_and(|name| name == exe.as_str());
                named || path == Some(Path::new(exe)) || exe.rsplit('/').next() == Some(&target.name)
            }
            Test::All => true,
        }
    }
}

/// Whether a cgroup is at or below the path of a selector, which may begin with the mount of a version 1 hierarchy.
fn is_below(cgroup: &Path, selected: &Path) -> bool {
    let cgroup = cgroup.strip_prefix("/").unwrap_or(cgroup);
    let mut within_mount = selected.components();
    within_mount.next();
    let within_mount = within_mount.as_path();
    cgroup.starts_with(selected) || (within_mount != Path::new("") && cgroup.starts_with(within_mount))
}

/// The sums by selector, the largest first. Their totals are those of all processes.
pub fn scope_rows(facts: &Facts, processes: &[ProcessRow]) -> Vec<ScopeRow> {
    let selectors = &facts.run.selectors;
    let row = |selector: &Selector| ScopeRow {
        kind: selector.kind.to_owned(),
        name: selector.name.clone(),
        ..ScopeRow::default()
    };
    let mut rows: Vec<ScopeRow> = selectors.iter().map(row).collect();
    let mut other = ScopeRow { kind: OTHER.to_owned(), ..ScopeRow::default() };
    let targets: BTreeMap<i32, &TargetFacts> = facts.targets.iter().map(|target| (target.pid, target)).collect();
    for process in processes {
        let target = targets.get(&process.pid);
        let at = target.and_then(|target| selectors.iter().position(|selector| selector.fits(target)));
        let row = at.map_or(&mut other, |at| &mut rows[at]);
        let (resident, marked, expected) = (process.resident_bytes, process.marked_bytes, process.expected_bytes);
        row.add(1, resident, marked, expected);
    }
    if rows.len() > SCOPES_MOST {
        rows.sort_by_key(|row| Reverse((row.expected_bytes, row.resident_bytes)));
        for row in rows.drain(SCOPES_MOST..) {
            other.add(row.processes, row.resident_bytes, row.marked_bytes, row.expected_bytes);
        }
    }
    rows.extend((other.processes > 0).then_some(other));
    rows
}

impl ScopeRow {
    fn add(&mut self, processes: usize, resident: u64, marked: u64, expected: u64) {
        self.processes += processes;
        self.resident_bytes += resident;
        self.marked_bytes += marked;
        self.expected_bytes += expected;
    }
}

/// Every reason why a process may be left alone.
pub const REASONS: [&str; 18] = [
    "kernel-thread",
    "ended",
    "not-dumpable",
    "dumpable-unknown",
    "traced",
    "deny-list",
    "opted-out",
    UNMERGED,
    "out-of-scope",
    "moves-domain",
    "other-domain",
    "no-domain",
    "other-program",
    "not-readable",
    "locked",
    "too-many-mappings",
    "restless",
    OTHER,
];

/// The reason of an exclusion, without the names in it.
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
        Exclusion::OutOfScope => "out-of-scope",
        Exclusion::MovedDomain { .. } => "moves-domain",
        Exclusion::OtherDomain { .. } => "other-domain",
        Exclusion::NoDomain => "no-domain",
        Exclusion::OtherProgram => "other-program",
        Exclusion::NotReadable => "not-readable",
        Exclusion::Stuck => "locked",
        Exclusion::TooManyMappings { .. } => "too-many-mappings",
        Exclusion::Restless => "restless",
        _ => OTHER,
    }
}

/// The number of processes left alone for each reason, also if there are none.
pub fn left_out_rows(facts: &Facts) -> Vec<LeftOutRow> {
    let with = |reason| facts.targets.iter().filter(|target| target.reason == Some(reason)).count();
    REASONS.iter().map(|&reason| LeftOutRow { reason: reason.to_owned(), processes: with(reason) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::keys::{DomainKey, OwnerKey};

    fn target(pid: i32) -> TargetFacts {
        TargetFacts {
            owner: OwnerKey(1),
            pid,
            start_time_ticks: 1,
            domain: DomainKey(0),
            name: "redis-server".to_owned(),
            uid: 33,
            exe: Some("/usr/bin/redis-check-rdb".into()),
            cgroup: Some("/system.slice/redis.service".to_owned()),
            left_alone: None,
            reason: None,
            to_unmark: None,
            notes: Vec::new(),
        }
    }

    #[track_caller]
    fn assert_fits(spec: &ScopeSpec, fits: bool) {
        let selectors = Selector::all_of(spec);
        assert_eq!(selectors.iter().any(|selector| selector.fits(&target(7))), fits, "{spec}");
    }

    #[test]
    fn a_process_counts_for_the_selector_that_names_it() {
        let base = ScopeSpec::default;
        for (pid, fits) in [(7, true), (8, false)] {
            assert_fits(&ScopeSpec { pids: vec![pid], ..base() }, fits);
        }
        for (path, fits) in [
            ("/sys/fs/cgroup/system.slice/redis.service", true),
            ("/sys/fs/cgroup/memory/system.slice", true),
            ("/system.slice", true),
            ("system.slice", true),
            ("/sys/fs/cgroup", true),
            ("/system", false),
            ("/system.slice/redis", false),
        ] {
            assert_fits(&ScopeSpec { cgroups: vec![path.into()], ..base() }, fits);
        }
        for (user, fits) in [("33", true), ("0", false), ("no-such-user", false)] {
            assert_fits(&ScopeSpec { users: vec![user.to_owned()], ..base() }, fits);
        }
        for (exe, fits) in [
            ("redis-server", true),
            ("/usr/bin/redis-server", true),
            ("redis-check-rdb", true),
            ("/usr/bin/redis-check-rdb", true),
            ("redis", false),
            ("", false),
        ] {
            assert_fits(&ScopeSpec { exes: vec![exe.to_owned()], ..base() }, fits);
        }
        assert_fits(&ScopeSpec { all: true, ..base() }, true);
    }

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
