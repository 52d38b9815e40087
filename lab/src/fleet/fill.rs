//! How many workloads fit into the same memory when each newcomer goes to a random host, or where the planner says.
//!
//! With the planner, we place the first workloads in turn, since there's no plan yet; then we make new plans as the
//! fleet fills. A host has room if its workloads, counted exactly, leave any. We stop at the first newcomer that fits
//! nowhere; with the planner, we first place all workloads anew, as often as that makes room.

use super::FleetOptions;
use super::mix::Mix;
use super::world::{CPU_EACH, Instance, World, contents};
use pagefold_engine::units::{Bytes, PAGE_BYTES, count, index};
use pagefold_planner::contents::Contents;
use pagefold_planner::{Fleet, Host, HostId, Placement, UnitId, plan};
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;

/// Newcomers on each host, on average, between two plans.
const BETWEEN_PLANS: u64 = 2;
/// A plan keeps one page in this many free, since the planner's figures are estimates.
const KEPT_FREE: u64 = 400;
/// About as many pages as a workload takes without sharing. We make the first plan once half of the memory would be
/// full.
const MEAN_PAGES: u64 = 10_000;
/// Every newcomer takes at least this many pages of a host's memory, which bounds how many fit.
const LEAST_PAGES: u64 = 4000;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Filled {
    pub random: usize,
    pub planned: usize,
    /// No placement fits more.
    pub bound: usize,
}

impl Filled {
    /// How many more fit by plan than at random, as a share.
    pub fn more(self) -> f64 {
        self.planned as f64 / self.random.max(1) as f64 - 1.0
    }

    /// How many more could fit at most.
    pub fn more_at_most(self) -> f64 {
        self.bound as f64 / self.random.max(1) as f64 - 1.0
    }
}

/// A host's contents, with their holders.
#[derive(Default)]
struct Held(FxHashMap<u64, u32>);

impl Held {
    /// Whether an instance fits beside what's there.
    fn fits(&self, mix: &Mix, instance: Instance, pages: u64) -> bool {
        let more = contents(mix, instance).filter(|content| !self.0.contains_key(content)).count();
        self.pages() + count(more) <= pages
    }

    fn add(&mut self, mix: &Mix, instance: Instance) {
        for content in contents(mix, instance) {
            *self.0.entry(content).or_default() += 1;
        }
    }

    fn remove(&mut self, mix: &Mix, instance: Instance) {
        for content in contents(mix, instance) {
            if let Entry::Occupied(mut holders) = self.0.entry(content) {
                *holders.get_mut() -= 1;
                if *holders.get() == 0 {
                    holders.remove();
                }
            }
        }
    }

    fn pages(&self) -> u64 {
        count(self.0.len())
    }
}

/// Fills hosts that hold `per_host` workloads without sharing.
pub fn fill(mix: &Mix, options: &FleetOptions, show: &dyn Fn(&str)) -> Filled {
    let kinds = &mix.kinds;
    let mean = kinds.iter().map(|kind| kind.common.len() + kind.own).sum::<usize>() / kinds.len().max(1);
    let pages = u64::from(options.per_host) * count(mean);
    let empty = FleetOptions { per_host: 0, ..*options };
    show("filling at random");
    let random = at_random(&mut World::new(mix, &empty), pages);
    show("filling by plan");
    let planned = by_plan(&mut World::new(mix, &empty), pages);
    Filled { random, planned, bound: at_most(&mut World::new(mix, &empty), pages) }
}

/// A bound on how many newcomers fit: as if all hosts were one that holds each content as often as its holders need
/// hosts.
fn at_most(world: &mut World<'_>, pages: u64) -> usize {
    let mix = world.mix;
    let own = mix.kinds.iter().map(|kind| count(kind.own)).min().unwrap_or(0);
    let smallest = mix.kinds.iter().map(|kind| count(kind.common.len() + kind.own) * mix.held_tenths / 10).min();
    // A host holds all of one workload, and at least each other workload's own pages.
    let others = pages.saturating_sub(smallest.unwrap_or(0)).checked_div(own);
    let on_a_host = others.map_or(u64::MAX, |others| 1 + others);
    let mut holders: FxHashMap<u64, u64> = FxHashMap::default();
    let mut taken = 0;
    for placed in 0.. {
        let instance = world.make(0);
        for content in contents(mix, instance) {
            let holders = holders.entry(content).or_default();
            taken += u64::from(*holders % on_a_host == 0);
            *holders += 1;
        }
        if taken > u64::from(world.options.hosts) * pages {
            return placed;
        }
    }
    0
}

fn at_random(world: &mut World<'_>, pages: u64) -> usize {
    let mix = world.mix;
    let mut hosts = held(world, 0);
    for placed in 0.. {
        let instance = world.make(0);
        let start = index(u32::try_from(world.random.below(count(hosts.len()))).unwrap_or(0));
        let (before, after) = hosts.split_at_mut(start);
        match after.iter_mut().chain(before).find(|host| host.fits(mix, instance, pages)) {
            Some(host) => host.add(mix, instance),
            None => return placed,
        }
    }
    0
}

fn by_plan(world: &mut World<'_>, pages: u64) -> usize {
    for _ in 0..u64::from(world.options.hosts) * pages / LEAST_PAGES {
        let newcomer = world.make(0);
        world.push(newcomer);
    }
    let hosts = count(index(world.options.hosts));
    let mut settled = 0;
    let mut planned = false;
    let mut next_plan = usize::try_from(hosts * pages / MEAN_PAGES / 2).unwrap_or(usize::MAX);
    loop {
        let before = settled;
        settled = settle(world, settled, next_plan, planned, pages);
        let stuck = settled < next_plan.min(world.instances.len());
        if settled == world.instances.len() {
            return settled;
        }
        let made_room = place_anew(world, settled, pages);
        if stuck && settled == before && !made_room {
            return settled;
        }
        planned |= made_room;
        next_plan = settled + usize::try_from(hosts * BETWEEN_PLANS).unwrap_or(1);
    }
}

/// Places newcomers until there are `until` workloads, or one fits nowhere. If there's been a plan (`planned`), each
/// goes to the host that shares most with it, otherwise to the hosts in turn. Returns how many workloads there are.
fn settle(world: &mut World<'_>, from: usize, until: usize, planned: bool, pages: u64) -> usize {
    let mix = world.mix;
    let fleet = limited(world, pages, world.instances.len());
    let sampled = Contents::of(&fleet);
    let mut placement = Placement::empty(&fleet, &sampled);
    let mut hosts = held(world, from);
    for (unit, instance) in fleet.unit_ids().zip(&world.instances[..from]) {
        placement.add(unit, HostId(instance.host));
    }
    for (number, unit) in fleet.unit_ids().enumerate().take(until).skip(from) {
        let instance = world.instances[number];
        let order = if planned { best_first(&placement, unit) } else { in_turn(number, world.options.hosts) };
        let host = order.into_iter().find(|host| hosts[index(host.0)].fits(mix, instance, pages));
        let Some(host) = host else { return number };
        placement.add(unit, host);
        hosts[index(host.0)].add(mix, instance);
        world.instances[number].host = host.0;
    }
    until.min(world.instances.len())
}

/// The contents of each host, with the first workloads on them.
fn held(world: &World<'_>, settled: usize) -> Vec<Held> {
    let mut hosts: Vec<Held> = (0..world.options.hosts).map(|_| Held::default()).collect();
    for instance in &world.instances[..settled] {
        hosts[index(instance.host)].add(world.mix, *instance);
    }
    hosts
}

/// All hosts, beginning with the one whose turn it is.
fn in_turn(number: usize, hosts: u32) -> Vec<HostId> {
    let first = u32::try_from(number).unwrap_or(0);
    (0..hosts).map(|next| HostId((first + next) % hosts)).collect()
}

/// All hosts, beginning with the one where a newcomer shares most; of equal ones, the one with most room.
fn best_first(placement: &Placement<'_>, unit: UnitId) -> Vec<HostId> {
    let mut hosts: Vec<HostId> = placement.fleet().host_ids().collect();
    hosts.sort_by_cached_key(|&host| Reverse((placement.gain(unit, host), placement.room(host).0, host)));
    hosts
}

fn shift(mix: &Mix, hosts: &mut [Held], instance: &mut Instance, to: u32) {
    hosts[index(instance.host)].remove(mix, *instance);
    instance.host = to;
    hosts[index(to)].add(mix, *instance);
}

/// Plans anew for all workloads that fitted, and makes the moves. The planner's figures are estimates, so we skip a
/// step that makes a host exceed its memory. Returns whether the others made room.
fn place_anew(world: &mut World<'_>, settled: usize, pages: u64) -> bool {
    let mix = world.mix;
    let fleet = limited(world, pages - pages / KEPT_FREE, settled);
    let made = plan(&fleet, &Contents::of(&fleet), u64::MAX);
    let mut hosts = held(world, settled);
    let before: u64 = hosts.iter().map(Held::pages).sum();
    for step in &made.steps {
        let former: Vec<u32> = step.moves.iter().map(|of| world.instances[index(of.unit.0)].host).collect();
        for of in &step.moves {
            shift(mix, &mut hosts, &mut world.instances[index(of.unit.0)], of.to.0);
        }
        if step.moves.iter().any(|of| hosts[index(of.to.0)].pages() > pages) {
            for (of, from) in step.moves.iter().zip(former) {
                shift(mix, &mut hosts, &mut world.instances[index(of.unit.0)], from);
            }
        }
    }
    hosts.iter().map(Held::pages).sum::<u64>() < before
}

/// The first workloads, on hosts that only memory limits.
fn limited(world: &World<'_>, pages: u64, first: usize) -> Fleet {
    let memory = Bytes(pages * PAGE_BYTES);
    let host = Host { memory, cpu_millicores: u64::MAX / CPU_EACH };
    let mut fleet = world.fleet();
    fleet.hosts = vec![host; fleet.hosts.len()];
    fleet.units.truncate(first);
    fleet
}
