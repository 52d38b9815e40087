//! The section `[fleet]`: the sketches' directory, the fleet's key, and this host's name.

use crate::config::options::{Options, SKETCH_INTERVAL};
use crate::config::ownership;
use crate::output::host_name;
use crate::place::Place;
use pagefold_procmem::os::pressure::MemoryMonitor;
use pagefold_sketch::FleetKey;
use pagefold_text::exit::{self, Exit};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest host name that we accept, bytes. It must fit into a file's name.
const HOST_BYTES: usize = 200;
const READABLE_BY_OTHERS: u32 = 0o077;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetSettings {
    pub directory: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub host: Option<String>,
    pub interval: Duration,
}

/// The fleet as this host sees it.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub key: FleetKey,
    pub host: String,
    pub memory_bytes: u64,
    pub cpu_millicores: u64,
}

impl FleetSettings {
    pub fn of(options: &Options) -> Self {
        Self {
            directory: options.sketches.clone(),
            key: options.fleet_key.clone(),
            host: options.fleet_host.clone(),
            interval: options.sketch_interval.unwrap_or(SKETCH_INTERVAL),
        }
    }

    /// Reads the key, and checks that we can write this host's file. `None` if the run makes no sketches.
    ///
    /// # Errors
    /// We can't use the directory, or there's no usable key. The exit code is 2.
    pub fn open(&self) -> Result<Option<(Fleet, Place)>, Exit> {
        let Some(directory) = &self.directory else { return Ok(None) };
        let fleet = self.fleet()?;
        let place = place_of(directory, &fleet.host).map_err(|why| {
            Exit::new(exit::USAGE, format!("sketches in {}: the file {why}", ownership::shown(directory)))
        })?;
        Ok(Some((fleet, place)))
    }

    /// Reads the key and facts about this host.
    ///
    /// # Errors
    /// There is no usable key or host name (exit code 2), or we can't read facts about the machine.
    pub fn fleet(&self) -> Result<Fleet, Exit> {
        let Some(key) = &self.key else {
            return Err(Exit::new(exit::USAGE, "sketches need the fleet's key; name its file by --fleet-key"));
        };
        let host = match &self.host {
            Some(host) => host.clone(),
            None => host_name(),
        };
        let has_others = host.contains(|c: char| !c.is_ascii_alphanumeric() && !".-_".contains(c));
        if host.is_empty() || host.len() > HOST_BYTES || host.starts_with('.') || has_others {
            let line = format!(
                "'{}' is no name for a file of sketches; use letters, digits, dots and dashes in --fleet-host",
                host.escape_debug()
            );
            return Err(Exit::new(exit::USAGE, line));
        }
        let memory = MemoryMonitor::open(Path::new("/proc")).and_then(|monitor| monitor.read());
        let memory = memory.map_err(|error| Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")))?;
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        Ok(Fleet { key: read_key(key)?, host, memory_bytes: memory.total.bytes().0, cpu_millicores: cpus * 1000 })
    }
}

fn place_of(directory: &Path, host: &str) -> Result<Place, String> {
    let place = Place::of(&directory.join(format!("{host}.parquet")))?;
    place.check().map_err(|error| format!("cannot be written: {error}; name a directory that root can write"))?;
    Ok(place)
}

/// Reads the key. Only root may read it: whoever has the key can test whether a sketch has a page of given contents.
fn read_key(path: &Path) -> Result<FleetKey, Exit> {
    parse_key(path).map_err(|why| Exit::new(exit::USAGE, format!("the fleet's key {} {why}", ownership::shown(path))))
}

fn parse_key(path: &Path) -> Result<FleetKey, String> {
    let text = ownership::read(path)?;
    let metadata = fs::metadata(path).map_err(|error| format!("cannot be examined: {error}; check the path"))?;
    if metadata.mode() & READABLE_BY_OTHERS != 0 {
        return Err("is a file that others may read; run chmod go= on it".to_owned());
    }
    text.parse().map_err(|error: pagefold_sketch::KeyError| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn settings(dir: &Path) -> FleetSettings {
        let key = dir.join("key");
        fs::write(&key, format!("{}\n", "0f".repeat(32))).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        FleetSettings {
            directory: Some(dir.to_owned()),
            key: Some(key),
            host: Some("node-1.example".to_owned()),
            interval: Duration::from_secs(60),
        }
    }

    #[track_caller]
    fn assert_refused(settings: &FleetSettings, says: &str) {
        let error = settings.open().unwrap_err();
        assert_eq!(error.code, exit::USAGE);
        assert!(error.line.contains(says) && error.line.contains("; ") && !error.line.contains('\n'), "{error}");
    }

    #[test]
    fn the_key_is_roots_alone() {
        let dir = tempfile::tempdir().unwrap();
        let set = settings(dir.path());
        let (fleet, place) = set.open().unwrap().unwrap();
        assert_eq!(fleet.host, "node-1.example");
        assert!(place.path.ends_with("node-1.example.parquet") && !place.path.exists());
        assert!(fleet.memory_bytes > 1 << 20 && fleet.cpu_millicores >= 1000);
        let key = set.key.clone().unwrap();
        for (mode, says) in [(0o640, "others may read"), (0o604, "others may read"), (0o620, "other users may write")] {
            fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
            assert_refused(&set, says);
        }
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        fs::write(&key, "secret").unwrap();
        assert_refused(&set, "is not a key of 64 hexadecimal digits");
        fs::remove_file(&key).unwrap();
        assert_refused(&set, "cannot be read");
        assert_refused(&FleetSettings { key: None, ..set }, "need the fleet's key");
    }

    #[test]
    fn the_directory_and_the_name_of_the_host_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let set = settings(dir.path());
        for host in ["", "a/b", "../x", ".hidden", "a b", &"x".repeat(201), "n\u{f6}de"] {
            assert_refused(&FleetSettings { host: Some(host.to_owned()), ..set.clone() }, "is no name");
        }
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        assert_refused(&FleetSettings { directory: Some(open), ..set.clone() }, "other users may write");
        assert_refused(&FleetSettings { directory: Some(dir.path().join("none")), ..set.clone() }, "cannot be created");
        assert!(FleetSettings { directory: None, ..set }.open().unwrap().is_none());
    }
}
