//! Memory cgroups with limits. A page is charged to the cgroup of the process that we allocated it for, and a merged
//! page to the cgroup of the process whose copy was kept. Nothing enforces a limit: tests compare the charged memory
//! with it.

use super::SimHost;
use crate::memory::Backing;
use pagefold_engine::host::{KillLimit, LimitView};
use pagefold_engine::keys::{LimitKey, OwnerKey};
use pagefold_engine::units::Pages;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How long pagefold's view of the limits stays the same, nanoseconds.
const READ_NS: u64 = 1_000_000_000;

/// A cgroup, and all cgroups below it.
#[derive(Clone, Debug)]
struct Cgroup {
    limit: Pages,
    /// Whether the kernel kills above the limit, rather than throttles.
    kills: bool,
    members: BTreeSet<OwnerKey>,
}

#[derive(Debug, Default)]
pub(super) struct Cgroups {
    groups: BTreeMap<LimitKey, Cgroup>,
    /// The limits as pagefold last read them.
    views: Arc<[LimitView]>,
    next_ns: u64,
}

impl SimHost {
    /// Puts processes into a cgroup with a memory limit, or changes the limit. A process may be in several, for example
    /// below a cgroup that also has a limit.
    pub fn limit(&mut self, key: LimitKey, limit: Pages, members: &[OwnerKey]) {
        let members = members.iter().copied().collect();
        self.cgroups.groups.insert(key, Cgroup { limit, kills: true, members });
    }

    /// Like [`Self::limit`], but above this limit the kernel only throttles (`memory.high`).
    pub fn throttle(&mut self, key: LimitKey, limit: Pages, members: &[OwnerKey]) {
        let members = members.iter().copied().collect();
        self.cgroups.groups.insert(key, Cgroup { limit, kills: false, members });
    }

    /// How many pages are charged to a cgroup.
    pub fn charged(&self, key: LimitKey) -> Pages {
        let Some(cgroup) = self.cgroups.groups.get(&key) else { return Pages(0) };
        Pages(self.granularity.scale(self.own_pages(cgroup) + self.frames_of(cgroup, |_| true)))
    }

    /// How many pages would be charged to a cgroup if its processes wrote to all of their merged memory, and nobody
    /// else did.
    pub fn charged_at_worst(&self, key: LimitKey) -> Pages {
        let Some(cgroup) = self.cgroups.groups.get(&key) else { return Pages(0) };
        let mut held_outside = BTreeSet::new();
        let mut merged = 0;
        for (_, region) in self.memory.live_regions() {
            let is_member = cgroup.members.contains(&OwnerKey(region.owner));
            for page in 0..region.len() {
                match (region.backing[page as usize], region.merged_frame(page)) {
                    (Backing::Merged | Backing::ZeroMerged, _) if is_member => merged += 1,
                    (_, Some(frame)) => drop(held_outside.insert(frame)),
                    _ => {}
                }
            }
        }
        let kept = self.frames_of(cgroup, |frame| held_outside.contains(&frame));
        Pages(self.granularity.scale(self.own_pages(cgroup) + merged + kept))
    }

    /// How many private and fork-shared frames the processes of a cgroup map. The cgroup pays for a frame that it
    /// shares through fork with processes elsewhere.
    fn own_pages(&self, cgroup: &Cgroup) -> u64 {
        let mut private = 0;
        let mut forked = BTreeSet::new();
        for (_, region) in self.memory.live_regions() {
            if !cgroup.members.contains(&OwnerKey(region.owner)) {
                continue;
            }
            for page in 0..region.len() {
                match (region.backing[page as usize], region.forked_frame(page)) {
                    (_, Some(frame)) => drop(forked.insert(frame)),
                    (Backing::Private, _) => private += 1,
                    _ => {}
                }
            }
        }
        private + forked.len() as u64
    }

    /// How many merged frames are charged to a cgroup, of those that `counts` accepts.
    fn frames_of(&self, cgroup: &Cgroup, counts: impl Fn(u32) -> bool) -> u64 {
        let mut frames = 0;
        for (number, frame) in (0..).zip(&self.memory.frames) {
            let is_charged = frame.mapped > 0 && cgroup.members.contains(&OwnerKey(frame.payer));
            frames += u64::from(is_charged && counts(number));
        }
        frames
    }

    /// Whether a merged frame is charged to a cgroup.
    pub(super) fn is_charged(&self, frame: u32, limit: LimitKey) -> bool {
        let payer = OwnerKey(self.memory.frames[frame as usize].payer);
        self.cgroups.groups.get(&limit).is_some_and(|cgroup| cgroup.members.contains(&payer))
    }

    /// The limits as pagefold sees them.
    pub(super) fn observe_limits(&mut self) -> Arc<[LimitView]> {
        if self.now_ns >= self.cgroups.next_ns {
            let read_ns = self.now_ns;
            let mut views: Vec<LimitView> =
                self.limits.iter().map(|view| LimitView { read_ns, ..view.clone() }).collect();
            for (&key, cgroup) in &self.cgroups.groups {
                let used = Pages(self.own_pages(cgroup) + self.frames_of(cgroup, |_| true));
                let owners = cgroup.members.iter().copied().collect();
                let limit = cgroup.limit;
                let left = limit.saturating_sub(used);
                let kills = cgroup.kills.then_some(KillLimit { limit, left });
                views.push(LimitView { key, limit, left, kills, owners, read_ns });
            }
            self.cgroups.views = views.into();
            self.cgroups.next_ns = self.now_ns + READ_NS;
        }
        self.cgroups.views.clone()
    }
}
