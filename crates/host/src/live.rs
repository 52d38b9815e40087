//! The live machine behind the core's [`Host`] interface.

mod collapsing;
mod limits;
mod marking;
mod placing;
mod reading;
mod refresh;
mod requesting;
mod unmerging;
mod withdrawing;

pub use placing::Policies;
pub use reading::{Content, Digest, PageContent, Place, Progress};
pub use unmerging::{RequestRefusal, Unmerging};

use self::limits::Limits;
use self::placing::Placing;
use self::requesting::Requesting;
use crate::identity::Programs;
use crate::sampling::{CountedProcess, Digesting, RegionRuns, Sampled, SamplingJob, sample};
use crate::scope::deny_list::DenyList;
use crate::scope::domain::{DomainRules, Domains, NO_DOMAIN};
use crate::scope::kept_out::KeptOut;
use crate::scope::new_processes::NewProcesses;
use crate::scope::rule::Rule;
use crate::scope::{ScopeError, ScopeSpec, Selector, user_id};
use crate::targets::Target;
use pagefold_engine::hash::{Digester, LineDigester};
use pagefold_engine::host::{
    Actions, ChangeResult, Cost, Host, KsmView, Marking, Mechanism, MemoryView, Outcome, PageRun, RegionView,
    SamplePlan, Samples, Snapshot,
};
use pagefold_engine::keys::{DomainKey, GroupKey, KeyCounter, LimitKey, OwnerKey, RegionKey};
use pagefold_engine::units::Pages;
use pagefold_inject::{InjectError, Injector};
use pagefold_ksm::controller::KsmdController;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::KsmLease;
use pagefold_ksm::request::RequestDevice;
use pagefold_ksm::{KnobError, RestoreOutcome};
use pagefold_ksm::{Ksm, KsmError, VmEventCounter, VmEvents};
use pagefold_procmem::Roots;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::os::cpu::{own_and_children_cpu_ns, own_cpu_ns};
use pagefold_procmem::os::pressure::{MemoryMonitor, PressureError};
use pagefold_procmem::process::ReadError;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::nanosleep;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Default time between two refreshes of the targets, nanoseconds.
const REFRESH_NS: u64 = 250_000_000;
/// Shortest time between two refreshes of the targets, nanoseconds.
const REFRESH_MIN_NS: u64 = 10_000_000;
/// Time between two reads of the memory pressure, nanoseconds.
const MEMORY_NS: u64 = 1_000_000_000;
/// How long we wait for the injector: longer than it takes to stop a thread whose cgroup is out of CPU time.
const INJECTOR_LIMIT: Duration = Duration::from_millis(400);
/// When restoring KSM, how long we wait for ksmd to finish its scan.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);

/// An error that ends the run.
#[derive(Debug, Error)]
pub enum LiveError {
    /// We can't resolve the scope.
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// We can't read KSM's state.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// We can't read the state of the machine's memory.
    #[error(transparent)]
    Memory(#[from] PressureError),
    /// We can't find ksmd.
    #[error(transparent)]
    Ksmd(ReadError),
    /// The injector has ended and we can't start it again.
    #[error(transparent)]
    Injector(InjectError),
    /// We can't start the control thread.
    #[error("cannot start the KSM control thread: {0}")]
    Controller(std::io::Error),
}

/// Something that happened during the run, other than the results of actions, which are in [`Outcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// We leave a process alone.
    LeftAlone {
        pid: i32,
        name: String,
        /// The reason.
        why: String,
    },
    /// We tried to unmark memory because it's excluded now, or because its process is in another trust domain.
    Withdrawn {
        pid: i32,
        /// The span, and the result.
        result: ChangeResult,
        reason: String,
    },
    /// We don't leave a process alone although its owner has opted out, because the opt-out is overridden.
    Overridden {
        pid: i32,
        /// How its owner has opted out.
        opt_out: String,
    },
    /// The injector had ended, and we started it again.
    InjectorRestarted { pid: u32 },
    /// We've stopped driving KSM.
    StoodDown {
        /// The reason.
        why: String,
    },
}

/// Whether the host changes the machine or only reports what it would change.
#[derive(Debug)]
pub enum HostMode {
    /// Mark memory and drive ksmd.
    Act {
        lease: KsmLease,
        /// The process that makes targets call madvise.
        injector: Injector,
    },
    /// Do everything but change the machine.
    DryRun,
}

/// The live machine.
#[derive(Debug)]
pub struct LiveHost {
    /// Users are given by number: we resolve names once.
    scope: ScopeSpec,
    /// Whether we haven't looked for processes yet.
    first: bool,
    programs: Programs,
    /// By pid, a mapping that we're unmarking because its marks must go.
    unmarking: BTreeMap<i32, withdrawing::WithdrawJob>,
    /// Marks that we withdrew and the engine hasn't accounted for yet.
    withdrawn: Outcome,
    roots: Roots,
    deny: DenyList,
    kept_out: KeptOut,
    next_forget_ns: u64,
    ksm: Arc<Ksm>,
    ksmd: Option<Ksmd>,
    actuator: Actuator,
    stop: Arc<AtomicBool>,
    began: Instant,
    targets: BTreeMap<i32, Target>,
    domain_rules: DomainRules,
    /// The rules for groups with limits, by the number of the group.
    group_rules: Vec<Rule>,
    /// The processes in such groups.
    groups: Arc<BTreeMap<OwnerKey, GroupKey>>,
    new_processes: NewProcesses,
    region_pids: BTreeMap<RegionKey, i32>,
    views: Vec<RegionView>,
    /// Absent after we abandoned it in a read that doesn't return.
    reader: Option<PageReader>,
    monitor: MemoryMonitor,
    memory: MemoryView,
    limits: Limits,
    placing: Placing,
    requesting: Requesting,
    event_counter: VmEventCounter,
    vm_events: VmEvents,
    /// Zero pages that KSM has merged on the whole machine.
    zeros: Pages,
    next_memory_ns: u64,
    owner_keys: KeyCounter,
    region_keys: KeyCounter,
    next_refresh_ns: u64,
    /// The first target that the last refresh had no time for; 0 if none.
    next_pid: i32,
    refresh_ns: u64,
    /// We look at this process first when we collapse huge pages again.
    next_collapse: i32,
    /// By pid, the last reason we reported for leaving a process alone.
    reported: BTreeMap<i32, String>,
    domains: Domains,
    /// The trust domain that we merge. `None`: each by itself, because we mark nothing.
    merged: Option<DomainKey>,
    /// Whether we've looked at all processes that were in scope at the start.
    are_all_looked_at: bool,
    events: Vec<Event>,
    base: Cost,
    /// ksmd's CPU time as last read.
    ksmd_ns: u64,
}

/// The state after the end of a run.
#[derive(Debug)]
pub struct Ended {
    /// Result of restoring KSM; `None` in a dry run, which doesn't change it.
    pub restored: Option<RestoreOutcome>,
    /// Time on the clock of the host's snapshots.
    pub now_ns: u64,
    /// KSM's state, if readable.
    pub ksm: Option<KsmView>,
    /// CPU time of the run, if ksmd's is readable.
    pub cost: Option<Cost>,
}

#[derive(Debug)]
enum Actuator {
    Act { lease: KsmLease, controller: KsmdController, injector: Injector, restarts: u32, stood_down: bool },
    DryRun,
}

impl LiveHost {
    /// A host for a scope. A signal handler sets `stop` to cut waits short. The signal must interrupt the waiting
    /// thread; the kernel prefers the main thread for signals to the process. If another thread sets the flag, we
    /// notice at the next refresh.
    ///
    /// # Errors
    /// If we can't read ksmd or the memory state, or can't start the control thread.
    pub fn new(
        scope: ScopeSpec,
        roots: Roots,
        deny: DenyList,
        ksm: Arc<Ksm>,
        mode: HostMode,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, LiveError> {
        raise_descriptor_limit();
        let ksmd = Ksmd::find().map_err(LiveError::Ksmd)?;
        let actuator = match mode {
            HostMode::Act { lease, mut injector } => {
                injector.set_patience(INJECTOR_LIMIT);
                let controller = KsmdController::start(&lease, Ksmd::find().map_err(LiveError::Ksmd)?)
                    .map_err(LiveError::Controller)?;
                Actuator::Act { lease, controller, injector, restarts: 0, stood_down: false }
            }
            HostMode::DryRun => Actuator::DryRun,
        };
        let mut host = Self {
            new_processes: NewProcesses::new(&roots),
            monitor: MemoryMonitor::open(&roots.proc)?,
            memory: MemoryView::default(),
            limits: Limits::default(),
            placing: Placing::new(),
            requesting: Requesting::default(),
            event_counter: VmEventCounter::open(&roots.proc),
            vm_events: VmEvents::default(),
            zeros: Pages(0),
            next_memory_ns: 0,
            programs: Programs::default(),
            unmarking: BTreeMap::new(),
            withdrawn: Outcome::default(),
            scope: by_number(scope),
            first: true,
            roots,
            deny,
            kept_out: KeptOut::default(),
            next_forget_ns: 0,
            ksm,
            ksmd,
            actuator,
            stop,
            began: Instant::now(),
            targets: BTreeMap::new(),
            domain_rules: DomainRules::default(),
            group_rules: Vec::new(),
            groups: Arc::default(),
            region_pids: BTreeMap::new(),
            views: Vec::new(),
            reader: Some(PageReader::new()),
            owner_keys: KeyCounter::default(),
            region_keys: KeyCounter::default(),
            next_refresh_ns: 0,
            next_pid: 0,
            refresh_ns: REFRESH_NS,
            next_collapse: 0,
            reported: BTreeMap::new(),
            domains: Domains::default(),
            merged: Some(DomainKey(0)),
            are_all_looked_at: false,
            events: Vec::new(),
            base: Cost::default(),
            ksmd_ns: 0,
        };
        host.base = host.clocks();
        host.vm_events = host.event_counter.read().unwrap_or_default();
        Ok(host)
    }

    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.values()
    }

    pub fn target(&self, pid: i32) -> Option<&Target> {
        self.targets.get(&pid)
    }

    /// The process of a region, as of the last refresh.
    pub fn target_of(&self, region: RegionKey) -> Option<&Target> {
        self.targets.get(self.region_pids.get(&region)?)
    }

    /// How often we started the injector again.
    pub fn injector_restarts(&self) -> u32 {
        match &self.actuator {
            Actuator::Act { restarts, .. } => *restarts,
            Actuator::DryRun => 0,
        }
    }

    /// The directory of the cgroup that has a limit.
    pub fn limited_cgroup(&self, key: LimitKey) -> Option<&Path> {
        self.limits.name(key)
    }

    /// Memory that KSM saves on the whole machine; 0 if we can't read its counters.
    pub fn saved_bytes(&self) -> u64 {
        self.ksm.counters().map_or(0, |counters| counters.view(false, false).saved().bytes().0)
    }

    /// The processes kept out by request.
    pub fn kept_out(&self) -> &KeptOut {
        &self.kept_out
    }

    /// Names of the trust domains seen so far, by key.
    pub fn domains(&self) -> &[String] {
        self.domains.names()
    }

    /// The name of the trust domain that we merge, if it's only one.
    pub fn merged_domain(&self) -> Option<&String> {
        self.domains.name(self.merged?)
    }

    /// Sets the rules that assign processes to trust domains. Call it before the first round.
    pub fn set_domains(&mut self, rules: DomainRules) {
        self.domain_rules = rules;
    }

    /// Reads the memory of all trust domains, for a host that merges nothing. Call it before the first round.
    pub fn read_all_domains(&mut self) {
        self.merged = None;
    }

    /// Merges the memory of this trust domain only, because ksmd merges across domains. Memory marked in others is
    /// unmarked before we mark anything else.
    pub fn merge_only(&mut self, domain: &str) {
        self.merged = Some(self.domains.key_of(domain).unwrap_or(NO_DOMAIN));
        self.judge_again();
    }

    /// Sets the rules that assign processes to groups with limits of their own.
    pub fn set_groups(&mut self, rules: Vec<Rule>) {
        self.group_rules = rules;
        self.judge_again();
    }

    /// Sets the policies for placing merged pages on machines with several memory nodes.
    pub fn set_policies(&mut self, policies: Policies) {
        self.placing.policies = policies;
    }

    /// Makes the host merge on request, through this device, instead of with ksmd. Call it before the first round.
    pub fn merge_by(&mut self, device: RequestDevice) {
        self.requesting.device = Some(Arc::new(device));
        self.merged = None;
        self.programs.mechanism = Mechanism::Request;
    }

    /// How pages are merged.
    pub fn mechanism(&self) -> Mechanism {
        if self.requesting.device.is_some() { Mechanism::Request } else { Mechanism::Ksmd }
    }

    /// Sets the time between two refreshes of the targets, nanoseconds. We clamp it to 10 to 250 ms, and refresh many
    /// targets less often.
    pub fn set_refresh_interval(&mut self, ns: u64) {
        self.refresh_ns = ns.clamp(REFRESH_MIN_NS, REFRESH_NS);
    }

    /// Replaces the deny list. We remove the marks of programs that it newly denies.
    pub fn set_deny(&mut self, deny: DenyList) {
        self.deny = deny;
        self.judge_again();
    }

    fn judge_again(&mut self) {
        self.targets.values_mut().for_each(Target::judge_again);
        self.next_refresh_ns = 0;
    }

    /// Returns the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Nanoseconds since the host was created, the `now_ns` of its snapshots.
    pub fn now_ns(&self) -> u64 {
        elapsed_ns(self.began)
    }

    /// Ends the run: stops ksmd, ends the injector and restores KSM. Merged pages stay merged.
    pub fn finish(self) -> Ended {
        let Self { actuator, ksm, ksmd, base, began, .. } = self;
        let (restored, elsewhere_ns, injector_ns) = match actuator {
            Actuator::Act { lease, controller, injector, .. } => {
                let (elsewhere_ns, injector_ns) = (injector.cpu_elsewhere_ns(), injector.total_cpu_ns());
                drop(injector);
                drop(controller);
                (Some(lease.restore(RESTORE_LIMIT)), elsewhere_ns, injector_ns)
            }
            Actuator::DryRun => (None, 0, 0),
        };
        // Read now, because ksmd may have been scanning until here. The injector counts as a reaped child.
        let ksmd_ns = ksmd.and_then(|ksmd| ksmd.cpu_ns().ok()).map(|ns| ns.saturating_sub(base.ksmd_ns));
        Ended {
            restored,
            now_ns: elapsed_ns(began),
            ksm: ksm.counters().ok().map(|counters| counters.view(false, false)),
            cost: ksmd_ns.map(|ksmd_ns| Cost {
                pagefold_ns: own_and_children_cpu_ns() + elsewhere_ns,
                injector_ns,
                ksmd_ns,
            }),
        }
    }

    fn clocks(&mut self) -> Cost {
        let (uncounted_ns, injector_ns) = match &self.actuator {
            Actuator::Act { injector, .. } => (injector.cpu_ns(), injector.total_cpu_ns()),
            Actuator::DryRun => (0, 0),
        };
        // ksmd doesn't end: if we can't read its clock, the last value stands.
        if let Some(ns) = self.ksmd.as_ref().and_then(|ksmd| ksmd.cpu_ns().ok()) {
            self.ksmd_ns = ns;
        }
        Cost { pagefold_ns: own_and_children_cpu_ns() + uncounted_ns, injector_ns, ksmd_ns: self.ksmd_ns }
    }

    /// Starts the injector again if it has died.
    fn tend_injector(&mut self) -> Result<(), LiveError> {
        if let Actuator::Act { injector, restarts, .. } = &mut self.actuator {
            let now = injector.tend().map_err(LiveError::Injector)?;
            if std::mem::replace(restarts, now) != now {
                self.events.push(Event::InjectorRestarted { pid: injector.pid() });
            }
        }
        Ok(())
    }

    /// Groups runs by region, leaving out processes whose reads don't return.
    fn pieces<'a>(&'a self, runs: &'a [PageRun]) -> impl Iterator<Item = (RegionRuns, &'a Target)> {
        runs.chunk_by(|a, b| a.region == b.region).filter_map(|same_region| {
            let region = same_region[0].region;
            let target = self.targets.get(self.region_pids.get(&region)?).filter(|target| target.may_be_read())?;
            let runs = same_region.iter().map(|run| (run.first, run.pages)).collect();
            Some((RegionRuns { region, process: target.process.clone(), runs }, target))
        })
    }

    /// The processes that may have merged zeros, if there are any. A mapping whose pages are all merged zeros holds no
    /// memory that we could judge, so it isn't among the regions.
    fn may_have_zeros(&self) -> Vec<CountedProcess> {
        let mut processes = Vec::new();
        if self.zeros == Pages(0) {
            return processes;
        }
        for target in self.targets.values().filter(|target| target.exclusion.is_none() && target.may_be_read()) {
            let process = target.process.clone();
            processes.push(CountedProcess { owner: target.owner, lineage: target.lineage(), process });
        }
        processes
    }

    fn stand_down(&mut self, why: String) {
        if let Actuator::Act { stood_down, .. } = &mut self.actuator {
            if !*stood_down {
                *stood_down = true;
                self.events.push(Event::StoodDown { why });
            }
        }
    }

    /// Whether we drive KSM, and whether ksmd is still carrying out our last order.
    fn check_lease(&mut self) -> (bool, bool) {
        let Actuator::Act { lease, controller, stood_down, .. } = &self.actuator else { return (false, false) };
        if *stood_down {
            return (false, false);
        }
        let status = controller.status();
        let why = match lease.check() {
            Ok(()) => status.stood_down,
            // We order nothing more after an error from the state file or sysfs either.
            Err(error @ (KnobError::Overridden(_) | KnobError::Ksm(_) | KnobError::State(_) | KnobError::Ended)) => {
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
        self.refresh(now_ns)?;
        let (ours, busy) = self.check_lease();
        let mut ksm = self.ksm.counters()?.view(ours, busy);
        if now_ns >= self.next_memory_ns {
            self.next_memory_ns = now_ns + MEMORY_NS;
            self.memory = self.monitor.read()?;
            if ksm.shared > Pages(0) {
                // The counts must not decrease: the next ones would look like a burst of copies.
                self.vm_events = self.event_counter.read().unwrap_or(self.vm_events);
            }
        }
        self.zeros = ksm.zero;
        (ksm.broken, ksm.splits) = (self.vm_events.copies, self.vm_events.splits);
        let clocks = self.clocks();
        let cost = Cost { ksmd_ns: clocks.ksmd_ns.saturating_sub(self.base.ksmd_ns), ..clocks };
        self.placing.refresh(now_ns, &self.targets, self.domains.names());
        self.limits.refresh(now_ns, &self.targets);
        Ok(Snapshot {
            now_ns,
            regions: self.views.clone(),
            ksm,
            mechanism: self.mechanism(),
            shows_frames: true,
            hashes_lines: self.requesting.device.as_ref().is_some_and(|device| device.hashes()),
            memory: self.memory,
            cpu_pressure: self.limits.cpu_pressure(),
            limits: self.limits.views(),
            groups: self.groups.clone(),
            foreign_marks: self.has_foreign_marks(),
            cost,
            nodes: self.placing.nodes.clone(),
            owners: self.placing.owners.clone(),
        })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, LiveError> {
        let before_ns = own_cpu_ns();
        let by_marks = self.mechanism() == Mechanism::Ksmd;
        let how = |piece: RegionRuns, target: &Target| {
            let region = piece.region;
            let stretch = target.regions.iter().find(|tracked| tracked.key == region).map(|tracked| &tracked.stretch);
            let huge = stretch.is_some_and(|stretch| stretch.huge);
            let unmarked = by_marks && stretch.is_some_and(|stretch| stretch.marked == Pages(0));
            let activity = plan.activity.contains(&region);
            let contents = if plan.forked.contains(&region) { Contents::All } else { Contents::Merged };
            (piece, ReadHow { huge, contents, activity, unmarked })
        };
        let digesting = match (plan.lines, &self.requesting.device) {
            (Some(lines), Some(device)) => {
                let digester = LineDigester::new(plan.digest_seed, lines);
                Digesting::InPlace(device.clone(), digester, plan.colliding.clone())
            }
            _ => Digesting::Read(Digester::new(plan.digest_seed)),
        };
        let work = SamplingJob {
            reads: self.pieces(&plan.runs).map(|(piece, target)| how(piece, target)).collect(),
            looks: self.pieces(&plan.inspect).map(|(piece, _)| piece).collect(),
            charged_to: plan.charged_to.and_then(|key| self.limits.name(key)).map(Path::to_owned),
            count: plan.count.then(|| self.may_have_zeros()),
            digesting,
            topology: self.placing.topology.clone(),
        };
        let mut samples = Samples::default();
        let reader = self.reader.take().unwrap_or_default();
        match sample(reader, work) {
            Ok(Sampled { reader, pages, merged, counted, failed }) => {
                self.reader = Some(reader);
                (samples.pages, samples.merged) = (pages, merged);
                samples.counted = counted;
                for (pid, error) in failed {
                    // The pages read before are valid. The next refresh finds processes that have ended.
                    if !matches!(error, ReadError::Vanished { .. }) {
                        self.report_left_alone(pid, error.to_string());
                    }
                }
            }
            Err((pid, pending)) => {
                if let Some(target) = self.targets.get_mut(&pid) {
                    target.set_late(pending);
                    self.next_refresh_ns = 0;
                }
            }
        }
        samples.cpu_ns = own_cpu_ns() - before_ns;
        Ok(samples)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, LiveError> {
        let mut outcome = std::mem::take(&mut self.withdrawn);
        if matches!(self.actuator, Actuator::Act { stood_down: true, .. }) {
            let busy = |&change| ChangeResult { change, marking: Marking::Busy };
            outcome.marked = actions.mark.iter().map(busy).collect();
            outcome.unmarked.extend(actions.unmark.iter().map(busy));
            outcome.merges.extend(actions.merge.iter().map(requesting::untried));
            return Ok(outcome);
        }
        outcome.marked = self.change(&actions.mark, true, actions.stop, &mut outcome);
        let unmarked = self.change(&actions.unmark, false, actions.stop, &mut outcome);
        outcome.unmarked.extend(unmarked);
        self.collapse(&mut outcome);
        self.merge(&actions.merge, &mut outcome);
        if let Actuator::Act { controller, .. } = &self.actuator {
            // Merging on request leaves KSM's knobs alone.
            if self.mechanism() == Mechanism::Ksmd {
                controller.order(actions.scan);
            }
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
            if now_ns >= end_ns || self.refresh(now_ns)? {
                break;
            }
            sleep_until_signal(self.next_refresh_ns.min(end_ns).saturating_sub(now_ns));
        }
        Ok(())
    }
}

/// A scope with users by number. If a user doesn't exist, we report it when we resolve the scope.
fn by_number(mut scope: ScopeSpec) -> ScopeSpec {
    for selector in &mut scope.0 {
        if let Selector::User(user) = selector {
            if let Ok(uid) = user_id(user) {
                *user = uid.to_string();
            }
        }
    }
    scope
}

fn elapsed_ns(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Raises the soft limit of open files to the hard limit: we hold three files of each target open, four if we merge its
/// pages on request, and three more for the targets read most recently. The default of 1024 exists for programs that
/// use select(2).
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Sleeps until this thread handles a signal. A signal between the check of the stop flag and the sleep doesn't end the
/// sleep, so we limit it to the time between two refreshes.
fn sleep_until_signal(ns: u64) {
    // A limit of some seconds always fits.
    if let Ok(time) = Duration::from_nanos(ns.min(REFRESH_NS)).try_into() {
        let _ = nanosleep(&time);
    }
}
