//! The file that lists the processes that users have excluded, so that the next run excludes them, too.
//!
//! The daemon writes the file after each request. Without a daemon, `exclude` and `include` write it while they hold
//! KSM's lock. If we can't use the file, no run begins: it might merge excluded processes.

use crate::config::ownership;
use crate::control::protocol::Selectors;
use crate::place::{Place, create_directory, is_there};
use pagefold_host::scope::kept_out::{ENTRIES_MOST, Entry, KeptOut, KeptOutError, Verdict};
use pagefold_host::scope::{ScopeSpec, Selector};
use pagefold_ksm::state_file::boot_id;
use pagefold_procmem::Roots;
use pagefold_procmem::process::ProcessKey;
use pagefold_text::exit::{self, Exit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

const SCHEMA: &str = "pagefold.kept-out/1";
const DIRECTORY: &str = "/var/lib/pagefold";
const NAME: &str = "kept-out.json";
/// The longest file that we read and write, bytes: some hundred thousand processes.
const LENGTH_MOST: u64 = 8 << 20;
/// How long we wait for another thread that's writing the list, and how often we look.
const TURN_LIMIT: Duration = Duration::from_secs(2);
const TURN_PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema: String,
    /// Identifies the boot, because pids and start times mean nothing after a reboot.
    boot_id: String,
    entries: Vec<Row>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// Exactly one selector.
    selector: Selectors,
    /// The user who excluded the processes. `None` if a user has included them again.
    uid: Option<u32>,
    processes: BTreeSet<ProcessKey>,
}

/// The service and all commands use the same path. We ignore `STATE_DIRECTORY`, which may be another service's.
fn path() -> PathBuf {
    Path::new(DIRECTORY).join(NAME)
}

/// Waits for our turn to write the list. One thread at a time fetches and writes it, so that an older list never
/// replaces a newer one.
///
/// # Errors
/// Another thread has been writing for too long.
pub fn turn() -> Result<MutexGuard<'static, ()>, String> {
    static TURN: Mutex<()> = Mutex::new(());
    let end = Instant::now() + TURN_LIMIT;
    loop {
        match TURN.try_lock() {
            Ok(turn) => return Ok(turn),
            Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() < end => sleep(TURN_PAUSE),
            Err(TryLockError::WouldBlock) => return Err("the disk does not answer".to_owned()),
        }
    }
}

/// Whether there's a list of an earlier run.
pub fn exists() -> bool {
    path().exists()
}

/// Reads the list of excluded processes.
///
/// # Errors
/// The file is there, but damaged, or other users can write or replace it. The exit code is 2, or 1 if we can't tell
/// whether the file is from this boot.
pub fn read() -> Result<KeptOut, Exit> {
    let mut kept_out = read_at(&path(), &boot()?).map_err(|why| {
        let shown = ownership::shown(&path());
        let advice = "see which processes it names, remove it, and exclude them again";
        Exit::new(exit::USAGE, format!("the list of excluded processes, {shown}, {why}; {advice}"))
    })?;
    kept_out.forget_ended(&Roots::default());
    Ok(kept_out)
}

fn boot() -> Result<String, Exit> {
    boot_id(&Roots::default().proc)
        .map_err(|error| Exit::new(exit::FAILURE, format!("cannot tell this boot from others: {error}; try again")))
}

/// Writes the list.
///
/// # Errors
/// We can't write the file.
pub fn write(kept_out: &KeptOut) -> Result<(), String> {
    let path = path();
    let boot = boot().map_err(|error| error.to_string())?;
    write_at(&path, kept_out, &boot).map_err(|why| format!("{} {why}", ownership::shown(&path)))
}

fn read_at(path: &Path, this_boot: &str) -> Result<KeptOut, String> {
    // A dangling symbolic link is an error, not a missing list.
    if !is_there(path) {
        return Ok(KeptOut::default());
    }
    let bytes = Place::of(path)?.read(LENGTH_MOST).map_err(|error| error.to_string())?;
    let Document { schema, boot_id, entries: rows } =
        serde_json::from_slice(&bytes).map_err(|error| format!("is damaged ({error})"))?;
    if schema != SCHEMA {
        return Err("is of another version".to_owned());
    }
    if rows.len() > ENTRIES_MOST {
        return Err(format!("has more than {ENTRIES_MOST} entries"));
    }
    let mut entries = Vec::new();
    for Row { selector, uid, processes } in rows {
        let Ok([selector]) = <[Selector; 1]>::try_from(selector.spec().0) else {
            return Err("is damaged (an entry without a selector of its own)".to_owned());
        };
        let verdict = uid.map_or(Verdict::In, |by| Verdict::Out { by });
        let processes = if boot_id == this_boot { processes } else { BTreeSet::new() };
        entries.push(Entry { verdict, selector, processes });
    }
    Ok(KeptOut::of(entries))
}

fn write_at(path: &Path, kept_out: &KeptOut, this_boot: &str) -> Result<(), String> {
    let mut rows = Vec::new();
    for Entry { verdict, selector, processes } in kept_out.entries() {
        let uid = match verdict {
            Verdict::Out { by } => Some(*by),
            Verdict::In => None,
        };
        let selector = Selectors::of(&ScopeSpec(vec![selector.clone()])).map_err(|error| error.to_string())?;
        rows.push(Row { selector, uid, processes: processes.clone() });
    }
    let document = Document { schema: SCHEMA.to_owned(), boot_id: this_boot.to_owned(), entries: rows };
    let text = serde_json::to_string(&document).map_err(|error| format!("cannot be written: {error}"))?;
    if text.len() as u64 > LENGTH_MOST {
        return Err("would be too long".to_owned());
    }
    if let Some(directory) = path.parent() {
        create_directory(directory)?;
    }
    let fill = |file: &mut std::fs::File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    Place::of(path)?.replace(0o600, fill).map_err(|error| format!("cannot be written: {error}"))
}

/// The exit code and advice if we can't change the list.
pub fn explain(error: &KeptOutError) -> Exit {
    match error {
        KeptOutError::NotKeptOut(_) => Exit::new(exit::NO_SCOPE, format!("{error}; see pagefold status")),
        KeptOutError::Init => Exit::new(exit::REFUSED, format!("{error}; name the programs to exclude")),
        KeptOutError::TooMany => {
            Exit::new(exit::FAILURE, format!("{error}; name a cgroup, a user or a program instead of processes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn entry(selector: Selector, by: Option<u32>, processes: &[ProcessKey]) -> Entry {
        let verdict = by.map_or(Verdict::In, |by| Verdict::Out { by });
        Entry { verdict, selector, processes: processes.iter().copied().collect() }
    }

    #[test]
    fn the_list_survives_a_restart_but_pids_survive_no_reboot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state").join(NAME);
        assert_eq!(read_at(&path, "one").unwrap().entries(), [], "there's no file yet");
        let named = |kind, name: &str| Selector::named(kind, name.to_owned()).unwrap();
        let list = [
            entry(named("exe", "a \"b"), Some(0), &[]),
            entry(Selector::Pid(7), Some(0), &[(7, 100), (9, 200)]),
            entry(named("user", "33"), None, &[]),
            entry(named("unit", "vault.service"), Some(0), &[]),
        ];
        write_at(&path, &KeptOut::of(list.to_vec()), "one").unwrap();
        assert_eq!(read_at(&path, "one").unwrap().entries(), list);
        let after = [&list[..1], &list[2..]].concat();
        assert_eq!(read_at(&path, "two").unwrap().entries(), after, "another process may have the pid");
    }

    #[test]
    fn a_file_that_is_not_ours_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let refused = |says: &str| {
            let error = read_at(&path, "x").unwrap_err();
            assert!(error.contains(says), "{says}: {error}");
        };
        let document = |entries: &str| {
            let text = format!(r#"{{"schema":"pagefold.kept-out/1","boot_id":"x","entries":[{entries}]}}"#);
            fs::write(&path, text).unwrap();
        };
        fs::write(&path, "{").unwrap();
        refused("is damaged");
        fs::write(&path, r#"{"schema":"pagefold.kept-out/2","boot_id":"x","entries":[]}"#).unwrap();
        refused("another version");
        document(r#"{"selector":{},"uid":0,"processes":[]}"#);
        refused("selector of its own");
        document(r#"{"selector":{"pids":[1,2]},"uid":0,"processes":[]}"#);
        refused("selector of its own");
        document(&vec![r#"{"selector":{"exes":["a"]},"uid":0,"processes":[]}"#; ENTRIES_MOST + 1].join(","));
        refused("more than 1024 entries");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        refused("symbolic link");
        fs::remove_file(&path).unwrap();
        document("");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        refused("other users may write");
    }
}
