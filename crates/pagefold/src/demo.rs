//! `pagefold demo`: what is duplicate, folding it, what that costs, and KSM by itself beside it, on programs that the
//! demonstration starts and ends itself. Every figure is measured while it runs.

mod picture;
mod watch;
mod words;
mod workers;

use crate::commands::run::{rounds, take};
use crate::commands::scan::{self, ScanArgs};
use crate::commands::unmerge;
use crate::config::settings::seed;
use crate::preflight;
use anyhow::{Context, Result, bail};
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::flags::DenyFlags;
use pagefold_cli::scope::ScopeArgs;
use pagefold_cli::style::{self, Style, human};
use pagefold_core::config::Config;
use pagefold_core::engine::Engine;
use pagefold_linux::host::live::{Event, LiveHost};
use pagefold_linux::inject::mark::mark;
use pagefold_linux::inject::unmerge::unmerge;
use pagefold_linux::ksm::experiment::KsmForExperiment;
use pagefold_linux::ksm::lease::{InitialKnobs, KsmLease, KsmPaths, TakeError, other_driver, restore_deferred};
use pagefold_linux::ksm::lock::Lock;
use pagefold_linux::ksm::{Knob, Ksm};
use pagefold_linux::os::cpu::own_and_children_cpu_ns;
use pagefold_linux::os::interrupt::Interrupt;
use pagefold_linux::proc::Roots;
use pagefold_linux::proc::process::Process;
use pagefold_linux::scope::deny_list::DenyList;
use pagefold_linux::scope::eligible::eligible_spans;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use watch::{Seen, Watch};
use words::Folded;
use workers::{Size, Workers};

/// KSM by itself, as its users set it.
const KSM_PAGES: u64 = 1000;
const KSM_SLEEP_MS: u64 = 20;

/// How the demonstration is given.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Small and short, to see that it works
    #[arg(long, hide = true)]
    quick: bool,
}

/// How long the parts take.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Folding, if it has come to rest by then.
    fold: Duration,
    /// Folding, in any case.
    fold_most: Duration,
    /// KSM by itself.
    ksm: Duration,
    /// To read what was said.
    read: Duration,
}

impl Times {
    const FULL: Self = Self {
        fold: Duration::from_secs(9),
        fold_most: Duration::from_secs(20),
        ksm: Duration::from_secs(20),
        read: Duration::from_millis(2500),
    };
    const QUICK: Self = Self {
        fold: Duration::from_secs(2),
        fold_most: Duration::from_secs(10),
        ksm: Duration::from_secs(3),
        read: Duration::ZERO,
    };
}

/// Tells the story, puts everything back, and returns the exit code.
pub fn run(args: &DemoArgs) -> Result<u8> {
    // Signals first: from here on the end is always an orderly one.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).context("cannot listen for signals")?;
    }
    preflight::need_rights("the demonstration")?;
    let ksm = preflight::ksm()?;
    let size = Size::that_fits(args.quick)?;
    let mut demo = Demo {
        workers: None,
        steering: take_ksm(&ksm, &stop)?,
        ksm,
        interrupt: stop.clone().into(),
        stop,
        style: Style::of_stdout(),
        times: if args.quick { Times::QUICK } else { Times::FULL },
    };
    let told = demo.tell(size, args.quick);
    // Whatever has happened: first everything is put back, then it is told.
    let stop = demo.stop.clone();
    let style = demo.style;
    let left = demo.put_back()?;
    let interrupted = stop.load(Ordering::Relaxed);
    match (&left, told) {
        (Some(what), _) => Err(Exit::new(exit::FAILURE, format!("{what}; see pagefold doctor")).into()),
        (None, Err(_)) if interrupted => {
            Err(Exit::new(exit::FAILURE, "stopped; KSM is as it was found, and the workers have ended").into())
        }
        (None, Err(error)) => Err(error),
        (None, Ok(())) => {
            style::print(&words::end(style))?;
            Ok(exit::OK)
        }
    }
}

/// Takes KSM for the whole of the demonstration. Waits for tests and experiments that have it; refuses if anybody else
/// uses it.
fn take_ksm(ksm: &Arc<Ksm>, stop: &Arc<AtomicBool>) -> Result<KsmForExperiment> {
    let taken = KsmForExperiment::take(&stop.clone().into());
    if stop.load(Ordering::Relaxed) {
        return Err(Exit::new(exit::FAILURE, "stopped; nothing was changed").into());
    }
    // Whoever else has KSM is named, also where that has just kept it from being taken.
    drop(lock()?);
    if let Some(other) = other_driver(ksm, Path::new("/proc"))? {
        return Err(preflight::explain_take(&TakeError::InUse(other)).into());
    }
    let saved = ksm.counters()?.view(true, false).saved().bytes().0;
    if saved > 0 {
        let line = format!("KSM saves {} in other programs; give that back first, with pagefold unmerge", human(saved));
        return Err(Exit::new(exit::KSM_TAKEN, line).into());
    }
    Ok(taken?)
}

/// The lock that keeps every other pagefold from driving KSM.
fn lock() -> Result<Lock, Exit> {
    Lock::try_take(&KsmPaths::default().lock).map_err(|error| preflight::explain_take(&error.into()))
}

/// The stage. Ends the workers before it gives KSM back, also when it is dropped.
struct Demo {
    workers: Option<Workers>,
    steering: KsmForExperiment,
    ksm: Arc<Ksm>,
    stop: Arc<AtomicBool>,
    interrupt: Interrupt,
    style: Style,
    times: Times,
}

impl Demo {
    fn tell(&mut self, size: Size, quick: bool) -> Result<()> {
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
            json: false,
            html: None,
            seed: None,
        })?;
        style::print(&words::found(&report, &pids, style))?;
        self.interrupt.sleep(self.times.read * 2)?;

        let savable = report.totals.savable_gross_bytes;
        let folded = self.fold(&pids, savable)?;
        self.interrupt.check()?;
        let bytes = self.verify()?;
        style::print(&words::verified(bytes, &folded, style))?;
        self.interrupt.sleep(self.times.read)?;

        let began = Instant::now();
        let given_back = self.give_back(&pids)?;
        style::print(&words::given_back(given_back, began.elapsed(), style))?;
        self.interrupt.check()?;
        let alone = self.ksm_alone(&pids, savable, &folded)?;
        let bytes = self.verify()?;
        style::print(&words::compared(bytes, &folded, &alone, style))?;
        Ok(())
    }

    fn verify(&mut self) -> Result<u64> {
        self.workers.as_mut().context("there are no workers")?.verify()
    }

    /// What `pagefold run --pid ...` does, with pictures.
    fn fold(&mut self, pids: &[i32], savable: u64) -> Result<Folded> {
        let (style, times) = (self.style, self.times);
        style::print(&words::folding(style))?;
        let cpu_before_ns = own_and_children_cpu_ns();
        let hands = take(Some(preflight::injector()?), &self.ksm, &InitialKnobs::default())?;
        let config = Config { seed: seed(), ..Config::default() };
        let mut engine = Engine::new(config);
        let spec = scope(pids).spec();
        let mut host =
            LiveHost::new(spec, Roots::default(), DenyList::default(), self.ksm.clone(), hands, self.stop.clone())?;
        // The last round may end a little after.
        let span = times.fold.as_secs_f64() + 1.0;
        let mut first: Vec<u64> = Vec::new();
        let watch = Watch::start(self.ksm.clone(), pids, move |view| {
            if first.is_empty() {
                first = view.workers.to_vec();
            }
            words::fold_picture(view, &first, savable, span, style)
        })?;
        let began = Instant::now();
        let mut trouble = None;
        let most_ns = u64::try_from(times.fold_most.as_nanos()).unwrap_or(u64::MAX);
        let ran = rounds(&mut engine, &mut host, &self.stop, most_ns, |engine, host, _| {
            trouble = host.take_events().into_iter().next();
            let rests = !engine.is_busy() && engine.ledger().saved().0 > 0;
            if trouble.is_some() || (rests && began.elapsed() >= times.fold) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        });
        let seen = watch.finish();
        // The injector's CPU time is ours once it has ended.
        host.finish();
        let (seen, ()) = (seen?, ran?);
        match trouble {
            Some(Event::StoodDown { why }) => {
                return Err(Exit::new(exit::KSM_TAKEN, format!("{why}; see pagefold doctor")).into());
            }
            Some(Event::LeftAlone { pid, why, .. }) => bail!("worker {pid} cannot be folded: {why}"),
            None => {}
        }
        let own_ns = own_and_children_cpu_ns().saturating_sub(cpu_before_ns);
        let own_cpu = Duration::from_nanos(own_ns).saturating_sub(seen.drawing);
        Ok(Folded { seen, own_cpu, marked: engine.ledger().marked.bytes().0 })
    }

    /// What `pagefold unmerge --pid ...` does. Returns the memory that has its own copy again.
    fn give_back(&mut self, pids: &[i32]) -> Result<u64> {
        let paths = KsmPaths::default();
        let lease = KsmLease::take(self.ksm.clone(), &paths, &InitialKnobs::NONE)
            .map_err(|error| preflight::explain_take(&error))?;
        let mut injector = preflight::injector()?;
        let mut given_back = 0;
        for &pid in pids {
            given_back += unmerge(&Process::open(pid)?, &mut injector, &Roots::default())?.given_back.0;
            self.interrupt.check()?;
        }
        drop(injector);
        unmerge::settle(lease)?;
        Ok(given_back)
    }

    /// The peer: everything marked, ksmd scanning at a steady pace.
    fn ksm_alone(&mut self, pids: &[i32], savable: u64, folded: &Folded) -> Result<Seen> {
        let (style, span) = (self.style, self.times.ksm.as_secs_f64());
        style::print(&words::ksm_alone(KSM_PAGES, KSM_SLEEP_MS))?;
        // Nobody takes KSM meanwhile.
        let _lock = lock()?;
        self.steering.kernel_defaults()?;
        for &pid in pids {
            let process = Process::open(pid)?;
            mark(&process, &eligible_spans(&process)?)?;
        }
        let before: Vec<(f64, u64)> = words::curve(&folded.seen.points);
        let watch =
            Watch::start(self.ksm.clone(), &[], move |view| words::ksm_picture(view, &before, savable, span, style))?;
        self.steering.set(Knob::PagesToScan, KSM_PAGES)?;
        self.steering.set(Knob::SleepMillisecs, KSM_SLEEP_MS)?;
        self.steering.set(Knob::Run, 1)?;
        let slept = self.interrupt.sleep(self.times.ksm);
        let seen = watch.finish();
        self.steering.stop()?;
        slept?;
        seen
    }

    /// Ends the workers and puts KSM back. Returns what is not as it was, if anything.
    fn put_back(self) -> Result<Option<String>> {
        let Self { workers, mut steering, ksm, .. } = self;
        drop(workers);
        let before = steering.before().clone();
        steering.unmerge()?;
        // What a part that was cut short had to leave turned can be put back now that nothing is merged.
        restore_deferred(&ksm, &KsmPaths::default())?;
        drop(steering);
        let now = ksm.knobs()?;
        if now != before {
            return Ok(Some(format!("KSM's knobs were {before:?} and are {now:?}")));
        }
        let saved = ksm.counters()?.view(true, false).saved().bytes().0;
        Ok((saved > 0).then(|| format!("KSM still saves {}", human(saved))))
    }
}

fn scope(pids: &[i32]) -> ScopeArgs {
    ScopeArgs { pid: pids.to_vec(), ..ScopeArgs::default() }
}
