//! Lists processes.

use super::process::{Process, ReadError};
use crate::os::fault;
use crate::os::peer::is_trusted;
use crate::status::Status;
use std::path::Path;

/// The pids under a mount of procfs, in directory order.
pub fn pids(proc_root: &Path) -> Result<impl Iterator<Item = i32> + use<>, ReadError> {
    let entries = fault::io("read:proc").and_then(|()| std::fs::read_dir(proc_root));
    let entries = entries.map_err(|error| ReadError::from_io(0, "", error))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The processes whose command name is one of `names`, by pid. All their user IDs must be root's or our own user's:
/// anybody can name a process, even a set-user-ID program that waits for a password, but others can't write KSM's
/// settings. Nor can a container's root, whose sysfs is read-only, so we skip processes in pid namespaces of their own.
pub fn programs_named(proc_root: &Path, names: &[&str]) -> Result<Vec<(i32, String)>, ReadError> {
    let mut found: Vec<(i32, String)> = Vec::new();
    for pid in pids(proc_root)? {
        // We skip processes that have just ended.
        let Ok(process) = Process::open_at(proc_root, pid) else { continue };
        let Ok(stat) = process.stat() else { continue };
        let Some(name) = names.iter().find(|name| name.as_bytes() == stat.comm) else { continue };
        let Ok(Status { uids, is_nested, .. }) = Status::of(&process) else { continue };
        if uids.into_iter().all(is_trusted) && !is_nested {
            found.push((pid, (*name).to_owned()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_other_users_and_containers_are_not_found_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, uids, inner) in [
            (75, "1000\t1000\t1000\t1000", ""),
            (76, "1000\t0\t0\t0", ""),
            (77, "0\t0\t0\t0", ""),
            (78, "0\t0\t0\t0", "\t5"),
        ] {
            let process = dir.path().join(pid.to_string());
            std::fs::create_dir(&process).unwrap();
            std::fs::write(process.join("stat"), format!("{pid} (ksmtuned) S 1 {}", "0 ".repeat(60))).unwrap();
            let status = format!(
                "Tgid:\t{pid}\nTracerPid:\t0\nUid:\t{uids}\nGid:\t0\t0\t0\t0\nCapPrm:\t0\nNSpid:\t{pid}{inner}\n"
            );
            std::fs::write(process.join("status"), status).unwrap();
        }
        assert_eq!(programs_named(dir.path(), &["ksmtuned"]).unwrap(), [(77, "ksmtuned".to_owned())]);
    }
}
