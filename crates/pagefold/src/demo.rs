//! `pagefold demo`: finds and merges the duplicates of programs that it starts itself, and shows the cost. All figures
//! that it shows are measured while it runs.

mod picture;
mod watch;
mod words;
pub mod worker;
mod workers;

use crate::commands::run::take;
use crate::commands::scan::{self, ScanArgs};
use crate::commands::unmerge;
use crate::config::flags::DenyFlags;
use crate::config::scope::ScopeArgs;
use crate::config::settings::seed;
use crate::daemon::Cycles;
use crate::preflight;
use anyhow::{Context, Result, bail};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::sampling::census::bytes_of;
use pagefold_engine::units::Pages;
use pagefold_host::live::{Event, LiveHost};
use pagefold_host::scope::deny_list::DenyList;
use pagefold_inject::unmerge::{Unmerged, unmerge};
use pagefold_ksm::controller::scan_and_restore;
use pagefold_ksm::lease::{INITIAL_KNOBS, KsmLease, KsmPaths, restore_deferred};
use pagefold_ksm::{Knob, Knobs, Ksm};
use pagefold_procmem::Roots;
use pagefold_procmem::os::cpu::own_and_children_cpu_ns;
use pagefold_procmem::os::interrupt::Interrupt;
use pagefold_procmem::process::Process;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::{self, Style, human};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use watch::Watch;
use words::Merged;
use workers::{Size, Workers};

/// A scan by ksmd may take this long, and so may restoring KSM's settings.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Use little memory and little time, for tests
    #[arg(long, hide = true)]
    quick: bool,
}

#[derive(Clone, Copy, Debug)]
struct Times {
    /// Merge for at least this long, and then until there's nothing left to do.
    merge: Duration,
    /// Merge for at most this long.
    merge_most: Duration,
    /// Pauses in which the user can read the text.
    read: Duration,
}

impl Times {
    const FULL: Self =
        Self { merge: Duration::from_secs(9), merge_most: Duration::from_secs(20), read: Duration::from_millis(2500) };
    const QUICK: Self =
        Self { merge: Duration::from_secs(2), merge_most: Duration::from_secs(10), read: Duration::ZERO };
}

/// Runs the demonstration, restores everything, and returns the exit code.
pub fn run(args: &DemoArgs) -> Result<u8> {
    // Install the handlers first, so that a signal never ends us before we've restored everything.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).context("cannot install signal handlers")?;
    }
    preflight::need_rights("the demonstration")?;
    let ksm = preflight::ksm()?;
    let size = Size::that_fits(args.quick)?;
    let mut demo = Demo {
        workers: None,
        before: check_ksm(&ksm)?,
        ksm,
        interrupt: stop.clone().into(),
        stop,
        style: Style::of_stdout(),
        times: if args.quick { Times::QUICK } else { Times::FULL },
    };
    let ran = demo.play(size, args.quick);
    // Even after an error, we first restore everything, and then report.
    let stop = demo.stop.clone();
    let style = demo.style;
    let left = demo.restore()?;
    let interrupted = stop.load(Ordering::Relaxed);
    match (&left, ran) {
        (Some(what), _) => Err(Exit::new(exit::FAILURE, format!("{what}; see pagefold doctor")).into()),
        (None, Err(_)) if interrupted => {
            Err(Exit::new(exit::FAILURE, "interrupted; KSM is restored and the workers have ended").into())
        }
        (None, Err(error)) => Err(error),
        (None, Ok(())) => {
            style::print(&words::end(style))?;
            Ok(exit::OK)
        }
    }
}

/// Fails if another program uses KSM. First restores settings that a killed pagefold left changed. Returns the knobs.
fn check_ksm(ksm: &Arc<Ksm>) -> Result<Knobs> {
    let left = restore_deferred(ksm, &KsmPaths::default()).map_err(|error| preflight::explain_take(&error))?;
    let lease = lease(ksm, &[])?;
    if left.is_some() {
        // KSM counts the pages of killed workers until ksmd's next scan.
        scan_and_restore(lease, LIMIT)?;
    }
    // We leave out merged zero pages, because kernels count them wrongly.
    let saved = ksm.counters()?.pages_sharing.bytes().0;
    if saved > 0 {
        let line =
            format!("KSM already saves {} in other programs; unmerge them first with pagefold unmerge", human(saved));
        return Err(Exit::new(exit::KSM_TAKEN, line).into());
    }
    let mut knobs = ksm.knobs()?;
    if knobs.run == 2 {
        // After somebody has unmerged everything, `run` stays 2, but our leases leave 0.
        knobs.run = 0;
    }
    Ok(knobs)
}

fn lease(ksm: &Arc<Ksm>, initial: &[(Knob, u64)]) -> Result<KsmLease, Exit> {
    KsmLease::take(ksm.clone(), &KsmPaths::default(), initial).map_err(|error| preflight::explain_take(&error))
}

/// The state of the demonstration. Dropping this ends the workers.
struct Demo {
    workers: Option<Workers>,
    ksm: Arc<Ksm>,
    before: Knobs,
    stop: Arc<AtomicBool>,
    interrupt: Interrupt,
    style: Style,
    times: Times,
}

impl Demo {
    fn play(&mut self, size: Size, quick: bool) -> Result<()> {
        let style = self.style;
        style::print(&words::opening(style))?;
        let began = Instant::now();
        let mut workers = Workers::start(size)?;
        self.interrupt.check()?;
        workers.verify()?;
        let text = words::started(workers.count(), size.bytes(), size.is_reduced(quick), began.elapsed(), style);
        style::print(&text)?;
        let pids = workers.pids();
        self.workers = Some(workers);
        self.interrupt.sleep(self.times.read)?;

        let report = scan::scan(&ScanArgs {
            scope: scope(&pids),
            deny: DenyFlags::default(),
            exact: true,
            why: false,
            json: false,
            html: None,
            seed: None,
        })?;
        style::print(&words::found(&report, &pids, style))?;
        self.interrupt.sleep(self.times.read * 2)?;

        let savable = bytes_of(report.totals.savable_gross);
        let merged = self.merge(&pids, savable)?;
        self.interrupt.check()?;
        let bytes = self.verify()?;
        style::print(&words::verified(bytes, &merged, style))?;
        self.interrupt.sleep(self.times.read)?;

        let began = Instant::now();
        let unmerged = self.unmerge(&pids)?;
        style::print(&words::unmerged(unmerged, began.elapsed(), style))?;
        self.interrupt.check()?;
        let bytes = self.verify()?;
        style::print(&words::verified_again(bytes, style))?;
        Ok(())
    }

    fn verify(&mut self) -> Result<u64> {
        self.workers.as_mut().context("there are no workers")?.verify()
    }

    /// Merges as `pagefold run --pid ...` does, and shows the progress.
    fn merge(&mut self, pids: &[i32], savable: u64) -> Result<Merged> {
        let style = self.style;
        let times = self.times;
        style::print(&words::merging(style))?;
        let cpu_before_ns = own_and_children_cpu_ns();
        let knobs = take(Some(preflight::injector()?), &self.ksm, &INITIAL_KNOBS)?;
        let config = Config { seed: seed(), governor: Governor::Full, ..Config::default() };
        let mut engine = Engine::new(config);
        let spec = scope(pids).spec();
        let mut host =
            LiveHost::new(spec, Roots::default(), DenyList::default(), self.ksm.clone(), knobs, self.stop.clone())?;
        // The last cycle may end a little after the time for merging.
        let span = times.merge.as_secs_f64() + 1.0;
        let mut first: Vec<u64> = Vec::new();
        let watch = Watch::start(self.ksm.clone(), pids, move |view| {
            if first.is_empty() {
                first = view.workers.to_vec();
            }
            words::merge_picture(view, &first, savable, span, style)
        })?;
        let began = Instant::now();
        let most_ns = u64::try_from(times.merge_most.as_nanos()).unwrap_or(u64::MAX);
        let ran = run_cycles(&mut engine, &mut host, Cycles::until(self.stop.clone(), most_ns), began + times.merge);
        let observed = watch.finish();
        // The kernel adds the injector's CPU time to ours only when the injector ends.
        host.finish();
        let observed = observed?;
        match ran? {
            Some(Event::StoodDown { why }) => {
                return Err(Exit::new(exit::KSM_TAKEN, format!("{why}; see pagefold doctor")).into());
            }
            Some(Event::LeftAlone { pid, why, .. } | Event::Withdrawn { pid, reason: why, .. }) => {
                bail!("worker {pid} cannot be merged: {why}; run pagefold doctor")
            }
            Some(Event::Overridden { .. } | Event::InjectorRestarted { .. }) | None => {}
        }
        let own_ns = own_and_children_cpu_ns().saturating_sub(cpu_before_ns);
        let own_cpu = Duration::from_nanos(own_ns).saturating_sub(observed.display_cpu);
        Ok(Merged { observed, own_cpu, marked: engine.ledger().marked.bytes().0 })
    }

    /// Unmerges as `pagefold unmerge --pid ...` does. Returns the number of bytes unmerged.
    fn unmerge(&mut self, pids: &[i32]) -> Result<u64> {
        let lease = lease(&self.ksm, &[])?;
        let injector = preflight::injector()?;
        let mut unmerged = 0;
        for &pid in pids {
            let mut done = Unmerged::default();
            unmerge(&Process::open(pid)?, &injector.handle(), &Roots::default(), &mut done)?;
            unmerged += done.given_back.0;
            self.interrupt.check()?;
        }
        drop(injector);
        unmerge::settle(lease)?;
        Ok(unmerged)
    }

    /// Unmerges other programs' memory that ksmd has merged because these programs had marked it.
    fn unmerge_others(&self) -> Result<()> {
        let lease = lease(&self.ksm, &[])?;
        if self.ksm.anything_merged()? {
            lease.unmerge_everything()?;
        }
        lease.restore(LIMIT);
        Ok(())
    }

    /// Ends the workers and restores KSM. Returns a sentence if KSM isn't as it was before.
    fn restore(mut self) -> Result<Option<String>> {
        self.workers = None;
        // An interrupted part may have left settings changed.
        self.unmerge_others()?;
        let now = self.ksm.knobs()?;
        if now != self.before {
            return Ok(Some(format!("KSM's settings were {:?} and are now {now:?}", self.before)));
        }
        let saved = self.ksm.counters()?.pages_sharing.bytes().0;
        Ok((saved > 0).then(|| format!("KSM still saves {}", human(saved))))
    }
}

/// Runs cycles until nothing is left to do, but at least until the time `least`. If an event spoils the demonstration,
/// returns that event at once.
fn run_cycles(
    engine: &mut Engine,
    host: &mut LiveHost,
    mut cycles: Cycles,
    least: Instant,
) -> Result<Option<Event>, Exit> {
    while cycles.next(engine, host)?.is_some() {
        for event in host.take_events() {
            if !matches!(event, Event::InjectorRestarted { .. }) {
                return Ok(Some(event));
            }
        }
        let at_rest = !engine.is_busy() && engine.ledger().saved > Some(Pages(0));
        if at_rest && Instant::now() >= least {
            break;
        }
    }
    Ok(None)
}

fn scope(pids: &[i32]) -> ScopeArgs {
    ScopeArgs { pid: pids.to_vec(), ..ScopeArgs::default() }
}
