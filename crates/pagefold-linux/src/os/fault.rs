//! Named faults, so that tests can have things go wrong at the worst moment.
//!
//! `PAGEFOLD_FAULT` holds a list like `registers-set=kill,read:smaps@3=EIO`: at the point of that name, from its third
//! passage on where `@3` says so, this process kills itself as `kill -9` would, or the read or write fails with that
//! error, or it never comes back (`=hang`). Without the variable a point costs one load. Only who starts a process sets
//! its environment, and can kill it anyway.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The environment variable.
pub const VARIABLE: &str = "PAGEFOLD_FAULT";

/// Names a file in which each read or write that was made to fail is noted once: a test that nothing came of proves
/// nothing if nothing failed.
pub const SEEN_VARIABLE: &str = "PAGEFOLD_FAULT_SEEN";

/// The points of a daemon's life, and of giving memory back, at which something is left turned. Those of the injector
/// are its own.
pub const POINTS: &[&str] = &[
    "injector-started",
    "lock-taken",
    "state-begun",
    "state-written",
    "state-saved",
    "turn:max_page_sharing",
    "turned:max_page_sharing",
    "turn:use_zero_pages",
    "turned:use_zero_pages",
    "socket-made",
    "mark",
    "marked",
    "order:kick",
    "turn:pages_to_scan",
    "turned:pages_to_scan",
    "turn:sleep_millisecs",
    "turned:sleep_millisecs",
    "turn:run",
    "turned:run",
    "order:rest",
    "order:pace",
    "put-back:run",
    "was-put-back:run",
    "put-back:sleep_millisecs",
    "was-put-back:sleep_millisecs",
    "put-back:pages_to_scan",
    "was-put-back:pages_to_scan",
    "put-back:use_zero_pages",
    "was-put-back:use_zero_pages",
    "put-back:max_page_sharing",
    "was-put-back:max_page_sharing",
    "state-closing",
    "state-closed",
    "unmark",
    "unmarked",
];

/// The reads of the live layer: files below `/proc/PID` (the last part of their path), of KSM, of the whole machine,
/// of memory cgroups, and our own.
pub const READS: &[&str] = &[
    "read:stat",
    "read:status",
    "read:exe",
    "read:cgroup",
    "read:statm",
    "read:maps",
    "read:smaps",
    "read:pagemap",
    "read:oom_score_adj",
    "read:mem",
    "read:process_vm_readv",
    "read:schedstat",
    "read:ksm_stat",
    "read:kpageflags",
    "read:ksm:run",
    "read:ksm:pages_to_scan",
    "read:ksm:max_page_sharing",
    "read:ksm:pages_shared",
    "read:ksm:pages_scanned",
    "read:ksm:full_scans",
    "read:ksm:advisor_mode",
    "read:proc",
    "read:loadavg",
    "read:meminfo",
    "read:pressure/memory",
    "read:vmstat",
    "read:boot_id",
    "read:limits",
    "read:state",
    "read:lock",
];

/// The writes.
pub const WRITES: &[&str] = &["write:state", "write:lock", "write:knob"];

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
    Hang,
}

/// Reads the variable now. Otherwise the first point does, which allocates.
pub fn init() {
    faults();
}

/// A point at which this process may be made to die. Does not allocate after [`init`].
pub fn point(name: &str) {
    point_of(name, "");
}

/// The same for a point named `name:of`.
pub fn point_of(name: &str, of: &str) {
    if happens(name, of).is_some_and(|fault| fault.what == What::Kill) {
        die();
    }
}

/// A read or write that may be made to fail: `Err` instead of doing it.
pub fn io(name: &str) -> io::Result<()> {
    io_of(name, "")
}

/// The same for one named `name:of`.
pub fn io_of(name: &str, of: &str) -> io::Result<()> {
    let Some(fault) = happens(name, of) else { return Ok(()) };
    fault.note();
    match fault.what {
        What::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
        What::Kill => {
            die();
            Ok(())
        }
        // As one who waits for a lock that only a fatal signal frees him from.
        What::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
    }
}

fn die() {
    // SAFETY: takes no memory, and does not return when it works.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

fn happens(name: &str, of: &str) -> Option<&'static Fault> {
    let fault = faults().iter().find(|fault| fault.is_of(name, of))?;
    (fault.passed.fetch_add(1, Ordering::Relaxed) + 1 >= fault.from).then_some(fault)
}

impl Fault {
    fn is_of(&self, name: &str, of: &str) -> bool {
        match self.point.strip_prefix(name) {
            Some("") => of.is_empty(),
            Some(rest) => rest.strip_prefix(':') == Some(of),
            None => false,
        }
    }

    fn note(&self) {
        let first = self.passed.load(Ordering::Relaxed) <= self.from;
        let Some(path) = std::env::var_os(SEEN_VARIABLE).filter(|_| first) else { return };
        // A test that finds nothing noted fails.
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| writeln!(file, "{}", self.point));
    }
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
            "hang" => What::Hang,
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
    fn a_name_and_what_it_is_of_go_together() {
        let names = |point: &str| ["", "run"].map(|of| parse(&format!("{point}=kill"))[0].is_of("turn", of));
        assert_eq!(names("turn"), [true, false]);
        assert_eq!(names("turn:run"), [false, true]);
        assert_eq!(names("turned:run"), [false, false]);
    }

    /// A point that is in no list is in no test.
    #[test]
    fn every_point_is_listed() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let listed: Vec<&str> = [POINTS, READS, WRITES].concat();
        let mut paths = vec![root.join("pagefold-linux/src"), root.join("pagefold/src")];
        while let Some(path) = paths.pop() {
            if path.is_dir() {
                paths.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            // The injector's points are in none of these lists.
            let own = path.parent().is_some_and(|dir| dir.ends_with("inject")) && !path.ends_with("unmerge.rs");
            if own || path.ends_with("fault.rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for call in ["fault::point(", "fault::point_of(", "fault::io(", "fault::io_of("] {
                for (at, _) in text.match_indices(call) {
                    let words = text[at + call.len()..].strip_prefix('"').expect("a name, not a variable");
                    let name = words.split('"').next().unwrap();
                    let found = listed.iter().any(|&one| one == name || one.starts_with(&format!("{name}:")));
                    assert!(found, "{name:?} of {} is in no list", path.display());
                }
            }
        }
    }

    #[test]
    fn without_the_variable_nothing_happens() {
        point("anything");
        assert!(io("anything").is_ok());
    }
}
