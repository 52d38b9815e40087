//! Kinds of workloads.
//!
//! Generated: enterprise and e-commerce applications on several systems, as in Memory Buddies (VEE 2009), whose traces
//! aren't public. So we chose the shares: of a workload's pages about a fifth is the system's, a third the
//! application's (half of which depends on the system, too), and the rest its own. Instances differ: each holds nine
//! tenths of its kind's contents.

use crate::record::{Record, RecordError, State};
use pagefold_engine::host::PageState;
use pagefold_engine::random::{Random, mix};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const SYSTEMS: u64 = 4;
const APPLICATIONS: u64 = 10;
/// Pages of a system, of an application on any system, of an application on one system, and of an instance.
const SYSTEM_PAGES: u64 = 2200;
const APPLICATION_PAGES: u64 = 2000;
const PORT_PAGES: u64 = 2000;
const OWN_PAGES: usize = 5000;
/// The share of its kind's contents that each instance holds, in tenths.
const HELD_TENTHS: u64 = 9;

#[derive(Clone, Debug)]
pub struct Kind {
    pub name: String,
    /// Contents that instances may have in common.
    pub common: Vec<u64>,
    /// Pages that each instance has for itself.
    pub own: usize,
    /// How common this kind is, relative to the others.
    pub weight: u64,
}

/// Kinds of workloads, and how alike instances are.
#[derive(Clone, Debug)]
pub struct Mix {
    pub name: String,
    pub kinds: Vec<Kind>,
    /// The share of `common` that an instance holds, in tenths.
    pub held_tenths: u64,
}

impl Mix {
    /// Generated kinds. Systems and applications aren't equally common: the n-th is half as common as the one before
    /// it, and at least a fifth as common as the first.
    pub fn generated() -> Self {
        let mut kinds = Vec::new();
        for system in 0..SYSTEMS {
            for application in 0..APPLICATIONS {
                let mut common = Vec::new();
                for (segment, pages) in [
                    (1000 + system, SYSTEM_PAGES),
                    (2000 + application, APPLICATION_PAGES),
                    (3000 + system * APPLICATIONS + application, PORT_PAGES),
                ] {
                    common.extend((0..pages).map(|page| mix(mix(segment) ^ page) >> 1));
                }
                let name = format!("os{system}-app{application}");
                kinds.push(Kind { name, common, own: OWN_PAGES, weight: weight(system) * weight(application) });
            }
        }
        Self { name: "enterprise and e-commerce mix".to_owned(), kinds, held_tenths: HELD_TENTHS }
    }

    /// The programs of a record at its end. Contents that only one of them holds become every instance's own; the rest
    /// is common.
    pub fn of_record(path: &Path) -> Result<Self, RecordError> {
        let record = Record::read(path)?;
        let mut state = State::default();
        for snapshot in &record.snapshots {
            state.apply(snapshot);
        }
        let mut by_process: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for held in state.regions.values() {
            let pages = by_process.entry(held.row.process).or_default();
            for (_, page) in held.pages.iter() {
                if page.digest != 0 && page.state != PageState::ZeroMapped {
                    // Half of a keyed digest tells contents apart as well.
                    pages.insert(u64::try_from(page.digest >> 65).unwrap_or(u64::MAX));
                }
            }
        }
        let mut holders: FxHashMap<u64, u32> = FxHashMap::default();
        for pages in by_process.values() {
            for page in pages {
                *holders.entry(*page).or_default() += 1;
            }
        }
        let mut kinds = Vec::new();
        for (process, pages) in by_process {
            let name = state.processes.get(&process).and_then(|row| row.name.clone());
            let common: Vec<u64> = pages.iter().copied().filter(|page| holders[page] > 1).collect();
            let own = pages.len() - common.len();
            kinds.push(Kind { name: name.unwrap_or_else(|| format!("process-{process}")), common, own, weight: 1 });
        }
        Ok(Self { name: format!("programs of {}", path.display()), kinds, held_tenths: 10 })
    }

    /// A kind at random, by weight.
    pub fn choose(&self, random: &mut Random) -> usize {
        let all: u64 = self.kinds.iter().map(|kind| kind.weight).sum();
        let mut left = random.below(all.max(1));
        for (number, kind) in self.kinds.iter().enumerate() {
            if left < kind.weight {
                return number;
            }
            left -= kind.weight;
        }
        0
    }
}

/// How common the n-th system or application is.
fn weight(number: u64) -> u64 {
    (10 >> number.min(3)).max(2)
}
