//! Refreshing the targets: processes that come into scope, change or end.

use super::{Event, LiveError, LiveHost, elapsed_ns};
use crate::identity::Watch;
use crate::regions::Tracked;
use crate::scope::domain::NO_DOMAIN;
use crate::scope::exclude::Exclusion;
use crate::scope::opt_out::OptOut;
use crate::scope::rule::RuleFacts;
use crate::scope::{ScopeError, Scoped, Selector};
use crate::targets::Target;
use pagefold_engine::host::{Mechanism, RegionView};
use pagefold_engine::keys::{DomainKey, LastingKey, OwnerKey, RegionKey};
use pagefold_engine::random::mix;
use pagefold_engine::units::{Pages, count};
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;
use tracing::debug;

/// If a refresh is due within this time we do it at once, nanoseconds.
const EARLY_NS: u64 = 30_000_000;
/// One refresh takes this long at most, not counting the last target. The next one continues with the others.
const PASS_NS: u64 = 250_000_000;
/// Cost of refreshing one unchanged target, nanoseconds. Refreshes may take 1/`UNCHANGED_SHARE` of the time: with more
/// than 300 targets we refresh them less often.
const UNCHANGED_NS: u64 = 1_000;
const UNCHANGED_SHARE: u64 = 3_333;
/// Shortest time between two looks for kept-out processes that have ended, nanoseconds. They may take 1/`FORGET_SHARE`
/// of the time.
const FORGET_NS: u64 = 10_000_000_000;
const FORGET_SHARE: u64 = 1_000;

impl LiveHost {
    /// Refreshes the targets if it's time. Returns whether anything has changed.
    pub(super) fn refresh(&mut self, now_ns: u64) -> Result<bool, LiveError> {
        if now_ns + EARLY_NS.min(self.refresh_ns / 8) < self.next_refresh_ns {
            return Ok(false);
        }
        self.tend_injector()?;
        self.end_late_merge();
        self.forget_kept_out(now_ns);
        self.add_targets(now_ns)?;
        let changed = self.refresh_targets(now_ns);
        let changed = self.withdraw_marks(now_ns) || changed;
        let cost_ns = count(self.targets.len()) * UNCHANGED_NS;
        if self.next_pid == 0 {
            self.next_refresh_ns = now_ns + (cost_ns * UNCHANGED_SHARE).max(self.refresh_ns);
        }
        if changed {
            self.list_regions();
        }
        Ok(changed)
    }

    /// From time to time, forgets kept-out processes that have ended.
    fn forget_kept_out(&mut self, now_ns: u64) {
        if now_ns >= self.next_forget_ns {
            let before_ns = own_cpu_ns();
            self.kept_out.forget_ended(&self.roots);
            self.next_forget_ns = now_ns + ((own_cpu_ns() - before_ns) * FORGET_SHARE).max(FORGET_NS);
        }
    }

    /// Adds the processes that have come into scope.
    fn add_targets(&mut self, now_ns: u64) -> Result<(), LiveError> {
        let first = std::mem::take(&mut self.first);
        // A selected pid means the one process that we opened at the start: a process that reuses the pid isn't
        // selected.
        let mut spec = if first { self.scope.clone() } else { self.scope.without_pids() };
        let ours = self.own_pids();
        let found = loop {
            if spec.0.is_empty() {
                return Ok(());
            }
            let known = |pid| ours.contains(&pid) || self.targets.contains_key(&pid);
            match self.new_processes.find(now_ns, &spec, &self.roots, known) {
                Ok(found) => break found,
                // The process has ended since we checked the command line; the others remain in scope.
                Err(ScopeError::UnknownPid(pid) | ScopeError::Unreadable { pid, .. }) => {
                    spec.0.retain(|selector| *selector != Selector::Pid(pid));
                }
                Err(error) => return Err(error.into()),
            }
        };
        for scoped in found {
            let mut target = self.new_target(scoped);
            target.appeared_ns = (!first).then_some(now_ns);
            debug!(target: "scope", pid = target.process.pid(), name = %target.name, domain = target.domain.0, "in scope");
            self.targets.insert(target.process.pid(), target);
        }
        Ok(())
    }

    pub(super) fn new_target(&mut self, scoped: Scoped) -> Target {
        let owner = self.owner_keys.take(|key| self.targets.values().any(|target| target.owner.0 == key));
        let facts = RuleFacts::from(&scoped);
        let domain = self.domain_rules.domain_of(scoped.domain.as_deref(), &facts, &mut Vec::new());
        let domain = self.domains.key_of(&domain).unwrap_or(NO_DOMAIN);
        Target::new(scoped, OwnerKey(owner), domain)
    }

    /// Refreshes as many targets as there is time for. Returns whether anything has changed.
    fn refresh_targets(&mut self, now_ns: u64) -> bool {
        let processes = count(self.targets.len());
        let mut changed = false;
        let (mut gone, mut reports) = (Vec::new(), Vec::new());
        forget_programs(&mut self.programs.marked, &self.targets);
        self.forget_domains();
        let rules = (&self.domain_rules, &mut self.domains, self.merged);
        let (scope, left_out) = ((&self.scope, &self.roots), (&self.deny, &mut self.kept_out));
        let mut watch = Watch::new(scope, left_out, rules, &self.group_rules, &self.programs);
        let began = Instant::now();
        let first = std::mem::take(&mut self.next_pid);
        for (&pid, target) in self.targets.range_mut(first..) {
            if elapsed_ns(began) > PASS_NS {
                self.next_pid = pid;
                break;
            }
            let (region_keys, in_use) = (&mut self.region_keys, &self.region_pids);
            let refreshed = target.refresh(now_ns, processes, &mut watch, || {
                RegionKey(region_keys.take(|key| in_use.contains_key(&RegionKey(key))))
            });
            let event = |opt_out: OptOut| Event::Overridden { pid, opt_out: opt_out.to_string() };
            self.events.extend(target.take_overridden().into_iter().map(event));
            let list = target.take_list().filter(|_| self.requesting.device.is_some());
            self.requesting.lists.extend(list.map(|list| (pid, Arc::new(list))));
            let why = match refreshed {
                Ok(false) => None,
                Ok(true) => {
                    changed = true;
                    target.exclusion.as_ref().map(ToString::to_string)
                }
                Err(ReadError::Vanished { .. }) => {
                    changed = true;
                    gone.push(pid);
                    None
                }
                Err(error) => {
                    let why = if target.is_stuck() { Exclusion::Stuck } else { Exclusion::NotReadable };
                    changed |= target.leave_alone(why);
                    Some(error.to_string())
                }
            };
            reports.extend(why.map(|why| (pid, why)));
        }
        self.are_all_looked_at |= self.next_pid == 0;
        for (pid, why) in reports {
            self.report_left_alone(pid, why);
        }
        for pid in gone {
            let target = self.targets.remove(&pid);
            if let Some((family, since_ns)) = target.and_then(|target| Some((target.family()?, target.appeared_ns?))) {
                self.programs.lifetimes.record_end(family, now_ns - since_ns, now_ns);
            }
            self.reported.remove(&pid);
            self.unmarking.remove(&pid);
            // Another process may have reused its pid.
            self.new_processes.invalidate();
        }
        changed
    }

    /// Forgets trust domains without processes, if there are as many as there can be.
    fn forget_domains(&mut self) {
        if !self.domains.are_full() {
            return;
        }
        let of_targets = self.targets.values().map(|target| target.domain);
        let needed: HashSet<DomainKey> =
            of_targets.chain(self.programs.marked.values().copied()).chain(self.merged).collect();
        self.domains.keep(|key| needed.contains(&key));
    }

    /// Reports why we leave a process alone, unless our last report about it said the same.
    pub(super) fn report_left_alone(&mut self, pid: i32, why: String) {
        let Some(target) = self.targets.get(&pid).filter(|target| !target.only_to_unmerge) else { return };
        if self.reported.get(&pid) != Some(&why) {
            self.reported.insert(pid, why.clone());
            self.events.push(Event::LeftAlone { pid, name: target.name.clone(), why });
        }
    }

    pub(super) fn list_regions(&mut self) {
        self.region_pids.clear();
        self.views.clear();
        self.groups =
            Arc::new(self.targets.values().filter_map(|target| Some((target.owner, target.group?))).collect());
        let on_request = self.mechanism() == Mechanism::Request;
        for (&pid, target) in &self.targets {
            let lasting = lasting_key(&target.process);
            for Tracked { key, stretch } in &target.regions {
                self.region_pids.insert(*key, pid);
                self.views.push(RegionView {
                    key: *key,
                    owner: target.owner,
                    lasting,
                    family: stretch.family,
                    lineage: target.lineage(),
                    domain: target.domain,
                    first: stretch.first,
                    pages: stretch.pages,
                    resident: stretch.resident,
                    marked: if on_request { Pages(0) } else { stretch.marked },
                    named: on_request && stretch.marked > Pages(0),
                    left_alone: target.exclusion.is_some(),
                });
            }
        }
    }
}

/// Names a process by its pid and start time. No other process has both until the machine restarts.
fn lasting_key(process: &Process) -> LastingKey {
    LastingKey(mix(mix(u64::from(process.pid().unsigned_abs())) ^ process.start_time_ticks()))
}

/// We remember the marks of this many programs before we forget programs without a process.
const PROGRAMS_MOST: usize = 16_384;

/// If there are many, forgets marked programs that no process in scope runs.
fn forget_programs(marked: &mut HashMap<u64, DomainKey>, targets: &BTreeMap<i32, Target>) {
    if marked.len() > PROGRAMS_MOST.max(targets.len() * 2) {
        let running: HashSet<u64> = targets.values().filter_map(Target::image).collect();
        marked.retain(|program, _| running.contains(program));
    }
}
