//! Makes a directory like KSM's in sysfs.

use std::path::Path;

/// Writes KSM's files with the values that Linux 6.18 has after boot.
pub fn fresh(root: &Path) {
    std::fs::create_dir_all(root).unwrap();
    for (name, text) in [
        ("run", "0"),
        ("pages_to_scan", "100"),
        ("sleep_millisecs", "20"),
        ("max_page_sharing", "256"),
        ("use_zero_pages", "0"),
        ("merge_across_nodes", "1"),
        ("smart_scan", "1"),
        ("advisor_mode", "[none] scan-time"),
        ("pages_shared", "0"),
        ("pages_sharing", "0"),
        ("pages_scanned", "0"),
        ("full_scans", "0"),
        ("ksm_zero_pages", "0"),
    ] {
        set(root, name, text);
    }
}

/// Writes one file, as the kernel or another program would.
pub fn set(root: &Path, name: &str, text: &str) {
    std::fs::write(root.join(name), format!("{text}\n")).unwrap();
}

pub fn get(root: &Path, name: &str) -> String {
    std::fs::read_to_string(root.join(name)).unwrap().trim().to_owned()
}
