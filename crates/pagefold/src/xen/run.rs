//! `pagefold run --xen-domain`: the daemon, for guests.

use super::{LiveClock, call, failure, open, refuse_all, take_lock};
use crate::audit::{Entry, Owner};
use crate::commands::run::progress::{LeftAlone, Progress};
use crate::commands::run::reload::ActiveSettings;
use crate::commands::run::room::RoomReports;
use crate::commands::run::summary::{self, Summary};
use crate::commands::run::{log_merges, rounds};
use crate::config::args::RunArgs;
use crate::config::settings::{MechanismChoice, Settings};
use crate::control;
use crate::control::queue::{Facts, RequestQueue, RunFacts, TargetFacts};
use crate::history::{self, HistoryFile};
use crate::metrics::Metrics;
use crate::output;
use crate::place;
use crate::preflight;
use anyhow::Result;
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::style;
use pagefold_core::config::Config;
use pagefold_core::engine::Engine;
use pagefold_core::host::Mechanism;
use pagefold_linux::proc::status::printable;
use pagefold_xen::guests::Selected;
use pagefold_xen::host::{Guest, XenHost};
use pagefold_xen::hypervisor::Hypervisor;
use pagefold_xen::library::Xen;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

type LiveXen = XenHost<Xen, LiveClock>;

/// Runs until it is stopped, and returns the exit code. `signals` are set to end the run and to cut a wait short.
pub fn run(
    args: &RunArgs,
    settings: Settings,
    guests: Vec<Selected>,
    (stop, woken): (Arc<AtomicBool>, Arc<AtomicBool>),
    passed: Vec<TcpListener>,
) -> Result<u8> {
    if settings.mechanism == MechanismChoice::Ksmd {
        let line = "ksmd does not merge memory of Xen's guests; omit --mechanism ksmd";
        return Err(Exit::new(exit::USAGE, line).into());
    }
    let mut xen = open("sharing memory of guests")?;
    xen.memory().map_err(|error| call(&error))?;
    // A dry run shares nothing, so it may run beside another one.
    let lock = if args.dry_run { None } else { Some(take_lock()?) };
    let metrics = Metrics::open(&settings.metrics, passed)?;
    let history = place::of_run((settings.history.as_deref(), "history"), args.dry_run, HistoryFile::open)?;
    let config = Config { mechanism: Mechanism::Request, ..settings.config.clone() };
    let mut active = ActiveSettings::new(args, settings)?;
    // What is left to do needs what is open only.
    preflight::give_up_rights(&[])?;
    let clock = LiveClock::new(stop.clone(), woken.clone());
    let mut host = XenHost::new(xen, clock, guests, !args.dry_run).map_err(|error| failure(&error))?;
    let left_alone = host.take_left_alone();
    if !host.guests().any(|guest| guest.left_alone.is_none()) {
        let refused: Vec<_> =
            left_alone.iter().map(|left| (left.domain, left.name.as_str(), left.why.as_str())).collect();
        return Err(refuse_all(&refused).into());
    }
    let facts = RunFacts::new(args.dry_run, &active.settings.scope, &config);
    let mut engine = Engine::new(config);
    let (requests, sender) = RequestQueue::new(woken);
    let metrics = metrics.start(&sender);
    let history = history::start(history, &sender);
    let server = control::serve(sender, args.dry_run);
    let mut progress = Progress::new();
    active.log(&Entry::begin("run", facts.scope.clone()), &progress);
    for left in left_alone {
        leave_alone(&mut active, &mut progress, left);
    }
    progress.begin();
    let ran = main_loop(args, &mut engine, &mut host, &stop, (requests, facts), (&mut active, &mut progress));
    progress.finish();
    drop((server, metrics, history));
    active.log(&Entry::end("run", active.lost()), &progress);
    ran?;
    let (now_ns, ksm, cost) = host.close().map_err(|error| failure(&error))?;
    engine.close(now_ns, &ksm, cost);
    let judged = host.guests().filter(|guest| guest.left_alone.is_none()).count();
    let mut summary = Summary::new(args, &active, (&engine, Mechanism::Request), judged, None, progress);
    summary.xen = Some(host.figures().into());
    output::print(args.json, &summary, |style| summary::describe(&summary, style))?;
    drop(lock);
    Ok(exit::OK)
}

fn main_loop(
    args: &RunArgs,
    engine: &mut Engine,
    host: &mut LiveXen,
    stop: &AtomicBool,
    (mut requests, facts): (RequestQueue, RunFacts),
    (active, progress): (&mut ActiveSettings<'_>, &mut Progress),
) -> Result<()> {
    let mut rooms = RoomReports::default();
    rounds(engine, host, (stop, args.end_ns(), LiveXen::now_ns), failure, |engine, host, outcome| {
        for left in host.take_left_alone() {
            leave_alone(active, progress, left);
        }
        let pid_of = |region| host.guest_of(region).map(|guest| guest.known.domain.id.0.into());
        log_merges((active, progress), outcome, pid_of, |region| host.guest_of(region).map(owner));
        if host.guests().next().is_none() {
            progress.say_on_terminal("every guest in scope has ended");
        }
        if let Some(line) = rooms.of_machine(engine.reserve(), false) {
            progress.say(&line);
        }
        let requested = requests.serve(engine, (&facts, &mut active.events), |engine, run| facts_of(engine, host, run));
        if let Some(governor) = requested {
            active.events.note("governor", governor.to_string());
        }
        let who = || style::count(host.guests().count(), "guest", "guests");
        progress.show(engine, who, requests.is_paused());
        ControlFlow::Continue(())
    })
}

/// Reports a guest that is left alone.
fn leave_alone(active: &mut ActiveSettings<'_>, progress: &mut Progress, left: pagefold_xen::host::LeftAlone) {
    let (pid, name) = (i32::from(left.domain.0), printable(left.name.as_bytes()));
    progress.say_of_programs(&format!("guest {name} ({pid}) is left alone: {}", left.why));
    active.events.add_of_process("left-alone", (pid, &name), &left.why);
    progress.left_alone.push(LeftAlone { pid, name, reason: left.why });
}

fn owner(guest: &Guest) -> Owner {
    Owner {
        pid: guest.known.domain.id.0.into(),
        start_time_ticks: 0,
        name: printable(guest.known.name.as_bytes()),
        exe: None,
        uid: None,
        cgroup: None,
        domain: Some(guest.known.trust.clone()),
    }
}

fn facts_of(engine: &Engine, host: &LiveXen, run: RunFacts) -> Facts {
    let targets = host.guests().map(|guest| TargetFacts {
        owner: guest.owner,
        pid: guest.known.domain.id.0.into(),
        start_time_ticks: 0,
        name: printable(guest.known.name.as_bytes()),
        uid: 0,
        exe: None,
        cgroup: None,
        left_alone: guest.left_alone.clone(),
        reason: None,
        to_unmark: None,
        notes: Vec::new(),
    });
    Facts {
        report: engine.report(),
        scans: 0,
        injector_restarts: 0,
        targets: targets.collect(),
        domains: host.trusts().to_vec(),
        limited: BTreeMap::new(),
        run,
        xen: Some(host.figures().into()),
    }
}
