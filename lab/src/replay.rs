//! Replays a record under an algorithm in virtual time and measures costs and savings.

use crate::script::Scripted;
use crate::uksmd::{UksmSettings, Uksmd};
use pagefold_engine::config::Config;
use pagefold_engine::engine::{Cycle, Engine, cycle};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Actions, Host, ScanOrder};
use pagefold_sim::{Classes, Costs, Forest, Granularity, Knobs, SearchCounts, SimHost};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

const NS_PER_MS: u64 = 1_000_000;
/// nuKSM has one tree for each 100 MiB of memory (section 4.3).
const PAGES_PER_TREE: u64 = 100 << 20 >> 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Linux's ksmd without `smart_scan`: two trees, everything marked.
    Ksm,
    /// Linux's ksmd with its defaults.
    KsmSmart,
    /// UKSM in the kernel.
    Uksm,
    /// ksmd with trees for eight ranges of physical addresses.
    CmdAddress,
    /// ksmd with trees for sixteen classes of write counts.
    #[serde(rename = "cmd-pagecount")]
    CmdPageCount,
    /// ksmd with trees for sixteen patterns of written quarters.
    #[serde(rename = "cmd-subpage")]
    CmdSubPage,
    /// ksmd with a forest, by checksum.
    #[serde(rename = "nuksm")]
    NuKsm,
    /// pagefold, which drives ksmd.
    Pagefold,
    /// pagefold, which names pairs of pages to the kernel.
    PagefoldRequest,
}

impl Algorithm {
    pub const NAMES: [(&'static str, Self); 9] = [
        ("ksm", Self::Ksm),
        ("ksm-smart", Self::KsmSmart),
        ("uksm", Self::Uksm),
        ("cmd-address", Self::CmdAddress),
        ("cmd-pagecount", Self::CmdPageCount),
        ("cmd-subpage", Self::CmdSubPage),
        ("nuksm", Self::NuKsm),
        ("pagefold", Self::Pagefold),
        ("pagefold-request", Self::PagefoldRequest),
    ];

    pub fn is_pagefold(self) -> bool {
        matches!(self, Self::Pagefold | Self::PagefoldRequest)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, algorithm)| algorithm == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no algorithm '{}'; choose from {}", .0.escape_debug(), Algorithm::NAMES.map(|(name, _)| name).join(", "))]
pub struct NoAlgorithm(String);

impl FromStr for Algorithm {
    type Err = NoAlgorithm;
    fn from_str(name: &str) -> Result<Self, NoAlgorithm> {
        match Self::NAMES.iter().find(|(known, _)| *known == name) {
            Some(&(_, algorithm)) => Ok(algorithm),
            None => Err(NoAlgorithm(name.to_owned())),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// Pages that ksmd scans in a batch.
    pub pages_to_scan: u32,
    /// Sleep between batches, milliseconds.
    pub sleep_ms: u32,
    /// Simulated time, nanoseconds; memory no longer changes after the end of the record.
    pub for_ns: u64,
    /// Time between two points of a curve, nanoseconds.
    pub every_ns: u64,
    pub config: Config,
    /// Trees of `nuksm` [default: one per 100 MiB].
    pub trees: Option<u16>,
    pub costs: Costs,
}

impl Settings {
    /// Defaults for the length of a record, with a scan rate of 1000 pages every 20 ms.
    pub fn for_record(scripted: &Scripted) -> Self {
        Self::for_time(scripted.ends_ns)
    }

    pub fn for_time(for_ns: u64) -> Self {
        Self {
            pages_to_scan: 1_000,
            sleep_ms: 20,
            for_ns,
            every_ns: 500 * NS_PER_MS,
            config: Config { governor: Governor::Full, ..Config::default() },
            trees: None,
            costs: Costs::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReplayPoint {
    /// Time since the beginning, seconds.
    pub seconds: f64,
    pub saved: u64,
    pub cpu_seconds: f64,
    pub comparisons: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub algorithm: Algorithm,
    /// Pages scanned by ksmd or its replacement.
    pub scanned: u64,
    pub read: u64,
    pub searches: u64,
    pub found: u64,
    /// Pages compared with pages of stable trees.
    pub stable_comparisons: u64,
    /// Pages compared with pages of unstable trees.
    pub unstable_comparisons: u64,
    /// Comparisons in searches that found nothing.
    pub futile_comparisons: u64,
    /// Share of futile comparisons (CMD, equation 1).
    pub futile_rate: f64,
    pub hash_comparisons: u64,
    /// Mean comparisons of pages in a search.
    pub depth: f64,
    /// Maximum depth of a search in one tree.
    pub deepest: u64,
    /// Pages that the scanner didn't compare again because nobody had written them.
    pub spared: u64,
    /// Pages in each tree, or in the trees of each class, at the end.
    pub trees: Vec<u64>,
    /// Writes to merged pages. Each made a copy.
    pub cow_breaks: u64,
    pub saved: u64,
    /// Pages saved on average over the time.
    pub saved_mean: f64,
    /// Modelled CPU time, seconds.
    pub cpu_seconds: f64,
    /// Memory of the kernel's metadata and pagefold's index, bytes.
    pub metadata_bytes: u64,
    pub curve: Vec<ReplayPoint>,
}

impl Outcome {
    pub fn comparisons(&self) -> u64 {
        self.stable_comparisons + self.unstable_comparisons
    }
}

pub fn replay(algorithm: Algorithm, scripted: &Scripted, settings: &Settings) -> Outcome {
    let knobs = knobs(algorithm, scripted.pages, settings.trees);
    let run = ReplayRun::begin(algorithm, knobs, settings, |mut sim| {
        sim.play(scripted.script.clone());
        sim
    });
    run.through(algorithm, settings)
}

/// Savable pages over time (seconds): all but one page of every content.
pub fn savable(scripted: &Scripted, settings: &Settings) -> Vec<(f64, u64)> {
    let mut sim = SimHost::new(1, Costs::default(), Knobs::default());
    sim.play(scripted.script.clone());
    let mut curve = Vec::new();
    while sim.now_ns() < settings.for_ns.min(scripted.ends_ns) {
        let Ok(()) = sim.wait(settings.every_ns.max(NS_PER_MS));
        curve.push((sim.now_ns() as f64 / 1e9, sim.truth().savable));
    }
    curve
}

/// The simulator's settings for an algorithm on a machine with `pages` pages.
pub(crate) fn knobs(algorithm: Algorithm, pages: u64, trees: Option<u16>) -> Knobs {
    let plain = Knobs { smart_scan: false, merge_any: true, ..Knobs::default() };
    let by_memory = u16::try_from(pages / PAGES_PER_TREE + 1).unwrap_or(u16::MAX);
    match algorithm {
        Algorithm::Ksm => plain,
        Algorithm::KsmSmart => Knobs { smart_scan: true, ..plain },
        Algorithm::CmdAddress => Knobs { forest: Forest::Classes(Classes::Address), ..plain },
        Algorithm::CmdPageCount => Knobs { forest: Forest::Classes(Classes::PageCount), ..plain },
        Algorithm::CmdSubPage => Knobs { forest: Forest::Classes(Classes::SubPages), ..plain },
        Algorithm::NuKsm => Knobs { forest: Forest::Checksum { trees: trees.unwrap_or(by_memory) }, ..plain },
        Algorithm::Uksm => Knobs { merge_any: false, ..plain },
        Algorithm::Pagefold => Knobs::driven(),
        Algorithm::PagefoldRequest => Knobs::requested(),
    }
}

pub(crate) struct ReplayRun {
    pub(crate) sim: SimHost,
    pub(crate) engine: Option<Engine>,
    next_round_ns: u64,
}

impl ReplayRun {
    /// Starts an algorithm on a machine filled by `populate`.
    pub(crate) fn begin(
        algorithm: Algorithm,
        knobs: Knobs,
        settings: &Settings,
        populate: impl FnOnce(SimHost) -> SimHost,
    ) -> Self {
        let mut sim = SimHost::new(1, settings.costs, knobs);
        if algorithm == Algorithm::Uksm {
            let uksm = UksmSettings::of_governor(settings.config.governor);
            sim = sim.with_scanner(Uksmd::new(&settings.costs, Granularity::new(knobs.granularity), uksm));
        }
        sim = populate(sim);
        let Ok(()) = sim.wait(0);
        let engine = match algorithm {
            Algorithm::Pagefold | Algorithm::PagefoldRequest => Some(Engine::new(settings.config.clone())),
            Algorithm::Uksm => None,
            _ => {
                let scan = ScanOrder::Pace {
                    pages_to_scan: settings.pages_to_scan,
                    sleep_ms: settings.sleep_ms,
                    thorough: false,
                };
                let Ok(_) = sim.apply(&Actions { scan, ..Actions::default() });
                None
            }
        };
        Self { sim, engine, next_round_ns: 0 }
    }

    fn through(mut self, algorithm: Algorithm, settings: &Settings) -> Outcome {
        let mut curve = Vec::new();
        let every_ns = settings.every_ns.max(NS_PER_MS);
        let mut at_ns = 0;
        while at_ns < settings.for_ns {
            at_ns = (at_ns + every_ns).min(settings.for_ns);
            self.run_until(at_ns);
            curve.push(self.point());
        }
        let SearchCounts { searches, found, stable, unstable, futile, hashes, deepest } = self.sim.counts();
        let saved_mean = curve.iter().map(|point| point.saved).sum::<u64>() as f64 / curve.len().max(1) as f64;
        let index = self.index_bytes();
        Outcome {
            algorithm,
            scanned: self.sim.ksm().scanned,
            read: self.engine.as_ref().map_or(0, |engine| engine.ledger().pages_read),
            searches,
            found,
            stable_comparisons: stable,
            unstable_comparisons: unstable,
            futile_comparisons: futile,
            futile_rate: self.sim.counts().futile_rate(),
            hash_comparisons: hashes,
            depth: self.sim.counts().depth(),
            deepest,
            spared: self.sim.spared(),
            trees: self.sim.tree_sizes(),
            cow_breaks: self.sim.cow_breaks(),
            saved: self.sim.saved().0,
            saved_mean,
            cpu_seconds: curve.last().map_or(0.0, |point| point.cpu_seconds),
            metadata_bytes: self.sim.metadata().0 + index,
            curve,
        }
    }

    pub(crate) fn run_until(&mut self, until_ns: u64) {
        let Some(engine) = &mut self.engine else {
            let Ok(()) = self.sim.wait(until_ns.saturating_sub(self.sim.now_ns()));
            return;
        };
        while self.sim.now_ns() < until_ns {
            if self.sim.now_ns() >= self.next_round_ns {
                let Ok(Cycle { wait_ns: pause_ns, .. }) = cycle(engine, &mut self.sim);
                self.next_round_ns = self.sim.now_ns() + pause_ns.max(1);
            }
            let next_ns = self.next_round_ns.min(until_ns);
            let Ok(()) = self.sim.wait(next_ns.saturating_sub(self.sim.now_ns()));
        }
    }

    /// Memory of pagefold's index, bytes. Visits all regions.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.engine.as_ref().map_or(0, |engine| engine.state().work.index.bytes)
    }

    /// CPU time of pagefold and the kernel's thread so far, seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let cost = self.sim.cost();
        (cost.pagefold_ns + cost.ksmd_ns) as f64 / 1e9
    }

    fn point(&self) -> ReplayPoint {
        ReplayPoint {
            seconds: self.sim.now_ns() as f64 / 1e9,
            saved: self.sim.saved().0,
            cpu_seconds: self.cpu_seconds(),
            comparisons: self.sim.counts().comparisons(),
        }
    }
}
