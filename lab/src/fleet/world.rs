//! The workloads of a fleet and their contents. We make contents again whenever we need them: they're functions of the
//! kind and the number of an instance.

use super::FleetOptions;
use super::mix::Mix;
use pagefold_engine::random::{Random, mix};
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages, count, index};
use pagefold_planner::{Fleet, Host, HostId, Sample, Unit};
use pagefold_sketch::{Content, Sketch};
use rustc_hash::FxHashSet;

/// CPU use of a workload, in thousandths of a core.
pub const CPU_EACH: u64 = 100;
/// Places on a host per workload that it starts with, as its processors allow. This bounds the best placement.
pub const PLACES: (u64, u64) = (6, 5);
/// A host's memory, relative to its workloads without sharing: enough that memory limits nothing here.
const AMPLE: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    pub kind: usize,
    pub number: u64,
    pub host: u32,
}

/// A fleet's workloads, placed at random.
#[derive(Clone, Debug)]
pub struct World<'a> {
    pub mix: &'a Mix,
    pub options: FleetOptions,
    pub instances: Vec<Instance>,
    pub sketches: Vec<Sketch>,
    next: u64,
    pub random: Random,
}

impl<'a> World<'a> {
    /// Hosts with equally many workloads of kinds chosen at random.
    pub fn new(mix: &'a Mix, options: &FleetOptions) -> Self {
        Self::numbered_from(mix, options, 0)
    }

    /// Like [`Self::new`], with instance numbers above `next`.
    pub fn numbered_from(mix: &'a Mix, options: &FleetOptions, next: u64) -> Self {
        let random = Random::new(options.seed);
        let mut world = Self { mix, options: *options, instances: Vec::new(), sketches: Vec::new(), next, random };
        for host in 0..options.hosts {
            for _ in 0..options.per_host {
                let instance = world.make(host);
                world.push(instance);
            }
        }
        world
    }

    pub fn make(&mut self, host: u32) -> Instance {
        self.next += 1;
        Instance { kind: self.mix.choose(&mut self.random), number: self.next, host }
    }

    pub fn push(&mut self, instance: Instance) {
        self.sketches.push(Sketch::of(contents(self.mix, instance).map(Content)));
        self.instances.push(instance);
    }

    pub fn replace(&mut self, at: usize, instance: Instance) {
        self.sketches[at] = Sketch::of(contents(self.mix, instance).map(Content));
        self.instances[at] = instance;
    }

    /// Counts the distinct contents of all workloads, each workload by itself.
    pub fn held(&self) -> u64 {
        self.instances.iter().map(|&instance| count(contents(self.mix, instance).count())).sum()
    }

    /// The most workloads on a host.
    pub fn places(&self) -> u64 {
        u64::from(self.options.per_host) * PLACES.0 / PLACES.1
    }

    /// The planner's view: samples of the sketches.
    pub fn fleet(&self) -> Fleet {
        let largest = self.mix.kinds.iter().map(|kind| kind.common.len() + kind.own).max().unwrap_or(0);
        let memory = Bytes(AMPLE * u64::from(self.options.per_host) * count(largest) * PAGE_BYTES);
        let host = Host { memory, cpu_millicores: self.places() * CPU_EACH };
        let mut fleet = Fleet { hosts: vec![host; index(self.options.hosts)], units: Vec::new() };
        for (&instance, sketch) in self.instances.iter().zip(&self.sketches) {
            fleet.units.push(self.unit(instance, sketch));
        }
        fleet
    }

    pub fn unit(&self, instance: Instance, sketch: &Sketch) -> Unit {
        let held = Pages(count(contents(self.mix, instance).count()));
        Unit {
            host: HostId(instance.host),
            memory: held.bytes(),
            held,
            cpu_millicores: CPU_EACH,
            workloads: 1,
            pinned: false,
            apart: Vec::new(),
            samples: vec![sample(sketch, self.options.sampled)],
        }
    }
}

/// The lowest contents of a sketch, as many as a plan for a large fleet uses.
pub fn sample(sketch: &Sketch, most: usize) -> Sample {
    let mut digests: Vec<u64> = sketch.hashes().collect();
    let threshold = digests.get(most).copied().unwrap_or(sketch.theta() + 1);
    digests.truncate(most);
    Sample { domain: 0, threshold, digests }
}

/// The distinct contents of a workload.
pub fn contents(mix_of: &Mix, instance: Instance) -> impl Iterator<Item = u64> + '_ {
    let kind = &mix_of.kinds[instance.kind];
    let seed = mix(instance.number);
    let is_held = move |content: &u64| mix_of.held_tenths >= 10 || mix(seed ^ content) % 10 < mix_of.held_tenths;
    let own = (0..count(kind.own)).map(move |page| mix(seed.wrapping_add(page << 20)) >> 1);
    kind.common.iter().copied().filter(is_held).chain(own)
}

/// Counts the pages that one host saves with some workloads of a fleet: all contents, less the distinct ones.
pub fn exact_saving(world: &World<'_>, workloads: &[usize]) -> u64 {
    let mut saved = 0;
    let mut different = FxHashSet::default();
    for &workload in workloads {
        for content in contents(world.mix, world.instances[workload]) {
            saved += u64::from(!different.insert(content));
        }
    }
    saved
}
