//! Units that hold the same content on one host need only one page for it. Each unit was sampled at its own rate, and
//! each sampled content stands for 2^level pages of its unit. The most densely sampled holder keeps its page, because
//! its sample would show the content in any case. So for each content, a host saves the sum of the pages that its
//! holders stand for, minus the smallest number among them. The expected value of that sum is the true number of pages,
//! whatever the rates. [`regression`](crate::regression) corrects the sum.

use crate::contents::{Contents, pages};
use crate::fleet::{Fleet, HostId, UNITS_PER_HOST, UnitId};
use crate::regression::Moments;
use pagefold_engine::units::{Bytes, Pages, count, index};
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::cell::Cell;
use std::cmp::Ordering;

/// A number of pages that is estimated from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Saving {
    pub pages: Pages,
    /// The estimate is off by at most this in 19 of 20 cases.
    pub error: Pages,
}

/// The holders of a content on a host.
#[derive(Clone, Copy, Debug)]
struct Holders {
    number: u16,
    /// How many holders have the lowest level. The others are in [`State::above`].
    lowest: u16,
    level: u8,
}

impl Holders {
    fn moments(self) -> Moments {
        Moments::of(1, self.number, self.level)
    }
}

/// For each content, how many holders there are at each level.
type Above = FxHashMap<u32, Vec<(u8, u16)>>;

#[derive(Debug, Default)]
struct State {
    units: Vec<UnitId>,
    contents: FxHashMap<u32, Holders>,
    /// For contents whose holders are of several levels: the holders above the lowest level.
    above: Above,
    /// How much memory the units would take without sharing.
    memory: Bytes,
    /// How many pages the samples say are saved, see the module.
    saved: u64,
    /// How many more pages the units hold than their samples stand for.
    shortfall: i64,
    moments: Moments,
    cpu_millicores: u64,
}

#[derive(Debug)]
pub struct Placement<'a> {
    fleet: &'a Fleet,
    contents: &'a Contents,
    hosts: Vec<State>,
    /// `None`: nowhere yet.
    place: Vec<Option<HostId>>,
    saved: u64,
    /// How many contents we've looked up to find out what units share.
    looked_up: Cell<u64>,
}

impl<'a> Placement<'a> {
    /// A placement with no unit on any host.
    pub fn empty(fleet: &'a Fleet, contents: &'a Contents) -> Self {
        let hosts = fleet.hosts.iter().map(|_| State::default()).collect();
        Self { fleet, contents, hosts, place: vec![None; fleet.units.len()], saved: 0, looked_up: Cell::new(0) }
    }

    pub fn current(fleet: &'a Fleet, contents: &'a Contents) -> Self {
        let mut placement = Self::empty(fleet, contents);
        for unit in fleet.unit_ids() {
            placement.add(unit, fleet.unit(unit).host);
        }
        placement
    }

    pub fn fleet(&self) -> &'a Fleet {
        self.fleet
    }

    pub fn contents(&self) -> &'a Contents {
        self.contents
    }

    pub fn host_of(&self, unit: UnitId) -> Option<HostId> {
        self.place[unit.index()]
    }

    pub fn units_on(&self, host: HostId) -> &[UnitId] {
        &self.hosts[host.index()].units
    }

    /// How many pages the samples say are saved on all hosts.
    pub fn saved(&self) -> u64 {
        self.saved
    }

    /// How many pages are saved on a host, corrected by the regression.
    pub fn saved_on(&self, host: HostId) -> Pages {
        let state = &self.hosts[host.index()];
        Pages(state.saved.saturating_add_signed(state.moments.correction(state.shortfall)))
    }

    /// Memory that a host's units take after merging, including memory that may come back.
    pub fn memory(&self, host: HostId) -> Bytes {
        Bytes(self.hosts[host.index()].memory.0.saturating_sub(self.saved_on(host).bytes().0))
    }

    /// Memory that is left on a host.
    pub fn room(&self, host: HostId) -> Bytes {
        Bytes(self.fleet.host(host).memory.0.saturating_sub(self.memory(host).0))
    }

    /// Puts a unit that's on no host on this one, whatever the limits. Returns the pages that this saves.
    pub fn add(&mut self, unit: UnitId, host: HostId) -> u64 {
        let level = self.contents.level(unit);
        let state = &mut self.hosts[host.index()];
        let mut gain = 0;
        for &content in self.contents.of_unit(unit) {
            let holders = state.contents.entry(content).or_insert(Holders { number: 0, lowest: 0, level });
            let before = holders.moments();
            if holders.number > 0 {
                gain += pages(holders.level.max(level));
            }
            holders.number += 1;
            match level.cmp(&holders.level) {
                Ordering::Greater => count_above(&mut state.above, content, level, 1),
                Ordering::Equal => holders.lowest += 1,
                Ordering::Less => {
                    count_above(&mut state.above, content, holders.level, holders.lowest);
                    holders.level = level;
                    holders.lowest = 1;
                }
            }
            state.moments.exchange(before, holders.moments());
        }
        state.moments.exchange(Moments::default(), self.contents.moments_alone(unit));
        state.shortfall += self.contents.shortfall(unit);
        let about = self.fleet.unit(unit);
        state.units.push(unit);
        state.saved += gain;
        state.memory.0 = state.memory.0.saturating_add(about.memory.0);
        state.cpu_millicores = state.cpu_millicores.saturating_add(about.cpu_millicores);
        self.saved += gain;
        self.place[unit.index()] = Some(host);
        gain
    }

    /// Takes a unit from its host. Returns the pages that are no longer saved.
    pub fn remove(&mut self, unit: UnitId) -> u64 {
        let Some(host) = self.place[unit.index()].take() else { return 0 };
        let level = self.contents.level(unit);
        let contents = self.contents;
        let state = &mut self.hosts[host.index()];
        state.moments.exchange(contents.moments_alone(unit), Moments::default());
        state.shortfall -= contents.shortfall(unit);
        let State { units, contents: held, above, moments, memory, saved, cpu_millicores, .. } = state;
        units.retain(|&other| other != unit);
        let mut loss = 0;
        for content in contents.of_unit(unit) {
            let Some(holders) = held.get_mut(content) else { continue };
            let before = holders.moments();
            holders.number -= 1;
            if holders.number == 0 {
                moments.exchange(before, Moments::default());
                held.remove(content);
                continue;
            }
            if level > holders.level {
                uncount_above(above, *content, level, 1);
            } else if holders.lowest > 1 {
                holders.lowest -= 1;
            } else if let Some(next) = next_above(above, *content) {
                (holders.level, holders.lowest) = next;
                uncount_above(above, *content, holders.level, holders.lowest);
            }
            moments.exchange(before, holders.moments());
            loss += pages(level.max(holders.level));
        }
        let about = self.fleet.unit(unit);
        *saved -= loss;
        memory.0 = memory.0.saturating_sub(about.memory.0);
        *cpu_millicores = cpu_millicores.saturating_sub(about.cpu_millicores);
        self.saved -= loss;
        loss
    }

    /// How many contents we've looked up to find out what units share.
    pub fn looked_up(&self) -> u64 {
        self.looked_up.get()
    }

    fn look_up(&self, contents: usize) {
        self.looked_up.set(self.looked_up.get().saturating_add(count(contents)));
    }

    /// Pages that a unit would share with the units on a host.
    pub fn gain(&self, unit: UnitId, host: HostId) -> u64 {
        let level = self.contents.level(unit);
        self.look_up(self.contents.of_unit(unit).len());
        let held = &self.hosts[host.index()].contents;
        let mut gain = 0;
        for content in self.contents.of_unit(unit) {
            if let Some(holders) = held.get(content) {
                gain += pages(holders.level.max(level));
            }
        }
        gain
    }

    /// Pages that a unit shares with the others on its host.
    pub fn loss(&self, unit: UnitId) -> u64 {
        let Some(host) = self.place[unit.index()] else { return 0 };
        let level = self.contents.level(unit);
        let State { contents: held, above, .. } = &self.hosts[host.index()];
        let mut loss = 0;
        self.look_up(self.contents.of_unit(unit).len());
        for content in self.contents.of_unit(unit) {
            let Some(holders) = held.get(content).filter(|holders| holders.number > 1) else { continue };
            let is_alone = level == holders.level && holders.lowest == 1;
            let next = if is_alone { next_above(above, *content) } else { None };
            loss += pages(next.map_or(level.max(holders.level), |(next, _)| next));
        }
        loss
    }

    /// Whether a unit may join the units on a host, by memory, CPU time and the rules about units that must be apart.
    pub fn fits(&self, unit: UnitId, host: HostId) -> bool {
        self.may_meet(unit, host, None) && self.has_room(unit, host, None)
    }

    /// Like [`Self::fits`], but as if another unit had left.
    pub fn fits_without(&self, unit: UnitId, host: HostId, leaving: UnitId) -> bool {
        self.may_meet(unit, host, Some(leaving)) && self.has_room(unit, host, Some(leaving))
    }

    fn has_room(&self, unit: UnitId, host: HostId, leaving: Option<UnitId>) -> bool {
        let limits = self.fleet.host(host);
        let state = &self.hosts[host.index()];
        let mut memory = self.memory(host).0;
        let mut cpu = state.cpu_millicores;
        let mut gain = self.gain(unit, host);
        if let Some(leaving) = leaving {
            memory = memory.saturating_sub(self.own_bytes(leaving, host, self.loss(leaving)));
            cpu = cpu.saturating_sub(self.fleet.unit(leaving).cpu_millicores);
            // We leave out the pages that the two units share with each other: at worst all that the newcomer shares.
            let level = self.contents.level(unit).max(self.contents.level(leaving));
            gain = gain.saturating_sub(count(self.contents.overlap(unit, leaving).0) * pages(level));
        }
        memory = memory.saturating_add(self.own_bytes(unit, host, gain));
        cpu = cpu.saturating_add(self.fleet.unit(unit).cpu_millicores);
        memory <= limits.memory.0 && cpu <= limits.cpu_millicores && state.units.len() < UNITS_PER_HOST
    }

    /// How much memory a unit itself takes on a host, if the samples say that it shares `shared` pages there.
    fn own_bytes(&self, unit: UnitId, host: HostId, shared: u64) -> u64 {
        let correction = self.hosts[host.index()].moments.correction(self.contents.shortfall(unit));
        let shared = Pages(shared.saturating_add_signed(correction)).bytes().0;
        self.fleet.unit(unit).memory.0.saturating_sub(shared)
    }

    fn may_meet(&self, unit: UnitId, host: HostId, leaving: Option<UnitId>) -> bool {
        let apart = &self.fleet.unit(unit).apart;
        if apart.is_empty() {
            return true;
        }
        for &other in &self.hosts[host.index()].units {
            if Some(other) != leaving && self.fleet.unit(other).apart.iter().any(|group| apart.contains(group)) {
                return false;
            }
        }
        true
    }

    /// A host's saving, with the error of the estimate.
    pub fn saving(&self, host: HostId) -> Saving {
        let variance = self.off(host).map(|(_, off)| off * off).sum::<f64>() + self.variance_alone(host);
        saving(self.saved_on(host), variance)
    }

    /// The saving of all hosts. We sample the same contents everywhere, so an error that comes from one content is the
    /// same on every host that holds it.
    pub fn total_saving(&self) -> Saving {
        let mut sums = vec![0.0_f64; self.contents.len()];
        let mut alone = 0.0;
        let mut shared = Pages(0);
        for host in self.fleet.host_ids() {
            for (content, off) in self.off(host) {
                sums[index(content)] += off;
            }
            alone += self.variance_alone(host);
            shared += self.saved_on(host);
        }
        saving(shared, sums.iter().map(|sum| sum * sum).sum::<f64>() + alone)
    }

    /// For each content, how far off a host's estimate is because we happened to sample the content or not: one
    /// standard deviation.
    fn off(&self, host: HostId) -> impl Iterator<Item = (u32, f64)> + '_ {
        let state = &self.hosts[host.index()];
        let slope = state.moments.slope();
        let mut sums: FxHashMap<u32, (u64, u8)> = FxHashMap::default();
        for &unit in &state.units {
            let level = self.contents.level(unit);
            for &content in self.contents.of_unit(unit) {
                let (sum, highest) = sums.entry(content).or_default();
                *sum += pages(level);
                *highest = level.max(*highest);
            }
        }
        sums.into_iter().map(move |(content, (held, highest))| {
            let least = state.contents.get(&content).map_or(0, |holders| pages(holders.level));
            (content, ((held - least) as f64 - slope * held as f64) * of_sampling(highest))
        })
    }

    /// The variance from contents that one unit alone holds.
    fn variance_alone(&self, host: HostId) -> f64 {
        let state = &self.hosts[host.index()];
        let slope = state.moments.slope();
        let mut variance = 0.0;
        for &unit in &state.units {
            let level = self.contents.level(unit);
            let off = slope * pages(level) as f64 * of_sampling(level);
            variance += f64::from(self.contents.alone(unit)) * off.powi(2);
        }
        variance
    }
}

/// The standard deviation that each sampled content adds if we sample one content in 2^level: √(1 - 2^-level).
fn of_sampling(level: u8) -> f64 {
    (1.0 - 1.0 / pages(level) as f64).sqrt()
}

/// The second lowest level of a content's holders, and how many holders have it.
fn next_above(above: &Above, content: u32) -> Option<(u8, u16)> {
    above.get(&content)?.iter().copied().min()
}

fn count_above(above: &mut Above, content: u32, level: u8, more: u16) {
    let levels = above.entry(content).or_default();
    match levels.iter_mut().find(|(other, _)| *other == level) {
        Some((_, number)) => *number += more,
        None => levels.push((level, more)),
    }
}

fn uncount_above(above: &mut Above, content: u32, level: u8, fewer: u16) {
    let Some(levels) = above.get_mut(&content) else { return };
    levels.retain_mut(|(other, number)| {
        if *other == level {
            *number -= fewer;
        }
        *number > 0
    });
    if levels.is_empty() {
        above.remove(&content);
    }
}

/// How many standard deviations an estimate is off by in 19 of 20 cases at most: a little more than two, because the
/// slope of the regression comes from the same samples.
const DEVIATIONS: f64 = 2.1;

/// An estimate with its error. If a sample finds nothing, the error is 0, too: then we don't know it.
fn saving(pages: Pages, variance: f64) -> Saving {
    Saving { pages, error: Pages(pagefold_engine::units::whole((DEVIATIONS * variance.sqrt()).ceil())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{DIGESTS_END, Host, Sample, Unit};
    use pagefold_engine::random::Random;
    use proptest::prelude::*;

    /// Units that hold some of few contents, sampled at several rates, on few hosts.
    fn fleet() -> impl Strategy<Value = Fleet> {
        let unit = (0..3_u32, 0..4_u32, proptest::collection::btree_set(0..64_u64, 0..40), 0..2_u32);
        proptest::collection::vec(unit, 1..12).prop_map(|units| {
            let units = units.into_iter().map(|(host, level, held, domain)| {
                let threshold = DIGESTS_END >> level;
                let digests = held.into_iter().map(|content| content << 57).filter(|&digest| digest < threshold);
                Unit {
                    host: HostId(host),
                    memory: Bytes(1 << 20),
                    held: Pages(80),
                    cpu_millicores: 10,
                    workloads: 1,
                    pinned: false,
                    apart: Vec::new(),
                    samples: vec![Sample { domain, threshold, digests: digests.collect() }],
                }
            });
            Fleet { hosts: vec![Host { memory: Bytes(1 << 30), cpu_millicores: 1000 }; 3], units: units.collect() }
        })
    }

    /// A host's saving, calculated straight from its definition.
    fn by_hand(placement: &Placement<'_>, host: HostId) -> u64 {
        let mut holders: FxHashMap<u32, Vec<u64>> = FxHashMap::default();
        for &unit in placement.units_on(host) {
            let weight = pages(placement.contents.level(unit));
            for &content in placement.contents.of_unit(unit) {
                holders.entry(content).or_default().push(weight);
            }
        }
        holders.values().map(|weights| weights.iter().sum::<u64>() - weights.iter().min().unwrap_or(&0)).sum()
    }

    proptest! {
        /// Whatever we move, gains and losses are the differences that the moves make, and the sums stay right.
        #[test]
        fn figures_are_kept_over_moves(fleet in fleet(), seed in any::<u64>()) {
            let contents = Contents::of(&fleet);
            let mut placement = Placement::current(&fleet, &contents);
            let mut random = Random::new(seed);
            for _ in 0..30 {
                let unit = UnitId(u32::try_from(random.below(fleet.units.len() as u64)).unwrap());
                let to = HostId(u32::try_from(random.below(3)).unwrap());
                let loss = placement.loss(unit);
                prop_assert_eq!(placement.remove(unit), loss);
                let gain = placement.gain(unit, to);
                prop_assert_eq!(placement.add(unit, to), gain);
                let saved: Vec<u64> = fleet.host_ids().map(|host| by_hand(&placement, host)).collect();
                let kept: Vec<u64> = placement.hosts.iter().map(|host| host.saved).collect();
                prop_assert_eq!(&kept, &saved);
                for host in fleet.host_ids() {
                    let mut again = Placement::empty(&fleet, &contents);
                    placement.units_on(host).iter().rev().for_each(|&unit| _ = again.add(unit, host));
                    prop_assert_eq!(again.saved_on(host), placement.saved_on(host));
                    prop_assert_eq!(again.hosts[host.index()].moments, placement.hosts[host.index()].moments);
                }
                prop_assert_eq!(placement.saved(), saved.iter().sum::<u64>());
            }
        }
    }

    /// With random contents and mixed rates, the estimate is right on average, and within its error in 19 of 20 cases.
    #[test]
    fn estimates_are_within_their_errors() {
        let mut within = 0;
        let (mut sum, mut exact_sum, mut errors) = (0.0, 0.0, (0.0, 0.0));
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let common: Vec<u64> = (0..2000).map(|_| random.next() >> 1).collect();
            let units = (0..8).map(|number| {
                // Each holds three quarters of the common contents, chosen at random, and some of its own.
                let mut held: Vec<u64> = common.iter().copied().filter(|_| random.below(4) > 0).collect();
                held.extend((0..500).map(|_| random.next() >> 1));
                let threshold = DIGESTS_END >> (2 + number % 3);
                (held, threshold)
            });
            let units: Vec<(Vec<u64>, u64)> = units.collect();
            let mut holders: FxHashMap<u64, u64> = FxHashMap::default();
            for digest in units.iter().flat_map(|(held, _)| held) {
                *holders.entry(*digest).or_default() += 1;
            }
            let exact = holders.values().map(|number| number - 1).sum::<u64>();
            let sampled = |(held, threshold): (Vec<u64>, u64)| Unit {
                workloads: 1,
                memory: Pages(count(held.len())).bytes(),
                held: Pages(count(held.len())),
                samples: vec![Sample {
                    domain: 0,
                    threshold,
                    digests: held.into_iter().filter(|&digest| digest < threshold).collect(),
                }],
                ..Unit::default()
            };
            let fleet = Fleet {
                hosts: vec![Host { memory: Bytes(0), cpu_millicores: 0 }],
                units: units.into_iter().map(sampled).collect(),
            };
            let contents = Contents::of(&fleet);
            let saving = Placement::current(&fleet, &contents).saving(HostId(0));
            within += u32::from(saving.pages.0.abs_diff(exact) <= saving.error.0);
            let mut unknown = fleet.clone();
            unknown.units.iter_mut().for_each(|unit| unit.held = Pages(0));
            let contents = Contents::of(&unknown);
            let uncorrected = Placement::current(&unknown, &contents).saving(HostId(0));
            errors.0 += saving.pages.0.abs_diff(exact) as f64;
            errors.1 += uncorrected.pages.0.abs_diff(exact) as f64;
            sum += saving.pages.0 as f64;
            exact_sum += exact as f64;
        }
        assert!(within >= 190, "{within} of 200 within their errors");
        assert!((sum / exact_sum - 1.0).abs() < 0.005, "{sum} for {exact_sum}");
        assert!(2.0 * errors.0 < errors.1, "{errors:?}: knowing what units hold is of no use");
    }
}
