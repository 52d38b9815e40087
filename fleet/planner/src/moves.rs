//! We move units in bundles: a bundle is the members of a group that leave one host. The host gets memory back for
//! their common contents only when the last of them has left. So the value of a bundle is the saving after all its
//! moves, divided by their number. The most valuable bundles come first. After each step the limits hold. Where hosts
//! are full, two units change places in one step. The plan ends at the step after which most is saved.

use crate::contents::Contents;
use crate::fleet::{Fleet, HostId, UnitId};
use crate::improve::most_look_ups;
use crate::likeness::groups;
use crate::placement::{Placement, Saving};
use crate::target::target;
use pagefold_engine::units::{Bytes, Pages, difference};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How many units we try for an exchange.
const EXCHANGES: usize = 8;

/// The move of a unit to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub unit: UnitId,
    pub from: HostId,
    pub to: HostId,
}

/// One move, or two by which units change places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub moves: Vec<Move>,
    /// Pages that this step saves. Negative if it only makes room for a later step.
    pub saves: i64,
}

/// The steps to make, and what they save.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub steps: Vec<Step>,
    pub moves: u64,
    /// The saving now.
    pub before: Saving,
    /// The saving after all steps.
    pub after: Saving,
    /// The saving of each host after all steps, in the order of hosts.
    pub hosts: Vec<Saving>,
    /// The group of like units that each unit belongs to.
    pub groups: Vec<u32>,
    /// The host of each unit at the end.
    pub places: Vec<HostId>,
}

pub fn plan(fleet: &Fleet, contents: &Contents, most_moves: u64) -> Plan {
    let groups = groups(contents, fleet.unit_ids());
    let wanted = target(fleet, contents, &groups);
    let mut walk = Walk::new(&groups, &wanted, Placement::current(fleet, contents));
    let before = walk.now.total_saving();
    walk.run(most_moves);
    walk.go_back_to_best();
    let Walk { now, steps, group_of, moved, .. } = walk;
    Plan {
        steps,
        moves: moved,
        before,
        after: now.total_saving(),
        hosts: fleet.host_ids().map(|host| now.saving(host)).collect(),
        groups: group_of,
        places: places(&now),
    }
}

/// The host of each unit. If a unit is on none, it stays where it is now.
fn places(placement: &Placement<'_>) -> Vec<HostId> {
    let fleet = placement.fleet();
    fleet.unit_ids().map(|unit| placement.host_of(unit).unwrap_or(fleet.unit(unit).host)).collect()
}

fn workloads(fleet: &Fleet, units: impl IntoIterator<Item = UnitId>) -> u64 {
    units.into_iter().map(|unit| u64::from(fleet.unit(unit).workloads)).sum()
}

/// Members of a group that leave a host.
struct Bundle {
    units: Vec<UnitId>,
    moves: u64,
}

struct Walk<'a> {
    now: Placement<'a>,
    /// The host that each unit should be on.
    wanted: Vec<HostId>,
    bundles: Vec<Bundle>,
    steps: Vec<Step>,
    group_of: Vec<u32>,
    moved: u64,
    /// For each host, the units that should leave it.
    leaving: Vec<Vec<UnitId>>,
}

impl<'a> Walk<'a> {
    fn new(groups: &[Vec<UnitId>], target: &Placement<'a>, mut now: Placement<'a>) -> Self {
        let fleet = now.fleet();
        let wanted = places(target);
        let mut group_of = vec![0; fleet.units.len()];
        let mut leaving = vec![Vec::new(); fleet.hosts.len()];
        let mut bundles = Vec::new();
        for (number, group) in (0..).zip(groups) {
            let mut by_host: BTreeMap<HostId, Vec<UnitId>> = BTreeMap::new();
            for &unit in group {
                group_of[unit.index()] = number;
                let host = fleet.unit(unit).host;
                if wanted[unit.index()] != host {
                    by_host.entry(host).or_default().push(unit);
                    leaving[host.index()].push(unit);
                }
            }
            bundles.extend(by_host.into_values());
        }
        let mut valued = Vec::new();
        for units in bundles {
            let moves = workloads(fleet, units.iter().copied());
            // The value per move, with 40 binary places, so that rounding doesn't matter.
            let value = i128::from(value(&units, target, &mut now)) * (1 << 40) / i128::from(moves.max(1));
            valued.push((Reverse(value), Bundle { units, moves }));
        }
        valued.sort_by_key(|(value, bundle)| (*value, bundle.moves.max(1)));
        let bundles = valued.into_iter().map(|(_, bundle)| bundle).collect();
        Self { now, wanted, bundles, steps: Vec::new(), group_of, moved: 0, leaving }
    }

    fn run(&mut self, most_moves: u64) {
        let mut pending = std::mem::take(&mut self.bundles);
        let most = most_look_ups(&self.now);
        loop {
            let before = self.steps.len();
            pending = self.pass(pending, most_moves, Self::step);
            if self.steps.len() == before {
                pending = self.pass(pending, most_moves, Self::exchange);
            }
            if pending.is_empty() || self.steps.len() == before || self.now.looked_up() > most {
                return;
            }
        }
    }

    /// Tries to move the pending bundles, by one method. Returns the bundles that are left.
    fn pass(
        &mut self,
        pending: Vec<Bundle>,
        most_moves: u64,
        by: fn(&mut Self, UnitId, HostId, u64) -> bool,
    ) -> Vec<Bundle> {
        let mut left = Vec::new();
        for Bundle { mut units, moves } in pending {
            // Moving only a part of a bundle gains nothing.
            if self.moved + moves > most_moves {
                continue;
            }
            units.retain(|&unit| {
                let to = self.wanted[unit.index()];
                self.now.host_of(unit) != Some(to) && !by(self, unit, to, most_moves)
            });
            if !units.is_empty() {
                let moves = workloads(self.now.fleet(), units.iter().copied());
                left.push(Bundle { units, moves });
            }
        }
        left
    }

    /// Moves a unit, if it fits.
    fn step(&mut self, unit: UnitId, to: HostId, _: u64) -> bool {
        if !self.now.fits(unit, to) {
            return false;
        }
        self.make(&[(unit, to)])
    }

    /// Moves a unit to a full host. In exchange, a unit that should leave that host goes to where the first one was.
    fn exchange(&mut self, unit: UnitId, to: HostId, most_moves: u64) -> bool {
        let Some(from) = self.now.host_of(unit) else { return false };
        let leaving = &self.leaving[to.index()];
        // First we try units that should go there.
        let back = leaving.iter().filter(|other| self.wanted[other.index()] == from).take(EXCHANGES);
        for &other in back.chain(leaving.iter().rev().take(EXCHANGES)) {
            let moves = workloads(self.now.fleet(), [unit, other]);
            if self.moved + moves <= most_moves
                && self.now.fits_without(unit, to, other)
                && self.now.fits_without(other, from, unit)
            {
                return self.make(&[(unit, to), (other, from)]);
            }
        }
        false
    }

    fn shift(&mut self, unit: UnitId, to: HostId) -> Move {
        let from = self.now.host_of(unit).unwrap_or(to);
        self.now.remove(unit);
        self.now.add(unit, to);
        self.leaving[from.index()].retain(|&other| other != unit);
        if self.wanted[unit.index()] != to {
            self.leaving[to.index()].push(unit);
        }
        Move { unit, from, to }
    }

    /// Makes a step, unless a host turns out to have no room. Before the units are there, we only have an estimate of
    /// whether they fit.
    fn make(&mut self, places: &[(UnitId, HostId)]) -> bool {
        // Each host's memory and saved pages before the step.
        let mut hosts: BTreeMap<HostId, (Bytes, Pages)> = BTreeMap::new();
        for &(unit, to) in places {
            for host in std::iter::once(to).chain(self.now.host_of(unit)) {
                hosts.insert(host, (self.now.memory(host), self.now.saved_on(host)));
            }
        }
        let mut moves = Vec::new();
        for &(unit, to) in places {
            moves.push(self.shift(unit, to));
        }
        let mut saves = 0;
        for (host, (memory, saved)) in hosts {
            if self.now.memory(host) > self.now.fleet().host(host).memory.max(memory) {
                for &Move { unit, from, .. } in moves.iter().rev() {
                    self.shift(unit, from);
                }
                return false;
            }
            saves += difference(self.now.saved_on(host).0, saved.0);
        }
        self.moved += workloads(self.now.fleet(), moves.iter().map(|step| step.unit));
        self.steps.push(Step { moves, saves });
        true
    }

    /// Undoes the steps after the one at which most is saved.
    fn go_back_to_best(&mut self) {
        let mut sum = 0;
        let mut best = 0;
        let mut steps = 0;
        for (number, step) in (1..).zip(&self.steps) {
            sum += step.saves;
            if sum > best {
                best = sum;
                steps = number;
            }
        }
        for step in self.steps.split_off(steps).into_iter().rev() {
            self.moved -= workloads(self.now.fleet(), step.moves.iter().map(|step| step.unit));
            for &Move { unit, from, .. } in step.moves.iter().rev() {
                self.now.remove(unit);
                self.now.add(unit, from);
            }
        }
    }
}

/// How many pages we finally save if these units leave their host together: the pages that they share where they go,
/// minus those that they share where they are.
fn value(units: &[UnitId], target: &Placement<'_>, now: &mut Placement<'_>) -> i64 {
    let mut gain = 0;
    let mut loss = 0;
    let mut from = Vec::new();
    for &unit in units {
        gain += target.loss(unit);
        if let Some(host) = now.host_of(unit) {
            from.push((unit, host));
        }
        loss += now.remove(unit);
    }
    for (unit, host) in from {
        now.add(unit, host);
    }
    difference(gain, loss)
}
