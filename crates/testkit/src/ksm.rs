//! KSM's knobs and counters, and the fixture that takes KSM for one test.

use crate::pagefold::{Daemon, is_on_request, unmerge};
use crate::process::is_root;
use crate::skip::{skip, skip_unsupported};
use pagefold_procmem::os::fields;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Where pagefold records the KSM settings that it has to restore.
pub const STATE_FILE: &str = "/run/pagefold/ksm-state.json";
/// `pages_to_scan` during a kick.
pub const KICK: u64 = u32::MAX as u64;

const ROOT: &str = "/sys/kernel/mm/ksm";
/// Tests and experiments that change KSM's knobs lock this file, so that they take turns.
const LOCK_PATH: &str = "/run/lock/pagefold-ksm.lock";

const DEFAULTS: [(&str, u64); 7] = [
    ("run", 0),
    ("pages_to_scan", 100),
    ("sleep_millisecs", 20),
    ("max_page_sharing", 256),
    ("use_zero_pages", 0),
    ("merge_across_nodes", 1),
    ("smart_scan", 1),
];

/// A knob or counter of KSM.
pub fn number(file: &str) -> u64 {
    let text = fs::read_to_string(format!("{ROOT}/{file}")).unwrap();
    // The kernel's count of zero pages can be negative.
    u64::try_from(text.trim().parse::<i64>().unwrap()).unwrap_or(0)
}

pub fn write_knob(file: &str, value: &str) {
    if let Err(error) = try_write_knob(file, value) {
        eprintln!("writing {value} to {file}: {error}");
    }
}

fn try_write_knob(file: &str, value: &str) -> std::io::Result<()> {
    OpenOptions::new().write(true).open(format!("{ROOT}/{file}"))?.write_all(value.as_bytes())
}

/// How much memory KSM saves on the whole machine, bytes.
pub fn saved_bytes() -> u64 {
    (number("pages_sharing") + number("ksm_zero_pages")) * 4096
}

pub fn advisor_is_off() -> bool {
    // Kernels before 6.8 have no advisor.
    fs::read_to_string(format!("{ROOT}/advisor_mode")).map_or(true, |mode| mode.contains("[none]"))
}

/// The exclusive right to change KSM's knobs among the project's tests and experiments.
pub struct KsmLock {
    _file: File,
}

impl KsmLock {
    pub fn take() -> Self {
        let file = OpenOptions::new().create(true).append(true).open(LOCK_PATH).unwrap();
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
        Self { _file: file }
    }
}

/// KSM for this test alone. It's at rest and has the kernel's defaults when we take it, and again after we drop it.
pub struct KsmAtRest {
    _lock: KsmLock,
}

impl KsmAtRest {
    /// Takes KSM. Where the tests can't use KSM at all, reports why and returns `None`.
    ///
    /// # Panics
    /// If another program uses KSM.
    #[track_caller]
    pub fn take() -> Option<Self> {
        if !is_root() {
            skip("only root can control KSM");
            return None;
        }
        if !Path::new(ROOT).join("smart_scan").exists() {
            skip_unsupported("the kernel has no KSM, or one before Linux 6.7");
            return None;
        }
        let lock = KsmLock::take();
        if !is_at_rest() {
            // A killed test or an experiment may have left something behind.
            if let Some(user) = user() {
                panic!("{user}; the tests need KSM for themselves");
            }
            rest();
            assert!(is_at_rest(), "KSM cannot be brought to rest: {:?}", changed_knobs());
        }
        Some(Self { _lock: lock })
    }

    /// Asserts that every knob except these has the kernel's default.
    #[track_caller]
    pub fn assert_knobs_restored_except(&self, except: &[&str]) {
        for (knob, value) in DEFAULTS.iter().filter(|(knob, _)| !except.contains(knob)) {
            assert_eq!(number(knob), *value, "{knob}");
        }
        assert!(advisor_is_off());
    }

    /// Asserts that every knob is restored, except the one that the kernel doesn't change while pages are merged.
    #[track_caller]
    pub fn assert_knobs_restored(&self) {
        self.assert_knobs_restored_except(deferred_knobs());
    }

    /// Ends a run and unmerges these processes. Returns the summary of the run.
    #[track_caller]
    pub fn end(&self, daemon: Daemon, pids: &[i32]) -> Value {
        let summary = daemon.stop();
        self.give_back(pids);
        summary
    }

    /// Unmerges these processes, and asserts that KSM is as it was before.
    #[track_caller]
    pub fn give_back(&self, pids: &[i32]) {
        unmerge(pids);
        self.assert_restored();
    }

    /// Asserts that KSM is as before the test, and that nothing is left to restore.
    #[track_caller]
    pub fn assert_restored(&self) {
        self.assert_knobs_restored_except(&[]);
        // The kernel's records of pages that aren't merged any more go with the next scan or the process. On request
        // nothing scans.
        assert!(number("pages_shared") == 0 || is_on_request());
        assert!(!Path::new(STATE_FILE).exists());
    }
}

impl Drop for KsmAtRest {
    fn drop(&mut self) {
        if !is_at_rest() {
            rest();
        }
    }
}

/// The knobs that we can't restore at the moment because pages are merged.
pub fn deferred_knobs() -> &'static [&'static str] {
    if number("pages_shared") > 0 { &["max_page_sharing"] } else { &[] }
}

/// This kernel's knobs with their values. Without the advisor's mode, which isn't a number.
pub fn knobs() -> Vec<(&'static str, u64)> {
    let here = DEFAULTS.into_iter().filter(|(knob, _)| Path::new(ROOT).join(knob).exists());
    here.map(|(knob, _)| (knob, number(knob))).collect()
}

fn changed_knobs() -> Vec<(&'static str, u64)> {
    knobs().into_iter().filter(|knob| !DEFAULTS.contains(knob)).collect()
}

fn is_at_rest() -> bool {
    changed_knobs().is_empty() && number("pages_shared") == 0 && advisor_is_off() && !Path::new(STATE_FILE).exists()
}

/// Stops ksmd, gives every process its own copies, and writes the kernel's defaults.
fn rest() {
    if !advisor_is_off() {
        write_knob("advisor_mode", "none");
    }
    write_knob("run", "2");
    for (knob, value) in DEFAULTS {
        write_knob(knob, &value.to_string());
    }
    let _ = fs::remove_file(STATE_FILE);
}

/// Who uses KSM at the moment: a running pagefold, or a process with merged pages.
fn user() -> Option<String> {
    if let Ok(Some(holder)) = pagefold_ksm::lock::holder(Path::new(pagefold_ksm::lock::LOCK_PATH)) {
        return Some(format!("pagefold is running ({holder:?})"));
    }
    // The victims of a test that has just ended may still be exiting.
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let process = process_with_merged_pages()?;
        if Instant::now() > end {
            return Some(process);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn process_with_merged_pages() -> Option<String> {
    let mut pids =
        fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.find_map(|pid| {
        let pages = merged_pages(pid);
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        (pages > 0).then(|| format!("process {pid} ({}) has {pages} merged pages", name.trim()))
    })
}

/// How many merged pages a process has, including those that now map the zero page.
pub fn merged_pages(pid: i32) -> u64 {
    let text = fs::read(format!("/proc/{pid}/ksm_stat")).unwrap_or_default();
    fields::number(&text, "ksm_merging_pages").unwrap_or(0)
}
