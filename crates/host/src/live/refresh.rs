//! Refreshing the targets: processes that come into scope, change or end.

use super::turns::{Pass, Turn};
use super::{Event, LiveError, LiveHost};
use crate::judge::Judge;
use crate::regions::Tracked;
use crate::scope::exclude::Exclusion;
use crate::scope::new_processes::NewProcesses;
use crate::scope::{ProcessInfo, ScopeError, Selector};
use crate::targets::Target;
use pagefold_engine::host::{Mechanism, RegionView};
use pagefold_engine::keys::{DomainKey, GroupKey, KeyCounter, LastingKey, OwnerKey, RegionKey};
use pagefold_engine::random::mix;
use pagefold_engine::units::{Pages, count};
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::{Origin, Share};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tracing::debug;

/// Default time between two refreshes of the targets, nanoseconds.
pub(super) const INTERVAL_NS: u64 = 250_000_000;
/// Shortest time between two refreshes of the targets, nanoseconds.
pub(super) const INTERVAL_MIN_NS: u64 = 10_000_000;
/// If a refresh is due within this time, nanoseconds, we do it at once.
const EARLY_NS: u64 = 30_000_000;
/// Cost of refreshing one unchanged target, nanoseconds. Refreshes may take 1/`UNCHANGED_SHARE` of the time: with more
/// than 75 targets we refresh less often than every `INTERVAL_NS`.
const UNCHANGED_NS: u64 = 1_000;
const UNCHANGED_SHARE: u64 = 3_333;
/// Shortest and longest time between two searches for kept-out processes that have ended, nanoseconds. In between, the
/// searches may take 1/`FORGET_SHARE` of the time. If we searched less often, programs that fork all the time would
/// make the list too long to be kept.
const FORGET_NS: u64 = 10_000_000_000;
const FORGET_LATEST_NS: u64 = 20_000_000_000;
const FORGET_SHARE: u64 = 1_000;

/// If earlier runs have marked programs, we stop ksmd until we've checked all processes, but no longer than this,
/// nanoseconds.
const FIRST_CHECKS_NS: u64 = 10_000_000_000;
/// We remember this many marked programs. Beyond that we forget programs that no process is running.
const PROGRAMS_MOST: usize = 16_384;

/// While this many targets match by name only or have left the scope, we add no more that match by name only: any user
/// can start such processes.
const STRANGERS_MOST: usize = 1_000;

/// At most this many processes of one user or cgroup are targets. In all they may have `REGIONS_OF_SHARE_MOST` regions.
/// A region takes about 1.8 KB, a target up to 30 KB if its paths are long.
const TARGETS_OF_SHARE_MOST: usize = 4_096;
const REGIONS_OF_SHARE_MOST: usize = REGIONS_MOST / 6;
/// Forks of marked programs that are out of scope become targets only until their marks are gone. Of one user or cgroup,
/// at most this many do so at a time. The others wait.
const FORKS_OF_SHARE_MOST: usize = 256;
/// All processes with more than `FEW_REGIONS` regions may have `REGIONS_MOST` in all, whoever they belong to.
const FEW_REGIONS: usize = 1_024;
const REGIONS_MOST: usize = 196_608;

/// How many targets and regions there are.
#[derive(Debug, Default)]
pub(super) struct Census {
    /// The regions of processes with more than [`FEW_REGIONS`].
    in_large_lists: usize,
    by_share: HashMap<Share, ShareCount>,
}

/// The targets and regions of one user or cgroup.
#[derive(Clone, Copy, Debug, Default)]
struct ShareCount {
    targets: usize,
    /// Targets that are out of scope.
    forks: usize,
    regions: usize,
}

impl Census {
    pub(super) fn of(targets: &BTreeMap<i32, Target>) -> Self {
        let mut census = Self::default();
        for target in targets.values() {
            if target.request.is_only_reason {
                census.add_fork(target.origin);
            } else {
                census.add_target(target.origin);
            }
            census.grow(target.origin, 0, target.regions.len());
        }
        census
    }

    fn add_target(&mut self, origin: Origin) {
        for share in origin.shares().into_iter().flatten() {
            self.by_share.entry(share).or_default().targets += 1;
        }
    }

    pub(super) fn add_fork(&mut self, origin: Origin) {
        for share in origin.shares().into_iter().flatten() {
            self.by_share.entry(share).or_default().forks += 1;
        }
    }

    /// Counts the regions of a process whose list has grown from `before` to `regions`.
    fn grow(&mut self, origin: Origin, before: usize, regions: usize) {
        if regions > FEW_REGIONS {
            self.in_large_lists += if before > FEW_REGIONS { regions - before } else { regions };
        }
        for share in origin.shares().into_iter().flatten() {
            self.by_share.entry(share).or_default().regions += regions - before;
        }
    }

    /// How many regions a process of this user and cgroup may have. It has `regions` now.
    fn regions_most(&self, origin: Origin, regions: usize) -> usize {
        let own = if regions > FEW_REGIONS { regions } else { 0 };
        let mut most = (REGIONS_MOST + own).saturating_sub(self.in_large_lists).max(FEW_REGIONS);
        for count in self.counts(origin) {
            most = most.min((REGIONS_OF_SHARE_MOST + regions).saturating_sub(count.regions));
        }
        most
    }

    fn has_room_for_target(&self, origin: Origin) -> bool {
        self.counts(origin).all(|count| count.targets < TARGETS_OF_SHARE_MOST)
    }

    pub(super) fn has_room_for_fork(&self, origin: Origin) -> bool {
        self.counts(origin).all(|count| count.forks < FORKS_OF_SHARE_MOST)
    }

    fn counts(&self, origin: Origin) -> impl Iterator<Item = ShareCount> {
        let shares = origin.shares().into_iter().flatten();
        shares.map(|share| self.by_share.get(&share).copied().unwrap_or_default())
    }
}

/// When we refresh the targets.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) interval_ns: u64,
    pub(super) next_ns: u64,
    /// Whether the last refresh had no time for all targets.
    is_behind: bool,
    next_forget_ns: u64,
    /// Whether we've checked all processes that were in scope at the start, and so know which of them are marked.
    pub(super) are_all_checked: bool,
}

impl Schedule {
    pub(super) fn new(are_all_checked: bool) -> Self {
        Self { interval_ns: INTERVAL_NS, next_ns: 0, is_behind: false, next_forget_ns: 0, are_all_checked }
    }

    fn is_due(&self, now_ns: u64) -> bool {
        now_ns + EARLY_NS.min(self.interval_ns / 8) >= self.next_ns
    }
}

/// Finds processes that come into scope.
#[derive(Debug)]
pub(super) struct Discovery {
    /// Whether we've looked for processes already.
    pub(super) has_begun: bool,
    /// Whether we've examined all processes that were there at the start.
    pub(super) is_complete: bool,
    /// Whether we've listed the regions of all processes that were there at the start, or have waited long enough.
    pub(super) has_listed_all: bool,
    pub(super) new_processes: NewProcesses,
    pub(super) owner_keys: KeyCounter,
}

/// The regions of all targets, as of the last refresh.
#[derive(Debug, Default)]
pub(super) struct RegionList {
    pub(super) pids: BTreeMap<RegionKey, i32>,
    pub(super) views: Vec<RegionView>,
    /// The processes in groups with limits.
    pub(super) groups: Arc<BTreeMap<OwnerKey, GroupKey>>,
    /// For each target: its part of the frames of its regions, as Pss counts.
    pub(super) held: Arc<BTreeMap<OwnerKey, Pages>>,
    keys: KeyCounter,
}

impl LiveHost {
    /// Refreshes the targets if it's time. Returns whether anything has changed.
    pub(super) fn refresh(&mut self, now_ns: u64) -> Result<bool, LiveError> {
        if !self.schedule.is_due(now_ns) {
            return Ok(false);
        }
        self.tend_injector()?;
        self.end_late_merge();
        self.forget_kept_out(now_ns);
        self.add_targets(now_ns)?;
        let mut changed = self.refresh_targets(now_ns);
        self.discovery.has_listed_all |= self.are_listed(now_ns);
        let cost_ns = count(self.targets.len()) * UNCHANGED_NS;
        if !self.schedule.is_behind && self.discovery.new_processes.has_examined_all() {
            self.schedule.next_ns = now_ns + (cost_ns * UNCHANGED_SHARE).max(self.schedule.interval_ns);
        }
        changed |= self.withdraw_marks(now_ns);
        if changed {
            self.list_regions();
        }
        Ok(changed)
    }

    fn tend_injector(&mut self) -> Result<(), LiveError> {
        if let Some(actuator) = &mut self.actuator {
            if actuator.tend_injector().map_err(LiveError::Injector)? {
                self.events.push(Event::InjectorRestarted { pid: actuator.injector.pid() });
            }
        }
        Ok(())
    }

    /// From time to time, forgets kept-out processes that have ended.
    fn forget_kept_out(&mut self, now_ns: u64) {
        if now_ns >= self.schedule.next_forget_ns {
            let before_ns = own_cpu_ns();
            self.rules.kept_out.forget_ended(&self.rules.roots);
            let wait_ns = (own_cpu_ns() - before_ns) * FORGET_SHARE;
            self.schedule.next_forget_ns = now_ns + wait_ns.clamp(FORGET_NS, FORGET_LATEST_NS);
        }
    }

    /// Adds the processes that have come into scope.
    fn add_targets(&mut self, now_ns: u64) -> Result<(), LiveError> {
        let is_first = !std::mem::replace(&mut self.discovery.has_begun, true);
        // A selected pid means the one process that we opened at the start: a process that reuses the pid isn't
        // selected.
        let mut spec = if is_first { self.rules.scope.clone() } else { self.rules.scope.without_pids() };
        let ours = self.own_pids();
        let found = loop {
            if spec.0.is_empty() {
                self.discovery.new_processes.forget_postponed();
                self.add_marked_forks();
                return Ok(());
            }
            let new_processes = &mut self.discovery.new_processes;
            let found = new_processes
                .find(now_ns, &spec, &self.rules.roots, |pid| ours.contains(&pid) || self.targets.contains_key(&pid));
            match found {
                Ok(found) => break found,
                // The process has ended since we checked the command line; the others remain in scope.
                Err(ScopeError::UnknownPid(pid) | ScopeError::Unreadable { pid, .. }) => {
                    spec.0.retain(|selector| *selector != Selector::Pid(pid));
                }
                // Our targets hold all files that we may open. We go on without new ones.
                Err(error) if error.is_for_lack_of_files() => break Vec::new(),
                Err(error) => return Err(error.into()),
            }
        };
        // If there are many processes at the start, we need several calls to find them.
        let are_old = !self.discovery.is_complete;
        let has_examined_all = self.discovery.new_processes.has_examined_all();
        self.discovery.is_complete |= has_examined_all || now_ns >= FIRST_CHECKS_NS;
        if found.is_empty() {
            self.add_marked_forks();
            return Ok(());
        }
        let mut census = Census::of(&self.targets);
        let mut strangers = 0;
        for target in self.targets.values() {
            strangers += usize::from(target.is_stranger());
        }
        for mut info in found {
            if let Some(parent) = self.targets.get(&info.stat.parent) {
                parent.share_exe(&mut info);
            }
            if info.distrust.is_some() {
                if strangers >= STRANGERS_MOST {
                    self.discovery.new_processes.turn_away(info.process.pid());
                    continue;
                }
                strangers += 1;
            }
            let mut target = self.new_target(info);
            if !census.has_room_for_target(target.origin) {
                self.discovery.new_processes.turn_away(target.pid());
                continue;
            }
            census.add_target(target.origin);
            target.appeared_ns = if are_old { None } else { Some(now_ns) };
            let pid = target.pid();
            debug!(target: "scope", pid, name = %target.info.name, domain = target.domain.0, "in scope");
            self.discovery.new_processes.join(pid);
            self.targets.insert(pid, target);
        }
        self.add_marked_forks();
        Ok(())
    }

    pub(super) fn new_target(&mut self, info: ProcessInfo) -> Target {
        let targets = &self.targets;
        let owner = self.discovery.owner_keys.take(|key| targets.values().any(|target| target.owner.0 == key));
        let domain = self.rules.domain_of(&info);
        let mut target = Target::new(info, OwnerKey(owner), domain);
        target.refreshed_ns = self.cost.now_ns();
        target
    }

    /// The targets in the order in which we refresh them.
    fn refresh_order(&self) -> Vec<Turn> {
        let mut turns = Vec::new();
        for target in self.targets.values() {
            turns.push(Turn::of(target, target.refreshed_ns));
        }
        turns.sort_unstable();
        turns
    }

    /// Refreshes as many targets as there is time for. Returns whether anything has changed.
    fn refresh_targets(&mut self, now_ns: u64) -> bool {
        let processes = count(self.targets.len());
        let mut changed = false;
        let mut gone = Vec::new();
        let mut left_alone = Vec::new();
        self.forget_programs();
        self.forget_domains();
        let turns = self.refresh_order();
        let mut census = Census::of(&self.targets);
        let mut judge = Judge::new(&mut self.rules, &self.history);
        let mut pass = Pass::begin();
        self.schedule.is_behind = false;
        for Turn { pid, .. } in turns {
            if pass.is_over() {
                self.schedule.is_behind = true;
                break;
            }
            let Some(target) = self.targets.get_mut(&pid) else { continue };
            let in_use = &self.regions.pids;
            let keys = &mut self.regions.keys;
            let regions = target.regions.len();
            target.regions_most = census.regions_most(target.origin, regions);
            let refreshed = target.refresh(now_ns, processes, &mut judge, || {
                RegionKey(keys.take(|key| in_use.contains_key(&RegionKey(key))))
            });
            target.refreshed_ns = now_ns + pass.charge(target.origin);
            if target.regions.len() > regions {
                census.grow(target.origin, regions, target.regions.len());
            }
            for opt_out in target.take_overridden() {
                self.events.push(Event::Overridden { pid, opt_out: opt_out.to_string() });
            }
            if let (Some(list), Some(_)) = (target.take_list(), &self.requesting.device) {
                self.requesting.lists.insert(pid, Arc::new(list));
            }
            match refreshed {
                Ok(false) => {}
                Ok(true) => {
                    changed = true;
                    left_alone.extend(target.exclusion.as_ref().map(|why| (pid, why.to_string())));
                }
                // The thread that we've read has just ended; the next refresh reads another one.
                Err(ReadError::Vanished { .. }) if target.info.process.is_alive() => {}
                Err(ReadError::Vanished { .. }) => {
                    changed = true;
                    gone.push(pid);
                }
                Err(error) => {
                    let why = if target.is_blocked() { Exclusion::Stuck } else { Exclusion::NotReadable };
                    changed |= target.leave_alone(why);
                    left_alone.push((pid, error.to_string()));
                }
            }
        }
        self.schedule.are_all_checked |= self.are_checked(now_ns);
        for (pid, why) in left_alone {
            self.report_left_alone(pid, why);
        }
        for pid in gone {
            self.remove_ended(pid, now_ns);
        }
        changed
    }

    /// Whether we've checked the processes that were in scope at the start, or have waited long enough. Only an exec
    /// can delay such a check for long, and an exec leaves no marks.
    fn are_checked(&self, now_ns: u64) -> bool {
        let is_checked = |target: &Target| target.appeared_ns.is_some() || target.image().is_some();
        now_ns >= FIRST_CHECKS_NS || self.discovery.is_complete && self.targets.values().all(is_checked)
    }

    /// Whether we've listed the regions of the processes that were in scope at the start, or have waited long enough.
    /// Some processes we must first ask whether they're dumpable.
    fn are_listed(&self, now_ns: u64) -> bool {
        let must_be_asked =
            |target: &Target| target.appeared_ns.is_none() && target.exclusion == Some(Exclusion::DumpableUnknown);
        now_ns >= FIRST_CHECKS_NS || self.are_checked(now_ns) && !self.targets.values().any(must_be_asked)
    }

    /// Removes a target whose process has ended.
    fn remove_ended(&mut self, pid: i32, now_ns: u64) {
        if let Some(target) = self.targets.remove(&pid) {
            if let (Some(family), Some(since_ns)) = (target.family(), target.appeared_ns) {
                self.history.lifetimes.record_end(family, now_ns - since_ns, now_ns);
            }
        }
        self.reported.remove(&pid);
        self.withdrawing.jobs.remove(&pid);
        // Another process may have its pid already, so we must read the list of processes again.
        self.discovery.new_processes.invalidate();
    }

    /// If the number of trust domains has reached its limit, forgets the ones without processes.
    fn forget_domains(&mut self) {
        if !self.rules.domains.are_full() {
            return;
        }
        let mut needed: HashSet<DomainKey> = self.targets.values().map(|target| target.domain).collect();
        needed.extend(self.history.marked.domains());
        needed.extend(self.forks.domains());
        needed.extend(self.rules.merged);
        self.rules.domains.keep(|key| needed.contains(&key));
    }

    /// If there are many marked programs, forgets the ones that no process in scope is running.
    fn forget_programs(&mut self) {
        let most = PROGRAMS_MOST.max(self.targets.len() * 2);
        if self.schedule.are_all_checked && self.history.marked.are_more_than(most) {
            let running = self.targets.values().filter_map(Target::image).chain(self.forks.images()).collect();
            self.history.marked.keep(&running, self.rules.domains.names());
        }
    }

    /// Reports why we leave a process alone, unless our last report about it said the same.
    pub(super) fn report_left_alone(&mut self, pid: i32, why: String) {
        let Some(target) = self.targets.get(&pid) else { return };
        if !target.request.is_only_reason && self.reported.get(&pid) != Some(&why) {
            self.reported.insert(pid, why.clone());
            self.events.push(Event::LeftAlone { pid, name: target.info.name.clone(), why });
        }
    }

    fn list_regions(&mut self) {
        let on_request = self.mechanism() == Mechanism::Request;
        let mut groups = BTreeMap::new();
        let mut held = BTreeMap::new();
        let RegionList { pids, views, .. } = &mut self.regions;
        pids.clear();
        views.clear();
        for (&pid, target) in &self.targets {
            if let Some(group) = target.group {
                groups.insert(target.owner, group);
            }
            let held_by_owner = held.entry(target.owner).or_insert(Pages(0));
            let lasting = lasting_key(&target.info.process);
            for Tracked { key, stretch } in &target.regions {
                pids.insert(*key, pid);
                *held_by_owner += stretch.held;
                views.push(RegionView {
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
                    merged_somewhere: if shows_merged() { Pages(0) } else { stretch.merged },
                    named: on_request && stretch.marked > Pages(0),
                    left_alone: target.exclusion.is_some(),
                });
            }
        }
        self.regions.groups = Arc::new(groups);
        self.regions.held = Arc::new(held);
    }
}

/// A key from a process's pid and start time. No other process has both until the machine restarts.
fn lasting_key(process: &Process) -> LastingKey {
    LastingKey(mix(mix(u64::from(process.pid().unsigned_abs())) ^ process.start_time_ticks()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_and_targets_are_bounded_by_user_and_cgroup_and_in_all() {
        let of = |user, cgroup| Origin { user: Some(Share::User(user)), cgroup: Some(Share::Cgroup(cgroup)) };
        let mut census = Census::default();
        for cgroup in 0..20 {
            census.grow(of(1, cgroup), 0, FEW_REGIONS);
        }
        let left = REGIONS_OF_SHARE_MOST - 20 * FEW_REGIONS;
        assert_eq!(census.regions_most(of(1, 500), 0), left, "short lists count, in whatever cgroup");
        census.grow(of(1, 500), 0, left);
        assert_eq!((census.regions_most(of(1, 501), 0), census.regions_most(of(1, 500), left)), (0, left));
        assert_eq!(census.regions_most(of(2, 600), 0), REGIONS_OF_SHARE_MOST);
        assert_eq!(census.regions_most(of(2, 500), 0), REGIONS_OF_SHARE_MOST - left);
        for user in 2..10 {
            census.grow(of(user, 600 + u64::from(user)), 0, 23_040);
        }
        assert_eq!(census.regions_most(of(10, 700), 0), FEW_REGIONS, "however many the others have");
        assert_eq!(census.regions_most(of(9, 609), 23_040), 23_040);
        for _ in 0..TARGETS_OF_SHARE_MOST {
            census.add_target(of(11, 800));
        }
        assert!(!census.has_room_for_target(of(11, 801)) && !census.has_room_for_target(of(12, 800)));
        assert!(census.has_room_for_target(of(12, 801)));
    }
}
