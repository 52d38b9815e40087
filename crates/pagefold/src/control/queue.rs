//! The queue between the control socket's threads and the main loop, which serves the queue between two cycles.
//!
//! The main loop only hands over facts. The thread that sent the request makes the answer from these facts.

use super::orders::Answer;
use super::protocol::{ControlState, Request, SCHEMA};
use crate::commands::status::groups::reason_of;
use crate::config::ownership::shown;
use crate::config::scope::ScopeArgs;
use crate::events::{Event, Events};
use crate::output::placement::PlacementView;
use crate::output::xen::XenView;
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::{DomainKey, LimitKey, OwnerKey};
use pagefold_engine::state::State;
use pagefold_host::live::LiveHost;
use pagefold_host::os::wake::Sleeper;
use pagefold_host::scope::Selector;
use pagefold_host::scope::kept_out::{Entry, KeptOut, Verdict};
use pagefold_host::targets::{PendingUnmark, Target};
use pagefold_procmem::os::cpu::thread_cpu_ns;
use pagefold_text::exit::{self, Exit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// We wake the main loop at this interval until it answers, since it may begin to wait just after we've woken it.
const WAKE_INTERVAL: Duration = Duration::from_millis(50);
/// How long the main loop may take to answer.
const LIMIT: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub struct Facts {
    pub state: State,
    pub injector_restarts: u32,
    pub targets: Vec<TargetFacts>,
    /// How many processes in scope aren't targets, because there are too many.
    pub turned_away: usize,
    /// The names of the trust domains, by key.
    pub domains: Vec<String>,
    /// The domain that we merge, if we merge only one.
    pub merged_domain: Option<String>,
    /// The selectors of processes that users have excluded, and of processes that they've included again although an
    /// earlier selector excludes them.
    pub kept_out: KeptOut,
    /// The cgroups whose limits leave too little headroom for copies of all merged pages, or none to merge more.
    pub limited: BTreeMap<LimitKey, String>,
    pub run: RunFacts,
    /// Xen's own figures, if the targets are Xen guests. Then pids are guest numbers.
    pub xen: Option<XenView>,
    /// The main loop's CPU time for gathering these facts, nanoseconds.
    pub cost_ns: u64,
}

#[derive(Clone, Debug, Default)]
pub struct TargetFacts {
    /// The target's key in the engine's state.
    pub owner: OwnerKey,
    pub pid: i32,
    /// When the process started, which tells it from a later process with the same pid.
    pub start_time_ticks: u64,
    pub domain: DomainKey,
    pub name: String,
    /// The workload of the process, as `top` shows it.
    pub workload: Option<String>,
    /// The selector that the process matches: an index into [`RunFacts::selectors`].
    pub selected_by: Option<usize>,
    /// Why we leave the target alone, if we do.
    pub left_alone: Option<String>,
    /// The same reason as a single word, from a small set.
    pub reason: Option<&'static str>,
    pub to_unmark: Option<ToUnmark>,
    /// Why we last failed to mark or unmark memory of the process.
    pub problem: Option<String>,
    /// A sentence for each rule that applies to the target, or seems to but doesn't.
    pub notes: Vec<String>,
}

/// Marked memory that we must unmark, because it was excluded later, but couldn't unmark yet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToUnmark {
    pub bytes: u64,
    pub reason: String,
    pub problem: Option<String>,
}

impl From<&PendingUnmark> for ToUnmark {
    fn from(pending: &PendingUnmark) -> Self {
        Self {
            bytes: pending.left.0,
            reason: pending.reason.to_string(),
            problem: pending.problem.as_ref().map(ToString::to_string),
        }
    }
}

/// A selector of processes that a user has excluded, or has included again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptOutRow {
    pub selector: String,
    /// The user who excluded the processes. `None` if a user has included them again.
    pub uid: Option<u32>,
}

impl From<&Entry> for KeptOutRow {
    fn from(entry: &Entry) -> Self {
        let uid = match entry.verdict {
            Verdict::Out { by } => Some(by),
            Verdict::In => None,
        };
        Self { selector: entry.selector.to_string(), uid }
    }
}

/// The run's arguments, and whether it still controls KSM.
#[derive(Clone, Debug)]
pub struct RunFacts {
    pub scope: String,
    pub selectors: Arc<[Selector]>,
    /// Whether the run marks nothing, and only finds out which memory it would mark.
    pub dry_run: bool,
    /// The file to which the run writes its history.
    pub history: Option<PathBuf>,
    pub config: Config,
    /// Why the run gave up KSM, if it did.
    pub stood_down: Option<String>,
    /// Lines missing from the audit log.
    pub audit_lost: u64,
    /// The latest events, the newest last.
    pub events: Vec<Event>,
}

impl RunFacts {
    /// The facts at the beginning of a run.
    pub fn new(dry_run: bool, scope: &ScopeArgs, config: &Config) -> Self {
        let mut facts = Self {
            scope: String::new(),
            selectors: Arc::default(),
            dry_run,
            history: None,
            config: config.clone(),
            stood_down: None,
            audit_lost: 0,
            events: Vec::new(),
        };
        facts.set_scope(scope);
        facts
    }

    pub fn set_scope(&mut self, scope: &ScopeArgs) {
        self.scope = scope.to_string();
        self.selectors = scope.spec().0.into();
    }
}

impl TargetFacts {
    fn of(target: &Target, problem: Option<&String>) -> Self {
        let mut notes = target.notes.clone();
        if target.on_probation {
            notes.push(YOUNG.to_owned());
        }
        Self {
            owner: target.owner,
            pid: target.pid(),
            start_time_ticks: target.info.process.start_time_ticks(),
            domain: target.domain,
            name: target.info.name.clone(),
            workload: target.info.workload().map(|workload| workload.to_string()),
            selected_by: target.info.selected_by,
            left_alone: target.exclusion.as_ref().map(ToString::to_string),
            reason: target.exclusion.as_ref().map(reason_of),
            to_unmark: target.pending.as_ref().map(ToUnmark::from),
            problem: problem.cloned(),
            notes,
        }
    }
}

/// Why we haven't examined a process yet, for `explain`.
const YOUNG: &str = "Not read yet: similar processes ended too soon for merging to pay.";

impl Facts {
    pub fn of(engine: &Engine, host: &LiveHost, run: RunFacts) -> Self {
        let state = engine.state();
        let mut limited = BTreeMap::new();
        let tight = state.reserve.limits.iter().map(|limit| limit.key);
        for key in tight.chain(state.reserve.full.iter().copied()) {
            if let Some(dir) = host.limited_cgroup(key) {
                limited.insert(key, shown(dir));
            }
        }
        Self {
            state,
            injector_restarts: host.injector_restarts(),
            targets: host.targets().map(|target| TargetFacts::of(target, host.reported(target.pid()))).collect(),
            turned_away: host.turned_away(),
            domains: host.domains().to_vec(),
            merged_domain: host.merged_domain().cloned(),
            kept_out: host.kept_out().clone(),
            limited,
            run,
            xen: None,
            cost_ns: 0,
        }
    }

    /// Where merged pages are, on a machine with several memory nodes.
    pub fn places(&self) -> Option<PlacementView> {
        Some(PlacementView::of(self.state.placement.as_ref()?, self.state.moves, |owner| {
            let target = self.targets.iter().find(|target| target.owner == owner)?;
            Some((target.pid, target.name.clone()))
        }))
    }

    /// The amount of marked memory that must be unmarked but couldn't be yet.
    pub fn to_unmark_bytes(&self) -> u64 {
        let mut bytes = 0;
        for target in &self.targets {
            if let Some(to_unmark) = &target.to_unmark {
                bytes += to_unmark.bytes;
            }
        }
        bytes
    }

    pub fn control_state(&self) -> ControlState {
        ControlState {
            schema: SCHEMA.to_owned(),
            pid: std::process::id(),
            governor: self.state.activity.governor,
            in_force: self.state.activity.in_force,
            allowed_share: self.state.activity.allowed_share.fraction(),
            paused: self.state.activity.paused,
        }
    }
}

/// A request that waits for the main loop.
#[derive(Debug)]
struct Pending {
    request: Request,
    reply: Sender<Arc<Facts>>,
}

/// A request about processes, which the main loop answers itself.
#[derive(Debug)]
pub struct Order {
    pub request: Request,
    /// The user who sent the request.
    pub uid: u32,
    pub reply: Sender<Result<Answer, Exit>>,
}

#[derive(Debug)]
enum Message {
    Request(Pending),
    Order(Order),
}

/// The threads' end of the queue: sends requests.
#[derive(Clone, Debug)]
pub struct RequestSender {
    messages: Sender<Message>,
    sleeper: Sleeper,
}

/// The main loop's end of the queue.
#[derive(Debug)]
pub struct RequestQueue {
    messages: Receiver<Message>,
    /// The signal that wakes the main loop sets this flag. The main loop doesn't wait while it's set.
    woken: Arc<AtomicBool>,
    /// Changes that were made since the last cycle began. We answer them after the next cycle.
    changes: Vec<Pending>,
    orders: Vec<Order>,
}

impl RequestQueue {
    /// A queue that the calling thread serves. [`pagefold_host::os::wake::SIGNAL`] must set `woken` and so end the
    /// thread's waits.
    pub fn new(woken: Arc<AtomicBool>) -> (Self, RequestSender) {
        let (sender, messages) = channel();
        (
            Self { messages, woken, changes: Vec::new(), orders: Vec::new() },
            RequestSender { messages: sender, sleeper: Sleeper::this_thread() },
        )
    }

    /// The orders that have come since the last call.
    pub fn take_orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// Applies and answers the requests since the last call. We answer a change one cycle later, so that the answer
    /// shows its effect; that cycle begins without a wait. We note the beginning or end of a pause as an event. Returns
    /// the governor if it has changed.
    pub fn serve(
        &mut self,
        engine: &mut Engine,
        run: &RunFacts,
        events: &mut Events,
        facts: impl FnOnce(&Engine, RunFacts) -> Facts,
    ) -> Option<Governor> {
        let mut chosen = None;
        let was_paused = engine.is_paused();
        // We clear the flag before we take requests, so a request that comes later sets it again.
        self.woken.store(false, Ordering::SeqCst);
        let mut ready = std::mem::take(&mut self.changes);
        for message in self.messages.try_iter() {
            let pending = match message {
                Message::Request(pending) => pending,
                Message::Order(order) => {
                    self.orders.push(order);
                    continue;
                }
            };
            match &pending.request {
                Request::Status | Request::Explain { .. } | Request::Workload(_) | Request::Guest { .. } => {
                    ready.push(pending);
                }
                Request::Governor { name } => {
                    // We checked the name when we parsed the request.
                    if let Ok(governor) = name.parse() {
                        engine.set_governor(governor);
                        chosen = Some(governor);
                    }
                    self.changes.push(pending);
                }
                Request::Pause | Request::Resume => {
                    engine.set_paused(pending.request == Request::Pause);
                    self.changes.push(pending);
                }
                // These requests only come as orders. If one came here, we'd drop it, and tell its sender that the
                // run is ending.
                Request::Unmerge(_) | Request::Include(_) | Request::Reload => {}
            }
        }
        if !self.changes.is_empty() {
            self.woken.store(true, Ordering::SeqCst);
        }
        if !ready.is_empty() {
            let before_ns = thread_cpu_ns();
            let mut facts = facts(engine, RunFacts { events: events.list(), ..run.clone() });
            facts.cost_ns = thread_cpu_ns() - before_ns;
            let facts = Arc::new(facts);
            for pending in ready {
                // The peer may have hung up.
                let _ = pending.reply.send(facts.clone());
            }
        }
        if engine.is_paused() != was_paused {
            events.note(if was_paused { "resume" } else { "pause" }, "by a request");
        }
        chosen
    }
}

impl RequestSender {
    /// Sends a request and waits until the main loop has served it.
    pub fn send(&self, request: Request) -> Result<Arc<Facts>, String> {
        let (reply, answer) = channel();
        self.ask(Message::Request(Pending { request, reply }), &answer, "start another one")
    }

    /// Sends a request about processes, and waits until the host has carried it out.
    pub fn order(&self, request: Request, uid: u32) -> Result<Answer, Exit> {
        let (reply, answer) = channel();
        let todo = "it may not have finished this request: run the command again";
        let answer = self.ask(Message::Order(Order { request, uid, reply }), &answer, todo);
        answer.unwrap_or_else(|why| Err(Exit::new(exit::FAILURE, why)))
    }

    /// Sends a message and waits for the answer. If the run is ending, the error advises the user to do `todo`.
    fn ask<T>(&self, message: Message, answer: &Receiver<T>, todo: &str) -> Result<T, String> {
        let ending = format!("the run is ending; {todo}");
        if self.messages.send(message).is_err() {
            return Err(ending);
        }
        let end = Instant::now() + LIMIT;
        loop {
            // This can't fail: the main loop's thread lives as long as the process.
            let _ = self.sleeper.wake();
            match answer.recv_timeout(WAKE_INTERVAL) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(ending),
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("the run has not answered within {} s; try again", LIMIT.as_secs()));
                }
            }
        }
    }
}
