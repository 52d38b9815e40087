//! `pagefold-xen run`: the daemon, for guests.

use super::{LiveClock, ScopeArgs, call, failure, open, refuse_all, take_lock};
use anyhow::{Context, Result};
use pagefold::audit::{Entry, Owner};
use pagefold::commands::run::progress::{LeftAlone, Progress};
use pagefold::commands::run::reload::ActiveSettings;
use pagefold::commands::run::room::RoomReports;
use pagefold::commands::run::summary::{self, Summary};
use pagefold::commands::run::{log_merges, rounds};
use pagefold::config::args::RunArgs as Args;
use pagefold::config::flags::RunFlags;
use pagefold::config::scope::ScopeArgs as Processes;
use pagefold::config::settings::{MechanismChoice, Settings};
use pagefold::control;
use pagefold::control::orders;
use pagefold::control::queue::{Facts, RequestQueue, RunFacts, TargetFacts};
use pagefold::history::{self, HistoryFile};
use pagefold::metrics::Metrics;
use pagefold::output;
use pagefold::output::xen::XenView;
use pagefold::place;
use pagefold::preflight;
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::host::Mechanism;
use pagefold_engine::units::Pages;
use pagefold_host::os::wake;
use pagefold_host::scope::Selector;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::messages;
use pagefold_text::style;
use pagefold_xen::host::{Guest, XenFigures, XenHost};
use pagefold_xen::hypervisor::Hypervisor;
use pagefold_xen::library::Xen;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

type LiveXen = XenHost<Xen, LiveClock>;

#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    options: RunFlags,
    /// Read options that are not given here from this file, which must select no processes
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stop after this time (60s, 5m, 2h) [default: on SIGINT or SIGTERM]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Find out what would be shared without changing anything
    #[arg(long)]
    dry_run: bool,
    /// Print the summary as JSON (schema pagefold.run/1)
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    /// The same as the options of `pagefold run`.
    fn of_daemon(&self) -> Args {
        Args {
            options: self.options.clone(),
            config: self.config.clone(),
            duration: self.duration,
            dry_run: self.dry_run,
            json: self.json,
            ..Args::default()
        }
    }
}

/// Runs until something stops it, and returns the exit code.
pub fn run(own: &RunArgs) -> Result<u8> {
    messages::never_wait("pagefold-xen");
    let stop = Arc::new(AtomicBool::new(false));
    let woken = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        on_signal(signal, &stop)?;
        // After the flag: when `woken` is set, the reason is set too.
        on_signal(signal, &woken)?;
    }
    on_signal(wake::SIGNAL, &woken)?;
    // Before anything opens a file.
    let passed = Metrics::passed()?;
    let args = &own.of_daemon();
    let settings = Settings::from(args, args.config.as_deref())?;
    if settings.scope != Processes::default() {
        let line = "guests and processes cannot be in one scope; give --config a file without [scope]";
        return Err(Exit::new(exit::USAGE, line).into());
    }
    let guests = own.scope.guests()?;
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
    // From here on we only need files that are already open.
    preflight::give_up_rights(&[])?;
    messages::start().context("cannot start the thread for messages")?;
    let clock = LiveClock::new(stop.clone(), woken.clone());
    let mut host = XenHost::new(xen, clock, guests, !args.dry_run).map_err(|error| failure(&error))?;
    let left_alone = host.take_left_alone();
    if !host.guests().any(|guest| guest.left_alone.is_none()) {
        let refused: Vec<_> =
            left_alone.iter().map(|left| (left.domain, left.name.as_str(), left.why.as_str())).collect();
        return Err(refuse_all(&refused).into());
    }
    let mut facts = RunFacts::new(args.dry_run, &active.settings.scope, &config);
    facts.scope = own.scope.to_string();
    let mut engine = Engine::new(config);
    let (requests, sender) = RequestQueue::new(woken);
    let metrics = metrics.start(&sender);
    let history = history::start(history, &sender);
    let server = control::serve(sender, args.dry_run);
    let mut progress = Progress::start();
    active.log(&Entry::begin("run", facts.scope.clone()));
    for left in left_alone {
        leave_alone(&mut active, &mut progress, left);
    }
    progress.begin();
    let ran = main_loop(args, &mut engine, &mut host, &stop, (requests, facts), (&mut active, &mut progress));
    progress.finish();
    drop((server, metrics, history));
    active.log(&Entry::end("run", active.lost()));
    active.finish(&progress);
    ran?;
    let (now_ns, ksm, cost) = host.close().map_err(|error| failure(&error))?;
    engine.close(now_ns, &ksm, cost);
    let judged = host.guests().filter(|guest| guest.left_alone.is_none()).count();
    let mut summary = Summary::new(args, &active, (&engine, Mechanism::Request), judged, None, progress);
    summary.scope = own.scope.to_string();
    summary.xen = Some(view(host.figures()));
    output::print_at_end(args.json, &summary, |style| summary::describe(&summary, style))?;
    drop(lock);
    Ok(exit::OK)
}

fn on_signal(signal: i32, flag: &Arc<AtomicBool>) -> Result<()> {
    signal_hook::flag::register(signal, flag.clone()).context("cannot install a signal handler")?;
    Ok(())
}

fn main_loop(
    args: &Args,
    engine: &mut Engine,
    host: &mut LiveXen,
    stop: &AtomicBool,
    (mut requests, mut facts): (RequestQueue, RunFacts),
    (active, progress): (&mut ActiveSettings<'_>, &mut Progress),
) -> Result<()> {
    let mut rooms = RoomReports::default();
    rounds(engine, host, (stop, args.end_ns(), LiveXen::now_ns), failure, |engine, host, outcome| {
        for left in host.take_left_alone() {
            leave_alone(active, progress, left);
        }
        let pid_of = |region| host.guest_of(region).map(|guest| guest.known.domain.id.0.into());
        log_merges(active, outcome, pid_of, |region| host.guest_of(region).map(owner));
        if host.guests().next().is_none() {
            progress.say_on_terminal("every guest in scope has ended");
        }
        if let Some(line) = rooms.of_machine(engine.reserve(), false) {
            progress.say(&line);
        }
        active.hear_audit(progress);
        facts.audit_lost = active.lost();
        let requested = requests.serve(engine, (&facts, &mut active.events), |engine, run| facts_of(engine, host, run));
        if let Some(governor) = requested {
            active.events.note("governor", governor.to_string());
        }
        let line = "this pagefold shares memory of Xen's guests, not of processes; stop it first";
        orders::refuse(requests.take_orders(), &Exit::new(exit::KSM_TAKEN, line));
        let who = || style::count(host.guests().count(), "guest", "guests");
        progress.show(engine, who, requests.is_paused());
        ControlFlow::Continue(())
    })
}

/// Reports a guest that we leave alone.
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

/// Whether a selector (`--all` or a number) is for a guest.
fn fits(selector: &Selector, guest: &Guest) -> bool {
    *selector == Selector::All || *selector == Selector::Pid(guest.known.domain.id.0.into())
}

fn facts_of(engine: &Engine, host: &LiveXen, run: RunFacts) -> Facts {
    let targets = host.guests().map(|guest| TargetFacts {
        owner: guest.owner,
        pid: guest.known.domain.id.0.into(),
        start_time_ticks: 0,
        domain: guest.trust,
        name: printable(guest.known.name.as_bytes()),
        uid: 0,
        exe: None,
        cgroup: None,
        selected_by: run.selectors.iter().position(|selector| fits(selector, guest)),
        left_alone: guest.left_alone.clone(),
        reason: None,
        to_unmark: None,
        notes: Vec::new(),
    });
    Facts {
        state: engine.state(),
        scans: 0,
        injector_restarts: 0,
        targets: targets.collect(),
        domains: host.trusts().to_vec(),
        kept_out: Vec::new(),
        merged_domain: None,
        limited: BTreeMap::new(),
        run,
        xen: Some(view(host.figures())),
    }
}

fn view(figures: XenFigures) -> XenView {
    XenView {
        saved_bytes: bytes(figures.memory.saved),
        frames_bytes: bytes(figures.memory.frames),
        free_bytes: bytes(figures.memory.free),
        shared_pages: figures.shares,
    }
}

fn bytes(pages: Pages) -> u64 {
    pages.bytes().0
}
