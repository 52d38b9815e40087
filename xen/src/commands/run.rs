//! `pagefold-xen run`: the daemon, for guests.

use super::{LiveClock, ScopeArgs, open, refuse_all, take_lock};
use anyhow::{Context, Result};
use pagefold::backend::Backend;
use pagefold::config::args::RunArgs as Args;
use pagefold::config::flags::RunFlags;
use pagefold::config::scope::ScopeArgs as Processes;
use pagefold::config::settings::{MechanismChoice, Settings};
use pagefold::control::queue::RunFacts;
use pagefold::daemon::{Daemon, Start};
use pagefold::preflight;
use pagefold_engine::config::Config;
use pagefold_engine::host::Mechanism;
use pagefold_text::exit::{self, Exit};
use pagefold_text::messages;
use pagefold_xen::backend::call;
use pagefold_xen::host::XenHost;
use pagefold_xen::hypervisor::Hypervisor;
use pagefold_xen::library::Xen;
use std::path::PathBuf;
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
    #[arg(long = "for", value_name = "DURATION", value_parser = pagefold::config::args::seconds)]
    duration: Option<Duration>,
    /// Find out what would be shared without changing anything
    #[arg(long)]
    dry_run: bool,
    /// Print the summary as JSON (schema pagefold.run/1)
    #[arg(long)]
    json: bool,
}

impl RunArgs {
    /// The options of `pagefold run` that correspond to these.
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
    // We set signal handlers first, so from here on the run always ends in an orderly way.
    let start = Start::of("pagefold-xen")?;
    start.signals.on(signal_hook::consts::SIGHUP, &start.signals.stop)?;
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
    let config = Config { mechanism: Mechanism::Request, ..settings.config.clone() };
    let facts = RunFacts { scope: own.scope.to_string(), ..RunFacts::new(args.dry_run, &settings.scope, &config) };
    let outputs = start.open(args, settings)?;
    // We can give up rights now, because from here on we only need files that are already open.
    preflight::give_up_rights(&[])?;
    messages::start().context("cannot start the thread for messages")?;
    let clock = LiveClock::new(outputs.signals.stop.clone(), outputs.signals.woken.clone());
    let host = LiveXen::new(xen, clock, guests, !args.dry_run).map_err(|error| LiveXen::explain(&error))?;
    if host.guests().all(|guest| guest.left_alone.is_some()) {
        return Err(refuse_all(host.left_alone()).into());
    }
    let code = Daemon::new(outputs, facts, host).run(Vec::new());
    drop(lock);
    code
}
