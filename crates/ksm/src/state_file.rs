//! The file that survives a crash: it has the original values of KSM's knobs, and the values that we set.
//!
//! The file is on disk before we set the first knob, and we remove it when the last one is restored. We replace it as a
//! whole (write a new file, sync and rename it), so a reader sees either the old text or the new one.

use crate::Knob;
use pagefold_procmem::os::fault;
use pagefold_procmem::process::{Process, ReadError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

pub const STATE_PATH: &str = "/run/pagefold/ksm-state.json";

const SCHEMA: &str = "pagefold.ksm-state/1";

/// From this value on, `sleep_millisecs` means an endless sleep: to the kernel it's negative.
pub const ENDLESS_SLEEP: u64 = 1 << 31;

/// Why we couldn't read or write the file.
#[derive(Debug, Error)]
pub enum StateError {
    /// The text isn't in our format.
    #[error("{} is malformed ({what}); set the knobs by hand and remove this file", path.display())]
    Malformed { path: PathBuf, what: String },
    #[error("not permitted to access {}", path.display())]
    Denied { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl StateError {
    fn from_io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if source.kind() == io::ErrorKind::PermissionDenied { Self::Denied { path } } else { Self::Io { path, source } }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub pid: i32,
    /// The process's start time, which a later process with the same pid doesn't share.
    pub start_time_ticks: u64,
}

impl Holder {
    pub fn own(proc_root: &Path) -> Result<Self, ReadError> {
        let pid = i32::try_from(std::process::id()).unwrap_or(0);
        let own = Process::open_at(proc_root, pid)?;
        Ok(Self { pid, start_time_ticks: own.start_time_ticks() })
    }

    /// Whether the process is alive. An error means that we can't tell.
    pub fn is_alive(self, proc_root: &Path) -> Result<bool, ReadError> {
        let stat = Process::open_at(proc_root, self.pid).and_then(|process| process.stat());
        match stat {
            Ok(stat) => Ok(stat.start_time_ticks == self.start_time_ticks && !stat.has_ended()),
            Err(ReadError::Vanished { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    schema: String,
    /// The boot during which we set the knobs. After another boot the knobs have the kernel's values again.
    pub boot_id: String,
    /// The process that set the knobs. `None` once only knobs are left that must wait until nothing is merged.
    pub holder: Option<Holder>,
    pub original: BTreeMap<Knob, u64>,
    /// The knobs that we've set, each with the values that we may have given it.
    pub turned: BTreeMap<Knob, Vec<u64>>,
}

impl State {
    pub fn new(boot_id: String, holder: Holder, original: BTreeMap<Knob, u64>) -> Self {
        Self { schema: SCHEMA.to_owned(), boot_id, holder: Some(holder), original, turned: BTreeMap::new() }
    }

    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if state.schema != SCHEMA {
            return Err(format!("schema {:?} instead of {SCHEMA:?}", state.schema));
        }
        match state.turned.keys().find(|knob| !state.original.contains_key(knob)) {
            Some(knob) => Err(format!("the original value of {knob} is missing")),
            None => Ok(state),
        }
    }

    /// Reads the file. `None` if it doesn't exist.
    pub fn load(path: &Path) -> Result<Option<Self>, StateError> {
        let text = match fault::io("read:state").and_then(|()| std::fs::read(path)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StateError::from_io(path, error)),
        };
        match Self::parse(&text) {
            Ok(state) => Ok(Some(state)),
            Err(what) => Err(StateError::Malformed { path: path.to_owned(), what }),
        }
    }

    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        self.replace(path).map_err(|error| {
            // On a full disk, we free the space of a half-written file.
            let _ = std::fs::remove_file(new_path(path));
            StateError::from_io(path, error)
        })
    }

    fn replace(&self, path: &Path) -> io::Result<()> {
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        std::fs::create_dir_all(dir)?;
        fault::point("state-begun");
        let new = new_path(path);
        let mut file = File::create(&new)?;
        fault::io("write:state")?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fault::point("state-written");
        std::fs::rename(&new, path)?;
        File::open(dir)?.sync_all()?;
        fault::point("state-saved");
        Ok(())
    }

    /// Removes the file if it exists.
    pub fn remove(path: &Path) -> Result<(), StateError> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StateError::from_io(path, error)),
            _ => Ok(()),
        }
    }

    /// Removes a half-written new file that a dead process has left. Only for the holder of the lock.
    pub fn sweep(path: &Path) {
        let _ = std::fs::remove_file(new_path(path));
    }

    /// Records that we're about to change `knob` from one value to another. Returns true if the caller must save the
    /// file first.
    pub fn note(&mut self, knob: Knob, from: u64, to: u64) -> bool {
        let known = self.turned.contains_key(&knob);
        let values = self.turned.entry(knob).or_default();
        if known && (is_signature(knob, to) || values.contains(&to)) {
            return false;
        }
        // The present value stays in the list, because we may crash before we write the new one to the knob.
        values.retain(|&value| known && value == from);
        values.push(to);
        true
    }

    /// Whether `knob` has this value because of us, going by this record.
    pub fn is_ours(&self, knob: Knob, value: u64) -> bool {
        self.turned.get(&knob).is_some_and(|values| values.contains(&value) || is_signature(knob, value))
    }
}

/// The name under which we write a new file before it replaces the old one.
fn new_path(path: &Path) -> PathBuf {
    path.with_extension("json.new")
}

/// Values that no other program would choose. Kicks write them by the hundred, so we don't record each one.
fn is_signature(knob: Knob, value: u64) -> bool {
    match knob {
        Knob::SleepMillisecs => value >= ENDLESS_SLEEP,
        Knob::PagesToScan => value == 0 || value == u64::from(u32::MAX),
        _ => false,
    }
}

pub fn boot_id(proc_root: &Path) -> Result<String, StateError> {
    let path = proc_root.join("sys/kernel/random/boot_id");
    let text = fault::io("read:boot_id").and_then(|()| std::fs::read_to_string(&path));
    let text = text.map_err(|error| StateError::from_io(&path, error))?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let original = Knob::ALL.into_iter().zip(100..).collect();
        State::new("boot".into(), Holder { pid: 7, start_time_ticks: 9 }, original)
    }

    #[test]
    fn what_is_saved_is_loaded_and_no_other_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/ksm-state.json");
        assert_eq!(State::load(&path).unwrap(), None);
        let mut state = state();
        state.note(Knob::Run, 0, 1);
        state.save(&path).unwrap();
        state.note(Knob::UseZeroPages, 0, 1);
        state.save(&path).unwrap();
        assert_eq!(State::load(&path).unwrap(), Some(state));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        State::remove(&path).unwrap();
        State::remove(&path).unwrap();
    }

    #[test]
    fn other_texts_are_malformed() {
        let good = serde_json::to_vec(&state()).unwrap();
        assert_eq!(State::parse(&good).unwrap(), state());
        for cut in 0..good.len() {
            assert!(State::parse(&good[..cut]).is_err());
        }
        let newer = String::from_utf8(good).unwrap().replace("ksm-state/1", "ksm-state/2");
        assert!(State::parse(newer.as_bytes()).unwrap_err().contains("schema"));
        let mut incomplete = state();
        incomplete.note(Knob::Run, 0, 1);
        incomplete.original.clear();
        assert!(State::parse(&serde_json::to_vec(&incomplete).unwrap()).unwrap_err().contains("run"));
    }

    #[test]
    fn recorded_values_and_those_of_kicks_are_ours() {
        let mut state = state();
        assert!(!state.is_ours(Knob::SleepMillisecs, ENDLESS_SLEEP), "not set yet");
        assert!(state.note(Knob::SleepMillisecs, 20, ENDLESS_SLEEP));
        assert!(!state.note(Knob::SleepMillisecs, ENDLESS_SLEEP, ENDLESS_SLEEP + 1), "kicks need no new file");
        assert!(state.is_ours(Knob::SleepMillisecs, ENDLESS_SLEEP + 77));
        assert!(!state.is_ours(Knob::SleepMillisecs, 20));
        assert!(state.note(Knob::SleepMillisecs, ENDLESS_SLEEP + 1, 50));
        assert!(state.note(Knob::SleepMillisecs, 50, 60));
        assert!(state.is_ours(Knob::SleepMillisecs, 50) && state.is_ours(Knob::SleepMillisecs, 60));
        assert!(state.note(Knob::SleepMillisecs, 60, 70));
        assert!(!state.is_ours(Knob::SleepMillisecs, 50), "overwritten long ago");
    }
}
