//! The audit log: one line of JSON (schema pagefold.audit/1) for every span of memory that is marked or unmarked, and for
//! the beginning and the end of the command. It has no contents of memory and no digests of them.
//!
//! A line that cannot be written is lost and counted, and the first loss is reported. Nothing waits for the log.

use crate::config::ownership;
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::style::visible_json;
use pagefold_core::host::{ChangeResult, Marking, Why};
use pagefold_core::units::Bytes;
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

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum Entry {
    /// A command that marks or unmarks begins.
    Begin(Begin),
    /// A span was marked, or could not be.
    Mark(Change),
    /// A span was unmarked, or could not be.
    Unmark(Change),
    /// The command ends.
    End(End),
}

/// The beginning of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Begin {
    /// `run` or `unmerge`.
    pub command: &'static str,
    /// pagefold's version.
    pub version: &'static str,
    /// The pid of the command.
    pub pid: u32,
    /// The scope, as flags.
    pub scope: String,
}

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct End {
    /// `run` or `unmerge`.
    pub command: &'static str,
    /// The pid of the command.
    pub pid: u32,
    /// The number of lines lost since the beginning.
    pub lost: u64,
}

/// The process that a span belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Owner {
    /// Pid.
    pub pid: i32,
    /// Start time, clock ticks after boot: distinguishes processes with the same pid.
    pub start_time_ticks: u64,
    /// Command name.
    pub name: String,
    /// Executable, if known.
    pub exe: Option<String>,
    /// Effective user.
    pub uid: Option<u32>,
    /// Cgroup.
    pub cgroup: Option<String>,
    /// Trust domain.
    pub domain: Option<String>,
}

impl Owner {
    /// Describes a target of a run in the trust domain `domain`.
    pub fn of(target: &Target, domain: Option<&String>) -> Self {
        Self {
            pid: target.process.pid(),
            start_time_ticks: target.process.start_time_ticks(),
            name: target.name.clone(),
            exe: target.exe.as_deref().map(path_text),
            uid: Some(target.uid),
            cgroup: target.cgroup.clone(),
            domain: domain.cloned(),
        }
    }
}

impl From<&Scoped> for Owner {
    fn from(scoped: &Scoped) -> Self {
        Self {
            pid: scoped.process.pid(),
            start_time_ticks: scoped.process.start_time_ticks(),
            name: scoped.name.clone(),
            exe: scoped.exe.as_deref().map(path_text),
            uid: Some(scoped.uid),
            cgroup: scoped.cgroup.clone(),
            domain: scoped.domain.clone(),
        }
    }
}

/// A change of one span of a process's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The process.
    #[serde(flatten)]
    pub owner: Owner,
    /// The first and the last address, hexadecimal as in `/proc/PID/maps`.
    pub first: String,
    #[allow(missing_docs)]
    pub last: String,
    /// The length of the span.
    pub bytes: u64,
    /// Why.
    pub why: Reason,
    /// The result.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Why a span was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// `duplicate`, `cow-broken`, `asked` or `excluded`.
    pub kind: &'static str,
    /// In words.
    pub sentence: String,
}

/// The result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// `done`, also in part; `busy`, to be tried again; `refused`.
    pub outcome: &'static str,
    /// How much of the span was changed.
    pub done_bytes: u64,
}

impl From<Why> for Reason {
    fn from(why: Why) -> Self {
        let (kind, sentence) = match why {
            Why::Duplicate { duplicate, resident } => {
                let (part, all) = (duplicate.0, resident.0);
                ("duplicate", format!("{part} of its {all} resident pages are zero or have a copy"))
            }
            Why::CowBroken { ratio } => (
                "cow-broken",
                format!(
                    "{ratio} of its merged pages would be written, and have the same content again, within two hours"
                ),
            ),
            Why::Asked => ("asked", "requested by a user".to_owned()),
            Why::Excluded => ("excluded", "excluded now".to_owned()),
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
    /// The result of an order to mark (or unmark) a span of a process.
    pub fn changed(owner: Owner, mark: bool, result: &ChangeResult) -> Self {
        let change = Change::of(owner, result);
        if mark { Self::Mark(change) } else { Self::Unmark(change) }
    }

    /// The result of removing marks that must not stay, for this reason.
    pub fn withdrawn(owner: Owner, result: &ChangeResult, reason: String) -> Self {
        let mut change = Change::of(owner, result);
        change.why.sentence = reason;
        Self::Unmark(change)
    }
}

impl Change {
    fn of(owner: Owner, result: &ChangeResult) -> Self {
        let span = result.change.span;
        let (first, bytes) = (span.first.address(), span.pages.bytes());
        Self {
            owner,
            first: format!("{first:x}"),
            last: last(first, bytes),
            bytes: bytes.0,
            why: result.change.why.into(),
            outcome: result.marking.into(),
        }
    }
}

fn path_text(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}

fn last(first: u64, bytes: Bytes) -> String {
    format!("{:x}", first.saturating_add(bytes.0.saturating_sub(1)))
}

/// The open log.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    file: File,
    lost: u64,
    complained: bool,
    /// The last line is incomplete.
    torn: bool,
}

impl Audit {
    /// Opens or creates the log.
    ///
    /// # Errors
    /// With exit code 2: the file cannot be opened, or other users could write or replace it.
    pub fn open(path: &Path) -> Result<Self, Exit> {
        // At the limit on the size of files (RLIMIT_FSIZE) this signal would end the run. Handled, the write fails.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
        Ok(Self { path: path.to_owned(), file: open(path)?, lost: 0, complained: false, torn: false })
    }

    /// Opens the log again by its name, after the file was renamed. If that fails the old file stays in use.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn reopen(&mut self) -> Result<(), Exit> {
        self.file = open(&self.path)?;
        (self.torn, self.complained) = (false, false);
        Ok(())
    }

    /// The number of lines lost so far.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Writes one line, with the time. Never fails; returns a message the first time that a line is lost.
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
        let end_of_torn = if self.torn { "\n" } else { "" };
        let written = serde_json::to_string(&line).map_err(io::Error::from).and_then(|line| {
            let line = format!("{end_of_torn}{}\n", visible_json(&line));
            self.append(line.as_bytes())
        });
        let error = written.err()?;
        self.lost += 1;
        if std::mem::replace(&mut self.complained, true) {
            return None;
        }
        let path = path_text(&self.path);
        Some(format!(
            "cannot write to the audit log {path}: {error}; free some space (the run continues without the log)"
        ))
    }

    /// In one call, so that the lines of two writers do not mix: with O_APPEND, write(2) seeks and writes atomically.
    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        let length = loop {
            match self.file.write(text) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.torn = length < text.len() && (length > 0 || self.torn);
        if length < text.len() {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "only part of a line could be written"));
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
        .map_err(|error| cannot(format!("cannot be created: {error}; create its directory, writable by root only")))?;
    ownership::directory(&directory).map_err(|why| cannot(format!("would be in a directory that {why}")))?;
    // Neither a symbolic link nor a pipe without a reader.
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|error| {
            cannot(format!("cannot be opened: {error}; name a file in a directory that only root can write"))
        })?;
    let metadata =
        file.metadata().map_err(|error| cannot(format!("cannot be examined: {error}; name another file")))?;
    if !metadata.is_file() {
        return Err(cannot("is not a regular file; name one, or a new one".to_owned()));
    }
    ownership::owned(metadata.uid(), metadata.mode()).map_err(|why| cannot(format!("is a file that {why}")))?;
    Ok(file)
}

/// The marked spans of a process that is about to be unmarked.
#[derive(Debug)]
pub struct Before {
    owner: Owner,
    marked: Vec<(u64, u64)>,
}

impl Before {
    /// Reads them. A process that cannot be read has none.
    pub fn of(scoped: &Scoped) -> Self {
        Self { owner: scoped.into(), marked: marked(&read_smaps(&scoped.process).unwrap_or_default()) }
    }

    /// What was unmarked of each span. `refused` means that what is still marked will stay so.
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
            Entry::Unmark(Change {
                owner: self.owner.clone(),
                first,
                last,
                bytes: bytes.0,
                why: Why::Asked.into(),
                outcome,
            })
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
