//! The live machine, as the judgement sees it.

use crate::cpu::{Ksmd, own_and_children_cpu_ns, own_cpu_ns};
use crate::drive::Driver;
use crate::exclude::{DenyList, Exclusion};
use crate::inject::{Call, Injector, Limits};
use crate::ksm::{Ksm, KsmError};
use crate::memory::{PageReader, ReadHow};
use crate::process::ReadError;
use crate::scope::{Roots, ScopeError, ScopeSpec, resolve_without};
use crate::targets::Target;
use crate::tenure::{Restored, Tenure, TurnError};
use pagefold_core::hash::{Digest, Digester};
use pagefold_core::host::{
    Actions, Cost, Host, KsmView, Marking, Outcome, OwnerKey, PageSample, PageState, RegionKey, SamplePlan, Samples,
    Snapshot, Span,
};
use pagefold_core::units::{Pages, Vpn};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// The scope is resolved anew at most this often, nanoseconds.
const RESOLVE_NS: u64 = 1_000_000_000;
/// How long giving KSM back may wait for ksmd to end its scan.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);
/// While waiting, signals are looked for this often.
const NAP: Duration = Duration::from_millis(100);

/// What the run cannot go on from.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The scope cannot be resolved.
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// KSM cannot be read.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// ksmd cannot be found.
    #[error(transparent)]
    Ksmd(ReadError),
    /// The control thread cannot be started.
    #[error("starting the KSM control thread: {0}")]
    Driver(std::io::Error),
}

/// What the run tells while it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A process is left alone.
    LeftAlone {
        /// The process.
        pid: i32,
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// KSM is not driven any more.
    StoodDown {
        /// Why.
        why: String,
    },
}

/// Whether and how the machine may be touched.
#[derive(Debug)]
pub enum Hands {
    /// Mark, and drive ksmd.
    Act {
        /// KSM, taken over.
        tenure: Tenure,
        /// The process that injects the marks.
        injector: Injector,
    },
    /// Stop at the last write.
    DryRun,
}

/// The live machine.
#[derive(Debug)]
pub struct LiveHost {
    scope: ScopeSpec,
    roots: Roots,
    deny: DenyList,
    ksm: Arc<Ksm>,
    ksmd: Option<Ksmd>,
    hands: Acting,
    stop: Arc<AtomicBool>,
    began: Instant,
    targets: BTreeMap<i32, Target>,
    region_pids: BTreeMap<RegionKey, i32>,
    reader: PageReader,
    next_owner: u32,
    next_region: u32,
    next_resolve_ns: u64,
    told: BTreeMap<i32, String>,
    events: Vec<Event>,
    base: Cost,
}

/// How things stand after the end of a run.
#[derive(Debug)]
pub struct Ended {
    /// What came of giving KSM back; `None` in a dry run, which does not take it.
    pub restored: Option<Restored>,
    /// The time, as in the host's snapshots.
    pub now_ns: u64,
    /// KSM, if it can still be read.
    pub ksm: Option<KsmView>,
    /// What the run has cost, if ksmd's clock can still be read.
    pub cost: Option<Cost>,
}

#[derive(Debug)]
enum Acting {
    Act { tenure: Tenure, driver: Driver, injector: Injector, stood_down: bool },
    DryRun,
}

impl LiveHost {
    /// A host for a scope. `stop` is set from outside (by a signal) to cut waits short.
    pub fn new(
        scope: ScopeSpec,
        roots: Roots,
        deny: DenyList,
        ksm: Arc<Ksm>,
        hands: Hands,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, LiveError> {
        let ksmd = Ksmd::find().map_err(LiveError::Ksmd)?;
        let hands = match hands {
            Hands::Act { tenure, injector } => {
                let driver =
                    Driver::start(&tenure, Ksmd::find().map_err(LiveError::Ksmd)?).map_err(LiveError::Driver)?;
                Acting::Act { tenure, driver, injector, stood_down: false }
            }
            Hands::DryRun => Acting::DryRun,
        };
        let mut host = Self {
            scope,
            roots,
            deny,
            ksm,
            ksmd,
            hands,
            stop,
            began: Instant::now(),
            targets: BTreeMap::new(),
            region_pids: BTreeMap::new(),
            reader: PageReader::new(),
            next_owner: 0,
            next_region: 0,
            next_resolve_ns: 0,
            told: BTreeMap::new(),
            events: Vec::new(),
            base: Cost::default(),
        };
        host.base = host.clocks();
        Ok(host)
    }

    /// The processes in scope.
    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.values()
    }

    /// What has happened since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Nanoseconds since the host was made, the `now_ns` of its snapshots.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Ends the run: ksmd rests, the injector goes, KSM is given back. Merged pages stay merged.
    pub fn finish(self) -> Ended {
        let Self { hands, ksm, ksmd, base, began, .. } = self;
        let restored = match hands {
            Acting::Act { tenure, driver, injector, .. } => {
                drop(injector);
                drop(driver);
                Some(tenure.restore(RESTORE_LIMIT))
            }
            Acting::DryRun => None,
        };
        // ksmd may have been in a scan until just now. The injector is a child waited for, if it held nobody.
        let ksmd_ns = ksmd.and_then(|ksmd| ksmd.cpu_ns().ok()).map(|ns| ns.saturating_sub(base.ksmd_ns));
        Ended {
            restored,
            now_ns: u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            ksm: ksm.counters().ok().map(|counters| counters.view(false, false)),
            cost: ksmd_ns.map(|ksmd_ns| Cost { pagefold_ns: own_and_children_cpu_ns(), ksmd_ns }),
        }
    }

    fn clocks(&self) -> Cost {
        let injector_ns = match &self.hands {
            Acting::Act { injector, .. } => injector.cpu_ns(),
            Acting::DryRun => 0,
        };
        // ksmd's clock cannot vanish; should it not be readable, the last figure stands for it.
        let ksmd_ns = self.ksmd.as_ref().and_then(|ksmd| ksmd.cpu_ns().ok()).unwrap_or(self.base.ksmd_ns);
        Cost { pagefold_ns: own_and_children_cpu_ns() + injector_ns, ksmd_ns }
    }

    /// Takes in who has come into scope and who has gone.
    fn resolve(&mut self, now_ns: u64) -> Result<(), LiveError> {
        if now_ns < self.next_resolve_ns {
            return Ok(());
        }
        self.next_resolve_ns = now_ns + RESOLVE_NS;
        let first = self.targets.is_empty() && self.next_owner == 0;
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let mut spec = if first {
            self.scope.clone()
        } else {
            // A pid names one process, which was taken hold of at the start: a later owner is not meant.
            ScopeSpec { pids: Vec::new(), ..self.scope.clone() }
        };
        let found = loop {
            if spec.is_empty() {
                return Ok(());
            }
            match resolve_without(&spec, &self.roots, &[own]) {
                Ok(found) => break found,
                // It was there when the command line was checked, and has ended since: no reason to leave the others.
                Err(ScopeError::UnknownPid(pid)) => spec.pids.retain(|&named| named != pid),
                Err(ScopeError::NoMatch(_) | ScopeError::NoCgroup(_)) if !first => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        };
        for scoped in found {
            let (pid, start) = (scoped.process.pid(), scoped.process.start_time_ticks());
            if self.targets.get(&pid).is_some_and(|known| known.process.start_time_ticks() == start) {
                continue;
            }
            self.next_owner += 1;
            self.targets.insert(pid, Target::new(scoped, OwnerKey(self.next_owner)));
        }
        Ok(())
    }

    fn look(&mut self, now_ns: u64) {
        let mut gone = Vec::new();
        for (&pid, target) in &mut self.targets {
            let next_region = &mut self.next_region;
            let looked = target.look(now_ns, &self.deny, || {
                *next_region += 1;
                RegionKey(*next_region)
            });
            let why = match looked {
                Ok(()) => target.exclusion.as_ref().map(ToString::to_string),
                Err(ReadError::Vanished { .. }) => {
                    gone.push(pid);
                    None
                }
                Err(error) => {
                    target.exclusion = Some(Exclusion::NotReadable);
                    target.regions.clear();
                    Some(error.to_string())
                }
            };
            if let Some(why) = why {
                if self.told.get(&pid) != Some(&why) {
                    self.told.insert(pid, why.clone());
                    self.events.push(Event::LeftAlone { pid, name: target.name.clone(), why });
                }
            }
        }
        for pid in gone {
            self.targets.remove(&pid);
            self.told.remove(&pid);
        }
    }

    fn stand_down(&mut self, why: String) {
        if let Acting::Act { stood_down, .. } = &mut self.hands {
            if !*stood_down {
                *stood_down = true;
                self.events.push(Event::StoodDown { why });
            }
        }
    }

    /// Whether KSM is ours to drive, and whether the last order is still under way.
    fn tenure_stands(&mut self) -> (bool, bool) {
        let Acting::Act { tenure, driver, stood_down, .. } = &self.hands else { return (false, false) };
        if *stood_down {
            return (false, false);
        }
        let status = driver.status();
        let why = match tenure.check() {
            Ok(()) => status.stood_down,
            // The state file or sysfs failed: nothing more is ordered either.
            Err(error @ (TurnError::Usurped(_) | TurnError::Ksm(_) | TurnError::State(_) | TurnError::Ended)) => {
                Some(error.to_string())
            }
        };
        match why {
            Some(why) => {
                self.stand_down(why);
                (false, false)
            }
            None => (true, status.under_way),
        }
    }

    /// Marks or unmarks spans, the spans of one process together.
    fn advise(&mut self, spans: &[Span], advice: i32, outcome: &mut Outcome) -> Vec<Marking> {
        let mut results = vec![Marking::Refused; spans.len()];
        let mut by_pid: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (at, span) in spans.iter().enumerate() {
            if let Some(&pid) = self.region_pids.get(&span.region) {
                by_pid.entry(pid).or_default().push(at);
            }
        }
        for (pid, wanted) in by_pid {
            let Some(target) = self.targets.get_mut(&pid) else { continue };
            // Look again just before acting: mappings may have come, gone or turned into what must not be marked.
            let Ok(details) = target.details() else { continue };
            let mut calls = Vec::new();
            let mut owners = Vec::new();
            for at in wanted {
                let (low, high) = (spans[at].first, spans[at].first + spans[at].pages.0);
                for detail in details.iter().filter(|detail| crate::exclude::vma_exclusion(detail).is_none()) {
                    let (first, end) = (detail.vma.first(), detail.vma.first() + detail.vma.pages().0);
                    let (from, to) = (first.max(low), end.min(high));
                    if from < to && detail.flags.has(*b"mg") != (advice == libc::MADV_MERGEABLE) {
                        calls.push(Call::madvise(from.address(), Pages(to.0 - from.0).bytes().0, advice));
                        owners.push((at, Pages(to.0 - from.0)));
                    } else if from < to {
                        // Marked already: by its owner, or by us when a retry follows half a batch.
                        add(&mut results[at], Pages(to.0 - from.0));
                    }
                }
            }
            target.look_again();
            match &mut self.hands {
                Acting::DryRun => {
                    for &(at, pages) in &owners {
                        add(&mut results[at], pages);
                    }
                }
                Acting::Act { injector, .. } => match injector.run(&target.process, &calls, &Limits::default()) {
                    Ok(report) => {
                        outcome.stops += report.stops;
                        outcome.longest_stop_ns = outcome.longest_stop_ns.max(report.longest_stop_ns);
                        outcome.total_stop_ns += report.total_stop_ns;
                        for (&(at, pages), result) in owners.iter().zip(&report.results) {
                            if result.is_ok() {
                                add(&mut results[at], pages);
                            }
                        }
                    }
                    Err(error) => {
                        let marking = if error.is_passing() { Marking::Busy } else { Marking::Refused };
                        for &(at, _) in &owners {
                            results[at] = marking;
                        }
                        let (name, why) = (target.name.clone(), error.to_string());
                        if self.told.get(&pid) != Some(&why) {
                            self.told.insert(pid, why.clone());
                            self.events.push(Event::LeftAlone { pid, name, why });
                        }
                    }
                },
            }
        }
        results
    }
}

fn add(marking: &mut Marking, pages: Pages) {
    *marking = match marking {
        Marking::Done(done) => Marking::Done(*done + pages),
        Marking::Busy | Marking::Refused => Marking::Done(pages),
    };
}

impl Host for LiveHost {
    type Error = LiveError;

    fn observe(&mut self) -> Result<Snapshot, LiveError> {
        let now_ns = self.now_ns();
        self.resolve(now_ns)?;
        self.look(now_ns);
        let (ours, busy) = self.tenure_stands();
        let ksm = self.ksm.counters()?.view(ours, busy);
        self.region_pids.clear();
        let mut regions = Vec::new();
        for (&pid, target) in &self.targets {
            for tracked in &target.regions {
                self.region_pids.insert(tracked.key, pid);
                regions.push(pagefold_core::host::RegionView {
                    key: tracked.key,
                    owner: target.owner,
                    family: tracked.stretch.family,
                    first: tracked.stretch.first,
                    pages: tracked.stretch.pages,
                    resident: tracked.stretch.resident,
                    marked: tracked.stretch.marked,
                });
            }
        }
        let clocks = self.clocks();
        let cost = Cost { pagefold_ns: clocks.pagefold_ns, ksmd_ns: clocks.ksmd_ns.saturating_sub(self.base.ksmd_ns) };
        Ok(Snapshot { now_ns, regions, ksm, cost })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, LiveError> {
        let before_ns = own_cpu_ns();
        let digester = Digester::new(plan.digest_seed);
        let mut samples = Samples::default();
        samples.pages.reserve(plan.runs.iter().map(|run| run.pages as usize).sum());
        let mut runs: Vec<(Vpn, u32)> = Vec::new();
        for same_region in plan.runs.chunk_by(|a, b| a.region == b.region) {
            let region = same_region[0].region;
            let Some(target) = self.region_pids.get(&region).and_then(|pid| self.targets.get(pid)) else { continue };
            let huge = target.regions.iter().any(|tracked| tracked.key == region && tracked.stretch.huge);
            runs.clear();
            runs.extend(same_region.iter().map(|run| (run.first, run.pages)));
            let how = ReadHow { huge, shared_bytes: false };
            let read = self.reader.read_runs(&target.process, &runs, how, |view| {
                let digest = match view.bytes {
                    Some(bytes) if view.state == PageState::Private => digester.digest(bytes),
                    _ => Digest::default(),
                };
                samples.pages.push(PageSample { region, page: view.page, state: view.state, huge: view.huge, digest });
            });
            // Ended or out of reach: the next look finds out. What was read so far is good.
            drop(read);
        }
        samples.cpu_ns = own_cpu_ns() - before_ns;
        Ok(samples)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, LiveError> {
        let mut outcome = Outcome::default();
        if matches!(self.hands, Acting::Act { stood_down: true, .. }) {
            outcome.marked = vec![Marking::Busy; actions.mark.len()];
            outcome.unmarked = vec![Marking::Busy; actions.unmark.len()];
            return Ok(outcome);
        }
        outcome.marked = self.advise(&actions.mark, libc::MADV_MERGEABLE, &mut outcome);
        outcome.unmarked = self.advise(&actions.unmark, libc::MADV_UNMERGEABLE, &mut outcome);
        if let Acting::Act { driver, .. } = &self.hands {
            driver.order(actions.merge);
        }
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), LiveError> {
        let end = Instant::now() + Duration::from_nanos(ns);
        while !self.stop.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(NAP));
        }
        Ok(())
    }
}
