//! The audit log's file, and how its thread writes it.

use super::{Entry, Order, line_of};
use crate::config::ownership::{self, shown};
use crate::place::{Place, unusable};
use pagefold_text::exit::Exit;
use pagefold_text::sink::Next;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::SystemTime;

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    pub(super) file: File,
    /// Whether the last line in the file is incomplete.
    pub(super) torn: bool,
    /// How many lines we've lost since we last wrote one.
    missing: u64,
    lost: Arc<AtomicU64>,
    complaints: Sender<String>,
    has_complained: bool,
}

impl LogFile {
    pub(super) fn open(path: &Path, lost: Arc<AtomicU64>, complaints: Sender<String>) -> Result<Self, Exit> {
        let file = open(path)?;
        Ok(Self { path: path.to_owned(), file, torn: false, missing: 0, lost, complaints, has_complained: false })
    }

    /// Does the next piece of work from the queue.
    pub(super) fn serve(&mut self, next: Next<Order>) {
        match next {
            Next::Item(Order::Write(line)) => {
                self.missing += line.missing;
                if let Err(error) = self.write(&line.text) {
                    self.missing += 1;
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    self.complain_once(&error);
                }
            }
            Next::Item(Order::Reopen) => self.reopen(),
            Next::Gap(lines) => {
                self.missing += lines;
                // If this fails, [`Self::write`] tries again before the next line.
                let _ = self.tell_missing();
            }
        }
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        self.tell_missing()?;
        self.append(line)
    }

    /// Writes how many lines are missing here, if any are.
    fn tell_missing(&mut self) -> io::Result<()> {
        if self.missing > 0 {
            self.append(&line_of(&Entry::Lost { lost: self.missing }, SystemTime::now()))?;
            self.missing = 0;
        }
        Ok(())
    }

    fn complain_once(&mut self, error: &io::Error) {
        if !self.has_complained {
            self.has_complained = true;
            let path = shown(&self.path);
            self.complain(format!(
                "cannot write to the audit log {path}: {error}; free some space (the run continues without the log)"
            ));
        }
    }

    fn complain(&self, line: String) {
        // Nobody listens if the run has ended.
        let _ = self.complaints.send(line);
    }

    fn reopen(&mut self) {
        match open(&self.path) {
            Ok(file) => {
                self.file = file;
                self.torn = false;
                self.has_complained = false;
            }
            Err(error) => {
                self.complain(format!("cannot reopen the audit log, so the old file stays in use: {error}"));
            }
        }
    }

    /// Writes in one call, so that two writers' lines don't mix: with O_APPEND, write(2) seeks and writes atomically.
    fn append(&mut self, line: &str) -> io::Result<()> {
        let end_of_torn = if self.torn { "\n" } else { "" };
        let text = format!("{end_of_torn}{line}");
        let length = loop {
            match self.file.write(text.as_bytes()) {
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
    try_open(path).map_err(|why| unusable("the audit log", path, &why))
}

fn try_open(path: &Path) -> Result<File, String> {
    let place = Place::of(path)?;
    // O_NOFOLLOW refuses a symbolic link. O_NONBLOCK lets us fail instead of waiting if this is a pipe without a
    // reader.
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&place.path)
        .map_err(|error| format!("cannot be opened: {error}; name a file in a directory that only root can write"))?;
    let metadata = file.metadata().map_err(|error| format!("cannot be examined: {error}; name another file"))?;
    if !metadata.is_file() {
        return Err("is not a regular file; name a regular or a new file".to_owned());
    }
    ownership::owned(metadata.uid(), metadata.mode()).map_err(|why| format!("is a file that {why}"))?;
    Ok(file)
}
