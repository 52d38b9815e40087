//! Parsers of memory limits and of memory and KSM counters.

use pagefold_engine::units::Permyriad;
use pagefold_ksm::cow_ksm;
use pagefold_procmem::cgroup::parse_cgroups;
use pagefold_procmem::headroom::{self, group_dir};
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::os::arc;
use pagefold_procmem::os::fields::number;
use pagefold_procmem::os::pressure::{parse_meminfo, parse_pressure, parse_zram_free};
use std::path::{Component, Path};

/// `/proc/PID/cgroup`: UTF-8 paths stay the same byte for byte, and no path leads out of the cgroup mount.
pub fn cgroup(text: &[u8]) {
    let cgroups = parse_cgroups(text);
    if let Ok(text) = std::str::from_utf8(text) {
        let paths = text.split('\n').filter_map(|line| line.splitn(3, ':').nth(2));
        let paths: Vec<&str> = paths.filter(|path| path.starts_with('/')).collect();
        assert_eq!(cgroups.iter().map(|cgroup| cgroup.path.as_str()).collect::<Vec<_>>(), paths);
    }
    let lines: Vec<String> =
        cgroups.iter().map(|cgroup| format!("0:{}:{}\n", cgroup.controllers, cgroup.path)).collect();
    assert_eq!(parse_cgroups(lines.concat().as_bytes()), cgroups);
    let root = Path::new("/no/such/mount");
    for (mount, dir) in cgroups.iter().filter_map(|cgroup| group_dir(cgroup, root)) {
        assert!(mount.starts_with(root));
        let below = dir.strip_prefix(&mount).unwrap_or_else(|_| panic!("{} is elsewhere", dir.display()));
        assert!(below.components().all(|part| matches!(part, Component::Normal(_))), "{}", dir.display());
    }
}

/// `/proc/PID/ksm_stat`: values are whole pages, and we find the fields among any others.
pub fn ksm_stat(text: &[u8]) {
    let zero_kib = KsmStat::parse(text).zero_kib;
    assert!(zero_kib % 4 == 0 || zero_kib == u64::MAX);
    for first in
        [&b"ksm_rmap_items 3\nksm_zero_pages 12\nksm_merge_any: yes\n"[..], b"ksm_zero_pages: 12\nksm_merge_any yes\n"]
    {
        let stat = KsmStat::parse(&[first, text].concat());
        assert_eq!((stat.merge_any, stat.zero_kib), (Some(true), 48));
    }
}

/// `/proc/meminfo`, `swaps`, `arcstats` and `memory.stat`: values in KiB print and parse back, and bytes don't overflow.
pub fn meminfo(text: &[u8]) {
    if let Ok((total, available, swap)) = parse_meminfo(text) {
        let kib = [available, total, swap].map(|pages| pages.0 * 4);
        let printed = format!(
            "SwapFree: {2} kB\nMemTotal: {1} kB\nMemFree: 1 kB\nMemAvailable:  {0} kB\n",
            kib[0], kib[1], kib[2]
        );
        assert_eq!(parse_meminfo(printed.as_bytes()), Ok((total, available, swap)));
        assert_eq!(headroom::available(&printed), Some(available.bytes().0));
        assert!(parse_meminfo(&printed.as_bytes()[..printed.len() - 1]).is_err(), "truncated");
    }
    let _ = parse_zram_free(text);
    let _ = arc::shrinkable(text);
    let text = String::from_utf8_lossy(text);
    let _ = headroom::available(&text);
    for name in ["inactive_file", "total_inactive_file"] {
        let Ok(bytes) = number::<u64>(text.as_bytes(), name) else { continue };
        assert_eq!(number(format!("anon 1\n{name} {bytes}\n").as_bytes(), name), Ok(bytes));
    }
}

/// `/proc/pressure/memory`: a share of at most 100 %, which prints and parses back.
pub fn pressure(text: &[u8]) {
    let Ok(share) = parse_pressure(text) else { return };
    assert!(share <= Permyriad(10_000), "{share:?}");
    let printed = format!("some avg10={}.{:02} avg60=0.00 avg300=0.00 total=0\n", share.0 / 100, share.0 % 100);
    assert_eq!(parse_pressure(printed.as_bytes()), Ok(share));
}

/// `/proc/vmstat`: we find the counter among any others.
pub fn vmstat(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let copies = cow_ksm(&text);
    assert_eq!(cow_ksm(&format!("ksm_swpin_copy 3\ncow_ksm {copies}\n{text}")), copies);
}
