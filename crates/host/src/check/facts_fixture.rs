//! A fixture of a machine without problems.

use super::*;
use std::fs::{OpenOptions, create_dir_all, write};

pub fn healthy(dir: &Path) -> MachinePaths {
    let (proc, sys) = (dir.join("proc"), dir.join("sys"));
    for at in ["self", "pressure", "sys/kernel/random", "sys/kernel/yama", "sys/vm"] {
        create_dir_all(proc.join(at)).unwrap();
    }
    for at in ["kernel/mm/transparent_hugepage/khugepaged", "devices/system/node", "fs/cgroup"] {
        create_dir_all(sys.join(at)).unwrap();
    }
    pagefold_testkit::ksm_files::fresh(&sys.join("kernel/mm/ksm"));
    let status = "Name:\tx\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n";
    for (path, text) in [
        ("sys/kernel/osrelease", "6.12.9-amd64\n"),
        ("sys/kernel/random/boot_id", "boot\n"),
        ("sys/kernel/yama/ptrace_scope", "1\n"),
        ("sys/vm/max_map_count", "65530\n"),
        ("meminfo", "MemTotal: 9 kB\nSwapTotal:      2048 kB\n"),
        ("self/status", status),
        ("self/ksm_stat", ""),
        ("kpageflags", ""),
        ("pressure/memory", ""),
    ] {
        write(proc.join(path), text).unwrap();
    }
    write(sys.join("kernel/mm/transparent_hugepage/enabled"), "always [madvise] never\n").unwrap();
    write(sys.join("kernel/mm/transparent_hugepage/khugepaged/max_ptes_none"), "0\n").unwrap();
    write(sys.join("devices/system/node/online"), "0\n").unwrap();
    write(sys.join("fs/cgroup/cgroup.controllers"), "memory\n").unwrap();
    let auxv: Vec<u8> = [33_u64, 7, 6, 4096, 0, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
    write(proc.join("self/auxv"), auxv).unwrap();
    set_frame(&proc, 1234);
    let (dev, modules) = (dir.join("dev"), dir.join("modules"));
    create_dir_all(&dev).unwrap();
    MachinePaths { proc, sys, dev, modules, lock: dir.join("lock"), state: dir.join("state.json") }
}

/// Makes pagemap show this frame number for the probe. The rest of the file is a hole.
pub fn set_frame(proc: &Path, frame: u64) {
    let at = proc.join("self/pagemap");
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(at).unwrap();
    file.write_all_at(&(frame | 1 << 63).to_ne_bytes(), probe_offset()).unwrap();
}
