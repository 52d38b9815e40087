//! How much memory a process may still take before something is killed for it: by the limits of its memory cgroup and
//! of those above, and by what the machine has left.
//!
//! Giving merged pages back takes that much memory, charged to the process (`unmerge_ksm_pages` breaks each page like a
//! write would, mm/ksm.c). Beyond a limit the kernel kills.

use crate::process::{Process, ReadError};
use crate::scope::{Cgroup, parse_cgroups};
use pagefold_core::units::Bytes;
use std::fs;
use std::path::{Path, PathBuf};

/// What the process's cgroups and the machine leave it. `Bytes(u64::MAX)` where neither tells.
///
/// The cheap part of the page cache (`inactive_file`) counts as free: the kernel takes it back before it kills.
pub fn headroom(process: &Process, proc_root: &Path, cgroup_root: &Path) -> Result<Bytes, ReadError> {
    let text = match process.read_file("cgroup") {
        Ok(text) => text,
        Err(ReadError::Absent { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let cgroups = parse_cgroups(&text);
    let groups = cgroups.iter().filter_map(|cgroup| group_dir(cgroup, cgroup_root));
    let by_groups = groups.flat_map(|(mount, dir)| {
        dir.ancestors().take_while(|dir| dir.starts_with(&mount)).map(Path::to_owned).collect::<Vec<_>>()
    });
    let least = by_groups.filter_map(|dir| left_in(&dir)).min();
    Ok(Bytes(least.unwrap_or(u64::MAX).min(left_in_machine(proc_root).unwrap_or(u64::MAX))))
}

/// Where a cgroup is mounted, and its directory, if it may limit memory.
fn group_dir(cgroup: &Cgroup, root: &Path) -> Option<(PathBuf, PathBuf)> {
    let path = cgroup.path.strip_prefix('/')?;
    let mount = match cgroup.controllers.as_str() {
        // Version 2: at the root, or beside the controllers of version 1.
        "" if root.join("unified").is_dir() => root.join("unified"),
        "" => root.to_owned(),
        controllers if controllers.split(',').any(|controller| controller == "memory") => root.join("memory"),
        _ => return None,
    };
    let dir = mount.join(path);
    Some((mount, dir))
}

/// What one cgroup's limit leaves; `None` without a limit.
fn left_in(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and no limit; version 1 has a huge number for it, which leaves as much.
    let (limit, usage) = number("memory.max")
        .zip(number("memory.current"))
        .or_else(|| number("memory.limit_in_bytes").zip(number("memory.usage_in_bytes")))?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = field(&stat, "total_inactive_file").or_else(|| field(&stat, "inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

fn left_in_machine(proc_root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(proc_root.join("meminfo")).ok()?;
    field(&meminfo, "MemAvailable:").map(|kib| kib * 1024)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process with pid 7 whose cgroup file says `line`.
    fn machine(line: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Process) {
        let dir = tempfile::tempdir().unwrap();
        let stat = format!("7 (x) S 1 {}", ["0"; 48].join(" "));
        let own =
            [("proc/7/stat", stat.as_str()), ("proc/7/cgroup", line), ("proc/meminfo", "MemAvailable: 4000 kB\n")];
        for (name, text) in own.iter().chain(files) {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let process = Process::open_at(&dir.path().join("proc"), 7).unwrap();
        (dir, process)
    }

    fn left(line: &str, files: &[(&str, &str)]) -> u64 {
        let (dir, process) = machine(line, files);
        headroom(&process, &dir.path().join("proc"), &dir.path().join("cg")).unwrap().0
    }

    #[test]
    fn the_tightest_limit_on_the_way_up_counts() {
        let files = [
            ("cg/a/b/memory.max", "max\n"),
            ("cg/a/b/memory.current", "5000\n"),
            ("cg/a/memory.max", "10000\n"),
            ("cg/a/memory.current", "9000\n"),
            ("cg/a/memory.stat", "anon 1\ninactive_file 500\n"),
        ];
        assert_eq!(left("0::/a/b\n", &files), 1500);
        assert_eq!(left("0::/elsewhere\n", &files), 4000 * 1024);
    }

    #[test]
    fn version_one_is_read_beside_version_two() {
        let files = [
            ("cg/memory/x/memory.limit_in_bytes", "8000\n"),
            ("cg/memory/x/memory.usage_in_bytes", "7000\n"),
            ("cg/memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 300\n"),
            ("cg/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cg/memory/memory.usage_in_bytes", "7000\n"),
            ("cg/unified/cgroup.procs", ""),
        ];
        assert_eq!(left("4:cpu,memory:/x\n0::/\n", &files), 1300);
    }

    #[test]
    fn a_machine_that_is_nearly_full_is_a_limit_too() {
        assert_eq!(left("", &[]), 4000 * 1024);
    }
}
