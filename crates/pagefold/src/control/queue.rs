//! Where questions wait for the loop, which answers them between two rounds.
//!
//! The loop hands over facts; sentences are made of them by the thread that asked.

use super::protocol::{Request, SCHEMA, Standing};
use crate::output::placement::PlacesView;
use pagefold_core::config::Config;
use pagefold_core::engine::Engine;
use pagefold_core::governor::Governor;
use pagefold_core::keys::OwnerKey;
use pagefold_core::report::EngineReport;
use pagefold_linux::host::live::LiveHost;
use pagefold_linux::os::wake::Sleeper;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// The loop is woken again if it has not answered, in case it fell asleep in the very moment when it was woken.
const AGAIN: Duration = Duration::from_millis(50);
/// How long the loop may take.
const LIMIT: Duration = Duration::from_secs(15);

/// How things stand, as the loop knows it.
#[derive(Debug)]
pub struct Facts {
    /// What the judgement knows.
    pub report: EngineReport,
    /// Full scans ordered from ksmd.
    pub scans: u64,
    /// The processes in scope.
    pub targets: Vec<TargetFacts>,
    /// The names of the trust domains, by key.
    pub domains: Vec<String>,
    /// The run.
    pub run: RunFacts,
}

/// A process in scope.
#[derive(Clone, Debug)]
pub struct TargetFacts {
    /// Its key in the report.
    pub owner: OwnerKey,
    /// Its pid.
    pub pid: i32,
    /// When it started: tells it from another with the same pid.
    pub start_time_ticks: u64,
    /// Its name, fit to print.
    pub name: String,
    /// Why it is left alone, if it is.
    pub left_alone: Option<String>,
}

/// What was asked of the run, and what became of it.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// The scope, as flags.
    pub scope: String,
    /// It marks nothing.
    pub dry_run: bool,
    /// The judgement's settings.
    pub config: Config,
    /// Why KSM is not driven any more, if it is not.
    pub stood_down: Option<String>,
}

impl Facts {
    /// Gathers them.
    pub fn of(engine: &Engine, host: &LiveHost, run: RunFacts) -> Self {
        let targets = host.targets().map(|target| TargetFacts {
            owner: target.owner,
            pid: target.process.pid(),
            start_time_ticks: target.process.start_time_ticks(),
            name: target.name.clone(),
            left_alone: target.exclusion.as_ref().map(ToString::to_string),
        });
        let domains = host.domains().to_vec();
        Self { report: engine.report(), scans: engine.scans(), targets: targets.collect(), domains, run }
    }

    /// Where merged pages are, on a machine with several memory nodes.
    pub fn places(&self) -> Option<PlacesView> {
        let who = |owner| {
            let target = self.targets.iter().find(|target| target.owner == owner)?;
            Some((target.pid, target.name.clone()))
        };
        Some(PlacesView::of(self.report.placement.as_ref()?, &self.report.ledger, who))
    }

    /// What is in force.
    pub fn standing(&self) -> Standing {
        Standing {
            schema: SCHEMA.to_owned(),
            pid: std::process::id(),
            governor: self.report.governor,
            in_force: self.report.in_force,
            allowed_share: self.report.top_share.fraction(),
            paused: self.report.paused,
        }
    }
}

#[derive(Debug)]
struct Question {
    request: Request,
    reply: Sender<Arc<Facts>>,
}

/// The askers' side.
#[derive(Clone, Debug)]
pub struct Counter {
    questions: Sender<Question>,
    sleeper: Sleeper,
}

/// The loop's side.
#[derive(Debug)]
pub struct Desk {
    questions: Receiver<Question>,
    /// Set by the signal that wakes the loop: its waits end while it is set.
    woken: Arc<AtomicBool>,
    /// Changes made before the round that is under way, or about to be.
    changes: Vec<Question>,
    paused: bool,
}

impl Desk {
    /// A desk for the calling thread, whose waits end when `woken` is set; [`pagefold_linux::os::wake::SIGNAL`] must set it.
    pub fn open(woken: Arc<AtomicBool>) -> (Self, Counter) {
        let (ask, questions) = channel();
        (
            Self { questions, woken, changes: Vec::new(), paused: false },
            Counter { questions: ask, sleeper: Sleeper::this_thread() },
        )
    }

    /// Whether the run has been told to pause.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Does what was asked for since the last call, and answers. Changes are answered after one more round, for which
    /// the next wait is cut short: by then they show. Returns the governor, if there is another one now.
    pub fn serve(&mut self, engine: &mut Engine, facts: impl FnOnce(&Engine) -> Facts) -> Option<Governor> {
        let mut chosen = None;
        // First: whoever asks from here on sets it again.
        self.woken.store(false, Ordering::SeqCst);
        let mut ready = std::mem::take(&mut self.changes);
        for question in self.questions.try_iter() {
            match &question.request {
                Request::Status | Request::Explain { .. } => ready.push(question),
                Request::Governor { name } => {
                    // Known to be a name since it was understood.
                    if let Ok(governor) = name.parse() {
                        engine.set_governor(governor);
                        chosen = Some(governor);
                    }
                    self.changes.push(question);
                }
                Request::Pause | Request::Resume => {
                    self.paused = question.request == Request::Pause;
                    engine.set_paused(self.paused);
                    self.changes.push(question);
                }
            }
        }
        if !self.changes.is_empty() {
            self.woken.store(true, Ordering::SeqCst);
        }
        if !ready.is_empty() {
            let facts = Arc::new(facts(engine));
            for question in ready {
                // One that has hung up meanwhile does not want to know.
                let _ = question.reply.send(facts.clone());
            }
        }
        chosen
    }
}

impl Counter {
    /// Asks, and waits for the loop.
    pub fn ask(&self, request: Request) -> Result<Arc<Facts>, String> {
        let ending = || "the run is ending; start another one".to_owned();
        let (reply, answer) = channel();
        self.questions.send(Question { request, reply }).map_err(|_| ending())?;
        let end = Instant::now() + LIMIT;
        loop {
            // The loop's thread lives as long as the process.
            let _ = self.sleeper.wake();
            match answer.recv_timeout(AGAIN) {
                Ok(facts) => return Ok(facts),
                Err(RecvTimeoutError::Disconnected) => return Err(ending()),
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("the run has not come round in {} s; try again", LIMIT.as_secs()));
                }
            }
        }
    }
}
