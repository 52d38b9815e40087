//! The race against memory (claim N5; section 5.4 of the thesis): a node with 180 GiB available, two instances of one
//! program with 40 GiB each and a job that takes 2 GiB every 15 s up to 100 GiB. Together they need slightly more than
//! the node has, so a slow algorithm runs out of memory.
//!
//! Beyond the thesis, we assume that "slightly more" is 2 GiB, which go to the instances; that both instances have
//! equal pages and don't change; that the job's pages are unique; and that the job begins 150 s after the instances and
//! the scanning, so that it's complete at 900 s, when the thesis's KSM is killed. Memory used for merging (metadata,
//! the index) counts as in use.

use super::{NS_PER_S, PAGES_PER_GIB};
use crate::replay::{Algorithm, ReplayRun, Settings, knobs};
use pagefold_engine::keys::FamilyKey;
use pagefold_engine::random::Random;
use pagefold_engine::units::{EXTENT_PAGES, Pages, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, Script, SimHost, Step};
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Race {
    pub node_gib: u64,
    /// Memory of each of the two instances, GiB.
    pub instance_gib: u64,
    /// Memory that the job takes in one step, GiB.
    pub step_gib: u64,
    pub every_seconds: u64,
    pub steps: u64,
    /// Start of the job, seconds.
    pub begins_seconds: u64,
    /// Simulated time, seconds.
    pub for_seconds: u64,
    /// Pages in a batch of ksmd.
    pub pages_to_scan: u32,
    /// Sleep between batches, milliseconds.
    pub sleep_ms: u32,
    pub trees: u16,
    /// Costs in per cent of our measurements with little memory.
    pub cost_percent: u64,
    /// Pages per simulated page.
    #[serde(rename = "grain")]
    pub granularity: u32,
}

impl Default for Race {
    fn default() -> Self {
        Self {
            node_gib: 180,
            instance_gib: 41,
            step_gib: 2,
            every_seconds: 15,
            steps: 50,
            begins_seconds: 150,
            for_seconds: 2_400,
            pages_to_scan: 10_000,
            sleep_ms: 100,
            trees: 1_800,
            cost_percent: 100,
            granularity: 64,
        }
    }
}

/// Results of an algorithm in a race.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Racer {
    /// The algorithm; `None`: no merging.
    pub algorithm: Option<Algorithm>,
    /// Time when memory ran out, seconds; `None` if the job finished.
    pub exhausted_seconds: Option<f64>,
    /// Peak memory in use, if there were enough, bytes.
    pub most_bytes: u64,
    /// Time until 1 GiB was saved, seconds.
    pub first_seconds: Option<f64>,
    /// Time until half of the savable memory was saved, seconds.
    pub half_seconds: Option<f64>,
    /// Memory saved when the job is complete, bytes.
    pub saved_bytes: u64,
    /// Memory saved at the end, bytes.
    pub saved_end_bytes: u64,
    pub cpu_seconds: f64,
    /// Seconds, memory in use and memory saved, bytes.
    pub curve: Vec<(f64, u64, u64)>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RaceResult {
    pub race: Race,
    pub racers: Vec<Racer>,
}

impl Racer {
    pub fn name(&self) -> String {
        self.algorithm.map_or_else(|| "no merging".to_owned(), |algorithm| algorithm.to_string())
    }
}

impl Race {
    /// The time at which the job is complete, seconds.
    pub fn complete_seconds(&self) -> u64 {
        self.begins_seconds + self.every_seconds * self.steps
    }

    fn simulated_pages(&self, gib: u64) -> u64 {
        gib * PAGES_PER_GIB / u64::from(self.granularity)
    }

    fn job(&self) -> Script {
        let pages = self.simulated_pages(self.step_gib);
        let mut contents = Random::for_purpose(1, 0x90b);
        let mut steps = vec![(0, Step::Start { process: 0 })];
        for number in 0..self.steps {
            let at_ns = (self.begins_seconds + number * self.every_seconds) * NS_PER_S;
            let region = u32::try_from(number).unwrap_or(u32::MAX);
            let first = Vpn((number + 1) * (pages + EXTENT_PAGES).next_multiple_of(EXTENT_PAGES));
            let family = FamilyKey(0x90b);
            steps.push((at_ns, Step::Map { process: 0, region, family, first, pages: Pages(pages) }));
            for page in 0..pages {
                let content = contents.next().max(1);
                steps.push((at_ns, Step::Write { region, page: first + page, content, parts: 0b1111, eighth: 0 }));
            }
        }
        steps.into()
    }

    fn wanted_gib(&self, seconds: u64) -> u64 {
        let mut gib = 2 * self.instance_gib;
        if seconds >= self.begins_seconds {
            let steps = (seconds - self.begins_seconds) / self.every_seconds + 1;
            gib += steps.min(self.steps) * self.step_gib;
        }
        gib
    }

    /// Runs with an algorithm, or without merging. We kill nothing when memory has run out, so that the result shows
    /// the whole demand.
    pub fn run(&self, algorithm: Option<Algorithm>) -> Racer {
        let runs = algorithm.unwrap_or(Algorithm::Pagefold);
        let total = self.wanted_gib(u64::MAX) * PAGES_PER_GIB;
        let knobs = Knobs { granularity: self.granularity, ..knobs(runs, total, Some(self.trees)) };
        let settings = Settings {
            pages_to_scan: self.pages_to_scan,
            sleep_ms: self.sleep_ms,
            costs: Costs::default().slower(self.cost_percent),
            ..Settings::for_time(self.for_seconds * NS_PER_S)
        };
        let mut run = ReplayRun::begin(runs, knobs, &settings, |mut sim: SimHost| {
            for _ in 0..2 {
                let instance = Mapping::new(Pages(self.simulated_pages(self.instance_gib)), Fill::Series(1));
                sim.add(Process::starting_at(0).mapping(instance.of_family(1)));
            }
            sim.play(self.job());
            sim
        });
        if algorithm.is_none() {
            run.engine = None;
        }
        let room = self.node_gib << 30;
        let mut racer = Racer { algorithm, ..Racer::default() };
        let mut index = 0;
        for second in 1..=self.for_seconds {
            run.run_until(second * NS_PER_S);
            let saved = run.sim.saved().bytes().0;
            if second % self.every_seconds == 0 {
                index = run.index_bytes() * u64::from(self.granularity);
            }
            let used = (self.wanted_gib(second) << 30) + run.sim.metadata().0 + index - saved;
            let seconds = second as f64;
            racer.most_bytes = racer.most_bytes.max(used);
            if used > room {
                racer.exhausted_seconds.get_or_insert(seconds);
            }
            if saved >= 1 << 30 {
                racer.first_seconds.get_or_insert(seconds);
            }
            if saved >= self.instance_gib << 29 {
                racer.half_seconds.get_or_insert(seconds);
            }
            if second == self.complete_seconds() {
                racer.saved_bytes = saved;
            }
            racer.saved_end_bytes = saved;
            if second % self.every_seconds == 0 {
                racer.curve.push((seconds, used, saved));
            }
        }
        racer.cpu_seconds = run.cpu_seconds();
        racer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth of the thesis's race, one step's worth of memory short.
    fn small() -> Race {
        Race {
            node_gib: 18,
            instance_gib: 4,
            step_gib: 1,
            every_seconds: 8,
            steps: 11,
            begins_seconds: 0,
            for_seconds: 200,
            pages_to_scan: 10_000,
            trees: 180,
            granularity: 256,
            ..Race::default()
        }
    }

    #[test]
    fn memory_runs_out_without_merging_but_not_with_pagefold() {
        let unmerged = small().run(None);
        // The eleventh step asks for the nineteenth GiB.
        assert_eq!((unmerged.exhausted_seconds, unmerged.most_bytes), (Some(80.0), 19 << 30));
        let pagefold = small().run(Some(Algorithm::Pagefold));
        assert_eq!(pagefold.exhausted_seconds, None);
        assert_eq!(pagefold.saved_end_bytes, 4 << 30);
        assert!(pagefold.most_bytes < 17 << 30 && pagefold.first_seconds < Some(40.0), "{pagefold:?}");
        let slow = Race { pages_to_scan: 1_000, ..small() };
        assert!(slow.run(Some(Algorithm::Ksm)).exhausted_seconds.is_some());
    }

    #[test]
    fn forests_are_quicker_than_trees() {
        let [ksm, nuksm] = [Algorithm::Ksm, Algorithm::NuKsm].map(|algorithm| small().run(Some(algorithm)));
        assert!(nuksm.first_seconds <= ksm.first_seconds && nuksm.half_seconds < ksm.half_seconds);
        assert!(nuksm.cpu_seconds < ksm.cpu_seconds);
        assert_eq!(nuksm.saved_end_bytes, ksm.saved_end_bytes, "no sharing is lost");
    }
}
