//! The daemon: one loop that works on any machine behind the trait [`Backend`].
//!
//! Three types enforce the order in which a run starts. Before anything opens a file, [`Start`] installs the signal
//! handlers and takes the sockets that the service manager has passed. While we still have all rights, it opens the
//! run's files ([`Outputs`]). After the caller has given up rights, [`Daemon`] starts threads and the control socket.

use crate::audit::{Change, Changes, Entry};
use crate::backend::Backend;
use crate::background::Background;
use crate::commands::run::progress::{LeftAlone, Progress};
use crate::commands::run::reload::ActiveSettings;
use crate::commands::run::room::RoomReports;
use crate::commands::run::summary::{self, Summary};
use crate::config::args::RunArgs;
use crate::config::scope::ScopeArgs;
use crate::config::settings::Settings;
use crate::control::orders::{self, Answer, Orders};
use crate::control::protocol::{Reloaded, Request, SCHEMA};
use crate::control::queue::{Order, RequestQueue, RunFacts};
use crate::control::server::Server;
use crate::control::{self, Keeper};
use crate::history::{self, HistoryFile};
use crate::learned::LearnedWriter;
use crate::metrics::Metrics;
use crate::output;
use crate::place;
use crate::sketch;
use anyhow::{Context, Result};
use pagefold_engine::engine::{Engine, count_saving, cycle};
use pagefold_engine::host::{Mechanism, Merging, Outcome};
use pagefold_engine::units::Pages;
use pagefold_host::live::Event;
use pagefold_host::os::wake;
use pagefold_procmem::os::fault;
use pagefold_text::exit::{self, Exit};
use pagefold_text::figures::thousands;
use pagefold_text::messages;
use pagefold_text::style;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{Level, debug, enabled};

/// The longest wait between two cycles, nanoseconds: a service manager's watchdog expects to hear from us.
const LONGEST_WAIT_NS: u64 = 60_000_000_000;

/// A run that has not opened its files yet.
#[derive(Debug)]
pub struct Start {
    pub signals: Signals,
    passed: Vec<TcpListener>,
}

#[derive(Debug, Default)]
pub struct Signals {
    /// Set when the run should end.
    pub stop: Arc<AtomicBool>,
    /// Set by every signal and request, to end a wait early.
    pub woken: Arc<AtomicBool>,
}

impl Signals {
    /// From now on the signal sets this flag and then `woken`, so a loop that sees `woken` also sees the reason.
    pub fn on(&self, signal: i32, flag: &Arc<AtomicBool>) -> Result<()> {
        for flag in [flag, &self.woken] {
            signal_hook::flag::register(signal, flag.clone()).context("cannot install a signal handler")?;
        }
        Ok(())
    }
}

impl Start {
    /// The first step of a run of this program. From now on, SIGINT and SIGTERM end the run in an orderly way.
    pub fn of(program: &'static str) -> Result<Self> {
        messages::never_wait(program);
        let signals = Signals::default();
        signals.on(signal_hook::consts::SIGINT, &signals.stop)?;
        signals.on(signal_hook::consts::SIGTERM, &signals.stop)?;
        signals.on(wake::SIGNAL, &signals.woken)?;
        Ok(Self { signals, passed: Metrics::passed()? })
    }

    /// Opens the run's sockets and files. Call this before giving up rights.
    pub fn open(self, args: &RunArgs, settings: Settings) -> Result<Outputs<'_>> {
        let metrics = Metrics::open(&settings.metrics, self.passed)?;
        let history = place::of_run(settings.history.as_deref(), "history", args.dry_run, HistoryFile::open)?;
        let active = ActiveSettings::new(args, settings)?;
        Ok(Outputs { signals: self.signals, active, metrics, history })
    }
}

/// The open sockets and files of a run. We start threads for them later, after giving up rights.
#[derive(Debug)]
pub struct Outputs<'a> {
    pub signals: Signals,
    pub active: ActiveSettings<'a>,
    metrics: Metrics,
    history: Option<(HistoryFile, Option<String>)>,
}

/// A run, with the engine, the machine that it works on, and its outputs.
pub struct Daemon<'a, B: Backend> {
    pub engine: Engine,
    pub backend: B,
    active: ActiveSettings<'a>,
    facts: RunFacts,
    stop: Arc<AtomicBool>,
    requests: RequestQueue,
    orders: Orders,
    control: Option<Server>,
    metrics: Option<Background<()>>,
    history: Option<Background<()>>,
    pub learned: Option<LearnedWriter>,
    pub sketches: Option<sketch::Writer>,
    keeper: Keeper,
    progress: Progress,
    rooms: RoomReports,
    /// Our last message said that we look for duplicates among one in this many contents.
    contents_one_in: u64,
    /// How many of ksmd's scans we've noted as events.
    scans: u64,
    /// The number of changed decisions that we've logged.
    decisions: u64,
}

impl<'a, B: Backend> Daemon<'a, B> {
    pub fn new(outputs: Outputs<'a>, facts: RunFacts, backend: B) -> Self {
        let Outputs { signals, active, metrics, history } = outputs;
        let (requests, sender) = RequestQueue::new(signals.woken);
        let metrics = metrics.start(&sender);
        let history = history::start(history, &sender);
        let keeper = Keeper::start(&sender);
        let control = control::serve(sender, facts.dry_run);
        fault::point("socket-made");
        let alone = Self::without_threads(backend, active, facts, requests, keeper);
        Self { stop: signals.stop, control, metrics, history, ..alone }
    }

    fn without_threads(
        backend: B,
        active: ActiveSettings<'a>,
        facts: RunFacts,
        requests: RequestQueue,
        keeper: Keeper,
    ) -> Self {
        Self {
            engine: Engine::new(facts.config.clone()),
            backend,
            active,
            facts,
            stop: Arc::default(),
            requests,
            orders: Orders::default(),
            control: None,
            metrics: None,
            history: None,
            learned: None,
            sketches: None,
            keeper,
            progress: Progress::start(),
            rooms: RoomReports::default(),
            contents_one_in: 1,
            scans: 0,
            decisions: 0,
        }
    }

    /// Runs until it's stopped, and returns the exit code. `left_alone` are targets that we won't touch.
    pub fn run(mut self, left_alone: Vec<LeftAlone>) -> Result<u8> {
        self.active.log(&Entry::begin("run", self.facts.scope.clone()));
        self.progress.leave_alone(B::TARGET, left_alone);
        self.report_events();
        self.progress.begin();
        let ran = self.run_cycles();
        self.finish(ran)
    }

    fn run_cycles(&mut self) -> Result<(), Exit> {
        let mut cycles = Cycles::until(self.stop.clone(), self.active.args.end_ns());
        while let Some(outcome) = cycles.next(&mut self.engine, &mut self.backend)? {
            // Once KSM is given up we log no actions, except this cycle's: `report_events` sets `stood_down` later.
            if self.facts.stood_down.is_none() {
                log_outcome(&mut self.active, &self.backend, &outcome);
            }
            self.report_events();
            self.log_decisions();
            // With a scope from a configuration file, the run goes on: a reload may add targets.
            let is_fixed = self.active.args.scope != ScopeArgs::default();
            if is_fixed && self.backend.has_ended(&self.active.settings.scope) {
                self.progress.say_on_terminal(&format!("every {} in scope has ended", B::TARGET));
                break;
            }
            self.report_room();
            self.report_index();
            if self.engine.scans() > self.scans {
                self.scans = self.engine.scans();
                self.active.events.note("scan", format!("{} in all", thousands(self.scans)));
            }
            self.serve_requests();
            let targets = style::count(self.backend.target_count(), B::TARGET, B::TARGETS);
            self.progress.show(&self.engine, &targets, self.engine.is_paused());
            self.keeper.keep(self.backend.adopted(), self.backend.now_ns());
            if let Some(learned) = &mut self.learned {
                learned.keep(&self.engine, self.backend.now_ns());
            }
            if let Some(sketches) = &mut self.sketches {
                self.backend.sketch(sketches, &mut self.engine);
            }
        }
        Ok(())
    }

    fn report_events(&mut self) {
        let mut withdrawn: BTreeMap<i32, Changes> = BTreeMap::new();
        let mut left_alone = Vec::new();
        for event in self.backend.take_events() {
            match event {
                Event::LeftAlone { pid, name, why } => {
                    self.active.events.add_of_process("left-alone", pid, &name, &why);
                    left_alone.push(LeftAlone { pid, name, reason: why });
                }
                Event::Withdrawn { pid, result, reason } => {
                    if let Some(owner) = self.backend.owner(pid) {
                        withdrawn.entry(pid).or_default().add(Change::withdrawn(owner, &result, reason));
                    }
                }
                Event::Overridden { pid, opt_out } => {
                    let Some(owner) = self.backend.owner(pid) else { continue };
                    let process = format!("process {pid} ({})", owner.name);
                    self.progress.say(&format!("{process} is merged because of --override-opt-out: {opt_out}"));
                    self.active.log(&Entry::overridden(owner, opt_out));
                }
                Event::InjectorRestarted { pid } => {
                    let line = format!("the injector process had ended; process {pid} replaces it");
                    self.active.say(&self.progress, "injector", line);
                }
                Event::StoodDown { why } => {
                    let line = format!("this run no longer controls KSM: {why}");
                    self.active.say(&self.progress, "stood-down", line);
                    self.facts.stood_down = Some(why);
                }
            }
        }
        self.progress.leave_alone(B::TARGET, left_alone);
        for change in withdrawn.into_values().flatten() {
            self.active.log(&Entry::Unmark(change));
        }
    }

    /// Logs the decisions that changed in this cycle.
    fn log_decisions(&mut self) {
        let log = self.engine.decisions();
        if enabled!(target: "decision", Level::DEBUG) {
            for change in log.since(self.decisions) {
                let Some(pid) = self.backend.pid_of(change.region) else { continue };
                let first = format!("{:x}", change.first.address());
                let bytes = change.pages.bytes().0;
                let (from, to) = (change.from.verb, change.to.verb);
                debug!(target: "decision", pid, first, bytes, %from, %to, why = %change.to.reason);
            }
        }
        self.decisions = log.number();
    }

    /// Reports when the index of contents is full, or has room for all contents again.
    fn report_index(&mut self) {
        let one_in = self.engine.contents_one_in();
        if std::mem::replace(&mut self.contents_one_in, one_in) == one_in {
            return;
        }
        if one_in == 1 {
            self.progress.say("all contents of pages are compared again");
        } else {
            self.progress.say(&format!(
                "only one in {one_in} contents of pages is compared with others: more don't fit into half of \
                 pagefold's memory limit; raise the limit (MemoryMax=) to find more duplicates"
            ));
        }
    }

    /// Reports when the headroom for writes to merged pages becomes too small, or sufficient again.
    fn report_room(&mut self) {
        let reserve = self.engine.reserve();
        let take_back = self.active.settings.config.reserve.take_back && self.facts.config.mechanism == Mechanism::Ksmd;
        if let Some(line) = self.rooms.of_machine(reserve, take_back) {
            self.progress.say(&line);
        }
        for line in self.rooms.of_limits(reserve, take_back, |limit| self.backend.limited_path(limit)) {
            self.progress.say_of_limits(&line);
        }
    }

    /// Answers requests, and reloads the settings if SIGHUP has come.
    fn serve_requests(&mut self) {
        self.facts.audit_lost = self.active.lost();
        let backend = &self.backend;
        let events = &mut self.active.events;
        let requested =
            self.requests.serve(&mut self.engine, &self.facts, events, |engine, run| backend.facts(engine, run));
        let (reloads, orders): (Vec<Order>, _) =
            self.requests.take_orders().into_iter().partition(|order| order.request == Request::Reload);
        self.backend.carry_out(&mut self.orders, orders, &mut self.active);
        self.active.hear_audit(&self.progress);
        let file = if reloads.is_empty() { Ok(PathBuf::new()) } else { self.active.request_reload() };
        let reloaded = self.backend.reload(&mut self.active, &mut self.engine, &self.progress);
        if std::mem::take(&mut self.active.is_scope_new) {
            self.facts.set_scope(&self.active.settings.scope);
        }
        for order in reloads {
            let answer = file.clone().and_then(|file| {
                self.active.reloaded.clone()?;
                Ok(Answer::Reloaded(Reloaded { schema: SCHEMA.to_owned(), file, scope: self.facts.scope.clone() }))
            });
            orders::send(&order.reply, answer);
        }
        if let Some(governor) = reloaded.or(requested) {
            self.active.events.note("governor", governor.to_string());
            self.backend.set_round_ns(self.facts.config.pace(governor).round_ns);
        }
    }

    /// Ends the run, even after an error, and returns the exit code.
    fn finish(mut self, ran: Result<(), Exit>) -> Result<u8> {
        // We answer no more requests. When we drop the queues, all waiting requests fail.
        drop((self.requests, self.orders));
        // If we can't read the host any more, we keep the last count of the savings.
        let _ = count_saving(&mut self.engine, &mut self.backend);
        self.progress.finish();
        if let Some(learned) = self.learned {
            learned.finish(&self.engine);
        }
        drop((self.control, self.metrics, self.history, self.sketches));
        // Even after an error, we restore KSM's settings before we report anything.
        let ending = self.backend.finish();
        self.active.log(&Entry::end("run", self.active.lost()));
        self.active.finish(&self.progress);
        if let (Some(ksm), Some(cost)) = (&ending.ended.ksm, ending.ended.cost) {
            self.engine.close(ending.ended.now_ns, ksm, cost);
        }
        ran?;
        let summary = Summary::new(&self.active, &self.facts, &self.engine, &ending, self.progress);
        for line in summary::unrestored(ending.ended.restored.as_ref()) {
            complain!("{line}");
        }
        output::print_at_end(self.active.args.json, &summary, |style| summary::describe(&summary, style))?;
        Ok(if summary.knobs_restored { exit::OK } else { exit::FAILURE })
    }
}

/// The cycles of a run, until it's stopped or its time is over.
#[derive(Debug)]
pub struct Cycles {
    stop: Arc<AtomicBool>,
    /// When the run ends, on the backend's clock.
    end_ns: u64,
    wait_ns: u64,
}

impl Cycles {
    pub fn until(stop: Arc<AtomicBool>, end_ns: u64) -> Self {
        Self { stop, end_ns, wait_ns: 0 }
    }

    /// Waits until the next cycle is due, and runs it. `None` if the run ends instead.
    pub fn next<B: Backend>(&mut self, engine: &mut Engine, backend: &mut B) -> Result<Option<Outcome>, Exit> {
        // SIGTERM also sets the flag that ends a wait, but the queue may have cleared that flag. So we check for
        // SIGTERM first.
        if !self.stop.load(Ordering::Relaxed) {
            let left_ns = self.end_ns.saturating_sub(backend.now_ns());
            let wait_ns = self.wait_ns.min(LONGEST_WAIT_NS).min(left_ns);
            backend.wait(wait_ns).map_err(|error| B::explain(&error))?;
        }
        if self.stop.load(Ordering::Relaxed) || backend.now_ns() >= self.end_ns {
            return Ok(None);
        }
        let cycle = cycle(engine, backend).map_err(|error| B::explain(&error))?;
        debug!(
            target: "cycle",
            marked = cycle.outcome.marked.len(),
            unmarked = cycle.outcome.unmarked.len(),
            merges = cycle.outcome.merges.len(),
            wait_ms = cycle.wait_ns / 1_000_000
        );
        self.wait_ns = cycle.wait_ns;
        Ok(Some(cycle.outcome))
    }
}

/// Writes the results of a cycle to the audit log.
pub fn log_outcome<B: Backend>(active: &mut ActiveSettings<'_>, backend: &B, outcome: &Outcome) {
    for (entry, results) in [(Entry::Mark as fn(Change) -> Entry, &outcome.marked), (Entry::Unmark, &outcome.unmarked)]
    {
        let mut of_processes: BTreeMap<i32, Changes> = BTreeMap::new();
        for result in results {
            let Some(pid) = backend.pid_of(result.change.span.region) else { continue };
            if let Some(owner) = backend.owner(pid) {
                of_processes.entry(pid).or_default().add(Change::of(owner, result));
            }
        }
        for change in of_processes.into_values().flatten() {
            active.log(&entry(change));
        }
    }
    log_merges(active, backend, outcome);
}

/// How many pages of two targets we asked the kernel to merge in a cycle, and how many of them it merged.
#[derive(Default)]
struct PairPages {
    named: Pages,
    merged: Pages,
}

/// Logs one line for each pair of targets, since there may be too many ranges of pages to log each.
fn log_merges<B: Backend>(active: &mut ActiveSettings<'_>, backend: &B, outcome: &Outcome) {
    let mut pairs: BTreeMap<(i32, Option<i32>), PairPages> = BTreeMap::new();
    for result in &outcome.merges {
        if result.merging == Merging::Untried {
            continue;
        }
        let range = result.range;
        let Some(pid) = backend.pid_of(range.take.region) else { continue };
        let with = range.keep.first().and_then(|(region, _)| backend.pid_of(region));
        let pages = Pages(range.take.pages.into());
        let pair = pairs.entry((pid, with)).or_default();
        pair.named += pages;
        if result.merging == Merging::Merged {
            pair.merged += pages;
        }
    }
    for ((pid, with), pages) in pairs {
        if let Some(owner) = backend.owner(pid) {
            active.log(&Entry::merged(owner, with, pages.named, pages.merged));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::cached::Cached;
    use crate::control::protocol::Request;
    use crate::control::queue::{Facts, RequestSender};
    use crate::golden::{Run, Simulated};
    use std::sync::atomic::AtomicU32;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    const SECOND_NS: u64 = 1_000_000_000;

    /// A daemon without threads, on the simulated host.
    fn daemon(duration: Duration) -> (Daemon<'static, Simulated>, RequestSender) {
        let Run { machine, known, mut active, .. } = Run::by_ksmd();
        active.args = Box::leak(Box::new(RunArgs { duration: Some(duration), ..RunArgs::default() }));
        let (requests, sender) = RequestQueue::new(Arc::default());
        let keeper = Keeper::start(&sender);
        (Daemon::without_threads(machine, active, known, requests, keeper), sender)
    }

    #[test]
    fn a_run_goes_on_until_its_time_is_over_or_it_is_stopped() {
        let (mut daemon, _) = daemon(Duration::from_secs(20));
        daemon.run_cycles().unwrap();
        let ended_ns = daemon.backend.now_ns();
        assert!((20 * SECOND_NS..21 * SECOND_NS).contains(&ended_ns), "{ended_ns}");
        assert!(daemon.engine.ledger().saved > Some(Pages(0)));
        let events = daemon.active.events.list();
        for kind in ["mark", "scan"] {
            assert!(events.iter().any(|event| event.what == kind), "{kind} is missing in {events:?}");
        }
        daemon.active.args = Box::leak(Box::new(RunArgs::default()));
        daemon.stop.store(true, Ordering::Relaxed);
        daemon.run_cycles().unwrap();
        assert_eq!(daemon.backend.now_ns(), ended_ns);
    }

    #[test]
    fn members_who_ask_all_the_time_share_one_answer() {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let make = |_: &Facts| Ok(MADE.fetch_add(1, Ordering::Relaxed).to_string());
        let (mut daemon, sender) = daemon(Duration::from_secs(20));
        let began = Instant::now();
        let member = std::thread::spawn(move || {
            let mut cached = Cached::new(sender, make);
            for _ in 0..1_000 {
                cached.get().unwrap();
            }
        });
        while !member.is_finished() {
            daemon.serve_requests();
        }
        member.join().unwrap();
        let answers = MADE.load(Ordering::Relaxed);
        assert!(u64::from(answers) <= 1 + began.elapsed().as_secs(), "{answers}");
    }

    #[test]
    fn whoever_asks_when_the_run_ends_is_told_at_once() {
        let (mut daemon, sender) = daemon(Duration::ZERO);
        let (answer, answers) = channel();
        daemon.metrics = Background::start("test", move |_| drop(answer.send(sender.send(Request::Status)))).ok();
        let began = Instant::now();
        daemon.run(Vec::new()).unwrap();
        // If the end of the run waited for this thread in vain, it would take two seconds.
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        assert!(answers.try_recv().unwrap().unwrap_err().contains("ending"));
    }
}
