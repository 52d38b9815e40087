//! Finds a placement that saves most, as if we could move everything at once.
//!
//! We place groups of like units greedily, as in first-fit-decreasing. The groups that hold most come first, and each
//! goes to as few hosts as possible. Of the hosts with room we choose the one where the members that fit save most,
//! with each other and with the units already there. Members that are on a host now count a little more there, so that
//! few have to move.

use crate::contents::Contents;
use crate::fleet::{Fleet, HostId, UnitId};
use crate::improve::improve;
use crate::placement::Placement;
use pagefold_engine::random::finalize;
use pagefold_engine::units::{PAGE_BYTES, Pages, count};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// How many hosts of each kind we consider for a group: those with most of its members, those that hold most of its
/// contents, and those with most room.
const CANDIDATES: usize = 12;
/// How many contents of a group we look up.
const LOOK_UPS: usize = 24;
/// How many hosts we remember for each content: the last ones.
const KNOWN_HOSTS: usize = 8;
/// For how many contents we remember hosts.
const KNOWN_CONTENTS: usize = 2_000_000;
/// A host counts as full once this many members didn't fit.
const REFUSALS: usize = 8;
/// A host gets a bonus for each member that can stay there: the pages that it shares with another member, divided by
/// this.
const STAYS: u64 = 16;

/// Places all units of a fleet, which `groups` divides into groups of like units. Keeps the limits, except on hosts
/// whose pinned units exceed them. Units that fit nowhere stay where they are, whatever the limits.
pub fn target<'a>(fleet: &'a Fleet, contents: &'a Contents, groups: &[Vec<UnitId>]) -> Placement<'a> {
    let mut builder = Builder::new(fleet, contents);
    for unit in fleet.unit_ids() {
        if fleet.unit(unit).pinned {
            builder.add(unit, fleet.unit(unit).host);
        }
    }
    let mut order: Vec<&Vec<UnitId>> = groups.iter().collect();
    order.sort_by_key(|group| Reverse(count(group.len()) * contents.pages(group[0])));
    for group in order {
        builder.place(group);
    }
    let Builder { mut placement, holders, one_in, .. } = builder;
    improve(&mut placement, |unit| {
        if fleet.hosts.len() <= CANDIDATES {
            return fleet.host_ids().collect();
        }
        holders_of(&holders, one_in, contents.of_unit(unit))
    });
    placement
}

/// For each content, a ring buffer of the last hosts that hold it, and the place of the next one.
type Holders = FxHashMap<u32, ([u32; KNOWN_HOSTS], usize)>;

/// Whether we remember the hosts of a content, if we do so for one content in `one_in`.
fn is_known(content: u32, one_in: u64) -> bool {
    finalize(u64::from(content) + 1) % one_in == 0
}

/// The hosts that hold most of these contents, as far as we remember hosts.
fn holders_of(holders: &Holders, one_in: u64, held: &[u32]) -> Vec<HostId> {
    let mut votes: BTreeMap<u32, u32> = BTreeMap::new();
    let mut found = 0;
    for &content in held {
        if found == LOOK_UPS {
            break;
        }
        if !is_known(content, one_in) {
            continue;
        }
        let Some((hosts, _)) = holders.get(&content) else { continue };
        found += 1;
        for host in hosts {
            *votes.entry(*host).or_default() += 1;
        }
    }
    votes.remove(&u32::MAX);
    let mut hosts: Vec<(u32, u32)> = votes.into_iter().collect();
    hosts.sort_unstable_by_key(|&(host, votes)| Reverse((votes, host)));
    hosts.truncate(CANDIDATES);
    hosts.into_iter().map(|(host, _)| HostId(host)).collect()
}

struct Builder<'a> {
    fleet: &'a Fleet,
    contents: &'a Contents,
    placement: Placement<'a>,
    by_room: BTreeSet<(u64, HostId)>,
    holders: Holders,
    /// `holders` only has one content in this many.
    one_in: u64,
}

impl<'a> Builder<'a> {
    fn new(fleet: &'a Fleet, contents: &'a Contents) -> Self {
        let placement = Placement::empty(fleet, contents);
        let by_room = fleet.host_ids().map(|host| (placement.room(host).0, host)).collect();
        let one_in = count(contents.len() / KNOWN_CONTENTS) + 1;
        Self { fleet, contents, placement, by_room, holders: FxHashMap::default(), one_in }
    }

    fn add(&mut self, unit: UnitId, host: HostId) {
        self.by_room.remove(&(self.placement.room(host).0, host));
        self.placement.add(unit, host);
        self.by_room.insert((self.placement.room(host).0, host));
    }

    /// Remembers that a host holds a unit's contents.
    fn remember(&mut self, unit: UnitId, host: HostId) {
        for &content in self.contents.of_unit(unit) {
            if !is_known(content, self.one_in) {
                continue;
            }
            let (hosts, next) = self.holders.entry(content).or_insert(([u32::MAX; KNOWN_HOSTS], 0));
            if !hosts.contains(&host.0) {
                hosts[*next] = host.0;
                *next = (*next + 1) % KNOWN_HOSTS;
            }
        }
    }

    fn place(&mut self, group: &[UnitId]) {
        let fleet = self.fleet;
        // Members that are on a host now, by host.
        let mut on: BTreeMap<HostId, Vec<UnitId>> = BTreeMap::new();
        for &unit in group {
            if !fleet.unit(unit).pinned {
                on.entry(fleet.unit(unit).host).or_default().push(unit);
            }
        }
        let mut left: usize = on.values().map(Vec::len).sum();
        while left > 0 {
            let Some((host, wanted)) = self.best_host(group[0], &on, left) else {
                for (host, units) in std::mem::take(&mut on) {
                    for unit in units {
                        self.add(unit, host);
                    }
                }
                return;
            };
            let placed = self.fill(host, wanted, &mut on);
            left -= placed;
            if placed == 0 {
                // Our estimate of what fits was wrong for every member: they must be apart, or are larger than the
                // first one.
                let Some((&from, units)) = on.iter_mut().find(|(_, units)| !units.is_empty()) else { return };
                let Some(unit) = units.pop() else { return };
                let mut roomy = self.by_room.iter().rev().take(4 * CANDIDATES);
                let to = roomy.find(|(_, host)| self.placement.fits(unit, *host)).map_or(from, |&(_, host)| host);
                self.add(unit, to);
                self.remember(unit, to);
                left -= 1;
            }
            on.retain(|_, units| !units.is_empty());
        }
    }

    /// Puts members on a host: first the ones that are there, then members from hosts that have few. Returns how many.
    fn fill(&mut self, host: HostId, wanted: usize, on: &mut BTreeMap<HostId, Vec<UnitId>>) -> usize {
        let mut from: Vec<(bool, usize, HostId)> =
            on.iter().map(|(&at, units)| (at != host, units.len(), at)).collect();
        from.sort_unstable();
        let mut placed = 0;
        let mut refused = 0;
        for (_, _, at) in from {
            let Some(units) = on.get_mut(&at) else { continue };
            let mut kept = Vec::new();
            while placed < wanted && refused < REFUSALS {
                let Some(unit) = units.pop() else { break };
                if self.placement.fits(unit, host) {
                    if placed == 0 {
                        self.remember(unit, host);
                    }
                    self.add(unit, host);
                    placed += 1;
                } else {
                    refused += 1;
                    kept.push(unit);
                }
            }
            on.entry(at).or_default().append(&mut kept);
            if placed >= wanted || refused >= REFUSALS {
                break;
            }
        }
        placed
    }

    /// Finds the host where members save most together, and how many of them fit there.
    fn best_host(&self, first: UnitId, on: &BTreeMap<HostId, Vec<UnitId>>, left: usize) -> Option<(HostId, usize)> {
        let mut candidates: Vec<HostId> = self.by_room.iter().rev().take(CANDIDATES).map(|&(_, host)| host).collect();
        let mut present: Vec<(usize, HostId)> = on.iter().map(|(&host, units)| (units.len(), host)).collect();
        present.sort_unstable_by(|a, b| b.cmp(a));
        candidates.extend(present.iter().take(8 * CANDIDATES).map(|&(_, host)| host));
        candidates.extend(holders_of(&self.holders, self.one_in, self.contents.of_unit(first)));
        candidates.sort_unstable();
        candidates.dedup();
        let shared = self.contents.pages(first);
        let mut best = None;
        for host in candidates {
            let gain = self.placement.gain(first, host);
            let fitting = self.fitting(first, host, gain, shared).min(left);
            if fitting > 0 {
                let staying = on.get(&host).map_or(0, Vec::len).min(fitting);
                let score = count(fitting - 1) * shared + gain + count(staying) * (shared / STAYS + 1);
                best = best.max(Some((score, Reverse(host), fitting)));
            }
        }
        let (_, Reverse(host), fitting) = best?;
        Some((host, fitting))
    }

    /// How many members fit on a host, if all are like the first one.
    fn fitting(&self, first: UnitId, host: HostId, gain: u64, shared: u64) -> usize {
        let memory = self.fleet.unit(first).memory.0;
        let first = memory.saturating_sub(Pages(gain).bytes().0).max(PAGE_BYTES);
        let another = memory.saturating_sub(Pages(shared).bytes().0).max(PAGE_BYTES);
        match self.placement.room(host).0.checked_sub(first) {
            Some(room) => usize::try_from(1 + room / another).unwrap_or(usize::MAX),
            None => 0,
        }
    }
}
