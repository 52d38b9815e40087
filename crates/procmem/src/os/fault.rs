//! Fault injection for tests.
//!
//! `PAGEFOLD_FAULT` holds a list like `registers-set=kill,read:smaps@3=EIO`. At the named point the process kills
//! itself with SIGKILL, or the read or write fails with the named error, or never returns (`=hang`). `@3` means from
//! the third time on. Only test builds have this: it needs debug assertions and the feature `faults`, which
//! pagefold-testkit enables. Everywhere else the points do nothing. pagefold-testkit's `faults.rs` lists the points.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const VARIABLE: &str = "PAGEFOLD_FAULT";

/// Environment variable that names a file. We record each injected failure there once, so that a test can check that
/// its fault occurred.
pub const SEEN_VARIABLE: &str = "PAGEFOLD_FAULT_SEEN";

static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();

#[derive(Debug)]
struct Fault {
    point: String,
    /// The fault happens each time that the process passes the point, beginning with this one, counted from 1.
    from: u64,
    effect: Effect,
    passed: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Kill,
    Errno(i32),
    Hang,
}

/// Reads the environment variable that says what should fail. Call this before a [`point`] that mustn't allocate: else
/// the first point reads the variable, and allocates.
pub fn init() {
    faults();
}

/// A point at which a test can kill this process. Does not allocate after [`init`].
pub fn point(name: &str) {
    point_of(name, "");
}

/// Like [`point`], for a point named `name:of`.
pub fn point_of(name: &str, of: &str) {
    if let Some(Fault { effect: Effect::Kill, .. }) = happens(name, of) {
        die();
    }
}

/// A point at which a test can make a read or write fail.
///
/// # Errors
/// The injected error; the caller returns it instead of reading or writing.
pub fn io(name: &str) -> io::Result<()> {
    io_of(name, "")
}

/// Like [`io`], for a point named `name:of`.
pub fn io_of(name: &str, of: &str) -> io::Result<()> {
    let Some(fault) = happens(name, of) else { return Ok(()) };
    fault.record();
    match fault.effect {
        Effect::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
        Effect::Kill => {
            die();
            Ok(())
        }
        // Imitates waiting for a lock: only a fatal signal ends it.
        Effect::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
    }
}

fn die() {
    // SAFETY: all arguments are numbers. Doesn't return if it succeeds.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

fn happens(name: &str, of: &str) -> Option<&'static Fault> {
    let fault = faults().iter().find(|fault| fault.is_of(name, of))?;
    let passage = fault.passed.fetch_add(1, Ordering::Relaxed) + 1;
    if passage >= fault.from { Some(fault) } else { None }
}

impl Fault {
    fn is_of(&self, name: &str, of: &str) -> bool {
        match self.point.strip_prefix(name) {
            Some("") => of.is_empty(),
            Some(rest) => rest.strip_prefix(':') == Some(of),
            None => false,
        }
    }

    fn record(&self) {
        if self.passed.load(Ordering::Relaxed) > self.from {
            return;
        }
        let Some(path) = std::env::var_os(SEEN_VARIABLE) else { return };
        // We ignore errors: a test that finds no record fails.
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = writeln!(file, "{}", self.point);
        }
    }
}

fn faults() -> &'static [Fault] {
    FAULTS.get_or_init(|| parse(&std::env::var(VARIABLE).unwrap_or_default()))
}

/// Parses the variable. We skip malformed entries: such a fault doesn't occur, so its test fails anyway.
fn parse(text: &str) -> Vec<Fault> {
    text.split(',').filter_map(parse_one).collect()
}

fn parse_one(text: &str) -> Option<Fault> {
    let (point, effect) = text.rsplit_once('=')?;
    let (point, from) = point.rsplit_once('@').unwrap_or((point, "1"));
    let effect = match effect {
        "kill" => Effect::Kill,
        "hang" => Effect::Hang,
        "EIO" => Effect::Errno(libc::EIO),
        "ENOMEM" => Effect::Errno(libc::ENOMEM),
        "ENOSPC" => Effect::Errno(libc::ENOSPC),
        "EMFILE" => Effect::Errno(libc::EMFILE),
        "EPERM" => Effect::Errno(libc::EPERM),
        _ => return None,
    };
    Some(Fault { point: point.into(), from: from.parse().ok()?, effect, passed: AtomicU64::new(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_with_their_passage() {
        let faults = parse("registers-set=kill,read:smaps@3=EIO,nonsense,x=y");
        let seen: Vec<_> = faults.iter().map(|fault| (fault.point.as_str(), fault.from, fault.effect)).collect();
        assert_eq!(seen, [("registers-set", 1, Effect::Kill), ("read:smaps", 3, Effect::Errno(libc::EIO))]);
    }

    #[test]
    fn points_match_by_full_name() {
        let names = |point: &str| ["", "run"].map(|of| parse(&format!("{point}=kill"))[0].is_of("turn", of));
        assert_eq!(names("turn"), [true, false]);
        assert_eq!(names("turn:run"), [false, true]);
        assert_eq!(names("turned:run"), [false, false]);
    }

    #[test]
    fn points_do_nothing_without_the_variable() {
        point("anything");
        assert!(io("anything").is_ok());
    }
}
