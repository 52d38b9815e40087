//! The live machine behind the engine's [`Host`] interface.

mod actuator;
mod collapsing;
mod forks;
mod limits;
mod machine;
mod marking;
mod placing;
mod reading;
mod refresh;
mod requesting;
mod turns;
mod unmerging;
mod withdrawing;
mod yielding;

pub use placing::Policies;
pub use reading::{Content, Digest, PageContent, Progress};
pub use unmerging::{RequestRefusal, Unmerging};

use self::actuator::{Actuator, InjectorCost, KsmControl};
use self::forks::Forks;
use self::limits::CgroupLimits;
use self::machine::{CostMeter, MachineMonitor};
use self::placing::Placing;
use self::refresh::{Discovery, RegionList, Schedule};
use self::requesting::Requesting;
use self::withdrawing::Withdrawing;
use crate::judge::{ProgramHistory, ScopeRules};
use crate::marked::{self, MarkedPrograms};
use crate::os::raise_descriptor_limit;
use crate::outsiders::Member;
use crate::sampling::{CountedProcess, HashMode, RegionRead, SamplingJob, sample};
use crate::scope::deny_list::DenyList;
use crate::scope::domain::{DEFAULT, DomainRules};
use crate::scope::kept_out::KeptOut;
use crate::scope::new_processes::NewProcesses;
use crate::scope::rule::Rule;
use crate::scope::{ScopeError, ScopeSpec, Selector, user_id};
use crate::targets::Target;
use pagefold_engine::hash::{Digester, LineDigester};
use pagefold_engine::host::{
    Actions, ChangeResult, Cost, Host, KsmView, Mechanism, MergedSample, Outcome, PageRun, SamplePlan, Samples,
    ScanOrder, Snapshot, Span,
};
use pagefold_engine::keys::{KeyCounter, LimitKey, RegionKey};
use pagefold_engine::units::{Pages, whole};
use pagefold_inject::{InjectError, Injector};
use pagefold_ksm::RestoreOutcome;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::KsmLease;
use pagefold_ksm::request::RequestDevice;
use pagefold_ksm::{Ksm, KsmError};
use pagefold_procmem::Roots;
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::os::pressure::PressureError;
use pagefold_procmem::process::ReadError;
use rustix::thread::nanosleep;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// How long we wait for the injector's answer: longer than it takes to stop a thread that a CPU quota is throttling.
const INJECTOR_LIMIT: Duration = Duration::from_millis(400);

/// An error that ends the run.
#[derive(Debug, Error)]
pub enum LiveError {
    #[error(transparent)]
    Scope(#[from] ScopeError),
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// We can't read the state of the machine's memory.
    #[error(transparent)]
    Memory(#[from] PressureError),
    #[error(transparent)]
    Ksmd(ReadError),
    /// The injector has ended and we can't start it again.
    #[error(transparent)]
    Injector(InjectError),
    /// We can't read or write the record of marked programs.
    #[error("{}: {source}", path.display())]
    Marked { path: PathBuf, source: std::io::Error },
    /// We can't start the control thread.
    #[error("cannot start the KSM control thread: {0}")]
    Controller(std::io::Error),
}

/// Something that happened during the run. Results of actions are in [`Outcome`] instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// We leave a process alone.
    LeftAlone { pid: i32, name: String, why: String },
    /// We tried to unmark memory that's excluded now, or whose process is in another trust domain.
    Withdrawn {
        pid: i32,
        /// The span that we tried to unmark, and how many of its pages we did unmark.
        result: ChangeResult,
        reason: String,
    },
    /// A process's owner has opted out, but the administrator has overridden that, so we don't leave the process alone.
    Overridden {
        pid: i32,
        /// How the process's owner has opted out.
        opt_out: String,
    },
    /// The injector had ended, and we started it again.
    InjectorRestarted { pid: u32 },
    /// We've stopped driving KSM, because somebody else does, or after an error.
    StoodDown { why: String },
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

#[derive(Debug)]
pub struct LiveHost {
    /// The rules name users by number, because we look names up only once.
    rules: ScopeRules,
    history: ProgramHistory,
    targets: BTreeMap<i32, Target>,
    discovery: Discovery,
    forks: Forks,
    schedule: Schedule,
    regions: RegionList,
    machine: MachineMonitor,
    cost: CostMeter,
    /// `None` in a dry run, which changes nothing.
    actuator: Option<Actuator>,
    withdrawing: Withdrawing,
    limits: CgroupLimits,
    placing: Placing,
    requesting: Requesting,
    /// When we next collapse huge pages, we begin with the process that has this pid or the next higher one.
    next_collapse: i32,
    /// `None` after a read that didn't return, whose thread we've abandoned: the next read makes a new reader.
    reader: Option<PageReader>,
    stop: Arc<AtomicBool>,
    events: Vec<Event>,
    /// For each pid, the last reason that we reported for leaving the process alone.
    reported: BTreeMap<i32, String>,
}

/// The state after the end of a run.
#[derive(Debug)]
pub struct Ended {
    /// Result of restoring KSM; `None` in a dry run, which doesn't change it.
    pub restored: Option<RestoreOutcome>,
    /// When the run ended, on the clock of the host's snapshots.
    pub now_ns: u64,
    /// KSM's state, if readable.
    pub ksm: Option<KsmView>,
    /// CPU time of the run, if ksmd's is readable.
    pub cost: Option<Cost>,
}

impl LiveHost {
    /// Makes a host for the processes of a scope. A signal handler sets `stop` to cut waits short. The signal must
    /// reach the thread that waits, which should be the main thread: the kernel prefers it for signals to a process. If
    /// the signal reaches another thread, we notice `stop` at the next refresh.
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
        let mut rules = ScopeRules::new(by_number(scope), roots, deny);
        rules.merged = Some(rules.domains.assign(DEFAULT));
        let mut history = ProgramHistory::default();
        let actuator = match mode {
            HostMode::Act { lease, injector } => {
                let path = lease.state_path().with_file_name(marked::FILE_NAME);
                let opened = MarkedPrograms::open(path.clone(), |domain| rules.domains.assign(domain));
                history.marked = opened.map_err(|source| LiveError::Marked { path, source })?;
                Some(Actuator::start(lease, injector)?)
            }
            HostMode::DryRun => None,
        };
        Ok(Self {
            targets: BTreeMap::new(),
            discovery: Discovery {
                has_begun: false,
                is_complete: false,
                has_listed_all: false,
                new_processes: NewProcesses::new(&rules.roots),
                owner_keys: KeyCounter::default(),
            },
            forks: Forks::default(),
            schedule: Schedule::new(history.marked.is_empty()),
            history,
            regions: RegionList::default(),
            machine: MachineMonitor::open(ksm, &rules.roots.proc)?,
            cost: CostMeter::start(ksmd),
            actuator,
            withdrawing: Withdrawing::default(),
            limits: CgroupLimits::default(),
            placing: Placing::new(),
            requesting: Requesting::default(),
            next_collapse: 0,
            reader: Some(PageReader::new()),
            stop,
            events: Vec::new(),
            reported: BTreeMap::new(),
            rules,
        })
    }

    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.values()
    }

    pub fn target(&self, pid: i32) -> Option<&Target> {
        self.targets.get(&pid)
    }

    /// The process of a region, as of the last refresh.
    pub fn target_of(&self, region: RegionKey) -> Option<&Target> {
        self.targets.get(self.regions.pids.get(&region)?)
    }

    /// Notes how many merged pages each process has, less its part of these pages by Pss.
    fn note_shared(&mut self, merged: &[MergedSample]) {
        let mut shared: BTreeMap<i32, f64> = BTreeMap::new();
        for sample in merged {
            if let Some(&pid) = self.regions.pids.get(&sample.region) {
                *shared.entry(pid).or_default() += 1.0 - 1.0 / f64::from(sample.mappers.max(1));
            }
        }
        for (pid, target) in &mut self.targets {
            target.note_shared(whole(shared.get(pid).copied().unwrap_or_default()));
        }
    }

    /// The last reason that we reported for leaving a process alone.
    pub fn reported(&self, pid: i32) -> Option<&String> {
        self.reported.get(&pid)
    }

    /// How many times we've restarted the injector.
    pub fn injector_restarts(&self) -> u32 {
        match &self.actuator {
            Some(actuator) => actuator.restarts,
            None => 0,
        }
    }

    /// The directory of the cgroup to which a limit belongs.
    pub fn limited_cgroup(&self, key: LimitKey) -> Option<&Path> {
        self.limits.name(key)
    }

    pub fn is_dry_run(&self) -> bool {
        self.actuator.is_none()
    }

    /// Memory that KSM saves on the whole machine; 0 if we can't read its counters.
    pub fn saved_bytes(&self) -> u64 {
        self.machine.ksm_view().unwrap_or_default().saved().bytes().0
    }

    /// The processes that an administrator has asked us to keep out of merging.
    pub fn kept_out(&self) -> &KeptOut {
        &self.rules.kept_out
    }

    /// Sets the processes that an administrator has asked us to keep out of merging. Call it before the first round.
    pub fn set_kept_out(&mut self, kept_out: KeptOut) {
        self.rules.kept_out = kept_out;
    }

    /// Replaces the scope. We remove the marks of processes that leave it.
    pub fn set_scope(&mut self, scope: ScopeSpec) {
        self.rules.scope = by_number(scope);
        self.discovery.new_processes.examine_all();
        self.judge_again();
    }

    /// Names of the trust domains seen so far, by key.
    pub fn domains(&self) -> &[String] {
        self.rules.domains.names()
    }

    /// How many processes we didn't take into the run: one user or cgroup has too many, or too many match the scope by
    /// name only.
    pub fn turned_away(&self) -> usize {
        self.discovery.new_processes.turned_away()
    }

    /// The name of the trust domain that we merge, if we merge only one.
    pub fn merged_domain(&self) -> Option<&String> {
        self.rules.domains.name(self.rules.merged?)
    }

    /// Sets the rules that assign processes to trust domains. Call it before the first round.
    pub fn set_domains(&mut self, rules: DomainRules) {
        self.rules.domain_rules = rules;
    }

    /// Makes the host read the memory of all trust domains, which only a host that merges nothing may do. Call it
    /// before the first round.
    pub fn read_all_domains(&mut self) {
        self.rules.merged = None;
    }

    /// Merges the memory of this trust domain only, because ksmd would merge across domains. We unmark memory of other
    /// domains before we mark anything else.
    pub fn merge_only(&mut self, domain: &str) {
        self.rules.merged = Some(self.rules.domains.assign(domain));
        self.judge_again();
    }

    /// Sets the rules that assign processes to groups with limits of their own.
    pub fn set_groups(&mut self, rules: Vec<Rule>) {
        self.rules.groups = rules;
        self.judge_again();
    }

    /// Sets the policies for placing merged pages on machines with several NUMA nodes.
    pub fn set_policies(&mut self, policies: Policies) {
        self.placing.policies = policies;
    }

    /// Makes the host merge on request, through this device, instead of with ksmd. Call it before the first round.
    pub fn merge_by(&mut self, device: RequestDevice) {
        self.requesting.device = Some(Arc::new(device));
        self.rules.merged = None;
        self.history.mechanism = Mechanism::Request;
    }

    pub fn mechanism(&self) -> Mechanism {
        if self.requesting.device.is_some() { Mechanism::Request } else { Mechanism::Ksmd }
    }

    /// Sets the time between two refreshes of the targets, nanoseconds. We clamp it to 10 to 250 ms. If there are many
    /// targets, we refresh them less often.
    pub fn set_refresh_interval(&mut self, ns: u64) {
        self.schedule.interval_ns = ns.clamp(refresh::INTERVAL_MIN_NS, refresh::INTERVAL_NS);
    }

    /// Replaces the deny list. We remove the marks of programs that it newly denies.
    pub fn set_deny(&mut self, deny: DenyList) {
        self.rules.deny = deny;
        for target in self.targets.values_mut() {
            target.forget_denial();
        }
        self.schedule.next_ns = 0;
    }

    fn judge_again(&mut self) {
        for target in self.targets.values_mut() {
            target.judge_again();
        }
        self.schedule.next_ns = 0;
    }

    /// Returns the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Nanoseconds since the host was created, the `now_ns` of its snapshots.
    pub fn now_ns(&self) -> u64 {
        self.cost.now_ns()
    }

    /// Ends the run: stops ksmd, ends the injector and restores KSM. Merged pages stay merged.
    pub fn finish(self) -> Ended {
        let Self { actuator, mut cost, machine, .. } = self;
        let mut injector = InjectorCost::default();
        let mut restored = None;
        if let Some(actuator) = actuator {
            injector = actuator.final_injector_cost();
            restored = Some(actuator.finish());
        }
        // We read ksmd's time only now, because ksmd may have been scanning until here.
        let is_ksmd_known = cost.ksmd_ns().is_some();
        Ended {
            restored,
            now_ns: cost.now_ns(),
            ksm: machine.ksm_view(),
            cost: is_ksmd_known.then(|| cost.read(injector)),
        }
    }

    /// Groups runs of pages by region. Leaves out processes that we mustn't read.
    fn region_reads(&self, runs: &[PageRun], plan: &SamplePlan, may_be_read: fn(&Target) -> bool) -> Vec<RegionRead> {
        let mut reads = Vec::new();
        for same_region in runs.chunk_by(|a, b| a.region == b.region) {
            let region = same_region[0].region;
            let target = match self.target_of(region) {
                Some(target) if may_be_read(target) => target,
                _ => continue,
            };
            let mut how = ReadHow { contents: Contents::Merged, ..ReadHow::default() };
            let mut family = Vec::new();
            if let Some(mappings) = plan.forked.get(&region) {
                how.contents = Contents::All;
                family = self.members(mappings);
            }
            how.activity = plan.activity.contains(&region);
            how.image = target.image();
            if let Some(tracked) = target.regions.iter().find(|tracked| tracked.key == region) {
                how.huge = tracked.stretch.huge;
                how.unmarked = tracked.stretch.marked == Pages(0);
            }
            let runs = same_region.iter().map(|run| (run.first, run.pages)).collect();
            reads.push(RegionRead { region, family, process: target.info.process.clone(), runs, how });
        }
        reads
    }

    /// The mappings of a family, without those of processes that we mustn't read.
    fn members(&self, mappings: &[Span]) -> Vec<Member> {
        let mut members = Vec::new();
        for mapping in mappings {
            if let Some(target) = self.target_of(mapping.region).filter(|target| target.may_be_read()) {
                let process = target.info.process.clone();
                members.push(Member { process, first: mapping.first, end: mapping.end() });
            }
        }
        members
    }

    /// The processes that may have pages of zeros merged into the kernel's zero page; none if no process on the machine
    /// has. Regions don't tell us, because a mapping that has only such pages has no resident memory to judge.
    fn may_have_zeros(&self) -> Vec<CountedProcess> {
        let mut processes = Vec::new();
        if self.machine.zeros == Pages(0) {
            return processes;
        }
        for target in self.targets.values() {
            if target.may_be_counted() {
                let process = target.info.process.clone();
                processes.push(CountedProcess { owner: target.owner, lineage: target.lineage(), process });
            }
        }
        processes
    }

    /// Whether we read the pages of a plan to digest them, or have the kernel hash them in place.
    fn hash_mode(&self, plan: &SamplePlan) -> HashMode {
        match (plan.lines, &self.requesting.device) {
            (Some(lines), Some(device)) => HashMode::InPlace {
                device: device.clone(),
                digester: LineDigester::new(plan.digest_seed, lines),
                colliding: plan.colliding.clone(),
            },
            _ => HashMode::Read(Digester::new(plan.digest_seed)),
        }
    }

    /// The job that reads the pages of a plan.
    fn sampling_job(&self, plan: &SamplePlan) -> SamplingJob {
        let may_be_looked_at = if plan.count { Target::may_be_counted } else { Target::may_be_read };
        SamplingJob {
            reads: self.region_reads(&plan.runs, plan, Target::may_be_read),
            looks: self.region_reads(&plan.inspect, plan, may_be_looked_at),
            charged_to: plan.charged_to.and_then(|key| Some(self.limits.name(key)?.to_owned())),
            count: plan.count.then(|| self.may_have_zeros()),
            hash_mode: self.hash_mode(plan),
            takes_averages: self.requesting.device.is_none(),
            topology: self.placing.topology.clone(),
        }
    }

    fn stand_down(&mut self, why: String) {
        if let Some(actuator) = &mut self.actuator {
            if !std::mem::replace(&mut actuator.has_stood_down, true) {
                self.events.push(Event::StoodDown { why });
            }
        }
    }

    fn check_lease(&mut self) -> KsmControl {
        let Some(actuator) = &self.actuator else { return KsmControl::default() };
        actuator.check_lease().unwrap_or_else(|why| {
            self.stand_down(why);
            KsmControl::default()
        })
    }
}

impl Host for LiveHost {
    type Error = LiveError;

    fn observe(&mut self) -> Result<Snapshot, LiveError> {
        let now_ns = self.now_ns();
        self.refresh(now_ns)?;
        let control = self.check_lease();
        let ksm = self.machine.read(now_ns, control)?;
        let injector = self.actuator.as_ref().map(Actuator::injector_cost).unwrap_or_default();
        let cost = self.cost.read(injector);
        self.placing.refresh(now_ns, &self.targets, self.rules.domains.names());
        self.limits.refresh(now_ns, &self.targets, self.mechanism() == Mechanism::Ksmd);
        let mut memory = self.machine.memory;
        memory.swap_free = self.limits.swap_left().map_or(memory.swap_free, |left| left.min(memory.swap_free));
        Ok(Snapshot {
            now_ns,
            regions: self.regions.views.clone(),
            is_starting: !self.discovery.has_listed_all,
            ksm,
            mechanism: self.mechanism(),
            shows_frames: self.reader.as_ref().is_none_or(PageReader::sees_frames),
            shows_lone: shows_merged(),
            hashes_lines: self.requesting.device.as_ref().is_some_and(|device| device.hashes()),
            memory,
            cpu_pressure: self.limits.cpu_pressure(),
            limits: self.limits.views(),
            groups: self.regions.groups.clone(),
            held: self.regions.held.clone(),
            foreign_marks: self.has_foreign_marks(),
            cost,
            nodes: self.placing.nodes.clone(),
            owners: self.placing.owners.clone(),
        })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, LiveError> {
        let before_ns = own_cpu_ns();
        let job = self.sampling_job(plan);
        let unread = plan.runs.iter().map(|run| run.region).collect();
        let mut samples = Samples { unread, ..Samples::default() };
        let reader = self.reader.take().unwrap_or_default();
        match sample(reader, job) {
            Ok(read) => {
                self.reader = Some(read.reader);
                samples.pages = read.pages;
                samples.unread.retain(|region| !read.read.contains(region));
                samples.merged = read.merged;
                samples.counted = read.counted;
                if samples.counted.is_some() {
                    self.note_shared(&samples.merged);
                }
                for (pid, error) in read.failed {
                    // The pages that we read before the error are valid. The next refresh finds processes that have
                    // ended.
                    if !matches!(error, ReadError::Vanished { .. }) {
                        self.report_left_alone(pid, error.to_string());
                    }
                }
            }
            Err((pid, pending)) => {
                if let Some(target) = self.targets.get_mut(&pid) {
                    target.set_timed_out(pending);
                    self.schedule.next_ns = 0;
                }
            }
        }
        samples.cpu_ns = own_cpu_ns() - before_ns;
        Ok(samples)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, LiveError> {
        let mut outcome = std::mem::take(&mut self.withdrawing.outcome);
        if matches!(&self.actuator, Some(Actuator { has_stood_down: true, .. })) {
            outcome.marked = marking::all_busy(&actions.mark);
            outcome.unmarked.extend(marking::all_busy(&actions.unmark));
            outcome.merges.extend(actions.merge.iter().map(requesting::untried));
            return Ok(outcome);
        }
        outcome.marked = self.change(&actions.mark, true, actions.stop, &mut outcome);
        let unmarked = self.change(&actions.unmark, false, actions.stop, &mut outcome);
        outcome.unmarked.extend(unmarked);
        self.collapse(&mut outcome);
        self.merge(&actions.merge, &mut outcome);
        if let Some(actuator) = &self.actuator {
            // Merging on request leaves KSM's knobs alone.
            if self.mechanism() == Mechanism::Ksmd {
                actuator.controller.order(actions.scan);
                if matches!(actions.scan, ScanOrder::Kick { .. } | ScanOrder::Pace { .. }) {
                    self.limits.note_merging(self.cost.now_ns());
                }
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
            sleep_until_signal(self.schedule.next_ns.min(end_ns).saturating_sub(now_ns));
        }
        Ok(())
    }
}

/// Replaces user names in a scope by numbers. If a user doesn't exist, we report it when we resolve the scope.
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

/// Sleeps until this thread handles a signal. A signal between the check of the stop flag and the sleep doesn't end the
/// sleep, so we sleep no longer than the time between two refreshes.
fn sleep_until_signal(ns: u64) {
    // The conversion fails only for times of many years.
    if let Ok(time) = Duration::from_nanos(ns.min(refresh::INTERVAL_NS)).try_into() {
        let _ = nanosleep(&time);
    }
}
