//! Keeps the sketches of all workloads up to date: reads the workloads one after the other, again and again.

use super::reading::{Finished, Known, ProcessId, Reading};
use super::settings::Fleet;
use super::workloads::{self, Id, Workload};
use pagefold_engine::keys::OwnerKey;
use pagefold_host::live::{Digest, LiveHost, Progress};
use pagefold_host::scope::exclude::Exclusion;
use pagefold_sketch::Row;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The present time: nanoseconds on the clock of the host's snapshots, and microseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub ns: u64,
    pub us: u64,
}

impl Now {
    pub fn of(host: &LiveHost) -> Self {
        let us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
        Self { ns: host.now_ns(), us: u64::try_from(us).unwrap_or(u64::MAX) }
    }
}

/// All sketches, and the workload that we're reading.
pub struct Keeper {
    fleet: Fleet,
    digest: Digest,
    kept: BTreeMap<Id, (Arc<Row>, Known)>,
    /// Workloads still to read in this pass. The last one is next.
    left: Vec<Workload>,
    pass: BTreeSet<Id>,
    /// The workloads that we've begun to read a second time in this pass.
    again: BTreeSet<Id>,
    reading: Option<Reading>,
}

/// The result of reading a portion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub pages: u64,
    pub cpu_ns: u64,
    /// Whether the portion ended the pass.
    pub ended: bool,
}

impl Keeper {
    pub fn new(fleet: Fleet) -> Self {
        let key = fleet.key.clone();
        let digest: Digest = Arc::new(move |page| key.content(page).0);
        Self {
            fleet,
            digest,
            kept: BTreeMap::new(),
            left: Vec::new(),
            pass: BTreeSet::new(),
            again: BTreeSet::new(),
            reading: None,
        }
    }

    /// Begins a pass over all workloads that are in scope now.
    pub fn begin(&mut self, host: &LiveHost) {
        self.left = workloads::find(host);
        self.pass = self.left.iter().map(|workload| workload.id.clone()).collect();
        self.again.clear();
    }

    /// Whether a pass is under way.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some() || !self.left.is_empty()
    }

    /// Reads about `most` pages. `allow` says how many of them we may read from a process now.
    pub fn step(
        &mut self,
        host: &mut LiveHost,
        now: Now,
        most: u64,
        mut allow: impl FnMut(OwnerKey, u64) -> u64,
    ) -> Step {
        let mut step = Step::default();
        self.forget_left_alone(host);
        while step.pages < most {
            let Some(reading) = &mut self.reading else {
                let Some(workload) = self.left.pop() else {
                    step.ended = true;
                    self.kept.retain(|id, _| self.pass.contains(id));
                    break;
                };
                self.reading = Some(Reading::new(workload, now));
                continue;
            };
            let Some(owner) = reading.next().map(|member| member.owner) else {
                self.finish(host, now);
                continue;
            };
            let allowed = allow(owner, most - step.pages);
            if allowed == 0 {
                break;
            }
            let (progress, cpu_ns) = host.read_contents(owner, &mut reading.cursor, allowed, &self.digest);
            step.cpu_ns += cpu_ns;
            match progress {
                Progress::More(pages) => {
                    step.pages += (pages.len() as u64).max(1);
                    reading.add(&pages);
                    if reading.is_endless() {
                        reading.finish_member(false);
                    }
                }
                Progress::Done(pages) => {
                    step.pages += pages.len() as u64;
                    reading.add(&pages);
                    reading.finish_member(true);
                }
                Progress::Ended => reading.finish_member(false),
                Progress::LeftAlone => self.begin_again(host),
            }
        }
        step
    }

    /// Drops the sketches of workloads with processes that we now leave alone, unless the reason still lets us use the
    /// pages that we read before.
    fn forget_left_alone(&mut self, host: &LiveHost) {
        let mut targets: Vec<_> = host.targets().collect();
        targets.retain(|target| target.exclusion.as_ref().is_some_and(Exclusion::withdraws_marks));
        let left_alone: BTreeSet<ProcessId> = targets.iter().map(|target| target.info.process.key()).collect();
        if left_alone.is_empty() {
            return;
        }
        self.kept.retain(|_, (_, known)| !known.has_any(&left_alone));
        if self.reading.as_ref().is_some_and(|reading| reading.has_any(&left_alone)) {
            self.begin_again(host);
        }
    }

    /// Starts a workload over, without the processes that we leave alone. We do this once per pass, after all other
    /// workloads, since a process that we leave alone from time to time mustn't delay other workloads.
    fn begin_again(&mut self, host: &LiveHost) {
        let Some(reading) = self.reading.take() else { return };
        self.kept.remove(reading.id());
        if self.again.insert(reading.id().clone()) {
            let again = workloads::find(host).into_iter().find(|workload| workload.id == *reading.id());
            self.left.splice(0..0, again);
        }
    }

    fn finish(&mut self, host: &mut LiveHost, now: Now) {
        if let Some(reading) = self.reading.take() {
            let zeros_merged = reading.processes().iter().map(|process| host.merged_zeros(process)).sum();
            let former = self.kept.get(reading.id()).map(|(row, known)| (&**row, known));
            let (sharing, shared) = host.merged_pages();
            let Finished { id, row, known } = reading.finish(&self.fleet, now, former, zeros_merged, sharing, shared);
            self.kept.insert(id, (Arc::new(row), known));
        }
    }

    /// The rows of all complete sketches.
    pub fn rows(&self) -> Vec<Arc<Row>> {
        self.kept.values().map(|(row, _)| row.clone()).collect()
    }
}
