//! `pagefold run`: the daemon, in the foreground.

pub mod progress;
pub mod reload;
pub mod room;
pub mod summary;

use crate::audit::{Entry, Owner};
use crate::config::args::RunArgs;
use crate::config::scope::{ScopeArgs, explain};
use crate::config::settings::Settings;
use crate::control;
use crate::control::orders::Orders;
use crate::control::queue::{Facts, RequestQueue, RunFacts};
use crate::history::{self, HistoryFile};
use crate::learned::{LearnedFile, LearnedWriter};
use crate::metrics::Metrics;
use crate::output;
use crate::place;
use crate::preflight;
use crate::sketch;
use anyhow::{Context, Result};
use pagefold_engine::config::Config;
use pagefold_engine::engine::{Engine, count_saving, cycle};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{ChangeResult, Host, Mechanism, MergeResult, Merging, Outcome};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::Pages;
use pagefold_host::live::{Event, HostMode, LiveError, LiveHost};
use pagefold_host::os::wake;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::domain::DomainRules;
use pagefold_host::scope::dumpable::ask_through;
use pagefold_host::scope::{ScopeError, resolve};
use pagefold_host::targets::Target;
use pagefold_inject::Injector;
use pagefold_ksm::Ksm;
use pagefold_ksm::lease::{InitialKnobs, KsmLease, KsmPaths};
use pagefold_procmem::Roots;
use pagefold_procmem::collapse;
use pagefold_procmem::os::fault;
use pagefold_procmem::os::privileges::{COLLAPSING, REQUESTING};
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::figures::thousands;
use pagefold_text::messages;
use pagefold_text::style;
use progress::{LeftAlone, Progress};
use reload::ActiveSettings;
use room::RoomReports;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use summary::Summary;
use tracing::debug;

/// Runs until it's stopped, and returns the exit code.
pub fn run(args: &RunArgs) -> Result<u8> {
    messages::never_wait("pagefold");
    // Signal handlers first: from here on the run always ends in an orderly way.
    let (stop, woken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let on = |signal, flag: &Arc<AtomicBool>| {
        signal_hook::flag::register(signal, flag.clone()).context("cannot install a signal handler")?;
        // After the flag, so whenever `woken` is set, the reason is set too.
        signal_hook::flag::register(signal, woken.clone()).context("cannot install a signal handler")
    };
    on(signal_hook::consts::SIGINT, &stop)?;
    on(signal_hook::consts::SIGTERM, &stop)?;
    signal_hook::flag::register(wake::SIGNAL, woken.clone()).context("cannot install a signal handler")?;
    // Before anything opens a file.
    let passed = Metrics::passed()?;
    let settings = Settings::of(args)?;
    let Settings { scope, config, deny, .. } = settings.clone();
    preflight::need_rights("merging other processes' memory")?;
    let ksm = preflight::ksm()?;
    let device = preflight::request_device(settings.mechanism, settings.placement.default, &ksm)?;
    let metrics = Metrics::open(&settings.metrics, passed)?;
    let history = place::of_run((settings.history.as_deref(), "history"), args.dry_run, HistoryFile::open)?;
    let learned = place::of_run((settings.learned.as_deref(), "learned.json"), args.dry_run, LearnedFile::open)?;
    let fleet = settings.fleet.open()?;
    let mut active = ActiveSettings::new(args, settings)?;
    on(signal_hook::consts::SIGHUP, &active.on_hangup().unwrap_or_else(|| stop.clone()))?;
    let injector = injector(args, device.is_some())?;
    messages::start().context("cannot start the thread for messages")?;
    let domains = device.is_none().then(|| active.settings.domains.clone());
    let left_alone = check_scope(args, &scope, &deny, domains.as_ref())?;
    let local_only = active.settings.placement.default == Placement::LocalOnly;
    let initial = match device {
        Some(_) => InitialKnobs::NONE,
        None => InitialKnobs { merge_across_nodes: local_only.then_some(false), ..InitialKnobs::default() },
    };
    let mode = take(injector, &ksm, &initial)?;
    let interval_ns = refresh_interval_ns(&config, config.governor);
    let mechanism = if device.is_some() { Mechanism::Request } else { Mechanism::Ksmd };
    let config = Config { mechanism, ..config };
    if config.reserve.take_back && mechanism == Mechanism::Request {
        complain!("--take-back has no effect where pages are merged on request; nothing will be taken apart");
    }
    let facts = RunFacts::new(args.dry_run, &scope, &config);
    let mut engine = Engine::new(config);
    let mut learned = learned.and_then(|file| LearnedWriter::start(file, &mut engine));
    let mut host = LiveHost::new(scope.spec(), Roots::default(), deny, ksm, mode, woken.clone())
        .map_err(|error| failure(&error))?;
    if let Some(device) = device {
        host.merge_by(device);
    }
    host.set_refresh_interval(interval_ns);
    host.set_domains(active.settings.domains.clone());
    if mechanism == Mechanism::Ksmd {
        host.merge_only(&active.settings.domains.merged());
    }
    host.set_groups(active.settings.groups.clone());
    host.set_policies(active.settings.placement.clone());
    let (requests, sender) = RequestQueue::new(woken);
    let metrics = metrics.start(&sender);
    let history = history::start(history, &sender);
    let interval = active.settings.fleet.interval;
    let mut sketches = fleet.and_then(|(fleet, place)| sketch::Writer::start(fleet, place, interval, &host));
    let server = control::serve(sender, args.dry_run);
    fault::point("socket-made");
    let mut progress = Progress::start();
    active.log(&Entry::begin("run", scope.to_string()));
    for left in left_alone {
        progress.leave_alone(left);
    }
    progress.begin();
    let kept = (&mut learned, &mut sketches);
    let ran = main_loop(args, &mut engine, &mut host, &stop, (requests, facts, kept), &mut active, &mut progress);
    // If we can't read a host any more, the last count stays.
    let _ = count_saving(&mut engine, &mut host);
    progress.finish();
    if let Some(learned) = learned {
        learned.finish(&engine);
    }
    drop((server, metrics, history, sketches));
    let processes = host.targets().filter(|target| target.exclusion.is_none()).count();
    // Whatever happened, we give KSM back before we report anything.
    let ended = host.finish();
    active.log(&Entry::end("run", active.lost()));
    active.finish(&progress);
    if let (Some(ksm), Some(cost)) = (&ended.ksm, ended.cost) {
        engine.close(ended.now_ns, ksm, cost);
    }
    ran?;
    let restored = ended.restored.as_ref();
    let summary = Summary::new(args, &active, (&engine, mechanism), processes, restored, progress);
    for line in summary::unrestored(restored) {
        complain!("{line}");
    }
    output::print_at_end(args.json, &summary, |style| summary::describe(&summary, style))?;
    Ok(if summary.knobs_restored { exit::OK } else { exit::FAILURE })
}

/// How often to refresh processes and mappings: several times in a round.
fn refresh_interval_ns(config: &Config, governor: Governor) -> u64 {
    config.pace(governor).round_ns / 4
}

/// Refuses a command line that selects no process, or only processes that we must leave alone: most likely a mistake. A
/// configuration file may select processes that start later. Returns the processes that we leave alone. `domains` are
/// given if we merge only one.
fn check_scope(
    args: &RunArgs,
    scope: &ScopeArgs,
    deny: &DenyList,
    domains: Option<&DomainRules>,
) -> Result<Vec<LeftAlone>, Exit> {
    let waits = args.scope == ScopeArgs::default();
    let scoped = match resolve(&scope.spec(), &Roots::default()) {
        Err(error @ (ScopeError::NoCgroup(_) | ScopeError::NoMatch(_) | ScopeError::NameOnly { .. })) if waits => {
            complain!("{error}; waiting for one to start");
            return Ok(Vec::new());
        }
        found => found.map_err(|error| explain(&error))?,
    };
    let all = scoped.len();
    let left_alone: Vec<LeftAlone> = scoped
        .iter()
        .filter(|scoped| scope.pid.contains(&scoped.process.pid()) || all == 1)
        .filter_map(|scoped| {
            let other_domain = domains.and_then(|rules| rules.excludes(scoped)).map(|why| why.to_string());
            let reason = other_domain.or_else(|| preflight::refusal(scoped, deny))?;
            Some(LeftAlone { pid: scoped.process.pid(), name: scoped.name.clone(), reason })
        })
        .collect();
    match left_alone.first() {
        Some(first) if left_alone.len() == all && !waits => Err(Exit::new(
            exit::REFUSED,
            format!("process {} ({}) is left alone: {}; nothing else is in scope", first.pid, first.name, first.reason),
        )),
        _ => Ok(left_alone),
    }
}

/// Starts the injector and gives up every capability that we don't need from there on. A dry run has no injector.
/// Without one we can't ask a process whether it's dumpable, so a dry run keeps the capabilities to find that out.
fn injector(args: &RunArgs, on_request: bool) -> Result<Option<Injector>> {
    if args.dry_run {
        return Ok(None);
    }
    let injector = match &args.injector {
        Some(path) => preflight::injector_at(path)?,
        None => preflight::injector()?,
    };
    let more = match on_request {
        true => &[REQUESTING][..],
        false if collapse::is_wanted() => &[COLLAPSING],
        false => &[],
    };
    preflight::give_up_rights(more)?;
    ask_through(&injector);
    fault::point("injector-started");
    Ok(Some(injector))
}

/// Takes KSM over. Without an injector we do a dry run, which leaves KSM alone.
pub fn take(injector: Option<Injector>, ksm: &Arc<Ksm>, initial: &InitialKnobs) -> Result<HostMode> {
    let Some(injector) = injector else { return Ok(HostMode::DryRun) };
    let lease =
        KsmLease::take(ksm.clone(), &KsmPaths::default(), initial).map_err(|error| preflight::explain_take(&error))?;
    for (knob, value) in lease.unavailable() {
        complain!(
            "{} cannot be set to {value} and stays as it is: pages are merged already, or this kernel lacks it",
            knob.file_name()
        );
    }
    Ok(HostMode::Act { lease, injector })
}

/// The longest wait between two cycles, nanoseconds: a service manager wants to hear that the run is alive.
const LONGEST_WAIT_NS: u64 = 60_000_000_000;

/// Runs cycles until `stop` is set, until the host's clock reaches `end_ns`, or until `each`, which we call after every
/// cycle, breaks.
pub fn rounds<H: Host>(
    engine: &mut Engine,
    host: &mut H,
    (stop, end_ns, now_ns): (&AtomicBool, u64, fn(&H) -> u64),
    failure: fn(&H::Error) -> Exit,
    mut each: impl FnMut(&mut Engine, &mut H, &Outcome) -> ControlFlow<()>,
) -> Result<()> {
    while !stop.load(Ordering::Relaxed) && now_ns(host) < end_ns {
        let cycle = cycle(engine, host).map_err(|error| failure(&error))?;
        if each(engine, host, &cycle.outcome).is_break() {
            break;
        }
        debug!(
            target: "cycle",
            marked = cycle.outcome.marked.len(),
            unmarked = cycle.outcome.unmarked.len(),
            merges = cycle.outcome.merges.len(),
            wait_ms = cycle.wait_ns / 1_000_000
        );
        let wait_ns = cycle.wait_ns.min(LONGEST_WAIT_NS).min(end_ns.saturating_sub(now_ns(host)));
        host.wait(wait_ns).map_err(|error| failure(&error))?;
    }
    Ok(())
}

/// The error that ends a run. Its text includes the causes.
pub fn failure(error: &LiveError) -> Exit {
    match error {
        LiveError::Scope(error) => explain(error),
        error => Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")),
    }
}

/// Runs cycles, and between them reports, logs, and handles requests and reloads.
fn main_loop(
    args: &RunArgs,
    engine: &mut Engine,
    host: &mut LiveHost,
    stop: &AtomicBool,
    (mut requests, mut facts, (learned, sketches)): (
        RequestQueue,
        RunFacts,
        (&mut Option<LearnedWriter>, &mut Option<sketch::Writer>),
    ),
    active: &mut ActiveSettings<'_>,
    progress: &mut Progress,
) -> Result<()> {
    let mut scans = 0;
    let mut rooms = RoomReports::default();
    let mut orders = Orders::default();
    rounds(engine, host, (stop, args.end_ns(), LiveHost::now_ns), failure, |engine, host, outcome| {
        for event in host.take_events() {
            match event {
                Event::LeftAlone { pid, name, why } => {
                    active.events.add_of_process("left-alone", (pid, &name), &why);
                    progress.leave_alone(LeftAlone { pid, name, reason: why });
                }
                Event::Withdrawn { pid, result, reason } => {
                    log_withdrawn(active, host, (pid, &result, reason));
                }
                Event::Overridden { pid, opt_out } => log_override(active, host, (pid, opt_out), progress),
                Event::InjectorRestarted { pid } => {
                    let line = format!("the injector process had ended; process {pid} takes its place");
                    progress.say(&line);
                    active.events.note("injector", line);
                }
                Event::StoodDown { why } => {
                    active.events.note("stood-down", format!("KSM is no longer controlled by this run: {why}"));
                    progress.stand_down(why);
                }
            }
        }
        if progress.stood_down.is_none() {
            log_changes(active, host, outcome);
            let pid_of = |region| host.target_of(region).map(|target| target.process.pid());
            let owner_of = |region| host.target_of(region).map(|target| owner(host, target));
            log_merges(active, outcome, pid_of, owner_of);
        }
        if host.targets().next().is_none() && !active.settings.scope.is_selective() {
            progress.say_on_terminal("every process in scope has ended");
            return ControlFlow::Break(());
        }
        let cgroup_of =
            |key| host.limited_cgroup(key).map(|dir| printable(dir.as_os_str().as_bytes())).unwrap_or_default();
        let take_back = active.settings.config.reserve.take_back && host.mechanism() == Mechanism::Ksmd;
        if let Some(line) = rooms.of_machine(engine.reserve(), take_back) {
            progress.say(&line);
        }
        for line in rooms.of_limits(engine.reserve(), take_back, cgroup_of) {
            progress.say_of_programs(&line);
        }
        facts.stood_down.clone_from(&progress.stood_down);
        facts.audit_lost = active.lost();
        if engine.scans() > scans {
            scans = engine.scans();
            active.events.note("scan", format!("{} in all", thousands(scans)));
        }
        let requested =
            requests.serve(engine, (&facts, &mut active.events), |engine, run| Facts::of(engine, host, run));
        orders.serve(requests.take_orders(), host, &mut active.events);
        let reloaded = active.serve(engine, host, progress);
        if let Some(governor) = reloaded.or(requested) {
            active.events.note("governor", governor.to_string());
            host.set_refresh_interval(refresh_interval_ns(&facts.config, governor));
        }
        let who = || style::count(host.targets().count(), "process", "processes");
        progress.show(engine, who, requests.is_paused());
        if let Some(learned) = learned {
            learned.keep(engine, host.now_ns());
        }
        if let Some(sketches) = sketches {
            sketches.step(engine, host);
        }
        // The wait wouldn't end early if the queue has cleared the flag that a signal set.
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// Writes the results of a cycle to the audit log.
fn log_changes(active: &mut ActiveSettings<'_>, host: &LiveHost, outcome: &Outcome) {
    let marked = outcome.marked.iter().map(|result| (true, result));
    for (mark, result) in marked.chain(outcome.unmarked.iter().map(|result| (false, result))) {
        if let Some(target) = host.target_of(result.change.span.region) {
            active.log(&Entry::changed(owner(host, target), mark, result));
        }
    }
}

/// Writes the results of requests to the audit log: a line for each pair of processes or guests, since there may be
/// many ranges.
pub fn log_merges(
    active: &mut ActiveSettings<'_>,
    outcome: &Outcome,
    pid_of: impl Fn(RegionKey) -> Option<i32>,
    owner_of: impl Fn(RegionKey) -> Option<Owner>,
) {
    let mut pairs: BTreeMap<(i32, Option<i32>), (RegionKey, Pages, Pages)> = BTreeMap::new();
    for MergeResult { range, merging } in outcome.merges.iter().filter(|result| result.merging != Merging::Untried) {
        let with = range.keep.first().and_then(|(region, _)| pid_of(region));
        let Some(take) = pid_of(range.take.region) else { continue };
        let pair = pairs.entry((take, with)).or_insert((range.take.region, Pages(0), Pages(0)));
        pair.1 += Pages(range.take.pages.into());
        pair.2 += Pages(if *merging == Merging::Merged { range.take.pages.into() } else { 0 });
    }
    for ((_, with), (region, named, merged)) in pairs {
        if let Some(owner) = owner_of(region) {
            active.log(&Entry::merged(owner, with, named, merged));
        }
    }
}

/// Writes to the audit log which marks we removed because they mustn't stay.
fn log_withdrawn(
    active: &mut ActiveSettings<'_>,
    host: &LiveHost,
    (pid, result, reason): (i32, &ChangeResult, String),
) {
    if let Some(target) = host.targets().find(|target| target.process.pid() == pid) {
        active.log(&Entry::withdrawn(owner(host, target), result, reason));
    }
}

/// Reports and logs that we don't leave a process alone although its owner has opted out.
fn log_override(active: &mut ActiveSettings<'_>, host: &LiveHost, (pid, opt_out): (i32, String), progress: &Progress) {
    let Some(target) = host.targets().find(|target| target.process.pid() == pid) else { return };
    progress.say(&format!("process {pid} ({}) is not left alone, by --override-opt-out: {opt_out}", target.name));
    active.log(&Entry::overridden(owner(host, target), opt_out));
}

fn owner(host: &LiveHost, target: &Target) -> Owner {
    Owner::of(target, host.domains().get(usize::from(target.domain.0)))
}
