//! `pagefold demo`: starts programs that hold equal memory, and scans, merges and unmerges it with pagefold's own
//! commands. Checks the programs' data after each.

pub mod worker;
mod workers;

use crate::preflight;
use anyhow::{Context, Result, bail};
use pagefold_ksm::controller::scan_and_restore;
use pagefold_ksm::lease::{KsmLease, KsmPaths, TakeError, restore_deferred};
use pagefold_ksm::{Knobs, Ksm};
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::{self, Lines, Style, human};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use workers::{Size, Workers};

/// A scan by ksmd may take this long, and so may restoring KSM's settings.
const LIMIT: Duration = Duration::from_secs(30);
/// How often we look for signals, and whether a command has ended.
const CHECK_EVERY: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Use little memory and little time, for tests
    #[arg(long, hide = true)]
    quick: bool,
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
    let before = knobs_at_rest(&ksm)?;
    let style = Style::of_stdout();
    let demo = Demo { stop, style, quick: args.quick };
    let played = demo.play(size);
    // Even after an error, we first restore everything, and then report.
    restore(&ksm, &before)?;
    if played.is_err() && demo.is_stopped() {
        return Err(Exit::new(exit::FAILURE, "interrupted; KSM is restored and the workers have ended").into());
    }
    played?;
    demo.heading(6, "Done: everything is restored")?;
    let mut text = String::new();
    text.line("The workers have ended, nothing is merged, and every KSM setting is restored.");
    text.line(format!("Next, scan your own programs:  {}", style.good("sudo pagefold scan")));
    style::print(&text)?;
    Ok(exit::OK)
}

/// Fails if another program uses KSM. First restores settings that a killed pagefold left changed. Returns the knobs.
fn knobs_at_rest(ksm: &Arc<Ksm>) -> Result<Knobs> {
    let left = restore_deferred(ksm, &KsmPaths::default()).map_err(|error| preflight::explain_take(&error))?;
    let lease = lease(ksm)?;
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

fn lease(ksm: &Arc<Ksm>) -> Result<KsmLease, Exit> {
    let end = Instant::now() + LIMIT;
    loop {
        match KsmLease::take(ksm.clone(), &KsmPaths::default(), &[]) {
            // A command that was interrupted may have left ksmd in a scan. Each attempt waits for ksmd.
            Err(TakeError::Recovering) if Instant::now() < end => {}
            taken => return taken.map_err(|error| preflight::explain_take(&error)),
        }
    }
}

/// Restores KSM after the workers have ended, even if one of our commands was interrupted. Also unmerges the pages that
/// ksmd has merged in other programs, because these had marked their memory.
fn restore(ksm: &Arc<Ksm>, before: &Knobs) -> Result<()> {
    let lease = lease(ksm)?;
    if ksm.anything_merged()? {
        lease.unmerge_everything()?;
    }
    lease.restore(LIMIT);
    let now = ksm.knobs()?;
    if now != *before {
        bail!("KSM's settings were {before:?} and are now {now:?}; see pagefold doctor");
    }
    let saved = ksm.counters()?.pages_sharing.bytes().0;
    if saved > 0 {
        bail!("KSM still saves {}; see pagefold doctor", human(saved));
    }
    Ok(())
}

struct Demo {
    stop: Arc<AtomicBool>,
    style: Style,
    quick: bool,
}

impl Demo {
    fn play(&self, size: Size) -> Result<()> {
        let style = self.style;
        let mut text = String::new();
        text.line(style.bold("pagefold: one copy of memory that programs hold twice"));
        text.line(style.dim("Takes half a minute, and marks only memory of programs that it starts itself."));
        text.line(style.dim("Ctrl-C stops it at any time and restores everything."));
        style::print(&text)?;

        let mut workers = Workers::start(size)?;
        let bytes = workers.verify()?;
        let before = workers.memory()?;
        self.heading(1, &format!("Start: {} workers of one program", workers.count()))?;
        let mut text = String::new();
        text.line(format!("{} together, written and checked byte by byte.", style.bold(&human(bytes))));
        text.line("Each holds data that all others also hold, data of its own, and zeros.");
        if size.is_reduced(self.quick) {
            text.line(style.dim("Smaller than normal, because little memory is free."));
        }
        style::print(&text)?;
        self.pause()?;

        let pids = workers.pids();
        self.heading(2, "Scan: how much of that is duplicate?")?;
        self.command(&["scan", "--exact"], &pids)?;
        self.pause()?;

        self.heading(3, "Merge: pagefold finds and marks the duplicates, the kernel merges them")?;
        self.command(&["run", "--governor", "full", "--for", if self.quick { "6s" } else { "15s" }], &pids)?;

        self.heading(4, "Check: is the data intact?")?;
        let merged = self.check(&mut workers, before)?;
        if merged >= before {
            bail!("no memory was merged; run pagefold doctor");
        }
        self.pause()?;

        self.heading(5, "Unmerge: every worker gets its own copies again")?;
        self.command(&["unmerge"], &pids)?;
        style::print("\n")?;
        let unmerged = self.check(&mut workers, merged)?;
        if unmerged.saturating_sub(merged) < (before - merged) / 10 * 9 {
            bail!("not all memory was unmerged; please report this bug");
        }
        Ok(())
    }

    fn heading(&self, number: u32, text: &str) -> Result<()> {
        let number = self.style.plain(&number.to_string());
        Ok(style::print(&format!("\n{number}  {}\n\n", self.style.bold(text)))?)
    }

    /// Compares every byte of the workers' data, and returns how much memory they take now.
    fn check(&self, workers: &mut Workers, before: u64) -> Result<u64> {
        let bytes = workers.verify()?;
        let now = workers.memory()?;
        let mut text = String::new();
        text.line(format!("{} {} of data, checked again.", self.style.good("Every byte is intact:"), human(bytes)));
        let change = format!("{} -> {}", human(before), human(now));
        text.line(format!("The workers' memory (Pss_Anon): {}", self.style.bold(&change)));
        style::print(&text)?;
        Ok(now)
    }

    /// Shows a command line of pagefold, and runs it. A signal that ends the demonstration also ends the command.
    fn command(&self, words: &[&str], pids: &[String]) -> Result<()> {
        let line = format!("$ pagefold {} {}", words.join(" "), pids.join(" "));
        style::print(&format!("{}\n", self.style.good(&line)))?;
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(words).args(pids).stdin(Stdio::null()).spawn().context("cannot run pagefold")?;
        let mut is_told = false;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if self.is_stopped() && !is_told {
                // This fails only for a process that has been reaped.
                let _ = kill_process(Pid::from_child(&child), Signal::TERM);
                is_told = true;
            }
            std::thread::sleep(CHECK_EVERY);
        };
        if self.is_stopped() {
            bail!("interrupted");
        }
        if !status.success() {
            bail!("pagefold {} failed ({status}); run pagefold doctor", words[0]);
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Gives the user time to read, unless a signal comes.
    fn pause(&self) -> Result<()> {
        let end = Instant::now() + Duration::from_millis(if self.quick { 0 } else { 2500 });
        while !self.is_stopped() {
            if Instant::now() >= end {
                return Ok(());
            }
            std::thread::sleep(CHECK_EVERY);
        }
        bail!("interrupted")
    }
}
