//! Named faults, so that tests can have things go wrong at the worst moment.
//!
//! `PAGEFOLD_FAULT` holds a list like `registers-set=kill,read:smaps@3=EIO`: at the point of that name, from its third
//! passage on where `@3` says so, this process kills itself as `kill -9` would, or the read or write fails with that
//! error. Without the variable a point costs one load. Only who starts a process sets its environment, and can kill it
//! anyway.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The environment variable.
pub const VARIABLE: &str = "PAGEFOLD_FAULT";

static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();

#[derive(Debug)]
struct Fault {
    point: String,
    /// The passage from which on it happens, counted from 1.
    from: u64,
    what: What,
    passed: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Kill,
    Errno(i32),
}

/// Reads the variable now. Otherwise the first point does, which allocates.
pub fn init() {
    faults();
}

/// A point at which this process may be made to die. Does not allocate after [`init`].
pub fn point(name: &str) {
    if happens(name) == Some(What::Kill) {
        // SAFETY: takes no memory, and does not return when it works.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
}

/// A read or write that may be made to fail: `Err` instead of doing it.
pub fn io(name: &str) -> io::Result<()> {
    match happens(name) {
        Some(What::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
        Some(What::Kill) => {
            point(name);
            Ok(())
        }
        None => Ok(()),
    }
}

fn happens(name: &str) -> Option<What> {
    let fault = faults().iter().find(|fault| fault.point == name)?;
    (fault.passed.fetch_add(1, Ordering::Relaxed) + 1 >= fault.from).then_some(fault.what)
}

fn faults() -> &'static [Fault] {
    FAULTS.get_or_init(|| std::env::var(VARIABLE).map_or(Vec::new(), |text| parse(&text)))
}

/// What cannot be read is left out: a test that names a fault wrongly finds that nothing fails.
fn parse(text: &str) -> Vec<Fault> {
    let fault = |word: &str| {
        let (point, what) = word.rsplit_once('=')?;
        let (point, from) = point.rsplit_once('@').map_or((point, "1"), |split| split);
        let what = match what {
            "kill" => What::Kill,
            "EIO" => What::Errno(libc::EIO),
            "ENOMEM" => What::Errno(libc::ENOMEM),
            "ENOSPC" => What::Errno(libc::ENOSPC),
            "EMFILE" => What::Errno(libc::EMFILE),
            _ => return None,
        };
        Some(Fault { point: point.into(), from: from.parse().ok()?, what, passed: AtomicU64::new(0) })
    };
    text.split(',').filter_map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named_with_their_passage() {
        let faults = parse("registers-set=kill,read:smaps@3=EIO,nonsense,x=y");
        let seen: Vec<_> = faults.iter().map(|fault| (fault.point.as_str(), fault.from, fault.what)).collect();
        assert_eq!(seen, [("registers-set", 1, What::Kill), ("read:smaps", 3, What::Errno(libc::EIO))]);
    }

    #[test]
    fn without_the_variable_nothing_happens() {
        point("anything");
        assert!(io("anything").is_ok());
    }
}
