//! How much memory a process can allocate before the OOM killer strikes, by the limits of its memory cgroups and of the
//! machine.
//!
//! Unmerging allocates memory that is charged to the process, because `unmerge_ksm_pages` (mm/ksm.c) breaks each page
//! as a write would. If that exceeds a limit, the OOM killer strikes.

use super::cgroup::{Cgroup, parse_cgroups};
use crate::os::arc;
use crate::os::fault;
use crate::os::fields::{kib, number};
use crate::process::{Process, ReadError};
use pagefold_engine::relief::{UNMERGE_MARGIN, margin_below};
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// How much more a process can allocate, by its tightest limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headroom {
    /// `Bytes(u64::MAX)` if we know of no limit.
    pub left: Bytes,
    /// How much of `left` should stay free while we make copies: [`margin_below`].
    pub margin: Bytes,
}

impl Headroom {
    fn min(self, other: Self) -> Self {
        if other.left.0.saturating_sub(other.margin.0) < self.left.0.saturating_sub(self.margin.0) {
            other
        } else {
            self
        }
    }
}

/// How much memory a process can still allocate. Page cache counts as free if the kernel can reclaim it.
pub fn headroom(process: &Process, proc_root: &Path, cgroup_root: &Path) -> Result<Headroom, ReadError> {
    let text = match process.read_file("cgroup") {
        Ok(text) => text,
        Err(ReadError::Absent { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let cgroups = parse_cgroups(&text);
    least_of(&cgroups, proc_root, cgroup_root).map_err(|error| ReadError::from_io(process.pid(), "cgroup", error))
}

/// The headroom by the tightest limit. If we can't read a limit, we return an error rather than assume there's none.
fn least_of(cgroups: &[Cgroup], proc_root: &Path, cgroup_root: &Path) -> io::Result<Headroom> {
    let mut least = Headroom { left: Bytes(left_in_machine(proc_root)?), margin: UNMERGE_MARGIN.bytes() };
    for Limit { limit, left } in limits_on(cgroups, cgroup_root)? {
        let margin = margin_below(Pages(limit.0 / PAGE_BYTES)).bytes();
        least = least.min(Headroom { left, margin });
    }
    Ok(least)
}

/// The lowest of our own cgroups' memory limits; the machine's memory if no limit is below that.
pub fn own_limit(proc_root: &Path, cgroup_root: &Path) -> io::Result<Bytes> {
    let cgroups = parse_cgroups(text_of(&proc_root.join("self/cgroup"))?.as_bytes());
    let mut least = total_of(proc_root)?;
    for Limit { limit, .. } in limits_on(&cgroups, cgroup_root)? {
        least = least.min(limit);
    }
    Ok(least)
}

/// The limits of these cgroups, and of those above them.
fn limits_on(cgroups: &[Cgroup], cgroup_root: &Path) -> io::Result<Vec<Limit>> {
    let mut limits = Vec::new();
    for cgroup in cgroups {
        let Some((mount, dir)) = group_dir(cgroup, cgroup_root) else { continue };
        for dir in dir.ancestors().take_while(|dir| dir.starts_with(&mount)) {
            limits.extend(limits_of(dir)?.map(|limits| limits.of_all));
        }
    }
    Ok(limits)
}

/// The machine's memory.
pub fn total_of(proc_root: &Path) -> io::Result<Bytes> {
    let text = text_of(&proc_root.join("meminfo"))?;
    let total = kib(text.as_bytes(), "MemTotal").map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Bytes(total.saturating_mul(1024)))
}

/// The text of a file; empty if it does not exist or its cgroup has just been removed.
fn text_of(path: &Path) -> io::Result<String> {
    match fault::io("read:limits").and_then(|()| fs::read_to_string(path)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(String::new()),
        other => other,
    }
}

/// Mount point and directory of a cgroup, if it can limit memory.
pub fn group_dir(cgroup: &Cgroup, root: &Path) -> Option<(PathBuf, PathBuf)> {
    let path = cgroup.path.strip_prefix('/')?;
    // Paths outside our cgroup namespace begin with "..". Below our mount they would lead to another cgroup.
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

/// The file of each limit, and the file of the usage that counts against it. If version 1 limits memory and swap
/// together, swapping out frees nothing.
const LIMITS: [(&str, &str); 4] = [
    ("memory.max", "memory.current"),
    (THROTTLES, "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
];

/// Above this limit the kernel throttles. Above the others it kills.
const THROTTLES: &str = "memory.high";

/// A limit this large has no effect: version 1 shows a huge number if there's no limit.
const NO_LIMIT: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub limit: Bytes,
    pub left: Bytes,
}

/// The tightest limits of a cgroup: the ones with the least left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TightestLimits {
    pub of_all: Limit,
    /// The tightest of the limits above which the kernel kills.
    pub kills: Option<Limit>,
}

/// The number in a file; `None` if the file doesn't exist, or says "max" (no limit).
fn bytes_in(path: &Path) -> io::Result<Option<u64>> {
    match text_of(path)?.trim() {
        "" | "max" => Ok(None),
        text => Ok(Some(text.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not a number"))?)),
    }
}

/// The tightest limits of a cgroup; `None` if it has no limit.
pub fn limits_of(dir: &Path) -> io::Result<Option<TightestLimits>> {
    let mut limits = Vec::new();
    for (name, usage) in LIMITS {
        let limit = bytes_in(&dir.join(name))?.unwrap_or(NO_LIMIT);
        if limit < NO_LIMIT {
            limits.extend(bytes_in(&dir.join(usage))?.map(|usage| (name, limit, usage)));
        }
    }
    if limits.is_empty() {
        return Ok(None);
    }
    // We read this file only if there is a limit: it costs the kernel more than all the other files together.
    let stat = text_of(&dir.join("memory.stat"))?;
    let cache = reclaimable(stat.as_bytes());
    let mut of_all = None;
    let mut kills = None;
    for (name, limit, usage) in limits {
        let left = limit.saturating_sub(usage.saturating_sub(cache));
        let limit = Limit { limit: Bytes(limit), left: Bytes(left) };
        of_all = Some(tighter(of_all, limit));
        if name != THROTTLES {
            kills = Some(tighter(kills, limit));
        }
    }
    Ok(of_all.map(|of_all| TightestLimits { of_all, kills }))
}

fn tighter(known: Option<Limit>, other: Limit) -> Limit {
    known.filter(|known| known.left <= other.left).unwrap_or(other)
}

/// How much more swap a cgroup and the ones below it may use; `None` if the cgroup has no limit. Version 1 limits
/// memory and swap together.
pub fn swap_left(dir: &Path) -> io::Result<Option<Bytes>> {
    const SWAP_LIMITS: [(&str, &str); 2] =
        [("memory.swap.max", "memory.swap.current"), ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")];
    for (limit, usage) in SWAP_LIMITS {
        let limit = bytes_in(&dir.join(limit))?.unwrap_or(NO_LIMIT);
        if limit < NO_LIMIT {
            let used = bytes_in(&dir.join(usage))?.unwrap_or(0);
            return Ok(Some(Bytes(limit.saturating_sub(used))));
        }
    }
    Ok(None)
}

/// The page cache that the kernel reclaims before it kills, in bytes, from the text of `memory.stat`: all inactive page
/// cache, and the active page cache that no program maps. Programs that read files fill their cgroup with page cache up
/// to the limit, and only lose time when the kernel drops it. We don't count pages that must first be written to disk,
/// tmpfs pages (they need swap), locked pages (they stay), or the kernel's caches (slab, which may be pinned). Nor do
/// we count on swap: anonymous memory is in use.
fn reclaimable(stat: &[u8]) -> u64 {
    let dirty = of_either(stat, "total_dirty", "file_dirty");
    let unwritten = dirty.saturating_add(of_either(stat, "total_writeback", "file_writeback"));
    let active = of_either(stat, "total_active_file", "active_file");
    let unmapped = active.saturating_sub(of_either(stat, "total_mapped_file", "file_mapped"));
    let inactive = of_either(stat, "total_inactive_file", "inactive_file");
    inactive.saturating_add(unmapped).saturating_sub(unwritten)
}

/// The value of a field by its version 1 name or, if that's missing, by its version 2 name.
fn of_either(stat: &[u8], name_v1: &str, name_v2: &str) -> u64 {
    number(stat, name_v1).or_else(|_| number(stat, name_v2)).unwrap_or(0)
}

fn left_in_machine(proc_root: &Path) -> io::Result<u64> {
    let available = available(&text_of(&proc_root.join("meminfo"))?).unwrap_or(u64::MAX);
    let arcstats = text_of(&proc_root.join(arc::ARCSTATS)).unwrap_or_default();
    Ok(available.saturating_add(arc::shrinkable(arcstats.as_bytes())))
}

/// `MemAvailable` in the text of `/proc/meminfo`, bytes.
pub fn available(meminfo: &str) -> Option<u64> {
    Some(kib(meminfo.as_bytes(), "MemAvailable").ok()?.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process with pid 7 and `line` in its cgroup file.
    fn machine(line: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Process) {
        let dir = tempfile::tempdir().unwrap();
        let stat = format!("7 (x) S 1 {}", ["0"; 48].join(" "));
        let own =
            [("proc/7/stat", stat.as_str()), ("proc/7/cgroup", line), ("proc/meminfo", "MemAvailable: 4000000 kB\n")];
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
        headroom(&process, &dir.path().join("proc"), &dir.path().join("cg")).unwrap().left.0
    }

    #[test]
    fn our_own_limit_is_the_lowest_one() {
        let limit = |line: &str, total: &str, max: &str| {
            let files = [
                ("proc/self/cgroup", line),
                ("proc/meminfo", total),
                ("cg/a/b/memory.max", max),
                ("cg/a/b/memory.current", "5000\n"),
                ("cg/a/memory.max", "70000\n"),
                ("cg/a/memory.current", "6000\n"),
            ];
            let (dir, _) = machine(line, &files);
            own_limit(&dir.path().join("proc"), &dir.path().join("cg")).map(|limit| limit.0).ok()
        };
        let total = "MemTotal: 100 kB\n";
        assert_eq!(limit("0::/a/b\n", total, "60000\n"), Some(60_000));
        assert_eq!(limit("0::/a/b\n", total, "max\n"), Some(70_000));
        assert_eq!(limit("0::/c\n", total, "max\n"), Some(102_400), "the machine's memory");
        assert_eq!(limit("0::/a/b\n", "MemFree: 100 kB\n", "max\n"), None);
    }

    #[test]
    fn the_tightest_limit_of_all_parents_applies() {
        let files = [
            ("cg/a/b/memory.max", "max\n"),
            ("cg/a/b/memory.current", "5000\n"),
            ("cg/a/memory.max", "10000\n"),
            ("cg/a/memory.current", "9000\n"),
            ("cg/a/memory.stat", "anon 1\ninactive_file 500\n"),
        ];
        assert_eq!(left("0::/a/b\n", &files), 1500);
        assert_eq!(left("0::/elsewhere\n", &files), 4_000_000 * 1024);
    }

    #[test]
    fn a_quarter_of_a_small_limit_is_margin_enough() {
        let mib = 1 << 20;
        for (limit, used, found) in [(100, 60, (40, 25)), (1_000, 950, (50, 34)), (40, 8, (32, 10))] {
            let (max, current) = ((limit * mib).to_string(), (used * mib).to_string());
            let files = [
                ("cg/a/memory.max", max.as_str()),
                ("cg/a/memory.current", &current),
                ("proc/meminfo", "MemAvailable: 999999 kB\n"),
            ];
            let (dir, process) = machine("0::/a\n", &files);
            let Headroom { left, margin } =
                headroom(&process, &dir.path().join("proc"), &dir.path().join("cg")).unwrap();
            assert_eq!((left.0 / mib, margin.0 / mib), found);
        }
    }

    #[test]
    fn a_cgroup_without_a_limit_has_none() {
        let (dir, _) = machine(
            "",
            &[
                ("cg/one/memory.limit_in_bytes", "9223372036854771712\n"),
                ("cg/one/memory.usage_in_bytes", "7000\n"),
                ("cg/two/memory.max", "max\n"),
                ("cg/two/memory.current", "7000\n"),
                ("cg/limited/memory.max", "8000\n"),
                ("cg/limited/memory.high", "7500\n"),
                ("cg/limited/memory.current", "7000\n"),
                ("cg/high/memory.high", "7500\n"),
                ("cg/high/memory.current", "7000\n"),
                ("cg/odd/memory.max", "many\n"),
            ],
        );
        let limits = |name: &str| limits_of(&dir.path().join("cg").join(name));
        for name in ["one", "two", "gone"] {
            assert_eq!(limits(name).unwrap(), None);
        }
        let throttles = Limit { limit: Bytes(7500), left: Bytes(500) };
        let kills = Limit { limit: Bytes(8000), left: Bytes(1000) };
        assert_eq!(limits("limited").unwrap(), Some(TightestLimits { of_all: throttles, kills: Some(kills) }));
        assert_eq!(limits("high").unwrap(), Some(TightestLimits { of_all: throttles, kills: None }));
        assert!(limits("odd").is_err());
    }

    #[test]
    fn limits_of_swap_are_read_for_both_versions() {
        let files = [
            ("cg/two/memory.swap.max", "9000\n"),
            ("cg/two/memory.swap.current", "5000\n"),
            ("cg/none/memory.swap.max", "0\n"),
            ("cg/none/memory.swap.current", "5000\n"),
            ("cg/free/memory.swap.max", "max\n"),
            ("cg/one/memory.memsw.limit_in_bytes", "8000\n"),
            ("cg/one/memory.memsw.usage_in_bytes", "5000\n"),
            ("cg/odd/memory.swap.max", "many\n"),
        ];
        let (dir, _) = machine("", &files);
        let left = |name: &str| swap_left(&dir.path().join("cg").join(name));
        let found = ["two", "none", "free", "one", "gone"].map(|name| left(name).unwrap().map(|left| left.0));
        assert_eq!(found, [Some(4_000), Some(0), None, Some(3_000), None]);
        assert!(left("odd").is_err());
    }

    #[test]
    fn memory_high_is_a_limit_too() {
        let files = [("cg/a/memory.max", "max\n"), ("cg/a/memory.high", "9000\n"), ("cg/a/memory.current", "8000\n")];
        assert_eq!(left("0::/a\n", &files), 1000);
    }

    #[test]
    fn dirty_page_cache_does_not_count_as_free() {
        let files = [
            ("cg/a/memory.max", "9000\n"),
            ("cg/a/memory.current", "8000\n"),
            ("cg/a/memory.stat", "file_dirty 300\nfile_writeback 100\ninactive_file 500\n"),
        ];
        assert_eq!(left("0::/a\n", &files), 1100);
    }

    #[test]
    fn page_cache_that_is_in_use_but_not_mapped_counts_as_free() {
        let stat =
            "inactive_file 500\nactive_file 300\nfile_mapped 100\nfile_dirty 50\nshmem 900\nslab_reclaimable 70\n";
        assert_eq!(reclaimable(stat.as_bytes()), 650);
        let one = "inactive_file 1\nactive_file 2\nmapped_file 3\ntotal_inactive_file 500\ntotal_active_file 300\n\
            total_mapped_file 400\ntotal_dirty 50\n";
        assert_eq!(reclaimable(one.as_bytes()), 450);
        assert_eq!(reclaimable(b""), 0);
    }

    #[test]
    fn combined_limits_of_memory_and_swap_apply() {
        let files = [
            ("cg/memory/x/memory.limit_in_bytes", "8000\n"),
            ("cg/memory/x/memory.usage_in_bytes", "5000\n"),
            ("cg/memory/x/memory.memsw.limit_in_bytes", "9000\n"),
            ("cg/memory/x/memory.memsw.usage_in_bytes", "8500\n"),
        ];
        assert_eq!(left("4:memory:/x\n", &files), 500);
    }

    #[test]
    fn version_one_limits_apply_beside_version_two() {
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
    fn cgroups_outside_our_namespace_are_skipped() {
        let files = [("memory.max", "10\n"), ("memory.current", "9\n")];
        assert_eq!(left("0::/../\n", &files), 4_000_000 * 1024);
    }

    #[test]
    fn available_memory_of_the_machine_is_a_limit_too() {
        assert_eq!(left("", &[]), 4_000_000 * 1024);
        let arcstats = ("proc/spl/kstat/zfs/arcstats", "name type data\nc_min 4 1000\nsize 4 3000\n");
        assert_eq!(left("", &[arcstats]), 4_000_000 * 1024 + 2000, "ZFS gives it back");
        assert_eq!(available("MemAvailable: 18446744073709551615 kB\n"), Some(u64::MAX));
    }
}
