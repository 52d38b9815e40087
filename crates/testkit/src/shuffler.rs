//! A handle of the victim `shuffler`.

use crate::cgroup::start_in;
use crate::ksm::merged_pages;
use crate::{OwnedChild, victim_binary, wait_until};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running shuffler. Killed when dropped.
pub struct Shuffler {
    child: OwnedChild,
    input: Option<ChildStdin>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
    /// The largest number of merged pages seen at one time.
    pub most_merged: u64,
}

impl Shuffler {
    /// Starts a shuffler and waits until it holds its memory. If there's a cgroup, all of the shuffler's pages are
    /// charged to it.
    pub fn start(settings: &str, cgroup: Option<&Path>) -> Self {
        let mut command = Command::new(victim_binary("shuffler"));
        command.args(settings.split_ascii_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            start_in(&mut command, cgroup);
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
        let shuffler = Self { child: OwnedChild(child), input, lines, reader: Some(reader), most_merged: 0 };
        wait_until("the shuffler holds its memory", || shuffler.has_printed(|line| line == "ready"));
        shuffler
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    pub fn has_printed(&self, matches: impl Fn(&str) -> bool) -> bool {
        self.lines.lock().unwrap().iter().any(|line| matches(line))
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_some()
    }

    pub fn last_lines(&self) -> String {
        let lines = self.lines.lock().unwrap();
        lines[lines.len().saturating_sub(4)..].join("\n")
    }

    /// Asserts that the shuffler is running and has found no damage. Records how much of it is merged.
    #[track_caller]
    pub fn assert_well(&mut self) {
        assert!(!self.has_printed(|line| line.starts_with("bad")), "{}", self.last_lines());
        let ended = self.child.0.try_wait().unwrap();
        assert!(ended.is_none(), "it ended with {ended:?}: {}", self.last_lines());
        self.most_merged = self.most_merged.max(merged_pages(self.pid()));
    }

    /// How many lines it has printed: about one each second.
    pub fn lines(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// Makes the shuffler check everything one last time and end. Returns its counts.
    #[track_caller]
    pub fn end(mut self) -> BTreeMap<String, u64> {
        drop(self.input.take());
        let status = self.child.0.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let lines = self.last_lines();
        let last = lines.lines().last().unwrap_or_default();
        let Some(counts) = last.strip_prefix("end ok ") else { panic!("{status}: {lines}") };
        assert!(status.success(), "{status}: {lines}");
        println!("shuffler: at most {} pages merged, {counts}", self.most_merged);
        counts
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect()
    }
}

pub fn pids(shufflers: &[Shuffler]) -> Vec<i32> {
    shufflers.iter().map(Shuffler::pid).collect()
}

/// For this time, asserts again and again that all shufflers are well.
#[track_caller]
pub fn assert_well_for(shufflers: &mut [Shuffler], time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        shufflers.iter_mut().for_each(Shuffler::assert_well);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Asserts, by the kernel's log, that the kernel has killed none of the processes for lack of memory.
#[track_caller]
pub fn assert_not_killed(pids: &[i32]) {
    let log = Command::new("dmesg").output().expect("dmesg");
    let log = String::from_utf8_lossy(&log.stdout);
    let killed = |line: &&str| pids.iter().any(|pid| line.contains(&format!("Killed process {pid} ")));
    assert_eq!(log.lines().find(killed), None);
}
