//! The audit log: one line of JSON (schema pagefold.audit/1) for every span of memory that is marked or unmarked, and for
//! the beginning and the end of the command. It has no contents of memory and no digests of them.
//!
//! A line that cannot be written is lost and counted, and the first loss is reported. Nothing waits for the log.

mod entry;

use crate::config::ownership;
pub use entry::{Before, Entry, Owner};
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::style::visible_json;
use pagefold_linux::proc::status::printable;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

const SCHEMA: &str = "pagefold.audit/1";

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
    pub fn reopen(&mut self) -> Result<(), Exit> {
        self.file = open(&self.path)?;
        (self.torn, self.complained) = (false, false);
        Ok(())
    }

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

fn path_text(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
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

#[cfg(test)]
#[path = "audit/tests.rs"]
mod tests;
