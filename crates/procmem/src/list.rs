//! Lists processes.

use super::process::{Process, ReadError};
use crate::image::effective_user;
use crate::os::fault;
use crate::os::peer::is_trusted;
use std::path::Path;

/// The pids under a mount of procfs, in directory order.
pub fn pids(proc_root: &Path) -> Result<impl Iterator<Item = i32> + use<>, ReadError> {
    let entries = fault::io("read:proc").and_then(|()| std::fs::read_dir(proc_root));
    let entries = entries.map_err(|error| ReadError::from_io(0, "", error))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The processes of root, or of the user that runs us, whose command name is one of `names`, by pid. Anybody can give a
/// process a name, but others can't write KSM's settings.
pub fn programs_named(proc_root: &Path, names: &[&str]) -> Result<Vec<(i32, String)>, ReadError> {
    let mut found: Vec<(i32, String)> = Vec::new();
    for pid in pids(proc_root)? {
        // We skip processes that have just ended.
        let Ok(process) = Process::open_at(proc_root, pid) else { continue };
        let Ok(stat) = process.stat() else { continue };
        if !effective_user(&process).is_ok_and(is_trusted) {
            continue;
        }
        if let Some(name) = names.iter().find(|name| name.as_bytes() == stat.comm) {
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
    #[cfg_attr(not(feature = "live"), ignore = "needs root")]
    fn other_users_processes_are_not_found_by_their_names() {
        if !pagefold_testkit::is_root() {
            return pagefold_testkit::skip("changing a file's owner needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        for pid in [76, 77] {
            let process = dir.path().join(pid.to_string());
            std::fs::create_dir(&process).unwrap();
            let numbers = "0 ".repeat(60);
            std::fs::write(process.join("stat"), format!("{pid} (ksmtuned) S 1 {numbers}")).unwrap();
        }
        std::os::unix::fs::chown(dir.path().join("76"), Some(65534), None).unwrap();
        assert_eq!(programs_named(dir.path(), &["ksmtuned"]).unwrap(), [(77, "ksmtuned".to_owned())]);
    }
}
