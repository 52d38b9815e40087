//! The operations that the daemon needs from a machine in addition to the engine's [`Host`]. With them, one loop
//! ([`crate::daemon`]) serves this machine's processes, Xen guests (pagefold-xen), and the simulated host of tests.

use crate::audit::Owner;
use crate::background::Background;
use crate::commands::run::progress::Progress;
use crate::commands::run::reload::ActiveSettings;
use crate::config::ownership::shown;
use crate::config::scope::{ScopeArgs, explain};
use crate::control::orders::Orders;
use crate::control::queue::{Facts, Order, RunFacts};
use crate::kept_out;
use crate::output::xen::XenView;
use crate::sketch;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{LimitKey, RegionKey};
use pagefold_host::live::{Ended, Event, LiveError, LiveHost};
use pagefold_text::exit::{self, Exit};
use std::sync::mpsc::Receiver;

/// A machine that the daemon works on. Its targets are processes or guests.
pub trait Backend: Host + Sized {
    /// The words for one target and for several.
    const TARGET: &'static str = "process";
    const TARGETS: &'static str = "processes";

    /// The exit code and advice for an error that ends the run.
    fn explain(error: &Self::Error) -> Exit;

    /// The time on the clock that snapshots use.
    fn now_ns(&self) -> u64;

    /// How many targets are in scope.
    fn target_count(&self) -> usize;

    /// Whether every target has ended and no other can enter the scope.
    fn has_ended(&self, _scope: &ScopeArgs) -> bool {
        false
    }

    /// The pid or guest number of a region's target.
    fn pid_of(&self, region: RegionKey) -> Option<i32>;

    /// Describes a target for the audit log.
    fn owner(&self, pid: i32) -> Option<Owner>;

    /// All facts that `status`, `top` and `explain` need.
    fn facts(&self, engine: &Engine, run: RunFacts) -> Facts;

    /// How many descendants of excluded processes we've found.
    fn adopted(&self) -> u64 {
        0
    }

    /// The events since the last call.
    fn take_events(&mut self) -> Vec<Event>;

    /// The path of the cgroup that has this limit.
    fn limited_path(&self, _limit: LimitKey) -> String {
        String::new()
    }

    /// Begins new requests about targets, and answers finished ones.
    fn carry_out(&mut self, orders: &mut Orders, new: Vec<Order>, active: &mut ActiveSettings<'_>);

    /// Reads the settings again if SIGHUP asks for that. Returns the governor if it has changed.
    fn reload(
        &mut self,
        _active: &mut ActiveSettings<'_>,
        _engine: &mut Engine,
        _progress: &Progress,
    ) -> Option<Governor> {
        None
    }

    /// Tells the backend the length of a round (one pass over the ladder's levels), which depends on the governor.
    fn set_round_ns(&mut self, _ns: u64) {}

    /// Reads some memory for the workloads' sketches.
    fn sketch(&mut self, _sketches: &mut sketch::Writer, _engine: &mut Engine) {}

    /// Ends the run and restores everything that it changed, such as KSM's settings.
    fn finish(self) -> Ending;
}

/// A machine's state at the end of a run, for the summary.
#[derive(Debug)]
pub struct Ending {
    /// How many targets in scope we worked on. The others we left alone.
    pub judged: usize,
    pub ended: Ended,
    /// Xen's own figures, if the targets were Xen guests.
    pub xen: Option<XenView>,
}

/// Saves the list of excluded processes, which may have had children since we last saved it.
fn keep(host: &LiveHost) {
    let kept_out = host.kept_out().clone();
    if host.is_dry_run() || kept_out.entries().is_empty() && !kept_out::exists() {
        return;
    }
    // Dropping the handle waits until the list is written, for two seconds at most: the disk may hang.
    let _ = Background::start("kept out", move |_: Receiver<()>| {
        let written = kept_out::turn().and_then(|_turn| kept_out::write(&kept_out));
        if let Err(why) = written {
            complain!("the list of excluded processes is not up to date: {why}");
        }
    });
}

impl Backend for LiveHost {
    fn explain(error: &LiveError) -> Exit {
        match error {
            LiveError::Scope(error) => explain(error),
            error => Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")),
        }
    }

    fn now_ns(&self) -> u64 {
        self.now_ns()
    }

    fn target_count(&self) -> usize {
        self.targets().count()
    }

    fn has_ended(&self, scope: &ScopeArgs) -> bool {
        self.targets().next().is_none() && !scope.is_selective()
    }

    fn pid_of(&self, region: RegionKey) -> Option<i32> {
        Some(self.target_of(region)?.pid())
    }

    fn owner(&self, pid: i32) -> Option<Owner> {
        let target = self.target(pid)?;
        Some(Owner::of(&target.info, self.domains().get(usize::from(target.domain.0))))
    }

    fn facts(&self, engine: &Engine, run: RunFacts) -> Facts {
        Facts::of(engine, self, run)
    }

    fn adopted(&self) -> u64 {
        self.kept_out().adopted()
    }

    fn take_events(&mut self) -> Vec<Event> {
        self.take_events()
    }

    fn limited_path(&self, limit: LimitKey) -> String {
        self.limited_cgroup(limit).map(shown).unwrap_or_default()
    }

    fn carry_out(&mut self, orders: &mut Orders, new: Vec<Order>, active: &mut ActiveSettings<'_>) {
        orders.serve(new, self, active);
    }

    fn reload(
        &mut self,
        active: &mut ActiveSettings<'_>,
        engine: &mut Engine,
        progress: &Progress,
    ) -> Option<Governor> {
        active.reload(engine, self, progress)
    }

    fn set_round_ns(&mut self, ns: u64) {
        // Four times a round, we look for processes that have started or changed.
        self.set_refresh_interval(ns / 4);
    }

    fn sketch(&mut self, sketches: &mut sketch::Writer, engine: &mut Engine) {
        sketches.step(engine, self);
    }

    fn finish(self) -> Ending {
        let judged = self.targets().filter(|target| target.exclusion.is_none()).count();
        keep(&self);
        Ending { judged, ended: self.finish(), xen: None }
    }
}
