//! The cgroups of targets: how much is left below their memory limits (a written merged page needs memory again), how
//! much swap they may use, and how long their tasks wait for a CPU.

use super::yielding::Yielding;
use crate::targets::Target;
use pagefold_engine::host::{KillLimit, LimitView};
use pagefold_engine::keys::{KeyCounter, LimitKey, OwnerKey};
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages, Permyriad};
use pagefold_procmem::headroom::{Limit, TightestLimits, limits_of, swap_left};
use pagefold_procmem::os::cpu::thread_cpu_ns;
use pagefold_procmem::os::fault;
use pagefold_procmem::os::fields::number;
use pagefold_procmem::os::pressure::parse_pressure;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time between two passes over the cgroups, nanoseconds. Passes may take 1/`PASS_PART` of the time, but
/// we never wait longer than `PASS_LATEST_NS`: merging below a limit relies on recent readings.
const PASS_EVERY_NS: u64 = 1_000_000_000;
const PASS_LATEST_NS: u64 = 2_000_000_000;
/// The shortest time while memory is being merged. With little headroom, each step of merging waits for two passes.
const PASS_WHILE_MERGING_NS: u64 = 200_000_000;
/// We assume that a step of merging ends within this time, nanoseconds. Steps that take longer don't need frequent
/// passes.
const MERGING_NS: u64 = 1_000_000_000;
const PASS_PART: u64 = 1_000;
/// One pass reads limits for this long at most.
const PASS_LIMIT: Duration = Duration::from_millis(10);
/// Cgroups whose paths begin with the same `SHARED_NAMES` names share one part of a pass: all cgroups of one user
/// (user.slice/user-1000.slice), of one service, or of one pod (`POD_NAMES`). Only root can make cgroups that far up,
/// so nobody else can get more parts. If a share takes longer than 1/`PASS_PART` of the time between two passes, we
/// read its limits less often, but at least every `RESTING_MOST_NS`, nanoseconds.
const SHARED_NAMES: usize = 2;
const POD_NAMES: usize = 3;
const RESTING_MOST_NS: u64 = 10_000_000_000;
/// For this long after a quota has throttled a cgroup, nanoseconds, we ignore its CPU pressure, which counts throttled
/// tasks as waiting. By then their part of the average over 10 s has fallen to a twentieth.
const THROTTLED_NS: u64 = 30_000_000_000;

/// The cgroups that can limit the memory of targets.
#[derive(Debug, Default)]
pub(super) struct CgroupLimits {
    groups: BTreeMap<PathBuf, Group>,
    /// Shares whose limits took long to read, and when we read them again, nanoseconds.
    resting: BTreeMap<PathBuf, u64>,
    /// The directories of `groups`, by key.
    dirs: BTreeMap<LimitKey, PathBuf>,
    keys: KeyCounter,
    /// The processes that we've assigned to groups.
    owners: BTreeSet<OwnerKey>,
    /// Whether there are processes whose cgroups we can't see.
    has_unplaced: bool,
    /// When the last pass began, and how long its cost makes us wait until the next one, nanoseconds.
    passed_ns: Option<u64>,
    cost_wait_ns: u64,
    /// Until when we assume that memory is being merged, nanoseconds.
    merging_until_ns: u64,
    views: Arc<[LimitView]>,
    swap_left: Option<Pages>,
    cpu_pressure: Option<Permyriad>,
    yielding: Yielding,
}

#[derive(Debug)]
struct Group {
    key: LimitKey,
    owners: Vec<OwnerKey>,
    /// How many pages of these processes may be merged outside of our regions ([`Target::forgotten`]).
    forgotten: Pages,
    /// The last reading, and its time in nanoseconds.
    reading: Reading,
    read_ns: u64,
    /// When we last tried to read the limit.
    tried_ns: u64,
    /// The beginning of the path. Groups with the same beginning share one part of a pass.
    share: PathBuf,
    /// Whether a target is directly in this cgroup, rather than below it.
    is_own: bool,
    /// Whether this is the root cgroup of its hierarchy.
    is_top: bool,
    /// How much more swap the cgroup's processes may use, if we know of a limit.
    swap_left: Option<Bytes>,
    /// The cgroup's `cpu.stat`, how long a quota has throttled the cgroup by that file, and when we last saw that time
    /// grow.
    cpu_stat: PathBuf,
    throttled: Option<u64>,
    throttled_ns: Option<u64>,
    /// The share of the last 10 s in which some task of the cgroup waited for a CPU. `None`: the kernel doesn't report
    /// it.
    cpu_pressure: Option<Permyriad>,
}

impl Group {
    fn new(key: LimitKey, mount: &Path, dir: &Path) -> Self {
        Self {
            key,
            owners: Vec::new(),
            forgotten: Pages(0),
            reading: Reading::Unknown,
            read_ns: 0,
            tried_ns: 0,
            share: share_of(mount, dir),
            is_own: false,
            is_top: dir == mount,
            swap_left: None,
            cpu_stat: cpu_stat_of(mount, dir),
            throttled: None,
            throttled_ns: None,
            cpu_pressure: None,
        }
    }

    fn read(&mut self, dir: &Path, now_ns: u64) {
        self.tried_ns = now_ns;
        // A limit that we can't read now still applies, so we keep the last reading.
        if let Ok(limits) = limits_of(dir) {
            self.reading = limits.map_or(Reading::Unlimited, Reading::Limited);
            self.read_ns = now_ns;
        }
        if let Ok(left) = swap_left(dir) {
            self.swap_left = left;
        }
        // The root cgroup holds the kernel's threads too, so we ignore its CPU pressure.
        self.cpu_pressure = if self.is_own && !self.is_top { cpu_pressure_of(dir) } else { None };
        if let Some(throttled) = throttled_by(&self.cpu_stat) {
            if self.throttled.is_some_and(|before| throttled > before) {
                self.throttled_ns = Some(now_ns);
            }
            self.throttled = Some(throttled);
        }
    }
}

/// The limit of a cgroup, as we last read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reading {
    /// We haven't read the limit yet, or couldn't. We assume that there's no headroom below it.
    #[default]
    Unknown,
    Unlimited,
    Limited(TightestLimits),
}

/// Processes by the directories of their cgroups and the mount points above.
type Members<'a> = BTreeMap<(&'a Path, &'a Path), Vec<OwnerKey>>;

impl CgroupLimits {
    /// Reads the limits again if it's time. We read the limits of a new process at once, so that we don't take it for
    /// an unlimited one.
    pub(super) fn refresh(&mut self, now_ns: u64, targets: &BTreeMap<i32, Target>, by_marks: bool) {
        let is_pass = self.is_due(now_ns);
        let before_ns = thread_cpu_ns();
        if is_pass {
            self.forget_owners();
        }
        let mut has_new = false;
        let mut members = Members::default();
        let mut forgotten: BTreeMap<&Path, Pages> = BTreeMap::new();
        for target in targets.values() {
            // A target without regions has nothing to merge, and we may not know its cgroups yet. A target that we
            // leave alone for a time keeps its regions as long as it keeps its marks.
            // If we merge on request, only a small part of the memory that we name may be merged, so we don't count it.
            let merged = if by_marks { target.forgotten() } else { Pages(0) };
            let is_counted = !target.regions.is_empty() || merged > Pages(0);
            if is_counted && self.owners.insert(target.owner) {
                has_new = true;
                self.has_unplaced |= target.limiting().is_empty();
                for (mount, dir) in target.limiting() {
                    members.entry((dir, mount)).or_default().push(target.owner);
                    *forgotten.entry(dir).or_default() += merged;
                }
            }
        }
        self.assign(members);
        for (dir, pages) in forgotten {
            self.count_forgotten(dir, pages);
        }
        if is_pass {
            self.read_for(now_ns, PASS_LIMIT);
            self.passed_ns = Some(now_ns);
            self.cost_wait_ns = ((thread_cpu_ns() - before_ns) * PASS_PART).min(PASS_LATEST_NS);
        } else if has_new {
            self.read_new(now_ns);
        } else {
            return;
        }
        self.views = self.limits().into();
        self.swap_left = self.swap_below_limits();
        self.cpu_pressure = self.pressure_to_yield_to(now_ns);
    }

    /// Notes that a step of merging begins: the next step depends on the headroom after it.
    pub(super) fn note_merging(&mut self, now_ns: u64) {
        self.merging_until_ns = now_ns + MERGING_NS;
    }

    fn is_due(&self, now_ns: u64) -> bool {
        let Some(passed_ns) = self.passed_ns else { return true };
        let is_merging = now_ns < self.merging_until_ns;
        let every_ns = if is_merging { PASS_WHILE_MERGING_NS } else { PASS_EVERY_NS };
        now_ns >= passed_ns + every_ns.max(self.cost_wait_ns)
    }

    fn forget_owners(&mut self) {
        self.owners.clear();
        self.has_unplaced = false;
        for group in self.groups.values_mut() {
            group.owners.clear();
            group.forgotten = Pages(0);
            group.is_own = false;
        }
    }

    /// Assigns processes to their own cgroups and the ones above, up to the mount points.
    fn assign(&mut self, members: Members<'_>) {
        let mut above = Members::default();
        for ((dir, mount), owners) in members {
            self.group(dir, mount).is_own = true;
            self.join(dir, mount, owners, &mut above);
        }
        // Cgroups sort after the ones above them. We take the last one first, so we come to each cgroup once.
        while let Some(((dir, mount), owners)) = above.pop_last() {
            self.join(dir, mount, owners, &mut above);
        }
    }

    /// Adds processes to a cgroup, and to the processes that `above` collects for the next cgroup up.
    fn join<'a>(&mut self, dir: &'a Path, mount: &'a Path, owners: Vec<OwnerKey>, above: &mut Members<'a>) {
        self.group(dir, mount).owners.extend(&owners);
        if let Some(parent) = dir.parent().filter(|parent| parent.starts_with(mount)) {
            above.entry((parent, mount)).or_default().extend(owners);
        }
    }

    fn group(&mut self, dir: &Path, mount: &Path) -> &mut Group {
        self.groups.entry(dir.to_owned()).or_insert_with(|| {
            let key = LimitKey(self.keys.take(|key| self.dirs.contains_key(&LimitKey(key))));
            self.dirs.insert(key, dir.to_owned());
            Group::new(key, mount, dir)
        })
    }

    /// Notes how many pages of a cgroup's processes may be merged outside of our regions.
    fn count_forgotten(&mut self, dir: &Path, pages: Pages) {
        if pages == Pages(0) {
            return;
        }
        for above in dir.ancestors() {
            let Some(group) = self.groups.get_mut(above) else { break };
            group.forgotten += pages;
        }
    }

    /// Forgets cgroups without processes, and reads the limits of as many others as there is time for.
    fn read_for(&mut self, now_ns: u64, limit: Duration) {
        self.groups.retain(|_, group| !group.owners.is_empty());
        self.dirs.retain(|_, dir| self.groups.contains_key(dir));
        self.resting.retain(|_, next_ns| now_ns < *next_ns);
        self.read_in_turn(now_ns, limit, |_| true);
    }

    /// Reads the limits that we don't know yet.
    fn read_new(&mut self, now_ns: u64) {
        self.read_in_turn(now_ns, PASS_LIMIT, |group| group.reading == Reading::Unknown);
    }

    /// Reads limits until the time `limit` is over: one from each share in turn, beginning with the cgroup that we
    /// haven't tried for longest.
    fn read_in_turn(&mut self, now_ns: u64, limit: Duration, is_wanted: impl Fn(&Group) -> bool) {
        let began = Instant::now();
        let mut waiting: Vec<_> = self.groups.iter_mut().filter(|(_, group)| is_wanted(group)).collect();
        waiting.sort_by_key(|(_, group)| group.tried_ns);
        let mut counts: BTreeMap<PathBuf, usize> = BTreeMap::new();
        let mut in_turn = Vec::new();
        for (dir, group) in waiting {
            let is_resting = self.resting.get(&group.share).is_some_and(|&next_ns| now_ns < next_ns);
            // As long as the first reading is missing, nothing of the cgroup is merged.
            if is_resting && group.reading != Reading::Unknown {
                continue;
            }
            let count = counts.entry(group.share.clone()).or_default();
            in_turn.push(((is_resting, *count), dir, group));
            *count += 1;
        }
        in_turn.sort_by_key(|(turn, ..)| *turn);
        let mut costs: BTreeMap<PathBuf, u64> = BTreeMap::new();
        for (_, dir, group) in in_turn {
            if began.elapsed() > limit {
                break;
            }
            let before_ns = thread_cpu_ns();
            group.read(dir, now_ns);
            *costs.entry(group.share.clone()).or_default() += thread_cpu_ns() - before_ns;
        }
        for (share, cost_ns) in costs {
            let wait_ns = (cost_ns * PASS_PART).min(RESTING_MOST_NS);
            if wait_ns > PASS_EVERY_NS {
                self.resting.insert(share, now_ns + wait_ns);
            }
        }
    }

    /// The highest CPU pressure among the targets' own cgroups, as last read: the share of the last 10 s in which some
    /// task waited for a CPU. A single tenant's pressure counts only for so long (see [`Yielding`]).
    pub(super) fn cpu_pressure(&self) -> Option<Permyriad> {
        self.cpu_pressure
    }

    /// How much more swap targets may use by the limits of their cgroups, as last read; `None` if we know of no limit.
    pub(super) fn swap_left(&self) -> Option<Pages> {
        self.swap_left
    }

    fn pressure_to_yield_to(&mut self, now_ns: u64) -> Option<Permyriad> {
        let mut waiting: BTreeMap<&Path, Permyriad> = BTreeMap::new();
        for (dir, group) in &self.groups {
            if !group.is_own {
                continue;
            }
            let Some(pressure) = group.cpu_pressure else { continue };
            let highest = waiting.entry(&group.share).or_default();
            // PSI counts tasks that a quota stops as waiting for a CPU, but they'd wait even if we used no CPU time.
            if pressure > *highest && !self.is_throttled(dir, group.tried_ns) {
                *highest = pressure;
            }
        }
        let is_reported = !waiting.is_empty();
        let pressure = self.yielding.pressure(now_ns, &waiting);
        is_reported.then_some(pressure)
    }

    /// Whether a quota of a cgroup, or of one above it, throttled the cgroup within `THROTTLED_NS` before this time.
    fn is_throttled(&self, dir: &Path, now_ns: u64) -> bool {
        let mut above = dir.ancestors().map_while(|above| self.groups.get(above));
        above.any(|group| group.throttled_ns.is_some_and(|at_ns| now_ns < at_ns + THROTTLED_NS))
    }

    /// How much more swap the targets may use. Only one hierarchy limits swap, so we take the least of all.
    fn swap_below_limits(&self) -> Option<Pages> {
        if self.has_unplaced {
            return None;
        }
        let mut sums: BTreeMap<&Path, u64> = BTreeMap::new();
        let mut least = u64::MAX;
        // In this order, each cgroup comes after the cgroups below it.
        for (dir, group) in self.groups.iter().rev() {
            let below = match sums.remove(dir.as_path()) {
                Some(below) if !group.is_own => below,
                _ => u64::MAX,
            };
            let left = group.swap_left.map_or(below, |left| left.0.min(below));
            match dir.parent().filter(|parent| self.groups.contains_key(*parent)) {
                Some(parent) => {
                    let sum = sums.entry(parent).or_default();
                    *sum = sum.saturating_add(left);
                }
                None => least = least.min(left),
            }
        }
        if least < u64::MAX { Some(Pages(least / PAGE_BYTES)) } else { None }
    }

    pub(super) fn views(&self) -> Arc<[LimitView]> {
        self.views.clone()
    }

    fn limits(&self) -> Vec<LimitView> {
        let mut views = Vec::new();
        for group in self.groups.values() {
            let known = match group.reading {
                Reading::Unlimited => continue,
                Reading::Unknown => TightestLimits { of_all: Limit { limit: Bytes(0), left: Bytes(0) }, kills: None },
                Reading::Limited(limits) => limits,
            };
            // The engine doesn't count `forgotten` pages, which may be merged outside our regions. But a write to one of
            // them takes room for a copy, too.
            let left_of = |limit: Limit| in_pages(limit.left).saturating_sub(group.forgotten);
            let kills = known.kills.map(|kills| KillLimit { limit: in_pages(kills.limit), left: left_of(kills) });
            views.push(LimitView {
                key: group.key,
                limit: in_pages(known.of_all.limit),
                left: left_of(known.of_all),
                kills,
                owners: group.owners.clone(),
                read_ns: group.read_ns,
            });
        }
        views
    }

    /// The directory of a cgroup with a limit.
    pub(super) fn name(&self, key: LimitKey) -> Option<&Path> {
        self.dirs.get(&key).map(PathBuf::as_path)
    }
}

fn in_pages(bytes: Bytes) -> Pages {
    Pages(bytes.0 / PAGE_BYTES)
}

/// The beginning of a cgroup's path by which it shares a part of each pass.
fn share_of(mount: &Path, dir: &Path) -> PathBuf {
    let mut names = dir.strip_prefix(mount).unwrap_or(dir).components();
    let is_pods = names.next().is_some_and(|first| first.as_os_str().as_encoded_bytes().starts_with(b"kubepods"));
    let names = if is_pods { POD_NAMES } else { SHARED_NAMES };
    dir.components().take(mount.components().count() + names).collect()
}

/// The `cpu.stat` that says how long a quota has throttled a cgroup. If both versions are mounted, version 2
/// (`unified`) has the pressure, but version 1 has the quotas, of cgroups with the same paths.
fn cpu_stat_of(mount: &Path, dir: &Path) -> PathBuf {
    match dir.strip_prefix(mount) {
        Ok(path) if mount.ends_with("unified") => mount.with_file_name("cpu").join(path).join("cpu.stat"),
        _ => dir.join("cpu.stat"),
    }
}

/// How long a quota has throttled a cgroup, in microseconds (version 1: nanoseconds). `None` if the file doesn't say
/// it, or if the cgroup is gone.
fn throttled_by(cpu_stat: &Path) -> Option<u64> {
    let text = fs::read(cpu_stat).ok()?;
    number(&text, "throttled_usec").or_else(|_| number(&text, "throttled_time")).ok()
}

/// Reads `cpu.pressure` of a cgroup. `None` on a kernel without PSI, or if the cgroup is gone.
fn cpu_pressure_of(dir: &Path) -> Option<Permyriad> {
    fault::io("read:limits").ok()?;
    parse_pressure(&fs::read(dir.join("cpu.pressure")).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads all limits, however long that takes.
    fn read_all(limits: &mut CgroupLimits, now_ns: u64) {
        limits.read_for(now_ns, Duration::MAX);
    }

    fn assign(limits: &mut CgroupLimits, mount: &Path, dir: &Path, owner: OwnerKey) {
        limits.assign([((dir, mount), vec![owner])].into());
    }

    #[test]
    fn passes_are_more_frequent_while_memory_is_being_merged() {
        let mut limits = CgroupLimits::default();
        let targets = BTreeMap::new();
        let mut passes_until = |end_ms: u64, is_merging: bool| {
            let began_ms = limits.passed_ns.map_or(0, |ns| ns / 1_000_000);
            let mut passes = 0;
            for ms in (began_ms + 10..=end_ms).step_by(10) {
                if is_merging {
                    limits.note_merging(ms * 1_000_000);
                }
                let before = limits.passed_ns;
                limits.refresh(ms * 1_000_000, &targets, true);
                limits.cost_wait_ns = 0;
                passes += u32::from(limits.passed_ns != before);
            }
            passes
        };
        assert_eq!(passes_until(10, false), 1);
        assert_eq!(passes_until(3_010, false), 3);
        assert_eq!(passes_until(6_010, true), 15);
        assert_eq!(passes_until(10_010, false), 7, "four more, and then one each second");
        limits.cost_wait_ns = 700_000_000;
        limits.note_merging(9_810_000_000);
        assert!(!limits.is_due(10_500_000_000), "passes may cost a thousandth of the time");
        assert!(limits.is_due(10_510_000_000));
    }

    #[test]
    fn the_cgroups_of_targets_tell_how_long_their_tasks_wait_for_a_cpu() {
        let root = tempfile::tempdir().unwrap();
        let write = |dir: &str, share: &str| {
            fs::create_dir_all(root.path().join(dir)).unwrap();
            let text = format!(
                "some avg10={share} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
            );
            fs::write(root.path().join(dir).join("cpu.pressure"), text).unwrap();
        };
        for (dir, share) in [("", "99.00"), ("a", "90.00"), ("a/b", "12.34"), ("a/c", "5.00"), ("d", "80.00")] {
            write(dir, share);
        }
        let mut limits = CgroupLimits::default();
        let of = |dir: &str| (root.path().to_owned(), root.path().join(dir));
        let members = [
            (of("a/b"), OwnerKey(1)),
            (of("a/c"), OwnerKey(2)),
            ((root.path().into(), root.path().into()), OwnerKey(3)),
        ];
        for ((mount, dir), owner) in &members {
            assign(&mut limits, mount, dir, *owner);
        }
        assert_eq!(limits.pressure_to_yield_to(0), None);
        read_all(&mut limits, 1);
        assert_eq!(
            limits.pressure_to_yield_to(1),
            Some(Permyriad(1_234)),
            "of those with targets, but not the topmost"
        );
        fs::write(root.path().join("a/b/cpu.pressure"), "what").unwrap();
        read_all(&mut limits, 2);
        assert_eq!(limits.pressure_to_yield_to(2), Some(Permyriad(500)));
        // One of two users waits for an hour.
        write("a/b", "90.00");
        for second in 0..3_000 {
            limits.pressure_to_yield_to(second * 1_000_000_000);
            if second % 600 == 0 {
                read_all(&mut limits, second * 1_000_000_000);
            }
        }
        assert_eq!(limits.pressure_to_yield_to(3_000_000_000_000), Some(Permyriad(500)));
        for dir in ["a/b", "a/c"] {
            write(dir, "90.00");
        }
        read_all(&mut limits, 3_601_000_000_000);
        assert_eq!(limits.pressure_to_yield_to(3_601_000_000_000), Some(Permyriad(9_000)), "both of them wait");
    }

    #[test]
    fn waiting_for_a_quota_is_no_waiting_for_a_cpu() {
        for (mount, stat, field) in [("", "a", "throttled_usec"), ("unified", "cpu/a", "throttled_time")] {
            let root = tempfile::tempdir().unwrap();
            let mount = root.path().join(mount);
            let mut limits = CgroupLimits::default();
            for (at, (dir, share)) in (1..).zip([("a/b", "58.00"), ("c", "3.00")]) {
                let dir = mount.join(dir);
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join("cpu.pressure"), format!("some avg10={share} total=1\n")).unwrap();
                assign(&mut limits, &mount, &dir, OwnerKey(at));
            }
            let stat = root.path().join(stat).join("cpu.stat");
            fs::create_dir_all(stat.parent().unwrap()).unwrap();
            let mut pressure_at = |second: u64, throttled: u64| {
                fs::write(&stat, format!("usage_usec 7\nnr_throttled 1\n{field} {throttled}\n")).unwrap();
                read_all(&mut limits, second * 1_000_000_000);
                limits.pressure_to_yield_to(second).map(|pressure| pressure.0)
            };
            // What a quota did before the first reading may be long ago.
            let found = [(1, 400), (2, 500), (31, 500), (32, 500), (33, 600)];
            let found = found.map(|(second, throttled)| pressure_at(second, throttled));
            assert_eq!(found, [Some(5_800), Some(300), Some(300), Some(5_800), Some(300)], "{field}");
        }
    }

    /// Swap that only other programs may use gives no room to pages that come back.
    #[test]
    fn swap_counts_as_far_as_targets_may_use_it() {
        let root = tempfile::tempdir().unwrap();
        let mount = root.path().join("unified");
        let file = |path: &str, text: &str| {
            let path = mount.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let pods = [("pods/a", "0"), ("pods/b", "819200"), ("pods/c", "409600")];
        let mut limits = CgroupLimits::default();
        for (owner, (dir, max)) in (1..).zip(pods) {
            file(&format!("{dir}/memory.swap.max"), max);
            file(&format!("{dir}/memory.swap.current"), "0");
            assign(&mut limits, &mount, &mount.join(dir), OwnerKey(owner));
        }
        assert_eq!(limits.swap_below_limits(), None, "we have read nothing yet");
        read_all(&mut limits, 1);
        assert_eq!(limits.swap_below_limits(), Some(Pages(300)));
        file("pods/memory.swap.max", "819200");
        file("pods/memory.swap.current", "204800");
        read_all(&mut limits, 2);
        assert_eq!(limits.swap_below_limits(), Some(Pages(150)), "the limit above");
        file("pods/c/memory.swap.max", "max");
        file("pods/memory.swap.max", "max");
        read_all(&mut limits, 3);
        assert_eq!(limits.swap_below_limits(), None, "one may use all");
        file("pods/c/memory.swap.max", "0");
        read_all(&mut limits, 4);
        assert_eq!(limits.swap_below_limits(), Some(Pages(200)));
        assign(&mut limits, &mount, &mount, OwnerKey(8));
        assert_eq!(limits.swap_below_limits(), None, "a target beside the pods");
        // Version 1 has another hierarchy.
        let memory = root.path().join("memory");
        assign(&mut limits, &memory, &memory.join("x"), OwnerKey(9));
        file("../memory/x/memory.memsw.limit_in_bytes", "409600");
        file("../memory/x/memory.memsw.usage_in_bytes", "0");
        read_all(&mut limits, 5);
        assert_eq!(limits.swap_below_limits(), Some(Pages(100)));
        limits.has_unplaced = true;
        assert_eq!(limits.swap_below_limits(), None);
    }

    #[test]
    fn what_is_merged_in_no_region_needs_room_too() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a.slice/a.service");
        fs::create_dir_all(&dir).unwrap();
        for (file, bytes) in [("memory.max", 100 * PAGE_BYTES), ("memory.current", 40 * PAGE_BYTES)] {
            fs::write(dir.join(file), bytes.to_string()).unwrap();
        }
        let mut limits = CgroupLimits::default();
        let members = || Members::from([((dir.as_path(), root.path()), vec![OwnerKey(1)])]);
        limits.assign(members());
        limits.count_forgotten(&dir, Pages(25));
        read_all(&mut limits, 1);
        let left = |limits: &CgroupLimits| limits.limits().iter().map(|view| view.left).collect::<Vec<_>>();
        assert_eq!(left(&limits), [Pages(35)]);
        limits.forget_owners();
        limits.assign(members());
        assert_eq!(left(&limits), [Pages(60)]);
    }

    /// Thousands of cgroups of one user don't delay our reads of other limits.
    #[test]
    fn limits_are_read_in_turn() {
        const MANY: u32 = 2_000;
        let root = tempfile::tempdir().unwrap();
        let mut limits = CgroupLimits::default();
        let mut add = |dir: &str, owner: u32| {
            let path = root.path().join(dir);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("memory.max"), "409600").unwrap();
            fs::write(path.join("memory.current"), "4096").unwrap();
            assign(&mut limits, root.path(), &path, OwnerKey(owner));
        };
        for number in 0..MANY {
            add(&format!("a.slice/user-1.slice/{number}"), number);
        }
        for (dir, owner) in [("a.slice/user-2.slice", MANY), ("b.slice/b.service/worker", MANY + 1)] {
            add(dir, owner);
        }
        let others = ["a.slice/user-2.slice", "b.slice/b.service/worker"].map(|dir| root.path().join(dir));
        let user = root.path().join("a.slice/user-1.slice");
        let mut tried = 0;
        for pass in [1, 2, 3].map(|pass| pass * 1_000_000_000_000) {
            // The time isn't enough for all limits.
            limits.read_in_turn(pass, Duration::from_millis(25), |_| true);
            assert!(others.iter().all(|dir| limits.groups[dir].read_ns == pass), "pass {pass}");
            let of_user: Vec<_> = limits.groups.iter().filter(|(dir, _)| dir.starts_with(&user)).collect();
            tried += of_user.iter().filter(|(_, group)| group.tried_ns == pass).count();
            let ever = of_user.iter().filter(|(_, group)| group.tried_ns > 0).count();
            assert!(ever == of_user.len() || ever == tried, "the oldest come first: {ever} of {tried}");
        }
    }

    /// A cgroup whose files take long to read delays neither the next pass nor other limits.
    #[test]
    fn slow_limits_are_read_less_often() {
        let root = tempfile::tempdir().unwrap();
        let mut limits = CgroupLimits::default();
        let [slow, other] = ["a.slice/user-1.slice/x", "a.slice/user-2.slice/x"].map(|dir| root.path().join(dir));
        for (dir, owner) in [(&slow, 1), (&other, 2)] {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join("memory.max"), "409600").unwrap();
            fs::write(dir.join("memory.current"), "4096").unwrap();
            assign(&mut limits, root.path(), dir, OwnerKey(owner));
        }
        fs::write(slow.join("memory.stat"), "a 1\n".repeat(1 << 20)).unwrap();
        let second = 1_000_000_000;
        for pass in 1..=5 {
            limits.read_in_turn(pass * second, Duration::MAX, |_| true);
            assert_eq!(limits.groups[&other].read_ns, pass * second);
        }
        assert_eq!(limits.groups[&slow].read_ns, second, "until a thousand times its cost is over");
        let new = root.path().join("a.slice/user-1.slice/y");
        fs::create_dir_all(&new).unwrap();
        assign(&mut limits, root.path(), &new, OwnerKey(3));
        limits.read_new(6 * second);
        assert_eq!(limits.groups[&new].read_ns, 6 * second, "the first reading doesn't wait");
        read_all(&mut limits, second << 20);
        assert_eq!(limits.groups[&slow].read_ns, second << 20);
        limits.passed_ns = Some(0);
        limits.cost_wait_ns = 0;
        limits.refresh(9 * second, &BTreeMap::new(), true);
        assert!(limits.cost_wait_ns <= PASS_LATEST_NS);
    }

    /// A user may make as many cgroups as processes, and each may be below many others.
    #[test]
    fn many_new_cgroups_take_little_time() {
        const MANY: u32 = 60_000;
        let mount = Path::new("/sys/fs/cgroup");
        let mut limits = CgroupLimits::default();
        let before_ns = thread_cpu_ns();
        for number in 0..MANY {
            assign(&mut limits, mount, &mount.join(format!("user.slice/user-1.slice/{number}")), OwnerKey(number));
        }
        let all: Vec<_> = limits.groups.iter().map(|(dir, group)| (dir.as_path(), group.key)).collect();
        assert!(all.iter().all(|&(dir, key)| limits.name(key) == Some(dir)));
        let spent_ns = thread_cpu_ns() - before_ns;
        // It took 29 s when we compared each new key with all others.
        assert!(spent_ns < 5_000_000_000, "{spent_ns} ns");
        limits.forget_owners();
        limits.read_for(1, Duration::ZERO);
        assert!(limits.groups.is_empty() && limits.dirs.is_empty());
    }

    /// Thousands of processes far down in the tree, all in one cgroup or each in its own.
    #[test]
    fn deep_cgroups_take_little_time() {
        const MANY: u32 = 4_000;
        const LEVELS: usize = 60;
        let mount = Path::new("/sys/fs/cgroup");
        let deep = mount.join(["a-name-that-takes-some-time-to-compare"; LEVELS].join("/"));
        // It took 2.4 s, both times, when we looked each cgroup up again for each process below it.
        for (is_shared, most_ns) in [(true, 200_000_000), (false, 1_200_000_000)] {
            let dirs: Vec<PathBuf> =
                (0..MANY).map(|number| if is_shared { deep.clone() } else { deep.join(number.to_string()) }).collect();
            let mut limits = CgroupLimits::default();
            for _ in 0..2 {
                let before_ns = thread_cpu_ns();
                limits.forget_owners();
                let mut members = Members::default();
                for (dir, owner) in dirs.iter().zip(0..) {
                    members.entry((dir, mount)).or_default().push(OwnerKey(owner));
                }
                limits.assign(members);
                let spent_ns = thread_cpu_ns() - before_ns;
                assert!(limits.groups.values().filter(|group| group.owners.len() == MANY as usize).count() >= LEVELS);
                assert!(spent_ns < most_ns, "{spent_ns} ns");
            }
        }
    }

    #[test]
    fn pods_have_shares_of_their_own() {
        let mount = Path::new("/sys/fs/cgroup");
        let share = |path: &str| share_of(mount, &mount.join(path)).strip_prefix(mount).unwrap().to_owned();
        let pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice";
        assert_eq!(share(&format!("{pod}/cri-containerd-2.scope/a")), Path::new(pod));
        assert_eq!(share("user.slice/user-1.slice/session-2.scope"), Path::new("user.slice/user-1.slice"));
        assert_eq!(share(""), Path::new(""));
    }

    #[test]
    fn each_limit_concerns_all_processes_below_it() {
        let root = tempfile::tempdir().unwrap();
        for (dir, max) in [("a", "4096000"), ("a/b", "max"), ("a/c", "819200")] {
            let dir = root.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("memory.max"), max).unwrap();
            fs::write(dir.join("memory.current"), "409600").unwrap();
        }
        let mut limits = CgroupLimits::default();
        let of = |dir: &str| (root.path().to_owned(), root.path().join(dir));
        let members = [(of("a/b"), OwnerKey(1)), (of("a/c"), OwnerKey(2)), (of("elsewhere"), OwnerKey(3))];
        for ((mount, dir), owner) in &members {
            assign(&mut limits, mount, dir, *owner);
        }
        let are_unknown = limits.limits().iter().all(|view| view.limit == Pages(0) && view.kills.is_none());
        assert!(are_unknown, "none has been read yet");
        read_all(&mut limits, 7);
        let views = limits.limits();
        let found: Vec<_> = views.iter().map(|view| (view.limit.0, view.left.0, view.owners.clone())).collect();
        assert_eq!(found, [(1000, 900, vec![OwnerKey(1), OwnerKey(2)]), (200, 100, vec![OwnerKey(2)])]);
        assert!(views.iter().all(|view| view.read_ns == 7));
        assert_eq!(limits.name(views[1].key), Some(root.path().join("a/c").as_path()));
        // Keys stay, and cgroups that have gone are forgotten.
        limits.forget_owners();
        assign(&mut limits, root.path(), &root.path().join("a/c"), OwnerKey(2));
        fs::write(root.path().join("a/c/memory.max"), "what").unwrap();
        read_all(&mut limits, 8);
        let after: Vec<_> = limits.limits().iter().map(|view| (view.key, view.limit.0, view.read_ns)).collect();
        assert_eq!(after, [(views[0].key, 1000, 8), (views[1].key, 200, 7)], "one that can't be read is still there");
        assert_eq!(limits.groups.len(), 3);
    }
}
