//! Shufflers (`examples/shuffler`), and what was seen of them.

use crate::support::*;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running shuffler. Killed when dropped.
pub struct Shuffler {
    child: Child,
    input: Option<ChildStdin>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
    /// The most pages of it that were merged at one time.
    pub most_merged: u64,
}

/// Its path. `cargo test` builds examples; for `cargo test --test NAME` it is done here.
fn example() -> PathBuf {
    let profile = std::env::current_exe().unwrap().parent().and_then(Path::parent).unwrap().to_owned();
    let path = profile.join("examples/shuffler");
    if !path.exists() {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--locked", "--example", "shuffler"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.is_ok_and(|status| status.success()) && path.exists(), "examples/shuffler was not built");
    }
    path
}

impl Shuffler {
    /// Starts one, in a cgroup from its first page on if one is given, and waits until it holds its memory.
    pub fn start(settings: &str, cgroup: Option<&Path>) -> Self {
        let mut command = Command::new(example());
        command.args(settings.split_ascii_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            let mut members = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs")).unwrap();
            // SAFETY: one write, to a file that is open.
            unsafe { command.pre_exec(move || members.write_all(b"0")) };
        }
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = lines.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                sink.lock().unwrap().push(line);
            }
        });
        let shuffler = Self { child, input, lines, reader: Some(reader), most_merged: 0 };
        wait_until("a shuffler holds its memory", || shuffler.said(|line| line == "ready"));
        shuffler
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn said(&self, is: impl Fn(&str) -> bool) -> bool {
        self.lines.lock().unwrap().iter().any(|line| is(line))
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn last_words(&self) -> String {
        let lines = self.lines.lock().unwrap();
        lines[lines.len().saturating_sub(4)..].join("\n")
    }

    /// Alive, moving, and with nothing to complain of. Takes note of how much is merged.
    #[track_caller]
    pub fn is_well(&mut self) {
        assert!(!self.said(|line| line.starts_with("bad")), "{}", self.last_words());
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "it ended with {ended:?}: {}", self.last_words());
        self.most_merged = self.most_merged.max(merging_pages(self.pid()));
    }

    /// How many lines it has said: one a second.
    pub fn seconds(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// Has it check everything once more and end. Returns its counts.
    #[track_caller]
    pub fn end(mut self) -> BTreeMap<String, u64> {
        drop(self.input.take());
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let words = self.last_words();
        let last = words.lines().last().unwrap_or_default();
        let Some(counts) = last.strip_prefix("end ok ") else { panic!("{status}: {words}") };
        assert!(status.success(), "{status}: {words}");
        println!("shuffler: merged={} at most, {counts}", self.most_merged);
        counts
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect()
    }
}

impl Drop for Shuffler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pages of a process that are merged, those kept for all included.
pub fn merging_pages(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix("ksm_merging_pages "));
    value.map_or(0, |value| value.trim().parse().unwrap())
}

/// A counter of /proc/vmstat.
pub fn vmstat(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

pub fn pids(shufflers: &[Shuffler]) -> Vec<i32> {
    shufflers.iter().map(Shuffler::pid).collect()
}

/// For so long all are well.
#[track_caller]
pub fn are_well(shufflers: &mut [Shuffler], time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        shufflers.iter_mut().for_each(Shuffler::is_well);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The kernel has killed none of them for want of memory. It says so in its log, by pid.
#[track_caller]
pub fn none_was_killed(pids: &[i32]) {
    let log = Command::new("dmesg").output().expect("dmesg, to look for kills");
    let log = String::from_utf8_lossy(&log.stdout);
    let killed = |line: &&str| pids.iter().any(|pid| line.contains(&format!("Killed process {pid} ")));
    assert_eq!(log.lines().find(killed), None);
}
