//! The file in which a run records which memory is worth merging, so that the next run needn't find out again.
//!
//! We merge nothing because of the file alone (see [`pagefold_engine::learned`]), but it has addresses and pids, so
//! only root may read it. A thread replaces the whole file, so no disk delays the run, and a crash leaves the old file.

use crate::background::{Background, Complaints};
use crate::config::ownership;
use crate::place::{Place, cannot_write, unusable};
use pagefold_engine::engine::Engine;
use pagefold_engine::learned::Learned;
use pagefold_ksm::state_file::boot_id;
use pagefold_procmem::Roots;
use pagefold_procmem::os::cpu::since_boot_ns;
use pagefold_text::exit::Exit;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::mpsc::Receiver;

const SCHEMA: &str = "pagefold.learned/2";
/// The longest file that we read, bytes.
const LENGTH_MOST: u64 = 16 << 20;
/// Time between two writes, nanoseconds.
const INTERVAL_NS: u64 = 180_000_000_000;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema: String,
    /// Identifies the boot, because pids, start times and addresses mean nothing after a reboot.
    boot_id: String,
    /// When we wrote the file, nanoseconds since boot.
    written_ns: u64,
    learned: Learned,
}

#[derive(Clone, Debug)]
pub struct LearnedFile(Place);

impl LearnedFile {
    /// Checks that no other user can redirect our writes.
    ///
    /// # Errors
    /// We can't use this path, something else is there, or other users could redirect our writes. The exit code is 2.
    pub fn open(path: &Path) -> Result<Self, Exit> {
        let place = Place::of_ours(path, "{\"schema\":\"pagefold.learned/");
        place.map(Self).map_err(|why| unusable("the learned file", path, &why))
    }

    /// Reads what earlier runs have learned since the machine booted. `None` if there's no file from this boot.
    ///
    /// # Errors
    /// We can't read the file, or it's damaged or of another version. The error is a sentence.
    pub fn read(&self) -> Result<Option<Learned>, String> {
        self.try_read().map_err(|why| {
            let shown = ownership::shown(&self.0.path);
            format!("the learned file {shown} is not used, since it {why}; all memory is searched again")
        })
    }

    fn try_read(&self) -> Result<Option<Learned>, String> {
        let bytes = match self.0.read(LENGTH_MOST) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let boot = boot_id(&Roots::default().proc).map_err(|error| format!("cannot be compared: {error}"))?;
        parse(&bytes, &boot, since_boot_ns())
    }

    fn write(&self, bytes: &[u8]) -> Result<(), String> {
        let written = self.0.replace(0o600, |file| file.write_all(bytes).and_then(|()| file.sync_all()));
        written.map_err(|error| cannot_write("the learned file", &self.0.path, &error))
    }
}

/// Parses a file's contents at the time `now_ns` since boot. `None` if the file is from an earlier boot.
fn parse(bytes: &[u8], boot: &str, now_ns: u64) -> Result<Option<Learned>, String> {
    #[derive(Deserialize)]
    struct Head {
        schema: String,
    }
    let head: Head = serde_json::from_slice(bytes).map_err(|error| format!("is damaged ({error})"))?;
    if head.schema != SCHEMA {
        return Err("is of another version".to_owned());
    }
    let Document { boot_id, written_ns, learned, .. } =
        serde_json::from_slice(bytes).map_err(|error| format!("is damaged ({error})"))?;
    Ok((boot_id == boot).then(|| learned.after(now_ns.saturating_sub(written_ns))))
}

/// Writes the file from time to time, and at the end of the run.
#[derive(Debug)]
pub struct LearnedWriter {
    boot_id: String,
    next_ns: u64,
    last: Learned,
    documents: Background<Document>,
}

impl LearnedWriter {
    /// Hands the file's contents to the engine, and starts the thread that writes the file. If the thread can't start,
    /// we print a message, and nothing is recorded.
    pub fn start(file: LearnedFile, engine: &mut Engine) -> Option<Self> {
        match file.read() {
            Ok(Some(learned)) => engine.adopt(learned),
            Ok(None) => {}
            Err(line) => complain!("{line}"),
        }
        let started = Self::start_thread(file);
        if let Err(error) = &started {
            complain!("the next run must search all memory: cannot start the thread for the learned file: {error}");
        }
        started.ok()
    }

    fn start_thread(file: LearnedFile) -> io::Result<Self> {
        let boot_id = boot_id(&Roots::default().proc).map_err(io::Error::other)?;
        let documents = Background::start("learned", move |documents: Receiver<Document>| {
            let mut complaints = Complaints::default();
            for document in documents {
                let bytes = serde_json::to_vec(&document).map_err(|error| error.to_string());
                complaints.hear(bytes.and_then(|bytes| file.write(&bytes)));
            }
        })?;
        Ok(Self { boot_id, next_ns: INTERVAL_NS, last: Learned::default(), documents })
    }

    /// Writes the file if it's time and the run has learned something new.
    pub fn keep(&mut self, engine: &Engine, now_ns: u64) {
        if now_ns < self.next_ns {
            return;
        }
        self.next_ns = now_ns + INTERVAL_NS;
        let learned = engine.learned();
        if learned != self.last {
            self.last.clone_from(&learned);
            self.documents.offer(self.document(learned));
        }
    }

    /// Writes the file a last time. Waits for the disk, but only two seconds.
    pub fn finish(self, engine: &Engine) {
        self.documents.offer(self.document(engine.learned()));
    }

    fn document(&self, learned: Learned) -> Document {
        Document { schema: SCHEMA.to_owned(), boot_id: self.boot_id.clone(), written_ns: since_boot_ns(), learned }
    }
}

#[cfg(test)]
#[path = "learned_tests.rs"]
mod tests;
