//! `pagefold run`: the daemon, in the foreground.

pub mod progress;
pub mod reload;
pub mod room;
pub mod summary;

use crate::backend::Backend;
use crate::bounds::Bounds;
use crate::config::args::RunArgs;
use crate::config::scope::{ScopeArgs, explain, hint};
use crate::config::settings::Settings;
use crate::control::queue::RunFacts;
use crate::daemon::{Daemon, Start};
use crate::kept_out;
use crate::learned::{LearnedFile, LearnedWriter};
use crate::place;
use crate::preflight;
use crate::sketch;
use anyhow::{Context, Result};
use pagefold_engine::config::Config;
use pagefold_engine::host::Mechanism;
use pagefold_engine::index::ENTRY_BYTES;
use pagefold_engine::placement::policy::Placement;
use pagefold_host::live::{HostMode, LiveHost};
use pagefold_host::scope::dumpable::ask_through;
use pagefold_host::scope::kept_out::KeptOut;
use pagefold_host::scope::{ScopeError, resolve, resolve_each};
use pagefold_inject::Injector;
use pagefold_ksm::lease::{INITIAL_KNOBS, KsmLease, KsmPaths};
use pagefold_ksm::request::RequestDevice;
use pagefold_ksm::{Knob, Ksm};
use pagefold_procmem::Roots;
use pagefold_procmem::collapse;
use pagefold_procmem::headroom::{own_limit, total_of};
use pagefold_procmem::os::fault;
use pagefold_procmem::os::privileges::{COLLAPSING, REQUESTING};
use pagefold_text::exit::{self, Exit};
use pagefold_text::messages;
use progress::LeftAlone;
use std::io;
use std::path::absolute;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Runs until it's stopped, and returns the exit code.
pub fn run(args: &RunArgs) -> Result<u8> {
    // Install the signal handlers first: after that the run always ends in an orderly way.
    let start = Start::of("pagefold")?;
    let settings = Settings::of(args)?;
    preflight::need_rights("merging other processes' memory")?;
    let ksm = preflight::ksm()?;
    let device = preflight::request_device(settings.mechanism, settings.placement.default, &ksm)?;
    let learned = place::of_run(settings.learned.as_deref(), "learned.json", args.dry_run, LearnedFile::open)?;
    // If we can't use the list of excluded processes, the run ends here, before it changes anything.
    let bounds = Bounds::of(&settings, device.is_none())?;
    let fleet = settings.fleet.open()?;
    let outputs = start.open(args, settings.clone())?;
    let on_hangup = outputs.active.on_hangup().unwrap_or_else(|| outputs.signals.stop.clone());
    outputs.signals.on(signal_hook::consts::SIGHUP, &on_hangup)?;
    let contents_most = contents_most(&Roots::default()).context("cannot read pagefold's own memory limit")?;
    let injector = injector(args, device.is_some())?;
    messages::start().context("cannot start the thread for messages")?;
    let left_alone = check_scope(args, &settings, bounds)?;

    let mode = take(injector, &ksm, &initial_knobs(&settings, device.is_some()))?;
    // Read the list of excluded processes again now that nobody else can change it: commands that change the list
    // without a daemon need the lock that we've just taken.
    let kept_out = kept_out::read()?;
    let mechanism = if device.is_some() { Mechanism::Request } else { Mechanism::Ksmd };
    let config = Config { mechanism, contents_most, ..settings.config.clone() };
    if config.reserve.take_back && mechanism == Mechanism::Request {
        complain!("--take-back has no effect when pages are merged on request; nothing will be unmerged");
    }
    let mut facts = RunFacts::new(args.dry_run, &settings.scope, &config);
    if let (Some(history), false) = (&settings.history, args.dry_run) {
        facts.history = absolute(history).ok();
    }
    let host = host(&settings, &config, ksm, mode, device, outputs.signals.woken.clone(), kept_out)?;
    let mut daemon = Daemon::new(outputs, facts, host);
    daemon.learned = learned.and_then(|file| LearnedWriter::start(file, &mut daemon.engine));
    if let Some((fleet, place)) = fleet {
        daemon.sketches = sketch::Writer::start(fleet, place, settings.fleet.interval, &daemon.backend);
    }
    daemon.run(left_alone)
}

/// How many contents the index may hold. It may take half of our own memory limit, but no more than a 64th of the
/// machine's memory. Even if the contents of all the machine's pages differ, they take less than a third of that 64th.
fn contents_most(roots: &Roots) -> io::Result<usize> {
    let limit = own_limit(&roots.proc, &roots.cgroup)?;
    let total = total_of(&roots.proc)?;
    let bytes = (limit.0 / 2).min(total.0 / 64);
    Ok(usize::try_from(bytes / ENTRY_BYTES).unwrap_or(usize::MAX))
}

/// The KSM knobs that a run sets at its start.
fn initial_knobs(settings: &Settings, on_request: bool) -> Vec<(Knob, u64)> {
    if on_request {
        return Vec::new();
    }
    let mut knobs = INITIAL_KNOBS.to_vec();
    if settings.placement.default == Placement::LocalOnly {
        knobs.push((Knob::MergeAcrossNodes, 0));
    }
    knobs
}

fn host(
    settings: &Settings,
    config: &Config,
    ksm: Arc<Ksm>,
    mode: HostMode,
    device: Option<RequestDevice>,
    woken: Arc<AtomicBool>,
    kept_out: KeptOut,
) -> Result<LiveHost, Exit> {
    let mut host = LiveHost::new(settings.scope.spec(), Roots::default(), settings.deny.clone(), ksm, mode, woken)
        .map_err(|error| LiveHost::explain(&error))?;
    host.set_kept_out(kept_out);
    host.set_domains(settings.domains.clone());
    match device {
        Some(device) => host.merge_by(device),
        None => host.merge_only(&settings.domains.merged()),
    }
    host.set_round_ns(config.pace(config.governor).round_ns);
    host.set_groups(settings.groups.clone());
    host.set_policies(settings.placement.clone());
    Ok(host)
}

/// Refuses a command line if a selector matches no process, or if we must leave alone all selected processes: most
/// likely that's a mistake. A configuration file may select processes that start later. Returns the processes that we
/// leave alone.
fn check_scope(args: &RunArgs, settings: &Settings, mut bounds: Bounds) -> Result<Vec<LeftAlone>, Exit> {
    let waits = args.scope == ScopeArgs::default();
    let resolve = if waits { resolve } else { resolve_each };
    let found = match resolve(&settings.scope.spec(), &Roots::default()) {
        Err(error @ (ScopeError::NoCgroup(_) | ScopeError::NoMatch(_) | ScopeError::NameOnly { .. })) if waits => {
            complain!("{error}; waiting for one to start");
            if let Some(hint) = hint(&error) {
                complain!("{hint}");
            }
            return Ok(Vec::new());
        }
        // The run leaves out whatever it can't open.
        Err(error) if error.is_for_lack_of_files() => {
            complain!("{}", explain(&error));
            return Ok(Vec::new());
        }
        found => found.map_err(|error| explain(&error))?,
    };
    let mut left_alone = Vec::new();
    for scoped in &found {
        let pid = scoped.process.pid();
        if !settings.scope.pid.contains(&pid) && found.len() != 1 {
            continue;
        }
        if let Some(reason) = bounds.refusal(scoped) {
            left_alone.push(LeftAlone { pid, name: scoped.name.clone(), reason });
        }
    }
    match (left_alone.first(), found.first()) {
        (Some(LeftAlone { pid, name, reason }), Some(scoped)) if left_alone.len() == found.len() && !waits => {
            let way_in = bounds.way_in(scoped, reason);
            let line = format!("process {pid} ({name}) is left alone: {reason}{way_in}; nothing else is in scope");
            Err(Exit::new(exit::REFUSED, line))
        }
        _ => Ok(left_alone),
    }
}

/// Starts the injector and gives up every capability that we no longer need. A dry run has no injector to ask a process
/// whether it's dumpable, so a dry run keeps the capabilities to find that out itself.
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

/// Takes control of KSM. Without an injector this is a dry run, which leaves KSM alone.
fn take(injector: Option<Injector>, ksm: &Arc<Ksm>, initial: &[(Knob, u64)]) -> Result<HostMode> {
    let Some(injector) = injector else { return Ok(HostMode::DryRun) };
    let lease =
        KsmLease::take(ksm.clone(), &KsmPaths::default(), initial).map_err(|error| preflight::explain_take(&error))?;
    for (knob, value) in lease.unavailable() {
        complain!(
            "{} cannot be set to {value} and stays as it is: pages are merged already, or this kernel lacks the knob",
            knob.file_name()
        );
    }
    Ok(HostMode::Act { lease, injector })
}
