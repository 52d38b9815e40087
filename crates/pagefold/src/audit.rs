//! The audit log: one line of JSON (schema pagefold.audit/1) for every span of memory marked or unmarked, and for the
//! beginning and the end of what did so. No contents of memory and no digests of them.
//!
//! A line that cannot be written is lost, counted, and complained about once: nothing waits for the log.

use crate::config::ownership;
use pagefold_cli::exit::{self, Exit};
use pagefold_core::host::{Marking, Why};
use pagefold_core::units::Bytes;
use pagefold_linux::host::live::Changed;
use pagefold_linux::host::targets::Target;
use pagefold_linux::proc::maps::{VmaDetail, read_smaps};
use pagefold_linux::proc::status::printable;
use pagefold_linux::scope::Scoped;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

const SCHEMA: &str = "pagefold.audit/1";

/// What is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum Entry {
    /// A command begins that may mark or unmark.
    Begin(Begin),
    /// Memory was marked, or should have been.
    Mark(Change),
    /// Memory was unmarked, or should have been.
    Unmark(Change),
    /// The command ends.
    End(End),
}

/// What begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Begin {
    /// `run` or `unmerge`.
    pub command: &'static str,
    /// pagefold's version.
    pub version: &'static str,
    /// The process that writes this.
    pub pid: u32,
    /// Whose memory is meant, as options.
    pub scope: String,
}

/// What ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct End {
    /// `run` or `unmerge`.
    pub command: &'static str,
    /// The process that writes this.
    pub pid: u32,
    /// Lines lost since the beginning.
    pub lost: u64,
}

/// A change of one span of one process's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The process.
    pub pid: i32,
    /// When it started, clock ticks after boot: tells it from another with the same pid.
    pub start_time_ticks: u64,
    /// Its name.
    pub name: String,
    /// Its executable, where it is known.
    pub exe: Option<String>,
    /// Its effective user.
    pub uid: Option<u32>,
    /// Its cgroup.
    pub cgroup: Option<String>,
    /// Its trust domain.
    pub domain: Option<String>,
    /// The first address and the last, hexadecimal as in `/proc/PID/maps`.
    pub first: String,
    #[allow(missing_docs)]
    pub last: String,
    /// How much that is.
    pub bytes: u64,
    /// Why.
    pub why: Reason,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Why a span was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// `duplicate`, `cow-broken` or `asked`.
    pub kind: &'static str,
    /// In words.
    pub sentence: String,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// `done`, also in part; `busy`: it will be tried again; `refused`.
    pub outcome: &'static str,
    /// How much of the span is as it should be.
    pub done_bytes: u64,
}

impl From<Why> for Reason {
    fn from(why: Why) -> Self {
        let (kind, sentence) = match why {
            Why::Duplicate { duplicate, resident } => {
                let (part, all) = (duplicate.0, resident.0);
                ("duplicate", format!("{part} of its {all} resident pages are zero or have a twin"))
            }
            Why::CowBroken { ratio } => (
                "cow-broken",
                format!("{ratio} of its merged pages would be written, and hold the same again, within two hours"),
            ),
            Why::Asked => ("asked", "somebody asked for it".to_owned()),
        };
        Self { kind, sentence }
    }
}

impl From<Marking> for Outcome {
    fn from(marking: Marking) -> Self {
        match marking {
            Marking::Done(pages) => Self { outcome: "done", done_bytes: pages.bytes().0 },
            Marking::Busy => Self { outcome: "busy", done_bytes: 0 },
            Marking::Refused => Self { outcome: "refused", done_bytes: 0 },
        }
    }
}

impl Entry {
    /// What the run did to a process, which is `target` if it still is.
    pub fn changed(changed: Changed, target: Option<&Target>) -> Self {
        let Changed { pid, start_time_ticks, name, domain, mark, first, bytes, why, outcome } = changed;
        let target = target.filter(|target| target.process.start_time_ticks() == start_time_ticks);
        let change = Change {
            pid,
            start_time_ticks,
            name,
            exe: target.and_then(|target| target.exe.as_deref()).map(path_text),
            uid: target.map(|target| target.uid),
            cgroup: target.and_then(|target| target.cgroup.clone()),
            domain: Some(domain),
            first: format!("{first:x}"),
            last: last(first, bytes),
            bytes: bytes.0,
            why: why.into(),
            outcome: outcome.into(),
        };
        if mark { Self::Mark(change) } else { Self::Unmark(change) }
    }
}

fn path_text(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}

fn last(first: u64, bytes: Bytes) -> String {
    format!("{:x}", first.saturating_add(bytes.0.saturating_sub(1)))
}

/// The log, open.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    file: File,
    lost: u64,
    complained: bool,
    /// The last line ends in its middle.
    torn: bool,
}

impl Audit {
    /// Opens the log, or makes it.
    pub fn open(path: &Path) -> Result<Self, Exit> {
        // Beyond a limit on the size of files (RLIMIT_FSIZE) this signal would end the run; handled, the write fails.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
        Ok(Self { path: path.to_owned(), file: open(path)?, lost: 0, complained: false, torn: false })
    }

    /// Opens it again by its name, after it was renamed. If that fails the old one stays, whatever it is called by now.
    pub fn reopen(&mut self) -> Result<(), Exit> {
        self.file = open(&self.path)?;
        (self.torn, self.complained) = (false, false);
        Ok(())
    }

    /// Lines lost so far.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Writes one line, with the time. Never fails; returns a complaint the first time that a line is lost.
    #[must_use]
    pub fn write(&mut self, entry: &Entry) -> Option<String> {
        self.write_at(entry, SystemTime::now())
    }

    fn write_at(&mut self, entry: &Entry, time: SystemTime) -> Option<String> {
        #[derive(Serialize)]
        struct Line<'a> {
            schema: &'static str,
            time: String,
            #[serde(flatten)]
            entry: &'a Entry,
        }
        let line = Line { schema: SCHEMA, time: humantime::format_rfc3339_millis(time).to_string(), entry };
        let mut text = if self.torn { vec![b'\n'] } else { Vec::new() };
        let written = serde_json::to_writer(&mut text, &line).map_err(io::Error::from).and_then(|()| {
            text.push(b'\n');
            self.append(&text)
        });
        let error = written.err()?;
        self.lost += 1;
        if std::mem::replace(&mut self.complained, true) {
            return None;
        }
        let path = path_text(&self.path);
        Some(format!("cannot write to the audit log {path}: {error}; make room for it, the run goes on without"))
    }

    /// One call, so that lines of two writers do not mix: O_APPEND moves and writes in one (write(2)).
    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        let length = loop {
            match self.file.write(text) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.torn = length < text.len() && (length > 0 || self.torn);
        if length < text.len() {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "only a part of a line could be written"));
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File, Exit> {
    let shown = path_text(path);
    let cannot = |what: String| Exit::new(exit::USAGE, format!("the audit log {shown} {what}"));
    let directory = match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    };
    let directory = directory
        .canonicalize()
        .map_err(|error| cannot(format!("cannot be made: {error}; make its directory, for root only")))?;
    ownership::directory(&directory).map_err(|why| cannot(format!("would be in a directory that {why}")))?;
    // Neither a link to elsewhere nor a pipe that nobody reads from.
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| cannot(format!("cannot be opened: {error}; name a file in a directory of root's")))?;
    let metadata = file.metadata().map_err(|error| cannot(format!("cannot be looked at: {error}; name another")))?;
    if !metadata.is_file() {
        return Err(cannot("is no regular file; name one, or one that does not exist yet".to_owned()));
    }
    ownership::owned(metadata.uid(), metadata.mode()).map_err(|why| cannot(format!("is a file that {why}")))?;
    Ok(file)
}

/// What is marked in a process that is about to be unmarked as a whole, for the log.
#[derive(Debug)]
pub struct Before {
    process: Change,
    marked: Vec<(u64, u64)>,
}

impl Before {
    /// Looks at it. A process that cannot be read has nothing to log.
    pub fn of(scoped: &Scoped) -> Self {
        let process = Change {
            pid: scoped.process.pid(),
            start_time_ticks: scoped.process.start_time_ticks(),
            name: scoped.name.clone(),
            exe: scoped.exe.as_deref().map(path_text),
            uid: Some(scoped.uid),
            cgroup: scoped.cgroup.clone(),
            domain: scoped.domain.clone(),
            first: String::new(),
            last: String::new(),
            bytes: 0,
            why: Why::Asked.into(),
            outcome: Marking::Refused.into(),
        };
        Self { process, marked: marked(&read_smaps(&scoped.process).unwrap_or_default()) }
    }

    /// What has become of it, span by span. `refused`: nothing was or will be done to what is still marked.
    pub fn after(self, scoped: &Scoped, refused: bool) -> Vec<Entry> {
        let left = marked(&read_smaps(&scoped.process).unwrap_or_default());
        let entry = |(start, end): (u64, u64)| {
            let still: u64 = left.iter().map(|(from, to)| to.min(&end).saturating_sub(*from.max(&start))).sum();
            let outcome = match (end - start - still, refused) {
                (0, true) => Marking::Refused.into(),
                (0, false) => Marking::Busy.into(),
                (done_bytes, _) => Outcome { outcome: "done", done_bytes },
            };
            let bytes = Bytes(end - start);
            let (first, last) = (format!("{start:x}"), last(start, bytes));
            Entry::Unmark(Change { first, last, bytes: bytes.0, outcome, ..self.process.clone() })
        };
        self.marked.iter().copied().map(entry).collect()
    }
}

fn marked(details: &[VmaDetail]) -> Vec<(u64, u64)> {
    details.iter().filter(|detail| detail.flags.has(*b"mg")).map(|detail| (detail.vma.start, detail.vma.end)).collect()
}

#[cfg(test)]
#[path = "audit/tests.rs"]
mod tests;
