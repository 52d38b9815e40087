//! The points at which tests make pagefold fail or die: see `os/fault.rs` of pagefold-procmem.

/// Points of the daemon and of unmerging at which a kill leaves changes behind. The injector has its own list.
pub const POINTS: &[&str] = &[
    "injector-started",
    "lock-taken",
    "state-begun",
    "state-written",
    "state-saved",
    "turn:max_page_sharing",
    "turned:max_page_sharing",
    "turn:use_zero_pages",
    "turned:use_zero_pages",
    "socket-made",
    "mark",
    "marked",
    "order:kick",
    "turn:pages_to_scan",
    "turned:pages_to_scan",
    "turn:sleep_millisecs",
    "turned:sleep_millisecs",
    "turn:run",
    "turned:run",
    "order:rest",
    "order:pace",
    "put-back:run",
    "was-put-back:run",
    "put-back:sleep_millisecs",
    "was-put-back:sleep_millisecs",
    "put-back:pages_to_scan",
    "was-put-back:pages_to_scan",
    "put-back:use_zero_pages",
    "was-put-back:use_zero_pages",
    "put-back:max_page_sharing",
    "was-put-back:max_page_sharing",
    "state-closing",
    "state-closed",
    "unmark",
    "unmarked",
];

/// Points where a read can fail: files below `/proc/PID` (named by the last component of their path), KSM's files, the
/// machine's, those of memory cgroups, and pagefold's own.
pub const READS: &[&str] = &[
    "read:stat",
    "read:status",
    "read:exe",
    "read:cgroup",
    "read:statm",
    "read:maps",
    "read:smaps",
    "read:pagemap",
    "read:oom_score_adj",
    "read:mem",
    "read:process_vm_readv",
    "read:schedstat",
    "read:ksm_stat",
    "read:kpageflags",
    "read:ksm:run",
    "read:ksm:pages_to_scan",
    "read:ksm:max_page_sharing",
    "read:ksm:pages_shared",
    "read:ksm:pages_scanned",
    "read:ksm:full_scans",
    "read:ksm:advisor_mode",
    "read:proc",
    "read:loadavg",
    "read:meminfo",
    "read:pressure/memory",
    "read:vmstat",
    "read:boot_id",
    "read:limits",
    "read:state",
    "read:lock",
];

#[cfg(test)]
const WRITES: &[&str] = &["write:state", "write:lock", "write:knob"];

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Tests iterate over the lists, so they'd miss a point that's in none.
    #[test]
    fn every_point_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let listed: Vec<&str> = [POINTS, READS, WRITES].concat();
        let mut paths =
            ["procmem", "inject", "ksm", "host", "pagefold"].map(|name| root.join(name).join("src")).to_vec();
        let mut calls = 0;
        while let Some(path) = paths.pop() {
            if path.is_dir() {
                paths.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            // The injector's points are in none of these lists.
            let own = path.parent().is_some_and(|dir| dir.ends_with("inject/src")) && !path.ends_with("unmerge.rs");
            if own || path.ends_with("fault.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for call in ["fault::point(", "fault::point_of(", "fault::io(", "fault::io_of("] {
                for (at, _) in text.match_indices(call) {
                    let words = text[at + call.len()..].strip_prefix('"').expect("a name, not a variable");
                    let name = words.split('"').next().unwrap();
                    let found = listed.iter().any(|&one| one == name || one.starts_with(&format!("{name}:")));
                    assert!(found, "{name:?} of {} is in no list", path.display());
                    calls += 1;
                }
            }
        }
        assert!(calls > 0, "no sources in {}", root.display());
    }
}
