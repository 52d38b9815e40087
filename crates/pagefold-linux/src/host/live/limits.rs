//! The cgroups of targets: their limits on memory, below which merged pages can come back until nothing is left, and how long their
//! tasks wait for a CPU.

use crate::host::targets::Target;
use crate::os::cpu::own_cpu_ns;
use crate::os::fault;
use crate::os::pressure::parse_pressure;
use crate::proc::headroom::limit_of;
use pagefold_core::host::LimitView;
use pagefold_core::keys::{KeyCounter, LimitKey, OwnerKey};
use pagefold_core::units::{PAGE_BYTES, Pages, Permyriad};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time between two passes, nanoseconds. They may take this part of the time.
const PASS_EVERY_NS: u64 = 1_000_000_000;
const PASS_PART: u64 = 1_000;
/// The longest time that one pass reads limits for. The next one continues with the others.
const PASS_LIMIT: Duration = Duration::from_millis(10);

/// The cgroups that can limit the memory of targets.
#[derive(Debug, Default)]
pub(super) struct Limits {
    groups: BTreeMap<PathBuf, Group>,
    keys: KeyCounter,
    /// Where the next pass continues.
    next_group: PathBuf,
    next_ns: u64,
    views: Arc<[LimitView]>,
}

#[derive(Debug)]
struct Group {
    key: LimitKey,
    owners: Vec<OwnerKey>,
    /// Its limit, and what is left, when they were last read. `None`: it has no limit, or that cannot be read.
    limit: Option<(Pages, Pages)>,
    /// Whether a target is in it, rather than below it.
    is_own: bool,
    /// The share of the last 10 s in which some of its tasks waited for a CPU. `None`: the kernel does not report it.
    cpu_pressure: Option<Permyriad>,
}

impl Limits {
    /// Looks at the limits again if it is time.
    pub(super) fn refresh(&mut self, now_ns: u64, targets: &BTreeMap<i32, Target>) {
        if now_ns < self.next_ns {
            return;
        }
        let before_ns = own_cpu_ns();
        let judged = targets.values().filter(|target| target.exclusion.is_none());
        self.assign(judged.flat_map(|target| target.limiting().iter().map(|group| (group, target.owner))));
        self.read();
        self.views = self.limits().into();
        self.next_ns = now_ns + ((own_cpu_ns() - before_ns) * PASS_PART).max(PASS_EVERY_NS);
    }

    /// Assigns processes to the cgroups that they are in, and those above, up to the mount point of each.
    fn assign<'a>(&mut self, members: impl Iterator<Item = (&'a (PathBuf, PathBuf), OwnerKey)>) {
        let mut owners: BTreeMap<&Path, (Vec<OwnerKey>, bool)> = BTreeMap::new();
        for ((mount, dir), owner) in members {
            // The topmost holds the kernel's threads too.
            let own = (dir != mount).then_some(dir.as_path());
            for dir in dir.ancestors().take_while(|dir| dir.starts_with(mount)) {
                let (owners, is_own) = owners.entry(dir).or_default();
                owners.push(owner);
                *is_own |= own == Some(dir);
            }
        }
        self.groups.retain(|dir, _| owners.contains_key(dir.as_path()));
        for (dir, (owners, is_own)) in owners {
            if let Some(group) = self.groups.get_mut(dir) {
                (group.owners, group.is_own) = (owners, is_own);
                continue;
            }
            let key = LimitKey(self.keys.take(|key| self.groups.values().any(|group| group.key.0 == key)));
            self.groups.insert(dir.to_owned(), Group { key, owners, limit: None, is_own, cpu_pressure: None });
        }
    }

    /// Reads as many limits as there is time for.
    fn read(&mut self) {
        let began = Instant::now();
        let first = std::mem::take(&mut self.next_group);
        for (dir, group) in self.groups.range_mut(first..) {
            if began.elapsed() > PASS_LIMIT {
                self.next_group.clone_from(dir);
                break;
            }
            let pages = |bytes: u64| Pages(bytes / PAGE_BYTES);
            let limit = limit_of(dir).unwrap_or_default();
            group.limit = limit.map(|limit| (pages(limit.limit.0), pages(limit.left.0)));
            group.cpu_pressure = if group.is_own { cpu_pressure_of(dir) } else { None };
        }
    }

    /// The largest share of the last 10 s in which some task of a cgroup with a target waited for a CPU, as last read.
    pub(super) fn cpu_pressure(&self) -> Option<Permyriad> {
        self.groups.values().filter_map(|group| group.cpu_pressure).max()
    }

    /// The limits as they were last read.
    pub(super) fn views(&self) -> Arc<[LimitView]> {
        self.views.clone()
    }

    fn limits(&self) -> Vec<LimitView> {
        let view = |group: &Group| {
            let (limit, left) = group.limit?;
            Some(LimitView { key: group.key, limit, left, owners: group.owners.clone() })
        };
        self.groups.values().filter_map(view).collect()
    }

    /// The directory of a cgroup with a limit.
    pub(super) fn name(&self, key: LimitKey) -> Option<&Path> {
        self.groups.iter().find(|(_, group)| group.key == key).map(|(dir, _)| dir.as_path())
    }
}

/// Reads `cpu.pressure` of a cgroup. A kernel without PSI, or a cgroup that has gone, reports nothing.
fn cpu_pressure_of(dir: &Path) -> Option<Permyriad> {
    fault::io("read:limits").ok()?;
    parse_pressure(&fs::read(dir.join("cpu.pressure")).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut limits = Limits::default();
        let of = |dir: &str| (root.path().to_owned(), root.path().join(dir));
        let members = [
            (of("a/b"), OwnerKey(1)),
            (of("a/c"), OwnerKey(2)),
            ((root.path().into(), root.path().into()), OwnerKey(3)),
        ];
        limits.assign(members.iter().map(|(group, owner)| (group, *owner)));
        assert_eq!(limits.cpu_pressure(), None);
        limits.read();
        assert_eq!(limits.cpu_pressure(), Some(Permyriad(1_234)), "of those with targets, but not the topmost");
        fs::write(root.path().join("a/b/cpu.pressure"), "what").unwrap();
        limits.read();
        assert_eq!(limits.cpu_pressure(), Some(Permyriad(500)));
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
        let mut limits = Limits::default();
        let of = |dir: &str| (root.path().to_owned(), root.path().join(dir));
        let members = [(of("a/b"), OwnerKey(1)), (of("a/c"), OwnerKey(2)), (of("elsewhere"), OwnerKey(3))];
        limits.assign(members.iter().map(|(group, owner)| (group, *owner)));
        limits.read();
        let views = limits.limits();
        let found: Vec<_> = views.iter().map(|view| (view.limit.0, view.left.0, view.owners.clone())).collect();
        assert_eq!(found, [(1000, 900, vec![OwnerKey(1), OwnerKey(2)]), (200, 100, vec![OwnerKey(2)])]);
        assert_eq!(limits.name(views[1].key), Some(root.path().join("a/c").as_path()));
        // Keys stay, and what is gone is forgotten.
        limits.assign([&members[1]].into_iter().map(|(group, owner)| (group, *owner)));
        fs::write(root.path().join("a/c/memory.max"), "what").unwrap();
        limits.read();
        let after = limits.limits();
        assert_eq!((after.len(), after[0].key), (1, views[0].key));
        assert_eq!(limits.groups.len(), 3);
    }
}
