//! The live machine, as the judgement sees it.

mod marking;
mod placing;
mod refresh;

pub use marking::Changed;
pub use placing::Policies;

use self::placing::Placing;
use crate::host::sampling::{Piece, Sampled, Work, sample};
use crate::host::targets::Target;
use crate::inject::Injector;
use crate::ksm::controller::Driver;
use crate::ksm::ksmd::Ksmd;
use crate::ksm::lease::{Restored, Tenure, TurnError};
use crate::ksm::{Breaks, Ksm, KsmError};
use crate::os::cpu::{own_and_children_cpu_ns, own_cpu_ns};
use crate::os::pressure::{Gauge, PressureError};
use crate::proc::Roots;
use crate::proc::memory::{Contents, PageReader, ReadHow};
use crate::proc::process::ReadError;
use crate::scope::domain::{self, DomainRules};
use crate::scope::exclude::DenyList;
use crate::scope::new_processes::Newcomers;
use crate::scope::{ScopeError, ScopeSpec};
use pagefold_core::hash::Digester;
use pagefold_core::host::{
    Actions, ChangeResult, Cost, Host, KsmView, Marking, MemoryView, Outcome, RegionView, Run, SamplePlan, Samples,
    Snapshot,
};
use pagefold_core::keys::RegionKey;
use pagefold_core::units::Pages;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Processes are looked at this often, nanoseconds, if that does not take more than its share.
const LOOK_NS: u64 = 250_000_000;
/// They are never looked at more often than this, nanoseconds.
const LOOK_MIN_NS: u64 = 10_000_000;
/// How scarce memory is is asked at most this often, nanoseconds.
const GAUGE_NS: u64 = 1_000_000_000;
/// How long giving KSM back may wait for ksmd to end its scan.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);

/// What the run cannot go on from.
#[derive(Debug, Error)]
pub enum LiveError {
    /// The scope cannot be resolved.
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// KSM cannot be read.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// What memory is left cannot be read.
    #[error(transparent)]
    Memory(#[from] PressureError),
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
    /// Memory of a program was marked or unmarked, or should have been.
    Changed(Changed),
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
    domain_rules: DomainRules,
    newcomers: Newcomers,
    region_pids: BTreeMap<RegionKey, i32>,
    views: Vec<RegionView>,
    /// Absent after it was left behind with a process that is stuck.
    reader: Option<PageReader>,
    gauge: Gauge,
    memory: MemoryView,
    placing: Placing,
    breaks: Breaks,
    broken: u64,
    next_gauge_ns: u64,
    next_owner: u32,
    next_region: u32,
    next_look_ns: u64,
    look_ns: u64,
    told: BTreeMap<i32, String>,
    /// The names of the trust domains, by key.
    domains: Vec<String>,
    events: Vec<Event>,
    base: Cost,
    /// ksmd's clock when it was last read.
    ksmd_ns: u64,
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
    /// A host for a scope. `stop` is set by a signal's handler to cut waits short. The signal must interrupt the thread
    /// that waits: the kernel gives a process's signals to its main thread if it can. Set by another thread, the flag is
    /// noticed at the next look.
    pub fn new(
        scope: ScopeSpec,
        roots: Roots,
        deny: DenyList,
        ksm: Arc<Ksm>,
        hands: Hands,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, LiveError> {
        more_descriptors();
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
            newcomers: Newcomers::new(&roots),
            gauge: Gauge::open(&roots.proc)?,
            memory: MemoryView::default(),
            placing: Placing::new(),
            breaks: Breaks::open(&roots.proc),
            broken: 0,
            next_gauge_ns: 0,
            scope,
            roots,
            deny,
            ksm,
            ksmd,
            hands,
            stop,
            began: Instant::now(),
            targets: BTreeMap::new(),
            domain_rules: DomainRules::default(),
            region_pids: BTreeMap::new(),
            views: Vec::new(),
            reader: Some(PageReader::new()),
            next_owner: 0,
            next_region: 0,
            next_look_ns: 0,
            look_ns: LOOK_NS,
            told: BTreeMap::new(),
            domains: vec![domain::DEFAULT.to_owned()],
            events: Vec::new(),
            base: Cost::default(),
            ksmd_ns: 0,
        };
        host.base = host.clocks();
        Ok(host)
    }

    /// The processes in scope.
    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.values()
    }

    /// The names of the trust domains seen so far, by key.
    pub fn domains(&self) -> &[String] {
        &self.domains
    }

    /// Who belongs to which trust domain. To be said before the first look: a process stays in the domain it was found in.
    pub fn set_domains(&mut self, rules: DomainRules) {
        self.domain_rules = rules;
    }

    /// By which policies merged pages are placed, on a machine with several memory nodes.
    pub fn set_policies(&mut self, policies: Policies) {
        self.placing.policies = policies;
    }

    /// Looks at processes this often, nanoseconds, or as often as it may.
    pub fn look_every(&mut self, ns: u64) {
        self.look_ns = ns.clamp(LOOK_MIN_NS, LOOK_NS);
    }

    /// Another deny list from now on. What is marked in a program that is denied by now stays so.
    pub fn set_deny(&mut self, deny: DenyList) {
        self.deny = deny;
        self.targets.values_mut().for_each(Target::look_again);
        self.next_look_ns = 0;
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
        let (restored, elsewhere_ns) = match hands {
            Acting::Act { tenure, driver, injector, .. } => {
                let elsewhere_ns = injector.cpu_elsewhere_ns();
                drop(injector);
                drop(driver);
                (Some(tenure.restore(RESTORE_LIMIT)), elsewhere_ns)
            }
            Acting::DryRun => (None, 0),
        };
        // ksmd may have been in a scan until just now. The injector is a child waited for, if it held nobody.
        let ksmd_ns = ksmd.and_then(|ksmd| ksmd.cpu_ns().ok()).map(|ns| ns.saturating_sub(base.ksmd_ns));
        Ended {
            restored,
            now_ns: u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            ksm: ksm.counters().ok().map(|counters| counters.view(false, false)),
            cost: ksmd_ns.map(|ksmd_ns| Cost { pagefold_ns: own_and_children_cpu_ns() + elsewhere_ns, ksmd_ns }),
        }
    }

    fn clocks(&mut self) -> Cost {
        let injector_ns = match &self.hands {
            Acting::Act { injector, .. } => injector.cpu_ns(),
            Acting::DryRun => 0,
        };
        // ksmd's clock cannot vanish; should it not be readable, the last figure stands for it.
        if let Some(ns) = self.ksmd.as_ref().and_then(|ksmd| ksmd.cpu_ns().ok()) {
            self.ksmd_ns = ns;
        }
        Cost { pagefold_ns: own_and_children_cpu_ns() + injector_ns, ksmd_ns: self.ksmd_ns }
    }

    /// Runs by region, those of processes that can be looked into.
    fn pieces<'a>(&'a self, runs: &'a [Run]) -> impl Iterator<Item = (Piece, &'a Target)> {
        runs.chunk_by(|a, b| a.region == b.region).filter_map(|same_region| {
            let region = same_region[0].region;
            let target = self.targets.get(self.region_pids.get(&region)?).filter(|target| !target.is_stuck())?;
            let runs = same_region.iter().map(|run| (run.first, run.pages)).collect();
            Some((Piece { region, process: target.process.clone(), runs }, target))
        })
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
}

impl Host for LiveHost {
    type Error = LiveError;

    fn observe(&mut self) -> Result<Snapshot, LiveError> {
        let now_ns = self.now_ns();
        self.attend(now_ns)?;
        let (ours, busy) = self.tenure_stands();
        let mut ksm = self.ksm.counters()?.view(ours, busy);
        if now_ns >= self.next_gauge_ns {
            self.next_gauge_ns = now_ns + GAUGE_NS;
            self.memory = self.gauge.read()?;
            if ksm.shared > Pages(0) {
                // The count must not go back: the next one would look like a burst of copies.
                self.broken = self.breaks.read().unwrap_or(self.broken);
            }
        }
        ksm.broken = self.broken;
        let clocks = self.clocks();
        let cost = Cost { pagefold_ns: clocks.pagefold_ns, ksmd_ns: clocks.ksmd_ns.saturating_sub(self.base.ksmd_ns) };
        self.placing.refresh(now_ns, &self.targets, &self.domains);
        Ok(Snapshot {
            now_ns,
            regions: self.views.clone(),
            ksm,
            memory: self.memory,
            cost,
            nodes: self.placing.nodes.clone(),
            owners: self.placing.owners.clone(),
        })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, LiveError> {
        let before_ns = own_cpu_ns();
        let contents = if plan.shared { Contents::All } else { Contents::Merged };
        let how = |piece: Piece, target: &Target| {
            let region = piece.region;
            let huge = target.regions.iter().any(|tracked| tracked.key == region && tracked.stretch.huge);
            (piece, ReadHow { huge, contents, activity: plan.activity.contains(&region) })
        };
        let work = Work {
            reads: self.pieces(&plan.runs).map(|(piece, target)| how(piece, target)).collect(),
            looks: self.pieces(&plan.looks).map(|(piece, _)| piece).collect(),
            digester: Digester::new(plan.digest_seed),
            topology: self.placing.topology.clone(),
        };
        let mut samples = Samples::default();
        let reader = self.reader.take().unwrap_or_default();
        match sample(reader, work) {
            Ok(Sampled { reader, pages, merged, failed }) => {
                self.reader = Some(reader);
                (samples.pages, samples.merged) = (pages, merged);
                for (pid, error) in failed {
                    // What was read so far is good. That it has ended the next look finds out.
                    if !matches!(error, ReadError::Vanished { .. }) {
                        self.tell_left_alone(pid, error.to_string());
                    }
                }
            }
            Err((pid, pending)) => {
                if let Some(target) = self.targets.get_mut(&pid) {
                    target.get_stuck(pending);
                    self.next_look_ns = 0;
                }
            }
        }
        samples.cpu_ns = own_cpu_ns() - before_ns;
        Ok(samples)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, LiveError> {
        let mut outcome = Outcome::default();
        if matches!(self.hands, Acting::Act { stood_down: true, .. }) {
            let busy = |&change| ChangeResult { change, marking: Marking::Busy };
            outcome.marked = actions.mark.iter().map(busy).collect();
            outcome.unmarked = actions.unmark.iter().map(busy).collect();
            return Ok(outcome);
        }
        outcome.marked = self.change(&actions.mark, true, actions.stop, &mut outcome);
        outcome.unmarked = self.change(&actions.unmark, false, actions.stop, &mut outcome);
        if let Acting::Act { driver, .. } = &self.hands {
            driver.order(actions.scan);
            if !actions.moves.is_empty() {
                let before_ns = own_cpu_ns();
                self.place(&actions.moves, &mut outcome);
                outcome.move_ns = own_cpu_ns() - before_ns;
            }
        }
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), LiveError> {
        let end_ns = self.now_ns().saturating_add(ns);
        while !self.stop.load(Ordering::Relaxed) {
            let now_ns = self.now_ns();
            if now_ns >= end_ns || self.attend(now_ns)? {
                break;
            }
            sleep_until_signal(self.next_look_ns.min(end_ns).saturating_sub(now_ns));
        }
        Ok(())
    }
}

/// Lets this process open as many files as it may: it holds two of each process in scope, and three more of those read
/// last. The usual limit of 1024 is there for programs that use select(2); should it stay, fewer processes fit.
fn more_descriptors() {
    // SAFETY: all-zero is a valid rlimit; both calls write and read no further than its end.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Sleeps; a signal that this thread handles ends it. One that comes in the microsecond between the look at what its
/// handler sets and the sleep does not: hence no sleep is longer than the time between two looks.
fn sleep_until_signal(ns: u64) {
    let ns = ns.min(LOOK_NS);
    let seconds = libc::time_t::try_from(ns / 1_000_000_000).unwrap_or(0);
    let rest = libc::c_long::try_from(ns % 1_000_000_000).unwrap_or(0);
    let time = libc::timespec { tv_sec: seconds, tv_nsec: rest };
    // SAFETY: `time` outlives the call, and what is left of it is not asked for.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}
