//! How much of the savable memory a run leaves alone, because it's in cgroups that have too little headroom below their
//! memory limits (see [`pagefold_engine::headroom`]).

use pagefold_engine::units::Bytes;
use pagefold_procmem::headroom::limits_of;
use std::collections::BTreeMap;
use std::path::Path;

/// A run leaves at least one part in this many of a limit free: half of the smallest reserve.
const FREE_PART: u64 = 40;

/// The savable memory of one process, and the cgroups that may limit it.
pub struct Savable<'a> {
    pub bytes: Bytes,
    pub cgroups: Vec<&'a Path>,
}

/// At least this much of the savable memory has no headroom. Two kinds of limits need none: one that applies to all of
/// the savable memory, and one that's as large as `memory`, the machine's memory, or larger.
pub fn without_headroom(processes: &[Savable<'_>], memory: Bytes) -> Bytes {
    let mut below: BTreeMap<&Path, u64> = BTreeMap::new();
    let mut all = 0;
    for Savable { bytes, cgroups } in processes {
        all += bytes.0;
        for cgroup in cgroups {
            *below.entry(cgroup).or_default() += bytes.0;
        }
    }
    let mut sum = 0;
    let mut counted: BTreeMap<&Path, u64> = BTreeMap::new();
    // In this order, each cgroup comes after the cgroups below it.
    for (&cgroup, &bytes) in below.iter().rev() {
        let counted_below = counted.remove(cgroup).unwrap_or_default();
        let mut lacking = counted_below;
        if bytes > 0 && bytes < all {
            if let Some(limits) = limits_of(cgroup).ok().flatten().filter(|limits| limits.of_all.limit < memory) {
                let room = limits.of_all.left.0.saturating_sub(limits.of_all.limit.0 / FREE_PART);
                lacking = lacking.max(bytes.saturating_sub(room));
            }
        }
        sum += lacking - counted_below;
        if let Some(parent) = cgroup.parent() {
            *counted.entry(parent).or_default() += lacking;
        }
    }
    Bytes(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_beyond_limits_counts_once() {
        let root = tempfile::tempdir().unwrap();
        let paths = ["a", "a/1", "a/2", "b"].map(|path| root.path().join(path));
        for (path, left) in paths.iter().zip([60, 10, 1_000, 10]) {
            fs::create_dir_all(path).unwrap();
            let limit = if path.ends_with("b") { 9_000 } else { 2_000 };
            fs::write(path.join("memory.max"), (limit * MIB).to_string()).unwrap();
            fs::write(path.join("memory.current"), ((limit * 39 / 40 - left) * MIB).to_string()).unwrap();
            fs::write(path.join("memory.stat"), "").unwrap();
        }
        let [a, first, second, b] = paths.each_ref().map(PathBuf::as_path);
        let process = |mib: u64, cgroups| Savable { bytes: Bytes(mib * MIB), cgroups };
        let mut processes = vec![process(50, vec![first, a]), process(30, vec![second, a])];
        assert_eq!(without_headroom(&processes[..1], Bytes(8_000 * MIB)), Bytes(0), "the limit applies to everything");
        processes.push(process(70, vec![b]));
        // 40 MiB don't fit in a/1. Below a, 60 of 80 MiB fit, so these 40 are enough.
        assert_eq!(without_headroom(&processes, Bytes(8_000 * MIB)), Bytes(40 * MIB));
        processes.push(process(40, vec![second, a]));
        assert_eq!(without_headroom(&processes, Bytes(8_000 * MIB)), Bytes(60 * MIB), "of 120 MiB below a, 60 fit");
    }
}
