//! Lists processes.

use super::process::{Process, ReadError};
use crate::os::fault;
use std::path::Path;

/// The pids under a mount of procfs, in directory order.
pub fn pids(proc_root: &Path) -> Result<impl Iterator<Item = i32> + use<>, ReadError> {
    let entries = fault::io("read:proc").and_then(|()| std::fs::read_dir(proc_root));
    let entries = entries.map_err(|error| ReadError::from_io(0, "", error))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The processes whose command name is one of `names`, by pid.
pub fn programs_named(proc_root: &Path, names: &[&str]) -> Result<Vec<(i32, String)>, ReadError> {
    let mut found: Vec<(i32, String)> = Vec::new();
    for pid in pids(proc_root)? {
        // We skip processes that have just ended.
        let Ok(stat) = Process::open_at(proc_root, pid).and_then(|process| process.stat()) else { continue };
        if let Some(name) = names.iter().find(|name| name.as_bytes() == stat.comm) {
            found.push((pid, (*name).to_owned()));
        }
    }
    found.sort_unstable();
    Ok(found)
}
