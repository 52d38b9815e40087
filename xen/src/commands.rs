//! The commands of `pagefold-xen`: pagefold's judgement, tables and JSON, for guests instead of processes.

pub mod doctor;
pub mod explain;
pub mod run;
pub mod scan;
pub mod unmerge;

use pagefold::commands::run::progress::LeftAlone;
use pagefold::preflight::need_root;
use pagefold_ksm::lock::{LOCK_PATH, Lock, LockError};
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style;
use pagefold_xen::backend::{call, select};
use pagefold_xen::guests::{InScope, SelectError, Selected, in_scope, missing, unfit};
use pagefold_xen::host::Clock;
use pagefold_xen::hypervisor::Hypervisor;
use pagefold_xen::library::{OpenError, Xen};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long we sleep at most before we look for signals and requests that end the wait.
const SLEEP_MOST: Duration = Duration::from_millis(50);

/// The guests in scope.
#[derive(Clone, Debug, clap::Args)]
pub struct ScopeArgs {
    /// These guests, by name or number (may be repeated, or separated by commas); append @ and a trust domain to set one
    #[arg(long, value_name = "GUEST", value_delimiter = ',', required = true)]
    pub xen_domain: Vec<String>,
}

impl ScopeArgs {
    fn guests(&self) -> Result<Vec<Selected>, Exit> {
        self.xen_domain.iter().map(|text| text.parse().map_err(|error| select(&error))).collect()
    }
}

impl fmt::Display for ScopeArgs {
    /// As command-line flags.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guests = self.xen_domain.iter().map(|guest| format!("--xen-domain {}", printable(guest.as_bytes())));
        f.write_str(&guests.collect::<Vec<_>>().join(" "))
    }
}

/// Loads Xen's libraries and opens the hypervisor.
pub fn open(purpose: &str) -> Result<Xen, Exit> {
    need_root(purpose)?;
    Xen::open().map_err(|error| {
        let advice = match &error {
            OpenError::NotDom0 { .. } => "run it in dom0, with xenfs mounted at /proc/xen",
            OpenError::NoLibrary { .. } => {
                "install Xen's libraries (on Debian libxenmisc4.17), and use a pagefold-xen that is linked dynamically"
            }
            OpenError::Open { .. } => "is xenstored running?",
        };
        Exit::new(exit::NO_KERNEL_SUPPORT, format!("{error}; {advice}"))
    })
}

/// Takes the machine-wide lock, so that no other pagefold shares memory meanwhile.
fn take_lock() -> Result<Lock, Exit> {
    Lock::try_take(Path::new(LOCK_PATH)).map_err(|error| match error {
        LockError::Held { pid } => {
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            Exit::new(exit::KSM_TAKEN, format!("another pagefold{pid} is at work; stop it first, or use it instead"))
        }
        LockError::Denied { .. } => Exit::new(exit::NOT_PERMITTED, format!("{error}; run as root")),
        LockError::Io { .. } => Exit::new(exit::FAILURE, error.to_string()),
    })
}

/// Finds the guests in scope. A guest that the user names must exist.
fn resolve(xen: &mut impl Hypervisor, scope: &[Selected]) -> Result<Vec<InScope>, Exit> {
    let domains = xen.domains().map_err(|error| call(&error))?;
    let found = in_scope(xen, scope, domains).map_err(|error| select(&error))?;
    match missing(scope, &found) {
        Some(guest) => Err(select(&SelectError::Unknown(guest.guest.clone()))),
        None => Ok(found),
    }
}

/// The refusal of a scope that has only guests that we must leave alone.
fn refuse_all(left_alone: &[LeftAlone]) -> Exit {
    let Some(LeftAlone { pid, name, reason }) = left_alone.first() else {
        return Exit::new(exit::NO_SCOPE, "no guest is in scope");
    };
    let others = match left_alone.len() - 1 {
        0 => String::new(),
        others => format!(" (and so are {})", style::count(others, "other", "others")),
    };
    Exit::new(exit::REFUSED, format!("guest {name} ({pid}) is left alone: {reason}{others}; nothing else is in scope"))
}

/// Refuses a scope if none of its guests can share memory.
fn refuse_unfit(guests: &[InScope]) -> Result<(), Exit> {
    let mut left_alone = Vec::new();
    for guest in guests {
        let Some(why) = unfit(&guest.domain) else { return Ok(()) };
        left_alone.push(guest.left_alone(why));
    }
    Err(refuse_all(&left_alone))
}

/// The machine's clocks, and a wait that signals and requests interrupt.
#[derive(Debug)]
pub struct LiveClock {
    began: Instant,
    /// Set when the run should end.
    stop: Arc<AtomicBool>,
    /// Set when the run should end or when there's a request to serve.
    woken: Arc<AtomicBool>,
}

impl LiveClock {
    pub fn new(stop: Arc<AtomicBool>, woken: Arc<AtomicBool>) -> Self {
        Self { began: Instant::now(), stop, woken }
    }
}

impl Clock for LiveClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn cpu_ns(&self) -> u64 {
        own_cpu_ns()
    }

    fn wait(&mut self, ns: u64) {
        let end = Instant::now() + Duration::from_nanos(ns);
        while !self.woken.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(SLEEP_MOST));
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        scope: ScopeArgs,
    }

    fn scope(args: &[&str]) -> Result<Vec<String>, u8> {
        let cli = Cli::try_parse_from(["x"].iter().chain(args)).map_err(|_| exit::USAGE)?;
        let found = cli.scope.guests().map_err(|exit| exit.code)?;
        Ok(found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn guests_repeat_and_separate_by_commas() {
        let args = ["--xen-domain", "a,b@c", "--xen-domain", "7"];
        assert_eq!(scope(&args), Ok(vec!["a".to_owned(), "b@c".to_owned(), "7".to_owned()]));
        let cli = Cli::try_parse_from(["x"].iter().chain(&args)).unwrap();
        assert_eq!(cli.scope.to_string(), "--xen-domain a --xen-domain b@c --xen-domain 7");
        assert_eq!(scope(&[]), Err(exit::USAGE));
        assert_eq!(scope(&["--xen-domain", "a", "--pid", "1"]), Err(exit::USAGE));
        assert_eq!(scope(&["--xen-domain", "a@"]), Err(exit::USAGE));
        assert_eq!(scope(&["--xen-domain", "Domain-0"]), Err(exit::REFUSED));
    }

    #[test]
    fn where_there_is_no_xen_one_line_says_so() {
        if Path::new("/proc/xen/capabilities").exists() || need_root("this").is_err() {
            println!("SKIP: this is a machine with Xen, or the user is not root");
            return;
        }
        let exit = open("sharing memory of guests").err().unwrap();
        assert_eq!(exit.code, exit::NO_KERNEL_SUPPORT);
        assert!(exit.line.contains("dom0") && !exit.line.contains('\n'), "{exit}");
    }
}
