//! How much memory a process may still take before something is killed for it: by the limits of its memory cgroup and
//! of those above, and by what the machine has left.
//!
//! Giving merged pages back takes that much memory, charged to the process (`unmerge_ksm_pages` breaks each page like a
//! write would, mm/ksm.c). Beyond a limit the kernel kills.

use super::cgroup::{Cgroup, parse_cgroups};
use crate::os::fault;
use crate::proc::process::{Process, ReadError};
use pagefold_core::units::Bytes;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

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
    let mut least = left_in_machine(proc_root);
    for (mount, dir) in cgroups.iter().filter_map(|cgroup| group_dir(cgroup, cgroup_root)) {
        for dir in dir.ancestors().take_while(|dir| dir.starts_with(&mount)) {
            least = least.and_then(|least| Ok(least.min(left_in(dir)?)));
        }
    }
    // A limit that cannot be read is not one that does not exist.
    least.map(Bytes).map_err(|error| ReadError::from_io(process.pid(), "cgroup", error))
}

/// What a file says; empty if there is no such file, or if its cgroup has just been removed.
fn text_of(path: &Path) -> io::Result<String> {
    match fault::io("read:limits").and_then(|()| fs::read_to_string(path)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(String::new()),
        other => other,
    }
}

/// Where a cgroup is mounted, and its directory, if it may limit memory.
pub(crate) fn group_dir(cgroup: &Cgroup, root: &Path) -> Option<(PathBuf, PathBuf)> {
    let path = cgroup.path.strip_prefix('/')?;
    // A path that leads out of our cgroup namespace begins with "..": its directories are not those named so here.
    if !Path::new(path).components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
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

/// A limit, and what counts against it. Beyond `memory.high` nothing is killed, but the process hardly gets on. Version 1
/// may limit memory and swap together: then paging out makes no room.
const LIMITS: [(&str, &str); 4] = [
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
];

/// What one cgroup's limits leave, bytes; `u64::MAX` without a limit.
fn left_in(dir: &Path) -> io::Result<u64> {
    let number = |name: &str| Ok::<_, io::Error>(text_of(&dir.join(name))?.trim().parse::<u64>().ok());
    let stat = text_of(&dir.join("memory.stat"))?;
    let either = |one: &str, two: &str| field(&stat, one).or_else(|| field(&stat, two)).unwrap_or(0);
    // What has to be written to disk first is not taken back at once.
    let unwritten = either("total_dirty", "file_dirty").saturating_add(either("total_writeback", "file_writeback"));
    let cache = either("total_inactive_file", "inactive_file").saturating_sub(unwritten);
    // "max" is no number, and no limit; version 1 has a huge number for it, which leaves as much.
    let mut least = u64::MAX;
    for (limit, usage) in LIMITS {
        if let (Some(limit), Some(usage)) = (number(limit)?, number(usage)?) {
            least = least.min(limit.saturating_sub(usage.saturating_sub(cache)));
        }
    }
    Ok(least)
}

fn left_in_machine(proc_root: &Path) -> io::Result<u64> {
    Ok(available(&text_of(&proc_root.join("meminfo"))?).unwrap_or(u64::MAX))
}

/// What the text of `/proc/meminfo` says is available, bytes.
pub(crate) fn available(meminfo: &str) -> Option<u64> {
    field(meminfo, "MemAvailable:").map(|kib| kib.saturating_mul(1024))
}

pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
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
    fn what_makes_a_process_stand_still_is_a_limit_too() {
        let files = [("cg/a/memory.max", "max\n"), ("cg/a/memory.high", "9000\n"), ("cg/a/memory.current", "8000\n")];
        assert_eq!(left("0::/a\n", &files), 1000);
    }

    #[test]
    fn cache_that_is_not_on_disk_yet_is_no_room() {
        let files = [
            ("cg/a/memory.max", "9000\n"),
            ("cg/a/memory.current", "8000\n"),
            ("cg/a/memory.stat", "file_dirty 300\nfile_writeback 100\ninactive_file 500\n"),
        ];
        assert_eq!(left("0::/a\n", &files), 1100);
    }

    #[test]
    fn memory_and_swap_may_be_limited_together() {
        let files = [
            ("cg/memory/x/memory.limit_in_bytes", "8000\n"),
            ("cg/memory/x/memory.usage_in_bytes", "5000\n"),
            ("cg/memory/x/memory.memsw.limit_in_bytes", "9000\n"),
            ("cg/memory/x/memory.memsw.usage_in_bytes", "8500\n"),
        ];
        assert_eq!(left("4:memory:/x\n", &files), 500);
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
    fn a_cgroup_outside_of_ours_limits_nothing_that_can_be_seen() {
        let files = [("memory.max", "10\n"), ("memory.current", "9\n")];
        assert_eq!(left("0::/../\n", &files), 4000 * 1024);
    }

    #[test]
    fn a_machine_that_is_nearly_full_is_a_limit_too() {
        assert_eq!(left("", &[]), 4000 * 1024);
        assert_eq!(available("MemAvailable: 18446744073709551615 kB\n"), Some(u64::MAX));
    }
}
